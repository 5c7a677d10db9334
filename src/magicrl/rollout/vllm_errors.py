"""What vLLM says when it cannot start or go on, with what to do about it."""

from __future__ import annotations

import re

_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"head.?(size|dim)", re.I),
        "vLLM's attention on this device has no kernel for the size of this model's attention heads; use the "
        "in-process engine",
    ),
    (
        re.compile(r"less than requested memory for kv", re.I),
        "the machine has not that much memory free: lower cache_mb, or end other processes",
    ),
    (re.compile(r"greater than or equal to max_num_seqs", re.I), "lower max_rows"),
    (
        re.compile(r"kv.?cache|cache blocks|available memory|free memory|gpu_memory_utilization", re.I),
        "the key/value cache does not fit: raise cache_mb (gpu_share on a GPU) if there is memory, else lower "
        "max_context or max_rows",
    ),
    (
        re.compile(r"out of memory|cannot allocate|can't allocate|not enough memory", re.I),
        "memory is exhausted: lower cache_mb (gpu_share on a GPU), max_rows or max_context, or use a smaller model",
    ),
    (
        re.compile(r"max_model_len|max_position_embeddings", re.I),
        "max_context is more than the model was made for; lower it",
    ),
    (
        re.compile(r"not supported|unsupported|no module or parameter|architectures", re.I),
        "this version of vLLM does not have this model's architecture; use the in-process engine",
    ),
    (re.compile(r"compil|inductor|triton|ninja", re.I), "compiled graphs failed; set eager = true"),
)


def vllm_missing(error: ImportError) -> ValueError:
    """The error of an installation without vLLM, or with a broken one."""
    if (error.name or "").split(".")[0] == "vllm":
        return ValueError(
            "the vllm engine needs vLLM, which is not installed; CPU: pip install 'magicrl[vllm]' (beside torch's CPU "
            "build), GPU: pip install vllm (the build for your CUDA)"
        )
    return ValueError(
        f"vLLM is installed but cannot be imported ({error}); it must fit the installed torch: reinstall it, "
        "on a CPU with pip install 'magicrl[vllm]'"
    )


def engine_trouble(what: str, error: Exception) -> ValueError:
    """``error`` of vLLM in one sentence, its first telling line and the remedy."""
    text = str(error).strip()
    remedy = next((advice for pattern, advice in _KNOWN if pattern.search(text)), None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next(
        (re.sub(r"^Value error, | \[type=.*", "", line) for line in lines if "validation error" not in line),
        type(error).__name__,
    )[:300].rstrip(".")
    return ValueError(f"{what}: {told}; {remedy or 'its log tells more with VLLM_LOGGING_LEVEL=INFO'}")
