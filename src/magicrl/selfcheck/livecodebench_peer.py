"""The same questions to LiveCodeBench's harness, from a clone of its repository (``--livecodebench FOLDER``).

Programs and tests enter through ``codegen_metrics``, as its own runner passes them. The harness has no sandbox and says
so: its programs run with the rights of the command. The attacks here harm at most processes of the harness.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from magicrl.selfcheck.setup import CannotRun, Proof, Setup
from magicrl.selfcheck.verifiers import HONEST, STDIN, attacks_of, problems, stdin_programs

SCRIPT = """
import json, sys
from lcb_runner.evaluation import codegen_metrics, extract_instance_results

tests, program = json.load(sys.stdin)
_, results, messages = codegen_metrics(
    [{"input_output": tests}], [[program]], k_list=[1], num_process_evaluate=1, timeout=2
)
with open(sys.argv[1], "w") as file:
    json.dump([extract_instance_results(results)[0][0], json.loads(messages[0][0]).get("error_message", "")], file)
"""
PATIENCE = 60.0
"""Seconds after which the harness counts as hanging. Its own limits add up to less than 20 seconds here."""
HANGS = "the harness does not end"
SLOW = """
import os, time

def f(x):
    with open({place!r}, "w") as file:
        print(os.getpid(), file=file)
    time.sleep(0.5)
    return x + 1
"""
"""A right program that tells its process before it answers."""
RIGHT = {"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}
TESTS = {"tests do not parse": {**RIGHT, "outputs": ["["]}, "tests without inputs": {"fn_name": "f"}}
"""Broken tests."""


def judging(setup: Setup) -> Proof:
    """Return what the harness makes of right programs whose process is killed or suspended, or whose tests are broken.

    Raises:
        CannotRun: There is no clone, or its harness does not start.
    """
    slow = SLOW.format(place=str(setup.folder / "process"))
    found = {"undisturbed": harness_verdict(setup, RIGHT, slow)}
    for name, signals in {"process killed": [signal.SIGKILL], "suspended": [signal.SIGSTOP, signal.SIGCONT]}.items():
        found[name] = harness_verdict(setup, RIGHT, slow, signals)
    found |= {name: harness_verdict(setup, tests, "def f(x): return x + 1") for name, tests in TESTS.items()}
    if not found.pop("undisturbed")[0]:
        raise CannotRun("the harness did not accept a right program that nothing disturbed")
    unsolved = [f"{name}: {message}" for name, (solved, message) in found.items() if not solved]
    return Proof(
        status="peer",
        figure=f"{len(unsolved)} of {len(found)} troubles of a right program count as unsolved "
        f"({'; '.join(unsolved)}); by definition: a benchmark's harness has two outcomes. Its README advises fewer "
        "processes or a longer timeout where results vary",
        against="the same program undisturbed, which is solved",
        details={name: list(each) for name, each in found.items()},
    )


def verifying(setup: Setup) -> Proof:
    """Return which attacks the harness accepts and which honest programs it refuses, in its two forms of tests.

    Raises:
        CannotRun: There is no clone, or its harness does not start.
    """
    calls = json.loads(problems()["calls"].references[0])
    tests = {
        "calls": {
            "fn_name": "f",
            "inputs": ["\n".join(map(json.dumps, arguments)) for arguments in calls["inputs"]],
            "outputs": [json.dumps(value) for value in calls["outputs"]],
        },
        "standard input": STDIN,
    }
    attacks: dict[str, tuple[bool, str]] = {}
    honest: dict[str, tuple[bool, str]] = {}
    for form, given in tests.items():
        # The harness keeps no tests on disk, so that attack does not apply to it.
        named = {name: text for name, text in attacks_of(form, Path("")).items() if name != "the tests' file"}
        right = {"honest": HONEST} if form == "calls" else stdin_programs()
        # One run for each: an attack may break the harness for what comes after it.
        for name, program in named.items():
            attacks[f"{name}, {form}"] = harness_verdict(setup, given, program)
        for name, program in right.items():
            honest[f"{name}, {form}"] = harness_verdict(setup, given, program)
    accepted = [name for name, (solved, _) in attacks.items() if solved]
    refused = [name for name, (solved, _) in honest.items() if not solved]
    hanging = [name for name, (_, message) in attacks.items() if message == HANGS]
    return Proof(
        status="peer",
        figure=f"code: {len(accepted)} of {len(attacks)} attacks accepted{_named(accepted)}, {len(hanging)} do not let "
        f"the harness end{_named(hanging)}; {len(refused)} of {len(honest)} honest programs refused{_named(refused)}",
        against="the same programs in the harness's two forms of tests. Its code says that it is no sandbox. It runs a "
        "program as a function in a process of its own, with a stand-in for standard input",
        details={name: list(each) for name, each in {**attacks, **honest}.items()},
    )


def _named(found: Sequence[str]) -> str:
    return f" ({'; '.join(found)})" if found else ""


def harness_verdict(
    setup: Setup, tests: object, program: str, signals: Sequence[signal.Signals] = ()
) -> tuple[bool, str]:
    """Return whether the harness counts a program as solved, and its error message.

    Args:
        setup: Folder of the check, and that of the clone.
        tests: Tests in LiveCodeBench's form.
        program: The program.
        signals: Sent to the process of a `SLOW` program, three seconds apart.

    Raises:
        CannotRun: There is no clone, or its harness does not start.
    """
    if setup.livecodebench is None:
        raise CannotRun("give --livecodebench FOLDER, a clone of github.com/LiveCodeBench/LiveCodeBench")
    place, output = setup.folder / "process", setup.folder / "livecodebench.json"
    for old in (place, output):
        old.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=setup.folder,
        env=os.environ | {"PYTHONPATH": str(setup.livecodebench.resolve())},
        text=True,
        start_new_session=True,
    )
    if signals:
        threading.Thread(target=_disturb, args=(place, signals), daemon=True).start()
    try:
        errors = process.communicate(json.dumps([json.dumps(tests), program]), timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        return False, HANGS
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a program left behind
        process.wait()
    if not output.exists():
        raise CannotRun(f"LiveCodeBench's harness gave no result: {errors[-300:]}")
    solved, message = json.loads(output.read_text(encoding="utf-8"))
    return solved, message


def _disturb(place: Path, signals: Sequence[signal.Signals]) -> None:
    """Send signals to the process whose number a program writes to ``place``."""
    end = time.monotonic() + PATIENCE
    while not (place.exists() and place.read_text().endswith("\n")):
        if time.monotonic() > end:
            return
        time.sleep(0.01)
    for number in signals:
        os.kill(int(place.read_text()), number)
        time.sleep(3.0)
