"""One training step as the planner sees it: what is to be done, on what, and how long each part takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from magicrl.planning.costs import (
    LearnerWork,
    System,
    decode_cost,
    kv_capacity,
    learner_seconds,
    logprob_seconds,
    weight_sync_seconds,
)
from magicrl.planning.lengths import Lengths
from magicrl.planning.simulator import ReplicaSetup, StepParts, requests_of, simulate_rollout


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
    micro_batch_tokens: int = 16384  # tokens of one forward/backward
    recompute: bool = True  # layers are computed again in the backward pass
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

    def drawn(self, seed: int) -> NDArray[np.int64]:
        """``[D_R, M]`` lengths of one step."""
        return self.lengths.sample(self.rollout_batch, self.group_size, np.random.default_rng(seed))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which accelerators do what."""

    rollout_gpus: int  # of the engine
    tensor_parallel: int  # accelerators of one replica
    learner_gpus: int  # that shard the learner
    sequence_parallel: int  # that share a sequence in the learner
    colocated: bool  # engine and learner are the same accelerators, one after the other
    cache_bytes: float  # for keys and values on each of the engine's accelerators
    rows: int = 256  # sequences that a replica decodes at once

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
        micro_batch_tokens=max(work.micro_batch_tokens, work.prompt + lengths.limit),
        recompute=work.recompute,
    )
    gpus = layout.learner_gpus
    return StepParts(
        logprobs=work.forwards * logprob_seconds(system, work.tokens, work.mean_context, gpus),
        learn=learner_seconds(system, learner, gpus, layout.sequence_parallel),
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
