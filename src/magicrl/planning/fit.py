"""Finding the four unknowns from published step times, and how far they carry.

The unknowns are logarithms of ``Efficiency``'s kv, step_overhead, learner and other. Five figures fix them: Table 9 at
32 and 256 GPUs, and the three parts of Table 8's first row. Residuals are logarithms of predicted over published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from magicrl.planning.costs import Efficiency
from magicrl.planning.published import Resolved, Row, resolve
from magicrl.planning.workload import StepTime, step_time

UNKNOWNS = ("kv", "step_overhead", "learner", "other")
START = Efficiency(kv=0.3, step_overhead=0.004, learner=0.3, other=0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Values of the unknowns and how sure they are.

    Attributes:
        efficiency: the values.
        covariance: ``[4, 4]`` of their logarithms, in the order of ``UNKNOWNS``.
        residuals: log(predicted / published) of the fitted rows.
    """

    efficiency: Efficiency
    covariance: NDArray[np.float64]
    residuals: dict[str, float]


def with_unknowns(logarithms: NDArray[np.float64], base: Efficiency = START) -> Efficiency:
    """The efficiency whose unknowns have these logarithms."""
    values = {name: exp(float(value)) for name, value in zip(UNKNOWNS, logarithms, strict=True)}
    return replace(base, **values)


def unknowns_of(efficiency: Efficiency) -> NDArray[np.float64]:
    """Logarithms of the unknowns."""
    return np.array([log(getattr(efficiency, name)) for name in UNKNOWNS])


def part_seconds(time: StepTime, part: str) -> float:
    """One part of a step as the report's tables count."""
    return {"rollout": time.rollout, "learn": time.learn, "other": time.other, "step": time.seconds}[part]


def predict(row: Row, efficiency: Efficiency, resolved: Resolved | None = None, draws: int = 6) -> float:
    """Seconds that the model gives for a published figure."""
    r = resolved or resolve(row.setting)
    return part_seconds(step_time(r.shape, r.hardware, efficiency, r.work, r.layout, draws), row.part)


def fit(
    rows: Sequence[Row], uncertainty: float, make: Callable[[Row], Resolved] | None = None, draws: int = 6
) -> Fitted:
    """Least squares on the rows marked ``fitted``.

    Args:
        rows: published figures; the others are ignored.
        uncertainty: relative standard deviation of a published figure about the model, for the covariance.
        make: how a row's setting is understood; default: ``resolve`` with its assumptions.
        draws: of lengths, the same for all values.

    Raises:
        ValueError: fewer rows than unknowns.
    """
    used = [row for row in rows if row.fitted]
    if len(used) < len(UNKNOWNS):
        raise ValueError(f"{len(UNKNOWNS)} unknowns need as many rows to be fitted on, got {len(used)}")
    resolved = [make(row) if make else resolve(row.setting) for row in used]

    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        efficiency = with_unknowns(logarithms)
        found = (predict(row, efficiency, r, draws) for row, r in zip(used, resolved, strict=True))
        return np.array([log(value / row.seconds) for value, row in zip(found, used, strict=True)])

    start = unknowns_of(START)
    low, high = np.log([0.02, 1e-5, 0.02, 1e-4]), np.log([1.0, 0.1, 1.0, 1.0])
    solved = least_squares(residuals, start, bounds=(low, high), diff_step=1e-3, xtol=1e-6)
    jacobian = np.asarray(solved.jac, dtype=np.float64)
    return Fitted(
        efficiency=with_unknowns(solved.x),
        # an unknown at its bound has no slope: the pseudo-inverse gives it no variance
        covariance=np.asarray(np.linalg.pinv(jacobian.T @ jacobian), dtype=np.float64) * uncertainty**2,
        residuals={row.name: float(value) for row, value in zip(used, solved.fun, strict=True)},
    )


def curve(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The plain curve t = a + b / N through two points ``(N, seconds)``.

    Example:
        >>> curve([(1, 30.0), (2, 20.0)])
        (10.0, 20.0)
    """
    (n, first), (m, second) = points
    b = (first - second) / (1 / n - 1 / m)
    return first - b / n, b
