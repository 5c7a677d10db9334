"""The released runs as recipes: the settings that the report publishes, and consistency within a cluster recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicrl.commands.main import app
from magicrl.config.loader import load_train_recipe
from magicrl.config.schema import TrainConfig

RECIPES = Path(__file__).resolve().parents[3] / "src" / "magicrl" / "recipes"
LARGE = sorted([*(RECIPES / "skywork").glob("*.toml"), *(RECIPES / "deepseek").glob("*.toml")])

# (T, D_R, D_T, gs, last step) of each phase
RELEASED = {
    "or1-math-7b": [
        (8192, 256, 128, 16, 740),
        (16384, 256, 128, 16, 1740),
        (32768, 256, 128, 16, 2080),
        (32768, 128, 64, 64, 2160),
    ],
    "or1-7b": [(16384, 256, 256, 16, 660), (32768, 160, 160, 32, 1320)],
    "or1-7b-8gpu": [(16384, 256, 256, 16, 660), (32768, 160, 160, 32, 1320)],
    "or1-32b": [(16384, 256, 256, 16, 760), (24576, 160, 160, 32, 1130)],
    "baseline-7b": [(16384, 64, 64, 16, 2700)],
}


def phases(config: TrainConfig) -> list[tuple[int, int, int, int, int]]:
    found: list[tuple[int, int, int, int, int]] = []
    done = 0
    for stage in config.stages:
        done += stage.max_steps
        found.append(
            (stage.max_tokens, stage.rollout_batch, stage.mini_batch or stage.rollout_batch, stage.group_size, done)
        )
    return found


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_run_has_its_published_settings(name: str) -> None:
    config = load_train_recipe(RECIPES / "skywork" / f"{name}.toml")
    assert phases(config) == RELEASED[name]
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (1e-6, 0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.max_grad_norm) == (0.9, 0.999, 0.01, 1)
    algorithm = config.algorithm
    assert (algorithm.loss, algorithm.advantage_mask, algorithm.reject_zero_advantage) == ("magic", "none", True)
    assert (config.rollout.temperature, config.rollout.max_staleness, config.reference.mode) == (1.0, 0, "none")
    assert config.entropy.controller == ("none" if name == "baseline-7b" else "adaptive")
    assert {stage.transition.rule for stage in config.stages} == {"fixed"}


@pytest.mark.parametrize("name", ["or1-7b", "or1-7b-8gpu", "or1-32b"])
def test_the_code_problems_stand_twice_in_the_mixture(name: str) -> None:
    config = load_train_recipe(RECIPES / "skywork" / f"{name}.toml")
    assert [source.split for source in config.data.train] == ["math", "code", "code"]
    assert config.start.model is not None
    assert {source.difficulty_of for source in config.data.train} == {config.start.model.rpartition("/")[2]}


@pytest.mark.parametrize("path", LARGE, ids=lambda p: p.stem)
def test_a_large_recipe_agrees_with_itself(path: Path) -> None:
    config = load_train_recipe(path)
    longest = max(stage.max_tokens for stage in config.stages)
    assert config.model.micro_batch_tokens >= longest + config.data.max_prompt_tokens
    assert config.verifier.reasoning == "required"
    assert config.evaluation.max_tokens is not None
    if config.cluster is None:
        assert config.rollout.engine == "in_process"
    else:
        assert config.rollout.engine == "vllm"
        learner, rollout = config.cluster.learner, config.cluster.rollout
        engines = rollout.replicas * rollout.tensor_parallel
        if rollout.colocated:
            assert learner.ranks == engines, "each rank shares its GPU with one rank of an engine"
        gpus = max(learner.ranks, engines) if rollout.colocated else learner.ranks + engines
        assert gpus % 8 == 0 or gpus < 8, f"{gpus} GPUs are no whole nodes of eight"


def test_the_plan_accepts_the_recipe_of_one_node_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", "skywork/or1-7b-8gpu", "--gpus", "8", "--gpu", "H100-80G", "--json"], result_action="return_value")
    plan = json.loads(capsys.readouterr().out)
    assert plan["stated"]["fits"]
    assert plan["settings"] == [], "the plan would change nothing"
