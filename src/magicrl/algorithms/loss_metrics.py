"""What a loss reports beside its value, in a form that adds over micro-batches and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMetrics:
    """Sums and extremes over the loss tokens of one or more micro-batches.

    Everything is a 0-d float64 tensor without gradient, left on its device so that reading it costs one
    synchronisation a mini-batch and not one a micro-batch.

    Attributes:
        sums: add over micro-batches: ``loss``, ``policy_loss`` (already weighted shares), and plain sums over
            loss tokens: ``tokens``, ``clipped``, ``ratio``, ``entropy``, ``kl``, ``kl_tokens`` (those with a
            reference), ``sampler_gap``, ``sampler_kl``, ``correction``, ``corrected``.
        maxima: ``ratio``, ``sampler_gap``.
        minima: ``ratio``.
    """

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]
    minima: Mapping[str, Tensor]

    @staticmethod
    def merge(parts: Sequence[LossMetrics]) -> LossMetrics:
        """The metrics of all parts together, in any order of the parts."""
        assert parts, "nothing to merge"
        first = parts[0]
        return LossMetrics(
            sums={k: torch.stack([p.sums[k] for p in parts]).sum() for k in first.sums},
            maxima={k: torch.stack([p.maxima[k] for p in parts]).max() for k in first.maxima},
            minima={k: torch.stack([p.minima[k] for p in parts]).min() for k in first.minima},
        )

    def values(self) -> dict[str, float]:
        """Readable numbers: means are over the loss tokens merged so far.

        ``clip_ratio`` is the share of clipped tokens, ``sampler_gap_*`` the absolute difference of old and
        sampler log-probs, ``sampler_kl`` the k3 estimate of KL(sampler || learner), ``corrected_ratio`` the
        share of tokens that a sampler correction capped or masked. ``kl`` is there only with a reference.
        """
        total = {k: float(v) for k, v in self.sums.items()}
        tokens = max(total["tokens"], 1.0)
        kl = {"kl": total["kl"] / total["kl_tokens"]} if total["kl_tokens"] else {}
        return {
            "loss": total["loss"],
            "policy_loss": total["policy_loss"],
            "entropy": total["entropy"] / tokens,
            **kl,
            "clip_ratio": total["clipped"] / tokens,
            "ratio_mean": total["ratio"] / tokens,
            "ratio_max": float(self.maxima["ratio"]),
            "ratio_min": float(self.minima["ratio"]),
            "sampler_gap_mean": total["sampler_gap"] / tokens,
            "sampler_gap_max": float(self.maxima["sampler_gap"]),
            "sampler_kl": total["sampler_kl"] / tokens,
            "correction_mean": total["correction"] / tokens,
            "corrected_ratio": total["corrected"] / tokens,
            "tokens": total["tokens"],
        }
