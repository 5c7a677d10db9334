"""Engines by name, made from the same settings for training and evaluation.

A reference of `magicrl.registry` (a built-in name, ``file.py:function``, ``module:function`` or an entry point of the
group ``magicrl.engine``) names a function from `EngineSettings` to a `magicrl.rollout.protocol.RolloutEngine`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError, create_model
from transformers import PreTrainedTokenizerBase

from magicrl import registry
from magicrl.config.errors import RecipeError
from magicrl.config.rollout_schema import TRAINING_ONLY, VllmConfig
from magicrl.config.section import first_mistake
from magicrl.models.adapters import adapter_shapes
from magicrl.models.loading import (
    LoadedModel,
    described_model,
    load_policy,
    load_tokenizer,
    resolve_device,
    warn_of_slow_products,
)
from magicrl.models.model_files import find_model
from magicrl.models.prompts import PromptEncoder
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine
from magicrl.rollout.openai_engine import OpenAIEngine
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.recording import ReplayEngine, read_rollouts
from magicrl.rollout.vllm_adapters import AdaptersRefused, adapters_fault
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.rollout.vllm_options import check_engine_args
from magicrl_verifiers.references import did_you_mean
from magicrl_verifiers.secrets import without_secrets
from magicrl_verifiers.served import ServerSettings

T = TypeVar("T")
_log = logging.getLogger(__name__)


def make_engine(name: str, settings: EngineSettings, *, key: str = "--engine") -> RolloutEngine:
    """Return the engine that ``name`` refers to. ``key`` is the setting with the name, for errors.

    Raises:
        RecipeError: The engine is unknown, is not a `RolloutEngine`, cannot be trained with, or cannot serve the model.
        ValueError: The model cannot be loaded (the message says why).
    """
    try:
        factory: Callable[[EngineSettings], Any] = registry.resolve("engine", name)
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error
    made = factory(settings)
    if not isinstance(made, RolloutEngine):
        raise RecipeError(
            f"engine {name!r} gave a {type(made).__name__}; give a subclass of magicrl.rollout.protocol.RolloutEngine",
            key=key,
        )
    lacking = [what for what in ("weights", "logprobs") if not getattr(made.capabilities, what)]
    # Check the declaration before the first step: a missing log-prob would otherwise show up only in the loss. Close
    # the engine, which may hold a GPU or a process.
    if settings.training is not None and lacking:
        made.close()
        raise RecipeError(
            f"engine {name!r} cannot be trained with: it declares that it has no {' and no '.join(lacking)} "
            "(magicrl.rollout.protocol.Capabilities)",
            key=key,
        )
    if settings.training is not None and settings.training.experts and not made.capabilities.experts:
        made.close()
        raise RecipeError(
            f"engine {name!r} does not report the experts that it chose (magicrl.rollout.protocol.Capabilities); use "
            'rollout.engine = "in_process", or leave this out',
            key="model.router_replay",
        )
    return made


def in_process_engine(
    policy: LoadedModel, decode: Callable[[Sequence[int]], str], settings: EngineSettings
) -> InProcessEngine:
    """Return the in-process engine on a loaded model, which belongs to the engine from now on."""
    return InProcessEngine(
        policy.model,
        settings,
        end_tokens=policy.end_tokens,
        decode=decode,
        valid_vocab=policy.valid_vocab,
        max_context=policy.max_context,
    )


def make_in_process(settings: EngineSettings) -> InProcessEngine:
    """Return magicrl's own engine, in this process."""
    if settings.options:
        raise RecipeError(f"--engine-option {next(iter(settings.options))}: the in_process engine has none")
    settings.use_threads()
    device = resolve_device(settings.device)
    policy = load_policy(settings.model, dtype=settings.dtype, device=device)
    if settings.training is None:  # in training the learner warns
        warn_of_slow_products(policy.model.dtype, device)
    encoder = settings.encoder or PromptEncoder(policy.tokenizer, policy.max_context)
    engine = in_process_engine(policy, encoder.decode, settings)
    # In evaluation nothing else loads weights. In training the first update does.
    if settings.training is None:
        engine.load_weights(dict(policy.model.named_parameters()), 0)
    return engine


_ENGINE_OPTIONS = ("dtype", "head_dtype", "max_context", "max_rows", "gpus")
"""Fields of `EngineSettings` that ``--engine-option`` may set for vLLM, in addition to those of ``[rollout.vllm]``."""


def with_vllm_options(settings: EngineSettings) -> EngineSettings:
    """Return settings whose ``options`` have changed the fields that they name, also those of ``settings.vllm``.

    Raises:
        RecipeError: An option is unknown, has a wrong value, or is one of training only.
    """
    for name in TRAINING_ONLY:
        if name in settings.options:
            raise RecipeError(f"--engine-option {name}: only training has it, as rollout.vllm.{name}")
    kinds = get_type_hints(EngineSettings)
    own: dict[str, Any] = {name: (kinds[name] | None, None) for name in _ENGINE_OPTIONS}
    checked = _checked(create_model("VllmOptions", __base__=VllmConfig, **own), settings.options)
    given = checked.model_dump(exclude_unset=True)
    vllm = {name: given.pop(name) for name in VllmConfig.model_fields if name in given}
    return replace(settings, **given, vllm=settings.vllm.model_copy(update=vllm))


def make_vllm(settings: EngineSettings) -> VllmEngine:
    """Return vLLM's offline engine on a model folder: in a run, a replica or an evaluation."""
    device = resolve_device(settings.device)
    if device.type == "cpu" and torch.cuda.is_available():
        raise RecipeError("--device cpu: vLLM uses the GPU where there is one; use --device auto, or in_process")
    settings = with_vllm_options(settings)
    check_engine_args(settings.vllm)
    settings.use_threads()
    policy = described_model(settings.model)
    # LongRoPE: with a longer context vLLM would rotate short sequences differently, too.
    if policy.max_context < policy.model.config.get_text_config().max_position_embeddings:
        settings = replace(settings, max_context=min(policy.max_context, settings.max_context or policy.max_context))
    encoder = settings.encoder or PromptEncoder(policy.tokenizer, settings.max_context or policy.max_context)
    training = settings.training
    make = partial(
        VllmEngine,
        str(find_model(settings.model)),
        settings,
        end_tokens=policy.end_tokens,
        decode=encoder.decode,
        valid_vocab=policy.valid_vocab,
        policy_version=0 if training is None else -1,
    )
    if training is None or training.lora is None:
        return make()
    fault = adapters_fault(
        training.lora,
        wanted=settings.vllm.adapters,
        dtype=settings.dtype,
        on_gpu=device.type != "cpu",
        sleeps=training.sleeps,
        direct_weights=training.direct_weights is not None,
    )
    if fault is None:
        try:
            return make(adapters=adapter_shapes(policy.model, training.lora))
        except AdaptersRefused as error:
            fault = str(error)
    if settings.vllm.adapters:
        raise RecipeError(f"{fault}; leave it out, and vLLM gets merged weights", key="rollout.vllm.adapters")
    _log.warning("vLLM gets merged weights after each update, not only the adapters: %s", fault)
    return make()


_SENT = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream")
_LEFT_OUT = ("temperature", "top_p", "seed")
"""Fields that decide which samples a server returns: other values than the record's would go unnoticed."""


def make_openai(settings: EngineSettings) -> OpenAIEngine:
    """Return a client of an OpenAI-compatible server.

    ``options`` are fields of ``ServerSettings``, and ``tokenizer``, a model folder or hub name. With a tokenizer,
    prompts are encoded here as for every other engine (mode ``completions``); without it the server formats them (mode
    ``chat``). Without ``base_url`` the environment variable OPENAI_BASE_URL is used.
    """
    if settings.training is not None:
        raise RecipeError(
            'a server cannot take new weights, so it cannot be trained with; use "in_process" or "vllm"',
            key="rollout.engine",
        )
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
    chosen = _checked(ServerSettings, defaults | options)
    for field, value in chosen.extra.items():
        # A server may refuse the fields of _LEFT_OUT: without them the evaluation differs from a preset.
        if field in (*_SENT, chosen.max_tokens_field) or (field in _LEFT_OUT and value is not None):
            remedy = "use null or leave it out" if field in _LEFT_OUT else "leave it out"
            raise RecipeError(f"--engine-option extra: magicrl sends {field} from its other options; {remedy}")
    tokenizer: PreTrainedTokenizerBase | None = None if name is None else load_tokenizer(find_model(name), name)
    return OpenAIEngine(chosen, tokenizer=tokenizer)


def make_replay(settings: EngineSettings) -> ReplayEngine:
    """Return the engine that replays the recorded rollouts in the folder ``options["replay"]``."""
    folder = settings.options.get("replay")
    if settings.training is None or folder is None:
        raise RecipeError("recorded rollouts serve the training steps of their run only; use another engine")
    try:
        return ReplayEngine(read_rollouts(Path(folder)))
    except ValueError as error:
        raise RecipeError(str(error), key="rollout.replay") from error


def _checked(kind: type[T], options: Mapping[str, Any]) -> T:
    """Return a model or dataclass of settings from options, whose values may still be texts from a command line."""
    model = issubclass(kind, BaseModel)
    names = [*kind.model_fields] if model else [field.name for field in fields(cast(Any, kind))]
    known = [name for name in names if name not in TRAINING_ONLY]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RecipeError(f"--engine-option {name}: unknown{hint} Known: {', '.join(known)}")
    values = dict(options)
    for name in {"extra", "engine_args"} & values.keys():  # tables: a command line gives their text
        if isinstance(values[name], str):
            try:
                values[name] = json.loads(values[name])
            except json.JSONDecodeError as error:
                raise RecipeError(f"--engine-option {name}: give a JSON object ({error})") from None
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        name, value, message = first_mistake(error)
        given = f"--engine-option {name}={without_secrets(str(value))}: " if name else ""
        raise RecipeError(given + message) from None
