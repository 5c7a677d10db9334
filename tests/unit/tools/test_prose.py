"""The check of style: idioms, first words of docstrings, long lines, limits."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tools import prose

SETTINGS = tomllib.loads(prose.SETTINGS.read_text("utf-8"))
PYTHON = '''"""Parts of a run."""


def first():
    """What the run may take."""


def second():
    """Return the folder. It is told beside the others."""  # of `told` in code nothing counts


class Row:
    @property
    def name(self):
        """Of the row."""
'''
PAGE = f"""# Title

{"word " * 30}
{"word " * 20}and `told` in code.

| cell | {"c" * 141} |
|---|---|
| x | [link](https://{"x" * 200}) |

```
{"told " * 40}
```

<!-- begin table -->

{"told " * 40}

<!-- end table -->
"""


def measured(tmp_path: Path, name: str, text: str) -> prose.Group:
    (tmp_path / name).write_text(text)
    return prose.measure([tmp_path / name], SETTINGS)


def test_idioms_and_first_words_of_python(tmp_path: Path) -> None:
    group = measured(tmp_path, "one.py", PYTHON)
    assert [place.split(": ")[1] for place in group.idioms] == [
        "What without a question",
        "told, tells",
        "beside",
        "fragment",
    ]
    assert [place.split(": ")[-1] for place in group.openings] == ["What the run may take."]
    assert group.docstrings == 2
    assert group.rates()["openings_percent"] == 50


def test_long_lines_and_words_of_a_page(tmp_path: Path) -> None:
    group = measured(tmp_path, "page.md", PAGE)
    assert [place.split(":")[-3] for place in group.lines] == ["3", "6"]
    assert group.idioms == []
    assert group.pages == 1
    assert 50 < group.words < 70


def test_sentences_end_at_their_mark_and_go_on_in_the_next_line() -> None:
    page = "# Heading\n\nOne two [three](https://x.y). Four\nfive `six`, 3.1 seven.\n- Eight (nine ten.)\n\n| a |\n"
    assert prose.sentence_lengths(page) == [3, 4, 3]


def test_a_page_that_the_site_generates_is_not_one_by_hand(tmp_path: Path) -> None:
    assert measured(tmp_path, "metrics.md", "# Metrics\n\n<!-- begin metrics -->\n").pages == 0


def test_a_figure_above_its_limit_is_named() -> None:
    found = {"idioms_per_10000_words": 12.0, "long_lines": 1.0}
    assert prose.exceeded(found, {"idioms_per_10000_words": 12.0, "long_lines": 0}) == ["long_lines"]


def test_every_group_has_files_and_generated_pages_are_left_out() -> None:
    for name, wanted in SETTINGS["groups"].items():
        assert prose.files_of(wanted, SETTINGS["generated"], []), name
    docs = prose.files_of(SETTINGS["groups"]["docs"], SETTINGS["generated"], [])
    assert prose.ROOT / "docs" / "index.md" in docs
    assert not [file for file in docs if "log" in file.parts or file.name == "recipe.md"]


def test_the_repository_is_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prose"])
    assert prose.main() == 0, "python -m tools.prose --show"
