"""Section 5 of the report with the simulator, from 32 to 4,096 GPUs: python benchmarks/plan_study.py

The setting of Tables 8 and 9 (7B, 64 x 16 responses, T = 16K) with the shipped efficiencies. What more GPUs, another
dealing of responses, tensor parallelism, partial rollouts and staleness do to a step; what D_R and group size cost; how
much the stages save. Writes ``docs/figures/plan-study.json``. Ten seconds of one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plan_published import ROOT, rounded
from published import Resolved, resolve, seven

from magicrl.planning.costs import BF16, Efficiency, load_calibration
from magicrl.planning.lengths import SHARED, SIGMA, LengthCourse, Lengths, lengths_of_mean, reasoning_lengths
from magicrl.planning.simulator import simulate_async, simulate_partial
from magicrl.planning.workload import Layout, replica_setup, step_parts, step_time

SHORT_MEAN = 5_400.0
"""Mean tokens at T = 32K of the model that was first trained at 8K."""
STEPS = 10


def efficiency() -> Efficiency:
    return load_calibration("H800-80G", 3584).efficiency


def with_tensor_parallel(r: Resolved, tp: int) -> Layout:
    """The released layout with another degree; the weights that it saves become cache."""
    saved = BF16 * r.shape.parameters * (1 - 1 / tp)
    return replace(r.layout, tensor_parallel=tp, cache_bytes=r.layout.cache_bytes + saved)


def one_count(gpus: int) -> dict[str, Any]:
    """Seconds of a step, or of its rollout, on so many GPUs under each way of working."""
    r, e = resolve(seven(gpus)), efficiency()
    released = step_time(r.shape, r.hardware, e, r.work, r.layout)
    parallel = {
        tp: step_time(r.shape, r.hardware, e, r.work, with_tensor_parallel(r, tp), 2).rollout for tp in (1, 2, 4, 8)
    }
    setup = replica_setup(r.shape, r.hardware, e, r.layout)
    parts = step_parts(r.shape, r.hardware, e, r.work, r.layout)
    drawn = [r.work.drawn(seed) for seed in range(STEPS)]
    partial = simulate_partial(drawn, r.work.prompt, setup, r.layout.replicas, parts, 0.5)
    split = replace(r.layout, rollout_gpus=gpus * 3 // 4, learner_gpus=gpus // 4, colocated=False)
    apart = step_parts(r.shape, r.hardware, e, r.work, split)
    stale = {
        staleness: simulate_async(drawn, r.work.prompt, setup, split.replicas, apart, staleness).seconds_per_step(4)
        for staleness in (1, 2, 4)
    }
    interleaved = step_time(r.shape, r.hardware, e, r.work, replace(r.layout, deal="interleaved"))
    return {
        "gpus": gpus,
        "step": rounded(released.seconds),
        "rollout": rounded(released.rollout),
        "learn": rounded(released.learn),
        "other": rounded(released.other),
        "idle_share_of_rollout": rounded(released.idle),
        "rollout_interleaved": rounded(interleaved.rollout),
        "rollout_by_tensor_parallel": {str(tp): rounded(seconds) for tp, seconds in parallel.items()},
        "step_partial_rollouts": rounded(partial.seconds_per_step()),
        "partial_staleness": partial.staleness,
        "step_by_staleness": {str(k): rounded(v) for k, v in stale.items()},
    }


def larger_batches() -> list[dict[str, Any]]:
    """D_R and group size beside the GPUs that pay for them: 64, 32, 16 on 64, 32, 16 GPUs, and groups of 16, 8, 4."""
    found: list[dict[str, Any]] = []
    for gpus, d_r, size in (
        (64, 64, 16),
        (32, 32, 16),
        (16, 16, 16),
        (32, 64, 8),
        (16, 64, 4),
        (32, 128, 16),
        (32, 64, 32),
    ):
        r = resolve(replace(seven(gpus), rollout_batch=d_r, group_size=size))
        time = step_time(r.shape, r.hardware, efficiency(), r.work, r.layout)
        found.append(
            {
                "gpus": gpus,
                "D_R": d_r,
                "group_size": size,
                "step": rounded(time.seconds),
                "rollout": rounded(time.rollout),
            }
        )
    return found


def stages(gpus: int) -> dict[str, float | int]:
    """Hours of 1000 steps at 16K (two updates a step), against 540 steps at 8K and 460 at 16K.

    Lengths stay as they are, or go over the first stage to the mean that it leaves and stay there, which the run from
    scratch is not given. ``first_stage_for_nothing`` is what would be saved if steps at 8K took no time at all.
    """

    def seconds(limit: int, lengths: Lengths) -> float:
        r = resolve(replace(seven(gpus, sgd_steps=2), limit=limit), lengths.at(limit))
        return step_time(r.shape, r.hardware, efficiency(), r.work, r.layout).seconds

    start = reasoning_lengths(16384)
    course = LengthCourse(start=start, end=lengths_of_mean(SHORT_MEAN, SIGMA, 32768, SHARED).median)
    scratch = seconds(16384, start)
    same = 540 * seconds(8192, start) + 460 * scratch
    points = [i / 8 for i in range(9)]
    first = sum(seconds(8192, course.at(progress)) for progress in points) / len(points)
    shorter = 540 * first + 460 * seconds(16384, course.at(1.0))
    return {
        "gpus": gpus,
        "hours_at_16k_throughout": rounded(1000 * scratch / 3600),
        "saved_if_lengths_stay": rounded((1000 * scratch - same) / 3600),
        "saved_if_they_shorten_over_the_first_stage": rounded((1000 * scratch - shorter) / 3600),
        "first_stage_for_nothing": rounded(540 * scratch / 3600),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "plan-study.json")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "hardware": "pure computation, one CPU core",
        "by_gpus": [one_count(gpus) for gpus in (32, 64, 128, 256, 1024, 4096)],
        "larger_batches": larger_batches(),
        "stages": [stages(gpus) for gpus in (8, 16, 32, 64)],
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
