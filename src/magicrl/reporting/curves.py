"""Curves of arms: the mean over an arm's runs with a band from the smallest to the largest, over several x axes.

Pure functions, no drawing: what the comparing report shows, and what other figures over arms are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from magicrl.reporting.arms import Arm
from magicrl.reporting.charts import Points, running_mean_of_parts, smoothing_window
from magicrl.reporting.run_folder import RecordedRun

Axis: TypeAlias = Literal["steps", "tokens", "wall", "gpu-hours"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "wall", "gpu-hours")

MOST_POINTS = 160
"""Steps of one curve; of a longer run evenly spaced ones are taken, the first and the last among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmPoint:
    """One training step of an arm: the mean over its runs and their smallest and largest value."""

    step: float
    mean: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmCurve:
    """One metric of an arm.

    Attributes:
        points: of the steps that every run of the arm has, ascending.
        tails: (run's index, its (step, value) points) of the runs that go on after the shortest has ended; each begins
            with the last common step.
    """

    points: tuple[ArmPoint, ...]
    tails: tuple[tuple[int, Points], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The unit of an x axis: ``name`` for its title, and what its values are divided by."""

    name: str
    divisor: float


def smoothed(points: Points, breaks: Sequence[float]) -> Points:
    """The running mean as in a run's own report, never across ``breaks`` (stage changes)."""
    window = smoothing_window(len(points))
    return points if window == 1 else running_mean_of_parts(points, window, breaks)


def arm_curve(runs: Sequence[Points]) -> ArmCurve:
    """The arm's curve from the (step, value) points of its runs that have the metric.

    The mean is taken over the same runs at every step, so that no jump comes from a run that ended earlier: beyond the
    end of the shortest run each other one goes on by itself. Steps are never interpolated; with one run the band has
    no width.
    """
    tables = {i: dict(points) for i, points in enumerate(runs) if points}
    if not tables:
        return ArmCurve(points=(), tails=())
    common = sorted(set.intersection(*(set(table) for table in tables.values())))
    points = tuple(_point(step, [table[step] for table in tables.values()]) for step in evenly(common, MOST_POINTS))
    tails: list[tuple[int, Points]] = []
    for i, table in tables.items():
        beyond = [step for step in sorted(table) if not common or step >= common[-1]]
        if len(beyond) > 1:
            tails.append((i, tuple((step, table[step]) for step in evenly(beyond, MOST_POINTS))))
    return ArmCurve(points=points, tails=tuple(tails))


def _point(step: float, values: Sequence[float]) -> ArmPoint:
    return ArmPoint(step=step, mean=sum(values) / len(values), low=min(values), high=max(values), runs=len(values))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """At most ``most`` of ``values``, evenly spaced by index, both ends among them."""
    last = len(values) - 1
    if last < most:
        return list(values)
    return [values[i] for i in sorted({round(i * last / (most - 1)) for i in range(most)})]


def devices(run: RecordedRun) -> int:
    """Accelerators (or CPU machines) that a run held: ``devices`` of run.json, 1 where a run records none."""
    recorded = run.run.get("devices")
    return recorded if isinstance(recorded, int) and recorded > 0 else 1


def positions(run: RecordedRun, axis: Axis) -> dict[float, float]:
    """Training step -> x of its end, in steps, response tokens, seconds or device hours; empty if it was not recorded.

    Tokens are all response tokens sampled so far (``tokens/sampled``), also those of rejected groups. Wall time is the
    sum of the steps' wall clocks (``time/step``): tests, the start and pauses between sessions are not in it. Device
    hours are wall time in hours times ``devices(run)``.
    """
    if axis == "steps":
        return {float(row.step): float(row.step) for row in run.metrics}
    points = run.points("tokens/sampled" if axis == "tokens" else "time/step")
    if len(points) < len(run.metrics):
        return {}  # a sum with gaps would be too small
    factor = devices(run) / 3600 if axis == "gpu-hours" else 1.0
    found: dict[float, float] = {}
    total = 0.0
    for step, value in points:
        total += value * factor
        found[step] = total
    return found


def common_positions(tables: Sequence[Mapping[float, float]]) -> dict[float, float]:
    """Step -> mean x over the runs of an arm, for the steps that all of them have; empty where one recorded none."""
    if not tables or not all(tables):
        return {}
    steps = set(tables[0]).intersection(*tables[1:])
    return {step: sum(table[step] for table in tables) / len(tables) for step in sorted(steps)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmAxes:
    """Where the steps of all arms lie on every x axis, read once.

    Attributes:
        scales: the unit of each axis that at least one arm has recorded.
        runs: by axis, arm and run: step -> x, in that unit.
        arms: by axis and arm: step -> mean x over the arm's runs that have any step; empty where one recorded none.
    """

    scales: Mapping[Axis, Scale]
    runs: Mapping[Axis, Sequence[Sequence[Mapping[float, float]]]]
    arms: Mapping[Axis, Sequence[Mapping[float, float]]]


def arm_axes(arms: Sequence[Arm]) -> ArmAxes:
    """All axes of a comparison."""
    scales: dict[Axis, Scale] = {}
    runs: dict[Axis, list[list[dict[float, float]]]] = {}
    means: dict[Axis, list[dict[float, float]]] = {}
    for axis in AXES:
        tables = [[positions(run, axis) for run in arm.runs] for arm in arms]
        largest = max((x for arm in tables for run in arm for x in run.values()), default=None)
        if largest is None:
            continue
        scale = scales[axis] = axis_scale(axis, largest)
        runs[axis] = [[{step: x / scale.divisor for step, x in run.items()} for run in arm] for arm in tables]
        means[axis] = [
            common_positions([table for table, run in zip(of_arm, arm.runs, strict=True) if run.metrics])
            for of_arm, arm in zip(runs[axis], arms, strict=True)
        ]
    return ArmAxes(scales=scales, runs=runs, arms=means)


def axis_scale(axis: Axis, largest: float) -> Scale:
    """A unit in which the largest x is a readable number."""
    if axis == "steps":
        return Scale(name="training step", divisor=1.0)
    if axis == "tokens":
        units = (("billion ", 1e9), ("million ", 1e6), ("thousand ", 1e3), ("", 1.0))
        word, divisor = next(unit for unit in units if largest >= 2 * unit[1] or unit[1] == 1)
        return Scale(name=f"{word}response tokens sampled", divisor=divisor)
    if axis == "wall":
        units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        word, divisor = next(unit for unit in units if largest >= 2 * unit[1] or unit[1] == 1)
        return Scale(name=f"{word} of training steps", divisor=divisor)
    units = (("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))
    word, divisor = next(unit for unit in units if largest >= 2 * unit[1] or unit[0] == "seconds")
    return Scale(name=f"device {word}", divisor=divisor)


def totals(run: RecordedRun) -> Mapping[Axis, float | None]:
    """What a run has spent so far on each axis (steps, tokens, seconds, device hours); None: not recorded."""
    tables: dict[Axis, dict[float, float]] = {axis: positions(run, axis) for axis in AXES}
    found: dict[Axis, float | None] = {axis: max(table.values(), default=None) for axis, table in tables.items()}
    found["steps"] = float(len(run.metrics))
    return found
