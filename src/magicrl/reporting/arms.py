"""Arms of a comparison: runs that differ only in what chance decides, named by the settings in which arms differ.

Pure functions on settings and runs, no HTML: the comparing report and the ablations' figures are made of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from magicrl.reporting.run_folder import RecordedRun
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


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved recipe as dotted key -> value, in its order; a list of plain values is one value.

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
                walk(f"{prefix}[{i}]", inner)
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
