"""Learner settings in one line, with the names of the recipe."""

from __future__ import annotations

from typing import Any

from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.training.objective import LearnerSettings


def learning(
    *,
    model: ModelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    **algorithm: Any,
) -> LearnerSettings:
    """Return settings with these keys of ``[algorithm]``."""
    return LearnerSettings(
        algorithm=AlgorithmConfig(**algorithm),
        model=model or ModelConfig(),
        optimizer=optimizer or OptimizerConfig(),
    )
