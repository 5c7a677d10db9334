"""When a stage has converged: an equivalence test on the accuracy curve, and a truncation-ratio rule.

The report changed stages by hand "when performance converged". Here a stage ends when the data exclude,
at the stated confidence, that training on for H more steps would still gain ``delta``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

# a line takes two degrees of freedom; two at least are left to tell its noise
MIN_POINTS = 4
# below 1: at 1 all noise is one offset, the residuals' expected power is 0 and the variance 0/0
MAX_AUTOCORRELATION = 0.95
_RHO_GRID = 0.05


class GainEstimate(NamedTuple):
    """Gain expected over the next H steps if the recent trend goes on, in units of the curve; its standard error,
    widened for autocorrelated noise, and the effective degrees of freedom of that error."""

    gain: float
    standard_error: float
    degrees: float

    def upper_bound(self, error: float) -> float:
        """One-sided upper bound that is too low with probability ``error``."""
        return self.gain + float(stdtrit(self.degrees, 1 - error)) * self.standard_error


def expected_gain(
    steps: Sequence[float], values: Sequence[float], horizon: float, noise_floor: float = 0.0
) -> GainEstimate:
    """Linear trend through a stretch of a curve, extrapolated by ``horizon`` steps.

    The noise is modelled as AR(1): its lag-one correlation is estimated from the residuals (corrected for
    the bias that detrending causes, never below 0), and residual variance, the slope's variance and the
    degrees of freedom are those exact for that correlation. On a curve that levels off, a straight line
    through the past promises more than will come and the bend reads as correlated noise: both errors are
    on the side of waiting.

    Args:
        steps: increasing.
        values: the curve at these steps.
        horizon: H, in steps.
        noise_floor: standard deviation that the noise of one value has at least (its sampling error).
    """
    count = len(steps)
    assert count == len(values) >= MIN_POINTS, f"{count} steps and {len(values)} values"
    # from the first on, so that stretches of the same spacing share one cached shape
    x = np.asarray(steps, dtype=np.float64) - steps[0]
    y = np.asarray(values, dtype=np.float64)
    centred = x - x.mean()
    slope = float(centred @ (y - y.mean()) / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    power = float(residuals @ residuals)
    # A perfect fit shows no correlation: what noise there is (the floor) is then taken as independent.
    measured = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else -1.0
    # detrending takes (2 + 4 rho) / n of the correlation away, to first order
    unbiased = measured + (2 + 4 * measured) / count
    # up to a grid, so that few shapes are computed; rounding up widens the error, on the side of waiting
    rho = math.ceil(min(max(unbiased, 0.0), MAX_AUTOCORRELATION) / _RHO_GRID - 1e-9) * _RHO_GRID
    shape = _trend_shape(tuple(float(v) for v in x), round(rho, 10))
    # few points may lie closer to a line by chance than their sampling error allows
    variance = max(power / shape.trace, noise_floor**2)
    return GainEstimate(
        gain=slope * horizon,
        standard_error=math.sqrt(variance * shape.slope_variance) * horizon,
        degrees=shape.degrees,
    )


class _TrendShape(NamedTuple):
    """What a linear fit under AR(1) noise of unit variance depends on besides the values."""

    slope_variance: float
    trace: float
    degrees: float


@lru_cache(maxsize=512)
def _trend_shape(offsets: tuple[float, ...], rho: float) -> _TrendShape:
    count = len(offsets)
    centred = np.asarray(offsets) - np.mean(offsets)
    norm = float(centred @ centred)
    # by observation, not by training step: what the lag-one correlation above was measured on
    correlation = np.power(rho, np.abs(np.subtract.outer(np.arange(count), np.arange(count))))
    residual_maker = np.eye(count) - 1.0 / count - np.outer(centred, centred) / norm
    spread = residual_maker @ correlation
    trace = float(np.trace(spread))
    # E[residual power] = sigma^2 * trace; its variance gives Satterthwaite's degrees of freedom.
    return _TrendShape(
        slope_variance=float(centred @ correlation @ centred) / norm**2,
        trace=trace,
        degrees=trace**2 / float(np.sum(spread * spread.T)),
    )


class ConvergenceTest:
    """Switch when the upper bound of the gain expected over the next H steps is below ``delta``.

    A look is taken after every ``window`` observations. Look j may err with probability
    (1 - confidence) / (j (j + 1)), which sums to 1 - confidence over any number of looks; it shares this
    over the stretches it tries: the last ``window`` observations, twice as many, four times, ... as far as
    the curve reaches. So a noisy curve is judged on a longer stretch. A stretch whose gain is not even known
    to within ``delta`` (one standard error) decides nothing, however far its trend happens to fall; where no
    stretch can decide the test waits (the stage's ``max_steps`` bounds it).

    What to expect, with ``sigma`` the noise of one observation, rho the correlation of successive ones, and
    windows of 20 observations or more (measured on simulated curves, see the tests):

    * a curve that still rises by 2 delta per H is left in at most 1 - confidence of runs, over all looks, for
      any ``sigma`` and rho up to 0.6; with shorter windows or stronger correlation only for ``sigma`` up to
      about twice ``noise_limit``, because rho itself is then hard to estimate;
    * a flat curve is left within two windows in at least 90 % of runs for ``sigma`` up to ``noise_limit``,
      that is delta * (2 window)^1.5 / (18 H) with H in observations, times sqrt((1 - rho) / (1 + rho)).
      Above it the test needs more windows.

    Args:
        horizon: H, in training steps.
        delta: gain over H steps that is still worth staying for, in units of the curve.
        window: observations between looks, and the fewest that a look uses.
        confidence: 1 - error over all looks of the stage.
    """

    def __init__(self, *, horizon: float, delta: float, window: int, confidence: float = 0.95) -> None:
        if horizon <= 0 or delta <= 0:
            raise ValueError(f"horizon and delta must be > 0, got {horizon} and {delta}")
        if window < MIN_POINTS:
            raise ValueError(f"window must be at least {MIN_POINTS} observations, got {window}")
        if not 0.5 < confidence < 1:
            raise ValueError(f"confidence must lie between 0.5 and 1, got {confidence}")
        self.horizon = horizon
        self.delta = delta
        self.window = window
        self.confidence = confidence
        self._steps: list[float] = []
        self._values: list[float] = []
        self._errors: list[float | None] = []
        self.converged = False

    def observe(self, step: float, value: float, standard_error: float | None = None) -> bool:
        """Add a point of the curve; True once the stage has converged (and from then on).

        Args:
            step: training step; must increase.
            value: accuracy at that step.
            standard_error: sampling error of ``value`` if known; the noise is taken to be at least that.
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
        """One look: the lowest bound of the gain among the stretches sharp enough to judge, infinite without any."""
        number = len(self._steps) // self.window
        lengths = [self.window * 2**i for i in range(number.bit_length())]
        # the lowest bound decides, so each stretch gets an equal part of the look's error (Bonferroni)
        error = (1 - self.confidence) / (number * (number + 1)) / len(lengths)
        estimates = [
            expected_gain(self._steps[-n:], self._values[-n:], self.horizon, self._noise_floor(n)) for n in lengths
        ]
        sharp = [estimate for estimate in estimates if estimate.standard_error <= self.delta]
        return min((estimate.upper_bound(error) for estimate in sharp), default=math.inf)

    def _noise_floor(self, points: int) -> float:
        known = [error for error in self._errors[-points:] if error is not None]
        return math.sqrt(sum(error**2 for error in known) / len(known)) if known else 0.0

    def state(self) -> dict[str, Any]:
        """The curve so far, as JSON."""
        return {
            "steps": list(self._steps),
            "values": list(self._values),
            "standard_errors": list(self._errors),
            "converged": self.converged,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; the settings come from the recipe."""
        self._steps = [float(v) for v in state["steps"]]
        self._values = [float(v) for v in state["values"]]
        self._errors = [None if v is None else float(v) for v in state["standard_errors"]]
        self.converged = bool(state["converged"])


def noise_limit(*, horizon: float, delta: float, window: int, correlation: float = 0.0) -> float:
    """Largest noise of an observation at which a flat curve is left within two windows in 90 % of runs.

    Inverted, it says how long a window a noisy curve needs: (18 H sigma / delta)^(2/3) / 2 observations.

    Args:
        horizon: H, counted in observations.
        delta: the gain that would still be worth staying for.
        window: observations.
        correlation: rho of successive observations.

    Example: H = window = 20 and delta = 0.02 allow 0.014: a validation of 1,200 responses at accuracy 0.5, or
    training accuracy averaged over as many. At 128 responses a step (0.044) the window must be 43.
    """
    return delta * (2 * window) ** 1.5 / (18 * horizon) * math.sqrt((1 - correlation) / (1 + correlation))


class TruncationRule:
    """Switch when the truncated share has stayed below a threshold for a window of observations.

    The stage's T then no longer binds, and the next one is the place to go on.
    """

    def __init__(self, *, below: float, window: int) -> None:
        if not 0 <= below <= 1:
            raise ValueError(f"truncation_below must lie between 0 and 1, got {below}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.below = below
        self.window = window
        self._run = 0

    def observe(self, step: float, value: float, standard_error: float | None = None) -> bool:
        """Add the truncated share of a step; True once the last ``window`` of them were below the threshold."""
        assert 0 <= value <= 1, f"truncated share {value} at step {step}"
        self._run = self._run + 1 if value < self.below else 0
        return self._run >= self.window

    def state(self) -> dict[str, Any]:
        return {"run": self._run}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._run = int(state["run"])
