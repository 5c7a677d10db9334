"""A decoding step with few and large products, and the same step on fixed buffers for CUDA graphs.

Llama, Qwen2, Qwen3, Mistral and Gemma share a structure: normalise, project to queries, keys and values, rotate,
attend, project, normalise, gated feed-forward. With one token per row, most of a step of transformers' own code is many
small calls. `fused_decoder` computes the same arithmetic from the model's own parameters with fewer and larger
products. It returns None for every other model, which then runs as in transformers.

A CUDA graph launches all kernels of a step at once. It repeats exactly what was captured: the same shapes and
addresses, without access to the host. `StaticDecoder` therefore rounds shapes up to a small set (`StepShape`), and
reads everything that differs between steps from buffers on the device: tokens, lengths, which rows share a prompt. Rows
are rounded up to a power of two, lengths to 64, 96, 128, 192, 256, ... tokens, separately for the longest eighth,
quarter and half of the rows. Spare rows write to place 0 of unused rows of the cache, and their logits are dropped. On
a CPU, and in tests, the same step runs uncaptured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from magicrl.models.attention import EXACT, PLAIN
from magicrl.models.cpu_kernels import (
    FEW_ROWS,
    LANES,
    DecodeKernel,
    addresses,
    can_multiply,
    can_multiply_rows,
    gated,
    has_both,
    multiply,
    multiply_rows,
    normalised,
    packed_rooms,
    packed_shape,
    packed_weight,
    rotate,
)
from magicrl.models.exact import ExactLinear
from magicrl.models.exact_cache import ExactDecodeAttention
from magicrl.models.head import Float32Head
from magicrl.models.kv_cache import DecodeAttention, Integers, KeyBlock, RowAttention, Sharing, SlotCache, shared_places
from magicrl.models.linear import linear_product
from magicrl.models.memory_efficient import is_silu, rms_norm, signed
from magicrl.models.packing import AttentionContext
from magicrl.models.products import float32_product, widens_bfloat16

# Model classes, and whether the stored norm weight is the factor itself (Gemma stores the factor minus 1).
_KNOWN = {
    "LlamaForCausalLM": True,
    "MistralForCausalLM": True,
    "Qwen2ForCausalLM": True,
    "Qwen3ForCausalLM": True,
    "GemmaForCausalLM": False,
}


def packs_weights(weight: Tensor) -> bool:
    """Return whether products with ``weight`` are faster on a copy in oneDNN's layout.

    Otherwise each product converts the weight again: a fifth of the time at 64 rows of SmolLM2, half at 8.
    """
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and not widens_bfloat16()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class JoinedLinear:
    """Linear layers with the same input as one product.

    If the weight is used unchanged, the layers' parameters become views of the joint weight, which takes no memory and
    is never outdated. If it is packed, for magicrl's kernel or for oneDNN, it is a copy, made again after a parameter
    has changed. With ``exact`` the product has the bits of the layers' own. With ``float32`` it is float32 for any
    input, on a CPU also with a copy of the weight.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, exact: bool = False, float32: bool = False) -> None:
        self._sources = [layer.weight for layer in layers]
        biases = [cast("nn.Parameter | None", layer.bias) for layer in layers]
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(layers)), "biases of all layers or of none"
        first = self._sources[0]
        self._exact = exact
        self._float32 = float32 and first.dtype.itemsize < torch.float32.itemsize
        ours = not exact or all(type(layer) is ExactLinear for layer in layers)  # or torch's, padded to many rows
        self._multiplies = ours and not self._float32 and all(can_multiply(source) for source in self._sources)
        self._columns = sum(len(source) for source in self._sources)
        self._packs = not (self._float32 or self._multiplies) and packs_weights(first)
        self._copies = self._multiplies or self._packs or (self._float32 and not first.is_cuda)
        self.bias = _joined(given) if given else None
        self.weight = first if self._copies else _joined(self._sources)
        self._by_rows = ours and not self._copies and can_multiply_rows(self.weight)
        self.packed_shape = packed_shape(self._columns, first.shape[1]) if self._multiplies else None
        """Shape of the copy for magicrl's kernel, None without one."""
        self.room: Tensor | None = None
        """Memory of this shape for the copy."""
        self.version = -1

    @property
    def in_width(self) -> int:
        """Width of an input row."""
        return self._sources[0].shape[1]

    def refresh(self) -> None:
        """Copy the weight again if a parameter was written since the last call."""
        if not self._copies:
            return
        version = sum(source._version for source in self._sources)  # torch counts in-place writes
        if version != self.version:
            whole = self._sources[0] if len(self._sources) == 1 else torch.cat(self._sources)
            if self._multiplies:
                self.weight = packed_weight(whole.detach(), self.room)
            else:
                copied = Tensor.float if self._float32 else torch.ops.mkldnn._reorder_linear_weight
                self.weight = copied(whole.detach())
            self.version = version

    def by_kernel(self, rows: int) -> bool:
        """Return whether magicrl's kernels multiply ``rows`` rows."""
        return self._multiplies or (self._by_rows and (self._exact or rows <= FEW_ROWS))

    def __call__(self, x: Tensor) -> Tensor:
        if self._multiplies:
            return multiply(x, self.weight, self._columns, self.bias)
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self._float32:
            logits = float32_product(x.float() if self._copies else x, self.weight)
            return logits if self.bias is None else logits + self.bias
        if self.by_kernel(len(x)):
            return multiply_rows(x, self.weight, self.bias)
        return linear_product(x, self.weight, self.bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``residual`` plus the product, rounded once if the weight is packed and the product is not exact."""
        if self._exact:
            return residual + self(x)
        if self._multiplies:
            return multiply(x, self.weight, self._columns, self.bias, residual)
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return residual + self(x)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Return one tensor that holds ``parameters`` one after the other. They become views of it, unless they already
    are.
    """
    first = parameters[0]
    if len(parameters) == 1:
        return first
    ends = [first.data_ptr() + sum(p.nbytes for p in parameters[:count]) for count in range(len(parameters))]
    # Another decoder of this model may have joined them. Joining again would detach its weight from the parameters.
    one_store = {p.untyped_storage().data_ptr() for p in parameters} == {first.untyped_storage().data_ptr()}
    if one_store and [p.data_ptr() for p in parameters] == ends:
        height = sum(len(parameter) for parameter in parameters)
        return first.detach().as_strided((height, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class _KernelNorm:
    """A norm by magicrl's kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return normalised(x, self.weight, self.eps)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, norm: Callable[[Any], Callable[[Tensor], Tensor]]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = cast(int, attention.layer_idx)
        self.scaling = cast(float, attention.scaling)
        self.head_dim = cast(int, attention.head_dim)
        self.rules = EXACT if getattr(attention, "exact", False) else PLAIN
        exact = self.rules.exact
        self.qkv = JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj], exact=exact)
        self.out = JoinedLinear([attention.o_proj], exact=exact)
        self.gate_up = JoinedLinear([mlp.gate_proj, mlp.up_proj], exact=exact)
        self.down = JoinedLinear([mlp.down_proj], exact=exact)
        self.queries, self.keys = (len(p.weight) // self.head_dim for p in (attention.q_proj, attention.k_proj))
        self.before_attention, self.before_mlp = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = (
            norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
        )
        self.activation = cast("Callable[[Tensor], Tensor]", mlp.act_fn)
        weight = cast(Tensor, attention.q_proj.weight)
        # In exact mode the learner uses the same kernels for the same widths.
        self._rotates = has_both(weight.dtype, weight.device, self.head_dim)
        self.inner = len(cast(Tensor, mlp.gate_proj.weight))
        gates = has_both(weight.dtype, weight.device, self.inner, LANES)
        self._gates = gates and is_silu(mlp.act_fn)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def for_kernel(self) -> tuple[Any, ...] | None:
        """Return the numbers with which a kernel runs the layer, None unless each part but the products has a kernel.

        Returns:
            Width of the feed-forward layer; heads of keys, of queries for each, and their width; the factor on scores;
            the epsilons of the norms.
        """
        norms = [norm for norm in self._norms if norm is not None]
        if not (self._rotates and self._gates and all(isinstance(norm, _KernelNorm) for norm in norms)):
            return None
        heads = (self.keys, self.queries // self.keys, self.head_dim)
        return self.inner, heads, self.scaling, *{cast(_KernelNorm, norm).eps for norm in norms}

    @property
    def _norms(self) -> tuple[Any, ...]:
        return self.before_attention, self.before_mlp, self.query_norm, self.key_norm

    def addresses(self) -> list[int | None]:
        """Return the addresses of the weights in the order of ``Layer`` in ``step.cpp``."""
        weights = [None if norm is None else norm.weight for norm in self._norms]
        return addresses(*weights, *(p.weight for p in self.products), *(p.bias for p in self.products))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        """Run the layer on ``x``, ``[tokens, d]``. ``cos`` and ``sin`` are ``[tokens, 1, head_dim]``, and ``sin``
        includes its signs.
        """
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim))
        # [tokens, query + key + value heads, head_dim]: queries and keys are rotated, values are not
        rotated, value = heads.split([self.queries + self.keys, self.keys], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated.split([self.queries, self.keys], dim=1)
            rotated = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        # Queries and keys at once. A roll is `rotate_half` without its minus, which is in `sin`.
        if self._rotates:
            rotate(rotated, cos[:, 0], sin[:, 0])
        else:
            rotated = rotated * cos + rotated.roll(self.head_dim // 2, -1) * sin
        query, key = rotated.split([self.queries, self.keys], dim=1)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        seen = context.attend(self.index, query, key, value, self.scaling, self.rules)
        x = self.out.added(seen[0].flatten(1), x)
        both = self.gate_up(self.before_mlp(x))
        gate, up = both.chunk(2, dim=-1)
        product = gated(gate, up) if self._gates else self.activation(gate) * up
        return self.down.added(product, x)


class FusedDecoder:
    """Forward pass of one model. See `fused_decoder`."""

    def __init__(self, model: Any, plain_norms: bool) -> None:
        self._base = model.get_decoder()
        exact = getattr(model, "exact", False)
        # transformers computes norms in float32 even in a float64 model. Fused norms do not.
        fused = plain_norms and model.dtype != torch.float64

        def norm(module: Any) -> Callable[[Tensor], Tensor]:
            if not exact and not fused:
                return module
            weight, eps = module.weight, float(module.variance_epsilon)
            if has_both(weight.dtype, weight.device, len(weight), LANES):
                return _KernelNorm(weight, eps)
            if exact:
                return lambda x: rms_norm(x, weight, eps)
            return lambda x: F.rms_norm(x, weight.shape, weight, eps)

        self._layers = [_Layer(layer, norm) for layer in self._base.layers]
        sizes = {layer.for_kernel() for layer in self._layers}
        alike = sizes.pop() if len(sizes) == 1 else None
        # One epsilon; the cache of decoding numbers its layers likewise.
        ordered = [layer.index for layer in self._layers] == list(range(len(self._layers)))
        self._sizes = alike if alike is not None and len(alike) == 4 and ordered else None
        self._norm = norm(self._base.norm)
        self.float32_head = Float32Head.serves(model)
        self._head = JoinedLinear([model.get_output_embeddings()], exact=exact, float32=self.float32_head)
        self.products = [p for layer in self._layers for p in layer.products] + [self._head]
        """Products in the order of the forward pass. The last is the head."""
        packed = [(product, product.packed_shape) for product in self.products if product.packed_shape is not None]
        for (product, _), room in zip(packed, packed_rooms([shape for _, shape in packed]), strict=True):
            product.room = room

    def __call__(
        self, tokens: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor | None = None
    ) -> Tensor:
        """Return logits ``[k, V]`` of packed ``tokens`` at ``positions`` (int64), after the tokens that ``keep``
        selects, or after all.
        """
        for product in self.products:
            # Weights may have been written since the last pass.
            product.refresh()
        x = self._base.embed_tokens(tokens)
        cos, sin = self._base.rotary_emb(x, positions[None])
        # The sine includes the minus of `rotate_half`, once for all layers.
        cos, sin = cos[0, :, None], signed(sin)[0, :, None]
        kernel = self._kernel_for(context, len(x))
        if kernel is None:
            for layer in self._layers:
                x = layer(x, cos, sin, context)
        else:
            assert self._sizes is not None, "a kernel runs the layers"
            inner, heads, scaling, eps = self._sizes
            table = torch.tensor([[at or 0 for at in layer.addresses()] for layer in self._layers])
            exact = self._layers[0].rules.exact
            kernel.run_layers(x, table, inner, heads, (cos[:, 0], sin[:, 0]), eps=eps, scaling=scaling, exact=exact)
        # The head is needed only where a token is sampled.
        x = x if keep is None else x.index_select(0, keep)
        return self._head(self._norm(x))

    def _kernel_for(self, context: AttentionContext, rows: int) -> DecodeKernel | None:
        """Return the kernel that runs all layers on a row of the cache each, None if there is none."""
        if self._sizes is None or not isinstance(context, DecodeAttention | ExactDecodeAttention):
            return None
        multiplied = all(product.by_kernel(rows) for product in self.products[:-1])
        return context.kernel_for(self._layers[0].rules) if multiplied else None


def fused_decoder(model: Any) -> FusedDecoder | None:
    """Return the fused forward pass of an HF causal LM, or None if it would differ from the model's own arithmetic.

    It follows every change of the model's parameters. It returns None for other architectures, sliding windows, layers
    that are not plain linear layers (adapters, quantised ones), and rotary embeddings of a part of the head.
    """
    plain_norms = _KNOWN.get(type(model).__name__)
    # A class of the same name from another package may compute something else.
    if plain_norms is None or not type(model).__module__.startswith("transformers.models."):
        return None
    base, mistral = model.get_decoder(), type(model).__name__ == "MistralForCausalLM"
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linear = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        # Not `isinstance`, because a quantised layer or one with an adapter may be a subclass.
        if any(type(module) not in (nn.Linear, ExactLinear) for module in linear):
            return None
        # Mistral reads the window from the config. The config of Qwen may have a value that its layers do not use.
        window = getattr(attention, "sliding_window", model.config.sliding_window if mistral else None)
        if window is not None:
            return None
    if type(model.get_output_embeddings()) not in (nn.Linear, ExactLinear):
        return None
    probe = torch.zeros(1, 1, dtype=model.dtype, device=model.device)
    # An embedding that rotates only a part of each head is narrower than the head.
    cos, _ = base.rotary_emb(probe, torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return FusedDecoder(model, plain_norms) if cos.shape[-1] == base.layers[0].self_attn.head_dim else None


_log = logging.getLogger(__name__)
_LEAST = 64  # tokens, the shortest rounded length
_TIERS = 4  # all rows, the longest half, quarter, eighth
_KEPT_GRAPHS = 128  # per cache; the least recently used one is dropped
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # others read the positions on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Sizes that select the kernels of a step."""

    rows: int  # rows of the pass
    prompts: int  # slots that are read
    members: int  # largest number of rows of one prompt
    prompt_tokens: int  # tokens that are read of each prompt
    # ``(rows, tokens)``: the first ``rows`` responses are read up to ``tokens``. Fewer rows are read further.
    tiers: tuple[tuple[int, int], ...]

    @staticmethod
    def of(cache: SlotCache, owners: Integers, prompt_lengths: Integers, response_lengths: Integers) -> StepShape:
        """Return the shape for these rows. Arguments as in `magicrl.models.kv_cache.DecodeAttention`."""
        assert cache.prompts.whole is not None, "static decoding needs a cache with whole stores"
        assert cache.responses.whole is not None, "static decoding needs a cache with whole stores"
        counts = np.bincount(owners)
        rows = min(_power_of_two(len(owners)), cache.rows)
        tiers: list[tuple[int, int]] = []
        reached, widest = rows, cache.responses.whole[0].shape[3]
        # Lengths descend, so the first row of each part is its longest.
        for tier in range(_TIERS):
            first = 0 if tier == _TIERS - 1 else reached // 2  # the longest row that is read no further
            # + 1 for the new token; spare rows have no other
            longest = int(response_lengths[first]) + 1 if first < len(owners) else 1
            tokens = min(_rounded_up(longest), widest)
            if not tiers or tokens > tiers[-1][1]:
                tiers.append((reached, tokens))
            if not first:
                break
            reached = first
        return StepShape(
            rows=rows,
            prompts=min(_power_of_two(len(counts)), cache.rows),
            members=_power_of_two(int(counts.max())),
            prompt_tokens=min(_rounded_up(int(prompt_lengths.max())), cache.prompts.whole[0].shape[3]),
            tiers=tuple(tiers),
        )


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _rounded_up(tokens: int) -> int:
    """Return the next of 64, 96, 128, 192, 256, 384, ..."""
    whole = max(_LEAST, _power_of_two(tokens))
    return whole // 4 * 3 if whole > _LEAST and tokens <= whole // 4 * 3 else whole


class _Views:
    """Parts of whole stores, by layer and part."""

    def __init__(self, whole: tuple[Tensor, Tensor] | None, parts: Sequence[tuple[int, int]]) -> None:
        assert whole is not None
        keys, values = whole
        self.keys, self.values = (
            [[layer[:, :, start:stop] for start, stop in parts] for layer in store] for store in (keys, values)
        )


class _StaticAttention(RowAttention):
    """Attention of a step whose lengths are only known on the device."""

    def __init__(self, cache: SlotCache, shape: StepShape) -> None:
        self._shape = shape
        # The block of a tier starts where the previous one ends.
        starts = [0, *(tokens for _, tokens in shape.tiers[:-1])]
        parts = [(start, tokens) for start, (_, tokens) in zip(starts, shape.tiers, strict=True)]
        self._parts = parts
        self._prompt_store = _Views(cache.prompts.whole, [(0, shape.prompt_tokens)])
        self._response_store = _Views(cache.responses.whole, parts)
        assert cache.responses.whole is not None
        self._whole = cache.responses.whole
        self._wide = torch.promote_types(cache.shape.dtype, torch.float32)
        self._columns = shape.prompt_tokens + parts[-1][1]
        self._rows = torch.arange(shape.rows, device=cache.device)
        self._counting = torch.arange(max(shape.prompt_tokens, parts[-1][1]), device=cache.device)
        self._held = self._rows

    def begin(self, place: Tensor, filled: Tensor, prompt_lengths: Tensor, held: Tensor) -> None:
        """Set a step's buffers. Everything that depends on lengths is computed from them on the device."""
        shape = self._shape
        self._sharing = Sharing(prompts=shape.prompts, members=shape.members, place=place, filled=filled)
        self._held = held
        columns = slice(0, shape.prompt_tokens)
        mask = self._mask(prompt_lengths, 0, shape.prompt_tokens)
        self._prompts = [KeyBlock(index=0, places=shape.prompts, columns=columns, mask=mask)]
        self._responses = [
            KeyBlock(
                index=index,
                places=rows,
                columns=slice(shape.prompt_tokens + start, shape.prompt_tokens + stop),
                mask=self._mask(held[:rows] + 1, start, stop),
            )
            for index, ((start, stop), (rows, _)) in enumerate(zip(self._parts, shape.tiers, strict=True))
        ]

    def end(self) -> None:
        """Release tensors in the graph's memory pool, so that the next graph may use it."""
        self._prompts, self._responses, self._scores = [], [], None

    def _mask(self, lengths: Tensor, start: int, stop: int) -> Tensor:
        """Return ``[n, 1, 1, stop - start]``: 0 for the first ``lengths`` tokens, -inf after them."""
        seen = self._counting[start:stop] < lengths[:, None]
        hidden = torch.zeros(seen.shape, dtype=self._wide, device=seen.device).masked_fill(~seen, float("-inf"))
        return hidden[:, None, None, :]

    def _append(self, layer: int, key: Tensor, value: Tensor) -> None:
        for store, new in zip(self._whole, (key, value), strict=True):
            store[layer][self._rows, :, self._held] = new[0].transpose(0, 1)


class _Step:
    """A step of one shape: its buffers, and its graph once it is captured."""

    def __init__(self, decoder: FusedDecoder, cache: SlotCache, shape: StepShape, logits: Tensor) -> None:
        self.shape = shape
        self.graph: Any = None
        self._decoder = decoder
        self._attention = _StaticAttention(cache, shape)
        # Tokens, places, prompt lengths, lengths held, and the row of each place of the prompts' table.
        sizes = [*[shape.rows] * 4, shape.prompts * shape.members]
        self._inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=cache.device)
        self._parts = self._inputs.split(sizes)
        self._logits = logits[: shape.rows]

    def fill(self, tokens: Integers, owners: Integers, prompt_lengths: Integers, held: Integers) -> None:
        """Write the inputs of a step into the buffers, with one copy to the device."""
        place, filled = shared_places(owners, self.shape.prompts, self.shape.members)
        spare = self.shape.rows - len(owners)
        columns = [_padded(column, spare, 0) for column in (tokens, place, held)]
        columns.insert(2, _padded(prompt_lengths, spare, 1))
        self._inputs.copy_(torch.from_numpy(np.concatenate([*columns, filled])))

    def run(self) -> None:
        """Compute the logits from the buffers, all on the device. A graph captures this."""
        tokens, place, prompt_lengths, held, filled = self._parts
        self._attention.begin(place, filled, prompt_lengths, held)
        self._logits.copy_(self._decoder(tokens, prompt_lengths + held, self._attention))
        self._attention.end()


def _padded(column: NDArray[Any], spare: int, value: int) -> NDArray[np.int64]:
    return np.concatenate([column.astype(np.int64), np.full(spare, value, dtype=np.int64)])


class StaticDecoder:
    """Decoding steps on fixed buffers, captured as CUDA graphs on CUDA. See `static_decoder`.

    Graphs stay valid when weights are written in place. They belong to a cache and are dropped with it.
    """

    def __init__(self, decoder: FusedDecoder, model: Any) -> None:
        self._decoder, self._model = decoder, model
        self._steps: WeakKeyDictionary[SlotCache, OrderedDict[StepShape, _Step]] = WeakKeyDictionary()
        self._logits: Tensor | None = None  # ``[rows, V]`` of the last step
        self._pool: Any = None
        self._captures = torch.device(model.device).type == "cuda"
        self._addresses = self._weights_at()
        self.captured = 0
        """Number of graphs captured so far."""

    def _weights_at(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._model.parameters())

    def reload(self) -> None:
        """Drop graphs that read other addresses. Call it after weights have been replaced."""
        addresses = self._weights_at()
        if addresses != self._addresses:
            self._steps.clear()
            self._addresses = addresses

    def __call__(
        self, cache: SlotCache, tokens: Integers, *, owners: Integers, prompt_lengths: Integers, held: Integers
    ) -> Tensor:
        """Return logits ``[n, V]`` after one more token per row. The next call overwrites them.

        Arguments as in `magicrl.models.kv_cache.DecodeAttention`. ``tokens`` are the inputs of the rows.
        """
        if self._logits is None or len(self._logits) < cache.rows:
            # One buffer for all steps, because a graph writes to the address at its capture.
            head = self._model.get_output_embeddings().weight
            dtype = torch.promote_types(head.dtype, torch.float32) if self._decoder.float32_head else head.dtype
            self._logits = torch.zeros(cache.rows, len(head), dtype=dtype, device=head.device)
            self._steps.clear()  # they write to the old buffer
        logits, shape = self._logits, StepShape.of(cache, owners, prompt_lengths, held)
        steps = self._steps.setdefault(cache, OrderedDict())
        step = steps.get(shape)
        if step is None:
            step = steps[shape] = _Step(self._decoder, cache, shape, logits)
            if len(steps) > _KEPT_GRAPHS:
                steps.popitem(last=False)
        steps.move_to_end(shape)
        # Before the capture, whose warm-up writes keys and values to the places in these buffers.
        step.fill(tokens, owners, prompt_lengths, held)
        if step.graph is None and self._captures:
            self._capture(step)
        if step.graph is None:
            step.run()
        else:
            step.graph.replay()
        return logits[: len(tokens)]

    def _capture(self, step: _Step) -> None:
        """Capture ``step``, whose buffers are filled: the warm-up writes the same values as the replay.

        If a driver or an operator does not support capture, steps run uncaptured, which is only slower.
        """
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # torch requires a warm-up on a separate stream before a capture.
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    step.run()  # libraries initialise at their first call, which a graph cannot capture
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                step.run()
        except RuntimeError as error:
            _log.warning("decoding without CUDA graphs, since a step could not be captured: %s", error)
            self._captures = False
            return
        step.graph = graph
        self.captured += 1


def static_decoder(decoder: FusedDecoder | None, model: Any) -> StaticDecoder | None:
    """Return decoding on fixed buffers for a model with a fused decoder, None if its step needs the host."""
    if decoder is None:
        return None
    rope = getattr(model.get_decoder().rotary_emb, "rope_type", None)
    return StaticDecoder(decoder, model) if rope in _STATIC_ROPES else None
