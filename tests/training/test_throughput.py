"""Speed of a step: what is counted, and for whom there is no MFU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from magicrl.config.loader import load_train_recipe
from magicrl.planning.costs import sequence_work
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.metrics import Throughput, rates, sampled_work, trained_work

RECIPE = Path(__file__).parents[2] / "src" / "magicrl" / "recipes" / "tiny.toml"
# one layer of 152 parameters, a head of 40; a token that sees one costs 16 of attention
MODEL = {
    "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": True,
}  # fmt: skip
# a prompt of 2 with responses of 1 and 3: 4 tokens enter, 4 are predicted, 10 are seen
FORWARD = 4 * 2 * 152 + 4 * 2 * 40 + 10 * 16


def sample(prompt: list[int], tokens: int, group: int = 0) -> TrainSample:
    return TrainSample(
        prompt_tokens=frozen_tokens(prompt),
        tokens=frozen_tokens([1] * tokens),
        advantage=1.0,
        group_index=group,
        sample_index=0,
        sampler_logprobs=frozen_floats(np.zeros(tokens)),
        policy_version=0,
    )


def group(prompt: int, *responses: int) -> Any:
    completions = [range(n) for n in responses]
    return SimpleNamespace(
        group=SimpleNamespace(request=SimpleNamespace(prompt_tokens=range(prompt)), completions=completions)
    )


def recipe(**changes: Any) -> Any:
    return load_train_recipe(RECIPE, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])


def on(*names: str) -> Any:
    return SimpleNamespace(devices=names, peak_mb=lambda: 7.0)


def test_a_prompt_counts_once_an_update() -> None:
    one = TrainBatch.of([sample([5, 6], 1), sample([5, 6], 3), sample([7], 2, 1)])
    assert trained_work([one]) == sequence_work([(2, [1, 3]), (1, [2])])
    assert trained_work([one, one]) == trained_work([one]) + trained_work([one]), "a second pass is work again"
    assert trained_work([]) == sequence_work([])


def test_a_draw_s_prompt_counts_once_in_sampling() -> None:
    assert sampled_work([group(2, 1, 3), group(2, 0, 4)]) == sequence_work([(2, [1, 3]), (2, [4])])


def test_rates_by_hand() -> None:
    found = rates("learner", 100, 2e15, 4.0, ("NVIDIA H200", "NVIDIA H200"), bf16=True)
    assert found == {
        "flops/learner": 2e15,
        "speed/learner/tokens_per_second": 25.0,
        "speed/learner/tokens_per_second_per_device": 12.5,
        "speed/learner/flops_per_second": 5e14,
        "speed/learner/mfu": pytest.approx(5e14 / (2 * 989e12)),
    }
    assert rates("learner", 1, 1.0, 0.0, ("cpu",), bf16=True) == {}
    assert rates("learner", 1, 1.0, 1.0, (), bf16=True) == {}


@pytest.mark.parametrize(
    ("devices", "bf16"),
    [(("cpu",), True), (("NVIDIA H200", "NVIDIA H100 PCIe"), True), (("NVIDIA H200",), False)],
)
def test_without_the_peak_of_this_arithmetic_there_is_no_mfu(devices: tuple[str, ...], bf16: bool) -> None:
    found = rates("engine", 10, 8.0, 2.0, devices, bf16=bf16)
    assert "speed/engine/mfu" not in found
    assert found["speed/engine/flops_per_second"] == 4.0


def test_a_step_s_learner_and_engine() -> None:
    batch = TrainBatch.of([sample([5, 6], 1), sample([5, 6], 3)])
    values = {"time/train": 2.0, "time/rollout": 4.0, "time/step": 7.0}
    meter = Throughput(recipe(model__dtype="bfloat16"), MODEL)
    found = meter.metrics([group(2, 1, 3)], [batch], values, learner=on("NVIDIA H200"), engine=on("cpu", "cpu"))
    assert found["flops/learner"] == 3 * FORWARD
    assert found["speed/learner/tokens_per_second"] == 6 / 2.0, "the prompt's two and the responses' four"
    assert found["speed/learner/mfu"] == pytest.approx(3 * FORWARD / 2.0 / 989e12)
    assert found["memory/learner/peak_mb"] == found["memory/engine/peak_mb"] == 7.0
    assert found["flops/engine"] == FORWARD
    assert found["speed/engine/tokens_per_second"] == 4 / 4.0
    assert found["speed/engine/tokens_per_second_per_device"] == 0.5
    values["idle/engine/seconds"] = 6.0
    late = meter.metrics([group(2, 1, 3)], [], values, learner=on("cpu"), engine=on("cpu"))
    assert late["speed/engine/tokens_per_second"] == 4.0, "asynchronous: over the seconds in which it generated"
    assert not any(key.startswith(("speed/learner", "flops/learner")) for key in late), "nothing was learnt"


def test_adapters_and_unknown_models() -> None:
    batch = TrainBatch.of([sample([5, 6], 1), sample([5, 6], 3)])
    lora = Throughput(recipe(model__lora='{rank=3, target_modules=["q_proj"]}'), MODEL)
    found = lora.metrics([], [batch], {"time/train": 1.0}, learner=on("cpu"), engine=object())
    assert found["flops/learner"] == 2 * (FORWARD - 160) + 3 * 160 + 4 * 6 * 3 * (4 + 4)
    other = Throughput(recipe(), {**MODEL, "model_type": "gemma2"})
    found = other.metrics([], [batch], {"time/train": 1.0}, learner=on("cpu"), engine=object())
    speeds = {"speed/learner/tokens_per_second", "speed/learner/tokens_per_second_per_device"}
    assert set(found) == speeds | {"memory/learner/peak_mb"}
