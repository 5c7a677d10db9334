"""Engines by name, with everything an evaluation needs of one: how prompts are encoded, and what its model is.

A further engine is a row of ``_ENGINES``: a function from ``EngineSettings`` to ``OpenedEngine``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedTokenizerBase

from magicrl.config.errors import RecipeError, without_secrets
from magicrl.config.schema import DType
from magicrl.models.loading import LoadedModel, load_policy, resolve_device
from magicrl.models.model_files import JSON_FILES, TOKENIZER_FILES, find_model
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, TokenArray
from magicrl.rollout.in_process import InProcessEngine
from magicrl.rollout.protocol import RolloutEngine
from magicrl.verifiers.extraction import OPEN_TAG

_READ = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What an engine is made from.

    Attributes:
        model: a model folder or hub name; for a server the model's name there.
        dtype: precision of the weights.
        device: where they are.
        max_rows: most sequences that decode at once.
        memory_limit_mb: most MiB of the key/value cache.
        threads: of torch; None: the cores this process may use.
        options: what only this kind of engine has (a server's address), by name; an unknown one is refused.
    """

    model: str
    dtype: DType = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_rows: int = 32
    memory_limit_mb: int = 4096
    threads: int | None = None
    options: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedEngine:
    """An engine that is ready to sample.

    Attributes:
        engine: has its weights.
        encode: a problem's prompt tokens; empty where the engine encodes by itself.
        max_context: most tokens of prompt and response together.
        opens_reasoning: the prompt ends in an opened ``<think>``, so that a response without ``</think>`` has no
            answer; None where that cannot be seen.
        knows_limit: whether the sampler is told the response limit in a way that changes tokens before it; then a
            curve over limits is no more than an estimate.
        decides: what the samples depend on, for the identity of a job (checksums, precision, prompt format).
        facts: what else is worth recording.
        gpus: how many GPUs the engine holds; None where it samples on another machine.
        served: what a server has counted so far (requests, tokens); None where nothing is served.
    """

    engine: RolloutEngine
    encode: Callable[[Problem], TokenArray]
    max_context: int
    opens_reasoning: bool | None
    knows_limit: bool
    decides: dict[str, Any]
    facts: dict[str, Any]
    gpus: int | None = 0
    served: Callable[[], dict[str, int]] | None = None


EngineFactory = Callable[[EngineSettings], OpenedEngine]


def make_engine(name: str, settings: EngineSettings) -> OpenedEngine:
    """The engine of this name.

    Raises:
        RecipeError: unknown name, or a model that cannot be one.
        ValueError: the model cannot be loaded; says why.
    """
    if name not in _ENGINES:
        raise RecipeError(f"--engine {name}: unknown; known: {', '.join(sorted(_ENGINES))}")
    return _ENGINES[name](settings)


def in_process_engine(
    policy: LoadedModel,
    decode: Callable[[Sequence[int]], str],
    *,
    max_rows: int,
    memory_limit_mb: int,
    device: torch.device,
) -> InProcessEngine:
    """The in-process engine on a loaded model, which belongs to it from here on."""
    return InProcessEngine(
        policy.model,
        end_tokens=policy.end_tokens,
        decode=decode,
        valid_vocab=policy.valid_vocab,
        max_context=policy.max_context,
        max_rows=max_rows,
        memory_limit_mb=memory_limit_mb,
        device=device,
    )


def model_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of a model folder's weights, and of the files that decide how text becomes tokens and where it ends.

    Names of files count, so that two shards in another order differ; model cards and training records do not.
    """
    weights = sorted(folder.glob("*.safetensors"))
    named = {*JSON_FILES, *TOKENIZER_FILES, "merges.txt"}
    others = sorted(p for p in folder.iterdir() if p.name in named or p.suffix == ".jinja")
    return {"weights_sha256": _checksum(weights), "tokenizer_and_config_sha256": _checksum(others)}


def _checksum(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        inner = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_READ):
                inner.update(block)
        digest.update(f"{path.name} {inner.hexdigest()}\n".encode())
    return digest.hexdigest()


def _in_process(settings: EngineSettings) -> OpenedEngine:
    if settings.options:
        raise RecipeError(f"--engine-option {next(iter(settings.options))}: the in_process engine has none")
    threads = settings.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    device = resolve_device(settings.device)
    policy = load_policy(settings.model, dtype=settings.dtype, device=device)
    encoder = PromptEncoder(policy.tokenizer, policy.max_context)
    engine = in_process_engine(
        policy, encoder.decode, max_rows=settings.max_rows, memory_limit_mb=settings.memory_limit_mb, device=device
    )
    engine.load_weights(dict(policy.model.named_parameters()), 0)
    chat = bool(policy.tokenizer.chat_template)
    decides = {
        "engine": "in_process",
        "dtype": settings.dtype,
        "prompt_format": "chat template" if chat else "plain text",
        **model_checksums(find_model(settings.model)),
    }
    facts = {
        "model": without_secrets(settings.model),
        "licence": policy.licence,
        "device": str(device),
        "threads": threads,
        "max_rows": settings.max_rows,
        "max_context": policy.max_context,
    }
    return OpenedEngine(
        engine=engine,
        encode=encoder.encode,
        max_context=policy.max_context,
        opens_reasoning=opens_reasoning(policy.tokenizer, encoder),
        knows_limit=False,
        decides=decides,
        facts=facts,
        gpus=int(device.type == "cuda"),
    )


def opens_reasoning(tokenizer: PreTrainedTokenizerBase, encoder: PromptEncoder) -> bool:
    """Whether the chat template ends a prompt in an opened ``<think>``."""
    if not tokenizer.chat_template:
        return False
    probe = Problem(id="probe", prompt="?", golds=("?",), verifier="exact", source="probe")
    prompt = cast(str, tokenizer.decode(encoder.encode(probe).tolist(), skip_special_tokens=False))
    return prompt.rstrip().endswith(OPEN_TAG)


def _vllm(settings: EngineSettings) -> OpenedEngine:
    from magicrl.evaluation.external_engines import open_vllm

    return open_vllm(settings)


def _openai(settings: EngineSettings) -> OpenedEngine:
    from magicrl.evaluation.external_engines import open_server

    return open_server(settings)


_ENGINES: dict[str, EngineFactory] = {"in_process": _in_process, "vllm": _vllm, "openai": _openai}


def engine_names() -> tuple[str, ...]:
    """Names of the engines there are."""
    return tuple(sorted(_ENGINES))
