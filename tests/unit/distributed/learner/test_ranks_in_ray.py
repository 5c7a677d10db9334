"""Ranks as Ray actors: the same learner, and the effect of a killed actor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.distributed.learner.launchers import RayLauncher
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.records import TrainBatch, TrainSample
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

ray = pytest.importorskip("ray")
CONTROLS = Controls(alpha=0.05, temperature=0.8, learning_rate=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("three_nodes")
def test_actors_are_one_learner_and_a_dead_one_is_mended(
    loaded: Callable[[], Any], recorded: list[TrainSample], tmp_path: Path
) -> None:
    settings = LearnerSettings(
        model=ModelConfig(dtype="float32", micro_batch_tokens=70), optimizer=OptimizerConfig(max_grad_norm=0.5)
    )
    policy = loaded()
    one = LocalLearner(policy.model, settings, valid_vocab=policy.valid_vocab)
    many = DistributedLearner(
        loaded(),
        settings,
        launcher=RayLauncher([{"num_cpus": 0}] * 2, files=[str(tmp_path / f"{process}.log") for process in range(2)]),
        placement=LearnerPlacement(ranks=2),
        threads=1,
        rebuilds=1,
    )
    for batch in (TrainBatch.of(recorded[:9]), TrainBatch.of(recorded)):
        expected = one.update(batch, CONTROLS)
        assert dict(many.update(batch, CONTROLS)) == pytest.approx(dict(expected), rel=1e-4, abs=1e-6)
        if not many.lost:
            ray.kill(many._ranks.actors[1])  # type: ignore[union-attr]
    assert list(many.weights()) == list(one.weights())
    assert len(many.lost) == 1
    assert many.lost[0].startswith("learner rank 1 died")
    assert f"(its output: {tmp_path}/1.log)" in many.lost[0]
    assert (tmp_path / "1.log").read_text().count("--- process") == 2, "and its successor's"
    many.close()
