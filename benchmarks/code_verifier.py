"""Figures of the code verifier: speed against the fork floor and LiveCodeBench's way, attacks, references, soak.

    python benchmarks/code_verifier.py speed
    python benchmarks/code_verifier.py parts
    python benchmarks/code_verifier.py attacks --data ../shared/data/code/adversarial_dev.jsonl
    python benchmarks/code_verifier.py references --data ../shared/data/code/sets
    python benchmarks/code_verifier.py soak --runs 100000
    python benchmarks/code_verifier.py scaling

Each writes its part of docs/figures/code-verifier.json. Speed is CPU time of the process and everything below it, so
that the machine's load does not change it; each measurement is a process of its own, start-up taken off.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from code_load import PROGRAM, measure_scaling, measure_soak, tests_of
from common import FIGURES, command, parser_of, write_figure

from magicrl.evaluation.provenance import git_commit

FIGURE = FIGURES / "code-verifier.json"
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
# what the fork server does before it serves: nothing but its forks is left
_SERVER = """
import importlib
from magicrl_verifiers.code import child, kernel
for name in forkserver.PRELOADED:
    importlib.import_module(name)
child.prepare()
gc.collect()
gc.freeze()
fork = kernel.fork
"""


def cpu_seconds() -> float:
    """CPU seconds of this process and of every process below it that has been waited for."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


# --- a harness in the manner of LiveCodeBench's check_correctness (described in its repository) -------------------


def _lcb_run(tests: dict[str, list[str]], program: str, result: Any) -> None:
    """One process a sample: the program as a function, a mocked stdin and an alarm a test, comparison inside."""
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
    """CPU seconds a sample of one harness, measured in this process.

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
    for count in (2, samples + 2):  # the difference leaves the start out
        start = cpu_seconds()
        with CodeJudge(CodeOptions(sandbox=SandboxOptions(tier=tier, guards_off=tuple(off)))) as judge:
            for _ in range(count):
                assert judge.judge_program(PROGRAM, suite).correct
        spent.append(cpu_seconds() - start)
    return (spent[1] - spent[0]) / samples


def _measured(kind: str, tests: int, samples: int) -> float:
    command = [sys.executable, __file__, "child", kind, str(tests), str(samples)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _floor(setup: str = "") -> float:
    """CPU seconds of fork, exit and wait of an interpreter that has run ``setup``."""
    command = [sys.executable, "-I", "-S", "-c", _FLOOR.format(setup=setup)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _server_floor() -> float:
    """The same of a process that has loaded what the fork server has."""
    from magicrl_verifiers.code.sandbox import bootstrap

    return _floor(bootstrap() + _SERVER)


def measure_parts(rounds: int) -> dict[str, Any]:
    """Microseconds of CPU time that one test of fifty takes, and what of it goes with each guard; medians of rounds."""
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
    """Rounds of every measurement in turn, each beside the floor of that moment; medians."""
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


# --- attacks and references ----------------------------------------------------------------------------------------


def _side_effects(row: dict[str, Any]) -> list[str]:
    effect = row.get("side_effect") or {}
    path = os.path.expanduser(effect.get("path") or "")
    if effect.get("kind") == "file_absent" and os.path.lexists(path):
        return [f"{path} was made"]
    if effect.get("kind") == "file_present" and not os.path.lexists(path):
        return [f"{path} was removed"]
    if effect.get("kind") == "no_process":
        names = [Path(f"/proc/{pid}/comm") for pid in os.listdir("/proc") if pid.isdigit()]
        alive = [name for name in names if name.exists() and name.read_text().strip() == effect["comm"]]
        return [f"{name} is alive" for name in alive]
    return []


def _each_tier(run: Callable[[Any], dict[str, Any]], tiers: list[str]) -> dict[str, Any]:
    from magicrl_verifiers.code.judge import CodeJudge, CodeOptions
    from magicrl_verifiers.code.sandbox import Limits, SandboxError, SandboxOptions

    found: dict[str, Any] = {}
    for tier in tiers:
        sandbox = SandboxOptions(tier=tier, preload=("sortedcontainers",))
        limits = Limits(cpu_seconds=20.0 if run is _references else 4.0, memory_mb=4096 if run is _references else 1024)
        try:
            with CodeJudge(CodeOptions(limits=limits, sandbox=sandbox)) as judge:
                found[f"tier {tier}"] = run(judge)
        except SandboxError as error:
            found[f"tier {tier}"] = str(error)
    return found


def _attacks(judge: Any) -> dict[str, Any]:
    from magicrl_verifiers.code.suite import parse_suite

    victim = Path("/tmp/adv_victim")
    victim.mkdir(exist_ok=True)
    (victim / "file").write_text("x")
    statuses: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for line in ARGUMENTS.data.read_text().splitlines():
        row = json.loads(line)
        verdict = judge.judge_program(
            row["program"], parse_suite({k: v for k, v in row["tests"].items() if k != "prelude"})
        )
        statuses[verdict.status] += 1
        honest = row["expected"] == "pass"
        counts["honest" if honest else "attacks"] += 1
        effects = _side_effects(row)
        if verdict.correct != honest or verdict.status == "infrastructure_error" or effects:
            wrong.append(f"{row['id']}: {verdict.status} {effects}")
    shutil.rmtree(victim)
    return {**counts, "wrong": wrong, "statuses": dict(statuses.most_common())}


def tests_in(row: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of a reference row as the verifier's tests; None where there are only inputs."""
    tests = dict(row["tests"])
    if tests.get("type") == "checker":
        return {"fn_name": "sol", "inputs": [[]], "checker": tests["checker"]}
    if "outputs" in tests and tests["outputs"] is None:
        return None
    if "entry_point" in row:
        tests["entry_point"] = row["entry_point"]
    if "prelude" in row:
        tests["import_prefix"] = row["prelude"]
    return tests


def _references(judge: Any) -> dict[str, Any]:
    from magicrl_verifiers.code.suite import parse_suite

    found: dict[str, Any] = {}
    for folder in sorted(path for path in ARGUMENTS.data.iterdir() if path.is_dir()):
        if ARGUMENTS.rest and folder.name not in ARGUMENTS.rest:
            continue
        known = {entry[0] for entry in json.loads((folder / "reference_failures.json").read_text())}
        counts: collections.Counter[str] = collections.Counter()
        failed: list[str] = []
        for line in (folder / "data.jsonl").read_text().splitlines():
            row = json.loads(line)
            tests = tests_in(row)
            if tests is None:
                counts["inputs only"] += 1
                continue
            verdict = judge.judge_program(row["reference_solution"], parse_suite(tests))
            counts["passed" if verdict.correct else "failed"] += 1
            if not verdict.correct:
                failed.append(f"{row['id']}: {verdict.status}{' (known)' if row['id'] in known else ''}")
            if "buggy_solution" in row:
                buggy = judge.judge_program(row["buggy_solution"], parse_suite(tests))
                counts["buggy rejected" if not buggy.correct else "buggy accepted"] += 1
        found[folder.name] = {**counts, "failures": failed}
        sys.stderr.write(f"{folder.name}: {found[folder.name]}\n")
    return found


def main() -> None:
    if ARGUMENTS.what == "child":
        kind, tests, samples = ARGUMENTS.rest
        print(child_speed(kind, int(tests), int(samples)))
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": lambda: measure_speed(ARGUMENTS.rounds),
        "parts": lambda: measure_parts(ARGUMENTS.rounds),
        "attacks": lambda: _each_tier(_attacks, ["B", "A"]),
        "references": lambda: _each_tier(_references, ["auto"]),
        "soak": lambda: measure_soak(ARGUMENTS.runs, ARGUMENTS.minutes),
        "scaling": lambda: measure_scaling(ARGUMENTS.rounds),
    }
    found = parts[ARGUMENTS.what]()
    figures = json.loads(FIGURE.read_text()) if FIGURE.exists() else {}
    figures["machine"] = {"kernel": platform.release(), "python": platform.python_version(), "cores": os.cpu_count()}
    if ARGUMENTS.what == "references" and ARGUMENTS.rest:  # some sets again
        for tier, sets in found.items():
            figures["references"][tier].update(sets)
    else:
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
    parser.add_argument("what", choices=["speed", "parts", "attacks", "references", "soak", "scaling", "child"])
    parser.add_argument("rest", nargs="*", help="names of sets: only these references")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=600.0, help="of a soak, at most")
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = _arguments()
    main()
