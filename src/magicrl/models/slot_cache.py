"""A key/value cache of rows for decoding many sequences at once, and the two attentions that use it.

Row ``r`` holds the keys and values of one sequence. Active rows are always ``0 .. n-1``, so that a decode step
reads a plain slice of the cache, no further than the longest of them. `PrefillAttention` computes prompts packed
one after the other and files their keys and values; `DecodeAttention` appends one token to every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CLEAN_TOKENS = 64  # the cache is cleaned in steps of so many tokens


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptState:
    """Keys ``[layers, kv_heads, P, key_dim]`` and values of one prompt, kept until all of its group has started."""

    keys: Tensor
    values: Tensor


class SlotCache:
    """Preallocated keys and values, ``[layers, rows, kv_heads, capacity, head_dim]``."""

    def __init__(self, shape: CacheShape, rows: int, capacity: int, device: torch.device) -> None:
        self.shape = shape
        self.rows = rows
        self.capacity = capacity
        head = (shape.layers, rows, shape.kv_heads, capacity)
        self._keys = torch.empty(*head, shape.key_dim, dtype=shape.dtype, device=device)
        self._values = torch.empty(*head, shape.value_dim, dtype=shape.dtype, device=device)
        self.keys = list(self._keys.unbind(0))
        self.values = list(self._values.unbind(0))
        self._clean = 0

    def prepare(self, used: int) -> None:
        """Make sure that the first ``used`` tokens of every row hold finite numbers.

        A masked key has weight 0, but 0 times a NaN that the allocator left there is NaN. Cleaning as far as
        sequences reach, and not more, leaves the rest of a large cache untouched (and unbacked by memory).
        """
        if used > self._clean:
            end = min(self.capacity, -(-used // _CLEAN_TOKENS) * _CLEAN_TOKENS)
            for store in (self._keys, self._values):
                store[:, :, :, self._clean : end] = 0.0
            self._clean = end

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` tokens of row ``source`` to row ``target``."""
        self.repeat(source, slice(target, target + 1), length)

    def repeat(self, source: int, rows: slice, length: int) -> None:
        """Copy the first ``length`` tokens of row ``source`` to ``rows``."""
        for store in (self._keys, self._values):
            store[:, rows, :, :length] = store[:, source : source + 1, :, :length]

    def keep(self, row: int, length: int) -> PromptState:
        """A copy of the first ``length`` tokens of ``row``."""
        return PromptState(keys=self._keys[:, row, :, :length].clone(), values=self._values[:, row, :, :length].clone())

    def restore(self, state: PromptState, rows: slice) -> None:
        """Write a kept prompt to the start of ``rows``."""
        length = state.keys.shape[2]
        self._keys[:, rows, :, :length] = state.keys[:, None]
        self._values[:, rows, :, :length] = state.values[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRun:
    """Neighbouring packed prompts of equal length.

    Attributes:
        start: first packed token.
        length: tokens of each prompt.
        rows: the cache row of each.
    """

    start: int
    length: int
    rows: tuple[int, ...]


class PrefillAttention:
    """Causal attention within each packed prompt; files its keys and values in the prompt's row."""

    def __init__(self, cache: SlotCache, runs: Sequence[PromptRun]) -> None:
        self.longest = max(run.length for run in runs)
        """Tokens of the longest sequence: what a sliding window has to be compared with."""
        cache.prepare(self.longest)
        self._cache = cache
        self._runs = [(run, list(run.rows)) for run in runs]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `magicrl.models.attention.AttentionContext`."""
        grouped = query.shape[1] != key.shape[1]
        outputs: list[Tensor] = []
        for run, rows in self._runs:
            end = run.start + run.length * len(rows)
            q, k, v = (
                # [1, heads, tokens, dim] -> [prompts, heads, length, dim]
                t[0, :, run.start : end].unflatten(1, (len(rows), run.length)).transpose(0, 1)
                for t in (query, key, value)
            )
            self._cache.keys[layer][rows, :, : run.length] = k
            self._cache.values[layer][rows, :, : run.length] = v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None]


class DecodeAttention:
    """One new token for each of the rows ``0 .. n-1``, attending to its own row.

    The query heads that share a key/value head stand as that head's query positions, so that keys and
    values are never repeated.
    """

    def __init__(self, cache: SlotCache, lengths: Tensor, shortest: int, longest: int) -> None:
        """
        Args:
            cache: holds ``lengths[r]`` tokens in row r.
            lengths: ``[n]`` int64 on the cache's device.
            shortest: the least of ``lengths``.
            longest: the greatest.
        """
        assert longest < cache.capacity, (longest, cache.capacity)
        self.longest = longest + 1
        """Tokens of the longest sequence, the new one included."""
        cache.prepare(self.longest)
        self._cache = cache
        self._rows = len(lengths)
        self._same = shortest == longest
        self._lengths = lengths
        self._index = torch.arange(self._rows, device=lengths.device)
        self._mask: Tensor | None = None
        if not self._same:
            seen = torch.arange(self.longest, device=lengths.device) <= lengths[:, None]
            mask = torch.zeros(seen.shape, dtype=cache.shape.dtype, device=lengths.device)
            self._mask = mask.masked_fill_(~seen, float("-inf"))[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `magicrl.models.attention.AttentionContext`; ``tokens`` are the rows."""
        keys = self._append(self._cache.keys[layer], key)
        values = self._append(self._cache.values[layer], value)
        q = query[0].unflatten(0, (key.shape[1], -1)).permute(2, 0, 1, 3)  # [n, kv_heads, heads per kv head, dim]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask, scale=scaling)
        return out.flatten(1, 2)[None]

    def _append(self, store: Tensor, new: Tensor) -> Tensor:
        """Write ``[1, kv_heads, n, dim]`` at each row's end; the part of the store in use."""
        if self._same:
            store[: self._rows, :, self.longest - 1] = new[0].transpose(0, 1)
        else:
            store[self._index, :, self._lengths] = new[0].transpose(0, 1)
        return store[: self._rows, :, : self.longest]
