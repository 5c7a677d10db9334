"""Reasons to reject a run before anything is computed, and the problems that it reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from builders import completion, problem
from toy_start import toy_sft
from transformers import AutoModelForCausalLM

from magicrl.commands.train import command as train
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe, to_toml
from magicrl.config.model_schema import LoraConfig
from magicrl.config.schema import TrainConfig
from magicrl.models.adapters import write_adapters
from magicrl.models.loading import save_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import make_byte_tokenizer
from magicrl.records import (
    Outcome,
    Problem,
    RolloutGroup,
    RolloutRequest,
    Verdict,
)
from magicrl.training import assemble, start_checks
from magicrl.training.curriculum import filter_by_difficulty
from magicrl.training.sft import supervised_start
from magicrl.training.start_checks import RunData, check_run, load_data

RECIPE = """
[start]
sft = "sft.toml"

[[data.train]]
path = "sums.jsonl"

[[stages]]
max_tokens = 8
rollout_batch = 2
group_size = 2
max_steps = 1
"""
ROW = '{"problem": "L 5 2 3 0 1 0 0 0 0 :", "answer": "1"}\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "sft.toml").write_text(toy_sft(steps=1_000_000, batch_size=2))
    (folder / "sums.jsonl").write_text(ROW)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def check(recipe: Path, output: Path, *overrides: str) -> start_checks.Ready:
    return check_run(load_train_recipe(recipe, overrides), output, resume=False)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.train.0.path=nowhere.jsonl", "no such file"),
        ("data.test={t={path='nowhere.jsonl'}}", "no such file"),
        ("stages.0.max_tokens=60", "lower it to at most"),
        ("reference.mode=monitor", ""),
        ("reference={mode='monitor',model='./nowhere'}", "model folder"),
        ("rollout={engine='replay',replay='nowhere'}", "holds no recorded rollouts"),
        ("start.sft=nowhere.toml", "no such recipe"),
    ],
)
def test_nothing_is_made_before_everything_is_known_to_be_right(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, reason: str
) -> None:
    if not reason:  # otherwise a million supervised steps would follow
        check(recipe, tmp_path / "run", override)
        return
    with pytest.raises(ValueError, match=reason):
        train(recipe, settings=[override, "run.expected_minutes=5"], output=tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["recipes"]
    assert capsys.readouterr().out == "", "nothing was promised"


@pytest.mark.parametrize("key", ["evaluation", "data.difficulty_filter"])
def test_the_limits_of_a_test_and_of_the_filter_must_fit_the_context_too(
    recipe: Path, tmp_path: Path, key: str
) -> None:
    with pytest.raises(RecipeError, match=rf"{key}\.max_tokens: 60 .*lower it to at most"):
        check(recipe, tmp_path / "run", f"{key}.max_tokens=60")


def test_the_engines_context_holds_the_answers_of_the_filter(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "described_model", lambda _: SimpleNamespace(max_context=10_000))
    sizes = [
        assemble._max_context(load_train_recipe(recipe, overrides), "model")
        for overrides in ([], ["data.difficulty_filter.samples=2"], ["data.difficulty_filter.max_tokens=60"])
    ]
    assert sizes == [sizes[0], sizes[0], sizes[0] - 8 + 60]


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (["entropy.controller=none", "entropy.step=0.1"], 'entropy.step: no effect with entropy.controller = "none"'),
        (["evaluation.every=2"], "evaluation.every = 2: no effect without data.validation"),
        (["data.validation=[{path='more.jsonl'}]"], "data.validation: no effect without evaluation.every"),
        (
            ["data.test={t={path='more.jsonl'}}", "evaluation.temperatures=[0]", "evaluation.pass_at=[2]"],
            "evaluation.pass_at: no effect without 1.0 in evaluation.temperatures",
        ),
        (["data.sampler=short_first"], 'data.sampler = "short_first" makes the problems harder'),
        (["entropy.controller=none", "entropy.preset=code"], 'entropy.preset: no effect with entropy.controller = "no'),
        (["algorithm.advantage_k=2"], 'algorithm.advantage_k: no effect with algorithm.advantage = "group"'),
        (["algorithm.correction_cap=3"], 'algorithm.correction_cap: no effect with algorithm.correction = "none"'),
        (["algorithm.second_moment=1"], 'algorithm.second_moment: no effect with algorithm.correction = "none"'),
        (
            ["model.gradient_checkpointing=true", "model.checkpoint_above_tokens=9"],
            "model.checkpoint_above_tokens: no effect with model.gradient_checkpointing",
        ),
        (["algorithm.refill_rounds=2"], 'algorithm.refill_rounds: no effect with algorithm.refill = "none"'),
        (
            ["algorithm.clip_high=0.3", "stages.0.clip_high=0.2"],
            "algorithm.clip_high: no effect, since every stage has its own clip_high",
        ),
        (
            ["data.test={t={path='more.jsonl'}}", "evaluation.temperatures=[0]", "evaluation.start_pass_at=2"],
            "evaluation.start_pass_at: no effect without 1.0 in evaluation.temperatures",
        ),
        (
            ["stages.0.transition.window=30", "stages.0.max_steps=19"],
            "stages.0.transition: no effect, since the rule looks after 30 measurements and the stage has at most 19",
        ),
    ],
)
def test_settings_without_an_effect_are_warned_of(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: list[str],
    warning: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.jsonl").write_text(ROW.replace("L 5 2", "L 5 3"))
    with caplog.at_level(logging.WARNING, start_checks.__name__):
        check(recipe, tmp_path / "run")
        assert "no effect" not in caplog.text
        check(recipe, tmp_path / "run", *settings)
    assert warning in caplog.text


def test_the_defaults_in_a_config_toml_are_not_stated(recipe: Path, tmp_path: Path, caplog: Any) -> None:
    written = tmp_path / "config.toml"
    written.write_text(to_toml(load_train_recipe(recipe, []), tmp_path))
    check(written, tmp_path / "run")
    assert "no effect" not in caplog.text


def test_a_lag_of_recorded_rollouts_is_warned_of(recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    replayed = ["rollout={engine='replay',replay='.',weight_lag=1}"]
    start_checks._warn_of_unused_settings(load_train_recipe(recipe, replayed))
    assert 'rollout.weight_lag: no effect with rollout.engine = "replay"' in caplog.text


@pytest.mark.parametrize("reward", ["judge", "maths + 0.2 * judge"])
def test_a_judge_without_a_server_is_refused(recipe: Path, tmp_path: Path, reward: str) -> None:
    with pytest.raises(RecipeError, match=r"verifier\.judge: the reward 'judge' asks a served model"):
        check(recipe, tmp_path / "run", f"data.train.0.verifier={reward}")


def test_a_folder_that_another_call_has_locked_is_no_strangers(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    check(recipe, tmp_path / "run")


def test_a_run_that_does_not_fit_says_what_would(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 2.0**30
    monkeypatch.setattr(start_checks, "host_memory", lambda: memory)
    wide = ("model.micro_batch_tokens=4000000", "stages.0.group_size=20000", "stages.0.max_tokens=50")
    with pytest.raises(ValueError, match=r"the run needs about .* GiB of memory .*model\.micro_batch_tokens = 4096"):
        check(recipe, tmp_path / "run", *wide)
    check(recipe, tmp_path / "run", *wide, "model.micro_batch_tokens=4096")


def test_a_hybrid_start_model_is_refused(recipe: Path, tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer(256)
    config = transformers.Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        layer_types=["conv", "full_attention"],
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_policy(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path / "hybrid")
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM has layers of Lfm2ShortConv"):
        check(recipe, tmp_path / "run", f"model={tmp_path / 'hybrid'}")


def test_a_missing_extra_is_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = start_checks.importlib.util.find_spec
    missing = ("peft", "vllm")
    monkeypatch.setattr(start_checks.importlib.util, "find_spec", lambda name: None if name in missing else real(name))
    with pytest.raises(RecipeError, match=r"model\.lora: needs PEFT"):
        check(recipe, tmp_path / "run", "model.lora.rank=4")
    with pytest.raises(ValueError, match="needs vLLM"):
        check(recipe, tmp_path / "run", "rollout.engine=vllm", "entropy.estimator=sampled")
    # another engine does not read settings of vLLM
    check(recipe, tmp_path / "run", "rollout.vllm.engine_args={no_such_argument=1}")


def test_a_reference_without_the_first_adapters_is_named(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check_adapters", "read_adapters", "adapter_shapes"):
        monkeypatch.setattr(start_checks, name, lambda *_: {})
    adapted = ["model.lora.rank=16", f"model.lora.start={tmp_path}"]
    with pytest.raises(RecipeError, match=r"reference\.model: the default would be .* without the adapters"):
        check(recipe, tmp_path / "run", *adapted, "reference.mode=monitor")
    check(recipe, tmp_path / "run", *adapted)


def test_adapters_of_another_base_are_refused_by_name(recipe: Path, tmp_path: Path) -> None:
    write_adapters(tmp_path / "adapter", {}, LoraConfig(), "owner/Other-7B")
    settings = ["model.lora.rank=16", f"model.lora.start={tmp_path / 'adapter'}"]
    with pytest.raises(RecipeError, match=r"model\.lora\.start: .* adapters of owner/Other-7B, and the start"):
        check(recipe, tmp_path / "run", *settings)
    _, made = supervised_start(load_train_recipe(recipe, []).start, tmp_path / "models")
    write_adapters(tmp_path / "adapter", {}, LoraConfig(), str(made))
    with pytest.raises(RecipeError, match=r"adapters of another model than .* tensors differ, first model\.layers\.0"):
        check(recipe, tmp_path / "run", *settings)


def test_layers_that_the_model_lacks_are_refused_before_the_start(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.lora\.target_modules: q_project: this model has no linear layers"):
        check(recipe, tmp_path / "run", 'model.lora={rank=2, target_modules=["q_project", "v_proj"]}')


TINY = Path(__file__).parents[3] / "src" / "magicrl" / "recipes" / "tiny.toml"
ASKED = [f"Ann has {n} of Ben's apples and gets 1{n % 7} more. How many has she?" for n in range(60)]
TWINS = {
    "verbatim": lambda text: text,
    "spaced": lambda text: "  " + text.replace(" ", "  ", 3) + "\n",
    "capitals": lambda text: text.upper(),
    "unicode": lambda text: text.replace(" ", "\u00a0", 2).replace("1", "１").replace("'", "’"),
}


class Encoder:
    """Encoder to which every prompt is one token, except long ones."""

    def encode(self, problem: Problem) -> list[int]:
        if not self.fits(problem):
            raise ValueError(f"problem {problem.id!r}: too long")
        return [1]

    def fits(self, problem: Problem) -> bool:
        return "long" not in problem.prompt

    def length(self, problem: Problem) -> int:
        return 1 if self.fits(problem) else 99


def load(folder: Path, rows: list[dict[str, str]], *settings: str) -> RunData:
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = ['data.train=[{path="own.jsonl"}]', "data.test={}", "data.validation=[]", *settings]
    return load_data(load_train_recipe(TINY, chosen, folder), cast(PromptEncoder, Encoder()))


def with_twins(kind: str) -> list[dict[str, Any]]:
    """Return 60 prompts, two in three of them twice."""
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
    data = load(tmp_path, with_twins("verbatim"), 'data.validation=[{path="exam.jsonl"}]')
    assert len(data.validation) == 7
    assert not {p.key for p in data.validation} & {p.key for p in data.train}


@pytest.mark.parametrize(("speed", "told"), [(2.0, False), (0.5, True)])
def test_bfloat16_that_this_cpu_is_slower_in_is_told(
    speed: float,
    told: bool,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(start_checks, "bfloat16_speeds", lambda *_: (speed, speed / 2))
    sft = recipe.with_name("sft.toml")
    sft.write_text(sft.read_text().replace('dtype = "float32"', 'dtype = "bfloat16"'))
    check(recipe, tmp_path / "run", "model.dtype=bfloat16")
    for section in ("model", "training"):
        assert (
            f'{section}.dtype = "bfloat16": this CPU multiplies in it at 0.5 (64 rows) and 0.25' in caplog.text
        ) == told
    caplog.clear()
    sft.write_text(sft.read_text().replace("bfloat16", "float32"))
    check(recipe, tmp_path / "run", "model.dtype=float32")
    assert "this CPU multiplies" not in caplog.text


def test_the_first_of_two_references_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"problem": p, "answer": a} for p, a in [("What is 2+3?", "5"), ("what is 2+3?", " 5"), ("b", "1")]]
    rows += [{"problem": "What is  2+3?", "answer": "6"}]
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, rows)
    assert [(p.id, p.references) for p in data.train] == [("own-0", ("5",)), ("own-1", ("5",)), ("own-2", ("1",))]
    assert data.dropped_conflicting == 1
    assert "1 of 4 problems have the prompt of an earlier one and other references ('own-0' and 'own-3'" in caplog.text


def test_layers_without_adapters_are_named(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_checks, "fitted", lambda lora, _: lora.model_copy(update={"target_modules": ("o_proj",)}))
    check(recipe, tmp_path / "run", "model.lora={rank=2, target_modules=['q_proj', 'o_proj']}")
    assert "model.lora.target_modules: this model lacks q_proj. Only o_proj get adapters" in caplog.text


def test_long_prompts_are_dropped_from_the_holdout_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"problem": text + " long" * (n % 3 == 0), "answer": "1"} for n, text in enumerate(ASKED)]
    data = load(tmp_path, rows, "data.holdout=30", "data.overlong_prompts=drop")
    assert 0 < len(data.test["holdout"]) < 30
    assert all("long" not in p.prompt for p in (*data.train, *data.test["holdout"]))
    assert len(data.train) + len(data.test["holdout"]) == 40
    missing = 30 - len(data.test["holdout"])
    assert f"data.holdout: {missing} of 30 problems are left out" in caplog.text
    assert f"data.train: {20 - missing} of 30 problems have prompts of more than" in caplog.text
    with pytest.raises(ValueError, match="7 of 30 prompts are too long"):
        load(tmp_path, rows, "data.holdout=30")


def test_a_holdout_of_every_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="60 would leave no training problems of 60 distinct prompts"):
        load(tmp_path, with_twins("spaced"), "data.holdout=60")


class Sampled:
    """Engine and judge in one: half of the samples of each prompt are correct, and all samples of ``easy`` ones."""

    policy_version = 0

    def __init__(self) -> None:
        self.asked: list[RolloutRequest] = []

    def submit(self, first: Any, second: Any = None) -> Any:
        if second is not None:
            return [first, len(second)]
        self.asked += first
        return None

    def finished(self) -> Iterator[RolloutGroup]:
        done = completion([1])
        return (RolloutGroup(request=request, completions=(done,) * request.group_size) for request in self.asked)

    def result(self, ticket: Any) -> tuple[Verdict, ...]:
        asked, count = ticket
        right = [i % 2 == 0 or "easy" in asked.prompt for i in range(count)]
        return tuple(Verdict(outcome=Outcome.CORRECT if r else Outcome.WRONG, status="") for r in right)


def test_the_difficulty_filter_samples_a_prompt_once(tmp_path: Path) -> None:
    asked = ["an easy one", "a hard one", "An  EASY one", "a hard  one", "another"]
    problems = [problem(f"p{i}", p) for i, p in enumerate(asked)]
    path = tmp_path / "difficulty.json"
    config = TrainConfig.model_validate(
        {
            "start": {"model": "none"},
            "data": {"train": [{"path": "sums.jsonl"}], "difficulty_filter": {"samples": 4}},
            "stages": [{"max_tokens": 4, "rollout_batch": 2, "group_size": 2, "max_steps": 1}],
        }
    )
    engine = Sampled()
    parts: Any = (engine, engine, Encoder().encode)
    for _ in range(2):  # measured, then read
        kept, removed, _ = filter_by_difficulty(config, problems, parts, path, lambda *_: None)
        assert [request.problem.id for request in engine.asked] == ["p0", "p1", "p4"]
        assert (kept, [*removed]) == ([problems[1].key, problems[4].key], [problems[0].key])
    assert list(json.loads(path.read_text())["counts"]) == ["p0", "p1", "p2", "p3", "p4"], "people read ids"


def test_a_filter_that_removes_graded_problems_names_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "difficulty.json"
    config = TrainConfig.model_validate(
        {
            "start": {"model": "none"},
            "data": {"train": [{"path": "sums.jsonl"}], "difficulty_filter": {"samples": 4}},
            "stages": [{"max_tokens": 4, "rollout_batch": 2, "group_size": 2, "max_steps": 1}],
        }
    )
    answers = {"groups": 1, "max_tokens": 4, "mixed": 1.0, "correct": 0.0, "truncated": 0.0}
    parts: Any = (None, None, None)
    for reward, remedy in (
        (0.5, "T = 4. A response is correct if its reward reaches the right_from"),
        (None, "T = 4."),
    ):
        path.write_text(json.dumps({"counts": {"p": [0, 4]}, "answers": answers | {"reward": reward}}))
        with pytest.raises(ValueError, match="leaves none of 1 problems") as caught:
            filter_by_difficulty(config, [problem("p", "one")], parts, path, lambda *_: None)
        assert remedy in str(caught.value)
        assert str(caught.value).endswith("T = 4." if reward is None else "(--set data.difficulty_filter=none).")
