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
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicrl.pipeline.judge_votes import CRITERIA, Judgement
from magicrl.pipeline.pipeline_schema import JudgeSettings, JudgingSettings

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def fleiss_kappa(counts: Sequence[tuple[int, int]]) -> float | None:
    """Agreement of several raters on two categories beyond chance (Fleiss 1971), 1 at best and 0 at chance.

    ``counts`` are votes for keeping and for dropping, by problem. Problems may have different numbers of votes; each
    weighs the same in the observed agreement, and those with fewer than two do not count. None where it is 0/0.

    Example:
        >>> round(fleiss_kappa([(3, 0), (0, 3), (2, 1), (1, 2)]) or 0, 4)
        0.3333
    """
    votes = np.asarray([pair for pair in counts if sum(pair) >= 2], dtype=np.float64).reshape(-1, 2)
    totals = votes.sum(axis=1)
    by_chance = float(((votes.sum(axis=0) / max(1.0, totals.sum())) ** 2).sum())
    # all votes alike: agreement beyond chance is 0/0
    if not len(votes) or by_chance == 1:
        return None
    observed = float(((votes * (votes - 1)).sum(axis=1) / (totals * (totals - 1))).mean())
    return (observed - by_chance) / (1 - by_chance)


def cohen_kappa(pairs: Iterable[tuple[bool, bool]]) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None where it is 0/0.

    Example:
        >>> cohen_kappa([(True, True), (False, False), (True, False), (True, True)])
        0.5
    """
    held = np.asarray([*pairs], dtype=np.float64).reshape(-1, 2)
    if not len(held):
        return None
    first, second = held.mean(axis=0)
    by_chance = float(first * second + (1 - first) * (1 - second))
    observed = float((held[:, 0] == held[:, 1]).mean())
    return None if by_chance == 1 else (observed - by_chance) / (1 - by_chance)


_STRENGTHS = (
    (0.0, "worthless: no better than chance"),
    (0.2, "weak: slight agreement"),
    (0.4, "weak: fair agreement"),
    (0.6, "moderate agreement"),
    (0.8, "substantial agreement"),
    (float("inf"), "almost perfect agreement"),
)


def strength(kappa: float | None) -> str:
    """A word for a kappa (Landis and Koch 1977), so that a weak judge is called one.

    Example:
        >>> strength(0.15), strength(0.7)
        ('weak: slight agreement', 'substantial agreement')
    """
    if kappa is None:
        return "not known: too few votes, or all the same"
    return next(word for limit, word in _STRENGTHS if kappa <= limit)


_DRAWS = 1000  # of the bootstrap


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdRow:
    """What a threshold would do, by a person's labels. All shares are weighted to the whole set."""

    threshold: int  # least votes for keeping
    kept: float  # share of all problems that would be kept
    precision: float | None  # share of the kept that are good; None where none would be kept
    recall: float  # share of the good that are kept
    flawed_kept: float | None  # share of the flawed that are kept nevertheless; None where there are none
    precision_interval: tuple[float, float]  # 95 % bootstrap
    recall_interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Votes against labels."""

    labelled: int  # problems that have a label and votes
    flawed: int  # of these, labelled as flawed
    rows: tuple[ThresholdRow, ...]  # for each threshold, from 1 to the number of votes
    threshold: int | None  # the highest that keeps ``least_recall`` of the good, if there is one
    least_recall: float
    judge_kappa: Mapping[str, float | None]  # of each judge's majority against the label
    judge_accuracy: Mapping[str, float]  # share of labelled problems where they agree


def sample_for_labels(judgements: Iterable[Judgement], *, count: int, seed: int) -> dict[str, float]:
    """Problems for a person to label, with how many problems each stands for.

    They are drawn evenly over the numbers of votes, so that every threshold is informed. The order is random: it says
    nothing of the votes.
    """
    strata: dict[int, list[str]] = {}
    for judgement in judgements:
        strata.setdefault(judgement.keeps, []).append(judgement.problem)
    draw = random.Random(seed)
    shuffled = [draw.sample(strata[keeps], len(strata[keeps])) for keeps in sorted(strata)]
    # round by round, so that small strata are taken whole
    rounds = [(name, place) for one in zip_longest(*shuffled) for place, name in enumerate(one) if name is not None]
    chosen = rounds[:count]
    taken = Counter(place for _, place in chosen)
    draw.shuffle(chosen)
    return {name: len(shuffled[place]) / taken[place] for name, place in chosen}


def read_labels(path: Path) -> dict[str, bool]:
    """Labels by problem id from the page's CSV or JSON, or a table written by hand; empty labels are skipped.

    Raises:
        ValueError: says the line and what is allowed.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    try:
        if path.suffix == ".json":
            rows = list(enumerate(json.loads(path.read_text(encoding="utf-8"))["labels"], 1))
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
    rows = tuple(_row(threshold, keeps >= threshold, good, weight) for threshold in range(1, votes + 1))
    majorities: dict[str, list[tuple[bool, bool]]] = {}
    for judgement in held:
        for judge, (yes, no) in _counts(judgement).items():
            if yes != no:  # a tie is no majority
                majorities.setdefault(judge, []).append((yes > no, labels[judgement.problem]))
    return Calibration(
        labelled=len(held),
        flawed=int((~good).sum()),
        rows=rows,
        threshold=max((row.threshold for row in rows if row.recall >= least_recall), default=None),
        least_recall=least_recall,
        judge_kappa={judge: cohen_kappa(pairs) for judge, pairs in majorities.items()},
        judge_accuracy={judge: sum(a == b for a, b in pairs) / len(pairs) for judge, pairs in majorities.items()},
    )


def _row(threshold: int, kept: Bools, good: Bools, weight: Floats) -> ThresholdRow:
    # seeded by the threshold: a report has the same intervals every time
    drawn = np.random.default_rng(threshold).integers(0, len(kept), (_DRAWS, len(kept)))

    def share(part: Bools, whole: Bools) -> float | None:
        total = float(weight[whole].sum())
        return float(weight[part & whole].sum()) / total if total else None

    def interval(whole: Bools) -> tuple[float, float]:
        # a resample in which nothing is kept is 0/0, and left out
        with np.errstate(invalid="ignore"):
            shares = (weight * (kept & good))[drawn].sum(axis=1) / (weight * whole)[drawn].sum(axis=1)
        known = shares[np.isfinite(shares)]
        low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (0.0, 1.0)
        return float(low), float(high)

    return ThresholdRow(
        threshold=threshold,
        kept=float(weight[kept].sum() / weight.sum()),
        precision=share(good, kept),
        recall=share(kept, good) or 0.0,
        flawed_kept=share(kept, ~good),
        precision_interval=interval(kept),
        recall_interval=interval(good),
    )


def _counts(judgement: Judgement) -> dict[str, tuple[int, int]]:
    """By judge: votes for keeping and for dropping."""
    said = Counter((vote.judge, vote.keep) for vote in judgement.votes)
    return {judge: (said[judge, True], said[judge, False]) for judge in sorted({judge for judge, _ in said})}


def report_of(judgements: Iterable[Judgement], settings: JudgingSettings) -> dict[str, Any]:
    """Agreement, shares, tokens and cost, as JSON values. Memory holds a few numbers a problem."""
    names = [judge.shown_name for judge in settings.judges]
    sums = {name: Counter[str]() for name in names}
    by_judge: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    together: list[tuple[int, int]] = []
    histogram, kept, undecided = Counter[int](), 0, 0
    for judgement in judgements:
        counts = _counts(judgement)
        for name in names:
            by_judge[name].append(counts.get(name, (0, 0)))
        for vote in judgement.votes:
            tokens = {"prompt_tokens": vote.prompt_tokens, "completion_tokens": vote.completion_tokens}
            sums[vote.judge].update({"votes": 1, vote.status: 1, **tokens})
        together.append((judgement.keeps, judgement.valid - judgement.keeps))
        histogram[judgement.keeps] += 1
        kept += judgement.keep
        undecided += not judgement.decided
    kappa = fleiss_kappa(together)
    return {
        "problems": len(together),
        "kept": kept,
        "dropped": len(together) - kept,
        "undecided": undecided,
        "threshold": settings.threshold,
        "votes_a_problem": settings.votes,
        "fleiss_kappa": kappa,
        "agreement": strength(kappa),
        "keep_votes": {str(keeps): number for keeps, number in sorted(histogram.items())},
        "judges": {
            judge.shown_name: _of_judge(judge, sums[judge.shown_name], by_judge[judge.shown_name])
            for judge in settings.judges
        },
        "between_judges": {
            f"{first} / {second}": cohen_kappa(
                (a[0] > a[1], b[0] > b[1])
                for a, b in zip(by_judge[first], by_judge[second], strict=True)
                if a[0] != a[1] and b[0] != b[1]  # a tie is no majority
            )
            for first, second in combinations(names, 2)
        },
    }


def _of_judge(judge: JudgeSettings, sums: Mapping[str, int], counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    kappa = fleiss_kappa(counts)
    keeps, tokens = sum(yes for yes, _ in counts), (sums["prompt_tokens"], sums["completion_tokens"])
    return {
        **{name: sums[name] for name in ("votes", "valid", "unreadable", "failed")},
        "says_keep": keeps / sums["valid"] if sums["valid"] else None,
        "fleiss_kappa": kappa,
        "agreement_with_itself": strength(kappa),
        "prompt_tokens": tokens[0],
        "completion_tokens": tokens[1],
        "dollars": cost(judge, *tokens),
    }


def cost(judge: JudgeSettings, prompt_tokens: float, completion_tokens: float) -> float:
    """Dollars at the judge's prices."""
    return (
        prompt_tokens * judge.dollars_per_million_input + completion_tokens * judge.dollars_per_million_output
    ) / 1e6


def estimated_cost(settings: JudgingSettings, missing: Mapping[str, int], characters: float) -> dict[str, Any]:
    """What the ``missing`` votes cost at most, by judge; a problem has so many ``characters`` in the mean."""
    estimate: dict[str, Any] = {}
    for judge in settings.judges:
        votes = missing[judge.shown_name]
        # the criteria have 1400 characters; a token is taken as 3.5
        prompt, answer = votes * (characters + 1400) / 3.5, votes * judge.max_tokens
        estimate[judge.shown_name] = {
            "votes": votes,
            "prompt_tokens": round(prompt),
            "most_completion_tokens": answer,
            "most_dollars": cost(judge, prompt, answer),
        }
    return estimate


def flawed_figures(judgements: Iterable[Judgement], flawed: Collection[str]) -> dict[str, Any]:
    """What became of problems (ids) known to be flawed."""
    kept = {judgement.problem: judgement.keep for judgement in judgements if judgement.problem in flawed}
    return {
        "flawed": len(flawed),
        "judged": len(kept),
        "found_by_judges": sum(not keep for keep in kept.values()),
        "missed_by_judges": sorted(name for name, keep in kept.items() if keep),
    }


def as_text(report: Mapping[str, Any], calibration: Calibration | None = None) -> str:
    """The report for a terminal or a file; a weak judge is called one."""
    lines = [
        f"{report['problems']} problems, {report['kept']} kept: at least {report['threshold']} of "
        f"{report['votes_a_problem']} votes; {report['undecided']} had too few readable votes",
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
        return "\n".join(lines) + "\n"
    lines.append(f"{calibration.labelled} labelled by a person, {calibration.flawed} of them as flawed")
    for name, kappa in calibration.judge_kappa.items():
        share = calibration.judge_accuracy[name]
        lines.append(f"judge {name} against the labels: {share:.2f} equal, kappa {_number(kappa)}, {strength(kappa)}")
    lines.append("threshold  kept  precision  recall  flawed kept")
    lines += [
        f"{row.threshold:9d} {row.kept:5.2f} {_number(row.precision):>10} {row.recall:7.2f} "
        f"{_number(row.flawed_kept):>12}"
        for row in calibration.rows
    ]
    wanted = f"{calibration.least_recall:.0%} of the good problems"
    if calibration.threshold is None:
        lines.append(f"no threshold keeps {wanted}: these judges are too weak")
    else:
        lines.append(f"threshold that follows: {calibration.threshold} (the highest that keeps {wanted})")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def write_sheet(sample: Mapping[str, float], texts: Mapping[str, str], folder: Path) -> Path:
    """Write ``sheet.html``, ``sheet.csv`` and ``weights.json`` (for ``calibrate``) and return the page's path.

    The page shows one problem of the ``sample_for_labels`` at a time and no votes, so that they cannot sway a label; it
    asks nothing of a network, keeps labels in the browser and saves them as CSV or JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # the text of a problem must not end the script element that holds it
    data = json.dumps([{"id": name, "text": texts[name]} for name in sample]).replace("<", "\\u003c")
    criteria = "".join(f"<li>{html.escape(text)}</li>" for text in CRITERIA.values())
    page = files("magicrl.pipeline").joinpath("label_sheet.html").read_text(encoding="utf-8")
    path = folder / "sheet.html"
    path.write_text(page.replace("<!--CRITERIA-->", criteria).replace("/*PROBLEMS*/[]", data), encoding="utf-8")
    with (folder / "sheet.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "label", "note", "text"])
        table.writerows([name, "", "", texts[name]] for name in sample)
    (folder / "weights.json").write_text(json.dumps(dict(sample), indent=1), encoding="utf-8")
    return path
