"""A worker process from both ends: `WorkerProcess` starts, asks and kills it; `main` serves inside it.

Messages are four bytes of length, then JSON in ASCII. Both ends check what arrives: a worker reads text that a model
wrote, so what it sends is data to validate, never something to unpickle. What a worker does with a request is its
`RequestHandler`, named when it is started.

An item is given so many seconds of the worker's own CPU time, so that a busy machine does not change a verdict. A
much longer wall-clock limit catches a worker that was stopped from outside.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

import magicrl
from magicrl.records import Problem

_HEADER = struct.Struct(">Q")
MAX_REPLY_BYTES = 1 << 20


class ProtocolError(Exception):
    """The other side sent something that is no message."""


def encode(message: Mapping[str, Any]) -> bytes:
    """The bytes of one message. ASCII escapes carry lone surrogates and control characters unharmed."""
    body = json.dumps(message, ensure_ascii=True).encode("ascii")
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Cuts a byte stream into messages, whatever the pieces it arrives in."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        """The next whole message, or None.

        Raises:
            ProtocolError: a message over the limit, or not a JSON object.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if self._limit is not None and length > self._limit:
            raise ProtocolError(f"message of {length} bytes, at most {self._limit} are allowed")
        if len(self._buffer) < _HEADER.size + length:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
        del self._buffer[: _HEADER.size + length]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not JSON: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"not an object: {type(message).__name__}")
        return message


def read_blocking(fd: int, decoder: Decoder) -> dict[str, Any] | None:
    """The next message from a blocking descriptor; None at its end."""
    while (message := decoder.next()) is None:
        data = os.read(fd, 1 << 16)
        if not data:
            return None
        decoder.feed(data)
    return message


def write_blocking(fd: int, message: Mapping[str, Any]) -> None:
    """Send one message whole."""
    data = memoryview(encode(message))
    while data:
        data = data[os.write(fd, data) :]


START_SECONDS = 120.0
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
"""Deaths that an answer can bring about by its depth or size; any other signal came from outside."""
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
class Answered:
    """A reply came. Its content is not validated yet."""

    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The item used up a limit: ``kind`` is ``timeout`` or ``crash``, ``phase`` what was being read."""

    kind: str
    phase: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker ended for a reason that is not the item's doing."""

    reason: str


Reply = Answered | Exhausted | Lost


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
        self._decoder = Decoder(MAX_REPLY_BYTES)
        self._retired = False
        self.last_problem: Problem | None = None
        """The problem that the worker was asked about last, so that a worker thread need not send it again."""
        try:
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
            self._send(encode(hello), START_SECONDS)
            return self._receive(START_SECONDS) or {}
        except (OSError, EOFError, ProtocolError):
            return {}

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def usable(self) -> bool:
        return not self._retired and self._child.poll() is None

    def ask(self, request: Mapping[str, Any]) -> Reply:
        """Send one request and wait for its reply. After anything but `Answered` the worker is gone."""
        phase = ""
        end = time.monotonic() + self._stall_limit
        try:
            self._send(encode(request), self._stall_limit)
            start = self._cpu_seconds()
            while True:
                left = self._cpu_limit - (self._cpu_seconds() - start)
                if left <= 0:
                    self.kill()
                    return Exhausted("timeout", phase)
                if time.monotonic() > end:
                    self.kill()
                    return Lost(f"worker did not run for {self._stall_limit:.0f} s of wall-clock time")
                # one thread: its CPU time cannot reach the limit sooner than this
                message = self._receive(max(_MIN_WAIT_SECONDS, min(left, end - time.monotonic())))
                if message is None:
                    continue
                if message.get("item") != request["item"]:
                    self.kill()
                    return Lost("worker answered another item")
                if "phase" not in message:
                    self._retired = message.get("retire") is not False
                    return Answered(message)
                # each phase has the whole limit, so that a slow gold is not the answer's fault
                phase, start = str(message["phase"])[:20], self._cpu_seconds()
        except ProtocolError as error:
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

    def _post_mortem(self, phase: str) -> Reply:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        code = self._child.poll()
        self.kill()
        if code == -signal.SIGXCPU:
            return Exhausted("timeout", phase)
        if code is not None and -code in _CRASHES:
            return Exhausted("crash", phase)
        cause = (
            "closed its pipe" if code is None else f"was killed by signal {-code}" if code < 0 else f"exited ({code})"
        )
        return Lost(f"worker {cause}")

    def _cpu_seconds(self) -> float:
        try:
            times = self._usage.cpu_times()
        except psutil.Error as error:
            raise EOFError from error
        return times.user + times.system

    def _send(self, data: bytes, seconds: float) -> None:
        """Write everything, or raise: a stopped reader must not block the pool for ever."""
        assert self._child.stdin is not None
        fd = self._child.stdin.fileno()
        view, end = memoryview(data), time.monotonic() + seconds
        while view:
            if not _ready(fd, select.POLLOUT, end - time.monotonic()):
                raise EOFError
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view) :]

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None when none came in time. Raises EOFError at the end of the stream."""
        assert self._child.stdout is not None
        fd, end = self._child.stdout.fileno(), time.monotonic() + seconds
        while (message := self._decoder.next()) is None:
            if not _ready(fd, select.POLLIN, end - time.monotonic()):
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                raise EOFError
            self._decoder.feed(data)
        return message


def _ready(fd: int, event: int, seconds: float) -> bool:
    poll = select.poll()  # not select(): descriptors above 1023 are common in long runs
    poll.register(fd, event)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _spawn(handler: str, errors: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter (never a fork: the parent may hold torch's threads) in its own session."""
    root = str(Path(magicrl.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
        "PYTHONHASHSEED": "0",  # sympy orders some terms by hash
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", "from magicrl.verifiers.worker import main; main()", handler],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        start_new_session=True,
        bufsize=0,
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    return child


Send = Callable[[dict[str, Any]], None]


class RequestHandler(Protocol):
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


def main() -> None:
    """In the worker: read settings and then requests on standard input until it ends or the worker should be replaced.

    The handler's ``module:class`` stands on the command line. It is made from the settings and a function that sends
    word of its progress.
    """
    sys.dont_write_bytecode = True
    module, _, name = sys.argv[1].partition(":")
    open_handler: Callable[[dict[str, Any], Send], RequestHandler] = getattr(importlib.import_module(module), name)
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
        handler = open_handler(hello, send)
    except Refused as refusal:
        send({"ready": False, "reason": str(refusal)})
        return
    send({"ready": True, **handler.greeting})
    os.dup2(sink, 2)  # until here the pool keeps standard error, to tell why a start failed
    with contextlib.closing(handler):
        while (request := read_blocking(0, requests)) is not None:
            reply = {"item": request["item"], **handler.handle(request)}
            send(reply)
            if reply["retire"]:
                return
