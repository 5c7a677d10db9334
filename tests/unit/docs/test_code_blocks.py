"""Python and TOML blocks of the pages work: rewards score, an environment answers, settings exist, scripts run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from transformers import LlamaConfig, LlamaForSequenceClassification

import magicrl
from magicrl.algorithms.loss_terms import loss_terms
from magicrl.algorithms.token_weights import LossInputs
from magicrl.config.schema import TrainConfig
from magicrl.config.sft_schema import SftConfig
from magicrl.data.families import make_family, unique_problems
from magicrl.environments.base import Step
from magicrl.models.small_models import make_miniature
from magicrl.records import Problem
from tools.recipe_page import section_of

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = (
    "start/own-data.md",
    "start/own-reward.md",
    "start/reading-a-report.md",
    "guides/custom-parts.md",
    "guides/environments.md",
    "guides/models.md",
    "guides/python.md",
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def namespace(page: str, number: int) -> dict[str, Any]:
    """Execute a Python block of a page and return its names."""
    space: dict[str, Any] = {"__name__": page}
    exec(compile(blocks(page, "python")[number], f"{page}, block {number}", "exec"), space)
    return space


def unknown_keys(tree: Mapping[str, Any], section: type[BaseModel], place: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        if key not in section.model_fields:
            found.append(f"{place}{key}")
            continue
        inner, kind = section_of(section.model_fields[key].annotation)
        parts = {"one": [value], "list": value, "table": [*value.values()] if kind == "table" else []}[kind]
        for part in parts if inner is not None else []:
            found += unknown_keys(part, inner, f"{place}{key}.")
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")])
def test_settings_in_recipe_blocks_exist(page: str) -> None:
    for text in blocks(page, "toml"):
        tree = tomllib.loads(text)
        assert unknown_keys(tree, SftConfig if "phases" in tree else TrainConfig) == [], text


def test_the_first_reward_of_the_page_scores() -> None:
    score = namespace("start/own-reward.md", 0)["score"]
    assert magicrl.verify("three words only", reward=score).score == 1
    assert magicrl.verify("one two three four five six", reward=score).score == pytest.approx(1 / 3)


def test_the_rewards_with_trls_signature_score() -> None:
    rewards = namespace("start/own-reward.md", 1)["REWARDS"]
    scores = [magicrl.verify(text, "5", reward=rewards).score for text in ("It is 5", r"\boxed{4}", r"\boxed{4} or 5")]
    assert scores == [1, 1, 2]


def test_the_weighted_rewards_of_the_page_score() -> None:
    rewards = namespace("start/own-reward.md", 2)["REWARD"]
    assert [magicrl.verify(text, "5", reward=rewards).score for text in (r"\boxed{5}", "No." + " " * 200)] == [1, 0]


def test_the_reward_model_of_the_page_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "path" / "to" / "reward-model"
    llama = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    make_miniature(llama, folder, max_context=64)  # for its tokenizer
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = LlamaConfig(vocab_size=vocabulary, pad_token_id=0, num_labels=1, **sizes)
    LlamaForSequenceClassification(shape).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    preference = namespace("start/own-reward.md", 3)["preference"]
    verdicts = magicrl.verify([{"prompt": "1 2", "response": text} for text in ("3", "1 2 3")], reward=preference)
    assert all(0 < (verdict.score or 0) < 1 for verdict in verdicts)


def test_the_settings_of_a_reward_are_read() -> None:
    score = namespace("start/own-reward.md", 4)["score"]
    assert (score.isolated, score.time_limit, score.memory_limit_mb, score.right_from) == (True, 5.0, 1024, 0.9)
    assert score(None, "a a b") == pytest.approx(2 / 3)


def test_the_game_of_the_page_ends_with_its_secret() -> None:
    game = namespace("guides/environments.md", 0)["Game"]()
    game.reset(Problem(id="a", prompt="?", references=(), verifier="none", source="own", extra={"secret": "7"}))
    assert game.step("3") == Step(observation="No.")
    assert game.step(" 7 ") == Step(reward=1.0, done=True, metrics={"found": 1})


def test_the_loss_of_the_page_clips_right_responses_only() -> None:
    row = namespace("guides/custom-parts.md", 0)["ROW"]
    logprobs = torch.tensor([0.5, 0.5], requires_grad=True)  # ratios of 1.65
    batch = LossInputs(
        logprobs=logprobs,
        advantages=torch.tensor([1.0, -1.0]),
        loss_mask=torch.tensor([True, True]),
        sample_index=torch.tensor([0, 1]),
        old_logprobs=torch.zeros(2),
    )
    loss_terms(row, batch, torch.full((2,), 0.5)).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.5 * torch.tensor(0.5).exp().item()])


def test_what_was_recognised_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "problems.jsonl").write_text('{"question": "What is 3 + 4?", "answer": "7"}\n')
    monkeypatch.chdir(tmp_path)
    namespace("start/own-data.md", 0)
    assert capsys.readouterr().out == "question, answer\n1 ()\n"


def test_predicted_times_of_models_are_those_of_the_planner() -> None:
    rows = re.findall(
        r"\| (\d+) s on an H100 .*? \((\d+) to (\d+)\) \| `(\S+)`", (DOCS / "guides/models.md").read_text()
    )
    assert len(rows) == 2
    for seconds, low, high, recipe in rows:
        stage = magicrl.plan(recipe, gpu="H100-80G", gpus=1)["stages"][0]
        assert stage["max_tokens"] == 4096
        found = (stage["step_seconds"], *stage["step_seconds_90_percent"])
        assert [round(value) for value in found] == [int(seconds), int(low), int(high)]


def run_script(text: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_blocks_of_the_python_page_run(tmp_path: Path) -> None:
    """Run them in their order, in one folder. A tiny model replaces the reader's, and short runs replace long ones."""
    problems = unique_problems(make_family("running_sum"), seed=5, split="train", count=60, levels=[2])
    rows = [{"question": problem.prompt, "answer": problem.references[0]} for problem in problems]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = {"path/to/hf-model": "runs/models/tiny-start", "minutes=10": "minutes=0.2", '"quickstart"': '"tiny"'}
    first, own, results, loop = blocks("guides/python.md", "python")
    assert "Name: train/reward/mean" in run_script(first, tmp_path)
    for text in (f"import magicrl\n{own}", results, f"import magicrl\n{loop}"):
        for page, here in short.items():
            text = text.replace(page, here)
        run_script(text, tmp_path)


@pytest.mark.slow
def test_the_script_of_figures_runs(tmp_path: Path) -> None:
    short = {"stages.0.max_steps": 2, "stages.1.max_steps": 1, "evaluation.samples": 1, "evaluation.pass_at": [1]}
    for name, loss in (("magic-0", "magic"), ("other-0", "dr_grpo")):
        settings = {**short, "algorithm.loss": loss}
        magicrl.train("tiny", settings=settings, output=tmp_path / "runs" / name, progress=False)
    told = run_script(blocks("start/reading-a-report.md", "python")[0], tmp_path)
    assert len(told.splitlines()) == 3
    assert (tmp_path / "accuracy.svg").read_text().startswith("<svg")
