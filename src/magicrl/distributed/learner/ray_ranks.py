"""Ranks as Ray actors, placed by the caller: a bundle of a placement group each, or any other actor options."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from magicrl.distributed.learner.ranks import Answer, Fault, RankGroup, answered, settled

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
        try:
            group.call("address", [()] * ranks, timeout=timeout, waiting_for="learner ranks to be placed and started")
        except BaseException:
            group.stop()
            raise
        return group


class _RankActor:
    """A ``LearnerRank`` in an actor; torch is imported there, not by whoever makes the handle."""

    def __init__(self, rank: int, numbers: Sequence[str] = (), place: int = 0) -> None:
        from magicrl.distributed.learner.rank import LearnerRank
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
