"""The speed benchmarks run on a tiny model, do equal work on both sides, and write what the page quotes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_models
import measure
import numpy as np
import pytest
import rollout_speed
from common import ROOT
from rollout_parts import batches_parts
from transformers import logging as hf_logging

FAST = measure.turns(1, most_threads=1)


@pytest.fixture(autouse=True)
def _own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_logging.set_verbosity_error()
    monkeypatch.setattr(bench_models, "MODELS", tmp_path)


@pytest.mark.benchmark
def test_rollouts_beside_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "bench.json"
    script = str(ROOT / "benchmarks" / "rollout_speed.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--repetitions", "1", "--output", str(output)])
    monkeypatch.delitem(rollout_speed.PEERS, "generate, static cache, compiled")  # for minutes
    monkeypatch.setitem(rollout_speed.PEERS, "broken", lambda case: rollout_speed.Peer(case, cache_implementation="?"))
    rollout_speed.main()
    cases = json.loads(output.read_text())["cases"]
    assert cases["tiny-equal"]["response_tokens"] == 2 * 2 * 6
    lengths = rollout_speed.QUICK[1].lengths()
    assert len(set(lengths.tolist())) > 1, "the long-tailed case has one length only"
    assert cases["tiny-long-tail"]["response_tokens"] == lengths.sum()
    for case in cases.values():
        tried = case["peer"]["cpu_s"]
        assert tried.keys() == {"generate, dynamic cache", "generate, static cache", "continuous batching", "broken"}
        assert isinstance(tried["broken"], str), "why a setting cannot be had stands in its place"
        assert tried[case["peer"]["setting"]] == min(value for value in tried.values() if isinstance(value, float))
        for side in ("magicrl", "transformers"):
            assert case[side]["measured"]["threads_1"]["cpu_s"] > 0
            assert case[side]["share_of_gemm_bound"] > 0
        ours = case["parts"]
        assert ours["rows_computed_over_needed"] == 1.0, "work for sequences that have ended"
        assert ours["cache_read_over_held"] >= 1.0
        assert case["parts_of_batches"]["cache_read_over_held"] >= 1.0
        assert 0 < ours["attention_share"] + ours["sampling_share"] < 1
    assert cases["tiny-equal"]["parts_of_batches"]["rows_computed_over_needed"] == 1.0
    assert cases["tiny-long-tail"]["parts_of_batches"]["rows_computed_over_needed"] > 1.0


def test_what_batches_compute_and_read() -> None:
    # two prompts of 10 tokens, two samples each of 3, 5 and 2, 2 tokens, in batches of 2: passes 4 and 1
    found = batches_parts(np.array([3, 5, 2, 2]), 10, 2, 2)
    assert found["rows_computed_over_needed"] == pytest.approx((4 * 2 + 1 * 2) / (2 + 4 + 1 + 1), rel=1e-3)
    read = 2 * (4 * 10 + 1 + 2 + 3 + 4) + 2 * (10 + 1)
    held = 4 * 10 + 1 * 10 + (1 + 2) + (1 + 2 + 3 + 4) + 1 + 1
    assert found["cache_read_over_held"] == pytest.approx(read / held, rel=1e-3)


def test_both_sides_of_the_rollout_benchmark_give_the_lengths_of_the_case() -> None:
    case = rollout_speed.QUICK[1]
    expected = case.lengths().tolist()
    assert rollout_speed.Ours(case)().tolist() == expected
    assert rollout_speed.Peer(case)().tolist() == expected


@pytest.mark.benchmark
def test_both_learners_take_the_same_gradient() -> None:
    import learner_speed

    exact = learner_speed.run_case(learner_speed.QUICK[1], FAST, memory=False)
    assert exact["gradients"]["relative_difference"] < 1e-5
    assert exact["loss"]["magicrl"] == pytest.approx(exact["loss"]["trl"], abs=1e-4)
    assert exact["padded_tokens_of_trl"] > exact["tokens"]
    rounded = learner_speed.run_case(learner_speed.QUICK[0], FAST, memory=False)
    assert rounded["gradients"]["cosine"] > 0.999
    assert rounded["times_faster"]["cpu_one_thread"] > 0


@pytest.mark.benchmark
def test_the_learner_benchmark_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    script = ROOT / "benchmarks" / "learner_speed.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "--quick", "--case", "tiny-bf16", "--repetitions", "1"]
    subprocess.run([*command, "--output", str(output)], check=True, env=environment)
    sides = json.loads(output.read_text())["cases"]["tiny-bf16"]
    for side in ("magicrl", "trl"):
        memory = sides[side]["memory"]
        assert memory["peak_mib"] > memory["before_model_mib"] > 0


@pytest.mark.parametrize("index", [0, 1])
def test_the_bound_of_learning_has_no_more_products_than_the_learner(index: int) -> None:
    import learner_speed

    case = learner_speed.QUICK[index]
    ours = learner_speed.Ours(case)
    computed = [batch for _, batch in ours.learner.scorer.micro_batches(ours.batch.samples)]
    tokens = sum(batch.input_ids.shape[1] for batch in computed)
    outputs = sum(len(batch.targets) for batch in computed)
    body, head = learner_speed.least_tokens(case)
    assert head == outputs
    assert body <= tokens
