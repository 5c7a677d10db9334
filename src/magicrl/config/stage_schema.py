"""The ``[[stages]]`` of a recipe: response-length limits and sizes, and when the next stage begins."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.section import Section


class TransitionConfig(Section):
    """When a stage ends before its ``max_steps``.

    ``converged``: the upper 95 % bound of the accuracy gain expected over the next ``horizon`` steps is
    below ``delta``. ``truncation``: the truncated share has stayed below ``truncation_below`` for a window.
    ``fixed``: after ``max_steps`` only.
    """

    rule: Literal["converged", "truncation", "fixed"] = "converged"
    """See above."""
    horizon: int = Field(default=20, ge=1)
    """H: steps over which a gain is predicted."""
    delta: float = Field(default=0.02, gt=0)
    """The gain (in accuracy, 0 to 1) that is not worth waiting for."""
    window: int = Field(default=20, ge=4)
    """Steps between looks, and the least number of points of a look."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Of the upper bound."""
    truncation_below: float = Field(default=0.05, ge=0, le=1)
    """Share of truncated responses, for ``truncation``."""


class StageConfig(Section):
    """One stage of multi-stage training."""

    max_tokens: int = Field(ge=1)
    """T, the response-length limit."""
    rollout_batch: int = Field(ge=1)
    """D_R, prompts per training step."""
    mini_batch: int | None = Field(default=None, ge=1)
    """D_T, prompts per SGD step; default D_R (on-policy)."""
    group_size: int = Field(ge=2)
    """M, responses per prompt."""
    min_steps: int = Field(default=0, ge=0)
    """No transition before so many."""
    max_steps: int = Field(ge=1)
    """The stage ends after so many."""
    transition: TransitionConfig = TransitionConfig()

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.mini_batch is not None and self.rollout_batch % self.mini_batch:
            raise ValueError(f"rollout_batch {self.rollout_batch} must be a multiple of mini_batch {self.mini_batch}")
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} exceeds max_steps {self.max_steps}")
        return self

    @property
    def num_minibatches(self) -> int:
        """D_R / D_T."""
        return self.rollout_batch // (self.mini_batch or self.rollout_batch)
