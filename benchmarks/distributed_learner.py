"""The learner over ranks beside the learner of one process, and a 7B model spread over ranks without its weights.

    python benchmarks/distributed_learner.py             # minutes; docs/figures/distributed-learner.json
    python benchmarks/distributed_learner.py --quick     # seconds, a tiny model: shows that the script runs
    python benchmarks/distributed_learner.py --dry       # seconds; docs/figures/distributed-learner-memory.json

Speed: the same batch through both, in turns, one thread a process, CPU seconds of all processes; memory of each
process. Ranks on one machine share its cores and its memory: what is measured is what sharding costs, not what more
machines gain. The dry run shards a model's shapes with FSDP2 as the learner does, counts the bytes that one rank
holds, and puts them beside what ``magicrl plan`` estimates.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from bench_models import model_folder
from learner_cases import CASES, QUICK, Case, samples_of
from measure import FIGURES, document, rounded, write_case

from magicrl.config.schema import AlgorithmConfig, LearnerPlacement, ModelConfig
from magicrl.distributed.learner import DistributedLearner, LocalLauncher
from magicrl.distributed.learner.sharding import Meshes, RankSettings, ShardedModel
from magicrl.models.loading import load_policy
from magicrl.planning.memory import LearnerSetup, learner_memory
from magicrl.planning.shapes import load_shape
from magicrl.records import TrainBatch
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

CONTROLS = Controls(clip_low=0.2, clip_high=0.28, learning_rate=1e-6)
RANKS = (1, 2)
DRY = (("DeepSeek-R1-Distill-Qwen-7B", 8, 1), ("DeepSeek-R1-Distill-Qwen-7B", 32, 4), ("Qwen3-8B", 8, 2))


def settings(case: Case) -> LearnerSettings:
    model = ModelConfig(dtype=case.dtype, micro_batch_tokens=case.micro_batch_tokens, head_chunk_tokens=256)
    return LearnerSettings(algorithm=AlgorithmConfig(loss="dapo"), model=model)


def single(case: Case) -> LocalLearner:
    policy = load_policy(model_folder(case.model))
    return LocalLearner(policy.model, settings(case), valid_vocab=policy.valid_vocab)


def spread(case: Case, ranks: int) -> DistributedLearner:
    return DistributedLearner(
        load_policy(model_folder(case.model)),
        settings(case),
        launcher=LocalLauncher(environment={"OMP_NUM_THREADS": "1"}),
        placement=LearnerPlacement(ranks=ranks),
        threads=1,
    )


def speed(case: Case, repetitions: int) -> dict[str, Any]:
    """CPU seconds of an update, the first of each side left out, and peak memory of each process."""
    batch = TrainBatch.of(samples_of(case.responses()))
    one, many = single(case), {ranks: spread(case, ranks) for ranks in RANKS}
    seconds: dict[str, list[float]] = {"single": [], **{f"{n} ranks": [] for n in RANKS}}
    losses: dict[str, float] = {}
    try:
        for _ in range(repetitions + 1):
            began = time.process_time()
            losses["single"] = one.update(batch, CONTROLS).values["loss"]
            seconds["single"].append(time.process_time() - began)
            for ranks, learner in many.items():
                losses[f"{ranks} ranks"] = learner.update(batch, CONTROLS).values["loss"]
                seconds[f"{ranks} ranks"].append(sum(rank.cpu_seconds for rank in learner.last))
        memory = {f"{n} ranks": [rounded(rank.peak_mb) for rank in learner.last] for n, learner in many.items()}
    finally:
        for learner in many.values():
            learner.close()
    tokens = batch.num_loss_tokens
    best = {side: min(found[1:]) for side, found in seconds.items()}
    return {
        "response_tokens": tokens,
        "cpu_seconds": {side: [rounded(s) for s in found] for side, found in seconds.items()},
        "response_tokens_per_cpu_second": {side: rounded(tokens / s) for side, s in best.items()},
        "cpu_against_single": {side: rounded(s / best["single"]) for side, s in best.items()},
        "loss_of_last_update": losses,
        "peak_mb": {"single": [single_peak(case)], **memory},
    }


def single_peak(case: Case) -> float:
    """Peak of a process that makes two updates and nothing else."""
    command = [sys.executable, __file__, "--single", case.name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def two_updates(case: Case) -> float:
    torch.set_num_threads(1)
    batch, one = TrainBatch.of(samples_of(case.responses())), single(case)
    for _ in range(2):
        one.update(batch, CONTROLS)
    return rounded(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def dry_run(name: str, ranks: int, sequence_parallel: int) -> dict[str, Any]:
    """Bytes that rank 0 of ``ranks`` holds, from the shards that FSDP2 makes of the model's shapes."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    table = tomllib.loads(resources.files("magicrl.planning").joinpath("models.toml").read_text(encoding="utf-8"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = {"architectures": [f"{table[name]['model_type'].capitalize()}ForCausalLM"], **table[name]}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            told = RankSettings(folder=folder, sequence_parallel=sequence_parallel)
            sharded = ShardedModel(told, Meshes.make("cpu", sequence_parallel), torch.device("meta"), fill=False)
        found = counted(sharded)
    finally:
        dist.destroy_process_group()
    setup = LearnerSetup(
        gpus=ranks,
        sequence_parallel=sequence_parallel,
        micro_batch_tokens=32768,
        longest=32768,
        checkpointing=True,
        head_chunk_tokens=1024,
    )
    planned = learner_memory(load_shape(name), setup, 0.0).terms()
    return {
        "ranks": ranks,
        "sequence_parallel": sequence_parallel,
        "gib_of_rank_0": {term: rounded(value / 2**30) for term, value in found.items()},
        "gib_planned": {term: rounded(value / 2**30) for term, value in planned.items() if value},
    }


def counted(sharded: ShardedModel) -> dict[str, float]:
    """Master weights, gradients, moments (shards, float32), and the most that is whole at once (bfloat16)."""
    shard = sum(4 * p.to_local().numel() for p in sharded.trained().values())  # type: ignore[attr-defined]
    names = {name: p.numel() for name, p in sharded.model.named_parameters()}
    layers = [prefix for prefix, _ in sharded.units() if prefix]
    sizes = [sum(n for name, n in names.items() if name.startswith(prefix)) for prefix in layers]
    rest = sum(n for name, n in names.items() if not name.startswith(tuple(layers)))
    # the next layer is fetched while one computes
    return {"master": shard, "gradients": shard, "moments": 2 * shard, "gathered": 2.0 * (2 * max(sizes) + rest)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model; nothing is written without --output")
    parser.add_argument("--dry", action="store_true", help="memory of a rank from shapes alone")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--single", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.single:
        print(two_updates(next(case for case in (*CASES, *QUICK) if case.name == given.single)))
        return
    torch.set_num_threads(1)
    if given.dry:
        results: Mapping[str, Any] = {f"{name} on {n}, {s} a sequence": dry_run(name, n, s) for name, n, s in DRY}
        path = given.output or FIGURES / "distributed-learner-memory.json"
    else:
        cases = QUICK[:1] if given.quick else CASES[:1]
        results = {case.name: speed(case, given.repetitions) for case in cases}
        path = given.output or (None if given.quick else FIGURES / "distributed-learner.json")
    print(json.dumps(results, indent=1))
    if path is not None:
        for name, result in results.items():
            write_case(path, document({"repetitions": given.repetitions}, ("torch",)), name, result, list(results))


if __name__ == "__main__":
    main()
