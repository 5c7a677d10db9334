"""A custom engine from a file next to the recipe: it trains and evaluates, and a wrong name lists the known ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import magicrl_here

from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import make_engine
from magicrl.training.assemble import make_training_engine

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "engine.py"


def test_the_example_trains_and_is_evaluated(toy_recipe: Path, toy_model: Path, tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    text = toy_recipe.read_text().replace("[rollout]", '[rollout]\nengine = "mine.py:make"')
    toy_recipe.write_text(text.replace("max_steps = 3", "max_steps = 1"))
    done = magicrl_here("train", str(toy_recipe), "--output", "run", cwd=tmp_path)
    assert done.returncode == 0, done
    rows = [json.loads(line)["values"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for values in rows:  # its log-probs are the learner's, so every update was made on the policy that sampled
        assert values["learner/sampler_gap_mean"] < 1e-5
        assert values["tokens/sampled"] > 0
    (tmp_path / "sums.jsonl").write_text('{"id": "a", "problem": "3 4", "answer": "7"}\n')
    words = "--benchmark sums.jsonl --samples 2 --max-tokens 8 --verifier exact --template {prompt} --output scores"
    done = magicrl_here("eval", "--engine", "mine.py:make", "--model", str(toy_model), *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done
    facts = (tmp_path / "scores" / "results.json").read_text()
    assert "engine_sha256" in facts, "another text of the file is another engine"


def test_a_wrong_name_says_the_nearest_before_anything_is_loaded(toy_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"did you mean 'in_process'\? Known: in_process, openai, replay, vllm"):
        load_train_recipe(toy_recipe, ('rollout.engine="in_proces"',))
    with pytest.raises(RecipeError, match=r"there is no file .*mine\.py"):
        load_train_recipe(toy_recipe, ('rollout.engine="mine.py:make"',))
    (tmp_path / "mine.py").write_text("def make(settings):\n    return settings.model\n")
    with pytest.raises(RecipeError, match="gave a str; give a subclass of"):
        make_engine(f"{tmp_path}/mine.py:make", EngineSettings(model="nowhere"))


def test_an_unknown_capability_says_where_it_is_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from magicrl.rollout.protocol import Capabilities\nOWN = Capabilities(turns=False, seeds=True)\n")
    said = r"Capabilities\(seeds=True\): there is no such capability; leave it out[.] .* \(mine.py, line 2\)"
    with pytest.raises(RecipeError, match=said):
        make_engine(f"{file}:make", EngineSettings(model="nowhere"))


def test_a_run_refuses_an_engine_that_cannot_do_what_it_needs(toy_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from magicrl.rollout.protocol import Capabilities, RolloutEngine\n"
        "class Silent(RolloutEngine):\n    capabilities = Capabilities(logprobs=False)\n"
        "class Plain(RolloutEngine):\n    pass\n"
        "def silent(settings):\n    return Silent()\n"
        "def plain(settings):\n    return Plain()\n"
    )
    encoder: Any = None
    for name, message in (("silent", "declares that it has no logprobs"), ("plain", "needs an engine that reports")):
        config = load_train_recipe(toy_recipe, (f'rollout.engine="{tmp_path}/mine.py:{name}"',))
        with pytest.raises(RecipeError, match=message):
            make_training_engine(config, "nowhere", encoder)
