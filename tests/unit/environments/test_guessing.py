"""The guessing game: its answers, its rewards, and any input of a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from magicrl.data.families import make_family, unique_problems
from magicrl.data.guess_number import GuessNumber, make_guess_number, range_split
from magicrl.environments.base import Step
from magicrl.environments.guessing import NO_GUESS, TOO_HIGH, TOO_LOW, Guessing, read_guess
from magicrl.records import Problem

GAME = Problem(
    id="game",
    prompt="?",
    references=("20",),
    verifier="exact",
    source="test",
    extra={"secret": 20, "low": 12, "high": 26, "guesses": 4},
)


def begun(**extra: object) -> Guessing:
    game = Guessing()
    game.reset(replace(GAME, extra={**GAME.extra, **extra}))
    return game


def test_it_says_too_low_and_too_high_and_pays_for_the_number() -> None:
    game = begun()
    assert game.step("19").observation == TOO_LOW
    assert game.step("I try 23").observation == TOO_HIGH
    end = game.step("between 19 and 23: 20")
    assert (end.done, end.reward, end.observation) == (True, 1.0, "")
    assert end.metrics == {"guesses": 3.0, "legal": 1.0}


def test_the_last_guess_pays_nothing_when_it_is_wrong() -> None:
    game = begun(guesses=2)
    assert not game.step("19").done
    end = game.step("19")
    assert (end.done, end.reward) == (True, 0.0)
    # 19 was no longer possible
    assert end.metrics == {"guesses": 2.0, "legal": 0.5}


def test_a_guess_outside_of_the_range_opens_nothing() -> None:
    game = begun()
    assert [game.step(text).observation for text in ("30", "28", "5")] == [TOO_HIGH, TOO_HIGH, TOO_LOW]
    assert game.step("20").metrics == {"guesses": 4.0, "legal": 0.25}


def test_a_turn_without_a_number_uses_a_guess_up() -> None:
    game = begun(guesses=2)
    assert game.step("is it large?").observation == NO_GUESS
    assert game.step("20").reward == 1.0
    assert begun(guesses=1).step("").metrics == {"guesses": 1.0, "legal": 0.0}


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("27", 27),
        ("007", 7),
        ("\\boxed{27}.", 27),
        ("<think>first 12, then 40</think> 27", 27),
        ("<think>27", None),
        ("9" * 100_000, None),
        ("٢٧", None),
        ("x" * 1_000_000, None),
        ("\x00\ud800 27 \x00", 27),
    ],
)
def test_what_counts_as_a_guess(text: str, guess: int | None) -> None:
    assert read_guess(text) == guess


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"secret": None}, "whole numbers secret, low, high, guesses"),
        ({"secret": "20"}, "whole numbers"),
        ({"secret": True}, "whole numbers"),
        ({"secret": 11}, "low <= secret <= high"),
        ({"guesses": 0}, "at least one guess"),
    ],
)
def test_a_problem_that_is_no_game_is_told(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        begun(**extra)


def problems(split: str, count: int = 300, **options: int) -> list[Problem]:
    return unique_problems(make_family("guess_number", options), seed=1, split=split, count=count)


def test_halving_always_wins_and_the_secret_is_not_in_the_prompt() -> None:
    for problem in problems("train"):
        game, (low, high) = Guessing(), (problem.extra["low"], problem.extra["high"])
        game.reset(problem)
        step = Step()
        while not step.done:
            middle = (low + high) // 2
            step = game.step(str(middle))
            low, high = (middle + 1, high) if step.observation == TOO_LOW else (low, middle - 1)
        assert step.reward == 1.0
        numbers = [int(word) for word in problem.prompt.split() if word.isdigit()]
        assert numbers == [problem.extra["low"], problem.extra["high"], problem.extra["guesses"]]


def test_ranges_reach_from_one_to_the_largest_number() -> None:
    train = problems("train", largest=31)
    assert min(problem.extra["low"] for problem in train) == 1
    assert max(problem.extra["high"] for problem in train) == 31


def test_splits_share_no_range_and_a_test_has_every_problem_once() -> None:
    ranges = {split: {problem.prompt for problem in problems(split)} for split in ("train", "validation", "test")}
    assert ranges["train"].isdisjoint(ranges["test"])
    assert ranges["train"].isdisjoint(ranges["validation"])
    assert ranges["validation"].isdisjoint(ranges["test"])
    test = problems("test")
    assert len({(problem.prompt, problem.extra["secret"]) for problem in test}) == len(test)
    assert all(range_split(p.extra["low"], p.extra["high"]) == "test" for p in test)
    # the secrets of one range are one unit of an interval
    assert len({problem.cluster for problem in test}) == len({problem.prompt for problem in test}) < len(test)


def test_demonstrations_play_legally_in_the_vocabulary_and_often_lose() -> None:
    family = make_guess_number()
    known, rng = set(family.vocabulary), np.random.default_rng(0)
    won = played = 0
    for problem in islice(family.stream(seed=2, split="train", levels=[5]), 300):
        texts = family.demonstration(problem, rng)
        assert len(texts) % 2 == 1
        assert set(" ".join([problem.prompt, *texts]).split()) <= known
        game = Guessing()
        game.reset(problem)
        # the environment answers as in the demonstration
        steps = [game.step(turn) for turn in texts[::2]]
        assert [step.observation for step in steps[:-1]] == list(texts[1::2])
        assert steps[-1].done
        assert steps[-1].metrics["legal"] == 1.0
        won, played = won + (steps[-1].reward == 1.0), played + 1
    assert 0.4 < won / played < 0.7


def test_a_stream_repeats_itself_and_refuses_levels_that_do_not_exist() -> None:
    family: GuessNumber = make_guess_number(levels=4, spare=2)
    first = list(islice(family.stream(seed=3, split="validation"), 20))
    assert first == list(islice(family.stream(seed=3, split="validation"), 20))
    assert {problem.level for problem in first} == {2, 3, 4}
    assert all(problem.extra["guesses"] == (problem.level or 0) + 2 for problem in first)
    with pytest.raises(ValueError, match=r"levels 2 to 4, got \[5\]"):
        family.stream(seed=0, split="train", levels=[5])
    with pytest.raises(ValueError, match="raise largest"):
        make_guess_number(levels=7, largest=99)
