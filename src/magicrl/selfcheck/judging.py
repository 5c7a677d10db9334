"""What was not judged is never a 0: troubles that are not the answer's fault, from the verifier to the advantages.

Each trouble befalls a right answer that shares its group with a judged right and a judged wrong one. It must be judged
right after all, or leave its group: the advantages of the others are then those of a group without it. Answers that
exhaust their own limits are the counterpart: these must be wrong, or hanging the verifier would pay.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil

from magicrl.algorithms.advantages import score_group, scored_advantages
from magicrl.config.verifier_schema import JudgeConfig
from magicrl.records import Outcome, Problem, ScoredGroup, Verdict
from magicrl.selfcheck.setup import Proof, Setup, judged, needs_sandbox, rollout_group
from magicrl.training.step import train_samples
from magicrl_verifiers import VerifierPool
from magicrl_verifiers.records import make_verdict

REWARDS = """
import asyncio

from magicrl_verifiers import reward

def raises(problem, response):
    raise KeyError("a bug of the reward")

def forgets(problem, response):
    pass

def infinite(problem, response):
    return float("nan")

@reward(batched=True, time_limit=0.1)
async def times_out(problems, responses):
    await asyncio.sleep(3)

@reward(isolated=True, memory_limit_mb=256)
def out_of_memory(problem, response):
    "x" * (1 << 30)
"""
HANGS = r"\boxed{\lim_{x \to 0} 9^{9^{9}}}"
PROGRAM = "```python\ndef f(n):\n    return n + 1\n```"
LOOP = "```python\ndef f(n):\n    while True:\n        pass\n```"
PATIENCE = 120.0
"""Seconds after which what a trouble waits for counts as never happening."""
Trouble = Callable[[Setup], Verdict]


def _problem(reference: str, verifier: str) -> Problem:
    return Problem(id="p", prompt="?", references=(reference,), verifier=verifier, source="selfcheck")


def check_judging(setup: Setup) -> Proof:
    """Return whether no trouble was scored as a 0, and every answer that exhausts its own limits is wrong."""
    verdicts = {name: trouble(setup) for name, trouble in TROUBLES.items()}
    zeros = [name for name, verdict in verdicts.items() if not leaves_or_right(verdict)]
    own = {name: fault(setup) for name, fault in OWN_FAULTS.items()}
    escaped = [name for name, verdict in own.items() if verdict.outcome is not Outcome.WRONG]
    right = sum(verdict.outcome is Outcome.CORRECT for verdict in verdicts.values())
    failed = f"; failed: {', '.join(zeros + escaped)}" if zeros or escaped else ""
    return Proof(
        status=judged(not zeros and not escaped),
        figure=f"{len(zeros)} of {len(verdicts)} troubles of a right answer scored as 0 ({right} judged right after "
        f"all, {len(verdicts) - right - len(zeros)} left their group); {len(escaped)} of {len(own)} answers that "
        f"exhaust their own limits escaped{failed}",
        against="the advantages of the same group without that answer",
        details={name: f"{verdict.outcome.value}: {verdict.reason}" for name, verdict in {**verdicts, **own}.items()},
    )


def leaves_or_right(verdict: Verdict) -> bool:
    """Return whether a verdict on a right answer is right, or leaves no trace in its group's advantages and samples."""
    if verdict.outcome is Outcome.CORRECT:
        return True
    with_it, without = scored([RIGHT, WRONG, verdict]), scored([RIGHT, WRONG])
    equal = np.array_equal(scored_advantages([with_it])[0][:2], scored_advantages([without])[0])
    return equal and len(train_samples([with_it], mask="none")) == 2


RIGHT, WRONG = make_verdict("matched", decided_by="selfcheck"), make_verdict("mismatch", decided_by="selfcheck")


def scored(verdicts: list[Verdict]) -> ScoredGroup:
    """Return a group of one-token responses with these verdicts."""
    count = len(verdicts)
    group = rollout_group(_problem("1", "exact"), [1], [[1]] * count, [False] * count, max_tokens=4)
    return score_group(group, verdicts)


def verdict_on(reference: str, answer: str, verifier: str = "maths", *, time_limit: float = 2.0) -> Verdict:
    with needs_sandbox(), VerifierPool(time_limit=time_limit) as pool:
        return pool.judge(_problem(reference, verifier), [answer])[0]


def of_reward(name: str) -> Trouble:
    """Return the trouble of a reward function of `REWARDS`."""

    def trouble(setup: Setup) -> Verdict:
        file = setup.folder / "rewards.py"
        file.write_text(REWARDS, encoding="utf-8")
        return verdict_on("7", "7", f"{file}:{name}")

    return trouble


def judge_down(setup: Setup) -> Verdict:
    """Ask a judge whose server does not listen."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    config = JudgeConfig(
        base_url=f"http://127.0.0.1:{port}/v1", model="judge", attempts=2, cache=str(setup.folder / "judge")
    )
    with VerifierPool(judge=config) as pool:
        return pool.judge(_problem("7", "judge"), ["7"])[0]


def worker_killed_twice(_setup: Setup) -> Verdict:
    """Kill the worker that judges, and the one that takes its place."""
    with VerifierPool(time_limit=60.0) as pool:
        ticket = pool.submit(_problem("7", "maths"), [HANGS])
        seen: set[int] = set()
        for _ in range(2):
            _until(lambda: bool(set(pool.worker_pids) - seen))
            (pid,) = set(pool.worker_pids) - seen
            seen.add(pid)
            before = _cpu_seconds(pid)  # a worker that has nothing to judge uses none
            _until(lambda pid=pid, before=before: _cpu_seconds(pid) > before + 0.1)
            os.kill(pid, signal.SIGKILL)
        return pool.result(ticket)[0]


def worker_suspended(_setup: Setup) -> Verdict:
    """Suspend the worker for longer than its time limit, as an overloaded machine may."""
    with VerifierPool(time_limit=1.0) as pool:
        pool.warm_up()
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGSTOP)
        resumed = threading.Timer(3.0, os.kill, (pid, signal.SIGCONT))
        resumed.start()
        found = pool.judge(_problem("1/2", "maths"), [r"\boxed{0.5}"])[0]
        resumed.join()
        return found


def harness_killed(_setup: Setup) -> Verdict:
    """Kill the process that judges programs while it is at it."""
    me = psutil.Process()
    before = {process.pid for process in me.children(recursive=True)}
    with VerifierPool(time_limit=10.0) as pool:
        pool.warm_up(["code"])
        slow = PROGRAM.replace("return", "sum(range(10**7))\n    return")
        ticket = pool.submit(_problem('{"assert_case": ["assert f(1) == 2"], "fn_name": "f"}', "code"), [slow])
        time.sleep(0.1)
        for process in me.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.pid not in before:
                    process.kill()
                    break
        return pool.result(ticket)[0]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"a worker did not start or compute within {PATIENCE:g} s; free a core and try again")
        time.sleep(0.01)


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


TROUBLES: dict[str, Trouble] = {
    "reward raises": of_reward("raises"),
    "reward returns None": of_reward("forgets"),
    "reward returns NaN": of_reward("infinite"),
    "reward times out": of_reward("times_out"),
    "reward runs out of memory": of_reward("out_of_memory"),
    "judge is down": judge_down,
    "reference answer cannot be read": lambda _: verdict_on(r"\overbrace{", r"\boxed{1}"),
    "reference answer hangs the verifier": lambda _: verdict_on("9!!!!!!", r"\boxed{x+3}", time_limit=0.5),
    "tests do not parse": lambda _: verdict_on('{"test_code": "def test_f(:"}', PROGRAM, "code"),
    "tests are no JSON": lambda _: verdict_on("{", PROGRAM, "code"),
    "tests import what is missing": lambda _: verdict_on('{"test_code": "import no_such_module"}', PROGRAM, "code"),
    "verifier worker killed twice": worker_killed_twice,
    "verifier worker suspended beyond its limit": worker_suspended,
    "code harness killed": harness_killed,
}
"""Ways in which a right answer is not judged, each a function that returns its verdict."""
OWN_FAULTS: dict[str, Trouble] = {
    "answer that hangs the verifier": lambda _: verdict_on("3", HANGS, time_limit=0.5),
    "program that never ends": lambda _: verdict_on('{"assert_case": ["assert f(1) == 2"]}', LOOP, "code"),
}
"""Answers that exhaust their own limits."""
