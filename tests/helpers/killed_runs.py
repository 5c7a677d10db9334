"""Runs in this process that are killed after a step, and the comparison of a resumed run with an uninterrupted one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from magicrl.config.loader import load_train_recipe
from magicrl.records import StepMetrics
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

QUIET = ("data.test={}", "evaluation.every=0")
TIMES = ("time/", "idle/", "speed/", "memory/", "tokens/per_second", "verify/seconds")


class Killed(BaseException):
    """Stand-in for SIGKILL: no handler of the run may catch it."""


class KillAfter(NullObserver):
    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == self._step:
            raise Killed


def run(
    recipe: Path, output: Path, *overrides: str, kill_after: int | None = None, resume: bool = False
) -> list[dict[str, Any]]:
    observer = NullObserver() if kill_after is None else KillAfter(kill_after)
    config = load_train_recipe(recipe, [*QUIET, *overrides])
    with contextlib.suppress(Killed):
        run_training(config, output, observer, resume=resume)
    rows = [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def rollouts(output: Path) -> list[dict[str, Any]]:
    """Return one row per response, in the order of steps, draws and samples, without times."""
    files = sorted((output / "rollouts").glob("*.parquet"))
    return [
        {k: v for k, v in row.items() if k != "seconds"} for path in files for row in pq.read_table(path).to_pylist()
    ]


def weights(output: Path) -> Mapping[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    return all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def goes_on_bit_for_bit(recipe: Path, folder: Path, *overrides: str, kill_after: int) -> list[dict[str, Any]]:
    """Run once uninterrupted, and once killed and resumed. Both must have equal metrics, responses and weights."""
    whole = run(recipe, folder / "whole", *overrides)
    run(recipe, folder / "killed", *overrides, kill_after=kill_after)
    assert run(recipe, folder / "killed", *overrides, resume=True) == whole
    assert rollouts(folder / "killed") == rollouts(folder / "whole")
    assert same_weights(folder / "killed", folder / "whole")
    return whole
