"""Variants of a comparison: runs that differ only in seed and bookkeeping, named by the settings that differ."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from magicrl.config.loader import leaves
from magicrl.config.schema import STAGE_SETTINGS
from magicrl.reporting.read_folders import RecordedRun
from magicrl.reporting.wording import visible

SAME_VARIANT = ("run.seed", "run.name", "run.output", "run.expected_minutes", "run.threads", "logging.", "checkpoint.")
"""Settings that do not distinguish variants: seed and bookkeeping. A final dot means the whole table."""

LONGEST_NAME = 48
"""Maximum length of a variant's name in characters; a longer one lists only the settings needed to distinguish it."""

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
    "model.head_dtype": "head precision",
    "start.model": "initial model",
    "start.sft": "SFT recipe",
}
_STAGE_WORDS = {
    "max_tokens": "T",
    "group_size": "M",
    "rollout_batch": "D_R",
    "mini_batch": "D_T",
    **{name: _WORDS[".".join(place)] for name, place in STAGE_SETTINGS.items() if ".".join(place) in _WORDS},
}
_FILE, _PROBLEMS, _WEIGHTS = "file of", "problems of", "weights of"
_STAGE = re.compile(r"stages\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Runs with the same settings."""

    name: str  # unique among the variants of a comparison
    runs: tuple[RecordedRun, ...]


def run_settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the settings of each run, and the `contents` of files and problems where these differ.

    Paths that differ only in the run's own seed (``seed-3``) get ``*`` in its place. Otherwise an initial model per
    seed would make one variant per seed.
    """
    tables = [leaves(run.config) | digests for run, digests in zip(runs, contents(runs), strict=True)]
    for key in {key for table in tables for key in table}:
        values = [table.get(key) for table in tables]
        seeds = [table.get("run.seed", run.run.get("seed")) for table, run in zip(tables, runs, strict=True)]
        starred = [
            re.sub(rf"(seed[-_=]?){re.escape(str(seed))}(?!\d)", r"\g<1>*", value) if isinstance(value, str) else value
            for value, seed in zip(values, seeds, strict=True)
        ]
        if len({repr(value) for value in starred}) < len({repr(value) for value in values}):
            for table, value in zip(tables, starred, strict=True):
                table.update({key: value} if key in table else {})
    return tables


def contents(runs: Sequence[RecordedRun]) -> list[dict[str, str]]:
    """Return by run the digests of custom files and problem sets that differ although their settings are the same.

    The keys are such as ``file of my/brief.py:score`` and ``problems of data.train``.
    """
    recorded = [_digests(run) for run in runs]
    found: dict[tuple[str, str], set[str]] = {}
    for digests in recorded:
        for key, digest in digests.items():
            found.setdefault(key, set()).add(digest)
    return [{key[0]: digest for key, digest in digests.items() if len(found[key]) > 1} for digests in recorded]


def _digests(run: RecordedRun) -> dict[tuple[str, str], str]:
    """Return the first digits of each recorded digest, of a custom file those of all sessions.

    The key has the name, and what must be equal in two runs for their digests to be comparable.
    """
    table = leaves(run.config)
    files: dict[tuple[str, str], dict[str, None]] = {}
    for session in run.environments:
        for key, digest in cast("Mapping[str, str]", session.get("custom") or session.get("brought") or {}).items():
            if decides(key):
                # a file of a list of files is recorded with its place
                reference = value_text(table.get(key) or table.get(key.rpartition(".")[0]) or key)
                name = f"{_FILE} " + re.sub(r"^(\.{1,2}/)+", "", reference)
                files.setdefault((name, ""), {})[digest[:8]] = None
    found = {key: ", ".join(digests) for key, digests in files.items()}
    data = cast("Mapping[str, Mapping[str, Any]]", run.run.get("data") or {})
    for name, facts in data.items():
        place = f"data.{name.replace('/', '.')}"
        source = "data.train" if name == "test/holdout" else place
        settings = {key: value for key, value in table.items() if f"{key}.".startswith(f"{source}.")}
        # the digest of problems includes the path of their custom reward
        settings |= {key: os.path.abspath(run.path / str(v)) for key, v in settings.items() if ".py:" in str(v)}
        if "sha256" in facts:
            found[f"{_PROBLEMS} {place}", repr(settings)] = str(facts["sha256"])[:8]
    # other starts are made with the run's seed
    if "start.model" in table and "start_weights" in run.run:
        found[f"{_WEIGHTS} start.model", str(table["start.model"])] = str(run.run["start_weights"])[:8]
    return found


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ, in the order of first appearance. A missing key differs from a value."""
    keys = list(dict.fromkeys(key for table in settings for key in table))
    return [key for key in keys if any(table.get(key) != settings[0].get(key) for table in settings[1:])]


def setting_rows(
    columns: Sequence[Sequence[Mapping[str, Any]]], decides: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Return a table row for each setting that differs between any of the tables.

    Args:
        columns: settings of the runs of each column. A cell lists all values of its column.
        decides: whether a key distinguishes variants. These rows come first.
    """
    keys = differing([table for column in columns for table in column])
    return [
        {
            "key": key,
            "name": setting_name(key),
            "decides": decides(key),
            "cells": [", ".join(dict.fromkeys(value_text(table.get(key)) for table in column)) for column in columns],
        }
        for key in sorted(keys, key=lambda key: not decides(key))
    ]


def decides(key: str) -> bool:
    """Return whether a setting distinguishes variants: it is neither the seed nor bookkeeping."""
    return not any(key == name or (name.endswith(".") and key.startswith(name)) for name in SAME_VARIANT)


def group_runs(runs: Sequence[RecordedRun], keys: Sequence[str] | None = None) -> tuple[Variant, ...]:
    """Group runs into variants, ordered by the first run of each.

    Args:
        runs: the runs of the comparison.
        keys: settings to group by. Default: every setting but seed and bookkeeping.

    Raises:
        ValueError: no run has one of ``keys``.
    """
    tables = run_settings(runs)
    known = {key for table in tables for key in table}
    for key in keys or ():
        if key not in known:
            near = sorted(k for k in known if key.rpartition(".")[2] in k)[:4]
            hint = f"did you mean {', '.join(near)}?" if near else "config.toml in a run folder lists the settings"
            raise ValueError(f"--group-by {key}: no run has such a setting; {hint}")
    grouping = list(keys) if keys is not None else [key for key in differing(tables) if decides(key)]
    found: dict[str, list[int]] = {}
    for i, table in enumerate(tables):
        found.setdefault(repr([table.get(key) for key in grouping]), []).append(i)
    settings = [{key: tables[members[0]].get(key) for key in grouping} for members in found.values()]
    recipes = [visible(", ".join(dict.fromkeys(runs[i].name for i in members))) for members in found.values()]
    names = setting_names(settings, recipes) if len(settings) > 1 else [runs[0].name if runs else ""]
    return tuple(
        Variant(name=name, runs=tuple(runs[i] for i in members))
        for name, members in zip(names, found.values(), strict=True)
    )


def setting_names(settings: Sequence[Mapping[str, Any]], recipes: Sequence[str] = ()) -> list[str]:
    """Return a name for each of several tables of settings, e.g. ``entropy control none``.

    Where all differences would make a long name, it is the recipe's name if each table is of another recipe. Else it
    lists only as many settings as distinguish the tables, and ``(+2)`` counts the other ones that differ.
    """
    keys = differing(settings)
    chosen = keys
    if any(len(_name(table, keys)) > LONGEST_NAME for table in settings):
        if len(set(recipes)) == len(settings):
            return list(recipes)
        chosen = distinguishing_keys(settings, keys)
    rest = f" (+{len(keys) - len(chosen)})" if len(chosen) < len(keys) else ""
    names = [_name(table, chosen) for table in settings]
    names = [(name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…") + rest for name in names]
    return [name if names.count(name) == 1 else f"{i + 1}: {name}" for i, name in enumerate(names)]


def _name(table: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return a name such as ``loss ppo, reuse 2``. A path is shortened to its last part."""
    words = {key: value_text(table.get(key)) for key in keys}
    paths = {key: words[key].rstrip("/").rpartition("/")[2] for key in keys if isinstance(table.get(key), str)}
    return ", ".join(f"{setting_name(key)} {value}" for key, value in (words | paths).items())


def distinguishing_keys(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return a small subset of ``keys`` that distinguishes the tables; greedily, the key that separates most pairs."""
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


def setting_name(key: str) -> str:
    """Return a setting in words: ``optimizer warmup steps``, or ``stage 2 T`` for ``stages.1.max_tokens``."""
    if key in _WORDS:
        return _WORDS[key]
    if key.startswith((_FILE, _PROBLEMS, _WEIGHTS)):
        return key
    if stage := _STAGE.fullmatch(key):
        return f"stage {int(stage.group(1)) + 1} {stage_setting_name(stage.group(2))}"
    # a place in a list belongs to its name, counted as for stages: data.train.0.seed is train 1 seed
    key = re.sub(r"\.(\d+)(?=\.)", lambda place: f" {int(place[1]) + 1}", key)
    *tables, words = key.replace("_", " ").split(".")
    return words if not tables or tables[-1] in words else f"{tables[-1]} {words}"


def stage_setting_name(name: str) -> str:
    """Return a setting of a stage in words: ``T`` for ``max_tokens``."""
    return _STAGE_WORDS.get(name, name.replace("_", " ").replace(".", " "))


def value_text(value: object) -> str:
    """Write a setting's value: ``on`` or ``off`` for a switch, a dash where a recipe does not have the setting."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(value_text(inner) for inner in cast("list[object]", value)) or "none"
    return f"{value:g}" if isinstance(value, float) else visible(str(value))


def path_labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that distinguishes it. A last part that all paths share is left out.

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
