"""`examples/environment.py`: training with an environment from outside the package."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from magicrl.commands.main import app

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "environment.py"


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    shutil.copy(EXAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("environment.py", run_name="__main__")
    short = ["--set", "stages.0.max_steps=4", "--output", "run"]
    assert app(["train", "recipe.toml", *short], result_action="return_value") in (0, 3)
    rows = [json.loads(line)["values"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert row["train/not_judged/ratio"] == 0
        assert 1 <= row["environment/turns"] <= 3
        # a reward is the share of correct digits, of two
        assert row["environment/digits_right"] <= 2
        assert row["train/accuracy/mean"] <= row["train/reward/mean"] < 1
