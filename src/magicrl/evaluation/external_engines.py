"""The engines of an evaluation that sample outside magicrl's own code: vLLM on this machine, and servers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import torch
from pydantic import TypeAdapter, ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from magicrl.config.errors import RecipeError, without_secrets
from magicrl.evaluation.engines import EngineSettings, OpenedEngine, model_checksums, opens_reasoning
from magicrl.models.loading import LoadedModel, describe_policy, resolve_device
from magicrl.models.model_files import check_model, find_model
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, TokenArray, frozen_tokens
from magicrl.rollout.openai_engine import UNLIMITED_CONTEXT, OpenAIEngine
from magicrl.rollout.openai_http import ServerSettings
from magicrl.rollout.vllm_engine import VllmEngine, VllmSettings

T = TypeVar("T")


def open_vllm(settings: EngineSettings) -> OpenedEngine:
    """vLLM's offline engine on a model folder; ``options`` are further fields of ``VllmSettings``.

    Raises:
        RecipeError: an unknown or unusable option.
        ValueError: vLLM is missing, or cannot serve the model.
    """
    device = resolve_device(settings.device)
    if device.type == "cpu" and torch.cuda.is_available():
        raise RecipeError("--device cpu: vLLM uses the GPU where there is one; use --device auto, or in_process")
    given: dict[str, Any] = {"dtype": settings.dtype, "max_rows": settings.max_rows}
    if device.type == "cpu":  # on a GPU the cache gets what is left of gpu_share
        given["cache_mb"] = settings.memory_limit_mb
    chosen = _settings(VllmSettings, given | settings.options)
    threads = settings.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    policy = described_model(settings.model)
    encoder = PromptEncoder(policy.tokenizer, chosen.max_context or policy.max_context)
    engine = VllmEngine(
        str(find_model(settings.model)),
        chosen,
        end_tokens=policy.end_tokens,
        decode=encoder.decode,
        valid_vocab=policy.valid_vocab,
    )
    return OpenedEngine(
        engine=engine,
        encode=encoder.encode,
        max_context=engine.max_context,
        opens_reasoning=opens_reasoning(policy.tokenizer, encoder),
        knows_limit=False,
        decides={
            "engine": "vllm",
            "dtype": chosen.dtype,
            "prompt_format": _prompt_format(policy.tokenizer),
            **model_checksums(find_model(settings.model)),
        },
        facts={
            "model": without_secrets(settings.model),
            "licence": policy.licence,
            "vllm": engine.version,
            "device": str(device),
            "threads": threads,
            "max_rows": chosen.max_rows,
            "max_context": engine.max_context,
        },
        gpus=chosen.gpus if device.type == "cuda" else 0,
    )


def open_server(settings: EngineSettings) -> OpenedEngine:
    """A client of an OpenAI-compatible server.

    ``options`` are fields of ``ServerSettings``, and ``tokenizer``, a model folder or hub name: with it prompts are
    made here as for every other engine (mode ``completions``), without it the server makes them (mode ``chat``).
    ``base_url`` may stand in the environment as OPENAI_BASE_URL.

    Raises:
        RecipeError: an unknown or unusable option.
        ValueError: the server cannot be used.
    """
    options = dict(settings.options)
    name = options.pop("tokenizer", None)
    if "base_url" not in options:
        if not os.environ.get("OPENAI_BASE_URL"):
            raise RecipeError(
                "the openai engine needs the server's address: --engine-option base_url=http://localhost:8000/v1, or "
                "the environment variable OPENAI_BASE_URL"
            )
        options["base_url"] = os.environ["OPENAI_BASE_URL"]
    defaults = {"model": settings.model, "mode": "chat" if name is None else "completions"}
    chosen = _settings(ServerSettings, defaults | options)
    tokenizer = None if name is None else _tokenizer(name)
    engine = OpenAIEngine(chosen, tokenizer=tokenizer)
    try:
        encoder = None if tokenizer is None else PromptEncoder(tokenizer, engine.max_context)
    except BaseException:
        engine.close()
        raise
    here = encoder is not None and chosen.mode == "completions"
    prompts = "problem's text" if chosen.mode == "completions" else "the server's chat template"
    return OpenedEngine(
        engine=engine,
        encode=encoder.encode if encoder is not None and here else _no_tokens,
        max_context=engine.max_context,
        opens_reasoning=opens_reasoning(tokenizer, encoder) if tokenizer is not None and encoder is not None else None,
        knows_limit=not engine.is_vllm,  # what others do with the limit cannot be seen
        decides={
            "engine": "openai",
            "served_model": engine.settings.model,
            "mode": chosen.mode,
            "prompt_format": _prompt_format(tokenizer) if tokenizer is not None and here else prompts,
            "extra": dict(chosen.extra),
        },
        facts={
            "model": without_secrets(engine.settings.model),
            "server": chosen.shown(""),  # no part of the identity: a server may come back at another address
            "prompts_as_tokens": engine.takes_tokens,
            "concurrency": chosen.concurrency,
            "max_context": engine.max_context if engine.max_context < UNLIMITED_CONTEXT else None,
        },
        gpus=None,
        served=lambda: asdict(engine.usage),
    )


def _no_tokens(problem: Problem) -> TokenArray:
    """The server makes the prompt's tokens."""
    return frozen_tokens([])


def _settings(kind: type[T], options: Mapping[str, Any]) -> T:
    """A dataclass of settings from options, which may still be the text of a command line.

    Raises:
        RecipeError: no field of that name, or not of its type.
    """
    known = [field.name for field in fields(cast(Any, kind))]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise RecipeError(f"--engine-option {name}: unknown; {hint}")
    values = dict(options)
    try:
        if isinstance(values.get("extra"), str):
            values["extra"] = json.loads(values["extra"])
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        given = without_secrets(str(first.get("input", "")))
        raise RecipeError(f"--engine-option {name}={given}: {first['msg']}" if name else first["msg"]) from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"--engine-option extra: give a JSON object ({error})") from None


def described_model(name: str) -> LoadedModel:
    """What is known of a model without its weights in memory."""
    folder = find_model(name)
    check_model(folder, name)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return describe_policy(model, _tokenizer(name), folder=str(folder))


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(find_model(name), trust_remote_code=False))


def _prompt_format(tokenizer: PreTrainedTokenizerBase) -> str:
    return "chat template" if tokenizer.chat_template else "plain text"
