"""Error rates of the stage transition on synthetic curves with known truth, by simulation with fixed seeds.

Also on curves of real runs: it waits while they rise and ends the stage when they are flat.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from magicrl.algorithms.convergence import ConvergenceTest, TruncationRule, expected_gain

HORIZON, DELTA, WINDOW = 20, 0.02, 20
RUNS = 300
LIMIT = DELTA * (2 * WINDOW) ** 1.5 / (18 * HORIZON)


def noise(rng: np.random.Generator, count: int, sigma: float, rho: float) -> np.ndarray:
    """Return AR(1) noise of standard deviation ``sigma``."""
    fresh = rng.normal(size=count) * sigma
    out = np.empty(count)
    out[0] = fresh[0]
    for i in range(1, count):
        out[i] = rho * out[i - 1] + math.sqrt(1 - rho**2) * fresh[i]
    return out


def switch_steps(curve, *, sigma: float, rho: float, steps: int, seed: int = 0) -> np.ndarray:
    """Return the step at which each of ``RUNS`` runs switched; infinite if it never did."""
    rng = np.random.default_rng(seed)
    truth = curve(np.arange(steps, dtype=float))
    found = np.full(RUNS, np.inf)
    for run in range(RUNS):
        test = ConvergenceTest(horizon=HORIZON, delta=DELTA, window=WINDOW)
        for step, value in enumerate(truth + noise(rng, steps, sigma, rho)):
            if test.observe(step, float(value)):
                found[run] = step
                break
    return found


def in_regime(rho: float, factor: float = 1.0) -> float:
    return factor * LIMIT * math.sqrt((1 - rho) / (1 + rho))


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 16.0])
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_still_rising_at_two_delta_switches_wrongly_in_at_most_five_percent(rho, factor):
    found = switch_steps(
        lambda t: 0.1 + 2 * DELTA / HORIZON * t, sigma=in_regime(rho, factor), rho=rho, steps=12 * WINDOW
    )
    assert np.mean(np.isfinite(found)) <= 0.05


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_flat_switches_within_two_windows_in_at_least_ninety_percent(rho):
    found = switch_steps(lambda t: 0.6 + 0 * t, sigma=in_regime(rho), rho=rho, steps=2 * WINDOW)
    assert np.mean(np.isfinite(found)) >= 0.90


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_saturating_exponential_is_not_left_while_it_gains_two_delta(rho, factor):
    tau = 60.0
    found = switch_steps(
        lambda t: 0.9 - 0.6 * np.exp(-t / tau), sigma=in_regime(rho, factor), rho=rho, steps=20 * WINDOW
    )
    gain_at_start = 0.6 * (1 - math.exp(-HORIZON / tau))
    still_rising_until = tau * math.log(gain_at_start / (2 * DELTA))
    assert np.mean(found < still_rising_until) <= 0.05
    assert np.mean(np.isfinite(found)) >= 0.90  # the stage ends at last


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_a_rise_that_stops_is_left_soon_after_and_not_before(rho):
    elbow = 100
    found = switch_steps(lambda t: np.minimum(0.3 + 0.004 * t, 0.7), sigma=in_regime(rho), rho=rho, steps=14 * WINDOW)
    assert np.mean(found < elbow) <= 0.05
    # Two windows wholly after the elbow end within three of it.
    assert np.mean(found < elbow + 3 * WINDOW) >= 0.90


def test_too_much_noise_waits():
    found = switch_steps(lambda t: 0.5 + 0 * t, sigma=in_regime(0.0, 30.0), rho=0.0, steps=4 * WINDOW)
    assert not np.isfinite(found).any()


def test_a_noiseless_flat_curve_switches_at_the_first_look_and_a_rising_one_never():
    flat = ConvergenceTest(horizon=10, delta=0.01, window=5)
    assert [flat.observe(step, 0.5) for step in range(6)] == [False] * 4 + [True, True]
    rising = ConvergenceTest(horizon=10, delta=0.01, window=5)
    assert not any(rising.observe(step, 0.0011 * step) for step in range(100))
    falling = ConvergenceTest(horizon=10, delta=0.01, window=5)
    assert any(falling.observe(step, 0.9 - 0.01 * step) for step in range(5))


def test_known_sampling_error_widens_a_lucky_fit():
    quiet = [0.5, 0.5, 0.5, 0.5]
    assert expected_gain([0, 1, 2, 3], quiet, 10)[1] == 0
    # slope variance of four points is sigma^2 / 5
    assert expected_gain([0, 1, 2, 3], quiet, 10, 0.1)[1] == pytest.approx(10 * 0.1 / math.sqrt(5))
    test = ConvergenceTest(horizon=10, delta=0.05, window=4)
    assert not any(test.observe(step, 0.5, standard_error=0.1) for step in range(4))


def test_trend_and_error_by_hand_for_independent_noise():
    steps = list(range(8))
    values = [0.1 * s + (0.05 if s % 2 else -0.05) for s in steps]  # alternating: rho is estimated below 0
    gain, error, degrees = expected_gain(steps, values, 20)
    fit = stats.linregress(steps, values)
    assert gain == pytest.approx(20 * fit.slope)
    assert error == pytest.approx(20 * fit.stderr)
    assert degrees == pytest.approx(6)


def test_steps_count_not_observations():
    values = [0.1, 0.2, 0.25, 0.4]
    every, sparse = expected_gain([0, 1, 2, 3], values, 20), expected_gain([0, 5, 10, 15], values, 20)
    assert every[:2] == pytest.approx([5 * found for found in sparse[:2]])


def test_correlated_noise_widens_the_error():
    rng = np.random.default_rng(0)
    rough = noise(rng, 200, 0.1, 0.0)
    smooth = noise(rng, 200, 0.1, 0.7)
    steps = list(range(200))
    ratio = expected_gain(steps, smooth.tolist(), 1)[1] / expected_gain(steps, rough.tolist(), 1)[1]
    assert ratio > 1.7  # sqrt(1.7 / 0.3) = 2.4 in theory


def test_state_survives_json_and_goes_on_the_same():
    rng = np.random.default_rng(2)
    values = [float(v) for v in 0.6 + noise(rng, 80, 0.02, 0.3)]
    whole, first, second = (ConvergenceTest(horizon=20, delta=0.02, window=20) for _ in range(3))
    expected = [whole.observe(step, value) for step, value in enumerate(values)]
    head = [first.observe(step, value) for step, value in enumerate(values[:33])]
    second.restore(json.loads(json.dumps(first.state())))
    assert head + [second.observe(33 + i, value) for i, value in enumerate(values[33:])] == expected
    assert whole.converged
    assert second.converged
    third = ConvergenceTest(horizon=20, delta=0.02, window=20)
    third.restore(json.loads(json.dumps(second.state())))
    assert third.observe(len(values), values[-1]), "from then on, also between two looks"


def test_a_restored_test_still_knows_the_sampling_errors():
    before = ConvergenceTest(horizon=10, delta=0.05, window=4)
    for step in range(3):
        before.observe(step, 0.5, standard_error=0.1)
    after = ConvergenceTest(horizon=10, delta=0.05, window=4)
    after.restore(json.loads(json.dumps(before.state())))
    # a flat curve converges at the fourth point, unless its known noise leaves room for a rise
    assert not after.observe(3, 0.5, standard_error=None)


@pytest.mark.parametrize(
    ("changes", "word"), [({"window": 3}, "window"), ({"delta": 0.0}, "delta"), ({"confidence": 1.0}, "confidence")]
)
def test_settings_are_checked(changes, word):
    with pytest.raises(ValueError, match=word):
        ConvergenceTest(**{"horizon": 20, "delta": 0.02, "window": 20, **changes})


def test_truncation_rule_needs_a_whole_window_below():
    rule = TruncationRule(below=0.05, window=3)
    assert [rule.observe(v) for v in [0.04, 0.04, 0.05, 0.0, 0.0]] == [False] * 5
    resumed = TruncationRule(below=0.05, window=3)
    resumed.restore(json.loads(json.dumps(rule.state())))
    assert resumed.observe(0.01)
    with pytest.raises(ValueError, match=r"1\.5"):
        TruncationRule(below=1.5, window=3)


RECORDED_RUNS = json.loads((Path(__file__).parent / "recorded_curves.json").read_text())["runs"]
RECORDED_DELTA = 0.05


def switch_step(accuracy: list[float], errors: list[float]) -> int | None:
    test = ConvergenceTest(horizon=HORIZON, delta=RECORDED_DELTA, window=WINDOW)
    for step, (value, error) in enumerate(zip(accuracy, errors, strict=True)):
        if test.observe(step, value, error):
            return step + 1
    return None


@pytest.mark.parametrize("run", RECORDED_RUNS, ids=lambda r: f"seed-{r['seed']}")
def test_it_leaves_where_little_was_left_to_gain(run: dict[str, list[float]]) -> None:
    step = switch_step(run["accuracy"], run["standard_error"])
    assert step == len(run["accuracy"]), "the recorded run switched here by this very test"
    before = float(np.mean(run["accuracy"][step - 2 * WINDOW : step - WINDOW]))
    last = float(np.mean(run["accuracy"][step - WINDOW : step]))
    assert last - before < RECORDED_DELTA


@pytest.mark.parametrize("run", RECORDED_RUNS, ids=lambda r: f"seed-{r['seed']}")
def test_it_never_leaves_while_the_next_window_gains_twice_delta(run: dict[str, list[float]]) -> None:
    accuracy = run["accuracy"]
    step = switch_step(accuracy, run["standard_error"])
    assert step is not None
    windows = [float(np.mean(accuracy[i : i + WINDOW])) for i in range(0, len(accuracy) - WINDOW + 1, WINDOW)]
    rising = [i for i, (a, b) in enumerate(pairwise(windows)) if b - a >= 2 * RECORDED_DELTA]
    assert rising, "the curves do rise"
    assert step > (max(rising) + 1) * WINDOW


@pytest.mark.parametrize("run", RECORDED_RUNS, ids=lambda r: f"seed-{r['seed']}")
def test_a_recorded_plateau_is_left_within_two_windows(run: dict[str, list[float]]) -> None:
    level, errors = run["accuracy"][-WINDOW:], run["standard_error"][-WINDOW:]
    flat = np.array(level) - np.polyval(np.polyfit(range(WINDOW), level, 1), range(WINDOW)) + np.mean(level)
    assert switch_step([*flat, *flat], [*errors, *errors]) is not None
