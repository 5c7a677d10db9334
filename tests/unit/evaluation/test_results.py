"""Usage and cost of an evaluation: tokens from the samples, times from the records of the calls."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import sample_row

from magicrl.config.errors import RecipeError
from magicrl.evaluation.results import Meter, Price, read_accounts, total_cost, total_usage, worker_cpu_seconds
from magicrl.evaluation.runner import JobCost

ROW = sample_row(prompt_tokens=10)


def account(**changes: Any) -> dict[str, Any]:
    known = {"samples": 2, "seconds": 4.0, "cpu_seconds": 3.0, "judging_cpu_seconds": 1.0, "gpu_seconds": 0.0}
    return known | {"server": None} | changes


def test_tokens_come_from_the_samples_and_times_from_every_call() -> None:
    rows = [ROW, replace(ROW, sample=1, tokens=50), replace(ROW, sample=2)]
    found = total_cost(
        rows, [account(), account(samples=0, seconds=1.5)], Price(per_million_in=2.0, per_million_out=8.0)
    )
    assert (found["prompt_tokens"], found["response_tokens"]) == (30, 110)
    assert (found["seconds"], found["cpu_seconds"], found["judging_cpu_seconds"]) == (5.5, 6.0, 2.0)
    assert found["samples_without_times"] == 1, "a kill lost the end of a call's account"
    assert found["price"]["total"] == pytest.approx((30 * 2 + 110 * 8) / 1e6)
    both = total_usage([found, found], None)
    assert (both["response_tokens"], both["calls"], both["price"]) == (220, 4, None)


def test_what_nobody_counted_is_not_made_up() -> None:
    unknown = replace(ROW, prompt_tokens=None)
    found = total_cost([unknown], [account(gpu_seconds=None)], Price(per_million_in=1.0, per_million_out=1.0))
    assert (found["prompt_tokens"], found["gpu_seconds"], found["price"]["total"]) == (None, None, None)
    counts = {"requests": 1, "retries": 0, "prompt_tokens": 12, "completion_tokens": 30, "unreported": 0}
    served = total_cost([unknown], [account(server=counts)], Price(per_million_in=1.0, per_million_out=1.0))
    assert served["prompt_tokens"] == 12
    assert total_cost([unknown], [account(server=counts | {"unreported": 1})], None)["prompt_tokens"] is None
    assert total_usage([found, served], None)["gpu_seconds"] is None


def test_an_account_is_there_before_its_call_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magicrl.evaluation.results.RENEWED_EVERY", 0.0)
    counted = {"requests": 5, "prompt_tokens": 7}
    meter = Meter(tmp_path / "usage", gpus=2, workers=tuple, served=lambda: dict(counted))
    counted |= {"requests": 6, "prompt_tokens": 17}
    meter.count(ROW)
    (running,) = read_accounts(tmp_path / "usage")
    assert (running["samples"], running["ended"]) == (1, False)
    assert running["server"] == {"requests": 1, "prompt_tokens": 10}, "only what this call asked for"
    meter.write(ended=True)
    (ended,) = read_accounts(tmp_path / "usage")
    assert ended["ended"]
    assert ended["gpu_seconds"] == pytest.approx(2 * ended["seconds"], abs=0.01)
    (tmp_path / "usage" / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is no record of a call"):
        read_accounts(tmp_path / "usage")


def test_cpu_seconds_of_a_worker_count_and_a_dead_one_is_no_error() -> None:
    busy = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert worker_cpu_seconds([worker.pid]) >= 0.15
    assert worker_cpu_seconds([worker.pid]) == 0.0
    assert worker_cpu_seconds([os.getpid()]) > 0


def test_prices_before_and_after() -> None:
    cost = JobCost(name="x", problems=2, samples=2, missing=4, wanted=4, max_tokens=100, prompt_tokens=50)
    assert cost.most_price is None
    assert replace(cost, price=Price(per_million_in=10.0, per_million_out=20.0)).most_price == pytest.approx(0.0085)
    assert replace(cost, prompt_tokens=None, price=Price(per_million_in=1.0, per_million_out=1.0)).most_price is None
    with pytest.raises(RecipeError, match="--price-out -1"):
        Price(per_million_in=0.0, per_million_out=-1.0)
