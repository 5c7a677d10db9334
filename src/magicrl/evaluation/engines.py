"""Engines for evaluation, with the encoding of prompts and the facts of their model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from magicrl.files import checksum
from magicrl.models.loading import described_model, resolve_device
from magicrl.models.model_files import describing_files, find_model
from magicrl.models.prompts import PromptEncoder, prompt_format
from magicrl.records import Problem, TokenArray, frozen_tokens
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import make_engine
from magicrl.rollout.openai_engine import UNLIMITED_CONTEXT, OpenAIEngine
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl_verifiers import references
from magicrl_verifiers.extraction import OPEN_TAG
from magicrl_verifiers.secrets import without_secrets


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedEngine:
    """An engine that is ready to sample."""

    engine: RolloutEngine  # has its weights
    encoder: PromptEncoder | None  # None if a server encodes prompts
    max_context: int  # most tokens of prompt and response together
    # the prompt ends in an opened ``<think>``, so that a response without ``</think>`` has no answer; None: unknown
    opens_reasoning: bool | None
    # the limit may change tokens before it, so that a curve over limits is an estimate
    knows_limit: bool
    decides: dict[str, Any]  # everything that the samples depend on (checksums, precision, prompts)
    facts: dict[str, Any]  # further facts for the record
    gpus: int | None = 0  # number of GPUs of the engine; None if it samples on another machine
    served: Callable[[], dict[str, int]] | None = None  # returns the counts of a server so far (requests, tokens)

    def encode(self, problem: Problem) -> TokenArray:
        """Return a problem's prompt tokens; none if a server encodes prompts."""
        return frozen_tokens([]) if self.encoder is None else self.encoder.encode(problem)


def open_engine(name: str, settings: EngineSettings) -> OpenedEngine:
    """Make the engine of this name with its model's weights.

    Raises:
        RecipeError: the name is unknown, or the setting of the model is wrong.
        ValueError: the model cannot be loaded; says why.
    """
    engine = make_engine(name, settings)
    try:
        return _served(engine) if isinstance(engine, OpenAIEngine) else _local(name, engine, settings)
    except BaseException:
        engine.close()
        raise


KNOWN_BEFORE_LOADING = ("engine", "engine_sha256", "dtype", "head_dtype", "engine_args")
"""Keys of `settings_that_decide`."""


def settings_that_decide(name: str, settings: EngineSettings) -> dict[str, Any]:
    """Return the settings of an engine on this machine that change the distribution of its samples, where they are set.

    Batching and the compiler also change the last bits of a sample. They are no part of it, so that an evaluation can
    continue with more memory.

    Args:
        name: name of the engine.
        settings: its settings, after the engine's options (`with_vllm_options`).
    """
    found = {
        "engine": name,
        # other code of a custom engine may give other samples
        "engine_sha256": references.file_fingerprint(name),
        "dtype": settings.dtype,
        "head_dtype": settings.head_dtype,
        # some of them change only the speed, but only vLLM knows which
        "engine_args": settings.vllm.engine_args or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _local(name: str, engine: RolloutEngine, settings: EngineSettings) -> OpenedEngine:
    """Describe an engine with a model on this machine."""
    device, policy = resolve_device(settings.device), described_model(settings.model)
    encoder = PromptEncoder(policy.tokenizer, engine.max_context)
    vllm = engine if isinstance(engine, VllmEngine) else None
    chosen = settings if vllm is None else vllm.settings  # engine options may have changed both
    of_vllm: dict[str, Any] = {}
    if vllm is not None:
        # the options that were given, of which most decide the speed only
        of_vllm = {"vllm": vllm.version, "vllm_options": vllm.settings.vllm.model_dump(exclude_defaults=True)}
    return OpenedEngine(
        engine=engine,
        encoder=encoder,
        max_context=engine.max_context,
        opens_reasoning=opens_reasoning(policy.tokenizer, encoder),
        knows_limit=False,
        decides={
            **settings_that_decide(name, chosen),
            "prompt_format": prompt_format(policy.tokenizer),
            **model_checksums(find_model(settings.model)),
        },
        facts={
            "model": without_secrets(settings.model),
            "licence": policy.licence,
            **of_vllm,
            "device": str(device),
            "threads": settings.use_threads(),
            "max_rows": chosen.max_rows,
            "max_context": engine.max_context,
        },
        gpus=chosen.gpus if device.type == "cuda" else 0,
    )


def _served(engine: OpenAIEngine) -> OpenedEngine:
    """Describe the client of a server."""
    settings, tokenizer = engine.settings, engine.tokenizer
    encoder = None if tokenizer is None else PromptEncoder(tokenizer, engine.max_context)
    here = encoder is not None and settings.mode == "completions"
    prompts = "problem's text" if settings.mode == "completions" else "the server's chat template"
    return OpenedEngine(
        engine=engine,
        encoder=encoder if here else None,
        max_context=engine.max_context,
        opens_reasoning=opens_reasoning(tokenizer, encoder) if tokenizer is not None and encoder is not None else None,
        knows_limit=not engine.is_vllm,  # the effect of the limit on other servers is unknown
        decides={
            "engine": "openai",
            "served_model": settings.model,
            "mode": settings.mode,
            "prompt_format": prompt_format(tokenizer) if tokenizer is not None and here else prompts,
            "extra": dict(settings.extra),
            # vLLM alone is sent top_k and min_p, which others take from their own defaults
            **({} if engine.is_vllm else {"dialect": "openai"}),
        },
        facts={
            "model": without_secrets(settings.model),
            "server": settings.shown(""),  # not in ``decides``: a server may return at another address
            "prompts_as_tokens": engine.takes_tokens,
            "concurrency": settings.concurrency,
            "max_context": engine.max_context if engine.max_context < UNLIMITED_CONTEXT else None,
        },
        gpus=None,
        served=lambda: asdict(engine.usage),
    )


def model_checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a model folder's weights, and of its tokenizer and configuration files.

    The checksums include file names, so that shards in another order differ, but no model cards or training records.
    """
    weights = sorted(folder.glob("*.safetensors"))
    return {"weights_sha256": checksum(weights), "tokenizer_and_config_sha256": checksum(describing_files(folder))}


def opens_reasoning(tokenizer: PreTrainedTokenizerBase, encoder: PromptEncoder) -> bool:
    """Return whether the chat template ends a prompt in an opened ``<think>``."""
    if not tokenizer.chat_template:
        return False
    probe = Problem(id="probe", prompt="?", references=("?",), verifier="exact", source="probe")
    prompt = cast(str, tokenizer.decode(encoder.encode(probe).tolist(), skip_special_tokens=False))
    return prompt.rstrip().endswith(OPEN_TAG)
