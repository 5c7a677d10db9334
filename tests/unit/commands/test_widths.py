"""Lists and tables at 60, 80 and 160 columns: no line is longer, and no name is broken."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from magicrl.commands.main import app
from magicrl.commands.recipes import fits_here
from magicrl.commands.tables import progress_lines
from magicrl.reporting.wording import print_prose

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
    assert max(len(line) for line in lines) <= width
    assert all(any(line.startswith(name) for line in lines) for name in names)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_list_names_its_figures(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert app(["recipes"], result_action="return_value") == 0
    shown = capsys.readouterr().out
    assert "3 min on 2 CPU cores" in shown
    assert ("  memory: 0.7 GiB, measured" in shown) == ("  time: by magicrl plan" in shown) == (width < 100)


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
    assert "t_R: seconds to sample" in told


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sentence_in_a_terminal_is_broken_between_words(width: int) -> None:
    sentence, path = "the policy moves towards random tokens " * 6, "/runs/" + "a" * 90
    for terminal in (True, False):
        printed = io.StringIO()
        print_prose(Console(file=printed, width=width, force_terminal=terminal, color_system=None), sentence + path)
        lines = printed.getvalue().splitlines()
        assert path in printed.getvalue(), "a path to copy stays whole"
        assert (len(lines) > 1) == terminal, "a line of a log file is one line"
        if terminal:
            assert all(len(line.rstrip()) <= width for line in lines if path not in line)
            assert {word for line in lines for word in line.split()} == {*sentence.split(), path}


def test_progress_in_a_file_has_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, now = io.StringIO(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    show = progress_lines(Console(file=printed, width=80))
    for step in range(40):
        show(f"step {step}")
        now[0] += 1.0
    show("what each token did")
    assert printed.getvalue().splitlines() == ["step 0", "step 10", "step 20", "step 30", "what each token did"]


def test_recipes_for_this_machine_come_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("magicrl.commands.recipes.host_memory", lambda: 4 * 2**30)
    monkeypatch.setattr("magicrl.commands.recipes.gpu_memory", lambda: 0.0)
    assert app(["recipes"], result_action="return_value") == 0
    shown = capsys.readouterr().out
    here, _, others = shown.partition("Other machines")
    assert "train quickstart" in here
    for name in ("train smollm2\n", "train skywork/or1-7b", "train deepseek/1.5b-gpu", "train smollm2-cluster"):
        assert name in others
        assert name not in here
    assert fits_here("8.8 GiB, measured", cluster=False) is False
    monkeypatch.undo()
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 81559\necho 40960\n")  # MiB of each GPU
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert fits_here("one GPU of 80 GB", cluster=False)
