"""Reasons why answers give nothing to learn from, and the verdict on a finished run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import completion, request
from safetensors.torch import save_file

from magicrl.algorithms.advantages import score_group
from magicrl.evaluation.samples import sample_row
from magicrl.evaluation.statistics import Interval, paired_scores
from magicrl.models.model_files import weights_differ
from magicrl.records import FinishReason, Outcome, RolloutGroup, ScoredGroup, StepMetrics, Verdict
from magicrl.training.diagnosis import (
    ANY_JUDGING,
    SUCCESS,
    Conclusion,
    Judging,
    LearningFacts,
    SampledAnswers,
    ScoreRise,
    answers_in,
    conclude,
    diagnose,
    learning_facts,
)
from magicrl.training.metrics import answers_of


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


# share of groups with an advantage in the first five steps, groups per step, entropy there in nats, and the accuracy at
# the training temperature before and after, from studies/results (ablation, variant, start); none of the first eleven
# gained less than 5 points, none of the last four more
KNOWN = {
    "quickstart": (0.69, 32, 0.51, 0.28, 0.96),
    "smollm2": (0.83, 8, 0.48, 0.22, 0.78),
    "10, 0.20, 4": (0.0625, 16, 0.086, 0.471, 0.647),
    "10, 0.28, 4": (0.0625, 16, 0.086, 0.471, 0.564),
    "4, 1.0, 4": (0.113, 16, 0.087, 0.471, 0.897),
    "8, 0.1 other data, 4": (0.113, 16, 0.095, 0.471, 0.75),
    "30, temperature 0.6, 0": (0.05, 8, 0.2, 0.223, 0.695),
    "30, temperature 0.6, 1": (0.05, 8, 0.235, 0.216, 0.578),
    "family, 1": (0.025, 16, 3.18, 0.002, 0.38),
    "family, 2": (0.0375, 16, 3.02, 0.002, 0.352),
    "family, 3": (0.0125, 16, 3.15, 0.001, 0.456),
    "0, forced, 0": (0.0125, 16, 0.025, 0.414, 0.407),
    "0, forced, 2": (0.025, 16, 0.032, 0.414, 0.352),
    "0, forced, 4": (0.0, 16, 0.03, 0.414, 0.407),
    "60, fresh small batches, 1": (0.05, 8, 0.587, 0.223, 0.241),
}


@pytest.mark.parametrize("name", KNOWN)
def test_set_ups_of_known_outcome(name: str) -> None:
    mixed, groups, entropy, before, after = KNOWN[name]
    found = diagnose(replace(answers(mixed, before, 0.0, 1.0), entropy=entropy, groups_per_step=groups))
    if after - before >= 0.05:
        assert found.cause == "enough" or found.rare, "it learned: nothing may stop it"
    else:
        assert found.advice, "it did not learn: there is advice"


def test_rare_groups_are_judged_by_the_step_and_the_advice_begins_with_it() -> None:
    seen = replace(answers(1 / 48, 0.001, 0.0, 1.0), entropy=3.1, groups_per_step=16)
    assert seen.found_per_step == pytest.approx(1 - (47 / 48) ** 16)
    found = diagnose(seen)
    assert found.rare
    assert "29 % of the steps" in found.advice[0]
    assert "3.1 nats per token the model still tries many answers" in found.advice[0]
    assert "optimizer.learning_rate first" in found.advice[0]
    assert "easier problems" in found.advice[1]
    assert "tries few other answers" in diagnose(replace(seen, entropy=0.03)).advice[0]
    for never in (replace(seen, mixed=0.0), replace(seen, groups_per_step=2), replace(seen, correct=0.999)):
        assert not diagnose(never).rare


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


def test_a_group_of_differing_scores_has_a_signal_though_all_are_wrong() -> None:
    def judged(*scores: float) -> ScoredGroup:
        group = RolloutGroup(
            request=request(0, [1], size=len(scores)), completions=tuple(completion([2]) for _ in scores)
        )
        verdicts = tuple(Verdict(outcome=Outcome.WRONG, status="graded", score=score) for score in scores)
        return score_group(group, verdicts)

    seen = answers_of([judged(0.1, 0.4), judged(0.3, 0.3)], max_tokens=8, judging=ANY_JUDGING)
    assert (seen.mixed, seen.correct) == (0.5, 0.0)
    unjudged = judged(0.1, 0.4)
    unjudged = score_group(
        unjudged.group, tuple(replace(v, outcome=Outcome.NOT_JUDGED, score=None) for v in unjudged.verdicts)
    )
    seen = answers_of([judged(0.1, 0.4), unjudged, unjudged, unjudged], max_tokens=8, judging=ANY_JUDGING)
    assert (seen.groups, seen.mixed) == (4, 0.25), "a group that nobody could judge gives no signal either"


def test_an_aborted_response_is_counted_no_more_than_in_training() -> None:
    completions = [completion([2]), dataclasses.replace(completion([2]), finish_reason=FinishReason.ABORTED)]
    verdicts = [Verdict(outcome=Outcome.CORRECT, status="equal"), Verdict(outcome=Outcome.WRONG, status="not equal")]
    group = RolloutGroup(request=request(0, [1], size=2), completions=tuple(completions))
    seen = answers_of([score_group(group, verdicts)], max_tokens=8, judging=ANY_JUDGING)
    assert (seen.mixed, seen.correct) == (0.0, 1.0)
    rows = [sample_row("p", i, *pair) for i, pair in enumerate(zip(completions, verdicts, strict=True))]
    assert [row.counted for row in rows] == [True, False]


def test_answers_that_nobody_could_judge_are_no_diagnosis() -> None:
    with pytest.raises(RuntimeError, match="no answer could be judged: check the reference answers"):
        answers_of([], max_tokens=64, judging=ANY_JUDGING)
    unjudged = {"groups/rejected/ratio": 1.0, "train/accuracy/mean": None, "train/truncation/ratio": 0.0}
    assert answers_in([StepMetrics(step=1, stage=0, values=unjudged | {"stage/max_tokens": 64})]) is None


SILENT = SampledAnswers(
    groups=24, max_tokens=64, mixed=0.0, correct=0.0, truncated=0.1, answered=0.02, judging=Judging("box", "auto")
)
MIXED = SampledAnswers(groups=24, max_tokens=64, mixed=0.6, correct=0.4, truncated=0.1, answered=0.8)
SCARCE = SampledAnswers(groups=24, max_tokens=64, mixed=0.02, correct=0.99, truncated=0.0, answered=1.0)


def rise(low: float, high: float, clusters: int = 100) -> ScoreRise:
    change = Interval(mean=(low + high) / 2, low=low, high=high, problems=100, clusters=clusters)
    return ScoreRise(set_name="held_out", temperature=1.0, before=0.4, after=0.4 + change.mean, change=change)


def facts(
    *,
    updates: int = 3,
    changed: bool | None = True,
    answers: SampledAnswers | None = MIXED,
    measured: ScoreRise | None = None,
    gradient: float | None = 0.3,
) -> LearningFacts:
    return LearningFacts(
        steps=3,
        updates=updates,
        weights_changed=changed,
        tokens_share=0.5,
        largest_gradient=gradient,
        answers=answers,
        rise=measured,
    )


@pytest.mark.parametrize(
    ("given", "outcome", "words"),
    [
        (facts(measured=rise(0.02, 0.1)), "learned", "held_out at temperature 1: 40.0 % before, 46.0 % after, +6.0"),
        (facts(measured=rise(0.02, 0.1, clusters=7)), "learned", "100 problems of 7 prompts or templates)"),
        (facts(measured=rise(-0.1, -0.02)), "worse", "(95 %: −10.0 to −2.0, 100 problems)"),
        (facts(measured=rise(-0.03, 0.02)), "no_rise", "(95 %: −3.0 to +2.0, 100 problems)"),
        (facts(measured=rise(-0.03, 0.02, clusters=53)), "undecided", "too few test problems to decide"),
        (facts(measured=rise(-0.03, 0.02, clusters=54)), "no_rise", "54 prompts"),
        (facts(measured=rise(-0.03, 0.2)), "undecided", "too wide to decide"),
        (facts(), "undecided", "no test set"),
        (facts(measured=rise(-0.03, 0.2), answers=SCARCE), "nothing_to_learn", "2.0 % of 24 groups"),
        (facts(updates=0, answers=SILENT, measured=rise(-0.03, 0.2)), "nothing_to_learn", "2.0 % end with a boxed"),
        (replace(facts(updates=0, answers=None), steps=0), "no_update", "no training step"),
        (facts(changed=False, measured=rise(0.02, 0.1)), "no_update", "3 updates left every weight"),
        # weight decay changes weights without a gradient, and chance moves the test
        (facts(gradient=0.0), "nothing_to_learn", "the gradient was 0 in every update (3)"),
        (facts(gradient=0.0, measured=rise(0.02, 0.1)), "nothing_to_learn", "60 % of 24 groups"),
        (facts(gradient=0.0, changed=False), "nothing_to_learn", "the gradient was 0"),
        (facts(gradient=None, measured=rise(0.02, 0.1)), "learned", "+6.0"),
        # judged responses are no random sample
        (facts(measured=replace(rise(0.02, 0.1), not_judged=0.55)), "undecided", "but 55 % of the responses of a test"),
        (facts(measured=replace(rise(0.02, 0.1), not_judged=0.1)), "learned", "+6.0"),
        # unknown is not unchanged
        (facts(changed=None, measured=rise(0.02, 0.1)), "learned", "+6.0"),
    ],
)
def test_each_outcome_from_its_facts(given: LearningFacts, outcome: str, words: str) -> None:
    found = conclude(given)
    assert found.outcome == outcome
    assert words in found.reason
    assert bool(found.advice) == (outcome != "learned" and given.answers is not None)
    assert (found.outcome in SUCCESS) == (outcome in ("learned", "undecided"))
    json.dumps(found.as_dict())


def test_training_responses_without_a_verdict_are_in_the_reason_of_any_verdict() -> None:
    for given in (facts(), facts(measured=rise(0.02, 0.1)), facts(updates=0, answers=None)):
        found = conclude(replace(given, not_judged=0.91))
        assert found.reason.endswith("; 91 % of the training responses could not be judged")
        assert "no training step" not in found.reason
        assert found.advice[0].startswith("Repair the verifier, reward or environment")
        assert "judged" not in conclude(replace(given, not_judged=0.1)).reason
    both = conclude(replace(facts(measured=replace(rise(0.02, 0.1), not_judged=0.55)), not_judged=0.91))
    assert sum("Repair" in advice for advice in both.advice) == 1


def test_the_advice_is_the_diagnosis_of_the_answers() -> None:
    assert 'verifier.extract = "lenient"' in conclude(facts(updates=0, answers=SILENT)).advice[0]
    assert "learning_rate" in conclude(facts(changed=False)).advice[0]
    assert "harder ones" in conclude(facts(measured=rise(0.0, 0.0), answers=SCARCE)).advice[0]
    assert "algorithm.advantage" in conclude(facts(gradient=0.0)).advice[0]
    assert "verifier.extract" in conclude(facts(gradient=0.0, answers=SILENT)).advice[0], "equal rewards are the cause"


def test_facts_of_a_recorded_run() -> None:
    steps = [
        StepMetrics(
            step=step,
            stage=0,
            values={"tokens/sampled": 100, "tokens/trained": trained, "train/not_judged/ratio": step / 4, **learner},
        )
        for step, trained, learner in (
            (1, 60, {"learner/sgd_steps": 1, "learner/grad_norm": 0.3}),
            (2, 20, {"learner/sgd_steps": 1, "learner/grad_norm": 0.0}),
            (3, 0, {"learner/sgd_steps": 0}),
        )
    ]

    def test(name: str, shares: list[float | None], **counts: int) -> dict[str, object]:
        known = [share for share in shares if share is not None]
        score = {"accuracy": {"mean": sum(known) / len(known)}, "per_problem": shares, "clusters": ["a", "b", "c", "a"]}
        score |= counts
        return {"name": name, "set": "held_out", "temperatures": {"0.0": score, "0.6": score}}

    found = learning_facts(
        steps,
        test("before", [0.0, 0.5, None, 0.25], not_judged=3, drawn=8),
        test("after", [0.5, 0.5, 1.0, 0.75]),
        reuse=[2],
        temperature=1.0,
        weights_changed=True,
        judging=Judging(),
    )
    assert (found.steps, found.updates, found.tokens_share) == (3, 2, pytest.approx(80 / 600))  # each token twice
    assert found.not_judged == 0.5
    assert found.largest_gradient == 0.3, "steps without an update have none"
    assert found.rise is not None
    assert found.rise.temperature == 0.6, "the highest that was measured"
    assert found.rise.not_judged == 3 / 8, "of the test that has more of them"
    assert found.rise.change.mean == pytest.approx(1 / 3)  # of the three problems that both judged
    assert (found.rise.change.problems, found.rise.change.clusters) == (3, 2)
    assert found.test_set == "held_out"


def graded(name: str, rewards: list[float]) -> dict[str, object]:
    score = {
        "accuracy": {"mean": 0.0},
        "per_problem": [0.0] * len(rewards),
        "reward": {"mean": sum(rewards) / len(rewards)},
        "reward_per_problem": rewards,
    }
    return {"name": name, "set": "held_out", "temperatures": {"1.0": score}}


@pytest.mark.parametrize(
    ("gain", "outcome", "words"),
    [
        (3.0, "learned", "held_out at temperature 1: mean reward 7 before, 10 after, +3 (95 %: +"),
        (0.0, "no_rise", "mean reward 7 before, 7 after, 0 (95 %: −"),
        (-3.0, "worse", "mean reward 7 before, 4 after, −3 (95 %: −"),
    ],
)
def test_graded_rewards_are_judged_by_their_mean_on_their_own_scale(gain: float, outcome: str, words: str) -> None:
    values = {
        "groups/rejected/ratio": 0.1,
        "groups/sampled": 8,
        "train/accuracy/mean": 0.0,
        "train/reward/mean": 7.0,
        "train/truncation/ratio": 0.0,
        "stage/max_tokens": 64,
        "learner/sgd_steps": 1,
        "tokens/sampled": 8,
        "tokens/trained": 8,
    }
    before = [4.0 + 6.0 * (i % 2) for i in range(200)]  # no answer is ever correct
    # the interval is 0.14 to either side: more than 5 % of a share, less than 5 % of the range of these rewards
    after = [reward + gain + (-1) ** (i // 2) for i, reward in enumerate(before)]
    found = conclude(
        learning_facts(
            [StepMetrics(step=1, stage=0, values=values)],
            graded("before", before),
            graded("after", after),
            reuse=[1],
            temperature=1.0,
            weights_changed=True,
            judging=ANY_JUDGING,
        )
    )
    assert found.outcome == outcome
    assert words in found.reason
    assert " right" not in found.reason
    assert "points" not in found.reason
    json.dumps(found.as_dict())


def test_a_test_of_truncated_episodes_is_compared_by_its_accuracy() -> None:
    """A truncated episode has no reward, and only one of these two tests is graded."""
    cut = {"accuracy": {"mean": 0.0}, "per_problem": [0.0] * 60}
    none = {"name": "before", "set": "held_out", "temperatures": {"1.0": cut}}

    def concluded(before: dict[str, object], after: dict[str, object]) -> Conclusion:
        facts = learning_facts(
            [StepMetrics(step=1, stage=0, values={"learner/sgd_steps": 1, "tokens/sampled": 8})],
            *(before, after),
            reuse=[1],
            temperature=1.0,
            weights_changed=True,
            judging=ANY_JUDGING,
        )
        return conclude(facts)

    some = graded("after", [0.0, 1.0, 0.5] * 20)
    assert concluded(none, some).outcome == "learned"
    assert concluded(some, none).outcome == "worse", "it collapsed"


def test_a_test_set_that_nobody_could_judge_is_named() -> None:
    found = conclude(replace(facts(), test_set="held_out"))
    assert found.outcome == "undecided"
    assert "two problems of test set held_out" in found.reason
    assert "name a test set" not in " ".join(found.advice)


def test_a_limit_of_turns_truncates_too() -> None:
    cut = {"groups/rejected/ratio": 1.0, "train/accuracy/mean": 0.0, "train/truncation/ratio": 1.0}
    values = cut | {"stage/max_tokens": 64, "groups/sampled": 8, "environment/turns": 3.0}
    seen = answers_in([StepMetrics(step=1, stage=0, values=values)])
    assert seen is not None
    found = diagnose(seen)
    assert "are truncated at T = 64 or at environment.max_turns" in found.message
    assert "or max_turns (they have 3 turns on average)" in found.advice[0]


def test_equal_rewards_have_advice_of_their_own() -> None:
    found = diagnose(replace(answers(0.1, 0.97, 0.0, 1.0), reward=0.5))
    assert found.cause == "same_reward"
    assert "the mean reward is 0.5" in found.message
    assert "a reward with more levels" in found.remedy


def test_scores_of_other_problems_are_not_paired() -> None:
    assert paired_scores([1.0, 0.0], [1.0]) is None
    assert paired_scores([1.0, None], [1.0, 0.0]) is None


def test_weights_are_compared_in_the_saved_precision(tmp_path: Path) -> None:
    def folder(name: str, **tensors: torch.Tensor) -> Path:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    base = torch.linspace(-1, 1, 7)
    start = str(folder("start", a=base, other=base.clone()))
    assert weights_differ(folder("rounded", a=base.bfloat16()), start) is False
    assert weights_differ(folder("moved", a=base + 1e-6), start) is True
    assert weights_differ(folder("foreign", b=base), start) is None
