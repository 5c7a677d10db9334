"""Time of each part of a training step, and its model FLOPs: functions of a model's shape, a machine and efficiencies.

All times are in seconds, sizes in bytes, bandwidths in bytes per second. Every function states its formula. The
quantities without a formula (fractions of the peaks, overhead of the host) are in ``Efficiency``. ``calibration.toml``
has the known ones: ``published`` for GPUs (fitted on published steps by ``benchmarks/planning/plan_published.py``), and
``cpu-2core`` for a machine with two cores, with a table per model width, since small products reach less of the peak.

Model FLOPs are those that a step's sequences need, independent of what was computed. MFU is defined by them. A prompt
counts once for all its responses, the output head only at positions that predict a response token, and attention only
to previous tokens (the causal half). Recomputation, padding and masked-out halves are work, but not model FLOPs.
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
    """Fractions of the peaks that are reached, the overhead of the host, and the error of plans that use them."""

    kv: float  # share of the memory bandwidth when reading keys and values, including scheduling of a sequence
    step_overhead: float  # seconds per decode step, independent of its batch
    learner: float  # share of the peak arithmetic of learner and log-prob passes, with recomputation as work
    other: float  # seconds per response outside rollout, log-probs and updates (judging, data handling, offloading)
    weights: float = 0.7  # share of the memory bandwidth when reading weights
    matmul: float = 0.6  # share of the peak arithmetic of decode and prefill products
    network: float = 0.7  # share of a link's bandwidth in collectives
    # seconds of a sequence's token in a decode step in addition to arithmetic and memory (sampling, bookkeeping, small
    # products); the reason why a narrow model's step becomes slower with its batch
    row: float = 0.0
    dtype: str = "bfloat16"  # precision of the measured steps, and of the times
    name: str = ""  # of the table in ``calibration.toml``
    source: str = ""  # data that the values were fitted on
    factor: float = 1.0  # nine of ten measured steps were within this factor of the plan
    factor_from: str = ""  # steps that the factor was measured on


@dataclass(frozen=True, slots=True)
class System:
    """A model, the accelerators that it runs on, and their efficiency."""

    shape: ModelShape
    hardware: Hardware
    efficiency: Efficiency
    adapters: int = 0  # parameters of LoRA adapters; 0: all parameters are trained

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.adapters or self.shape.parameters

    def collective_bandwidth(self, gpus: int) -> float:
        """Return bytes/s of each accelerator in a collective over ``gpus``: the link in a node, the network beyond."""
        link = self.hardware.link if gpus <= self.hardware.gpus_per_node else self.hardware.network
        return link * self.efficiency.network


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCost:
    """Seconds of one decode step of one replica, linear in the number of sequences and their tokens of context."""

    overhead: float  # host time and latency of collectives
    weights: float  # reading the weights once
    sequence: float  # arithmetic of one sequence's token; overlaps with ``weights`` while the batch is small
    context: float  # reading one token's keys and values
    prefill: float  # prefill of one token
    row: float = 0.0  # additional time of one sequence's token, without overlap

    def step(self, sequences: float, context_tokens: float) -> float:
        """Return the seconds of one step: overhead + rows + max(weights, arithmetic) + context."""
        base = self.overhead + self.row * sequences + max(self.weights, self.sequence * sequences)
        return base + self.context * context_tokens


def decode_cost(system: System, tensor_parallel: int = 1) -> DecodeCost:
    """Return the cost of a decode step of a replica of ``tensor_parallel`` accelerators, with bf16 weights and cache.

    Weights and cache are divided over the accelerators. With more than one, each layer adds two all-reduces.
    """
    shape, hardware, efficiency = system.shape, system.hardware, system.efficiency
    tp = tensor_parallel
    reductions = 2.0 * shape.layers if tp > 1 else 0.0
    moved = reductions * 2.0 * shape.hidden * BF16 * (tp - 1) / tp / (hardware.link * efficiency.network)
    compute = 2.0 * shape.multiplied_parameters / (tp * hardware.flops * efficiency.matmul)
    return DecodeCost(
        overhead=efficiency.step_overhead + reductions * ALL_REDUCE_LATENCY,
        weights=BF16 * shape.read_parameters / tp / (hardware.bandwidth * efficiency.weights),
        sequence=compute + moved,
        context=shape.kv_bytes_per_token() / min(tp, shape.kv_heads) / (hardware.bandwidth * efficiency.kv),
        prefill=compute + moved,
        row=efficiency.row,
    )


def kv_capacity(shape: ModelShape, kv_bytes: float, tensor_parallel: int = 1, width: float = BF16) -> int:
    """Return the tokens of context that fit into ``kv_bytes`` on each accelerator of a replica, ``width`` per value."""
    return max(0, int(kv_bytes * min(tensor_parallel, shape.kv_heads) / shape.kv_bytes_per_token(width)))


def forward_flops(shape: ModelShape, tokens: float, mean_context: float, *, head_tokens: float | None = None) -> float:
    """Return 2 N per token plus the attention to ``mean_context`` tokens (half the length of a causal sequence).

    ``head_tokens`` is the number of tokens with an output head; None: all.
    """
    forward = tokens * (2.0 * shape.multiplied_parameters + shape.attention_flops_per_token(mean_context))
    return forward - (0.0 if head_tokens is None else _head_flops(shape, tokens - head_tokens))


def learner_flops(
    shape: ModelShape, tokens: float, mean_context: float, *, recompute: float, adapters: int = 0
) -> float:
    """Return the FLOPs of forward and backward, three times the forward (6 N per token).

    With LoRA the frozen weights need no gradient, which is a third of their products. Recomputation adds a forward of
    the layers for the share ``recompute`` of the tokens.
    """
    forward = forward_flops(shape, tokens, mean_context)
    saved = tokens * (2.0 * shape.multiplied_parameters - 6.0 * adapters) if adapters else 0.0
    return 3.0 * forward - saved + recompute * (forward - _head_flops(shape, tokens))


def _head_flops(shape: ModelShape, tokens: float) -> float:
    return tokens * 2.0 * shape.vocabulary * shape.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerWork:
    """The learner's work in a step."""

    tokens: float  # prompt and response tokens of the kept groups, over all accelerators and passes
    mean_context: float  # mean number of tokens that a token attends to
    responses: float  # samples, counted once per pass
    variation: float  # standard deviation of a sample's tokens over their mean
    sgd_steps: int  # optimizer steps
    # tokens of one forward/backward on one accelerator, or on one sequence-parallel group
    micro_batch_tokens: float
    recompute: float  # share of the tokens whose layers are recomputed in the backward pass

    def micro_batches(self, groups: int) -> int:
        """Return the micro-batches of each of ``groups`` data-parallel groups, at least one per update."""
        return max(self.sgd_steps, ceil(self.tokens / (groups * self.micro_batch_tokens)))


def largest_normal(count: float) -> float:
    """Return the expected largest of ``count`` standard normal values (Blom's approximation); 0 for one."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def straggling(ranks: int, responses: float, variation: float) -> float:
    """Return the ratio of the time of the slowest rank to the mean time of ``ranks``.

    It is the largest of ``ranks`` normal sums: 1 + z * variation / sqrt(responses), with z of `largest_normal`, and 1
    for one rank.

    Args:
        ranks: data-parallel groups, which wait for each other at every update.
        responses: samples of each in one update, counted as at least one.
        variation: standard deviation of a response's cost over its mean.
    """
    if ranks < 2:
        return 1.0
    return 1.0 + largest_normal(ranks) * variation / sqrt(max(responses, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How the learner's accelerators exchange weights and gradients."""

    shards: int | None = None  # neighbouring accelerators that share one copy of the model; None: all
    reduce_bytes: float = FLOAT32  # bytes per value of the summed gradients
    reduce_once: bool = False  # reduce once per update instead of once per micro-batch


def exchange_seconds(system: System, exchange: Exchange, gpus: int, micro_batches: int, updates: int) -> float:
    """Return the time to exchange weights and gradients of ``micro_batches`` over ``gpus``, in ``updates`` updates.

    Among the s accelerators of one copy, each micro-batch gathers the weights twice in bf16 and reduce-scatters its
    gradients, each time (s - 1) / s of the parameters. The c copies then all-reduce their shards, twice (c - 1) / c of
    them: once per update, or with 16-bit sums once per micro-batch (`magicrl.distributed.learner.sharding`).
    """
    shards = exchange.shards or gpus
    copies, parameters = gpus // shards, system.shape.parameters
    sums = updates if exchange.reduce_once else micro_batches
    moved = 2 * BF16 * micro_batches * parameters + exchange.reduce_bytes * sums * system.trained
    inside = (shards - 1) / shards * moved
    meetings = updates if exchange.reduce_bytes == FLOAT32 else sums
    across = 2 * (copies - 1) / copies * system.trained / shards * exchange.reduce_bytes * meetings
    return inside / system.collective_bandwidth(shards) + across / system.collective_bandwidth(gpus)


def learner_seconds(
    system: System,
    work: LearnerWork,
    gpus: int,
    sequence_parallel: int = 1,
    exchange: Exchange | None = None,
) -> float:
    """Return the time of all updates of a step with fully sharded data parallelism.

    It is the longer of arithmetic and communication, plus the optimizer. Communication is `exchange_seconds` and, with
    sequence parallelism, Ulysses' four exchanges of activations per layer. The arithmetic is that of the slowest rank
    (``straggling``). A sample is not divided over more than its sequence-parallel group, so that ranks beyond the
    number of samples are idle. The optimizer reads and writes master weights, moments and gradient of its shard (28
    bytes per trained parameter).
    """
    shape, hardware, efficiency = system.shape, system.hardware, system.efficiency
    flops = learner_flops(shape, work.tokens, work.mean_context, recompute=work.recompute, adapters=system.adapters)
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
    shard = system.trained / (given.shards or gpus)
    optimizer = work.sgd_steps * 28.0 * shard / (hardware.bandwidth * efficiency.weights)
    return max(compute, communication) + optimizer


def offload_seconds(system: System, work: LearnerWork, groups: int, shards: int) -> float:
    """Return the additional time of a step with master weights, moments and gradients in the host's memory.

    Each micro-batch fetches the shard's float32 weights twice and sends its gradient (12 bytes per parameter). Each
    update reads and writes master weights, moments and gradient there (28). No overlap is assumed.
    """
    moved = 12.0 * work.micro_batches(groups) + 28.0 * work.sgd_steps
    return moved * system.shape.parameters / shards / (system.hardware.host * system.efficiency.network)


def logprob_seconds(system: System, tokens: float, mean_context: float, gpus: int) -> float:
    """Return the time of one forward over ``tokens`` (old or reference log-probs) at the learner's efficiency."""
    rate = gpus * system.hardware.flops * system.efficiency.learner
    return forward_flops(system.shape, tokens, mean_context) / rate


def weight_sync_seconds(system: System, gpus: int) -> float:
    """Return the time to send bf16 weights to every accelerator of the engine; 0 in one process."""
    if gpus == 1:
        return 0.0
    return BF16 * system.shape.parameters / system.collective_bandwidth(gpus)


def load_calibration(hardware: str, hidden: int) -> Efficiency:
    """Return the efficiencies of an accelerator nearest to a model's width, or else the published ones."""
    tables = shipped_table("planning/calibration.toml", dict[str, dict[str, Any]])
    own = {name: table for name, table in tables.items() if table["hardware"] == hardware}
    candidates = own or {name: table for name, table in tables.items() if table["hardware"] == "gpu"}
    name, table = min(candidates.items(), key=lambda item: abs(log(item[1]["hidden"] / hidden)))
    return Efficiency(name=name, **{f.name: table[f.name] for f in fields(Efficiency) if f.name in table})


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceWork:
    """The tokens of one pass over prompts and their responses. The work of several passes can be added."""

    # that enter the layers: each prompt once, and of each response all but the last token, which predicts nothing
    tokens: int = 0
    predicted: int = 0  # response tokens, each predicted by the output head
    seen: int = 0  # sum over ``tokens`` of the tokens that each attends to, including itself
    prompts: int = 0  # tokens of the prompts

    def __add__(self, other: SequenceWork) -> SequenceWork:
        return SequenceWork(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def sequence_work(groups: Iterable[tuple[int, Sequence[int]]]) -> SequenceWork:
    """Return the work of one pass over ``groups``: the tokens of a prompt, and those of each of its responses.

    Example: a prompt of 2 tokens with responses of 1 and 3. Tokens: 2 + 0 + 2. Seen: 1 + 2 by the prompt, nothing by
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
    """Return the forward FLOPs (2 N per token and attention) of sampling these responses, or of their log-probs."""
    if not work.tokens:
        return 0.0
    return forward_flops(shape, work.tokens, work.seen / work.tokens, head_tokens=work.predicted)


def update_flops(shape: ModelShape, work: SequenceWork, *, adapters: int | None = None) -> float:
    """Return the FLOPs of forward and backward (6 N per token and attention), without recomputation.

    Args:
        shape: shape of the model.
        work: work of all mini-batches.
        adapters: parameters of LoRA adapters. Frozen weights need no gradient: 4 N, and 6 per adapter parameter.
    """
    forward = generation_flops(shape, work)
    if adapters is None:
        return 3.0 * forward
    attention = work.seen * shape.attention_flops_per_token(1.0)
    return 2.0 * forward + attention + 6.0 * adapters * work.tokens
