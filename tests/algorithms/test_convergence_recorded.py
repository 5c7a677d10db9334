"""The stage transition on curves of real runs: it waits while they rise and leaves when they are flat."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from magicrl.algorithms.convergence import ConvergenceTest

RUNS = json.loads((Path(__file__).parent / "recorded_curves.json").read_text())["runs"]
HORIZON, DELTA, WINDOW = 20, 0.05, 20


def switch_step(accuracy: list[float], errors: list[float]) -> int | None:
    test = ConvergenceTest(horizon=HORIZON, delta=DELTA, window=WINDOW)
    for step, (value, error) in enumerate(zip(accuracy, errors, strict=True)):
        if test.observe(step, value, error):
            return step + 1
    return None


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"seed-{r['seed']}")
def test_it_leaves_where_little_was_left_to_gain(run: dict[str, list[float]]) -> None:
    step = switch_step(run["accuracy"], run["standard_error"])
    assert step == len(run["accuracy"]), "the recorded run switched here by this very test"
    before = float(np.mean(run["accuracy"][step - 2 * WINDOW : step - WINDOW]))
    last = float(np.mean(run["accuracy"][step - WINDOW : step]))
    assert last - before < DELTA


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"seed-{r['seed']}")
def test_it_never_leaves_while_the_next_window_gains_twice_delta(run: dict[str, list[float]]) -> None:
    accuracy = run["accuracy"]
    step = switch_step(accuracy, run["standard_error"])
    assert step is not None
    windows = [float(np.mean(accuracy[i : i + WINDOW])) for i in range(0, len(accuracy) - WINDOW + 1, WINDOW)]
    rising = [i for i, (a, b) in enumerate(pairwise(windows)) if b - a >= 2 * DELTA]
    assert rising, "the curves do rise"
    assert step > (max(rising) + 1) * WINDOW


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"seed-{r['seed']}")
def test_a_recorded_plateau_is_left_within_two_windows(run: dict[str, list[float]]) -> None:
    level, errors = run["accuracy"][-WINDOW:], run["standard_error"][-WINDOW:]
    flat = np.array(level) - np.polyval(np.polyfit(range(WINDOW), level, 1), range(WINDOW)) + np.mean(level)
    assert switch_step([*flat, *flat], [*errors, *errors]) is not None
