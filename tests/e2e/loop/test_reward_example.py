"""`examples/reward.py`: training and evaluation with a graded reward from outside the package."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from magicrl.commands.main import app
from magicrl.training.curriculum import StageSchedule

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "reward.py"


def test_the_example_trains_and_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    shutil.copy(EXAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("reward.py", run_name="__main__")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the path is relative to the recipe's folder
    curve: list[tuple[float, float | None]] = []
    monkeypatch.setattr(StageSchedule, "observe_accuracy", lambda _, value, error: curve.append((value, error)))
    short = ["--set", "stages.0.max_steps=8", "--output", str(tmp_path / "run")]
    assert app(["train", str(tmp_path / "recipe.toml"), *short], result_action="return_value") == 0
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line)["values"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert row["train/accuracy/mean"] < row["train/reward/mean"] < 1
        assert row["reward/digits"] > 0
        assert row["groups/rejected/ratio"] < 0.5, "groups in which nobody is right have something to learn from"
    assert rows[-1]["train/reward/mean"] > rows[0]["train/reward/mean"]
    # The reward decides convergence: the accuracy stays near 0 while it rises.
    assert [value for value, _ in curve] == pytest.approx([row["train/reward/mean"] for row in rows])
    assert all(error > row["train/accuracy/standard_error"] for (_, error), row in zip(curve, rows, strict=True))
    told = [json.loads(line)["message"] for line in Path("run/events.jsonl").read_text().splitlines()]
    assert not [text for text in told if text.startswith("test ") and "accuracy" in text]
    learning = json.loads(Path("run/run.json").read_text())["learning"]
    assert "the mean reward is 0." in learning["reason"]
    assert " right" not in learning["reason"]
    asked = ["--model", "run/model", "--benchmark", "prompts.jsonl", "--verifier", "reward.py:score"]
    words = ["eval", *asked, "--samples", "4", "--limit", "8", "--max-tokens", "12", "--output", "eval"]
    assert app(words, result_action="return_value") == 0
    (result,) = json.loads(Path("eval/results.json").read_text())["benchmarks"].values()
    assert result["accuracy"]["mean"] <= result["reward"]["mean"] < 1
    assert set(result["pass_at"]) == {"2", "4"}
    assert result["majority_at"] == {}
    assert result["not_judged"] == 0
