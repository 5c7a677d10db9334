"""The work and the time of a training step, and the response lengths that both depend on.

Lengths follow a log-normal distribution truncated at T. `read_measured` reads lengths and the share of kept groups from
the ``metrics.jsonl`` of an existing run. A step takes t_R for the rollout, t_T for the updates and t_O for everything
else, as in section 5 of the report. Each has a closed form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean

from magicrl.planning.costs import (
    BF16,
    DecodeCost,
    Exchange,
    LearnerWork,
    System,
    decode_cost,
    kv_capacity,
    largest_normal,
    learner_seconds,
    logprob_seconds,
    offload_seconds,
    straggling,
    weight_sync_seconds,
)
from magicrl.planning.shapes import ModelShape

NORMAL = NormalDist()
MEAN_AT_32K = 12_500  # tokens, mean response of R1-Distill-Qwen-7B trained from scratch at T = 32K (published)
SIGMA = 0.8  # standard deviation of the logarithm of lengths, without a measured run (assumed, not published)
SHARED = 0.5  # correlation of the lengths in a group (assumed)
KEPT = 0.6  # share of the groups that are kept after rejection (assumed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Distribution of response lengths in tokens, with the end token."""

    median: float  # of the distribution without truncation
    sigma: float  # standard deviation of the logarithm
    limit: int  # T; longer responses are truncated to this length

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma > 0 and self.limit >= 1):
            raise ValueError(f"lengths need median > 0, sigma > 0 and limit >= 1, got {self}")

    @property
    def truncated(self) -> float:
        """Share of truncated responses."""
        return NORMAL.cdf(-(log(self.limit / self.median)) / self.sigma)

    @property
    def mean(self) -> float:
        """Mean length after truncation: E[min(X, T)]."""
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        """E[min(X, T) squared], proportional to the cost of attention."""
        return self._moment(2)

    def _moment(self, order: int) -> float:
        z = log(self.limit / self.median) / self.sigma
        below = exp(order * log(self.median) + (order * self.sigma) ** 2 / 2) * NORMAL.cdf(z - order * self.sigma)
        return below + self.limit**order * self.truncated

    @property
    def mean_context(self) -> float:
        """Mean number of response tokens that a response token attends to: half of E[L^2] / E[L]."""
        return self.mean_square / self.mean / 2

    def at(self, limit: int) -> Lengths:
        """Return the same distribution with another T."""
        return replace(self, limit=limit)

    def longest(self, count: float) -> float:
        """Return the expected length of the longest of ``count`` independent responses, at least the mean."""
        return max(self.mean, min(self.limit, self.median * exp(self.sigma * largest_normal(count))))


def lengths_of_mean(mean: float, limit: int, sigma: float = SIGMA) -> Lengths:
    """Return the distribution whose mean after truncation at ``limit`` is ``mean``.

    Raises:
        ValueError: ``mean`` is not below T.
    """
    if not 0 < mean < 0.999 * limit:
        raise ValueError(f"a mean length of {mean:g} tokens does not fit T = {limit}: it must be below T")

    # The mean grows with the median from almost 0 to almost T, so that bisection finds the only solution.
    low, high = log(mean) - 5 * sigma - sigma**2, log(limit) + 6 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        below = Lengths(median=exp(middle), sigma=sigma, limit=limit).mean < mean
        low, high = (middle, high) if below else (low, middle)
    return Lengths(median=exp(high), sigma=sigma, limit=limit)


@cache
def reasoning_lengths(limit: int) -> Lengths:
    """Return the lengths of an R1-distilled model trained from scratch, for T = ``limit``."""
    return lengths_of_mean(MEAN_AT_32K, 32768).at(limit)


WINDOW = 20  # number of last steps to average over


def read_measured(folder: Path) -> tuple[Lengths, float]:
    """Return the lengths of the last steps of a run folder, and the share of the groups used in training.

    Raises:
        ValueError: no metrics, or no step with sampled responses.
    """
    path = folder / "metrics.jsonl"
    keys = ("length/mean", "length/q50", "length/q90", "groups/trained", "groups/sampled", "stage/max_tokens")
    try:
        # the last line of a running or killed run may be incomplete
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        rows = [(row["stage"], row["values"]) for row in map(json.loads, lines)]
        # a step without responses has no lengths
        steps = [(stage, values) for stage, values in rows if None not in map(values.get, keys)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not the metrics of a run: {error}; name a run folder of magicrl train") from None
    last = [values for stage, values in steps if stage == steps[-1][0]][-WINDOW:]
    if not any(values["groups/sampled"] for values in last):
        raise ValueError(f"{path}: holds no step with sampled responses yet")
    limit = int(last[-1]["stage/max_tokens"])
    mean = {key: fmean(values[key] for values in last) for key in keys}
    median, ninth = mean["length/q50"], mean["length/q90"]
    inside = 0 < median < ninth < limit  # a decile at T does not determine the spread
    sigma = min(2.0, max(0.05, log(ninth / median) / NORMAL.inv_cdf(0.9))) if inside else SIGMA
    lengths = lengths_of_mean(min(mean["length/mean"], 0.99 * limit), limit, sigma)
    return lengths, min(1.0, max(mean["groups/trained"] / mean["groups/sampled"], 0.01))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of one step."""

    lengths: Lengths  # of the responses; its limit is T
    prompt: int  # tokens
    rollout_batch: int  # D_R
    group_size: int  # M
    sgd_steps: int = 1  # N_SGD, over all passes
    reuse: int = 1  # passes over the buffer
    kept: float = 1.0  # share of the groups that are kept after rejection
    # additional forwards over tokens: 1 for old log-probs of all responses, 1 for a reference, 1 for the policy as its
    # own teacher
    forwards: int = 0
    teacher: ModelShape | None = None  # another model that makes one forward over them
    shared_prompts: bool = False  # learner and log-prob passes compute a prompt once per group

    @property
    def responses(self) -> int:
        """D_R * M."""
        return self.rollout_batch * self.group_size

    @property
    def tokens(self) -> float:
        """Expected tokens of all responses and of the prompts that the learner computes."""
        prompts = self.rollout_batch if self.shared_prompts else self.responses
        return prompts * self.prompt + self.responses * self.lengths.mean

    @property
    def mean_context(self) -> float:
        """Mean number of tokens that a token of a sample attends to in learner and log-prob passes."""
        square = self.lengths.mean_square + 2 * self.prompt * self.lengths.mean + self.prompt**2
        return square / (self.prompt + self.lengths.mean) / 2

    def beyond(self, tokens: float) -> tuple[float, float]:
        """Return the share of samples with more than ``tokens`` tokens, prompt included, and their share of tokens."""
        lengths, left = self.lengths, tokens - self.prompt
        if left >= lengths.limit:
            return 0.0, 0.0
        if left <= 0:
            return 1.0, 1.0
        z = log(left / lengths.median) / lengths.sigma
        share = NORMAL.cdf(-z)
        shorter = exp(log(lengths.median) + lengths.sigma**2 / 2) * NORMAL.cdf(z - lengths.sigma)
        return share, (share * self.prompt + lengths.mean - shorter) / (self.prompt + lengths.mean)

    def micro_batch(self, tokens: int) -> float:
        """Return the mean tokens of a micro-batch of at most ``tokens``. A longer sample has its own micro-batch."""
        share, alone = self.beyond(tokens)
        return 1.0 / ((1.0 - alone) / tokens + share / (self.prompt + self.lengths.mean))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Assignment of accelerators to engine and learner, and the learner's micro-batches and state."""

    rollout_gpus: int  # of the engine
    tensor_parallel: int  # accelerators per replica
    learner_gpus: int  # of the learner
    sequence_parallel: int  # accelerators that share a sequence in the learner
    colocated: bool  # engine and learner take turns on the same accelerators
    cache_bytes: float  # for keys and values on each of the engine's accelerators
    engine_width: float = BF16  # bytes per value of the cache
    rows: int = 256  # sequences that a replica decodes at once
    micro_batch_tokens: int = 16384  # maximum of one forward/backward; a longer sample has its own micro-batch
    checkpointing: bool = False  # layers are recomputed in the backward pass
    checkpoint_above: int | None = None  # the same only in micro-batches of more tokens than this
    offload: bool = False  # the learner's state is in the host's memory
    exchange: Exchange = field(default_factory=Exchange)  # of the learner's weights and gradients

    def recomputed(self, work: Workload) -> float:
        """Return the share of the tokens whose layers are recomputed."""
        if self.checkpointing or self.checkpoint_above is None:
            return float(self.checkpointing)
        return 1.0 if self.checkpoint_above < self.micro_batch_tokens else work.beyond(self.checkpoint_above)[1]

    @property
    def shards(self) -> int:
        """Accelerators that share one copy of the learner's state."""
        return self.exchange.shards or self.learner_gpus

    @property
    def gpus(self) -> int:
        """All accelerators."""
        return self.rollout_gpus if self.colocated else self.rollout_gpus + self.learner_gpus

    @property
    def replicas(self) -> int:
        """Replicas of the engine."""
        return self.rollout_gpus // self.tensor_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of each part of one step, without overlap."""

    rollout: float  # t_R: every response of the step, including the longest
    learn: float  # t_T: all updates
    logprobs: float  # log-probs of the old policy, the reference and a teacher
    sync: float  # new weights to the engine
    outside: float  # judging, data handling
    busy: float  # rollout of as many tokens if the next steps' responses keep the engine's batch full
    batch: float  # mean number of sequences that a replica decodes at once

    @property
    def other(self) -> float:
        """t_O: everything except rollout and updates, as in the report."""
        return self.logprobs + self.sync + self.outside

    @property
    def learner(self) -> float:
        """Everything except the rollout."""
        return self.learn + self.other

    def seconds(self, staleness: int) -> float:
        """Return the seconds per step where rollouts may be ``staleness`` updates old.

        Synchronous: t_R + t_T + t_O. One step off-policy: the slower side, and a pause for the new weights. More: the
        slower side with a full batch, or the rollout of the longest response divided by the steps that it may span.
        """
        if staleness == 0:
            return self.rollout + self.learner
        if staleness == 1:
            return max(self.rollout, self.learner - self.sync) + self.sync
        return max(self.busy + self.sync, self.learner, self.rollout / staleness)


def rollout_seconds(
    cost: DecodeCost,
    *,
    responses: float,
    batch: float,
    mean: float,
    mean_context: float,
    longest: float,
    prompts: float,
    prompt: float,
) -> tuple[float, float]:
    """Return the seconds in which one replica generates ``responses``, and its mean batch over that time.

    While responses are waiting, each place in the batch decodes one after the other. Then the longest response is
    decoded to its end. This makes ``(responses / batch - 1) * mean + longest`` decode steps. Each costs the overhead
    and the larger of reading the weights and the arithmetic of the mean batch. Each token adds the read of its context,
    each distinct prompt its prefill.

    Args:
        cost: decode step of the replica.
        responses: responses of the replica.
        batch: maximum number of sequences decoded at once, at most ``responses``.
        mean: mean response length, tokens.
        mean_context: mean number of response tokens that a response token attends to.
        longest: length of the longest response.
        prompts: distinct prompts, each prefilled once.
        prompt: mean prompt length, tokens.

    Example:
        >>> cost = DecodeCost(overhead=1.0, weights=2.0, sequence=0.0, context=0.0, prefill=0.5)
        >>> rollout_seconds(
        ...     cost, responses=4, batch=2, mean=3, mean_context=1.5, longest=7, prompts=1, prompt=2
        ... )  # 3 + 7 steps of 3 s, and 1 s of prefill
        (31.0, 1.2)
    """
    steps = (responses / batch - 1) * mean + longest
    tokens = responses * mean
    decode = steps * (cost.overhead + max(cost.weights, cost.sequence * tokens / steps))
    context = tokens * (cost.row + cost.context * (prompt + mean_context))
    return cost.prefill * prompts * prompt + decode + context, tokens / steps


def step_time(system: System, work: Workload, layout: Layout) -> StepTime:
    """Return the seconds of each part of a step on a layout."""
    lengths, replicas = work.lengths, layout.replicas
    cost = decode_cost(system, layout.tensor_parallel)
    context = work.prompt + lengths.mean_context
    capacity = kv_capacity(system.shape, layout.cache_bytes, layout.tensor_parallel, layout.engine_width)
    room = max(1.0, min(layout.rows, capacity / context))
    each, longest = max(1.0, work.responses / replicas), lengths.longest(work.responses)
    deviation = sqrt(max(0.0, lengths.mean_square - lengths.mean**2))
    # A step waits for the replica with the most tokens. The responses of a group stay together, and those to hard
    # problems are all long, so that a replica averages over fewer independent lengths than it has responses.
    independent = each / (1 + (min(each, work.group_size) - 1) * SHARED)
    fullest = each * min(straggling(replicas, independent, deviation / lengths.mean), longest / lengths.mean)
    rollout, batch = rollout_seconds(
        cost,
        responses=fullest,
        batch=min(fullest, room),
        mean=lengths.mean,
        mean_context=lengths.mean_context,
        longest=longest,
        prompts=max(1.0, work.rollout_batch / replicas),
        prompt=work.prompt,
    )
    # with staleness, responses of the next steps replace those that have ended
    full = min(room, 2 * each)
    busy = each * lengths.mean / full * cost.step(full, full * context)
    learner = LearnerWork(
        tokens=work.tokens * work.kept * work.reuse,
        mean_context=work.mean_context,
        responses=work.responses * work.kept * work.reuse,
        variation=deviation / (work.prompt + lengths.mean),
        sgd_steps=work.sgd_steps,
        micro_batch_tokens=work.micro_batch(layout.micro_batch_tokens),
        recompute=layout.recomputed(work),
    )
    gpus = layout.learner_gpus
    scored = [system] * work.forwards + ([] if work.teacher is None else [replace(system, shape=work.teacher)])
    moved = offload_seconds(system, learner, gpus // layout.sequence_parallel, layout.shards) if layout.offload else 0.0
    return StepTime(
        rollout=rollout,
        learn=learner_seconds(system, learner, gpus, layout.sequence_parallel, layout.exchange) + moved,
        logprobs=sum(logprob_seconds(one, work.tokens, work.mean_context, gpus) for one in scored),
        sync=weight_sync_seconds(system, layout.gpus),
        outside=system.efficiency.other * work.responses,
        busy=busy,
        batch=batch,
    )


def timing(system: System, work: Workload, layout: Layout, staleness: int) -> tuple[StepTime, float]:
    """Return the parts of a step and its seconds under the schedule. Colocated engine and learner take turns."""
    parts = step_time(system, work, layout)
    return parts, parts.seconds(0 if layout.colocated else staleness)
