"""Layers for which a token's place in the row counts: made to count its place in its own sequence.

The gated delta nets of Qwen3-Next and Qwen3.5 carry a state from token to token. Such a layer reads a row from left to
right, so in a packed row it would take one sequence's state over into the next. `keep_sequences_apart` puts in place of
its forward one that asks the pass's context: the context cuts the row into sequences (right-padded rows of a batch,
where what follows changes nothing before it) and says which state each begins with, none or that after its prompt. The
layer itself is transformers' own, called on those rows; its state goes in and out where transformers would keep it in a
cache. The layers of Llama 4 without rotary embeddings scale queries by their place in the row; they get the true one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DELTA_NETS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


class State(NamedTuple):
    """After the last token of each row."""

    inputs: Tensor  # ``[rows, channels, kernel]`` the last inputs of the convolution
    memory: Tensor  # ``[rows, heads, key_dim, value_dim]`` float32 at least


Run = Callable[[Tensor, State | None], tuple[Tensor, State]]
"""A layer on ``[rows, tokens, d]`` that begin with a state or, None, at a text's beginning: its output and the states
after the rows' last tokens."""


class RecurrentContext(Protocol):
    """An ``AttentionContext`` that knows how layers with a state go over the row."""

    def carry(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        """Output ``[1, tokens, d]`` of the layer of this index on ``hidden``, ``[1, tokens, d]``."""
        ...


class _LayerState:
    """What a layer takes for transformers' cache: one layer of it, without writes in place, so that gradients pass."""

    record_past = True  # else a layer writes into the state that it was given

    def __init__(self, layer: int, state: State | None) -> None:
        self.layers = {layer: self}
        self._given = state
        self._inputs = self._memory = cast("Tensor | None", None)

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        del layer, state_idx
        return self._given is not None

    @property
    def recurrent_states(self) -> list[Tensor]:
        assert self._given is not None
        return [self._given.memory]

    def update_conv_state(self, inputs: Tensor, layer: int, conv_kernel_size: int) -> Tensor:
        del layer
        whole = inputs if self._given is None else torch.cat((self._given.inputs, inputs), dim=-1)
        self._inputs = F.pad(whole, (max(0, conv_kernel_size - whole.shape[-1]), 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, memory: Tensor, layer: int) -> None:
        del layer
        self._memory = memory

    @property
    def state(self) -> State:
        assert self._inputs is not None
        assert self._memory is not None
        return State(self._inputs, self._memory)


class _Carried:
    """The forward of one layer; an object, so that a copied model's layer finds its own weights."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden_states: Tensor, *, attention_context: Any = None, **_unused: Any) -> Tensor:
        carry = getattr(attention_context, "carry", None)
        if carry is None:
            raise ValueError(
                f"{type(self._module).__name__} carries a state from token to token, which "
                f"{type(attention_context).__name__} does not keep apart; with cluster.learner.sequence_parallel above "
                "1 use a model whose layers all attend"
            )
        return cast(Tensor, carry(self._module.layer_idx, hidden_states, self._run))

    def _run(self, rows: Tensor, state: State | None) -> tuple[Tensor, State]:
        cache = _LayerState(self._module.layer_idx, state)
        out = type(self._module).forward(self._module, rows, cache_params=cache)
        return cast(Tensor, out), cache.state


def keep_sequences_apart(model: nn.Module) -> list[int]:
    """Let layers that look along the row ask the pass's context or positions; the indices of those with a state."""
    found: list[int] = []
    for module in model.modules():
        # a class of the same name from elsewhere may compute something else
        if not type(module).__module__.startswith("transformers.models."):
            continue
        if type(module).__name__ in _DELTA_NETS:
            module.forward = _Carried(module)
            found.append(cast(int, module.layer_idx))
        elif type(module).__name__ == "Llama4TextModel":
            module.register_forward_pre_hook(_tell_positions, with_kwargs=True)
    return found


def check_layers(model: nn.Module) -> None:
    """``ValueError``, which names them, for layers known to mix packed sequences: convolutions over the row, states.

    Weights are not looked at, so that it is known before they are read; `magicrl.models.scorer.check_isolation` tries
    what a loaded model does.
    """
    found = {
        type(module).__name__
        for module in decoder_of(model).modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children()) or hasattr(module, "A_log")
    }
    unknown = sorted(found.difference(_DELTA_NETS))
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has layers of {', '.join(unknown)}, which carry a state or a convolution from "
            "token to token; magicrl keeps packed sequences apart in attention, and in the gated delta nets of "
            "Qwen3-Next and Qwen3.5: use a model of docs/models.md"
        )


def _tell_positions(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    del module
    return given, named | {"row_positions": named["position_ids"]}


def queries_in_place(module: Any, query: Tensor, positions: Tensor | None) -> Tensor:
    """``[1, heads, tokens, dim]`` queries that a Llama 4 layer scaled by their place in the row, by their positions."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    assert positions is not None, "`keep_sequences_apart` was called"
    row = torch.arange(query.shape[2], device=query.device)
    wanted, applied = (
        torch.log1p(torch.floor((place.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for place in (positions[0], row)
    )
    return (query * (wanted / applied)[:, None]).to(query.dtype)


def decoder_of(model: Any) -> nn.Module:
    """What computes the hidden states of a causal LM, without its head."""
    found = cast(nn.Module, model.get_decoder())
    # transformers looks for Llama 4's under the multimodal model's name, and finds the causal LM again
    return cast(nn.Module, model.model) if found is model else found
