"""The ``[rollout]`` section of a recipe: the engine and how it samples."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.model_schema import DType
from magicrl.config.paths import FilePath
from magicrl.config.section import Section


class VllmConfig(Section):
    """What only vLLM has, for ``rollout.engine = "vllm"``."""

    cache_mb: int | None = Field(default=None, ge=1)
    """Size of the key/value cache in MiB; default: ``rollout.memory_limit_mb`` on a CPU, what ``gpu_share`` leaves on a
    GPU."""
    gpu_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for weights and cache; default: 0.9 of a GPU of its own, 0.6 of one that it uses in turn
    with the learner (on one machine, or ``cluster.rollout.colocated``), whose weights and moments stay."""
    eager: bool | None = None
    """Without compiled graphs: starts sooner, samples slower on a GPU; default: on a CPU only."""


class RolloutConfig(Section):
    """The rollout engine and how it samples."""

    engine: Literal["in_process", "vllm", "replay"] = "in_process"
    """``vllm``: vLLM on this machine (docs/engines.md); ``replay`` feeds recorded rollouts."""
    temperature: float = Field(default=1.0, gt=0)
    """tau, of training rollouts and of the policy that learns."""
    dtype: DType | None = None
    """Precision of the engine; default: ``model.dtype``."""
    max_rows: int = Field(default=64, ge=1)
    """Sequences that decode at once."""
    memory_limit_mb: int = Field(default=2048, ge=1)
    """Upper limit of the key/value cache; fewer rows are used when they would not fit."""
    start_order: Literal["longest_first", "issued"] = "longest_first"
    """Which groups start first where a step has more responses than ``max_rows``: those whose problems had the longest
    responses when they were last drawn, or in the order of their draws. Which groups are used is the same, and so are
    their random numbers."""
    vllm: VllmConfig = VllmConfig()
    replay: FilePath | None = None
    """Folder of recorded rollouts, for ``engine = "replay"``."""
    max_sampler_gap: float = Field(default=0.25, gt=0)
    """Mean absolute gap of the learner's and the sampler's log-probs above which the run stops: such an engine
    serves other weights than the learner's. Not checked when ``weight_lag`` > 0; when
    ``max_staleness`` > 0, over the responses of the newest weights alone."""
    weight_lag: int = Field(default=0, ge=0)
    """Updates of the loop that the engine's weights are behind (off-policy studies without a cluster). The denominator
    of rho stays the learner's own policy before the step: with one SGD step a training step rho is exactly 1 whatever
    the lag, and only ``algorithm.correction`` weighs the difference."""
    max_staleness: int = Field(default=0, ge=0)
    """Most training steps between the policy that began a group and the learner that trains on it. 0: synchronous; from
    1 on the engine is asked that many steps ahead and goes on while the learner updates (docs/asynchronous.md)."""

    @model_validator(mode="after")
    def _replay_has_a_folder(self) -> Self:
        if (self.engine == "replay") != (self.replay is not None):
            raise ValueError('rollout.replay (a folder) goes with rollout.engine = "replay", and only with it')
        return self

    @model_validator(mode="after")
    def _one_staleness(self) -> Self:
        if self.max_staleness and self.weight_lag:
            raise ValueError(
                f"rollout.max_staleness = {self.max_staleness} and rollout.weight_lag = {self.weight_lag} both make "
                "the sampler older than the learner; use one of them"
            )
        if self.max_staleness and self.engine == "replay":
            raise ValueError(
                f'rollout.max_staleness = {self.max_staleness} has no effect with rollout.engine = "replay", whose '
                "rollouts are recorded; set it to 0"
            )
        return self
