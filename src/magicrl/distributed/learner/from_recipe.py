"""The distributed learner that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable

from magicrl.config.schema import TrainConfig
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.learner.ranks import Launcher, LearnerLost
from magicrl.distributed.learner.settings import LearnerTimeouts
from magicrl.models.loading import LoadedModel, resolve_device

REBUILDS = 3
"""Losses of a rank that one call of the learner mends before the run stops."""


def distributed_learner(
    config: TrainConfig,
    policy: LoadedModel,
    launcher: Launcher,
    *,
    on_loss: Callable[[LearnerLost], None] | None = None,
) -> DistributedLearner:
    """The learner of ``[cluster.learner]`` on the start model, with the same objective as a run of one process.

    Args:
        config: the recipe; its ``[cluster]`` section is there.
        policy: the start model, which is the learner's from here on.
        launcher: starts the ranks where the caller wants them.
        on_loss: told of every loss of a rank before it is mended.

    Raises:
        RecipeError: the degree of sequence parallelism does not fit the model.
        LearnerLost: the ranks did not start.
    """
    cluster = config.cluster
    assert cluster is not None, "the caller asks for a distributed learner"
    return DistributedLearner(
        policy,
        launcher=launcher,
        placement=cluster.learner,
        loss=config.algorithm.loss,
        optimizer=config.optimizer,
        model_config=config.model,
        correction=config.algorithm.correction,
        correction_cap=config.algorithm.correction_cap,
        kl_coefficient=config.reference.coefficient,
        max_response_tokens=max(stage.max_tokens for stage in config.stages),
        device=resolve_device(config.run.device).type,
        threads=config.run.threads,
        timeouts=LearnerTimeouts(start=cluster.timeouts.start, call=cluster.timeouts.learner),
        rebuilds=REBUILDS,
        on_loss=on_loss,
    )
