"""A Hugging Face model spread over ranks by FSDP2, each decoder layer a unit, the rest one.

Parameters are float32 shards on dimension 0, gathered in the compute precision a layer at a time. Gradients of all
micro-batches are summed over ranks in float32, never averaged: every loss is an additive share of the mini-batch's.

The start model is read by rank 0 alone; the others build an empty one and receive their shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from magicrl.distributed.learner.settings import LearnerSettings
from magicrl.distributed.learner.ulysses import check_degree
from magicrl.models.loading import load_empty, load_policy, resolve_dtype
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

    def __init__(self, settings: LearnerSettings, meshes: Meshes, device: torch.device, *, fill: bool = True) -> None:
        self.device, self.meshes = device, meshes
        self._dtype = resolve_dtype(settings.model.dtype)
        with torch.device("meta"):
            shell = load_empty(settings.folder)
            check_degree(shell.config, settings.sequence_parallel)
            self.model, self.lora = self._trained(shell, settings)
        self._layers = {
            name: layer for name, layer in self.model.named_modules() if isinstance(layer, GradientCheckpointingLayer)
        }
        if not self._layers:
            raise ValueError(f"{type(self.model).__name__} has no decoder layers that transformers marks as such")
        self._root = self._sharded(settings)
        if fill:
            self._fill(settings)
            self.run(lambda: None)  # FSDP settles who is the root
            self._reshard_root()

    def _trained(
        self, model: PreTrainedModel, settings: LearnerSettings
    ) -> tuple[PreTrainedModel, LoraAdapters | None]:
        """The model with its adapters, its frozen weights in the compute precision."""
        model.requires_grad_(True)
        if settings.model.lora is None:
            return model, None
        lora = LoraAdapters(model, settings.model.lora)
        for parameter in lora.model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self._dtype)
        return lora.model, lora

    def _sharded(self, settings: LearnerSettings) -> FSDPModule:
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

    def _fill(self, settings: LearnerSettings) -> None:
        """Every rank's shards and buffers from the start model that rank 0 reads."""
        whole: PreTrainedModel | None = None
        if dist.get_rank() == 0:
            loaded = load_policy(settings.folder, dtype="float32").model
            whole, _ = self._trained(loaded, settings)
        cast(nn.Module, self._root).to_empty(device="cpu" if settings.offload else self.device)
        given = {} if whole is None else dict(whole.state_dict())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, given, options=options)
        source = {} if whole is None else dict(whole.named_buffers())
        for name, buffer in list(self.model.named_buffers()):
            made = torch.empty_like(buffer, device=self.device)
            if name in source:
                made.copy_(source[name])
            dist.broadcast(made, src=0)
            module, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(module), leaf, made)

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
        prefixes = tuple(prefix for prefix, _ in self.units() if prefix)
        for prefix, unit in self.units():
            with self.whole(unit):
                if keep:
                    part = self._part(prefix, prefixes)
                    found.update({name: tensor.detach().cpu().clone() for name, tensor in part.items()})
        names = [n.replace(".base_layer.", ".") for n, _ in self.model.named_parameters() if ".lora_" not in n]
        return {name: found[name] for name in names} if keep else {}

    def _part(self, prefix: str, layers: tuple[str, ...]) -> Mapping[str, Tensor]:
        if prefix and self.lora is not None:
            return self.lora.merged_weights(prefix)
        named = dict(self.model.named_parameters())
        mine = (n for n in named if (n.startswith(prefix) if prefix else not n.startswith(layers)))
        return {name: named[name] for name in mine}

    def _reshard_root(self) -> None:
        self._root.reshard()
