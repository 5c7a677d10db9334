"""``docs/evaluation.md``: its commands are understood, its tables and figures are those of the code and the files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from magicrl.cli.eval import ask_of, reading_of, settings_of
from magicrl.cli.main import app
from magicrl.cli.options import EvalOptions
from magicrl.evaluation.benchmarks import catalogue, described, parse_asked
from magicrl.evaluation.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evaluation.md"
COMMANDS = [line for line in PAGE.read_text().splitlines() if line.startswith("magicrl eval")]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_understood(command: str) -> None:
    _, bound, ignored = app.parse_args(shlex.split(command)[1:], print_error=False, exit_on_error=False)
    assert not ignored
    options: EvalOptions = bound.arguments["options"]
    reading_of(options.problems)
    settings_of(options, ask_of(options))
    for text in options.asked.benchmark or ():
        asked = parse_asked(text)
        assert asked.path is not None or asked.known is not None


def test_the_catalogue_on_the_page_is_the_catalogue() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w.-]+/[\w.-]+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(name, hub, licence) for name, _title, hub, licence in described()]
    first, last = catalogue().benchmarks["livecodebench"].window or (None, None)
    assert f"{first} to {last}" in PAGE.read_text()


def test_every_preset_stands_on_the_page_with_its_temperature() -> None:
    for preset in PRESETS.values():
        assert re.search(rf"^\| `{preset.name}` \| {preset.temperature:g} \|", PAGE.read_text(), re.MULTILINE)
        assert preset.max_tokens == 32768


def test_the_example_quotes_the_committed_figures() -> None:
    figures = json.loads((ROOT / "docs/figures/eval-smollm2.json").read_text())
    titles = {"gsm8k": "GSM8K", "svamp": "SVAMP", "math500": "MATH-500", "humaneval": "HumanEval", "mbpp": "MBPP"}

    def points(value: float) -> str:
        return f"{100 * value:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")

    for name, title in titles.items():
        scores = [figures["scores"][model].get(name) for model in ("instruct", "start", "trained")]
        pairs = [figures["comparisons"][pair].get(name) for pair in ("start to trained", "instruct to trained")]
        cells = [
            "not run"
            if score is None
            else "{:.1f} ({:.1f} to {:.1f})".format(*(100 * score["accuracy"][key] for key in ("mean", "low", "high")))
            for score in scores
        ]
        cells += [
            "not run"
            if pair is None
            else "{} ({} to {}), p {:.2g}".format(*map(points, pair["difference"].values()), pair["p_value"])
            for pair in pairs
        ]
        assert f"| {title} | {' | '.join(cells)} |" in PAGE.read_text()
