"""Measures by their definition in the table, with hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from studies.definition import parse_measure


def result(tests: dict[str, dict[str, float]] | None = None, **curves: list[float | None]) -> dict[str, Any]:
    return {"curves": curves, "tests": tests or {"before": {}, "after": {}}}


RISING = [i / 10 for i in range(10)]  # steps 1 to 10: 0, 0.1, ..., 0.9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accuracy@5", 0.4),  # steps 3 to 7
        ("accuracy@1", 0.1),  # steps 1 to 3, since there is nothing earlier
        ("accuracy@10", 0.8),  # steps 8 to 10
        ("accuracy@start", 0.1),
        ("accuracy@late", 0.7),
        ("accuracy@max", 0.7),
        ("accuracy@min", 0.2),
        ("fall:accuracy@5", 0.1 - 0.4),
        ("steps:accuracy>0.45", 8.0),  # steps 4 to 8 are the first five whose mean (0.5) is above
        ("tokens:accuracy>0.45", 800.0),
        ("steps:accuracy>0.95", 10.0),  # never reached: the length of the run
        ("tokens:accuracy>0.95", 1000.0),
        ("updates:accuracy>0.45", 32.0),
        ("accuracy@tokens:450", 0.4),  # spent at step 5
        ("accuracy@updates:20", 0.4),
        ("accuracy@tokens:1001", math.nan),
        ("drop:accuracy", 0.0),
        ("spread:accuracy", 0.0),  # a straight line
    ],
)
def test_of_a_curve_that_rises_evenly(text: str, expected: float) -> None:
    tokens, updates = [100.0 * step for step in range(1, 11)], [4.0 * step for step in range(1, 11)]
    measured = parse_measure(text)(result(accuracy=RISING, tokens=tokens, updates=updates))
    assert measured == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_what_a_curve_lost_and_how_it_varies() -> None:
    peak: list[float | None] = [0.1] * 5 + [0.9] * 5 + [0.5] * 10
    assert parse_measure("drop:validation")(result(validation=peak)) == pytest.approx(0.4)
    climbing: list[float | None] = [0.1 * i for i in range(10)]
    assert parse_measure("drop:validation")(result(validation=climbing)) == 0, (
        "its best five in a row lie before the end"
    )
    assert math.isnan(parse_measure("drop:validation")(result(validation=[0.1])))
    zigzag: list[float | None] = [0.0] * 20 + [0.3 + (0.1 if i % 2 else -0.1) for i in range(20)]
    assert parse_measure("spread:entropy")(result(entropy=zigzag)) == pytest.approx(0.1, rel=0.02)
    assert math.isnan(parse_measure("spread:entropy")(result(entropy=[0.1, 0.2])))


def test_steps_without_the_metric_are_left_out() -> None:
    gappy = [None, 0.2, None, 0.4]
    assert parse_measure("validation@late")(result(validation=gappy)) == pytest.approx(0.3)
    assert math.isnan(parse_measure("validation@late")(result()))
    assert math.isnan(parse_measure("accuracy@20")(result(accuracy=RISING))), "the run has no step 20"


def test_tests_before_and_after() -> None:
    tested = result({"before": {"1.0": 0.4, "0.0": 0.2}, "after": {"1.0": 0.9}})
    assert parse_measure("test@1")(tested) == 0.9
    assert parse_measure("start@0.0")(tested) == 0.2
    assert parse_measure("rise@1.0")(tested) == pytest.approx(0.5)
    assert math.isnan(parse_measure("rise@0.0")(tested)), "stopped before that test"
    assert parse_measure("start@best")(tested) == 0.4
    assert parse_measure("rise@best")(tested) == pytest.approx(0.5)
    assert math.isnan(parse_measure("test@best")(result()))
    assert parse_measure("pass@4")({**tested, "passes": {"before": {}, "after": {"4": 0.95}}}) == 0.95
    assert math.isnan(parse_measure("pass@4")(tested)), "results of before pass@k was kept"


def test_a_collapse_comes_before_accuracy_is_won() -> None:
    falls: list[float | None] = [0.5] * 5 + [0.01] * 10
    early = parse_measure("collapse:0.05@0.8")
    assert early(result(entropy=falls, accuracy=[0.4] * 15)) == 1.0
    # entropy's first five below lie in steps 6 to 10, accuracy's first five above in 5 to 9, or in 7 to 11
    assert early(result(entropy=falls, accuracy=[0.4] * 4 + [0.9] * 11)) == 0.0, "solved, then sure of it"
    assert early(result(entropy=falls, accuracy=[0.4] * 6 + [0.81] * 9)) == 1.0
    assert early(result(entropy=[0.5] * 15, accuracy=[0.4] * 15)) == 0.0
    assert math.isnan(early(result(entropy=[0.1], accuracy=[0.4])))


def test_held_counts_from_the_first_step_below_the_target() -> None:
    # the first two steps are the beginning; of the six from the crossing on, four are above 0.2 - 0.02
    entropy: list[float | None] = [0.5, 0.3, 0.15, 0.1, 0.19, 0.25, 0.3, 0.185]
    assert parse_measure("held:0.2")(result(entropy=entropy)) == pytest.approx(4 / 6)
    assert parse_measure("held:0.05")(result(entropy=entropy)) == 1.0, "never below"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("acuracy@5", "did you mean 'accuracy'"),
        ("accuracy@end", "no measure 'accuracy@end'"),
        ("steps:entropi>0.1", "did you mean 'entropy'"),
        ("minutes:accuracy>0.1", "no measure"),
    ],
)
def test_a_text_that_names_no_measure_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_measure(text)
