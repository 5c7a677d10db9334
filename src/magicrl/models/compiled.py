"""Decoder layers compiled by torch: ``model.compile`` (docs/distributed-learner.md#compiled-layers).

A layer's own forward is compiled and nothing around it, so that FSDP2's hooks and gradient checkpointing wrap it as
before and no parameter has another name. All layers of a model share the graphs, in which the number of tokens is a
symbol. A graph ends before attention, which is chosen in Python from the row's sequences, and a next one begins behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._inductor import list_options
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from magicrl.models.packing import AttentionContext
from magicrl.models.routing import experts_of
from magicrl.models.scores import PLAIN, ScoreRules


def check_compiler(device: torch.device) -> None:
    """``ValueError`` where torch lacks what it compiles with: a C++ compiler on a CPU, Triton and a C one on CUDA."""
    variable, usual = ("CC", ("gcc", "clang")) if device.type == "cuda" else ("CXX", ("g++",))
    wanted = (os.environ[variable].split()[0],) if os.environ.get(variable, "").strip() else usual
    missing = None if any(map(shutil.which, wanted)) else " or ".join(wanted)
    if device.type == "cuda" and find_spec("triton") is None:
        missing = "Triton"
    if missing is not None:
        raise ValueError(
            f"torch compiles with {missing} here, which is not found; install it (a compiler may be named by the "
            f"environment variable {variable}), or leave out model.compile"
        )


def check_compiled(config: PreTrainedConfig) -> None:
    """``ValueError`` for layers whose shapes are not a matter of the number of tokens alone."""
    text: Any = config.get_text_config()
    what = "is a mixture of experts" if experts_of(text) else "has layers that carry a state"
    if experts_of(text) or "linear_attention" in (getattr(text, "layer_types", None) or []):
        raise ValueError(
            f"this model (type {text.model_type!r}) {what}, which are not compiled; leave out model.compile"
        )


def compile_layers(model: nn.Module) -> None:
    """Let each decoder layer's forward be compiled when it is first called.

    Before or after FSDP2 and checkpointing are put on: both stay outside.
    """
    graphs: dict[Any, Callable[..., Any]] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            forward = type(layer).forward
            if forward not in graphs:
                graphs[forward] = torch.compile(forward, dynamic=True, options=_options())
            layer.forward = _Compiled(layer, graphs[forward])


def _options() -> dict[str, Any]:
    # threads are written into a CPU's code, and without this not into the key by which torch finds it on disk
    options: dict[str, Any] = {"cpp.threads": torch.get_num_threads()}
    # kernels that add up are not chosen by how fast they were today
    return options | {name: True for name in ("deterministic",) if name in list_options()}


class _Compiled:
    """The forward of one layer; an object, so that a copied model's layer finds its own weights.

    What a graph is made for besides shapes (a context's type, whether a tensor is a view, whether a gradient is wanted
    of the layer's input) is made the same for every pass.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self._module, self._compiled = module, compiled
        self._trained = any(parameter.requires_grad for parameter in module.parameters())

    def __call__(self, hidden_states: Tensor, *args: Any, attention_context: AttentionContext, **kwargs: Any) -> Any:
        hidden = cast(Tensor, _owned(hidden_states))
        # above an embedding that is not trained the first layer is as the others
        if torch.is_grad_enabled() and self._trained and not hidden.requires_grad:
            hidden.requires_grad_()
        named = {name: _owned(value) for name, value in kwargs.items()}
        context = _Context(attention_context)
        return self._compiled(self._module, hidden, *map(_owned, args), attention_context=context, **named)


class _Context:
    """Any ``AttentionContext``, as one type and with a result that is no view."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        """See `AttentionContext`."""
        return cast(Tensor, _owned(self._context.attend(layer, query, key, value, scaling, rules)))


def _owned(value: Any) -> Any:
    """Tensors, also those of a tuple, as tensors of the same memory that are views of no other."""
    if isinstance(value, tuple):
        return tuple(map(_owned, cast("tuple[Any, ...]", value)))
    return _Owned.apply(value) if isinstance(value, Tensor) else value


class _Owned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]
