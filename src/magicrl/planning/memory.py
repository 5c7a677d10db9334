"""Memory of one accelerator, of one machine and of a cluster's nodes, by term, and whether a run fits.

The learner shards parameters, gradients and moments over all its accelerators. Activations are those of one
micro-batch, divided over a sequence-parallel group. The engine has its weights, and its cache uses the rest.

On a cluster each replica is inside one node, next to learner ranks. The total over the nodes is not sufficient: 2 nodes
of 8 GPUs have 10 GPUs left next to 6 ranks, but room for only two replicas of 4.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import psutil

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.model_schema import DType, LoraConfig, ModelConfig
from magicrl.config.schema import TrainConfig
from magicrl.planning.costs import BF16, FLOAT32
from magicrl.planning.hardware import GIB, Hardware
from magicrl.planning.shapes import ModelShape
from magicrl_verifiers.progress import plural

WORKING_WIDTHS = 10
"""Values of width d per token that a layer keeps for its backward pass, in addition to three of the feed-forward's
width."""
LOGIT_COPIES = 3  # float32 tensors of the logits' size that exist at once in the chunked head


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    """Settings that determine the learner's memory."""

    width: float = BF16  # bytes per value of forward and backward passes
    gpus: int = 1  # accelerators that share one copy of parameters, gradients and moments
    reduce_bytes: float = FLOAT32  # bytes per value of the gradients that are summed over accelerators
    reduce_once: bool = False  # sum only after the last micro-batch; whole gradients accumulate until then
    sequence_parallel: int = 1  # accelerators that share a sequence
    micro_batch_tokens: int  # tokens of a forward/backward; a longer sample has its own micro-batch
    longest: int  # tokens of the longest sample, prompt and T
    checkpointing: bool  # only the layers' inputs are kept
    checkpoint_above: int | None = None  # the same only in micro-batches of more tokens than this
    head_chunk_tokens: int  # rows of logits that exist at once
    # all shards (weights, gradients, AdamW's moments) are in the host's memory, as FSDP2's CPUOffloadPolicy keeps them
    offload_optimizer: bool = False
    reference: bool = False  # a frozen reference model is kept, sharded
    teacher: int = 0  # parameters of a frozen teacher, sharded
    adapters: int = 0  # parameters of LoRA adapters; 0: all parameters are trained


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerMemory:
    """Bytes on one accelerator at the peak of an update."""

    master: float  # float32 weights (shard); 0 when offloaded
    gradients: float  # float32 (shard); 0 when offloaded
    moments: float  # AdamW's two, float32 (shard); 0 when offloaded
    reference: float  # reference and teacher (shard); 0 when offloaded
    frozen: float  # weights that LoRA leaves as they are (shard); 0 when offloaded
    gathered: float  # weights that are whole; when offloaded also the shard of a unit on its way, float32
    reduced: float  # gradients that are whole, and what is on its way between accelerators
    activations: float  # of one micro-batch
    head: float  # logits of one chunk
    runtime: float  # contexts and buffers
    host: float = 0.0  # of the host's memory for this accelerator, when offloaded: all shards; in no sum

    @property
    def resident(self) -> float:
        """Bytes that remain while the engine generates: master weights, moments, reference, frozen weights, runtime."""
        return self.master + self.moments + self.reference + self.frozen + self.runtime

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """Return bytes by term, of the accelerator's memory."""
        return {name: value for name, value in asdict(self).items() if name != "host"}


Transient: TypeAlias = tuple[float, float, float, float]
"""Bytes that an accelerator needs only at one point of a micro-batch: the terms ``gathered``, ``reduced``,
``activations`` and ``head`` of `LearnerMemory`."""


def _micro_batch(shape: ModelShape, setup: LearnerSetup) -> tuple[float, float, float]:
    """Return the tokens of one accelerator's largest micro-batch, and the bytes of its activations and logits."""
    # a sample that is longer than a micro-batch is not split
    tokens = max(setup.micro_batch_tokens, setup.longest) / setup.sequence_parallel
    layer = tokens * (WORKING_WIDTHS * shape.hidden + 3 * shape.chosen * shape.intermediate) * setup.width
    activations = (
        shape.layers * tokens * shape.hidden * setup.width + layer if setup.checkpointing else shape.layers * layer
    )
    return tokens, activations, LOGIT_COPIES * FLOAT32 * min(setup.head_chunk_tokens, tokens) * shape.vocabulary


def unit_transients(shape: ModelShape, setup: LearnerSetup) -> list[Transient]:
    """Return the candidates for the peak in a backward pass over shards: at the head, at a layer, at the ends.

    The order is that of FSDP2 with one unit per layer. A unit's weights are gathered while the previous one computes
    and dropped when its gradient is whole. The gradient is then copied into the send buffer, which exists until that of
    the next unit is made. Embedding and head are separate units. A tied one is whole from the first layer to the last,
    and its gradient from the head on.
    """
    tokens, activations, logits = _micro_batch(shape, setup)
    ends, layer = float(shape.vocabulary * shape.hidden), float(shape.layer_parameters)
    trained_ends, trained_layer = (0.0, setup.adapters / shape.layers) if setup.adapters else (ends, layer)
    whole = setup.width * ends if shape.tied else 0.0
    summed = setup.reduce_bytes * (setup.adapters or shape.parameters) if setup.reduce_once else 0.0
    sent = 0.0 if setup.reduce_once else setup.reduce_bytes
    inputs = shape.layers * tokens * shape.hidden * setup.width if setup.checkpointing else activations
    # what remains after the head: the gradient of a tied head, the send buffer of another
    left = (setup.width if shape.tied else sent) * trained_ends
    last = left + setup.width * trained_layer
    inner = (left if shape.tied else 0.0) + (setup.width + sent) * trained_layer
    # with this accelerator's shard of the sum, also in float32
    back = setup.reduce_bytes + (FLOAT32 if setup.reduce_bytes != FLOAT32 else 0.0)
    sending = (setup.width + setup.reduce_bytes + back / setup.gpus) * trained_ends
    found = [
        (setup.width * (ends + layer), setup.width * trained_ends + summed, inputs, logits),
        (whole + 2 * setup.width * layer, max(last, inner) + summed, activations, 0.0),
    ]
    if not shape.tied:
        return [*found, (setup.width * layer, sending + summed, inputs, 0.0)]
    adding = 3 * setup.width * trained_ends + sent * trained_layer  # the head's gradient, the embedding's and their sum
    return [*found, (whole, adding + summed, 0.0, 0.0), (0.0, sending + summed, 0.0, 0.0)]


def learner_memory(shape: ModelShape, setup: LearnerSetup, runtime: float) -> LearnerMemory:
    """Return the bytes on one accelerator by term.

    A single accelerator has everything, and a 16-bit copy of the trained weights unless it computes in float32.
    """
    above, largest = setup.checkpoint_above, max(setup.micro_batch_tokens, setup.longest)
    if above is not None:  # the largest micro-batch with, and the largest without checkpointing
        short = min(above, largest)
        ways = [replace(setup, longest=short, micro_batch_tokens=short, checkpoint_above=None)]
        if largest > above:
            ways.append(replace(setup, checkpointing=True, checkpoint_above=None))
        return max((learner_memory(shape, way, runtime) for way in ways), key=lambda found: found.total)
    trained = setup.adapters or shape.parameters
    shard = trained / setup.gpus
    if setup.gpus == 1:
        _, activations, logits = _micro_batch(shape, setup)
        gathered, reduced = setup.width * trained if setup.width != FLOAT32 else 0.0, 0.0
    else:
        gathered, reduced, activations, logits = max(unit_transients(shape, setup), key=sum)
    shards = {
        "master": FLOAT32 * shard,
        "gradients": FLOAT32 * shard,
        "moments": 2 * FLOAT32 * shard,
        "reference": setup.width * (setup.reference * shape.parameters + setup.teacher) / setup.gpus,
        "frozen": setup.width * shape.parameters / setup.gpus if setup.adapters else 0.0,
    }
    host = 0.0
    if setup.offload_optimizer:
        unit = max(float(shape.vocabulary * shape.hidden), float(shape.layer_parameters))
        gathered += FLOAT32 * unit / setup.gpus
        host, shards = sum(shards.values()), dict.fromkeys(shards, 0.0)
    return LearnerMemory(
        **shards, gathered=gathered, reduced=reduced, activations=activations, head=logits, runtime=runtime, host=host
    )


def engine_memory(
    shape: ModelShape, hardware: Hardware, tensor_parallel: int, learner: float, width: float = BF16
) -> dict[str, float]:
    """Return the bytes by term on one accelerator while it generates, next to the learner's resident bytes.

    ``weights`` have ``width`` bytes each, divided by the tensor-parallel degree. ``cache`` is the rest of the budget,
    for keys and values; it is negative if nothing remains.
    """
    weights = width * shape.parameters / tensor_parallel
    own = 0.0 if learner else hardware.runtime  # else included in the learner's resident bytes
    cache = hardware.budget - weights - learner - own
    return {"weights": weights, "learner": learner, "runtime": own, "cache": cache}


_NODE_SHARE = 0.25
"""Maximum share of an accelerator's memory for the learner's state, if each node is to have a copy of it."""


def learner_state(parameters: int, *, lora: bool) -> float:
    """Return the bytes of all shards together: four float32 values per parameter, or with LoRA frozen bf16 weights."""
    return (BF16 if lora else 4 * FLOAT32) * parameters


def shards_by_default(ranks: int, node: int, state: float, memory: float) -> int:
    """Return the default of ``cluster.learner.shard_ranks``, the ranks that share one copy of the model.

    These are the ranks of a node, since weights are gathered many times per step and links inside a node are fast. If
    their shards would leave too little memory for activations, these are all ranks.

    Args:
        ranks: learner ranks.
        node: ranks per node, a divisor of ``ranks``.
        state: bytes of master weights, gradients and moments together.
        memory: bytes of an accelerator.
    """
    return node if state / node <= _NODE_SHARE * memory else ranks


def value_bytes(dtype: DType) -> float:
    """Return the bytes of a value of ``dtype``."""
    return FLOAT32 if dtype == "float32" else BF16


RUNTIME = 0.7 * GIB  # torch and transformers, before a model is loaded
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> float:
    """Return the bytes of this machine, or of the container that this process runs in."""
    limits = [float(psutil.virtual_memory().total)]
    for place in _LIMITS:
        try:
            text = Path(place).read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits += [float(text)] if text.isdigit() and int(text) else []
    return min(limits)


def learner_terms(
    model: ModelConfig, shape: ModelShape, *, batch_tokens: int, longest: int, reference: bool = False
) -> dict[str, float]:
    """Return the bytes of this process's learner by term.

    Args:
        model: precision, micro-batches, checkpointing, LoRA.
        shape: shape of the model.
        batch_tokens: tokens of a mini-batch, an upper bound of a micro-batch.
        longest: tokens of the longest sample.
        reference: whether a frozen reference is kept.
    """
    setup = LearnerSetup(
        width=value_bytes(model.dtype),
        micro_batch_tokens=min(model.micro_batch_tokens, batch_tokens),
        longest=longest,
        checkpointing=model.gradient_checkpointing,
        checkpoint_above=model.checkpoint_above_tokens,
        head_chunk_tokens=model.head_chunk_tokens,
        reference=reference,
        adapters=0 if model.lora is None else shape.adapter_parameters(model.lora.rank, model.lora.target_modules),
    )
    found = learner_memory(shape, setup, RUNTIME).terms()
    # a second copy of weights and moments while a checkpoint is written during the next update
    found["checkpoint"] = 3 * FLOAT32 * (setup.adapters or shape.parameters)
    return found


def run_terms(config: TrainConfig, model: ModelConfig, shape: ModelShape, longest_prompt: int) -> dict[str, float]:
    """Return the bytes by term of a run on this machine with an in-process engine and a cache for one sample."""
    longest = longest_prompt + max(stage.max_tokens for stage in config.stages)
    batch = max(
        (stage.mini_batch or stage.rollout_batch) * stage.group_size * (longest_prompt + stage.max_tokens)
        for stage in config.stages
    )
    learner = learner_terms(
        model, shape, batch_tokens=batch, longest=longest, reference=config.reference.mode != "none"
    )
    width = value_bytes(config.rollout.dtype or model.dtype)
    # a float32 head of narrower weights decodes with a copy of them
    head = FLOAT32 * shape.vocabulary * shape.hidden if model.head_dtype == "float32" and width != FLOAT32 else 0
    return learner | {"engine": width * shape.parameters + head, "cache": longest * shape.kv_bytes_per_token(width)}


def memory_fault(
    section: str, model: ModelConfig, terms: Callable[[ModelConfig], Mapping[str, float]], memory: float
) -> str | None:
    """Return why a run does not fit this machine and what would make it fit; None where it fits.

    Args:
        section: section of the recipe with the settings ``model``.
        model: the settings.
        terms: returns the bytes by term with such settings.
        memory: available bytes.
    """
    needed = terms(model)
    if sum(needed.values()) <= memory:
        return None
    ways = [f"{section}.{name}" for name, changed in _smaller(model) if sum(terms(changed).values()) <= memory]
    shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in needed.items() if value >= 0.05 * GIB)
    cure = (
        f"any one of these would make it fit: {'; '.join(ways)}" if ways else "use a smaller model or a larger machine"
    )
    return (
        f"the run needs about {sum(needed.values()) / GIB:.1f} GiB of memory ({shown}), and "
        f"{memory / GIB:.1f} are available; {cure}"
    )


def _smaller(model: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yield settings that need less memory, each with its change."""
    if not model.gradient_checkpointing:
        yield "gradient_checkpointing = true", model.model_copy(update={"gradient_checkpointing": True})
    for tokens in (4096, 1024):
        if tokens < model.micro_batch_tokens:
            yield f"micro_batch_tokens = {tokens}", model.model_copy(update={"micro_batch_tokens": tokens})
    if model.dtype == "float32":
        yield 'dtype = "bfloat16"', model.model_copy(update={"dtype": "bfloat16"})
    if model.lora is None:
        yield "lora = { rank = 16 }", model.model_copy(update={"lora": LoraConfig()})


RANK_CPUS = 1  # each learner rank on a GPU reserves one
_MOST_NODES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRoom:
    """Available GPUs of a node, and CPUs where they are known."""

    gpus: float
    cpus: float = math.inf


def nodes_of(gpus: int, each: int) -> list[NodeRoom]:
    """Return ``gpus`` accelerators as nodes of ``each``, with the rest in a smaller node."""
    whole, rest = divmod(gpus, each)
    return [NodeRoom(gpus=each)] * whole + ([NodeRoom(gpus=rest)] if rest else [])


def beside_ranks(nodes: Sequence[NodeRoom], ranks: int) -> list[NodeRoom] | None:
    """Return what remains of the nodes next to learner ranks of one GPU and one CPU each; None if these do not fit.

    Ray's PACK fills the node with the largest remaining shares after one rank, then the next (`LeastResourceScorer`).
    """
    left = list(nodes)
    usable = (index for index, node in enumerate(nodes) if _ranks_in(node))

    def share_left(index: int) -> float:
        node = nodes[index]
        cpus = 1.0 if math.isinf(node.cpus) else (node.cpus - RANK_CPUS) / node.cpus
        return (node.gpus - 1) / node.gpus + cpus

    for index in sorted(usable, key=lambda index: (-share_left(index), index)):
        taken = min(ranks, _ranks_in(left[index]))
        left[index] = NodeRoom(gpus=left[index].gpus - taken, cpus=left[index].cpus - taken * RANK_CPUS)
        ranks -= taken
    return None if ranks else left


def replicas_held(nodes: Sequence[NodeRoom], gpus: int, cpus: float = 0.0) -> int:
    """Return the number of replicas of ``gpus`` GPUs and ``cpus`` CPUs that fit, each inside one node."""
    return sum(math.floor(min(node.gpus / gpus, node.cpus / cpus if cpus else math.inf)) for node in nodes)


def placement_fault(nodes: Sequence[NodeRoom], cluster: ClusterConfig) -> str | None:
    """Return why ranks and replicas on GPUs do not fit these nodes together and what to change; None where they fit.

    If colocated, replicas and ranks share GPUs and CPUs. CPUs are ignored on nodes where they are not known.
    """
    learner, rollout = cluster.learner, cluster.rollout
    gpus, wanted, ranks = rollout.tensor_parallel, rollout.replicas, 0 if rollout.colocated else learner.ranks
    largest = max((node.gpus for node in nodes), default=0.0)
    if gpus > largest:
        return (
            f"cluster.rollout.tensor_parallel {gpus} is more than the {largest:g} GPUs of the largest node; a replica "
            "must be inside one node"
        )

    def held(ranks: int, among: Sequence[NodeRoom] = nodes) -> int:
        left = beside_ranks(among, ranks)
        return -1 if left is None else replicas_held(left, gpus, rollout.cpus)

    now = held(ranks)
    if now >= wanted:
        return None
    left = beside_ranks(nodes, ranks)
    taken = f"next to {ranks} learner ranks, which fill as few nodes as possible, " if ranks else ""
    if left is None:
        fault = f"{ranks} learner ranks, each with a GPU and a CPU, do not fit: {_room_text(nodes)}"
    else:
        each = f"{gpus} GPUs" + (f" and {rollout.cpus:g} CPUs" if any(math.isfinite(n.cpus) for n in nodes) else "")
        fault = f"{wanted} replicas of {each} do not fit, {now} do: {taken}{_room_text(left)}"
        fault += "; a replica must be inside one node"
    ways = [f"cluster.rollout.replicas = {now}"] if now > 0 and not rollout.colocated else []
    if now > 0 and rollout.colocated:
        ways.append(f"cluster.rollout.replicas = {now} with cluster.learner.ranks = {now * gpus}")
    fewer = range(ranks - learner.sequence_parallel, 0, -learner.sequence_parallel)
    enough = next((count for count in fewer if held(count) >= wanted), None)
    if enough is not None:
        ways.append(f"cluster.learner.ranks = {enough}")
    best = max(nodes, key=lambda node: (node.gpus, node.cpus))
    added = (count for count in range(1, _MOST_NODES + 1) if held(ranks, [*nodes, *[best] * count]) >= wanted)
    count = next(added, None)
    ways.append(
        "nodes with more CPUs, or smaller cluster.rollout.cpus"
        if count is None
        else f"{plural(count, 'more node')} of {best.gpus:g} GPUs"
    )
    return f"{fault}. Any one of these would make it fit: {'; '.join(ways)}"


def _ranks_in(node: NodeRoom) -> int:
    return math.floor(min(node.gpus, node.cpus / RANK_CPUS))


def _room_text(nodes: Sequence[NodeRoom]) -> str:
    """Return the room of the nodes in words, with a count of equal nodes."""
    words = (
        f"{count} x {node.gpus:g}" + ("" if math.isinf(node.cpus) else f" (with {node.cpus:g} CPUs)")
        for node, count in Counter(nodes).items()
    )
    return f"there are nodes of {', '.join(words)} GPUs"
