"""Health of a run: what goes wrong in runs of this recipe, told with its remedy while it happens.

The rules (``health_signs``) are pure, so that the live display, the event log and the finished report say the
same. A finding is told once an episode: again only after its rule has been quiet for ``REARM_STEPS``.

Losses that are not finite are no matter of health: the learner stops on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from magicrl.records import StepMetrics
from magicrl.training.diagnosis import ANY_JUDGING, Judging, SampledAnswers, diagnose
from magicrl.training.health_series import Series
from magicrl.training.health_signs import RULES, HealthRule, Severity

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


class HealthMonitor:
    """Watches a run step by step.

    It remembers only the metrics that its rules read, so its state stays small enough for every checkpoint.

    Args:
        judging: the verifier's settings, which some remedies depend on.
        rules: what it watches for.
    """

    def __init__(self, judging: Judging = ANY_JUDGING, rules: Sequence[HealthRule] = RULES) -> None:
        self._judging = judging
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
            seen = rule.check(self._series)
            if seen is None:
                self._count_quiet(rule.name)
                continue
            if rule.name not in self._quiet:
                findings.append(self._finding(rule, seen, metrics))
            self._quiet[rule.name] = 0
        return findings

    def _finding(self, rule: HealthRule, seen: str | SampledAnswers, metrics: StepMetrics) -> HealthFinding:
        if isinstance(seen, SampledAnswers):
            found = diagnose(replace(seen, judging=self._judging))
            message, remedy = found.message, found.remedy
        else:
            message, remedy = seen, rule.remedy
        return HealthFinding(
            rule=rule.name,
            severity=rule.severity,
            step=metrics.step,
            stage=metrics.stage,
            message=message,
            remedy=remedy,
        )

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
