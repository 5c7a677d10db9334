"""Long responses start first, and nothing changes except time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from magicrl.config.loader import load_train_recipe
from magicrl.records import RolloutRequest, StepMetrics
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.recorder import NullObserver
from magicrl.training.rollout_queue import longest_first
from magicrl.training.session import run_training


def test_the_longest_first_and_the_unknown_in_their_middle() -> None:
    assert longest_first(["a", "b", "c"], {}) == [0, 1, 2], "nothing is known: the order of issue"
    means = {"short": 3.0, "long": 60.0, "middling": 30.0}
    # new problems are expected to take the mean of 3, 30 and 60
    assert longest_first(["new", "short", "middling", "long", "newer"], means) == [3, 0, 4, 2, 1]


FEW_ROWS = (
    "data.test={}", "evaluation.every=0", "data.train.0.count=12", "data.online_filter=false", "rollout.max_rows=6",
    "stages.0.max_steps=4", "stages.0.max_tokens=24", "stages.1.max_steps=1",
)  # fmt: skip


class Killed(BaseException):
    """Stand-in for SIGKILL."""


class KillAfter(NullObserver):
    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == 3:
            raise Killed


def run(recipe: Path, output: Path, *overrides: str, observer: NullObserver | None = None) -> list[dict[str, Any]]:
    """Return one row per response."""
    config = load_train_recipe(recipe, [*FEW_ROWS, *overrides])
    with contextlib.suppress(Killed):
        run_training(config, output, observer or NullObserver(), resume=output.exists())
    files = sorted((output / "rollouts").glob("*.parquet"))
    return [
        {k: v for k, v in row.items() if k != "seconds"} for path in files for row in pq.read_table(path).to_pylist()
    ]


def test_only_the_order_of_starting_differs(toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[list[int]] = []
    submit = InProcessEngine.submit

    def noting(engine: InProcessEngine, requests: Sequence[RolloutRequest]) -> None:
        submitted.append([request.draw for request in requests])
        submit(engine, requests)

    monkeypatch.setattr(InProcessEngine, "submit", noting)
    rows = {
        order: run(toy_recipe, tmp_path / order, f"rollout.start_order={order}")
        for order in ("issued", "longest_first")
    }
    issued, first = submitted[: len(submitted) // 2], submitted[len(submitted) // 2 :]
    assert all(draws == sorted(draws) for draws in issued)
    assert [sorted(draws) for draws in first] == issued
    assert first != issued, "problems come again in this run"
    assert [[r["draw"], r["problem_id"], r["sample"]] for r in rows["issued"]] == [
        [r["draw"], r["problem_id"], r["sample"]] for r in rows["longest_first"]
    ]
    same = [a["tokens"] == b["tokens"] for a, b in zip(*rows.values(), strict=True)]
    assert sum(same) > 0.97 * len(same), "the same random numbers; products of another size round differently"


def test_a_resumed_run_starts_the_same_groups_first(toy_recipe: Path, tmp_path: Path) -> None:
    whole = run(toy_recipe, tmp_path / "whole")
    run(toy_recipe, tmp_path / "killed", observer=KillAfter())
    assert run(toy_recipe, tmp_path / "killed") == whole
    metrics = [(tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1] for name in ("whole", "killed")]
    ends = [json.loads(line)["values"]["learner/grad_norm"] for line in metrics]
    assert ends[0] == ends[1]
