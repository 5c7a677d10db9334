"""Supervised training: schedules, tokens of the loss, learning, resuming bit for bit, errors."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import learning
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from magicrl.config.loader import to_toml
from magicrl.config.model_schema import ModelConfig, OptimizerConfig, TinyModelConfig
from magicrl.config.schema import RunConfig, StartConfig
from magicrl.config.sft_schema import SftConfig, SftModelConfig, SftPhaseConfig
from magicrl.data.families import Split
from magicrl.models.loading import LoadedModel, describe_policy, load_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import make_tiny
from magicrl.records import Problem, frozen_tokens
from magicrl.training import sft
from magicrl.training.learner import LocalLearner
from magicrl.training.sft import (
    demonstrations,
    phase_schedule,
    recipe_hash,
    run_sft,
    supervised_sample,
    supervised_start,
    supervised_steps,
)


class Echo:
    """Task of repeating a letter. An option makes the response longer."""

    name = "test_echo"
    verifier = "exact"
    vocabulary = ("a", "b", "c", "d", ":")

    def __init__(self, times: int = 2) -> None:
        self.times = times

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        rng = np.random.default_rng(seed)
        index = 0
        while True:
            letter = "abcd"[int(rng.integers(4))]
            yield Problem(
                id=f"e{index}", prompt=f"{letter} :", references=(letter,), verifier="exact", source="test", level=1
            )
            index += 1

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        return " ".join([problem.references[0]] * self.times)


class Asking:
    """Environment that turns the prompt's letter into the one that the demonstration names."""


class Dialogue(Echo):
    """Task with three turns: say the letter, hear another one twice, say that."""

    environment = f"{__file__}:Asking"

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        for problem in super().stream(seed=seed, split=split, levels=levels):
            yield replace(problem, environment=self.environment)

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        heard = "abcd"[int(rng.integers(4))]
        return (problem.references[0], f": {heard} {heard}", heard)[: self.times + 1]


def recipe(*, seed: int = 0, rate: float = 1e-2, steps: tuple[int, ...] = (25, 10), times: int = 2) -> SftConfig:
    return SftConfig(
        run=RunConfig(name="echo", seed=seed, threads=1),
        model=SftModelConfig(tiny=TinyModelConfig(hidden_size=16, layers=1, intermediate_size=32, max_context=16)),
        phases=tuple(
            SftPhaseConfig(
                family=f"{__file__}:Echo",
                options={"times": times},
                steps=n,
                batch_size=8,
                learning_rate=rate,
                warmup_steps=2,
            )
            for n in steps
        ),
        training=ModelConfig(dtype="float32"),
        optimizer=OptimizerConfig(weight_decay=0.0),
    )


class Killed(Exception):
    """Stand-in for the end of the process."""


def kill_at(step: int):
    def on_step(done: int, total: int) -> None:
        if done == step:
            raise Killed

    return on_step


def test_schedule_warms_up_and_ends_at_a_tenth() -> None:
    linear = phase_schedule(1.0, steps=5, warmup_steps=2, decay="linear")
    assert [linear(i) for i in range(5)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])
    cosine = phase_schedule(2.0, steps=5, warmup_steps=0, decay="cosine")
    # 2 * (0.1 + 0.9 * (1 + cos(pi x)) / 2) at x = 0, 1/4, 1/2, 3/4, 1
    half = 0.5**0.5
    expected = [2.0, 2 * (0.1 + 0.45 * (1 + half)), 1.1, 2 * (0.1 + 0.45 * (1 - half)), 0.2]
    assert [cosine(i) for i in range(5)] == pytest.approx(expected)
    assert phase_schedule(3.0, steps=2, warmup_steps=0, decay="constant")(1) == 3.0


def test_loss_is_the_mean_over_response_tokens_alone_the_end_token_included() -> None:
    config = recipe()
    assert config.model.tiny is not None
    model, tokenizer = make_tiny(config.model.tiny, Echo.vocabulary, seed=1)
    encoder = PromptEncoder(tokenizer, 16)
    problem = Problem(id="p", prompt="a b :", references=("a",), verifier="exact", source="test")
    samples = [
        supervised_sample(encoder.encode(problem), encoder.encode_response("a c"), 0),
        supervised_sample(frozen_tokens([4, 6]), encoder.encode_response("d"), 1),
    ]
    reference = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").double()
    reference.load_state_dict(model.state_dict())
    total = 0.0
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]])
        logprobs = reference(ids).logits[0].log_softmax(-1).detach()
        start = len(sample.prompt_tokens)
        total -= sum(float(logprobs[start + i - 1, token]) for i, token in enumerate(sample.tokens.tolist()))
    learner = LocalLearner(model, learning(loss="nll", model=config.training, optimizer=config.optimizer))
    ((loss, tokens),) = supervised_steps(learner, [samples], {3: 3.5}.__getitem__, first=3)
    assert loss == pytest.approx(total / 5, rel=1e-5)  # 3 + 2 response tokens, ends included
    assert tokens == 10


def test_turns_are_taught_and_observations_are_context() -> None:
    """A demonstration is: letter, end, ``: b b``, ``b``, end. Its loss is the mean over the 4 tokens of the turns."""
    config = recipe(times=2)
    phase = config.phases[0].model_copy(update={"family": f"{__file__}:Dialogue", "batch_size": 3})
    config = config.model_copy(update={"phases": (phase,)})
    assert config.model.tiny is not None
    model, tokenizer = make_tiny(config.model.tiny, Echo.vocabulary, seed=1)
    policy = LoadedModel(
        model=model, tokenizer=tokenizer, end_tokens=frozenset({1}), max_context=16, valid_vocab=7, folder=""
    )
    samples = next(demonstrations(config, 0, policy))
    turns = [0, 1, 5, 6]
    for sample in samples:
        assert sample.tokens[[1, 6]].tolist() == [1, 1], "a turn ends with the end token"
        colon, *heard = sample.tokens[2:5].tolist()
        assert tokenizer.decode([colon]) == ":"
        assert heard == [int(sample.tokens[5])] * 2
        assert sample.loss_mask is not None
        assert np.flatnonzero(sample.loss_mask).tolist() == turns
    reference = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").double()
    reference.load_state_dict(model.state_dict())
    total = 0.0
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]])
        logprobs = reference(ids).logits[0].log_softmax(-1).detach()
        total -= sum(float(logprobs[len(sample.prompt_tokens) + t - 1, int(sample.tokens[t])]) for t in turns)
    learner = LocalLearner(model, learning(loss="nll", model=config.training, optimizer=config.optimizer))
    ((loss, tokens),) = supervised_steps(learner, [samples], lambda step: 0.5)
    assert loss == pytest.approx(total / 12, rel=1e-5)
    assert tokens == 3 * 9


def test_a_demonstration_that_ends_in_an_observation_is_refused(tmp_path: Path) -> None:
    config = recipe(times=1)
    phase = config.phases[0].model_copy(update={"family": f"{__file__}:Dialogue"})
    with pytest.raises(ValueError, match="problem 'e0': its demonstration has 2 texts; pass turn, observation, turn"):
        run_sft(config.model_copy(update={"phases": (phase,)}), tmp_path / "start")


def recorded(model: Path) -> dict[str, Any]:
    """Return the record of how a model was trained."""
    return json.loads((model / "sft.json").read_text())


def test_a_trivial_family_is_learned_saved_and_reused(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    torch.set_num_threads(2)
    result = run_sft(recipe(steps=(60, 5)), tmp_path / "start", lambda *progress: told.append(progress))
    assert torch.get_num_threads() == 2, "the caller's; the recipe has 1"
    record = recorded(result)
    assert [len(phase) for phase in record["losses"]] == [60, 5]
    assert record["losses"][0][0] > 1.5
    assert record["losses"][1][-1] < 0.1
    assert told == [(done, 65) for done in range(1, 66)]
    assert record["tokens"] == 65 * 8 * 5  # two prompt tokens, two letters and the end
    assert not (tmp_path / "start.partial").exists()
    loaded = load_policy(result)
    assert record["recipe"]["phases"][0]["steps"] == 60
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    model = AutoModelForCausalLM.from_pretrained(result)
    encoder = PromptEncoder(loaded.tokenizer, 16)
    problem = Problem(id="p", prompt="c :", references=("c",), verifier="exact", source="test")
    prompt = torch.tensor(encoder.encode(problem).tolist())[None]
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    assert encoder.decode(out[0, 2:].tolist()) == "c c"
    run_sft(recipe(steps=(60, 5)), tmp_path / "start", kill_at(1))  # would raise if it trained
    assert recorded(result) == record


@pytest.mark.parametrize("step", [7, 25, 26, 31])
def test_interrupted_run_ends_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = run_sft(recipe(), tmp_path / "whole")
    monkeypatch.setattr(sft, "_CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(Killed):
        run_sft(recipe(), tmp_path / "cut", kill_at(step))
    assert not (tmp_path / "cut").exists()
    told: list[int] = []
    cut = run_sft(recipe(), tmp_path / "cut", lambda done, total: told.append(done))
    assert told[0] == step  # the step that was killed before its checkpoint, and none before it
    assert recorded(cut)["losses"] == recorded(whole)["losses"]
    assert recorded(cut)["tokens"] == recorded(whole)["tokens"]
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, cut))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_phase_begins_with_fresh_moments(tmp_path: Path) -> None:
    made = run_sft(recipe(steps=(6, 1)), tmp_path / "two")
    first = run_sft(recipe(steps=(6,)), tmp_path / "one")
    assert recorded(made)["losses"][0] == recorded(first)["losses"][0]
    before = load_file(first / "model.safetensors")
    after = load_file(made / "model.safetensors")
    # AdamW's first step moves each weight by lr * g / (|g| + eps): by the warm-up's half rate where g is not tiny.
    moved = (after["model.layers.0.mlp.down_proj.weight"] - before["model.layers.0.mlp.down_proj.weight"]).abs()
    assert float(moved.max()) == pytest.approx(0.5e-2, rel=1e-3)
    assert float(moved.median()) == pytest.approx(0.5e-2, rel=1e-2)


def test_another_recipe_in_the_same_place_is_refused(tmp_path: Path) -> None:
    run_sft(recipe(steps=(2,)), tmp_path / "start")
    with pytest.raises(ValueError, match=r"start belongs to another supervised recipe .*--output or delete"):
        run_sft(recipe(steps=(2,), rate=1e-3), tmp_path / "start")
    with pytest.raises(Killed):
        run_sft(recipe(), tmp_path / "cut", kill_at(2))
    with pytest.raises(ValueError, match=r"cut\.partial belongs to another supervised recipe"):
        run_sft(recipe(seed=1), tmp_path / "cut")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="mine exists and was not made by `magicrl sft`"):
        run_sft(recipe(), tmp_path / "mine")


def test_the_model_has_the_recipes_name_and_another_recipes_has_its_hash_too(tmp_path: Path) -> None:
    def start(seed: int) -> Path:
        config = recipe(steps=(1,), seed=seed)
        (tmp_path / "own-sft.toml").write_text(to_toml(config))
        made, folder = supervised_start(StartConfig(sft=str(tmp_path / "own-sft.toml")), tmp_path / "models")
        return run_sft(made, folder)

    assert start(0) == start(0) == tmp_path / "models" / "echo"
    other = start(1)
    assert other.name == f"echo-{recipe_hash(recipe(steps=(1,), seed=1))}"
    assert (start(0).name, start(1)) == ("echo", other)


def test_demonstration_longer_than_the_context_names_problem_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'e0' and its demonstration have 23 tokens, more than the context .*\(16\)"):
        run_sft(recipe(times=20), tmp_path / "start")


def test_bfloat16_compute_keeps_float32_masters_across_phases(tmp_path: Path) -> None:
    config = recipe(steps=(20, 20), rate=1e-4)
    result = run_sft(config.model_copy(update={"training": ModelConfig(dtype="bfloat16")}), tmp_path / "b")
    losses = recorded(result)["losses"]
    assert losses[1][-1] < losses[0][0]  # steps of 1e-4 would vanish in bfloat16 weights
    assert describe_policy(load_policy(result).model, load_policy(result).tokenizer, folder="b").valid_vocab == 7
