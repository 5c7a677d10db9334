"""Sequences of different lengths in one row of tokens without padding, and the attention that keeps them apart.

Decoders that follow transformers' attention interface (Llama, Qwen2, Qwen3, Gemma, SmolLM, ...) call a registered
attention function, and pass unknown keyword arguments of ``forward`` on to it. magicrl registers one under the name
``magicrl``, and the keyword argument ``attention_context`` defines what it computes. No model is reimplemented: linear
layers see ``[1, tokens, d]``, and only the context knows the bounds of sequences.

`PackedContext` has whole sequences one after the other, with positions restarting at each. `SharedPromptContext` has
the row ``[prompt 0, prompt 1, ..., response 0, response 1, ...]``, in which a prompt is computed once for all of its
responses. Its log-probs and gradients equal those of separately packed samples up to rounding. Both compute a layer in
one call of a kernel for rows (`magicrl.models.attention`) if it supports the layer, else in
buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from magicrl.models.attention import (
    PLAIN,
    ScoreRules,
    VarlenRow,
    attend_rows,
    capability_of,
    rules_of,
    supports_row,
    supports_varlen,
)
from magicrl.models.cpu_rows import CpuRow
from magicrl.models.recurrent import LayerFunction, RecurrentState, queries_in_place
from magicrl.records import ExpertArray, TrainSample

ATTENTION_NAME = "magicrl"


class AttentionContext(Protocol):
    """Definition of attention in the current forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        """Attend within a layer.

        Args:
            layer: Index of the layer.
            query: ``[1, heads, tokens, head_dim]``, with rotary embedding, as ``key``.
            key, value: ``[1, kv_heads, tokens, head_dim]``.
            scaling: Factor on the scores.
            rules: Further rules of the layer for its scores.

        Returns:
            ``[1, tokens, heads, head_dim]``.
        """
        ...


@torch.compiler.disable  # Python selects the kernel by the row's sequences
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    context = cast("AttentionContext | None", kwargs.get("attention_context"))
    if context is None:
        raise ValueError(
            "a model with magicrl's attention needs attention_context=...; load the model with "
            "attn_implementation='sdpa' to use it outside magicrl"
        )
    # rho compares two log-probs of one distribution. With dropout there would be two.
    if dropout:
        raise ValueError(f"attention dropout must be 0 in magicrl, the model's config says {dropout}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = cast(int, module.layer_idx)
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = queries_in_place(module, query, kwargs.get("row_positions"))
    rules = rules_of(module, attention_mask, kwargs)
    return context.attend(layer, query, key, value, scale, rules), None


def _no_mask(*_args: Any, local_size: int | None = None, **kwargs: Any) -> int | None:
    """Return how many keys a query sees, or None for all. transformers passes it on as the mask of the layer.

    The context knows the visible keys, so the rest of the mask is not needed.
    """
    if "allow_is_bidirectional_skip" in kwargs:
        raise ValueError(
            "this model's attention looks ahead (use_bidirectional_attention or is_causal=false in its config), so it "
            "cannot sample token by token; use a causal language model"
        )
    return local_size


def register_attention() -> None:
    """Register ``attn_implementation="magicrl"`` with transformers. Repeated calls are safe."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


MAX_ATTENTION_PADDING = 0.15
"""Largest share of padding in a bucket of the attention."""


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Split samples of these lengths into micro-batches of at most ``token_budget`` tokens, longest first.

    Samples of similar length share a micro-batch, so that their attention needs little padding. Of all such splits with
    the smallest number of micro-batches, this is the one whose largest micro-batch is smallest. A sample is never
    split, and one above the budget has its own micro-batch. The plan depends only on the arguments.

    Example:
        >>> plan_micro_batches([5, 3, 9, 2, 3], token_budget=8)
        [[2], [0, 1], [3, 4]]
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be >= 1, got {token_budget}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # Longest first, so these are the first of the order.
    oversized = [[i] for i in order if lengths[i] > token_budget]
    rest = order[len(oversized) :]
    if not rest:
        return oversized
    # Filling to the budget gives the smallest number. Bisection then finds the smallest capacity with that number.
    best = _fill(rest, lengths, token_budget)
    low, high = lengths[rest[0]], token_budget
    while low < high:
        middle = (low + high) // 2
        trial = _fill(rest, lengths, middle)
        if len(trial) <= len(best):
            best, high = trial, middle
        else:
            low = middle + 1
    return oversized + [sorted(part) for part in best]


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Split ``order`` into consecutive parts, each filled up to the capacity."""
    parts: list[list[int]] = []
    # Starts as full, so that the first sample opens a part.
    used = capacity
    for index in order:
        if used + lengths[index] > capacity:
            parts.append([])
            used = 0
        parts[-1].append(index)
        used += lengths[index]
    return parts


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch as the model reads it: N input tokens and R response tokens over all samples.

    The last token of a sample is not an input, because nothing is predicted from it.

    Example: prompts of 2 and 1 tokens, responses of 1 and 2: two sequences of 2, predict_index [1, 2, 3].
    """

    input_ids: Tensor  # ``[1, N]`` int64
    position_ids: Tensor  # ``[1, N]`` int64, restarting at 0 in each sequence
    attention: AttentionContext  # keeps every token to its own sequence
    predict_index: Tensor  # ``[R]`` int64, input positions whose next token is a response token
    targets: Tensor  # ``[R]`` int64, those response tokens, sample after sample
    response_lengths: tuple[int, ...]  # response tokens of each sequence; their sum is R
    experts: Tensor | None = None  # ``[N, routers, k]`` int64, the sampler's choices; None if not recorded

    @staticmethod
    def of(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> PackedBatch:
        """Pack the samples in their order, each with its own prompt.

        Raises:
            ValueError: A prompt or a response is empty.
        """
        check_samples(samples)
        responses = np.array([len(s.tokens) for s in samples])
        lengths = np.array([len(s) for s in samples]) - 1
        starts = np.cumsum(lengths) - lengths
        pieces = [piece for s in samples for piece in (s.prompt_tokens, s.tokens[:-1])]
        # The prompt's last token predicts the response's first: starts + (P + R - 1) - R.
        first_predicted = starts + lengths - responses
        return _packed(
            np.concatenate(pieces),
            np.arange(lengths.sum()) - np.repeat(starts, lengths),
            ranges(first_predicted, responses),
            samples,
            PackedContext(lengths.tolist(), device),
            [_experts_of(sample) for sample in samples],
            device,
        )


def _experts_of(sample: TrainSample) -> ExpertArray | None:
    """Return the recorded choices of a sample's input tokens, ``[P + T - 1, routers, k]``."""
    if sample.experts is None:
        return None
    # The sampler never read the tokens of an observation that ends an episode. They have no loss.
    missing = len(sample) - 1 - len(sample.experts)
    return np.pad(sample.experts, ((0, max(0, missing)), (0, 0), (0, 0)), mode="edge")[: len(sample) - 1]


def _packed(
    tokens: NDArray[Any],
    positions: NDArray[Any],
    predict: NDArray[Any],
    samples: Sequence[TrainSample],
    attention: AttentionContext,
    experts: Sequence[ExpertArray | None],
    device: torch.device | str,
) -> PackedBatch:
    recorded = [part for part in experts if part is not None]
    if recorded and len(recorded) < len(experts):
        raise ValueError("some samples have the sampler's choice of experts and others do not; all need it, or none")
    targets = np.concatenate([sample.tokens for sample in samples])
    arrays = (tokens[None], positions[None], predict, targets)
    input_ids, position_ids, predict_index, wanted = (torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention=attention,
        predict_index=predict_index,
        targets=wanted,
        response_lengths=tuple(len(sample.tokens) for sample in samples),
        experts=torch.from_numpy(np.concatenate(recorded).astype(np.int64)).to(device) if recorded else None,
    )


def check_samples(samples: Sequence[TrainSample]) -> None:
    """Raise ``ValueError`` where a prompt or a response is empty."""
    for sample in samples:
        if not len(sample.prompt_tokens) or not len(sample.tokens):
            raise ValueError(
                f"sample {sample.sample_index} of group {sample.group_index} has {len(sample.prompt_tokens)} "
                f"prompt and {len(sample.tokens)} response tokens; the learner needs at least one of each"
            )


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenation of ``[s, s+1, ..., s+c-1]`` for each start and count."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(counts.sum())


class _Padding:
    """Conversion of consecutive sequences in a row to right-padded buckets of similar length, and back.

    Args:
        sizes: Tokens of each sequence (0 for one that is in no bucket).
        parts: Sequences of each bucket.
        device: Device of the row.
    """

    def __init__(self, sizes: NDArray[np.int64], parts: Sequence[Sequence[int]], device: torch.device | str) -> None:
        self._shapes = [(len(part), int(sizes[list(part)].max())) for part in parts]
        members = np.array([index for part in parts for index in part], dtype=np.int64)
        widths = np.array([width for rows, width in self._shapes for _ in range(rows)], dtype=np.int64)
        starts, slots = np.cumsum(sizes) - sizes, np.cumsum(widths) - widths
        # Without padding and with the same order, no copies are needed.
        self.in_place = bool((widths == sizes[members]).all() and (slots == starts[members]).all())
        # Padding repeats the last token of its sequence: finite numbers that no real token sees.
        spread = ranges(np.zeros_like(widths), widths)
        source = np.repeat(starts[members], widths) + np.minimum(spread, np.repeat(sizes[members] - 1, widths))
        # Place of each real token among the padded ones, for the way back.
        place = np.empty(int(sizes.sum()), dtype=np.int64)
        place[ranges(starts[members], sizes[members])] = ranges(slots, sizes[members])
        self._source, self._place = (torch.from_numpy(x).to(device) for x in (source, place))

    def buckets(self, x: Tensor, *, in_place: bool = False) -> list[Tensor]:
        """Convert ``[1, heads, tokens, dim]`` to ``[rows, width, heads, dim]`` each. ``in_place`` if nothing moves."""
        packed = x[0].transpose(0, 1)
        padded = packed if in_place else cast(Tensor, Reorder.apply(packed, self._source, self._place, False))
        parts = padded.split([rows * width for rows, width in self._shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def joined(self, outputs: Sequence[Tensor], *, in_place: bool = False) -> Tensor:
        """Invert `buckets`: return ``[1, tokens, heads, dim]``."""
        flat = [output.flatten(0, 1) for output in outputs]
        padded = flat[0] if len(flat) == 1 else torch.cat(flat)
        return (padded if in_place else cast(Tensor, Reorder.apply(padded, self._place, self._source, True)))[None]


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences by descending length, with a new group where padding would exceed its limit."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts: list[list[int]] = []
    padding = 0
    for index in order:
        width = lengths[parts[-1][0]] if parts else 0
        # The first sequence of a bucket is its longest.
        waste = width - lengths[index]
        # + 1 for the bucket including this sequence.
        if not parts or padding + waste > MAX_ATTENTION_PADDING * width * (len(parts[-1]) + 1):
            parts.append([])
            padding = waste = 0
        parts[-1].append(index)
        padding += waste
    return parts


class _Row(ABC):
    """A row of sequences. Each layer is computed by a kernel for rows if one supports it, else in buckets."""

    _longest: int  # keys of the longest sequence
    _device: torch.device | str

    # Made when a layer first needs them.
    @cached_property
    def varlen(self) -> VarlenRow:
        return VarlenRow(*self._sequences(), self._device)

    @cached_property
    def kernels(self) -> CpuRow:
        return CpuRow(*self._sequences())

    @cached_property
    @abstractmethod
    def buckets(self) -> PackedBuckets | SharedBuckets: ...

    @abstractmethod
    def _sequences(self) -> tuple[Sequence[int], Sequence[int] | None, NDArray[np.int64] | None]:
        """Return the first arguments of `VarlenRow`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        if supports_row(query, value, rules, self._longest):
            return self.kernels.attend(query, key, value, scaling, rules.exact)
        widths = query.shape[-1], value.shape[-1]
        if supports_varlen(capability_of(query.device), query.dtype, widths, rules, self._longest):
            return self.varlen.attend(query, key, value, scaling, rules)
        return self.buckets.attend(query, key, value, scaling, rules)

    def carry(self, layer: int, hidden: Tensor, run: LayerFunction) -> Tensor:
        return self.buckets.carry(hidden, run)


class PackedContext(_Row):
    """Causal attention inside each packed sequence of these lengths. An ``AttentionContext`` and a `RecurrentContext`.

    Example: ``model.model(input_ids=..., position_ids=..., use_cache=False, attention_context=context)``.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"packed sequences need at least one token each, got lengths {list(lengths)}")
        self._lengths, self._device, self._longest = lengths, device, max(lengths)

    def _sequences(self) -> tuple[Sequence[int], None, None]:
        return self._lengths, None, None

    @cached_property
    def buckets(self) -> PackedBuckets:
        return PackedBuckets(self._lengths, self._device)


class PackedBuckets:
    """Sequences of similar length in right-padded buckets, with one call of ``scaled_dot_product_attention`` each.

    Under causal attention only padding sees padding on the right. No mask is needed, and values and gradients are those
    of each sequence on its own.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._padding = _Padding(np.array(lengths), similar_lengths(lengths), device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN) -> Tensor:
        """Attend as `AttentionContext` does."""
        padding, stays = self._padding, self._padding.in_place
        parts = zip(*(padding.buckets(x, in_place=stays) for x in (query, key, value)), strict=True)
        return padding.joined([attend_rows(q, k, v, scaling, rules) for q, k, v in parts], in_place=stays)

    def carry(self, hidden: Tensor, run: LayerFunction) -> Tensor:
        """Run a layer with a state as `RecurrentContext` does."""
        padding, stays = self._padding, self._padding.in_place
        # The hidden state of a token is passed as a single head.
        parts = padding.buckets(hidden[:, None], in_place=stays)
        return padding.joined([run(part[:, :, 0], None)[0][:, :, None] for part in parts], in_place=stays)[:, :, 0]


class Reorder(torch.autograd.Function):
    """Rows of ``x`` in another order. The backward pass is a copy too, where ``index_select`` would add.

    Every real token has exactly one place in the packed and in the padded layout. The gradient of one direction is
    therefore the other direction, with nothing in the padding: padded queries get no gradient and pass none to the keys
    that they saw.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, to_packed: bool) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.to_packed = to_packed
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        (grad,) = grads
        if ctx.to_packed:
            padded = grad.new_zeros(len(inverse), *grad.shape[1:])
            return padded.index_copy_(0, index, grad), None, None, None
        return grad.index_select(0, inverse), None, None, None


PAYS_FROM = 0.1
"""Smallest share of tokens that sharing prompts must save. Below it the fewer attention calls of the plain layout
are faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedLayout:
    """Prompts and responses of a micro-batch with shared prompts, in tokens."""

    prompts: tuple[int, ...]  # tokens of each distinct prompt
    owners: tuple[int, ...]  # ``[S]`` index of each response's prompt
    responses: tuple[int, ...]  # ``[S]`` input tokens: all but the last, which predicts nothing; can be 0

    @property
    def saved(self) -> float:
        """Share of the tokens of the plain layout that this one saves."""
        repeated = sum(self.prompts[owner] for owner in self.owners)
        return (repeated - sum(self.prompts)) / (repeated + sum(self.responses))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return prompts, owners and responses as arrays."""
        prompts, owners, responses = (np.array(x, dtype=np.int64) for x in (self.prompts, self.owners, self.responses))
        return prompts, owners, responses


def shared_layout(samples: Sequence[TrainSample]) -> tuple[SharedLayout, list[TrainSample]]:
    """Return the layout of ``samples``, and for each distinct prompt a sample that has it."""
    places: dict[bytes, int] = {}
    holders: list[TrainSample] = []
    owners: list[int] = []
    for sample in samples:
        # By tokens, not by group, so that a prompt of several draws is computed once too.
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
    """Group samples that share a prompt, as indices. A family of more than ``token_budget`` tokens is split.

    The tokens of a family are those of its prompt, once, and of its responses.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_tokens.tobytes(), []).append(index)
    found: list[list[int]] = []
    for members in by_prompt.values():
        # Starts as full, so that the first response opens a part, which holds the prompt once.
        used = token_budget + 1
        for index in members:
            response = len(samples[index].tokens)
            if used + response > token_budget:
                found.append([])
                used = len(samples[index].prompt_tokens)
            found[-1].append(index)
            used += response
    return found


@dataclass(frozen=True, slots=True)
class _SharedBucket:
    """Responses of similar length whose prompts have the same length."""

    prompt: int  # tokens of each prompt
    prompt_tokens: Tensor  # ``[G * prompt]`` places of the distinct prompts' tokens in the row
    owners: Tensor  # ``[rows]`` index of each response's prompt among them
    mask: Tensor  # ``[width, prompt + width]`` visible keys of a response token
    states: Tensor  # ``[rows]`` index of each response's prompt among the states after all prompts

    def with_prompts(self, whole: Tensor, part: Tensor) -> Tensor:
        """Return each response's keys or values after its prompt's, ``[rows, prompt + width, kv_heads, dim]``."""
        distinct = whole.index_select(0, self.prompt_tokens).unflatten(0, (-1, self.prompt))
        return torch.cat((cast(Tensor, _Spread.apply(distinct, self.owners)), part), dim=1)


def packed_with_shared_prompts(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack ``samples`` with every distinct prompt once. Raise ``ValueError`` for an empty sample."""
    check_samples(samples)
    layout, holders = shared_layout(samples)
    prompts, owners, inputs = layout.arrays()
    ends = np.cumsum(prompts)
    starts = int(ends[-1]) + np.cumsum(inputs) - inputs
    positions = [np.arange(n) for n in prompts]
    positions += [prompts[owner] + np.arange(n) for owner, n in zip(owners, inputs, strict=True)]
    # A prompt is computed once, with the expert choices of its first response.
    experts = [None if h.experts is None else h.experts[: len(h.prompt_tokens)] for h in holders]
    experts += [None if (e := _experts_of(s)) is None else e[len(s.prompt_tokens) :] for s in samples]
    # A response's first token is predicted by its prompt's last, the others by the response itself.
    predict = [np.r_[ends[o] - 1, s : s + n] for o, s, n in zip(owners, starts, inputs, strict=True)]
    return _packed(
        np.concatenate([h.prompt_tokens for h in holders] + [s.tokens[:-1] for s in samples]),
        np.concatenate(positions),
        np.concatenate(predict),
        samples,
        SharedPromptContext(layout, device),
        experts,
        device,
    )


class SharedPromptContext(_Row):
    """Attention of a row of prompts followed by responses. An ``AttentionContext`` and a `RecurrentContext`."""

    def __init__(self, layout: SharedLayout, device: torch.device | str = "cpu") -> None:
        self._layout, self._device = layout, device
        prompts, owners, sizes = layout.arrays()
        self._longest = int(np.max(prompts[owners] + sizes))

    def _sequences(self) -> tuple[Sequence[int], Sequence[int], NDArray[np.int64]]:
        prompts, owners, sizes = self._layout.arrays()
        prompt_starts, starts = (np.cumsum(x) - x for x in (prompts, sizes))
        tokens = int(prompts.sum())
        some = sizes > 0  # an empty response has no queries
        owners, sizes, starts = owners[some], sizes[some], tokens + starts[some]
        # For each response the keys of its prompt, then its own.
        pairs = ((prompt_starts[owners], starts), (prompts[owners], sizes))
        behind = ranges(*(np.stack(pair, axis=1).ravel() for pair in pairs))
        queries, keys = (np.r_[prompts, x].tolist() for x in (sizes, prompts[owners] + sizes))
        return queries, keys, np.r_[np.arange(tokens), behind]

    @cached_property
    def buckets(self) -> SharedBuckets:
        return SharedBuckets(self._layout, self._device)


class SharedBuckets:
    """Prompts in buckets of similar length, and responses in buckets whose prompts have the same length."""

    def __init__(self, layout: SharedLayout, device: torch.device | str = "cpu") -> None:
        prompts, owners, sizes = layout.arrays()
        self._own = PackedBuckets(layout.prompts, device)
        self._prompt_tokens = int(prompts.sum())
        prompt_starts = np.cumsum(prompts) - prompts
        self._alike = _AlikePrompts(prompts, prompt_starts, device)
        parts: list[list[int]] = []
        # Prompts of a bucket have the same length, so that one mask serves all of its rows.
        for length in sorted(set(layout.prompts)):
            members = np.flatnonzero((prompts[owners] == length) & (sizes > 0))  # an empty response has no queries
            parts += [members[part].tolist() for part in similar_lengths(sizes[members].tolist())]
        self._padding = _Padding(sizes, parts, device)
        self._buckets: list[_SharedBucket] = []
        for part in parts:
            distinct, among = np.unique(owners[part], return_inverse=True)
            prompt, width = int(prompts[distinct[0]]), int(sizes[part].max())
            arrays = (
                ranges(prompt_starts[distinct], prompts[distinct]),
                among.astype(np.int64),
                # The whole prompt and the token's own past. Padding is to the right of all real tokens.
                np.arange(prompt + width)[None] <= prompt + np.arange(width)[:, None],
                self._alike.place[owners[part]],
            )
            self._buckets.append(_SharedBucket(prompt, *(torch.from_numpy(a).to(device) for a in arrays)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN) -> Tensor:
        """Attend as `AttentionContext` does."""
        cut = self._prompt_tokens
        # A prompt sees only itself, so its hidden states are the same for all of its responses.
        own = self._own.attend(query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], scaling, rules)
        # Responses of one token are not inputs, so the input may consist of prompts only.
        if not self._buckets:
            return own
        keys, values = (x[0, :, :cut].transpose(0, 1) for x in (key, value))
        parts = zip(self._buckets, *(self._padding.buckets(x[:, :, cut:]) for x in (query, key, value)), strict=True)
        outputs = [
            attend_rows(q, bucket.with_prompts(keys, k), bucket.with_prompts(values, v), scaling, rules, bucket.mask)
            for bucket, q, k, v in parts
        ]
        return torch.cat((own, self._padding.joined(outputs)), dim=1)

    def carry(self, hidden: Tensor, run: LayerFunction) -> Tensor:
        """Run a layer with a state as `RecurrentContext` does."""
        cut = self._prompt_tokens
        own, after = self._alike.carry(hidden[0, :cut], run)
        if not self._buckets:
            return own[None]
        parts = zip(self._buckets, self._padding.buckets(hidden[:, None, cut:]), strict=True)
        outputs: list[Tensor] = []
        for bucket, part in parts:
            state = RecurrentState(*(cast(Tensor, _Spread.apply(x, bucket.states)) for x in after))
            outputs.append(run(part[:, :, 0], state)[0][:, :, None])
        return torch.cat((own[None], self._padding.joined(outputs)[:, :, 0]), dim=1)


class _AlikePrompts:
    """Batches of prompts of one length. Without padding, the state after the last token is the prompt's."""

    def __init__(self, sizes: NDArray[np.int64], starts: NDArray[np.int64], device: torch.device | str) -> None:
        order = np.argsort(sizes, kind="stable")
        self.place = np.argsort(order)
        """``[prompts]`` index of each prompt's state among those that `carry` returns."""
        lengths, counts = np.unique(sizes, return_counts=True)
        self._shapes = [(int(count), int(length)) for count, length in zip(counts, lengths, strict=True)]
        source = ranges(starts[order], sizes[order])
        self._source, self._back = (torch.from_numpy(x).to(device) for x in (source, np.argsort(source)))

    def carry(self, hidden: Tensor, run: LayerFunction) -> tuple[Tensor, RecurrentState]:
        """Return the output for ``[tokens, d]``, and the states after the prompts, ``[prompts, ...]``."""
        sorted_rows = cast(Tensor, Reorder.apply(hidden, self._source, self._back, False))
        parts = sorted_rows.split([count * length for count, length in self._shapes])
        found = [run(part.unflatten(0, shape), None) for part, shape in zip(parts, self._shapes, strict=True)]
        out = torch.cat([out.flatten(0, 1) for out, _ in found])
        states = RecurrentState(*(torch.cat(kind) for kind in zip(*(state for _, state in found), strict=True)))
        return cast(Tensor, Reorder.apply(out, self._back, self._source, False)), states


class _Spread(torch.autograd.Function):
    """``x[owners]`` with a backward pass that adds in float32 and in a fixed order, unlike an indexed add on a GPU."""

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
        # The sum over a prompt's responses is one product with a table of 0 and 1.
        belongs = (owners[None] == torch.arange(ctx.count, device=owners.device)[:, None]).to(wide)
        return (belongs @ grad.flatten(1).to(wide)).unflatten(1, grad.shape[1:]).to(grad.dtype), None
