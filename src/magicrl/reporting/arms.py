"""Arms of a comparison: runs that differ only in what chance decides, named by the settings in which arms differ.

Two kinds of chance are in a difference of arms: which problems were asked, and how training went. The intervals of
``arm_scores`` are over problems (clustered as in ``evaluation.statistics``), given the trained models; what the seed
does is told by the smallest and the largest difference of the arm's single runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from magicrl.evaluation.statistics import paired_difference, share
from magicrl.reporting.read_folders import Interval, RecordedRun, TemperatureScore
from magicrl.reporting.wording import visible

CHANCE = ("run.seed",)
"""Settings that only choose the random numbers."""

BOOKKEEPING = ("run.name", "run.output", "run.expected_minutes", "run.threads", "logging.", "checkpoint.")
"""Settings that change no result; a final dot stands for the whole table."""

LONGEST_NAME = 48
"""Characters of an arm's name; a longer one names only what tells the arms apart."""

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
    "start.model": "start",
    "start.sft": "start recipe",
}
_STAGE_WORDS = {"max_tokens": "T", "group_size": "M", "rollout_batch": "D_R", "mini_batch": "D_T"}
_STAGE = re.compile(r"stages\[(\d+)\]\.(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Runs of one setting.

    Attributes:
        name: unique among the arms of a comparison; for legends.
        settings: key -> value of the settings in which the arms differ; None where a recipe does not have it.
        runs: in the order given.
    """

    name: str
    settings: Mapping[str, Any]
    runs: tuple[RecordedRun, ...]


def flat_settings(config: Mapping[str, Any], index: str = "[{}]") -> dict[str, Any]:
    """A resolved recipe as dotted key -> value, in its order; a list of plain values is one value.

    ``index`` is how a place in a list of tables is written.

    Example:
        >>> flat_settings({"run": {"seed": 1}, "stages": [{"max_tokens": 48}]})
        {'run.seed': 1, 'stages[0].max_tokens': 48}
    """
    found: dict[str, Any] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, inner in cast("Mapping[str, object]", value).items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for i, inner in enumerate(cast("list[object]", value)):
                walk(prefix + index.format(i), inner)
        else:
            found[prefix] = value

    walk("", config)
    return found


def run_settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """The settings of each run; where paths of one setting differ only in naming each run's own seed (``seed-3``), with
    ``*`` in its place, so that a start model a seed does not make an arm a seed."""
    tables = [flat_settings(run.config) for run in runs]
    starred = [
        {k: _without_seed(v, t.get("run.seed", run.run.get("seed"))) for k, v in t.items()}
        for run, t in zip(runs, tables, strict=True)
    ]
    fewer = {
        key
        for key in {key for table in tables for key in table}
        if len({repr(s.get(key)) for s in starred}) < len({repr(t.get(key)) for t in tables})
    }
    return [{k: s[k] if k in fewer else v for k, v in t.items()} for t, s in zip(tables, starred, strict=True)]


def _without_seed(value: object, seed: object) -> object:
    return re.sub(rf"(seed[-_=]?){re.escape(str(seed))}(?!\d)", r"\g<1>*", value) if isinstance(value, str) else value


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same everywhere, in the order in which they first stand; a missing key differs."""
    keys = list(dict.fromkeys(key for table in settings for key in table))
    return [key for key in keys if any(table.get(key) != settings[0].get(key) for table in settings[1:])]


def decides(key: str) -> bool:
    """Whether a setting tells arms apart: neither chance nor bookkeeping."""
    kept_apart = (key == name or (name.endswith(".") and key.startswith(name)) for name in BOOKKEEPING)
    return key not in CHANCE and not any(kept_apart)


def group_runs(runs: Sequence[RecordedRun], keys: Sequence[str] | None = None) -> tuple[Arm, ...]:
    """Runs as arms, in the order in which each arm's first run stands.

    Args:
        runs: of the comparison.
        keys: group by these settings alone; default: by every setting but seed and bookkeeping.

    Raises:
        ValueError: a key that no run has.
    """
    tables = run_settings(runs)
    for key in keys or ():
        if not any(key in table for table in tables):
            near = sorted(k for k in {k for table in tables for k in table} if key.rpartition(".")[2] in k)[:4]
            hint = f"; did you mean {', '.join(near)}?" if near else "; config.toml in a run folder lists the settings"
            raise ValueError(f"--group-by {key}: no run has such a setting{hint}")
    telling = list(keys) if keys is not None else [key for key in differing(tables) if decides(key)]
    found: dict[str, list[int]] = {}
    for i, table in enumerate(tables):
        found.setdefault(repr([table.get(key) for key in telling]), []).append(i)
    settings = [{key: tables[members[0]].get(key) for key in telling} for members in found.values()]
    names = setting_names(settings) if len(settings) > 1 else [runs[0].name if runs else ""]
    return tuple(
        Arm(name=name, settings=values, runs=tuple(runs[i] for i in members))
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
    names = [_shortened(_name(table, chosen), LONGEST_NAME) + rest for table in settings]
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
    stage = _STAGE.fullmatch(key)
    if stage:
        name = stage.group(2)
        return f"stage {int(stage.group(1)) + 1} {_STAGE_WORDS.get(name, name.replace('_', ' ').replace('.', ' '))}"
    table, _, name = key.rpartition(".")
    words = name.replace("_", " ")
    last = table.rpartition(".")[2].replace("_", " ")
    return words if not last or last in words else f"{last} {words}"


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


def run_labels(runs: Sequence[RecordedRun]) -> list[str]:
    """Each run by the shortest end of its path that no other run shares."""
    return path_labels([run.path for run in runs])


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
    return ", ".join(f"{readable(key)} {_short(table.get(key))}" for key in keys)


def _short(value: object) -> str:
    text = written(value)
    return text.rstrip("/").rpartition("/")[2] if isinstance(value, str) and "/" in text else text


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


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
            found.append(SetScores(set_name=name, temperature=temperature, arms=_scores_of(arms, name, temperature)))
    return tuple(found)


def _scores_of(arms: Sequence[Arm], set_name: str, temperature: float) -> tuple[ArmScore, ...]:
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
