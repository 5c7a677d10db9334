"""A killed and resumed run with Muon, and settings that are rejected before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import goes_on_bit_for_bit

from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe

LORA = 'model.lora={ rank = 2, alpha = 4.0, target_modules = ["q_proj", "v_proj"] }'


@pytest.mark.parametrize("more", [(), (LORA,)], ids=["all", "lora"])
def test_a_killed_run_goes_on(toy_recipe: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    steps = ("stages.0.max_steps=3", "stages.1.max_steps=1", "checkpoint.every=1", "optimizer.kind=muon")
    rows = goes_on_bit_for_bit(toy_recipe, tmp_path, *steps, *more, kill_after=2)
    assert any(row.get("learner/grad_norm", 0) > 0 for row in rows)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (("optimizer.kind=muon", "cluster={}"), "each rank has some rows of a matrix"),
        (("optimizer.momentum=0.8",), "optimizer.momentum is Muon's"),
    ],
)
def test_what_does_not_fit_is_refused(toy_recipe: Path, settings: tuple[str, ...], error: str) -> None:
    with pytest.raises(RecipeError, match=error):
        load_train_recipe(toy_recipe, list(settings))
