"""Word problems: references re-derived from the text, held-out splits, readable English, and shares of the styles."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from magicrl.data.families import make_family, unique_problems
from magicrl.data.word_problems import (
    INSTRUCTION,
    WordProblems,
    evaluate_steps,
    expression,
    instance_split,
    load_stories,
    make_word_problems,
    people,
    with_slip,
)
from magicrl.records import Problem

FAITHFUL = {"direct": 0.0, "partial": 0.0, "slips": 0.0, "repairs": 0.0}
SUM = r"\d+(?: [-+x/] \d+)*"
EQUATION = re.compile(rf"{SUM}(?: = {SUM})+")
BOX = re.compile(r"\\boxed\{(\d+)\}")
REPAIR = re.compile(r"No, |Wait, |That is wrong: |Let me redo it: |Not quite, |I slipped, ")


def problems(split: str, count: int = 200, seed: int = 0, **options: float | int | str) -> list[Problem]:
    return unique_problems(make_family("word_problems", options), seed=seed, split=split, count=count)


def family_with(**options: float | int | str) -> WordProblems:
    return make_word_problems(**options)


def python_value(text: str) -> float:
    """Return the value of an expression of digits and the four operations, by Python's own grammar."""
    assert re.fullmatch(r"[\d\s()+\-x/]+", text)
    return eval(text.replace("x", "*"), {"__builtins__": {}})  # only digits and operators, asserted above


def tokens_about(text: str) -> int:
    """Return about the token count of a tokenizer that splits digits: words, single digits, punctuation."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]", text))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_reference_is_the_value_of_the_computation(split: str) -> None:
    for problem in problems(split):
        (reference,) = problem.references
        assert int(reference) >= 2
        assert python_value(expression(problem.extra["steps"])) == int(reference)
        assert len(problem.extra["steps"]) == problem.level


def test_the_story_holds_exactly_the_numbers_of_the_computation() -> None:
    for problem in problems("train"):
        told = Counter(re.findall(r"\d+", problem.prompt))
        needed = Counter(w for step in problem.extra["steps"] for w in step.split(" ")[::2] if w.isdigit())
        assert set(told) == set(needed), (problem.prompt, problem.extra["steps"])


def test_steps_and_expressions_worked_by_hand() -> None:
    assert [s.value for s in evaluate_steps(["4 * 6", "s0 + 12", "s1 / 3"]) or []] == [24, 36, 12]
    assert expression(["4 * 6", "s0 + 12", "s1 / 3"]) == "(4 x 6 + 12) / 3"
    assert [s.value for s in evaluate_steps(["3 * 5", "40 - s0", "s1 - 7"]) or []] == [15, 25, 18]
    assert expression(["3 * 5", "40 - s0", "s1 - 7"]) == "40 - 3 x 5 - 7"
    assert [s.value for s in evaluate_steps(["20 - 5", "20 + s0"]) or []] == [15, 35]
    assert expression(["2 + 3", "9 - s0"]) == "9 - (2 + 3)"


def test_faithful_demonstrations_compute_the_reference_and_state_only_true_equations() -> None:
    family = family_with(**FAITHFUL, checks=1.0, plain=1.0)
    rng = np.random.default_rng(3)
    seen = 0
    for problem in problems("train"):
        text = family.demonstration(problem, rng)
        assert BOX.findall(text) == [problem.references[0]]
        for equation in EQUATION.findall(text):
            assert len({python_value(side) for side in equation.split(" = ")}) == 1, text
            seen += 1
    assert seen > 500


def test_the_share_of_checks_is_one_of_solutions_and_not_of_steps() -> None:
    family = family_with(**FAITHFUL, checks=0.9, decompositions=0.0)
    found = unique_problems(family, seed=0, split="train", count=150, levels=[3])
    texts = [family.demonstration(problem, np.random.default_rng(place)) for place, problem in enumerate(found)]
    checks = sum(len(re.findall(r"Check: |To check, |Going back, |Test: |Indeed ", text)) for text in texts)
    assert checks / len(texts) == pytest.approx(0.9, abs=0.2)


def test_every_phrasing_of_a_faithful_step_shows_its_result_before_the_box() -> None:
    family = family_with(**FAITHFUL, decompositions=0.0)
    rng = np.random.default_rng(4)
    for problem in problems("train", count=150):
        text = family.demonstration(problem, rng)
        written = re.findall(r"\d+", text.partition("\\boxed")[0])
        for step in evaluate_steps(problem.extra["steps"]) or []:
            assert str(step.value) in written, text


def test_shares_of_strategies_slips_and_repairs() -> None:
    rng = np.random.default_rng(5)

    def drawn(**options: float) -> list[tuple[str, bool]]:
        """Return demonstrations, and whether each is right."""
        family = family_with(**options)
        asked = unique_problems(family, seed=0, split="train", count=400, levels=[2, 3])
        texts = [(family.demonstration(p, rng), p.references) for p in asked for _ in range(5)]
        return [(text, BOX.findall(text) == [*references]) for text, references in texts]

    early = drawn(direct=0.2, partial=0.3, slips=0.0, repairs=0.0)
    assert np.mean([len(re.findall(r"\d+", text)) == 1 for text, _ in early]) == pytest.approx(0.2, abs=0.03)
    assert np.mean([not right for _, right in early]) == pytest.approx(0.3, abs=0.03)
    worked = drawn(direct=0.0, partial=0.0, slips=0.25, repairs=0.15)
    assert np.mean([not right for _, right in worked]) == pytest.approx(0.25, abs=0.04)
    assert np.mean([REPAIR.search(text) is not None for text, _ in worked]) == pytest.approx(0.15, abs=0.04)


@pytest.mark.parametrize("slips", [False, True])
def test_a_slip_makes_the_answer_wrong_and_nothing_else_does(slips: bool) -> None:
    family = family_with(direct=0.0 if slips else 0.1, partial=0.0, slips=slips, repairs=0.0 if slips else 0.5)
    rng = np.random.default_rng(6)
    for problem in problems("train"):
        text = family.demonstration(problem, rng)
        assert (BOX.findall(text) == list(problem.references)) is not slips, text


def test_a_slip_that_would_cancel_out_is_made_elsewhere() -> None:
    steps = ["10 + 5", "30 - s0", "s0 + s1"]  # the last value is 30 whatever the first one is
    solution = evaluate_steps(steps)
    assert solution is not None
    rng = np.random.default_rng(7)
    assert all(with_slip(steps, solution, rng)[-1].value != 30 for _ in range(50))


def test_direct_answers_have_no_working_and_partial_ones_stop_early() -> None:
    rng = np.random.default_rng(7)
    for problem in problems("train", count=100):
        direct = family_with(direct=1.0, partial=0.0).demonstration(problem, rng)
        assert not EQUATION.search(direct)
        assert re.findall(r"\d+", direct) == list(problem.references)
    family = family_with(direct=0.0, partial=1.0)
    for problem in unique_problems(family, seed=1, split="train", count=100, levels=[2, 3]):
        text = family.demonstration(problem, rng)
        values = [str(step.value) for step in evaluate_steps(problem.extra["steps"]) or []]
        assert BOX.findall(text)[0] in values[:-1]


def test_templates_and_instances_are_held_out() -> None:
    sets = {split: problems(split) for split in ("train", "validation", "test")}
    stories = {split: {p.extra["story"] for p in found} for split, found in sets.items()}
    instances = {split: {p.extra["steps"] for p in found} for split, found in sets.items()}
    for a, b in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not stories[a] & stories[b]
        assert not instances[a] & instances[b]
    assert len(stories["train"]) >= 30
    assert min(len(stories["validation"]), len(stories["test"])) >= 6


def test_no_held_out_sentence_stands_in_a_training_story() -> None:
    texts: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    for story in load_stories():
        texts[story.split].update(s for phrasings in story.sentences.values() for s in phrasings)
    assert not texts["train"] & (texts["validation"] | texts["test"])
    assert not texts["validation"] & texts["test"]


def test_every_story_has_known_sentences_and_an_answer_to_each_question() -> None:
    events = "open add sub open_groups add_groups sub_groups share more fewer"
    questions = "ask tell ask_share tell_share ask_friend tell_friend ask_both tell_both"
    for story in load_stories():
        assert set(story.sentences) <= {*events.split(), *questions.split()}, story.key
        for ending in ("", "_share", "_friend", "_both"):
            assert len(story.sentences.get(f"ask{ending}", ())) == len(story.sentences.get(f"tell{ending}", ()))


def test_held_out_by_instance_shares_stories_but_no_computation() -> None:
    train, test = (problems(split, held_out="instance") for split in ("train", "test"))
    assert {p.extra["story"] for p in train} & {p.extra["story"] for p in test}
    assert not {p.extra["steps"] for p in train} & {p.extra["steps"] for p in test}
    assert all(instance_split(p.extra["steps"]) == "test" for p in test)


def test_streams_are_deterministic_and_ids_unique() -> None:
    def draw(seed: int) -> list[Problem]:
        return list(islice(make_family("word_problems").stream(seed=seed, split="train"), 50))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len({p.id for p in draw(1)}) == 50
    easy = list(islice(make_family("word_problems").stream(seed=1, split="train", levels=[1]), 1500))
    assert len({p.id for p in easy}) == 1500  # so many that problems repeat
    texts = [
        [WordProblems().demonstration(p, np.random.default_rng(9)) for p in draw(1)[:10]] for _ in range(2)
    ]  # same generator state, same text
    assert texts[0] == texts[1]


def test_levels_are_equally_frequent_and_checked() -> None:
    family = WordProblems()
    counts = Counter(p.level for p in islice(family.stream(seed=0, split="train", levels=[1, 3]), 400))
    assert set(counts) == {1, 3}
    assert abs(counts[1] - 200) < 50
    with pytest.raises(ValueError, match="got \\[4\\]"):
        family.stream(seed=0, split="train", levels=[4])


def test_numbers_keep_to_the_options() -> None:
    for problem in problems("train", max_number=15, max_factor=3, max_unit=4):
        for step in problem.extra["steps"]:
            left, operator, right = step.split(" ")
            if operator == "*":
                assert int(left) <= 3
                assert int(right) <= 4
            elif left.isdigit():
                assert int(left) <= 15


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_english_is_clean(split: str) -> None:
    family = WordProblems()
    rng = np.random.default_rng(11)
    for problem in problems(split, count=250):
        story = problem.prompt.removesuffix(INSTRUCTION)
        for text in (story, family.demonstration(problem, rng)):
            bare = BOX.sub("7", text)
            assert not re.search(r"[{}\\]", bare), bare
            assert not re.search(r"  |\s[.,:]|\.\.|^\s|\s$", bare.rstrip()), bare
            assert all(s[0].isupper() or s[0].isdigit() for s in re.split(r"(?<=[.?]) ", bare.strip())), bare
            assert not re.search(r"\b(a|A) [aeiou]\w+|\b(an|An) (?!hour)[^aeiou\W]", bare), bare
            assert not re.search(r"\b[01] [a-z]", bare), bare
            assert not re.search(r"\b(\w+) \1\b", re.sub(r"\d+", "#", bare)), bare
        assert story.count("?") == 1
        assert problem.prompt.endswith(INSTRUCTION)


def test_heroes_friends_and_items_agree() -> None:
    for problem in problems("train"):
        named = [name for name in people() if re.search(rf"\b{name}\b", problem.prompt)]
        assert len(named) <= 2
    for story in load_stories():
        text = " ".join(s for phrasings in story.sentences.values() for s in phrasings)
        if story.who is not None:
            assert not re.search(r"\{([Hh]e|him|his|His)\}", text), story.key
        for kind, needs in (("share", "ask_share"), ("more", "ask_both"), ("fewer", "ask_both")):
            assert kind not in story.sentences or needs in story.sentences, story.key


def test_lengths_stay_short() -> None:
    family = family_with(direct=0.0, partial=0.0)
    rng = np.random.default_rng(12)
    worked = [tokens_about(family.demonstration(p, rng)) for p in problems("train")]
    assert 30 < np.mean(worked) < 65
    assert max(worked) < 128
    assert max(tokens_about(p.prompt) for p in problems("train")) < 80


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="no option 'slip'; did you mean 'slips'"):
        make_family("word_problems", {"slip": 0.2})
    with pytest.raises(ValueError, match="max_number"):
        make_family("word_problems", {"max_number": 3})
    with pytest.raises(ValueError, match="direct \\+ partial must be at most 1"):
        make_family("word_problems", {"direct": 0.7, "partial": 0.6})
    with pytest.raises(ValueError, match="held_out"):
        make_family("word_problems", {"held_out": "names"})
