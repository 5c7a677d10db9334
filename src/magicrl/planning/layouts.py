"""Ways to lay a step over accelerators, which of them fit, and what would make one fit.

A colocated layout gives every accelerator to engine and learner in turn: while the engine generates, the learner's
master weights and moments stay; while the learner learns, the engine is asleep. A split layout gives each its own.
A recipe's ``[cluster]`` may state its layout (``Stated``): it is checked, and compared with the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from magicrl.config.schema import ClusterConfig, LearnerPlacement, RolloutPlacement
from magicrl.planning.costs import BF16, kv_capacity
from magicrl.planning.hardware import GIB, Hardware
from magicrl.planning.memory import (
    EngineMemory,
    LearnerMemory,
    LearnerSetup,
    beside_ranks,
    engine_memory,
    learner_memory,
    nodes_of,
    placement_fault,
    replicas_held,
)
from magicrl.planning.shapes import ModelShape
from magicrl.planning.workload import Layout

MOST_GPUS = 4096
"""Where the search for enough accelerators ends."""
SPLITS = (0.25, 0.5, 0.75, 0.875)
"""Shares of the accelerators that a split layout may give to the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What of a recipe decides memory.

    Attributes:
        shape: of the model.
        hardware: of one accelerator.
        longest: tokens of the longest sample, the prompt's limit and the largest T.
        micro_batch_tokens: tokens of a forward/backward.
        checkpointing: only layers' inputs are kept in the longest micro-batch.
        head_chunk_tokens: rows of logits that exist at once.
        reference: a frozen reference is kept.
        offload_moments: AdamW's moments live in the host's memory.
        rows: sequences that a replica decodes at once.
        cache_limit: bytes that the engine's cache may take at most.
        adapters: parameters of LoRA adapters, which alone are trained; 0: everything is.
    """

    shape: ModelShape
    hardware: Hardware
    longest: int
    micro_batch_tokens: int
    checkpointing: bool
    head_chunk_tokens: int
    reference: bool
    offload_moments: bool = False
    rows: int = 256
    cache_limit: float = float("inf")
    adapters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A layout and its memory.

    Attributes:
        layout: which accelerators do what.
        learner: bytes on one of the learner's accelerators, by term.
        engine: bytes on one of the engine's.
        missing: bytes that the worse of the two lacks; 0 or less where both fit.
    """

    layout: Layout
    learner: LearnerMemory
    engine: EngineMemory
    missing: float

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


def candidates(demand: Demand, gpus: int) -> list[Placed]:
    """All layouts of ``gpus`` accelerators, those that fit first; the smallest sequence-parallel degree that fits.

    A Ulysses degree divides the query heads and is at most the key/value heads; a tensor-parallel degree divides the
    query heads, and as many replicas fit, each inside a node.
    """
    sides = [(gpus, gpus, True)]
    for share in SPLITS:
        engine = round(gpus * share)
        if 0 < engine < gpus and (engine, gpus - engine, False) not in sides:
            sides.append((engine, gpus - engine, False))
    found: list[Placed] = []
    nodes = nodes_of(gpus, demand.hardware.gpus_per_node)
    for rollout_gpus, learner_gpus, colocated in sides:
        room = nodes if colocated else beside_ranks(nodes, learner_gpus)
        assert room is not None, "the learner's are a part of all"
        for tp in degrees(min(demand.hardware.gpus_per_node, rollout_gpus)):
            divides = demand.shape.heads % tp == 0 and rollout_gpus % tp == 0
            if divides and replicas_held(room, tp) >= rollout_gpus // tp:
                found.append(_narrowest(demand, rollout_gpus, learner_gpus, tp, colocated=colocated))
    return sorted(found, key=lambda placed: max(0.0, placed.missing))


def _narrowest(demand: Demand, rollout_gpus: int, learner_gpus: int, tp: int, *, colocated: bool) -> Placed:
    best: Placed | None = None
    for sp in degrees(min(demand.shape.kv_heads, demand.hardware.gpus_per_node, learner_gpus)):
        if demand.shape.heads % sp or learner_gpus % sp:
            continue
        placed = place(demand, rollout_gpus, learner_gpus, tp, sp, colocated=colocated)
        if best is None or placed.missing < best.missing:
            best = placed
        if placed.fits:
            break
    assert best is not None, "a degree of 1 always divides"
    return best


def place(demand: Demand, rollout_gpus: int, learner_gpus: int, tp: int, sp: int, *, colocated: bool) -> Placed:
    """One layout with its memory."""
    hardware, shape = demand.hardware, demand.shape
    setup = LearnerSetup(
        gpus=learner_gpus,
        sequence_parallel=sp,
        micro_batch_tokens=demand.micro_batch_tokens,
        longest=demand.longest,
        checkpointing=demand.checkpointing,
        head_chunk_tokens=demand.head_chunk_tokens,
        offload_moments=demand.offload_moments,
        reference=demand.reference,
        adapters=demand.adapters,
    )
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
    )
    short = cache_short(demand, engine, tp)
    return Placed(layout=layout, learner=learner, engine=engine, missing=max(learner.total - hardware.budget, short))


def cache_short(demand: Demand, engine: EngineMemory, tensor_parallel: int) -> float:
    """Bytes that a replica's cache lacks, on each of its accelerators, to hold the longest sample; 0 where it does."""
    shape = demand.shape
    if kv_capacity(shape, engine.cache, tensor_parallel) >= demand.longest:
        return 0.0
    return demand.longest * shape.kv_bytes_per_token() / min(tensor_parallel, shape.kv_heads) - engine.cache


def remedies(demand: Demand, gpus: int) -> list[str]:
    """Changes that would each, alone, make the recipe fit; empty where none of them does."""
    found: list[str] = []

    def helps(changed: Demand, count: int = gpus) -> bool:
        return any(placed.fits for placed in candidates(changed, count))

    if not demand.checkpointing and helps(replace(demand, checkpointing=True)):
        found.append("model.gradient_checkpointing = true")
    more = _first(lambda n: helps(demand, n), [gpus * 2**k for k in range(1, 13) if gpus * 2**k <= MOST_GPUS])
    if more is not None:
        found.append(f"--gpus {more}")
    if helps(replace(demand, offload_moments=True)):
        found.append("AdamW's moments in the host's memory (--offload-moments)")
    smaller = [demand.longest >> k for k in range(1, 8) if demand.longest >> k >= 256]
    shorter = _first(
        lambda n: helps(replace(demand, longest=n, micro_batch_tokens=min(n, demand.micro_batch_tokens))), smaller
    )
    if shorter is not None:
        found.append(f"samples of at most {shorter} tokens, prompt and T together (model.micro_batch_tokens too)")
    return found


def _first(test: Callable[[int], bool], values: list[int]) -> int | None:
    return next((value for value in values if test(value)), None)


def refusal(demand: Demand, gpus: int) -> str:
    """Why nothing fits, by term, and what would make it fit."""
    best = min(candidates(demand, gpus), key=lambda placed: placed.missing)
    learner_short = best.learner.total > demand.hardware.budget
    terms = best.learner.terms() if learner_short else best.engine.terms()
    side = "the learner" if learner_short else "the engine"
    shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items() if abs(value) >= 0.05 * GIB)
    layout = "colocated" if best.layout.colocated else "split"
    ways = remedies(demand, gpus)
    cure = "What would make it fit, each alone: " + "; ".join(ways) if ways else "No single change makes it fit"
    return (
        f"{demand.shape.name} with samples of {demand.longest} tokens does not fit on {gpus} x {demand.hardware.name}: "
        f"in the best layout ({layout}, tensor parallel {best.layout.tensor_parallel}, sequence parallel "
        f"{best.layout.sequence_parallel}) {side} lacks {best.missing / GIB:.1f} GiB of "
        f"{demand.hardware.budget / GIB:.1f} an accelerator ({shown}). {cure}."
    )


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
