"""The log-prob check: after every weight copy an engine outside the learner's process shows what it samples with.

An engine that serves stale weights still gives fluent text and plausible log-probs; training then goes wrong slowly.
So a few short responses are sampled after each copy, and the learner, which has just these weights, scores their
tokens. In float32 both agree to 1e-5 (measured, FINDINGS); in bfloat16 they differ by rounding, by how much depends
on the model: the first comparison, whose weights are the start model's on both sides, tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from magicrl.records import Problem, RolloutGroup, RolloutRequest, SamplingParams, TokenArray, TrainSample
from magicrl.training.protocols import Learner, TrainingStopped

PROBES = 2
SAMPLES = 4
TOKENS = 16
FLOAT32_LIMIT = 1e-3
LEAST_LIMIT = 0.02
TIMES_ROUNDING = 4.0


class StaleEngineError(TrainingStopped):
    """An engine samples with other weights than the learner's."""


class LogprobCheck:
    """A `magicrl.rollout.protocol.WeightCheck` against a learner.

    Args:
        learner: has the weights of the version that is compared.
        prompts: problems with their tokens, the first of which are asked.
        float32: learner and engine compute in float32.
        ceiling: mean absolute gap in nats that no precision explains (``rollout.max_sampler_gap``).
        max_tokens: of an answer, at most ``TOKENS``.
    """

    def __init__(
        self,
        learner: Learner,
        prompts: Sequence[tuple[Problem, TokenArray]],
        *,
        float32: bool,
        ceiling: float,
        max_tokens: int = TOKENS,
    ) -> None:
        self._learner = learner
        self._limit = FLOAT32_LIMIT if float32 else None
        self._ceiling = ceiling
        self._last: dict[str, NDArray[np.float32]] = {}
        sampling = SamplingParams(temperature=1.0, max_tokens=min(TOKENS, max_tokens))
        self._requests = tuple(
            RolloutRequest(draw=draw, problem=problem, prompt_tokens=tokens, group_size=SAMPLES, sampling=sampling)
            for draw, (problem, tokens) in enumerate(prompts[:PROBES])
        )

    @property
    def requests(self) -> Sequence[RolloutRequest]:
        """Short samples at tau = 1 of a few training prompts, the same every time."""
        return self._requests

    @property
    def limit(self) -> float | None:
        """Mean absolute gap above which an engine is stale; None before the first comparison in bfloat16."""
        return self._limit

    def compare(self, answers: Mapping[str, Sequence[RolloutGroup]], version: int) -> None:
        """Score the answers with the learner; see ``WeightCheck.compare``.

        Where the learner is ahead of ``version`` already (asynchronous mode), nothing can be compared.

        Raises:
            StaleEngineError: an engine's mean gap exceeds the limit; names the engine and the likely cause.
        """
        if version != self._learner.version:
            return
        first = self._limit is None or not self._last
        gaps = {name: self._gap(groups) for name, groups in answers.items()}
        limit = min(self._limit or self._ceiling, self._ceiling)
        for name, gap in gaps.items():
            reported = _logprobs(answers[name])
            if not gap <= limit:
                raise StaleEngineError(self._trouble(name, version, gap, limit, reported, first=first))
            self._last[name] = reported
        if self._limit is None:
            self._limit = max(LEAST_LIMIT, TIMES_ROUNDING * max(gaps.values()))

    def _gap(self, groups: Sequence[RolloutGroup]) -> float:
        samples = [
            TrainSample(
                prompt_tokens=group.request.prompt_tokens,
                tokens=completion.tokens,
                advantage=0.0,
                group_index=place,
                sample_index=index,
                sampler_logprobs=completion.sampler_logprobs,
                policy_version=completion.policy_version,
            )
            for place, group in enumerate(groups)
            for index, completion in enumerate(group.completions)
        ]
        learned, _ = self._learner.logprobs(samples, 1.0)
        return float(np.abs(np.concatenate(learned) - _logprobs(groups)).mean())

    def _trouble(
        self, name: str, version: int, gap: float, limit: float, reported: NDArray[np.float32], *, first: bool
    ) -> str:
        text = (
            f"log-prob check: after loading the weights of version {version}, {name} and the learner differ by "
            f"{gap:.2g} nats a token on average (limit {limit:.2g}). "
        )
        before = self._last.get(name)
        if first:
            return text + (
                "Both hold the start model, so the engine computes something else: another precision (rollout.dtype), "
                "another model folder, or an architecture that it does not have right; use rollout.engine = "
                '"in_process" if no setting helps'
            )
        if before is not None and len(before) == len(reported) and np.array_equal(before, reported):
            return text + (
                "Its log-probs are those of the version before: nothing of the update arrived. This step is in no "
                "checkpoint; resume from the last one"
            )
        return text + (
            "It samples with weights of which a part is stale; with tied embeddings that is the output head, which "
            "vLLM's own reload leaves as it was. magicrl packs it again for the vLLM of constraints.txt: install that "
            'one, or use rollout.engine = "in_process". This step is in no checkpoint; resume from the last one'
        )


def _logprobs(groups: Sequence[RolloutGroup]) -> NDArray[np.float32]:
    """``[tokens]`` what the engine reported."""
    return np.concatenate([c.sampler_logprobs for group in groups for c in group.completions])
