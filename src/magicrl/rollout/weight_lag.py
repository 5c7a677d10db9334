"""Engine that samples with older weights on purpose: with the policy of ``lag`` steps ago.

It gives off-policy studies the staleness of asynchronous training in one process, repeatably, without a cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from magicrl.records import FinishedSample, RolloutGroup, RolloutRequest
from magicrl.rollout.protocol import RolloutEngine


class LaggedEngine(RolloutEngine):
    """Engine that gives the wrapped engine the weights of the ``lag``-th last call of ``load_weights``.

    Before that many calls, it uses the oldest weights. ``policy_version`` and the completions have the version that
    samples, not the newest version.
    """

    def __init__(self, engine: RolloutEngine, *, lag: int) -> None:
        if lag < 0:
            raise ValueError(f"rollout.weight_lag must be >= 0, got {lag}")
        self._engine = engine
        # These two are not forwarded to the wrapped engine.
        self.capabilities = replace(engine.capabilities, in_flight=False, sleep=False)
        self._history: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)

    @property
    def sampler(self) -> RolloutEngine:
        return self._engine

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._engine.submit(requests)

    def finished(self) -> Iterator[RolloutGroup]:
        return self._engine.finished()

    def finished_samples(self) -> Iterator[FinishedSample]:
        return self._engine.finished_samples()

    def turn(self) -> list[FinishedSample]:
        return self._engine.turn()

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Keep a copy of ``weights``, replacing one of the same version, and serve those of ``lag`` updates before."""
        # The same version again is no update and must not make the others older.
        if self._history and self._history[-1][0] == version:
            self._history.pop()
        # A copy, because the learner updates its tensors in place.
        self._history.append((version, {name: tensor.detach().clone() for name, tensor in weights.items()}))
        self._serve(0)

    @contextmanager
    def newest_weights(self) -> Generator[None]:
        self._serve(-1)
        try:
            yield
        finally:
            self._serve(0)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        return self._engine.interrupt(keep=keep)

    def close(self) -> None:
        self._engine.close()

    def state(self) -> Mapping[str, Any]:
        """Return the kept weights, as ``<age index>/<parameter>``, and their versions, oldest first."""
        tensors = {f"{i}/{name}": t for i, (_, kept) in enumerate(self._history) for name, t in kept.items()}
        return {"versions": [version for version, _ in self._history], **tensors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ``ValueError`` if it has another lag."""
        versions = [int(version) for version in state["versions"]]
        if len(versions) > (self._history.maxlen or 0):
            raise ValueError(
                f"the state keeps {len(versions)} weights, rollout.weight_lag + 1 is {self._history.maxlen}"
            )
        self._history.clear()
        for index, version in enumerate(versions):
            head = f"{index}/"
            kept = {k.removeprefix(head): v.clone() for k, v in state.items() if k.startswith(head)}
            self._history.append((version, kept))
        self._serve(0)

    def _serve(self, index: int) -> None:
        if self._history:
            version, weights = self._history[index]
            self._engine.load_weights(weights, version)
