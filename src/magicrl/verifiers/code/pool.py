"""Many programs, judged beside the caller by worker processes: nothing lost, nothing mixed up, nothing that hangs.

Its own pool beside `verifiers.pool`, since here the processes that use up limits are not the workers but the
programs that they run; `VerifierPool` hands it the problems whose verifier is ``code``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

import magicrl
from magicrl.records import Outcome, Problem
from magicrl.verifiers.base import OUTCOME_OF_STATUS
from magicrl.verifiers.code.host import SandboxError
from magicrl.verifiers.code.judge import CodeOptions, CodeVerdict, code_verdict
from magicrl.verifiers.feeder import Ticket
from magicrl.verifiers.wire import MAX_REPLY_BYTES, Decoder, ProtocolError, encode

_ATTEMPTS = 2
_START_SECONDS = 120.0
_JUDGE_CPU_SECONDS = 60.0
_STALL_FACTOR = 12.0
_STALL_SECONDS = 120.0
_LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Item:
    number: int
    ticket: Ticket
    index: int
    text: str
    program: bool
    tests: str


class CodePool:
    """Judges responses (or bare programs) to code problems in worker processes. Safe to use from several threads.

    A problem's tests are the JSON text in ``golds[0]`` (`suite` has the forms).

    Args:
        options: limits, isolation and where the program stands in a response.
        workers: worker processes, each with its own sandbox.

    Example:
        >>> problem = Problem(id="p", prompt="", golds=('{"inputs": ["2 3"], "outputs": ["5"]}',), verifier="code",
        ...                   source="doc")
        >>> with CodePool() as pool:
        ...     ticket = pool.submit(problem, ["```python\\nprint(sum(map(int, input().split())))\\n```"])
        ...     [verdict.status for verdict in pool.result(ticket)]
        ['passed']
    """

    def __init__(self, options: CodeOptions | None = None, *, workers: int = 1) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._options = options or CodeOptions()
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._feeders = [_Feeder(self._items, settings_of(self._options)) for _ in range(workers)]
        self._started = False
        self._closed = False

    def submit(self, problem: Problem, responses: Sequence[str]) -> Ticket:
        """Queue the responses to one problem and return at once.

        Raises:
            ValueError: the problem has no tests.
            RuntimeError: the pool is closed.
        """
        return self._submit(problem, responses, programs=False)

    def submit_programs(self, problem: Problem, programs: Sequence[str]) -> Ticket:
        """The same for bare programs, from which nothing has to be extracted."""
        return self._submit(problem, programs, programs=True)

    def _submit(self, problem: Problem, texts: Sequence[str], *, programs: bool) -> Ticket:
        if not problem.golds:
            raise ValueError(f"problem {problem.id!r} has no tests; give them as JSON in its first gold")
        ticket = Ticket(problem, len(texts))
        with self._lock:
            if self._closed:
                raise RuntimeError("the code pool is closed")
            self._start()
            for index, text in enumerate(texts):
                self._items.put(_Item(next(self._numbers), ticket, index, text, programs, problem.golds[0]))
        return ticket

    def result(self, ticket: Ticket) -> tuple[CodeVerdict, ...]:
        """The verdicts of ``ticket`` in the order of its texts. Waits until all are there.

        Raises:
            RuntimeError: the pool was closed before they were judged.
            SandboxError: this machine cannot isolate programs; says why.
        """
        verdicts = ticket.wait()
        found = tuple(verdict for verdict in verdicts if isinstance(verdict, CodeVerdict))
        assert len(found) == len(verdicts)
        return found

    def ready(self, ticket: Ticket) -> bool:
        """Whether `result` would return at once."""
        return ticket.done

    def warm_up(self) -> str:
        """Start every worker now and wait for them; returns the tier of isolation in use.

        Raises:
            SandboxError: this machine cannot isolate programs; says why.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the code pool is closed")
            self._start()
        tiers = [feeder.wait_until_started() for feeder in self._feeders]
        return tiers[0]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now, for monitors."""
        return tuple(pid for feeder in self._feeders if (pid := feeder.pid) is not None)

    def close(self) -> None:
        """Kill the workers; tickets that still wait raise. Safe to call twice."""
        with self._lock:
            self._closed = True
            started, self._started = self._started, False
        if not started:
            return
        for feeder in self._feeders:
            feeder.close()
            self._items.put(None)
        for feeder in self._feeders:
            feeder.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for feeder in self._feeders:
                feeder.start()


def settings_of(options: CodeOptions) -> dict[str, Any]:
    """What a worker is told when it starts."""
    return {
        "time_limit": options.limits.cpu_seconds,
        "memory_limit_mb": options.limits.memory_mb,
        "total_seconds": options.total_seconds,
        "stop_at_failure": options.stop_at_failure,
        "tier": options.sandbox.tier,
        "preload": list(options.sandbox.preload),
        "guards_off": list(options.sandbox.guards_off),
        "reasoning": options.judge.reasoning,
    }


class _Feeder:
    """The thread that feeds one worker and replaces it when it is lost."""

    def __init__(self, items: queue.SimpleQueue[_Item | None], settings: Mapping[str, Any]) -> None:
        self._items = items
        self._settings = settings
        self._worker: _Worker | None = None
        self._error: SandboxError | None = None
        self._tier = ""
        self._started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="code-feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def wait_until_started(self) -> str:
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self._tier

    @property
    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.pid

    def close(self) -> None:
        self._closing.set()
        worker = self._worker
        if worker is not None:
            worker.interrupt()

    def _run(self) -> None:
        try:
            self._tier = self._ready().tier
        except SandboxError as error:
            self._error = error
        finally:
            self._started.set()
        while (item := self._items.get()) is not None:
            try:
                self._serve(item)
            except Exception as error:  # noqa: BLE001 - the caller waits for this ticket: hand the error over to it
                item.ticket.fail(error)
        if self._worker is not None:
            self._worker.kill()

    def _serve(self, item: _Item) -> None:
        verdict = code_verdict("infrastructure_error")
        for _ in range(_ATTEMPTS):
            if self._closing.is_set():
                raise RuntimeError("the code pool was closed before all programs were judged")
            start = time.perf_counter()
            verdict = self._ready().ask(item, start)
            if verdict.outcome is not Outcome.NOT_JUDGED or verdict.decided_by == "suite":
                break
            self._drop()
        if self._closing.is_set() and verdict.outcome is Outcome.NOT_JUDGED:
            raise RuntimeError("the code pool was closed before all programs were judged")
        item.ticket.fill(item.index, verdict)

    def _ready(self) -> _Worker:
        if self._worker is None or not self._worker.usable:
            self._drop()
            self._worker = _Worker(self._settings)
        return self._worker

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class _Worker:
    """One worker process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        root = str(Path(magicrl.__file__).resolve().parents[1])
        inherited = os.environ.get("PYTHONPATH")
        self._stall = _STALL_SECONDS + _STALL_FACTOR * (settings["total_seconds"] or 12 * settings["time_limit"])
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "magicrl.verifiers.code.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,
            bufsize=0,
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        self._decoder = Decoder(MAX_REPLY_BYTES)
        self._tests: str | None = None
        self._retired = False
        try:
            self._usage = psutil.Process(self._child.pid)
            self._send(encode(settings), _START_SECONDS)
            hello = self._receive(time.monotonic() + _START_SECONDS)
        except (OSError, EOFError, ProtocolError, psutil.Error):
            hello = None
        if hello is None or hello.get("ready") is not True:
            self.kill()
            raise SandboxError("a code worker did not start" if hello is None else str(hello.get("reason")))
        self.tier = str(hello.get("tier"))

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def usable(self) -> bool:
        return not self._retired and self._child.poll() is None

    def ask(self, item: _Item, start: float) -> CodeVerdict:
        """The verdict on one program; after a lost worker ``infrastructure_error``, and the worker is gone."""
        request: dict[str, Any] = {"item": item.number, "text": item.text, "program": item.program}
        if item.tests != self._tests:
            request["tests"] = item.tests
        try:
            self._send(encode(request), self._stall)
            self._tests = item.tests
            message = self._wait()
        except (OSError, EOFError, ProtocolError, psutil.Error) as error:
            self.kill()
            return code_verdict("infrastructure_error", f"the worker was lost: {error!r}")
        if message is None:
            self.kill()
            return code_verdict("output_limit", "its output could not be compared within the judge's own time")
        self._retired = message.get("retire") is not False
        return _verdict_from(message, item.number, time.perf_counter() - start)

    def _wait(self) -> dict[str, Any] | None:
        """The reply; None when the judge itself used up its CPU time on what the program wrote."""
        end = time.monotonic() + self._stall
        before: float | None = None
        while True:
            message = self._receive(min(end, time.monotonic() + _LOOK_SECONDS))
            if message is not None:
                return message
            times = self._usage.cpu_times()
            used = times.user + times.system
            before = used if before is None else before
            if used - before > _JUDGE_CPU_SECONDS:
                return None
            if time.monotonic() > end:
                raise EOFError("no reply in time")

    def interrupt(self) -> None:
        """Kill the process; a thread that waits for it then finds a lost worker. For other threads."""
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it, and through it its zygotes and what they run."""
        self.interrupt()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, data: bytes, seconds: float) -> None:
        assert self._child.stdin is not None
        fd = self._child.stdin.fileno()
        view, end = memoryview(data), time.monotonic() + seconds
        while view:
            if not _ready(fd, select.POLLOUT, end):
                raise EOFError("the worker does not read")
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view) :]

    def _receive(self, end: float) -> dict[str, Any] | None:
        assert self._child.stdout is not None
        fd = self._child.stdout.fileno()
        while (message := self._decoder.next()) is None:
            if not _ready(fd, select.POLLIN, end):
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                raise EOFError("the worker ended")
            self._decoder.feed(data)
        return message


def _ready(fd: int, event: int, end: float) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))


def _verdict_from(message: Mapping[str, Any], number: int, seconds: float) -> CodeVerdict:
    status, reason = message.get("status"), message.get("reason")
    passed, total = message.get("passed"), message.get("total")
    if (
        message.get("item") != number
        or status not in OUTCOME_OF_STATUS
        or not isinstance(reason, str)
        or not isinstance(passed, int)
        or not isinstance(total, int)
    ):
        return code_verdict("infrastructure_error", "the worker sent a malformed verdict", seconds=seconds)
    decided_by = "suite" if message.get("unusable") is True else "tests"
    return code_verdict(str(status), reason, passed=passed, total=total, seconds=seconds, decided_by=decided_by)
