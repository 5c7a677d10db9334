"""Health rules over a run's metrics: what goes wrong in runs of this recipe, told with its remedy.

The rules are the warning signs of section 12 of the recipe. Each is one row of ``RULES``: a pure
predicate over the steps so far, so that the live display, the event log and the finished report say the
same. A finding is told once an episode: again only after its rule has been quiet for ``REARM_STEPS``.

Losses that are not finite are no matter of health: the learner stops on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from magicrl.records import StepMetrics
from magicrl.training.health_signs import (
    ACCURACY,
    ENTROPY,
    Series,
    clip_high,
    clip_zero,
    early_plateau,
    entropy_collapse,
    entropy_estimators,
    entropy_growth,
    groups_rejected,
    length_explosion,
    response_shortening,
    sampler_gap,
    truncation_stuck,
)

Severity: TypeAlias = Literal["info", "warning", "critical"]

REARM_STEPS = 10
"""Steps a rule must be quiet before it may speak again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthFinding:
    """A rule that spoke: what was seen, with numbers, and what helps."""

    rule: str
    severity: Severity
    step: int
    stage: int
    message: str
    remedy: str

    def as_event(self) -> dict[str, Any]:
        """Its line of ``events.jsonl``."""
        return {
            "kind": "health",
            "step": self.step,
            "stage": self.stage,
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRule:
    """One warning sign.

    Attributes:
        name: its key in events.
        severity: ``info`` is expected behaviour worth knowing, ``critical`` usually ruins the run.
        keys: the metrics it reads; what the monitor must remember.
        check: the steps so far (oldest first, never empty) to a message, or None when all is well.
        remedy: what to change, in the recipe's settings.
    """

    name: str
    severity: Severity
    keys: tuple[str, ...]
    check: Callable[[Series], str | None]
    remedy: str


RULES: tuple[HealthRule, ...] = (
    HealthRule(
        name="entropy_collapse",
        severity="critical",
        keys=(*ENTROPY, ACCURACY),
        check=entropy_collapse,
        remedy="Sample at temperature 1 (rollout.temperature), take one SGD step per training step (algorithm.reuse = 1"
        " and mini_batch = rollout_batch), or hold entropy at a target (entropy.controller = 'adaptive').",
    ),
    HealthRule(
        name="entropy_growth",
        severity="critical",
        keys=(*ENTROPY, "entropy/target"),
        check=entropy_growth,
        remedy="Lower the entropy coefficient (entropy.alpha, or entropy.step and entropy.maximum), or lower "
        "algorithm.clip_high. Where neither acts, lower optimizer.learning_rate and see whether any answer is right.",
    ),
    HealthRule(
        name="response_shortening",
        severity="info",
        keys=(ACCURACY, "train/accuracy_nontruncated/mean"),
        check=response_shortening,
        remedy="Expected early in a stage with a short T: the policy learns to finish in time. Nothing to change; "
        "accuracy of finished responses recovers later.",
    ),
    HealthRule(
        name="early_plateau",
        severity="warning",
        keys=(ACCURACY,),
        check=early_plateau,
        remedy="Enlarge the batch (rollout_batch, group_size) or look at the data: wrong golds, problems that are all "
        "too hard or too easy (data.difficulty_filter).",
    ),
    HealthRule(
        name="groups_rejected",
        severity="warning",
        keys=("groups/rejected/ratio", ACCURACY),
        check=groups_rejected,
        remedy="Too easy: harder problems, or the next stage. Too hard: easier ones, a better supervised start. Either "
        "way: the difficulty filter, larger groups (group_size), algorithm.refill = 'until_full'.",
    ),
    HealthRule(
        name="clip_never_acts",
        severity="info",
        keys=("learner/clip_ratio", "learner/sgd_steps"),
        check=clip_zero,
        remedy="The policy hardly moves between the SGD steps of one batch: optimizer.learning_rate may be too low.",
    ),
    HealthRule(
        name="clip_share_high",
        severity="warning",
        keys=("learner/clip_ratio",),
        check=clip_high,
        remedy="The policy leaves its own data within a step: lower optimizer.learning_rate, or take fewer SGD steps "
        "(larger mini_batch, algorithm.reuse = 1).",
    ),
    HealthRule(
        name="sampler_gap",
        severity="warning",
        keys=("learner/sampler_gap_mean",),
        check=sampler_gap,
        remedy="Sample in the learner's precision (rollout.dtype = model.dtype), or correct for the gap "
        "(algorithm.correction = 'tis'); lagged weights (rollout.weight_lag) widen it too.",
    ),
    HealthRule(
        name="entropy_estimators_disagree",
        severity="critical",
        keys=ENTROPY,
        check=entropy_estimators,
        remedy="The sampler's log-probs are not those of the distribution it samples from: check its temperature "
        "and top_p.",
    ),
    HealthRule(
        name="length_explosion",
        severity="warning",
        keys=("length/mean", ACCURACY),
        check=length_explosion,
        remedy="Look at the longest rollouts for loops; lower the entropy coefficient or the learning rate, or "
        "shorten T for a while.",
    ),
    HealthRule(
        name="truncation_stuck",
        severity="warning",
        keys=("train/truncation/ratio",),
        check=truncation_stuck,
        remedy="Raise the stage's max_tokens, and use algorithm.advantage_mask = 'none': masking truncated responses "
        "takes away the pressure to finish.",
    ),
)
"""Every rule, in the order in which findings of one step are told."""


class HealthMonitor:
    """Watches a run step by step.

    It remembers only the metrics that its rules read, so its state stays small enough for every checkpoint.
    """

    def __init__(self, rules: Sequence[HealthRule] = RULES) -> None:
        self._rules = tuple(rules)
        self._keys = tuple(dict.fromkeys(key for rule in self._rules for key in rule.keys))
        self._series: list[StepMetrics] = []
        self._quiet: dict[str, int] = {}

    def observe(self, metrics: StepMetrics) -> list[HealthFinding]:
        """Take one training step in; return what has newly gone wrong (or been noticed) at it."""
        kept = {key: metrics.values[key] for key in self._keys if metrics.values.get(key) is not None}
        self._series.append(StepMetrics(step=metrics.step, stage=metrics.stage, values=kept))
        findings: list[HealthFinding] = []
        for rule in self._rules:
            message = rule.check(self._series)
            if message is None:
                self._count_quiet(rule.name)
                continue
            if rule.name not in self._quiet:
                findings.append(
                    HealthFinding(
                        rule=rule.name,
                        severity=rule.severity,
                        step=metrics.step,
                        stage=metrics.stage,
                        message=message,
                        remedy=rule.remedy,
                    )
                )
            self._quiet[rule.name] = 0
        return findings

    @property
    def active(self) -> tuple[str, ...]:
        """Rules whose episode is not over."""
        return tuple(rule.name for rule in self._rules if rule.name in self._quiet)

    def _count_quiet(self, name: str) -> None:
        if name in self._quiet:
            self._quiet[name] += 1
            if self._quiet[name] >= REARM_STEPS:
                del self._quiet[name]

    def state(self) -> dict[str, Any]:
        """All it remembers, as JSON."""
        return {
            "series": [[row.step, row.stage, dict(row.values)] for row in self._series],
            "quiet": dict(self._quiet),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self._series = [
            StepMetrics(step=int(step), stage=int(stage), values=dict(values))
            for step, stage, values in state["series"]
        ]
        self._quiet = {str(name): int(count) for name, count in state["quiet"].items()}


def check_run(series: Series) -> list[HealthFinding]:
    """Every finding of a recorded run, in order: what a monitor would have told while it ran."""
    monitor = HealthMonitor()
    return [finding for row in series for finding in monitor.observe(row)]
