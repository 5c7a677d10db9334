"""Stages and their transitions, and the problems that a filter removed, by source and difficulty."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from magicrl.algorithms.filters import PassCount
from magicrl.config.schema import StageConfig, TransitionConfig
from magicrl.records import Problem
from magicrl.training.curriculum import StageSchedule, difficulties_of, filter_table, in_words, removals


def stage(max_tokens: int, **changes: object) -> StageConfig:
    settings = {"max_tokens": max_tokens, "rollout_batch": 4, "group_size": 2, "max_steps": 200, **changes}
    return StageConfig.model_validate(settings)


CONVERGED = TransitionConfig(rule="converged", horizon=20, delta=0.05, window=20)


def flat_until_switch(schedule: StageSchedule, seed: int, limit: int = 200) -> int:
    rng = np.random.default_rng(seed)
    for step in range(limit):
        schedule.observe_accuracy(0.8 + 0.02 * rng.standard_normal(), 0.02)
        if schedule.finish_step():
            return step + 1
    return limit


def test_fixed_stages_end_at_their_steps() -> None:
    fixed = TransitionConfig(rule="fixed")
    schedule = StageSchedule([stage(8, max_steps=2, transition=fixed), stage(16, max_steps=1, transition=fixed)])
    assert schedule.finish_step() is None
    assert schedule.finish_step() == (0, 2, "max_steps = 2 reached")
    assert schedule.stage is not None
    assert schedule.stage.max_tokens == 16
    assert schedule.finish_step() is not None
    assert schedule.stage is None


def test_a_flat_curve_ends_the_stage_early_and_says_why() -> None:
    schedule = StageSchedule([stage(8, transition=CONVERGED), stage(16)])
    assert flat_until_switch(schedule, seed=0) <= 60
    assert schedule.index == 1


def test_min_steps_hold_a_converged_stage() -> None:
    schedule = StageSchedule([stage(8, min_steps=90, transition=CONVERGED), stage(16)])
    assert flat_until_switch(schedule, seed=0) == 90


def test_a_rising_curve_stays() -> None:
    schedule = StageSchedule([stage(8, transition=CONVERGED), stage(16)])
    rng = np.random.default_rng(0)
    for step in range(100):
        schedule.observe_accuracy(0.2 + 0.005 * step + 0.02 * rng.standard_normal(), 0.02)
        assert schedule.finish_step() is None


def test_the_truncation_rule_reads_truncation() -> None:
    rule = TransitionConfig(rule="truncation", window=5, truncation_below=0.1)
    schedule = StageSchedule([stage(8, transition=rule), stage(16)])
    ends = []
    for ratio in [0.5, 0.05, 0.05, 0.2, *[0.05] * 5]:
        schedule.observe_truncation(ratio)
        schedule.observe_accuracy(0.5, 0.01)
        ends.append(schedule.finish_step())
    assert [end is not None for end in ends] == [False] * 8 + [True]
    assert ends[-1] is not None
    assert "below 0.1 for 5 steps" in ends[-1][2]


@pytest.mark.parametrize("cut", [1, 10, 19])
def test_a_restored_schedule_switches_at_the_same_step(cut: int) -> None:
    stages = [stage(8, transition=CONVERGED), stage(16)]
    curve = 0.8 + 0.02 * np.random.default_rng(3).standard_normal(100)

    def drive(schedule: StageSchedule, values: np.ndarray) -> int:
        for i, value in enumerate(values):
            schedule.observe_accuracy(float(value), 0.02)
            if schedule.finish_step():
                return i + 1
        return -1

    whole = drive(StageSchedule(stages), curve)
    first = StageSchedule(stages)
    assert drive(first, curve[:cut]) == -1
    second = StageSchedule(stages)
    second.restore(json.loads(json.dumps(first.state())))
    assert drive(second, curve[cut:]) == whole - cut


@pytest.mark.parametrize(("later", "last"), [(0.0, 7), (0.5, 14)])
def test_truncation_before_min_steps_is_no_reason_after_them(later: float, last: int) -> None:
    rule = TransitionConfig(rule="truncation", window=4, truncation_below=0.1)
    schedule = StageSchedule([stage(8, min_steps=7, max_steps=14, transition=rule), stage(16)])
    ended = None
    for ratio in [0.0] * 4 + [later] * 10:
        schedule.observe_truncation(ratio)
        if ended := schedule.finish_step():
            break
    assert ended == (0, last, "max_steps = 14 reached" if later else "truncated share below 0.1 for 4 steps")


def test_a_stage_that_waits_for_its_min_steps_waits_on_after_a_restart() -> None:
    rule = TransitionConfig(rule="truncation", window=4, truncation_below=0.1)
    stages = [stage(8, min_steps=7, transition=rule), stage(16)]
    schedule = StageSchedule(stages)
    ended = []
    for step, ratio in enumerate([0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]):
        if step == 5:
            schedule, before = StageSchedule(stages), schedule
            schedule.restore(json.loads(json.dumps(before.state())))
        schedule.observe_truncation(ratio)
        ended.append(schedule.finish_step() is not None)
    assert ended == [False] * 6 + [True]


def test_more_confidence_takes_more_steps() -> None:
    def steps(confidence: float) -> int:
        rule = CONVERGED.model_copy(update={"confidence": confidence})
        return flat_until_switch(StageSchedule([stage(8, transition=rule), stage(16)]), seed=0)

    assert steps(0.95) < steps(0.9999)


def problem(name: str, source: str, **more: Any) -> Problem:
    return Problem(id=f"#{name}", key=name, prompt="?", references=("1",), verifier="exact", source=source, **more)


def released(name: str, table: object) -> Problem:
    return problem(name, "numina", extra={"extra_info": {"index": 1, "model_difficulty": table}})


def test_by_source_and_by_difficulty() -> None:
    problems = [problem("a", "sums", level=1), problem("b", "sums", level=2), released("c", {"7B": 3, "32B": 1})]
    found = removals(problems, ["a", "c", "not among them"])
    assert found["source"] == {"numina": (1, 1), "sums": (1, 2)}
    assert found["difficulty"] == {
        "32B: 1 failed": (1, 1),
        "7B: 3 failed": (1, 1),
        "level 1": (1, 1),
        "level 2": (0, 1),
    }
    assert in_words(found["source"]) == "numina 1 of 1, sums 1 of 2"


def test_a_difficulty_that_nobody_told_is_unknown() -> None:
    for odd in (problem("a", "s"), released("b", {}), released("c", None), problem("d", "s", extra={"extra_info": 3})):
        assert difficulties_of(odd) == ["unknown"]


def test_the_table_of_the_difficulty_filter_counts_each_problem_once() -> None:
    right = {"a": 0, "b": 4, "c": 2, "d": 4, "e": 1}
    problems = [problem(name, "sums", level=None if name == "e" else 3) for name in right]
    table = filter_table(problems, {name: PassCount(correct=n, counted=4) for name, n in right.items()})
    assert table == [
        {"level": 3, "problems": 4, "never": 1, "always": 2, "kept": 1},
        {"level": None, "problems": 1, "never": 0, "always": 0, "kept": 1},
    ]
