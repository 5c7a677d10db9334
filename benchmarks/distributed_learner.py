"""A 7B model spread over ranks without its weights: python benchmarks/distributed_learner.py

Shards a model's shapes with FSDP2 as the learner does, counts the bytes that one rank holds, and puts them beside what
``magicrl plan`` estimates. Seconds; writes ``docs/figures/distributed-learner-memory.json``.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from common import FIGURES, document, parser_of, rounded, write_case

from magicrl.distributed.learner.sharding import Meshes, RankSettings, ShardedModel
from magicrl.planning.memory import LearnerSetup, learner_memory
from magicrl.planning.shapes import load_shape

DRY = (("DeepSeek-R1-Distill-Qwen-7B", 8, 1), ("DeepSeek-R1-Distill-Qwen-7B", 32, 4), ("Qwen3-8B", 8, 2))


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
    parser = parser_of(__doc__, FIGURES / "distributed-learner-memory.json")
    given = parser.parse_args()
    results = {f"{name} on {n}, {s} a sequence": dry_run(name, n, s) for name, n, s in DRY}
    print(json.dumps(results, indent=1))
    for name, result in results.items():
        write_case(given.output, document({}, ("torch",)), name, result, list(results))


if __name__ == "__main__":
    main()
