"""Parts of a run on a cluster, as ``[cluster]`` of a recipe says, with the protocols of the local parts."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import TrainConfig
from magicrl.distributed.engine_pool import ColocatedPool, EnginePool, GroupPool
from magicrl.distributed.learner.launchers import RayLauncher
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.replica import Replica
from magicrl.distributed.runtime import ClusterError, check_room, connected, nodes, waited_for
from magicrl.distributed.same_files import Digests, check_digests, digests_of
from magicrl.distributed.verifier_nodes import VerifierNodes
from magicrl.models.loading import LoadedModel, described_model, load_policy, load_shell
from magicrl.models.model_files import stored_buffers
from magicrl.models.prompts import PromptEncoder
from magicrl.models.routing import experts_of
from magicrl.planning.memory import NodeRoom, placement_fault
from magicrl.rollout.protocol import RolloutEngine, WeightCheck
from magicrl.rollout.weight_lag import LaggedEngine
from magicrl.training.assemble import LocalParts, OwnedVerifiers, make_training_engine
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Learner, Reference
from magicrl.training.start_checks import with_needed_reference


class ClusterParts(LocalParts):
    """Parts of a run on the connected cluster.

    Args:
        config: recipe with ``[cluster]``.
        output: folder of the run, which keeps the workers' output; default: Ray's logs.

    Raises:
        RecipeError: the replicas and ranks do not fit the nodes.
    """

    def __init__(self, config: TrainConfig, output: Path | None = None) -> None:
        assert config.cluster is not None, "without [cluster] everything is local"
        super().__init__(config)
        if config.rollout.engine == "replay":
            raise RecipeError("recorded rollouts need no cluster; leave [cluster] out", key="rollout.engine")
        self._gpus = config.run.device != "cpu" and any(node.gpus for node in nodes())
        self._asked = config.cluster.rollout.weight_copy
        self._copy_weights(config.cluster, weight_copy(config, gpus=self._gpus))
        self._check_room()
        self._rank_group: Any = None  # placement group of the ranks' GPUs
        self._logs = None if output is None else output.absolute() / "workers"

    def _copy_weights(self, cluster: ClusterConfig, how: Literal["object_store", "direct"]) -> None:
        rollout = cluster.rollout.model_copy(update={"weight_copy": how})
        self._cluster = cluster.model_copy(update={"rollout": rollout})
        # Resolve "auto" once: ranks and replicas must not decide differently.
        self._config = self._config.model_copy(update={"cluster": self._cluster})  # replicas read it

    def _file(self, worker: str) -> str | None:
        return None if self._logs is None else str(self._logs / f"{worker}.log")

    @property
    def devices(self) -> int:
        """Number of GPUs of learner ranks and replicas, shared ones counted once; without GPUs the number of nodes."""
        if not self._gpus:
            return len(nodes())
        rollout = self._cluster.rollout
        return self._cluster.learner.ranks + (0 if rollout.colocated else rollout.replicas * rollout.tensor_parallel)

    def judge(self) -> OwnedVerifiers:
        """Return a verifier pool on every node."""
        placement = self._cluster.verifier
        return VerifierNodes(
            self._config.verifier,
            workers_per_node=placement.workers_per_node,
            timeouts=self._cluster.timeouts,
            file=lambda number: self._file(f"verifier-{number}"),
        )

    def policy(self, start: Path | str) -> LoadedModel:
        """Load the policy, without weights where ranks train: each rank reads its rows from the files."""
        with under("start.model"):
            policy = load_policy(start, dtype="float32") if self._trains_here else load_shell(start)
        # vLLM expects one weight per expert, where the learner stacks them, and stored buffers, which no rank sends.
        other = experts_of(policy.model.config.get_text_config()) or stored_buffers(policy.model)
        if other and self._cluster.rollout.weight_copy == "direct":
            if self._asked == "direct":
                raise RecipeError(
                    '"direct" does not take mixtures, whose experts are one tensor in the learner, and models with '
                    'stored buffers, such as Gemma 4: set "auto"',
                    key="cluster.rollout.weight_copy",
                )
            self._copy_weights(self._cluster, "object_store")
        return policy

    def learner(self, policy: LoadedModel) -> Learner:
        """Return FSDP2 ranks as Ray actors; a single rank without a GPU is this process."""
        config, placement = self._config, self._cluster.learner
        if self._trains_here:
            return super().learner(policy)
        shared, timeouts, ranks = self._shared, self._cluster.timeouts, placement.ranks
        if shared is None:
            # Reserve all GPUs of the ranks at once: ranks placed one by one could take the GPUs of a wide replica.
            options = rank_options(ranks, gpus=self._gpus, seconds=timeouts.start)
            self._rank_group = getattr(options[0].get("scheduling_strategy"), "placement_group", None)
        else:
            options = [shared.rank_options(rank) for rank in range(ranks)]
        if self._gpus:
            # set before the process starts: torch reads it once
            allocator = {"runtime_env": {"env_vars": rank_allocator(os.environ)}}
            options = [one | allocator for one in options]
        reference = None
        if with_needed_reference(config).reference.mode != "none":
            with under("reference.model"):
                reference = policy if config.reference.model is None else load_shell(config.reference.model)
        return DistributedLearner(
            policy,
            LearnerSettings.of(config),
            launcher=RayLauncher(
                options,
                shared=None if shared is None else shared.rank_gpu,
                files=[self._file(f"learner-{process}") for process in range(ranks)],
            ),
            shares_gpus=shared is not None,
            placement=placement,
            device="cuda" if self._gpus else "cpu",
            threads=config.run.threads,
            timeouts=timeouts,
            rebuilds=placement.restarts,
            reference=reference,
        )

    def reference(self, start: Path | str, learner: Learner) -> Reference | None:
        """Return the reference, which the ranks hold in shards; local where the learner is local."""
        return learner.reference if isinstance(learner, DistributedLearner) else super().reference(start, learner)

    def engine(self, start: Path | str, encoder: PromptEncoder, learner: Learner, check: WeightCheck) -> RolloutEngine:
        """Return the pool of rollout replicas, each with the engine that ``rollout.engine`` names."""
        rollout, shared = self._cluster.rollout, self._shared
        gpus = rollout.tensor_parallel if self._gpus else 0
        digests = digests_of([self._config.rollout.engine], [str(start)])

        def file(index: int) -> str | None:
            return self._file(f"replica-{index}")

        def make(index: int) -> Any:
            place = None if shared is None else shared.replica(index)
            return start_replica(self._config, str(start), digests, gpus=gpus, shared=place, file=file(index))

        pool_of: Any = EnginePool
        direct: dict[str, Any] = {}
        if rollout.weight_copy == "direct":
            if not isinstance(learner, DistributedLearner):
                raise RecipeError(
                    '"direct" sends from learner ranks, and on CPUs a single rank is the process of the run: set '
                    'cluster.learner.ranks = 2 or more, or weight_copy = "object_store"',
                    key="cluster.rollout.weight_copy",
                )
            pool_of = ColocatedPool if rollout.colocated else GroupPool
            direct = {"learner": learner, **({} if rollout.colocated else {"workers": rollout.tensor_parallel})}
        pool: EnginePool = pool_of(
            make,
            rollout.replicas,
            timeouts=self._cluster.timeouts,
            restarts=rollout.restarts,
            check=check,
            file=file,
            **direct,
        )
        lag = self._config.rollout.weight_lag
        return LaggedEngine(pool, lag=lag) if lag else pool

    def close(self) -> None:
        """Release the ranks' GPUs and the bundles that replicas and ranks share: the user's Ray may outlive the run."""
        if self._rank_group is not None:
            remove_placement_group(self._rank_group)
            self._rank_group = None
        if "_shared" in vars(self) and self._shared is not None:
            self._shared.close()
            del self._shared

    @cached_property
    def _shared(self) -> SharedBundles | None:
        """Bundles in which replicas and ranks take turns; None where each has separate GPUs."""
        rollout = self._cluster.rollout
        if not rollout.colocated:
            return None
        return SharedBundles(
            rollout.replicas,
            rollout.tensor_parallel,
            gpus=self._gpus,
            cpus=rollout.cpus,
            seconds=self._cluster.timeouts.start,
        )

    @property
    def _trains_here(self) -> bool:
        return self._cluster.learner.ranks == 1 and not self._gpus

    def _check_room(self) -> None:
        rollout, alive = self._cluster.rollout, nodes()
        # vLLM is the only engine that splits a model over GPUs. Refuse here, before Ray starts replicas that would
        # fail.
        if rollout.tensor_parallel > 1 and not (self._gpus and self._config.rollout.engine == "vllm"):
            raise RecipeError(
                f'{rollout.tensor_parallel} needs rollout.engine = "vllm" and GPUs; set it to 1',
                key="cluster.rollout.tensor_parallel",
            )
        key = "cluster.rollout.replicas"
        if not self._gpus:
            check_room("rollout replicas", rollout.replicas, cpus=rollout.cpus, key=key, alive=alive)
            return
        rooms = [NodeRoom(gpus=node.gpus, cpus=node.cpus) for node in alive]
        if (fault := placement_fault(rooms, self._cluster)) is not None:
            raise RecipeError(fault, key=key)


def weight_copy(config: TrainConfig, *, gpus: bool) -> Literal["object_store", "direct"]:
    """Return how new weights reach the replicas: as the recipe says, by default directly wherever vLLM takes them so.

    Through the object store each copy passes the host's memory of the sender, the store and every replica. LoRA
    adapters, which are small, mixtures and stored buffers (`ClusterParts.policy`) go through the store: vLLM's transfer
    takes whole weights of plain models. The placement decides the transport of direct weights:
    ``vllm_weights.TRANSPORTS``.
    """
    assert config.cluster is not None
    placed, rollout = config.cluster.rollout, config.rollout
    if placed.weight_copy != "auto":
        return placed.weight_copy
    taken = gpus and rollout.engine == "vllm" and not rollout.weight_lag and config.model.lora is None
    return "direct" if taken else "object_store"


def rank_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator setting of a learner rank: that of this process, else growing segments.

    Micro-batches differ in their numbers of tokens; blocks of fixed segments that fit none of the next ones would stay
    reserved. Replicas keep the default: vLLM turns growing segments off in its pools.
    """
    given = (environment.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return {"PYTORCH_ALLOC_CONF": next(filter(None, given), "expandable_segments:True")}


def rank_options(ranks: int, *, gpus: bool, seconds: float) -> list[dict[str, Any]]:
    """Return Ray's options of each learner rank.

    On GPUs the ranks fill as few nodes as possible: spread out, they would leave too few GPUs per node for a replica
    with tensor parallelism. On CPUs a rank reserves none: the ranks work while the replicas wait.
    """
    if not gpus:
        return [{"num_cpus": 0, "scheduling_strategy": "SPREAD"}] * ranks
    what = f"{ranks} free GPUs, each with a CPU, for the learner ranks"
    group = _reserved([{"GPU": 1, "CPU": 1}] * ranks, seconds, what)
    return [{"num_gpus": 1, "num_cpus": 1, **_in_bundle(group, rank)} for rank in range(ranks)]


def _reserved(bundles: list[dict[str, float]], seconds: float, what: str) -> Any:
    """Return a placement group; raise ``ClusterError`` if it does not fit within ``seconds``."""
    group = placement_group(bundles, strategy="PACK")
    try:
        waited_for(group.ready(), seconds, what)
    except ClusterError:
        remove_placement_group(group)  # otherwise it would reserve resources that become free
        raise
    return group


def _in_bundle(group: Any, index: int) -> dict[str, Any]:
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}


def start_replica(
    config: TrainConfig,
    start: str,
    digests: Digests,
    *,
    gpus: int,
    shared: tuple[dict[str, Any], Any] | None = None,
    file: str | None = None,
) -> Any:
    """Start the actor of a rollout replica, which makes its engine on the node where Ray places it.

    Args:
        config: recipe.
        start: model folder or hub name.
        digests: those of its files and of a custom engine's, which its node must have.
        gpus: GPUs of the replica.
        shared: from `SharedBundles.replica`, where the GPUs are those of learner ranks.
        file: file that keeps its output.
    """
    assert config.cluster is not None
    placement = config.cluster.rollout
    actor: Any = ray.remote(Replica)
    options = {
        "num_cpus": placement.cpus,
        "num_gpus": gpus,
        "max_restarts": 0,  # its weights would be lost: the pool makes another and gives it the present ones
        "scheduling_strategy": "SPREAD",
    }
    numbers: Any = ()
    if shared is not None:
        options, numbers = options | shared[0], shared[1]
    threads = placement.threads or max(1, int(placement.cpus))
    make = partial(make_replica_engine, config, start, max(1, gpus), digests)
    return actor.options(**options).remote(make, threads, numbers, file)


def make_replica_engine(config: TrainConfig, start: str, gpus: int, digests: Digests = ()) -> RolloutEngine:
    """Make the engine of one replica as on one machine; lagged weights are kept by the pool."""
    check_digests(digests)
    # replicas of one node would bind their threads to the same cores
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # The pool delays the weights of all replicas together, so a replica must not delay them again.
    plain = config.model_copy(update={"rollout": config.rollout.model_copy(update={"weight_lag": 0})})
    try:
        encoder = PromptEncoder(described_model(start).tokenizer, config.data.max_prompt_tokens)
        return make_training_engine(plain, start, encoder, gpus=gpus)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{' '.join(str(error).split())} (on node {socket.gethostname()}; the start model must be at the same path "
            "on every node, or a hub name)"
        ) from error


_LEAST_CPUS = 0.01  # Ray refuses an empty bundle


class _Holder:
    """An actor that reserves a bundle's GPUs."""

    def numbers(self) -> tuple[str, ...]:
        """Return the numbers of its GPUs for ``CUDA_VISIBLE_DEVICES``; none on a CPU."""
        return tuple(str(number) for number in ray.get_gpu_ids())


class SharedBundles:
    """Colocated placement: a bundle of a placement group per replica and the learner ranks that share its GPUs.

    Ray assigns each GPU once. One small actor per bundle therefore reserves its GPUs and reports their numbers. The
    replica sees all of them, each of its ``ranks_each`` ranks one. If a node dies, Ray places the bundle and restarts
    that actor on another node; replicas and ranks that start meanwhile wait for its answer.
    """

    def __init__(self, replicas: int, ranks_each: int, *, gpus: bool, cpus: float, seconds: float) -> None:
        self._each = ranks_each
        self._cpus = cpus
        bundle = {"CPU": max(cpus, _LEAST_CPUS)} | ({"GPU": float(ranks_each)} if gpus else {})
        what = f"room for {replicas} replicas with the {ranks_each} learner ranks that share each one's GPUs"
        self._group = _reserved([bundle] * replicas, seconds, what)
        holder: Any = ray.remote(_Holder)
        options = {"num_cpus": 0, "num_gpus": ranks_each if gpus else 0, "max_restarts": -1, "max_task_retries": -1}
        self._holders: list[Any] = [holder.options(**options, **self._in(index)).remote() for index in range(replicas)]

    def replica(self, index: int) -> tuple[dict[str, Any], Any]:
        """Return a replica's actor options, and a reference to the numbers of its GPUs."""
        return {"num_cpus": self._cpus, "num_gpus": 0, **self._in(index)}, self._numbers(index)

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Return a rank's actor options."""
        return {"num_cpus": 0, "num_gpus": 0, **self._in(rank // self._each)}

    def rank_gpu(self, rank: int) -> tuple[Any, int]:
        """Return a reference to the numbers of the GPUs of a rank's bundle, and the rank's place among them."""
        index, place = divmod(rank, self._each)
        return self._numbers(index), place

    def close(self) -> None:
        """Release the bundles; actors that are still in them end."""
        remove_placement_group(self._group)

    def _numbers(self, index: int) -> Any:
        return self._holders[index].numbers.remote()

    def _in(self, index: int) -> dict[str, Any]:
        return _in_bundle(self._group, index)


@contextmanager
def cluster_parts(config: TrainConfig, output: Path | None = None) -> Generator[ClusterParts]:
    """Connect to Ray and yield the parts of a recipe with ``[cluster]`` that is run in ``output``."""
    assert config.cluster is not None
    with connected(config.cluster):
        parts = ClusterParts(config, output)
        try:
            yield parts
        finally:
            parts.close()
