"""Whole runs with an environment: every number counts the tokens of the model, and a replayed run learns the same."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import magicrl
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.config.model_schema import TinyModelConfig
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny
from magicrl.training.protocols import TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

FILE = """
    import dataclasses

    from magicrl.environments.base import Step
    from magicrl.records import Problem


    class Family:
        '''Name a letter; whatever is said, the letter is told.'''

        name, verifier, vocabulary = "letters", "exact", ("a", "b", "c", ":")

        def stream(self, *, seed, split, levels=None):
            index = 0
            while True:
                reference = "abc"[(seed + index) % 3]
                name = f"{split}-{seed}-{index}"
                prompt = " ".join("abc"[index // 3**n % 3] for n in range(6)) + " :"
                yield Problem(id=name, prompt=prompt, references=(reference,), verifier="exact", source="letters",
                              environment=ENVIRONMENT)
                index += 1

        def demonstration(self, problem, rng):
            return ("b", ": " + problem.references[0], problem.references[0])


    class Letters:
        def reset(self, problem):
            self.reference, self.turns = problem.references[0], 0

        def step(self, text):
            self.turns += 1
            if self.turns == 3 or self.reference in text.split():
                return Step(done=True, reward=float(self.reference in text.split()), metrics={"turns_used": self.turns})
            return Step(observation=f": {self.reference} : {self.reference} {self.reference}")
"""

RECIPE = """
[run]
name = "letters"
threads = 1

[start]
model = "model"

[model]
dtype = "float32"

[[data.train]]
family = "letters.py:Family"
count = 40

[rollout]
max_rows = 16
memory_limit_mb = 64

[environment]
max_turns = 3
max_observation_tokens = 4

[optimizer]
learning_rate = 1e-3

[[stages]]
max_tokens = 12
rollout_batch = 6
group_size = 4
max_steps = 3
transition = { rule = "fixed" }

[evaluation]
every = 0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    own = tmp_path / "letters.py"
    own.write_text(textwrap.dedent(FILE).replace("ENVIRONMENT", repr(f"{own}:Letters")))
    sizes = TinyModelConfig(hidden_size=16, heads=2, layers=1, intermediate_size=32, max_context=64)
    model, tokenizer = make_tiny(sizes, ("a", "b", "c", ":"), seed=3)
    save_policy(model, tokenizer, tmp_path / "model")
    (tmp_path / "letters.toml").write_text(RECIPE)
    return tmp_path / "letters.toml"


def run(recipe: Path, output: Path, *overrides: str) -> list[dict[str, Any]]:
    run_training(load_train_recipe(recipe, overrides), output, NullObserver(), resume=False)
    return [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def recorded(output: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of a step, with the positions that the model wrote, taken from the recording."""
    rows = pq.read_table(output / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
    for row in rows:
        observed = json.loads(row["episode"])["observed"]
        answered = {place for first, count in observed for place in range(first, first + count)}
        row["places"] = [place for place in range(len(row["tokens"])) if place not in answered]
        row["turns"] = len(observed) + 1
    return rows


def test_a_run_s_numbers_are_of_what_the_model_wrote(recipe: Path, tmp_path: Path) -> None:
    values = run(recipe, tmp_path / "run")
    for step, found in enumerate(values, start=1):
        rows = recorded(tmp_path / "run", step)
        written = np.array([len(row["places"]) for row in rows])
        assert max(row["turns"] for row in rows) == 3
        assert written.max() <= 12
        assert found["tokens/sampled"] == written.sum() < sum(len(row["tokens"]) for row in rows)
        assert found["length/mean"] == pytest.approx(written.mean())
        entropies = [row["sampler_entropies"][t] for row in rows for t in row["places"]]
        assert found["entropy/exact/mean"] == pytest.approx(np.mean(entropies), rel=1e-6)
        logprobs = [row["sampler_logprobs"][t] for row in rows for t in row["places"]]
        assert found["entropy/sampled/mean"] == pytest.approx(-np.mean(logprobs), rel=1e-6)
        by_draw: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            by_draw.setdefault(row["draw"], []).append(row)
        taught = [group for group in by_draw.values() if len({row["reward"] for row in group}) > 1]
        assert found["tokens/trained"] == sum(len(row["places"]) for group in taught for row in group)
        assert found["learner/sampler_gap_max"] < 1e-4, "the tokens are scored where they were sampled"
        assert found["environment/turns"] == pytest.approx(np.mean([row["turns"] for row in rows]))
        observed = [len(row["tokens"]) - len(row["places"]) for row in rows]
        assert found["environment/observed_tokens"] == pytest.approx(np.mean(observed))
        cut = np.mean([row["turns"] - 1 for row in rows])
        assert found["environment/observations_cut"] == pytest.approx(cut), "five words each, and four are allowed"
        ended = [row["turns"] for row in rows if row["finish_reason"] == "stop"]
        assert found["environment/turns_used"] == pytest.approx(np.mean(ended))
    taken_apart = magicrl.explain(tmp_path / "run", 2)
    assert taken_apart["equal"]
    assert taken_apart["update"]["entropy"] == pytest.approx(values[1]["entropy/exact/mean"], rel=1e-4)


def test_a_replayed_run_learns_the_same(recipe: Path, tmp_path: Path) -> None:
    first = run(recipe, tmp_path / "first")
    rollouts = tmp_path / "first" / "rollouts"
    again = run(recipe, tmp_path / "again", "rollout.engine=replay", f"rollout.replay={rollouts}")
    different = ("time/", "speed/", "memory/", "flops/", "tokens/per_second", "verify/seconds")
    for one, other in zip(first, again, strict=True):
        assert "learner/grad_norm" in one
        assert {k: v for k, v in one.items() if not k.startswith(different)} == {
            k: v for k, v in other.items() if not k.startswith(different)
        }


def test_episodes_that_could_outgrow_the_context_are_refused_before_the_run(recipe: Path, tmp_path: Path) -> None:
    """A prompt of 7 tokens, T and two observations of 4 in a context of 64."""
    with pytest.raises(RecipeError, match=r"stages\.0\.max_tokens: 50 .*with observations of 8 tokens in all exceed"):
        run(recipe, tmp_path / "run", "stages.0.max_tokens=50")
    assert not (tmp_path / "run").exists()


def test_an_environment_that_is_down_stops_the_run_though_some_responses_are_cut_at_t(
    recipe: Path, tmp_path: Path
) -> None:
    own = tmp_path / "letters.py"
    own.write_text(own.read_text().replace("self.turns += 1", 'raise ValueError("down")'))
    with pytest.raises(TrainingStopped, match="no response of 2 steps in a row could be judged"):
        run(recipe, tmp_path / "run", "verifier.stop_after_unjudged_steps=2")
    for step in (1, 2):
        counted = [row["counted"] for row in recorded(tmp_path / "run", step)]
        assert 0 < sum(counted) < len(counted), "a response without an end is wrong, whoever would have judged it"


def test_asynchronous_the_learner_s_entropy_is_of_what_the_model_wrote(recipe: Path, tmp_path: Path) -> None:
    """In the first step the learner has the weights that sampled, so its entropies are the recorded ones."""
    values = run(recipe, tmp_path / "run", "rollout.max_staleness=1", "algorithm.correction=m2po")
    rows = recorded(tmp_path / "run", 1)
    entropies = [row["sampler_entropies"][t] for row in rows for t in row["places"]]
    assert values[0]["entropy/exact/mean"] == pytest.approx(np.mean(entropies), rel=1e-4)
    assert values[0]["staleness/fresh_gap/mean"] < 1e-4
    assert max(row["staleness/max"] for row in values) == 1
