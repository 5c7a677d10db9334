"""Every setting of a recipe has a visible effect.

`setting_rows.py` has two values for each setting of the schema. `setting_observers.py` observes their effects: figures
and files of a run, requests, problems, rejections, arguments that are passed to vLLM, Ray and FSDP.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from setting_files import SFT, TRAIN
from setting_observers import Observers
from setting_rows import ROWS, Row

from magicrl.config.schema import TrainConfig
from magicrl.config.section import Section
from magicrl.config.sft_schema import SftConfig

SCHEMAS: dict[str, type[Section]] = {"train": TrainConfig, "sft": SftConfig}


def settings_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the settings of a section and its tables: ``[]`` is an entry of a list, ``*`` a key of a table."""
    for key, field in section.model_fields.items():
        inner, place = table_in(field.annotation)
        if inner is None:
            yield f"{prefix}{key}"
        else:
            yield from settings_of(inner, f"{prefix}{key}{place}.")


def table_in(annotation: Any) -> tuple[type[Section] | None, str]:
    """Return the section that a field holds, and how a row writes its place."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, ""
    inner = next((found for part in get_args(annotation) if (found := table_in(part)[0]) is not None), None)
    return inner, {tuple: "[]", dict: ".*"}.get(get_origin(annotation), "")


@pytest.fixture(scope="module")
def observers(tmp_path_factory: pytest.TempPathFactory) -> Generator[Observers]:
    """Return observers in an empty folder, to which the paths of the recipes are relative."""
    root, before = tmp_path_factory.mktemp("settings"), Path.cwd()
    os.chdir(root)
    yield Observers(root)
    os.chdir(before)


@pytest.mark.parametrize("recipe", SCHEMAS)
def test_every_setting_has_a_row(recipe: str) -> None:
    known, found = set(settings_of(SCHEMAS[recipe])), Counter(row.setting for row in ROWS if row.recipe == recipe)
    missing, gone = sorted(known - found.keys()), sorted(found.keys() - known)
    assert not missing, (
        f"no row of tests/helpers/setting_rows.py says what {', '.join(missing)} of a {recipe} recipe changes: add one "
        "with two values and what differs then. If nothing differs, remove the setting"
    )
    assert not gone, f"tests/helpers/setting_rows.py has rows of settings that a {recipe} recipe lacks: {gone}"


@pytest.mark.parametrize(
    ("observer", "recipe", "tree"), [("run", "train", TRAIN), ("sft", "sft", SFT)], ids=["train", "sft"]
)
def test_a_recipe_leads_to_the_same_twice(
    observers: Observers, observer: str, recipe: str, tree: dict[str, Any]
) -> None:
    """Without this test a difference would prove nothing."""
    assert observers.look(observer, recipe, tree) == observers.look(observer, recipe, tree)


def name_of(row: Row) -> str:
    return f"{row.recipe}-{row.setting}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_setting_changes_what_its_row_says(row: Row, observers: Observers) -> None:
    one, other = (observers.see(row, value) for value in row.values)
    for value, seen in zip(row.values, (one, other), strict=True):
        if "error" not in row.sees:
            assert seen.get("error") is None, f"with {row.setting} = {value!r} the recipe is refused: {seen['error']}"
    values = " and ".join(map(repr, row.values))
    for key in row.sees:
        assert key in one or key in other, f"nothing of the name {key} is seen, but {sorted(one.keys() | other)}"
        assert one.get(key) != other.get(key), f"{row.setting} = {values} both lead to {key} = {one.get(key)}"
    if "error" in row.sees:
        texts = [str(seen["error"]) for seen in (one, other) if seen.get("error")]
        wanted = row.refuses or row.setting.rpartition(".")[2]
        assert all(wanted in text for text in texts), texts
    if row.gives is not None:
        assert (one.get(row.sees[0]), other.get(row.sees[0])) == row.gives
