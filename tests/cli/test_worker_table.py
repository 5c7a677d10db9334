"""The rows of a cluster's workers below a run's figures: what is in them, which are left out, and that they fit."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from magicrl.cli.display import RunPanel, WorkerRow, memory, worker_rows
from magicrl.records import StepMetrics

WHOLE = {
    "train/accuracy/mean": 0.25,
    "tokens/per_second": 800.0,
    "time/step": 10.0,
    "time/rollout": 6.0,
    "time/train": 3.0,
    "memory/learner/peak_mb": 71680.0,
    "speed/learner/tokens_per_second": 53210.0,
    "speed/learner/tokens_per_second_per_device": 6651.25,
    "speed/learner/mfu": 0.412,
    "memory/engine/peak_mb": 512.0,
    "speed/engine/tokens_per_second": 12210.0,
    "speed/engine/tokens_per_second_per_device": 6105.0,
}


def step(replicas: int, verifiers: int = 0, **more: float) -> StepMetrics:
    values: dict[str, Any] = dict(WHOLE)
    for n in range(replicas):
        key = f"cluster/replica_{n}"
        values |= {f"{key}/tokens": 100, f"{key}/tokens_per_second": 2000.0 - 10 * n, f"{key}/busy_seconds": 4.0 + n}
        values |= {f"{key}/queue": 0, f"{key}/queue_max": 12, f"{key}/peak_mb": 512.0}
    for n in range(verifiers):
        key = f"cluster/verifier_{n}"
        values |= {f"{key}/judged": 8, f"{key}/busy_seconds": 1.0 + n, f"{key}/queue": 3}
    values |= {key.replace("__", "/"): value for key, value in more.items()}
    return StepMetrics(step=1, stage=0, values=values)


def drawn(metrics: StepMetrics, width: int = 80) -> str:
    panel = RunPanel(title="demo", max_steps=10, stage_steps=(10,), elapsed=lambda: 75.0)
    panel.step(metrics, 10.0)
    out = io.StringIO()
    Console(file=out, width=width).print(panel)
    return out.getvalue()


def test_every_worker_has_a_row() -> None:
    rows, note = worker_rows(
        step(2, 1, cluster__replicas__lost=1, cluster__verifiers__lost=2, cluster__learner__lost=0)
    )
    learner = {"tokens/s": "53,210", "busy": "30 %", "memory": "70.0 GiB", "MFU": "41 %", "per device": "6,651"}
    assert rows == [
        WorkerRow(name="learner", cells=learner),
        WorkerRow(
            name="engine",
            cells={"tokens/s": "12,210", "busy": "60 %", "memory": "512 MiB", "per device": "6,105"},
        ),
        WorkerRow(
            name="replica 0", cells={"tokens/s": "2,000", "busy": "40 %", "queue": "0 (12)", "memory": "512 MiB"}
        ),
        WorkerRow(
            name="replica 1", cells={"tokens/s": "1,990", "busy": "50 %", "queue": "0 (12)", "memory": "512 MiB"}
        ),
        WorkerRow(name="verifier 0", cells={"busy": "10 %", "queue": "3"}),
    ]
    assert note.plain == "lost: 1 replica, 2 verifier nodes"


def test_of_many_workers_the_slowest_and_the_busiest_are_shown() -> None:
    rows, note = worker_rows(step(32, 5))
    assert [row.name for row in rows[2:]] == [*(f"replica {n}" for n in range(28, 32)), "verifier 3", "verifier 4"]
    assert rows[2].cells["busy"] == "100 %", "seconds that came in late do not make it busier than the step is long"
    assert note.plain == "4 slowest replicas of 32, 2 busiest verifiers of 5"


def test_without_a_cluster_there_are_no_rows_but_the_memory() -> None:
    metrics = StepMetrics(step=1, stage=0, values=WHOLE)
    assert worker_rows(metrics)[0] == []
    text = drawn(metrics)
    assert "tokens/s 800" in text
    assert "memory 70.0 GiB" in text, "of the fuller one"
    assert "MFU" not in text


def test_a_cluster_s_memory_stands_in_its_rows_alone() -> None:
    text = drawn(step(2))
    assert "memory 70.0 GiB" not in text
    assert text.count("70.0 GiB") == 1


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_the_rows_fit_and_the_speed_stays(width: int) -> None:
    text = drawn(step(2, 1), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert [part for part in ("53,210", "12,210", "2,000", "1,990") if part not in text] == []
    assert ("per device" in text) == (width >= 80)


def test_memory_in_words() -> None:
    assert [memory(1.4), memory(1023.0), memory(1536.0)] == ["1 MiB", "1023 MiB", "1.5 GiB"]
