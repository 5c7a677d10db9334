"""The replay of a step's schedule: by hand, and against the engine itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_models
import measure
import numpy as np
import pytest
import rollout_tails
from graph_shapes import shapes_of
from tails import Group, ahead, lock_step, refilled

from magicrl.models.loading import load_policy
from magicrl.records import Problem, RolloutRequest, SamplingParams, frozen_tokens
from magicrl.rollout.in_process import InProcessEngine


def groups(*lengths: Sequence[int]) -> list[Group]:
    return [Group(problem=str(n), lengths=np.array(values)) for n, values in enumerate(lengths)]


def test_batches_wait_for_their_longest() -> None:
    # two batches of two rows; a response of n tokens takes n - 1 passes, the first comes with the prompt
    played = lock_step(groups([3, 9], [5, 2]), 2, cost=float)
    assert (played.passes, played.seconds) == (8 + 4, 2 * 8 + 2 * 4)


def test_a_free_row_is_given_to_the_next() -> None:
    played = refilled(groups([3], [9], [5]), [0, 1, 2], 2, cost=float)
    # 3 and 9 start, after 2 passes 5 follows and ends after 6, the last two passes have one row
    assert (played.passes, played.seconds) == (8, 2 * 6 + 2)
    assert [(place, passes) for place, passes, _ in played.complete] == [(0, 2), (2, 6), (1, 8)]
    assert refilled(groups([3], [9], [5]), [0, 2, 1], 2, cost=float).passes == 2 + 8, "the longest last"


def test_steps_asked_ahead_fill_the_rows_that_wait() -> None:
    steps = [groups([9], [2]), groups([9], [2])]
    # 9 and 2 of the first step, then 9 and 2 of the second beside them: 1 + 8 passes, then nothing is left
    assert [p.passes for p in ahead(steps, 2, cost=float)] == [8, 1]
    assert sum(refilled(step, [0, 1], 2, cost=float).passes for step in steps) == 16


def test_what_dropping_keeps_is_shorter() -> None:
    step = groups([2], [20], [4], [6])
    found = rollout_tails.dropping([step], 4, cost=float)
    assert found["dropped_groups"] == 0.25
    assert found["mean_tokens"] == {"kept": 4.0, "dropped": 20.0, "all": 8.0}
    assert found["passes_per_used_group"] == pytest.approx((5 / 3) / (19 / 4), rel=1e-3)


def test_what_fixed_shapes_compute_and_read() -> None:
    # three rows of 3 tokens: two passes of 3 rows as 4, all within 64 columns; one prompt of 10 tokens, kept as 10
    found = shapes_of(groups([3, 3, 3]), 4, 10)
    assert (found["passes"], found["graphs"]) == (2, 1)
    assert found["rows_computed_over_needed"] == pytest.approx(8 / 6, rel=1e-3)
    # the cache has room for 3 tokens a response: that is what is read, by 4 rows, twice; needed are 1 and then 2
    assert found["cache_read_over_held"] == pytest.approx(2 * (4 * 3 + 10) / (3 * 1 + 10 + 3 * 2 + 10), rel=1e-3)


@pytest.mark.parametrize("rows", [2, 5, 9, 16])
def test_the_replay_takes_the_engines_turns(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of several samples that end where the model ends them, one-token responses among them."""
    monkeypatch.setattr(bench_models, "MODELS", tmp_path)
    loaded = load_policy(bench_models.model_folder(bench_models.TINY), dtype="float32")
    engine = InProcessEngine(
        loaded.model, end_tokens=frozenset({3, 8, 11}), decode=lambda tokens: "", valid_vocab=23, max_context=64,
        max_rows=rows, memory_limit_mb=64,
    )  # fmt: skip
    passes, step = 0, engine._decode_step

    def counted() -> Any:
        nonlocal passes
        passes += 1
        return step()

    monkeypatch.setattr(engine, "_decode_step", counted)
    problem = Problem(id="p", prompt="", golds=("",), verifier="exact", source="test")
    sampling = SamplingParams(temperature=1.0, max_tokens=40, seed=5)
    engine.submit(
        [
            RolloutRequest(
                draw=n, problem=problem, prompt_tokens=frozen_tokens([2 + n % 20, 4]), group_size=3, sampling=sampling
            )
            for n in range(12)
        ]
    )
    lengths = {g.request.draw: [len(c) for c in g.completions] for g in engine.finished()}
    assert {1, 40} & {n for values in lengths.values() for n in values}, "the test wants extremes"
    played = refilled(groups(*(lengths[n] for n in range(12))), range(12), rows, cost=float)
    assert played.passes == passes
    assert played.seconds == sum(n - 1 for values in lengths.values() for n in values), "a pass of n rows costs n here"


def test_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_models, "MODELS", tmp_path)
    script, output, page = str(measure.ROOT / "benchmarks" / "rollout_tails.py"), tmp_path / "t.json", tmp_path / "t.md"
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--output", str(output), "--page", str(page)])
    rollout_tails.main()
    report = json.loads(output.read_text())
    assert report["engine"]["longest_alone"]["passes"] == report["engine"]["longest"] - 1
    for case in report["studies"][0]["cases"]:
        for name, row in case["schedules"].items():
            assert name == "ahead" or min(row["passes_over_bound"], row["seconds_over_bound"]) >= 1, "below its bound"
    assert "| long tail |" in page.read_text()
