"""The in-process engine on one device: seconds per step against the time to read weights and cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.shared import rounded
from benchmarks.speed.gpu_device import copy_rate, forget_peak, name_of, now, peak_gib, product_rate, random_model
from benchmarks.speed.models import random_prompts, speed_engine, submit
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.planning.costs import DecodeCost, Efficiency, System, decode_cost
from magicrl.planning.hardware import load_hardware
from magicrl.planning.shapes import ModelShape
from magicrl.rollout.in_process import InProcessEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCase:
    """One batch that decodes from the first step to the last."""

    name: str  # of the case in the JSON
    shape: ModelShape
    prompts: int  # groups
    samples: int  # responses of each; they share their prompt's cache
    prompt_tokens: int  # random tokens of every prompt
    generated: int  # tokens of every response
    generations: int  # the last one counts, when graphs exist
    cache_mb: int = 65536  # most memory of the cache

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


def bound_of(case: EngineCase, device: str, side: int, size: int) -> DecodeCost:
    """Return the planner's time of a decode step that only reads weights and cache, or multiplies if that is slower."""
    peaks = replace(load_hardware("H200"), bandwidth=copy_rate(device, size), flops=product_rate(device, side))
    whole = Efficiency(kv=1.0, step_overhead=0.0, learner=1.0, other=0.0, weights=1.0, matmul=1.0, network=1.0)
    return decode_cost(System(case.shape, peaks, whole))


def engine_model(case: EngineCase, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model with random weights."""
    register_attention()
    return random_model(case.shape, dtype, device, attn_implementation=ATTENTION_NAME).eval()


def make_engine(
    case: EngineCase, device: str, *, static: bool, model: Any = None, float32_head: bool = False
) -> InProcessEngine:
    """Return an engine; ``static`` gives steps of fixed shapes, which CUDA captures as graphs."""
    model = model or engine_model(case, device)
    engine = speed_engine(
        model, case.rows, case.prompt_tokens + case.generated, memory_limit_mb=case.cache_mb,
        static=static, head_dtype="float32" if float32_head else None,
    )  # fmt: skip
    engine.load_weights({name: p.detach() for name, p in model.named_parameters()}, 0)
    return engine


def ask(engine: InProcessEngine, case: EngineCase, seed: int) -> None:
    """Submit the whole batch."""
    prompts = random_prompts(case.prompts, case.prompt_tokens, case.shape.vocabulary, seed)
    submit(engine, prompts, case.samples, [case.generated] * case.prompts)


def seconds_of_turns(turn: Callable[[], object], count: int, device: str) -> list[float]:
    """Return the seconds of ``count`` turns, each with one token per row that ends on the host."""
    found: list[float] = []
    for _ in range(count):
        start = now(device)
        turn()
        found.append(now(device) - start)
    return found


def engine_case(case: EngineCase, device: str, side: int, size: int, *, static: bool) -> dict[str, Any]:
    """Return seconds of a whole generation, and of its last half against the bound."""
    bound = bound_of(case, device, side, size)
    forget_peak(device)
    engine = make_engine(case, device, static=static)
    seconds: list[float] = []
    for number in range(case.generations):
        ask(engine, case, number)
        # the first turn computes the prompts and samples twice
        seconds = seconds_of_turns(engine.turn, case.generated - 1, device)
    assert engine.rows == case.rows, f"only {engine.rows} of {case.rows} rows fit into {case.cache_mb} MiB of cache"
    late = len(seconds) // 2
    held = statistics.mean(range(late + 1, case.generated))
    context = case.prompts * case.prompt_tokens + case.rows * held
    step, least = statistics.median(seconds[late:]), bound.step(case.rows, context)
    tokens = case.rows * case.generated
    captured = engine.graphs_captured
    engine.close()
    return {
        "device": name_of(device), "model": case.shape.name, "parameters": case.shape.parameters,
        "prompts": case.prompts, "samples": case.samples, "prompt_tokens": case.prompt_tokens,
        "generated": case.generated, "graphs_captured": captured,
        "whole": {
            "seconds": rounded(sum(seconds)), "of_first_step_with_prompts": rounded(seconds[0]),
            "tokens_per_s": rounded(tokens / sum(seconds)),
        },
        "last_half": {
            "context_tokens": rounded(case.prompt_tokens + held), "seconds_a_step": rounded(step),
            "tokens_per_s": rounded(case.rows / step), "bound_seconds_a_step": rounded(least),
            "share_of_bound": rounded(least / step),
        },
        "copy_gb_per_s": rounded(copy_rate(device, size) / 1e9), "peak_memory_gib": peak_gib(device),
    }  # fmt: skip
