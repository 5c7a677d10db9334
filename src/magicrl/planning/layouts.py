"""Ways to lay a step over accelerators, which of them fit, and what would make one fit.

A colocated layout gives every accelerator to engine and learner in turn: while the engine generates, the learner's
master weights and moments stay; while the learner learns, the engine is asleep. A split layout gives each its own.
A recipe's ``[cluster]`` may state its layout (``Stated``): it is checked, and compared with the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from magicrl.config.cluster_schema import ClusterConfig, LearnerPlacement, RolloutPlacement
from magicrl.planning.costs import BF16, FLOAT32, Exchange, kv_capacity
from magicrl.planning.hardware import GIB, Hardware
from magicrl.planning.memory import (
    EngineMemory,
    LearnerMemory,
    LearnerSetup,
    beside_ranks,
    engine_memory,
    learner_memory,
    learner_state,
    nodes_of,
    placement_fault,
    replicas_held,
    shards_by_default,
)
from magicrl.planning.shapes import ModelShape
from magicrl.planning.workload import Layout

MOST_GPUS = 4096  # where the search for enough accelerators ends
SPLITS = (0.25, 0.5, 0.75, 0.875)  # shares of the accelerators that a split layout may give to the engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand(LearnerSetup):
    """What of a recipe decides memory; a layout says how many accelerators share the learner."""

    shape: ModelShape
    hardware: Hardware  # of one accelerator
    shard_ranks: int | None = None  # accelerators that hold the model once; None is the learner's own default
    rows: int = 256  # sequences that a replica decodes at once
    cache_limit: float = float("inf")  # bytes that the engine's cache may take at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A layout and its memory."""

    layout: Layout  # which accelerators do what
    learner: LearnerMemory  # bytes on one of the learner's accelerators, by term
    engine: EngineMemory  # bytes on one of the engine's
    missing: float  # bytes that the worse of the two lacks; 0 or less where both fit

    @property
    def fits(self) -> bool:
        """Both sides fit, and the cache holds the longest sample."""
        return self.missing <= 0


def degrees(limit: int) -> Iterator[int]:
    """1, 2, 4, ... up to ``limit``."""
    degree = 1
    while degree <= limit:
        yield degree
        degree *= 2


class Side(NamedTuple):
    """Accelerators of engine and learner, and the engine's possible tensor-parallel degrees."""

    rollout_gpus: int
    learner_gpus: int
    colocated: bool
    degrees: tuple[int, ...]


def sides(demand: Demand, gpus: int) -> Iterator[Side]:
    """Ways to give ``gpus`` accelerators to engine and learner, in turn or apart.

    A tensor-parallel degree divides the query heads, and as many replicas fit, each inside a node.
    """
    nodes = nodes_of(gpus, demand.hardware.gpus_per_node)
    engines = {round(gpus * share) for share in SPLITS} - {0, gpus}
    for engine in (gpus, *sorted(engines)):
        learner = gpus if engine == gpus else gpus - engine
        room = nodes if engine == gpus else beside_ranks(nodes, learner)
        assert room is not None, "the learner's are a part of all"
        fitting = tuple(
            tp
            for tp in degrees(min(demand.hardware.gpus_per_node, engine))
            if demand.shape.heads % tp == 0 and engine % tp == 0 and replicas_held(room, tp) >= engine // tp
        )
        yield Side(engine, learner, engine == gpus, fitting)


def sequence_degrees(demand: Demand, ranks: int) -> list[int]:
    """Ulysses degrees: they divide the query heads and the ranks, and are at most the key/value heads."""
    shape, node = demand.shape, demand.hardware.gpus_per_node
    found = degrees(min(shape.kv_heads, node, ranks))
    return [sp for sp in found if not (shape.heads % sp or shape.kv_heads % sp or ranks % sp)]


def candidates(demand: Demand, gpus: int) -> list[Placed]:
    """Layouts of ``gpus`` accelerators with the demand's own learner settings, those that fit first.

    In turn on all accelerators, or apart with a share of `SPLITS` for the engine; each tensor-parallel degree; of the
    sequence-parallel degrees the smallest that fits, or the one that lacks least.
    """
    found: list[Placed] = []
    for side in sides(demand, gpus):
        for tp in side.degrees:
            ways = [
                place(demand, side.rollout_gpus, side.learner_gpus, tp, sp, colocated=side.colocated)
                for sp in sequence_degrees(demand, side.learner_gpus)
            ]
            fitting = next((placed for placed in ways if placed.fits), None)
            found.append(fitting or min(ways, key=lambda placed: placed.missing))
    return sorted(found, key=lambda placed: max(0.0, placed.missing))


def lean_settings(demand: Demand, gpus: int) -> Iterator[Demand]:
    """The recipe's own learner settings, then ones that take less and less memory.

    Recomputation, a micro-batch of one longest sample, and at last the optimizer state in the host's memory.
    """
    yield demand
    demand = replace(demand, checkpointing=True)
    yield demand
    demand = replace(demand, micro_batch_tokens=min(demand.micro_batch_tokens, demand.longest))
    yield demand
    if gpus > 1 and demand.hardware.gpus_per_node > 1 and not demand.adapters:
        yield replace(demand, offload_optimizer=True)


def fitting_layouts(demand: Demand, gpus: int) -> list[Placed]:
    """Layouts that fit with the first of `lean_settings` with which any does; empty where none fits."""
    ways = ([placed for placed in candidates(way, gpus) if placed.fits] for way in lean_settings(demand, gpus))
    return next((way for way in ways if way), [])


def place(demand: Demand, rollout_gpus: int, learner_gpus: int, tp: int, sp: int, *, colocated: bool) -> Placed:
    """One layout with its memory."""
    hardware, shape = demand.hardware, demand.shape
    shards = demand.shard_ranks or default_shards(demand, learner_gpus, colocated=colocated)
    setup = replace(demand, gpus=shards, sequence_parallel=sp)
    learner = learner_memory(shape, setup, hardware.runtime)
    engine = engine_memory(shape, hardware, tp, learner.resident if colocated else 0.0)
    engine = replace(engine, cache=min(engine.cache, demand.cache_limit))
    layout = Layout(
        rollout_gpus=rollout_gpus,
        tensor_parallel=tp,
        learner_gpus=learner_gpus,
        sequence_parallel=sp,
        colocated=colocated,
        cache_bytes=engine.cache,
        rows=demand.rows,
        micro_batch_tokens=demand.micro_batch_tokens,
        checkpointing=demand.checkpointing,
        checkpoint_above=demand.checkpoint_above,
        offload=demand.offload_optimizer,
        exchange=Exchange(shards=setup.gpus, reduce_bytes=setup.reduce_bytes, reduce_once=setup.reduce_once),
    )
    short = cache_short(demand, engine, tp)
    return Placed(layout=layout, learner=learner, engine=engine, missing=max(_learner_short(learner, hardware), short))


def _learner_short(learner: LearnerMemory, hardware: Hardware) -> float:
    """Bytes that a rank lacks, of its accelerator's memory or of the host's."""
    return max(learner.total - hardware.budget, learner.host - hardware.host_memory)


def default_shards(demand: Demand, learner_gpus: int, *, colocated: bool) -> int:
    """Accelerators that hold the model once by default, ranks being placed as `beside_ranks` says."""
    if colocated:
        return learner_gpus
    node = demand.hardware.gpus_per_node
    inside = learner_gpus if learner_gpus <= node else math.gcd(learner_gpus, node)
    return shards_by_default(
        learner_gpus, inside, learner_state(demand.shape.parameters, lora=demand.adapters > 0), demand.hardware.memory
    )


def cache_short(demand: Demand, engine: EngineMemory, tensor_parallel: int) -> float:
    """Bytes that a replica's cache lacks, on each of its accelerators, to hold the longest sample; 0 where it does."""
    shape = demand.shape
    if kv_capacity(shape, engine.cache, tensor_parallel) >= demand.longest:
        return 0.0
    return demand.longest * shape.kv_bytes_per_token() / min(tensor_parallel, shape.kv_heads) - engine.cache


def _doubled(gpus: int) -> list[int]:
    return [gpus * 2**k for k in range(1, 13) if gpus * 2**k <= MOST_GPUS]


def refusal(demand: Demand, gpus: int, ways: Iterable[str]) -> str:
    """Why nothing fits, by term, and what would make it fit."""
    *_, demand = lean_settings(demand, gpus)
    best = min(candidates(demand, gpus), key=lambda placed: placed.missing)
    layout, learner_short = best.layout, _learner_short(best.learner, demand.hardware) > 0
    split = "colocated" if layout.colocated else "split"
    spared = ", state in the host's memory" if layout.offload else ""
    lacking = _lacking(
        "the learner" if learner_short else "the engine",
        best.missing,
        best.learner if learner_short else best.engine,
        demand,
        ways,
    )
    return (
        f"{demand.shape.name} with samples of {demand.longest} tokens does not fit on {gpus} x {demand.hardware.name}: "
        f"in the best layout ({split}, tensor parallel {layout.tensor_parallel}, sequence parallel "
        f"{layout.sequence_parallel}, everything computed again{spared}) {lacking}"
    )


def _lacking(who: str, short: float, memory: LearnerMemory | EngineMemory, needed: Demand, ways: Iterable[str]) -> str:
    terms = memory.terms()
    shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items() if abs(value) >= 0.05 * GIB)
    if isinstance(memory, LearnerMemory) and memory.host > needed.hardware.host_memory:
        there = needed.hardware.host_memory / GIB
        shown += f"; with offload_optimizer {memory.host / GIB:.1f} of the host's memory, {there:.1f} there"
    changes = "; ".join(ways)
    cure = f"What would make it fit, each alone: {changes}" if changes else "Nothing tried makes it fit"
    return f"{who} lacks {short / GIB:.1f} GiB of {needed.hardware.budget / GIB:.1f} an accelerator ({shown}). {cure}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """What a plan says of ``[cluster]``."""

    needs: int  # accelerators
    placed: Placed | None  # the layout with its memory; None where the numbers themselves do not go together
    faults: tuple[str, ...]  # what would stop the run, each with what to change; empty where nothing would
    seconds: float | None = None  # of all stages under this layout; None where it does not fit

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
    if (short := _short_learner(needed, placed)) > 0:
        ways = _ways(needed, cluster, _short_learner)
        faults.append(_lacking("a learner rank", short, placed.learner, needed, ways))
    if (short := _short_cache(needed, placed)) > 0:
        what = f"a replica, for one sample of {needed.longest} tokens in its cache,"
        faults.append(_lacking(what, short, placed.engine, needed, _ways(needed, cluster, _short_cache)))
    return Stated(needs=needs, placed=placed, faults=tuple(faults))


def placed_as(needed: Demand, learner: LearnerPlacement, rollout: RolloutPlacement) -> Placed:
    """The stated layout with its memory."""
    return place(
        replace(
            needed,
            offload_optimizer=learner.offload_optimizer,
            shard_ranks=learner.shard_ranks,
            reduce_bytes=BF16 if learner.reduce_dtype == "bfloat16" else FLOAT32,
            reduce_once=learner.reduce_once,
        ),
        rollout.replicas * rollout.tensor_parallel,
        learner.ranks,
        rollout.tensor_parallel,
        learner.sequence_parallel,
        colocated=rollout.colocated,
    )


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


def _short_learner(needed: Demand, placed: Placed) -> float:
    return _learner_short(placed.learner, needed.hardware)


def _short_cache(needed: Demand, placed: Placed) -> float:
    return cache_short(needed, placed.engine, placed.layout.tensor_parallel)


def _ways(needed: Demand, cluster: ClusterConfig, short: Callable[[Demand, Placed], float]) -> Iterator[str]:
    """Settings that would each, alone, leave nothing short; of each kind the smallest change that does."""
    learner, rollout, heads = cluster.learner, cluster.rollout, needed.shape.heads

    def helps(learner: LearnerPlacement, rollout: RolloutPlacement, needed: Demand = needed) -> bool:
        return short(needed, placed_as(needed, learner, rollout)) <= 0

    if not needed.checkpointing and helps(learner, rollout, replace(needed, checkpointing=True)):
        yield "model.gradient_checkpointing = true"
    for ranks in _doubled(learner.ranks):
        # colocated replicas live on the ranks' accelerators
        beside = rollout.model_copy(update={"replicas": max(1, ranks // rollout.tensor_parallel)})
        if helps(learner.model_copy(update={"ranks": ranks}), beside if rollout.colocated else rollout):
            both = f" with cluster.rollout.replicas = {beside.replicas}" if rollout.colocated else ""
            yield f"cluster.learner.ranks = {ranks}{both}"
            break
    for sp in degrees(needed.shape.kv_heads):
        divides = not (heads % sp or needed.shape.kv_heads % sp or learner.ranks % sp)
        wider = learner.model_copy(update={"sequence_parallel": sp})
        if sp > learner.sequence_parallel and divides and helps(wider, rollout):
            yield f"cluster.learner.sequence_parallel = {sp}"
            break
    for tp in degrees(needed.hardware.gpus_per_node):
        replicas = max(1, learner.ranks // tp) if rollout.colocated else rollout.replicas
        wider = rollout.model_copy(update={"tensor_parallel": tp, "replicas": replicas})
        if tp > rollout.tensor_parallel and not heads % tp and helps(learner, wider):
            both = f" with cluster.rollout.replicas = {replicas}" if rollout.colocated else ""
            yield f"cluster.rollout.tensor_parallel = {tp}{both}"
            break
    spared = learner.model_copy(update={"offload_optimizer": True})
    if not learner.offload_optimizer and helps(spared, rollout):
        yield "cluster.learner.offload_optimizer = true"
