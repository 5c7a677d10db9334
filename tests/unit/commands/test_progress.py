"""Progress and remaining time of work that counts its items."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from magicrl.commands.main import app
from magicrl_verifiers import progress
from magicrl_verifiers.progress import TimeLeft


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_what_remains_at_the_pace_so_far() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    assert left.words("rows", 10, 50) == ""  # 10 existed before the work began
    clock.now += 4
    assert left.words("rows", 20, 50) == ", left 12 s"  # 10 in 4 s, 30 to go
    assert left.words("rows", 50, 50) == ""
    clock.now += 60
    assert left.words("rows", 1, 50) == ""  # it starts again: the minute between does not count
    clock.now += 2
    assert left.words("rows", 2, 50) == ", left 1 min 36 s"


def test_lines_come_after_two_seconds_and_then_every_five() -> None:
    clock, out = Clock(), StringIO()
    tell = progress.ProgressLines(Console(file=out, width=60), clock)
    for done in range(1, 13):
        tell("clean", done, 12, "rows")
        clock.now += 1
    assert out.getvalue().splitlines() == ["  clean: 3 of 12 rows, left 9.0 s", "  clean: 8 of 12 rows, left 4.0 s"]


def test_judging_a_file_tells_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    lines = [json.dumps({"reference": "2", "response": "\\boxed{2}"})] * 3
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines))  # blank lines are not counted
    words = ["verify", "math", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert app([*words, "--workers", "1"], result_action="return_value") == 0
    assert "judged: 1 of 3 lines" in capsys.readouterr().out
