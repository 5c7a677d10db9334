"""The calculator: values compared with Python's, limits, both forms of a call, and hostile input."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.data.calculator_problems import CalculatorProblems, make_calculator_problems
from magicrl.data.families import make_family, unique_problems
from magicrl.environments.calculator import (
    BAD_CALL,
    ERRORS,
    MAX_CALLS,
    SYNTAX,
    TOO_LARGE,
    TOO_LONG,
    TOO_MANY,
    ZERO,
    CalculationError,
    Calculator,
    apart,
    calculate,
    read_calls,
)
from magicrl.records import Problem
from magicrl_verifiers.extraction import ExactVerifier
from magicrl_verifiers.records import JudgeOptions

ASKED = Problem(id="a", prompt="?", references=("758",), verifier="maths", source="test")


def begun(**extra: object) -> Calculator:
    calculator = Calculator()
    calculator.reset(Problem(id="a", prompt="?", references=("758",), verifier="maths", source="test", extra=extra))
    return calculator


def chat_call(expression: object, name: str = "calculator") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'expression': expression}})}\n</tool_call>"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("473 + 285", "758"),
        ("2 + 3 x 4", "14"),
        ("(2 + 3) × 4", "20"),
        ("10 - 4 - 3", "3"),
        ("60 / 4 / 5", "3"),
        ("60 ÷ 4 * 5", "75"),
        ("-2 ^ 2", "-4"),
        ("2 ** 3 ^ 2", "512"),
        ("2 ^ -1", "0.5"),
        ("- - 3", "3"),
        ("1,250 + 1", "1251"),
        (".5 + 0.25", "0.75"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("100 / 7", "14.2857142857"),
        ("1 / 10000000", "0.0000001"),
        ("9 ^ 60 - 9 ^ 60 + 1", "1"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("", SYNTAX),
        ("2 3", SYNTAX),
        ("2 +", SYNTAX),
        ("(2", SYNTAX),
        ("2)", SYNTAX),
        ("()", SYNTAX),
        ("1_000", SYNTAX),
        ("0b11", SYNTAX),
        ("1e9", SYNTAX),
        ("sqrt(2)", SYNTAX),
        ("__import__('os')", SYNTAX),
        ("2 ^ 0.5", SYNTAX),
        ("٣ + 1", SYNTAX),
        ("1 / 0", ZERO),
        ("1 / (3 - 3)", ZERO),
        ("0 ^ -1", ZERO),
        ("9 ^ 9 ^ 9", TOO_LARGE),
        ("9 ^ 999999999999", TOO_LARGE),
        ("9" * 100, TOO_LARGE),
        ("(9 ^ 60) * (9 ^ 60)", TOO_LARGE),
        ("1" * 201, TOO_LONG),
        ("(" * 200, TOO_LONG),
        ("(" * 30, SYNTAX),
        ("-" * 200, SYNTAX),
        ("2 ^ " * 49 + "2", TOO_LARGE),
    ],
)
def test_what_is_wrong_is_said(expression: str, error: str) -> None:
    with pytest.raises(CalculationError) as caught:
        calculate(expression)
    assert str(caught.value) == error
    assert error in ERRORS


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda x: st.tuples(x, st.sampled_from("+-*"), x).map("({0[0]}{0[1]}{0[2]})".format),
        max_leaves=8,
    )
)
def test_whole_numbers_agree_with_python(expression: str) -> None:
    assert calculate(expression) == str(eval(expression, {"__builtins__": {}}))  # only digits, signs and brackets


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.text(alphabet="0123456789.,+-*/^()x ", max_size=210))
def test_any_expression_has_a_short_value_or_an_error(expression: str) -> None:
    answer = begun().step(f"<calc>{expression}</calc>").observation
    if answer not in ERRORS:
        Fraction(answer)
        assert len(answer) <= 80


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<calc>",
                "</calc>",
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                '{"name":',
                "[[",
                "1+1",
                "\ud800",
            ]
        )
        | st.text(max_size=5)
    ).map("".join)
)
def test_any_turn_is_answered(text: str) -> None:
    step = begun().step(text)
    assert step.done or step.observation
    assert step.reward is None


def test_both_forms_of_a_call_and_several_in_a_turn() -> None:
    turn = f"<calc>473 + 285</calc> and {chat_call('2 x 3')}"
    assert read_calls(turn) == ["473 + 285", "2 x 3"]
    assert begun().step(turn).observation == "758\n6"
    several = '<tool_call>[{"name": "calculator", "arguments": {"expression": "1+1"}}, {"name": "other"}]</tool_call>'
    assert read_calls(several) == ["1+1", None]
    # arguments as a JSON string, as in OpenAI's API
    assert read_calls(
        '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"2*2\\"}"}</tool_call>'
    ) == ["2*2"]


@pytest.mark.parametrize(
    "turn",
    [
        "<calc>1 + 1",
        "<tool_call>1 + 1</calc>",
        "\\boxed{758} <tool_call>",
        "<tool_call>1 + 1</tool_call>",
        "<tool_call>null</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>{'name': 'calculator'}</tool_call>",
        '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": "["}</tool_call>',
        "<calc>1<tool_call></calc>",
        f"<tool_call>{'[' * 1500}</tool_call>",
        chat_call("1+1", name="shell"),
        chat_call(5),
        chat_call("1" * 3000),
    ],
)
def test_a_call_that_cannot_be_read_is_answered_with_an_error(turn: str) -> None:
    step = begun().step(turn)
    assert not step.done
    assert BAD_CALL in step.observation


def test_a_turn_without_a_call_ends_the_episode_for_the_verifier() -> None:
    calculator = begun()
    assert calculator.step("<calc>1/0</calc>").observation == ZERO
    assert calculator.step("<calc>473+285</calc>").observation == "758"
    end = calculator.step("<think>maybe <calc>1</calc></think> It is \\boxed{758}.")
    assert (end.done, end.reward) == (True, None)
    assert end.metrics == {"calls": 2.0, "call_errors": 1.0, "called": 1.0}
    assert begun().step("758").metrics["called"] == 0.0


def test_a_flood_of_calls_is_cut_and_takes_no_time() -> None:
    clock = time.process_time()
    answer = begun().step("<calc>9^60</calc>" * 60_000).observation.splitlines()
    assert len(answer) == MAX_CALLS + 1
    assert answer[-1] == TOO_MANY
    assert BAD_CALL in begun().step("<calc>" * 150_000).observation
    assert BAD_CALL in begun().step("<tool_call>[" * 80_000).observation
    assert time.process_time() - clock < 5


def test_digits_apart_are_read_and_written_so_only_where_the_problem_says_it() -> None:
    tiny = begun(digits_apart=True)
    assert tiny.step("<calc> 4 7 3 + 2 8 5 </calc>").observation == "7 5 8"
    assert tiny.step("<calc> 1 . 5 - 3 </calc>").observation == "- 1 . 5"
    assert begun().step("<calc> 4 7 3 + 2 8 5 </calc>").observation == SYNTAX


def test_the_tool_is_described_as_chat_templates_want_it() -> None:
    (tool,) = Calculator.tools
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "calculator"
    assert set(tool["function"]["parameters"]["required"]) <= set(tool["function"]["parameters"]["properties"])


def family(**options: object) -> CalculatorProblems:
    return make_calculator_problems(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("digits_apart", [True, False])
def test_demonstrations_play_as_the_calculator_does(digits_apart: bool) -> None:
    made = family(digits_apart=digits_apart, held_out="instance", tool_share=0.5, slips=0.5)
    rng, judge = np.random.default_rng(0), ExactVerifier(JudgeOptions())
    called = right_by_hand = by_hand = 0
    for problem in islice(made.stream(seed=4, split="train"), 200):
        turns = made.demonstration(problem, rng)
        calculator = Calculator()
        calculator.reset(problem)
        steps = [calculator.step(turn) for turn in turns[::2]]
        assert [step.observation for step in steps[:-1]] == list(turns[1::2])
        assert steps[-1].done
        assert steps[-1].metrics["call_errors"] == 0
        right = judge.judge(problem.references, turns[-1]).correct
        if len(turns) > 1:
            called += 1
            assert right
        else:
            by_hand, right_by_hand = by_hand + 1, right_by_hand + right
        if made.vocabulary is not None:
            assert set(" ".join([problem.prompt, *turns]).split()) <= set(made.vocabulary)
    assert 60 < called < 140
    assert 0.3 < right_by_hand / by_hand < 0.7


@pytest.mark.parametrize("stepwise", [0.0, 1.0])
def test_the_steps_are_called_one_by_one_where_the_options_say_so(stepwise: float) -> None:
    made = family(tool_share=1, stepwise=stepwise)
    for problem in islice(made.stream(seed=4, split="train"), 30):
        calls = len(made.demonstration(problem, np.random.default_rng(0))) // 2
        assert calls == (len(problem.extra["steps"]) if stepwise else 1)


def test_a_tiny_model_can_read_every_answer_of_the_calculator() -> None:
    known = set(family(digits_apart=True).vocabulary or ())
    for error in ERRORS:
        assert set(apart(error).split()) <= known
    assert family().vocabulary is None


def test_problems_are_those_of_word_problems_with_larger_numbers() -> None:
    options = {"held_out": "instance", "digits_apart": True}
    found = {
        split: unique_problems(make_family("calculator_problems", options), seed=2, split=split, count=200)
        for split in ("train", "test")
    }
    assert {p.prompt for p in found["train"]}.isdisjoint({p.prompt for p in found["test"]})
    assert max(int("".join(p.references[0].split())) for p in found["train"]) > 900
    assert all(p.environment == "calculator" and p.verifier == "exact" for p in found["train"])
    # the same stories, which are the units of an interval
    assert len({p.cluster for p in found["test"]} & {p.cluster for p in found["train"]}) > 30
    with pytest.raises(ValueError, match="option held_out"):
        family(held_out="nothing")
