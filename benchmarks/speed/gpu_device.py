"""Shared parts of the GPU benchmarks: clock, measured rates, memory, models with random weights."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.shared import rounded
from magicrl.planning.hardware import GIB, Hardware, load_hardware
from magicrl.planning.shapes import ModelShape

MARGIN = 25.0
"""Seconds before its end at which a part stops the current case, so that its figures are written."""


def remaining() -> float:
    """Return the seconds that this process may still measure: PART_SECONDS of `gpu.sh`, else infinity."""
    age = time.time() - psutil.Process().create_time()
    return float(os.environ.get("PART_SECONDS", "inf")) - age - MARGIN


def now(device: str) -> float:
    """Return wall-clock seconds after the device has finished all its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


@cache
def product_rate(device: str, side: int) -> float:
    """Return FLOP/s of a plain bfloat16 product of square matrices, the best of ten."""
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.zeros_like(a)
    return 2 * side**3 / _least(lambda: torch.mm(a, b, out=out), device)


@cache
def copy_rate(device: str, size: int) -> float:
    """Return bytes per second of a copy of ``size`` bytes, reads and writes counted, the best of ten."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _least(lambda: target.copy_(source), device)


def _least(action: Callable[[], object], device: str) -> float:
    action()  # sets libraries up
    found: list[float] = []
    for _ in range(10):
        start = now(device)
        action()
        found.append(now(device) - start)
    return min(found)


def planned_with(device: str) -> Hardware:
    """Return the planner's hardware with this device's memory, at the planner's usable share."""
    total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else psutil.virtual_memory().total
    return replace(load_hardware("H200"), name=name_of(device), memory=float(total))


def forget_peak(device: str) -> None:
    """Free unused memory and reset the peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float | None:
    """Return the peak memory of tensors since ``forget_peak``, or None on a CPU."""
    return rounded(torch.cuda.max_memory_allocated() / GIB) if device == "cuda" else None


def random_model(shape: ModelShape, dtype: torch.dtype, device: str, **options: Any) -> Any:
    """Return a Qwen2 of this shape with random weights, created on the device: on a CPU 7B parameters take minutes."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=65536, tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
