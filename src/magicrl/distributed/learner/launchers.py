"""Start of the ranks, calls to them, and the reason when one is lost."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from magicrl.config.errors import RecipeError
from magicrl.distributed.learner.rank import LearnerRank
from magicrl.distributed.worker_logs import keep_output, output_hint


class LearnerLost(RuntimeError):
    """Error for a rank that died, failed or did not answer. The next call of `DistributedLearner` starts new ranks.

    Attributes:
        rank: Number of the rank.
        cause: Description of what happened to it.
        mistake: The error as a user's mistake, if the rank reported it as one.
    """

    def __init__(self, rank: int, cause: str, waiting_for: str, mistake: ValueError | None = None) -> None:
        super().__init__(f"learner rank {rank} {cause}, while the run waited for: {waiting_for}")
        self.rank = rank
        self.cause = cause
        self.mistake = mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Reason why a rank returned no value."""

    died: bool  # its process ended; otherwise it raised
    kind: str = ""  # type of the exception
    text: str  # what happened
    key: str | None = None  # key of the recipe, if the mistake is in a recipe

    @property
    def mistake(self) -> ValueError | None:
        """The error to raise if it is a user's mistake, otherwise None."""
        if self.kind != "ValueError":
            return None
        return ValueError(self.text) if self.key is None else RecipeError(self.text, key=self.key)

    @property
    def blame(self) -> tuple[bool, bool, bool]:
        """Sort key with the most informative fault first: a death, a user's mistake, an error that only reports
        another's loss."""
        # Words with which gloo and NCCL report that another rank is gone.
        echo = any(word in self.text for word in ("gloo", "NCCL", "Connection", "closed by peer", "Broken pipe"))
        return not self.died, self.kind != "ValueError", echo


def answer_call(target: object, method: str, arguments: tuple[Any, ...]) -> Any:
    """Call a method in a rank's process and return its value. An exception becomes a ``Fault``."""
    try:
        return getattr(target, method)(*arguments)
    except ValueError as error:
        return Fault(died=False, kind="ValueError", text=str(error), key=getattr(error, "key", None))
    except Exception as error:  # noqa: BLE001 - border of a process: the driver must learn of every error
        name = type(error).__name__
        text = f"{name}: {error}\n" + "".join(traceback.format_exception(error)).rstrip()
        return Fault(died=False, kind=name, text=text)


def collect_values(
    answers: Mapping[int, Any], ranks: int, *, waiting_for: str, seconds: float, files: Sequence[str | None] = ()
) -> list[Any]:
    """Return the values of all answers to a call, or raise the most informative error.

    Args:
        answers: Value or ``Fault`` by rank. A rank without one did not answer.
        ranks: Number of ranks.
        waiting_for: Name of what the run waited for, for the error.
        seconds: Time limit of the call, for the error.
        files: Files with each rank's output, if it is kept.

    Raises:
        LearnerLost: A rank returned no value.
        ValueError: All ranks raised it.
    """
    faults = {rank: answer for rank, answer in answers.items() if isinstance(answer, Fault)}
    if faults:
        rank = min(faults, key=lambda rank: (faults[rank].blame, rank))
        fault = faults[rank]
        mistakes = [fault.mistake for fault in faults.values()]
        # Only if all ranks raised are they at the same place and can continue; otherwise some wait in a collective.
        if len(faults) == ranks and mistakes[0] is not None and None not in mistakes:
            raise mistakes[0]
        cause = fault.text if fault.died else f"failed: {fault.text}"
        raise LearnerLost(rank, cause + output_hint(files[rank] if files else None), waiting_for, fault.mistake)
    for rank in range(ranks):
        if rank not in answers:
            where = output_hint(files[rank] if files else None)
            raise LearnerLost(rank, f"gave no answer in {seconds:g} s{where}", waiting_for)
    return [answers[rank] for rank in range(ranks)]


class RankGroup:
    """Running ranks. A subclass implements how a call is sent and answered.

    Attributes:
        order: Process of each rank, if it differs from the order in which they were started.
        files: File with each process's output; empty if the output is not kept.
    """

    _grace: float  # seconds for the other ranks to answer after the first failure
    order: Sequence[int] | None = None
    files: Sequence[str | None] = ()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float, waiting_for: str) -> list[Any]:
        """Call ``LearnerRank.<method>`` on every rank with its own arguments and return the values in order.

        Raises:
            LearnerLost: A rank died, failed, or did not answer in time.
            ValueError: Every rank raised it. The ranks can continue.
        """
        # Send all calls before any answer is read: a call of one rank may wait for the others.
        order = self.order or range(len(arguments))
        waiting = {self._send(order[rank], method, given): rank for rank, given in enumerate(arguments)}
        answers: dict[int, Any] = {}
        deadline, failed = time.monotonic() + timeout, False
        while waiting and (ready := self._ready(list(waiting), max(0.0, deadline - time.monotonic()))):
            for call in ready:
                rank = waiting.pop(call)
                answers[rank] = found = self._receive(order[rank], call)
                # The others may be waiting for the failed rank. They get little time, but enough to report the same
                # mistake.
                if isinstance(found, Fault) and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + self._grace)
        files = [self.files[order[rank]] for rank in range(len(arguments))] if self.files else ()
        return collect_values(answers, len(arguments), waiting_for=waiting_for, seconds=timeout, files=files)

    def answering(self, ranks: int, timeout: float, to: str) -> RankGroup:
        """Wait until every rank answers and return the group. If one does not, end all of them."""
        try:
            self.call("answers", [()] * ranks, timeout=timeout, waiting_for=f"learner ranks to {to}")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all ranks, whatever they are doing."""
        raise NotImplementedError

    def _send(self, process: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Start a call and return a handle for `_ready`."""
        raise NotImplementedError

    def _ready(self, calls: list[Any], seconds: float) -> Sequence[Any]:
        """Wait for at least one of the calls and return those that have ended; none if the time is over."""
        raise NotImplementedError

    def _receive(self, process: int, call: Any) -> Any:
        """Return the value of a call that has ended, or a ``Fault``."""
        raise NotImplementedError


class Launcher(Protocol):
    """Starts ranks where the caller wants them."""

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """Start ``ranks`` processes, each with a ``LearnerRank``. Raises ``LearnerLost`` if not all start in time."""
        ...


_FETCH_SECONDS = 60.0  # limit for fetching an answer that is ready


class RayLauncher:
    """Starts every rank as a Ray actor. Ray never restarts one, because a restarted rank would have no weights.

    Args:
        options: ``ray.remote`` options of each rank.
        shared: For GPUs that Ray does not assign to the rank itself: function from the rank's number to a reference to
            the numbers of its bundle's GPUs, and its own index among them. Called at every start.
        files: File for each rank's output, in the order of their start. Default: Ray's logs.
    """

    def __init__(
        self,
        options: Sequence[Mapping[str, Any]],
        *,
        shared: Callable[[int], tuple[Any, int]] | None = None,
        files: Sequence[str | None] = (),
    ) -> None:
        self._options, self._shared = list(options), shared
        self._files = files or [None] * len(options)

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """Start ranks; see ``Launcher.start``."""
        shared = [() if self._shared is None else self._shared(rank) for rank in range(ranks)]
        group = RayRanks(self._options, shared, self._files)
        return group.answering(ranks, timeout, "be placed and started")


class _RankActor:
    """``LearnerRank`` in a Ray actor."""

    def __init__(self, file: str | None, numbers: Sequence[str] = (), place: int = 0) -> None:
        import ray

        from magicrl.distributed.runtime import node_network, see_only

        if file is not None:
            keep_output(file)
        see_only(numbers[place : place + 1])
        self._rank = LearnerRank(cast(Any, ray).get_runtime_context().get_node_id(), node_network())

    def answer(self, method: str, *arguments: Any) -> Any:
        return answer_call(self._rank, method, arguments)


class RayRanks(RankGroup):
    """Ray actors."""

    _grace = 10.0  # Ray reports a death within seconds

    def __init__(
        self,
        options: Sequence[Mapping[str, Any]],
        shared: Sequence[tuple[Any, ...]],
        files: Sequence[str | None],
    ) -> None:
        import ray

        self._ray: Any = ray
        self.files = files
        actor: Any = ray.remote(_RankActor)
        common = {"max_restarts": 0, "max_task_retries": 0}
        self.actors: list[Any] = [
            actor.options(**{**given, **common}).remote(file, *gpus)
            for given, gpus, file in zip(options, shared, files, strict=True)
        ]

    def stop(self) -> None:
        for actor in self.actors:
            self._ray.kill(actor, no_restart=True)

    def _send(self, process: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return self.actors[process].answer.remote(method, *arguments)

    def _ready(self, calls: list[Any], seconds: float) -> Sequence[Any]:
        return self._ray.wait(calls, num_returns=1, timeout=seconds)[0]

    def _receive(self, process: int, call: Any) -> Any:
        try:
            return self._ray.get(call, timeout=_FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            lost = "died" if isinstance(error, self._ray.exceptions.RayActorError) else "is lost"
            return Fault(died=True, text=f"{lost}: {' '.join(str(error).split())[:400]}")
