"""Multi-stage training: which stage a run is in, and when it moves on (section 3.1 of the report)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicrl.algorithms.convergence import ConvergenceTest, TruncationRule
from magicrl.config.schema import StageConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEnd:
    """Why a stage ended.

    Attributes:
        stage: its index.
        steps: training steps it took.
        reason: a sentence for the log.
    """

    stage: int
    steps: int
    reason: str


class StageSchedule:
    """A state machine over the stages of a recipe.

    A stage ends when its rule says so and it has had ``min_steps``, or at ``max_steps``. The convergence test
    looks at validation accuracy where it is measured, else at training accuracy before rejection, corrected
    for the prompts that a filter removed.
    """

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        self._stages = tuple(stages)
        self._index = 0
        self._steps = 0
        self._converged = False
        self._test = self._make_test()

    @property
    def index(self) -> int:
        """Index of the present stage; the number of stages once all are done."""
        return self._index

    @property
    def steps_in_stage(self) -> int:
        return self._steps

    @property
    def stage(self) -> StageConfig | None:
        """The present stage, None when the run is over."""
        return self._stages[self._index] if self._index < len(self._stages) else None

    @property
    def is_last(self) -> bool:
        return self._index >= len(self._stages) - 1

    def most_steps_left(self) -> int:
        """Upper bound on the steps still to come."""
        stage = self.stage
        if stage is None:
            return 0
        return stage.max_steps - self._steps + sum(s.max_steps for s in self._stages[self._index + 1 :])

    def observe_accuracy(self, accuracy: float, standard_error: float | None) -> None:
        """Take in one measured accuracy (of validation, or of training where none is measured)."""
        if isinstance(self._test, ConvergenceTest):
            self._converged |= self._test.observe(self._steps, accuracy, standard_error)

    def observe_truncation(self, ratio: float) -> None:
        """Take in the share of truncated responses of a training step."""
        if isinstance(self._test, TruncationRule):
            self._converged |= self._test.observe(self._steps, ratio)

    def finish_step(self) -> StageEnd | None:
        """Count one training step; if it was the stage's last, move on and say why."""
        stage = self.stage
        assert stage is not None, "finish_step after the last stage"
        self._steps += 1
        early = self._converged and self._steps >= stage.min_steps
        if not early and self._steps < stage.max_steps:
            return None
        reason = self._reason(stage) if early else f"max_steps = {stage.max_steps} reached"
        end = StageEnd(stage=self._index, steps=self._steps, reason=reason)
        self._index += 1
        self._steps = 0
        self._converged = False
        self._test = self._make_test()
        return end

    def _reason(self, stage: StageConfig) -> str:
        rule = stage.transition
        if rule.rule == "truncation":
            return f"truncated share below {rule.truncation_below} for {rule.window} steps"
        return (
            f"converged: the gain expected over {rule.horizon} more steps is below {rule.delta} "
            f"at {rule.confidence:.0%} confidence"
        )

    def _make_test(self) -> ConvergenceTest | TruncationRule | None:
        stage = self.stage
        if stage is None or stage.transition.rule == "fixed":
            return None
        rule = stage.transition
        if rule.rule == "truncation":
            return TruncationRule(below=rule.truncation_below, window=rule.window)
        return ConvergenceTest(horizon=rule.horizon, delta=rule.delta, window=rule.window, confidence=rule.confidence)

    def state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "index": self._index,
            "steps": self._steps,
            "converged": self._converged,
            "test": self._test.state() if self._test else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self._index = int(state["index"])
        self._steps = int(state["steps"])
        self._converged = bool(state["converged"])
        self._test = self._make_test()
        if self._test:
            self._test.restore(state["test"])
