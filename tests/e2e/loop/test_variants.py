"""Every method, and every option that changes the path of a step through the loop, end to end on the toy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from magicrl.algorithms.losses import LOSSES
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.models.head import Float32Head
from magicrl.training.checkpoint import CheckpointError, checkpoint_folders, export_checkpoint
from magicrl.training.protocols import TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

SHORT = ("stages.0.max_steps=2", "stages.1.max_steps=1", "evaluation.every=0", "evaluation.temperatures=[0.0]")
NO_TESTS = ("data.test={}", "evaluation.every=0")


def run(recipe: Path, output: Path, *overrides: str) -> list[dict[str, Any]]:
    config = load_train_recipe(recipe, overrides)
    run_training(config, output, NullObserver(), resume=False)
    return [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"nll"}))
def test_every_loss_row_trains(toy_recipe: Path, tmp_path: Path, loss: str) -> None:
    rows = run(
        toy_recipe,
        tmp_path / "run",
        *SHORT,
        f"algorithm.loss={loss}",
        "stages.0.mini_batch=4",
        "algorithm.reuse=2",
        "reference.mode=loss",
        "reference.coefficient=1e-3",
        "entropy.controller=fixed",
        "entropy.alpha=1e-3",
        "algorithm.correction=tis",
        "algorithm.refill=until_full",
        "algorithm.refill_rounds=40",
    )
    assert rows[0]["learner/sgd_steps"] == 4
    assert all(row["learner/grad_norm"] > 0 for row in rows)
    assert rows[-1]["learner/kl"] > 0
    assert all(row["entropy/alpha"] == 1e-3 for row in rows)


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        (("algorithm.advantage=pass_at_k", "algorithm.advantage_k=2"), ("algorithm.advantage=pass_at_k",)),
        (("algorithm.advantage=reinforce_pp_baseline",), ()),
        (("algorithm.overlong_buffer=6",), ()),
        (("algorithm.loss=scalerl", "algorithm.advantage=batch_std", "algorithm.correction=tis"), ()),
    ],
    ids=["pass_at_k", "reinforce_pp_baseline", "overlong", "scalerl"],
)
def test_another_advantage_is_another_update_of_the_same_responses(
    toy_recipe: Path, tmp_path: Path, settings: tuple[str, ...], beside: tuple[str, ...]
) -> None:
    short = (*NO_TESTS, "stages.0.max_steps=1", "stages.1.max_steps=1")
    plain = run(toy_recipe, tmp_path / "plain", *short, *beside)[0]
    found = run(toy_recipe, tmp_path / "run", *short, *settings)[0]
    # the records hold rewards, rejection and entropy of the step
    for key in (key for key in plain if key.startswith(("train/", "groups/", "length/", "entropy/"))):
        assert found[key] == plain[key], key
    assert 0 < found["learner/grad_norm"] != plain["learner/grad_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["algorithm.overlong_buffer=8"], "overlong_buffer = 8 is not below stages.0.max_tokens = 8"),
        (["algorithm.advantage=pass_at_k", "algorithm.advantage_k=5"], "is above stages.0.group_size = 4"),
        (["algorithm.advantage=maxrl", "algorithm.overlong_buffer=2"], "maxrl divides by their mean"),
        (["algorithm.advantage=reinforce_pp"], "needs algorithm.reject_zero_advantage = false"),
        (["algorithm.advantage=OWN:max_likelihood", "algorithm.overlong_buffer=2"], "is maxrl: .* by their mean"),
        (["algorithm.advantage=OWN:mine", "algorithm.overlong_buffer=2"], "own.py:mine' is gdpo: .* does not read"),
    ],
)
def test_advantages_that_do_not_fit_the_settings_are_refused(
    toy_recipe: Path, tmp_path: Path, settings: list[str], told: str
) -> None:
    (tmp_path / "own.py").write_text(
        "from magicrl.algorithms.advantages import group_relative, max_likelihood\n"
        "def mine(a):\n    return group_relative(a)\nmine.by_parts = True\n"
    )
    with pytest.raises(RecipeError, match=told):
        run(toy_recipe, tmp_path / "run", *(one.replace("OWN", f"{tmp_path}/own.py") for one in settings))
    assert not (tmp_path / "run").exists()


def test_lora_trains_adapters_and_saves_a_whole_model(toy_recipe: Path, toy_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    refill = ("algorithm.refill=until_full", "algorithm.refill_rounds=40")  # every step has something to learn from
    rows = run(toy_recipe, output, *SHORT, *refill, "model.lora.rank=4", "optimizer.learning_rate=1e-2")
    assert all(row["learner/sampler_gap_max"] < 1e-3 for row in rows), "the engine serves the merged weights"
    before, after = load_file(toy_model / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    # the last checkpoint gives the same model, with adapters
    last = export_checkpoint(output, checkpoint_folders(output)[-1], tmp_path / "last")
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        theirs, ours = load_file(last / name), load_file(output / "model" / name)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[key], ours[key]) for key in ours)
    described = json.loads((output / "model" / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(toy_model)
    document = json.loads((output / "run.json").read_text())
    (output / "run.json").write_text(json.dumps(document | {"start_weights": "others"}))
    with pytest.raises(CheckpointError, match=rf"the weights of their base {toy_model} changed since the run started"):
        export_checkpoint(output, checkpoint_folders(output)[-1], tmp_path / "again")


def test_replayed_rollouts_give_the_same_updates(toy_recipe: Path, tmp_path: Path) -> None:
    first = run(toy_recipe, tmp_path / "first", *NO_TESTS)
    again = run(
        toy_recipe,
        tmp_path / "again",
        *NO_TESTS,
        "rollout.engine=replay",
        f"rollout.replay={tmp_path / 'first' / 'rollouts'}",
    )
    for key in ("train/accuracy/mean", "learner/loss", "learner/grad_norm", "entropy/exact/mean"):
        assert [row.get(key) for row in again] == [row.get(key) for row in first]


@pytest.mark.parametrize(
    ("precision", "gap"),
    [
        (["model.dtype=bfloat16"], 0.05),
        (["model.dtype=bfloat16", "model.head_dtype=float32"], 0.05),
        (["model.dtype=float16"], 0.005),
        (["model.dtype=float16", "model.head_dtype=float32"], 0.005),
    ],
)
def test_narrow_precisions_keep_the_sampler_near_and_go_on_bit_for_bit(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: list[str], gap: float
) -> None:
    heads: list[Any] = []
    put = Float32Head.put_into
    monkeypatch.setattr(Float32Head, "put_into", lambda model: (heads.append(model), put(model)))
    settings = [*SHORT, "data.test={}", "checkpoint.every=1", "checkpoint.keep_last=9", *precision]
    rows = run(toy_recipe, tmp_path / "run", *settings)
    assert len(heads) == (2 if len(precision) > 1 else 0), "the learner's and the engine's"
    assert all(0 < row["learner/sampler_gap_mean"] < gap for row in rows if row["learner/sgd_steps"])
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-00000{step}")
    shutil.rmtree(tmp_path / "cut" / "model")
    run_training(load_train_recipe(toy_recipe, settings), tmp_path / "cut", NullObserver(), resume=True)
    whole, again = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "cut"))
    assert {str(value.dtype) for value in whole.values()} == {precision[0].replace("model.dtype=", "torch.")}
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    last = export_checkpoint(tmp_path / "run", checkpoint_folders(tmp_path / "run")[-1], tmp_path / "last")
    exported = load_file(last / "model.safetensors")
    assert all(exported[name].dtype == whole[name].dtype for name in whole)
    assert all(torch.equal(exported[name], whole[name]) for name in whole)
    states = [
        (tmp_path / name / "checkpoints" / "step-000003" / "state.json").read_text().count('"loss_scale": 65536.0')
        for name in ("run", "cut")
    ]
    assert states == [1, 1] if "model.dtype=float16" in precision else [0, 0]


@pytest.mark.parametrize(
    ("dtype", "several"), [("float32", ("stages.0.mini_batch=4", "algorithm.reuse=2")), ("bfloat16", ())]
)
def test_exact_sampler_and_learner_part_by_no_bit(
    toy_recipe: Path, tmp_path: Path, dtype: str, several: tuple[str, ...]
) -> None:
    refill = ("algorithm.refill=until_full", "algorithm.refill_rounds=40")
    rows = run(toy_recipe, tmp_path / "run", *SHORT, *refill, f"model.dtype={dtype}", "model.exact=true", *several)
    assert [row["learner/sampler_gap_max"] for row in rows] == [0.0] * len(rows)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["rollout.engine=vllm", "entropy.estimator=sampled"], 'model.exact with rollout.engine = "vllm"'),
        (["model.lora.rank=4"], "model.exact with model.lora"),
        (["rollout.dtype=bfloat16", "model.dtype=float32"], "model.exact with rollout.dtype"),
        (["rollout.dtype=float32", "model.dtype=bfloat16"], "model.exact with rollout.dtype"),
        (["run.device=cuda"], "not proven there"),
    ],
)
def test_exact_is_refused_where_it_is_not_proven(toy_recipe: Path, settings: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        load_train_recipe(toy_recipe, [*settings, "model.exact=true"])


def test_an_engine_that_serves_other_weights_stops_the_run(toy_recipe: Path, tmp_path: Path) -> None:
    """The rounding of bfloat16 simulates other weights: it is far above a bound that any correct engine keeps."""
    with pytest.raises(TrainingStopped, match="the engine has other weights than the learner"):
        run(toy_recipe, tmp_path / "run", *SHORT, "model.dtype=bfloat16", "rollout.max_sampler_gap=1e-6")
    assert not list((tmp_path / "run" / "checkpoints").glob("step-000001*")), "the step is in no checkpoint"


def test_refill_fills_the_batch_with_groups_that_teach(toy_recipe: Path, tmp_path: Path) -> None:
    plain = run(toy_recipe, tmp_path / "plain", *SHORT)
    filled = run(toy_recipe, tmp_path / "filled", *SHORT, "algorithm.refill=until_full", "algorithm.refill_rounds=40")
    assert min(row["groups/trained"] for row in plain) < 8
    assert all(row["groups/trained"] == 8 for row in filled)
    assert all(row["groups/sampled"] == 8 + row["groups/refilled"] for row in filled)


@pytest.mark.parametrize("mask", ["before", "after"])
def test_advantage_masks_run(toy_recipe: Path, tmp_path: Path, mask: str) -> None:
    rows = run(toy_recipe, tmp_path / "run", *SHORT, f"algorithm.advantage_mask={mask}", "stages.0.max_tokens=4")
    assert rows[0]["train/truncation/ratio"] > 0
