"""Seconds of each part of a training step, and its model FLOPs: pure functions of a model's shape, a machine and its
efficiencies.

All times are seconds, all sizes bytes, all bandwidths bytes a second. Every function states its formula. What no
formula knows (how much of a peak is reached, what the host adds) is an ``Efficiency``. Those that are known are kept in
``calibration.toml``: ``published`` for GPUs (``benchmarks/planning/plan_published.py`` fits it on published steps),
and ``cpu-2core`` for a machine of two cores, a table for each width of model, since small products reach less of the
peak.

Model FLOPs are what a step's sequences need, whatever was computed for them; MFU is counted in them. A prompt counts
once for all its responses, the output head at the positions that predict a response token, attention to the tokens
before (the causal half). Recomputation, padding and masked-out halves are work, but no model FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import ceil, log, sqrt
from statistics import NormalDist
from typing import Any

from magicrl.config.loader import shipped_table
from magicrl.planning.hardware import Hardware
from magicrl.planning.shapes import ModelShape

BF16 = 2.0
FLOAT32 = 4.0
ALL_REDUCE_LATENCY = 10e-6  # seconds of one small all-reduce inside a node


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What is reached of the peaks, and what the host adds."""

    kv: float  # share of the memory bandwidth reached on reading keys and values, scheduling of a sequence included
    step_overhead: float  # seconds a decode step, whatever its batch
    learner: float  # share of the peak arithmetic reached by learner and log-prob passes, recomputation counted as work
    other: float  # seconds a response outside rollout, log-probs and updates (judging, data handling, offloading)
    weights: float = 0.7  # share of the memory bandwidth reached on reading weights
    matmul: float = 0.6  # share of the peak arithmetic reached by decode and prefill products
    network: float = 0.7  # share of a link's bandwidth reached by collectives
    # seconds of a sequence's token in a decode step beside arithmetic and memory (sampling, bookkeeping, small
    # products): what makes a narrow model's step dearer with its batch
    row: float = 0.0


@dataclass(frozen=True, slots=True)
class System:
    """A model on accelerators, and what is reached of these."""

    shape: ModelShape
    hardware: Hardware
    efficiency: Efficiency

    def collective_bandwidth(self, gpus: int) -> float:
        """Bytes/s of each accelerator in a collective over ``gpus``: the link in a node, the network beyond."""
        link = self.hardware.link if gpus <= self.hardware.gpus_per_node else self.hardware.network
        return link * self.efficiency.network


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCost:
    """Seconds of one decode step of one replica: linear in its sequences and in their tokens of context."""

    overhead: float  # host time and collectives' latency
    weights: float  # reading the weights once
    sequence: float  # arithmetic of one sequence's token; hidden behind ``weights`` while the batch is small
    context: float  # reading one token's keys and values
    prefill: float  # seconds of one token that is prefilled
    row: float = 0.0  # of one sequence's token, hidden behind nothing

    def step(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one step: overhead + rows + max(weights, arithmetic) + context."""
        base = self.overhead + self.row * sequences + max(self.weights, self.sequence * sequences)
        return base + self.context * context_tokens


def decode_cost(system: System, tensor_parallel: int = 1) -> DecodeCost:
    """The decode step of a replica of ``tensor_parallel`` accelerators, weights and cache in bf16.

    Weights and cache divide over the accelerators; two all-reduces a layer are added where there is more than one.
    """
    shape, hardware, efficiency = system.shape, system.hardware, system.efficiency
    tp = tensor_parallel
    reductions = 2.0 * shape.layers if tp > 1 else 0.0
    moved = reductions * 2.0 * shape.hidden * BF16 * (tp - 1) / tp / (hardware.link * efficiency.network)
    compute = 2.0 * shape.multiplied_parameters / (tp * hardware.flops * efficiency.matmul)
    kv_read = shape.kv_bytes_per_token() / min(tp, shape.kv_heads) / (hardware.bandwidth * efficiency.kv)
    return DecodeCost(
        overhead=efficiency.step_overhead + reductions * ALL_REDUCE_LATENCY,
        weights=BF16 * shape.read_parameters / tp / (hardware.bandwidth * efficiency.weights),
        sequence=compute + moved,
        context=kv_read,
        prefill=compute + moved,
        row=efficiency.row,
    )


def kv_capacity(shape: ModelShape, kv_bytes: float, tensor_parallel: int = 1) -> int:
    """Tokens of context that fit into ``kv_bytes`` on each of a replica's accelerators."""
    return max(0, int(kv_bytes * min(tensor_parallel, shape.kv_heads) / shape.kv_bytes_per_token()))


def forward_flops(shape: ModelShape, tokens: float, mean_context: float, *, head_tokens: float | None = None) -> float:
    """2 N a token, and the attention to ``mean_context`` tokens (half the length of a causal sequence).

    ``head_tokens``: those that the output head sees, where these are not all.
    """
    forward = tokens * (2.0 * shape.multiplied_parameters + shape.attention_flops_per_token(mean_context))
    return forward - (0.0 if head_tokens is None else _head_flops(shape, tokens - head_tokens))


def learner_flops(shape: ModelShape, tokens: float, mean_context: float, *, recompute: float) -> float:
    """Forward and backward, three times the forward (6 N a token); recomputation adds a forward of the layers, for
    that share of the tokens."""
    forward = forward_flops(shape, tokens, mean_context)
    return 3.0 * forward + recompute * (forward - _head_flops(shape, tokens))


def _head_flops(shape: ModelShape, tokens: float) -> float:
    return tokens * 2.0 * shape.vocabulary * shape.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerWork:
    """What the learner computes in a step."""

    tokens: float  # prompt and response tokens of the surviving groups, over all accelerators and passes
    mean_context: float  # tokens that a token sees, on average
    responses: float  # samples, passes counted
    variation: float  # standard deviation of a sample's tokens over their mean
    sgd_steps: int  # optimizer steps
    # tokens of one forward/backward on one accelerator (of a sequence-parallel group together)
    micro_batch_tokens: float
    recompute: float  # share of the tokens whose layers are computed again in the backward pass

    def micro_batches(self, groups: int) -> int:
        """Of each of so many data-parallel groups; at least one an update."""
        return max(self.sgd_steps, ceil(self.tokens / (groups * self.micro_batch_tokens)))


def largest_normal(count: float) -> float:
    """Expected largest of ``count`` standard normal values (Blom's approximation); 0 for one."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def straggling(ranks: int, responses: float, variation: float) -> float:
    """How much longer the fullest of ``ranks`` learners takes than the mean, where each has ``responses`` samples.

    The largest of ``ranks`` normal sums: 1 + z * variation / sqrt(responses), with z of `largest_normal`. 1 for one
    rank. A rank without a whole sample counts one.

    Args:
        ranks: data-parallel groups, which wait for each other at every update.
        responses: samples of each in one update.
        variation: standard deviation of a response's cost over its mean.
    """
    if ranks < 2:
        return 1.0
    return 1.0 + largest_normal(ranks) * variation / sqrt(max(responses, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How the learner's accelerators exchange weights and gradients."""

    shards: int | None = None  # accelerators that hold the model once, neighbours; None: all
    reduce_bytes: float = FLOAT32  # of a value of the gradients that are summed
    reduce_once: bool = False  # once an update, not once a micro-batch


def exchange_seconds(system: System, exchange: Exchange, gpus: int, micro_batches: int, updates: int) -> float:
    """Weights and gradients of ``micro_batches`` over ``gpus`` accelerators, in ``updates`` updates.

    Among the accelerators of one copy (s) each micro-batch gathers the weights twice in bf16 and scatters the sum of
    its gradients: (s - 1) / s of the parameters each time. Copies (c) then all-reduce their shards, twice (c - 1) / c
    of them: once an update, in a sum of 16 bits once a micro-batch (`magicrl.distributed.learner.sharding`).
    """
    shards = exchange.shards or gpus
    copies, parameters = gpus // shards, system.shape.parameters
    sums = updates if exchange.reduce_once else micro_batches
    inside = (shards - 1) / shards * parameters * (2 * BF16 * micro_batches + exchange.reduce_bytes * sums)
    meetings = updates if exchange.reduce_bytes == FLOAT32 else sums
    across = 2 * (copies - 1) / copies * parameters / shards * exchange.reduce_bytes * meetings
    return inside / system.collective_bandwidth(shards) + across / system.collective_bandwidth(gpus)


def learner_seconds(
    system: System,
    work: LearnerWork,
    gpus: int,
    sequence_parallel: int = 1,
    exchange: Exchange | None = None,
) -> float:
    """All updates of a step with fully sharded data parallelism: arithmetic or communication, the longer of the two,
    and the optimizer.

    Weights and gradients move as `exchange_seconds` has it, and Ulysses' four exchanges a layer move activations. The
    arithmetic is that of the fullest rank (``straggling``), and a sample is not divided over more than its
    sequence-parallel group, so that ranks beyond the number of samples stand idle. The optimizer reads and writes
    master, moments and gradient of its shard (28 bytes a parameter).
    """
    shape, hardware, efficiency = system.shape, system.hardware, system.efficiency
    flops = learner_flops(shape, work.tokens, work.mean_context, recompute=work.recompute)
    groups = max(1, gpus // sequence_parallel)
    spread = straggling(groups, work.responses / (groups * work.sgd_steps), work.variation)
    busy = min(gpus, sequence_parallel * work.responses / work.sgd_steps)
    compute = flops / (busy * hardware.flops * efficiency.learner) * spread
    micro_batches = work.micro_batches(groups)
    given = exchange or Exchange()
    communication = exchange_seconds(system, given, gpus, micro_batches, work.sgd_steps)
    if sequence_parallel > 1:
        passes = 3.0 + work.recompute
        exchanged = passes * 4.0 * shape.layers * work.tokens / gpus * shape.hidden * BF16
        communication += exchanged / system.collective_bandwidth(sequence_parallel)
    shard = shape.parameters / (given.shards or gpus)
    optimizer = work.sgd_steps * 28.0 * shard / (hardware.bandwidth * efficiency.weights)
    return max(compute, communication) + optimizer


def offload_seconds(system: System, work: LearnerWork, groups: int, shards: int) -> float:
    """What a step takes longer where masters, moments and gradients live in the host's memory, a shard a rank.

    Each micro-batch fetches the shard's float32 weights twice and sends its gradient (12 bytes a parameter), each
    update reads and writes master, moments and gradient there (28). Nothing of it is taken to overlap.
    """
    moved = 12.0 * work.micro_batches(groups) + 28.0 * work.sgd_steps
    return moved * system.shape.parameters / shards / (system.hardware.host * system.efficiency.network)


def logprob_seconds(system: System, tokens: float, mean_context: float, gpus: int) -> float:
    """One forward over ``tokens`` (old or reference log-probs) at the learner's efficiency."""
    rate = gpus * system.hardware.flops * system.efficiency.learner
    return forward_flops(system.shape, tokens, mean_context) / rate


def weight_sync_seconds(system: System, gpus: int) -> float:
    """The new weights in bf16 to every accelerator of the engine; 0 in one process, which holds them already."""
    if gpus == 1:
        return 0.0
    return BF16 * system.shape.parameters / system.collective_bandwidth(gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Efficiencies, and how far plans that use them were from measured steps."""

    name: str  # of the table
    efficiency: Efficiency  # its values
    source: str  # figures that the values were fitted on
    factor: float  # nine of ten measured steps were within this factor of the plan
    factor_from: str  # the steps that the factor was found on


def load_calibration(hardware: str, hidden: int) -> Calibration:
    """The efficiencies for an accelerator and a model's width: its own where there are any, else the published ones."""
    tables = shipped_table("planning/calibration.toml", dict[str, dict[str, Any]])
    own = {name: table for name, table in tables.items() if table["hardware"] == hardware}
    candidates = own or {name: table for name, table in tables.items() if table["hardware"] == "gpu"}
    name, table = min(candidates.items(), key=lambda item: abs(log(item[1]["hidden"] / hidden)))
    return Calibration(
        name=name,
        efficiency=Efficiency(**{f.name: table[f.name] for f in fields(Efficiency) if f.name in table}),
        source=table["source"],
        factor=table["factor"],
        factor_from=table["factor_from"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceWork:
    """The tokens of one pass over prompts and their responses; passes add up."""

    # that enter the layers: each prompt once, and of each response all but the last, which predicts nothing
    tokens: int = 0
    predicted: int = 0  # response tokens, each predicted by the output head
    seen: int = 0  # tokens that the entering ones attend to, themselves included, summed
    prompts: int = 0  # tokens of the prompts

    def __add__(self, other: SequenceWork) -> SequenceWork:
        return SequenceWork(
            tokens=self.tokens + other.tokens,
            predicted=self.predicted + other.predicted,
            seen=self.seen + other.seen,
            prompts=self.prompts + other.prompts,
        )


def sequence_work(groups: Iterable[tuple[int, Sequence[int]]]) -> SequenceWork:
    """The work of one pass over ``groups``: tokens of a prompt, and of each of its responses.

    Example: a prompt of 2 tokens with responses of 1 and 3. Entering: 2 + 0 + 2. Seen: 1 + 2 by the prompt, nothing by
    the first response, 3 + 4 by the second.
        >>> sequence_work([(2, [1, 3])])
        SequenceWork(tokens=4, predicted=4, seen=10, prompts=2)
    """
    tokens = predicted = seen = prompts = 0
    for prompt, responses in groups:
        prompts += prompt
        tokens += prompt
        seen += prompt * (prompt + 1) // 2
        for response in responses:
            entering = response - 1
            tokens += entering
            predicted += response
            seen += entering * prompt + entering * (entering + 1) // 2
    return SequenceWork(tokens=tokens, predicted=predicted, seen=seen, prompts=prompts)


def generation_flops(shape: ModelShape, work: SequenceWork) -> float:
    """2 N a token and attention, forward: of sampling these responses, or of their log-probs without gradient."""
    if not work.tokens:
        return 0.0
    return forward_flops(shape, work.tokens, work.seen / work.tokens, head_tokens=work.predicted)


def update_flops(shape: ModelShape, work: SequenceWork, *, adapters: int | None = None) -> float:
    """6 N a token and attention, forward and backward, recomputation not counted.

    Args:
        shape: of the model.
        work: of all mini-batches.
        adapters: parameters of LoRA adapters; the frozen weights' own gradient is then not needed: 4 N, 6 for these.
    """
    forward = generation_flops(shape, work)
    if adapters is None:
        return 3.0 * forward
    attention = work.seen * shape.attention_flops_per_token(1.0)
    return 2.0 * forward + attention + 6.0 * adapters * work.tokens
