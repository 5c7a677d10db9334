"""Recipe table ``[cluster]``: Ray, and the processes that run on it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.section import Section


class LearnerPlacement(Section):
    """Processes (ranks) of the learner. FSDP2 shards the weights over them."""

    ranks: int = Field(default=1, ge=1)
    """Number of learner processes, one per GPU. With 1 the learner runs in the process of the run itself."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share one sequence (Ulysses). Must divide ``ranks``, the query heads and the key/value
    heads."""
    shard_ranks: int | None = Field(default=None, ge=1)
    """Number of ranks over which one copy of the model is sharded; must divide ``ranks``. Several such groups hold
    copies (HSDP). Default: the ranks of a node if their shards need at most a quarter of a GPU, otherwise all ranks."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the gradients of a micro-batch are summed over ranks. The accumulated sum is always
    float32."""
    reduce_once: bool = False
    """Sum gradients over ranks once per update instead of once per micro-batch. Each rank then holds a full float32
    gradient."""
    offload_optimizer: bool = False
    """Keep the float32 weights, gradients and optimizer state in CPU memory, and run the optimizer there."""
    restarts: int = Field(default=4, ge=0)
    """Number of lost ranks that one learner call replaces. After more losses the run stops; it can be resumed from its
    checkpoint."""

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
    """Rollout replicas. Each has an engine of the kind that ``rollout.engine`` names."""

    replicas: int = Field(default=1, ge=1)
    """Number of engines. Each is a Ray actor on any node."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs of one node over which a replica's model is split (vLLM)."""
    cpus: float = Field(default=1.0, ge=0)
    """Number of CPUs that a replica reserves on its node. A replica on a GPU needs few."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads per replica. Default: ``cpus``, at least 1."""
    colocated: bool = False
    """Let replicas and learner ranks use the same GPUs in turns. Needs ``rollout.engine = "vllm"`` and synchronous
    training."""
    weight_copy: Literal["auto", "object_store", "direct"] = "auto"
    """How new weights reach the replicas. ``object_store``: through Ray. ``direct``: from learner ranks to vLLM's
    workers (NCCL; CUDA IPC if ``colocated``; gloo or shared memory on CPUs). ``auto``: direct if vLLM runs on GPUs and
    takes full weights, otherwise through Ray."""
    restarts: int = Field(default=8, ge=0)
    """Number of lost replicas that are replaced in one run. After more losses the run stops."""


class VerifierPlacement(Section):
    """Verifier pools, one per node, with the limits of ``[verifier]``."""

    workers_per_node: int | None = Field(default=None, ge=1)
    """Number of verifier processes per node. Default: ``verifier.workers``."""


class ClusterTimeouts(Section):
    """Timeouts in seconds. When one expires, the run stops with an error that names what it waited for."""

    connect: float = Field(default=120.0, gt=0)
    """Timeout for Ray at ``cluster.address`` to answer."""
    start: float = Field(default=900.0, gt=0)
    """Timeout for an actor to be placed and to load its model."""
    generate: float = Field(default=3600.0, gt=0)
    """Longest time without a finished sample from any replica."""
    load_weights: float = Field(default=600.0, gt=0)
    """Timeout for a replica to load new weights."""
    judge: float = Field(default=600.0, gt=0)
    """Longest time without a verdict from any verifier pool."""
    learner: float = Field(default=3600.0, gt=0)
    """Timeout for a learner rank to answer one call."""


class ClusterConfig(Section):
    """Ray cluster and the placement of the run's processes."""

    address: str | None = None
    """Address of a running Ray: ``host:port``, or ``auto`` for the one on this node. Default: start Ray on this machine
    for the run."""
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
