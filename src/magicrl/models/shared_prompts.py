"""A group's prompt once: its responses attend to one copy of it instead of each carrying its own.

In RL the M responses of a group have the same prompt. Without sharing it is computed M times, forward and backward.
Here a micro-batch is the row ``[prompt 0, prompt 1, ..., response 0, response 1, ...]``: linear layers see each prompt
once, and attention lets every response see its prompt and itself. Log-probs and gradients are those of the responses
packed each with its own prompt, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.lean import widened_attention
from magicrl.models.packing import (
    WIDENED_UP_TO,
    PackedBatch,
    PackedContext,
    Reorder,
    check_samples,
    padded_layout,
    ranges,
    similar_lengths,
)
from magicrl.records import TrainSample

PAYS_FROM = 0.1
"""Share of all tokens that sharing has to save: below it the plain layout's fewer attention calls win."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedLayout:
    """Which response belongs to which prompt, in tokens.

    Attributes:
        prompts: tokens of each distinct prompt.
        owners: ``[S]`` index of each response's prompt.
        responses: ``[S]`` input tokens of each response: all but its last, which predicts nothing; may be 0.
    """

    prompts: tuple[int, ...]
    owners: tuple[int, ...]
    responses: tuple[int, ...]

    @property
    def saved(self) -> float:
        """Share of the tokens of the plain layout that this one does without."""
        alone = sum(self.prompts[owner] for owner in self.owners)
        return (alone - sum(self.prompts)) / (alone + sum(self.responses))


def shared_layout(samples: Sequence[TrainSample]) -> tuple[SharedLayout, list[TrainSample]]:
    """The layout of ``samples``, and for each distinct prompt a sample that has it."""
    places: dict[bytes, int] = {}
    holders: list[TrainSample] = []
    owners: list[int] = []
    for sample in samples:
        key = sample.prompt_tokens.tobytes()
        if key not in places:
            places[key] = len(holders)
            holders.append(sample)
        owners.append(places[key])
    layout = SharedLayout(
        prompts=tuple(len(holder.prompt_tokens) for holder in holders),
        owners=tuple(owners),
        responses=tuple(len(sample.tokens) - 1 for sample in samples),
    )
    return layout, holders


def families(samples: Sequence[TrainSample], token_budget: int) -> list[list[int]]:
    """Samples that share a prompt, as indices; a family of more than ``token_budget`` tokens is cut.

    A family's tokens are its prompt's once and its responses'.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_tokens.tobytes(), []).append(index)
    found: list[list[int]] = []
    for members in by_prompt.values():
        used = token_budget + 1
        for index in members:
            response = len(samples[index].tokens)
            if used + response > token_budget:
                found.append([])
                used = len(samples[index].prompt_tokens)
            found[-1].append(index)
            used += response
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """Responses of similar length whose prompts are equally long.

    Attributes:
        width: tokens to which its responses are padded.
        prompt: tokens of each prompt.
        prompt_tokens: ``[G * prompt]`` where the distinct prompts' tokens stand in the row.
        owners: ``[rows]`` index of each response's prompt among them.
        mask: ``[width, prompt + width]`` what a response token sees.
    """

    width: int
    prompt: int
    prompt_tokens: Tensor
    owners: Tensor
    mask: Tensor


def packed_with_shared_prompts(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> PackedBatch:
    """The micro-batch of ``samples`` with every distinct prompt once.

    Raises:
        ValueError: a prompt or a response is empty.
    """
    check_samples(samples)
    layout, holders = shared_layout(samples)
    prompts, owners, inputs = (np.array(x) for x in (layout.prompts, layout.owners, layout.responses))
    ends = np.cumsum(prompts)
    starts = int(ends[-1]) + np.cumsum(inputs) - inputs
    positions = [np.arange(n) for n in prompts]
    positions += [prompts[owner] + np.arange(n) for owner, n in zip(owners, inputs, strict=True)]
    # a response's first token is predicted by its prompt's last, the others by the response itself
    predict = [np.r_[ends[o] - 1, s : s + n] for o, s, n in zip(owners, starts, inputs, strict=True)]
    arrays = (
        np.concatenate([h.prompt_tokens for h in holders] + [s.tokens[:-1] for s in samples])[None],
        np.concatenate(positions)[None],
        np.concatenate(predict),
        np.concatenate([s.tokens for s in samples]),
    )
    tensors = [torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays]
    return PackedBatch(
        input_ids=tensors[0],
        position_ids=tensors[1],
        attention=SharedPromptContext(layout, device),
        predict_index=tensors[2],
        targets=tensors[3],
        response_lengths=tuple(len(s.tokens) for s in samples),
    )


class SharedPromptContext:
    """Attention of a row of prompts followed by responses; an ``AttentionContext``.

    Args:
        layout: who belongs to whom.
        device: where the row lives.
    """

    def __init__(self, layout: SharedLayout, device: torch.device | str = "cpu") -> None:
        prompts, owners, sizes = (np.array(x) for x in (layout.prompts, layout.owners, layout.responses))
        self.longest = int((prompts[owners] + sizes).max())
        """Tokens of the longest sequence: what a sliding window has to be compared with."""
        self._own = PackedContext(layout.prompts, device)
        self._prompt_tokens = int(prompts.sum())
        prompt_starts = np.cumsum(prompts) - prompts
        buckets, members = [], list[int]()
        for part in _parts(prompts[owners], sizes):
            buckets.append(_bucket(part, prompts, prompt_starts, owners, sizes, device))
            members += part
        self._buckets: list[_Bucket] = buckets
        kept = np.array(members, dtype=np.int64)
        widths = np.repeat([b.width for b in buckets], [len(b.owners) for b in buckets]).astype(np.int64)
        self._source, self._place = padded_layout(sizes, kept, widths, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See ``AttentionContext.attend``."""
        cut = self._prompt_tokens
        own = self._own.attend(layer, query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], scaling)
        if not self._buckets:
            return own
        padded = [
            cast(Tensor, Reorder.apply(x[0, :, cut:].transpose(0, 1), self._source, self._place, False))
            for x in (query, key, value)
        ]
        prompt_key, prompt_value = (x[0, :, :cut].transpose(0, 1) for x in (key, value))
        sizes = [len(bucket.owners) * bucket.width for bucket in self._buckets]
        outputs = [
            _attend(bucket, q, k, v, prompt_key, prompt_value, scaling)
            for bucket, q, k, v in zip(self._buckets, *(x.split(sizes) for x in padded), strict=True)
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        responses = cast(Tensor, Reorder.apply(joined, self._place, self._source, True))
        return torch.cat((own, responses[None]), dim=1)


def _parts(prompts: NDArray[Any], sizes: NDArray[Any]) -> list[list[int]]:
    """Responses to attend together: prompts equally long, lengths similar; empty ones are left out."""
    found: list[list[int]] = []
    for length in sorted(set(prompts.tolist())):
        members = np.flatnonzero((prompts == length) & (sizes > 0))
        found += [[int(members[i]) for i in part] for part in similar_lengths(sizes[members].tolist())]
    return found


def _bucket(
    part: Sequence[int],
    prompts: NDArray[Any],
    prompt_starts: NDArray[Any],
    owners: NDArray[Any],
    sizes: NDArray[Any],
    device: torch.device | str,
) -> _Bucket:
    distinct, among = np.unique(owners[list(part)], return_inverse=True)
    prompt, width = int(prompts[distinct[0]]), int(sizes[list(part)].max())
    tokens = ranges(prompt_starts[distinct], prompts[distinct])
    seen = np.arange(prompt + width)[None] <= prompt + np.arange(width)[:, None]
    return _Bucket(
        width=width,
        prompt=prompt,
        prompt_tokens=torch.from_numpy(tokens).to(device),
        owners=torch.from_numpy(among.astype(np.int64)).to(device),
        mask=torch.from_numpy(seen).to(device),
    )


def _attend(
    bucket: _Bucket,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    scaling: float,
) -> Tensor:
    """``[rows * width, heads, head_dim]``, as ``query`` is."""
    rows = len(bucket.owners)
    keys, values = (
        torch.cat((_prompt_rows(whole, bucket), part.unflatten(0, (rows, bucket.width))), dim=1)
        for whole, part in ((prompt_key, key), (prompt_value, value))
    )
    queries = query.unflatten(0, (rows, bucket.width))
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and bucket.width <= WIDENED_UP_TO:
        return widened_attention(queries, keys, values, scaling, mask=bucket.mask).flatten(0, 1)
    queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=bucket.mask,
        scale=scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _prompt_rows(whole: Tensor, bucket: _Bucket) -> Tensor:
    """``[rows, prompt, kv_heads, head_dim]``: each response's prompt."""
    distinct = whole.index_select(0, bucket.prompt_tokens).unflatten(0, (-1, bucket.prompt))
    return cast(Tensor, _Spread.apply(distinct, bucket.owners))


class _Spread(torch.autograd.Function):
    """``x[owners]`` whose backward pass sums in float32 and in a fixed order (an indexed add on a GPU has none)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owners: Tensor) -> Tensor:
        ctx.save_for_backward(owners)
        ctx.count = x.shape[0]
        return x.index_select(0, owners)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (owners,) = ctx.saved_tensors
        (grad,) = grads
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        belongs = (owners[None] == torch.arange(ctx.count, device=owners.device)[:, None]).to(wide)
        return (belongs @ grad.flatten(1).to(wide)).unflatten(1, grad.shape[1:]).to(grad.dtype), None
