"""The protocol of rollout engines, and the capabilities that an engine declares.

A custom engine is a subclass of `RolloutEngine` with `generate`, `load_weights` and ``max_context``
(``examples/engine.py``). An engine that schedules many requests at once is a subclass of
`magicrl.rollout.requests.SchedulingEngine`. It declares further features in `capabilities`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from magicrl.records import Completion, FinishedSample, RolloutGroup, RolloutRequest


class WeightSource(Protocol):
    """A learner, as engines see it."""

    @property
    def version(self) -> int:
        """Number of updates so far."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """Return the current weights; see `RolloutEngine.load_weights`."""
        ...

    def adapters(self) -> Mapping[str, Any]:
        """Return only the LoRA adapters, for engines with ``capabilities.adapters``."""
        ...


class WeightCheck(Protocol):
    """A comparison of an engine's log-probs after ``load_weights`` with the learner's for the same tokens.

    An engine that was made with one generates ``requests`` after each load and passes the groups to ``compare``.
    """

    @property
    def requests(self) -> Sequence[RolloutRequest]:
        """A few short requests, the same each time."""
        ...

    def compare(self, answers: Mapping[str, Sequence[RolloutGroup]], version: int) -> None:
        """Raise ``RuntimeError`` if an engine samples with other weights than the learner's of ``version``.

        ``answers`` are the groups of ``requests``, in order, by the name of the engine or replica.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Features of an engine. A run that needs a feature its engine lacks is refused before it starts.

    Attributes:
        weights: samples with the weights given to `RolloutEngine.load_weights`. Training needs it.
        turns: accepts prompts that end in response tokens: the next turn of an episode (`RolloutRequest.offset`).
        logprobs: completions have log-probs of the sampling distribution. Training needs it.
        entropies: completions have the entropies of the sampling distribution.
        experts: completions have the experts that tokens were routed to. ``model.router_replay`` needs it.
        filters: excludes unlikely tokens by ``top_p`` and ``top_k``. An evaluation that sets them needs it.
        in_flight: requests may stay in flight over weight updates, evaluations and restarts. Asynchronous mode needs
            it: `advance`, `newest_weights`, `busy_seconds`, `snapshot`, `resume` and ``interrupt(keep=True)``, and for
            episodes `advance_samples` and `sampled_tokens`. Weights loaded between two tokens of a response leave its
            keys and values as they are. It continues under the new weights, its completion has ``version_spans``, and
            each token's log-prob is that of the weights that sampled it.
        adapters: `load_weights` takes only the learner's LoRA adapters, for the model that the engine was made with.
        sleep: can lend its GPUs to the learner: it holds no memory there between `sleep` and `load_weights`.
    """

    weights: bool = True
    turns: bool = True
    logprobs: bool = True
    entropies: bool = False
    experts: bool = False
    filters: bool = False
    in_flight: bool = False
    adapters: bool = False
    sleep: bool = False


_declare = Capabilities.__init__


@functools.wraps(_declare)
def _declare_known(self: Capabilities, **declared: bool) -> None:
    known = [field.name for field in fields(Capabilities)]
    for name, value in declared.items():
        if name not in known:
            raise ValueError(
                f"Capabilities({name}={value!r}): there is no such capability; leave it out. Known: {', '.join(known)}"
            )
    _declare(self, **declared)


Capabilities.__init__ = _declare_known


class RolloutEngine:
    """Base class of engines: generates groups of completions, one request after the other.

    For synchronous use, ``submit`` all requests, then drain ``finished``. Two engines with the same weights, requests
    and seed produce the same tokens: a random number is a function of (run seed, draw, sample, position), and the
    schedule depends on requests and tokens, never on time.
    """

    capabilities = Capabilities()
    _version: int = -1
    _max_context: int
    _queue: deque[RolloutRequest] | None = None

    @property
    def policy_version(self) -> int:
        """Version of the current sampling weights; -1 before the first ``load_weights``."""
        return self._version

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and response together that the engine can serve."""
        return self._max_context

    def generate(self, request: RolloutRequest) -> Sequence[Completion]:
        """Return the completions of one request, in the order of ``request.indices``."""
        raise NotImplementedError(f"{type(self).__name__} has neither generate nor finished")

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue all requests, or none if one is refused. They start in the given order.

        Raises:
            ValueError: the engine cannot serve a request; names the problem.
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
        """Run until nothing is queued, and yield each group when its last member ends.

        Groups come in the order in which they finish. The caller may stop iterating and call this again later:
        unfinished requests stay in flight, and groups that ended in between are yielded first.
        """
        while self._queue:
            completions = tuple(self.generate(self._queue[0]))
            yield RolloutGroup(request=self._queue.popleft(), completions=completions)

    def finished_samples(self) -> Iterator[FinishedSample]:
        """Run like `finished`, but yield each completion when it ends."""
        for group in self.finished():
            yield from _samples(group)

    def turn(self) -> list[FinishedSample]:
        """Work for a moment (one token per active response, or one request) and return the samples that have ended.

        Requests and weights may be given between two turns. Without requests it does nothing. A caller uses either
        this method or the iterators.
        """
        return next((_samples(group) for group in self.finished()), [])

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights (HF parameter names to tensors) and set ``policy_version``.

        With ``capabilities.adapters`` they are LoRA adapters by PEFT's names (`magicrl.models.adapters`).
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights; declare capabilities.weights = False")

    def sync_weights(self, learner: WeightSource) -> None:
        """Sample with the learner's current weights from now on. An engine may fetch them in its own way."""
        self.load_weights(learner.adapters() if self.capabilities.adapters else learner.weights(), learner.version)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """Stop generating and return the requests that were not yielded, in issue order.

        With ``keep`` the requests hold their responses so far (``RolloutRequest.begun``). If they are submitted again,
        to this or another engine, each response continues after its last token: tokens and log-probs stay, and the
        cache is computed again under the weights of that time. Without ``keep`` partial responses are dropped.
        """
        unanswered = list(self._queue or ())
        self._queue = None
        return unanswered

    def close(self) -> None:
        """Free all resources. Safe to call twice."""
        self.interrupt()

    @contextmanager
    def newest_weights(self) -> Generator[None]:
        """Inside this context, serve the newest weights as if nothing else were in flight, for evaluations.

        Requests that were in flight before are not yielded inside the context. They pause, or continue if no weights
        are loaded inside it.
        """
        earlier, self._queue = self._queue, None
        try:
            yield
        finally:
            self._queue = deque([*(earlier or ()), *(self._queue or ())])

    def answers(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Return the groups of these requests under the newest weights, in order. Earlier requests stay in flight."""
        with self.newest_weights():
            self.submit(requests)
            groups = {id(group.request): group for group in self.finished()}
        return [groups[id(request)] for request in requests]

    @property
    def sampler(self) -> RolloutEngine:
        """The engine that samples, without a wrapper that keeps older weights."""
        return self

    # with capabilities.sleep

    def sleep(self) -> None:
        """Free weights and cache until the next ``load_weights``. Nothing may be submitted before it.

        An engine that does not share its GPUs frees nothing.

        Raises:
            RuntimeError: requests are in flight.
        """
        raise NotImplementedError

    # with capabilities.in_flight

    def advance(self, tokens: int) -> list[RolloutGroup]:
        """Work while the learner trains, and return the groups that have ended and were not yielded.

        An engine in the learner's process generates until ``tokens`` more are sampled (0: none), so that its schedule
        depends on tokens and not on time. An engine with worker processes runs all the time: it ignores ``tokens`` and
        returns the groups that have arrived.
        """
        raise NotImplementedError

    def advance_samples(self, tokens: int) -> list[FinishedSample]:
        """Work like `advance`, but return each completion that has ended."""
        raise NotImplementedError

    def sampled_tokens(self) -> int:
        """Return the number of tokens sampled since the engine was made; always 0 with worker processes."""
        raise NotImplementedError

    def busy_seconds(self) -> float:
        """Return the seconds spent generating since the engine was made (for replicas, their mean)."""
        raise NotImplementedError

    def snapshot(self) -> Mapping[str, Any]:
        """Return the requests in flight as tensors and JSON values by name, for the checkpoint.

        Anything may be left out (such as the caches of another machine): see ``resume``.
        """
        raise NotImplementedError

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Continue from a ``snapshot``; called on an idle engine after ``load_weights``.

        ``requests`` are all requests that were in flight, in issue order. Those that are not in the snapshot are
        generated from their beginning, so that none is lost.
        """
        raise NotImplementedError

    # for an engine whose next tokens depend on more than its last load_weights

    def state(self) -> Mapping[str, Any]:
        """Return tensors and JSON scalars by name, for the checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state``; called after ``load_weights``."""


def _samples(group: RolloutGroup) -> list[FinishedSample]:
    pairs = zip(group.request.indices, group.completions, strict=True)
    return [FinishedSample(request=group.request, index=index, completion=answer) for index, answer in pairs]
