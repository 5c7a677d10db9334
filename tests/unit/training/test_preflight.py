"""Findings for the figures of a check before a run; the cases of tests/helpers/preflight_cases.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import completion, problem, request, scored_group
from preflight_cases import main

from magicrl.algorithms.advantages import score_group
from magicrl.config.loader import load_train_recipe
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.evaluation.statistics import Interval, share
from magicrl.records import Outcome, Problem, RolloutGroup, ScoredGroup, Verdict
from magicrl.rollout.protocol import Capabilities
from magicrl.training.diagnosis import SampledAnswers
from magicrl.training.preflight import (
    Facts,
    Learnable,
    LongerAnswers,
    OtherForm,
    TemplateFacts,
    Update,
    _Bench,
    _learnable,
    _system,
    divergence,
)
from magicrl.training.preflight_rules import preflight_findings
from magicrl.training.reward_probes import (
    NOTHING,
    REFERENCE,
    SEVERAL,
    WRONG,
    Neighbour,
    RewardFacts,
    _fitting,
    _made_up,
    probe_reward,
)
from magicrl_verifiers.records import make_verdict

RISE = Interval(mean=0.3, low=0.1, high=0.5, problems=24, clusters=24)
NEIGHBOUR = Neighbour(
    offset=1, own=0.3, there=0.1, rise=replace(RISE, mean=-0.2, low=-0.4, high=-0.1), skill=replace(RISE, mean=0.2)
)
UPDATE = Update(
    rate=1e-3, prompts=32, updates=1, kl=2e-3, change=0.02, grad_norm=0.3, entropy=(0.5, 0.5), correct=(0.3, 0.3)
)
SOUND = Facts(
    learnable=Learnable(
        answers=SampledAnswers(groups=32, max_tokens=48, mixed=0.6, correct=0.3, truncated=0.4, answered=0.6),
        group_size=8,
        pass_1=share([0.25, 0.375] * 16),
        pass_all=share([1.0, 0.0] * 16),
        signal=share([1.0, 0.2] * 16),
        entropy=0.6,
        uniform_entropy=math.log(25),
        lengths=(20, 40, 48),
        mean_length=25.0,
        example="= 3",
        example_references=("3",),
        example_verdict="correct (equal)",
        constant=False,
    ),
    longer=LongerAnswers(max_tokens=384, truncated=0.0, correct=0.4, length=90),
    reward=RewardFacts(
        references=200,
        earned={NOTHING: 0.0, REFERENCE: 1.0, WRONG: 0.0, SEVERAL: 0.0},
        neighbour=NEIGHBOUR,
    ),
    template=TemplateFacts(
        chat=True,
        prompt="?",
        end="<end>",
        foreign=(),
        begins=1,
        opens=True,
        system="",
        other_ends={"<x>": 0.1},
        other_form=None,
    ),
    update=UPDATE,
    cost=None,
    problems=4000,
    later_tokens=0,
    conflicting=10,
    filtered=False,
    temperature=1.0,
    alpha=0.03,
    kl_coefficient=0.05,
    taught=False,
    seconds=10.0,
)


def answers(signal: list[float], **changed: Any) -> Facts:
    """Return the sound facts with other answers. ``signal`` is the share of groups with an advantage."""
    seen = SOUND.learnable
    changed = {"mixed": sum(signal) / len(signal)} | changed
    learnable = replace(seen, answers=replace(seen.answers, **changed), signal=share(signal))
    return replace(SOUND, learnable=learnable)


def several(**parts: Mapping[str, float]) -> Facts:
    """Return the sound facts with several rewards."""
    return replace(SOUND, learnable=replace(SOUND.learnable, rewards=parts))


PART = {"weight": 1.0, "mean": 0.5, "signal": 0.4, "not_judged": 0.0}
NONE, RARE = [0.0] * 32, [1.0, *[0.0] * 47]
STEP: dict[str, Any] = {"groups_per_step": 16}
CHANCE = replace(NEIGHBOUR, own=0.1, skill=replace(RISE, mean=0.01, low=-0.02, high=0.04))


def agreed(consensus: int, against: int, neighbour: Neighbour = CHANCE, **changed: Any) -> Facts:
    """Return the sound facts with answers that mostly agree for some problems."""
    return replace(
        SOUND, reward=replace(SOUND.reward, neighbour=neighbour, consensus=consensus, against=against), **changed
    )


EARNED = SOUND.reward.earned


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (SOUND, {}),
        # rare, and still found in three of ten steps; if never found, the run stops for any entropy
        (answers(RARE, correct=0.002, truncated=0.7, answered=0.3, entropy=3.1, **STEP), {"rare_reward": "warning"}),
        (answers(RARE, correct=0.002, truncated=0.0, answered=0.0, entropy=3.1, **STEP), {"rare_reward": "warning"}),
        (answers(RARE, correct=0.002, truncated=0.0, answered=1.0, groups_per_step=2), {"too_hard": "stop"}),
        (answers(NONE, correct=0.0, truncated=0.0, answered=1.0, entropy=3.1, **STEP), {"too_hard": "stop"}),
        (answers(RARE, correct=0.998, truncated=0.0, answered=1.0, entropy=3.1, **STEP), {"too_easy": "stop"}),
        (answers(NONE, correct=1.0, truncated=0.0, answered=1.0), {"too_easy": "stop"}),
        (answers(NONE, correct=0.0, truncated=0.0, answered=1.0), {"too_hard": "stop"}),
        # three groups of ten: fewer than a run needs, and the interval does not exclude enough
        (answers([1.0, 0.0, 0.0, 0.0, 0.0] * 2, correct=0.0, answered=1.0, truncated=0.0), {"too_hard": "warning"}),
        # the recipe's filter drops problems that are never solved, and some remain
        (replace(answers([1.0, *[0.0] * 15] * 2, correct=0.0, truncated=0.0), filtered=True), {"too_hard": "warning"}),
        (answers(NONE, correct=0.0, truncated=0.9, answered=0.1), {"limit": "stop"}),
        (
            replace(
                answers(NONE, correct=0.0, truncated=0.9, answered=0.1),
                longer=LongerAnswers(max_tokens=384, truncated=0.8, correct=0.0, length=384),
            ),
            {"never_ends": "stop"},
        ),
        # each of several rewards has to judge and to distinguish responses, unless it is only logged
        (several(maths=PART, brief=PART | {"weight": 0.2, "not_judged": 0.9}), {}),
        (several(maths=PART, brief=PART | {"signal": 0.0}), {"reward_without_signal": "warning"}),
        (several(maths=PART, brief=PART | {"signal": 0.0, "weight": 0.0}), {}),
        (several(maths=PART, brief=PART | {"signal": 0.0, "not_judged": 1.0}), {"reward_never_judges": "stop"}),
        # enough groups have an advantage, but most answers are truncated; a larger T gives twice as many correct ones
        (
            replace(
                answers([1.0, 0.0] * 16, truncated=0.8, answered=0.2),
                longer=LongerAnswers(max_tokens=384, truncated=0.2, correct=0.7, length=200),
            ),
            {"limit": "stop"},
        ),
        # ... or some more, which the recipe intends if a later stage has room for them; otherwise a warning
        (
            replace(
                answers([1.0, 0.0] * 16, truncated=0.6, answered=0.4),
                longer=LongerAnswers(max_tokens=384, truncated=0.2, correct=0.4, length=200),
                later_tokens=200,
            ),
            {},
        ),
        (
            replace(
                answers([1.0, 0.0] * 16, truncated=0.6, answered=0.4),
                longer=LongerAnswers(max_tokens=384, truncated=0.2, correct=0.4, length=200),
                later_tokens=199,
            ),
            {"limit": "warning"},
        ),
        # few groups of few have an advantage, which by itself is no proof: the larger T is
        (
            replace(
                answers([1.0, 0.0, 0.0, 0.0, 0.0] * 2, correct=0.05, truncated=0.8, answered=0.2),
                longer=LongerAnswers(max_tokens=384, truncated=0.2, correct=0.7, length=200),
            ),
            {"limit": "stop"},
        ),
        (
            replace(
                answers(NONE, correct=0.0, truncated=1.0, answered=0.0),
                template=replace(SOUND.template, other_ends={"<eot>": 0.9}),
            ),
            {"end_token": "stop"},
        ),
        (
            replace(SOUND, reward=replace(SOUND.reward, neighbour=replace(NEIGHBOUR, own=0.1, there=0.4, rise=RISE))),
            {"shifted_references": "stop"},
        ),
        # the best offset is twice as good as the rows' own answers and not more than twice chance: 0.13 + 0.01
        (
            agreed(4, 3, replace(CHANCE, own=0.13, there=0.27, rise=RISE, skill=replace(CHANCE.skill, mean=-0.01))),
            {"label_noise": "stop"},
        ),
        (replace(SOUND, reward=replace(SOUND.reward, unread=50)), {"references_unread": "stop"}),
        (replace(SOUND, reward=replace(SOUND.reward, unread=5)), {"references_unread": "warning"}),
        (replace(SOUND, conflicting=400), {"conflicting_references": "warning"}),
        (
            replace(
                SOUND,
                learnable=replace(SOUND.learnable, constant=True),
                reward=replace(SOUND.reward, earned=dict.fromkeys(EARNED, 1.0)),
            ),
            {"constant_reward": "stop"},
        ),
        (
            replace(SOUND, reward=replace(SOUND.reward, earned={**EARNED, WRONG: 1.0})),
            {"reward_pays_wrong": "stop"},
        ),
        (
            replace(SOUND, reward=replace(SOUND.reward, earned={**EARNED, SEVERAL: 1.0})),
            {"reward_pays_hedging": "warning"},
        ),
        # a random reward also pays for answers with several values
        (
            replace(SOUND, reward=replace(SOUND.reward, earned={**EARNED, SEVERAL: 1.0}, unsteady=0.5)),
            {"reward_unsteady": "warning"},
        ),
        (replace(SOUND, reward=replace(SOUND.reward, unsteady=1.0, noise=0.01)), {"reward_unsteady": "warning"}),
        (replace(SOUND, reward=replace(SOUND.reward, unsteady=0.5, noise=0.6)), {"reward_unsteady": "stop"}),
        (
            replace(SOUND, reward=replace(SOUND.reward, fitting=replace(RISE, mean=-0.5, low=-0.9, high=-0.1))),
            {"reward_against_references": "warning"},
        ),
        (replace(SOUND, reward=replace(SOUND.reward, fitting=replace(RISE, mean=-0.1, low=-0.3, high=0.1))), {}),
        # graded scores that never reach right_from: the offline filter leaves nothing
        (replace(answers([1.0, 0.5] * 16, correct=0.0), filtered=True), {"all_filtered": "stop"}),
        (answers([1.0, 0.5] * 16, correct=0.0), {}),
        (replace(SOUND, template=replace(SOUND.template, foreign=("<|im_end|>",))), {"template": "stop"}),
        (
            replace(
                SOUND,
                template=replace(
                    SOUND.template, other_form=OtherForm(name="a", remedy="b", before=0.1, after=0.4, rise=RISE)
                ),
            ),
            {"template": "stop"},
        ),
        (replace(SOUND, template=replace(SOUND.template, begins=2)), {"double_begin": "warning"}),
        (replace(SOUND, template=replace(SOUND.template, opens=False)), {"generation_prompt": "warning"}),
        (replace(SOUND, update=replace(UPDATE, kl=0.3)), {"learning_rate": "stop"}),
        # a warm-up saves a run from the measured step
        (replace(SOUND, update=replace(UPDATE, kl=0.3, warmup=True)), {}),
        (replace(SOUND, update=replace(UPDATE, kl=math.nan)), {"learning_rate": "stop"}),
        (
            replace(SOUND, template=replace(SOUND.template, foreign=("<|im_end|>",)), update=replace(UPDATE, kl=0.3)),
            {"template": "stop"},
        ),
        (replace(SOUND, update=replace(UPDATE, failure="NaN", finite=False)), {"learning_rate": "stop"}),
        (replace(SOUND, update=replace(UPDATE, kl=1e-12)), {"learning_rate_low": "warning"}),
        # answers agree, the labels differ, and other problems' labels fit them as well
        (agreed(4, 3), {"label_noise": "stop"}),
        (agreed(8, 5), {}),
        (agreed(3, 3), {}),
        # a model with habits: most agreed answers are wrong, but they depend on their problems
        (agreed(16, 16, NEIGHBOUR), {}),
        (agreed(16, 16, replace(CHANCE, own=0.0)), {}),
        # another fault explains that answers are unrelated to their problems
        (
            replace(agreed(16, 16), template=replace(SOUND.template, foreign=("<|im_end|>",))),
            {"template": "stop"},
        ),
        (
            replace(
                agreed(16, 16, replace(CHANCE, there=0.4, rise=RISE)),
                learnable=replace(SOUND.learnable, entropy=3.1),
            ),
            {"temperature": "stop"},
        ),
        (replace(SOUND, temperature=6.0, learnable=replace(SOUND.learnable, entropy=3.1)), {"temperature": "stop"}),
        (replace(SOUND, learnable=replace(SOUND.learnable, entropy=2.42)), {"temperature": "stop"}),
        (replace(SOUND, learnable=replace(SOUND.learnable, entropy=2.41)), {}),
        # 3.1 nats are much for 25 tokens and little for 49,152
        (replace(SOUND, learnable=replace(SOUND.learnable, entropy=3.1, uniform_entropy=math.log(49152))), {}),
        (replace(SOUND, learnable=replace(SOUND.learnable, entropy=None)), {}),
        (replace(SOUND, alpha=0.2), {"entropy_bonus": "stop"}),
        (replace(SOUND, alpha=0.19), {}),
        (replace(SOUND, kl_coefficient=1.0), {"kl_coefficient": "stop"}),
        (replace(SOUND, kl_coefficient=0.99), {}),
        # a teacher gives a gradient where no group has an advantage
        (replace(answers(NONE, correct=0.0, truncated=0.0, answered=1.0), taught=True), {}),
    ],
)
def test_what_figures_mean(facts: Facts, named: dict[str, str]) -> None:
    found = preflight_findings(facts)
    assert {item["name"]: item["severity"] for item in found} == named
    assert all(item["message"] and item["remedy"] for item in found)


def test_a_hot_recipe_and_an_untrained_model_have_different_remedies() -> None:
    random_tokens = replace(SOUND, learnable=replace(SOUND.learnable, entropy=3.1))
    (hot,), (untrained,) = (preflight_findings(replace(random_tokens, temperature=value)) for value in (6.0, 1.0))
    assert "rollout.temperature = 1" in hot["remedy"]
    (own,) = preflight_findings(replace(random_tokens, temperature=6.0, own=("temperature",)))
    assert "stages.0.temperature = 1" in own["remedy"]
    assert "supervised fine-tuning" in untrained["remedy"]


def test_the_learning_rate_to_lower_is_that_of_the_stage_if_it_has_one() -> None:
    fast = replace(SOUND, update=replace(UPDATE, kl=0.3))
    for facts, key in ((fast, "optimizer"), (replace(fast, own=("learning_rate",)), "stages.0")):
        (found,) = preflight_findings(facts)
        assert f"Lower {key}.learning_rate from 0.001 to about" in found["remedy"]


class LastDigit:
    """A verifier service: a response is correct if its last character is the reference answer."""

    def submit(self, problem: Problem, responses: Sequence[str]) -> tuple[Verdict, ...]:
        right = [response[-1:] == problem.references[0] for response in responses]
        return tuple(Verdict(outcome=Outcome.CORRECT if r else Outcome.WRONG, status="exact") for r in right)

    def result(self, ticket: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
        return ticket

    def ready(self, ticket: tuple[Verdict, ...]) -> bool:
        return True

    def close(self) -> None: ...


def test_answers_by_other_problems_references() -> None:
    """Problem i has the reference answer i mod 7. The answers are correct, then correct for the row below."""
    train = [problem(str(i), reference=str(i % 7)) for i in range(28)]

    def answered(shift: int) -> Neighbour:
        groups = []
        for i, asked in enumerate(train):
            answers = [completion([1], text=f"= {(i + shift) % 7}"), completion([1], text="= 9")]
            group = RolloutGroup(request=request(i, [1], size=2, asked=asked), completions=tuple(answers))
            groups.append(score_group(group, LastDigit().submit(asked, [c.text for c in answers])))
        found = probe_reward(LastDigit(), VerifierConfig(), train, groups).neighbour
        assert found is not None
        return found

    right, shifted = answered(0), answered(1)
    assert (right.own, right.there, right.skill.mean) == (0.5, 0.0, 0.5)
    # one of the four offsets fits: 0.5 / 4
    assert (shifted.offset, shifted.own, shifted.there, shifted.skill.mean) == (1, 0.0, 0.5, -0.125)


class Tossed(LastDigit):
    """A verifier service whose every second call finds each answer correct, and the others none."""

    calls = 0

    def submit(self, problem: Problem, responses: Sequence[str]) -> tuple[Verdict, ...]:
        self.calls += 1
        outcome = Outcome.CORRECT if self.calls % 2 else Outcome.WRONG
        return tuple(Verdict(outcome=outcome, status="exact") for _ in responses)


@pytest.mark.parametrize(
    ("verifier", "compared"),
    [
        ("my.py:score", True),
        ("my.py:score + maths", True),
        ("maths + my.py:score", False),
        ("reasoning_gym", False),  # it accepts other answers than the reference
    ],
)
def test_a_custom_reward_is_compared_with_the_references_and_with_itself(verifier: str, compared: bool) -> None:
    """A reward with the wrong sign pays for the one of two answers that does not fit the reference."""
    groups = []
    for i in range(10):
        asked = replace(problem(str(i), reference=str(i)), verifier=verifier)
        answers = tuple(completion([1], text=f"It is {value}") for value in (i, i + 50))
        group = RolloutGroup(request=request(i, [1], size=2, asked=asked), completions=answers)
        paid = (Outcome.WRONG, Outcome.CORRECT)
        groups.append(score_group(group, tuple(Verdict(outcome=outcome, status="score") for outcome in paid)))
    if not compared:
        assert _fitting(VerifierConfig(), groups) is None
        return
    found = probe_reward(Tossed(), VerifierConfig(), [], groups)
    assert found.unsteady == 1.0
    # Two verdicts of an answer differ by 1: their variance is 1/2, and that of the groups' rewards (0 and 1) is 1/4.
    assert found.noise == 2.0
    assert found.fitting is not None
    assert (found.fitting.mean, found.fitting.high < 0) == (-1.0, True)


def test_divergence_by_hand() -> None:
    # a log-prob halves its probability: r = 1/2, r - 1 - log r = 0.5 - 1 + 0.6931; the masked token does not count
    before = [np.array([-1.0, -2.0], dtype=np.float32), np.array([-1.0, -9.0], dtype=np.float32)]
    after = [np.array([-1.0 - math.log(2), -2.0], dtype=np.float32), np.array([-1.0, 0.0], dtype=np.float32)]
    kl, change = divergence(before, after, [None, np.array([True, False])])
    assert kl == pytest.approx((math.log(2) - 0.5) / 3, rel=1e-5)
    assert change == pytest.approx(math.log(2) / 3, rel=1e-5)


@pytest.mark.slow
def test_every_planted_fault_is_named_and_no_sound_recipe_is_accused(tmp_path: Path) -> None:
    told: list[str] = []
    assert main([str(tmp_path)], told.append) == 0, "\n".join(told)


def test_another_accepted_answer_is_not_tried_as_a_wrong_one() -> None:
    first = replace(problem("p0", "0?", "1"), references=("1", "one"))
    boxed = VerifierConfig(extract="box", reasoning="auto")
    with boxed.pool() as pool:
        earned, unsteady, _ = _made_up(pool, boxed, [first, problem("p1", "1?", "one"), problem("p2", "2?", "2")])
    assert unsteady == 0.0
    assert (earned[REFERENCE], earned[WRONG], earned[NOTHING]) == (1.0, 0.0, 0.0)


def test_the_system_prompt_of_a_template_keeps_its_words() -> None:
    told = "You are a helpful AI assistant named SmolLM"
    assert _system(f"<|im_start|>system\n{told}<|im_end|>\n<|im_start|>user\n?<|im_end|>\n") == told
    for rendered in ("<s>[INST] ? [/INST]", "<|user|>\n?<|end|>", "\n\nHuman: ?\n\nAssistant:"):
        assert _system(rendered) == ""


def test_groups_are_rejected_as_in_training() -> None:
    """Rewards 1, 1 and 0, where the last response is truncated: under the mask ``before`` they are equal."""
    group = scored_group(*[make_verdict("matched")] * 2, make_verdict("mismatch"), truncated=1)
    for mask, share_of_groups in (("none", 1.0), ("before", 0.0)):
        config = load_train_recipe(Path("tiny"), [f"algorithm.advantage_mask={mask}"])
        found = _learnable(config, [group], 25)
        assert (found.signal.mean, found.answers.mixed) == (share_of_groups, share_of_groups)


@pytest.mark.parametrize(
    ("context", "environments", "expected"),
    [
        (1000, {}, 8 * 16),
        (3 + 40, {}, 40),
        (3 + 31, {}, None),
        # with two turns an observation of 10 tokens is added
        (3 + 40 + 10, {"game": problem()}, 40),
    ],
)
def test_a_larger_t_fits_the_engine(
    context: int, environments: dict[str, Problem], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def sampled(*_: Any, max_tokens: int, **__: Any) -> list[ScoredGroup]:
        asked.append(max_tokens)
        return [scored_group(make_verdict("matched"))]

    monkeypatch.setattr("magicrl.training.preflight.sample_problems", sampled)
    room = ("environment.max_turns=2", "environment.max_observation_tokens=10", "stages.0.max_tokens=16")
    built: Any = SimpleNamespace(
        encoder=SimpleNamespace(encode=lambda _: [1, 1, 1]),
        engine=SimpleNamespace(max_context=context, capabilities=Capabilities()),
        data=SimpleNamespace(train=(), environments=lambda: environments),
    )
    bench = _Bench(load_train_recipe(Path("tiny"), room), built, built)
    longer = bench.longer([problem()])
    assert asked == ([] if expected is None else [expected])
    assert (longer and longer.max_tokens) == expected

    def refused(*_: Any, **__: Any) -> list[ScoredGroup]:
        raise ValueError("one row needs 3000 MiB, more than rollout.memory_limit_mb")

    monkeypatch.setattr("magicrl.training.preflight.sample_problems", refused)
    assert bench.longer([problem()]) is None


def test_only_a_prompt_that_cannot_be_encoded_leaves_a_form_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("of the engine")

    built: Any = SimpleNamespace(
        start=SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ messages }}")),
        engine=SimpleNamespace(capabilities=Capabilities()),
        data=SimpleNamespace(train=()),
    )
    bench = _Bench(load_train_recipe(Path("tiny")), built, built)
    monkeypatch.setattr("magicrl.training.preflight.sample_problems", fail)
    monkeypatch.setattr("magicrl.training.preflight.PromptEncoder", lambda *_: SimpleNamespace(encode=fail))
    groups = [scored_group(make_verdict("mismatch"))]
    assert bench.other_form(groups) is None
    monkeypatch.setattr("magicrl.training.preflight.PromptEncoder", lambda *_: SimpleNamespace(encode=id))
    with pytest.raises(ValueError, match="of the engine"):
        bench.other_form(groups)
