"""One decoding step on buffers of fixed shape and place, so that a CUDA graph can hold it.

A step of the ordinary path launches some tens of kernels a layer; where each takes microseconds, launching them is most
of the step. A CUDA graph launches all of them at once, but it repeats exactly what was captured: the same shapes, the
same addresses, no look at the host in between. So shapes are rounded up to a few (`StepShape`), what differs from step
to step (tokens, lengths, which rows share a prompt) is read from buffers on the device, and masks come from lengths
there.

Rounding up costs reading: rows to the next power of two, lengths to the next of 64, 96, 128, 192, 256, 384, ... tokens,
the longest eighth, quarter and half of the rows apart, so that a few long rows are not paid for by all.
The rows beyond those in use write to place 0 of rows of the cache that nobody has, and their logits are cut off.

On a CPU, and in tests, the very same step runs without being captured. Captured on a GPU it is not proven yet.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.decode_attention import Block, Integers, RowAttention, Sharing, shared_places
from magicrl.models.decoder import FusedDecoder
from magicrl.models.slot_cache import SlotCache

_log = logging.getLogger(__name__)
_LEAST = 64  # tokens: the shortest length that lengths are rounded up to
_TIERS = 4  # all rows, the longest half, quarter, eighth
_KEPT_GRAPHS = 128  # of a cache; the one that was not used for longest goes
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # the others look at the positions on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """All that the kernels of a step are chosen by.

    Attributes:
        rows: of the pass.
        prompts: slots that are read.
        members: rows of one prompt at most.
        prompt_tokens: read of each prompt.
        tiers: ``(rows, tokens)``: the first ``rows`` rows are read up to ``tokens`` of their responses; fewer and fewer
            rows, further and further.
    """

    rows: int
    prompts: int
    members: int
    prompt_tokens: int
    tiers: tuple[tuple[int, int], ...]

    @staticmethod
    def of(cache: SlotCache, owners: Integers, prompt_lengths: Integers, response_lengths: Integers) -> StepShape:
        """The shape that holds these rows; arguments as of `magicrl.models.decode_attention.DecodeAttention`."""
        assert cache.prompts.whole is not None, "made for caches of whole stores"
        assert cache.responses.whole is not None, "made for caches of whole stores"
        counts = np.bincount(owners)
        rows = min(_power_of_two(len(owners)), cache.rows)
        tiers: list[tuple[int, int]] = []
        reached, widest = rows, cache.responses.whole[0].shape[3]
        for tier in range(_TIERS):
            first = 0 if tier == _TIERS - 1 else reached // 2  # the longest row that is read no further
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
        """Logits ``[n, V]`` after one more token for each row; they are overwritten by the next call.

        Args:
            cache: of whole stores.
            tokens: ``[n]`` the token to feed each row.
            owners, prompt_lengths, held: as of `magicrl.models.decode_attention.DecodeAttention`.
        """
        logits, shape = self._room(cache), StepShape.of(cache, owners, prompt_lengths, held)
        steps = self._steps.setdefault(cache, OrderedDict())
        step = steps.get(shape)
        if step is None:
            step = steps[shape] = _Step(self._decoder, cache, shape, logits)
            if len(steps) > _KEPT_GRAPHS:
                steps.popitem(last=False)
        steps.move_to_end(shape)
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
            head = self._model.get_output_embeddings().weight
            self._logits = torch.zeros(cache.rows, len(head), dtype=head.dtype, device=head.device)
            self._steps.clear()  # they write to the old one
        return self._logits

    def _capture(self, step: _Step) -> None:
        """Capture ``step``, whose buffers are filled: the rehearsal writes what the replay writes again.

        A graph is a matter of speed. Where a driver or an operator refuses to be captured, steps run as they are.
        """
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
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
