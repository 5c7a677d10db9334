"""``magicrl convert``: a file of TRL or verl in, a recipe out that loads, with paths that still mean the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicrl.cli.main import app
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe


def run(*words: str) -> int:
    return app(["convert", *words], result_action="return_value")


def test_a_script_beside_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(50)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=train.jsonl data.train_batch_size=16 \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 trainer.total_epochs=2 \\\n"
        "  algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B trainer.n_gpus_per_node=1 \\\n"
        "  actor_rollout_ref.actor.clip_ratio_hihg=0.3 actor_rollout_ref.actor.clip_ratio_c=10\n"
    )
    assert run("run.sh", "--output", "sub/run.toml") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "clip_ratio_hihg: unknown to verl 0.6, which has actor_rollout_ref.actor.clip_ratio_high" in told
    assert "clip_ratio_c = 10: no bound of the ratio" in told
    config = load_train_recipe(tmp_path / "sub" / "run.toml")
    assert config.data.train[0].path == str(tmp_path / "train.jsonl")
    assert config.start.model == "Qwen/Qwen2.5-0.5B"
    (stage,) = config.stages
    assert (stage.rollout_batch, stage.mini_batch, stage.group_size, stage.max_steps) == (16, 8, 4, 2 * 3)
    with pytest.raises(RecipeError, match=r"sub/run\.toml exists"):
        run("run.sh", "--output", "sub/run.toml")


def test_what_the_command_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").write_text("num_generations: 16\nper_device_train_batch_size: 8\n")
    with pytest.raises(RecipeError, match="does not divide the 8 completions"):
        run("grpo.yaml")
    words = ("--model", "some/model", "--data", "openai/gsm8k", "--steps", "3", "--processes", "4")
    assert run("grpo.yaml", *words) == 0
    config = load_train_recipe(tmp_path / "run.toml")
    assert (config.stages[0].rollout_batch, config.stages[0].max_steps) == (2, 3)
    assert (config.data.train[0].hub, config.start.model) == ("openai/gsm8k", "some/model")
    (tmp_path / "other.yaml").write_text("x: 1\n")
    with pytest.raises(RecipeError, match=r"no option of TRL 1\.16 or verl 0\.6 is in it"):
        run("other.yaml", "--output", "other.toml")
    (tmp_path / "bad.yaml").write_text("max_grad_norm: 0\nmax_steps: 2\n")
    with pytest.raises(RecipeError, match=r"the recipe that follows cannot be used: .*max_grad_norm"):
        run("bad.yaml", *words, "--output", "bad.toml")
    assert not (tmp_path / "bad.toml").exists()
