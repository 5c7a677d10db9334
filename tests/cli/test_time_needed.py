"""How long a run is said to take: measured for a shipped recipe as it is, planned for anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicrl.cli.train import minutes_needed
from magicrl.config.loader import load_train_recipe
from magicrl.config.paths import FOLDER, find_recipe


def said(recipe: Path, *overrides: str) -> str:
    path = find_recipe(recipe)
    return minutes_needed(load_train_recipe(path, ["run.device=cpu", *overrides]), path, overrides)


@pytest.mark.parametrize("overrides", [(), ("run.seed=4",), ("logging.samples=1",)])
def test_a_shipped_recipe_as_it_is_takes_what_was_measured(overrides: tuple[str, ...]) -> None:
    assert said(Path("smollm2"), *overrides) == "about 50 minutes on two CPU cores; "


def test_anything_else_is_planned_for_its_model_and_steps(tmp_path: Path) -> None:
    copied = tmp_path / "mine.toml"
    copied.write_text(
        (FOLDER / "smollm2.toml").read_text().replace('sft = "smollm2-sft.toml"', 'model = "SmolLM2-135M"')
    )
    short = said(Path("smollm2"), "model=SmolLM2-135M", "data=problems.jsonl", "stages.1.max_steps=1")
    for words, steps in ((said(copied), 50), (short, 21)):
        assert f"for at most {steps} training steps as planned on two CPU cores" in words
        assert "50 minutes" not in words
    assert said(Path("smollm2"), "model=nobody/knows-me") == "", "no shape, no plan"
