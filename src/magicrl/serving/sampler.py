"""Sampling for a client: the in-process engine, with the weights of whichever sampler a request names."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from magicrl.config.model_schema import DType
from magicrl.models.loading import load_policy
from magicrl.models.scorer import sample_to_score
from magicrl.records import (
    Completion,
    FinishReason,
    FloatArray,
    Problem,
    RolloutRequest,
    SamplingParams,
    TokenArray,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import in_process_engine
from magicrl.rollout.in_process import copy_weights
from magicrl.serving.messages import sample_response
from magicrl.training.learner import ReferenceModel

KEPT = 4
"""Number of samplers without a name whose weights are kept, the latest ones."""
_CACHE_MB = 2048
_FURTHER = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
_Weights = Mapping[str, Tensor]


class Prompt(NamedTuple):
    """A prompt to continue.

    Attributes:
        request: The request to the engine.
        stops: Tokens and texts that end a response.
        scored: Whether the client wants the log-probs of the prompt too.
    """

    request: RolloutRequest
    stops: Sequence[int | str]
    scored: bool


class Sampler:
    """An engine and the weights that it can sample with.

    Args:
        folder: Model folder or hub name.
        dtype: Precision of the engine.
        device: Device of the engine.
        seed: Seed of requests that name none.
    """

    def __init__(self, folder: str, *, dtype: DType, device: torch.device, seed: int) -> None:
        policy = load_policy(folder, dtype=dtype, device=device)
        self._tokenizer, self._vocab = policy.tokenizer, policy.valid_vocab
        settings = EngineSettings(model=folder, max_rows=64, memory_limit_mb=_CACHE_MB)
        self._engine = in_process_engine(policy, self._text, settings)
        self._seed = seed
        self._load = partial(load_policy, dtype=dtype, device=device)
        self._folder = folder
        self._sources: dict[str, tuple[int, _Weights | str]] = {}  # a sampler's number, and its weights
        self._opened = 0
        self._active: str | None = None
        self._scored: tuple[str, ReferenceModel] | None = None

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and response together."""
        return self._engine.max_context

    def open(self, name: str, source: _Weights | str) -> None:
        """Add a sampler: with weights in memory, or those of a model folder."""
        if name in self._sources:
            return
        self._opened += 1
        self._sources[name] = (self._opened, source)
        held = [other for other, (_, kept) in list(self._sources.items()) if not isinstance(kept, str)]
        for other in held[:-KEPT]:
            del self._sources[other]

    def read(self, name: str, request: Mapping[str, Any]) -> Prompt:
        """Return a client's request for the sampler ``name``.

        Raises:
            ValueError: The weights are gone, or the request needs what this server does not have.
        """
        number, _ = self._source(name)
        further = [key for key in (*_FURTHER, "prompt_logprobs_last_n", "record_stability_info") if request.get(key)]
        params, chunks = request["sampling_params"], request["prompt"]["chunks"]
        limit = params.get("max_tokens")
        further += [key for key, off in (("top_k", -1), ("top_p", 1)) if params.get(key, off) != off]
        further += ["image or audio chunks"] * any(chunk.get("type") != "encoded_text" for chunk in chunks)
        stop = params.get("stop")
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("stop has an empty text, which would end every sample at once; leave it out")
        if further or stop == []:
            raise ValueError(f"this server has no {', '.join(further or ['sampling past the end of text (stop=[])'])}")
        tokens = [token for chunk in chunks for token in chunk["tokens"]]
        room, seed = min(self.max_context, self._engine.max_cached), params.get("seed")
        asked = RolloutRequest(
            # With its own seed, a request gives the same samples whenever it is made.
            draw=(number << 32) + request["seq_id"] if seed is None else 0,
            problem=Problem(id=f"request {request['seq_id']}", prompt="", references=(), verifier="", source="client"),
            prompt_tokens=frozen_tokens(tokens),
            group_size=request.get("num_samples", 1),
            sampling=SamplingParams(
                temperature=params.get("temperature", 1.0),
                max_tokens=max(1, room - len(tokens)) if limit is None else limit,
                seed=self._seed if seed is None else seed,
            ),
        )
        most = len(tokens) + asked.sampling.max_tokens
        if room < most <= self.max_context:
            raise ValueError(
                f"prompt and max_tokens need {most} tokens, and the server's cache of {_CACHE_MB} MiB holds {room} of "
                f"one sample; {'lower max_tokens' if len(tokens) < room else 'shorten the prompt'}"
            )
        return Prompt(asked, [stop] if isinstance(stop, str) else stop or (), bool(request.get("prompt_logprobs")))

    def sample(self, name: str, prompts: Sequence[Prompt]) -> list[bytes | ValueError]:
        """Return the response to each prompt, or why there is none."""
        if name != self._active:
            self._engine.load_weights(self._weights(name), self._engine.policy_version + 1)
            self._active = name
        refused: dict[int, ValueError] = {}
        for prompt in prompts:
            try:
                self._engine.submit([prompt.request])
            except ValueError as error:
                refused[id(prompt)] = error
        try:
            groups = {id(group.request): group.completions for group in self._engine.finished()}
        except BaseException:
            self._engine.interrupt()
            raise
        return [
            refused.get(id(prompt)) or self._response(name, prompt, groups[id(prompt.request)]) for prompt in prompts
        ]

    def _source(self, name: str) -> tuple[int, _Weights | str]:
        if name not in self._sources:
            raise ValueError(
                f"sampler {name} has no weights here; the server keeps those of the last {KEPT} samplers without a "
                "name: use save_weights_for_sampler(name) for weights that you come back to"
            )
        return self._sources[name]

    def _weights(self, name: str) -> _Weights:
        source = self._source(name)[1]
        return dict(self._load(source).model.named_parameters()) if isinstance(source, str) else source

    def _response(self, name: str, prompt: Prompt, completions: Sequence[Completion]) -> bytes:
        logprobs = self._prompt_logprobs(name, prompt.request.prompt_tokens) if prompt.scored else None
        return sample_response([self._until_stop(prompt.stops, completion) for completion in completions], logprobs)

    def _until_stop(self, stops: Sequence[int | str], completion: Completion) -> tuple[TokenArray, FloatArray, bool]:
        """Return tokens and log-probs up to the first stop, which is included, and whether there is one."""
        tokens = completion.tokens

        def stopped(count: int) -> bool:
            text = self._text(tokens[:count])
            return any(stop in tokens[:count] if isinstance(stop, int) else stop in text for stop in stops)

        end = bisect.bisect_left(range(len(tokens)), True, key=stopped) if stops else len(tokens)
        found = completion.finish_reason is FinishReason.STOP or (bool(stops) and stopped(end))
        return tokens[:end], completion.sampler_logprobs[:end], found

    def _text(self, tokens: Sequence[int] | TokenArray) -> str:
        return cast(str, self._tokenizer.decode([int(token) for token in tokens]))

    def _prompt_logprobs(self, name: str, tokens: TokenArray) -> FloatArray:
        """Return the log-prob of each token after those before it, NaN for the first."""
        if self._scored is None or self._scored[0] != name:
            # The engine's model has other layers than scoring needs, so this is another one, loaded when first needed.
            model = self._load(self._folder).model
            copy_weights(model, self._weights(name))
            self._scored = (name, ReferenceModel(model, valid_vocab=self._vocab))
        if len(tokens) == 1:
            return frozen_floats([np.nan])
        logprobs, _ = self._scored[1].logprobs([sample_to_score(tokens[:1], tokens[1:])], 1.0)
        return frozen_floats([np.nan, *logprobs[0]])
