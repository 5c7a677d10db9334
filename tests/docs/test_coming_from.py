"""The tables of options that the site shows are those that `magicrl convert` reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import generated  # noqa: E402

from magicrl.config.foreign import Library  # noqa: E402
from magicrl.config.foreign_trl import TRL  # noqa: E402
from magicrl.config.foreign_verl import VERL  # noqa: E402


@pytest.mark.parametrize(("mark", "library"), [("TRL", TRL), ("verl", VERL)])
def test_every_option_that_is_read_has_a_row(mark: str, library: Library) -> None:
    assert f"<!-- {mark} -->" in (DOCS / "coming-from.md").read_text()
    rows = [line.split("|") for line in generated.PARTS[mark]().splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])} == library.known
    assert all(len(row) == 5 and (row[2].strip() or row[3].strip()) for row in rows)
