"""Worker processes and the pool that judges items in them: nothing is lost, nothing is mixed up, nothing hangs.

The caller submits a problem's responses and continues. One small thread per worker process gives the worker one item at
a time. A worker that an item exhausts is killed and the item is wrong. A worker that dies for another reason is
replaced and the item is tried once more. Each verifier has its own `WorkerPool`; its `WorkerProtocol` says how an item
is sent, what a reply means and who is to blame when an item ends badly. In the worker, a `RequestHandler` answers.

Messages are lines of JSON in ASCII, whose escapes carry lone surrogates. A worker reads text that a model wrote, so
what it sends is validated and never unpickled. The limit of an item is CPU time of its worker, so that a busy machine
does not change a verdict. A much longer wall-clock limit catches a worker that was stopped from outside.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil
from pydantic import TypeAdapter

import magicrl_verifiers
from magicrl_verifiers.records import MAX_EXTRACTED, OUTCOME_OF_STATUS, Outcome, Problem, Verdict, make_verdict

MAX_REPLY_BYTES = 1 << 20
START_SECONDS = 120.0
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
"""Signals that an answer can cause by its depth or size; any other signal came from outside."""
_MIN_WAIT_SECONDS = 0.01


class WorkerStartError(RuntimeError):
    """A worker process could not be started; says what it wrote on standard error."""


class WorkerRefusal(WorkerStartError):
    """A worker started and said why it cannot serve on this machine; another try would say the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """How one kind of worker is started, and what an item may use of it.

    Attributes:
        handler: its `RequestHandler`, as ``module:class``.
        hello: its settings, sent once.
        cpu_limit: seconds of the worker's own CPU time for one item (or one phase of it).
        stall_limit: wall-clock seconds after which a worker that says nothing was stopped from outside.
    """

    handler: str
    hello: Mapping[str, Any]
    cpu_limit: float
    stall_limit: float


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The item used up a limit: ``kind`` is ``timeout`` or ``crash``, ``phase`` what was being read."""

    kind: str
    phase: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker ended for a reason that is not the item's doing; ``stalled``: it said nothing for too long."""

    reason: str
    stalled: bool = False


class WorkerProcess:
    """A warm worker. One thread at a time may ``ask``; any thread may ``kill``."""

    def __init__(self, plan: WorkerPlan) -> None:
        """Start and warm up; returns when the worker is ready.

        Raises:
            WorkerStartError: the process ended or said nothing within `START_SECONDS`.
            WorkerRefusal: it cannot serve on this machine.
        """
        self._cpu_limit = plan.cpu_limit
        self._stall_limit = plan.stall_limit
        self._unread = b""
        self._retired = False
        self.last_problem: Problem | None = None
        """Problem of the last request, which need not be sent again."""
        try:
            # a file: nobody reads while the worker warms up, and a full pipe would block it
            with tempfile.TemporaryFile() as errors:
                self._child = _spawn(plan.handler, errors.fileno())
                self._usage = psutil.Process(self._child.pid)
                self.greeting = self._greet(plan.hello)
                if self.greeting.get("ready") is not True:
                    self.kill()
                    errors.seek(0)
                    said = errors.read()[-2000:].decode("utf-8", "replace").strip()
                    if "reason" in self.greeting:
                        raise WorkerRefusal(str(self.greeting["reason"]))
                    raise WorkerStartError(f"verifier worker did not start: {said or 'no output'}")
        except (OSError, psutil.Error) as error:
            raise WorkerStartError(f"verifier worker did not start: {error}") from error

    def _greet(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._send(hello, START_SECONDS)
            return self._receive(START_SECONDS) or {}
        except (OSError, EOFError, ValueError, RecursionError):
            return {}

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def usable(self) -> bool:
        return not self._retired and self._child.poll() is None

    def ask(self, request: Mapping[str, Any], stall_limit: float = 0.0) -> dict[str, Any] | Exhausted | Lost:
        """Send one request and wait for its reply, whose content is not validated; without one the worker is gone.

        Args:
            request: The request.
            stall_limit: Seconds of the plan's ``stall_limit`` if this request needs more.
        """
        phase = ""
        stall_limit = max(stall_limit, self._stall_limit)
        end = time.monotonic() + stall_limit
        try:
            self._send(request, stall_limit)
            # the worker is warm and has used CPU time before: what counts begins here
            start = self._cpu_seconds()
            while True:
                left = self._cpu_limit - (self._cpu_seconds() - start)
                if left <= 0:
                    self.kill()
                    return Exhausted("timeout", phase)
                if time.monotonic() > end:
                    self.kill()
                    return Lost(f"worker did not run for {stall_limit:.0f} s of wall-clock time", stalled=True)
                # one thread: its CPU time cannot reach the limit sooner than this
                message = self._receive(max(_MIN_WAIT_SECONDS, min(left, end - time.monotonic())))
                if message is None:
                    continue
                # a reply to another item would be a verdict on the wrong answer
                if message.get("item") != request["item"]:
                    self.kill()
                    return Lost("worker answered another item")
                if "phase" not in message:
                    # a worker must say that it can continue; otherwise it is replaced
                    self._retired = self._retired or message.get("retire") is not False
                    return message
                # each phase has the whole limit, so that a slow reference answer is not the answer's fault
                phase, start = str(message["phase"])[:20], self._cpu_seconds()
        except (ValueError, RecursionError) as error:
            self.kill()
            return Lost(f"worker sent no valid message: {error}")
        except (OSError, EOFError):
            return self._post_mortem(phase)

    def interrupt(self) -> None:
        """Kill the process group; a thread inside ``ask`` then finds a lost worker. For other threads."""
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the worker and everything it started, now, and free its pipes."""
        self.interrupt()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _post_mortem(self, phase: str) -> Exhausted | Lost:
        # the end of the pipe is seen a moment before the end of the process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        code = self._child.poll()
        self.kill()
        # only a signal can be the item's doing (`_CRASHES`); an exit is the worker's
        if code is None or code >= 0:
            return Lost("worker closed its pipe" if code is None else f"worker exited ({code})")
        # the kernel's limit, a second net under the pool's own (`isolated.limit_cpu`)
        if -code == signal.SIGXCPU:
            return Exhausted("timeout", phase)
        return Exhausted("crash", phase) if -code in _CRASHES else Lost(f"worker ended by signal {-code}")

    def _cpu_seconds(self) -> float:
        try:
            times = self._usage.cpu_times()
        except psutil.Error as error:
            raise EOFError from error
        return times.user + times.system

    def _send(self, message: Mapping[str, Any], seconds: float) -> None:
        """Write everything, or raise: a stopped reader must not block the pool for ever."""
        assert self._child.stdin is not None
        fd = self._child.stdin.fileno()
        view, end = memoryview(_line(message)), time.monotonic() + seconds
        while view:
            if not _ready(fd, select.POLLOUT, end - time.monotonic()):
                raise EOFError
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view) :]

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message, or None when none came in time. Raises EOFError at the end of the stream."""
        assert self._child.stdout is not None
        fd, end = self._child.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_REPLY_BYTES:
                raise ValueError(f"more than {MAX_REPLY_BYTES} bytes")
            if not _ready(fd, select.POLLIN, end - time.monotonic()):
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                raise EOFError
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not an object: {type(message).__name__}")
        return message


_STARTS = 3
"""A worker may be killed from outside while it warms up; a broken installation fails every time."""


class WorkerSlot:
    """A place for one worker at a time, which is replaced when it is gone. One thread uses it.

    Args:
        plan: how its workers are started.
        closing: no worker is started again once it is set.
    """

    def __init__(self, plan: WorkerPlan, closing: threading.Event) -> None:
        self._plan, self._closing = plan, closing
        self.worker: WorkerProcess | None = None

    def ready(self) -> WorkerProcess:
        """Return the worker, a new one where the last is used up.

        Raises:
            WorkerStartError: as of `WorkerProcess`, after three tries.
        """
        for attempt in range(_STARTS):
            if self.worker is not None and self.worker.usable:
                break
            self.drop()
            try:
                self.worker = WorkerProcess(self._plan)
            except WorkerStartError as error:
                if isinstance(error, WorkerRefusal) or self._closing.is_set() or attempt == _STARTS - 1:
                    raise
        assert self.worker is not None
        return self.worker

    def drop(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def _ready(fd: int, event: int, seconds: float) -> bool:
    poll = select.poll()  # not select(): descriptors above 1023 are common in long runs
    poll.register(fd, event)
    # milliseconds are a C int: a stall limit of ten days overflows it
    return bool(poll.poll(min(max(0.0, seconds), 1e6) * 1000))


def _spawn(handler: str, errors: int) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter in its own session; never fork, since the parent may hold torch's threads."""
    # the folders from which this process has the package and the handler's own, installed or not
    packages = [magicrl_verifiers, sys.modules.get(handler.partition(".")[0])]
    roots = [str(Path(one.__file__).resolve().parents[1]) for one in packages if one is not None and one.__file__]
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*roots, *([inherited] if inherited else [])])),
        "PYTHONHASHSEED": "0",  # sympy orders some terms by hash
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    child = subprocess.Popen(
        # -P: a user's file in the current folder, say json.py, must not be imported in place of the module
        [sys.executable, "-P", "-c", "from magicrl_verifiers.workers import serve_requests; serve_requests()", handler],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        # a separate group: `killpg` reaches all that it starts, and Ctrl-C at the terminal does not
        start_new_session=True,
        bufsize=0,
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    return child


Send = Callable[[Mapping[str, Any]], None]


class RequestHandler(ABC):
    """Handler of the requests of a worker; made from settings and a function that sends progress.

    Attributes:
        greeting: said once, when it is ready to serve.
    """

    greeting: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply; ``retire`` in it makes the pool replace this worker."""

    def close(self) -> None:  # noqa: B027 - most kinds hold nothing open
        """Release what the handler holds, after the last request."""


class Refused(Exception):
    """This kind of worker cannot serve on this machine; says why."""


def serve_requests() -> None:
    """In the worker: read settings and then requests on standard input until it ends or the worker should be replaced.

    The handler's ``module:class`` is the argument on the command line.
    """
    sys.dont_write_bytecode = True
    module, _, name = sys.argv[1].partition(":")
    open_handler: Callable[[dict[str, Any], Send], RequestHandler] = getattr(importlib.import_module(module), name)
    replies = open(os.dup(1), "wb")  # noqa: SIM115 - open until the process ends
    requests = open(os.dup(0), "rb")  # noqa: SIM115
    sink = os.open(os.devnull, os.O_RDWR)
    # a library that prints, or a program of a reward that reads, cannot disturb the messages
    os.dup2(sink, 0)
    os.dup2(sink, 1)

    def send(message: Mapping[str, Any]) -> None:
        replies.write(_line(message))
        replies.flush()

    with requests:
        hello = requests.readline()
        if not hello:
            return
        try:
            handler = open_handler(json.loads(hello), send)
        except Refused as refusal:
            send({"ready": False, "reason": str(refusal)})
            return
        send({"ready": True, **handler.greeting})
        os.dup2(sink, 2)  # until here the pool keeps standard error for the message about a failed start
        with contextlib.closing(handler):
            for line in requests:
                request = json.loads(line)
                reply = {"item": request["item"], **handler.handle(request)}
                send(reply)
                if reply["retire"]:
                    return


# --- The pool ---------------------------------------------------------------------------------------------------------


class Closing(ABC):
    """Base of what holds processes until it is closed."""

    @abstractmethod
    def close(self) -> None:
        """End what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


ATTEMPTS = 2
"""Tries of an item whose worker was lost."""
_CLOSED = "the verifier pool was closed before all answers were judged"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One submitted problem; its verdicts come in parts, which together are in the order of the responses."""

    problem: Problem
    parts: Sequence[Future[list[Verdict]]]

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(part.done() for part in self.parts)

    def wait(self) -> tuple[Verdict, ...]:
        """Wait for every verdict, in the order of the responses."""
        try:
            return tuple(verdict for part in self.parts for verdict in part.result())
        except CancelledError as error:
            raise RuntimeError(_CLOSED) from error


@dataclass(frozen=True, slots=True)
class Item:
    """One response on its way to a worker. ``bare``: it is the answer itself, nothing has to be extracted."""

    number: int
    problem: Problem
    text: str
    bare: bool
    judged: Future[list[Verdict]] = field(default_factory=Future[list[Verdict]])


class WorkerProtocol(ABC):
    """How items of one verifier are judged in worker processes. Used by several threads.

    Attributes:
        plan: how its workers are started.
        verdicts: the form of the ``verdict`` in a worker's reply.
        own_words: its statuses may be others than those of `OUTCOME_OF_STATUS`.
    """

    plan: WorkerPlan
    verdicts: TypeAdapter[Any] = TypeAdapter(Verdict)
    own_words: bool = False

    @abstractmethod
    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        """Return the item as its worker reads it. ``repeat``: the last request of the worker had the same problem."""

    def read(self, item: Item, message: Mapping[str, Any], seconds: float) -> Verdict:
        """Return the verdict of a reply; a malformed reply counts as a lost worker."""
        try:
            verdict: Verdict = self.verdicts.validate_python(message.get("verdict"))
            if self.own_words:
                return verdict
            # a worker reads hostile text: a status that does not go with its outcome is none of ours
            known = OUTCOME_OF_STATUS.get(verdict.status) is verdict.outcome
            if known and len(verdict.extracted or "") <= MAX_EXTRACTED + 3:
                return verdict
        except ValueError:
            pass
        return self.lost("the worker sent a malformed verdict", seconds)

    @abstractmethod
    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> Verdict:
        """Return the verdict on an item that used up its worker."""

    def stall_limit(self, item: Item) -> float:
        """Return the wall-clock seconds after which the worker of this item was stopped, if more than the plan's."""
        return 0.0

    def lost(self, reason: str, seconds: float = 0.0) -> Verdict:
        """Return the verdict on an item whose worker ended through no fault of the item's."""
        return make_verdict("worker_lost", reason=reason, seconds=seconds)

    def final(self, item: Item, verdict: Verdict) -> bool:
        """Return whether a verdict that judges nothing would be the same in a fresh worker."""
        return False

    def give_up(self, item: Item, verdict: Verdict) -> None:  # noqa: B027 - most kinds remember nothing
        """Note that every attempt failed, the last one with ``verdict``."""


class WorkerThread:
    """Takes items from the common queue and judges them in its own worker, which it replaces when needed."""

    def __init__(
        self, items: queue.SimpleQueue[Item | None], protocol: WorkerProtocol, closing: threading.Event
    ) -> None:
        self._items, self._protocol, self._closing = items, protocol, closing
        self._slot = WorkerSlot(protocol.plan, closing)
        self.greeting: Future[Mapping[str, Any]] = Future()
        """Greeting of its first worker, or the error that prevented one."""
        self.thread = threading.Thread(target=self._run, name="verifier-worker", daemon=True)

    @property
    def worker(self) -> WorkerProcess | None:
        """The one that lives now."""
        return self._slot.worker

    def _run(self) -> None:
        try:
            self.greeting.set_result(self._slot.ready().greeting)
        except Exception as error:  # noqa: BLE001 - it is raised where the first worker is awaited
            self.greeting.set_exception(error)
        while (item := self._items.get()) is not None:
            try:
                item.judged.set_result([self._serve(item)])
            except Exception as error:  # noqa: BLE001 - the caller waits for this item: hand the error over to it
                item.judged.set_exception(error)
        self._slot.drop()

    def _serve(self, item: Item) -> Verdict:
        verdict = self._protocol.lost("not tried")
        for _ in range(ATTEMPTS):
            if self._closing.is_set():
                break
            verdict = self._attempt(item)
            if verdict.outcome is not Outcome.NOT_JUDGED or self._protocol.final(item, verdict):
                return verdict
            self._slot.drop()  # the second try gets a fresh one
        if self._closing.is_set():
            # a pool that closes hands over no verdict: the item would count as not judged though nobody tried
            raise RuntimeError(_CLOSED)
        self._protocol.give_up(item, verdict)
        return verdict

    def _attempt(self, item: Item) -> Verdict:
        try:
            worker = self._slot.ready()
        # no item's doing, and the next worker would say the same: the caller has to hear it
        except WorkerRefusal:
            raise
        except WorkerStartError as error:
            return self._protocol.lost(str(error))
        # by identity: no comparison of long texts for every item
        request = self._protocol.request(item, repeat=worker.last_problem is item.problem)
        start = time.perf_counter()
        outcome = worker.ask({"item": item.number, **request}, self._protocol.stall_limit(item))
        seconds = time.perf_counter() - start
        if isinstance(outcome, Exhausted):
            return self._protocol.exhausted(item, outcome, seconds)
        if isinstance(outcome, Lost):
            return self._protocol.lost(outcome.reason, seconds)
        worker.last_problem = item.problem
        return self._protocol.read(item, outcome, seconds)


class JudgingPool(Closing):
    """Base of pools that hand out tickets."""

    def result(self, ticket: Ticket) -> tuple[Verdict, ...]:
        """Return the verdicts of ``ticket`` in the order of its responses. Waits until all are there.

        Raises:
            RuntimeError: the pool was closed before they were judged.
            WorkerRefusal: the verifier cannot serve on this machine; says why.
        """
        return ticket.wait()

    def ready(self, ticket: Ticket) -> bool:
        """Return whether `result` would return at once."""
        return ticket.done


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
# before any thread of the child can use one
os.register_at_fork(after_in_child=lambda: [pool.renew() for pool in list(_POOLS)])


class WorkerPool(JudgingPool):
    """Judges items of one verifier in worker processes, one small thread a worker. Safe to use from several threads.

    Workers start with the first item. Any number of items may wait: they lie in this process.

    Args:
        protocol: how a worker is started and asked.
        workers: worker processes.
    """

    def __init__(self, protocol: WorkerProtocol, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._protocol, self._workers = protocol, workers
        self._numbers = itertools.count()
        self.renew()
        _POOLS.add(self)

    def renew(self) -> None:
        """Forget threads and workers, which in a forked process are those of its parent."""
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads = [WorkerThread(self._items, self._protocol, self._closing) for _ in range(self._workers)]
        self._started = False

    def submit(self, problem: Problem, responses: Sequence[str], *, bare: bool = False) -> Ticket:
        """Queue the responses to one problem (``bare``: the answers themselves) and return at once.

        Raises:
            RuntimeError: the pool is closed.
        """
        with self._lock:
            self._start()
            # under the lock, so that none comes after the sentinels that `close` puts: its ticket would wait for ever
            items = [Item(next(self._numbers), problem, response, bare) for response in responses]
            for item in items:
                self._items.put(item)
        return Ticket(problem, [item.judged for item in items])

    def warm(self) -> list[Mapping[str, Any]]:
        """Start every worker now and wait for them; returns what each said.

        Raises:
            WorkerStartError: a worker could not be started (with what it wrote on standard error).
        """
        with self._lock:
            self._start()
        return [thread.greeting.result() for thread in self._threads]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now, for monitors."""
        workers = [thread.worker for thread in self._threads]
        return tuple(worker.pid for worker in workers if worker is not None)

    def close(self) -> None:
        """Kill the workers; tickets that still wait raise. Safe to call twice."""
        with self._lock:
            self._closing.set()
            started, self._started = self._started, False
        if not started:
            return
        for thread in self._threads:
            # its thread may wait in `ask`; it finds a lost worker and sees that the pool closes
            if (worker := thread.worker) is not None:
                worker.interrupt()
            self._items.put(None)
        for thread in self._threads:
            thread.thread.join()

    def _start(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("the verifier pool is closed")
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.thread.start()
