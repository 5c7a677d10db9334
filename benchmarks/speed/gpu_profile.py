"""Time of a decode step and of an update by kind of operator, from torch's profiler.

On CUDA it is the time of kernels, assigned to the operators that launched them; on a CPU the time inside an operator.

- ``head``: products with the vocabulary, everything on logits (in decoding also sampling), the fused head's passes.
- ``attention``: scores, softmax and weighted sums; in decoding these are batched products.
- ``products``: all other matrix products.
- ``optimizer``: everything after the backward pass: gradient norm, clipping, AdamW, updated compute weights.
- ``rest``: norms, activations, rotary embedding, copies.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared import rounded
from benchmarks.speed.gpu_device import forget_peak, name_of, now
from benchmarks.speed.gpu_engine import EngineCase, ask, make_engine, seconds_of_turns
from benchmarks.speed.gpu_learner import CONTROLS, LearnerCase, batch_of, make_learner, needs_lora, planned_with

KINDS: tuple[str, ...] = ("products", "attention", "head", "optimizer", "rest")
HEAD_KERNELS = ("statistics_kernel", "gradient_kernel")  # those of ``magicrl.models.head_triton``
_BATCHED = ("aten::bmm", "aten::baddbmm")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise")
_BACKWARD = "autograd::engine::evaluate_function"
STEPS = 4  # decode steps that are profiled


def kind_of(event: Any, vocabulary: int, backward_end: float) -> str:
    """Return the kind of an operator's own time.

    Args:
        event: A ``FunctionEvent`` of the profiler, with shapes.
        vocabulary: Size that identifies the head's products.
        backward_end: End of the last backward pass; infinity if there is none.
    """
    parents = list(_parents(event))
    if event.time_range.start >= backward_end:
        return "optimizer"
    if any(name.removeprefix(f"{_BACKWARD}: ") in ("_Head", "_HeadBackward") for name in (event.name, *parents)):
        return "head"
    shapes = [shape for shape in event.input_shapes or [] if shape]
    if event.name in _PRODUCTS:
        return "head" if any(vocabulary in shape for shape in shapes) else "products"
    if any(shape[-1] == vocabulary for shape in shapes):
        return "head"
    names = (event.name, *parents)
    if event.name in _BATCHED or any("attention" in name.lower() or "softmax" in name for name in names):
        return "attention"
    return "rest"


def _parents(event: Any) -> Iterable[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name


def microseconds(events: Iterable[Any], vocabulary: int, device: str) -> dict[str, float]:
    """Return seconds by kind. A kernel without a known operator belongs to the head by its name, or to the rest."""
    every = [event for event in events if not event.is_user_annotation]
    operators = [event for event in every if event.device_type == DeviceType.CPU]
    ends = [event.time_range.end for event in operators if event.name.startswith(_BACKWARD)]
    end = max(ends, default=float("inf"))
    found, linked = dict.fromkeys(KINDS, 0.0), Counter[str]()
    for event in operators:
        if device == "cpu":
            found[kind_of(event, vocabulary, end)] += event.self_cpu_time_total
            continue
        for kernel in event.kernels:
            head = kernel.name in HEAD_KERNELS
            found["head" if head else kind_of(event, vocabulary, end)] += kernel.duration
            linked[kernel.name] += kernel.duration
    if device == "cuda":
        all_kernels = Counter[str]()
        for event in every:
            if event.device_type == DeviceType.CUDA:
                all_kernels[event.name] += event.time_range.elapsed_us()
        for name, time in all_kernels.items():
            found["head" if name in HEAD_KERNELS else "rest"] += max(0.0, time - linked[name])
    return found


def profiled(action: Callable[[], object], vocabulary: int, device: str) -> dict[str, float]:
    """Return the seconds of each kind in one call."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as found:
        action()
        now(device)
    return {kind: time / 1e6 for kind, time in microseconds(found.events() or [], vocabulary, device).items()}


def _table(kinds: dict[str, float], times: int, seconds: float) -> dict[str, Any]:
    """Return seconds and shares by kind; ``seconds`` is measured without the profiler, which slows the host."""
    whole = sum(kinds.values())
    return {
        "seconds": rounded(seconds),
        "seconds_of_kernels": rounded(whole / times),
        "device_busy": rounded(whole / times / seconds),
        "kinds": {
            kind: {"seconds": rounded(time / times), "share": rounded(time / whole)} for kind, time in kinds.items()
        },
    }


def decode_profile(case: EngineCase, device: str) -> dict[str, Any]:
    """Return a decode step in plain mode, where the profiler sees operators, and how busy graphs keep the device."""
    found: dict[str, Any] = {"device": name_of(device), "model": case.shape.name, "rows": case.rows}
    found["context_tokens"] = case.prompt_tokens + case.generated
    for mode, static in (("plain", False), ("graphs", True)):
        forget_peak(device)
        engine = make_engine(case, device, static=static)
        ask(engine, case, 0)
        turns = case.generated - 1 - STEPS
        seconds = statistics.median(seconds_of_turns(engine.turn, turns, device)[turns // 2 :])
        kinds = profiled(lambda: [engine.turn() for _ in range(STEPS)], case.shape.vocabulary, device)  # noqa: B023
        found[mode] = _table(kinds, STEPS, seconds)
        if static:
            del found[mode]["kinds"]  # a graph's kernels have no operators
        engine.close()
    return found


def update_profile(case: LearnerCase, device: str) -> dict[str, Any]:
    """Return one update after a first one that compiles kernels."""
    lora = needs_lora(case, planned_with(device))
    learner, batch = make_learner(case, device, lora=lora), batch_of(case)
    learner.update(batch, CONTROLS)
    start = now(device)
    learner.update(batch, CONTROLS)
    seconds = now(device) - start
    kinds = profiled(lambda: learner.update(batch, CONTROLS), case.shape.vocabulary, device)
    return {
        "device": name_of(device),
        "model": case.shape.name,
        "response_tokens": case.tokens,
        "checkpointing": case.checkpointing,
        **_table(kinds, 1, seconds),
    }
