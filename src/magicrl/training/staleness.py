"""How old the policies are that sampled a step's buffer, and who waited for whom: metrics of asynchronous mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from magicrl.records import FloatArray, ScoredGroup
from magicrl.rollout.protocol import InFlightEngine, RolloutEngine
from magicrl.training.batches import SampleKey
from magicrl.training.clock import StepClock
from magicrl.training.metrics import Values
from magicrl.training.protocols import TrainingStopped

_WAITS = ("rollout/rollout", "rollout/ahead", "other/verify")
"""Spans in which the learner stands still: an engine in its own process, and verdicts that are not there yet."""


class StalenessMeter:
    """Remembers which versions the engine has served, oldest first.

    The staleness of a token is how many times other weights were loaded since those that sampled it: training steps,
    however many updates a step makes; a step that made none leaves the weights as they were.

    Args:
        most: the bound, ``rollout.max_staleness``.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._versions: list[int] = []
        self._busy = 0.0

    def begin_step(self, engine: RolloutEngine) -> None:
        """The version that the engine serves is the learner's now."""
        if not self._versions or self._versions[-1] != engine.policy_version:
            self._versions = [*self._versions[-self._most :], engine.policy_version] if self._most else []
        self._busy = engine.busy_seconds() if isinstance(engine, InFlightEngine) else 0.0

    def check(self, groups: Sequence[ScoredGroup]) -> None:
        """See that the engine kept to the bound, before anything is learned from ``groups``.

        Raises:
            TrainingStopped: a token is of weights that the engine should have left behind, or never had.
        """
        if not self._most:
            return
        known = set(self._versions)
        for scored in groups:
            for index, completion in enumerate(scored.group.completions):
                strange = {completion.policy_version, *completion.token_versions.tolist()} - known
                if strange:
                    raise TrainingStopped(
                        f"response {index + 1} to problem {scored.group.request.problem.id!r} has tokens of policy "
                        f"version {min(strange)}, but rollout.max_staleness = {self._most} allows the versions "
                        f"{', '.join(map(str, self._versions))} alone: the rollout engine did not take new weights, or "
                        "held a response back. Nothing was learned from this step; resume from the last checkpoint"
                    )

    def metrics(self, groups: Sequence[ScoredGroup], old_logprobs: Mapping[SampleKey, FloatArray]) -> Values:
        """``staleness/...`` of the step's buffer; see docs/asynchronous.md.

        Args:
            groups: the buffer, before rejection, after `check`.
            old_logprobs: the learner's, of every response.
        """
        newest = self._versions[-1]
        age = {version: index for index, version in enumerate(reversed(self._versions))}
        completions = [(g.group.request.draw, i, c) for g in groups for i, c in enumerate(g.group.completions)]
        tokens = np.array([age[int(v)] for *_, c in completions for v in c.token_versions])
        begun = np.array([age[c.policy_version] for *_, c in completions])
        fresh = [(d, i, c) for d, i, c in completions if c.policy_version == newest]
        gaps = [np.abs(old_logprobs[d, i] - c.sampler_logprobs) for d, i, c in fresh]
        shares = np.bincount(tokens, minlength=self._most + 1) / len(tokens)
        return {
            "staleness/mean": float(tokens.mean()),
            "staleness/max": int(begun.max()),
            "staleness/begun/mean": float(begun.mean()),
            "staleness/older/ratio": float((tokens > 0).mean()),
            "staleness/spanning/ratio": float(np.mean([bool(c.version_spans) for *_, c in completions])),
            **{f"staleness/share_{steps}/ratio": float(share) for steps, share in enumerate(shares)},
            # an engine that serves other weights than it says shows here, however old the rest of the buffer is
            "staleness/fresh_gap/mean": float(np.concatenate(gaps).mean()) if gaps else None,
        }

    def idle(self, engine: RolloutEngine, clock: StepClock) -> Values:
        """Seconds of the step in which the learner, and the engine, had to wait."""
        assert isinstance(engine, InFlightEngine), "asynchronous mode has such an engine"
        waited = sum(end - begin for name, begin, end in clock.spans if name in _WAITS)
        busy = engine.busy_seconds() - self._busy
        return {"idle/learner/seconds": waited, "idle/engine/seconds": max(0.0, clock.times()["step"] - busy)}

    def state(self) -> list[int]:
        """JSON-able."""
        return list(self._versions)

    def restore(self, state: Sequence[Any]) -> None:
        """Inverse of ``state``."""
        self._versions = [int(version) for version in state]
