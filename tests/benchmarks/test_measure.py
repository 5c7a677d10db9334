"""The clocks, counts and rates that the speed benchmarks rest on."""

from __future__ import annotations

import json
from pathlib import Path

import common
import gemm_bound
import measure
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )


def test_the_bound_counts_every_product_once() -> None:
    bound = gemm_bound.GemmBound(tiny_model())
    layer = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 12  # q and o; k and v of one shared head; gate, up and down
    assert bound.flops(5, 2, backward=False) == 2 * (5 * 3 * layer + 2 * 20 * 8)
    assert bound.flops(5, 2, backward=True) == 3 * bound.flops(5, 2, backward=False)
    body, head = bound.training(16)
    assert body > 0
    assert head > 0


def test_turns_warm_up_first_and_end_at_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    order = measure.turns(2)
    assert [(turn.threads, turn.warm_up) for turn in order] == [(3, True), (3, False), (1, False), (1, False)]
    assert [turn.threads for turn in measure.turns(2, most_threads=1)] == [1, 1, 1]


def test_summaries_leave_the_warm_up_out_and_ratios_are_theirs_over_ours() -> None:
    def side(scale: float) -> dict[str, object]:
        measured = [
            (measure.Turn(threads=2, warm_up=True), measure.Times(cpu=900.0, wall=900.0)),
            (measure.Turn(threads=2), measure.Times(cpu=8.0 * scale, wall=5.0 * scale)),
            *((measure.Turn(threads=1), measure.Times(cpu=c * scale, wall=99.0)) for c in (7.0, 6.0, 20.0)),
        ]
        return measure.summary(measured, {"tokens": 70.0})

    ours, theirs = side(1.0), side(3.0)
    assert ours["threads_1"]["cpu_s"] == 7.0
    assert ours["threads_1"]["tokens_per_cpu_s"] == 10.0
    assert ours["threads_2"]["tokens_per_wall_s"] == 14.0
    assert measure.ratio(theirs, ours) == {"cpu_one_thread": 3.0, "wall_all_threads": 3.0}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel has no high-water mark to reset")
def test_peak_memory_sees_what_was_freed_again() -> None:
    peak = measure.PeakMemory()
    peak.start()
    before = peak.read()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    assert peak.read() - before > 60 << 20
    peak.start()
    assert peak.read() - before < 30 << 20


def test_every_case_says_where_and_how_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.sys, "argv", [str(common.ROOT / "benchmarks" / "rollout_speed.py"), "--quick"])
    path = tmp_path / "new" / "bench.json"
    head = common.document({"repetitions": 1}, packages=("trl",))
    for name in ("old", "a", "b"):
        common.write_case(path, head, name, {"figure": 1}, ["old", "a", "b"])
    common.write_case(path, {**head, "settings": {"repetitions": 2}}, "b", {"figure": 2}, ["a", "b"])
    cases = json.loads(path.read_text())["cases"]
    assert list(cases) == ["a", "b"], "a case that is no more must go"
    assert (cases["a"]["figure"], cases["b"]["figure"]) == (1, 2)
    assert (cases["a"]["run"]["settings"], cases["b"]["run"]["settings"]) == ({"repetitions": 1}, {"repetitions": 2})
    run = cases["a"]["run"]
    assert run["command"] == "python benchmarks/rollout_speed.py --quick"
    assert {"torch", "transformers", "trl", "magicrl"} <= set(run["machine"]["versions"])
    assert {"cpu", "git", "started", "memory_gib"} <= set(run["machine"])
    assert len(run["load_average_at_start"]) == len(run["load_average_at_end"]) == 3
