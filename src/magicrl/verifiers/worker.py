"""The process in which hostile answers are judged: ``python -m magicrl.verifiers.worker``.

It reads requests on its standard input and answers on a private copy of its standard output. It imports no
torch, keeps its own limits, and leaves when its input ends. `magicrl.verifiers.process` is the other end, for this
kind of worker and for every other that serves through `serve`.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from magicrl.records import Verdict
from magicrl.verifiers.base import JudgeOptions, verifier_spec
from magicrl.verifiers.wire import Decoder, read_blocking, write_blocking

Send = Callable[[dict[str, Any]], None]

MAX_ITEMS = 20_000
"""A worker is replaced after so many items: caches of symbolic libraries only grow."""
_CPU_SLACK_SECONDS = 5


class Desk(Protocol):
    """What a kind of worker does with a request."""

    greeting: dict[str, Any]
    """Said once, when it is ready to serve."""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply; ``retire`` in it asks for this worker to be replaced."""
        ...

    def close(self) -> None:
        """The last request was served."""
        ...


class Refused(Exception):
    """This kind of worker cannot serve on this machine; says why."""


def serve(open_desk: Callable[[dict[str, Any], Send], Desk]) -> None:
    """Read settings and then requests on standard input until it ends or the worker should be replaced."""
    replies = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)  # a library that prints cannot disturb the replies
    requests = Decoder(limit=None)
    hello = read_blocking(0, requests)
    if hello is None:
        return

    def send(message: dict[str, Any]) -> None:
        write_blocking(replies, message)

    try:
        desk = open_desk(hello, send)
    except Refused as refusal:
        send({"ready": False, "reason": str(refusal)})
        return
    send({"ready": True, **desk.greeting})
    os.dup2(sink, 2)  # until here the pool keeps standard error, to tell why a start failed
    with contextlib.closing(desk):
        while (request := read_blocking(0, requests)) is not None:
            reply = {"item": request["item"], **desk.handle(request)}
            send(reply)
            if reply["retire"]:
                return


class _Desk:
    """Holds the verifiers of this worker and turns a request into a reply."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        self._send = send
        self._item = -1
        self._phase = ""
        self._cpu_limit: float = hello["cpu_limit"]
        self._handled = 0
        options = JudgeOptions(reasoning=hello["reasoning"], extract=hello["extract"])
        spec = verifier_spec(hello["verifier"])
        assert spec.isolated is not None, spec.name
        self._verifier = spec.isolated(options, self._progress)
        gold, response = spec.warm_up
        self._verifier.judge([gold], response)
        # resident memory now, not ru_maxrss: that one starts at the size of the parent process
        self._most_resident = psutil.Process().memory_info().rss + hello["memory_limit_mb"] * 2**19
        self.greeting: dict[str, Any] = {}
        _limit_process(hello["memory_limit_mb"])

    def close(self) -> None:
        """Nothing is held open."""

    def _progress(self, phase: str) -> None:
        self._phase = phase
        if self._item >= 0:
            self._send({"item": self._item, "phase": phase})

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        self._item, self._phase = request["item"], ""
        _limit_cpu(self._cpu_limit)
        random.seed(0)  # a verdict must not depend on the items before it
        if request["distrust"]:
            self._verifier.distrust(request["golds"])
        retire = False
        try:
            verdict = self._verifier.judge(request["golds"], request["response"])
            message = _fields(verdict)
        except MemoryError:
            message, retire = self._failed("memory", "the answer needs more memory than its limit"), True
        except RecursionError:
            message = self._failed("unparsable", "the answer is nested too deeply")
        except Exception as error:  # noqa: BLE001 - hostile text may raise anything; it must not end the worker
            message = self._failed("unparsable", f"the verifier raised {type(error).__name__}")
        self._handled += 1
        retire = retire or self._handled >= MAX_ITEMS or psutil.Process().memory_info().rss > self._most_resident
        return {**message, "retire": retire}

    def _failed(self, status: str, reason: str) -> dict[str, Any]:
        if self._phase == "gold":
            status, reason = "gold_unparsable", reason.replace("answer", "gold")
        return {"status": status, "reason": reason, "decided_by": "", "extracted": None}


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "status": verdict.status,
        "reason": verdict.reason,
        "decided_by": verdict.decided_by,
        "extracted": verdict.extracted,
    }


def _limit_process(memory_limit_mb: int) -> None:
    """Address space (Linux): what the warm worker has now plus the limit. No files, no core dumps."""
    if sys.platform == "linux":
        _lower(resource.RLIMIT_AS, psutil.Process().memory_info().vms + memory_limit_mb * 2**20)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit_cpu(seconds: float) -> None:
    """A second net under the pool's own limit: an orphan of a killed run ends by itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + 2 * seconds) + _CPU_SLACK_SECONDS
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    serve(_Desk)
