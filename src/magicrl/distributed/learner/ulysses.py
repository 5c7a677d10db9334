"""Sequence parallelism as in DeepSpeed-Ulysses (arXiv 2309.14509): ranks share the tokens of one micro-batch.

Every layer except attention works on a rank's slice of the tokens. For attention, an all-to-all exchange gives each
rank all tokens of some of the heads, and a second exchange returns the tokens. Each head computes what it would compute
on one device, so any ``AttentionContext`` (packed sequences, shared prompts) works inside, without approximation.

Every rank then has the log-probs of all response tokens and the full loss. Its backward pass covers only its slice, so
the sum of the ranks' gradients is the gradient of the micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import PreTrainedConfig

from magicrl.config.errors import RecipeError
from magicrl.models.attention import PLAIN, ScoreRules
from magicrl.models.packing import AttentionContext, PackedBatch


def check_degree(config: PreTrainedConfig, degree: int) -> None:
    """Check that ``degree`` divides the query heads and the key/value heads, and that every layer is an attention
    layer.

    Raises:
        RecipeError: It does not, or a layer carries a state from token to token.
    """
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

    ``inner`` attends over the whole micro-batch of ``tokens``. Padding at the end makes the slices equally long.
    """

    def __init__(self, inner: AttentionContext, tokens: int, group: dist.ProcessGroup) -> None:
        self._inner = inner
        self._tokens = tokens
        self._group = group
        self._degree = group.size()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN
    ) -> Tensor:
        """Attend as ``AttentionContext.attend`` does; the arguments hold this rank's slice."""
        parts = [x[0].unflatten(0, (self._degree, -1)) for x in (query, key, value)]
        heads = [part.shape[1] for part in parts]
        # Query, key and value travel in one exchange, since latency counts here more than bandwidth.
        slices = self._exchange(torch.cat(parts, dim=1))  # [ranks, heads of this rank, slice, head_dim]
        whole = slices.permute(1, 0, 2, 3).flatten(1, 2)[:, : self._tokens]
        q, k, v = whole.split(heads)
        # A sink is a parameter per head, and this rank now has only some of the heads.
        if rules.sinks is not None:
            rules = replace(rules, sinks=rules.sinks.unflatten(0, (self._degree, -1))[self._group.rank()])
        out = self._inner.attend(layer, q[None], k[None], v[None], scaling, rules)[0]
        padding = self._degree * query.shape[2] - self._tokens
        out = F.pad(out, (0, 0, 0, 0, 0, padding)).unflatten(0, (self._degree, -1))
        return self._exchange(out).permute(1, 0, 2, 3).flatten(1, 2)[None]

    def _exchange(self, x: Tensor) -> Tensor:
        """Send row ``i`` to rank ``i``. Row ``i`` of the result comes from rank ``i``."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self._group)


class SequenceSlice:
    """This rank's tokens of a micro-batch ``batch`` that is split into slices of equal length.

    Attributes:
        input_ids: ``[1, n]``, padding at the end of the last slices.
        position_ids: ``[1, n]``.
        attention: Attention over the whole micro-batch.
        predict_index: ``[r]`` positions in the slice whose next token is a response token.
        targets: ``[r]`` those response tokens.
        own: ``[r]`` their indices among the micro-batch's R response tokens.
        place: ``[R]`` index of each response token in the concatenation of the ranks' padded results.
        width: Maximum number of response tokens of a slice, to which results are padded.
    """

    def __init__(self, batch: PackedBatch, group: dist.ProcessGroup) -> None:
        self._group = group
        tokens, degree, rank = batch.input_ids.shape[1], group.size(), group.rank()
        length = -(-tokens // degree)
        padded = [F.pad(x, (0, degree * length - tokens)) for x in (batch.input_ids, batch.position_ids)]
        self.input_ids, self.position_ids = (x[:, rank * length : (rank + 1) * length] for x in padded)
        self.attention = UlyssesContext(batch.attention, tokens, group)
        owners = batch.predict_index // length
        counts = torch.bincount(owners, minlength=degree)
        self.width = int(counts.max())
        # Stable, so that tokens keep their order within a slice, as the slices' results do.
        order = torch.argsort(owners, stable=True)
        within = torch.empty_like(owners)
        starts = counts.cumsum(0) - counts
        within[order] = torch.arange(len(owners), device=owners.device) - starts.repeat_interleave(counts)
        self.place = owners * self.width + within
        self.own = (owners == rank).nonzero()[:, 0]
        self.predict_index = batch.predict_index[self.own] - rank * length
        self.targets = batch.targets[self.own]

    def gathered(self, values: Tensor) -> Tensor:
        """Return all ranks' ``[r]`` values as ``[R]`` in the micro-batch's order, with gradients for this rank's
        values."""
        return cast(Tensor, _Gather.apply(values, self.own, self.place, self.width, self._group))


class _Gather(torch.autograd.Function):
    """All-gather with a local gradient: all ranks compute the same loss, so each has the full gradient of its
    part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, place: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        padded = F.pad(values, (0, width - len(values)))
        # ``all_gather`` needs equal shapes, hence the padding to the widest slice.
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded.contiguous(), group)
        return torch.cat(parts)[place]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return grads[0][own], None, None, None, None
