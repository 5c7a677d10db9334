"""Every magicrl setting in the tables of docs/guides/coming-from-trl-or-verl.md exists."""

from __future__ import annotations

import re
from pathlib import Path

from magicrl.config.schema import TrainConfig
from tools.recipe_page import section_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "coming-from-trl-or-verl.md"


def test_every_setting_of_the_tables_exists() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    keys = [key for row in rows for key in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)", row[1])]
    assert len(keys) > 80
    for key in keys:
        *tables, name = key.split(".")
        section = TrainConfig
        for table in tables:
            section = section_of(section.model_fields[table].annotation)[0]
            assert section is not None, key
        assert name in section.model_fields, key
