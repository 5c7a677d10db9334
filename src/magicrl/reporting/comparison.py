"""Before against after: the scores at each temperature, and the rise against the start's best one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from magicrl.evaluation.statistics import paired_scores
from magicrl.reporting.run_folder import Evaluation, Interval, RecordedRun, TemperatureScore


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorePair:
    """One temperature: the start's score and the trained model's, where they were measured."""

    temperature: float
    before: TemperatureScore | None
    after: TemperatureScore | None

    @property
    def rise(self) -> Interval | None:
        """After minus before at this temperature."""
        if self.before is None or self.after is None:
            return None
        return rise(self.before, self.after)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """The trained model at one temperature against the start at another."""

    before_temperature: float
    after_temperature: float
    before: Interval
    after: Interval
    change: Interval

    @property
    def clear(self) -> bool:
        """Whether the interval of the change lies above zero."""
        return self.change.low > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A test set before and after training; either may be missing while a run goes on."""

    set_name: str
    before: Evaluation | None
    after: Evaluation | None

    @property
    def pairs(self) -> tuple[ScorePair, ...]:
        """One a temperature, ascending."""
        old = {} if self.before is None else self.before.temperatures
        new = {} if self.after is None else self.after.temperatures
        return tuple(ScorePair(temperature=t, before=old.get(t), after=new.get(t)) for t in sorted({*old, *new}))

    @property
    def start_best(self) -> tuple[float, TemperatureScore] | None:
        """The temperature at which the start is best. Its score is chosen as the highest, so the rise over it
        is if anything too small."""
        if self.before is None or not self.before.temperatures:
            return None
        return max(self.before.temperatures.items(), key=lambda item: item[1].accuracy.mean)

    @property
    def training_temperature(self) -> float | None:
        """The highest temperature measured (after training, if it was): the one it sampled at, in every preset."""
        measured = self.after or self.before
        return max(measured.temperatures, default=None) if measured is not None else None

    def rise_over_best(self, after_temperature: float) -> Rise | None:
        """The rise at ``after_temperature`` over the start's best temperature."""
        best = self.start_best
        if best is None or self.after is None or after_temperature not in self.after.temperatures:
            return None
        after = self.after.temperatures[after_temperature].accuracy
        return Rise(
            before_temperature=best[0],
            after_temperature=after_temperature,
            before=best[1].accuracy,
            after=after,
            change=rise(best[1], self.after.temperatures[after_temperature]),
        )

    def pass_at(self, which: str) -> dict[int, tuple[float, Interval]]:
        """k -> (temperature, pass@k) of ``before`` or ``after``, at the highest temperature that has it."""
        evaluation = self.before if which == "before" else self.after
        found: dict[int, tuple[float, Interval]] = {}
        if evaluation is not None:
            for t in sorted(evaluation.temperatures):
                found.update({k: (t, value) for k, value in evaluation.temperatures[t].pass_at.items()})
        return dict(sorted(found.items()))


def rise(before: TemperatureScore, after: TemperatureScore) -> Interval:
    """``after - before`` with a 95 % interval: paired by problem where both files tell each problem's share."""
    paired = paired_scores(after.per_problem, before.per_problem, after.clusters or before.clusters or None)
    if paired is None:
        return difference(before.accuracy, after.accuracy)
    return Interval(mean=paired.mean, low=paired.low, high=paired.high)


def difference(before: Interval, after: Interval) -> Interval:
    """``after - before`` with a 95 % interval from the two intervals (Newcombe's square-and-add).

    It treats the two as independent; on the same problems they are positively correlated, so the
    interval is if anything too wide.
    """
    change = after.mean - before.mean
    below = math.hypot(after.mean - after.low, before.high - before.mean)
    above = math.hypot(after.high - after.mean, before.mean - before.low)
    return Interval(mean=change, low=change - below, high=change + above)


def comparisons(run: RecordedRun) -> tuple[Comparison, ...]:
    """One a test set, in the order of the files."""
    return tuple(
        Comparison(set_name=name, before=run.evaluation("before", name), after=run.evaluation("after", name))
        for name in run.sets
    )
