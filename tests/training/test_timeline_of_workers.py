"""What a step's record takes from workers elsewhere: their spans inside the step, their metrics, their losses."""

from __future__ import annotations

import json
from pathlib import Path

from magicrl.training.metrics import StepClock
from magicrl.training.protocols import WorkSpan
from magicrl.training.session import Workers


class Pool:
    """Tells its counter and its spans once, as `protocols.Observed`, `Timed` and `Mending` say."""

    def __init__(self) -> None:
        self.tokens = 0
        self.work: list[WorkSpan] = []
        self.lost: list[str] = []

    def observations(self) -> dict[str, float]:
        told, self.tokens = self.tokens, 0
        return {"cluster/replica_0/tokens": told}

    def spans(self) -> list[WorkSpan]:
        told, self.work = self.work, []
        return told


def test_the_timeline_has_the_work_inside_the_step(tmp_path: Path) -> None:
    clock = StepClock(started=100.0, spans=[("rollout/rollout", 100.0, 104.0), ("other/weights", 108.5, 109.0)])
    clock.ended = 110.0
    work = [
        WorkSpan("replica 0", "rollout", 90.0, 99.0),  # a test before the step
        WorkSpan("replica 0", "rollout", 99.5, 103.25),
        WorkSpan("replica 1", "rollout", 109.0, 200.0),
        WorkSpan("replica 1", "rollout", 110.0, 111.0),
    ]
    clock.append_timeline(tmp_path / "timeline.jsonl", 7, work)
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [(row["worker"], row["what"], row["start"], row["end"]) for row in rows] == [
        ("local", "rollout", 0.0, 4.0),
        ("local", "weights", 8.5, 9.0),
        ("replica 0", "rollout", 0.0, 3.25),
        ("replica 1", "rollout", 9.0, 10.0),
    ]
    assert {row["step"] for row in rows} == {7}


def test_the_end_of_a_step_is_when_its_times_were_taken() -> None:
    clock = StepClock()
    assert clock.times()["step"] == clock.ended - clock.started


def test_a_step_s_figures_leave_out_what_came_before_it() -> None:
    pool = Pool()
    workers = Workers(pool, object())
    pool.tokens, pool.work = 5, [WorkSpan("replica 0", "rollout", 0.0, 1.0)]
    pool.lost.append("replica 0: killed")
    workers.begin_step()
    pool.tokens, pool.work = 7, [WorkSpan("replica 0", "rollout", 2.0, 3.0)]
    assert workers.observations() == {"cluster/replica_0/tokens": 7}
    assert workers.spans() == [WorkSpan("replica 0", "rollout", 2.0, 3.0)]
    assert workers.losses() == ["replica 0: killed"], "a loss is told whenever it came"
    pool.lost.append("replica 1: silent")
    assert workers.losses() == ["replica 1: silent"]
    assert workers.losses() == []
