"""Published runs of other systems, on which no unknown of the planner was fitted.

    python -m benchmarks.planning.plan_held_out

Compares plan, published time and the bound of FLOPs at the peak. Whole RL steps give the factor that holds for nine
of ten steps (split conformal: the ceil(0.9 (n + 1))-th smallest |log(plan / published)|), and how many steps of each
system a factor from the other systems would hold. Updates and rollouts give no interval. Writes
``plan-held-out.json``; with ``--write`` the factor goes into the planner's calibration. Seconds of one core; no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, exp, log
from typing import Any

from published import ENGINE_SHARE

from benchmarks.planning.plan_published import write_published
from benchmarks.shared import FIGURES, document, parser_of, rounded, write_figure
from magicrl.planning.costs import BF16, Efficiency, LearnerWork, System, learner_seconds, load_calibration
from magicrl.planning.hardware import load_hardware
from magicrl.planning.planner import flops_bound
from magicrl.planning.shapes import load_shape
from magicrl.planning.workload import Layout, Lengths, Workload, lengths_of_mean, reasoning_lengths, timing

SHARE = 0.9  # of the steps that the factor holds
NEMO = "github.com/NVIDIA-NeMo/RL docs/about/performance-summary.md, v0.4, commit 06beed9 (2025)"
AREAL = "AReaL v0.3 release notes (2025), hours of 250 steps"
PRIME = "prime-rl benchmarks/results/BENCHMARKS.md, 2026-01-16, commit 2dfe22e of a public copy"
RLINF = "verl and RLinf, 1.5B on 8 H100 at 28K (2026); 512 responses follow from tokens a second and the step's parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One published step, or part of one, with the settings that the plan needs."""

    system: str
    source: str
    model: str
    hardware: str
    gpus: int
    part: str = "step"  # or rollout, update
    seconds: float
    limit: int  # T
    mean: float | None = None  # tokens of a sample; None: an R1-distilled model's
    prompt: int = 128
    responses: int
    sgd_steps: int = 1
    forwards: int = 1  # passes over all tokens without gradient
    tensor_parallel: int = 1
    staleness: int = 0
    split: float = 0.75  # of the accelerators that generate where steps overlap


def nemo(
    model: str, gpus: int, seconds: float, limit: int, mean: float, tp: int, responses: int, lag: int
) -> Published:
    return Published(
        system="NeMo-RL", source=NEMO, model=model, hardware="H100-80G", gpus=gpus, seconds=seconds, limit=limit,
        mean=mean, responses=responses, sgd_steps=responses // 512, forwards=2, tensor_parallel=tp, staleness=lag,
        split=0.5,
    )  # fmt: skip


def areal(size: str, gpus: int, hours: float, lag: int) -> Published:
    return Published(
        system="AReaL", source=AREAL, model=f"DeepSeek-R1-Distill-Qwen-{size}", hardware="H800-80G", gpus=gpus,
        seconds=hours * 3600 / 250, limit=27648, prompt=256, responses=8192, staleness=lag,
    )  # fmt: skip


def long_decode(system: str, part: str, seconds: float) -> Published:
    return Published(
        system=system, source=RLINF, model="DeepSeek-R1-Distill-Qwen-1.5B", hardware="H100-80G", gpus=8, part=part,
        seconds=seconds, limit=28672, mean=14000.0, prompt=256, responses=512, sgd_steps=4,
    )  # fmt: skip


ROWS = (
    areal("1.5B", 128, 41.0, 0),
    areal("1.5B", 128, 14.8, 4),
    areal("7B", 192, 57.7, 0),
    areal("7B", 192, 25.4, 4),
    nemo("Llama-3.1-8B", 16, 97.7, 4096, 1060.0, 1, 2048, 0),
    nemo("Llama-3.1-8B", 16, 74.6, 4096, 1129.0, 1, 2048, 1),
    nemo("Qwen3-32B", 32, 393.0, 4096, 3206.0, 4, 2048, 0),
    nemo("Qwen3-32B", 64, 215.0, 4096, 3207.0, 4, 2048, 1),
    nemo("Qwen3-30B-A3B", 32, 225.0, 4096, 3154.0, 4, 2048, 0),
    nemo("Qwen3-30B-A3B", 32, 244.0, 4096, 3158.0, 2, 2048, 1),
    nemo("Qwen3-235B-A22B", 128, 506.0, 8192, 5671.0, 16, 512, 0),
    nemo("Qwen3-235B-A22B", 256, 241.0, 8192, 5691.0, 8, 512, 1),
    long_decode("verl", "step", 364.0),
    long_decode("RLinf", "step", 346.0),
    long_decode("verl", "rollout", 512 * 14000 / (8 * 3533)),
    long_decode("RLinf", "rollout", 512 * 14000 / (8 * 3361)),
    long_decode("verl", "update", 67.0),
    long_decode("RLinf", "update", 61.0),
)

MICRO_BATCHES = (  # prime-rl's trainer: model, hardware, ranks, tokens of a rank's sequence, tokens per second of all
    ("Qwen3-0.6B", "H100-80G", 1, 16384, 11900.0),
    ("Qwen3-0.6B", "H100-80G", 1, 65536, 10150.0),
    ("Qwen3-0.6B", "A6000", 1, 16384, 3690.0),
    ("Qwen3-0.6B", "A6000", 1, 65536, 2080.0),
    ("Qwen3-4B", "H100-80G", 8, 16384, 26030.0),
    ("Qwen3-4B", "H200", 8, 16384, 27440.0),
    ("Qwen3-4B", "B200", 8, 16384, 27540.0),
    ("Qwen3-4B", "H100-80G", 8, 65536, 28970.0),
    ("Qwen3-4B", "H200", 8, 65536, 29540.0),
)


def predicted(row: Published, efficiency: Efficiency) -> tuple[float, float]:
    """Return seconds of the plan, without the released code's time outside the GPUs, and of FLOPs at the peak."""
    shape, hardware = load_shape(row.model), load_hardware(row.hardware)
    engine = round(row.gpus * row.split) if row.staleness else row.gpus
    lengths: Lengths = reasoning_lengths(row.limit)
    if row.mean is not None:
        lengths = lengths_of_mean(row.mean - row.prompt, row.limit)
    work = Workload(
        lengths=lengths, prompt=row.prompt, rollout_batch=row.responses // 16, group_size=16, forwards=row.forwards,
        sgd_steps=row.sgd_steps,
    )  # fmt: skip
    layout = Layout(
        rollout_gpus=engine,
        tensor_parallel=row.tensor_parallel,
        learner_gpus=row.gpus - engine if row.staleness else row.gpus,
        sequence_parallel=1,
        colocated=not row.staleness,
        cache_bytes=ENGINE_SHARE * hardware.memory - BF16 * shape.parameters / row.tensor_parallel,
        micro_batch_tokens=row.limit + row.prompt,
        checkpointing=True,
    )
    system = System(shape, hardware, replace(efficiency, other=0.0))
    parts, step = timing(system, work, layout, row.staleness)
    seconds = {"step": step, "rollout": parts.rollout, "update": parts.learn}[row.part]
    return seconds, flops_bound(shape, hardware, work, row.gpus)[row.part]


def micro_batch(model: str, name: str, ranks: int, tokens: int, rate: float, efficiency: Efficiency) -> dict[str, Any]:
    """Return the time of a pass over one sequence per rank, with recomputation."""
    system = System(load_shape(model), load_hardware(name), efficiency)
    work = LearnerWork(
        tokens=tokens * ranks, mean_context=tokens / 2, responses=ranks, variation=0.0, sgd_steps=1,
        micro_batch_tokens=tokens, recompute=1.0,
    )  # fmt: skip
    return line("prime-rl", PRIME, f"{model}, {ranks} x {name}, {tokens} tokens, update", tokens * ranks / rate,
                learner_seconds(system, work, ranks), None)  # fmt: skip


def line(system: str, source: str, row: str, published: float, plan: float, bound: float | None) -> dict[str, Any]:
    return {
        "system": system,
        "row": row,
        "published_seconds": rounded(published),
        "planned_seconds": rounded(plan),
        "error": round(plan / published - 1, 3),
        "flops_bound_seconds": None if bound is None else rounded(bound),
        "source": source,
    }


def factor_of(residuals: Sequence[float]) -> float:
    """Return the factor that holds for a new step with probability ``SHARE``; the largest if there are too few."""
    ordered = sorted(abs(one) for one in residuals)
    return exp(ordered[min(len(ordered), ceil(SHARE * (len(ordered) + 1))) - 1])


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "plan-held-out.json")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    calibration = load_calibration("H100-80G", 3584)
    rows: list[dict[str, Any]] = []
    residuals: list[tuple[str, float]] = []
    for row in ROWS:
        plan, bound = predicted(row, calibration)
        mode = f"{row.staleness} stale" if row.staleness else "synchronous"
        name = f"{row.model}, {row.gpus} x {row.hardware}, {mode}, {row.part}"
        rows.append(line(row.system, row.source, name, row.seconds, plan, bound) | {"setting": asdict(row)})
        if row.part == "step":
            residuals.append((row.system, log(plan / row.seconds)))
    rows += [micro_batch(*one, calibration) for one in MICRO_BATCHES]
    factor = factor_of([one for _, one in residuals])
    by_system: dict[str, str] = {}
    for system in dict.fromkeys(name for name, _ in residuals):
        others = factor_of([one for name, one in residuals if name != system])
        own = [abs(one) <= log(others) for name, one in residuals if name == system]
        by_system[system] = f"{sum(own)} of {len(own)} within {others:.2f}"
    within = [abs(row["error"]) <= 0.1 for row in rows]
    result = {
        "run": document({"hardware": "pure computation, one CPU core"}),
        "factor": round(factor, 3),
        "steps": len(residuals),
        "steps_within_factor": sum(abs(one) <= log(factor) for _, one in residuals),
        "left_out": by_system,
        "rows_within_10_percent": f"{sum(within)} of {len(within)}",
        "rows": rows,
    }
    if options.write:
        steps = f"{len(residuals)} published steps of other systems"
        write_published({"factor": round(factor, 3), "factor_from": steps})
    write_figure(options.output, result)
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    for found in rows:
        print(*(found[key] for key in ("system", "row", "published_seconds", "planned_seconds", "error")))


if __name__ == "__main__":
    main()
