"""What votes are worth: agreement, cost, known flaws found, and a calibration against labels of a person."""

from __future__ import annotations

import csv
import html
import json
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np

from magicrl.pipeline.judge_votes import CRITERIA, Judgement
from magicrl.pipeline.pipeline_schema import JudgeSettings, JudgingSettings


def fleiss_kappa(counts: Sequence[tuple[int, int]]) -> float | None:
    """Agreement of several raters on two categories beyond chance (Fleiss 1971), 1 at best and 0 at chance.

    Problems may have different numbers of votes; each weighs the same in the observed agreement, and those with fewer
    than two votes do not count.

    Args:
        counts: votes for keeping and for dropping, by problem.

    Returns:
        None where no problem has two votes, or all votes are the same, so that kappa is 0/0.

    Example:
        >>> round(fleiss_kappa([(3, 0), (0, 3), (2, 1), (1, 2)]) or 0, 4)
        0.3333
    """
    rated = [(yes, no) for yes, no in counts if yes + no >= 2]
    if not rated:
        return None
    total = sum(yes + no for yes, no in rated)
    share = sum(yes for yes, _ in rated) / total
    by_chance = share**2 + (1 - share) ** 2
    if by_chance == 1:
        return None
    agreeing = [(yes * (yes - 1) + no * (no - 1)) / ((yes + no) * (yes + no - 1)) for yes, no in rated]
    observed = sum(agreeing) / len(agreeing)
    return (observed - by_chance) / (1 - by_chance)


def cohen_kappa(pairs: Iterable[tuple[bool, bool]]) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None where it is 0/0.

    Example:
        >>> cohen_kappa([(True, True), (False, False), (True, False), (True, True)])
        0.5
    """
    held = list(pairs)
    if not held:
        return None
    n = len(held)
    observed = sum(a == b for a, b in held) / n
    first, second = sum(a for a, _ in held) / n, sum(b for _, b in held) / n
    by_chance = first * second + (1 - first) * (1 - second)
    return None if by_chance == 1 else (observed - by_chance) / (1 - by_chance)


def strength(kappa: float | None) -> str:
    """A word for a kappa (Landis and Koch 1977), so that a weak judge is called one.

    Example:
        >>> strength(0.15), strength(0.7)
        ('weak: slight agreement', 'substantial agreement')
    """
    if kappa is None:
        return "not known: too few votes, or all the same"
    for limit, word in ((0.0, "worthless: no better than chance"), (0.2, "weak: slight agreement")):
        if kappa <= limit:
            return word
    for limit, word in ((0.4, "weak: fair agreement"), (0.6, "moderate agreement"), (0.8, "substantial agreement")):
        if kappa <= limit:
            return word
    return "almost perfect agreement"


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


class JudgingReport:
    """Collects judgements, one at a time; memory holds a few numbers a problem."""

    def __init__(self, settings: JudgingSettings) -> None:
        self._settings = settings
        names = [judge.shown_name for judge in settings.judges]
        self._sums = {name: Counter[str]() for name in names}
        self._by_judge: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        self._counts: list[tuple[int, int]] = []
        self._histogram: dict[int, int] = {}
        self._kept = 0
        self._undecided = 0

    def add(self, judgement: Judgement) -> None:
        """Count a judgement."""
        for name, sums in self._sums.items():
            votes = [vote for vote in judgement.votes if vote.judge == name]
            said = Counter(vote.status for vote in votes)
            keeps = sum(vote.keep is True for vote in votes)
            sums.update(
                {"votes": len(votes), "keeps": keeps, **said},
                prompt_tokens=sum(vote.prompt_tokens for vote in votes),
                completion_tokens=sum(vote.completion_tokens for vote in votes),
            )
            self._by_judge[name].append((keeps, said["valid"] - keeps))
        self._counts.append((judgement.keeps, judgement.valid - judgement.keeps))
        self._histogram[judgement.keeps] = self._histogram.get(judgement.keeps, 0) + 1
        self._kept += judgement.keep
        self._undecided += not judgement.decided

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "problems": len(self._counts),
            "kept": self._kept,
            "dropped": len(self._counts) - self._kept,
            "undecided": self._undecided,
            "threshold": self._settings.threshold,
            "votes_a_problem": self._settings.votes,
            "fleiss_kappa": fleiss_kappa(self._counts),
            "agreement": strength(fleiss_kappa(self._counts)),
            "keep_votes": {str(keeps): number for keeps, number in sorted(self._histogram.items())},
            "judges": {judge.shown_name: self._of(judge) for judge in self._settings.judges},
            "between_judges": self._between(),
        }

    def _of(self, judge: JudgeSettings) -> dict[str, Any]:
        sums = self._sums[judge.shown_name]
        kappa = fleiss_kappa(self._by_judge[judge.shown_name])
        return {
            **{name: sums[name] for name in ("votes", "valid", "unreadable", "failed")},
            "says_keep": sums["keeps"] / sums["valid"] if sums["valid"] else None,
            "fleiss_kappa": kappa,
            "agreement_with_itself": strength(kappa),
            "prompt_tokens": sums["prompt_tokens"],
            "completion_tokens": sums["completion_tokens"],
            "dollars": cost(judge, sums["prompt_tokens"], sums["completion_tokens"]),
        }

    def _between(self) -> dict[str, float | None]:
        """Cohen's kappa of the majorities of each pair of judges; ties do not count."""
        names, found = list(self._by_judge), dict[str, float | None]()
        for place, first in enumerate(names):
            for second in names[place + 1 :]:
                pairs = zip(self._by_judge[first], self._by_judge[second], strict=True)
                majorities = [(a[0] > a[1], b[0] > b[1]) for a, b in pairs if a[0] != a[1] and b[0] != b[1]]
                found[f"{first} / {second}"] = cohen_kappa(majorities)
        return found


def cost(judge: JudgeSettings, prompt_tokens: float, completion_tokens: float) -> float:
    """Dollars at the judge's prices."""
    return (
        prompt_tokens * judge.dollars_per_million_input + completion_tokens * judge.dollars_per_million_output
    ) / 1e6


def estimated_cost(settings: JudgingSettings, missing: Mapping[str, int], characters: float) -> dict[str, Any]:
    """What the missing votes cost at most, by judge, before any is asked for.

    Args:
        missing: votes by judge, from ``votes_missing``.
        characters: mean length of a problem; the criteria come on top. A token is taken as 3.5 characters.
    """
    estimate: dict[str, Any] = {}
    for judge in settings.judges:
        votes = missing[judge.shown_name]
        prompt, answer = votes * (characters + 1400) / 3.5, votes * judge.max_tokens
        estimate[judge.shown_name] = {
            "votes": votes,
            "prompt_tokens": round(prompt),
            "most_completion_tokens": answer,
            "most_dollars": cost(judge, prompt, answer),
        }
    return estimate


def flawed_figures(
    judgements: Iterable[Judgement], flawed: Collection[str], survivors: Collection[str] | None = None
) -> dict[str, Any]:
    """What became of problems that are known to be flawed.

    Args:
        judgements: of the judges; a flawed problem among them counts as found when it is not kept.
        flawed: ids of flawed problems, labelled by a person or planted.
        survivors: ids that the difficulty filter kept, if it ran.
    """
    kept = {judgement.problem: judgement.keep for judgement in judgements if judgement.problem in flawed}
    told: dict[str, Any] = {
        "flawed": len(flawed),
        "judged": len(kept),
        "found_by_judges": sum(not keep for keep in kept.values()),
        "missed_by_judges": sorted(name for name, keep in kept.items() if keep),
    }
    if survivors is not None:
        passed = sum(name in survivors for name in flawed)
        told |= {
            "survived_difficulty": passed,
            "share_survived_difficulty": passed / len(flawed) if flawed else None,
        }
    return told


def as_text(report: Mapping[str, Any], calibration: Calibration | None = None) -> str:
    """The report for a terminal or a file; a weak judge is called one."""
    lines = [
        f"{report['problems']} problems, {report['kept']} kept: at least {report['threshold']} of "
        f"{report['votes_a_problem']} votes",
        f"{report['undecided']} had too few readable votes" if report["undecided"] else "",
        f"all votes: Fleiss' kappa {_number(report['fleiss_kappa'])}, {report['agreement']}",
    ]
    for name, judge in report["judges"].items():
        lines.append(
            f"judge {name}: {judge['valid']} of {judge['votes']} votes readable, {_number(judge['says_keep'])} keep,"
            f" kappa {_number(judge['fleiss_kappa'])} with itself ({judge['agreement_with_itself']}),"
            f" {judge['prompt_tokens']} + {judge['completion_tokens']} tokens, {judge['dollars']:.2f} dollars"
        )
    lines += [f"between {names}: kappa {_number(kappa)}" for names, kappa in report["between_judges"].items()]
    if calibration is None:
        lines.append("agreement with people is not known: label a sample to calibrate the judges")
    else:
        lines += _calibration_lines(calibration)
    return "\n".join(line for line in lines if line) + "\n"


def _calibration_lines(calibration: Calibration) -> list[str]:
    lines = [f"{calibration.labelled} labelled by a person, {calibration.flawed} of them as flawed"]
    for name, kappa in calibration.judge_kappa.items():
        accuracy = calibration.judge_accuracy[name]
        lines.append(
            f"judge {name} against the labels: {accuracy:.2f} equal, kappa {_number(kappa)}, {strength(kappa)}"
        )
    lines.append("threshold  kept  precision  recall  flawed kept")
    lines += [
        f"{row.threshold:9d} {row.kept:5.2f} {_number(row.precision):>10} {row.recall:7.2f} "
        f"{_number(row.flawed_kept):>12}"
        for row in calibration.rows
    ]
    if calibration.threshold is None:
        lines.append(
            f"no threshold keeps {calibration.least_recall:.0%} of the good problems: these judges are too weak"
        )
    else:
        lines.append(
            f"threshold that follows: {calibration.threshold} (the highest that keeps {calibration.least_recall:.0%} "
            "of the good)"
        )
    return lines


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def write_sheet(sample: Sequence[Sampled], texts: Mapping[str, str], folder: Path) -> Path:
    """Write ``sheet.html``, ``sheet.csv`` and ``weights.json`` (for ``calibrate``) and return the page's path.

    The page shows one problem at a time and no votes, so that they cannot sway a label; it asks nothing of a network,
    keeps labels in the browser and saves them as CSV or JSON.

    Args:
        sample: from ``sample_for_labels``.
        texts: statements by problem id.
        folder: is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems = [{"id": one.problem, "text": texts[one.problem]} for one in sample]
    # the text of a problem must not end the script element that holds it
    data = json.dumps(problems).replace("<", "\\u003c")
    criteria = "".join(f"<li>{html.escape(text)}</li>" for text in CRITERIA.values())
    page = files("magicrl.pipeline").joinpath("label_sheet.html").read_text(encoding="utf-8")
    path = folder / "sheet.html"
    path.write_text(page.replace("<!--CRITERIA-->", criteria).replace("/*PROBLEMS*/[]", data), encoding="utf-8")
    with (folder / "sheet.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "label", "note", "text"])
        table.writerows([one["id"], "", "", one["text"]] for one in problems)
    weights = {one.problem: one.weight for one in sample}
    (folder / "weights.json").write_text(json.dumps(weights, indent=1), encoding="utf-8")
    return path
