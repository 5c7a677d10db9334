"""Quantiles of Student's t distribution, so that the library does not need scipy for one function."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def student_cdf(t: float, degrees: float) -> float:
    """P(T <= t) for real ``degrees`` > 0.

    With t = sqrt(degrees) * tan(a) the density becomes a power of a cosine, smooth on a bounded interval,
    which Gauss-Legendre quadrature integrates to about 1e-12.
    """
    if t < 0:
        return 1.0 - student_cdf(-t, degrees)
    angle = math.atan(t / math.sqrt(degrees))
    nodes = angle * (_NODES + 1) / 2
    area = float(np.sum(_WEIGHTS * np.cos(nodes) ** (degrees - 1))) * angle / 2
    log_norm = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(math.pi)
    return 0.5 + math.exp(log_norm) * area


@lru_cache(maxsize=4096)
def student_quantile(probability: float, degrees: float) -> float:
    """The t with P(T <= t) = ``probability``, by bisection.

    Raises:
        ValueError: a probability outside (0, 1) or degrees that are not positive.
    """
    if not 0 < probability < 1 or not degrees > 0:
        raise ValueError(f"no t quantile for probability {probability} and {degrees} degrees of freedom")
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability and high < 1e9:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2
