"""Evaluating while a run goes on changes nothing of the run: not a weight, not a sampled token, not a random state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from magicrl.config.loader import load_train_recipe
from magicrl.rollout.recording import read_rollouts
from magicrl.training.held_out import Validation
from magicrl.training.recorder import NullObserver
from magicrl.training.session import train

SHORT = ("stages.0.max_steps=2", "stages.1.max_steps=2")
NEVER = (*SHORT, "evaluation.every=0")
OFTEN = (*SHORT, "evaluation.every=1", "evaluation.validation_samples=3", "evaluation.validation_temperature=0.7")


def run(recipe: Path, output: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], list[list[list[int]]]]:
    """The weights at the end, and every response token that training sampled."""
    train(load_train_recipe(recipe, overrides), output, NullObserver(), resume=False)
    groups = sorted(read_rollouts(output / "rollouts"), key=lambda group: group.request.draw)
    tokens = [[completion.tokens.tolist() for completion in group.completions] for group in groups]
    return load_file(output / "model" / "model.safetensors"), tokens


def random_states() -> list[Any]:
    numpys: Any = np.random.get_state()  # noqa: NPY002 - the global state is what must not move
    return [random.getstate(), numpys[1].tolist(), numpys[2], torch.get_rng_state().tolist()]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_with_evaluation_is_the_run_without(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    lagged = f"rollout.weight_lag={lag}"
    without, sampled_without = run(toy_recipe, tmp_path / "without", *NEVER, lagged)
    measured: list[dict[str, float]] = []
    original = Validation.measure

    def watched(self: Validation, *given: Any, **named: Any) -> dict[str, float]:
        before = random_states()
        values = original(self, *given, **named)
        assert random_states() == before
        measured.append(values)
        return values

    monkeypatch.setattr(Validation, "measure", watched)
    with_it, sampled_with = run(toy_recipe, tmp_path / "with", *OFTEN, lagged)
    assert [set(values) >= {"validation/accuracy/mean"} for values in measured] == [True] * 4
    assert sampled_with == sampled_without
    assert with_it.keys() == without.keys()
    assert all(torch.equal(with_it[name], without[name]) for name in without)
