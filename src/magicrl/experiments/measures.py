"""Numbers that claims are made of, each a function of one run's curves.

A measure is written ``NAME@PLACE``:

=====================  ============================================================================================
``CURVE@20``           the curve's mean over steps 18 to 22
``CURVE@start``        over its first three steps
``CURVE@late``         over its last tenth (five steps at least)
``CURVE@max``          the largest mean of five steps in a row, ``CURVE@min`` the smallest
``fall:CURVE@20``      its start minus its value there, so that runs that start elsewhere can be compared
``test@1.0``           accuracy on the test set after training, at this temperature; ``start@1.0`` before it
``rise@1.0``           the one minus the other
``drop:CURVE``         its ``max`` minus its ``late``: how far it fell back from its best; 0 if it still rises
``spread:CURVE``       the standard deviation of its second half, a straight line taken off
``CURVE@tokens:20000`` the mean of five steps around the one at which so many tokens had been sampled; also of
                       ``updates:``, ``seconds:``. A run that ended before has no such number.
``steps:CURVE>0.8``    steps until five in a row have a mean above 0.8; ``tokens:`` sampled tokens, ``updates:`` SGD
                       steps, ``seconds:`` time of the steps. A run that never gets there counts as long as it lasted,
                       which is too little.
``held:0.1``           share of the steps with entropy above 0.1 - 0.02, after the first that is below
=====================  ============================================================================================

Curves: accuracy, accuracy_nontruncated, truncation, length, entropy, alpha, kl, clip, rejected, grad_norm, validation.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Curves: TypeAlias = Mapping[str, Sequence[float | None]]
Result: TypeAlias = Mapping[str, Any]
"""A line of the results file: ``curves``, ``tests`` and what made them (see ``runner``)."""
Measure: TypeAlias = Callable[[Result], float]

CURVES = {
    "accuracy": "train/accuracy_unfiltered/mean",
    "accuracy_nontruncated": "train/accuracy_nontruncated/mean",
    "truncation": "train/truncation/ratio",
    "length": "length/mean",
    "entropy": "entropy/exact/mean",
    "alpha": "entropy/alpha",
    "kl": "learner/kl",
    "clip": "learner/clip_ratio",
    "rejected": "groups/rejected/ratio",
    "grad_norm": "learner/grad_norm",
    "validation": "validation/accuracy/mean",
}
"""Names of the curves that a result keeps, and the metric each is."""
COSTS = {"tokens": "tokens/sampled", "updates": "learner/sgd_steps", "seconds": "time/step"}
"""Costs of a step; results keep their running sums."""
WINDOW = 5
HELD_MARGIN = 0.02


def parse_measure(text: str) -> Measure:
    """The measure that ``text`` names.

    Raises:
        ValueError: it names none; the text says what is wrong.
    """
    reach = re.fullmatch(r"(steps|tokens|updates|seconds):(\w+)>(\d*\.?\d+)", text)
    if reach:
        cost, curve, bound = reach[1], _curve(reach[2], text), float(reach[3])
        return lambda result: _cost_until(result["curves"], cost, curve, bound)
    if held := re.fullmatch(r"held:(\d*\.?\d+)", text):
        target = float(held[1])
        return lambda result: _held(result["curves"], target)
    test = re.fullmatch(r"(test|start|rise)@(\d*\.?\d+)", text)
    if test:
        kind, temperature = test[1], str(float(test[2]))
        return lambda result: _tested(result["tests"], kind, temperature)
    if whole := re.fullmatch(r"(drop|spread):(\w+)", text):
        function, curve = {"drop": _drop, "spread": _spread}[whole[1]], _curve(whole[2], text)
        return lambda result: function(result["curves"], curve)
    if spent := re.fullmatch(r"(\w+)@(tokens|updates|seconds):(\d+)", text):
        curve, cost, amount = _curve(spent[1], text), spent[2], float(spent[3])
        return lambda result: _at_cost(result["curves"], curve, cost, amount)
    at = re.fullmatch(r"(fall:)?(\w+)@(start|late|max|min|\d+)", text)
    if at:
        curve, place = _curve(at[2], text), at[3]
        if at[1]:
            return lambda result: _at(result["curves"], curve, "start") - _at(result["curves"], curve, place)
        return lambda result: _at(result["curves"], curve, place)
    raise ValueError(f"no measure {text!r}; write CURVE@STEP, test@1.0, steps:accuracy>0.8 or held:0.1, for example")


def _curve(name: str, text: str) -> str:
    if name not in CURVES:
        near = difflib.get_close_matches(name, CURVES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"measure {text!r}: no curve {name!r}; {hint}known: {', '.join(CURVES)}")
    return name


def _values(curves: Curves, name: str) -> NDArray[np.float64]:
    """``[steps]``; nan where a step did not measure it (validation, or a step without an update)."""
    return np.array([math.nan if value is None else value for value in curves.get(name, ())], dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _at(curves: Curves, name: str, place: str) -> float:
    values = _values(curves, name)
    if place == "start":
        return _mean(values[:3])
    if place == "late":
        return _mean(values[-max(WINDOW, len(values) // 10) :])
    if place in ("max", "min"):
        means = _running_means(values)
        if not len(means):
            return math.nan
        return float(means.max() if place == "max" else means.min())
    step = int(place)
    if step > len(values):
        return math.nan
    return _mean(values[max(0, step - 1 - WINDOW // 2) : step + WINDOW // 2])


def _running_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of ``WINDOW`` finite values in a row."""
    finite = values[np.isfinite(values)]
    if len(finite) < WINDOW:
        return finite[:0]
    return np.convolve(finite, np.full(WINDOW, 1 / WINDOW), mode="valid").astype(np.float64)


def _cost_until(curves: Curves, cost: str, name: str, bound: float) -> float:
    values = _values(curves, name)
    spent = np.arange(1, len(values) + 1, dtype=np.float64) if cost == "steps" else _values(curves, cost)
    at = np.flatnonzero(np.isfinite(values))
    above = np.flatnonzero(_running_means(values) > bound)
    if not len(spent):
        return math.nan
    return float(spent[at[above[0] + WINDOW - 1]]) if len(above) else float(spent[-1])


def _at_cost(curves: Curves, name: str, cost: str, amount: float) -> float:
    spent = _values(curves, cost)
    if not len(spent) or spent[-1] < amount:
        return math.nan
    return _at(curves, name, str(int(np.searchsorted(spent, amount)) + 1))


def _drop(curves: Curves, name: str) -> float:
    fallen = _at(curves, name, "max") - _at(curves, name, "late")
    return math.nan if math.isnan(fallen) else max(0.0, fallen)


def _spread(curves: Curves, name: str) -> float:
    values = _values(curves, name)
    steps = np.arange(len(values))
    keep = np.isfinite(values) & (steps >= len(values) // 2)
    if keep.sum() < WINDOW:
        return math.nan
    slope, offset = np.polyfit(steps[keep], values[keep], 1)
    return float(np.std(values[keep] - (slope * steps[keep] + offset)))


def _held(curves: Curves, target: float) -> float:
    values = _values(curves, "entropy")
    below = np.flatnonzero(values < target)
    if not len(below):
        return 1.0
    return _mean((values[below[0] :] > target - HELD_MARGIN).astype(np.float64))


def _tested(tests: Mapping[str, Mapping[str, float]], kind: str, temperature: str) -> float:
    before = tests["before"].get(temperature, math.nan)
    after = tests["after"].get(temperature, math.nan)
    return {"test": after, "start": before, "rise": after - before}[kind]
