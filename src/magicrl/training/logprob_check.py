"""Check after every weight copy that an engine outside the learner's process samples with the new weights.

An engine with stale weights still returns fluent text and plausible log-probs, and training then degrades slowly. So a
few short responses are sampled after each copy, and the learner, which has the same weights, scores their tokens. In
float32 both agree to 1e-5 (measured, FINDINGS). In bfloat16 they differ by rounding, by an amount that depends on the
model: the first comparison, with the initial model on both sides, measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from magicrl.records import Problem, RolloutGroup, RolloutRequest, SamplingParams, TokenArray
from magicrl.training.protocols import Learner, TrainingStopped
from magicrl.training.step import buffer_samples

# 2 prompts x 4 samples x 16 tokens: a mean over at most 128 tokens, after every copy.
PROBES = 2
SAMPLES = 4
TOKENS = 16
FLOAT32_LIMIT = 1e-3
# Nats per token. A stale tied head differs by 0.086 (measured on vLLM, FINDINGS).
LEAST_LIMIT = 0.02
TIMES_ROUNDING = 4.0
_ANOTHER_MODEL = (
    "Both hold the initial model, so the engine computes something else: another precision (rollout.dtype), another "
    'model folder, or an architecture that it implements wrongly; use rollout.engine = "in_process" if no setting helps'
)
_NOTHING_ARRIVED = (
    "Its log-probs are those of the previous version: the update did not arrive. This step is in no checkpoint; "
    "resume from the last one"
)
_PARTLY_STALE = (
    "Part of its weights is stale. With tied embeddings that is the output head, which vLLM's own reload does not "
    "update. magicrl updates it for the vLLM of constraints.txt: install that version and continue with --resume (this "
    'step is in no checkpoint), or start a new run with rollout.engine = "in_process"'
)


class StaleEngineError(TrainingStopped):
    """An engine samples with other weights than the learner's."""


class LogprobCheck:
    """A `magicrl.rollout.protocol.WeightCheck` against a learner.

    Args:
        learner: Learner with the weights of the compared version.
        prompts: Problems with their tokens. A few short samples at tau = 1 of the first ones, the same every time.
        float32: Whether learner and engine compute in float32.
        ceiling: Mean absolute gap in nats that no precision explains (``rollout.max_sampler_gap``).
        max_tokens: Length limit of an answer, at most ``TOKENS``.

    Attributes:
        requests: Requests that an engine samples.
        limit: Mean absolute gap above which an engine is stale; None before the first comparison in bfloat16.
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
        self.limit = FLOAT32_LIMIT if float32 else None
        self._ceiling = ceiling
        self._last: dict[str, NDArray[np.float32]] = {}
        sampling = SamplingParams(temperature=1.0, max_tokens=min(TOKENS, max_tokens))
        self.requests = tuple(
            RolloutRequest(draw=draw, problem=problem, prompt_tokens=tokens, group_size=SAMPLES, sampling=sampling)
            for draw, (problem, tokens) in enumerate(prompts[:PROBES])
        )

    def compare(self, answers: Mapping[str, Sequence[RolloutGroup]], version: int) -> None:
        """Score the answers with the learner; see ``WeightCheck.compare``.

        If the learner is ahead of ``version`` already (asynchronous mode), nothing can be compared.

        Raises:
            StaleEngineError: An engine's mean gap exceeds the limit. The text names the engine and the likely cause.
        """
        if version != self._learner.version:
            return
        first = not self._last
        # In bfloat16 only the ceiling is known before the first comparison.
        limit = min(self.limit or self._ceiling, self._ceiling)
        gaps: list[float] = []
        for name, groups in answers.items():
            learned, _ = self._learner.logprobs(buffer_samples(groups), 1.0)
            reported = np.concatenate([c.sampler_logprobs for group in groups for c in group.completions])
            gap = float(np.abs(np.concatenate(learned) - reported).mean())
            gaps.append(gap)
            if not gap <= limit:  # also refuses NaN
                before = self._last.get(name)
                same = before is not None and np.array_equal(before, reported)
                raise StaleEngineError(
                    f"log-prob check: after loading the weights of version {version}, {name} and the learner differ by "
                    f"{gap:.2g} nats per token on average (limit {limit:.2g}). "
                    + (_ANOTHER_MODEL if first else _NOTHING_ARRIVED if same else _PARTLY_STALE)
                )
            # Kept to distinguish an engine that missed a whole update from one that missed a part.
            self._last[name] = reported
        if self.limit is None:
            self.limit = max(LEAST_LIMIT, TIMES_ROUNDING * max(gaps))
