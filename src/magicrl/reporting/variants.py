"""Variants of a comparison: runs that differ only in what chance decides, named by the settings in which variants differ.

Two kinds of chance are in a difference of variants: which problems were asked, and how training went. The intervals of
``variant_scores`` are over problems (clustered as in ``evaluation.statistics``), given the trained models; what the seed
does is told by the smallest and the largest difference of the variant's single runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from magicrl.config.loader import leaves
from magicrl.config.schema import STAGE_SETTINGS
from magicrl.evaluation.statistics import mean_of, paired_difference, share
from magicrl.reporting.read_folders import Evaluation, Interval, RecordedRun, TemperatureScore
from magicrl.reporting.wording import visible
from magicrl.training.diagnosis import ACCURACY, Measure, measure_of

SAME_VARIANT = ("run.seed", "run.name", "run.output", "run.expected_minutes", "run.threads", "logging.", "checkpoint.")
"""Settings that are chance or bookkeeping; a final dot stands for the whole table."""

LONGEST_NAME = 48
"""Characters of a variant's name; a longer one names only what tells the variants apart."""

_WORDS = {
    "algorithm.loss": "loss",
    "entropy.controller": "entropy control",
    "entropy.alpha": "entropy α",
    "entropy.target": "entropy target",
    "optimizer.learning_rate": "learning rate",
    "reference.coefficient": "KL β",
    "reference.mode": "reference",
    "rollout.temperature": "τ",
    "algorithm.reuse": "reuse",
    "rollout.weight_lag": "weight lag",
    "model.dtype": "precision",
    "model.head_dtype": "head's precision",
    "start.model": "start",
    "start.sft": "start recipe",
}
_STAGE_WORDS = {
    "max_tokens": "T",
    "group_size": "M",
    "rollout_batch": "D_R",
    "mini_batch": "D_T",
    **{name: _WORDS[".".join(place)] for name, place in STAGE_SETTINGS.items() if ".".join(place) in _WORDS},
}
_STAGE = re.compile(r"stages\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Runs of one setting."""

    name: str  # unique among the variants of a comparison
    settings: Mapping[str, Any]  # those in which the variants differ; None where a recipe does not have it
    runs: tuple[RecordedRun, ...]


def run_settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """The settings of each run; where paths of one setting differ only in naming each run's own seed (``seed-3``), with
    ``*`` in its place, so that a start model a seed does not make a variant a seed."""
    tables = [leaves(run.config) for run in runs]
    for key in {key for table in tables for key in table}:
        values = [table.get(key) for table in tables]
        seeds = [table.get("run.seed", run.run.get("seed")) for table, run in zip(tables, runs, strict=True)]
        starred = [_without_seed(value, seed) for value, seed in zip(values, seeds, strict=True)]
        if len({repr(value) for value in starred}) < len({repr(value) for value in values}):
            for table, value in zip(tables, starred, strict=True):
                table.update({key: value} if key in table else {})
    return tables


def _without_seed(value: object, seed: object) -> object:
    return re.sub(rf"(seed[-_=]?){re.escape(str(seed))}(?!\d)", r"\g<1>*", value) if isinstance(value, str) else value


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same everywhere, in the order in which they first stand; a missing key differs."""
    keys = list(dict.fromkeys(key for table in settings for key in table))
    return [key for key in keys if any(table.get(key) != settings[0].get(key) for table in settings[1:])]


def setting_rows(
    columns: Sequence[Sequence[Mapping[str, Any]]], decides: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Settings that are not the same in all tables, those that decide first; a cell has all values of its column."""
    keys = differing([table for column in columns for table in column])
    return [
        {
            "key": key,
            "name": readable(key),
            "decides": decides(key),
            "cells": [", ".join(dict.fromkeys(written(table.get(key)) for table in column)) for column in columns],
        }
        for key in sorted(keys, key=lambda key: not decides(key))
    ]


def decides(key: str) -> bool:
    """Whether a setting tells variants apart: neither chance nor bookkeeping."""
    return not any(key == name or (name.endswith(".") and key.startswith(name)) for name in SAME_VARIANT)


def group_runs(runs: Sequence[RecordedRun], keys: Sequence[str] | None = None) -> tuple[Variant, ...]:
    """Runs as variants, in the order in which each variant's first run stands.

    Args:
        runs: of the comparison.
        keys: group by these settings alone; default: by every setting but seed and bookkeeping.

    Raises:
        ValueError: a key that no run has.
    """
    tables = run_settings(runs)
    known = {key for table in tables for key in table}
    for key in keys or ():
        if key not in known:
            near = sorted(k for k in known if key.rpartition(".")[2] in k)[:4]
            hint = f"did you mean {', '.join(near)}?" if near else "config.toml in a run folder lists the settings"
            raise ValueError(f"--group-by {key}: no run has such a setting; {hint}")
    telling = list(keys) if keys is not None else [key for key in differing(tables) if decides(key)]
    found: dict[str, list[int]] = {}
    for i, table in enumerate(tables):
        found.setdefault(repr([table.get(key) for key in telling]), []).append(i)
    settings = [{key: tables[members[0]].get(key) for key in telling} for members in found.values()]
    names = setting_names(settings) if len(settings) > 1 else [runs[0].name if runs else ""]
    return tuple(
        Variant(name=name, settings=values, runs=tuple(runs[i] for i in members))
        for name, values, members in zip(names, settings, found.values(), strict=True)
    )


def setting_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each of several tables of settings that differ pairwise, e.g. ``entropy control none``.

    Where naming every difference would be long, only as many settings are named as tell the tables apart, and
    ``(+2)`` counts those that differ besides.
    """
    keys = differing(settings)
    chosen = keys
    if any(len(_name(table, keys)) > LONGEST_NAME for table in settings):
        chosen = telling_keys(settings, keys)
    rest = f" (+{len(keys) - len(chosen)})" if len(chosen) < len(keys) else ""
    names = [_name(table, chosen) for table in settings]
    names = [(name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…") + rest for name in names]
    return [name if names.count(name) == 1 else f"{i + 1}: {name}" for i, name in enumerate(names)]


def telling_keys(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """A small set of ``keys`` that tells the tables apart: greedily the one that parts most pairs."""
    left = set(combinations(range(len(settings)), 2))
    chosen: list[str] = []
    while left:
        parted = {k: {(i, j) for i, j in left if settings[i].get(k) != settings[j].get(k)} for k in keys}
        best = max(keys, key=lambda key: len(parted[key]), default=None)
        if best is None or not parted[best]:
            break
        chosen.append(best)
        left -= parted[best]
    return [key for key in keys if key in chosen]


def readable(key: str) -> str:
    """A setting in words: ``optimizer.warmup_steps`` as ``optimizer warmup steps``, a stage's T as ``stage 2 T``."""
    if key in _WORDS:
        return _WORDS[key]
    if stage := _STAGE.fullmatch(key):
        return f"stage {int(stage.group(1)) + 1} {of_stage(stage.group(2))}"
    *tables, words = key.replace("_", " ").split(".")
    return words if not tables or tables[-1] in words else f"{tables[-1]} {words}"


def of_stage(name: str) -> str:
    """A key of a stage in words: ``max_tokens`` as ``T``."""
    return _STAGE_WORDS.get(name, name.replace("_", " ").replace(".", " "))


def written(value: object) -> str:
    """A setting's value: ``on``/``off`` for switches, a dash where a recipe does not have it, a path by its end."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(written(inner) for inner in cast("list[object]", value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return visible(str(value))


def path_labels(paths: Sequence[Path]) -> list[str]:
    """Each path by its shortest end, up to its whole, that tells it apart; a common last part alone is left out.

    Example:
        >>> path_labels([Path("study/seed-0/run"), Path("study/seed-1/run")])
        ['seed-0', 'seed-1']
    """
    parts = [path.resolve().parts for path in paths]
    while len(parts) > 1 and all(len(p) > 2 for p in parts) and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]
    for length in range(1, max((len(p) for p in parts), default=1)):
        labels = ["/".join(p[-length:]) for p in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _name(table: Mapping[str, Any], keys: Sequence[str]) -> str:
    """``loss ppo, reuse 2``; a start model by its folder's name."""
    words = {key: written(table.get(key)) for key in keys}
    paths = {key: words[key].rstrip("/").rpartition("/")[2] for key in keys if isinstance(table.get(key), str)}
    return ", ".join(f"{readable(key)} {value}" for key, value in (words | paths).items())


# Test scores of variants.


class Spread(NamedTuple):
    """Smallest and largest value over the runs of a variant."""

    low: float
    high: float


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread(min(values), max(values)) if len(values) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantScore:
    """One variant on one test set at one temperature; intervals are over problems, None: not measured."""

    variant: str
    before: Interval | None  # mean over the variant's runs and problems
    after: Interval | None
    spread: Spread | None  # of ``after`` over the runs
    rise: Interval | None  # after minus before, paired by problem
    against: Interval | None  # minus the first variant after training, paired by problem; None for the first variant
    against_spread: Spread | None  # of that difference over the runs, against the first variant's mean
    unpaired: str  # why there is no paired difference; empty where there is one or none is due
    tested: int  # runs that were tested after training
    runs: int
    problems: int
    samples: int  # a problem


class SetScores(NamedTuple):
    """All variants on one test set at one temperature."""

    set_name: str
    temperature: float
    variants: tuple[VariantScore, ...]
    measure: Measure


_Tested: TypeAlias = Sequence[tuple[RecordedRun, TemperatureScore]]


def variant_scores(variants: Sequence[Variant]) -> tuple[SetScores, ...]:
    """Every test set of any run, in order; of each the temperatures, the highest (that of training) first."""
    found: list[SetScores] = []
    for name in dict.fromkeys(name for variant in variants for run in variant.runs for name in run.sets):
        tests = [e for variant in variants for run in variant.runs for e in run.evaluations if e.set_name == name]
        for at in sorted({t for e in tests for t in e.temperatures}, reverse=True):
            before, after = (
                [_tested(variant, which, name, at) for variant in variants] for which in ("before", "after")
            )
            told = [score.reward if score.reward_per_problem else None for e in tests for score in _at(e, at)]
            measure = measure_of(rewards=() if None in told else told)  # what every test tells can be compared
            scores = [
                _score(variant, name, before[i], after[i], after[0] if i else None, measure)
                for i, variant in enumerate(variants)
            ]
            found.append(SetScores(name, at, tuple(scores), measure))
    return tuple(found)


def _at(test: Evaluation, temperature: float) -> list[TemperatureScore]:
    return [test.temperatures[temperature]] if temperature in test.temperatures else []


def _tested(variant: Variant, which: str, set_name: str, temperature: float) -> _Tested:
    pairs = ((run, run.evaluation(which, set_name)) for run in variant.runs)
    return [(run, e.temperatures[temperature]) for run, e in pairs if e is not None and temperature in e.temperatures]


def _score(
    variant: Variant, set_name: str, before: _Tested, after: _Tested, first: _Tested | None, measure: Measure
) -> VariantScore:
    """One variant's scores; ``first`` are the first variant's tests after training, None for that variant itself."""
    against: Interval | None = None
    spread: Spread | None = None
    why = ""
    if first is not None:
        if not after or not first:
            why = "not tested after training" if not after else "the first variant was not tested after training"
        elif not (why := _not_paired([*first, *after], set_name)):
            base = mean_per_problem([score for _, score in first], measure)
            clusters = _clusters([score for _, score in (*first, *after)])
            against = _paired(mean_per_problem([score for _, score in after], measure), base, clusters, measure)
            why = "" if against is not None else "no problem was judged in both"
            changes = (_paired(mean_per_problem([score], measure), base, clusters, measure) for _, score in after)
            spread = _spread([change.mean for change in changes if change is not None])
    old, new = ([score for _, score in tested] for tested in (before, after))
    both = old and new and not _not_paired([*before, *after], set_name)
    rise = None
    if both:
        clusters = _clusters([*old, *new])
        rise = _paired(mean_per_problem(new, measure), mean_per_problem(old, measure), clusters, measure)
    newest = next(iter((*new, *old)), None)
    return VariantScore(
        variant=variant.name,
        before=_mean_score(old, measure),
        after=_mean_score(new, measure),
        spread=_spread([told.mean for score in new if (told := score.score(measure)) is not None]),
        rise=rise,
        against=against,
        against_spread=spread,
        unpaired=why,
        tested=len(after),
        runs=len(variant.runs),
        problems=newest.problems if newest else 0,
        samples=newest.samples if newest else 0,
    )


def _not_paired(tested: _Tested, set_name: str) -> str:
    """Why the problems of these tests cannot be paired, in words; empty where they can."""
    if len({len(score.per_problem) for _, score in tested}) > 1:
        return "the tests hold different numbers of problems"
    recorded: list[Any] = [run.run.get("data") for run, _ in tested]
    facts = [data.get(f"test/{set_name}") for data in recorded if isinstance(data, dict)]
    checksums = {fact["sha256"] for fact in facts if isinstance(fact, dict) and "sha256" in fact}
    return "the tests hold other problems (by checksum)" if len(checksums) > 1 else ""


def _clusters(scores: Sequence[TemperatureScore]) -> NDArray[np.int64]:
    """Each problem's cluster, as the first score that tells it has it; problems by themselves where none does."""
    told = next((score.clusters for score in scores if score.clusters), None)
    return np.asarray(range(len(scores[0].per_problem)) if told is None else told)


def mean_per_problem(scores: Sequence[TemperatureScore], measure: Measure) -> NDArray[np.float64]:
    """Each problem's mean score over several runs; NaN where no run judged it."""
    table = np.array([score.by_problem(measure) for score in scores], dtype=np.float64)  # None becomes NaN
    counts = (~np.isnan(table)).sum(axis=0)
    return np.divide(np.nansum(table, axis=0), counts, out=np.full(len(counts), np.nan), where=counts > 0)


def _mean_score(scores: Sequence[TemperatureScore], measure: Measure) -> Interval | None:
    """The mean over runs and problems, with an interval over problems; None where runs were tested on unlike sets."""
    if len({len(score.per_problem) for score in scores}) != 1:
        return None
    values = mean_per_problem(scores, measure)
    judged = ~np.isnan(values)
    if not judged.any():
        return None
    estimate = (share if measure is ACCURACY else mean_of)(values[judged], _clusters(scores)[judged].tolist())
    return Interval(mean=estimate.mean, low=estimate.low, high=estimate.high)


def _paired(
    after: NDArray[np.float64], before: NDArray[np.float64], clusters: NDArray[np.int64], measure: Measure
) -> Interval | None:
    """``after - before`` over the problems that both have judged, with a clustered interval; None without any."""
    both = ~(np.isnan(after) | np.isnan(before))
    if not both.any():
        return None
    span = measure.span(after[both].tolist(), before[both].tolist())
    change = paired_difference(after[both], before[both], clusters[both].tolist(), span=span)
    return Interval(mean=change.mean, low=change.low, high=change.high)
