"""What can be refused is refused before anything is computed, written or announced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from magicrl.cli.train import run_training
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_byte_tokenizer
from magicrl.training import preflight
from magicrl.training.preflight import check_run

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
SFT = """
[model.tiny]
hidden_size = 32
heads = 2
layers = 1
intermediate_size = 64
max_context = 64

[[phases]]
family = "running_sum"
options = { variant = "stages", max_tokens = 32 }
steps = 1000000
batch_size = 2
learning_rate = 1e-3
"""
ROW = '{"problem": "L 5 2 3 0 1 0 0 0 0 :", "answer": "1"}\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "sft.toml").write_text(SFT)
    (folder / "sums.jsonl").write_text(ROW)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def check(recipe: Path, output: Path, *overrides: str) -> preflight.Ready:
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
    if not reason:  # a million supervised steps would follow
        check(recipe, tmp_path / "run", override)
        return
    with pytest.raises(ValueError, match=reason):
        run_training(recipe, [override, "run.expected_minutes=5"], tmp_path / "run", resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["recipes"]
    assert capsys.readouterr().out == "", "nothing was promised"


def test_somebody_elses_folder_is_not_written_into(recipe: Path, tmp_path: Path) -> None:
    taken = tmp_path / "run"
    taken.mkdir()
    (taken / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds other files \(thesis\.tex\)"):
        check(recipe, taken)
    (taken / "thesis.tex").unlink()
    (taken / ".lock").touch()
    check(recipe, taken)


def test_a_run_that_does_not_fit_says_what_would(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 2.0**30
    monkeypatch.setattr(preflight, "host_memory", lambda: memory)
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
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM .* mixes sequences that share a row"):
        check(recipe, tmp_path / "run", f"model={tmp_path / 'hybrid'}")


def test_a_missing_extra_is_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = preflight.importlib.util.find_spec
    missing = ("peft", "vllm")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name in missing else real(name))
    with pytest.raises(RecipeError, match=r"model\.lora: needs PEFT"):
        check(recipe, tmp_path / "run", "model.lora.rank=4")
    with pytest.raises(ValueError, match="needs vLLM"):
        check(recipe, tmp_path / "run", "rollout.engine=vllm", "entropy.estimator=sampled")
