"""Names of version 0.1 in users' files and code. They are read until version 0.3."""

from __future__ import annotations

import pytest

import magicrl
from magicrl.pipeline.pipeline_schema import MathsCleaning
from magicrl_verifiers.judge_settings import JudgeSettings
from magicrl_verifiers.records import Problem
from magicrl_verifiers.served_judge import question


def test_problems_with_golds() -> None:
    with pytest.warns(FutureWarning, match="Problem: the argument 'golds' is now 'references'"):
        problem = Problem(id="a", prompt="1?", golds=("1",), verifier="exact", source="own")  # type: ignore[call-arg]
    assert problem.references == ("1",)
    with pytest.warns(FutureWarning, match="problem.golds is now problem.references"):
        assert problem.golds == ("1",)


def test_verify_with_gold() -> None:
    with pytest.warns(FutureWarning, match="verify: the argument 'gold' is now 'reference'"):
        assert magicrl.verify("5", gold="5").correct  # type: ignore[call-overload]


def test_lines_of_answers_with_gold() -> None:
    verdicts = magicrl.verify([{"gold": "5", "response": "5"}, {"gold": ["4", "6"], "response": "5"}], reward="exact")
    assert [verdict.status for verdict in verdicts] == ["matched", "mismatch"]


def test_a_judge_prompt_with_gold() -> None:
    problem = Problem(id="a", prompt="1?", references=("1", "one"), verifier="judge", source="own")
    settings = JudgeSettings(base_url="http://localhost:1", model="m", prompt="{gold} {reference}: {response}")
    assert question(problem, "x", settings).startswith("1 or one 1 or one: ")


def test_a_pipeline_with_unreadable_golds() -> None:
    with pytest.warns(FutureWarning, match="unreadable_golds is now unreadable_references"):
        assert MathsCleaning.model_validate({"unreadable_golds": "keep"}).unreadable_references == "keep"


def test_plan_with_hardware_count_and_price() -> None:
    with pytest.warns(FutureWarning, match="plan: the argument '(hardware|count|price)' is now"):
        found = magicrl.plan("quickstart", hardware="cpu-2core", count=1, price=2.0)  # type: ignore[call-arg]
    assert (found["gpu"], found["gpus"], found["price"]) == ("cpu-2core", 1, 2.0)
