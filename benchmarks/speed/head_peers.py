"""Published formulations of log-probs and entropies from hidden states: the baselines of ``head_speed.py``.

The formulations are the projects', the code is ours. All return ``(logprobs, entropies)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Compute whole logits and their log-softmax in float32, with autograd (TRL and most scripts)."""
    return _of_logits(hidden @ weight.T, targets)


def _of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Compute checkpointed chunks of rows (the chunked losses of torchtune and torchforge)."""
    parts = [
        checkpoint(lambda h, t: _of_logits(h @ weight.T, t), h, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class _Verl(torch.autograd.Function):
    """Chunks of rows; the backward pass recomputes logits and applies the formula (verl's ``FusedLinearForPPO``)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk = chunk
        logprobs, entropies = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ weight.T).float()
            probs, logp = logits.softmax(-1), logits.log_softmax(-1)
            logprobs[rows] = logp.gather(1, targets[rows, None])[:, 0]
            entropies[rows] = logits.logsumexp(-1) - (probs * logits).sum(-1)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = (hidden[rows] @ weight.T).float()
            probs, logp = logits.softmax(-1), logits.log_softmax(-1)
            entropy = logits.logsumexp(-1) - (probs * logits).sum(-1)
            onehot = torch.zeros_like(logits).scatter_(1, targets[rows, None], 1.0)
            change = grads[0][rows, None] * (onehot - probs)
            change += grads[1][rows, None] * -probs * (logp + entropy[:, None])
            narrow = change.to(hidden.dtype)
            grad_hidden[rows] += narrow @ weight
            grad_weight += narrow.T @ hidden[rows]
        return grad_hidden, grad_weight, None, None


def verl(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Apply ``_Verl``."""
    found: Any = _Verl.apply(hidden, weight, targets, chunk_tokens)
    return found


class _Liger(torch.autograd.Function):
    """Both gradients in the forward pass, chunk by chunk (Liger's fused linear losses): logits are computed once.

    The incoming gradients of log-probs and entropies must be constants, here 1 and 0.01.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        logprobs, entropies = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logp = (hidden[rows] @ weight.T).float().log_softmax(-1)
            probs = logp.exp()
            logprobs[rows] = logp.gather(1, targets[rows, None])[:, 0]
            entropies[rows] = -(probs * logp).sum(-1)
            change = probs * (logp + entropies[rows, None]) * -0.01 - probs
            change.scatter_add_(1, targets[rows, None], torch.ones_like(change[:, :1]))
            narrow = change.to(hidden.dtype)
            grad_hidden[rows] = narrow @ weight
            grad_weight += narrow.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None, None


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Apply ``_Liger``."""
    found: Any = _Liger.apply(hidden, weight, targets, chunk_tokens)
    return found


PEERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "naive": naive,
    "checkpointed": checkpointed,
    "verl": verl,
    "liger": liger,
}
