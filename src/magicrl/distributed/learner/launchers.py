"""How the driver starts and calls ranks, wherever they run, and tells what became of a lost one.

``LocalLauncher`` has them as processes of this machine, ``RayLauncher`` as actors that the caller places.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from magicrl.config.errors import RecipeError
from magicrl.distributed.learner.rank import LearnerRank
from magicrl.distributed.learner.sharding import LOCAL_RANK


class LearnerLost(RuntimeError):
    """A rank died, failed or did not answer: the learner's processes are of no more use.

    ``DistributedLearner.rebuild`` starts new ones and brings them to where the lost ones were.

    Attributes:
        rank: which one; None if none can be named.
        cause: what became of it.
        mistake: the error as a user's mistake, where the rank said that it is one.
    """

    def __init__(self, rank: int | None, cause: str, waiting_for: str, mistake: ValueError | None = None) -> None:
        who = "the learner's ranks" if rank is None else f"learner rank {rank}"
        super().__init__(f"{who} {cause}, while the run waited for: {waiting_for}")
        self.rank = rank
        self.cause = cause
        self.mistake = mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Why a rank has no answer.

    Attributes:
        died: its process is gone; otherwise it raised.
        kind: the exception's type, or ``""``.
        text: what happened.
        key: the recipe's key, where it is a recipe's mistake.
    """

    died: bool
    kind: str
    text: str
    key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A rank's answer to a call: a value, or why there is none."""

    value: Any = None
    fault: Fault | None = None


class RankGroup(Protocol):
    """Running ranks."""

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float, waiting_for: str) -> list[Any]:
        """Call ``LearnerRank.<method>`` on every rank with its own arguments; what each gave, in order.

        Raises:
            LearnerLost: a rank died, failed, or did not answer in time.
            ValueError: every rank raised it; the ranks may go on.
        """
        ...

    def stop(self) -> None:
        """End all ranks, whatever they are doing."""
        ...


class Launcher(Protocol):
    """Starts ranks where the caller wants them."""

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """Start ``ranks`` processes, each with a ``LearnerRank``.

        Raises:
            LearnerLost: one could not be placed or started in ``timeout`` seconds.
        """
        ...


def answered(target: object, method: str, arguments: tuple[Any, ...]) -> Answer:
    """Call a method in a rank's process; an exception becomes a ``Fault``."""
    try:
        return Answer(value=getattr(target, method)(*arguments))
    except Exception as error:  # noqa: BLE001 - the border of a worker: whatever it is, the driver must be told
        told = f"{type(error).__name__}: {error}"
        if not isinstance(error, ValueError):
            told += "\n" + "".join(traceback.format_exception(error)).rstrip()
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        text = str(error) if isinstance(error, ValueError) else told
        return Answer(fault=Fault(died=False, kind=kind, text=text, key=getattr(error, "key", None)))


def settled(answers: Sequence[Answer | None], *, waiting_for: str, seconds: float) -> list[Any]:
    """The values of a call's answers, or the error that tells most.

    Args:
        answers: one a rank; None where there was none in time.
        waiting_for: what the call was for.
        seconds: how long was waited.

    Raises:
        LearnerLost: some rank has no value. Named is one that died, before one that raised an error of its own,
            before one whose error may be no more than the loss of another.
        ValueError: all ranks raised it.
    """
    faults = {rank: answer.fault for rank, answer in enumerate(answers) if answer is not None and answer.fault}
    mistakes = [fault for fault in faults.values() if fault.kind == "ValueError"]
    if mistakes and len(mistakes) == len(answers):
        raise _mistake(mistakes[0])
    if faults:
        rank = min(faults, key=lambda r: (not faults[r].died, faults[r].kind != "ValueError", _secondary(faults[r]), r))
        fault = faults[rank]
        cause = fault.text if fault.died else f"failed: {fault.text}"
        raise LearnerLost(rank, cause, waiting_for, _mistake(fault) if fault.kind == "ValueError" else None)
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    if silent:
        raise LearnerLost(silent[0], f"gave no answer in {seconds:g} s", waiting_for)
    return [answer.value for answer in answers if answer is not None]


def _mistake(fault: Fault) -> ValueError:
    return ValueError(fault.text) if fault.key is None else RecipeError(fault.text, key=fault.key)


def _secondary(fault: Fault) -> bool:
    """Whether an error looks like the loss of another rank, as gloo and NCCL tell it."""
    return any(word in fault.text for word in ("gloo", "NCCL", "Connection", "closed by peer", "Broken pipe"))


def _answering(group: RankGroup, ranks: int, timeout: float, to: str) -> RankGroup:
    """The group once every rank answers; none of it is left running where one does not."""
    try:
        group.call("address", [()] * ranks, timeout=timeout, waiting_for=f"learner ranks to {to}")
    except BaseException:
        group.stop()
        raise
    return group


_CHILD = "import sys; from magicrl.distributed.learner.launchers import serve; serve(*map(int, sys.argv[1:3]))"
_STOP_SECONDS = 30.0
"""For the exit status of a process whose pipe is closed."""


class LocalLauncher:
    """Starts ranks as child processes, which end with this one.

    Args:
        grace: seconds that other ranks get to answer after the first one failed.
        environment: further variables of theirs.
    """

    def __init__(self, *, grace: float = 3.0, environment: dict[str, str] | None = None) -> None:
        self._grace = grace
        self._environment = environment or {}

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """See ``Launcher.start``."""
        return _answering(LocalRanks(ranks, self._grace, self._environment), ranks, timeout, "start")


class LocalRanks:
    """Child processes with a pipe each; see ``RankGroup``."""

    def __init__(self, ranks: int, grace: float, environment: dict[str, str]) -> None:
        self._grace = grace
        self._pipes: list[Connection[Any, Any]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            ours, theirs = Pipe()
            self._pipes.append(ours)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _CHILD, str(theirs.fileno()), str(rank)],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, LOCAL_RANK: str(rank), **environment},
                )
            )
            theirs.close()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float, waiting_for: str) -> list[Any]:
        """See ``RankGroup.call``."""
        answers: list[Answer | None] = [None] * len(self._pipes)
        for rank, (pipe, given) in enumerate(zip(self._pipes, arguments, strict=True)):
            try:
                pipe.send((method, given))
            except OSError:
                answers[rank] = self._death(rank)
        self._collect(answers, time.monotonic() + timeout)
        return settled(answers, waiting_for=waiting_for, seconds=timeout)

    def _collect(self, answers: list[Answer | None], deadline: float) -> None:
        """Fill ``answers`` until all are there, the time is over, or the grace after a first failure is."""
        failed = any(answer is not None for answer in answers)
        while None in answers:
            if failed:
                deadline = min(deadline, time.monotonic() + self._grace)
                failed = False
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if answers[rank] is None]
            ready = cast("list[Connection[Any, Any]]", wait(open_pipes, max(0.0, deadline - time.monotonic())))
            if not ready:
                return
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    found = cast(Answer, pipe.recv())
                except (EOFError, OSError):
                    found = self._death(rank)
                answers[rank] = found
                failed = failed or found.fault is not None

    def _death(self, rank: int) -> Answer:
        try:
            code = self.processes[rank].wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return Answer(fault=Fault(died=True, kind="", text="closed its connection"))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return Answer(fault=Fault(died=True, kind="", text=how))

    def stop(self) -> None:
        """See ``RankGroup.stop``."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank ends by itself
        for process in self.processes:
            process.kill()
            process.wait()


_FETCH_SECONDS = 60.0
"""For an answer that is there."""


class RayLauncher:
    """Starts every rank as an actor of a running Ray.

    Args:
        options: ``ray.remote`` options of each rank by its number (``num_gpus``, ``num_cpus``,
            ``scheduling_strategy``, ``runtime_env``); as many as there are ranks. A rank is never restarted by Ray:
            alone it would have no weights.
        shared: of GPUs that Ray does not give the rank itself: from its number to (a reference to the numbers of its
            bundle's GPUs, its own place among them); asked at every start.
        grace: seconds that other ranks get to answer after the first one failed.
    """

    def __init__(
        self,
        options: Sequence[Mapping[str, Any]],
        *,
        shared: Callable[[int], tuple[Any, int]] | None = None,
        grace: float = 3.0,
    ) -> None:
        self._options = list(options)
        self._shared = shared
        self._grace = grace

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """See ``Launcher.start``."""
        if len(self._options) < ranks:
            raise ValueError(f"{ranks} learner ranks need as many placements, got {len(self._options)}")
        shared = [() if self._shared is None else self._shared(rank) for rank in range(ranks)]
        group = RayRanks(self._options[:ranks], shared, self._grace)
        return _answering(group, ranks, timeout, "be placed and started")


class _RankActor:
    """A ``LearnerRank`` in an actor."""

    def __init__(self, rank: int, numbers: Sequence[str] = (), place: int = 0) -> None:
        from magicrl.distributed.runtime import see_only

        see_only(numbers[place : place + 1])
        self._rank = LearnerRank(rank)

    def answer(self, method: str, *arguments: Any) -> Answer:
        return answered(self._rank, method, arguments)


class RayRanks:
    """Actors; see ``RankGroup``."""

    def __init__(self, options: Sequence[Mapping[str, Any]], shared: Sequence[tuple[Any, ...]], grace: float) -> None:
        import ray

        self._ray: Any = ray
        self._grace = grace
        actor: Any = ray.remote(_RankActor)
        common = {"max_restarts": 0, "max_task_retries": 0}
        self.actors: list[Any] = [
            actor.options(**{**given, **common}).remote(rank, *gpus)
            for rank, (given, gpus) in enumerate(zip(options, shared, strict=True))
        ]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float, waiting_for: str) -> list[Any]:
        """See ``RankGroup.call``."""
        pairs = zip(self.actors, arguments, strict=True)
        references = [actor.answer.remote(method, *given) for actor, given in pairs]
        answers: list[Answer | None] = [None] * len(references)
        deadline = time.monotonic() + timeout
        failed = False
        while None in answers:
            waiting = [reference for i, reference in enumerate(references) if answers[i] is None]
            left = max(0.0, deadline - time.monotonic())
            ready, _ = self._ray.wait(waiting, num_returns=1, timeout=left)
            if not ready:
                break
            answer = self._answer(ready[0])
            answers[references.index(ready[0])] = answer
            if answer.fault is not None and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + self._grace)
        return settled(answers, waiting_for=waiting_for, seconds=timeout)

    def _answer(self, reference: Any) -> Answer:
        try:
            return self._ray.get(reference, timeout=_FETCH_SECONDS)
        except self._ray.exceptions.RayActorError as error:
            reason = " ".join(str(error).split())
            return Answer(fault=Fault(died=True, kind="", text=f"died: {reason[:400]}"))
        except self._ray.exceptions.RayError as error:
            return Answer(fault=Fault(died=True, kind="", text=f"is lost: {type(error).__name__}: {error}"))

    def stop(self) -> None:
        """See ``RankGroup.stop``."""
        for actor in self.actors:
            self._ray.kill(actor, no_restart=True)


def serve(descriptor: int, rank: int) -> None:
    """In a rank's process: answer calls until the driver closes the pipe or is gone."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    target = LearnerRank(rank)
    while True:
        try:
            method, arguments = pipe.recv()
            pipe.send(answered(target, method, arguments))
        except (EOFError, OSError):
            return
