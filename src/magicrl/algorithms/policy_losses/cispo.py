"""CISPO (MiniMax 2025): the clip bounds a token's weight and never its gradient."""

from __future__ import annotations

from magicrl.algorithms.surrogates import LossRow, Surrogate, SurrogateInputs


def clipped_weight(s: SurrogateInputs) -> Surrogate:
    """stop_gradient(clip(rho)) * A * log pi (CISPO): every token keeps a gradient, its weight is bounded."""
    weight = s.ratio.detach().clamp(1 - s.clip_low, 1 + s.clip_high)
    return Surrogate(weight * s.advantages * s.logprobs, weight != s.ratio.detach())


ROW = LossRow(surrogate=clipped_weight, reducer="global_tokens", clip=(1.0, 4.0))
