"""The vanilla policy gradient."""

from __future__ import annotations

from magicrl.algorithms.surrogates import LossRow, Surrogate, SurrogateInputs, nothing_clipped


def policy_gradient(s: SurrogateInputs) -> Surrogate:
    """rho * A: the vanilla policy gradient; its gradient at theta_k is that of A * log pi."""
    return Surrogate(s.ratio * s.advantages, nothing_clipped(s))


ROW = LossRow(surrogate=policy_gradient, reducer="sequence_sum")
