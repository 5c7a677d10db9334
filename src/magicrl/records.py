"""The typed records that flow through magicrl, and what makes two problems the same one.

    Problem -> RolloutRequest -> RolloutGroup(completions) -> ScoredGroup(verdicts, rewards)
            -> TrainSample -> TrainBatch -> StepMetrics

Every record is frozen and keyword-only; token arrays are read-only numpy (8 bytes a token where a
tuple of ints would take 68). A later record holds the earlier one, so nothing is decoded and encoded
again between the sampler and the learner: tokens in, tokens out.

Axis names used in docstrings: ``P`` prompt tokens, ``T`` response tokens (the end token included),
``G`` members of a group.

Five kinds of log-probability are never confused:

* ``logprobs``          the policy in training (these have a gradient);
* ``old_logprobs``      the learner's own, taken before the step's first update: denominator of rho;
* ``sampler_logprobs``  what the rollout engine reported while sampling;
* ``ref_logprobs``      the frozen reference model's.
* ``teacher_logprobs``  the teacher's, with its own prompt.

Where an environment takes part, a response holds its observations as well: the model reads them, and that is all. Every
count, mean and loss over response tokens is over those that were sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from magicrl_verifiers.records import Message as Message
from magicrl_verifiers.records import Outcome as Outcome
from magicrl_verifiers.records import Problem as Problem
from magicrl_verifiers.records import Verdict as Verdict
from magicrl_verifiers.records import plain_typography as plain_typography
from magicrl_verifiers.records import prompt_key as prompt_key
from magicrl_verifiers.records import reward_earned as reward_earned

TokenArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
ExpertArray: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Experts that each token of a sequence was routed to, ``[tokens, routers, k]``: uint8, or uint16 above 256 experts."""
AnyNumber = TypeVar("AnyNumber", bound=np.generic)
VersionSpans: TypeAlias = tuple[tuple[int, int], ...]
"""Spans of ``(policy version, number of tokens)`` in the order of the tokens."""


def frozen_tokens(tokens: Sequence[int] | NDArray[Any]) -> TokenArray:
    """Return a read-only int32 copy of ``tokens``, shape ``[T]``."""
    # a copy, because the caller may modify its array
    array = np.array(tokens, dtype=np.int32, copy=True).reshape(-1)
    array.flags.writeable = False
    return array


def frozen_floats(values: Sequence[float] | NDArray[Any]) -> FloatArray:
    """Return a read-only float32 copy of ``values``, shape ``[T]``."""
    array = np.array(values, dtype=np.float32, copy=True).reshape(-1)
    array.flags.writeable = False
    return array


def is_logprob(value: float) -> bool:
    """Return whether a server may state this as a token's log-prob: it is finite, and above 0 by rounding only."""
    return -math.inf < value <= 1e-4


def joined_experts(first: ExpertArray | None, then: ExpertArray | None) -> ExpertArray | None:
    """Return the routes of a sequence that was computed in two parts. Of a token in both, the first part counts."""
    if first is None or then is None:
        return then
    return np.concatenate([first, then[len(first) :]])


def token_versions(policy_version: int, spans: VersionSpans, tokens: int) -> NDArray[np.int64]:
    """Return ``[T]`` the version of the weights that sampled each token: ``policy_version`` for all without spans."""
    if not spans:
        return np.full(tokens, policy_version, dtype=np.int64)
    versions, counts = zip(*spans, strict=True)
    assert sum(counts) == tokens, f"spans {spans} do not cover {tokens} tokens"
    return np.repeat(np.array(versions, dtype=np.int64), counts)


class FinishReason(StrEnum):
    """Reason why a completion ended. The recipe calls ``LENGTH`` truncated."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


TOKEN_FILTERS: Mapping[str, float | int] = MappingProxyType({"top_p": 1.0, "top_k": 0})
"""Fields of `SamplingParams` that exclude unlikely tokens, and their values when off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of a completion.

    Attributes:
        temperature: tau; divides the logits. 0 means greedy decoding.
        max_tokens: T, the response-length limit in tokens (the end token included).
        seed: the run seed. With ``RolloutRequest.draw``, the sample's index and the token's position it
            is all that a random number depends on.
        top_p: Only the most likely tokens that together have this probability are sampled. 1 in training, whose
            log-probs are those of the whole distribution.
        top_k: Only this many most likely tokens are sampled; 0: all. Applies before ``top_p``.
    """

    temperature: float
    max_tokens: int
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are excluded."""
        return any(getattr(self, name) != off for name, off in TOKEN_FILTERS.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """Request for ``group_size`` completions of a problem.

    A group is a draw, not a prompt: the same problem may be drawn twice and then has two ``draw`` numbers.

    Attributes:
        draw: Running number of the draw in its run. It orders groups and seeds their randomness.
        problem: Problem of the prompt.
        prompt_tokens: ``[P]`` tokens of the prompt, with the chat template applied.
        group_size: Number of completions, M.
        sampling: Temperature, limit and seed.
        samples: Ascending indices of the completions to generate, if others of the draw already exist (an interrupted
            evaluation). None means all, 0 to M-1. A sample's random numbers depend on its index, so it does not matter
            whether the others are generated together with it.
        offset: Number of response tokens at the end of ``prompt_tokens`` (a later turn of an episode), from which the
            random numbers continue.
        room: Number of tokens that prompts of later turns may add. An engine that allocates ahead reserves memory for
            them.
        begun: ``(sample index, completion)`` of an interrupted generation. An ``ABORTED`` completion continues after
            its last token; any other is complete and kept.
    """

    draw: int
    problem: Problem
    prompt_tokens: TokenArray
    group_size: int
    sampling: SamplingParams
    samples: tuple[int, ...] | None = None
    offset: int = 0
    room: int = 0
    begun: tuple[tuple[int, Completion], ...] = ()

    @property
    def indices(self) -> tuple[int, ...]:
        """Sample indices of the completions, in order."""
        return tuple(range(self.group_size)) if self.samples is None else self.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """Record of a response with environment turns.

    Attributes:
        observed: ``(first token, tokens)`` of each observation, ascending; all other tokens were sampled.
        answer: the text of the last turn, which the problem's verifier judges where the environment gave no reward.
        verdict: the environment's own, or why the episode is not judged; None: the verifier judges.
        metrics: further numbers that the environment gave with its last step.
        cut: observations that were longer than ``[environment] max_observation_tokens``.
    """

    observed: tuple[tuple[int, int], ...]
    answer: str
    verdict: Verdict | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    cut: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A sampled response.

    Attributes:
        tokens: ``[T]`` response tokens, the end token included when there is one.
        text: the decoded response, special tokens left out; what the verifier reads.
        sampler_logprobs: ``[T]`` natural log-probabilities under the sampling distribution (at tau).
        sampler_entropies: ``[T]`` entropy of that distribution in nats, or None if the engine cannot tell.
        finish_reason: stop, length (= truncated) or aborted.
        policy_version: version of the weights that sampled it (the oldest, if it spans an update).
        seconds: wall-clock seconds from the start of its prompt to its last token.
        version_spans: which version sampled which tokens, where there was an update on the way; empty: one version.
        episode: of a response to an environment: which of its tokens are observations, whose log-probs and entropies
            are 0 here; None: all were sampled.
        experts: with router replay, the experts that prompt and response went to, up to the last token that the model
            read: ``[P + T - 1, routers, k]``, less where it ends in an observation; None: not recorded.

    Example: weights 7 sampled three tokens, then 8 was loaded and two more followed: ``policy_version`` is 7 and
    ``version_spans`` ``((7, 3), (8, 2))``.
    """

    tokens: TokenArray
    text: str
    sampler_logprobs: FloatArray
    sampler_entropies: FloatArray | None
    finish_reason: FinishReason
    policy_version: int
    seconds: float = 0.0
    version_spans: VersionSpans = ()
    episode: Episode | None = None
    experts: ExpertArray | None = None

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """``[T]`` the version of the weights that sampled each token."""
        return token_versions(self.policy_version, self.version_spans, len(self.tokens))

    @property
    def sampled(self) -> NDArray[np.bool_] | None:
        """``[T]`` bool, False at tokens of observations; None if every token was sampled."""
        if self.episode is None:
            return None
        mask = np.ones(len(self.tokens), dtype=np.bool_)
        for first, count in self.episode.observed:
            mask[first : first + count] = False
        return mask

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled. T limits it, and the loss uses only these tokens."""
        return len(self.tokens) - sum(count for _, count in self.episode.observed) if self.episode else len(self.tokens)

    def of_sampled(self, values: NDArray[AnyNumber]) -> NDArray[AnyNumber]:
        """Return the entries of ``values`` ``[T]`` at tokens that the model sampled."""
        mask = self.sampled
        return values if mask is None else values[mask]

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSample:
    """A completion that has ended while others of its group are still being generated.

    Attributes:
        request: what was asked.
        index: its sample index.
        completion: the response.
    """

    request: RolloutRequest
    index: int
    completion: Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All completions of one request, in the order of its ``indices`` (0 to M-1 unless it asks for some only)."""

    request: RolloutRequest
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(c.num_sampled for c in self.completions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group with its verdicts and rewards.

    Attributes:
        group: the rollouts.
        verdicts: one a completion, same order.
        rewards: ``[G]`` float32: 1 or 0, or a graded reward's score; a truncated response has 0, or its score where
            that is less. 0 where not counted.
        counted: ``[G]`` bool; False where the outcome is not_judged.
    """

    group: RolloutGroup
    verdicts: tuple[Verdict, ...]
    rewards: FloatArray
    counted: NDArray[np.bool_]

    @property
    def correct(self) -> NDArray[np.bool_]:
        """``[G]`` bool, True if the response counts, is correct and was not truncated."""
        right = np.array([verdict.correct for verdict in self.verdicts], dtype=np.bool_)
        return right & self.counted & ~self.truncated

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """``[G]`` bool, True if the response was truncated at T."""
        return np.array([c.truncated for c in self.group.completions], dtype=np.bool_)

    @property
    def answered(self) -> NDArray[np.bool_]:
        """``[G]`` bool, True if the response was not truncated and holds something to judge."""
        return np.array([verdict.answered for verdict in self.verdicts], dtype=np.bool_) & ~self.truncated


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """A response as the learner receives it.

    Attributes:
        prompt_tokens: ``[P]``.
        tokens: ``[T]`` response tokens.
        advantage: the same for every token of the response.
        group_index: index of its group within the step's batch (its draw order).
        sample_index: index within the group.
        sampler_logprobs: ``[T]``.
        policy_version: version that sampled it (the oldest).
        loss_mask: ``[T]`` bool, False at an observation's tokens, which are context alone; None when every response
            token counts. A response masked by an advantage
            mask keeps its tokens here: only its advantage is 0.
        old_logprobs: ``[T]``, None with a single SGD step (rho is then exactly 1).
        ref_logprobs: ``[T]``, None without a reference.
        teacher_logprobs: ``[T]``, None without a teacher.
        policy_mask: ``[T]`` bool, False where the token leaves the policy term (and stays in everything else: T_k,
            entropy, KL); None when every token is in it.
        version_spans: as in `Completion`.
        experts: as in `Completion`.
    """

    prompt_tokens: TokenArray
    tokens: TokenArray
    advantage: float
    group_index: int
    sample_index: int
    sampler_logprobs: FloatArray
    policy_version: int
    loss_mask: NDArray[np.bool_] | None = None
    old_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    teacher_logprobs: FloatArray | None = None
    policy_mask: NDArray[np.bool_] | None = None
    version_spans: VersionSpans = ()
    experts: ExpertArray | None = None

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """``[T]`` the version of the weights that sampled each token."""
        return token_versions(self.policy_version, self.version_spans, len(self.tokens))

    @property
    def num_loss_tokens(self) -> int:
        return len(self.tokens) if self.loss_mask is None else int(self.loss_mask.sum())

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """A (mini-)batch of one SGD step.

    Attributes:
        samples: every response of the surviving groups of this mini-batch.
        num_loss_tokens: T_k of Eq. 3.1: sampled response tokens over the whole mini-batch, all devices and
            micro-batches. The one denominator of the token-level loss.
        max_response_tokens: T of the present stage, for the rows whose reducer divides by it (Dr.GRPO).

    Example: two groups of two responses of 3, 5, 4, 2 tokens have ``num_loss_tokens = 14``.
    """

    samples: tuple[TrainSample, ...]
    num_loss_tokens: int
    max_response_tokens: int | None = None

    @staticmethod
    def of(samples: Sequence[TrainSample], *, max_response_tokens: int | None = None) -> TrainBatch:
        """Return the batch of these samples, with its totals."""
        return TrainBatch(
            samples=tuple(samples),
            num_loss_tokens=sum(s.num_loss_tokens for s in samples),
            max_response_tokens=max_response_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of a training step, keyed ``area/name/stat`` (a line of ``metrics.jsonl``)."""

    step: int
    stage: int
    values: Mapping[str, float | int | str | None]
