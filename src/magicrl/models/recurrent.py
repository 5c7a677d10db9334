"""Layers that depend on a token's place in the row, changed to use its place in its own sequence.

The gated delta nets of Qwen3-Next and Qwen3.5 carry a state from token to token. In a packed row such a layer would
carry the state of one sequence into the next. `keep_sequences_apart` replaces its forward by one that calls the context
of the pass. The context splits the row into sequences (right-padded rows of a batch, where padding changes nothing
before it) and passes the state with which each starts: none, or that after its prompt. The layer itself is
transformers' own, called on these rows. Its state goes in and out through the interface of transformers' cache. Llama
4's layers without rotary embeddings scale queries by their place in the row, and get the position in the sequence
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DELTA_NETS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


class RecurrentState(NamedTuple):
    """State after the last token of each row."""

    inputs: Tensor  # ``[rows, channels, kernel]``, the last inputs of the convolution
    memory: Tensor  # ``[rows, heads, key_dim, value_dim]`` float32 at least


LayerFunction = Callable[[Tensor, RecurrentState | None], tuple[Tensor, RecurrentState]]
"""Call of a layer on ``[rows, tokens, d]`` with the state at their start (None at the start of a text). It returns
the output and the states after the last tokens of the rows."""


class RecurrentContext(Protocol):
    """``AttentionContext`` that also runs layers with a state over the row."""

    def carry(self, layer: int, hidden: Tensor, run: LayerFunction) -> Tensor:
        """Return the output ``[1, tokens, d]`` of the layer with this index for ``hidden``, ``[1, tokens, d]``."""
        ...


class _LayerState:
    """Stand-in for transformers' cache with one layer. It never writes in place, so that gradients pass."""

    record_past = True  # otherwise a layer writes into the given state

    def __init__(self, layer: int, state: RecurrentState | None) -> None:
        self.layers = {layer: self}
        self._given = state
        self._inputs = self._memory = cast("Tensor | None", None)

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        return self._given is not None

    @property
    def recurrent_states(self) -> list[Tensor]:
        assert self._given is not None
        return [self._given.memory]

    def update_conv_state(self, inputs: Tensor, layer: int, conv_kernel_size: int) -> Tensor:
        whole = inputs if self._given is None else torch.cat((self._given.inputs, inputs), dim=-1)
        self._inputs = F.pad(whole, (max(0, conv_kernel_size - whole.shape[-1]), 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, memory: Tensor, layer: int) -> None:
        self._memory = memory

    @property
    def state(self) -> RecurrentState:
        assert self._inputs is not None
        assert self._memory is not None
        return RecurrentState(self._inputs, self._memory)


def _carried(module: Any, hidden_states: Tensor, *, attention_context: Any = None, **_unused: Any) -> Tensor:
    """Compute the forward of one layer with a state."""
    carry = getattr(attention_context, "carry", None)
    if carry is None:
        raise ValueError(
            f"{type(module).__name__} carries a state from token to token, which "
            f"{type(attention_context).__name__} does not keep apart; with cluster.learner.sequence_parallel above "
            "1 use a model whose layers all attend"
        )

    def run(rows: Tensor, state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        cache = _LayerState(module.layer_idx, state)
        out = type(module).forward(module, rows, cache_params=cache)
        return cast(Tensor, out), cache.state

    return cast(Tensor, carry(module.layer_idx, hidden_states, run))


def keep_sequences_apart(model: nn.Module) -> None:
    """Make layers that depend on the place in the row use the pass's context or positions."""
    for module in model.modules():
        # A class of the same name from another package may compute something else.
        if not type(module).__module__.startswith("transformers.models."):
            continue
        if type(module).__name__ in _DELTA_NETS:
            # Not a closure: the layer of a copied model must find its own weights.
            module.forward = partial(_carried, module)
        elif type(module).__name__ == "Llama4TextModel":
            module.register_forward_pre_hook(_pass_positions, with_kwargs=True)


def check_layers(model: nn.Module) -> None:
    """Raise ``ValueError`` for layers known to mix packed sequences: convolutions over the row, states.

    It does not read the weights, so it can be called before they are loaded. `magicrl.models.scorer.check_isolation`
    tests a loaded model.
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
            "Qwen3-Next and Qwen3.5: use a model of docs/guides/models.md"
        )


def _pass_positions(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return given, named | {"row_positions": named["position_ids"]}


def queries_in_place(module: Any, query: Tensor, positions: Tensor | None) -> Tensor:
    """Rescale the queries ``[1, heads, tokens, dim]`` of a Llama 4 layer from their place in the row to their
    positions.
    """
    assert positions is not None, "`keep_sequences_apart` was called"
    row = torch.arange(query.shape[2], device=query.device)
    wanted, applied = (
        torch.log1p(torch.floor((place.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for place in (positions[0], row)
    )
    return (query * (wanted / applied)[:, None]).to(query.dtype)


def decoder_of(model: Any) -> nn.Module:
    """Return the module that computes the hidden states of a causal LM, without its head."""
    found = cast(nn.Module, model.get_decoder())
    # transformers looks for the decoder of Llama 4 under the name in the multimodal model, and returns the causal LM.
    return cast(nn.Module, model.model) if found is model else found
