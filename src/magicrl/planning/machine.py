"""What a run takes in the memory of the one machine that it is started on, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from magicrl.config.schema import LoraConfig, ModelConfig, TrainConfig
from magicrl.planning.costs import BF16, FLOAT32
from magicrl.planning.hardware import GIB
from magicrl.planning.memory import LearnerSetup, learner_memory
from magicrl.planning.shapes import ModelShape

RUNTIME = 0.7 * GIB
"""torch and transformers, before a model is loaded."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> float:
    """Bytes that this machine, or the container that this process lives in, has."""
    limits = [float(psutil.virtual_memory().total)]
    for place in _LIMITS:
        try:
            text = Path(place).read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits += [float(text)] if text.isdigit() and int(text) else []
    return min(limits)


def learner_terms(
    model: ModelConfig, shape: ModelShape, *, batch_tokens: int, longest: int, reference: bool = False
) -> dict[str, float]:
    """Bytes of this process's learner by term.

    Args:
        model: precision, micro-batches, checkpointing, LoRA.
        shape: of the model.
        batch_tokens: of a mini-batch; no micro-batch has more.
        longest: tokens of the longest sample.
        reference: a frozen reference is kept.
    """
    micro_batch, above = min(model.micro_batch_tokens, batch_tokens), model.checkpoint_above_tokens
    setup = LearnerSetup(
        gpus=1,
        sequence_parallel=1,
        micro_batch_tokens=micro_batch,
        longest=longest,
        checkpointing=model.gradient_checkpointing or (above is not None and max(micro_batch, longest) > above),
        head_chunk_tokens=model.head_chunk_tokens,
        reference=reference,
        adapters=0 if model.lora is None else shape.adapter_parameters(model.lora.rank, model.lora.target_modules),
    )
    found = learner_memory(shape, setup, RUNTIME).terms()
    if model.dtype == "float32":  # the planner counts in bfloat16; in float32 the masters themselves are computed with
        found |= {name: 2 * found[name] for name in ("reference", "frozen", "activations")} | {"gathered": 0.0}
    return found


def run_terms(config: TrainConfig, model: ModelConfig, shape: ModelShape, longest_prompt: int) -> dict[str, float]:
    """Bytes of a run whose learner and in-process engine share this machine; of the cache one sample's."""
    longest = longest_prompt + max(stage.max_tokens for stage in config.stages)
    batch = max(
        (stage.mini_batch or stage.rollout_batch) * stage.group_size * (longest_prompt + stage.max_tokens)
        for stage in config.stages
    )
    learner = learner_terms(
        model, shape, batch_tokens=batch, longest=longest, reference=config.reference.mode != "none"
    )
    width = FLOAT32 if (config.rollout.dtype or model.dtype) == "float32" else BF16
    return learner | {"engine": width * shape.parameters, "cache": longest * shape.kv_bytes_per_token(width)}


def memory_fault(
    section: str, model: ModelConfig, terms: Callable[[ModelConfig], Mapping[str, float]], memory: float
) -> str | None:
    """Why a run does not fit this machine, and what would make it fit; None where it does.

    Args:
        section: of the recipe that holds ``model``'s settings.
        model: those settings.
        terms: bytes by term under such settings.
        memory: bytes that there are.
    """
    needed = terms(model)
    if sum(needed.values()) <= memory:
        return None
    ways = [f"{section}.{name}" for name, changed in _smaller(model) if sum(terms(changed).values()) <= memory]
    shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in needed.items() if value >= 0.05 * GIB)
    cure = (
        f"what would make it fit, each alone: {'; '.join(ways)}" if ways else "take a smaller model or a larger machine"
    )
    return (
        f"the run needs about {sum(needed.values()) / GIB:.1f} GiB of memory ({shown}), and there are "
        f"{memory / GIB:.1f}; {cure}"
    )


def _smaller(model: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Settings that take less memory, each with what was changed."""
    if not model.gradient_checkpointing:
        yield "gradient_checkpointing = true", model.model_copy(update={"gradient_checkpointing": True})
    for tokens in (4096, 1024):
        if tokens < model.micro_batch_tokens:
            yield f"micro_batch_tokens = {tokens}", model.model_copy(update={"micro_batch_tokens": tokens})
    if model.dtype == "float32":
        yield 'dtype = "bfloat16"', model.model_copy(update={"dtype": "bfloat16"})
    if model.lora is None:
        yield "lora = { rank = 16 }", model.model_copy(update={"lora": LoraConfig()})
