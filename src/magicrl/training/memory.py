"""Giving freed memory back: what the C allocator keeps after a step would otherwise grow with every step.

Micro-batches differ in size, so glibc's heap fragments: on a 135M-parameter model it kept 4 GB of free pages after
thirty steps. ``malloc_trim`` returns them to the system; it changes nothing but the resident size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import psutil

WORTH_IT_BYTES = 1 << 30
"""Below this resident size a run is left alone: there is nothing to win and the call takes time."""


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``; None where the C library has none (macOS, musl)."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_size_t]
    return function


def release_free_memory() -> None:
    """Return the allocator's free pages to the system, where the process is large and the library can."""
    trim = _malloc_trim()
    if trim is not None and psutil.Process().memory_info().rss > WORTH_IT_BYTES:
        trim(0)
