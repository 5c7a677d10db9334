"""The engine: what the loop asks of whatever generates, and what an engine declares that it can do.

An engine of your own is a subclass of `RolloutEngine` with `generate`, `load_weights` and ``max_context``
(``examples/engine.py``). One that schedules many requests at once is a `magicrl.rollout.requests.SchedulingEngine`;
what else it overrides it declares in `capabilities`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from magicrl.records import Completion, FinishedSample, RolloutGroup, RolloutRequest


class Learner(Protocol):
    """A learner, as engines see it."""

    @property
    def version(self) -> int:
        """Updates made."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The present weights; see `RolloutEngine.load_weights`."""
        ...

    def adapters(self) -> Mapping[str, Any]:
        """The LoRA adapters alone, for engines with ``capabilities.adapters``."""
        ...


class WeightCheck(Protocol):
    """Compares what an engine reports after ``load_weights`` with what the learner computes for the same tokens.

    An engine that was made with one answers ``requests`` each time and gives the answers to ``compare``.
    """

    @property
    def requests(self) -> Sequence[RolloutRequest]:
        """A few short requests, the same every time."""
        ...

    def compare(self, answers: Mapping[str, Sequence[RolloutGroup]], version: int) -> None:
        """Raise ``RuntimeError`` if an engine samples with other weights than the learner's of ``version``.

        ``answers`` are groups of ``requests`` in their order, by the name of the engine or replica that made them.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine can do beside generating. A run that needs more is refused before it starts.

    Attributes:
        in_flight: work may stay under way over weight updates, evaluations and restarts; asynchronous mode needs it:
            `advance`, `newest_weights`, `busy_seconds`, `snapshot`, `resume` and ``interrupt(keep=True)``, and for
            episodes `advance_samples` and `sampled_tokens`. Weights
            loaded between two tokens of a response leave its keys and values as they are; it goes on under the new
            ones, its completion has ``version_spans``, and each token's log-prob is of the weights that sampled it.
    """

    weights: bool = True  # it samples with the weights that `RolloutEngine.load_weights` gives it. Training needs it
    turns: bool = (
        True  # a prompt may end in tokens of the response: the next turn of an episode (`RolloutRequest.offset`)
    )
    logprobs: bool = True  # completions have log-probs of the distribution that was sampled from. Training needs it
    entropies: bool = False  # completions have the entropies of those distributions
    experts: bool = False  # completions have the experts that tokens went to. ``model.router_replay`` needs it
    seeds: bool = True  # equal weights, requests and seeds give equal tokens
    in_flight: bool = False
    adapters: bool = False  # `load_weights` takes the learner's LoRA adapters alone, on the model that it was made with
    sleep: bool = False  # it can lend the learner its GPUs: between `sleep` and `load_weights` it holds no memory there


class RolloutEngine:
    """Generates groups of completions, one request after the other unless a subclass does better.

    Synchronous use is: ``submit`` everything, then drain ``finished``. Two engines given the same weights, requests and
    seed produce the same tokens: a random number depends on (run seed, draw, sample, position) alone, and the schedule
    on requests and tokens alone, never on time.
    """

    capabilities = Capabilities()
    _version: int = -1
    _max_context: int
    _queue: deque[RolloutRequest] | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now; -1 before the first ``load_weights``."""
        return self._version

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and response together that the engine can serve."""
        return self._max_context

    def generate(self, request: RolloutRequest) -> Sequence[Completion]:
        """The completions of one request, in the order of ``request.indices``."""
        raise NotImplementedError(f"{type(self).__name__} has neither generate nor finished")

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests, all or, on an error, none. They are started in the order given.

        Raises:
            ValueError: a request that the engine cannot serve (names the problem).
        """
        for request in requests:
            length = len(request.prompt_tokens) + request.sampling.max_tokens
            if length > self.max_context:
                raise ValueError(
                    f"problem {request.problem.id!r}: prompt and max_tokens need {length} tokens, more than the "
                    f"engine's context of {self.max_context}; lower max_tokens (T) or drop the problem"
                )
        self._queue = self._queue or deque()
        self._queue.extend(requests)

    def finished(self) -> Iterator[RolloutGroup]:
        """Run until nothing is queued, yielding each group as its last member ends.

        Groups come in the order they finish; the caller puts them back in draw order. It may stop iterating and ask
        again later: what is unfinished stays in flight, and what has ended meanwhile is yielded first.
        """
        while self._queue:
            completions = tuple(self.generate(self._queue[0]))
            yield RolloutGroup(request=self._queue.popleft(), completions=completions)

    def finished_samples(self) -> Iterator[FinishedSample]:
        """As ``finished``, but each completion as it ends."""
        for group in self.finished():
            yield from _samples(group)

    def turn(self) -> list[FinishedSample]:
        """Work for a moment (one token for every response that has a row, one request); the samples that have ended.

        Between two turns the engine can be given work and weights. With nothing queued it does nothing. Whoever uses it
        does not use the iterators beside it.
        """
        return next((_samples(group) for group in self.finished()), [])

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights (HF parameter names to tensors) and set ``policy_version``.

        With ``capabilities.adapters`` they are LoRA adapters by PEFT's names (`magicrl.models.adapter_files`).
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights; declare capabilities.weights = False")

    def sync_weights(self, learner: Learner) -> None:
        """Sample with the learner's present weights from now on; an engine may fetch them from where they lie."""
        self.load_weights(learner.adapters() if self.capabilities.adapters else learner.weights(), learner.version)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """Stop generating and return the unfinished requests in issue order, ended groups not yet yielded among them.

        With ``keep`` they hold what there is of their responses (``RolloutRequest.begun``), so that submitting them
        again, here or to another engine, goes on after the last token of each: the cache is computed anew under the
        weights of that time, tokens and log-probs stay. Without it partial work is dropped.
        """
        del keep
        unanswered = list(self._queue or ())
        self._queue = None
        return unanswered

    def close(self) -> None:
        """Free what the engine holds. Safe to call twice."""
        self.interrupt()

    def newest_weights(self) -> AbstractContextManager[object]:
        """Within it the engine serves the newest weights, as if nothing were in flight: for evaluations.

        What is in flight is not yielded meanwhile. It stands still, or goes on where no weights are loaded within.
        """
        return nullcontext()

    def answers(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """The groups of these requests under the newest weights, in their order; what is in flight is yielded later."""
        with self.newest_weights():
            self.submit(requests)
            groups = {id(group.request): group for group in self.finished()}
        return [groups[id(request)] for request in requests]

    @property
    def sampler(self) -> RolloutEngine:
        """The engine that samples, without what keeps older weights for it."""
        return self

    # with capabilities.sleep

    def sleep(self) -> None:
        """Give weights and cache back until the next ``load_weights``; before it nothing may be submitted.

        An engine that has its GPUs for itself gives nothing back. ``RuntimeError`` if requests are in flight.
        """
        raise NotImplementedError

    # with capabilities.in_flight

    def advance(self, tokens: int) -> list[RolloutGroup]:
        """What the engine does while the learner works; the groups that have ended by now, not yielded before.

        An engine that shares the learner's process generates until ``tokens`` more are sampled (0: it only tells), so
        that what it does depends on tokens and not on time. One with workers of its own never stands still: it
        ignores ``tokens`` and tells what has arrived.
        """
        raise NotImplementedError

    def advance_samples(self, tokens: int) -> list[FinishedSample]:
        """As ``advance``, but each completion that has ended by now."""
        raise NotImplementedError

    def sampled_tokens(self) -> int:
        """Tokens sampled since the engine was made; of one with workers of its own always 0."""
        raise NotImplementedError

    def busy_seconds(self) -> float:
        """Seconds spent generating since the engine was made (of replicas: their mean)."""
        raise NotImplementedError

    def snapshot(self) -> Mapping[str, Any]:
        """What is in flight, as tensors and JSON values by name, for the checkpoint.

        Whatever it should not hold (another machine's caches) may be left out: see ``resume``.
        """
        raise NotImplementedError

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Inverse of ``snapshot``, called on an idle engine after ``load_weights``.

        ``requests`` are all that were in flight, in issue order. Those that the snapshot does not hold are generated
        from their beginning: none is ever lost.
        """
        raise NotImplementedError

    # what a checkpoint holds of an engine whose next tokens depend on more than its last load_weights

    def state(self) -> Mapping[str, Any]:
        """Tensors and JSON scalars by name, for the checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; called after ``load_weights``."""


def _samples(group: RolloutGroup) -> list[FinishedSample]:
    pairs = zip(group.request.indices, group.completions, strict=True)
    return [FinishedSample(request=group.request, index=index, completion=answer) for index, answer in pairs]
