"""Scripted workers: their answers, resource use and deaths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import problem

from magicrl.records import Outcome, Verdict
from magicrl_verifiers.isolated import IsolatedProtocol
from magicrl_verifiers.records import JudgeOptions
from magicrl_verifiers.workers import Exhausted, Item, WorkerPlan, WorkerPool, WorkerProcess, WorkerProtocol

SCRIPTED = '''
import os, random, signal, time
from magicrl_verifiers.records import make_verdict
from magicrl_verifiers.workers import RequestHandler


class Handler(RequestHandler):
    """Replies as the item's text says, the first time that it meets it."""

    def __init__(self, hello, send):
        self.log = hello["log"]

    def handle(self, request):
        text = request["text"]
        with open(self.log, "a+") as file:
            file.seek(0)
            known = text in file.read().splitlines()
            file.write(text + "\\n")
        verdict = {"outcome": "correct", "status": "matched", "reason": "", "extracted": str(os.getpid())}
        reply = {"verdict": verdict, "retire": False}
        if text == "malformed" and not known:
            verdict["extracted"] = 5
        if text == "another item" and not known:
            reply["item"] = -1
        if text == "does not say that it may stay":
            reply["retire"] = None
        if text == "sleeps":
            time.sleep(2.0)
        return reply


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Verifier:
    """Does what a response says."""

    def __init__(self, options, progress):
        self.progress, self.distrusted, self.kept = progress, False, ""

    def distrust(self, references):
        self.distrusted = True

    def judge(self, references, response):
        said = ""
        if response == "two phases":
            for phase in ("reference", "answer"):
                self.progress(phase)
                burn(0.35)
        if response == "random":
            said = str(random.random())
        if response == "grows":
            self.kept = "x" * (48 << 20)
        if response == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if response == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if response == "is distrusted":
            said = str(self.distrusted)
        return make_verdict("matched", reason=said, decided_by=str(os.getpid()))

'''


def test_a_worker_that_asked_to_be_replaced_is(module: Path, tmp_path: Path) -> None:
    worker = WorkerProcess(Protocol(tmp_path / "log").plan)
    for number, text in enumerate(("does not say that it may stay", "says that it may stay")):
        worker.ask({"item": number, "text": text})
        assert not worker.usable
    worker.kill()


class Protocol(WorkerProtocol):
    """Pool side of `Handler`."""

    def __init__(self, log: Path) -> None:
        hello = {"log": str(log)}
        self.plan = WorkerPlan(handler="scripted_worker:Handler", hello=hello, cpu_limit=60.0, stall_limit=600.0)

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        return {"text": item.text}

    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> Verdict:
        raise AssertionError(outcome)


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the scripted module, which workers import, and a file in the current folder that no worker may import."""
    folder, current = tmp_path_factory.mktemp("scripted"), tmp_path_factory.mktemp("current")
    (folder / "scripted_worker.py").write_text(SCRIPTED)
    (current / "json.py").write_text("raise SystemExit('a file of the current folder was imported')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(current)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder / "scripted_worker.py"


def judged(pool: WorkerPool, *texts: str) -> tuple[Verdict, ...]:
    return pool.result(pool.submit(problem(), texts))


def test_an_unusable_reply_costs_its_worker_and_closing_waits_for_nobody(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    with WorkerPool(Protocol(tmp_path / "texts"), 1) as pool:
        texts = ["fine", "another item", "malformed", "does not say that it may stay", "fine"]
        verdicts = judged(pool, *texts)
        assert {verdict.status for verdict in verdicts} == {"matched"}, "the second try was usable"
        workers = [verdict.extracted for verdict in verdicts]
        assert [workers.index(worker) for worker in workers] == [0, 1, 2, 2, 4], "which text met a new worker"
        ticket = pool.submit(problem(), ["fine", "sleeps"])
        until(lambda: ticket.parts[0].done())
        assert not pool.ready(ticket), "one of two verdicts is not all"
    with pytest.raises(RuntimeError, match="closed"):
        pool.result(ticket)


def test_what_an_isolated_item_does_is_its_own(module: Path) -> None:
    with WorkerPool(IsolatedProtocol(f"{module}:Verifier", JudgeOptions(), 0.5, 64), 1) as pool:
        phases, grown, first, second = judged(pool, "two phases", "grows", "random", "random")
        assert phases.status == "matched", "the reference answer and the answer have the whole time each"
        assert phases.decided_by == grown.decided_by != first.decided_by, "a worker that has grown is replaced"
        assert first.reason == second.reason, "no item changes the random numbers of the next"
        lost, trusted, crashed = judged(pool, "is killed", "is distrusted", "crashes")
    assert (lost.outcome, lost.status) == (Outcome.NOT_JUDGED, "worker_lost")
    assert trusted.reason == "False", "an accident says nothing about the reference answer"
    assert (crashed.outcome, crashed.status) == (Outcome.WRONG, "crash")
