"""Own data with repeats: what is held out, tested or contradicted stays out of training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.config.schema import DifficultyFilterConfig
from magicrl.models.prompts import PromptEncoder
from magicrl.records import (
    Completion,
    FinishReason,
    Outcome,
    Problem,
    RolloutGroup,
    RolloutRequest,
    Verdict,
    frozen_floats,
    frozen_tokens,
)
from magicrl.training.curriculum import DifficultyFilter
from magicrl.training.diagnosis import Judging
from magicrl.training.preflight import RunData, load_data

TINY = Path(__file__).parents[2] / "src" / "magicrl" / "recipes" / "tiny.toml"
ASKED = [f"Ann has {n} of Ben's apples and gets 1{n % 7} more. How many has she?" for n in range(60)]
TWINS = {
    "verbatim": lambda text: text,
    "spaced": lambda text: "  " + text.replace(" ", "  ", 3) + "\n",
    "capitals": lambda text: text.upper(),
    "unicode": lambda text: text.replace(" ", "\u00a0", 2).replace("1", "１").replace("'", "’"),
}


class Encoder:
    """Every prompt is one token."""

    def encode(self, problem: Problem) -> list[int]:
        return [1]

    def fits(self, problem: Problem) -> bool:
        return True


def load(folder: Path, rows: list[dict[str, str]], *settings: str) -> RunData:
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = ['data.train=[{path="own.jsonl"}]', "data.test={}", "data.validation=[]", *settings]
    return load_data(load_train_recipe(TINY, chosen, folder), cast(PromptEncoder, Encoder()))


def with_twins(kind: str) -> list[dict[str, Any]]:
    """60 prompts, two in three of them twice."""
    twins = [TWINS[kind](text) for place, text in enumerate(ASKED) if place % 3]
    return [{"problem": text, "answer": "1"} for text in (*ASKED, *twins)]


@pytest.mark.parametrize("kind", TWINS)
def test_no_copy_of_a_held_out_prompt_stays_in_training(kind: str, tmp_path: Path) -> None:
    data = load(tmp_path, with_twins(kind), "data.holdout=20")
    held = {p.key for p in data.test["holdout"]}
    assert len(held) == len(data.test["holdout"]) == 20
    assert not held & {p.key for p in data.train}
    assert len(data.train) + 20 + data.dropped_in_test == 100
    assert len({p.key for p in data.train}) == 40
    turned = load(tmp_path, with_twins(kind)[::-1], "data.holdout=20")
    assert {p.key for p in turned.test["holdout"]} == held, "neither the order nor the ids decide"


@pytest.mark.parametrize("kind", TWINS)
def test_no_copy_of_a_test_prompt_stays_in_training(kind: str, tmp_path: Path) -> None:
    rows = [{"problem": TWINS[kind](text), "answer": "1"} for text in ASKED[:7]]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(tmp_path, with_twins("verbatim"), 'data.test={exam={path="exam.jsonl", template="Q: {prompt} A:"}}')
    assert not {p.key for p in data.test["exam"]} & {p.key for p in data.train}
    assert data.dropped_in_test == 11


def test_the_first_of_two_golds_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"problem": p, "answer": a} for p, a in [("What is 2+3?", "5"), ("what is 2+3?", " 5"), ("b", "1")]]
    rows += [{"problem": "What is  2+3?", "answer": "6"}]
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, rows)
    assert [(p.id, p.golds) for p in data.train] == [("own-0", ("5",)), ("own-1", ("5",)), ("own-2", ("1",))]
    assert data.dropped_conflicting == 1
    assert "1 of 4 problems have the prompt of an earlier one and other golds ('own-0' and 'own-3'" in caplog.text


def test_a_holdout_of_every_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="60 would leave no training problems of 60 distinct prompts"):
        load(tmp_path, with_twins("spaced"), "data.holdout=60")


class Sampled:
    """An engine and a judge in one: of each asked prompt half of the samples are right, of ``easy`` ones all."""

    policy_version = 0

    def __init__(self) -> None:
        self.asked: list[RolloutRequest] = []

    def submit(self, first: Any, second: Any = None) -> Any:
        if second is not None:
            return [first, len(second)]
        self.asked += first
        return None

    def finished(self) -> Iterator[RolloutGroup]:
        none = frozen_floats([0.0])
        done = Completion(
            tokens=frozen_tokens([1]),
            text="",
            sampler_logprobs=none,
            sampler_entropies=none,
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )
        return (RolloutGroup(request=request, completions=(done,) * request.group_size) for request in self.asked)

    def result(self, ticket: Any) -> tuple[Verdict, ...]:
        problem, count = ticket
        right = [i % 2 == 0 or "easy" in problem.prompt for i in range(count)]
        return tuple(Verdict(outcome=Outcome.CORRECT if r else Outcome.WRONG, status="") for r in right)


def test_the_difficulty_filter_samples_a_prompt_once(tmp_path: Path) -> None:
    asked = ["an easy one", "a hard one", "An  EASY one", "a hard  one", "another"]
    problems = [
        Problem(id=f"p{i}", prompt=p, golds=("1",), verifier="exact", source="doc") for i, p in enumerate(asked)
    ]
    path = tmp_path / "difficulty.json"
    filters = DifficultyFilter(
        config=DifficultyFilterConfig(samples=4), max_tokens=4, seed=0, path=path, judging=Judging()
    )
    engine = Sampled()
    parts: Any = (engine, engine, Encoder().encode, lambda *_: None)
    for _ in range(2):  # measured, then read again
        result, _diagnosis = filters.apply(problems, *parts)
        assert [request.problem.id for request in engine.asked] == ["p0", "p1", "p4"]
        assert (result.kept, result.removed) == ((problems[1].key, problems[4].key), (problems[0].key,))
    assert list(json.loads(path.read_text())["counts"]) == ["p0", "p1", "p2", "p3", "p4"], "people read ids"
