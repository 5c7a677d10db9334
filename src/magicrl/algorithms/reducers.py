"""From per-token terms to one number: how much each response's tokens weigh.

The weights are computed once from a whole mini-batch, before it is cut into micro-batches or spread over
workers. The loss is then a plain sum over tokens of weight times term, so it cannot depend on packing,
order, or the number of workers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Reducer: TypeAlias = Literal["global_tokens", "response_mean", "sequence_sum", "constant"]


def response_weights(
    reducer: Reducer,
    lengths_N: Tensor,
    group_index_N: Tensor,
    *,
    num_loss_tokens: int,
    max_tokens: int | None = None,
) -> Tensor:
    """The weight of every loss token of each response of a mini-batch.

    * ``global_tokens``: 1/T_k (MAGIC Eq. 3.1, DAPO, CISPO): all tokens alike.
    * ``response_mean``: mean over a response's tokens, then over its group, then over groups (GRPO, GSPO).
    * ``sequence_sum``: sum over tokens, mean over the group, then over groups (vanilla PG, PPO).
    * ``constant``: sum over tokens / (T * responses) (Dr.GRPO): a constant instead of the lengths.

    Args:
        lengths_N: loss tokens of each response, all responses of the mini-batch on all workers.
        group_index_N: group of each; any integers.
        num_loss_tokens: T_k; must be the sum of ``lengths_N``, which guards against passing one worker's share.
        max_tokens: T, the response-length limit; needed by ``constant``.

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: unknown reducer, no loss tokens at all, or ``constant`` without ``max_tokens``.

    Example: lengths 3, 5, 4, 2 in two groups of two: ``global_tokens`` 1/14 each; ``response_mean`` 1/12,
    1/20, 1/16, 1/8; ``sequence_sum`` 1/4 each; ``constant`` with T = 8 1/32 each.
    """
    lengths = lengths_N.to(torch.float64)
    assert int(lengths.sum()) == num_loss_tokens, f"lengths sum to {int(lengths.sum())}, not to T_k = {num_loss_tokens}"
    if num_loss_tokens == 0:
        raise ValueError("a mini-batch without loss tokens has no loss; skip it")
    if reducer == "global_tokens":
        return torch.full_like(lengths, 1.0 / num_loss_tokens)
    if reducer == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(f"the reducer 'constant' needs max_tokens, the response-length limit; got {max_tokens}")
        return torch.full_like(lengths, 1.0 / (max_tokens * len(lengths)))
    groups, index, members = torch.unique(group_index_N, return_inverse=True, return_counts=True)
    per_response = 1.0 / (len(groups) * members[index].to(torch.float64))
    if reducer == "sequence_sum":
        return per_response
    if reducer == "response_mean":
        return torch.where(lengths > 0, per_response / lengths.clamp(min=1), torch.zeros_like(lengths))
    raise ValueError(f"unknown reducer {reducer!r}; known: global_tokens, response_mean, sequence_sum, constant")
