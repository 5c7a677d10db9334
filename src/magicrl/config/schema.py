"""The recipe schema: every setting of a run, typed, with units. Importing it needs no torch.

Names follow the report's symbols: ``rollout_batch`` is D_R, ``mini_batch`` D_T, ``group_size`` M (gs),
``reuse`` N_reuse, ``max_tokens`` T, ``temperature`` tau. Unknown keys fail; no setting rewrites another.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from magicrl.config.algorithm_schema import AlgorithmConfig, EntropyConfig, LossName, OptimizerConfig, ReferenceConfig
from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.data_schema import DataConfig, DifficultyFilterConfig, FieldMapping, SourceConfig
from magicrl.config.model_schema import DType, LoraConfig, ModelConfig, StartConfig
from magicrl.config.rollout_schema import RolloutConfig, VllmConfig
from magicrl.config.run_schema import CheckpointConfig, EvaluationConfig, LoggingConfig, RunConfig, VerifierConfig
from magicrl.config.section import Section
from magicrl.config.stage_schema import StageConfig, TransitionConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DType",
    "DataConfig",
    "DifficultyFilterConfig",
    "EntropyConfig",
    "EvaluationConfig",
    "FieldMapping",
    "LoggingConfig",
    "LoraConfig",
    "LossName",
    "ModelConfig",
    "OptimizerConfig",
    "ReferenceConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "StageConfig",
    "StartConfig",
    "TrainConfig",
    "TransitionConfig",
    "VerifierConfig",
    "VllmConfig",
]


class TrainConfig(Section):
    """A whole recipe for ``magicrl train``."""

    run: RunConfig = RunConfig()
    start: StartConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    entropy: EntropyConfig = EntropyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    verifier: VerifierConfig = VerifierConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig | None = None
    """Without the section everything runs in this process, on this machine."""

    @model_validator(mode="after")
    def _engine_tells_entropies(self) -> Self:
        if self.rollout.engine == "vllm" and self.entropy.estimator == "exact" and not self.rollout.max_staleness:
            raise ValueError(
                'entropy.estimator = "exact" needs an engine that reports entropies, and rollout.engine = "vllm" does '
                'not; set entropy.estimator = "sampled"'
            )
        return self

    @model_validator(mode="after")
    def _entropy_is_of_the_learner(self) -> Self:
        if self.rollout.max_staleness and self.entropy.estimator == "sampled":
            raise ValueError(
                f'entropy.estimator = "sampled" with rollout.max_staleness = {self.rollout.max_staleness}: the tokens '
                "were sampled by older policies, whose log-probs do not tell the learner's entropy; use "
                '"exact", which the learner measures on the buffer'
            )
        return self

    @model_validator(mode="after")
    def _weights_can_be_sent(self) -> Self:
        rollout = self.rollout
        if self.cluster is None or self.cluster.rollout.weight_copy == "object_store":
            return self
        if rollout.engine != "vllm" or rollout.weight_lag or self.cluster.rollout.colocated:
            raise ValueError(
                'cluster.rollout.weight_copy = "direct" is how vLLM takes the newest weights on GPUs of its own: it '
                'needs rollout.engine = "vllm", rollout.weight_lag = 0 and cluster.rollout.colocated = false (NCCL '
                'joins no two processes on one GPU); set these, or weight_copy = "object_store"'
            )
        return self

    @model_validator(mode="after")
    def _colocated_takes_turns(self) -> Self:
        rollout = self.rollout
        if self.cluster is None or not self.cluster.rollout.colocated:
            return self
        if rollout.engine != "vllm":
            raise ValueError(
                f'cluster.rollout.colocated with rollout.engine = "{rollout.engine}": vLLM alone gives its memory '
                'back; set rollout.engine = "vllm" or leave colocated out'
            )
        if rollout.max_staleness or rollout.weight_lag:
            raise ValueError(
                "cluster.rollout.colocated: while the learner works the engine sleeps, so that nothing can be in "
                "flight and it keeps no older weights; set rollout.max_staleness and rollout.weight_lag to 0"
            )
        return self
