"""Settings of the rollout engine: the tables ``[rollout]`` and ``[rollout.vllm]``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from magicrl.config.model_schema import DType
from magicrl.config.paths import FilePath, Reference, reference_to
from magicrl.config.section import Section
from magicrl.records import SamplingParams

EngineName = Annotated[Reference, reference_to("engine")]


class VllmConfig(Section):
    """Settings that only vLLM has. Other engines do not read them."""

    # A field that `engine_options` (rollout/vllm_options.py) makes an argument of vLLM works in training, in replicas
    # of a cluster and as `magicrl eval --engine-option` without further code, and config.toml holds it where it is set.
    # One that changes samples is also named in `settings_that_decide` (evaluation/engines.py). `gpu_share` is also read
    # by the planner, `adapters` by rollout/engines.py, `keep_caches` by rollout/vllm_engine.py.

    cache_mb: int | None = Field(default=None, ge=1)
    """Size of the KV cache in MiB. Default: ``rollout.memory_limit_mb`` on a CPU, the memory that ``gpu_share`` leaves
    on a GPU."""
    gpu_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for vLLM's weights and KV cache. Default: 0.9, or 0.6 if the learner uses the same GPU in
    turns."""
    eager: bool | None = None
    """Do not compile CUDA graphs. vLLM then starts sooner and samples slower on a GPU. Default: ``true`` on a CPU,
    ``false`` on a GPU."""
    adapters: bool | None = None
    """With ``model.lora``: send only the adapters to vLLM instead of the merged weights. Default: ``true`` on a GPU; on
    a CPU this samples slower."""
    keep_caches: bool = True
    """Keep the KV cache of unfinished responses when new weights arrive. ``false`` recomputes it, one prefill per
    response and update (docs/guides/engines.md#asynchronous-training)."""
    engine_args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of vLLM's ``EngineArgs``, by name: ``{ max_num_batched_tokens = 8192 }``. Arguments that
    magicrl sets itself are refused."""


TRAINING_ONLY = ("adapters", "keep_caches")
"""Settings of `VllmConfig` that an evaluation does not have."""


class RolloutConfig(Section):
    """Engine that samples responses, and how it samples."""

    engine: EngineName = "in_process"
    """Rollout engine: ``in_process``, ``vllm`` (on this machine, docs/guides/engines.md), ``replay`` (recorded
    rollouts), or a custom one, ``file.py:function``."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature (tau) of training rollouts. The policy that learns uses the same temperature."""
    dtype: DType | None = None
    """Precision of the engine, except for the logits (``model.head_dtype``). Default: ``model.dtype``."""
    max_rows: int = Field(default=64, ge=1)
    """Maximum number of sequences that the engine decodes at the same time (vLLM: ``max_num_seqs``)."""
    memory_limit_mb: int = Field(default=2048, ge=1)
    """Maximum size of the KV cache in MiB. The engine decodes fewer sequences at a time if ``max_rows`` would need
    more."""
    start_order: Literal["longest_first", "issued"] = "longest_first"
    """Order in which groups start if a step has more responses than ``max_rows``: the prompts with the longest
    responses at their last visit first, or in the order drawn. Both use the same groups and random numbers."""
    vllm: VllmConfig = VllmConfig()
    replay: FilePath | None = None
    """Folder of recorded rollouts, for ``engine = "replay"``."""
    max_sampler_gap: float = Field(default=0.25, gt=0, allow_inf_nan=True)
    """Maximum mean absolute difference between the log-probs of learner and engine, in nats. Above it the run stops,
    because the engine must have other weights. Not checked with ``weight_lag``; with ``max_staleness`` only responses
    sampled with the newest weights count."""
    weight_lag: int = Field(default=0, ge=0)
    """Number of training steps by which the engine's weights are older than the learner's, for off-policy studies
    without a cluster. rho still compares with the learner's policy before the step, so only ``algorithm.correction``
    accounts for the difference. Entropy control reads the entropy of the engine's weights."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum number of training steps between the policy that started a group and the learner that trains on it. Above
    0 the engine samples that many steps ahead while the learner updates. 0 is synchronous
    (docs/guides/engines.md#asynchronous-training)."""

    def sampling(self, max_tokens: int, seed: int) -> SamplingParams:
        """Return the sampling parameters of training rollouts."""
        return SamplingParams(temperature=self.temperature, max_tokens=max_tokens, seed=seed)

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if (self.engine == "replay") != (self.replay is not None):
            raise ValueError('rollout.replay (a folder) goes with rollout.engine = "replay", and only with it')
        if self.max_staleness and self.weight_lag:
            raise ValueError(
                f"rollout.max_staleness = {self.max_staleness} and rollout.weight_lag = {self.weight_lag} both make "
                "the sampler older than the learner; use one of them"
            )
        if self.max_staleness and self.engine == "replay":
            raise ValueError(
                f'rollout.max_staleness = {self.max_staleness} with rollout.engine = "replay": recorded rollouts are '
                "not sampled ahead; set it to 0"
            )
        return self
