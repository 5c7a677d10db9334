"""`model.router_replay` end to end on a small random mixture of experts: use of the record, and rejected models."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import CASES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.models.loading import save_policy
from magicrl.records import StepMetrics
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

REWARD = '''
def score(problem, response):
    """Responses differ in their digits, so that groups have something to learn from."""
    words = response.split()
    return sum(word in ("1", "3", "5", "7", "9") for word in words) / max(1, len(words))
'''
RECIPE = """
[run]
name = "mixture"
threads = 1

[start]
model = "MODEL"

[model]
dtype = "float32"
router_replay = true

[[data.train]]
path = "prompts.jsonl"
verifier = "reward.py:score"

[rollout]
max_rows = 8
memory_limit_mb = 64

[optimizer]
learning_rate = 1e-3

[[stages]]
max_tokens = 12
rollout_batch = 4
group_size = 4
mini_batch = 2
max_steps = 3

[evaluation]
every = 0

[checkpoint]
every = 1
"""


@pytest.fixture
def recipe(toy_model: Path, tmp_path: Path) -> Path:
    tokenizer: Any = AutoTokenizer.from_pretrained(toy_model)
    further = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            CASES["Qwen3-MoE"].config(initializer_range=0.2, num_hidden_layers=2, **further)
        )
    save_policy(model, tokenizer, tmp_path / "start")
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = [f"L {seed % 7} {seed % 5} {seed % 3} :" for seed in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("MODEL", str(tmp_path / "start")))
    return path


class Killed(BaseException):
    """Stand-in for SIGKILL."""


class KillAfter(NullObserver):
    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == 2:
            raise Killed


def run(recipe: Path, output: Path, *changes: str, killed: bool = False, resume: bool = False) -> list[dict[str, Any]]:
    config = load_train_recipe(recipe, changes)
    with contextlib.suppress(Killed):
        run_training(config, output, KillAfter() if killed else NullObserver(), resume=resume)
    return [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_the_learner_is_nearer_to_the_sampler(recipe: Path, tmp_path: Path) -> None:
    """Compare the same first rollouts in bfloat16, in the updates and in the old log-probs before them."""
    low = ("model.dtype=bfloat16", "stages.0.max_steps=1")
    plain = run(recipe, tmp_path / "plain", *low, "model.router_replay=false")[0]
    replayed = run(recipe, tmp_path / "replayed", *low)[0]
    assert replayed["tokens/sampled"] == plain["tokens/sampled"]
    assert replayed["learner/sgd_steps"] == 2
    assert 0 < replayed["learner/sampler_gap_mean"] < plain["learner/sampler_gap_mean"]


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_goes_on_bit_for_bit(recipe: Path, tmp_path: Path) -> None:
    """The checkpoint holds the record of finished responses and of those in flight."""
    ahead = "rollout.max_staleness=2"
    whole = run(recipe, tmp_path / "whole", ahead)
    run(recipe, tmp_path / "killed", ahead, killed=True)
    resumed = run(recipe, tmp_path / "killed", ahead, resume=True)
    for key in ("learner/grad_norm", "learner/sampler_gap_mean", "train/reward/mean"):
        assert [row.get(key) for row in resumed] == [row.get(key) for row in whole]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_choices_of_older_weights_are_taken(recipe: Path, tmp_path: Path) -> None:
    """In float32 the record differs from the learner's own choice where the sampler's weights are older."""
    changes = ("rollout.weight_lag=1", "stages.0.max_steps=2", "stages.0.mini_batch=4")
    runs = [run(recipe, tmp_path / on, *changes, f"model.router_replay={on}") for on in ("true", "false")]
    first, second = ([rows[step]["learner/grad_norm"] for rows in runs] for step in (0, 1))
    assert first[0] == pytest.approx(first[1], rel=1e-4)
    assert second[0] != pytest.approx(second[1], rel=1e-4)


def test_what_cannot_be_replayed_is_refused_before_the_run(recipe: Path, toy_model: Path, tmp_path: Path) -> None:
    def told(*changes: str) -> str:
        with pytest.raises(RecipeError) as caught:
            run(recipe, tmp_path / "run", *changes)
        return str(caught.value)

    assert "is no mixture of experts" in (text := told(f"start.model={toy_model}"))
    assert text.startswith("model.router_replay")
    (tmp_path / "rollouts").mkdir()
    recorded = ("rollout.engine=replay", f"rollout.replay={tmp_path / 'rollouts'}")
    assert "recordings do not hold the experts" in told(*recorded)
    (tmp_path / "engine.py").write_text(
        "from magicrl.rollout.protocol import RolloutEngine\ndef make(settings): return RolloutEngine()\n"
    )
    text = told(f"rollout.engine={tmp_path / 'engine.py'}:make")
    assert text.startswith("model.router_replay")
    assert "does not report the experts that it chose" in text
    sft = tmp_path / "sft.toml"
    sft.write_text(
        '[model]\nfolder = "start"\n[training]\nrouter_replay = true\n[[phases]]\nfamily = "running_sum"\n'
        "steps = 1\nbatch_size = 1\nlearning_rate = 1e-3\n"
    )
    with pytest.raises(ValueError, match="demonstrations were not sampled by an engine"):
        load_sft_recipe(sft)
