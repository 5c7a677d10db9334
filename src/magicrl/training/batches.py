"""From scored groups to what the learner reads: advantages, samples, mini-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.algorithms.advantages import (
    Advantage,
    AdvantageMask,
    MinibatchMode,
    group_relative,
    scored_advantages,
    split_minibatches,
)
from magicrl.records import FloatArray, ScoredGroup, TrainBatch, TrainSample

SampleKey: TypeAlias = tuple[int, int]
"""(draw, index within the group)."""


def train_samples(
    groups: Sequence[ScoredGroup],
    *,
    mask: AdvantageMask,
    normalise_std: bool = True,
    advantage: Advantage = group_relative,
    k: int = 4,
    overlong_buffer: int | None = None,
) -> list[TrainSample]:
    """The counted responses of surviving groups with their advantages (Eq. 2.5); arguments of `scored_advantages`.

    ``group_index`` is the group's place in ``groups``. A response that could not be judged has left its
    group: it is neither in the mean nor in the loss.
    """
    # of whole groups, before responses that were not judged leave them
    advantages = scored_advantages(
        groups, mask=mask, normalise_std=normalise_std, advantage=advantage, k=k, overlong_buffer=overlong_buffer
    )
    return [
        _sample(group, i, j, float(advantages[i][j]))
        for i, group in enumerate(groups)
        for j in range(len(group.rewards))
        if group.counted[j]
    ]


def _sample(scored: ScoredGroup, group_index: int, sample_index: int, advantage: float) -> TrainSample:
    completion = scored.group.completions[sample_index]
    return TrainSample(
        prompt_tokens=scored.group.request.prompt_tokens,
        tokens=completion.tokens,
        advantage=advantage,
        group_index=group_index,
        sample_index=sample_index,
        sampler_logprobs=completion.sampler_logprobs,
        policy_version=completion.policy_version,
        loss_mask=completion.sampled,
        version_spans=completion.version_spans,
        experts=completion.experts,
    )


def buffer_samples(groups: Sequence[ScoredGroup]) -> list[TrainSample]:
    """Every response of the buffer, counted or not, without an advantage: what a learner scores before rejection."""
    return [_sample(group, i, j, 0.0) for i, group in enumerate(groups) for j in range(len(group.rewards))]


def sample_keys(groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> list[SampleKey]:
    """Which response each sample is, whatever groups have left since; ``samples`` are of ``groups``."""
    return [(groups[s.group_index].group.request.draw, s.sample_index) for s in samples]


def with_old_logprobs(samples: Sequence[TrainSample], logprobs: Sequence[FloatArray]) -> list[TrainSample]:
    """The same samples with the learner's log-probs from before the step's first update."""
    pairs = zip(samples, logprobs, strict=True)
    return [dataclasses.replace(sample, old_logprobs=array) for sample, array in pairs]


def with_ref_logprobs(samples: Sequence[TrainSample], logprobs: Sequence[FloatArray]) -> list[TrainSample]:
    """The same samples with the reference model's log-probs."""
    pairs = zip(samples, logprobs, strict=True)
    return [dataclasses.replace(sample, ref_logprobs=array) for sample, array in pairs]


def with_policy_mask(
    batch: TrainBatch, mask_of: Callable[[Tensor, Tensor, float], Tensor], threshold: float
) -> TrainBatch:
    """Return the mini-batch with the ``policy_mask`` of a correction's ``batch_mask``, such as M2PO's.

    The mask function sees all loss tokens of the mini-batch together, so it runs before the batch is split into
    micro-batches or over workers. Samples need ``old_logprobs``.
    """
    gaps: list[NDArray[np.float64]] = []
    for sample in batch.samples:
        assert sample.old_logprobs is not None, "the mask needs the learner's log-probs"
        gap = sample.old_logprobs.astype(np.float64) - sample.sampler_logprobs
        # tokens without loss have no part in the second moment
        gaps.append(gap if sample.loss_mask is None else gap[sample.loss_mask])
    lengths = [len(gap) for gap in gaps]
    advantages = np.repeat([sample.advantage for sample in batch.samples], lengths)
    kept = mask_of(torch.from_numpy(np.concatenate(gaps)), torch.from_numpy(advantages), threshold).numpy()
    # back to samples, and within each to its loss tokens
    parts = np.split(kept, np.cumsum(lengths)[:-1])
    samples: list[TrainSample] = []
    for sample, part in zip(batch.samples, parts, strict=True):
        mask = part
        if sample.loss_mask is not None:
            # False at tokens without loss, where nobody reads it
            mask = np.zeros(len(sample.tokens), dtype=np.bool_)
            mask[sample.loss_mask] = part
        samples.append(dataclasses.replace(sample, policy_mask=mask))
    return dataclasses.replace(batch, samples=tuple(samples))


def minibatches(
    samples: Sequence[TrainSample],
    *,
    parts: int,
    prompts_per_part: int,
    mode: MinibatchMode,
    reuse: int,
    seed: Sequence[int],
    max_response_tokens: int | None = None,
) -> Iterator[TrainBatch]:
    """The step's SGD batches: N_reuse passes, each split anew by groups.

    Args:
        samples: of all surviving groups.
        parts: D_R / D_T.
        prompts_per_part: D_T.
        mode: ``keep_n_sgd`` keeps the number of SGD steps, ``keep_d_t`` the groups of each (as the released code).
        reuse: N_reuse.
        seed: (run seed, step); the split of pass p is a function of it and p alone.
        max_response_tokens: T of the stage.
    """
    # groups stay whole: D_T counts prompts
    by_group: dict[int, list[TrainSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_index, []).append(sample)
    groups = list(by_group.values())
    for turn in range(reuse):
        # of its own for every pass, so that a resumed run splits as it would have
        rng = np.random.Generator(np.random.PCG64([*seed, turn]))
        chosen = split_minibatches(len(groups), num_parts=parts, prompts_per_part=prompts_per_part, mode=mode, rng=rng)
        for part in chosen:
            members = [sample for index in part for sample in groups[index]]
            yield TrainBatch.of(members, max_response_tokens=max_response_tokens)
