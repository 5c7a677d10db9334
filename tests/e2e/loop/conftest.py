"""A recipe that runs in seconds, and the starting model that it needs, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_start import toy_sft

from magicrl.config.loader import load_sft_recipe
from magicrl.training.sft import run_sft

SFT = toy_sft(steps=40, options="recheck_continue = 0.5, ", more="[optimizer]\nbeta2 = 0.95\n\n")

TRAIN = """
[run]
name = "toy"
threads = 1

[start]
model = "MODEL"

[model]
dtype = "float32"

[[data.train]]
family = "running_sum"
count = 60

[[data.validation]]
family = "running_sum"
count = 6
split = "validation"

[data.test.held_out]
family = "running_sum"
count = 10
split = "test"

[rollout]
max_rows = 32
memory_limit_mb = 64

[entropy]
preset = "small"

[optimizer]
learning_rate = 1e-3

[[stages]]
max_tokens = 8
rollout_batch = 8
group_size = 4
max_steps = 3
transition = { rule = "fixed" }

[[stages]]
max_tokens = 24
rollout_batch = 8
group_size = 4
max_steps = 3
transition = { rule = "fixed" }

[evaluation]
every = 2
validation_samples = 2
temperatures = [0.0, 1.0]
samples = 4
pass_at = [4]

[verifier]
extract = "lenient"

[checkpoint]
every = 2
"""


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a starting model after 40 supervised steps: bad, but it ends its responses and is sometimes right."""
    folder = tmp_path_factory.mktemp("models")
    recipe = folder / "sft.toml"
    recipe.write_text(SFT)
    return run_sft(load_sft_recipe(recipe), folder / "toy-start")


@pytest.fixture(scope="session")
def toy_text(toy_model: Path) -> str:
    """Return the training recipe on that model."""
    return TRAIN.replace("MODEL", str(toy_model))


@pytest.fixture
def toy_recipe(tmp_path: Path, toy_text: str) -> Path:
    """Return that recipe as a file."""
    path = tmp_path / "toy.toml"
    path.write_text(toy_text)
    return path
