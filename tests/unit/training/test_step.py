"""Figures of a step that stop the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magicrl.config.loader import load_train_recipe
from magicrl.records import StepMetrics
from magicrl.training.protocols import TrainingStopped
from magicrl.training.step import Trainer


def check(values: dict[str, Any], *settings: str) -> None:
    part: Any = None
    parts = dict.fromkeys(("engine", "learner", "judge", "encode", "sampler", "controller"), part)
    Trainer(load_train_recipe(Path("tiny"), settings), **parts).check(StepMetrics(step=1, stage=0, values=values))


def test_a_sampler_gap_that_is_not_finite_stops_the_run() -> None:
    gap = {"learner/sgd_steps": 1, "learner/sampler_gap_mean": 0.1, "learner/sampler_gap_max": 0.2}
    check(gap)
    check({"learner/sgd_steps": 0})
    # metrics have None for NaN and infinity
    unknown = gap | {"learner/sampler_gap_mean": None, "learner/sampler_gap_max": None}
    with pytest.raises(TrainingStopped, match=r"rollout\.engine = 'in_process' reported log-probs that are NaN"):
        check(unknown)
    check(unknown, "rollout.max_sampler_gap=inf")
    with pytest.raises(TrainingStopped, match=r"start a new run with --set model\.exact=false"):
        check(gap, "model.exact=true", "model.dtype=float32")
