"""The pool under any answer and any accident of the operating system."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from builders import completion

from magicrl.config.verifier_schema import VerifierConfig
from magicrl.records import Episode, Outcome, Problem, Verdict
from magicrl.rollout.requests import submit_completions, verdicts_of
from magicrl_verifiers import JudgeOptions, VerifierPool
from magicrl_verifiers.code.judge import CodeOptions
from magicrl_verifiers.code.sandbox import Limits
from magicrl_verifiers.isolated import IsolatedProtocol
from magicrl_verifiers.records import make_verdict
from magicrl_verifiers.workers import Item, Lost, WorkerProcess, WorkerRefusal, WorkerStartError

HANG = r"\boxed{\lim_{x \to 0} 9^{9^{9}}}"


def problem(*references: str, verifier: str = "maths") -> Problem:
    return Problem(id="p", prompt="?", references=references, verifier=verifier, source="test")


Until = Callable[[Callable[[], bool]], None]


def unread(pid: int) -> int:
    """Return the bytes of requests that a worker has not read. They are in the only pipe that it reads."""
    size = array.array("i", [0])
    modes = {file: (file.parents[1] / "fdinfo" / file.name).read_text() for file in Path(f"/proc/{pid}/fd").iterdir()}
    (source,) = (
        file
        for file, text in modes.items()
        if os.readlink(file).startswith("pipe:") and int(text.split()[3], 8) & os.O_ACCMODE == os.O_RDONLY
    )
    pipe = os.open(source, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.ioctl(pipe, termios.FIONREAD, size)
    finally:
        os.close(pipe)
    return size[0]


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(time_limit=0.4, workers=1) as shared:
        shared.warm_up()
        yield shared


@pytest.fixture(scope="module")
def patient() -> Iterator[VerifierPool]:
    """Yield a pool with long limits: Math-Verify needs half a CPU second for an integral on a slow core."""
    with VerifierPool(time_limit=4.0, workers=1) as shared:
        shared.warm_up()
        yield shared


@pytest.mark.parametrize(
    ("references", "response", "status", "decided_by"),
    [
        (["5"], r"\boxed{5}", "matched", "string"),
        (["5"], r"\boxed{6}", "mismatch", "rational"),
        (["5", "6"], r"\boxed{6}", "matched", "string"),
        (["0.5"], r"\boxed{\frac{1}{2}}", "matched", "rational"),
        ([r"\frac{\sqrt{2}}{2}"], r"\boxed{\frac{1}{\sqrt{2}}}", "matched", "structure"),
        (["x+1", "x+2"], r"\boxed{2+x}", "matched", "structure"),
        (["x+1"], r"\boxed{1-x}", "mismatch", "structure"),
        # Math-Verify parses neither side of this pair: string comparison must come first
        ([r"1-\frac{1}{\mathrm{e}}"], r"\boxed{1 - \frac{1}{\mathrm{e}}}", "matched", "string"),
        ([r"1-\frac{1}{\mathrm{e}}"], r"\boxed{1 + \frac{1}{\mathrm{e}}}", "mismatch", "structure"),
        # both round to 0.000000
        ([r"\frac{1}{2004!}"], r"\boxed{\frac{1}{2006!}}", "mismatch", "structure"),
        ([r"\frac{1}{2004!}"], r"\boxed{\frac{2005}{2005!}}", "matched", "structure"),
        ([r"\frac{1}{2^{99}}"], r"\boxed{0}", "mismatch", "structure"),
        # the grammar of formulas has no integrals
        ([r"\int_0^1 2x \, dx"], r"\boxed{\int_0^1 2y \, dy}", "matched", "math_verify"),
        ([r"\int_0^1 2x \, dx"], r"\boxed{\int_0^1 3y \, dy}", "mismatch", "math_verify"),
        ([r"\overbrace{"], r"\boxed{1}", "reference_unparsable", "math_verify"),
        (["42"], "so it is 43. No, the answer is 42.", "matched", "string"),
        (["42"], r"<think>\boxed{42}", "no_answer", "extraction"),
        (["42"], r"<think>\boxed{41}</think>\boxed{42}", "matched", "string"),
        (["42"], r"<think>\boxed{42}</think>\boxed{41}", "mismatch", "rational"),
        (["42"], r"\boxed{ }", "no_answer", "extraction"),
        (["42"], r"\boxed{?}", "mismatch", "structure"),
        (["42"], r"\boxed{43} Wait. \boxed{42}", "matched", "string"),
        (["42"], "\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}", "mismatch", "string"),
        (["42"], "\\boxed{" + "{" * 100_000 + "42" + "}" * 100_000 + "}", "matched", "string"),
        (["42"], "\\boxed{" + "x" * 1_000_000 + "}", "mismatch", "string"),
        (["3"], "the answer is" + " " * 200_000 + "4", "mismatch", "rational"),
        (["3"], "\ud800 \x00 \\boxed{3}", "matched", "string"),
    ],
)
def test_maths_verdicts(
    patient: VerifierPool, references: list[str], response: str, status: str, decided_by: str
) -> None:
    (verdict,) = patient.judge(problem(*references), [response])
    assert (verdict.status, verdict.decided_by) == (status, decided_by)
    expected = {"matched": Outcome.CORRECT, "reference_unparsable": Outcome.NOT_JUDGED}.get(status, Outcome.WRONG)
    assert verdict.outcome is expected
    assert verdict.seconds > 0


def test_an_answer_that_hangs_is_wrong_and_its_neighbours_are_unharmed(pool: VerifierPool) -> None:
    before = pool.worker_pids
    verdicts = pool.judge(problem("3"), [r"\boxed{3}", HANG, r"\boxed{3}", r"\boxed{4}"])
    assert [v.status for v in verdicts] == ["matched", "timeout", "matched", "mismatch"]
    assert verdicts[1].outcome is Outcome.WRONG
    assert pool.worker_pids != before


def test_a_reference_that_hangs_is_nobody_s_fault_and_costs_its_time_once(pool: VerifierPool) -> None:
    bomb = problem("9!!!!!!")
    (first,) = pool.judge(bomb, [r"\boxed{x+3}"])
    assert (first.outcome, first.status) == (Outcome.NOT_JUDGED, "reference_unparsable")
    pool.judge(problem("1"), [r"\boxed{1}"])
    before = pool.worker_pids
    others = pool.judge(bomb, [r"\boxed{x+4}", r"\boxed{9!!!!!!}"])
    assert [v.status for v in others] == ["reference_unparsable", "matched"]  # equal strings still count
    assert pool.worker_pids == before  # no worker was spent on it again


def test_a_worker_killed_from_outside_loses_nothing(pool: VerifierPool, until: Until) -> None:
    pool.warm_up()
    pool.judge(problem("1"), [r"\boxed{1}"])
    (pid,) = pool.worker_pids
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    ticket = pool.submit(problem("7"), [r"\boxed{7}", r"\boxed{8}", r"\boxed{\sqrt{49}}"])
    until(lambda: unread(pid) > 0)  # the worker dies with the first item
    assert not ticket.done
    os.kill(pid, signal.SIGKILL)
    assert [v.status for v in pool.result(ticket)] == ["matched", "mismatch", "matched"]
    assert pool.worker_pids != (pid,)


def test_an_idle_worker_killed_from_outside_is_replaced(pool: VerifierPool) -> None:
    pool.judge(problem("1"), [r"\boxed{1}"])
    (pid,) = pool.worker_pids
    os.kill(pid, signal.SIGKILL)
    assert pool.judge(problem("7"), [r"\boxed{7}"])[0].correct


CODE = Problem(id="c", prompt="?", references=('{"inputs": ["7"], "outputs": ["7"]}',), verifier="code", source="test")


@pytest.mark.parametrize("victim", ["verifiers.isolated", "verifiers.code.judge", "forkserver"])
def test_whoever_is_killed_while_it_warms_up_is_started_again(victim: str, until: Until) -> None:
    if victim == "verifiers.isolated":
        problem_, answer = problem("7"), r"\boxed{7}"
    else:
        problem_, answer = CODE, "```python\nprint(input())\n```"
    me = psutil.Process()

    others = {process.pid for process in me.children(recursive=True)}

    def killed_another() -> bool:
        for process in me.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may have exited since it was listed
                if process.pid not in others and victim in " ".join(process.cmdline()):
                    others.add(process.pid)
                    process.kill()
                    return True
        return False

    with VerifierPool(time_limit=5.0) as pool:
        ticket = pool.submit(problem_, [answer, "8"])
        for _ in range(2):
            until(killed_another)
        try:
            pool.warm_up([problem_.verifier])
        except WorkerRefusal as refusal:
            pytest.skip(f"kernel lacks the primitive: {refusal}")
        assert [verdict.correct for verdict in pool.result(ticket)] == [True, False]


def test_a_worker_killed_twice_means_not_judged(until: Until) -> None:
    with VerifierPool(time_limit=600.0) as pool:
        ticket = pool.submit(problem("7"), [HANG, r"\boxed{7}"])
        seen: set[int] = set()
        for _ in range(2):
            until(lambda: bool(set(pool.worker_pids) - seen))
            (pid,) = set(pool.worker_pids) - seen
            seen.add(pid)
            before = cpu_seconds(pid)  # an idle worker uses no CPU time
            until(lambda pid=pid, before=before: cpu_seconds(pid) > before + 0.1)
            os.kill(pid, signal.SIGKILL)
        lost, other = pool.result(ticket)
    assert (lost.outcome, lost.status) == (Outcome.NOT_JUDGED, "worker_lost")
    assert "signal 9" in lost.reason
    assert other.correct


def test_memory_belongs_to_the_answer() -> None:
    with VerifierPool(time_limit=4.0, memory_limit_mb=256) as small:
        verdicts = small.judge(problem("3"), [r"\boxed{2^{10^{10}}}", r"\boxed{3}"])
    assert verdicts[0].outcome is Outcome.WRONG
    assert verdicts[1].correct


def test_a_large_calling_process_does_not_wear_out_its_workers() -> None:
    ballast = bytearray(os.urandom(2**20)) * 256  # on Linux a child inherits the peak memory of its parent
    with VerifierPool(memory_limit_mb=256) as small:
        small.warm_up()
        before = small.worker_pids
        small.judge(problem("x+1"), [r"\boxed{1+x}", r"\boxed{2+x}"])
        assert small.worker_pids == before
    assert len(ballast) == 2**28


def test_many_items_from_two_threads_are_never_mixed_up() -> None:
    found: dict[int, list[tuple[str, ...]]] = {}

    def use(pool: VerifierPool, name: int) -> None:
        tickets = [
            pool.submit(problem(str(1000 * name + k)), [rf"\boxed{{{1000 * name + k + d}}}" for d in (-1, 0, 1)])
            for k in range(60)
        ]
        found[name] = [tuple(str(v.extracted) for v in pool.result(t) if v.correct) for t in reversed(tickets)]

    with VerifierPool(workers=2) as pool:
        threads = [threading.Thread(target=use, args=(pool, name)) for name in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name in (1, 2):
        assert found[name] == [(str(1000 * name + k),) for k in reversed(range(60))]


def test_close_ends_workers_and_fails_what_waits(until: Until) -> None:
    pool = VerifierPool(time_limit=600.0)
    ticket = pool.submit(problem("7"), [HANG, r"\boxed{7}"])
    until(lambda: len(pool.worker_pids) == 1)
    (pid,) = pool.worker_pids
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.result(ticket)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(problem("7"), ["7"])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_reward_asked_while_the_pool_closes_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, answer = VerifierPool(), Future[list[Verdict]]()

    def asked(_problem: Problem, _responses: Sequence[str]) -> Future[list[Verdict]]:
        pool.close()
        return answer

    monkeypatch.setitem(pool._local, "exact", asked)
    pool.submit(problem("1", verifier="exact"), ["1"])
    assert answer.cancelled()


def test_exact_problems_need_no_worker_and_options_come_from_the_recipe() -> None:
    config = VerifierConfig(reasoning="required", extract="box", workers=1)
    with config.pool() as pool:
        responses = [r"a \boxed{3}", "a </think> 3", r"a </think> \boxed{3}", rf"a </think> \boxed{{{'3' * 2000}}}"]
        verdicts = pool.judge(problem("3", verifier="exact"), responses)
        assert [v.status for v in verdicts] == ["no_answer", "no_answer", "matched", "mismatch"]
        assert verdicts[-1].extracted == "3" * 1000 + "...", "a truncated answer is marked as such"
        assert pool.worker_pids == ()
        assert pool.judge(problem("3", verifier="exact"), []) == ()


def test_verdicts_of_environments_and_of_the_pool_keep_their_places() -> None:
    own = Episode(observed=(), answer="3", verdict=make_verdict("score_below"))
    left = Episode(observed=(), answer="3")
    completions = [
        completion([1], text="2"),
        completion([1], text="3", episode=own),
        completion([1], text="2, and then 4", episode=left),
    ]
    with VerifierPool() as pool:
        submitted = submit_completions(pool, problem("3", verifier="exact"), completions)
        statuses = [verdict.status for verdict in verdicts_of(pool, submitted)]
    assert statuses == ["mismatch", "score_below", "matched"], "an episode's answer is its last turn"


def test_errors_name_the_remedy() -> None:
    with VerifierPool() as pool:
        with pytest.raises(ValueError, match="did you mean 'maths'"):
            pool.submit(problem("3", verifier="math"), ["3"])
        with pytest.raises(ValueError, match="no reference answer"):
            pool.submit(problem(), ["3"])
        with pytest.raises(ValueError, match="ended problem 'p' without a reward"):
            pool.submit(dataclasses.replace(problem(), environment="mine.py:Game"), ["3"])
    with pytest.raises(ValueError, match="reasoning must be"):
        JudgeOptions(reasoning="maybe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="workers"):
        VerifierPool(workers=0)


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf"), 1e300])
def test_a_time_limit_that_no_timer_takes_is_refused(seconds: float) -> None:
    """NaN would make every answer wrong, and infinity overflows the timer after the first answer was sent."""
    with pytest.raises(ValueError, match="time_limit must be positive seconds, at most 86400"):
        VerifierPool(time_limit=seconds)
    with pytest.raises(ValueError, match="time_limit must be"):
        Limits(cpu_seconds=seconds)
    with pytest.raises(ValueError, match="total_limit must be"):
        CodeOptions(total_seconds=seconds)


def test_the_longest_time_limit_can_be_waited_for() -> None:
    with VerifierPool(time_limit=86_400.0) as pool:
        assert pool.judge(problem("1/2"), [r"\boxed{0.5}"])[0].correct


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with VerifierPool() as pool:
        with pytest.raises(WorkerStartError, match="did not start"):
            pool.warm_up()
        (verdict,) = pool.judge(problem("3"), [r"\boxed{3}"])
    assert (verdict.outcome, verdict.status) == (Outcome.NOT_JUDGED, "worker_lost")


def test_a_stopped_worker_does_not_hang_the_pool() -> None:
    plan = IsolatedProtocol(
        "magicrl_verifiers.maths.maths_verifier:MathsVerifier", JudgeOptions(extract="box"), 5.0, 1024
    ).plan
    worker = WorkerProcess(dataclasses.replace(plan, stall_limit=0.3))
    os.kill(worker.pid, signal.SIGSTOP)
    request = {"item": 0, "references": ["3"], "response": "x" * 10**6, "distrust": False}
    assert isinstance(worker.ask(request), Lost)
    assert not worker.usable


@pytest.mark.parametrize(
    "change",
    [
        {"status": "correct"},
        {"status": "mismatch"},
        {"status": ["matched"]},
        {"reason": None},
        {"decided_by": 3},
        {"extracted": "x" * 2000},
        {"extracted": 5},
    ],
)
def test_replies_are_validated(change: dict[str, object]) -> None:
    good: dict[str, object] = {"outcome": "correct", "status": "matched", "reason": "", "extracted": "3"}
    protocol, item = (
        IsolatedProtocol("magicrl_verifiers.maths.maths_verifier:MathsVerifier", JudgeOptions(), 1.0, 1024),
        Item(0, problem("3"), "3", bare=False),
    )
    assert protocol.read(item, {"verdict": good}, 0.1).correct
    assert protocol.read(item, {"verdict": good | change}, 0.1).status == "worker_lost"
    assert protocol.read(item, good, 0.1).status == "worker_lost"


def test_the_calling_process_loads_neither_torch_nor_sympy() -> None:
    code = "import sys, magicrl_verifiers.batch; print(sorted({'torch', 'sympy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_many_tasks_of_an_event_loop_share_a_pool(pool: VerifierPool) -> None:
    async def judge(value: int) -> bool:
        verdicts = await asyncio.to_thread(pool.judge, problem(str(value)), [f"\\boxed{{{value}}}", r"\boxed{-1}"])
        return [one.correct for one in verdicts] == [True, False]

    async def everything() -> list[bool]:
        return await asyncio.gather(*(judge(value) for value in range(40)))

    assert all(asyncio.run(everything()))
