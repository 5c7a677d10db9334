"""Training with an environment from outside the package: tokens that are trained on, stops, failures."""

from __future__ import annotations

import contextlib
import json
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.records import StepMetrics
from magicrl.training.protocols import TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

GAME = """
    from magicrl.environments.base import Step

    class Again:
        '''Says a turn's last word back; the second turn is worth the share of its words that are in the first.'''

        def reset(self, problem):
            self.first = None

        def step(self, text):
            words = text.split()
            if self.first is None and words:
                self.first = words
                return Step(observation=words[-1])
            known = sum(word in (self.first or ()) for word in words)
            return Step(done=True, reward=known / max(1, len(words)), metrics={"words": len(words)})

    class Fails(Again):
        def step(self, text):
            raise RuntimeError("the game is broken")

    class Sometimes(Again):
        def step(self, text):
            if len(text) % 3 == 0:
                raise RuntimeError("the game is broken")
            return super().step(text)
"""
SHORT = (
    "data.train.0.environment=ENV",
    "data.test={}",
    "data.validation.0.environment=ENV",
    "environment.max_turns=3",
    "environment.max_observation_tokens=4",
    "stages.0.max_steps=3",
    "stages.0.max_tokens=20",
    "stages.1.max_steps=1",
    "logging.rollouts_every=1",
)


class Killed(BaseException):
    """Stand-in for SIGKILL."""


class KillAfter(NullObserver):
    def __init__(self, step: int | None) -> None:
        self._step = step
        self.told: list[str] = []

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == self._step:
            raise Killed


@pytest.fixture
def game(tmp_path: Path) -> Path:
    path = tmp_path / "game.py"
    path.write_text(textwrap.dedent(GAME))
    return path


def run(recipe: Path, output: Path, name: str, *more: str, kill: int | None = None, resume: bool = False) -> list[Any]:
    config = load_train_recipe(recipe, [*(text.replace("ENV", name) for text in SHORT), *more])
    with contextlib.suppress(Killed):
        run_training(config, output, KillAfter(kill), resume=resume)
    return [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def rollouts(output: Path) -> list[dict[str, Any]]:
    files = sorted((output / "rollouts").glob("*.parquet"))
    return [
        {k: v for k, v in row.items() if k != "seconds"} for path in files for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(
    toy_recipe: Path, tmp_path: Path, game: Path, staleness: int
) -> None:
    more = (f"rollout.max_staleness={staleness}", "rollout.max_rows=6", "checkpoint.every=1")
    values = run(toy_recipe, tmp_path / "whole", f"{game}:Again", *more)
    assert len(values) == 4
    for row in values:
        assert row["environment/turns"] > 1
        assert row["environment/words"] > 0
        assert 0 < row["train/reward/mean"] < 1
        assert row["train/not_judged/ratio"] == 0
        if not staleness:
            assert row["learner/sampler_gap_max"] < 1e-4, "of sampled tokens: an observation has no log-prob"
    run(toy_recipe, tmp_path / "stopped", f"{game}:Again", *more, kill=2)
    run(toy_recipe, tmp_path / "stopped", f"{game}:Again", *more, resume=True)
    assert rollouts(tmp_path / "stopped") == rollouts(tmp_path / "whole")
    whole, again = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_an_environment_that_sometimes_fails_does_not_stop_the_run(
    toy_recipe: Path, tmp_path: Path, game: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = run(toy_recipe, tmp_path / "run", f"{game}:Sometimes", "stages.0.max_steps=2")
    assert sum(row["train/not_judged/ratio"] for row in values) > 0
    failed = [row for row in rollouts(tmp_path / "run") if row["status"] == "environment_failed"]
    assert failed
    assert not any(row["counted"] for row in failed)
    told = [r.getMessage() for r in caplog.records if "the game is broken" in r.getMessage()]
    assert len(told) == 1
    assert f"environment {game}:Sometimes failed in an episode of problem" in told[0]


def test_an_environment_that_always_fails_stops_the_run(toy_recipe: Path, tmp_path: Path, game: Path) -> None:
    more = ("algorithm.stop_after_empty_steps=2", "evaluation.every=0")
    with pytest.raises(TrainingStopped, match=r"no answer could be judged: \w+Error: "):
        run(toy_recipe, tmp_path / "run", f"{game}:Fails", *more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("environment.max_observation_tokens=40", "with observations of 80 tokens in all exceed the context"),
        ("data.train.0.environment=GAME:Agin", "did you mean 'Again'"),
    ],
)
def test_what_is_refused_before_anything_is_computed(
    toy_recipe: Path, tmp_path: Path, game: Path, more: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        run(toy_recipe, tmp_path / "run", f"{game}:Again", more.replace("GAME", str(game)))
    assert not (tmp_path / "run").exists()
