"""The tables from other libraries: every setting of ours is in the schema, every option of TRL in its configuration."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.docs.write_recipe_page import section_of

from magicrl.config.schema import Section, TrainConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text()
ROWS = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\| (`.*) \|$", PAGE, re.MULTILINE)]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


@pytest.mark.parametrize("name", sorted({name for _, ours, _ in ROWS for name in names(ours)}))
def test_a_setting_of_ours_is_one(name: str) -> None:
    section: type[Section] | None = TrainConfig
    for key in name.split("."):
        assert section is not None
        assert key in section.model_fields, name
        section = section_of(section.model_fields[key].annotation)[0]


def test_options_of_trl_are_its_own() -> None:
    trl = pytest.importorskip("trl", reason="the extra `bench`")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    theirs = {name for row in ROWS for name in names(row[0]) if "." not in name}
    assert len(theirs) > 30
    assert theirs <= known, theirs - known
