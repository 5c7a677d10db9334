"""Starting vLLM inside this process, and leaving the process as it was."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from magicrl.models.devices import device_name, peak_mb
from magicrl.rollout.vllm_errors import engine_trouble, vllm_missing
from magicrl.rollout.vllm_transfer import worker_backend

_CPU_BLOCK = 32  # tokens of a cache block, the smallest that vLLM's CPU attention has: its default of 128 shares less
_CPU_CACHE_MB = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """How vLLM serves a model.

    Attributes:
        dtype: precision of weights and activations; ``auto`` is the folder's own.
        max_context: most prompt + response tokens; None: the model's.
        max_rows: most sequences that decode at once.
        cache_mb: size of the key/value cache in MiB; None: 4096 on a CPU, what ``gpu_share`` leaves on a GPU.
        gpu_share: share of the GPU's memory for everything.
        gpus: over how many GPUs of this machine the model is spread (tensor parallel).
        eager: without compiled graphs: starts sooner, samples slower on a GPU. None: on a CPU only.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_context: int | None = None
    max_rows: int = 256
    cache_mb: int | None = None
    gpu_share: float = 0.9
    gpus: int = 1
    eager: bool | None = None


def start_vllm(folder: str, settings: VllmSettings, *, sleeps: bool = False, direct_weights: bool = False) -> Any:
    """A running ``LLMEngine``.

    Args:
        folder: the model.
        settings: how it is served.
        sleeps: its memory can be given back and taken again.
        direct_weights: its workers can take weights from a learner's ranks (`vllm_transfer`).

    Raises:
        ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
    """
    on_gpu = torch.cuda.is_available()
    cache_mb = settings.cache_mb if settings.cache_mb is not None else None if on_gpu else _CPU_CACHE_MB
    options: dict[str, Any] = {
        "model": folder,
        "dtype": settings.dtype,
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.gpus,
        "kv_cache_memory_bytes": None if cache_mb is None else cache_mb << 20,
        # on a CPU, a share of the memory that must be free whatever the cache takes
        "gpu_memory_utilization": settings.gpu_share if on_gpu else 0.01,
        "enforce_eager": settings.eager if settings.eager is not None else not on_gpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if on_gpu:
        options["enable_sleep_mode"] = sleeps
    else:
        options["block_size"] = _CPU_BLOCK
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is reported to anybody unless the user says so
    with _undisturbed():
        try:
            from vllm import EngineArgs, LLMEngine  # pyright: ignore[reportMissingImports]
            from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise vllm_missing(error) from error
        try:
            if direct_weights:
                options["weight_transfer_config"] = WeightTransferConfig(backend=worker_backend())
            return LLMEngine.from_engine_args(EngineArgs(**options))
        except (ValueError, RuntimeError, OSError, AssertionError, TypeError) as error:
            trouble = engine_trouble(f"vLLM cannot serve {folder}", error)
            clean_up()
            raise trouble from error


def worker_device(model: torch.nn.Module) -> tuple[str, float]:
    """For ``LLMEngine.apply_model``: what a worker's model lies on, and the most memory so far of its process there."""
    device = next(model.parameters()).device
    return device_name(device), peak_mb(device)


def clean_up() -> None:
    """Leave vLLM's process groups and give memory back."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    cleanup_dist_env_and_memory()
    gc.collect()


@contextmanager
def _undisturbed() -> Generator[None]:
    """Start vLLM inside this process and leave its random state, thread setting and environment as they were."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before, threads, set_threads = os.environ.get(name), torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    os.environ[name] = "0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)
