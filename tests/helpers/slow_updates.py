"""Figures of the updates of the slow loop: means and extremes over tokens, and one row for all updates of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Sums:
    """Means and extremes over an update's tokens."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}

    def add(
        self, rho: Tensor, clipped: Tensor, entropies: Tensor, kl: Tensor | None, gap: Tensor, correction: Tensor
    ) -> None:
        columns = {"rho": rho, "clipped": clipped.double(), "entropy": entropies.detach(), "gap": gap.detach()}
        columns |= {"correction": correction.detach()} | ({} if kl is None else {"kl": kl.detach()})
        for name, column in columns.items():
            self.parts.setdefault(name, []).append(column)

    def values(self, *, corrected: bool) -> dict[str, float]:
        whole = {name: torch.cat(columns) for name, columns in self.parts.items()}
        gap, weights = whole["gap"], whole["correction"]
        changed = (weights - gap.exp()).abs() > 1e-12
        return {
            "tokens": float(len(gap)),
            "entropy": float(whole["entropy"].mean()),
            "clip_ratio": float(whole["clipped"].mean()),
            "ratio_mean": float(whole["rho"].mean()),
            "ratio_max": float(whole["rho"].max()),
            "ratio_min": float(whole["rho"].min()),
            "sampler_gap_mean": float(gap.abs().mean()),
            "sampler_gap_max": float(gap.abs().max()),
            "sampler_kl": float((gap.exp() - gap - 1).mean()),
            "correction_mean": float(weights.mean()),
            "corrected_ratio": float(changed.double().mean()) if corrected else 0.0,
            **({"kl": float(whole["kl"].mean())} if "kl" in whole else {}),
        }


def merged(told: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Merge a step's updates: means weighted by tokens, extremes of extremes, the last learning rate."""
    merged: dict[str, Any] = {"learner/sgd_steps": len(told), "tokens/trained": int(sum(row["tokens"] for row in told))}
    for name in told[0] if told else ():
        column = [row[name] for row in told]
        if name in ("ratio_max", "sampler_gap_max"):
            merged[f"learner/{name}"] = max(column)
        elif name == "ratio_min":
            merged[f"learner/{name}"] = min(column)
        elif name == "learning_rate":
            merged[f"learner/{name}"] = column[-1]
        elif name != "tokens":
            total = sum(value * row["tokens"] for value, row in zip(column, told, strict=True))
            merged[f"learner/{name}"] = total / merged["tokens/trained"]
    return merged
