"""Speed of the code verifier against a bare fork and against LiveCodeBench's harness.

    python -m benchmarks.verifiers.code_verifier speed
    python -m benchmarks.verifiers.code_verifier parts

Each writes its part of code-verifier.json. Speed is CPU time of the process and its children, which the machine's load
does not change. Each measurement has its own process, and start-up is subtracted.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.shared import FIGURES, command, parser_of, write_figure
from magicrl.evaluation.provenance import git_commit

FIGURE = FIGURES / "code-verifier.json"
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
_FLOOR = """
import gc, os, resource
fork = os.fork
def cpu():
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in both)
{setup}
for count in (50, 1000):
    start = cpu()
    for _ in range(count):
        pid = fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    spent = cpu() - start
print(spent / count)
"""
# the fork server's preparation; afterwards only forks remain
_SERVER = """
import importlib
from magicrl_verifiers.code import forkserver, kernel
for name in forkserver.PRELOADED:
    importlib.import_module(name)
forkserver.prepare()
gc.collect()
gc.freeze()
fork = kernel.fork
"""


def tests_of(count: int) -> dict[str, list[str]]:
    """Return tests that `PROGRAM` passes."""
    return {
        "inputs": [f"{i} {i + 1}\n" for i in range(count)],
        "outputs": [f"{2 * i + 1}\n" for i in range(count)],
    }


def cpu_seconds() -> float:
    """Return CPU seconds of this process and of every child that has been waited for."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


# --- a harness in the manner of LiveCodeBench's check_correctness (described in its repository) -------------------


def _lcb_run(tests: dict[str, list[str]], program: str, result: Any) -> None:
    """Run one process per sample: the program as a function, a mocked stdin, an alarm per test, comparison inside."""
    import ast
    import faulthandler
    import io
    from types import ModuleType
    from unittest.mock import mock_open, patch

    def alarmed(number: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, alarmed)
    faulthandler.disable()
    tree = ast.parse(program)
    body = "\n".join("    " + line for line in ast.unparse(tree).split("\n"))
    module = ModuleType("tmp_sol")
    exec(compile("import sys\n\ndef wrapped_function():\n" + body, "<string>", "exec"), vars(module))
    outcomes: list[Any] = []
    for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
        signal.alarm(6)
        kept, sys.stdout = sys.stdout, io.StringIO()
        lines = iter(given.split("\n"))

        @patch("builtins.open", mock_open(read_data=given))
        @patch("sys.stdin", io.StringIO(given))
        @patch("sys.stdin.readline", lambda *_: next(lines))
        @patch("sys.stdin.readlines", lambda *_: given.split("\n"))
        @patch("sys.stdin.read", lambda *_: given)
        def call() -> None:
            vars(module)["wrapped_function"]()

        try:
            call()
        finally:
            written = sys.stdout.getvalue()
            sys.stdout = kept
            signal.alarm(0)
        found = [line.strip() for line in written.strip().split("\n")]
        outcomes.append(found == [line.strip() for line in wanted.strip().split("\n")])
    result.append(outcomes)


def lcb_sample(tests: dict[str, list[str]], program: str) -> bool:
    manager = multiprocessing.get_context("fork").Manager()
    result = manager.list()
    worker = multiprocessing.get_context("fork").Process(target=_lcb_run, args=(tests, program, result))
    worker.start()
    worker.join(timeout=30)
    if worker.is_alive():
        worker.kill()
    passed = bool(result) and all(result[0])
    manager.shutdown()
    return passed


# --- speed -----------------------------------------------------------------------------------------------------------


def child_speed(kind: str, tests: int, samples: int) -> float:
    """Return CPU seconds per sample of one harness, measured in this process.

    ``kind`` is lcb, or ours_ with the tier and the guards that are left out, as ours_B-seccomp.
    """
    cases = tests_of(tests)
    if kind == "lcb":
        for _ in range(2):
            assert lcb_sample(cases, PROGRAM)
        start = cpu_seconds()
        assert all(lcb_sample(cases, PROGRAM) for _ in range(samples))
        return (cpu_seconds() - start) / samples
    from magicrl_verifiers.code.judge import CodeJudge, CodeOptions
    from magicrl_verifiers.code.sandbox import SandboxOptions
    from magicrl_verifiers.code.suite import parse_suite

    tier, *off = kind.removeprefix("ours_").split("-")
    suite = parse_suite(cases)
    spent: list[float] = []
    for count in (2, samples + 2):  # the difference excludes start-up
        start = cpu_seconds()
        with CodeJudge(CodeOptions(sandbox=SandboxOptions(tier=tier, guards_off=tuple(off)))) as judge:
            for _ in range(count):
                assert judge.judge_program(PROGRAM, suite).correct
        spent.append(cpu_seconds() - start)
    return (spent[1] - spent[0]) / samples


def _measured(kind: str, tests: int, samples: int) -> float:
    command = [sys.executable, "-m", "benchmarks.verifiers.code_verifier", "child", kind, str(tests), str(samples)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _floor(setup: str = "") -> float:
    """Return CPU seconds of fork, exit and wait of an interpreter that has run ``setup``."""
    command = [sys.executable, "-I", "-S", "-c", _FLOOR.format(setup=setup)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _server_floor() -> float:
    """Return the same for a process that has loaded what the fork server loads."""
    from magicrl_verifiers.code.sandbox import bootstrap

    return _floor(bootstrap() + _SERVER)


def measure_parts(rounds: int) -> dict[str, Any]:
    """Return microseconds of CPU time of one test of fifty, and the part of each guard; medians of rounds."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    guards = ("pid_namespace", "landlock", "seccomp")
    kinds = {"all guards": "ours_B", **{f"without {name}": f"ours_B-{name}" for name in guards}}
    kinds["without these three"] = "ours_B-" + "-".join(guards)
    loads: list[float] = []
    for _ in range(rounds):
        loads.append(round(os.getloadavg()[0], 1))
        found["a bare interpreter's fork, exit and wait"].append(_floor())
        found["the fork server's own"].append(_server_floor())
        for name, kind in kinds.items():
            found[name].append(_measured(kind, 50, 12) / 50)
    middle = {name: statistics.median(values) for name, values in found.items()}
    floor, *_ = middle.values()
    return {
        "rounds": rounds,
        "load": [min(loads), max(loads)],
        "microseconds_a_test": {name: round(1e6 * seconds) for name, seconds in middle.items()},
        "share_of_floor": {name: round(floor / seconds, 3) for name, seconds in middle.items()},
    }


def measure_speed(rounds: int) -> dict[str, Any]:
    """Return medians of rounds of every measurement in turn, each with the fork time of that moment."""
    kinds = ["ours_A", "ours_B", "ours_B-pid_namespace", "lcb"]
    plan = {1: 200, 10: 40, 50: 12}
    found: dict[str, list[float]] = collections.defaultdict(list)
    loads: list[float] = []
    for _ in range(rounds):
        for kind in kinds:
            for tests, samples in plan.items():
                try:
                    floor = _floor()
                    seconds = _measured(kind, tests, samples if kind != "lcb" else samples // 4)
                except subprocess.CalledProcessError as error:  # a tier that this machine does not allow
                    sys.stderr.write(f"{kind} {tests}: {error.stderr[-400:]}\n")
                    continue
                found["floor"].append(floor)
                found["warm_floor"].append(_server_floor())
                found[f"{kind}_{tests}"].append(seconds)
                found[f"share_{kind}_{tests}"].append(floor * tests / seconds)
                found[f"warm_share_{kind}_{tests}"].append(found["warm_floor"][-1] * tests / seconds)
                loads.append(round(os.getloadavg()[0], 1))
    middle = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
    result: dict[str, Any] = {
        "rounds": rounds,
        "load": [min(loads), max(loads)],
        "fork_exit_floor_ms": round(1000 * middle["floor"], 3),
        "warm_fork_exit_floor_ms": round(1000 * middle["warm_floor"], 3),
    }
    for kind in kinds:
        for tests in plan:
            seconds = middle.get(f"{kind}_{tests}")
            if seconds is None:
                continue
            row = {"ms_per_sample": round(1000 * seconds, 2), "tests_per_second_core": round(tests / seconds, 1)}
            if kind != "lcb":
                row["share_of_floor"] = round(middle[f"share_{kind}_{tests}"], 3)
                row["share_of_warm_floor"] = round(middle[f"warm_share_{kind}_{tests}"], 3)
                row["times_lcb"] = round(middle[f"lcb_{tests}"] / seconds, 2)
            result[f"{kind}, {tests} tests"] = row
    return result


def main() -> None:
    if ARGUMENTS.what == "child":
        kind, tests, samples = ARGUMENTS.rest
        print(child_speed(kind, int(tests), int(samples)))
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": lambda: measure_speed(ARGUMENTS.rounds),
        "parts": lambda: measure_parts(ARGUMENTS.rounds),
    }
    found = parts[ARGUMENTS.what]()
    figures = json.loads(FIGURE.read_text()) if FIGURE.exists() else {}
    figures["machine"] = {"kernel": platform.release(), "python": platform.python_version(), "cores": os.cpu_count()}
    figures[ARGUMENTS.what] = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit(),
        **found,
    }
    write_figure(FIGURE, figures)
    print(json.dumps(found, indent=1))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["speed", "parts", "child"])
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = _arguments()
    main()
