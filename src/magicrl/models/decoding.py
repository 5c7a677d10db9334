"""A decoding step with few and large products, and the same step on fixed buffers for CUDA graphs.

Llama, Qwen2, Qwen3, Mistral and Gemma have one shape: normalise, project to queries, keys and values, rotate, attend,
project, normalise, gated feed-forward. With one token a row most of a step of transformers' own code is many small
calls. `fused_decoder` runs the same arithmetic over the parameters of the model itself with fewer and larger products;
it gives None for every other model, which then runs as transformers has it.

A CUDA graph launches all kernels of a step at once, but repeats what was captured: same shapes, same addresses, no look
at the host. So `StaticDecoder` rounds shapes up to a few (`StepShape`) and reads what differs from step to step from
buffers on the device: tokens, lengths, which rows share a prompt. Rows go to the next power of two, lengths to the next
of 64, 96, 128, 192, 256, ... tokens, the longest eighth, quarter and half of the rows apart. Spare rows write to place
0 of unused rows of the cache, and their logits are cut off. On a CPU, and in tests, the same step runs uncaptured.
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

from magicrl.models.cpu_kernels import gated, normalised, rotate, serves
from magicrl.models.head import Float32Head, float32_product
from magicrl.models.kv_cache import Block, Integers, RowAttention, Sharing, SlotCache, shared_places
from magicrl.models.memory_efficient import rms_norm
from magicrl.models.packing import AttentionContext
from magicrl.models.scores import EXACT, PLAIN

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
    With ``float32`` the product is float32 whatever its input: on a CPU over a copy of the weight, too.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, float32: bool = False) -> None:
        self._sources = [layer.weight for layer in layers]
        biases = [cast("nn.Parameter | None", layer.bias) for layer in layers]
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(layers)), "biases of all layers or of none"
        first = self._sources[0]
        self._float32 = float32 and first.dtype.itemsize < torch.float32.itemsize
        self._packs = not self._float32 and packs_weights(first)
        self._copies = self._packs or (self._float32 and not first.is_cuda)
        self._bias = _joined(given) if given else None
        self._weight = first if self._copies else _joined(self._sources)
        self.version = -1

    @property
    def in_width(self) -> int:
        """Width of an input row."""
        return self._sources[0].shape[1]

    def refresh(self) -> None:
        """Copy the weight again if a parameter was written since the last time."""
        if not self._copies:
            return
        version = sum(source._version for source in self._sources)  # torch counts every write in place
        if version != self.version:
            whole = self._sources[0] if len(self._sources) == 1 else torch.cat(self._sources)
            copied = torch.ops.mkldnn._reorder_linear_weight if self._packs else Tensor.float
            self._weight = copied(whole.detach())
            self.version = version

    def __call__(self, x: Tensor) -> Tensor:
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        if self._float32:
            logits = float32_product(x.float() if self._copies else x, self._weight)
            return logits if self._bias is None else logits + self._bias
        return F.linear(x, self._weight, self._bias)

    def added(self, x: Tensor, residual: Tensor, *, exact: bool = False) -> Tensor:
        """``residual`` plus the product, rounded once where the weight is packed, unless it is to be ``exact``."""
        if exact:
            return residual + self(x)
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return residual + F.linear(x, self._weight, self._bias)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor that holds ``parameters`` one below the other; they become views of it, if they are not by now."""
    first = parameters[0]
    if len(parameters) == 1:
        return first
    ends = [first.data_ptr() + sum(p.nbytes for p in parameters[:count]) for count in range(len(parameters))]
    # joined already, by another decoder of this model: joined anew, that one's weight would be left behind
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
        weight = cast(Tensor, attention.q_proj.weight)
        exact = getattr(attention, "exact", False)
        self._kernels = not exact and serves(weight.dtype, weight.device, self.head_dim)
        self._width = len(mlp.gate_proj.weight)
        self._gates = self._kernels and self._width % 16 == 0 and _is_silu(mlp.act_fn)
        self.rules = EXACT if exact else PLAIN

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        """``x`` and result ``[tokens, d]``; ``cos`` and ``sin`` ``[tokens, 1, head_dim]``, ``sin`` with its signs."""
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim))
        # [tokens, query + key + value heads, head_dim]: queries and keys are rotated, values are not
        rotated, value = heads.split([self.queries + self.keys, self.keys], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated.split([self.queries, self.keys], dim=1)
            rotated = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        # queries and keys at once; a roll is `rotate_half` without its minus, which is in `sin`
        if self._kernels:
            rotate(rotated, cos[:, 0], sin[:, 0])
        else:
            rotated = rotated * cos + rotated.roll(self.head_dim // 2, -1) * sin
        query, key = rotated.split([self.queries, self.keys], dim=1)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        seen = context.attend(self.index, query, key, value, self.scaling, self.rules)
        x = self.out.added(seen[0].flatten(1), x, exact=self.rules.exact)
        both = self.gate_up(self.before_mlp(x))
        if self._gates:
            return self.down.added(gated(both, self._width), x)
        gate, up = both.chunk(2, dim=-1)
        return self.down.added(self.activation(gate) * up, x, exact=self.rules.exact)


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


class FusedDecoder:
    """The forward pass of one model; see `fused_decoder`."""

    def __init__(self, model: Any, plain_norms: bool) -> None:
        self._base = model.get_decoder()
        # transformers takes norms in float32 in a float64 model too; fused norms do not
        norm = _fused_norm if plain_norms and model.dtype != torch.float64 else _own_norm
        if getattr(model, "exact", False):
            norm = _learners_norm
        self._layers = [_Layer(layer, norm) for layer in self._base.layers]
        self._norm = norm(self._base.norm)
        self.float32_head = Float32Head.serves(model)
        self._head = JoinedLinear([model.get_output_embeddings()], float32=self.float32_head)
        self.products = [p for layer in self._layers for p in layer.products] + [self._head]
        """In the order of the forward pass; the last is the head."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor | None = None
    ) -> Tensor:
        """Logits ``[k, V]`` of packed ``tokens`` at ``positions`` (int64), after those that ``keep`` names or all."""
        for product in self.products:
            # weights may have been written since the last pass
            product.refresh()
        x = self._base.embed_tokens(tokens)
        cos, sin = self._base.rotary_emb(x, positions[None])
        # the minus of `rotate_half` goes into the sine, once for all layers
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        cos, sin = cos[0, :, None], sin[0, :, None]
        for layer in self._layers:
            x = layer(x, cos, sin, context)
        # the head is needed only where a token is to be sampled
        x = x if keep is None else x.index_select(0, keep)
        return self._head(self._norm(x))


def _fused_norm(module: Any) -> Callable[[Tensor], Tensor]:
    weight, eps = module.weight, float(module.variance_epsilon)
    if serves(weight.dtype, weight.device, len(weight)):
        return lambda x: normalised(x, weight, eps)
    return lambda x: F.rms_norm(x, weight.shape, weight, eps)


def _learners_norm(module: Any) -> Callable[[Tensor], Tensor]:
    weight, eps = module.weight, float(module.variance_epsilon)
    return lambda x: rms_norm(x, weight, eps)


def _own_norm(module: Any) -> Callable[[Tensor], Tensor]:
    return module


def fused_decoder(model: Any) -> FusedDecoder | None:
    """The fused forward pass of an HF causal LM, or None where it would not be the model's own arithmetic.

    It follows every change of the model's parameters. Not covered, and None: other architectures, sliding windows,
    layers that are no plain linear layers (adapters, quantised ones), rotary embeddings of a part of the head.
    """
    plain_norms = _KNOWN.get(type(model).__name__)
    # a class of the same name from elsewhere may compute something else
    if plain_norms is None or not type(model).__module__.startswith("transformers.models."):
        return None
    base, mistral = model.get_decoder(), type(model).__name__ == "MistralForCausalLM"
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linear = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        # not `isinstance`: a quantised layer, or one with an adapter, may be a subclass
        if any(type(module) is not nn.Linear for module in linear):
            return None
        # Mistral's layers ask the config, where Qwen's has a value that its layers may not use
        window = getattr(attention, "sliding_window", model.config.sliding_window if mistral else None)
        if window is not None:
            return None
    if type(model.get_output_embeddings()) is not nn.Linear:
        return None
    probe = torch.zeros(1, 1, dtype=model.dtype, device=model.device)
    # an embedding that rotates a part of each head only is narrower than the head
    cos, _ = base.rotary_emb(probe, torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return FusedDecoder(model, plain_norms) if cos.shape[-1] == base.layers[0].self_attn.head_dim else None


_log = logging.getLogger(__name__)
_LEAST = 64  # tokens: the shortest length that lengths are rounded up to
_TIERS = 4  # all rows, the longest half, quarter, eighth
_KEPT_GRAPHS = 128  # of a cache; the one that was not used for longest goes
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # the others look at the positions on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """All that the kernels of a step are chosen by."""

    rows: int  # of the pass
    prompts: int  # slots that are read
    members: int  # rows of one prompt at most
    prompt_tokens: int  # read of each prompt
    # ``(rows, tokens)``: the first ``rows`` rows are read up to ``tokens`` of their responses; fewer rows, further
    tiers: tuple[tuple[int, int], ...]

    @staticmethod
    def of(cache: SlotCache, owners: Integers, prompt_lengths: Integers, response_lengths: Integers) -> StepShape:
        """The shape that holds these rows; arguments as of `magicrl.models.kv_cache.DecodeAttention`."""
        assert cache.prompts.whole is not None, "made for caches of whole stores"
        assert cache.responses.whole is not None, "made for caches of whole stores"
        counts = np.bincount(owners)
        rows = min(_power_of_two(len(owners)), cache.rows)
        tiers: list[tuple[int, int]] = []
        reached, widest = rows, cache.responses.whole[0].shape[3]
        # lengths descend, so the first row of each part is its longest
        for tier in range(_TIERS):
            first = 0 if tier == _TIERS - 1 else reached // 2  # the longest row that is read no further
            # + 1: the new token; spare rows have no other
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
    """The next of 64, 96, 128, 192, 256, 384, ..."""
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
    """Attention of a step whose lengths are known to the device alone."""

    def __init__(self, cache: SlotCache, shape: StepShape) -> None:
        self._shape = shape
        # a tier's block begins where the one before it ends
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
        """Take a step's buffers; what depends on lengths is computed from them on the device."""
        shape = self._shape
        self._sharing = Sharing(prompts=shape.prompts, members=shape.members, place=place, filled=filled)
        self._held = held
        columns = slice(0, shape.prompt_tokens)
        mask = self._mask(prompt_lengths, 0, shape.prompt_tokens)
        self._prompts = [Block(index=0, places=shape.prompts, columns=columns, mask=mask)]
        self._responses = [
            Block(
                index=index,
                places=rows,
                columns=slice(shape.prompt_tokens + start, shape.prompt_tokens + stop),
                mask=self._mask(held[:rows] + 1, start, stop),
            )
            for index, ((start, stop), (rows, _)) in enumerate(zip(self._parts, shape.tiers, strict=True))
        ]

    def end(self) -> None:
        """Let go of what lies in the graph's own memory, so that the next graph may use it."""
        self._prompts, self._responses, self._scores = [], [], None

    def _mask(self, lengths: Tensor, start: int, stop: int) -> Tensor:
        """``[n, 1, 1, stop - start]``: 0 for the first ``lengths`` tokens, -inf behind them."""
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
        # tokens, places, prompt lengths, lengths held; then the row of each place of the prompts' table
        sizes = [*[shape.rows] * 4, shape.prompts * shape.members]
        self._inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=cache.device)
        self._parts = self._inputs.split(sizes)
        self._logits = logits[: shape.rows]

    def fill(self, tokens: Integers, owners: Integers, prompt_lengths: Integers, held: Integers) -> None:
        """Put what this step is about into the buffers: one copy to the device."""
        place, filled = shared_places(owners, self.shape.prompts, self.shape.members)
        spare = self.shape.rows - len(owners)
        columns = [_padded(column, spare, 0) for column in (tokens, place, held)]
        columns.insert(2, _padded(prompt_lengths, spare, 1))
        self._inputs.copy_(torch.from_numpy(np.concatenate([*columns, filled])))

    def run(self) -> None:
        """What a graph holds: from the buffers to the logits, all on the device."""
        tokens, place, prompt_lengths, held, filled = self._parts
        self._attention.begin(place, filled, prompt_lengths, held)
        self._logits.copy_(self._decoder(tokens, prompt_lengths + held, self._attention))
        self._attention.end()


def _padded(column: NDArray[Any], spare: int, value: int) -> NDArray[np.int64]:
    return np.concatenate([column.astype(np.int64), np.full(spare, value, dtype=np.int64)])


class StaticDecoder:
    """Decoding steps on fixed buffers, captured where there is CUDA; see `static_decoder`.

    Weights that are written in place stay those of the graphs. Graphs belong to a cache and go with it.
    """

    def __init__(self, decoder: FusedDecoder, model: Any) -> None:
        self._decoder, self._model = decoder, model
        self._steps: WeakKeyDictionary[SlotCache, OrderedDict[StepShape, _Step]] = WeakKeyDictionary()
        self._logits: Tensor | None = None
        self._pool: Any = None
        self._captures = torch.device(model.device).type == "cuda"
        self._addresses = self._weights_at()
        self.captured = 0
        """Graphs captured so far."""

    def _weights_at(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._model.parameters())

    def reload(self) -> None:
        """Call it when weights have been replaced: graphs that read other addresses are dropped."""
        addresses = self._weights_at()
        if addresses != self._addresses:
            self._steps.clear()
            self._addresses = addresses

    def __call__(
        self, cache: SlotCache, tokens: Integers, *, owners: Integers, prompt_lengths: Integers, held: Integers
    ) -> Tensor:
        """Logits ``[n, V]`` after one more token for each row, overwritten by the next call.

        Arguments as of `magicrl.models.kv_cache.DecodeAttention`; ``tokens`` is what to feed each row.
        """
        logits, shape = self._room(cache), StepShape.of(cache, owners, prompt_lengths, held)
        steps = self._steps.setdefault(cache, OrderedDict())
        step = steps.get(shape)
        if step is None:
            step = steps[shape] = _Step(self._decoder, cache, shape, logits)
            if len(steps) > _KEPT_GRAPHS:
                steps.popitem(last=False)
        steps.move_to_end(shape)
        # before the capture, whose rehearsal writes keys and values to the places in these buffers
        step.fill(tokens, owners, prompt_lengths, held)
        if step.graph is None and self._captures:
            self._capture(step)
        if step.graph is None:
            step.run()
        else:
            step.graph.replay()
        return logits[: len(tokens)]

    def _room(self, cache: SlotCache) -> Tensor:
        """``[rows, V]`` where every step leaves its logits."""
        if self._logits is None or len(self._logits) < cache.rows:
            # one buffer for all steps: a graph writes to the address that it was captured with
            head = self._model.get_output_embeddings().weight
            dtype = torch.promote_types(head.dtype, torch.float32) if self._decoder.float32_head else head.dtype
            self._logits = torch.zeros(cache.rows, len(head), dtype=dtype, device=head.device)
            self._steps.clear()  # they write to the old one
        return self._logits

    def _capture(self, step: _Step) -> None:
        """Capture ``step``, whose buffers are filled: the rehearsal writes what the replay writes again.

        A graph is a matter of speed. Where a driver or an operator refuses to be captured, steps run as they are.
        """
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # torch asks for a rehearsal on a stream of its own before a capture
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    step.run()  # libraries set themselves up at their first call, which a graph could not hold
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
    """Decoding on fixed buffers for a model with a fused decoder; None where its step has to look at the host."""
    if decoder is None:
        return None
    rope = getattr(model.get_decoder().rotary_emb, "rope_type", None)
    return StaticDecoder(decoder, model) if rope in _STATIC_ROPES else None
