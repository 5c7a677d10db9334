"""The seam between the loop and whatever generates: in-process, replayed, vLLM, a pool of replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        """Queue requests. Order matters: rows are filled in issue order.

        Raises:
            ValueError: a prompt plus ``max_tokens`` exceeds ``max_context`` (names the problem).
        """
        ...

    def finished(self) -> Iterator[RolloutGroup]:
        """Run until nothing is queued, yielding each group as its last member ends.

        Groups come in the order they finish; the caller puts them back in draw order.
        """
        ...

    def finished_samples(self) -> Iterator[FinishedSample]:
        """As ``finished``, but each completion as it ends: for what is kept to the single sample."""
        ...

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights (HF parameter names to tensors) and set ``policy_version``."""
        ...

    def interrupt(self) -> list[RolloutRequest]:
        """Stop generating, drop partial work and return the unfinished requests in issue order."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Safe to call twice."""
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
