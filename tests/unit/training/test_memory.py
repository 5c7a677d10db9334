"""Freed memory returns to the system, and small processes are not touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from magicrl.training import learner as memory

PROGRAM = """
import ctypes, psutil
from magicrl.training.learner import release_free_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
# blocks below the mmap threshold live in the heap; every last one keeps those before it from shrinking it
blocks = [libc.malloc(100_000) for _ in range(15_000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:
    libc.free(block)
before = psutil.Process().memory_info().rss
release_free_memory()
after = psutil.Process().memory_info().rss
print(before, after)
"""


@pytest.mark.skipif(memory._MALLOC_TRIM is None, reason="the C library has no malloc_trim")
def test_a_fragmented_heap_shrinks() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > memory.WORTH_IT_BYTES
    assert after < before / 2


def test_a_small_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory, "_MALLOC_TRIM", lambda size: calls.append(size.value))
    monkeypatch.setattr(memory, "WORTH_IT_BYTES", 1 << 60)
    memory.release_free_memory()
    assert calls == []
    monkeypatch.setattr(memory, "WORTH_IT_BYTES", 0)
    memory.release_free_memory()
    assert calls == [0]
