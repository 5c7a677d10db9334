"""State of the learner: precision, state, adapters, folders; and state that it must not lose."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import learning
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from magicrl.algorithms.loss_terms import LossMetrics
from magicrl.config.model_schema import LoraConfig, ModelConfig, OptimizerConfig, TinyModelConfig
from magicrl.models.packing import PackedBatch, register_attention
from magicrl.models.small_models import make_tiny
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.learner import START_SCALE, LocalLearner, LossScale, MasterOptimizer
from magicrl.training.protocols import Controls, NotFiniteError

SYMBOLS = [f"w{i}" for i in range(30)]
CONTROLS = Controls(alpha=0.01, learning_rate=1e-3)


def learner(dtype: str = "float32", seed: int = 0, **kwargs: Any) -> LocalLearner:
    config = TinyModelConfig(hidden_size=32, layers=2, heads=2, intermediate_size=48, max_context=64)
    model, tokenizer = make_tiny(config, SYMBOLS, seed)
    settings = {"dtype": dtype, "micro_batch_tokens": 100} | kwargs.pop("model", {})
    optimizer = OptimizerConfig(**kwargs.pop("optimizer", {}))
    return LocalLearner(
        model, learning(model=ModelConfig(**settings), optimizer=optimizer), tokenizer=tokenizer, **kwargs
    )


def batch(seed: int) -> TrainBatch:
    rng = np.random.default_rng(seed)
    return TrainBatch.of(
        [
            TrainSample(
                prompt_tokens=frozen_tokens(rng.integers(2, 32, 5)),
                tokens=frozen_tokens(tokens := rng.integers(1, 32, rng.integers(4, 20))),
                advantage=float(rng.normal()),
                group_index=i // 4,
                sample_index=i % 4,
                sampler_logprobs=frozen_floats(np.full(len(tokens), -3.4)),
                policy_version=0,
            )
            for i in range(12)
        ]
    )


def copied(one: LocalLearner) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else dict(v) for k, v in one.state().items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "lora"])
def test_a_restored_learner_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    dtype = "float32" if kind == "lora" else kind
    settings: dict[str, Any] = {"model": {"lora": LoraConfig(rank=2)}} if kind == "lora" else {}
    first = learner(dtype, **settings)
    for seed in range(2):
        first.update(batch(seed), CONTROLS)
    # through files, like a checkpoint: no tensor keeps its memory, no number its type
    tensors = {k: v for k, v in first.state().items() if isinstance(v, torch.Tensor)}
    save_file(tensors, tmp_path / "state.safetensors")
    meta = json.loads(json.dumps(first.state()["meta"]))
    expected = [first.update(batch(seed), CONTROLS) for seed in (2, 3)]

    second = learner(dtype, **settings)
    second.update(batch(9), CONTROLS)  # its earlier updates must not matter
    second.restore({**load_file(tmp_path / "state.safetensors"), "meta": meta})
    assert second.version == 2
    assert [second.update(batch(seed), CONTROLS) for seed in (2, 3)] == expected
    assert_same(copied(second), copied(first))
    assert_same(dict(second.weights()), dict(first.weights()))


def test_state_is_keyed_by_parameter_name() -> None:
    one = learner()
    names = {name for name, _ in one._model.named_parameters()}
    assert {k.removeprefix("weights/") for k in one.state() if k != "meta"} == names
    one.update(batch(0), CONTROLS)
    kinds = {"weights", "exp_avg", "exp_avg_sq"}
    assert set(one.state()) == {f"{kind}/{name}" for kind in kinds for name in names} | {"meta"}
    assert one.state()["meta"] == {"optimizer_steps": 1}


def test_restoring_the_start_forgets_the_moments() -> None:
    one = learner()
    start = copied(one)
    first = one.update(batch(0), CONTROLS)
    one.restore(start)
    assert one.version == 0
    assert one.update(batch(0), CONTROLS) == first


def test_a_foreign_state_is_refused_by_name() -> None:
    one = learner()
    state = copied(one)
    state["weights/model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"differs in .*model\.norm\.weight"):
        one.restore(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loss_that_is_not_finite_changes_nothing(dtype: str) -> None:
    one, clean = learner(dtype), learner(dtype)
    for each in (one, clean):
        each.update(batch(0), CONTROLS)
    before = copied(one)
    samples = list(batch(1).samples)
    samples[3] = dataclasses.replace(samples[3], advantage=float("nan"))
    with pytest.raises(
        NotFiniteError, match=r"loss of update 2 is nan; weights and optimizer are unchanged.*learn"
    ) as raised:
        one.update(TrainBatch.of(samples), CONTROLS)
    assert isinstance(raised.value, FloatingPointError)
    assert raised.value.culprit == (samples[3].group_index, samples[3].sample_index)
    assert_same(copied(one), before)
    assert one.version == 1
    assert one.update(batch(2), CONTROLS) == clean.update(batch(2), CONTROLS)
    assert_same(copied(one), copied(clean))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: str) -> None:
    one = learner(dtype)
    before = copied(one)
    samples = [dataclasses.replace(s, advantage=s.advantage * 2e38) for s in batch(1).samples]
    with pytest.raises(FloatingPointError, match="gradient norm of update 1 is"):
        one.update(TrainBatch.of(samples), dataclasses.replace(CONTROLS, temperature=0.001))
    assert_same(copied(one), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_overflow_are_refused(dtype: str) -> None:
    one = learner(dtype)
    with pytest.raises(FloatingPointError, match="update 1 gave weights that are not finite"):
        one.update(batch(0), dataclasses.replace(CONTROLS, learning_rate=1e39))


def test_bfloat16_computes_low_and_learns_high() -> None:
    low, high = learner("bfloat16"), learner("float32")
    assert {p.dtype for p in low._model.parameters()} == {torch.bfloat16}
    assert low._model.model.rotary_emb.inv_freq.dtype == torch.float32, "positions stay precise"
    values = [one.update(batch(0), CONTROLS) for one in (low, high)]
    for key in ("loss", "entropy", "grad_norm"):
        assert values[0][key] == pytest.approx(values[1][key], rel=0.05, abs=0.01)
    grads = [torch.cat([g.flatten() for g in _gradient(one).values()]) for one in (low, high)]
    assert torch.cosine_similarity(grads[0], grads[1], dim=0) > 0.995


def _gradient(one: LocalLearner) -> dict[str, torch.Tensor]:
    given = batch(1)
    one.accumulate(given.samples, one.objective.sample_weights(given), CONTROLS)
    return one.gradients()


def test_steps_too_small_for_bfloat16_add_up_in_the_masters() -> None:
    one = learner("bfloat16", optimizer={"weight_decay": 0.0})
    name = "model.norm.weight"  # all ones: bfloat16 has no number between 0.9961 and 1, nor between 1 and 1.0078
    for seed in range(3):
        one.update(batch(seed), Controls(learning_rate=1e-4))
    assert one.weights()[name].eq(1).all()
    master = one.state()[f"weights/{name}"]
    assert master.dtype == torch.float32
    assert (master != 1).all()
    for _ in range(30):
        one.update(batch(3), Controls(learning_rate=3e-4))
    assert not one.weights()[name].eq(1).all()


def one_weight() -> tuple[torch.nn.Parameter, MasterOptimizer]:
    weight = torch.nn.Parameter(torch.ones(1))
    return weight, MasterOptimizer({"w": weight}, OptimizerConfig(max_grad_norm=1e9), torch.float16)


def pulling(weight: torch.nn.Parameter, slope: float, scales: list[float]) -> Callable[[float], LossMetrics]:
    """Return a mini-batch whose loss has this slope. Scale factors are appended to ``scales``."""
    other, given = learner(), batch(0)
    metrics = other.accumulate(given.samples, other.objective.sample_weights(given), CONTROLS)

    def accumulate(scale: float) -> LossMetrics:
        scales.append(scale)
        (weight.float() * slope).sum().backward(torch.tensor(scale))
        return metrics

    return accumulate


def test_a_gradient_below_float16_is_learned_from() -> None:
    weight, optimizer = one_weight()
    # 2^-24 is float16's smallest number
    assert torch.tensor(2.0**-26).half() == 0
    _, norm = optimizer.collect(pulling(weight, 2.0**-26, scales := []))
    assert (scales, norm) == ([2.0**16], 2.0**-26)
    assert optimizer.gradients()["w"].tolist() == [2.0**-26]


def test_a_gradient_that_overflows_is_computed_again() -> None:
    weight, optimizer = one_weight()
    # 2^4 x 2^11 = 2^15 is the largest power of two in float16
    _, norm = optimizer.collect(pulling(weight, 2.0**4, scales := []))
    assert scales == [2.0**k for k in (16, 15, 14, 13, 12, 11)]
    assert norm == 2.0**4
    optimizer.step(1e-3, norm)
    assert optimizer.state()["meta"] == {"optimizer_steps": 1, "loss_scale": 2.0**11, "updates_at_loss_scale": 1}
    ordinary = pulling(weight, 1.0, [])
    for _ in range(99):
        optimizer.step(1e-3, optimizer.collect(ordinary)[1])
    assert optimizer.loss_scale.value == 2.0**12, "after 100 updates that went well"


def test_the_updates_before_an_overflow_do_not_count_towards_the_next_growth() -> None:
    scale = LossScale(dynamic=True)
    for _ in range(60):
        scale.passed()
    assert scale.lower()
    for _ in range(99):
        scale.passed()
    assert scale.value == START_SCALE / 2
    scale.passed()
    assert scale.value == START_SCALE


def test_float16_learns_from_small_advantages_as_float32_does() -> None:
    samples = [dataclasses.replace(s, advantage=1e-6 * s.advantage) for s in batch(0).samples]
    quiet = dataclasses.replace(CONTROLS, alpha=0.0)
    norms = [learner(d).update(TrainBatch.of(samples), quiet)["grad_norm"] for d in ("float16", "float32")]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
    metrics = learner("float16").update(batch(0), CONTROLS)
    assert metrics["loss_scale"] >= 1.0
    assert "loss_scale" not in learner("bfloat16").update(batch(0), CONTROLS)


def test_every_precision_learns_what_float32_learns() -> None:
    samples = [dataclasses.replace(s, advantage=1.0) for s in batch(0).samples]
    ends: dict[str, float] = {}
    for dtype, head in (("float32", None), ("bfloat16", "float32"), ("float16", None)):
        one = learner(dtype, model={"head_dtype": head})
        for _ in range(6):
            one.update(TrainBatch.of(samples), dataclasses.replace(CONTROLS, learning_rate=2e-2))
        ends[dtype] = float(np.concatenate(one.logprobs(samples, 1.0)[0]).mean())
    exact = ends["float32"]
    assert exact > -2.0, "from log(1/32) = -3.5"
    assert all(end == pytest.approx(exact, abs=0.05) for end in ends.values()), ends


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.no_grad()
def test_a_float32_head_does_not_round_the_logits(dtype: str) -> None:
    errors: list[float] = []
    for one in (learner(dtype), learner(dtype, model={"head_dtype": "float32"})):
        packed = PackedBatch.of(list(batch(0).samples))
        hidden = one.scorer._hidden(packed.input_ids, packed.position_ids, packed.attention)
        assert str(hidden.dtype) == f"torch.{dtype}", "the body stays narrow"
        logits = hidden[packed.predict_index].double() @ one.scorer.head.weight.double().T
        exact = logits.log_softmax(1).gather(1, packed.targets[:, None])[:, 0]
        errors.append(float((one.scorer.forward(packed, 1.0)[0] - exact).abs().max()))
    assert errors[1] < 1e-6 < 1e-5 < errors[0]


def test_a_recipes_clamp_reaches_the_entropies_and_the_bonus() -> None:
    usual, clamped = learner(), learner(model={"entropy_clamp": 0.5})
    samples = list(batch(0).samples)
    (logprobs, entropies), (same, fewer) = (one.logprobs(samples, 1.0) for one in (usual, clamped))
    assert all(np.array_equal(a, b) for a, b in zip(logprobs, same, strict=True))
    # of 32 tokens, then of the 16 more likely ones
    assert np.concatenate(fewer).max() <= np.log(16) < np.concatenate(entropies).mean()
    norms = [one.update(batch(0), CONTROLS)["grad_norm"] for one in (usual, clamped)]
    assert norms[0] != norms[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saved_folders_hold_the_weights_that_were_used(dtype: str, tmp_path: Path) -> None:
    one = learner(dtype)
    one.update(batch(0), CONTROLS)
    one.save_hf(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert str(loaded.dtype) == f"torch.{dtype}"
    weights = dict(loaded.named_parameters())
    assert set(weights) == set(one.weights())
    for name, value in one.weights().items():
        assert torch.equal(weights[name], value)
    with pytest.raises(ValueError, match="tokenizer"):
        LocalLearner(make_tiny(TinyModelConfig(), SYMBOLS, 0)[0]).save_hf(tmp_path / "other")


def test_lora_trains_adapters_alone_and_gives_merged_weights(tmp_path: Path) -> None:
    plain = learner()
    start = {name: value.clone() for name, value in plain.weights().items()}
    one = learner(model={"lora": LoraConfig(rank=3, alpha=8.0)})
    assert_same(dict(one.weights()), start)  # B starts at 0
    assert all(".lora_" in name for name in one.state() if name != "meta")
    for seed in range(3):
        one.update(batch(seed), Controls(learning_rate=1e-2))
    merged = dict(one.weights())
    assert merged.keys() == start.keys()
    changed = {name for name in start if not torch.equal(start[name], merged[name])}
    assert changed == {name for name in start if name.endswith("_proj.weight")}
    # the merged weights are the policy that was trained, in an engine and on disk
    one.save_hf(tmp_path / "model")
    register_attention()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.detach(), merged[name])
    given = batch(5).samples
    for ours, theirs in zip(one.logprobs(given, 1.0)[0], LocalLearner(loaded, learning(model=ModelConfig(
        dtype="float32"))).logprobs(given, 1.0)[0], strict=True):  # fmt: skip
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_lora_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"magicrl\[lora\]"):
        learner(model={"lora": LoraConfig()})
