"""When a stage has converged: an equivalence test on the accuracy curve, and a rule on the truncation ratio.

The report changed stages by hand "when performance converged". Here a stage ends when the data exclude, at a stated
confidence, that training for H more steps would still gain ``delta``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import stdtrit

# A line uses two degrees of freedom, and at least two must remain to estimate the noise.
MIN_POINTS = 4
# Less than 1: at 1 all noise is a single offset, the expected residual power is 0 and the variance 0/0.
MAX_AUTOCORRELATION = 0.95
_RHO_GRID = 0.05


def expected_gain(
    steps: Sequence[float], values: Sequence[float], horizon: float, noise_floor: float = 0.0
) -> tuple[float, float, float]:
    """Fit a line to a stretch of a curve and extrapolate it by ``horizon`` steps.

    The noise is modelled as AR(1). Its lag-one correlation is estimated from the residuals, corrected for the bias of
    detrending, and never below 0. Residual variance, the slope's variance and the degrees of freedom are exact for that
    correlation. On a curve that levels off, a line through the past overestimates the gain, and the bend reads as
    correlated noise. Both errors make the test wait longer.

    Args:
        steps: Increasing training steps.
        values: The curve at these steps.
        horizon: H, in steps.
        noise_floor: Lower bound of the standard deviation of one value's noise (its sampling error).

    Returns:
        Expected gain over the horizon in units of the curve, its standard error widened for autocorrelated noise, and
        the effective degrees of freedom of that error.
    """
    count = len(steps)
    assert count == len(values) >= MIN_POINTS, f"{count} steps and {len(values)} values"
    # Relative to the first step, so that stretches of equal spacing share one cached shape.
    x = np.asarray(steps, dtype=np.float64) - steps[0]
    y = np.asarray(values, dtype=np.float64)
    centred = x - x.mean()
    slope = float(centred @ (y - y.mean()) / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    power = float(residuals @ residuals)
    # A perfect fit shows no correlation. The remaining noise (the floor) is then taken as independent.
    measured = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else -1.0
    # Detrending lowers the correlation by (2 + 4 rho) / n, to first order.
    unbiased = measured + (2 + 4 * measured) / count
    # Rounded up to a grid, so that few shapes are computed. A larger rho widens the error, so the test waits longer.
    rho = math.ceil(min(max(unbiased, 0.0), MAX_AUTOCORRELATION) / _RHO_GRID - 1e-9) * _RHO_GRID
    slope_variance, trace, degrees = _trend_shape(tuple(float(v) for v in x), round(rho, 10))
    # By chance, a few points may be closer to a line than their sampling error allows.
    variance = max(power / trace, noise_floor**2)
    return slope * horizon, math.sqrt(variance * slope_variance) * horizon, degrees


@lru_cache(maxsize=512)
def _trend_shape(offsets: tuple[float, ...], rho: float) -> tuple[float, float, float]:
    """Return slope variance, expected residual power and degrees of freedom of a line fit under unit AR(1) noise."""
    count = len(offsets)
    centred = np.asarray(offsets) - np.mean(offsets)
    norm = float(centred @ centred)
    # By observation, not by training step, like the lag-one correlation in `expected_gain`.
    correlation = np.power(rho, np.abs(np.subtract.outer(np.arange(count), np.arange(count))))
    residual_maker = np.eye(count) - 1.0 / count - np.outer(centred, centred) / norm
    spread = residual_maker @ correlation
    trace = float(np.trace(spread))
    # E[residual power] = sigma^2 * trace, and its variance gives Satterthwaite's degrees of freedom.
    return float(centred @ correlation @ centred) / norm**2, trace, trace**2 / float(np.sum(spread * spread.T))


class ConvergenceTest:
    """Rule that ends a stage when the upper bound of the gain expected over the next H steps is below ``delta``.

    The test looks at the curve after every ``window`` observations. Look j has an error probability of (1 - confidence)
    / (j (j + 1)), which sums to 1 - confidence over any number of looks. A look shares its error over several
    stretches: the last ``window`` observations, twice as many, four times as many, and so on. A noisy curve is thus
    judged on a longer stretch. A stretch whose gain has a standard error above ``delta`` is ignored, however far its
    trend happens to fall. If no stretch can decide, the test waits (the stage's ``max_steps`` bounds it).

    Behaviour with ``sigma`` the noise of one observation, rho the correlation of successive ones, and windows of 20
    observations or more (measured on simulated curves, see the tests):

    * A curve that still rises by 2 delta per H ends in at most 1 - confidence of runs, over all looks, for any
      ``sigma`` and rho up to 0.6. With shorter windows or stronger correlation this holds only for ``sigma`` up to
      about twice the limit of the next point, because rho is then hard to estimate.
    * A flat curve ends within two windows in at least 90 % of runs for ``sigma`` up to delta * (2 window)^1.5 / (18 H)
      with H in observations, times sqrt((1 - rho) / (1 + rho)). With more noise the test needs more windows. H = window
      = 20 and delta = 0.02 allow 0.014: a validation of 1,200 responses at accuracy 0.5, or training accuracy averaged
      over as many. At 128 responses per step (0.044) the window must be 43.

    Args:
        horizon: H, in training steps.
        delta: Gain over H steps for which the stage continues, in units of the curve.
        window: Observations between looks, and the fewest that a look uses.
        confidence: 1 - error over all looks of the stage.
    """

    def __init__(self, *, horizon: float, delta: float, window: int, confidence: float = 0.95) -> None:
        if horizon <= 0 or delta <= 0:
            raise ValueError(f"horizon and delta must be > 0, got {horizon} and {delta}")
        if window < MIN_POINTS:
            raise ValueError(f"window must be at least {MIN_POINTS} observations, got {window}")
        if not 0.5 < confidence < 1:
            raise ValueError(f"confidence must be between 0.5 and 1, got {confidence}")
        self.horizon = horizon
        self.delta = delta
        self.window = window
        self.confidence = confidence
        self._steps: list[float] = []
        self._values: list[float] = []
        self._errors: list[float | None] = []
        self.converged = False

    def observe(self, step: float, value: float, standard_error: float | None = None) -> bool:
        """Add a point of the curve. Return True once the stage has converged, and from then on.

        Args:
            step: Training step, which must increase.
            value: Accuracy at that step.
            standard_error: Sampling error of ``value``, if known. It is a lower bound of the estimated noise.
        """
        assert not self._steps or step > self._steps[-1], f"step {step} after {self._steps[-1:]}"
        assert math.isfinite(value), f"the curve is {value} at step {step}"
        self._steps.append(float(step))
        self._values.append(float(value))
        self._errors.append(None if standard_error is None else float(standard_error))
        if len(self._steps) % self.window == 0:
            self.converged = self.converged or self._upper_bound() < self.delta
        return self.converged

    def _upper_bound(self) -> float:
        """Return the lowest upper bound of the gain over all stretches that are precise enough, infinity if none is."""
        number = len(self._steps) // self.window
        lengths = [self.window * 2**i for i in range(number.bit_length())]
        # The lowest bound decides, so each stretch gets an equal part of the look's error (Bonferroni).
        error = (1 - self.confidence) / (number * (number + 1)) / len(lengths)
        bounds: list[float] = []
        for length in lengths:
            known = [each for each in self._errors[-length:] if each is not None]
            noise_floor = math.sqrt(sum(each**2 for each in known) / len(known)) if known else 0.0
            gain, deviation, degrees = expected_gain(
                self._steps[-length:], self._values[-length:], self.horizon, noise_floor
            )
            if deviation <= self.delta:
                bounds.append(gain + float(stdtrit(degrees, 1 - error)) * deviation)
        return min(bounds, default=math.inf)

    def state(self) -> dict[str, Any]:
        """Return the curve so far, as JSON."""
        return {
            "steps": list(self._steps),
            "values": list(self._values),
            "standard_errors": list(self._errors),
            "converged": self.converged,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned. The settings come from the recipe."""
        self._steps = [float(v) for v in state["steps"]]
        self._values = [float(v) for v in state["values"]]
        self._errors = [None if v is None else float(v) for v in state["standard_errors"]]
        self.converged = bool(state["converged"])


class TruncationRule:
    """Rule that ends a stage when the truncation ratio has stayed below a threshold for a window of observations.

    The stage's T then no longer limits the responses, so training can continue with the next stage.
    """

    def __init__(self, *, below: float, window: int) -> None:
        if not 0 <= below <= 1:
            raise ValueError(f"truncation_below must be between 0 and 1, got {below}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.below = below
        self.window = window
        self._run = 0

    def observe(self, value: float) -> bool:
        """Add the truncation ratio of a step. Return whether the last ``window`` of them were below the threshold."""
        assert 0 <= value <= 1, f"truncated share {value}"
        self._run = self._run + 1 if value < self.below else 0
        return self._run >= self.window

    def state(self) -> dict[str, Any]:
        """Return the number of successive observations below the threshold, as JSON."""
        return {"run": self._run}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self._run = int(state["run"])
