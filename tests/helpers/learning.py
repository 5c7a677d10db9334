"""Learner settings in a line: what tests vary, in the words of the recipe."""

from __future__ import annotations

from typing import Any

from magicrl.config.schema import AlgorithmConfig, ModelConfig, OptimizerConfig, ReferenceConfig
from magicrl.training.objective import LearnerSettings


def learning(
    *,
    model: ModelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    kl_coefficient: float = 0.0,
    **algorithm: Any,
) -> LearnerSettings:
    """Settings with these keys of ``[algorithm]`` and, where beta is not 0, the reference in the loss."""
    return LearnerSettings(
        algorithm=AlgorithmConfig(**algorithm),
        model=model or ModelConfig(),
        optimizer=optimizer or OptimizerConfig(),
        reference=ReferenceConfig(mode="loss" if kl_coefficient else "none", coefficient=kl_coefficient),
    )
