"""Many runs at once: what each came to and what was changed in it, to be filtered, sorted, and compared.

A run is known by its columns (``COLUMNS``), its settings (``optimizer.learning_rate``) and the last values of its
metrics (``entropy/exact/mean``); filters and orders name any of these.
"""

from __future__ import annotations

import difflib
import json
import operator
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from magicrl.config.errors import RecipeError
from magicrl.config.loader import leaves, load_train_recipe, to_toml
from magicrl.config.paths import shipped_recipe
from magicrl.config.schema import TrainConfig
from magicrl.reporting.variants import decides, differing, path_labels, run_settings
from magicrl.reporting.comparison_page import LeftOut, last_mean
from magicrl.reporting.read_folders import RecordedRun, read_run
from magicrl.reporting.scores import comparisons, training_seconds
from magicrl.training.diagnosis import Measure

COLUMNS = ("run", "recipe", "status", "steps", "best", "last", "train", "test", "verdict", "started", "seconds")
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*([\w./@-]+)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*")


@dataclass(frozen=True)
class ListedRun:
    """A run among others."""

    label: str  # as short as tells it from the others
    recorded: RecordedRun
    changed: Mapping[str, Any]  # settings that are not its recipe's, or not those of other runs of its name

    @property
    def measure(self) -> Measure:
        """What its scores are told in."""
        return self.recorded.measure

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Value by column, None where it was not measured; scores are shares or mean rewards, ``started`` ISO 8601."""
        run, key = self.recorded, self.measure.key
        validated = run.points(f"validation/{key}/mean")
        tests = comparisons(run)
        after = [pair.scores[1] for pair in tests[0].pairs] if tests else []
        learning = run.learning
        return {
            "run": self.label,
            "recipe": run.name,
            "status": run.status,
            "steps": run.metrics[-1].step if run.metrics else 0,
            "best": max((value for _, value in validated), default=None),
            "last": validated[-1][1] if validated else None,
            "train": last_mean(run, f"train/{key}/mean"),
            "test": next((score.mean for score in reversed(after) if score is not None), None),
            "verdict": None if learning is None else learning.outcome,
            "started": (run.environments or [{}])[0].get("started"),
            "seconds": training_seconds(run),
        }

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of its recipe."""
        return leaves(self.recorded.config)

    def value(self, key: str) -> Any:
        """Of a column, a setting, or the last value of a metric; None where this run has none."""
        if key in COLUMNS:
            return self.columns[key]
        if key in self.settings:
            return self.settings[key]
        points = self.recorded.points(key)
        return points[-1][1] if points else None

    def as_json(self) -> dict[str, Any]:
        """Its columns, path and changed settings."""
        changed = {key: json.loads(json.dumps(value, default=str)) for key, value in self.changed.items()}
        return {**self.columns, "path": str(self.recorded.path), "measure": self.measure.key, "changed": changed}


def list_runs(folder: Path) -> tuple[list[ListedRun], list[LeftOut]]:
    """Every run in ``folder`` and below it, the newest first, and those that cannot be read.

    Raises:
        RecipeError: there is no such folder.
    """
    if not folder.is_dir():
        raise RecipeError(f"{folder}: no such folder; magicrl train makes runs/ where it is started")
    runs: list[RecordedRun] = []
    left_out: list[LeftOut] = []
    for path in run_folders(folder):
        try:
            run = read_run(path)
            run.learning  # noqa: B018 - a verdict that cannot be read is told here
            runs.append(run)
        except ValueError as error:
            left_out.append(LeftOut(str(path), str(error)))
    changed = changed_settings(runs)
    labels = path_labels([run.path for run in runs]) if len(runs) > 1 else [run.path.resolve().name for run in runs]
    listed = [ListedRun(*of) for of in zip(labels, runs, changed, strict=True)]
    return sorted(listed, key=lambda run: run.columns["started"] or "", reverse=True), left_out


def run_folders(folder: Path) -> list[Path]:
    """Folders with a ``run.json``, by name; what lies inside a run is not looked at."""
    found: list[Path] = []
    for place, inner, names in os.walk(folder):
        if "run.json" in names:
            found.append(Path(place))
            inner.clear()
        inner[:] = sorted(name for name in inner if not name.startswith("."))
    return found


def changed_settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Of each run the settings that are not those of the shipped recipe of its name; where none is shipped, those in
    which the runs of one name differ."""
    settings = run_settings(runs)
    found: list[dict[str, Any]] = []
    for run, table in zip(runs, settings, strict=True):
        base = _shipped_settings(run)
        if base is None:
            same = [other for peer, other in zip(runs, settings, strict=True) if peer.name == run.name]
            keys = differing(same)
        else:
            keys = differing([base, table])
        # what it does not have was not changed: another version of magicrl wrote it
        found.append({key: table[key] for key in keys if key in table and (decides(key) or key == "run.seed")})
    return found


def _shipped_settings(run: RecordedRun) -> dict[str, Any] | None:
    recipe = shipped_recipe(run.name)
    if recipe is None or "stages" not in tomllib.loads(recipe.read_text(encoding="utf-8")):
        return None
    return leaves(tomllib.loads(to_toml(_loaded(recipe), run.path.absolute())))  # paths as the run's file has them


@cache
def _loaded(recipe: Path) -> TrainConfig:
    return load_train_recipe(recipe)


def where(runs: Sequence[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """The runs that meet every condition: ``status=finished``, ``best>=0.8``, ``optimizer.learning_rate<1e-4``,
    ``run~seed`` (holds the text).

    Raises:
        RecipeError: a condition that is none, or a name that no run has.
    """
    kept = list(runs)
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise RecipeError(f"--where {text}: a condition is NAME=VALUE, or with != < <= > >= ~ (holds the text)")
        name, sign, wanted = match.groups()
        known_name(name, runs, "--where")
        kept = [run for run in kept if _meets(run.value(name), sign, wanted)]
    return kept


def _meets(value: Any, sign: str, wanted: str) -> bool:
    if value is None:
        return sign == "!="  # what was not measured is not equal to anything
    if sign == "~":
        return wanted.lower() in str(value).lower()
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return _COMPARISONS[sign](value, float(wanted))
        except ValueError:
            return sign == "!="
    told = str(value).lower() if isinstance(value, bool) else str(value)
    return _COMPARISONS[sign](told, wanted)


def ordered(runs: Sequence[ListedRun], name: str, *, reverse: bool) -> list[ListedRun]:
    """By a column, a setting or a metric, ascending; runs without it last.

    Raises:
        RecipeError: a name that no run has.
    """
    known_name(name, runs, "--sort")
    having = [run for run in runs if run.value(name) is not None]
    numeric = all(isinstance(run.value(name), int | float) for run in having)
    having.sort(key=lambda run: run.value(name) if numeric else str(run.value(name)), reverse=reverse)
    return having + [run for run in runs if run.value(name) is None]


def known_name(name: str, runs: Sequence[ListedRun], option: str) -> None:
    """Raises ``RecipeError`` where neither a column nor a setting nor a metric of these runs has the name."""
    known = {*COLUMNS, *(key for run in runs for key in run.settings)}
    known |= {key for run in runs for row in run.recorded.metrics[-1:] for key in row.values}
    if name not in known and not any(run.recorded.points(name) for run in runs):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(k for k in known if name in k)[:3]
        hint = f"did you mean {', '.join(near)}?" if near else f"columns: {', '.join(COLUMNS)}"
        raise RecipeError(f"{option} {name}: no run has such a column, setting or metric; {hint}")


def named(runs: Sequence[ListedRun], name: str) -> ListedRun:
    """The run of this label, folder, or unique part of its path.

    Raises:
        RecipeError: none or several.
    """
    path = Path(name).resolve()
    found = [run for run in runs if name == run.label or path == run.recorded.path.resolve()]
    found = found or [run for run in runs if name in str(run.recorded.path)]
    if len(found) != 1:
        known = ", ".join(run.label for run in (found or runs)[:8])
        raise RecipeError(f"--compare {name}: {'several runs have' if found else 'no run has'} that name: {known}")
    return found[0]
