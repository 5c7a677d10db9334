"""Each rank's part of a starting model, without processes: torch's fake process group."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from local_ranks import LocalLauncher
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.model_schema import LoraConfig, ModelConfig
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.learner.sharding import RankSettings, ShardedModel, make_meshes
from magicrl.models.adapters import LoraAdapters
from magicrl.models.loading import load_empty, load_policy, load_shell
from magicrl.training.objective import LearnerSettings

LORA = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "down_proj"))


@contextmanager
def one_of(ranks: int, rank: int) -> Generator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def read_by(folder: Path, ranks: int, rank: int, model: ModelConfig) -> dict[str, Tensor]:
    """Return the rows that a rank holds after its start."""
    with one_of(ranks, rank):
        settings = RankSettings(folder=str(folder), learning=LearnerSettings(model=model))
        sharded = ShardedModel(settings, make_meshes("cpu", 1), torch.device("cpu"))
        named = sharded.model.named_parameters(remove_duplicate=False)
        return {name: cast(DTensor, parameter.data).to_local().clone() for name, parameter in named}


# the largest parameter has 48 rows: of 36 ranks the last one holds nothing
@pytest.mark.parametrize(("ranks", "chosen"), [(1, (0,)), (3, (0, 1, 2)), (36, (0, 17, 35))])
def test_ranks_hold_the_rows_that_sharding_the_loaded_model_gives(
    start_folder: Path, ranks: int, chosen: tuple[int, ...]
) -> None:
    whole = dict(load_policy(start_folder).model.named_parameters(remove_duplicate=False))
    empty = 0
    for rank in chosen:
        found = read_by(start_folder, ranks, rank, ModelConfig(dtype="float32"))
        assert found.keys() == whole.keys()
        for name, parameter in whole.items():
            parts = parameter.detach().chunk(ranks)
            expected = parts[rank] if rank < len(parts) else parameter.detach()[:0]
            assert torch.equal(found[name], expected), name
            empty += not len(expected)
    assert (empty > 0) == (ranks == 36)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_start_from_the_same_values_on_ranks_and_in_one_process(start_folder: Path, dtype: str) -> None:
    single = LoraAdapters(load_policy(start_folder).model, LORA)
    expected = {name: parameter.detach() for name, parameter in single.model.named_parameters()}
    starts = LoraAdapters(load_empty(start_folder), LORA).start_values()
    assert starts.keys() == {name for name in expected if ".lora_" in name}
    for name, value in starts.items():
        assert torch.equal(value, expected[name]), name
        assert value.any() == (".lora_A." in name)
    model = ModelConfig(dtype="float32" if dtype == "float32" else "bfloat16", lora=LORA)
    parts = [read_by(start_folder, 4, rank, model) for rank in range(4)]
    for name, value in expected.items():
        rows = torch.cat([part[name] for part in parts])
        trained = ".lora_" in name
        assert rows.dtype == (torch.float32 if trained or dtype == "float32" else torch.bfloat16)
        assert torch.equal(rows, value.to(rows.dtype)), name


@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning")  # warning of the counter
@pytest.mark.parametrize(
    ("settings", "inner", "last"),
    [
        ({}, {"_reduce_scatter_base_": 6}, {"_reduce_scatter_base_": 6}),
        ({"shard_ranks": 2}, {"_reduce_scatter_base_": 6}, {"_reduce_scatter_base_": 6, "allreduce_": 6}),
        ({"reduce_once": True}, {}, {"_reduce_scatter_base_": 6}),
        (
            {"shard_ranks": 2, "reduce_dtype": "bfloat16"},
            {"_reduce_scatter_base_": 6, "allreduce_": 6},
            {"_reduce_scatter_base_": 6, "allreduce_": 6},
        ),
    ],
)
def test_what_a_pass_exchanges(
    untied_folder: Path, settings: dict[str, Any], inner: dict[str, int], last: dict[str, int]
) -> None:
    """Three layers, embedding, head and the norm: six units. Only layers are gathered for both directions."""
    with one_of(4, 0):
        placement = LearnerPlacement(ranks=4, **settings)
        told = RankSettings(folder=str(untied_folder), placement=placement)
        sharded = ShardedModel(told, make_meshes("cpu", 1, placement.shard_ranks), torch.device("cpu"))
        units = [prefix for prefix, _ in sharded.units()]
        assert units == [*(f"model.layers.{i}." for i in range(3)), "model.embed_tokens.", "lm_head.", ""]
        model: Any = sharded.model
        model.set_attn_implementation("sdpa")
        for is_last, expected in ((False, inner), (True, last)):
            sharded.begin_pass(last=is_last)
            with CommDebugMode() as traffic:
                loss = sharded.run(
                    lambda: sharded.with_head(
                        lambda hidden: (hidden @ model.lm_head.weight.T).float().sum(),
                        model.model(torch.arange(5)[None], use_cache=False).last_hidden_state,
                    )
                )
                loss.backward()
            found = {str(kind).rpartition(".")[2]: count for kind, count in traffic.get_comm_counts().items()}
            assert found == {"_allgather_base_": 9, **expected}


@pytest.mark.slow
def test_a_weight_that_only_one_rank_sees_to_be_broken_is_the_models_error(start_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(start_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][-1, 0] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    launcher = LocalLauncher(grace=1.0, environment={"OMP_NUM_THREADS": "1"})
    model = ModelConfig(dtype="float32")
    with pytest.raises(ValueError, match=r"weight model\.layers\.2\.mlp\.up_proj\.weight holds values that are not"):
        DistributedLearner(
            load_shell(folder),
            LearnerSettings(model=model),
            launcher=launcher,
            placement=LearnerPlacement(ranks=2),
            threads=1,
        )
