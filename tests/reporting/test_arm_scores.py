"""Scores of arms: intervals over problems, the spread over runs apart, and no difference that cannot be paired."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from magicrl.evaluation.statistics import paired_difference, share
from magicrl.reporting.arms import SetScores, arm_scores, group_runs, mean_per_problem
from magicrl.reporting.read_folders import TemperatureScore, read_run


def scores(folders: list[Path]) -> tuple[SetScores, ...]:
    return arm_scores(group_runs([read_run(folder) for folder in folders]))


def test_an_arm_s_score_is_clustered_by_problem_over_its_runs(arm_folders: list[Path]) -> None:
    first = scores(arm_folders)[0]
    assert (first.set_name, first.temperature) == ("test", 1.0)
    magic, ppo = first.arms
    assert magic.after is not None
    wanted = share([0.51, 0.51, 1.0, 1.0])
    assert (magic.after.mean, magic.after.low) == pytest.approx((wanted.mean, wanted.low))
    assert magic.spread is not None
    assert (magic.against, magic.unpaired) == (None, "")
    assert ppo.rise is not None
    assert ppo.rise.mean == pytest.approx(np.mean([0.65, 0.15, 0.5, 0.0]))


def test_the_difference_to_the_first_arm_is_paired_by_problem(arm_folders: list[Path]) -> None:
    _, ppo = scores(arm_folders)[0].arms
    wanted = paired_difference([0.65, 0.65, 1.0, 1.0], [0.51, 0.51, 1.0, 1.0])
    assert ppo.against is not None
    assert (ppo.against.mean, ppo.against.low, ppo.against.high) == pytest.approx(
        (wanted.mean, wanted.low, wanted.high)
    )
    assert ppo.against_spread is not None
    assert (ppo.against_spread.low, ppo.against_spread.high) == pytest.approx((0.045, 0.095))


def test_other_problems_are_not_paired(arm_folders: list[Path]) -> None:
    for folder in arm_folders[2:]:
        path = folder / "run.json"
        path.write_text(path.read_text().replace('"sha256": "a"', '"sha256": "b"'))
    _, ppo = scores(arm_folders)[0].arms
    assert ppo.against is None
    assert ppo.unpaired == "the tests hold other problems (by checksum)"
    assert ppo.rise is not None, "before and after are of one run's own problems"


def test_a_run_that_was_not_tested_yet_is_counted(arm_folders: list[Path]) -> None:
    (arm_folders[3] / "evaluations" / "after.json").unlink()
    _, ppo = scores(arm_folders)[0].arms
    assert (ppo.tested, ppo.runs) == (1, 2)
    assert ppo.spread is None
    (arm_folders[2] / "evaluations" / "after.json").unlink()
    assert scores(arm_folders)[0].arms[1].unpaired == "not tested after training"


def test_without_scores_by_problem_the_widest_interval_stands(arm_folders: list[Path]) -> None:
    for folder in arm_folders:
        path = folder / "evaluations" / "after.json"
        document = json.loads(path.read_text())
        del document["temperatures"]["1.0"]["per_problem"]
        path.write_text(json.dumps(document))
    _, ppo = scores(arm_folders)[0].arms
    assert ppo.after is not None
    assert (ppo.after.low, ppo.after.high) == pytest.approx((0.87, 0.93))
    assert ppo.unpaired == "a test does not tell each problem's score"


def test_a_problem_that_no_run_judged_is_left_out() -> None:
    told = [
        TemperatureScore.model_validate(
            {"accuracy": {"mean": 0, "low": 0, "high": 0}, "problems": 3, "samples": 1, "per_problem": shares}
        )
        for shares in ([1.0, None, None], [0.0, 0.5, None])
    ]
    np.testing.assert_array_equal(mean_per_problem(told), [0.5, 0.5, np.nan])
