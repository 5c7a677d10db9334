"""Lists and tables at 60, 80 and 160 columns: no line is longer, and no name is broken."""

from __future__ import annotations

import pytest

from magicrl.commands.main import app

WIDTHS = (60, 80, 160)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("recipes", ("data build data/laptop", "train quickstart")),
        ("eval --list", ("olympiadbench", "mbpp_sanitized")),
        ("data import --list", ("numina_math_1_5", "aime_1983_2023")),
    ],
)
def test_lists_fit_and_keep_their_names(
    command: str,
    names: tuple[str, ...],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert app(command.split(), result_action="return_value") == 0
    lines = capsys.readouterr().out.splitlines()
    # the closing sentence of recipes is a line to copy from, not a row
    assert max(len(line) for line in lines if "magicrl recipes NAME" not in line) <= width
    assert all(any(line.startswith(name) for line in lines) for name in names)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_has_every_figure_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["plan", "quickstart", "--gpus", "1", "--gpu", "cpu-2core"]
    assert app(words, result_action="return_value") == 0
    told = capsys.readouterr().out
    assert "…" not in told
    assert all(name in told for name in ("step s", "range", "h/1000"))
