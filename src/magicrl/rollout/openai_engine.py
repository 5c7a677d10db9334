"""An engine for any OpenAI-compatible server, with many concurrent requests behind a synchronous interface."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from magicrl.records import (
    Completion,
    FinishReason,
    RolloutRequest,
    SamplingParams,
    frozen_floats,
    frozen_tokens,
    is_logprob,
)
from magicrl.rollout.protocol import Capabilities
from magicrl.rollout.requests import GroupProgress, OpenGroups, SchedulingEngine, check_request, sample_seed
from magicrl_verifiers.served import ServerError, ServerSettings, ServerUsage, Transport, usage_of

UNKNOWN_TOKEN = -1
"""Placeholder for a response token whose id the server did not return."""
UNLIMITED_CONTEXT = 2**31 - 1
"""``max_context`` of a server that does not state it."""

T = TypeVar("T")
_FIRST_ATTEMPTS = 3  # an unreachable server mostly means a wrong address
_STATED = {
    FinishReason.STOP: ("stop", "eos", "eos_token", "stop_sequence", "end_turn"),
    FinishReason.LENGTH: ("length", "max_tokens"),
    # ended by the server, not by the model: a filter, or a tool call
    FinishReason.ABORTED: ("content_filter", "tool_calls", "function_call", "abort"),
}
_REASONS = {word: reason for reason, words in _STATED.items() for word in words}


class AnswerError(ValueError):
    """A server's answer without a required field."""


class OpenAIEngine(SchedulingEngine):
    """An engine that only generates, through a server.

    Each sample is a separate request, with a seed that is a function of (seed, draw, sample). Whether equal seeds give
    equal tokens depends on the server: they do with vLLM in float32, and do not with most hosted models. Log-probs are
    kept if they are certain to be those of the sampling distribution (``ServerSettings.processed_logprobs``), else they
    are empty. Entropies are unknown. Token ids are those of the server. If it returns none, ``UNKNOWN_TOKEN`` is used
    for each token that it counted. ``usage`` counts requests and tokens so far.
    """

    capabilities = Capabilities(weights=False, logprobs=False, filters=True)
    _version = 0

    def __init__(self, settings: ServerSettings, *, tokenizer: Any = None) -> None:
        """Request the server's list of models, so that a wrong address or key is found before sampling.

        Args:
            settings: address, model and limits of the server.
            tokenizer: the model's tokenizer, if it is known. It turns prompts into text for servers that take no ids,
                and counts the tokens of answers without a count.

        Raises:
            ValueError: the server cannot be reached, refuses the key, or serves several models and none is named.
        """
        self.usage = ServerUsage()
        self.settings = settings
        self.tokenizer: PreTrainedTokenizerBase | None = tokenizer
        self._groups = OpenGroups()
        self._waiting: deque[tuple[GroupProgress, int]] = deque()
        self._asked: dict[concurrent.futures.Future[Completion | None], tuple[GroupProgress, int]] = {}
        self._failed: ValueError | ServerError | None = None
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._path = "/chat/completions" if settings.mode == "chat" else "/completions"
        self._transport = Transport(settings, self.usage)
        self._loop = asyncio.new_event_loop()
        # the loop runs in its own thread, since callers are synchronous and answers arrive between their calls
        self._thread = threading.Thread(target=self._loop.run_forever, name="magicrl-openai", daemon=True)
        self._thread.start()
        try:
            self._discover()
        except BaseException:
            self.close()
            raise

    @property
    def takes_tokens(self) -> bool:
        """Whether prompts are sent as token ids, so that the model sees exactly these."""
        return self.is_vllm and self.settings.mode == "completions"

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """See `RolloutEngine.submit`. Also refuses a prompt that cannot be sent unchanged.

        Nothing is sent yet. Prompt tokens may be empty: then the problem's text is sent, as always in chat mode.
        """
        for request in requests:
            check_request(request, self._max_context)
            self._body(request, request.indices[0])  # refuses what cannot be sent, before anything is queued
        for group in self._groups.take_in(requests):
            self._waiting.extend((group, index) for index in group.to_start)

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Raise ``ValueError`` unless ``version`` is the current one: a server's weights cannot be replaced."""
        if version != self._version:
            raise ValueError(
                f"{self.settings.shown('')} cannot load the weights of version {version}; serve the "
                "saved model there, or train with the in-process engine"
            )

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """Cancel all requests (the server sees its connections close) and return the unfinished ones in issue order."""
        # whatever `keep` is: a server cannot continue the response of an earlier request
        self._waiting.clear()
        self._started(_cancel_others()).result()
        self._asked.clear()
        self._failed = None
        unfinished = self._unfinished(keep=False)
        self._groups.drop()
        return unfinished

    def close(self) -> None:
        """Cancel all requests and close the connections."""
        if self._loop.is_closed():
            return
        self.interrupt()
        self._started(self._transport.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _started(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _advance(self) -> None:
        """Take in at least one answer.

        After a request has failed for good no new one is sent. Those in flight are waited for and yielded, since they
        are paid for, and then the `ServerError` is raised. Unfinished requests stay queued.
        """
        if self._failed is not None and not self._asked:
            error, self._failed = self._failed, None
            raise error
        # at most two rounds ahead of the answers, since tasks cost memory too
        while self._failed is None and self._waiting and len(self._asked) < 2 * self.settings.concurrency:
            group, index = self._waiting.popleft()
            self._asked[self._started(self._sample(group.request, index))] = (group, index)
        concurrent.futures.wait(self._asked, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in [future for future in self._asked if future.done()]:
            group, index = self._asked.pop(future)
            try:
                completion = future.result()
            except (ValueError, ServerError) as error:
                completion, self._failed = None, self._failed or error
            # not sent, since another request failed: it stays queued for the next call
            if completion is None:
                self._waiting.append((group, index))
            else:
                self._groups.file(group, index, completion)

    async def _sample(self, request: RolloutRequest, index: int) -> Completion | None:
        """Return the sample, or None if it was not sent since another request failed; runs in the event loop."""
        async with self._slots:
            if self._failed is not None:
                return None
            began, name = time.perf_counter(), f"problem {request.problem.id!r}, sample {index}"
            body = self._body(request, index)
            try:
                answer = await self._transport.send("POST", self._path, body, stopped=lambda: self._failed is not None)
            except ServerError as error:
                raise ServerError(f"{name}: {error}", status=error.status, retryable=error.retryable) from None
            try:
                completion = self._completion(request, answer, time.perf_counter() - began)
            except AnswerError as error:
                where = f"{name}: POST {self.settings.shown(self._path)}"
                raise ServerError(f"{where}: the answer cannot be used: {error}", status=200, retryable=False) from None
            self.usage.add(answer)
            return completion

    def _discover(self) -> None:
        """Find the model's name, whether the server is vLLM, and its context."""
        settings, transport = self.settings, self._transport
        try:
            answer = self._started(transport.send("GET", "/models", attempts=_FIRST_ATTEMPTS)).result()
        except ServerError as error:
            absent = error.status in (404, 405) or (error.status or 0) >= 500
            if not absent or not settings.model:
                raise
            answer = {}  # some servers do not list their models; that of transformers fails without a hub cache
        listed: Any = answer.get("data")
        models = {str(m["id"]): m for m in listed or () if isinstance(m, dict) and "id" in m}
        transport.served = list(models)
        names = ", ".join(transport.served[:8])
        if not settings.model:
            if len(models) != 1:
                raise ValueError(f"{settings.shown('')}: say which model (served: {names or 'none listed'})")
            self.settings = replace(settings, model=transport.served[0])
        mine: dict[str, Any] = models.get(self.settings.model, {})
        owner = next(iter([mine] if mine else models.values()), mine).get("owned_by")
        self.is_vllm = settings.dialect == "vllm" or (settings.dialect == "auto" and owner == "vllm")
        """Whether the server is vLLM, as it or the settings state, and takes and returns token ids."""
        if self.is_vllm and models and not mine:
            raise ValueError(f"{settings.shown('')}: model {settings.model!r} is not served; served: {names}")
        stated = mine.get("max_model_len")
        # without token ids, nothing can be appended to a response
        self.capabilities = replace(self.capabilities, turns=self.takes_tokens)
        self._max_context = settings.max_context or (stated if isinstance(stated, int) else UNLIMITED_CONTEXT)

    # requests and answers

    def _body(self, request: RolloutRequest, index: int) -> dict[str, Any]:
        """Return the request for sample ``index``; ``ValueError`` if the prompt cannot be sent unchanged."""
        settings, sampling = self.settings, request.sampling
        chat = settings.mode == "chat"
        body: dict[str, Any] = {
            "model": settings.model,
            settings.max_tokens_field: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # some servers keep an int32
            "seed": sample_seed(sampling.seed, request.draw, index, known=request.offset, bits=31),
        }
        if chat:
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in request.problem.messages]
        else:
            body["prompt"] = self._prompt(request)
        if self.is_vllm:
            # a server started with the model's recommended settings applies them unless others are sent
            body |= {"top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0}
            body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "return_token_ids": True}
        elif sampling.top_k:
            raise ValueError(
                f"top_k = {sampling.top_k}: only vLLM's server surely applies it; if this one has such a field, give "
                'it as extra = {"top_k": ...} instead'
            )
        if settings.logprobs if settings.logprobs is not None else self.is_vllm:
            body["logprobs"] = True if chat else 1
        # last: the user's fields override, and None removes a field
        body |= settings.extra
        return {name: value for name, value in body.items() if value is not None}

    def _completion(self, request: RolloutRequest, answer: dict[str, Any], seconds: float) -> Completion:
        """Return the sample in ``answer``; ``AnswerError`` without its text, its end, or a way to count tokens."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise AnswerError("no choices")
        choice = cast("dict[str, Any]", choices[0])
        text = _text(choice)
        ids: Any = choice.get("token_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in cast("list[Any]", ids)):
            # truncation and token counts need the right length even without ids
            usage = usage_of(answer)
            if usage is None and self.tokenizer is None:
                raise AnswerError("neither token ids nor usage.completion_tokens; name the model's tokenizer to count")
            encoded = [] if self.tokenizer is None else self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = [UNKNOWN_TOKEN] * (len(encoded) if usage is None else usage[1])
        elif (beyond := next((n for n, i in enumerate(ids) if not 0 <= i < 2**31), None)) is not None:
            raise AnswerError(f"the id of token {beyond + 1} is {ids[beyond]}; ids are 0 to {2**31 - 1}")
        limit, stated = request.sampling.max_tokens, choice.get("finish_reason")
        # some servers state no reason: then a response as long as the limit was truncated
        if stated is None:
            stated = "length" if len(ids) >= limit else "stop"
        if stated not in _REASONS:
            raise AnswerError(f"finish_reason is {stated!r}")
        return Completion(
            tokens=frozen_tokens(ids),
            text=text,
            sampler_logprobs=self._logprobs(choice, request.sampling, len(ids)),
            sampler_entropies=None,
            finish_reason=_REASONS[stated],
            policy_version=self._version,
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
        if self.is_vllm:
            return tokens
        if self.tokenizer is None:
            raise ValueError(
                f"problem {request.problem.id!r}: this server takes text, and without the model's tokenizer its prompt "
                "tokens cannot be turned into any; name the tokenizer, or use mode = 'chat'"
            )
        automatic = cast("list[int]", self.tokenizer("")["input_ids"])
        begin = len(automatic) if tokens[: len(automatic)] == automatic else 0  # the server adds these itself
        text = cast(str, self.tokenizer.decode(tokens[begin:], clean_up_tokenization_spaces=False))
        if cast("list[int]", self.tokenizer(text)["input_ids"]) != tokens:
            raise ValueError(
                f"problem {request.problem.id!r}: its prompt would become other tokens if it were sent as text; use a "
                "server that takes token ids (vLLM), or mode = 'chat'"
            )
        return text

    def _logprobs(self, choice: dict[str, Any], sampling: SamplingParams, count: int) -> Any:
        """Return log-probs ``[T]`` of the sampling distribution; empty if they may be of another one."""
        plain = sampling.temperature in (0.0, 1.0) and not sampling.truncates
        known = self.settings.processed_logprobs or plain
        values = _stated_logprobs(choice) if known else []
        if len(values) != count or not all(isinstance(value, int | float) for value in values):
            values = []
        for number, value in enumerate(values, start=1):
            if not is_logprob(value):
                raise AnswerError(f"the log-prob of token {number} is {value}, which no sampled token has")
        return frozen_floats(np.asarray(values, dtype=np.float32))


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)  # until their connections are closed


def _text(choice: dict[str, Any]) -> str:
    """Return the response as the model wrote it, with the reasoning that a server split off in front."""
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


def _stated_logprobs(choice: dict[str, Any]) -> Sequence[Any]:
    """Return one value per token, from the form of either endpoint."""
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
