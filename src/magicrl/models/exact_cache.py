"""Exact decoding over the slot cache: blocks of keys are counted from the start of each sequence (`exact.py`).

A prompt's whole blocks are in its slot, read once for all responses of a group. The rest of the prompt, less than a
block, is in each row before the response, so that a row's blocks start where a block of its sequence does.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from magicrl.models.attention import PLAIN, ScoreRules
from magicrl.models.cpu_kernels import DecodeKernel, has_both
from magicrl.models.exact import BLOCK, add_block, block_weights, least_rows, rounded_up
from magicrl.models.kv_cache import BlockStore, Integers, KeyBlock, SlotCache, indexable
from magicrl.models.products import product

AHEAD = BLOCK - 1
"""Largest number of prompt tokens before a response in its row."""


def exact_lengths(prompt: int, response: int) -> tuple[int, int]:
    """Return the capacities, in whole blocks, for a prompt and a response of this many tokens."""
    return rounded_up(prompt, BLOCK), rounded_up(response + AHEAD, BLOCK)


class ExactDecodeAttention:
    """Attention of one new token for each of the rows ``0 .. n-1``. Arguments as in
    `magicrl.models.kv_cache.DecodeAttention`.
    """

    def __init__(
        self, cache: SlotCache, *, owners: Integers, prompt_lengths: Integers, response_lengths: Integers
    ) -> None:
        whole = prompt_lengths // BLOCK * BLOCK
        held = prompt_lengths - whole + response_lengths
        self._cache, self._rows = cache, len(owners)
        # Responses that start: the rest of their prompt goes before them.
        starting = np.flatnonzero((response_lengths == 0) & (prompt_lengths > whole))
        for place, rows in _by(whole[starting], starting):
            self._copy_tails(place, rows, owners[rows])
        self._kernel = None
        if has_both(cache.shape.dtype, cache.device, cache.shape.head_dim):
            self._kernel = DecodeKernel(*cache.addressed(), owners, whole, held)
            return
        self._wide = torch.promote_types(cache.shape.dtype, torch.float32)
        self._sharing = cache.sharing(owners)
        self._prompts = self._blocks(cache.prompts, whole, 0)
        begin = self._prompts[-1].columns.stop if self._prompts else 0
        # + 1 because the new token sees itself.
        self._responses = self._blocks(cache.responses, held + 1, begin)
        self._columns = self._responses[-1].columns.stop
        self._ends = [
            (block, rows, held[rows] % cache.responses.width)
            for block, rows in _by(held // cache.responses.width, np.arange(self._rows))
        ]

    def _blocks(self, store: BlockStore, lengths: Integers, begin: int) -> list[KeyBlock]:
        """Return the blocks of the store up to the longest of ``lengths``, each for the rows up to the last that
        reaches it.
        """
        found: list[KeyBlock] = []
        longest = int(lengths.max())
        for index, start in enumerate(range(0, longest, store.width)):
            used = min(store.width, rounded_up(longest - start, BLOCK))
            places = int(np.flatnonzero(lengths > start)[-1]) + 1
            if store is self._cache.prompts:
                places = self._rows
            seen = lengths[:places] - start
            mask = None
            if seen.min() < used:
                hidden = np.where(np.arange(used) < seen[:, None], 0.0, -np.inf)
                mask = torch.from_numpy(hidden).to(self._wide)[:, None, None, :]
            columns = slice(begin + start, begin + start + used)
            found.append(KeyBlock(index=index, places=places, columns=columns, mask=mask))
        return found

    def kernel_for(self, rules: ScoreRules) -> DecodeKernel | None:
        """Return the kernel that attends, None if torch does."""
        assert rules.exact, "exact decoding needs exact layers"
        return self._kernel

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        """Attend as `magicrl.models.packing.AttentionContext` does."""
        kernel = self.kernel_for(rules)
        if kernel is not None:
            return kernel(layer, query, key, value, scaling)
        prompts, responses = self._cache.prompts, self._cache.responses
        self._write(layer, key, value)
        kv_heads = key.shape[1]
        q = query[0].transpose(0, 1).unflatten(1, (kv_heads, -1))  # [n, kv_heads, heads of each, dim]
        heads = q.shape[2]
        rows = least_rows(heads, q.shape[3], q.dtype)
        q = F.pad(q, (0, 0, 0, rows - heads)) if rows > heads else q.contiguous()
        scores = torch.empty(self._rows, kv_heads, rows, self._columns, dtype=self._wide)
        shared = self._sharing.gather(q)
        for block in self._prompts:
            keys = self._part(prompts.keys[layer], block, self._sharing.prompts)
            found = self._sharing.spread(product(shared, keys.transpose(1, 2)), kv_heads)
            _fill(scores[..., block.columns], found, scaling, block.mask)
        for block in self._responses:
            keys = self._part(responses.keys[layer], block, block.places)
            found = product(q[: block.places].flatten(0, 1), keys.transpose(1, 2)).unflatten(0, (-1, kv_heads))
            _fill(scores[: block.places, ..., block.columns], found, scaling, block.mask)
            scores[block.places :, ..., block.columns] = -torch.inf
        weights, total, _ = block_weights(scores)
        return (self._summed(layer, weights, kv_heads) / total)[:, :, :heads].flatten(1, 2).to(q.dtype)[None]

    def _summed(self, layer: int, weights: Tensor, kv_heads: int) -> Tensor:
        """Return the weighted values of each row, ``[n, kv_heads, rows, dim]``, block by block."""
        prompts, responses = self._cache.prompts, self._cache.responses
        total: Tensor | None = None
        for block in self._prompts:
            values = self._part(prompts.values[layer], block, self._sharing.prompts)
            part = self._sharing.gather(weights[..., block.columns])
            for start in range(0, values.shape[1], BLOCK):
                keys = slice(start, start + BLOCK)
                total = add_block(total, part[..., keys], values[:, keys])
        if total is not None:
            # Contiguous, because blocks are added in place.
            total = self._sharing.spread(total, kv_heads).contiguous()
        for block in self._responses:
            values = self._part(responses.values[layer], block, block.places)
            part = weights[: block.places, ..., block.columns].flatten(0, 1)
            for start in range(0, values.shape[1], BLOCK):
                keys = slice(start, start + BLOCK)
                if total is None:
                    # Every row has the first block of a response.
                    total = add_block(None, part[..., keys], values[:, keys]).unflatten(0, (-1, kv_heads))
                else:
                    add_block(total[: block.places].flatten(0, 1), part[..., keys], values[:, keys])
        assert total is not None
        return total

    @staticmethod
    def _part(stored: list[Tensor], block: KeyBlock, places: int) -> Tensor:
        """Return ``[places * kv_heads, tokens, dim]`` of a store's block."""
        used = block.columns.stop - block.columns.start
        return stored[block.index][:places, :, :used].flatten(0, 1)

    def _copy_tails(self, place: int, rows: Integers, owners: Integers) -> None:
        """Copy what follows ``place`` in the prompts of ``owners`` to the start of these rows."""
        prompts, responses = self._cache.prompts, self._cache.responses
        block, start = divmod(place, prompts.width)
        for stored, source in ((responses.keys, prompts.keys), (responses.values, prompts.values)):
            for layer, blocks in source.items():
                # The whole block is copied: entries after the end of the prompt are overwritten before they are read.
                whole = indexable(blocks[block])[owners, :, start : start + BLOCK]
                indexable(stored[layer][0])[rows, :, :BLOCK] = whole

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        responses = self._cache.responses
        for stored, new in ((responses.keys[layer], key), (responses.values[layer], value)):
            by_row = indexable(new[0].transpose(0, 1))
            for block, rows, offsets in self._ends:
                indexable(stored[block])[rows, :, offsets] = by_row[rows]


def _by(values: Integers, rows: Integers) -> list[tuple[int, Integers]]:
    """Return the rows that share each value."""
    return [(int(value), rows[values == value]) for value in np.unique(values)]


def _fill(target: Tensor, scores: Tensor, scaling: float, mask: Tensor | None) -> None:
    target.copy_(scores).mul_(scaling)
    if mask is not None:
        target.add_(mask)
