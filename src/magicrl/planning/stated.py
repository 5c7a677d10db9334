"""The split that a recipe's own ``[cluster]`` states, checked: do its parts fit, and what does it cost beside the best.

The learner's ranks and the replicas have accelerators of their own, ``ranks + replicas * tensor_parallel`` of them, or
are colocated on ``ranks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from magicrl.config.schema import ClusterConfig, LearnerPlacement, RolloutPlacement
from magicrl.planning.costs import BF16
from magicrl.planning.hardware import GIB, Hardware
from magicrl.planning.layouts import MOST_GPUS, Demand, Placed, cache_short, degrees, place
from magicrl.planning.memory import LearnerMemory, engine_memory
from magicrl.planning.node_room import nodes_of, placement_fault
from magicrl.planning.shapes import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """What a plan says of ``[cluster]``.

    Attributes:
        needs: accelerators.
        placed: the layout with its memory; None where the numbers themselves do not go together.
        faults: what would stop the run, each with what to change; empty where nothing would.
        seconds: of all stages under this layout; None where it does not fit.
    """

    needs: int
    placed: Placed | None
    faults: tuple[str, ...]
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Nothing stands in its way."""
        return not self.faults


def accelerators(cluster: ClusterConfig) -> int:
    """Accelerators that ``[cluster]`` asks for."""
    if cluster.rollout.colocated:
        return cluster.learner.ranks
    return cluster.learner.ranks + cluster.rollout.replicas * cluster.rollout.tensor_parallel


def check_stated(needed: Demand, cluster: ClusterConfig, gpus: int) -> Stated:
    """Placement and memory of ``[cluster]`` on ``gpus`` accelerators; its time is left to the caller.

    Args:
        needed: what of the recipe decides memory.
        cluster: the recipe's section.
        gpus: accelerators that there are, all nodes together.
    """
    needs = accelerators(cluster)
    faults = list(_misplaced(needed.shape, needed.hardware, cluster, gpus))
    if any("must divide" in fault for fault in faults):
        return Stated(needs=needs, placed=None, faults=tuple(faults))
    placed = placed_as(needed, cluster.learner, cluster.rollout)
    faults += _short_learner(needed, cluster, placed)
    faults += _short_engine(needed, cluster, placed)
    return Stated(needs=needs, placed=placed, faults=tuple(faults))


def placed_as(needed: Demand, learner: LearnerPlacement, rollout: RolloutPlacement) -> Placed:
    """The stated layout with its memory."""
    engine_gpus = rollout.replicas * rollout.tensor_parallel
    placed = place(
        needed,
        engine_gpus,
        learner.ranks,
        rollout.tensor_parallel,
        learner.sequence_parallel,
        colocated=rollout.colocated,
    )
    if not learner.offload_optimizer:
        return placed
    spared = _offloaded(placed.learner, (needed.adapters or needed.shape.parameters) / learner.ranks)
    if rollout.colocated:
        engine = engine_memory(needed.shape, needed.hardware, rollout.tensor_parallel, spared.resident)
        placed = replace(placed, engine=replace(engine, cache=min(engine.cache, needed.cache_limit)))
    return replace(
        placed, learner=spared, missing=max(spared.total - needed.hardware.budget, _short_cache(needed, placed))
    )


def _offloaded(memory: LearnerMemory, shard: float) -> LearnerMemory:
    """Master weights, gradients and moments are in the host's memory; a bf16 shard of the weights stays."""
    return replace(memory, master=BF16 * shard, gradients=0.0, moments=0.0)


def _misplaced(shape: ModelShape, hardware: Hardware, cluster: ClusterConfig, gpus: int) -> Iterator[str]:
    learner, rollout, needs = cluster.learner, cluster.rollout, accelerators(cluster)
    if needs > gpus:
        yield (
            f"{learner.ranks} learner ranks and {rollout.replicas} replicas of {rollout.tensor_parallel} need {needs} "
            f"accelerators, there are {gpus}: fewer cluster.rollout.replicas or cluster.learner.ranks, or --gpus "
            f"{needs}"
        )
    tensor, sequence, node = rollout.tensor_parallel, learner.sequence_parallel, hardware.gpus_per_node
    if shape.heads % tensor:
        yield f"cluster.rollout.tensor_parallel {tensor} must divide the {shape.heads} query heads of {shape.name}"
    if shape.heads % sequence or shape.kv_heads % sequence:
        yield (
            f"cluster.learner.sequence_parallel {sequence} must divide the {shape.heads} query heads and the "
            f"{shape.kv_heads} key/value heads of {shape.name}"
        )
    if (needs <= gpus or tensor > node) and (fault := placement_fault(nodes_of(gpus, node), cluster)) is not None:
        yield fault


def _short_learner(needed: Demand, cluster: ClusterConfig, placed: Placed) -> Iterator[str]:
    short = placed.learner.total - needed.hardware.budget
    if short <= 0:
        return
    learner, rollout = cluster.learner, cluster.rollout

    def helps(changed: Demand = needed, **further: int | bool) -> bool:
        try:
            other = LearnerPlacement.model_validate(learner.model_dump() | further)
        except ValueError:  # these ranks are no multiple of that degree
            return False
        return placed_as(changed, other, _beside(rollout, other.ranks)).learner.total <= needed.hardware.budget

    ways: list[str] = []
    if not needed.checkpointing and helps(replace(needed, checkpointing=True)):
        ways.append("model.gradient_checkpointing = true")
    counts = (learner.ranks * 2**k for k in range(1, 13) if learner.ranks * 2**k <= MOST_GPUS)
    more = next((count for count in counts if helps(ranks=count)), None)
    if more is not None:
        both = f" with cluster.rollout.replicas = {more // rollout.tensor_parallel}" if rollout.colocated else ""
        ways.append(f"cluster.learner.ranks = {more}{both}")
    shape = needed.shape
    wider = (sp for sp in degrees(shape.kv_heads) if sp > learner.sequence_parallel and not shape.heads % sp)
    degree = next((sp for sp in wider if not shape.kv_heads % sp and helps(sequence_parallel=sp)), None)
    if degree is not None:
        ways.append(f"cluster.learner.sequence_parallel = {degree}")
    if not learner.offload_optimizer and helps(offload_optimizer=True):
        ways.append("cluster.learner.offload_optimizer = true")
    yield _lacking("a learner rank", short, placed.learner.terms(), needed, ways)


def _beside(rollout: RolloutPlacement, ranks: int) -> RolloutPlacement:
    """The replicas that go with ``ranks``: colocated as many as these have accelerators for."""
    if not rollout.colocated:
        return rollout
    return rollout.model_copy(update={"replicas": max(1, ranks // rollout.tensor_parallel)})


def _short_cache(needed: Demand, placed: Placed) -> float:
    return cache_short(needed, placed.engine, placed.layout.tensor_parallel)


def _short_engine(needed: Demand, cluster: ClusterConfig, placed: Placed) -> Iterator[str]:
    short = _short_cache(needed, placed)
    if short <= 0:
        return
    shape, rollout = needed.shape, cluster.rollout
    wider = (tp for tp in degrees(needed.hardware.gpus_per_node) if tp > rollout.tensor_parallel)
    ways: list[str] = []
    for tp in wider:
        other = _beside(rollout.model_copy(update={"tensor_parallel": tp}), cluster.learner.ranks)
        if shape.heads % tp == 0 and _short_cache(needed, placed_as(needed, cluster.learner, other)) <= 0:
            both = f" with cluster.rollout.replicas = {other.replicas}" if rollout.colocated else ""
            ways.append(f"cluster.rollout.tensor_parallel = {tp}{both}")
            break
    spared = cluster.learner.model_copy(update={"offload_optimizer": True})
    if rollout.colocated and _short_cache(needed, placed_as(needed, spared, rollout)) <= 0:
        ways.append("cluster.learner.offload_optimizer = true")
    what = f"a replica's accelerator, for one sample of {needed.longest} tokens in its cache,"
    yield _lacking(what, short, placed.engine.terms(), needed, ways)


def _lacking(who: str, short: float, terms: dict[str, float], needed: Demand, ways: list[str]) -> str:
    shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items() if abs(value) >= 0.05 * GIB)
    cure = "; ".join(ways) if ways else "no single setting of [cluster] does: a smaller T, or larger accelerators"
    return (
        f"{who} lacks {short / GIB:.1f} GiB of {needed.hardware.budget / GIB:.1f} ({shown}). "
        f"What would make it fit, each alone: {cure}"
    )
