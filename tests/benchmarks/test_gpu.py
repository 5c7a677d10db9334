"""The one command for GPU figures runs from end to end on tiny sizes, and decides and counts as it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_page
import psutil
import pytest
import torch
from common import PERFORMANCE, ROOT
from gpu_device import MARGIN, random_model
from gpu_engine import bound_of
from gpu_learner import needs_lora
from gpu_parts import pack_case, pytest_case, run_case
from gpu_profile import KINDS, microseconds
from torch._C._autograd import DeviceType
from varlen_kernel import kernel_on_cpu

import gpu
from magicrl.planning.hardware import load_hardware


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    output = folder / "gpu.json"
    given = ["--device", "cpu", "--quick", "--output", str(output), "--page", str(folder / "page.md"), *arguments]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "gpu.py"), *given])
    gpu.main()
    return json.loads(output.read_text())["cases"]


@pytest.mark.benchmark
def test_all_parts_run_on_a_cpu_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(monkeypatch, tmp_path, "--parts", "engine,learner")
    assert list(first) == [
        "engine-tiny-graphs",
        "engine-tiny-plain",
        "learner-tiny",
        "learner-tiny-lora",
        "learner-tiny-compiled",
    ]
    cases = run(monkeypatch, tmp_path, "--parts", "head,profile,gap,packs,weights")
    elsewhere = ("tests", "ranks", "tiles", "runs")  # what follows, and the rehearsal of gpu.sh, where triton is
    assert list(cases) == [n for n in gpu.jobs(gpu.quick(), "cpu") if n.partition("-")[0] not in elsewhere]
    assert {name: cases[name] for name in first} == first, "what was measured before stays"
    assert cases["head-quick"]["relative_difference_of_gradients"]["weight"] < 0.02
    assert cases["engine-tiny-graphs"]["last_half"]["tokens_per_s"] > 0
    # 12 generated tokens: the steps that feed tokens 6 to 11 see 8 of the prompt and 6 to 11 of the response
    assert cases["engine-tiny-plain"]["last_half"]["context_tokens"] == 16.5
    assert cases["learner-tiny"]["trained"] == "all weights"
    assert cases["learner-tiny-lora"]["trained_parameters"] < cases["learner-tiny"]["trained_parameters"]
    assert cases["learner-tiny-lora"]["model_tflop_per_s"] > 0
    for found in (cases["profile-update"], cases["profile-decode-tiny"]["plain"]):
        assert list(found["kinds"]) == list(KINDS)
        assert sum(kind["share"] for kind in found["kinds"].values()) == pytest.approx(1, abs=1e-3)
        assert found["kinds"]["products"]["seconds"] > 0
        assert found["kinds"]["attention"]["seconds"] > 0
        assert found["kinds"]["head"]["seconds"] > 0
    assert cases["profile-update"]["kinds"]["optimizer"]["seconds"] > 0
    page = (tmp_path / "page.md").read_text()
    assert "| tiny-lora | LoRA of rank 16 |" in page
    assert "Not measured" not in page
    # sampler and learner round differently, the more the narrower their numbers
    gaps = [cases[f"gap-{name}"]["mean_gap"] for name in ("float16-float32-head", "bfloat16")]
    assert 0 < gaps[0] < gaps[1] < 0.01
    assert cases["packs-tiny-shared-buckets"]["tokens"] == 30 + cases["packs-tiny-buckets"]["tokens"]
    assert "left_out" in cases["packs-tiny-varlen"], "no CUDA device"
    assert "failed" not in cases["weights-copied"], "the engine has the learner's weights"


def test_both_ways_over_a_pack_are_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernel_on_cpu(monkeypatch) as (forwards, _):
        monkeypatch.setattr("gpu_parts.capability_of", lambda device: (9, 0))
        for case in gpu.quick().packs:
            ways = [pack_case(case, way, "cpu")["norms_of_gradients"] for way in ("varlen", "buckets")]
            assert ways[0] == pytest.approx(ways[1], rel=0.01)
    assert len(forwards) > 2


def test_the_committed_section_is_what_the_figures_give() -> None:
    cases = json.loads(gpu_page.JSON.read_text())["cases"] if gpu_page.JSON.exists() else {}
    assert "\n".join(gpu_page.section(cases)) in PERFORMANCE.read_text()


def test_without_figures_the_page_says_so() -> None:
    assert "**Not measured**" in gpu_page.section({})[-1]


def test_a_case_that_fails_says_why_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_memory() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    def broken() -> dict[str, Any]:
        raise RuntimeError("no kernel")

    jobs = {"head-a": full_memory, "engine-b": broken, "learner-c": lambda: {"measured": 1}}
    assert gpu.attempted(full_memory) == {"out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    monkeypatch.setattr(gpu, "jobs", lambda plan, device: jobs)
    with pytest.raises(SystemExit, match="engine-b"):
        run(monkeypatch, tmp_path)
    cases = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert list(cases) == ["head-a", "engine-b", "learner-c"]
    assert cases["learner-c"]["measured"] == 1
    assert cases["engine-b"]["failed"] == "RuntimeError: no kernel"
    assert "| head-a | CUDA out of memory." in (tmp_path / "page.md").read_text()


def part_with(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a part that this process is have so much time left."""
    age = time.time() - psutil.Process().create_time()
    monkeypatch.setenv("PART_SECONDS", str(age + MARGIN + seconds))


def test_a_part_ends_in_time_and_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first() -> dict[str, Any]:
        part_with(monkeypatch, 5.0)
        return {"measured": 1}

    jobs = {"head-a": first, "head-b": lambda: time.sleep(60), "head-c": lambda: {"measured": 1}}
    monkeypatch.setattr(gpu, "jobs", lambda plan, device: jobs)
    with pytest.raises(SystemExit, match="head-b, head-c"):
        run(monkeypatch, tmp_path)
    cases = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert cases["head-a"]["measured"] == 1
    assert cases["head-b"]["failed"] == "TimeoutError: stopped at the end of the part's time"
    assert cases["head-c"]["failed"] == "no time of the part was left"


def test_tests_that_take_too_long_are_stopped_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("import time\ndef test_good(): pass\ndef test_slow(): time.sleep(600)\n")
    part_with(monkeypatch, 25 + 6.0)
    found = pytest_case(str(file), "-p", "no:cacheprovider")
    assert found["tests"] >= 1
    assert found["failed"] == "pytest: stopped at the end of the part's time"


@pytest.mark.benchmark
def test_the_gpu_tests_are_found_by_a_pytest_without_plugins() -> None:
    # as on a lent machine, whose pytest has no xdist
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_red_test_is_named(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    found = pytest_case(str(file), "-p", "no:cacheprovider")
    assert (found["tests"], found["failures"]) == (2, 1)
    assert found["failed"].endswith("::test_bad")


def test_a_run_that_ends_wrongly_fails_its_part() -> None:
    found = run_case("no-such-recipe", ("cpu",))
    assert found["failed"] == "cpu: 2"
    assert found["runs"]["cpu"]["reward"] == []


def test_figures_of_several_calls_come_together(tmp_path: Path) -> None:
    for name, cases in (("a", {"x": {"v": 1}, "y": {"v": 1}}), ("b", {"y": {"v": 2}})):
        (tmp_path / name).write_text(json.dumps({"cases": cases}))
    figures = tmp_path / "all.json"
    gpu_page.add(figures, [tmp_path / "a"])
    gpu_page.add(figures, [tmp_path / "b"])
    assert json.loads(figures.read_text()) == {"cases": {"x": {"v": 1}, "y": {"v": 2}}}


def test_an_unknown_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--parts", "head,heads")


def test_the_planner_decides_what_is_trained() -> None:
    """18 bytes for each of 7.6e9 parameters are 128 GiB before any activation: too much for 139, enough for 179."""
    by_name = {case.name: case for case in gpu.full().learners}
    on = {name: load_hardware(name) for name in ("A100-80G", "H200", "B200")}
    assert not any(needs_lora(by_name[f"1.5b-{length}"], on["A100-80G"]) for length in ("16k", "32k"))
    assert all(needs_lora(by_name[f"7b-{length}"], on["H200"]) for length in ("16k", "32k"))
    assert not needs_lora(by_name["7b-16k"], on["B200"])


def test_models_have_the_planners_parameters() -> None:
    shape = gpu.quick().update.shape
    assert sum(p.numel() for p in random_model(shape, torch.float32, "cpu").parameters()) == shape.parameters


def test_the_bound_of_a_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_engine.copy_rate", lambda device, size: 1e6)
    monkeypatch.setattr("gpu_engine.product_rate", lambda device, side: 1e15)
    case = gpu.quick().engines[0]
    shape = replace(case.shape, layers=1, qkv_bias=False)
    # a layer: q and o 32 x 32, k and v 32 x 16, three of 32 x 64, two norms of 32; the head 300 x 32; two bytes each
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 300 * 32)
    cache = 2 * 2 * 16 * 50  # keys and values of one head of 16, bfloat16, 50 tokens
    assert bound_of(replace(case, shape=shape), "cpu", 64, 64).step(4, 50) == pytest.approx((weights + cache) / 1e6)


def event(name: str, start: float, kernels: dict[str, float], parent: Any = None, shapes: Any = ()) -> Any:
    """An operator as the profiler tells of it on CUDA."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=start + 1), cpu_parent=parent, input_shapes=shapes,
        device_type=DeviceType.CPU, is_user_annotation=False, self_cpu_time_total=0.0,
        kernels=[SimpleNamespace(name=kernel, duration=time) for kernel, time in kernels.items()],
    )  # fmt: skip


def kernel(name: str, time: float, *, annotation: bool = False) -> Any:
    """A kernel as the profiler tells of it, or the span of an annotation on the device."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(elapsed_us=lambda: time), device_type=DeviceType.CUDA,
        is_user_annotation=annotation,
    )  # fmt: skip


def test_kernels_are_counted_once_for_the_operator_that_launched_them() -> None:
    attention = event("aten::_flash_attention_backward", 3, {"flash": 5})
    backward = event("autograd::engine::evaluate_function: MmBackward0", 4, {})
    step = event("Optimizer.step#AdamW.step", 9, {"span": 99})
    step.is_user_annotation = True
    events = [
        event("aten::mm", 0, {"gemm": 10}, shapes=[[8, 32], [32, 64]]),
        event("aten::mm", 1, {"gemm": 20}, shapes=[[8, 32], [32, 300]]),
        event("aten::exp", 2, {"elementwise": 3}, shapes=[[8, 300]]),
        event("_Head", 2, {"statistics_kernel": 7}),
        attention,
        event("aten::copy_", 3, {"elementwise": 1}, parent=attention, shapes=[[8, 16]]),
        event("aten::embedding", 3, {"gather": 2}, shapes=[[300, 32], [8]]),
        backward,
        event("aten::mm", 4, {"gemm": 40}, parent=backward, shapes=[[64, 8], [8, 32]]),
        step,
        event("aten::_fused_adamw_", 9, {"adam": 6}, parent=step),
        kernel("gemm", 70), kernel("elementwise", 4), kernel("statistics_kernel", 7), kernel("flash", 5),
        kernel("gather", 2), kernel("adam", 6),
        kernel("gradient_kernel", 11),  # launched by nobody known
        kernel("Memset", 0.5),
        kernel("Optimizer.step#AdamW.step", 99, annotation=True),
    ]  # fmt: skip
    assert microseconds(events, 300, "cuda") == {
        "products": 50, "attention": 6, "head": 20 + 3 + 7 + 11, "optimizer": 6, "rest": 2.5,
    }  # fmt: skip
