"""The seam between the loop and whatever generates: in-process, replayed, vLLM, a pool of replicas.

What an engine does once it has new weights: show that it samples with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from magicrl.records import FinishedSample, RolloutGroup, RolloutRequest


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates groups of completions.

    Synchronous use is: ``submit`` everything, then drain ``finished``. Two engines given the same
    weights, requests and seed produce the same tokens: a random number depends on (run seed, draw,
    sample, position) alone, and the schedule on requests and tokens alone, never on time.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now; -1 before the first ``load_weights``."""
        ...

    @property
    def max_context(self) -> int:
        """Largest prompt + response length in tokens that the engine can serve."""
        ...

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests. Order matters: rows are filled in the order given.

        Raises:
            ValueError: a prompt plus ``max_tokens`` exceeds ``max_context`` (names the problem).
        """
        ...

    def finished(self) -> Iterator[RolloutGroup]:
        """Run until nothing is queued, yielding each group as its last member ends.

        Groups come in the order they finish; the caller puts them back in draw order. It may stop iterating and ask
        again later: what is unfinished stays in flight, and what has ended meanwhile is yielded first.
        """
        ...

    def finished_samples(self) -> Iterator[FinishedSample]:
        """As ``finished``, but each completion as it ends: for what is kept to the single sample."""
        ...

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights (HF parameter names to tensors) and set ``policy_version``.

        An `InFlightEngine` may be given them while responses are under way.
        """
        ...

    def interrupt(self) -> list[RolloutRequest]:
        """Stop generating, drop partial work and return the unfinished requests in issue order."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Safe to call twice."""
        ...


class WeightGiver(Protocol):
    """A learner, as engines see it."""

    @property
    def version(self) -> int:
        """Updates made."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The present weights; see `RolloutEngine.load_weights`."""
        ...


@runtime_checkable
class TakingEngine(RolloutEngine, Protocol):
    """An engine that takes weights from where they lie, so that the caller need not gather them."""

    def take_weights(self, giver: WeightGiver) -> None:
        """As ``load_weights`` with the giver's weights and version."""
        ...


def hand_over(giver: WeightGiver, engine: RolloutEngine) -> None:
    """Have ``engine`` sample with the giver's present weights from now on."""
    if isinstance(engine, TakingEngine):
        engine.take_weights(giver)
    else:
        engine.load_weights(giver.weights(), giver.version)


@runtime_checkable
class SleepingEngine(RolloutEngine, Protocol):
    """An engine that can lend the learner its GPUs: between rollouts and ``load_weights`` it holds no memory there."""

    def sleep(self) -> None:
        """Give weights and cache back until the next ``load_weights``; before it nothing may be submitted.

        An engine that has its GPUs for itself gives nothing back.

        Raises:
            RuntimeError: requests are in flight.
        """
        ...


@runtime_checkable
class InFlightEngine(RolloutEngine, Protocol):
    """An engine whose work may stay under way over weight updates, evaluations and restarts: asynchronous mode.

    ``load_weights`` between two tokens of a response: the keys and values that it has are kept, and it goes on under
    the new weights. Its completion then has ``version_spans``, and each token's log-prob is of the weights that
    sampled it.
    """

    def advance(self, tokens: int) -> list[RolloutGroup]:
        """What the engine does while the learner works; the groups that have ended by now, not yielded before.

        An engine that shares the learner's process generates until ``tokens`` more are sampled (0: it only tells), so
        that what it does depends on tokens and not on time. One with workers of its own never stands still: it
        ignores ``tokens`` and tells what has arrived.
        """
        ...

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """Stop generating and return the unfinished requests in issue order, ended groups not yet yielded among them.

        Args:
            keep: with what there is of their responses (``RolloutRequest.begun``), so that submitting them again, here
                or to another engine, goes on after the last token of each: the cache is computed anew under the
                weights of that time, tokens and log-probs stay. Without it partial work is dropped.
        """
        ...

    def set_aside(self) -> AbstractContextManager[None]:
        """Within it the engine is as if nothing were in flight, and serves the newest weights: for evaluations.

        What is in flight is not yielded meanwhile. It stands still, or goes on where no weights are loaded within.
        """
        ...

    def busy_seconds(self) -> float:
        """Seconds spent generating since the engine was made (of replicas: their mean)."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """What is in flight, as tensors and JSON values by name, for the checkpoint.

        Whatever a checkpoint should not hold (another machine's caches) may be left out: see ``resume``.
        """
        ...

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Inverse of ``snapshot``, called on an idle engine after ``load_weights``.

        Args:
            snapshot: what ``snapshot`` gave.
            requests: every request that was in flight, in issue order. Those that the snapshot does not hold are
                generated from their beginning: none is ever lost.
        """
        ...


@runtime_checkable
class SteppingEngine(InFlightEngine, Protocol):
    """An engine of this process that works in turns, between which it can be given work and weights."""

    def turn(self) -> list[FinishedSample]:
        """One token for every response that has a row; the samples that have ended, each told once.

        With nothing queued it does nothing. Whoever uses it does not use the iterators beside it.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """An engine whose next tokens depend on more than its last ``load_weights`` (lagged weights, for one)."""

    def state(self) -> Mapping[str, Any]:
        """Tensors and JSON scalars by name, for the checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; called after ``load_weights``."""
        ...


class WeightCheck(Protocol):
    """Compares what an engine reports after ``load_weights`` with what the learner computes for the same tokens.

    An engine that was made with one answers ``requests`` each time and hands the answers to ``compare`` before it
    serves anything else.
    """

    @property
    def requests(self) -> Sequence[RolloutRequest]:
        """A few short requests, the same every time."""
        ...

    def compare(self, answers: Mapping[str, Sequence[RolloutGroup]], version: int) -> None:
        """
        Args:
            answers: groups of ``requests`` in their order, by the name of the engine or replica that made them.
            version: of the weights that were loaded.

        Raises:
            RuntimeError: an engine samples with other weights than the learner's.
        """
        ...
