"""Reward functions with TRL's signature, lists of functions, and functions that end the process."""

from __future__ import annotations

import math
import re
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magicrl_verifiers import rewards
from magicrl_verifiers.records import Outcome, Problem, Verdict
from magicrl_verifiers.rewards import RewardFunction

PROBLEM = Problem(
    id="a", prompt="1 + 1?", references=("2",), verifier="own", source="s", extra={"kind": "sum", "solution": "#### 2"}
)


def judged(function: Any, *responses: str) -> list[tuple[float | None, dict[str, float]]]:
    return [(v.score, dict(v.metrics)) for v in RewardFunction("own", function).judge(PROBLEM, responses)]


def test_texts_and_columns() -> None:
    def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        assert columns["prompts"] == ["1 + 1?"] * 2
        assert columns["kind"] == ["sum"] * 2
        assert columns["solution"] == ["#### 2"] * 2
        return [float(text == one) for text, one in zip(completions, answer, strict=True)]

    assert judged(right, "2", "3") == [(1.0, {}), (0.0, {})]


def test_only_the_parameters_that_it_has() -> None:
    def kinds(prompts: list[str], completions: list[str], kind: list[str]) -> list[float]:
        return [float(len(one)) for one in kind]

    assert judged(kinds, "x") == [(3.0, {})]


def test_messages_if_it_fails_on_texts() -> None:
    def length(prompts: list[Any], completions: list[Any]) -> list[float]:
        assert prompts[0] == [{"role": "user", "content": "1 + 1?"}]
        return [float(len(messages[0]["content"])) for messages in completions]

    function = RewardFunction("own", length)
    assert [v.score for _ in range(2) for v in function.judge(PROBLEM, ["ab"])] == [2.0, 2.0]


def test_its_own_error_is_reported() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("no such table")

    (verdict,) = RewardFunction("own", broken).judge(PROBLEM, ["x"])
    assert verdict.outcome is Outcome.NOT_JUDGED
    place = f"test_trl_rewards.py, line {broken.__code__.co_firstlineno + 1}"
    assert verdict.reason == f"KeyError: 'no such table' ({place})"


def test_a_verdict_of_a_reward_is_checked() -> None:
    def made(**fields: Any) -> Verdict:
        given = Verdict(**{"outcome": Outcome.CORRECT, "status": "mine", **fields})
        return RewardFunction("own", lambda problem, response: given).judge(PROBLEM, ["x"])[0]

    assert made(outcome="correct").correct, "a text is the outcome of this name"
    assert made(outcome="not_judged").outcome is Outcome.NOT_JUDGED
    assert made(outcome="right").reason.startswith(
        "ValueError: outcome must be correct, wrong, not_judged, got 'right'"
    )
    assert made(score=math.nan).reason.startswith("ValueError: score must be finite, got nan")
    assert made(score="1").reason.startswith("TypeError: score must be a number, got '1'")
    assert made(metrics={"length": math.inf}).reason.startswith("ValueError: metric length must be finite, got inf")


def test_the_line_of_a_reward_that_is_installed_without_a_virtual_environment() -> None:
    place = Path(sysconfig.get_path("stdlib"), "site-packages", "mine", "rewards.py")
    found: dict[str, Any] = {}
    exec(compile("def broken(problem, response):\n    return {}['x']\n", place, "exec"), found)
    (verdict,) = RewardFunction("own", found["broken"]).judge(PROBLEM, ["x"])
    assert verdict.reason == "KeyError: 'x' (rewards.py, line 2)"


def test_a_list_is_summed_and_none_is_no_opinion() -> None:
    def short(problem: Problem, response: str) -> float:
        return float(len(response) < 2)

    def right(completions: list[str], answer: list[str]) -> list[float | None]:
        return [2.0 if text == one else None for text, one in zip(completions, answer, strict=True)]

    found = judged([short, right], "2", "3", "33")
    assert found == [(3.0, {"short": 1.0, "right": 2.0}), (1.0, {"short": 1.0}), (0.0, {"short": 0.0})]
    verdicts = RewardFunction("own", [right]).judge(PROBLEM, ["3"])
    assert verdicts[0].outcome is Outcome.NOT_JUDGED, "no function had an opinion"


def test_a_response_without_a_score_is_the_only_one_that_is_not_judged() -> None:
    def number(problem: Problem, response: str) -> float:
        return 1.0 / float(response)

    def brief(problem: Problem, response: str) -> float:
        return float(len(response) < 2)

    def inverse(completions: list[str], **columns: Any) -> list[float | None]:
        return [
            1.0 if text == "1" else {"2": None, "3": math.nan, "4": math.inf}.get(text, 0.0) for text in completions
        ]

    def outcomes(function: Any, *responses: str) -> list[Outcome]:
        return [one.outcome for one in RewardFunction("own", function).judge(PROBLEM, responses)]

    right, wrong, lost = Outcome.CORRECT, Outcome.WRONG, Outcome.NOT_JUDGED
    assert outcomes(number, "1", "2", "0") == [right, wrong, lost]
    assert outcomes([number, brief], "1", "2", "0") == [right, right, lost]
    assert outcomes(inverse, "1", "2", "3", "4", "5") == [right, lost, lost, lost, wrong]
    # no opinion of one function of several
    assert outcomes([inverse, brief], "1", "2", "3", "4", "5") == [right, right, lost, lost, right]
    place = f"test_trl_rewards.py, line {number.__code__.co_firstlineno + 1}"
    verdict = RewardFunction("own", [number, brief]).judge(PROBLEM, ["1", "0"])[1]
    assert verdict.reason == f"ZeroDivisionError: float division by zero ({place})"


def test_a_function_of_a_list_that_is_named_score_keeps_its_metric() -> None:
    def score(problem: Problem, response: str) -> float:
        return 0.25

    def brief(problem: Problem, response: str) -> float:
        return 0.5

    assert judged([score, brief], "x") == [(0.75, {"score_0": 0.25, "brief": 0.5})]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "must return a list of 1 scores, got 1.0"),
        ("1", "must return a list of 1 scores, got '1'"),
        ([0.5, 1.0], "must return 1 scores, got 2"),
        ([(1.0, 2.0)], r"score must be a number, got \(1.0, 2.0\)"),
    ],
)
def test_what_is_no_list_of_numbers_is_named(returned: Any, message: str) -> None:
    def scores(completions: list[str], **columns: Any) -> Any:
        return returned

    (verdict,) = RewardFunction("own", scores).judge(PROBLEM, ["x"])
    assert re.search(message, verdict.reason), verdict.reason


@pytest.mark.parametrize("exit_", [sys.exit, lambda code: (_ for _ in ()).throw(SystemExit(code))])
def test_a_function_that_exits_judges_nothing(exit_: Callable[[int], Any]) -> None:
    async def waits(problem: Problem, response: str) -> float:
        return exit_(0) or next(iter([]))

    for function in (lambda problem, response: exit_(0) or next(iter([])), waits):
        (verdict,) = RewardFunction("own", function).judge(PROBLEM, ["x"])
        assert verdict.outcome is Outcome.NOT_JUDGED
        assert verdict.status == "reward_failed"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 1.0, r"cannot be called with \(problem, response\).*completions, \*\*kwargs"),
        ([], "an empty list of rewards"),
        ([1.0], "reward 0 of the list is no function but float"),
        (
            [rewards.reward(isolated=True, right_from=0.5)(lambda *_: 1.0)],
            "isolated, right_from would have no effect in a list",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunction("own", function)


def test_a_missing_column_is_named() -> None:
    def needs(completions: list[str], rubric: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="reward needs requires the column 'rubric', and the data has kind, solution"):
        RewardFunction("own", [needs]).check(PROBLEM)

    def all_columns(completions: list[str], rubric: list[str], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="and the data has no columns but prompt and answer: rename"):
        RewardFunction("own", all_columns).check(replace(PROBLEM, extra={}))
    RewardFunction("own", lambda problem, response: 1.0).check(PROBLEM)


def test_a_reward_that_takes_long_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced = threading.Event()
    monkeypatch.setattr("magicrl_verifiers.rewards.SILENT_SECONDS", 0.01)
    monkeypatch.setattr(rewards._log, "warning", lambda *_: announced.set())
    assert judged(lambda problem, response: float(announced.wait(60)), "x") == [(1.0, {})]
