"""Reading metrics for the health rules: columns, recent values, differences and trends with their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from magicrl.records import StepMetrics

Series: TypeAlias = Sequence[StepMetrics]
"""The training steps so far, oldest first."""


def column(series: Series, *keys: str) -> list[float]:
    """The finite numbers of the first of ``keys`` that each step has; steps without one are left out."""
    found: list[float] = []
    for row in series:
        for key in keys:
            value = row.values.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.append(float(value))
                break
    return found


def tail(series: Series, count: int, *keys: str) -> list[float]:
    """The last ``count`` numbers of ``column``, oldest first, without reading the whole run for them."""
    found: list[float] = []
    for row in reversed(series):
        if len(found) == count:
            break
        found.extend(column([row], *keys))
    return found[::-1]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one number."""
    return sum(values) / len(values)


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Difference of two windows' means and its standard error, from the scatter inside the windows."""
    variance = 0.0
    for window in (before, after):
        if len(window) > 1:
            centre = mean(window)
            variance += sum((v - centre) ** 2 for v in window) / (len(window) - 1) / len(window)
    return mean(after) - mean(before), math.sqrt(variance)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Rise of the least-squares line over all of ``values`` (three or more), and its standard error."""
    n = len(values)
    centre, middle = mean(values), (n - 1) / 2
    spread = n * (n * n - 1) / 12
    slope = sum((i - middle) * (v - centre) for i, v in enumerate(values)) / spread
    residual = sum((v - centre - slope * (i - middle)) ** 2 for i, v in enumerate(values))
    return slope * (n - 1), math.sqrt(residual / (n - 2) / spread) * (n - 1)


def this_stage(series: Series) -> Series:
    """The steps of the stage that the last step belongs to."""
    first = len(series)
    while first > 0 and series[first - 1].stage == series[-1].stage:
        first -= 1
    return series[first:]


def percent(share: float) -> str:
    """``0.123`` as ``12 %``."""
    return f"{100 * share:.0f} %"
