"""A sample as a request of vLLM's: what is asked, and what there is of the response, in part or whole (vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicrl.records import Completion, FinishReason, VersionSpans, frozen_floats, frozen_tokens
from magicrl.rollout.external import sample_seed
from magicrl.rollout.rows import GroupProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A sample that vLLM is to generate, or to go on with.

    Attributes:
        group: whose it is.
        index: its sample index.
        before: what there is already, from an interrupted generation.
    """

    group: GroupProgress
    index: int
    before: Completion | None

    @property
    def known(self) -> int:
        """Tokens that are given."""
        return 0 if self.before is None else len(self.before)

    @property
    def prompt(self) -> list[int]:
        """What vLLM gets as the prompt: what is given of the response is the prompt's end."""
        prompt: list[int] = self.group.request.prompt_tokens.tolist()
        return prompt if self.before is None else prompt + self.before.tokens.tolist()

    def settings(self, end_tokens: Sequence[int], padding: dict[int, float] | None) -> Any:
        """vLLM's ``SamplingParams``: the plain distribution at tau, ended by ``end_tokens`` alone."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        sampling = self.group.request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=sampling.max_tokens - self.known,
            seed=sample_seed(sampling.seed, self.group.request.draw, self.index, known=self.known),
            ignore_eos=True,  # our end tokens alone end a response
            stop_token_ids=list(end_tokens),
            logprobs=0,  # the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias=padding,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Tokens that vLLM has sampled for a request.

    Attributes:
        tokens: ``[T]``.
        logprobs: ``[T]`` of the weights that sampled each.
        spans: which version sampled how many, in their order; empty where vLLM does not tell.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: VersionSpans

    @classmethod
    def of_output(cls, answer: Any) -> Sampled:
        """What vLLM gives for a request that has ended."""
        tokens = [int(token) for token in answer.token_ids]
        spans = tuple((int(s.version), s.end - s.start) for s in answer.weight_versions or ())
        return cls(tokens=tokens, logprobs=_of_tokens(answer.logprobs, tokens), spans=spans)

    @classmethod
    def so_far(cls, state: Any) -> Sampled:
        """What vLLM's output processor holds of a request under way."""
        tokens = [int(token) for token in state.detokenizer.output_token_ids]
        starts = [start for _, start in state.weight_version_starts]
        lengths = np.diff([*starts, len(tokens)]).tolist() if starts else []
        spans = tuple((int(v), n) for (v, _), n in zip(state.weight_version_starts, lengths, strict=True) if n)
        return cls(tokens=tokens, logprobs=_of_tokens(state.logprobs_processor.logprobs, tokens), spans=spans)

    def completion(
        self,
        before: Completion | None,
        reason: FinishReason,
        *,
        version: int,
        seconds: float,
        decode: Callable[[Sequence[int]], str],
    ) -> Completion:
        """The response, after what there was ``before``.

        Args:
            before: its beginning, if vLLM was given one.
            reason: why it ended.
            version: of the weights, where vLLM does not tell.
            seconds: spent on these tokens.
            decode: tokens to text.

        Raises:
            FloatingPointError: a log-prob is not finite.
        """
        if not np.isfinite(self.logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {version}); its weights are broken"
            )
        spans = self.spans or ((version, len(self.tokens)),)
        tokens, logprobs = self.tokens, self.logprobs
        if before is not None:
            tokens = before.tokens.tolist() + tokens
            logprobs = before.sampler_logprobs.tolist() + logprobs
            spans = _joined(before.version_spans or ((before.policy_version, len(before)),), spans)
            seconds += before.seconds
        return Completion(
            tokens=frozen_tokens(tokens),
            text=decode(tokens),
            sampler_logprobs=frozen_floats(logprobs),
            sampler_entropies=None,
            finish_reason=reason,
            policy_version=min(version for version, _ in spans),
            version_spans=spans if len(spans) > 1 else (),
            seconds=seconds,
        )


def _of_tokens(places: Any, tokens: Sequence[int]) -> list[float]:
    return [float(place[token].logprob) for place, token in zip(places, tokens, strict=True)]


def _joined(first: VersionSpans, then: VersionSpans) -> VersionSpans:
    """Spans one after the other; two of one version that meet are one."""
    if first[-1][0] != then[0][0]:
        return (*first, *then)
    return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])
