"""A Hugging Face model spread over ranks by FSDP2, each decoder layer a unit, the rest one.

Parameters are float32 shards on dimension 0, gathered in the compute precision a layer at a time. Gradients of all
micro-batches are summed over ranks in float32, never averaged: every loss is an additive share of the mini-batch's.

Every rank builds an empty model and reads its own rows of the start model's weights from the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from magicrl.distributed.learner.settings import RankSettings
from magicrl.distributed.learner.ulysses import check_degree
from magicrl.models.loading import load_empty, resolve_dtype
from magicrl.models.model_files import WeightFiles, find_model
from magicrl.training.lora import LoraAdapters

T = TypeVar("T")


class _Root(nn.Module):
    """Runs what it is given while the parameters outside the layers (embeddings, head, last norm) are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Who exchanges what with whom.

    Attributes:
        all: every rank: shards, gradients, sums.
        sequence: the ranks that share this rank's micro-batches; None if it has them alone.
        share: which share of a mini-batch this rank works on.
    """

    all: DeviceMesh
    sequence: dist.ProcessGroup | None
    share: int

    @staticmethod
    def make(device: str, sequence_parallel: int) -> Meshes:
        """Neighbouring ranks share sequences: ranks ``k * degree`` to ``(k + 1) * degree - 1``."""
        ranks = dist.get_world_size()
        sequence = None
        if sequence_parallel > 1:
            grid = (ranks // sequence_parallel, sequence_parallel)
            sequence = init_device_mesh(device, grid, mesh_dim_names=("share", "sequence"))["sequence"].get_group()
        return Meshes(
            all=init_device_mesh(device, (ranks,), mesh_dim_names=("all",)),
            sequence=sequence,
            share=dist.get_rank() // sequence_parallel,
        )


class ShardedModel:
    """The policy over all ranks; every method is called by all of them in the same order.

    Attributes:
        model: the causal LM; its parameters are shards but within ``run`` and ``whole``.
        device: where it computes.
        meshes: see there.
        lora: adapters, or None.

    Args:
        settings: the learner's.
        meshes: see there.
        device: where it computes.
        fill: load the start model; without, the parameters have shapes and no data (a dry run).
    """

    def __init__(self, settings: RankSettings, meshes: Meshes, device: torch.device, *, fill: bool = True) -> None:
        self.device, self.meshes = device, meshes
        self._dtype = resolve_dtype(settings.learning.model.dtype)
        shell = load_empty(settings.folder)
        check_degree(shell.config, settings.sequence_parallel)
        files = WeightFiles(find_model(settings.folder), shell, settings.folder) if fill else None
        self.model, self.lora = self._trained(shell, settings)
        self._layers = {
            name: layer for name, layer in self.model.named_modules() if isinstance(layer, GradientCheckpointingLayer)
        }
        if not self._layers:
            raise ValueError(f"{type(self.model).__name__} has no decoder layers that transformers marks as such")
        self._root = self._sharded(settings)
        if files is not None:
            self._fill(files, "cpu" if settings.offload else self.device)
            self.run(lambda: None)  # FSDP settles who is the root
            self._reshard_root()

    def _trained(self, model: PreTrainedModel, settings: RankSettings) -> tuple[PreTrainedModel, LoraAdapters | None]:
        """The model with its adapters, its frozen weights in the compute precision."""
        model.requires_grad_(True)
        if settings.learning.model.lora is None:
            return model, None
        lora = LoraAdapters(model, settings.learning.model.lora)
        for parameter in lora.model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self._dtype)
        return lora.model, lora

    def _sharded(self, settings: RankSettings) -> FSDPModule:
        narrow = self._dtype if self._dtype != torch.float32 else None
        options: dict[str, Any] = {
            "mesh": self.meshes.all,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            "offload_policy": (
                CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if settings.offload else OffloadPolicy()
            ),
        }
        for layer in self._layers.values():
            fully_shard(layer, **options)
        # gathered once a micro-batch: head and tied embedding stay whole from forward to backward
        root = fully_shard(_Root(self.model), reshard_after_forward=False, **options)
        for unit in (*self._layers.values(), root):
            cast(FSDPModule, unit).set_gradient_divide_factor(1.0)
            cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)
        return root

    def _fill(self, files: WeightFiles, device: torch.device | str) -> None:
        """This rank's rows of the start model, read and converted a parameter at a time, and all buffers."""
        buffers = dict(self.model.named_buffers())
        cast(nn.Module, self._root).to_empty(device=device)
        for name, computed in buffers.items():
            module, _, leaf = name.rpartition(".")
            stored = files.whole(name)
            setattr(self.model.get_submodule(module), leaf, (computed if stored is None else stored).to(self.device))
        adapters = self.lora.start_values() if self.lora is not None else {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            shard = cast(DTensor, parameter.data)
            start, stop = self._rows(shard)
            if start == stop:
                continue
            rows = adapters[name][start:stop] if name in adapters else files.rows(_plain(name), start, stop)
            shard.to_local().copy_(rows)

    def _rows(self, shard: DTensor) -> tuple[int, int]:
        """Which rows this rank has: FSDP gives all ranks as many, and the last ones what is left, maybe none."""
        assert shard.placements == (Shard(0),)
        each = -(-shard.shape[0] // self.meshes.all.size())
        first = self.meshes.all.get_local_rank() * each
        return min(first, shard.shape[0]), min(first + each, shard.shape[0])

    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters' shards (``DTensor``) by name, each tied one once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work``, in which the model may be used, forward with or without gradient."""
        found = cast(T, cast(nn.Module, self._root)(work))
        if not torch.is_grad_enabled():
            self._reshard_root()  # nothing follows that would; kept, it would be stale after an update
        return found

    @contextlib.contextmanager
    def whole(self, unit: FSDPModule) -> Generator[None]:
        """Within, the unit's own parameters are whole, in the compute precision."""
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()

    def units(self) -> list[tuple[str, FSDPModule]]:
        """Layers by the start of their parameters' names, then (as ``""``) what is left."""
        layers = [(f"{name}.", cast(FSDPModule, layer)) for name, layer in self._layers.items()]
        return [*layers, ("", self._root)]

    @torch.no_grad()
    def weights(self, keep: bool) -> dict[str, Tensor]:
        """All weights by their names before sharding, LoRA merged, in the compute precision on the CPU.

        Gathered a unit at a time; kept where ``keep`` is true, elsewhere dropped at once.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in self.stream():
            if keep:
                found[name] = tensor.detach().cpu().clone()
        names = [_plain(name) for name, _ in self.model.named_parameters() if ".lora_" not in name]
        return {name: found[name] for name in names} if keep else {}

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights as `weights` has them, on the device, each until the next one is asked for.

        All ranks have to go through it to its end together.
        """
        prefixes = tuple(prefix for prefix, _ in self.units() if prefix)
        for prefix, unit in self.units():
            with self.whole(unit):
                yield from self._part(prefix, prefixes).items()

    def _part(self, prefix: str, layers: tuple[str, ...]) -> Mapping[str, Tensor]:
        if prefix and self.lora is not None:
            return self.lora.merged_weights(prefix)
        named = dict(self.model.named_parameters())
        mine = (n for n in named if (n.startswith(prefix) if prefix else not n.startswith(layers)))
        return {name: named[name] for name in mine}

    def _reshard_root(self) -> None:
        self._root.reshard()


def _plain(name: str) -> str:
    """A weight's name in a model without adapters."""
    return name.replace(".base_layer.", ".")
