"""`rollout.max_staleness` on a pool of two replicas, through the training loop: versions, order, cost of a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from magicrl.config.schema import TrainConfig
from magicrl.records import StepMetrics
from magicrl.training.checkpoint import load_latest
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

pytestmark = pytest.mark.slow

STEPS, BATCH, GROUP = 6, 4, 4
CLUSTER = {"rollout": {"replicas": 2, "cpus": 1.0}, "timeouts": {"start": 300.0}}
TIMES = ("time/", "idle/", "speed/", "memory/", "tokens/per_second", "verify/", "cluster/", "workers/")


class Killed(BaseException):
    """Stand-in for SIGKILL: no handler of the run may catch it."""


class Watching(NullObserver):
    """Observer that calls ``act`` after every step, while the responses of the next ones are under way."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    def step(self, metrics: StepMetrics) -> None:
        self._act(metrics.step)


@pytest.fixture(scope="session")
def recipe(make_recipe: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """Return a recipe with few rows, so that responses wait and are under way whenever new weights come."""

    def make(staleness: int, cluster: dict[str, Any] | None = CLUSTER) -> TrainConfig:
        return make_recipe(
            cluster,
            rollout={"max_rows": 1, "memory_limit_mb": 64, "max_staleness": staleness},
            # a random model solves nothing: only entropy moves the weights, so that versions differ
            entropy={"controller": "fixed", "alpha": 0.5},
            algorithm={"reject_zero_advantage": False, "correction": "tis"},
            optimizer={"learning_rate": 1e-3},
            stages=[{"max_tokens": 48, "rollout_batch": BATCH, "group_size": GROUP, "max_steps": STEPS}],
            checkpoint={"every": 2},
        )

    return make


def run(config: TrainConfig, output: Path, *, act: Callable[..., None] = lambda *_: None, resume: bool = False) -> Any:
    """Run the loop to its end, and return its pool. ``act(step, pool)`` is called after each step."""
    from magicrl.distributed.cluster_parts import ClusterParts
    from magicrl.training.assemble import LocalParts

    pools: list[Any] = []

    class Parts(ClusterParts):
        """Parts with verdicts from this process: a verifier pool on every node takes longer to start than the run."""

        def judge(self) -> Any:
            return LocalParts(config).judge()

        def engine(self, start: Any, encoder: Any, learner: Any, check: Any) -> Any:
            pools.append(super().engine(start, encoder, learner, check))
            return pools[0]

    parts = None if config.cluster is None else Parts(config)
    with contextlib.suppress(Killed):
        run_training(config, output, Watching(lambda n: act(n, *pools)), resume=resume, parts=parts)
    return pools[0] if pools else None


def metrics(output: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def samples(output: Path) -> list[dict[str, Any]]:
    files = sorted((output / "rollouts").glob("*.parquet"))
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def weights(output: Path) -> Mapping[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def every_prompt_once(output: Path) -> None:
    used = [(row["step"], row["draw"], row["sample"]) for row in samples(output)]
    assert sorted(used) == [(1 + d // BATCH, d, s) for d in range(STEPS * BATCH) for s in range(GROUP)]


def versions_make_sense(output: Path, staleness: int) -> None:
    """Check bound, histogram and gaps. Only log-probs of responses of the newest weights are the learner's."""
    rows = metrics(output)
    assert [row["queue/in_flight"] for row in rows] == [BATCH * min(staleness, n) for n in range(STEPS - 1, -1, -1)]
    assert rows[0]["staleness/max"] == 0
    assert 0 < max(row["staleness/max"] for row in rows) <= staleness
    for row in rows:
        shares = [row[f"staleness/share_{steps}/ratio"] for steps in range(staleness + 1)]
        assert sum(shares) == pytest.approx(1)
        assert row["staleness/mean"] == pytest.approx(sum(n * share for n, share in enumerate(shares)))
    assert max(row["staleness/fresh_gap/mean"] or 0.0 for row in rows) < 1e-4
    assert max(row["learner/sampler_gap_mean"] for row in rows) > 1e-4, "stale tokens part from the learner"
    assert any(row["version_spans"] for row in samples(output)), "no response spans an update"


def test_at_staleness_0_it_is_the_synchronous_run(three_nodes: Any, recipe: Any, tmp_path: Path) -> None:
    run(recipe(0, None), tmp_path / "alone")
    run(recipe(0), tmp_path / "pool")
    assert samples(tmp_path / "pool") == samples(tmp_path / "alone")
    assert metrics(tmp_path / "pool") == metrics(tmp_path / "alone")
    mine, theirs = weights(tmp_path / "pool"), weights(tmp_path / "alone")
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_samples_of_a_replica_killed_in_flight_are_asked_again(three_nodes: Any, recipe: Any, tmp_path: Path) -> None:
    assigned: set[tuple[int, int]] = set()
    version = 0

    def kill(step: int, pool: Any) -> None:
        nonlocal version
        slot, make = pool._slots[0], pool._make
        if step == 1 or assigned or pool.lost or not slot.assigned:
            return

        def successor(index: int) -> Any:
            assigned.update((order, sample) for order, samples in slot.assigned.items() for sample in samples)
            return make(index)

        version, pool._make = pool.policy_version, successor
        os.kill(slot.facts.pid, signal.SIGKILL)

    pool = run(recipe(1), tmp_path / "run", act=kill)
    assert len(pool.lost) == 1
    every_prompt_once(tmp_path / "run")
    versions_make_sense(tmp_path / "run", 1)
    again = [row for row in samples(tmp_path / "run") if (row["draw"], row["sample"]) in assigned]
    assert len(again) == len(assigned) > 0
    assert min(row["policy_version"] for row in again) >= version >= 2, "they began when they were asked again"


def test_a_killed_run_asks_again_for_what_was_in_flight(three_nodes: Any, recipe: Any, tmp_path: Path) -> None:
    def kill(step: int, _: Any) -> None:
        if step == 3:
            raise Killed

    run(recipe(2), tmp_path / "run", act=kill)
    checkpoint = load_latest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 2
    state = checkpoint.state["trainer"]
    pending = state["pending"]
    assert [item["draw"] for item in pending] == list(range(2 * BATCH, 4 * BATCH))
    whole = {(item["draw"], sample) for item in pending if item["finished"] for sample in range(GROUP)}
    rows = zip(state.get("engine/places", []), state.get("engine/begun/rows", []), strict=True)
    held = {(draw, sample): row for (draw, sample, _), row in rows}
    run(recipe(2), tmp_path / "run", resume=True)
    every_prompt_once(tmp_path / "run")
    versions_make_sense(tmp_path / "run", 2)
    used = {(row["draw"], row["sample"]): row for row in samples(tmp_path / "run")}
    for place, row in held.items():
        assert used[place]["policy_version"] == row["policy_version"], "what had arrived is kept"
    again = [row for place, row in used.items() if row["step"] in (3, 4) and place not in {*whole, *held}]
    assert again
    assert min(row["policy_version"] for row in again) >= 2, "they began when they were asked again"
