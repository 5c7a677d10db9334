"""Sequence parallelism after DeepSpeed-Ulysses (arXiv 2309.14509): ranks share the tokens of one micro-batch.

Every layer works on a rank's own slice of the tokens, but attention: there an exchange gives each rank all tokens of
a part of the heads, and a second one gives the tokens back. What a head computes is what one device computes, so any
``AttentionContext`` (packed sequences, shared prompts) works inside, and nothing is approximated.

Every rank then has the log-probs of all response tokens and the whole loss; its backward pass follows its own slice
only, so that the ranks' gradients add up to the micro-batch's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import PreTrainedConfig

from magicrl.config.errors import RecipeError
from magicrl.models.packing import AttentionContext, PackedBatch
from magicrl.models.scores import PLAIN, ScoreRules


def check_degree(config: PreTrainedConfig, degree: int) -> None:
    """Raise ``RecipeError`` unless ``degree`` divides query heads and key/value heads, and every layer attends."""
    text: Any = config.get_text_config()
    if degree > 1 and "linear_attention" in (getattr(text, "layer_types", None) or []):
        raise RecipeError(
            f"{degree}, but this model ({text.model_type}) has layers that carry a state from token to token, which "
            "cannot be cut into slices; set it to 1",
            key="cluster.learner.sequence_parallel",
        )
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if heads % degree or kv_heads % degree:
        fitting = [d for d in range(1, kv_heads + 1) if heads % d == 0 and kv_heads % d == 0]
        raise RecipeError(
            f"{degree} does not divide the {heads} query heads and {kv_heads} key/value heads of this model; "
            f"possible: {', '.join(map(str, fitting))}",
            key="cluster.learner.sequence_parallel",
        )


class UlyssesContext:
    """Attention over all tokens of a micro-batch of which every rank holds a slice; an ``AttentionContext``.

    ``inner`` attends the whole micro-batch of ``tokens``; the slices are longer together, by padding at the end.
    """

    def __init__(self, inner: AttentionContext, tokens: int, group: dist.ProcessGroup) -> None:
        self._inner = inner
        self._tokens = tokens
        self._group = group
        self._degree = group.size()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        """See ``AttentionContext.attend``; ``tokens`` there are this rank's slice."""
        parts = [x[0].unflatten(0, (self._degree, -1)) for x in (query, key, value)]
        heads = [part.shape[1] for part in parts]
        slices = self._exchange(torch.cat(parts, dim=1))  # [ranks, heads of this rank, slice, head_dim]
        whole = slices.permute(1, 0, 2, 3).flatten(1, 2)[:, : self._tokens]
        q, k, v = whole.split(heads)
        if rules.sinks is not None:
            rules = replace(rules, sinks=rules.sinks.unflatten(0, (self._degree, -1))[self._group.rank()])
        out = self._inner.attend(layer, q[None], k[None], v[None], scaling, rules)[0]
        padding = self._degree * query.shape[2] - self._tokens
        out = F.pad(out, (0, 0, 0, 0, 0, padding)).unflatten(0, (self._degree, -1))
        return self._exchange(out).permute(1, 0, 2, 3).flatten(1, 2)[None]

    def _exchange(self, x: Tensor) -> Tensor:
        """Row ``i`` goes to rank ``i``; row ``i`` of the result is what rank ``i`` sent here."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self._group)


@dataclass(frozen=True, kw_only=True)
class SequenceSlice:
    """This rank's tokens of a micro-batch."""

    input_ids: Tensor  # ``[1, n]``, padding at the end of the last slices
    position_ids: Tensor  # ``[1, n]``
    attention: UlyssesContext  # over the whole micro-batch
    predict_index: Tensor  # ``[r]`` places in the slice whose next token is a response token
    targets: Tensor  # ``[r]`` those response tokens
    own: Tensor  # ``[r]`` which of the micro-batch's R response tokens they are
    place: Tensor  # ``[R]`` where each response token stands when the ranks' results, padded, follow each other
    width: int  # most response tokens of a slice: to which they are padded

    @staticmethod
    def of(batch: PackedBatch, group: dist.ProcessGroup) -> SequenceSlice:
        """Cut ``batch`` into slices of equal length and take this rank's."""
        tokens, degree, rank = batch.input_ids.shape[1], group.size(), group.rank()
        length = -(-tokens // degree)
        padded = [F.pad(x, (0, degree * length - tokens)) for x in (batch.input_ids, batch.position_ids)]
        ids, positions = (x[:, rank * length : (rank + 1) * length] for x in padded)
        owners = batch.predict_index // length
        counts = torch.bincount(owners, minlength=degree)
        width = int(counts.max())
        order = torch.argsort(owners, stable=True)
        within = torch.empty_like(owners)
        starts = counts.cumsum(0) - counts
        within[order] = torch.arange(len(owners), device=owners.device) - starts.repeat_interleave(counts)
        own = (owners == rank).nonzero()[:, 0]
        return SequenceSlice(
            input_ids=ids,
            position_ids=positions,
            attention=UlyssesContext(batch.attention, tokens, group),
            predict_index=batch.predict_index[own] - rank * length,
            targets=batch.targets[own],
            own=own,
            place=owners * width + within,
            width=width,
        )

    def gathered(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """``[R]`` every rank's ``[r]`` values in the micro-batch's order, with gradient for this rank's own."""
        return cast(Tensor, _Gather.apply(values, self.own, self.place, self.width, group))


class _Gather(torch.autograd.Function):
    """All ranks compute one loss from what is gathered, so each one's own part of the gradient is whole."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, place: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        padded = F.pad(values, (0, width - len(values)))
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded.contiguous(), group)
        return torch.cat(parts)[place]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return grads[0][own], None, None, None, None
