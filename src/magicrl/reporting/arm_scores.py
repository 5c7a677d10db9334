"""Test scores of arms, and how each differs from the first one: intervals over problems, spread over runs apart.

Two kinds of chance are in a difference of arms: which problems were asked, and how training went. The intervals are
over problems (clustered as in ``evaluation.statistics``), given the trained models; what the seed does is told by the
smallest and the largest difference of the arm's single runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from magicrl.evaluation.statistics import paired_difference, share
from magicrl.reporting.arms import Arm
from magicrl.reporting.run_folder import Interval, RecordedRun, TemperatureScore

Moment: TypeAlias = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Smallest and largest value over the runs of an arm."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmScore:
    """One arm on one test set at one temperature.

    Attributes:
        arm: its name.
        before, after: mean over the arm's runs and problems, with a 95 % interval over problems; None: not measured.
        spread: of ``after`` over the runs; None with one run.
        rise: after minus before, paired by problem.
        against: minus the first arm after training, paired by problem; None for the first arm.
        against_spread: of that difference over the runs of this arm, against the first arm's mean.
        unpaired: why there is no paired difference, in words; empty where there is one or none is due.
        tested: runs that were tested after training.
        runs: of the arm.
        problems: of the set.
        samples: a problem.
    """

    arm: str
    before: Interval | None
    after: Interval | None
    spread: Spread | None
    rise: Interval | None
    against: Interval | None
    against_spread: Spread | None
    unpaired: str
    tested: int
    runs: int
    problems: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetScores:
    """All arms on one test set at one temperature."""

    set_name: str
    temperature: float
    arms: tuple[ArmScore, ...]


def arm_scores(arms: Sequence[Arm]) -> tuple[SetScores, ...]:
    """Every test set of any run, in order; of each the temperatures, the highest (that of training) first."""
    sets = list(dict.fromkeys(name for arm in arms for run in arm.runs for name in run.sets))
    found: list[SetScores] = []
    for name in sets:
        tests = [e for arm in arms for run in arm.runs for e in run.evaluations if e.set_name == name]
        for temperature in sorted({t for e in tests for t in e.temperatures}, reverse=True):
            found.append(SetScores(set_name=name, temperature=temperature, arms=_scores(arms, name, temperature)))
    return tuple(found)


def _scores(arms: Sequence[Arm], set_name: str, temperature: float) -> tuple[ArmScore, ...]:
    tables = {which: [_tested(arm, which, set_name, temperature) for arm in arms] for which in ("before", "after")}
    return tuple(
        _score(arms, i, set_name, tables["before"][i], tables["after"][i], tables["after"][0]) for i in range(len(arms))
    )


def _tested(arm: Arm, which: Moment, set_name: str, temperature: float) -> list[tuple[RecordedRun, TemperatureScore]]:
    pairs = ((run, run.evaluation(which, set_name)) for run in arm.runs)
    return [(run, e.temperatures[temperature]) for run, e in pairs if e is not None and temperature in e.temperatures]


_Tested = Sequence[tuple[RecordedRun, TemperatureScore]]


def _score(arms: Sequence[Arm], index: int, set_name: str, before: _Tested, after: _Tested, first: _Tested) -> ArmScore:
    against: Interval | None = None
    spread: Spread | None = None
    why = ""
    if index and after and first:
        why = not_paired([*first, *after], set_name)
        if not why:
            base = mean_per_problem([score for _, score in first])
            clusters = _clusters([score for _, score in (*first, *after)])
            against = paired(mean_per_problem([score for _, score in after]), base, clusters)
            why = "" if against is not None else "no problem was judged in both"
            changes = (paired(_per_problem(score), base, clusters) for _, score in after)
            singles = [change.mean for change in changes if change is not None]
            spread = Spread(low=min(singles), high=max(singles)) if len(singles) > 1 else None
    elif index:
        why = "not tested after training" if not after else "the first arm was not tested after training"
    means = [score.accuracy.mean for _, score in after]
    both = before and after and not not_paired([*before, *after], set_name)
    newest = [score for _, score in (*after, *before)]
    old, new = ([score for _, score in tested] for tested in (before, after))
    return ArmScore(
        arm=arms[index].name,
        before=mean_score(old),
        after=mean_score(new),
        spread=Spread(low=min(means), high=max(means)) if len(means) > 1 else None,
        rise=paired(mean_per_problem(new), mean_per_problem(old), _clusters([*old, *new])) if both else None,
        against=against,
        against_spread=spread,
        unpaired=why,
        tested=len(after),
        runs=len(arms[index].runs),
        problems=newest[0].problems if newest else 0,
        samples=newest[0].samples if newest else 0,
    )


def not_paired(tested: _Tested, set_name: str) -> str:
    """Why the problems of these tests cannot be paired, in words; empty where they can."""
    if any(not score.per_problem for _, score in tested):
        return "a test does not tell each problem's score"
    if len({len(score.per_problem) for _, score in tested}) > 1:
        return "the tests hold different numbers of problems"
    checksums = {str(c) for c in (_checksum(run, set_name) for run, _ in tested) if c is not None}
    return "the tests hold other problems (by checksum)" if len(checksums) > 1 else ""


def _checksum(run: RecordedRun, set_name: str) -> object:
    data: object = run.run.get("data")
    facts = data.get(f"test/{set_name}") if isinstance(data, dict) else None
    return facts.get("sha256") if isinstance(facts, dict) else None


def _per_problem(score: TemperatureScore) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in score.per_problem], dtype=np.float64)


def _clusters(scores: Sequence[TemperatureScore]) -> np.ndarray:
    """Each problem's cluster, as the first score that tells it has it; problems by themselves where none does."""
    told = next((score.clusters for score in scores if score.clusters), None)
    return np.arange(len(scores[0].per_problem)) if told is None else np.asarray(told)


def mean_per_problem(scores: Sequence[TemperatureScore]) -> np.ndarray:
    """Each problem's mean share over several runs; NaN where no run judged it."""
    table = np.stack([_per_problem(score) for score in scores])
    judged = ~np.isnan(table)
    counts = judged.sum(axis=0)
    sums = np.where(judged, table, 0.0).sum(axis=0)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def mean_score(scores: Sequence[TemperatureScore]) -> Interval | None:
    """The mean over runs and problems, with an interval over problems.

    Where the problems' own scores are not told: the interval of a single run, and for several the widest ends.
    """
    if not scores:
        return None
    if any(not s.per_problem for s in scores) or len({len(s.per_problem) for s in scores}) > 1:
        accuracies = [s.accuracy for s in scores]
        mean = sum(a.mean for a in accuracies) / len(accuracies)
        return Interval(mean=mean, low=min(a.low for a in accuracies), high=max(a.high for a in accuracies))
    values = mean_per_problem(scores)
    judged = ~np.isnan(values)
    if not judged.any():
        return None
    estimate = share(values[judged], _clusters(scores)[judged].tolist())
    return Interval(mean=estimate.mean, low=estimate.low, high=estimate.high)


def paired(after: np.ndarray, before: np.ndarray, clusters: np.ndarray) -> Interval | None:
    """``after - before`` over the problems that both have judged, with a clustered interval; None without any."""
    both = ~(np.isnan(after) | np.isnan(before))
    if not both.any():
        return None
    change = paired_difference(after[both], before[both], clusters[both].tolist())
    return Interval(mean=change.mean, low=change.low, high=change.high)
