"""Runs whose sampler chooses the problems: killed and resumed, and stopped by a sampler that returns nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import goes_on_bit_for_bit, rollouts, run

from magicrl.config.errors import RecipeError

STEPS = ("stages.0.max_steps=4", "stages.1.max_steps=2", "checkpoint.every=1")
ROOT = Path(__file__).resolve().parents[3]


def test_a_killed_run_goes_on_with_the_same_problems(toy_recipe: Path, tmp_path: Path) -> None:
    options = ("data.sampler=difficulty", "data.sampler_options={ hard_to = 0.0, hard_share = 0.0, easy_share = 0.0 }")
    goes_on_bit_for_bit(toy_recipe, tmp_path, *STEPS, "data.train.0.count=12", *options, kill_after=3)
    drawn = rollouts(tmp_path / "whole")
    assert len({row["problem_id"] for row in drawn if row["step"] == 1}) == 8
    # Problems without a correct response at their last visit do not come back while others remain.
    first = [row for row in drawn if row["step"] == 1]
    hard = {row["problem_id"] for row in first} - {row["problem_id"] for row in first if row["reward"]}
    assert hard
    assert not hard & {row["problem_id"] for row in drawn if row["step"] == 2}


def test_the_example_is_a_sampler(toy_recipe: Path, tmp_path: Path) -> None:
    run(toy_recipe, tmp_path / "run", "stages.0.max_steps=1", "stages.1.max_steps=1",
        f"data.sampler={ROOT}/examples/sampler.py:LevelByLevel", "data.train.0.levels=[2, 3]")  # fmt: skip
    assert {row["level"] for row in rollouts(tmp_path / "run")} == {2}


def test_a_sampler_that_stops_returning_problems_loses_nothing(toy_recipe: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = """
from magicrl.data.curricula import ShortFirst


class Tired(ShortFirst):
    def next(self, n, remaining):
        return [] if self._draws > LIMIT else super().next(n, remaining)
"""
    own.write_text(text.replace("LIMIT", "20"))
    options = (*STEPS, f"data.sampler={own}:Tired")
    with pytest.raises(ValueError, match=r"the sampler Tired must return the ids of 8 of .* continue with --resume"):
        run(toy_recipe, tmp_path / "run", *options)
    own.write_text(text.replace("LIMIT", "10**6"))
    whole = run(toy_recipe, tmp_path / "whole", *options)
    assert run(toy_recipe, tmp_path / "run", *options, resume=True) == whole
    own.write_text(text.replace("LIMIT", "-1"))
    with pytest.raises(RecipeError, match=r"data.sampler: the sampler Tired must return"):
        run(toy_recipe, tmp_path / "refused", *options)
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
