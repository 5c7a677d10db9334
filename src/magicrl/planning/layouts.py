"""Layouts of a step over accelerators, which of them fit, and what would make one fit.

In a colocated layout engine and learner take turns on every accelerator: while the engine generates, the learner's
master weights and moments remain; while the learner trains, the engine sleeps. In a split layout each has its own
accelerators. The layout of a recipe's ``[cluster]`` (``Stated``) is checked, and compared with the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from magicrl.config.cluster_schema import ClusterConfig, LearnerPlacement, RolloutPlacement
from magicrl.planning.costs import BF16, FLOAT32, Exchange, kv_capacity
from magicrl.planning.hardware import GIB, Hardware
from magicrl.planning.memory import (
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

MOST_GPUS = 4096  # end of the search for enough accelerators
SPLITS = (0.25, 0.5, 0.75, 0.875)  # shares of the accelerators for the engine of a split layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand(LearnerSetup):
    """Settings of a recipe that determine memory. The layout determines the accelerators of the learner."""

    shape: ModelShape
    hardware: Hardware
    shard_ranks: int | None = None  # accelerators that share one copy of the model; None: the learner's default
    engine_width: float = BF16  # bytes per value of the engine's weights and cache
    rows: int = 256  # sequences that a replica decodes at once
    cache_limit: float = float("inf")  # maximum bytes of the engine's cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A layout and its memory."""

    layout: Layout
    learner: LearnerMemory  # bytes on one of the learner's accelerators, by term
    engine: Mapping[str, float]  # bytes on one of the engine's accelerators, by term
    learner_missing: float  # bytes that a rank lacks, of its accelerator's memory or of the host's; 0 or less: none
    cache_missing: float  # bytes that a replica lacks on each accelerator for the longest sample

    @property
    def missing(self) -> float:
        """Missing bytes of the worse side; 0 or less where both fit."""
        return max(self.learner_missing, self.cache_missing)

    @property
    def fits(self) -> bool:
        """Whether both sides fit and the cache has room for the longest sample."""
        return self.missing <= 0


def degrees(limit: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to ``limit``."""
    degree = 1
    while degree <= limit:
        yield degree
        degree *= 2


def candidates(demand: Demand, gpus: int) -> list[Placed]:
    """Return layouts of ``gpus`` accelerators with the demand's learner settings, those that fit first.

    Engine and learner are colocated, or the engine has a share of `SPLITS`. The tensor-parallel degrees divide the
    query heads and leave each replica inside a node. The Ulysses degree divides query heads and ranks and is at most
    the number of key/value heads; it is the smallest that fits, or the one with the fewest missing bytes.
    """
    shape, node = demand.shape, demand.hardware.gpus_per_node
    found: list[Placed] = []
    nodes = nodes_of(gpus, node)
    engines = {round(gpus * share) for share in SPLITS} - {0, gpus}
    for engine in (gpus, *sorted(engines)):
        learner = gpus if engine == gpus else gpus - engine
        room = nodes if engine == gpus else beside_ranks(nodes, learner)
        assert room is not None, "the learner has only a part of all accelerators"
        for tp in degrees(min(node, engine)):
            if shape.heads % tp or engine % tp or replicas_held(room, tp) < engine // tp:
                continue
            ways = [
                place(demand, engine, learner, tp, sp, colocated=engine == gpus)
                for sp in degrees(min(shape.kv_heads, node, learner))
                if not (shape.heads % sp or shape.kv_heads % sp or learner % sp)
            ]
            fitting = next((placed for placed in ways if placed.fits), None)
            found.append(fitting or min(ways, key=lambda placed: placed.missing))
    return sorted(found, key=lambda placed: max(0.0, placed.missing))


def lean_settings(demand: Demand, gpus: int) -> Iterator[Demand]:
    """Yield the recipe's learner settings, then settings that need less and less memory.

    These are recomputation, a micro-batch of one longest sample, and the optimizer state in the host's memory.
    """
    yield demand
    demand = replace(demand, checkpointing=True)
    yield demand
    demand = replace(demand, micro_batch_tokens=min(demand.micro_batch_tokens, demand.longest))
    yield demand
    if gpus > 1 and demand.hardware.gpus_per_node > 1 and not demand.adapters:
        yield replace(demand, offload_optimizer=True)


def fitting_layouts(demand: Demand, gpus: int) -> list[Placed]:
    """Return the layouts that fit with the first of `lean_settings` for which any fits; empty where none fits."""
    ways = ([placed for placed in candidates(way, gpus) if placed.fits] for way in lean_settings(demand, gpus))
    return next((way for way in ways if way), [])


def place(demand: Demand, rollout_gpus: int, learner_gpus: int, tp: int, sp: int, *, colocated: bool) -> Placed:
    """Return one layout with its memory."""
    hardware, shape = demand.hardware, demand.shape
    shards = demand.shard_ranks or default_shards(demand, learner_gpus, colocated=colocated)
    setup = replace(demand, gpus=shards, sequence_parallel=sp)
    learner = learner_memory(shape, setup, hardware.runtime)
    engine = engine_memory(shape, hardware, tp, learner.resident if colocated else 0.0, demand.engine_width)
    engine["cache"] = min(engine["cache"], demand.cache_limit)
    layout = Layout(
        rollout_gpus=rollout_gpus,
        tensor_parallel=tp,
        learner_gpus=learner_gpus,
        sequence_parallel=sp,
        colocated=colocated,
        cache_bytes=engine["cache"],
        engine_width=demand.engine_width,
        rows=demand.rows,
        micro_batch_tokens=demand.micro_batch_tokens,
        checkpointing=demand.checkpointing,
        checkpoint_above=demand.checkpoint_above,
        offload=demand.offload_optimizer,
        exchange=Exchange(shards=setup.gpus, reduce_bytes=setup.reduce_bytes, reduce_once=setup.reduce_once),
    )
    longest_fits = kv_capacity(shape, engine["cache"], tp, demand.engine_width) >= demand.longest
    needed = demand.longest * shape.kv_bytes_per_token(demand.engine_width)
    return Placed(
        layout=layout,
        learner=learner,
        engine=engine,
        learner_missing=max(learner.total - hardware.budget, learner.host - hardware.host_memory),
        cache_missing=0.0 if longest_fits else needed / min(tp, shape.kv_heads) - engine["cache"],
    )


def default_shards(demand: Demand, learner_gpus: int, *, colocated: bool) -> int:
    """Return the default number of accelerators per copy of the model, for the placement of `beside_ranks`."""
    if colocated:
        return learner_gpus
    node = demand.hardware.gpus_per_node
    inside = learner_gpus if learner_gpus <= node else math.gcd(learner_gpus, node)
    return shards_by_default(
        learner_gpus, inside, learner_state(demand.shape.parameters, lora=demand.adapters > 0), demand.hardware.memory
    )


def refusal(demand: Demand, gpus: int, ways: Iterable[str]) -> str:
    """Return why nothing fits, by term, and what would make it fit."""
    *_, demand = lean_settings(demand, gpus)
    best = min(candidates(demand, gpus), key=lambda placed: placed.missing)
    layout, learner_short = best.layout, best.learner_missing > 0
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
        f"{layout.sequence_parallel}, everything recomputed{spared}) {lacking}"
    )


def _lacking(
    who: str, short: float, memory: LearnerMemory | Mapping[str, float], needed: Demand, ways: Iterable[str]
) -> str:
    terms = memory.terms() if isinstance(memory, LearnerMemory) else memory
    shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items() if abs(value) >= 0.05 * GIB)
    if isinstance(memory, LearnerMemory) and memory.host > needed.hardware.host_memory:
        there = needed.hardware.host_memory / GIB
        shown += f"; with offload_optimizer {memory.host / GIB:.1f} of the host's memory, {there:.1f} there"
    changes = "; ".join(ways)
    cure = f"Any one of these would make it fit: {changes}" if changes else "Nothing tried makes it fit"
    budget = needed.hardware.budget / GIB
    return f"{who} lacks {short / GIB:.1f} GiB of {budget:.1f} per accelerator ({shown}). {cure}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """The layout of a recipe's ``[cluster]`` in a plan."""

    needs: int  # accelerators
    placed: Placed | None  # the layout with its memory; None where the degrees do not divide the heads
    faults: tuple[str, ...]  # what would stop the run, each with a remedy; empty where the layout fits
    seconds: float | None = None  # of all stages with this layout; None where it does not fit
    staleness: int = 0  # of the recipe; ``seconds`` are with this

    @property
    def fits(self) -> bool:
        """Whether there is no fault."""
        return not self.faults


def check_stated(needed: Demand, cluster: ClusterConfig, gpus: int) -> Stated:
    """Check placement and memory of ``[cluster]``, without its time.

    Args:
        needed: settings of the recipe that determine memory.
        cluster: the recipe's section.
        gpus: available accelerators of all nodes together.
    """
    learner, rollout = cluster.learner, cluster.rollout
    needs = learner.ranks + (0 if rollout.colocated else rollout.replicas * rollout.tensor_parallel)
    faults = list(_misplaced(needed.shape, needed.hardware, cluster, gpus, needs))
    if any("must divide" in fault for fault in faults):
        return Stated(needs=needs, placed=None, faults=tuple(faults))
    placed = placed_as(needed, learner, rollout)
    if placed.learner_missing > 0:
        ways = _ways(needed, cluster, lambda placed: placed.learner_missing <= 0)
        faults.append(_lacking("a learner rank", placed.learner_missing, placed.learner, needed, ways))
    if placed.cache_missing > 0:
        what = f"a replica, for one sample of {needed.longest} tokens in its cache,"
        ways = _ways(needed, cluster, lambda placed: placed.cache_missing <= 0)
        faults.append(_lacking(what, placed.cache_missing, placed.engine, needed, ways))
    return Stated(needs=needs, placed=placed, faults=tuple(faults))


def placed_as(needed: Demand, learner: LearnerPlacement, rollout: RolloutPlacement) -> Placed:
    """Return the stated layout with its memory."""
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


def _misplaced(shape: ModelShape, hardware: Hardware, cluster: ClusterConfig, gpus: int, needs: int) -> Iterator[str]:
    learner, rollout = cluster.learner, cluster.rollout
    if needs > gpus:
        yield (
            f"{learner.ranks} learner ranks and {rollout.replicas} replicas of {rollout.tensor_parallel} need {needs} "
            f"accelerators, but there are {gpus}: use fewer cluster.rollout.replicas or cluster.learner.ranks, or "
            f"--gpus {needs}"
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


def _ways(needed: Demand, cluster: ClusterConfig, fits: Callable[[Placed], bool]) -> Iterator[str]:
    """Yield settings of which each one would make the layout fit; of each kind the smallest change."""
    learner, rollout, heads = cluster.learner, cluster.rollout, needed.shape.heads

    def helps(learner: LearnerPlacement, rollout: RolloutPlacement, needed: Demand = needed) -> bool:
        return fits(placed_as(needed, learner, rollout))

    if not needed.checkpointing and helps(learner, rollout, replace(needed, checkpointing=True)):
        yield "model.gradient_checkpointing = true"
    for ranks in (learner.ranks * factor for factor in degrees(MOST_GPUS // learner.ranks) if factor > 1):
        # colocated replicas share the ranks' accelerators
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
