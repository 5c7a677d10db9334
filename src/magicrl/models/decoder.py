"""A forward pass of few products for the usual decoders, over the parameters of the Hugging Face model itself.

Llama, Qwen2, Qwen3, Mistral and Gemma have one shape: normalise, project to queries, keys and values, rotate, attend,
project, normalise, gated feed-forward. When one token a row goes through, most of a step of transformers' own code is
not arithmetic: many small calls, products that could be one, weights that the CPU's matrix library rearranges at each
call. `fused_decoder` runs the same arithmetic with fewer and larger products. It gives None for every other model,
which then runs as transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicrl.models.attention import AttentionContext

# classes of the model -> whether the norm's weight is stored as it is (Gemma stores it less 1)
_KNOWN = {
    "LlamaForCausalLM": True,
    "MistralForCausalLM": True,
    "Qwen2ForCausalLM": True,
    "Qwen3ForCausalLM": True,
    "GemmaForCausalLM": False,
}


def packs_weights(weight: Tensor) -> bool:
    """Whether products with ``weight`` are faster on a copy in the order that oneDNN reads.

    Without it each product rearranges the weight anew: a fifth of the time at 64 rows of SmolLM2, half at 8.
    """
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class JoinedLinear:
    """Linear layers of one input as one product.

    Where the weight is used as it is, the layers' parameters become views of the joint one, which takes no memory and
    can never be older than they are. Where it is packed, a copy is made, and made anew once a parameter has changed.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._sources = [layer.weight for layer in layers]
        biases = [cast("nn.Parameter | None", layer.bias) for layer in layers]
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(layers)), "biases of all layers or of none"
        self._packs = packs_weights(self._sources[0])
        self._bias = _joined(given) if given else None
        self._weight = self._sources[0] if self._packs else _joined(self._sources)
        self.version = -1

    @property
    def in_width(self) -> int:
        """Width of an input row."""
        return self._sources[0].shape[1]

    def refresh(self) -> None:
        """Pack the weight again if a parameter was written since the last time."""
        if not self._packs:
            return
        version = sum(source._version for source in self._sources)  # torch counts every write in place
        if version != self.version:
            whole = self._sources[0] if len(self._sources) == 1 else torch.cat(self._sources)
            self._weight = torch.ops.mkldnn._reorder_linear_weight(whole.detach())
            self.version = version

    def __call__(self, x: Tensor) -> Tensor:
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` plus the product, rounded once where the weight is packed."""
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return residual + F.linear(x, self._weight, self._bias)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor that holds ``parameters`` one below the other; they become views of it, if they are not by now."""
    first = parameters[0]
    if len(parameters) == 1:
        return first
    ends = [first.data_ptr() + sum(p.nbytes for p in parameters[:count]) for count in range(len(parameters))]
    one_store = {p.untyped_storage().data_ptr() for p in parameters} == {first.untyped_storage().data_ptr()}
    if one_store and [p.data_ptr() for p in parameters] == ends:
        height = sum(len(parameter) for parameter in parameters)
        return first.detach().as_strided((height, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, norm: Callable[[Any], Callable[[Tensor], Tensor]]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = cast(int, attention.layer_idx)
        self.scaling = cast(float, attention.scaling)
        self.head_dim = cast(int, attention.head_dim)
        self.qkv = JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = JoinedLinear([attention.o_proj])
        self.gate_up = JoinedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = JoinedLinear([mlp.down_proj])
        self.queries, self.keys = (len(p.weight) // self.head_dim for p in (attention.q_proj, attention.k_proj))
        self.before_attention, self.before_mlp = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = (
            norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
        )
        self.activation = cast("Callable[[Tensor], Tensor]", mlp.act_fn)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        """``x`` and result ``[tokens, d]``; ``cos`` and ``sin`` ``[tokens, 1, head_dim]``, ``sin`` with its signs."""
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim))
        rotated, value = heads.split([self.queries + self.keys, self.keys], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated.split([self.queries, self.keys], dim=1)
            rotated = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        rotated = rotated * cos + rotated.roll(self.head_dim // 2, -1) * sin
        query, key = rotated.split([self.queries, self.keys], dim=1)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        seen = context.attend(self.index, query, key, value, self.scaling)
        x = self.out.added(seen[0].flatten(1), x)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return self.down.added(self.activation(gate) * up, x)


class FusedDecoder:
    """The forward pass of one model; see `fused_decoder`."""

    def __init__(self, model: Any, plain_norms: bool) -> None:
        self._base = model.get_decoder()
        # transformers takes norms in float32 in a float64 model too; fused norms do not
        fused = plain_norms and model.dtype != torch.float64
        self._layers = [_Layer(layer, _fused_norm if fused else _own_norm) for layer in self._base.layers]
        self._norm = (_fused_norm if fused else _own_norm)(self._base.norm)
        self._head = JoinedLinear([model.get_output_embeddings()])
        self.products = [p for layer in self._layers for p in layer.products] + [self._head]
        """In the order of the forward pass; the last is the head."""

    def reload(self) -> None:
        """Take every weight anew at the next forward pass, however it was written."""
        for product in self.products:
            product.version = -1

    def __call__(
        self, tokens: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor | None = None
    ) -> Tensor:
        """Logits of packed tokens.

        Args:
            tokens: ``[tokens]`` int64.
            positions: ``[tokens]`` int64.
            context: what attention means.
            keep: ``[k]`` the tokens after which logits are wanted; None for all.

        Returns:
            ``[k, V]``.
        """
        for product in self.products:
            product.refresh()
        x = self._base.embed_tokens(tokens)
        cos, sin = self._base.rotary_emb(x, positions[None])
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        cos, sin = cos[0, :, None], sin[0, :, None]
        for layer in self._layers:
            x = layer(x, cos, sin, context)
        x = x if keep is None else x.index_select(0, keep)
        return self._head(self._norm(x))


def _fused_norm(module: Any) -> Callable[[Tensor], Tensor]:
    weight, eps = module.weight, float(module.variance_epsilon)
    return lambda x: F.rms_norm(x, weight.shape, weight, eps)


def _own_norm(module: Any) -> Callable[[Tensor], Tensor]:
    return module


def fused_decoder(model: Any) -> FusedDecoder | None:
    """The fused forward pass of an HF causal LM, or None where it would not be the model's own arithmetic.

    It follows every change of the model's parameters. Not covered, and None: other architectures, sliding windows,
    layers that are no plain linear layers (adapters, quantised ones), rotary embeddings of a part of the head.
    """
    plain_norms = _KNOWN.get(type(model).__name__)
    if plain_norms is None or not type(model).__module__.startswith("transformers.models."):
        return None
    base, mistral = model.get_decoder(), type(model).__name__ == "MistralForCausalLM"
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linear = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if any(type(module) is not nn.Linear for module in linear):
            return None
        # Mistral's layers ask the config, where Qwen's has a value that its layers may not use
        window = getattr(attention, "sliding_window", model.config.sliding_window if mistral else None)
        if window is not None:
            return None
    if type(model.get_output_embeddings()) is not nn.Linear:
        return None
    probe = torch.zeros(1, 1, dtype=model.dtype, device=model.device)
    cos, _ = base.rotary_emb(probe, torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return FusedDecoder(model, plain_norms) if cos.shape[-1] == base.layers[0].self_attn.head_dim else None
