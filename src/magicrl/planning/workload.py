"""One training step as the planner sees it: response lengths, what is to be done, on what, how long each part takes.

Lengths are a log-normal cut at T, with an atom there for the responses that T truncates. `read_measured` takes them,
and the share of groups that survive rejection, from the ``metrics.jsonl`` of a run that exists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from magicrl.planning.costs import (
    Exchange,
    LearnerWork,
    System,
    decode_cost,
    kv_capacity,
    learner_seconds,
    logprob_seconds,
    offload_seconds,
    weight_sync_seconds,
)
from magicrl.planning.simulator import ReplicaSetup, StepParts, requests_of, simulate_rollout

MEAN_AT_32K = 12_500  # mean response of R1-Distill-Qwen-7B trained from scratch at T = 32K, tokens: published
SIGMA = 0.8  # spread of the logarithm of lengths, where no run has been measured: assumed, since not published
SHARED = 0.5  # how much of that spread a group shares: assumed
KEPT = 0.6  # share of the groups that survive rejection: assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths of responses in tokens, end token included."""

    median: float  # of the untruncated distribution
    sigma: float  # standard deviation of the logarithm
    limit: int  # T; longer responses have exactly this length
    # share of the logarithm's variance that the responses of a group have in common (hard problems are long for every
    # sample), 0 to 1
    shared: float = 0.0

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma > 0 and self.limit >= 1 and 0 <= self.shared <= 1):
            raise ValueError(f"lengths need median > 0, sigma > 0, limit >= 1 and shared in [0, 1], got {self}")

    @property
    def truncated(self) -> float:
        """Share of the responses that end at T."""
        return float(ndtr(-(log(self.limit / self.median)) / self.sigma))

    @property
    def mean(self) -> float:
        """Mean length after truncation: E[min(X, T)]."""
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        """E[min(X, T) squared], which attention's cost goes with."""
        return self._moment(2)

    def _moment(self, order: int) -> float:
        z = log(self.limit / self.median) / self.sigma
        below = exp(order * log(self.median) + (order * self.sigma) ** 2 / 2) * float(ndtr(z - order * self.sigma))
        return below + self.limit**order * self.truncated

    @property
    def mean_context(self) -> float:
        """Response tokens that a response token sees on average: half of E[L^2] / E[L]."""
        return self.mean_square / self.mean / 2

    def at(self, limit: int) -> Lengths:
        """The same responses under another T."""
        return replace(self, limit=limit)

    def sample(self, groups: int, group_size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """``[groups, group_size]`` lengths, at least 1."""
        common = rng.standard_normal((groups, 1)) * sqrt(self.shared)
        own = rng.standard_normal((groups, group_size)) * sqrt(1 - self.shared)
        drawn = self.median * np.exp(self.sigma * (common + own))
        return np.clip(np.ceil(drawn), 1, self.limit).astype(np.int64)


def lengths_of_mean(mean: float, limit: int, sigma: float = SIGMA, shared: float = SHARED) -> Lengths:
    """The distribution whose mean after truncation at ``limit`` is ``mean``.

    Raises:
        ValueError: no distribution below T has such a mean.
    """
    if not 0 < mean < 0.999 * limit:
        raise ValueError(f"a mean length of {mean:g} tokens does not go with T = {limit}: it must be below T")

    def gap(log_median: float) -> float:
        return Lengths(median=exp(log_median), sigma=sigma, limit=limit).mean - mean

    # the mean grows with the median from almost 0 to almost T, so that there is one root between
    root = cast(float, brentq(gap, log(mean) - 5 * sigma - sigma**2, log(limit) + 6 * sigma))
    return Lengths(median=exp(root), sigma=sigma, limit=limit, shared=shared)


@cache
def reasoning_lengths(limit: int) -> Lengths:
    """Lengths of an R1-distilled model in training from scratch, under another T."""
    return lengths_of_mean(MEAN_AT_32K, 32768).at(limit)


WINDOW = 20  # last steps that are averaged
NINTH_DECILE = 1.2815515655446004  # standard normal quantile of 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run's last steps looked like."""

    lengths: Lengths  # under the T of those steps
    kept: float  # share of the groups that was trained on


def read_measured(folder: Path) -> Measured:
    """The last steps of a run folder.

    Raises:
        ValueError: no metrics, or fewer than one step.
    """
    path = folder / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not the metrics of a run: {error}; name a run folder of magicrl train") from None
    if not records:
        raise ValueError(f"{path}: holds no step yet")
    last = [record["values"] for record in records if record["stage"] == records[-1]["stage"]][-WINDOW:]
    limit = int(last[-1]["stage/max_tokens"])
    keys = ("length/mean", "length/q50", "length/q90", "groups/trained", "groups/sampled")
    mean = {key: float(np.mean([values[key] for values in last])) for key in keys}
    median, ninth = mean["length/q50"], mean["length/q90"]
    inside = 0 < median < ninth < limit  # a decile at T says nothing of the spread
    sigma = min(2.0, max(0.05, log(ninth / median) / NINTH_DECILE)) if inside else SIGMA
    lengths = lengths_of_mean(min(mean["length/mean"], 0.99 * limit), limit, sigma)
    return Measured(lengths=lengths, kept=min(1.0, max(mean["groups/trained"] / mean["groups/sampled"], 0.01)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of one step."""

    lengths: Lengths  # of the responses; its limit is T
    prompt: int  # tokens
    rollout_batch: int  # D_R
    group_size: int  # M
    sgd_steps: int = 1  # N_SGD, passes counted
    reuse: int = 1  # passes over the buffer
    kept: float = 1.0  # share of the groups that survive rejection
    forwards: int = 0  # further forwards over tokens: 1 for old log-probs of all responses, 1 for a reference
    shared_prompts: bool = False  # learner and log-prob passes compute a prompt once for its group

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
        """Tokens that a token of a sample sees on average in learner and log-prob passes."""
        square = self.lengths.mean_square + 2 * self.prompt * self.lengths.mean + self.prompt**2
        return square / (self.prompt + self.lengths.mean) / 2

    def beyond(self, tokens: float) -> tuple[float, float]:
        """Shares of the samples, and of tokens, that samples of more tokens than these have, prompt included."""
        lengths, left = self.lengths, tokens - self.prompt
        if left >= lengths.limit:
            return 0.0, 0.0
        if left <= 0:
            return 1.0, 1.0
        z = log(left / lengths.median) / lengths.sigma
        share = float(ndtr(-z))
        shorter = exp(log(lengths.median) + lengths.sigma**2 / 2) * float(ndtr(z - lengths.sigma))
        return share, (share * self.prompt + lengths.mean - shorter) / (self.prompt + lengths.mean)

    def micro_batch(self, tokens: int) -> float:
        """Mean tokens of a micro-batch that may have so many; longer samples go alone."""
        share, alone = self.beyond(tokens)
        return 1.0 / ((1.0 - alone) / tokens + share / (self.prompt + self.lengths.mean))

    def drawn(self, seed: int) -> NDArray[np.int64]:
        """``[D_R, M]`` lengths of one step."""
        return self.lengths.sample(self.rollout_batch, self.group_size, np.random.default_rng(seed))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which accelerators do what, and the learner's micro-batches and state."""

    rollout_gpus: int  # of the engine
    tensor_parallel: int  # accelerators of one replica
    learner_gpus: int  # of the learner
    sequence_parallel: int  # that share a sequence in the learner
    colocated: bool  # engine and learner are the same accelerators, one after the other
    cache_bytes: float  # for keys and values on each of the engine's accelerators
    rows: int = 256  # sequences that a replica decodes at once
    micro_batch_tokens: int = 16384  # most tokens of one forward/backward; a longer sample goes alone
    checkpointing: bool = False  # layers are computed again in the backward pass
    checkpoint_above: int | None = None  # the same in micro-batches of more tokens than this
    offload: bool = False  # the learner's state is in the host's memory
    exchange: Exchange = field(default_factory=Exchange)  # of the learner's weights and gradients

    def recomputed(self, work: Workload) -> float:
        """Share of the tokens whose layers are computed again."""
        if self.checkpointing or self.checkpoint_above is None:
            return float(self.checkpointing)
        return 1.0 if self.checkpoint_above < self.micro_batch_tokens else work.beyond(self.checkpoint_above)[1]

    @property
    def shards(self) -> int:
        """Accelerators that hold the learner's state once."""
        return self.exchange.shards or self.learner_gpus

    @property
    def gpus(self) -> int:
        """All accelerators."""
        return self.rollout_gpus if self.colocated else self.rollout_gpus + self.learner_gpus

    @property
    def replicas(self) -> int:
        """Of the engine."""
        return self.rollout_gpus // self.tensor_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one synchronous step."""

    rollout: float  # t_R, mean over draws of lengths
    parts: StepParts  # everything else
    tail: float  # share of the rollout after nine tenths of the responses had ended
    idle: float  # share of the replicas' rollout time with nothing to do
    preemptions: float  # a step

    @property
    def learn(self) -> float:
        """t_T."""
        return self.parts.learn

    @property
    def other(self) -> float:
        """t_O: everything but rollout and updates, as the report counts."""
        return self.parts.total - self.parts.learn

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.rollout + self.parts.total


def replica_setup(system: System, layout: Layout) -> ReplicaSetup:
    """One replica of the layout's engine."""
    return ReplicaSetup(
        cost=decode_cost(system, layout.tensor_parallel),
        capacity=kv_capacity(system.shape, layout.cache_bytes, layout.tensor_parallel),
        rows=layout.rows,
    )


def step_parts(system: System, work: Workload, layout: Layout) -> StepParts:
    """Seconds of a step outside its rollout."""
    lengths = work.lengths
    deviation = sqrt(max(0.0, lengths.mean_square - lengths.mean**2)) / (work.prompt + lengths.mean)
    learner = LearnerWork(
        tokens=work.tokens * work.kept * work.reuse,
        mean_context=work.mean_context,
        responses=work.responses * work.kept * work.reuse,
        variation=deviation,
        sgd_steps=work.sgd_steps,
        micro_batch_tokens=work.micro_batch(layout.micro_batch_tokens),
        recompute=layout.recomputed(work),
    )
    gpus = layout.learner_gpus
    moved = offload_seconds(system, learner, gpus // layout.sequence_parallel, layout.shards) if layout.offload else 0.0
    return StepParts(
        logprobs=work.forwards * logprob_seconds(system, work.tokens, work.mean_context, gpus),
        learn=learner_seconds(system, learner, gpus, layout.sequence_parallel, layout.exchange) + moved,
        sync=weight_sync_seconds(system, layout.gpus),
        other=system.efficiency.other * work.responses,
    )


def step_time(system: System, work: Workload, layout: Layout, draws: int = 4) -> StepTime:
    """A synchronous step: rollout, then everything else.

    Raises:
        ValueError: the cache does not hold the longest response.
    """
    setup = replica_setup(system, layout)
    # the same draws for every layout and efficiency, so that these can be compared
    played = [
        simulate_rollout(requests_of(work.drawn(seed), work.prompt), setup, layout.replicas) for seed in range(draws)
    ]
    return StepTime(
        rollout=float(np.mean([r.seconds for r in played])),
        parts=step_parts(system, work, layout),
        tail=float(np.mean([r.tail() for r in played])),
        idle=float(np.mean([r.idle for r in played])),
        preemptions=float(np.mean([r.preemptions for r in played])),
    )
