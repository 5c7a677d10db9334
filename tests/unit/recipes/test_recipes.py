"""Every shipped recipe parses, and everything that it refers to exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicrl.config.data_schema import SourceConfig
from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.data.sources import load_problems

RECIPES = Path(__file__).resolve().parents[3] / "src" / "magicrl" / "recipes"
SFT = sorted(RECIPES.glob("*-sft.toml"))
TRAIN = sorted(set(RECIPES.glob("*.toml")) - set(SFT))


def test_there_are_recipes() -> None:
    assert {p.stem for p in TRAIN} >= {"quickstart", "smollm2"}


@pytest.mark.parametrize("path", SFT, ids=lambda p: p.stem)
def test_supervised_recipes_parse(path: Path) -> None:
    assert load_sft_recipe(path).run.name


@pytest.mark.parametrize("path", TRAIN, ids=lambda p: p.stem)
def test_training_recipes_parse_and_their_start_exists(path: Path) -> None:
    start = load_train_recipe(path).start
    if path.stem == "family":  # trains a published model without a supervised start
        assert start.model is not None
    else:
        assert start.sft is not None
        assert load_sft_recipe(path.parent / start.sft).phases


def test_on_a_cluster_the_recipe_differs_by_its_cluster_section_alone() -> None:
    alone, there = (load_train_recipe(RECIPES / f"{name}.toml") for name in ("smollm2", "smollm2-cluster"))
    assert alone.cluster is None
    assert there.cluster is not None
    assert there.cluster.learner.ranks == there.cluster.rollout.replicas == 2
    assert there.model_copy(update={"cluster": None}) == alone


@pytest.mark.parametrize("path", TRAIN, ids=lambda p: p.stem)
def test_no_test_problem_is_trained_on(path: Path) -> None:
    config = load_train_recipe(path)

    def load(source: SourceConfig) -> set[str]:
        if source.family is None:
            return set()
        return {p.prompt for p in load_problems(source)}

    train = set().union(*map(load, config.data.train))
    validation = set().union(*map(load, config.data.validation))
    test = set().union(*map(load, config.data.test.values()))
    assert train.isdisjoint(test)
    assert train.isdisjoint(validation)
    assert validation.isdisjoint(test)
