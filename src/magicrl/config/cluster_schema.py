"""The recipe's ``[cluster]``: Ray, and how many processes of what kind run on it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.section import Section


class LearnerPlacement(Section):
    """The learner's processes (ranks): FSDP2 shards the weights over them."""

    ranks: int = Field(default=1, ge=1)
    """Processes, one a GPU; 1: the learner stays in the run's own process."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that share one sequence (Ulysses); divides ``ranks``, the query heads and the key/value heads."""
    shard_ranks: int | None = Field(default=None, ge=1)
    """Ranks that hold the model once, in shards; divides ``ranks``, and groups of so many are copies of each other
    (HSDP). Default: those of a node, where their shards then take a quarter of a GPU or less; else all."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which a micro-batch's gradients are summed over ranks; what is kept of the sum is float32."""
    reduce_once: bool = False
    """Sum gradients over ranks once an update, not once a micro-batch; every rank then holds a whole float32 one."""
    offload_optimizer: bool = False
    """Keep master weights, gradients and moments in the host's memory, and step there."""
    restarts: int = Field(default=4, ge=0)
    """Losses of a rank that are mended within one call; then the run stops, to be resumed from its checkpoint."""

    @model_validator(mode="after")
    def _numbers_go_together(self) -> Self:
        if self.ranks % self.sequence_parallel:
            raise ValueError(f"sequence_parallel {self.sequence_parallel} must divide ranks {self.ranks}")
        if self.shard_ranks is not None and self.ranks % self.shard_ranks:
            raise ValueError(f"shard_ranks {self.shard_ranks} must divide ranks {self.ranks}")
        if self.reduce_once and self.reduce_dtype == "bfloat16":
            raise ValueError(
                "reduce_once adds micro-batches up in reduce_dtype, and in bfloat16 small gradients would be lost: "
                'leave out one of the two, or set reduce_dtype = "float32"'
            )
        return self


class RolloutPlacement(Section):
    """The rollout replicas: each holds an engine of the kind that ``rollout.engine`` names."""

    replicas: int = Field(default=1, ge=1)
    """Engines, each a Ray actor on any node."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one node over which a replica's model is spread (vLLM)."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that a replica reserves of its node; a replica on a GPU needs few."""
    threads: int | None = Field(default=None, ge=1)
    """torch threads of a replica; default: ``cpus``, at least 1."""
    colocated: bool = False
    """Replicas and learner ranks use the same GPUs in turns. For ``rollout.engine = "vllm"``, synchronous."""
    weight_copy: Literal["auto", "object_store", "direct"] = "auto"
    """``object_store``: through Ray's; ``direct``: from learner ranks to vLLM's workers by its transfer (NCCL, CUDA IPC
    where ``colocated``; on CPUs gloo, a file in memory). ``auto``: direct where vLLM is on GPUs and takes whole
    weights, else through the store."""
    restarts: int = Field(default=8, ge=0)
    """Replicas that may be lost and replaced in one run before it stops."""


class VerifierPlacement(Section):
    """The verifier pools: one on each node, with ``[verifier]``'s limits."""

    workers_per_node: int | None = Field(default=None, ge=1)
    """Processes that judge on each node; default: ``verifier.workers``."""


class ClusterTimeouts(Section):
    """Seconds after which a wait ends with an error that names what was waited for."""

    connect: float = Field(default=120.0, gt=0)
    """For the Ray at ``cluster.address`` to answer."""
    start: float = Field(default=900.0, gt=0)
    """For an actor to be placed and to have loaded its model."""
    generate: float = Field(default=3600.0, gt=0)
    """Without a single finished sample from any replica."""
    load_weights: float = Field(default=600.0, gt=0)
    """For a replica to take new weights."""
    judge: float = Field(default=600.0, gt=0)
    """Without a single verdict from any verifier pool."""
    learner: float = Field(default=3600.0, gt=0)
    """For a learner rank to answer one call."""


class ClusterConfig(Section):
    """Ray and what runs on it."""

    address: str | None = None
    """Of a running Ray (``auto``: the one of this node, else ``host:port``); None: one is started here for the run."""
    learner: LearnerPlacement = LearnerPlacement()
    rollout: RolloutPlacement = RolloutPlacement()
    verifier: VerifierPlacement = VerifierPlacement()
    timeouts: ClusterTimeouts = ClusterTimeouts()

    @model_validator(mode="after")
    def _colocated_parts_match(self) -> Self:
        rollout, ranks = self.rollout, self.learner.ranks
        wanted = rollout.replicas * rollout.tensor_parallel
        if rollout.colocated and ranks != wanted:
            raise ValueError(
                f"cluster.rollout.colocated: {rollout.replicas} replicas of {rollout.tensor_parallel} GPUs take turns "
                f"with as many learner ranks; set cluster.learner.ranks = {wanted} (it is {ranks})"
            )
        return self
