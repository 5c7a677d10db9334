from __future__ import annotations

import json
import math

import numpy as np
import pytest

from magicrl.algorithms.entropy import (
    PRESETS,
    AdaptiveEntropyController,
    ControllerSettings,
    EntropyController,
    FixedEntropyController,
    clustered_mean,
    make_controller,
    measure_entropy,
)
from magicrl.records import Completion, FinishReason, frozen_floats, frozen_tokens


def completion(logprobs, entropies=None):
    return Completion(
        tokens=frozen_tokens([0] * len(logprobs)),
        text="",
        sampler_logprobs=frozen_floats(logprobs),
        sampler_entropies=None if entropies is None else frozen_floats(entropies),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )


def test_the_mean_is_over_tokens_not_over_responses():
    found = measure_entropy([completion([-1.0], [4.0]), completion([-2.0] * 3, [2.0] * 3)], "exact")
    assert found is not None
    assert found.mean == pytest.approx(10 / 4)
    assert measure_entropy([completion([-1.0]), completion([-2.0] * 3)], "sampled").mean == pytest.approx(7 / 4)


def test_standard_error_by_hand():
    # totals 4 and 6 over 1 and 3 tokens: mean 2.5, residuals 1.5 and -1.5, sqrt(4.5 * 2) / 4
    found = clustered_mean(np.array([4.0, 6.0]), np.array([1, 3]))
    assert found.standard_error == pytest.approx(3 / 4)
    assert math.isinf(clustered_mean(np.array([4.0]), np.array([2])).standard_error)


def test_standard_error_matches_repeated_sampling():
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        lengths = rng.integers(1, 30, size=60)
        level = rng.normal(0.5, 0.1, size=60)  # tokens of a response share a level: they correlate
        found = clustered_mean(level * lengths, lengths)
        means.append(found.mean)
        errors.append(found.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_exact_is_unknown_when_one_response_lacks_it():
    assert measure_entropy([completion([-1.0], [1.0]), completion([-1.0])], "exact") is None


def test_no_tokens_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        measure_entropy([], "sampled")
    with pytest.raises(ValueError, match="'median'"):
        measure_entropy([], "median")  # pyright: ignore[reportArgumentType]


def play(controller, entropies):
    """Return alpha_k of each step."""
    alphas = []
    for entropy in entropies:
        alphas.append(controller.coefficient(entropy))
        controller.observe(entropy)
    return alphas


def test_hand_computed_course():
    controller = AdaptiveEntropyController(0.2, 0.01)
    alphas = play(controller, [0.1, 0.1, 0.3, 0.1, 0.2, 0.2])
    # c: 0, .01, .02, .01, .02, .02 (unchanged at equality); alpha is off above the target
    assert alphas == pytest.approx([0, 0.01, 0, 0.01, 0.02, 0.02])
    assert controller.c == pytest.approx(0.02)


def test_fifty_steps_above_target_do_not_wind_c_down():
    for preset in PRESETS:
        controller = make_controller("adaptive", ControllerSettings(preset))
        play(controller, [0.5] * 50)
        controller.observe(0.1)  # the crossing
        assert controller.coefficient(0.1) > 0, preset
        assert controller.coefficient(0.1) == pytest.approx(PRESETS[preset]["step"])


def test_alpha_is_c_times_the_indicator_and_never_negative():
    controller = AdaptiveEntropyController(0.2, 0.01)
    for entropy in (0.1, 0.25, 0.19, 0.2, 0.4, 0.0, 0.21, 0.1):
        alpha = controller.coefficient(entropy)
        assert alpha == (controller.c if entropy <= 0.2 else 0.0)
        assert alpha >= 0
        controller.observe(entropy)


def test_asking_changes_nothing():
    controller = AdaptiveEntropyController(0.2, 0.01)
    controller.observe(0.1)
    before = controller.state()
    assert controller.coefficient(0.1) == controller.coefficient(0.1)
    assert controller.state() == before


def test_c_is_clamped_at_both_ends():
    controller = AdaptiveEntropyController(0.2, 0.01, c_max=0.025)
    play(controller, [0.1] * 9)
    assert controller.c == 0.025
    play(controller, [0.3] * 9)
    assert controller.c == 0.0


def test_released_code_lags_by_one_step_and_decreases_at_equality():
    controller = make_controller("adaptive", ControllerSettings("code"))
    # alpha_k uses the entropy of step k - 1; the first step has none
    assert play(controller, [0.1, 0.5, 0.1, 0.1]) == pytest.approx([0.0, 1e-4, 0.0, 1e-4])
    at_equality = make_controller("adaptive", ControllerSettings("code"))
    play(at_equality, [0.1, 0.1, 0.2])
    assert at_equality.state()["c"] == pytest.approx(1e-4)


def test_presets():
    assert PRESETS["report"] == {"target": 0.2, "step": 0.005}
    assert (PRESETS["code"]["target"], PRESETS["code"]["step"], PRESETS["code"]["c_max"]) == (0.2, 1e-4, 0.005)
    assert PRESETS["small"] == {"target": 0.2, "step": 0.01, "c_max": 0.1}


def test_overrides():
    controller = make_controller("adaptive", ControllerSettings(target=0.3, step=0.5, maximum=0.7))
    assert isinstance(controller, AdaptiveEntropyController)
    play(controller, [0.25, 0.25])
    assert controller.c == 0.7


@pytest.mark.parametrize("preset", list(PRESETS))
def test_state_survives_json_and_goes_on_the_same(preset):
    entropies = [0.1, 0.3, 0.15, 0.2, 0.05, 0.21, 0.1]
    whole, first, second = (make_controller("adaptive", ControllerSettings(preset)) for _ in range(3))
    expected = play(whole, entropies)
    head = play(first, entropies[:3])
    second.restore(json.loads(json.dumps(first.state())))
    assert head + play(second, entropies[3:]) == expected


def test_fixed_and_none():
    assert play(make_controller("fixed", ControllerSettings(alpha=0.003)), [0.1, 0.9]) == [0.003, 0.003]
    assert play(make_controller("none"), [0.1, 0.9]) == [0.0, 0.0]
    for controller in (FixedEntropyController(0.1), make_controller("none"), AdaptiveEntropyController(0.2, 0.1)):
        assert isinstance(controller, EntropyController)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"kind": "fixed"}, "alpha"),
        ({"kind": "fixed", "alpha": -1.0}, "-1"),
        ({"kind": "magic"}, "'magic'"),
        ({"kind": "adaptive", "preset": "huge"}, "'huge'"),
        ({"kind": "adaptive", "step": 0.0}, "step"),
        ({"kind": "adaptive", "target": -0.1}, "-0.1"),
        ({"kind": "adaptive", "maximum": -1.0}, "c_max"),
    ],
)
def test_errors_name_the_value(arguments, word):
    kind = arguments.pop("kind")
    with pytest.raises(ValueError, match=word):
        make_controller(kind, ControllerSettings(**arguments))
