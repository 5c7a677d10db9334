"""Runs with a teacher: they approach it, and continue after a kill. Requests to the teacher, and rejected settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_server import Asked, Reply, json_server
from killed_runs import goes_on_bit_for_bit, run, same_weights

from magicrl.config.algorithm_schema import TeacherConfig
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.models.loading import described_model
from magicrl.records import Problem, TrainSample, frozen_floats, frozen_tokens
from magicrl.reporting.curves import figure_groups
from magicrl.reporting.read_folders import read_run
from magicrl.training.teacher import ServedTeacher, check_teacher, make_teacher
from magicrl_verifiers.served import ServerError

SHORT = ("stages.0.max_steps=3", "stages.1.max_steps=1", "checkpoint.every=1", "algorithm.reject_zero_advantage=false")
TOLD = "teacher={prompt = '{prompt} {reference}'}"


@pytest.fixture(scope="module")
def trained(toy_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a teacher: the starting model after three steps at a high learning rate."""
    output = tmp_path_factory.mktemp("teacher") / "run"
    recipe = output.with_name("toy.toml")
    recipe.write_text(toy_text)
    run(recipe, output, "stages.0.max_steps=3", "stages.1.max_steps=1", "optimizer.learning_rate=0.01")
    return output / "model"


@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)], ids=["full", "lora"])
def test_a_killed_run_goes_on_and_the_report_shows_the_distance(
    toy_recipe: Path, tmp_path: Path, trained: Path, lora: tuple[str, ...]
) -> None:
    settings = (*SHORT, f"teacher={{model = '{trained}'}}", *lora)
    rows = goes_on_bit_for_bit(toy_recipe, tmp_path, *settings, kill_after=2)
    assert all(row["learner/teacher_kl"] > 0 for row in rows)
    groups = figure_groups(read_run(tmp_path / "whole"))
    charts = {chart.key for _, panels, _ in groups for panel in panels for chart in panel}
    assert "teacher_kl" in charts


def test_the_policy_approaches_the_teacher(toy_recipe: Path, tmp_path: Path, trained: Path) -> None:
    steps = ("stages.0.max_steps=12", "stages.1.max_steps=1", "entropy.controller=none", SHORT[-1])
    rows = run(toy_recipe, tmp_path / "run", *steps, f"teacher={{model = '{trained}'}}")
    distances = [row["learner/teacher_kl"] for row in rows[:-1]]
    assert sum(distances[-3:]) < 0.5 * sum(distances[:3])


def test_with_rewards_and_coefficient_act(toy_recipe: Path, tmp_path: Path) -> None:
    one = ("stages.0.max_steps=1", "stages.1.max_steps=1", SHORT[-1], TOLD)
    for name, more in {
        "alone": (),
        "both": ("teacher.with_rewards=true",),
        "half": ("teacher.coefficient=0.5",),
    }.items():
        run(toy_recipe, tmp_path / name, *one, *more)
    assert not same_weights(tmp_path / "alone", tmp_path / "both")
    assert not same_weights(tmp_path / "alone", tmp_path / "half")


# --- the policy as its own teacher -----------------------------------------------------------------------------------


class Scorer:
    """Stub that records the teacher's requests to the policy."""

    def __init__(self) -> None:
        self.asked: list[TrainSample] = []

    def logprobs(self, samples: list[TrainSample], temperature: float) -> tuple[list[Any], list[Any]]:
        self.asked = [*samples]
        return [frozen_floats([temperature] * len(sample.tokens)) for sample in samples], []


def sample(tokens: list[int]) -> TrainSample:
    return TrainSample(
        prompt_tokens=frozen_tokens([1, 2]),
        tokens=frozen_tokens(tokens),
        advantage=1.0,
        group_index=0,
        sample_index=0,
        sampler_logprobs=frozen_floats([0.0] * len(tokens)),
        policy_version=0,
    )


def test_the_policy_itself_scores_its_responses_after_the_teachers_prompt(toy_recipe: Path) -> None:
    config = load_train_recipe(
        toy_recipe, ["teacher={prompt = '{prompt} {reference}'}", "algorithm.reject_zero_advantage=false"]
    )
    start = described_model(str(config.start.model))
    scorer, problem = Scorer(), Problem(verifier="maths", source="test", id="a", prompt="3", references=("4",))
    teacher = make_teacher(config, start, scorer)  # pyright: ignore[reportArgumentType]
    assert teacher is not None
    assert [values.tolist() for values in teacher([sample([5, 6])], [problem], 0.5)] == [[0.5, 0.5]]
    shown = start.tokenizer.decode(scorer.asked[0].prompt_tokens.tolist())
    assert shown.replace(" ", "").endswith("34")
    assert scorer.asked[0].tokens.tolist() == [5, 6]


# --- a server ---------------------------------------------------------------------------------------------------------


def vllm(tokenizer: Any, change: Callable[[Any], Any] = lambda body: body) -> Callable[..., Reply]:
    """Answer like vLLM: the log-prob of token t is -t / 100."""

    def answer(asked: Asked) -> Reply:
        if asked.path.endswith("/models"):
            return Reply(body={"data": [{"id": "big", "owned_by": "vllm"}]})
        assert asked.body["model"] == "big"
        assert asked.body["prompt_logprobs"] == 0
        assert asked.body["max_tokens"] == 1
        prompt = asked.body["prompt"]
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        stated = [None, *({str(i): {"logprob": -i / 100, "rank": 1}} for i in ids[1:])]
        return Reply(body=change({"choices": [{"text": "x", "prompt_logprobs": stated}]}))

    return answer


@pytest.fixture
def tokenizer(toy_recipe: Path) -> Any:
    return described_model(str(load_train_recipe(toy_recipe, []).start.model)).tokenizer


def test_a_server_returns_the_log_probs_of_the_response(tokenizer: Any) -> None:
    with json_server(vllm(tokenizer)) as address:
        found, _ = ServedTeacher(address, "").logprobs([sample([5, 6]), sample([7])], 1.0)
        ServedTeacher(address, "big").check(tokenizer)
    assert [values.tolist() for values in found] == [pytest.approx([-0.05, -0.06]), pytest.approx([-0.07])]


def test_another_tokenizer_on_the_server_is_refused(tokenizer: Any) -> None:
    def shifted(body: Any) -> Any:
        stated = body["choices"][0]["prompt_logprobs"]
        stated[2] = {"999": {"logprob": -1.0}}
        return body

    with json_server(vllm(tokenizer, shifted)) as address, pytest.raises(ValueError, match="another tokenizer"):
        ServedTeacher(address, "").check(tokenizer)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"prompt_logprobs": None}]}])
def test_a_server_without_log_probs_is_refused(tokenizer: Any, answer: Any) -> None:
    refused = pytest.raises(ServerError, match="no log-probs of the prompt; serve the teacher with vLLM")
    with json_server(vllm(tokenizer, lambda _: answer)) as address, refused:
        ServedTeacher(address, "").check(tokenizer)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, 0.5])
def test_a_log_prob_that_no_token_has_is_refused(tokenizer: Any, wrong: float) -> None:
    def broken(body: Any) -> Any:
        body["choices"][0]["prompt_logprobs"][-1] = {"6": {"logprob": wrong}}
        return body

    refused = pytest.raises(ServerError, match=f"/completions: the log-prob of token 6 is {wrong}")
    with json_server(vllm(tokenizer, broken)) as address, refused:
        ServedTeacher(address, "").logprobs([sample([5, 6])], 1.0)


# --- rejected before the run starts ---------------------------------------------------------------------------------

KEEP = "algorithm.reject_zero_advantage=false"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (("teacher={model = 'x'}",), "set algorithm.reject_zero_advantage = false"),
        (("teacher={}", KEEP), "names neither a model nor a server"),
        (("teacher={prompt = 'The answer is {reference}.'}", KEEP), r"does not hold \{prompt\}"),
        (("teacher={model = 'x'}", KEEP, "cluster={}"), "serve it with vLLM and set teacher.server"),
        (
            ("teacher={server = 'http://localhost:1/v1'}", KEEP, "rollout.temperature=0.7"),
            "set rollout.temperature = 1",
        ),
        (
            ("teacher={server = 'http://localhost:1/v1'}", KEEP, "stages.0.temperature=0.7"),
            "set stages.0.temperature = 1",
        ),
    ],
)
def test_settings_that_do_not_fit(toy_recipe: Path, settings: tuple[str, ...], error: str) -> None:
    with pytest.raises(RecipeError, match=error):
        load_train_recipe(toy_recipe, list(settings))


def test_a_teacher_that_does_not_fit(toy_recipe: Path, tokenizer: Any) -> None:
    plain = load_train_recipe(toy_recipe, [])
    policy = described_model(str(plain.start.model))

    def check(problem: Problem, correction: str = "none", start: Any = policy, **settings: Any) -> float:
        algorithm = plain.algorithm.model_copy(update={"correction": correction})
        update = {"teacher": TeacherConfig(**settings), "algorithm": algorithm}
        return check_teacher(plain.model_copy(update=update), start, [problem], (1, problem.id), 0)

    known, unknown = (
        Problem(verifier="maths", source="test", id="a", prompt="3", references=("4",)),
        Problem(verifier="maths", source="test", id="b", prompt="3", references=()),
    )
    same = {"model": str(plain.start.model)}
    held = sum(p.numel() for p in policy.model.parameters()) * 4
    assert check(known, **same) == held
    assert check(known, prompt="{prompt} {reference}") == 0
    with pytest.raises(RecipeError, match="one advantage per response"):
        check(known, correction="m2po", **same)
    replayed = plain.model.model_copy(update={"router_replay": True})
    alone = plain.model_copy(update={"model": replayed, "teacher": TeacherConfig(prompt="{prompt} {reference}")})
    with pytest.raises(RecipeError, match=r"model\.router_replay: the policy is its own teacher"):
        check_teacher(alone, policy, [known], (1, known.id), 0)
    check_teacher(alone.model_copy(update={"teacher": TeacherConfig(**same)}), policy, [known], (1, known.id), 0)
    with pytest.raises(RecipeError, match="problem 'b' has none"):
        check(unknown, prompt="{prompt} {reference}")
    with pytest.raises(RecipeError, match=r"exceed its context of \d+ tokens"):
        check(known, prompt="{prompt} " + "1 " * policy.max_context)
    small = dataclasses.replace(policy, valid_vocab=policy.valid_vocab + 1)
    with pytest.raises(RecipeError, match="has log-probs for"):
        check(known, start=small, **same)
    other = described_model(str(plain.start.model))
    other.tokenizer.add_tokens(["<another>"])
    with pytest.raises(RecipeError, match=r"has another tokenizer .* 1 tokens differ, such as '<another>'"):
        check(known, start=other, **same)
    with pytest.raises(RecipeError, match="cannot reach the server"):
        check(known, server="http://127.0.0.1:9/v1")
