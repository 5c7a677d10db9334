"""Tests of the showcase's page: rules without a model, and the verdict on a claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magicrl.config.schema import SourceConfig
from magicrl.records import Problem
from studies.showcase import sentence, without_model, without_template


def problem(prompt: str, answer: str) -> Problem:
    return Problem(id=prompt, prompt=prompt, references=(answer,), verifier="exact", source="test")


def test_the_examples_in_a_template_are_no_numbers_of_the_problem() -> None:
    source = SourceConfig(path="x.json", template="Tom has 3 and 6: 9\n{prompt}\nAnswer:")
    bare = problem("a 7 b 4 c 1", "3")
    asked = replace(bare, prompt=f"Tom has 3 and 6: 9\n{bare.prompt}\nAnswer:")
    assert without_template(asked, [source]).prompt == bare.prompt
    train = [bare, problem("5 then 9 then 9", "0"), problem("8 of 2", "6"), problem("no number", "6")]
    assert without_model(train, [problem("a 4 b 9 c 2", "7")]) == {
        "always '6'": 0.0,
        "difference of the last two numbers": 1.0,
    }


@pytest.mark.parametrize(
    ("steps", "before", "greedy", "at_1", "verdict"),
    [
        (30, 0.02, (0.45, 0.45, 0.45), 0.2, "holds"),
        (60, 0.02, (0.45, 0.45, 0.45), 0.2, "fails"),
        (60, 0.02, (0.45, 0.45, 0.45), 0.4, "holds"),
        (60, 0.02, (0.45, 0.44, 0.45), 0.4, "fails"),
        (60, 0.02, (0.45, 0.45), 0.4, "undecided"),
        (60, 0.02, (0.45, 0.44), 0.4, "fails"),
        (60, 0.06, (0.45, 0.44, 0.45), 0.4, "undecided"),
    ],
)
def test_a_claim_needs_its_premise_its_seeds_and_each_bar(
    steps: int, before: float, greedy: tuple[float, ...], at_1: float, verdict: str
) -> None:
    runs = [
        {
            "seed": seed,
            "curves": {"train/accuracy/mean": [0.0] * steps},
            "tests": {
                "before": {"0.0": {"accuracy": {"mean": before}}},
                "after": {"0.0": {"accuracy": {"mean": value}}, "1.0": {"accuracy": {"mean": at_1}}},
            },
        }
        for seed, value in enumerate(greedy)
    ]
    assert f"**{verdict}**" in sentence(runs)
