"""Where the time of one test goes: the life of a sandboxed child, stage upon stage. Part of `code_verifier.py`.

Run as a program it is the fork server of this measurement: one warm interpreter, made as the verifier makes its
own, that forks children which go one stage further each. All stages take turns, so that the machine's load is the same
for all.
"""

from __future__ import annotations

import ctypes
import gc
import json
import marshal
import os
import resource
import statistics
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_SOURCES = Path(__file__).resolve().parents[1] / "src" / "magicrl"
_FORKS = 16  # in a script, as the verifier makes them
_SCRIPTS = 4
_WAIT4, _EXIT = 61, 231
_STAGES = {
    "fork": "fork and exit of the warm fork server, nothing in between",
    "bind": "descriptors, limits, capabilities, Landlock",
    "filter": "the child's half of the system-call filter",
    "python": "Python goes on in the child and exits",
    "program": "the compiled program is loaded and run, its output flushed",
}


def _once(stage: str, program: str) -> Callable[[], None]:
    """Forks children that go as far as this stage, one after another."""
    from magicrl.verifiers.code import child, kernel
    from magicrl.verifiers.code.kernel import Machine, Script
    from magicrl.verifiers.code.sandbox import readable_paths
    from magicrl.verifiers.code.seccomp import child_filter
    from magicrl.verifiers.code.values import SLOTS

    def file(content: bytes) -> int:
        fd = os.memfd_create("part")
        os.write(fd, content)
        return fd

    code = marshal.dumps([compile(program, "main.py", "exec")])
    places = {"stdin": file(b"1 2\n"), "stdout": file(b""), "stderr": file(b""), "status": file(b"")}
    depth = list(_STAGES).index(stage)
    rules = kernel.landlock_rules((path, kernel.READ_RIGHTS) for path in readable_paths())
    filters = child_filter()
    guards = child.Guards(rules, filters if depth >= 2 else None, filters, "/", os.getpid())
    binding = child.Binding("program", guards, (file(code), len(code)))
    binding.allow(10)
    script, memory = Script(Machine(), 2 * _FORKS + 64), (ctypes.c_int64 * 19)()
    forks: list[int] = []
    for _ in range(_FORKS):
        forks.append(script.call(kernel.FORK))
        script.call((_WAIT4, -1, kernel.address(memory), 0, kernel.address(memory) + 8, 0), 1)
    end = script.stop()
    for fork in forks:
        script.lead(fork, len(script))
    if depth >= 1:
        script.call((8, places["stdin"], 0, os.SEEK_SET, 0, 0))
        for name, fd in places.items():
            script.call(kernel.duplicate(fd, SLOTS[name]))
        binding.write(script)
    if depth < 3:
        script.call((_EXIT, 0, 0, 0, 0, 0))
    script.stop()
    request: dict[str, Any] = {"role": "program", "code": binding.code, "common": ()}

    def go() -> None:
        kept = binding, memory  # what the script points to
        if script.run(0) != end:
            _inside(child.run, request, depth)
        assert kept[1][0] == 0, os.waitstatus_to_exitcode(kept[1][0])

    return go


def _inside(run: Callable[[dict[str, Any], bool], NoReturn], request: dict[str, Any], depth: int) -> NoReturn:
    if depth == 3:
        os._exit(0)
    run(request, True)


def _spent() -> tuple[float, int]:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts), sum(part.ru_minflt for part in parts)


def serve(program: str) -> None:
    """A line in, one round out: seconds and page faults of each stage."""
    from magicrl.verifiers.code import child, forkserver, kernel

    forkserver._preload([])  # pyright: ignore[reportPrivateUsage]
    kernel.enlarge_code()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    stages = {stage: _once(stage, program) for stage in _STAGES}
    child.rehearse()
    gc.collect()
    gc.freeze()
    while sys.stdin.readline():
        found: dict[str, tuple[float, float]] = {}
        for stage, go in stages.items():
            seconds, faults = _spent()
            for _ in range(_SCRIPTS):
                go()
            after, count = _spent(), _SCRIPTS * _FORKS
            found[stage] = (after[0] - seconds) / count, (after[1] - faults) / count
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def measure_parts(program: str, rounds: int, floor: Callable[[], float]) -> dict[str, Any]:
    """Microseconds and page faults that each stage adds, and their shares of the floor beside them; medians of rounds.

    Args:
        program: reads two numbers.
        floor: CPU seconds of a bare fork and exit, measured now.
    """
    from magicrl.verifiers.code.sandbox import _ENVIRONMENT  # pyright: ignore[reportPrivateUsage]

    command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", __file__, program]
    forkserver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_ENVIRONMENT)
    assert forkserver.stdin is not None
    assert forkserver.stdout is not None
    seen: dict[str, list[tuple[float, float, float]]] = {stage: [] for stage in _STAGES}
    floors: list[float] = []
    for _ in range(rounds):
        floors.append(floor())
        forkserver.stdin.write("\n")
        forkserver.stdin.flush()
        for stage, (seconds, faults) in json.loads(forkserver.stdout.readline()).items():
            seen[stage].append((seconds, faults, seconds / floors[-1]))
    forkserver.stdin.close()
    forkserver.wait()
    rows: dict[str, Any] = {}
    before = (0.0, 0.0, 0.0)
    for stage, values in seen.items():
        now = tuple(statistics.median(one[place] for one in values) for place in range(3))
        rows[stage] = {
            "what": _STAGES[stage],
            "adds_us": round(1e6 * (now[0] - before[0])),
            "adds_page_faults": round(now[1] - before[1]),
            "adds_floors": round(now[2] - before[2], 2),
        }
        before = now
    return {
        "rounds": rounds,
        "fork_exit_floor_us": round(1e6 * statistics.median(floors)),
        "load": round(os.getloadavg()[0], 1),
        "all_us": round(1e6 * before[0]),
        "all_floors": round(before[2], 2),
        "stages": rows,
    }


if __name__ == "__main__":
    for name in ("magicrl", "magicrl.verifiers", "magicrl.verifiers.code"):  # without what their __init__ loads
        package = types.ModuleType(name)
        package.__path__ = [str(_SOURCES.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    serve(sys.argv[1])
