"""What is sent to an OpenAI-compatible server for one sample, and what its answer says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from magicrl.records import Completion, FinishReason, RolloutRequest, frozen_floats, frozen_tokens
from magicrl.rollout.external import sample_seed
from magicrl.rollout.openai_settings import ServerSettings

UNKNOWN_TOKEN = -1
"""Stands for each response token whose id the server did not give: their number is known, they are not."""

_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    # ended by the server, not by the model: a filter, a tool call that nobody answers
    "content_filter": FinishReason.ABORTED,
    "tool_calls": FinishReason.ABORTED,
    "function_call": FinishReason.ABORTED,
    "abort": FinishReason.ABORTED,
}


class AnswerError(ValueError):
    """An answer that does not say what it must."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Builds requests and reads answers for one server.

    Attributes:
        settings: of the server, with the model's name filled in.
        vllm: whether it is vLLM, and takes and gives token ids.
        tokenizer: the model's, where one is known: turns prompts into text for servers that take no ids, and counts
            the tokens of answers that state no count.
        end_tokens: end a response in addition to the server's own (vLLM only).
    """

    settings: ServerSettings
    vllm: bool
    tokenizer: Any
    end_tokens: tuple[int, ...]

    @property
    def path(self) -> str:
        """Below the base URL."""
        return "/chat/completions" if self.settings.mode == "chat" else "/completions"

    def body(self, request: RolloutRequest, index: int) -> dict[str, Any]:
        """The request for sample ``index``.

        Raises:
            ValueError: the prompt cannot be sent without changing it.
        """
        settings, sampling = self.settings, request.sampling
        chat = settings.mode == "chat"
        body: dict[str, Any] = {
            "model": settings.model,
            settings.max_tokens_field: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            # some servers keep an int32
            "seed": sample_seed(sampling.seed, request.draw, index, bits=31),
        }
        if chat:
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in request.problem.messages]
        else:
            body["prompt"] = self._prompt(request)
        if self.vllm:
            # a server started with the model's recommended settings applies those that are not sent
            body |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
            body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "return_token_ids": True}
            if self.end_tokens:
                body["stop_token_ids"] = list(self.end_tokens)
        if settings.logprobs if settings.logprobs is not None else self.vllm:
            body["logprobs"] = True if chat else 1
        body |= settings.extra
        return {name: value for name, value in body.items() if value is not None}

    def completion(
        self, request: RolloutRequest, answer: dict[str, Any], *, policy_version: int, seconds: float
    ) -> Completion:
        """The sample that ``answer`` holds.

        Raises:
            AnswerError: it lacks its text, why it ended, or every way to count its tokens.
        """
        choice = _choice(answer)
        text = _text(choice)
        ids = _ids(choice)
        count = len(ids) if ids is not None else self._count(answer, text)
        return Completion(
            tokens=frozen_tokens(ids if ids is not None else [UNKNOWN_TOKEN] * count),
            text=text,
            sampler_logprobs=self._logprobs(choice, request.sampling.temperature, count),
            sampler_entropies=None,
            finish_reason=_reason(choice, count, request.sampling.max_tokens),
            policy_version=policy_version,
            seconds=seconds,
        )

    def _prompt(self, request: RolloutRequest) -> list[int] | str:
        tokens = cast("list[int]", request.prompt_tokens.tolist())
        if not tokens:
            if request.problem.context:
                raise ValueError(
                    f"problem {request.problem.id!r}: its prompt is a conversation, and without the model's tokenizer "
                    "it cannot be turned into text; use mode = 'chat', or name the tokenizer"
                )
            return request.problem.prompt
        if self.vllm:
            return tokens
        if self.tokenizer is None:
            raise ValueError(
                f"problem {request.problem.id!r}: this server takes text, and without the model's tokenizer its prompt "
                "tokens cannot be turned into any; name the tokenizer, or use mode = 'chat'"
            )
        automatic = cast("list[int]", self.tokenizer("")["input_ids"])
        begin = len(automatic) if tokens[: len(automatic)] == automatic else 0  # the server puts these there itself
        text = cast(str, self.tokenizer.decode(tokens[begin:], clean_up_tokenization_spaces=False))
        if cast("list[int]", self.tokenizer(text)["input_ids"]) != tokens:
            raise ValueError(
                f"problem {request.problem.id!r}: its prompt would become other tokens if it were sent as text; use a "
                "server that takes token ids (vLLM), or mode = 'chat'"
            )
        return text

    def _count(self, answer: dict[str, Any], text: str) -> int:
        usage = usage_of(answer)
        if usage is not None:
            return usage[1]
        if self.tokenizer is None:
            raise AnswerError("neither token ids nor usage.completion_tokens; name the model's tokenizer to count")
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _logprobs(self, choice: dict[str, Any], temperature: float, count: int) -> Any:
        """Log-probs ``[T]`` of the sampling distribution; empty where they are not known for certain."""
        known = self.settings.processed_logprobs or temperature in (0.0, 1.0)
        values = _stated_logprobs(choice) if known else []
        if len(values) != count or not all(isinstance(value, int | float) for value in values):
            values = []
        return frozen_floats(np.asarray(values, dtype=np.float32))


def usage_of(answer: dict[str, Any]) -> tuple[int, int] | None:
    """Prompt and completion tokens as the server counted them; None where it did not."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = [cast("dict[str, Any]", usage).get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        return None
    return cast("tuple[int, int]", tuple(counts))


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise AnswerError("no choices")
    return cast("dict[str, Any]", choices[0])


def _text(choice: dict[str, Any]) -> str:
    """The response, the reasoning that a server cut out of it put back in front, as the model wrote it."""
    message = choice.get("message")
    if not isinstance(message, dict):
        if isinstance(choice.get("text"), str):
            return cast(str, choice["text"])
        raise AnswerError("neither text nor message")
    fields = cast("dict[str, Any]", message)
    content = fields.get("content") or fields.get("refusal") or ""
    thoughts = fields.get("reasoning") or fields.get("reasoning_content") or ""
    if not isinstance(content, str) or not isinstance(thoughts, str):
        raise AnswerError("message.content is no text")
    if not thoughts:
        return content
    return f"<think>\n{thoughts.strip()}\n</think>\n\n{content}" if content else f"<think>\n{thoughts}"


def _ids(choice: dict[str, Any]) -> list[int] | None:
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in cast("list[Any]", ids)):
        return None
    return cast("list[int]", ids)


def _reason(choice: dict[str, Any], count: int, limit: int) -> FinishReason:
    stated = choice.get("finish_reason")
    if stated is None:
        return FinishReason.LENGTH if count >= limit else FinishReason.STOP
    if stated not in _REASONS:
        raise AnswerError(f"finish_reason is {stated!r}")
    return _REASONS[stated]


def _stated_logprobs(choice: dict[str, Any]) -> Sequence[Any]:
    """One value a token, from either endpoint's form."""
    stated = choice.get("logprobs")
    if not isinstance(stated, dict):
        return []
    fields = cast("dict[str, Any]", stated)
    if isinstance(fields.get("token_logprobs"), list):
        return fields["token_logprobs"]
    content = fields.get("content")
    if not isinstance(content, list):
        return []
    return [entry.get("logprob") if isinstance(entry, dict) else None for entry in cast("list[Any]", content)]
