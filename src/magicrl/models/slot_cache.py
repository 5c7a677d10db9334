"""Keys and values of many sequences that decode at once; each prompt is held once for all of its responses.

A sequence is a prompt in a *slot*, which the responses of a group share, and a response in a *row*. Both stores hold
their tokens in blocks, each block one contiguous tensor over all slots or rows, so that the used part of the cache is
read where it lies, by batched matrix products, and once: no copies of slices, nothing for absent sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PROMPT_BLOCK, _RESPONSE_BLOCK = 128, 64  # tokens of a block at least
_BLOCKS = 32  # most blocks of a store, unless that made them wider than
_WIDEST = 512  # tokens
_ALIGNED = 64  # bytes: a cache line, and what vector units want


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """What one token takes in the cache.

    Attributes:
        layers: attention layers.
        kv_heads: key/value heads of each.
        key_dim: width of a key head.
        value_dim: width of a value head.
        dtype: of keys and values.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class _ShapeProbe:
    """Attention of a single token: its value. Notes the shapes that pass."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int, torch.dtype]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        del scaling
        self.seen[layer] = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)


@torch.inference_mode()
def probe_cache_shape(model: Any, device: torch.device) -> CacheShape:
    """The cache shape of an HF causal LM with magicrl's attention, found by running one token through it.

    Raises:
        ValueError: its layers differ in shape, or none of them attends.
    """
    probe = _ShapeProbe()
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    model(input_ids=zero, position_ids=zero, use_cache=False, attention_context=probe)
    shapes = set(probe.seen.values())
    if len(shapes) != 1 or sorted(probe.seen) != list(range(len(probe.seen))):
        raise ValueError(f"the cache needs layers of one key/value shape, this model has {probe.seen}")
    kv_heads, key_dim, value_dim, dtype = shapes.pop()
    return CacheShape(layers=len(probe.seen), kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype)


class BlockStore:
    """Keys and values of up to ``places`` token sequences of up to ``capacity`` tokens, in blocks of ``width``.

    ``keys[layer][block]`` is ``[places, kv_heads, width, key_dim]``, ``values`` likewise. All are finite from the
    start: a masked key has weight 0, but 0 times a NaN that the allocator left there is NaN.
    """

    def __init__(
        self, shape: CacheShape, places: int, capacity: int, least: int, device: torch.device, *, whole: bool
    ) -> None:
        few = -(-capacity // (_BLOCKS * least)) * least
        self.width = min(max(few, least), _WIDEST, capacity)
        self.capacity = capacity
        blocks = range(0, capacity, self.width)
        tokens = len(blocks) * self.width if whole else self.width
        dims = (shape.key_dim, shape.value_dim)

        def both() -> tuple[Tensor, Tensor]:
            head = (shape.layers, places, shape.kv_heads, tokens)
            keys, values = (_zeros((*head, dim), shape.dtype, device) for dim in dims)
            return keys, values

        self.whole = both() if whole else None
        """Keys and values, ``[layers, places, kv_heads, tokens, dim]`` each, that the blocks are views of."""
        self._stores: list[tuple[Tensor, Tensor]] = []
        for start in blocks:
            if self.whole is None:
                self._stores.append(both())
            else:
                keys, values = (t[..., start : start + self.width, :] for t in self.whole)
                self._stores.append((keys, values))
        self.keys = [[keys[layer] for keys, _ in self._stores] for layer in range(shape.layers)]
        self.values = [[values[layer] for _, values in self._stores] for layer in range(shape.layers)]

    def spans(self, tokens: int) -> list[tuple[int, int]]:
        """``(block, tokens in it)`` of a sequence's first ``tokens`` tokens."""
        return [(block, min(self.width, tokens - start)) for block, start in enumerate(range(0, tokens, self.width))]

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens at ``source`` to ``target``."""
        for block, used in self.spans(tokens):
            for store in self._stores[block]:
                store[:, target, :, :used] = store[:, source, :, :used]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU as fresh pages of the system, which take memory only once something is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNED, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


class SlotCache:
    """Preallocated keys and values: prompts in slots, responses in rows.

    Both are numbered densely: the caller keeps slots ``0 .. g-1`` and rows ``0 .. n-1`` in use, rows by descending
    length of their responses.
    """

    def __init__(
        self,
        shape: CacheShape,
        rows: int,
        prompt_capacity: int,
        response_capacity: int,
        device: torch.device,
        *,
        whole: bool = False,
    ) -> None:
        """
        Args:
            shape: of a token.
            rows: responses at most; as many prompts, since each may have its own.
            prompt_capacity: tokens of the longest prompt.
            response_capacity: tokens of the longest response.
            device: where the cache lies.
            whole: each store is one tensor, so that a token's place may be an index on the device (`static_decode`);
                on a CPU blocks of their own are read faster.
        """
        self.shape = shape
        self.rows = rows
        self.device = device
        self.prompts = BlockStore(shape, rows, prompt_capacity, _PROMPT_BLOCK, device, whole=whole)
        self.responses = BlockStore(shape, rows, response_capacity, _RESPONSE_BLOCK, device, whole=whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRun:
    """Neighbouring packed prompts of equal length.

    Attributes:
        start: first packed token.
        length: tokens of each prompt.
        slots: the slot of each.
    """

    start: int
    length: int
    slots: tuple[int, ...]


class PrefillAttention:
    """Causal attention within each packed prompt; files its keys and values in the prompt's slot."""

    def __init__(self, cache: SlotCache, runs: Sequence[PromptRun]) -> None:
        self.longest = max(run.length for run in runs)
        """Tokens of the longest sequence: what a sliding window has to be compared with."""
        self._store = cache.prompts
        self._runs = [(run, list(run.slots), cache.prompts.spans(run.length)) for run in runs]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `magicrl.models.attention.AttentionContext`."""
        grouped = query.shape[1] != key.shape[1]
        outputs: list[Tensor] = []
        for run, slots, spans in self._runs:
            end = run.start + run.length * len(slots)
            q, k, v = (
                # [1, heads, tokens, dim] -> [prompts, heads, length, dim]
                t[0, :, run.start : end].unflatten(1, (len(slots), run.length)).transpose(0, 1)
                for t in (query, key, value)
            )
            for block, used in spans:
                part = slice(block * self._store.width, block * self._store.width + used)
                self._store.keys[layer][block][slots, :, :used] = k[:, :, part]
                self._store.values[layer][block][slots, :, :used] = v[:, :, part]
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None]
