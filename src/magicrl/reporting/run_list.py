"""Lists of runs with their results and changed settings, to be filtered, sorted and compared.

Filters and sort orders name a column (``COLUMNS``), a setting (``optimizer.learning_rate``) or a metric
(``entropy/exact/mean``), of which the last value counts.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from magicrl.config.errors import RecipeError
from magicrl.config.loader import leaves, load_train_recipe, to_toml
from magicrl.config.paths import shipped_recipe
from magicrl.reporting.read_folders import RecordedRun, is_run, read_run
from magicrl.reporting.scores import comparisons
from magicrl.reporting.variants import decides, differing, path_labels, run_settings

COLUMNS = ("run", "recipe", "status", "steps", "best", "last", "train", "test", "verdict", "started", "seconds")
_MEASURED = ("best", "last", "train", "test")
"""Columns that hold shares of correct answers, or mean rewards where rewards are graded."""
_SCORES = (*_MEASURED, "seconds")
"""Columns that hold numbers, where a run has them."""
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_load = cache(load_train_recipe)
_CONDITION = re.compile(r"\s*([\w./@-]+)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*")


@dataclass(frozen=True)
class ListedRun:
    """One run of a list."""

    label: str  # the shortest end of its path that distinguishes it
    recorded: RecordedRun
    changed: Mapping[str, Any]  # settings that differ from its recipe, or from other runs of the same name

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Value by column, None where it is missing. Scores are shares or mean rewards, ``started`` is ISO 8601."""
        run, key = self.recorded, self.recorded.measure.key
        validated = run.points(f"validation/{key}/mean")
        tests = comparisons(run)
        # the comparison page and the tiles of a run show the score at this temperature
        at = tests[0].training_temperature if tests else None
        after = [pair.scores[1] for test in tests[:1] for pair in test.pairs if pair.temperature == at]
        learning = run.learning
        return {
            "run": self.label,
            "recipe": run.name,
            "status": run.shown_status,
            "steps": run.metrics[-1].step if run.metrics else 0,
            "best": max((value for _, value in validated), default=None),
            "last": validated[-1][1] if validated else None,
            "train": run.last_mean(f"train/{key}/mean"),
            "test": next((score.mean for score in after if score is not None), None),
            "verdict": None if learning is None else learning.outcome,
            "started": (run.environments or [{}])[0].get("started"),
            "seconds": run.training_seconds,
        }

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of its recipe. Paths are relative to the working directory where they are below it."""
        return {key: from_here(value, self.recorded.path) for key, value in leaves(self.recorded.config).items()}

    def value(self, key: str) -> Any:
        """Return a column, a setting, or the last value of a metric; None where this run does not have it."""
        if key in COLUMNS:
            return self.columns[key]
        if key in self.settings:
            return self.settings[key]
        points = self.recorded.points(key)
        return points[-1][1] if points else None

    def as_json(self) -> dict[str, Any]:
        """Return columns, path and changed settings."""
        changed = {key: json.loads(json.dumps(value, default=str)) for key, value in self.changed.items()}
        return {
            **self.columns,
            "path": str(self.recorded.path),
            "measure": self.recorded.measure.key,
            "changed": changed,
        }


def list_runs(folder: Path) -> tuple[list[ListedRun], list[tuple[str, str]]]:
    """Read every run in and below ``folder``.

    Returns:
        The runs, the newest first, and (folder, reason) of those that cannot be read.

    Raises:
        RecipeError: there is no such folder.
    """
    if not folder.is_dir():
        raise RecipeError(f"{folder}: no such folder; magicrl train creates runs/ in its working directory")
    runs: list[RecordedRun] = []
    left_out: list[tuple[str, str]] = []
    for path in run_folders(folder):
        try:
            run = read_run(path)
            run.learning  # noqa: B018 - raises for an invalid verdict
            runs.append(run)
        except ValueError as error:
            left_out.append((str(path), str(error)))
    changed = changed_settings(runs)
    labels = path_labels([run.path for run in runs]) if len(runs) > 1 else [run.path.resolve().name for run in runs]
    listed = [ListedRun(*of) for of in zip(labels, runs, changed, strict=True)]
    return sorted(listed, key=lambda run: run.columns["started"] or "", reverse=True), left_out


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders, by name. Folders inside a run are not searched."""
    found: list[Path] = []
    for place, inner, names in os.walk(folder):
        if is_run(names):
            found.append(Path(place))
            inner.clear()
        inner[:] = sorted(name for name in inner if not name.startswith("."))
    return found


def changed_settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the settings of each run that differ from the shipped recipe of its name.

    Without a shipped recipe, these are the settings that differ between the runs of one name.
    """
    settings = run_settings(runs)
    found: list[dict[str, Any]] = []
    for run, table in zip(runs, settings, strict=True):
        recipe = shipped_recipe(run.name)
        if recipe is None or "stages" not in tomllib.loads(recipe.read_text(encoding="utf-8")):
            same = [other for peer, other in zip(runs, settings, strict=True) if peer.name == run.name]
            keys = differing(same)
        else:
            base = tomllib.loads(to_toml(_load(recipe), run.path.absolute()))  # paths as the run's file has them
            keys = differing([leaves(base), table])
        # a missing setting was not changed: the run is of another version of magicrl
        shown = [key for key in keys if key in table and (decides(key) or key == "run.seed")]
        found.append({key: from_here(table[key], run.path) for key in shown})
    return found


def from_here(value: Any, folder: Path) -> Any:
    """Return a path of a run's recipe, which is relative to the run folder, as a user types it in this folder.

    Any other value is returned unchanged.
    """
    if not isinstance(value, str) or not value.startswith(("./", "../")):
        return value
    path = Path(os.path.normpath(folder.absolute() / value))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def where(runs: Sequence[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """Return the runs that meet every condition.

    Args:
        runs: the runs to filter.
        conditions: ``status=finished``, ``best>=0.8``, ``optimizer.learning_rate<1e-4``, ``run~seed`` (contains the
            text), ...

    Raises:
        RecipeError: not a condition, a name that no run has, text to compare numbers with, or accuracies of some runs
            and mean rewards of others.
    """
    kept = list(runs)
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise RecipeError(f"--where {text}: a condition is NAME=VALUE, or with != < <= > >= ~ (contains the text)")
        name, sign, wanted = match.groups()
        known_name(name, runs, "--where")
        if name == "started" and sign != "~":
            if (then := _time(wanted)) is None:
                raise RecipeError(
                    f"--where {text}: started is a time in UTC, and {wanted!r} is none; as in "
                    f"started{sign}2026-11-28 20:10"
                )
            kept = [run for run in kept if _meets(_time(run.value(name)), sign, then)]
            continue
        if sign in ("<", "<=", ">", ">="):
            _one_measure(name, kept, f"--where {text}")
        values = [value for value in (run.value(name) for run in runs) if value is not None]
        if (
            sign != "~"
            and (all(map(_is_number, values)) if values else name in _SCORES)
            and not _reads_as_number(wanted)
        ):
            raise RecipeError(f"--where {text}: {name} is a number, and {wanted!r} is none; as in {name}{sign}0.5")
        kept = [run for run in kept if _meets(run.value(name), sign, wanted)]
    return kept


def _one_measure(name: str, runs: Sequence[ListedRun], option: str) -> None:
    """Raise ``RecipeError`` if a column holds accuracies of some runs and mean rewards of others."""
    measures = {run.recorded.measure.name for run in runs if run.value(name) is not None}
    if name in _MEASURED and len(measures) > 1:
        raise RecipeError(
            f"{option}: {name} is an {' in some runs and a '.join(sorted(measures))} in others; choose runs of one "
            "kind first, as in --where recipe=NAME"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reads_as_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def _time(iso: object) -> datetime | None:
    """Return the time, in UTC where it names no time zone; None for any other text."""
    try:
        found = datetime.fromisoformat(str(iso))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _meets(value: Any, sign: str, wanted: str | datetime) -> bool:
    if value is None:
        return sign == "!="  # a missing value equals nothing
    if isinstance(wanted, datetime):
        return _COMPARISONS[sign](value, wanted)
    if sign == "~":
        return wanted.lower() in str(value).lower()
    if _is_number(value):
        try:
            return _COMPARISONS[sign](value, float(wanted))
        except ValueError:
            return sign == "!="
    return _COMPARISONS[sign](str(value).lower() if isinstance(value, bool) else str(value), wanted)


def ordered(runs: Sequence[ListedRun], name: str, *, reverse: bool) -> list[ListedRun]:
    """Sort the runs by a column, a setting or a metric, ascending unless ``reverse``. Runs without a value come last.

    Raises:
        RecipeError: no run has ``name``, or it is an accuracy of some runs and a mean reward of others.
    """
    known_name(name, runs, "--sort")
    _one_measure(name, runs, f"--sort {name}")
    having = [run for run in runs if run.value(name) is not None]
    numeric = all(isinstance(run.value(name), int | float) for run in having)
    having.sort(key=lambda run: run.value(name) if numeric else str(run.value(name)), reverse=reverse)
    return having + [run for run in runs if run.value(name) is None]


def known_name(name: str, runs: Sequence[ListedRun], option: str) -> None:
    """Check that ``name`` is a column, or a setting or a metric of one of these runs.

    Raises:
        RecipeError: it is none of these.
    """
    known = {*COLUMNS, *(key for run in runs for key in run.settings)}
    known |= {key for run in runs for row in run.recorded.metrics[-1:] for key in row.values}
    if name not in known and not any(run.recorded.points(name) for run in runs):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(k for k in known if name in k)[:3]
        hint = f"did you mean {', '.join(near)}?" if near else f"columns: {', '.join(COLUMNS)}"
        raise RecipeError(f"{option} {name}: no run has such a column, setting or metric; {hint}")


def find_run(runs: Sequence[ListedRun], name: str) -> ListedRun:
    """Return the run with this label, folder, or unique part of its path.

    Raises:
        RecipeError: no run or several runs match.
    """
    path = Path(name).resolve()
    found = [run for run in runs if name == run.label or path == run.recorded.path.resolve()]
    found = found or [run for run in runs if name in str(run.recorded.path)]
    if len(found) != 1:
        known = ", ".join(run.label for run in (found or runs)[:8])
        raise RecipeError(f"--compare {name}: {'several runs have' if found else 'no run has'} that name: {known}")
    return found[0]
