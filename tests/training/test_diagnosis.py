"""Causes and advice from numbers: each cause where its share is the largest, in the settings that can change it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from magicrl.records import StepMetrics
from magicrl.training.diagnosis import ANY_JUDGING, Judging, SampledAnswers, answers_in, answers_of, diagnose


def answers(
    mixed: float, correct: float, truncated: float, answered: float | None, judging: Judging = ANY_JUDGING
) -> SampledAnswers:
    return SampledAnswers(
        groups=100,
        max_tokens=256,
        mixed=mixed,
        correct=correct,
        truncated=truncated,
        answered=answered,
        judging=judging,
    )


@pytest.mark.parametrize(
    ("seen", "cause", "words"),
    [
        (answers(0.5, 0.4, 0.1, 0.8), "enough", ()),
        (
            answers(0.02, 0.005, 0.06, 0.022, Judging("box", "auto")),
            "no_answer",
            ("lenient", r"\\boxed{}", "[start] sft"),
        ),
        (answers(0.02, 0.005, 0.06, 0.022, Judging("lenient", "required")), "no_answer", ('reasoning = "auto"',)),
        (answers(0.0, 0.0, 0.7, 0.25), "truncated", ("T = 256", "max_tokens")),
        (answers(0.0, 0.0, 0.97, 0.0), "truncated", ("T = 256", "do not end at any length")),
        (answers(0.1, 0.02, 0.1, 0.88), "all_wrong", ("easier problems", "[data.difficulty_filter]", "group_size")),
        (answers(0.1, 0.02, 0.1, None), "all_wrong", ("easier problems",)),
        (answers(0.1, 0.97, 0.0, 1.0), "all_right", ("harder ones", "data.online_filter")),
    ],
)
def test_the_largest_share_is_the_cause(seen: SampledAnswers, cause: str, words: tuple[str, ...]) -> None:
    found = diagnose(seen)
    assert found.cause == cause
    assert bool(found.advice) == (cause != "enough")
    for word in words:
        assert word in found.remedy
    assert "100 groups" in found.message


def test_advice_offers_nothing_that_is_set_already() -> None:
    assert "lenient" not in diagnose(answers(0.0, 0.0, 0.0, 0.0, Judging("lenient", "auto"))).remedy
    assert "reasoning" not in diagnose(answers(0.0, 0.0, 0.0, 0.0, Judging("box", "auto"))).remedy
    assert "verifier." not in diagnose(answers(0.0, 0.0, 0.0, 0.0)).remedy, "code has no such setting"


def test_a_second_large_cause_has_its_advice_too() -> None:
    found = diagnose(answers(0.0, 0.0, 0.4, 0.1, Judging("box", "auto")))
    assert found.cause == "no_answer"
    assert [sentence.split()[1] for sentence in found.advice] == ["end", "are"]  # end without ..., are cut ...


def test_failures_and_right_answers_add_up_to_one() -> None:
    seen = answers(0.0, 0.2, 0.3, 0.4)
    assert seen.failures() == {
        "truncated": pytest.approx(0.3),
        "no_answer": pytest.approx(0.3),
        "all_wrong": pytest.approx(0.2),
    }


def test_recorded_steps_are_averaged() -> None:
    steps = [
        StepMetrics(
            step=i,
            stage=0,
            values={
                "groups/rejected/ratio": rejected,
                "groups/sampled": 8,
                "train/accuracy/mean": 0.1,
                "train/truncation/ratio": 0.2,
                "train/answered/ratio": 0.5,
                "stage/max_tokens": 64,
            },
        )
        for i, rejected in enumerate((1.0, 0.5))
    ]
    seen = answers_in(steps)
    assert seen is not None
    assert (seen.groups, seen.mixed, seen.answered, seen.max_tokens) == (16, 0.25, 0.5, 64)
    assert answers_in([]) is None


def test_answers_that_nobody_could_judge_are_no_diagnosis() -> None:
    with pytest.raises(ValueError, match="no answer could be judged; look at the gold answers"):
        answers_of([], max_tokens=64, judging=ANY_JUDGING)
    unjudged = {"groups/rejected/ratio": 1.0, "train/accuracy/mean": None, "train/truncation/ratio": 0.0}
    assert answers_in([StepMetrics(step=1, stage=0, values=unjudged | {"stage/max_tokens": 64})]) is None


def test_it_needs_no_torch() -> None:
    code = "import sys, magicrl.training.diagnosis; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
