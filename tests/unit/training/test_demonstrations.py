"""Worked solutions of a user as a supervised phase: demonstrations, their order, and texts that are never shown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.config.model_schema import TinyModelConfig
from magicrl.config.sft_schema import SftConfig
from magicrl.models.loading import LoadedModel, describe_policy, load_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import make_miniature, make_tiny
from magicrl.records import Problem
from magicrl.training import sft
from magicrl.training.sft import as_response, demonstrations, recipe_hash, run_sft, trial_batches
from magicrl.training.start_checks import check_run, check_sft

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
RECIPE = """
[run]
name = "own"
threads = 1

[model]
folder = "./model"

[training]
dtype = "float32"

[[phases]]
steps = 6
batch_size = 4
learning_rate = 3e-3
holdout = 2
data = { path = "solved.jsonl" }
"""
RUN = """
[start]
sft = "start.toml"

[data]
holdout = 2

[[data.train]]
path = "solved.jsonl"

[[stages]]
max_tokens = 32
rollout_batch = 2
group_size = 2
max_steps = 1
"""
ROWS = [{"question": f"{n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"} for n in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_miniature(LLAMA, tmp_path_factory.mktemp("models") / "model", max_context=128)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "start.toml").write_text(RECIPE)
    (tmp_path / "run.toml").write_text(RUN)
    write(tmp_path, ROWS)
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(folder: Path, *overrides: str) -> SftConfig:
    return load_sft_recipe(folder / "start.toml", overrides)


def shown(config: SftConfig, policy: LoadedModel, first: int = 0) -> list[tuple[str, str]]:
    encoder = PromptEncoder(policy.tokenizer, policy.max_context)
    batches = demonstrations(config, 0, policy, first)
    return [(encoder.decode(s.prompt_tokens), encoder.decode(s.tokens)) for batch in batches for s in batch]


def test_a_pass_shows_every_solution_that_is_not_held_out_once(folder: Path) -> None:
    config, policy = recipe(folder), load_policy(folder / "model")
    seen = shown(config, policy)
    assert len(seen) == 24, "6 steps of 4"
    passes = [seen[i : i + 6] for i in range(0, 24, 6)]
    assert all(len(set(one)) == 6 for one in passes), "8 problems, 2 of them held out"
    assert passes[0] != passes[1]
    assert set(passes[0]) == set(passes[1])
    assert shown(config, policy, first=4) == seen[16:], "the same from any step on"

    config = load_train_recipe(folder / "run.toml")
    data, _ = check_run(config, folder / "run", resume=False)
    held = {p.prompt for p in data.test["holdout"]}
    assert len(held) == 2
    assert not any(prompt in text for prompt in held for text, _ in seen)


def test_solutions_take_turns(folder: Path) -> None:
    write(folder, [{"problem": "Why?", "answer": "4", "solution": ["so \\boxed{4}", "two and two"]}])
    config, policy = recipe(folder, "phases.0.holdout=0", "phases.0.steps=1"), load_policy(folder / "model")
    assert Counter(text for _, text in shown(config, policy)) == {
        "so \\boxed{4}\n</think>\n\nThe answer is \\boxed{4}.": 2,
        "two and two\n</think>\n\nThe answer is \\boxed{4}.": 2,
    }


def test_a_solution_outside_the_vocabulary_is_named(folder: Path) -> None:
    write(folder, [{"problem": "1 + 1", "answer": "2", "solution": "1 + 1 2"}])
    tiny = make_tiny(TinyModelConfig(hidden_size=16, intermediate_size=16), ["1", "+", "2"], 0)
    config, policy = recipe(folder, "phases.0.holdout=0"), describe_policy(*tiny, folder="tiny")
    with pytest.raises(ValueError, match=r"phases\.0\.data: problem 'solved-0': its worked solution.*know \['The'"):
        shown(config, policy)


@pytest.mark.parametrize(
    ("solution", "verifier", "references", "reasoning", "response"),
    [
        ("2 + 3 = <<2+3=5>>5\n#### 5", "maths", ("5",), False, "2 + 3 = 5\nThe answer is \\boxed{5}."),
        ("It is \\boxed{5}.", "maths", ("5",), False, "It is \\boxed{5}."),
        ("apple is first", "exact", ("apple",), False, "apple is first\nThe answer is \\boxed{apple}."),
        ("print(5)\n", "code", ("{}",), False, "```python\nprint(5)\n```"),
        ("So:\n```python\nprint(5)\n```", "code", ("{}",), False, "So:\n```python\nprint(5)\n```"),
        # closes the reasoning that the prompt opens
        ("2 + 3\n#### 5", "maths", ("5",), True, "2 + 3\n</think>\n\nThe answer is \\boxed{5}."),
        ("\\boxed{6/2}", "maths", ("6", "3"), True, "\\boxed{6/2}\n</think>\n\nThe answer is \\boxed{6/2}."),
        ("Why\n</think>\n\n\\boxed{5}", "maths", ("5",), True, "Why\n</think>\n\n\\boxed{5}"),
        ("print(5)", "code", ("{}",), True, "</think>\n\n```python\nprint(5)\n```"),
    ],
)
def test_a_solution_is_written_as_a_response(
    solution: str, verifier: str, references: tuple[str, ...], reasoning: bool, response: str
) -> None:
    problem = Problem(id="p", prompt="?", references=references, verifier=verifier, source="test")
    assert as_response(solution, problem, reasoning=reasoning) == response


def test_it_is_learned_and_goes_on_after_a_kill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done == 17:
            raise Killed

    config = recipe(folder, "phases.0.steps=40")
    whole = run_sft(config, folder / "whole")
    losses = json.loads((whole / "sft.json").read_text())["losses"]
    assert np.mean(losses[0][-5:]) < 0.7 * losses[0][0]
    monkeypatch.setattr(sft, "_CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(Killed):
        run_sft(config, folder / "cut", kill)
    assert json.loads((run_sft(config, folder / "cut") / "sft.json").read_text())["losses"] == losses
    assert "worked solutions of solved.jsonl" in (whole / "README.md").read_text()


def test_the_content_is_the_recipe_not_the_place(folder: Path) -> None:
    before = recipe_hash(recipe(folder))
    (folder / "moved").mkdir()
    (folder / "solved.jsonl").rename(folder / "moved" / "solved.jsonl")
    moved = recipe(folder, f"phases.0.data.path={folder}/moved/solved.jsonl")
    assert recipe_hash(moved) == before
    with (folder / "moved" / "solved.jsonl").open("a") as file:
        file.write(json.dumps(ROWS[0] | {"question": "0 + 1 again?"}) + "\n")
    assert recipe_hash(moved) != before


def test_the_longest_solution_is_tried_and_those_without_room_are_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long, too_long = "x" * 40 + "\n#### 1", "x" * 400 + "\n#### 1"
    write(folder, [*ROWS, {"question": "l?", "answer": long}, {"question": "t?", "answer": too_long}])
    config, policy = recipe(folder, "phases.0.holdout=0"), load_policy(folder / "model")
    (batch,) = trial_batches(config, policy)
    assert len(batch) == 4
    assert max(map(len, batch)) == len(batch[0])
    assert "x" * 40 in PromptEncoder(policy.tokenizer, policy.max_context).decode(batch[0].tokens)
    assert "1 of 10 worked solutions exceed the context of 128 tokens" in caplog.text


def test_records_without_a_solution_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, [*ROWS, {"question": "n?", "answer": "7"}, {"question": "e?", "answer": ""}])
    next(demonstrations(recipe(folder), 0, load_policy(folder / "model")))
    assert "2 of 8 records have no worked solution and are left out (the first: " in caplog.text
    assert "line 10: no answer: field 'answer' is empty" in caplog.text


def test_with_a_reward_function_any_response_is_a_demonstration(folder: Path) -> None:
    write(folder, [{"prompt": f"{n}?", "completion": f"It is {n}.\nYes."} for n in range(4)])
    (folder / "my.py").write_text("def score(problem, response):\n    return 1.0\n")
    config = recipe(folder, "phases.0.holdout=0", f"phases.0.data.verifier={folder}/my.py:score")
    texts = {text for _, text in shown(config, load_policy(folder / "model"))}
    assert any(text.endswith("It is 2.\nYes.") for text in texts), "nothing is added to it"
    run_sft(config, folder / "made")
    chosen = [f"model={folder}/made", f"data.train.0.verifier={folder}/my.py:score"]
    with pytest.raises(RecipeError, match=r"its worked solutions show 2 of the 2 problems"):
        check_run(load_train_recipe(folder / "run.toml", chosen), folder / "run", resume=False)
    write(folder, [{"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two."}]}])
    ((problem, (text,)),) = sft.worked_solutions(config.phases[0])[0]
    assert as_response(text, problem, reasoning=True) == "</think>\n\nTwo."


def test_a_start_model_remembers_what_it_was_shown(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_sft(recipe(folder, "phases.0.steps=1"), folder / "apart")
    run_sft(recipe(folder, "phases.0.steps=1", "phases.0.holdout=0"), folder / "all")
    (folder / "problems.jsonl").write_bytes((folder / "solved.jsonl").read_bytes())

    def check(model: str) -> None:
        chosen = [f"model={folder / model}", f"data.train.0.path={folder / 'problems.jsonl'}"]
        check_run(load_train_recipe(folder / "run.toml", chosen), folder / "run", resume=False)

    check("apart")
    with pytest.raises(RecipeError, match=r"start\.model: its worked solutions show 2 of the 2 problems"):
        check("all")
    assert "cannot be read" not in caplog.text
    run_sft(recipe(folder, "phases.0.steps=1", f"model.folder={folder / 'all'}"), folder / "later")
    with pytest.raises(RecipeError, match="2 of the 2 problems"):
        check("later")
    record = json.loads((folder / "all" / "sft.json").read_text())
    plain = record["recipe"]["phases"][0]
    hostile = {**plain, "data": {"source": "os:abort"}}
    record["recipe"]["phases"] = [hostile, plain]
    (folder / "all" / "sft.json").write_text(json.dumps(record))
    with pytest.raises(RecipeError, match="2 of the 2 problems"):
        check("all")
    record["recipe"]["phases"] = [hostile]
    (folder / "all" / "sft.json").write_text(json.dumps(record))
    caplog.clear()
    check("all")
    assert "sft.json names cannot be read (only files are read)" in caplog.text
    (folder / "solved.jsonl").unlink()
    check("apart")
    assert caplog.text.count("cannot be read") == 2


def test_refusals(folder: Path) -> None:
    run = load_train_recipe(folder / "run.toml")
    (folder / "start.toml").write_text(RECIPE.replace("holdout = 2", "holdout = 1"))
    with pytest.raises(RecipeError, match=r"show 1 of the 2 problems of the set 'holdout'.*set its holdout = 2"):
        check_run(run, folder / "run", resume=False)
    write(folder, [{"question": row["question"], "answer": "1"} for row in ROWS])
    with pytest.raises(RecipeError, match=r"phases\.0\.data: none of its 8 problems has a worked solution"):
        check_sft(recipe(folder), folder / "out")
    with pytest.raises(RecipeError, match=r"phases\.0\.data\.path: .*no such file"):
        check_sft(recipe(folder, "phases.0.data.path=nowhere.jsonl"), folder / "out")
    for setting, reason in (
        ("family='running_sum'", "exactly one of: family, data"),
        ("options={a=1}", "options and levels are a family's"),
        ("data={family='running_sum',count=3}", "name a family by the phase's own family"),
    ):
        with pytest.raises((RecipeError, ValidationError), match=reason):
            recipe(folder, f"phases.0.{setting}")
