"""`examples/loop.py` makes the same weights as the trainer, bit for bit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from magicrl.config.loader import load_sft_recipe
from magicrl.config.schema import TrainConfig
from magicrl.training.checkpoint import load_checkpoint
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training
from magicrl.training.sft import run_sft

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "loop.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("loop_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def recipe(example: Any, start: Path) -> TrainConfig:
    """Return the example's settings as a recipe."""
    return TrainConfig.model_validate(
        {
            "run": {"name": "loop", "seed": example.SEED, "threads": 1},
            "start": {"model": str(start)},
            "model": {"dtype": "float32"},
            "data": {
                "train": [{"family": "running_sum", "seed": 1, "count": 80, "levels": [2]}],
                "online_filter": False,
            },
            "rollout": {"temperature": example.TEMPERATURE, "max_rows": 128, "memory_limit_mb": 256},
            "algorithm": {"loss": "magic"},
            "entropy": {"target": 1.4, "step": 0.005},
            "optimizer": {"learning_rate": example.LEARNING_RATE, "warmup_steps": 0},
            "stages": [stage.model_dump() for stage in example.STAGES],
            "verifier": {"extract": "lenient"},
            "evaluation": {"every": 0},
        }
    )


def test_the_loop_makes_the_trainers_weights(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    start = run_sft(load_sft_recipe(Path("tiny-sft")), tmp_path / "start")
    loop = example.Loop(start, example.problems(), example.STAGES)
    loop.run()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert loop.learner.version > 6, "most steps must have something to learn"
    run_training(recipe(example, start), tmp_path / "run", NullObserver(), resume=False)
    (newest,) = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1:]
    checkpoint = load_checkpoint(newest)
    assert checkpoint.state["controller"] == loop.controller.state()
    trained, expected = checkpoint.learner_state(), loop.learner.state()
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(trained[name]), np.asarray(value), err_msg=name)
