"""Gradients that add up, AdamW with each step's settings, and checkpoints, against plain transformers and torch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from magicrl.serving.messages import Datum, LossRequest
from magicrl.serving.trainer import ServedTrainer, lora_of

CPU = torch.device("cpu")
ADAM = {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 0.0}


def trainer(model: str, lora: dict[str, Any] | None = None) -> ServedTrainer:
    return ServedTrainer(model, lora_of(lora), dtype="float32", device=CPU)


def datum(seed: int, length: int, **changes: Any) -> Datum:
    """Return a datum whose targets are not its next tokens, so that a server that shifts the input is found."""
    rng = np.random.default_rng(seed)
    inputs = {
        "target_tokens": rng.integers(4, 200, length),
        "logprobs": rng.uniform(-6, -4, length).astype(np.float32),
        "advantages": rng.normal(size=length).astype(np.float32),
    }
    return rng.integers(4, 200, length), {**inputs, **changes}


def request(*data: Datum, loss: str = "importance_sampling", backward: bool = True) -> LossRequest:
    return LossRequest(model_id="m", seq_id=1, data=data, loss=loss, config={}, backward=backward)


def slow_loss(model: Any, data: list[Datum]) -> torch.Tensor:
    """Return the summed importance-sampling loss, one datum and one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, inputs in data:
        logits = model(input_ids=torch.tensor(tokens)[None]).logits[0].double()
        for position in range(len(tokens)):
            logprob = logits[position].log_softmax(0)[int(inputs["target_tokens"][position])]
            ratio = (logprob - float(inputs["logprobs"][position])).exp()
            total = total - ratio * float(inputs["advantages"][position])
    return total


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_are_those_of_torch_on_the_sum_of_all_gradients_since_the_last(model: str, clip: float) -> None:
    ours = trainer(model)
    slow: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(slow.parameters())
    for step, rate in enumerate((3e-3, 1e-3)):
        first, second = [datum(step, 9), datum(step + 10, 4)], [datum(step + 20, 1)]
        ours.forward_backward(request(*first))
        ours.forward_backward(request(*second))
        # A forward pass between them adds nothing.
        ours.forward_backward(request(*first, backward=False))
        metrics = ours.step({**ADAM, "learning_rate": rate, "grad_clip_norm": clip})
        optimizer.zero_grad()
        slow_loss(slow, first + second).backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in slow.parameters()))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        if clip:
            torch.nn.utils.clip_grad_norm_(slow.parameters(), clip)
        for group in optimizer.param_groups:
            group |= {"lr": rate, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
        optimizer.step()
    weights = ours.weights()
    for name, value in slow.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_restored_trainer_continues_bit_for_bit(model: str, tmp_path: Path, lora: dict[str, Any] | None) -> None:
    one, other = trainer(model, lora), trainer(model, lora)
    for step in range(2):
        one.forward_backward(request(datum(step, 8)))
        one.step(ADAM)
    one.save(tmp_path / "folder" / "a.safetensors")
    assert not one.unsaved
    # Earlier gradients belong to other weights.
    other.forward_backward(request(datum(9, 8)))
    other.restore(tmp_path / "folder" / "a.safetensors", optimizer=True)
    assert other.steps == 2
    with pytest.raises(ValueError, match="no step, since there was no forward_backward"):
        other.step(ADAM)
    for each in (one, other):
        each.forward_backward(request(datum(5, 8)))
        each.step(ADAM)
    ours, theirs = one.weights(), other.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one.unsaved


def test_adapters_of_other_weights_are_refused(model: str, tmp_path: Path) -> None:
    folder, saved = str(shutil.copytree(model, tmp_path / "model")), tmp_path / "a.safetensors"
    one = trainer(folder, {"rank": 4})
    weights = load_file(f"{folder}/model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "other", {"format": "pt"})
    (tmp_path / "other").replace(f"{folder}/model.safetensors")
    one.save(saved)  # of the weights that it was made with
    with pytest.raises(ValueError, match=r"a\.safetensors holds adapters of \S+/model with other weights than it has"):
        trainer(folder, {"rank": 4}).restore(saved, optimizer=True)
    whole = trainer(model)
    whole.save(saved)
    trainer(folder).restore(saved, optimizer=True)  # it holds all weights


def test_without_the_optimizer_only_weights_are_restored(model: str, tmp_path: Path) -> None:
    one, other = trainer(model), trainer(model)
    one.forward_backward(request(datum(0, 8)))
    one.step(ADAM)
    one.save(tmp_path / "a.safetensors")
    other.restore(tmp_path / "a.safetensors", optimizer=False)
    assert other.steps == 0
    ours, theirs = one.weights(), other.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_failed_backward_pass_costs_the_step_and_nothing_else(model: str) -> None:
    ours = trainer(model)
    before = ours.weights()
    ours.forward_backward(request(datum(0, 8)))
    with pytest.raises(ValueError, match="the importance_sampling loss is nan"):
        ours.forward_backward(request(datum(1, 8, advantages=np.full(8, np.nan, np.float32))))
    # A later chunk of the same forward_backward arrives, and the gradient is still incomplete.
    ours.forward_backward(request(datum(2, 8)))
    with pytest.raises(ValueError, match="no step, since a forward_backward before it failed: the importance"):
        ours.step(ADAM)
    with pytest.raises(ValueError, match="no step, since there was no forward_backward after the last one"):
        ours.step(ADAM)
    assert all(torch.equal(value, before[name]) for name, value in ours.weights().items())
    clean = trainer(model)
    for each in (ours, clean):
        each.forward_backward(request(datum(3, 8)))
        each.step(ADAM)
    theirs = clean.weights()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.weights().items())


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        ([datum(0, 3)], "cross_entropy", r"datum 0 has loss_fn_inputs \['advantages', .*'cross_entropy' reads \['ta"),
        ([datum(0, 3), datum(0, 129)], "importance_sampling", "datum 1 has 129 tokens; the model takes 1 to 128"),
        (
            [datum(0, 1, target_tokens=np.array([260]))],
            "importance_sampling",
            "datum 0: target_tokens has tokens 260 to 260, and the model has 260; use the tokenizer of",
        ),
        ([], "importance_sampling", "the request holds no data"),
    ],
)
def test_data_that_do_not_fit_are_named(model: str, data: list[Datum], loss: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(model).forward_backward(request(*data, loss=loss))


def test_a_rate_that_is_no_number_leaves_the_weights(model: str) -> None:
    ours = trainer(model)
    before = ours.weights()
    for rate, message in (
        (math.nan, r"the gradient norm is .*, the learning rate nan"),
        (-1e-3, r"the gradient norm is .*, the learning rate -0\.001"),
        (None, r"learning_rate is None; send a finite number"),
    ):
        ours.forward_backward(request(datum(0, 8)))
        wrong: Any = {**ADAM, "learning_rate": rate}
        with pytest.raises(ValueError, match=f"no step: {message}"):
            ours.step(wrong)
    ours.forward_backward(request(datum(0, 8)))
    with pytest.raises(ValueError, match=r"^no step: beta2 is 1\.5\. Input should be less than 1$"):
        ours.step({**ADAM, "beta2": 1.5})
    assert all(torch.equal(value, before[name]) for name, value in ours.weights().items())


def test_a_full_disk_names_the_checkpoint_and_leaves_nothing(
    model: str, tmp_path: Path, room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    with room_for(100), pytest.raises(OSError, match=r"a\.safetensors'$"):
        trainer(model).save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_adapters_are_those_that_the_client_requests() -> None:
    config = lora_of({"rank": 8, "train_attn": False, "train_mlp": True, "train_unembed": True})
    assert config is not None
    assert (config.rank, config.alpha, config.target_modules) == (8, 32, ("gate_proj", "up_proj", "down_proj"))
    with pytest.raises(ValueError, match="the unembedding cannot be adapted here"):
        lora_of({"rank": 8, "train_attn": False, "train_mlp": False})
    for rank in (0, "many"):
        with pytest.raises(ValueError, match=rf"^lora_config: rank is {rank!r}\. Input should be [^\n]*$"):
            lora_of({"rank": rank})
