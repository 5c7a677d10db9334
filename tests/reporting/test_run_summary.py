"""The terminal summary and the words that page and terminal share."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from magicrl.reporting.read_folders import read_run
from magicrl.reporting.scores import summary
from magicrl.reporting.wording import duration, moment, number, percent, points, temperature, visible


def printed(folder: Path, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(summary(read_run(folder)))
    return out.getvalue()


def test_the_summary_fits_a_terminal_and_says_what_matters(run_folder: Path) -> None:
    (run_folder / "report.html").write_text("")
    text = printed(run_folder)
    assert "46.0 (43.0–49.0)" in text
    assert "90.0 (87.0–93.0)" in text
    assert "+44.0" in text
    assert "against the start's best" in text
    assert "pass@16" in text
    assert "40 training steps in 1 min 10 s (finished)" in text
    assert "report.html" in text.replace("\n", "").replace(" ", "")  # a long path wraps
    assert "…" not in text, "nothing was cut off"


def test_the_summary_of_a_run_without_tests_is_short(run_folder: Path) -> None:
    for path in (run_folder / "evaluations").glob("*"):
        path.unlink()
    assert printed(run_folder).startswith("40 training steps")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "–"), (2.41, "2.4 s"), (59.7, "1 min 0 s"), (75, "1 min 15 s"), (3725, "1 h 2 min"), (float("nan"), "–")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.20349, "0.203"), (24.1, "24.1"), (1234.5, "1234"), (100.0, "100"), (2e-7, "2.00e-07"), (None, "–")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_other_words() -> None:
    assert percent(0.4567) == "45.7 %"
    assert points(-0.05) == "−5.0"
    assert temperature(0.0) == "0 (greedy)"
    assert moment("2026-01-02T03:04:05+01:00") == "2026-01-02 02:04 UTC"
    assert moment("yesterday") == "yesterday"


def test_visible_shows_what_would_act() -> None:
    assert visible("a\tb\r\nc\x1b[0m\x00\x7f\x9b\u202e\ud800") == "a\tb\nc␛[0m␀␡⟨U+009B⟩⟨U+202E⟩⟨U+D800⟩"
