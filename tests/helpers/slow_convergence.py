"""The test of convergence of the slow loop: the gain of more steps, and its upper bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as students_t


def upper_bound(curve: Sequence[tuple[int, float, float | None]], rule: Mapping[str, Any]) -> float:
    """Return the smallest upper bound of the gain over H more steps, over the windows that know it to within delta.

    Look j shares (1 - confidence) / (j (j + 1)) over the last window, two windows, four windows, ...; noise is AR(1)
    with a correlation estimated from the residuals, corrected by (2 + 4 rho) / n and rounded up to a grid of 0.05.
    """
    look = len(curve) // rule["window"]
    lengths = [rule["window"] * 2**i for i in range(20) if rule["window"] * 2**i <= len(curve)]
    error = (1 - rule["confidence"]) / (look * (look + 1)) / len(lengths)
    bounds = [math.inf]
    for length in lengths:
        gain, deviation, degrees = _gain(curve[-length:], rule["horizon"])
        if deviation <= rule["delta"]:
            bounds.append(gain + float(students_t.ppf(1 - error, degrees)) * deviation)
    return min(bounds)


def _gain(curve: Sequence[tuple[int, float, float | None]], horizon: int) -> tuple[float, float, float]:
    """Return gain over the horizon, its standard error and degrees of freedom."""
    n = len(curve)
    x = np.array([step for step, *_ in curve], dtype=float)
    y = np.array([value for _, value, _ in curve])
    slope, intercept = np.polyfit(x, y, 1)
    residuals = y - slope * x - intercept
    known = [error**2 for *_, error in curve if error is not None]
    floor = sum(known) / len(known) if known else 0.0
    power = float(residuals @ residuals)
    measured = float(residuals[1:] @ residuals[:-1]) / power if power > 1e-24 else -1.0
    rho = min(max(measured + (2 + 4 * measured) / n, 0.0), 0.95)
    rho = math.ceil(rho / 0.05 - 1e-9) * 0.05
    correlation = np.array([[rho ** abs(i - j) if rho else float(i == j) for j in range(n)] for i in range(n)])
    design = np.stack([np.ones(n), x - x.mean()], 1)
    maker = np.eye(n) - design @ np.linalg.inv(design.T @ design) @ design.T
    spread = maker @ correlation
    centred = x - x.mean()
    slope_variance = float(centred @ correlation @ centred) / float(centred @ centred) ** 2
    variance = max(power / float(np.trace(spread)), floor)
    degrees = float(np.trace(spread)) ** 2 / float(np.trace(spread @ spread))
    return float(slope) * horizon, math.sqrt(variance * slope_variance) * horizon, degrees
