"""Decoder layers compiled by torch: ``model.compile`` (docs/guides/cluster.md#compiled-layers).

Only a layer's own forward is compiled. FSDP2's hooks and gradient checkpointing therefore wrap it as usual, and no
parameter changes its name. All layers of a model share the graphs, in which the number of tokens is a symbol. A graph
ends before attention, which is selected in Python from the row's sequences, and the next one starts after it.
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

from magicrl.models.attention import PLAIN, ScoreRules
from magicrl.models.packing import AttentionContext
from magicrl.models.routing import experts_of


def check_compiler(device: torch.device) -> None:
    """Raise ``ValueError`` if torch lacks a compiler: a C++ compiler on a CPU, Triton and a C compiler on CUDA."""
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
    """Raise ``ValueError`` for layers whose shapes depend on more than the number of tokens."""
    text: Any = config.get_text_config()
    what = "is a mixture of experts" if experts_of(text) else "has layers that carry a state"
    if experts_of(text) or "linear_attention" in (getattr(text, "layer_types", None) or []):
        raise ValueError(
            f"this model (type {text.model_type!r}) {what}, which are not compiled; leave out model.compile"
        )


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer's forward at its first call.

    Call it before or after FSDP2 and checkpointing are applied: both stay outside.
    """
    # CPU code contains the number of threads. Without this entry, torch's cache key on disk does not.
    options: dict[str, Any] = {"cpp.threads": torch.get_num_threads()}
    # Reduction kernels must not be selected by measured time, which differs from run to run.
    options |= {name: True for name in ("deterministic",) if name in list_options()}
    graphs: dict[Any, Callable[..., Any]] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            forward = type(layer).forward
            if forward not in graphs:
                graphs[forward] = torch.compile(forward, dynamic=True, options=options)
            layer.forward = _Compiled(layer, graphs[forward])


class _Compiled:
    """Forward of one layer. It is an object, so that the layer of a copied model finds its own weights.

    Graphs depend on more than shapes: the type of the context, whether a tensor is a view, whether the input needs a
    gradient. These are made the same for every pass.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self._module, self._compiled = module, compiled
        self._trained = any(parameter.requires_grad for parameter in module.parameters())

    def __call__(self, hidden_states: Tensor, *args: Any, attention_context: AttentionContext, **kwargs: Any) -> Any:
        hidden = cast(Tensor, _owned(hidden_states))
        # If the embedding is not trained, the first layer would differ from the others in this.
        if torch.is_grad_enabled() and self._trained and not hidden.requires_grad:
            hidden.requires_grad_()
        named = {name: _owned(value) for name, value in kwargs.items()}
        context = _Context(attention_context)
        return self._compiled(self._module, hidden, *map(_owned, args), attention_context=context, **named)


class _Context:
    """Wrapper that gives every ``AttentionContext`` the same type, and returns a result that is not a view."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        """Attend as `AttentionContext` does."""
        return cast(Tensor, _owned(self._context.attend(layer, query, key, value, scaling, rules)))


def _owned(value: Any) -> Any:
    """Return tensors, also those in a tuple, as tensors over the same memory that are not views."""
    if isinstance(value, tuple):
        return tuple(map(_owned, cast("tuple[Any, ...]", value)))
    return _Owned.apply(value) if isinstance(value, Tensor) else value


class _Owned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
