"""The scripts of `make bench` and benchmarks/gpu.sh run from end to end at tiny sizes and write the quoted figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).resolve().parents[3]


def rehearsed(folder: Path, module: str, *options: str) -> dict[str, Any]:
    """Return the cases of a script."""
    output = folder / "found.json"
    command = [sys.executable, "-m", f"benchmarks.speed.{module}", *options, "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text())["cases"]


def test_rollouts_beside_generate(tmp_path: Path) -> None:
    for case in rehearsed(tmp_path, "rollout_speed", "--quick", "--repetitions", "1").values():
        tried = case["peer"]["cpu_s"]
        assert tried[case["peer"]["setting"]] == min(value for value in tried.values() if isinstance(value, float))
        for side in ("magicrl", "transformers"):
            assert case[side]["measured"]["threads_1"]["cpu_s"] > 0
            assert case[side]["share_of_gemm_bound"] > 0
        assert case["parts"]["rows_computed_over_needed"] == 1.0, "work for sequences that have ended"
        assert case["run"]["command"].startswith("python -m benchmarks.speed.rollout_speed --quick")
    before = json.loads((tmp_path / "found.json").read_text())["cases"]
    (tmp_path / "this-kind").mkdir()
    (tmp_path / "found.json").rename(tmp_path / "this-kind" / "found.json")
    again = rehearsed(tmp_path, "rollout_speed", "--quick", "--repetitions", "1", "--case", "tiny-equal")
    assert again["tiny-equal"]["peer"] == before["tiny-equal"]["peer"], "settings are tried once for their versions"


def test_both_learners_take_the_same_gradient(tmp_path: Path) -> None:
    cases = rehearsed(tmp_path, "learner_speed", "--quick", "--repetitions", "1")
    exact, rounded = cases["tiny-long-tail"], cases["tiny-bf16"]
    assert exact["gradients"]["relative_difference"] < 1e-5
    assert exact["loss"]["magicrl"] == pytest.approx(exact["loss"]["trl"], abs=1e-4)
    assert exact["padded_tokens_of_trl"] > exact["tokens"]
    assert rounded["gradients"]["cosine"] > 0.999
    for side in ("magicrl", "trl"):
        memory = rounded[side]["memory"]
        assert memory["peak_mib"] > memory["before_model_mib"] > 0


def test_the_head_beside_other_formulations(tmp_path: Path) -> None:
    (case,) = rehearsed(tmp_path, "head_speed", "--quick").values()
    assert case["relative_difference_of_gradients"]["weight"] < 0.02
    assert {"magicrl", "naive", "verl"} <= case["sides"].keys()


def test_the_cost_of_exact_mode(tmp_path: Path) -> None:
    (case,) = rehearsed(tmp_path, "exact_cost", "--quick", "--repetitions", "1").values()
    for part in ("decode", "update"):
        assert case[part]["ratio"] == pytest.approx(case[part]["exact_s"] / case[part]["plain_s"], rel=1e-3)


def test_own_kernels_beside_torch(tmp_path: Path) -> None:
    for case in rehearsed(tmp_path, "decode_kernels", "--quick", "--repetitions", "1").values():
        assert case["times_faster"]["cpu_one_thread"] > 0


def test_all_parts_of_the_gpu_figures_run_on_a_cpu_one_after_the_other(tmp_path: Path) -> None:
    tiny = ("gpu", "--device", "cpu", "--quick", "--parts")
    first = rehearsed(tmp_path, *tiny, "engine,learner")
    assert {"engine-tiny-graphs", "learner-tiny", "learner-tiny-lora"} <= first.keys()
    cases = rehearsed(tmp_path, *tiny, "head,profile,gap,packs,weights")
    assert {name: cases[name] for name in first} == first, "what was measured before stays"
    assert not [name for name, case in cases.items() if "failed" in case]
    # 12 generated tokens: the steps that read tokens 6 to 11 see 8 of the prompt and 6 to 11 of the response
    assert cases["engine-tiny-plain"]["last_half"]["context_tokens"] == 16.5
    assert cases["learner-tiny-lora"]["trained_parameters"] < cases["learner-tiny"]["trained_parameters"]
    for found in (cases["profile-update"], cases["profile-decode-tiny"]["plain"]):
        assert sum(kind["share"] for kind in found["kinds"].values()) == pytest.approx(1, abs=1e-3)
        assert found["kinds"]["products"]["seconds"] > 0
    # sampler and learner round differently, and more so with fewer bits
    gaps = [cases[f"gap-{name}"]["mean_gap"] for name in ("float16-float32-head", "bfloat16")]
    assert 0 < gaps[0] < gaps[1] < 0.01


def test_the_gpu_tests_are_found_by_a_pytest_without_plugins() -> None:
    # as on the GPU machine, whose pytest has no xdist
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
