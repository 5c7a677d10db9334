"""Sequences of different lengths in one row of tokens without padding, and the attention that keeps them apart.

transformers sends the attention of every decoder that follows its attention interface (Llama, Qwen2, Qwen3, Gemma,
SmolLM, ...) to a registered function and passes unknown keyword arguments of the model's ``forward`` through to it.
magicrl registers one under the name ``magicrl``; the keyword argument ``attention_context`` says what to do. So no
model is reimplemented: linear layers see ``[1, tokens, d]``, and only the context knows where sequences begin and end.

`PackedContext`: whole sequences one after the other, positions restarting at each. `SharedPromptContext`: the row
``[prompt 0, prompt 1, ..., response 0, response 1, ...]``, in which a group's prompt is computed once for all of its
responses; log-probs and gradients are those of the responses packed each with its own prompt, up to rounding. Both
compute a layer in one call of a kernel for rows (`magicrl.models.varlen`) where that serves it, else in buckets.
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

from magicrl.models import cpu_rows
from magicrl.models.cpu_rows import KernelRow
from magicrl.models.recurrent import Run, State, queries_in_place
from magicrl.models.scores import PLAIN, LocalMask, ScoreRules, attend_rows, rules_of
from magicrl.models.varlen import VarlenRow, capability_of, serves
from magicrl.records import ExpertArray, TrainSample

ATTENTION_NAME = "magicrl"


class AttentionContext(Protocol):
    """What attention means in the present forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        """Attend within this layer.

        Args:
            layer: its index.
            query: ``[1, heads, tokens, head_dim]``, rotary embedding applied, as to ``key``.
            key, value: ``[1, kv_heads, tokens, head_dim]``.
            scaling: factor on the scores.
            rules: what else the layer does to its scores.

        Returns:
            ``[1, tokens, heads, head_dim]``.
        """
        ...


@torch.compiler.disable  # what a row's sequences need is chosen in Python
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
    # rho compares two log-probs of one distribution, which dropout would make two
    if dropout:
        raise ValueError(f"attention dropout must be 0 in magicrl, the model's config says {dropout}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = cast(int, module.layer_idx)
    query = queries_in_place(module, query, kwargs.get("row_positions"))
    rules = rules_of(module, attention_mask, kwargs)
    return context.attend(layer, query, key, value, scale, rules), None


def _no_mask(*_args: Any, local_size: int | None = None, **kwargs: Any) -> LocalMask | None:
    """The context knows which keys a query may see; of transformers' mask no more is kept than how far it reaches."""
    if "allow_is_bidirectional_skip" in kwargs:
        raise ValueError(
            "this model's attention looks ahead (use_bidirectional_attention or is_causal=false in its config), so it "
            "cannot sample token by token; use a causal language model"
        )
    return None if local_size is None else LocalMask(local_size)


def register_attention() -> None:
    """Make ``attn_implementation="magicrl"`` known to transformers. Safe to call twice."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


MAX_ATTENTION_PADDING = 0.15
"""Most padding a bucket of the attention may hold, as a share of its tokens."""


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Split samples of these lengths into micro-batches of at most ``token_budget`` tokens, longest first.

    Samples of similar length share a micro-batch (their attention then needs little padding), and among all splits of
    that kind into the fewest micro-batches the one whose largest is smallest is taken. A sample is never split; one
    that exceeds the budget goes alone. The plan depends on its arguments only.

    Example:
        >>> plan_micro_batches([5, 3, 9, 2, 3], token_budget=8)
        [[2], [0, 1], [3, 4]]
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be >= 1, got {token_budget}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # longest first, so these stand at the head of the order
    alone = [[i] for i in order if lengths[i] > token_budget]
    rest = order[len(alone) :]
    if not rest:
        return alone
    # fewest micro-batches: filled to the budget; then the smallest largest one: bisect the capacity that needs no more
    best = _fill(rest, lengths, token_budget)
    low, high = lengths[rest[0]], token_budget  # smallest capacity that needs no further micro-batch
    while low < high:
        middle = (low + high) // 2
        trial = _fill(rest, lengths, middle)
        if len(trial) <= len(best):
            best, high = trial, middle
        else:
            low = middle + 1
    return alone + [sorted(part) for part in best]


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Consecutive samples of ``order``, each part filled as far as it goes."""
    parts: list[list[int]] = []
    # as if full, so that the first sample opens a part
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
    """One micro-batch as the model reads it, of N input tokens and R response tokens over all samples.

    A sample's last token is not among the inputs: nothing is predicted from it.

    Example: prompts of 2 and 1 tokens, responses of 1 and 2: two sequences of 2, predict_index [1, 2, 3].
    """

    input_ids: Tensor  # ``[1, N]`` int64
    position_ids: Tensor  # ``[1, N]`` int64, restarting at 0 in each sequence
    attention: AttentionContext  # keeps every token to its own sequence
    predict_index: Tensor  # ``[R]`` int64, the input positions whose next token is a response token
    targets: Tensor  # ``[R]`` int64, those response tokens, sample after sample
    response_lengths: tuple[int, ...]  # response tokens of each sequence; their sum is R
    experts: Tensor | None = None  # ``[N, routers, k]`` int64, the sampler's choices; None where none were recorded

    @staticmethod
    def of(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> PackedBatch:
        """Pack the samples in their order, each with its own prompt.

        Raises:
            ValueError: a prompt or a response is empty.
        """
        check_samples(samples)
        responses = np.array([len(s.tokens) for s in samples])
        lengths = np.array([len(s) for s in samples]) - 1
        starts = np.cumsum(lengths) - lengths
        pieces = [piece for s in samples for piece in (s.prompt_tokens, s.tokens[:-1])]
        # the prompt's last token, which predicts the response's first: starts + (P + R - 1) - R
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
    """``[P + T - 1, routers, k]`` the recorded choices of a sample's input tokens."""
    if sample.experts is None:
        return None
    # tokens of an observation that ends an episode were never read by the sampler: nothing is learned from them
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
    """``[s, s+1, ..., s+c-1]`` for each start and count, one after the other."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(counts.sum())


class _Padding:
    """Sequences that follow each other in a row, as right-padded buckets of similar length, and back again.

    ``sizes`` are the tokens of each sequence (0 of one that is in no bucket), ``parts`` the sequences of each bucket.
    """

    def __init__(self, sizes: NDArray[np.int64], parts: Sequence[Sequence[int]], device: torch.device | str) -> None:
        self._shapes = [(len(part), int(sizes[list(part)].max())) for part in parts]
        members = np.array([index for part in parts for index in part], dtype=np.int64)
        widths = np.array([width for rows, width in self._shapes for _ in range(rows)], dtype=np.int64)
        starts, slots = np.cumsum(sizes) - sizes, np.cumsum(widths) - widths
        # nothing is padded and the order is the row's: the copies are left out
        self.in_place = bool((widths == sizes[members]).all() and (slots == starts[members]).all())
        # padded slots read their sequence's last token: finite numbers that nothing real ever sees
        spread = ranges(np.zeros_like(widths), widths)
        source = np.repeat(starts[members], widths) + np.minimum(spread, np.repeat(sizes[members] - 1, widths))
        # where each real token stands among the padded ones: the way back
        place = np.empty(int(sizes.sum()), dtype=np.int64)
        place[ranges(starts[members], sizes[members])] = ranges(slots, sizes[members])
        self._source, self._place = (torch.from_numpy(x).to(device) for x in (source, place))
        self.tokens = len(source)
        """Of all buckets, padding included."""

    def buckets(self, x: Tensor, *, in_place: bool = False) -> list[Tensor]:
        """``[1, heads, tokens, dim]`` -> ``[rows, width, heads, dim]`` each; ``in_place`` where nothing moves."""
        packed = x[0].transpose(0, 1)
        padded = packed if in_place else cast(Tensor, Reorder.apply(packed, self._source, self._place, False))
        parts = padded.split([rows * width for rows, width in self._shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def joined(self, outputs: Sequence[Tensor], *, in_place: bool = False) -> Tensor:
        """Inverse of `buckets`: ``[1, tokens, heads, dim]``."""
        flat = [output.flatten(0, 1) for output in outputs]
        padded = flat[0] if len(flat) == 1 else torch.cat(flat)
        return (padded if in_place else cast(Tensor, Reorder.apply(padded, self._place, self._source, True)))[None]


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences by falling length, cut where padding would exceed its limit."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts: list[list[int]] = []
    padding = 0
    for index in order:
        width = lengths[parts[-1][0]] if parts else 0
        # a bucket is as wide as its first, which is its longest
        waste = width - lengths[index]
        # + 1: the share that the bucket would have with this one in it
        if not parts or padding + waste > MAX_ATTENTION_PADDING * width * (len(parts[-1]) + 1):
            parts.append([])
            padding = waste = 0
        parts[-1].append(index)
        padding += waste
    return parts


class _Row(ABC):
    """A row's layers: those that a kernel for rows serves go there, all others to buckets."""

    _longest: int  # keys of the longest sequence

    _device: torch.device | str

    # made when a layer first needs them
    @cached_property
    def varlen(self) -> VarlenRow:
        return VarlenRow(*self._sequences(), self._device)

    @cached_property
    def kernels(self) -> KernelRow:
        return KernelRow(*self._sequences())

    @cached_property
    @abstractmethod
    def buckets(self) -> PackedBuckets | SharedBuckets: ...

    @abstractmethod
    def _sequences(self) -> tuple[Sequence[int], Sequence[int] | None, NDArray[np.int64] | None]:
        """The first arguments of `VarlenRow`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        if cpu_rows.serves(query, value, rules, self._longest):
            return self.kernels.attend(query, key, value, scaling)
        widths = query.shape[-1], value.shape[-1]
        if serves(capability_of(query.device), query.dtype, widths, rules, self._longest):
            return self.varlen.attend(query, key, value, scaling, rules)
        return self.buckets.attend(query, key, value, scaling, rules)

    def carry(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        return self.buckets.carry(hidden, run)


class PackedContext(_Row):
    """Causal attention inside each packed sequence of these lengths; an ``AttentionContext`` and a `RecurrentContext`.

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
    """Sequences of similar length in right-padded buckets, a call of ``scaled_dot_product_attention`` each.

    Under causal attention padding on the right is seen by padding only, so no mask is needed and values and gradients
    are those of each sequence alone.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._padding = _Padding(np.array(lengths), similar_lengths(lengths), device)
        self.padded_tokens = self._padding.tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN) -> Tensor:
        """See `AttentionContext`."""
        padding, stays = self._padding, self._padding.in_place
        parts = zip(*(padding.buckets(x, in_place=stays) for x in (query, key, value)), strict=True)
        return padding.joined([attend_rows(q, k, v, scaling, rules) for q, k, v in parts], in_place=stays)

    def carry(self, hidden: Tensor, run: Run) -> Tensor:
        """See `RecurrentContext`."""
        padding, stays = self._padding, self._padding.in_place
        # a token's hidden state as a single head
        parts = padding.buckets(hidden[:, None], in_place=stays)
        return padding.joined([run(part[:, :, 0], None)[0][:, :, None] for part in parts], in_place=stays)[:, :, 0]


class Reorder(torch.autograd.Function):
    """Rows of ``x`` in another order; the backward pass is a copy too, where ``index_select`` would add.

    Between the packed and the padded layout every real token has exactly one place in each, so the gradient
    of one direction is the other direction, with nothing in the padding: padded queries get no gradient
    and pass none to the keys that they saw.
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
"""Share of all tokens that sharing has to save: below it the plain layout's fewer attention calls win."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedLayout:
    """Which response belongs to which prompt, in tokens."""

    prompts: tuple[int, ...]  # tokens of each distinct prompt
    owners: tuple[int, ...]  # ``[S]`` index of each response's prompt
    responses: tuple[int, ...]  # ``[S]`` input tokens: all but the last, which predicts nothing; may be 0

    @property
    def saved(self) -> float:
        """Share of the tokens of the plain layout that this one does without."""
        alone = sum(self.prompts[owner] for owner in self.owners)
        return (alone - sum(self.prompts)) / (alone + sum(self.responses))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Prompts, owners and responses."""
        prompts, owners, responses = (np.array(x, dtype=np.int64) for x in (self.prompts, self.owners, self.responses))
        return prompts, owners, responses


def shared_layout(samples: Sequence[TrainSample]) -> tuple[SharedLayout, list[TrainSample]]:
    """The layout of ``samples``, and for each distinct prompt a sample that has it."""
    places: dict[bytes, int] = {}
    holders: list[TrainSample] = []
    owners: list[int] = []
    for sample in samples:
        # by tokens, not by group: a prompt that was drawn twice stands once, too
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
        # as if full, so that the first response opens a part, which holds the prompt once
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
    """Responses of similar length whose prompts are equally long."""

    prompt: int  # tokens of each prompt
    prompt_tokens: Tensor  # ``[G * prompt]`` where the distinct prompts' tokens stand in the row
    owners: Tensor  # ``[rows]`` index of each response's prompt among them
    mask: Tensor  # ``[width, prompt + width]`` what a response token sees
    states: Tensor  # ``[rows]`` index of each response's prompt among the states after all prompts

    def with_prompts(self, whole: Tensor, part: Tensor) -> Tensor:
        """``[rows, prompt + width, kv_heads, dim]``: each response's keys or values behind its prompt's."""
        distinct = whole.index_select(0, self.prompt_tokens).unflatten(0, (-1, self.prompt))
        return torch.cat((cast(Tensor, _Spread.apply(distinct, self.owners)), part), dim=1)


def packed_with_shared_prompts(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> PackedBatch:
    """The micro-batch of ``samples`` with every distinct prompt once; ``ValueError`` for an empty sample."""
    check_samples(samples)
    layout, holders = shared_layout(samples)
    prompts, owners, inputs = layout.arrays()
    ends = np.cumsum(prompts)
    starts = int(ends[-1]) + np.cumsum(inputs) - inputs
    positions = [np.arange(n) for n in prompts]
    positions += [prompts[owner] + np.arange(n) for owner, n in zip(owners, inputs, strict=True)]
    # the prompt's choices are those of its first response: it is computed once
    experts = [None if h.experts is None else h.experts[: len(h.prompt_tokens)] for h in holders]
    experts += [None if (e := _experts_of(s)) is None else e[len(s.prompt_tokens) :] for s in samples]
    # a response's first token is predicted by its prompt's last, the others by the response itself
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
    """Attention of a row of prompts followed by responses; an ``AttentionContext`` and a `RecurrentContext`."""

    def __init__(self, layout: SharedLayout, device: torch.device | str = "cpu") -> None:
        self._layout, self._device = layout, device
        prompts, owners, sizes = layout.arrays()
        self._longest = int(np.max(prompts[owners] + sizes))

    def _sequences(self) -> tuple[Sequence[int], Sequence[int], NDArray[np.int64]]:
        prompts, owners, sizes = self._layout.arrays()
        prompt_starts, starts = (np.cumsum(x) - x for x in (prompts, sizes))
        tokens = int(prompts.sum())
        some = sizes > 0  # an empty one has nothing to attend
        owners, sizes, starts = owners[some], sizes[some], tokens + starts[some]
        # of each response its prompt's keys, then its own
        pairs = ((prompt_starts[owners], starts), (prompts[owners], sizes))
        behind = ranges(*(np.stack(pair, axis=1).ravel() for pair in pairs))
        queries, keys = (np.r_[prompts, x].tolist() for x in (sizes, prompts[owners] + sizes))
        return queries, keys, np.r_[np.arange(tokens), behind]

    @cached_property
    def buckets(self) -> SharedBuckets:
        return SharedBuckets(self._layout, self._device)


class SharedBuckets:
    """Prompts in buckets of similar length, and responses in such whose prompts are equally long."""

    def __init__(self, layout: SharedLayout, device: torch.device | str = "cpu") -> None:
        prompts, owners, sizes = layout.arrays()
        self._own = PackedBuckets(layout.prompts, device)
        self._prompt_tokens = int(prompts.sum())
        prompt_starts = np.cumsum(prompts) - prompts
        self._alike = _AlikePrompts(prompts, prompt_starts, device)
        parts: list[list[int]] = []
        # a bucket's prompts are equally long: one mask and one column for the first response token serve all its rows
        for length in sorted(set(layout.prompts)):
            members = np.flatnonzero((prompts[owners] == length) & (sizes > 0))  # an empty one has nothing to attend
            parts += [members[part].tolist() for part in similar_lengths(sizes[members].tolist())]
        self._padding = _Padding(sizes, parts, device)
        self._buckets: list[_SharedBucket] = []
        for part in parts:
            distinct, among = np.unique(owners[part], return_inverse=True)
            prompt, width = int(prompts[distinct[0]]), int(sizes[part].max())
            arrays = (
                ranges(prompt_starts[distinct], prompts[distinct]),
                among.astype(np.int64),
                # the whole prompt and one's own past; padding stands to the right of all that is real
                np.arange(prompt + width)[None] <= prompt + np.arange(width)[:, None],
                self._alike.place[owners[part]],
            )
            self._buckets.append(_SharedBucket(prompt, *(torch.from_numpy(a).to(device) for a in arrays)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN) -> Tensor:
        """See `AttentionContext`."""
        cut = self._prompt_tokens
        # a prompt sees itself alone, so its hidden states are the same for all of its responses
        own = self._own.attend(query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], scaling, rules)
        # responses of one token each, which predict nothing: prompts are the whole input
        if not self._buckets:
            return own
        keys, values = (x[0, :, :cut].transpose(0, 1) for x in (key, value))
        parts = zip(self._buckets, *(self._padding.buckets(x[:, :, cut:]) for x in (query, key, value)), strict=True)
        outputs = [
            attend_rows(q, bucket.with_prompts(keys, k), bucket.with_prompts(values, v), scaling, rules, bucket.mask)
            for bucket, q, k, v in parts
        ]
        return torch.cat((own, self._padding.joined(outputs)), dim=1)

    def carry(self, hidden: Tensor, run: Run) -> Tensor:
        """See `RecurrentContext`."""
        cut = self._prompt_tokens
        own, after = self._alike.carry(hidden[0, :cut], run)
        if not self._buckets:
            return own[None]
        parts = zip(self._buckets, self._padding.buckets(hidden[:, None, cut:]), strict=True)
        outputs = [
            run(part[:, :, 0], State(*(cast(Tensor, _Spread.apply(x, bucket.states)) for x in after)))[0][:, :, None]
            for bucket, part in parts
        ]
        return torch.cat((own[None], self._padding.joined(outputs)[:, :, 0]), dim=1)


class _AlikePrompts:
    """Prompts of one length as a batch: without padding, so that the state after the last token is the prompt's."""

    def __init__(self, sizes: NDArray[np.int64], starts: NDArray[np.int64], device: torch.device | str) -> None:
        order = np.argsort(sizes, kind="stable")
        self.place = np.argsort(order)
        """``[prompts]`` index of each prompt's state among those that `carry` gives."""
        lengths, counts = np.unique(sizes, return_counts=True)
        self._shapes = [(int(count), int(length)) for count, length in zip(counts, lengths, strict=True)]
        source = ranges(starts[order], sizes[order])
        self._source, self._back = (torch.from_numpy(x).to(device) for x in (source, np.argsort(source)))

    def carry(self, hidden: Tensor, run: Run) -> tuple[Tensor, State]:
        """Output of ``[tokens, d]``, and the states after the prompts, ``[prompts, ...]``."""
        sorted_rows = cast(Tensor, Reorder.apply(hidden, self._source, self._back, False))
        parts = sorted_rows.split([count * length for count, length in self._shapes])
        found = [run(part.unflatten(0, shape), None) for part, shape in zip(parts, self._shapes, strict=True)]
        out = torch.cat([out.flatten(0, 1) for out, _ in found])
        states = State(*(torch.cat(kind) for kind in zip(*(state for _, state in found), strict=True)))
        return cast(Tensor, Reorder.apply(out, self._back, self._source, False)), states


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
        # the sum over a prompt's responses as one product with a table of 0 and 1
        belongs = (owners[None] == torch.arange(ctx.count, device=owners.device)[:, None]).to(wide)
        return (belongs @ grad.flatten(1).to(wide)).unflatten(1, grad.shape[1:]).to(grad.dtype), None
