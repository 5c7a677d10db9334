"""Training with several rewards per response: logged values, a failing reward, a killed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import goes_on_bit_for_bit, rollouts, run

import magicrl
from magicrl.config.loader import load_train_recipe, to_toml
from magicrl.reporting.curves import figure_groups
from magicrl.reporting.read_folders import read_run

REWARDS = """
def brief(problem, response):
    return 1.0 / max(1, len(response.split()) - 3)


def moody(problem, response):
    if len(response) % 2:
        raise RuntimeError("no opinion")
    return 1.0 if "1" in response else 0.0
"""
EVERY = ("stages.0.max_steps=4", "stages.1.max_steps=1", "checkpoint.every=1")


@pytest.fixture
def rewards(toy_recipe: Path) -> Path:
    path = toy_recipe.parent / "rewards.py"
    path.write_text(REWARDS)
    return path


def test_a_killed_run_goes_on(toy_recipe: Path, tmp_path: Path, rewards: Path) -> None:
    several = f"reward=maths + 0.5 * {rewards}:brief + 0.25 * {rewards}:moody"
    rows = goes_on_bit_for_bit(toy_recipe, tmp_path, *EVERY, several, "algorithm.advantage=gdpo", kill_after=3)
    assert all(0 < row["reward/brief/mean"] <= 1 for row in rows)
    assert any(0 < row["reward/moody/not_judged/ratio"] < 1 for row in rows)
    # A failing reward removes no response from its group.
    assert all(row["train/not_judged/ratio"] == 0 for row in rows)
    assert all(row["groups/trained"] for row in rows)
    assert len({row["reward"] for row in rollouts(tmp_path / "whole")}) > 3

    groups = figure_groups(read_run(tmp_path / "whole"))
    charts = {chart.key: chart for _, panels, _ in groups for panel in panels for chart in panel}
    assert {line.label.removesuffix(", mean of 5 steps") for line in charts["rewards"].series} >= {"brief", "moody"}
    assert [line.label for line in charts["rewards_not_judged"].series] == ["moody"]


def test_gdpo_learns_from_groups_whose_sums_are_equal(toy_recipe: Path, tmp_path: Path, rewards: Path) -> None:
    """The second reward is 1 minus the first one: with equal weights all sums are equal, the single rewards are not."""
    rewards.write_text(
        "def even(p, r):\n    return float(len(r) % 2 == 0)\ndef odd(p, r):\n    return float(len(r) % 2)\n"
    )
    several = f"reward={rewards}:even + {rewards}:odd"
    steps = (
        "stages.0.max_steps=1",
        "stages.1.max_steps=1",
        "data.online_filter=false",
        "algorithm.advantage_mask=before",
    )
    level = run(toy_recipe, tmp_path / "group", *steps, several)
    assert all(row["groups/trained"] == 0 for row in level)
    apart = run(toy_recipe, tmp_path / "gdpo", *steps, several, "algorithm.advantage=gdpo")
    assert all(row["groups/trained"] > 0 for row in apart)


def test_in_python_a_dict_gives_the_weights(toy_recipe: Path, tmp_path: Path, rewards: Path) -> None:
    def short(problem: magicrl.Problem, response: str) -> float:
        return float(len(response) < 9)

    settings = {"stages.0.max_steps": 1, "stages.1.max_steps": 1, "data.test": {}, "evaluation.every": 0}

    def train(weights: dict, resume: bool = False) -> magicrl.Run:
        given = {"settings": settings, "output": tmp_path / "run", "progress": False, "resume": resume}
        return magicrl.train(toy_recipe, reward=weights, **given)

    done = train({"maths": 1.0, short: 0.5})
    assert done.metrics["reward/short/mean"].between(0, 1).all()
    assert "no command can reproduce it" in (done.model / "README.md").read_text()
    with pytest.raises(
        ValueError, match=r"was started in Python with data.train.0.verifier = 1 \* maths \+ 0.5 \* live:"
    ):
        train({"maths": 1.0, short: 0.6}, resume=True)
    with pytest.raises(ValueError, match="reward must give a number to each of its rewards"):
        train({"maths": "much"})


def test_paths_are_counted_from_the_recipe_and_a_changed_file_is_noticed(toy_recipe: Path, rewards: Path) -> None:
    text = toy_recipe.read_text().replace("count = 60", 'count = 60\nverifier = "maths + 0.5 * rewards.py:brief"')
    toy_recipe.write_text(text)
    config = load_train_recipe(toy_recipe, [])
    assert config.data.train[0].verifier == f"maths + 0.5 * {rewards}:brief"
    assert 'verifier = "maths + 0.5 * rewards.py:brief"' in to_toml(config, toy_recipe.parent)

    from magicrl.config.loader import custom_files

    assert list(custom_files(config)) == ["data.train.0.verifier.1"]
