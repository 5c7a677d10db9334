"""What votes are worth: a sample that a person labels, and the threshold that follows from the labels."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from magicrl.pipeline.judging.agreement import cohen_kappa
from magicrl.pipeline.judging.problems import Judgement

_DRAWS = 1000  # of the bootstrap


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A problem of the sample.

    Attributes:
        problem: its id.
        weight: how many problems it stands for.
    """

    problem: str
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdRow:
    """What a threshold would do, by a person's labels. All shares are weighted to the whole set.

    Attributes:
        threshold: least votes for keeping.
        kept: share of all problems that would be kept.
        precision: share of the kept that are good; None where none would be kept.
        recall: share of the good that are kept.
        flawed_kept: share of the flawed that are kept nevertheless; None where there are none.
        recall_interval, precision_interval: 95 % bootstrap intervals.
    """

    threshold: int
    kept: float
    precision: float | None
    recall: float
    flawed_kept: float | None
    precision_interval: tuple[float, float]
    recall_interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Votes against labels.

    Attributes:
        labelled: how many problems have a label and votes.
        flawed: how many of these are labelled as flawed.
        rows: for each threshold, from 1 to the number of votes.
        threshold: the highest that keeps the wanted share of the good; None where there is no such one.
        least_recall: that share.
        judge_kappa: of each judge's majority against the label, beyond chance.
        judge_accuracy: share of labelled problems where they agree.
    """

    labelled: int
    flawed: int
    rows: tuple[ThresholdRow, ...]
    threshold: int | None
    least_recall: float
    judge_kappa: Mapping[str, float | None]
    judge_accuracy: Mapping[str, float]


def sample_for_labels(judgements: Iterable[Judgement], *, count: int, seed: int) -> list[Sampled]:
    """Problems for a person to label: evenly over the numbers of votes, so that every threshold is informed.

    Only ids and numbers of votes are held in memory. The order is random: it says nothing of the votes.
    """
    strata: dict[int, list[str]] = {}
    for judgement in judgements:
        strata.setdefault(judgement.keeps, []).append(judgement.problem)
    draw = random.Random(seed)
    quota = dict.fromkeys(sorted(strata), 0)
    left = min(count, sum(len(members) for members in strata.values()))
    while left:  # round by round, so that small strata are taken whole
        for keeps in quota:
            if left and quota[keeps] < len(strata[keeps]):
                quota[keeps] += 1
                left -= 1
    chosen = [
        Sampled(problem=name, weight=len(strata[keeps]) / number)
        for keeps, number in quota.items()
        if number
        for name in draw.sample(strata[keeps], number)
    ]
    draw.shuffle(chosen)
    return chosen


def read_labels(path: Path) -> dict[str, bool]:
    """Labels by problem id from the page's CSV or JSON, or a table written by hand; empty labels are skipped.

    Raises:
        ValueError: says the line and what is allowed.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    try:
        if path.suffix == ".json":
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            rows = list(enumerate(cast("list[dict[str, Any]]", content["labels"]), 1))
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(enumerate(csv.DictReader(file), 2))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no table of labels ({error}); save it from the sheet as CSV or JSON") from None
    labels: dict[str, bool] = {}
    for line, row in rows:
        name, said = row.get("id"), str(row.get("label") or "").strip().lower()
        if name is None:
            raise ValueError(f"{path}, line {line}: no column id; the columns are id, label, note")
        if said in ("", "skip"):
            continue
        if said not in ("keep", "drop"):
            raise ValueError(f"{path}, line {line}: label is {said!r}; write keep, drop or nothing")
        if labels.get(name, said == "keep") != (said == "keep"):
            raise ValueError(f"{path}, line {line}: problem {name!r} has both labels")
        labels[name] = said == "keep"
    return labels


def calibrate(
    judgements: Iterable[Judgement],
    labels: Mapping[str, bool],
    *,
    weights: Mapping[str, float] | None = None,
    least_recall: float = 0.95,
) -> Calibration:
    """Judges against labels, by threshold.

    Args:
        judgements: of at least the labelled problems.
        labels: whether a person found the problem well posed.
        weights: how many problems each stands for, from ``sample_for_labels``; default: each for one.
        least_recall: share of the good problems that the threshold must keep.

    Raises:
        ValueError: no labelled problem has votes, or none is labelled as good.
    """
    held = [judgement for judgement in judgements if judgement.problem in labels]
    if not held:
        raise ValueError("no labelled problem has votes; are these the labels of another set?")
    good = np.asarray([labels[judgement.problem] for judgement in held])
    if not good.any():
        raise ValueError("every labelled problem is labelled drop; label some that are good")
    keeps = np.asarray([judgement.keeps for judgement in held])
    weight = np.asarray([(weights or {}).get(judgement.problem, 1.0) for judgement in held])
    votes = max(len(judgement.votes) for judgement in held)
    rows = tuple(_row(threshold, keeps, good, weight) for threshold in range(1, votes + 1))
    enough = [row.threshold for row in rows if row.recall >= least_recall]
    pairs = _majorities(held, labels)
    return Calibration(
        labelled=len(held),
        flawed=int((~good).sum()),
        rows=rows,
        threshold=max(enough, default=None),
        least_recall=least_recall,
        judge_kappa={judge: cohen_kappa(found) for judge, found in pairs.items()},
        judge_accuracy={judge: sum(a == b for a, b in found) / len(found) for judge, found in pairs.items()},
    )


def _row(threshold: int, keeps: Any, good: Any, weight: Any) -> ThresholdRow:
    kept = keeps >= threshold
    drawn = np.random.default_rng(threshold).integers(0, len(keeps), (_DRAWS, len(keeps)))
    with np.errstate(invalid="ignore", divide="ignore"):
        right = (weight * (kept & good))[drawn].sum(axis=1)
        precision = right / (weight * kept)[drawn].sum(axis=1)
        recall = right / (weight * good)[drawn].sum(axis=1)
    return ThresholdRow(
        threshold=threshold,
        kept=float(weight[kept].sum() / weight.sum()),
        precision=_share(kept & good, kept, weight),
        recall=_share(kept & good, good, weight) or 0.0,
        flawed_kept=_share(kept & ~good, ~good, weight),
        precision_interval=_interval(precision),
        recall_interval=_interval(recall),
    )


def _share(part: Any, whole: Any, weight: Any) -> float | None:
    total = float(weight[whole].sum())
    return float(weight[part].sum()) / total if total else None


def _interval(values: Any) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def _majorities(held: Sequence[Judgement], labels: Mapping[str, bool]) -> dict[str, list[tuple[bool, bool]]]:
    """By judge: its majority and the label, where it has one; a tie is none."""
    found: dict[str, list[tuple[bool, bool]]] = {}
    for judgement in held:
        for judge in sorted({vote.judge for vote in judgement.votes}):
            said = [vote.keep for vote in judgement.votes if vote.judge == judge and vote.keep is not None]
            keeps = sum(said)
            if 2 * keeps != len(said):
                found.setdefault(judge, []).append((2 * keeps > len(said), labels[judgement.problem]))
    return found
