"""Keys and values of many sequences during decoding, and the attention that reads them.

A sequence is a prompt in a *slot*, which the responses of a group share, and a response in a *row*. Both stores hold
their tokens in blocks. Each block is one contiguous tensor over all slots or rows, so that batched matrix products read
the used part of the cache in place, and once.

All responses of a prompt read it in one product, and so do the query heads that share a key/value head. The scores of
prompt and response are in one table with one softmax in float32 or better. Where `magicrl.models.cpu_kernels` has
kernels, they read the same blocks up to each row's length without a table. For layers with a state instead of keys the
cache holds the state after a slot's prompt and after a row's last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.attention import PLAIN, ScoreRules, attend_rows, supports_row
from magicrl.models.cpu_kernels import DecodeKernel, has_both
from magicrl.models.cpu_rows import CpuRow
from magicrl.models.products import is_widened, product
from magicrl.models.recurrent import LayerFunction, RecurrentState

Integers = NDArray[np.int64]

_PROMPT_BLOCK, _RESPONSE_BLOCK = 128, 64  # smallest numbers of tokens of a block
_BLOCKS = 32  # largest number of blocks of a store, unless blocks would exceed _WIDEST
_WIDEST = 512  # tokens
_MOVED = 2**23  # bytes of moving sequences that are held twice, about
_ALIGNED = 64  # bytes of a cache line, the alignment for vector units


LayerShape: TypeAlias = tuple[int, int, int]
"""Key/value heads, width of a key head and width of a value head of a layer that attends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Memory layout of tokens and sequences in the cache."""

    attending: dict[int, LayerShape]  # by index of the layer
    dtype: torch.dtype  # of keys and values
    states: dict[int, RecurrentState] = field(default_factory=dict[int, RecurrentState])  # of one sequence, by layer

    @property
    def head_dim(self) -> int | None:
        """Width of all key and value heads, None if widths differ."""
        widths = {width for _, *dims in self.attending.values() for width in dims}
        return widths.pop() if len(widths) == 1 else None

    @property
    def groups(self) -> list[tuple[LayerShape, list[int]]]:
        """Layers by shape. Layers of one shape share a tensor."""
        found: dict[LayerShape, list[int]] = {}
        for layer, shape in sorted(self.attending.items()):
            found.setdefault(shape, []).append(layer)
        return list(found.items())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        values = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in self.attending.values())
        return values * self.dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a sequence's own and its prompt's states over all layers, for any length."""
        return 2 * sum(part[0].nbytes for state in self.states.values() for part in state)


class _ShapeProbe:
    """Attention context for a single token, whose output is its value. It records the shapes."""

    def __init__(self) -> None:
        self.attending: dict[int, LayerShape] = {}
        self.states: dict[int, RecurrentState] = {}
        self.dtypes: set[torch.dtype] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        self.attending[layer] = key.shape[1], key.shape[3], value.shape[3]
        self.dtypes.add(key.dtype)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    def carry(self, layer: int, hidden: Tensor, run: LayerFunction) -> Tensor:
        out, self.states[layer] = run(hidden, None)
        return out


@torch.inference_mode()
def probe_cache_shape(model: Any, device: torch.device) -> CacheShape:
    """Return the cache shape of an HF causal LM with magicrl's attention, found by running one token through it.

    Raises:
        ValueError: Its layers differ in precision, or none of them attends.
    """
    probe = _ShapeProbe()
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    model(input_ids=zero, position_ids=zero, use_cache=False, attention_context=probe)
    if len(probe.dtypes) != 1:
        raise ValueError(f"the cache needs layers that attend in one precision, this model has {probe.attending}")
    return CacheShape(attending=probe.attending, states=probe.states, dtype=probe.dtypes.pop())


class BlockStore:
    """Keys and values of up to ``places`` token sequences of up to ``capacity`` tokens, in blocks of ``width``.

    ``keys[layer][block]`` is ``[places, kv_heads, width, key_dim]``, and ``values`` likewise. All start as finite
    numbers: a masked key has weight 0, but 0 times an uninitialised NaN is NaN.
    """

    def __init__(
        self, shape: CacheShape, places: int, capacity: int, least: int, device: torch.device, *, whole: bool
    ) -> None:
        # At most _BLOCKS blocks, which bounds the products per layer. Their width is a multiple of the least.
        few = -(-capacity // (_BLOCKS * least)) * least
        self.width = min(max(few, least), _WIDEST, capacity)
        self.capacity = capacity
        self._device = device
        blocks = range(0, capacity, self.width)
        tokens = len(blocks) * self.width if whole else self.width
        self.layers = [layers for _, layers in shape.groups]
        """Indices of the layers of each tensor."""

        def both(kind: LayerShape, count: int) -> tuple[Tensor, Tensor]:
            heads, *dims = kind
            keys, values = (_zeros((count, places, heads, tokens, dim), shape.dtype, device) for dim in dims)
            return keys, values

        self.whole: tuple[Tensor, Tensor] | None = None
        """Keys and values, ``[layers, places, kv_heads, tokens, dim]`` each, that the blocks are views of."""
        self._stores: list[list[tuple[Tensor, Tensor]]] = [[] for _ in blocks]
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}
        for kind, layers in shape.groups:
            if whole:
                assert self.whole is None, "layers of one shape"
                self.whole = both(kind, len(layers))
            for store, start in zip(self._stores, blocks, strict=True):
                if self.whole is None:
                    store.append(both(kind, len(layers)))
                else:
                    keys, values = (t[..., start : start + self.width, :] for t in self.whole)
                    store.append((keys, values))
            for index, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = (
                    [store[-1][part][index] for store in self._stores] for part in (0, 1)
                )
        self.states = {
            layer: RecurrentState(*(_zeros((places, *part.shape[1:]), part.dtype, device) for part in state))
            for layer, state in shape.states.items()
        }
        """State after the last token of each place, by layer."""

    def spans(self, tokens: int) -> list[tuple[int, int]]:
        """Return ``(block, tokens in it)`` of a sequence's first ``tokens`` tokens."""
        return [(block, min(self.width, tokens - start)) for block, start in enumerate(range(0, tokens, self.width))]

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move sequences to other places at once: a source may be the target of another move.

        Args:
            moves: ``(source, target, tokens)`` of each sequence; no target occurs twice.
        """
        for block, tensors in enumerate(self._stores):
            here = [move for move in moves if move[2] > block * self.width]
            if not here:
                break
            used = min(self.width, max(tokens for *_, tokens in here) - block * self.width)
            sources, targets = self._places(here)
            for store in (part[..., :used, :] for pair in tensors for part in pair):
                # few layers at a time, because the rows are copied twice
                size = len(here) * store[0, 0].numel() * store.element_size()
                for layers in map(indexable, store.split(max(1, _MOVED // size))):
                    layers[:, targets] = layers[:, sources]
        if moves and self.states:
            sources, targets = self._places(moves)
            for part in (indexable(part) for state in self.states.values() for part in state):
                part[targets] = part[sources]

    def _places(self, moves: Sequence[tuple[int, int, int]]) -> list[Any]:
        return [indexable(torch.tensor(column, device=self._device)) for column in list(zip(*moves, strict=True))[:2]]


def indexable(stored: Tensor) -> Any:
    """Return an array over the same memory: numpy copies rows by index up to 30 times faster than torch.

    Its numbers are only good for copies. On another device than a CPU, return the tensor.
    """
    if stored.device.type != "cpu":
        return stored
    # numpy has no bfloat16
    return stored.view(torch.int16).numpy() if stored.element_size() == 2 else stored.numpy()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU they are fresh pages of the system, which take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNED, dtype=np.uint8)
    # numpy does not align to cache lines, so skip to the next one.
    start = -raw.ctypes.data % _ALIGNED
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


class SlotCache:
    """Preallocated keys and values: prompts in slots, responses in rows.

    Both are numbered densely: the caller keeps slots ``0 .. g-1`` and rows ``0 .. n-1`` in use, with rows by descending
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
        ahead: int = 0,
    ) -> None:
        """Allocate the cache.

        Args:
            shape: Memory layout of a token.
            rows: Largest number of responses, and of prompts, because each response may have its own.
            prompt_capacity, response_capacity: Tokens of the longest prompt and response.
            device: Device of the cache.
            whole: Make each store one tensor, so that an index on the device can address a token (`StaticDecoder`). On
                a CPU separate blocks are read faster.
            ahead: Largest number of prompt tokens before a response in its row, within the capacity.
        """
        self.shape = shape
        self.rows = rows
        self.device = device
        self.ahead = ahead
        self.prompts = BlockStore(shape, rows, prompt_capacity, _PROMPT_BLOCK, device, whole=whole)
        self.responses = BlockStore(shape, rows, response_capacity, _RESPONSE_BLOCK, device, whole=whole)
        self._sharing: tuple[bytes, Sharing] | None = None
        self._lists: dict[tuple[int, int], Tensor] = {}
        self._addressed: Tensor | None = None

    def addressed(self) -> tuple[Tensor, tuple[int, int]]:
        """Return where kernels find keys and values. It never changes.

        Returns:
            ``[layers, 4]`` addresses of lists, which hold the addresses of a layer's blocks: keys and values of
            prompts, then of responses; and the tokens of a block of prompts and of responses.
        """
        if self._addressed is None:
            stores = [part for store in (self.prompts, self.responses) for part in (store.keys, store.values)]
            self._addressed = torch.zeros(max(self.shape.attending) + 1, len(stores), dtype=torch.int64)
            for layer in self.shape.attending:
                for part, blocks in enumerate(stores):
                    found = torch.tensor([block.data_ptr() for block in blocks[layer]])
                    self._lists[layer, part] = found  # the address is good for the life of the tensor
                    self._addressed[layer, part] = found.data_ptr()
        return self._addressed, (self.prompts.width, self.responses.width)

    def sharing(self, owners: Integers) -> Sharing:
        """Return the table of rows with these owners. It is computed when they differ from those of the last call."""
        key = owners.tobytes()
        if self._sharing is None or self._sharing[0] != key:
            self._sharing = key, Sharing.of(owners, self.device)
        return self._sharing[1]


class PrefillAttention:
    """Causal attention within each packed prompt. It stores keys and values in the prompt's slot.

    Args:
        cache: The cache.
        runs: Length of neighbouring prompts of equal length, and their slots, in the order of the pack.
    """

    def __init__(self, cache: SlotCache, runs: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._store = cache.prompts
        self._runs = [(length, list(slots)) for length, slots in runs]
        self._longest = max(length for length, _ in runs)

    @cached_property
    def _kernels(self) -> CpuRow:
        return CpuRow([length for length, slots in self._runs for _ in slots])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        # Prompts of one length are attended in one call, without padding.
        grouped = query.shape[1] != key.shape[1]
        served = supports_row(query, value, rules, self._longest)
        outputs: list[Tensor] = []
        sizes = [length * len(slots) for length, slots in self._runs]
        packed = zip(*(t[0].split(sizes, dim=1) for t in (query, key, value)), strict=True)
        for (length, slots), parts in zip(self._runs, packed, strict=True):
            # [heads, tokens, dim] -> [prompts, heads, length, dim]
            q, k, v = (part.unflatten(1, (len(slots), length)).transpose(0, 1) for part in parts)
            for block, used in self._store.spans(length):
                part = slice(block * self._store.width, block * self._store.width + used)
                self._store.keys[layer][block][slots, :, :used] = k[:, :, part]
                self._store.values[layer][block][slots, :, :used] = v[:, :, part]
            if served:
                continue
            if rules.plain(length) and not is_widened(q):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
                ).transpose(1, 2)
            else:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                out = attend_rows(q, k, v, scaling, rules)
            outputs.append(out.flatten(0, 1))
        return self._kernels.attend(query, key, value, scaling, rules.exact) if served else torch.cat(outputs)[None]

    def carry(self, layer: int, hidden: Tensor, run: LayerFunction) -> Tensor:
        outputs: list[Tensor] = []
        for (length, slots), rows in zip(self._runs, hidden[0].split([n * len(s) for n, s in self._runs]), strict=True):
            out, state = run(rows.unflatten(0, (len(slots), length)), None)
            for kept, new in zip(self._store.states[layer], state, strict=True):
                kept[slots] = new
            outputs.append(out.flatten(0, 1))
        return torch.cat(outputs)[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBlock:
    """Block of keys that some of the rows see."""

    index: int  # index in its store
    places: int  # number of slots or rows, from the first, for which it is read
    columns: slice  # its columns in the score table
    mask: Tensor | None  # ``[rows, 1, 1, width]`` 0 or -inf, added to the scores; None if every row sees every key


def shared_places(owners: Integers, prompts: int, members: int) -> tuple[Integers, Integers]:
    """Return a table of ``prompts`` prompts by ``members`` rows, as two index arrays.

    Returns:
        ``[rows]`` place of each row in the table, and ``[prompts * members]`` row of each place (0 for an empty place).
    """
    rows, counts = len(owners), np.bincount(owners, minlength=prompts)
    # Rows by prompt, and in the given order within a prompt.
    order = np.argsort(owners, kind="stable")
    starts = np.cumsum(counts) - counts
    place = np.empty(rows, dtype=np.int64)
    place[order] = owners[order] * members + np.arange(rows) - np.repeat(starts, counts)
    # Empty places repeat row 0, which is computed with the others and never read.
    filled = np.zeros(prompts * members, dtype=np.int64)
    filled[place] = np.arange(rows)
    return place, filled


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Rows that share a prompt: ``prompts`` prompts of at most ``members`` rows each.

    ``place`` and ``filled`` are those of `shared_places`, None if the rows are already in the order of their places.
    """

    prompts: int
    members: int
    place: Tensor | None
    filled: Tensor | None

    @staticmethod
    def of(owners: Integers, device: torch.device) -> Sharing:
        """Return the table of rows with these owners."""
        counts = np.bincount(owners)
        prompts, members = len(counts), int(counts.max())
        place, filled = shared_places(owners, prompts, members)
        # Every group is complete and in order, so nothing needs to be copied.
        if len(filled) == len(owners) and (place == np.arange(len(owners))).all():
            return Sharing(prompts=prompts, members=members, place=None, filled=None)
        to, back = (torch.from_numpy(x).to(device) for x in (place, filled))
        return Sharing(prompts=prompts, members=members, place=to, filled=back)

    def gather(self, x: Tensor) -> Tensor:
        """Convert ``[rows, kv_heads, heads, c]`` to ``[prompts * kv_heads, members * heads, c]``."""
        x = x if self.filled is None else x.index_select(0, self.filled)
        if self.members == 1:
            return x.flatten(0, 1)
        return x.unflatten(0, (self.prompts, self.members)).transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def spread(self, x: Tensor, kv_heads: int) -> Tensor:
        """Invert `gather`."""
        x = x.unflatten(0, (self.prompts, kv_heads)).unflatten(2, (self.members, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.place is None else x.index_select(0, self.place)


class Stored(Protocol):
    """Keys and values by layer and block, ``[places, kv_heads, width, dim]`` each."""

    keys: Any  # for each layer index a list
    values: Any


class RowAttention:
    """Attention of one new token per row over blocks of keys. A subclass defines the blocks."""

    _prompts: Sequence[KeyBlock]
    _responses: Sequence[KeyBlock]
    _sharing: Sharing
    _prompt_store: Stored
    _response_store: Stored
    _columns: int
    _wide: torch.dtype
    _reach: int = 0  # tokens of the longest sequence, including the new one
    _scores: Tensor | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        responses, prompts = self._response_store, self._prompt_store
        self._append(layer, key, value)
        q = query[0].transpose(0, 1).unflatten(1, (key.shape[1], -1))  # [n, kv_heads, heads of each, dim]
        exact = math.frexp(scaling)[0] == 0.5  # a power of two scales without rounding
        q = q * scaling if exact else q.contiguous()
        weights = self._weights(layer, q, 1.0 if exact else scaling, rules)
        shared, kv_heads = self._sharing, key.shape[1]
        total: Tensor | None = None
        for block in self._prompts:
            part = shared.gather(weights[..., block.columns].to(q.dtype))
            out = product(part, prompts.values[layer][block.index][: block.places].flatten(0, 1))
            # The sum over blocks is in float32 or wider, whatever the precision of the products.
            total = out.to(self._wide) if total is None else total.add_(out)
        assert total is not None
        total = shared.spread(total, kv_heads)
        for block in self._responses:
            part = weights[: block.places, ..., block.columns].to(q.dtype).flatten(0, 1)
            out = product(part, responses.values[layer][block.index][: block.places].flatten(0, 1))
            total[: block.places] += out.unflatten(0, (-1, kv_heads))
        return total.flatten(1, 2).to(q.dtype)[None]

    def _weights(self, layer: int, q: Tensor, scaling: float, rules: ScoreRules) -> Tensor:
        """Return attention weights ``[n, kv_heads, heads per kv_head, columns]``, in working precision."""
        kv_heads = q.shape[1]
        if self._scores is None or self._scores.shape[:3] != q.shape[:3]:
            # One table for all layers of a step with the same number of heads.
            self._scores = torch.empty(*q.shape[:3], self._columns, dtype=self._wide, device=q.device)
        scores = self._scores
        queries = self._sharing.gather(q)
        for block in self._prompts:
            keys = self._prompt_store.keys[layer][block.index][: block.places].flatten(0, 1)
            found = self._sharing.spread(product(queries, keys.transpose(1, 2)), kv_heads)
            _fill(scores[..., block.columns], found, block.mask)
        rows = q.flatten(0, 1)
        for block in self._responses:
            keys = self._response_store.keys[layer][block.index][: block.places].flatten(0, 1)
            found = product(rows[: block.places * kv_heads], keys.transpose(1, 2)).unflatten(0, (-1, kv_heads))
            _fill(scores[: block.places, ..., block.columns], found, block.mask)
            # The table is uninitialised, so columns that shorter rows do not see must get no weight.
            if block.places < len(scores):
                scores[block.places :, ..., block.columns] = float("-inf")
        if scaling != 1.0:
            scores *= scaling
        if rules.softcap is not None:
            # Hidden scores have become minus the cap, and are hidden again below.
            scores.div_(rules.softcap).tanh_().mul_(rules.softcap)
        if rules.softcap is not None or rules.cuts(self._reach):
            scores.masked_fill_(self._hidden(rules), float("-inf"))
        if rules.sinks is not None:
            sinks = rules.sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        return scores.softmax(-1)

    def _hidden(self, rules: ScoreRules) -> Tensor:
        """Return the columns of the table whose keys a row does not see, ``[n, 1, 1, columns]``."""
        raise NotImplementedError

    def _append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write ``[1, kv_heads, n, dim]`` after each row's response."""
        raise NotImplementedError


class DecodeAttention(RowAttention):
    """Attention of one new token for each of the rows ``0 .. n-1``. Its key and value are appended to the row's
    response.
    """

    def __init__(
        self, cache: SlotCache, *, owners: Integers, prompt_lengths: Integers, response_lengths: Integers
    ) -> None:
        """Prepare a step.

        Args:
            cache: Holds ``response_lengths[r]`` tokens of a response in row r.
            owners: ``[n]`` slot of each row's prompt. All slots up to the largest are read.
            prompt_lengths: ``[n]`` tokens of that prompt.
            response_lengths: ``[n]`` in descending order.
        """
        assert (np.diff(response_lengths) <= 0).all(), "rows must be ordered by descending response length"
        assert response_lengths[0] < cache.responses.capacity, (response_lengths[0], cache.responses.capacity)
        self._prompt_store, self._response_store = cache.prompts, cache.responses
        self._rows, self._width = len(owners), cache.responses.width
        self._device = cache.device
        dtype = cache.shape.dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._cache, self._owners, self._lengths = cache, owners, (prompt_lengths, response_lengths)
        self._reach = int((prompt_lengths + response_lengths).max()) + 1
        self._hides: dict[tuple[int | None, int | None], Tensor] = {}
        self._kernel = (
            DecodeKernel(*cache.addressed(), owners, prompt_lengths, response_lengths)
            if has_both(dtype, cache.device, cache.shape.head_dim) and cache.prompts.whole is None
            else None
        )
        self._columns = 0

    def _lay_out(self) -> None:
        """Divide the keys into blocks. Kernels need none."""
        (prompts, held), cache = self._lengths, self._cache
        self._sharing = cache.sharing(self._owners)
        self._prompts = self._blocks(prompts, cache.prompts.width, 0, self._sharing.prompts)
        # The columns of responses follow those of prompts, so that one softmax covers both.
        begin = self._prompts[-1].columns.stop
        # + 1 because the new token sees itself.
        self._responses = self._blocks(held + 1, cache.responses.width, begin, None)
        self._columns = self._responses[-1].columns.stop
        # (block, rows, offset) of the new tokens. The offset is one number if all rows of a block agree.
        self._ends: list[tuple[int, slice, int | tuple[Any, ...]]] = []
        blocks, first = held // self._width, 0
        for block in range(int(blocks[0]), int(blocks[-1]) - 1, -1):
            stop = int(np.count_nonzero(blocks >= block))  # neighbours, since lengths descend
            if stop == first:
                continue
            offsets = held[first:stop] - block * self._width
            places = (torch.from_numpy(column).to(self._device) for column in (np.arange(first, stop), offsets))
            same = offsets[0] == offsets[-1]
            where = int(offsets[0]) if same else tuple(map(indexable, places))
            self._ends.append((block, slice(first, stop), where))
            first = stop

    def kernel_for(self, rules: ScoreRules) -> DecodeKernel | None:
        """Return the kernel that attends by these rules, None if torch does."""
        return self._kernel if rules.plain(self._reach) else None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        kernel = self.kernel_for(rules)
        if kernel is not None:
            return kernel(layer, query, key, value, scaling)
        if not self._columns:
            self._lay_out()
        return super().attend(layer, query, key, value, scaling, rules)

    def carry(self, layer: int, hidden: Tensor, run: LayerFunction) -> Tensor:
        _, held = self._lengths
        kept, after_prompt = self._cache.responses.states[layer], self._cache.prompts.states[layer]
        begun = int((held > 0).sum())  # the first rows, because rows are ordered by descending length
        owners = torch.from_numpy(self._owners[begun:].astype(np.int64)).to(self._device)
        given = RecurrentState(*(torch.cat((r[:begun], p[owners])) for r, p in zip(kept, after_prompt, strict=True)))
        out, state = run(hidden[0][:, None], given)
        for store, new in zip(kept, state, strict=True):
            store[: self._rows] = new
        return out[:, 0][None]

    def _hidden(self, rules: ScoreRules) -> Tensor:
        key = (rules.window, rules.chunk)
        if key not in self._hides:
            prompt, held = (lengths[:, None] for lengths in self._lengths)
            begin = self._prompts[-1].columns.stop
            before, after = np.arange(begin)[None], np.arange(self._columns - begin)[None]
            seen = np.concatenate(
                (
                    (before < prompt) & rules.seen(prompt + held, before),
                    (after <= held) & rules.seen(prompt + held, prompt + after),
                ),
                axis=1,
            )
            self._hides[key] = torch.from_numpy(~seen).to(self._device)[:, None, None, :]
        return self._hides[key]

    def _blocks(self, lengths: Integers, width: int, begin: int, places: int | None) -> list[KeyBlock]:
        """Return the blocks of the longest of ``lengths``, for ``places`` places or (None) for the rows that reach
        them.
        """
        found: list[KeyBlock] = []
        for index, start in enumerate(range(0, int(lengths.max()), width)):
            # Rows are ordered by descending length, so the first ones reach a block.
            reached = self._rows if places is not None else int((lengths > start).sum())
            seen = np.minimum(lengths[:reached] - start, width)
            mask = None
            # A block that every row fills needs no mask.
            if seen.min() < width:
                # One row of the mask serves all rows of one length.
                seen = seen[:1] if (seen == seen[0]).all() else seen
                hidden = np.where(np.arange(width) < seen[:, None], np.float32(0), np.float32(-np.inf))
                mask = torch.from_numpy(hidden).to(self._device, self._wide)[:, None, None, :]
            columns = slice(begin + start, begin + start + width)
            found.append(KeyBlock(index=index, places=places or reached, columns=columns, mask=mask))
        return found

    def _append(self, layer: int, key: Tensor, value: Tensor) -> None:
        for blocks, new in ((self._response_store.keys[layer], key), (self._response_store.values[layer], value)):
            by_row = new[0].transpose(0, 1)
            for block, rows, where in self._ends:
                if isinstance(where, int):
                    blocks[block][rows, :, where] = by_row[rows]
                else:
                    index, offsets = where
                    indexable(blocks[block])[index, :, offsets] = indexable(by_row[rows])


def _fill(target: Tensor, scores: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        target.copy_(scores)
    else:
        torch.add(scores, mask, out=target)
