"""The page of models contains the measured figures, and has a row for each tested model type."""

from __future__ import annotations

import json
from pathlib import Path

from model_cases import CASES

from tools import model_table


def test_the_page_shows_the_figures(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(model_table.PAGE.read_text())
    model_table.write(page, model_table.JSON)
    assert page.read_text() == model_table.PAGE.read_text(), "python -m tools.model_table --part page"


def test_every_model_type_has_a_row_of_its_present_configuration() -> None:
    rows = json.loads(model_table.JSON.read_text())["models"]
    assert list(rows) == list(CASES)
    for name, case in CASES.items():
        assert rows[name]["model_type"] == case.model_type
        assert case.differs.items() <= rows[name]["config"].items(), name
        assert not [key for key in rows[name] if key.endswith("_refused")], name
