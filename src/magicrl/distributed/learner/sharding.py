"""The single learner's model, optimizer, scorer and state on shards, by FSDP2.

Each decoder layer is a unit, so are an embedding and a head of its own; the rest (the last norm, an embedding that is
the head, too) is one. Parameters are float32 shards on dimension 0, gathered in the compute precision a unit at a time.
Gradients are summed over ranks, never averaged: every loss is an additive share of the mini-batch's. With fewer shards
than ranks (HSDP) a micro-batch's sum stays among the ranks of one copy, and copies exchange theirs once an update.
The state is written as safetensors under the keys of the single learner's checkpoint, one file a rank in the form of
``torch.distributed.checkpoint``, so that any number of ranks, or one process without any, reads them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.model_schema import AdamWConfig, LoraConfig
from magicrl.distributed.learner.ulysses import SequenceSlice, check_degree
from magicrl.files import sha256_of
from magicrl.models.loading import load_empty, resolve_dtype
from magicrl.models.memory_efficient import use_memory_efficient_layers
from magicrl.models.model_files import WeightFiles, find_model
from magicrl.models.packing import PackedBatch
from magicrl.models.scorer import PolicyScorer
from magicrl.records import TrainSample, frozen_floats, frozen_tokens
from magicrl.training.adapters import LoraAdapters
from magicrl.training.checkpoint import host_copy
from magicrl.training.learner import LossScale, MasterOptimizer, square_sum
from magicrl.training.objective import LearnerSettings

LOCAL_RANK = "MAGICRL_LOCAL_RANK"
"""Environment variable: a rank's number among those of its machine, where they share its GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """The same on all ranks."""

    folder: str  # the start model, a folder that every rank can read or a hub name
    learning: LearnerSettings = field(default_factory=LearnerSettings)
    valid_vocab: int | None = None  # rows of the output head that are words; None means all
    # ``shard_ranks`` None means all: the learner has settled how many it is before the ranks get this
    placement: LearnerPlacement = field(default_factory=LearnerPlacement)
    device: Literal["cpu", "cuda"] = "cpu"  # ``cuda`` gives every rank one GPU
    shares_gpus: bool = False  # rollout engines use the ranks' GPUs in turn with them
    threads: int | None = None  # torch threads of a rank; None leaves torch's default
    reference: str | None = None  # the frozen reference model, as ``folder``; None: there is none
    reference_vocab: int | None = None  # as ``valid_vocab``, of the reference


T = TypeVar("T")


def _given(work: Callable[[Tensor], T], hidden: Tensor) -> T:
    return work(hidden)


class _Root(nn.Module):
    """Runs what it is given while the parameters outside the layers (embeddings, head, last norm) are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Who exchanges what with whom."""

    shards: DeviceMesh  # the ranks of one copy of the model; of several copies ``[copies, ranks of one]``
    sequence: dist.ProcessGroup | None  # the ranks that share this rank's micro-batches; None if it has them alone

    @staticmethod
    def make(device: str, sequence_parallel: int, shard_ranks: int | None = None) -> Meshes:
        """Neighbours share sequences, and a copy of the model: ranks ``k * degree`` to ``(k + 1) * degree - 1``."""
        ranks = dist.get_world_size()
        each = shard_ranks or ranks
        copies = {"copy": ranks // each} if each < ranks else {}
        shards = init_device_mesh(device, (*copies.values(), each), mesh_dim_names=(*copies, "shard"))
        sequence = None
        if sequence_parallel > 1:
            grid = (ranks // sequence_parallel, sequence_parallel)
            sequence = init_device_mesh(device, grid, mesh_dim_names=("share", "sequence"))["sequence"].get_group()
        return Meshes(shards=shards, sequence=sequence)


class ShardedModel:
    """The policy over all ranks; every method is called by all of them in the same order.

    The parameters of ``model`` are shards but within ``run`` and ``whole``. Without ``fill`` they have shapes and no
    data (a dry run). With ``frozen`` it is the reference: nothing is trained, and shards are in the compute precision.
    """

    def __init__(
        self,
        settings: RankSettings,
        meshes: Meshes,
        device: torch.device,
        *,
        frozen: bool = False,
        fill: bool = True,
    ) -> None:
        self.device, self.meshes, self._placement = device, meshes, settings.placement
        self._dtype = resolve_dtype(settings.learning.model.dtype)
        source = settings.reference if frozen else settings.folder
        assert source is not None, "there is a reference"
        shell = load_empty(source)
        check_degree(shell.config, settings.placement.sequence_parallel)
        files = WeightFiles(find_model(source), shell, source) if fill else None
        self.model, self.lora = self._trained(shell, None if frozen else settings.learning.model.lora, frozen=frozen)
        self._layers = {
            name: layer for name, layer in self.model.named_modules() if isinstance(layer, GradientCheckpointingLayer)
        }
        if not self._layers:
            raise ValueError(f"{type(self.model).__name__} has no decoder layers that transformers marks as such")
        embedding: Any = self.model.get_input_embeddings()
        self._head: Any = self.model.get_output_embeddings()
        # a tied weight is needed first and last: it stays with the root
        ends = () if embedding.weight is self._head.weight else (embedding, self._head)
        self._ends = {name: module for name, module in self.model.named_modules() if module in ends}
        self._root = self._sharded(settings.placement)
        if files is not None:
            self._fill(files, "cpu" if settings.placement.offload_optimizer else self.device)
            self.run(lambda: None)  # FSDP settles who is the root
            self._root.reshard()

    def _trained(
        self, model: PreTrainedModel, of: LoraConfig | None, *, frozen: bool
    ) -> tuple[PreTrainedModel, LoraAdapters | None]:
        """The model with its adapters, its frozen weights in the compute precision."""
        model.requires_grad_(not frozen)
        lora = None if of is None else LoraAdapters(model, of)
        found = model if lora is None else lora.model
        for parameter in found.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self._dtype)
        return found, lora

    def _sharded(self, placement: LearnerPlacement) -> FSDPModule:
        narrow = self._dtype if self._dtype != torch.float32 else None
        options: dict[str, Any] = {
            "mesh": self.meshes.shards,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=narrow, reduce_dtype=resolve_dtype(placement.reduce_dtype), cast_forward_inputs=False
            ),
            "offload_policy": (
                CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
                if placement.offload_optimizer
                else OffloadPolicy()
            ),
        }
        for module in (*self._layers.values(), *self._ends.values()):
            # the head's backward pass follows its forward pass at once
            fully_shard(module, reshard_after_forward=module is not self._head, **options)
            if module in self._ends.values() and module is not self._head:
                cast(FSDPModule, module).set_unshard_in_backward(unshard_in_backward=False)  # a look-up needs no weight
        # gathered once a micro-batch: what is left stays whole from forward to backward
        root = fully_shard(_Root(self.model), reshard_after_forward=False, **options)
        if self._ends:  # hidden states come as an argument: past their gradient the head is sharded again
            self._head.with_weights = _given
            register_fsdp_forward_method(self._head, "with_weights")
        for unit in (*self._layers.values(), *self._ends.values(), root):
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
            start, stop = rows_of(shard)
            if start == stop:
                continue
            rows = adapters[name][start:stop] if name in adapters else files.rows(_plain(name), start, stop)
            shard.to_local().copy_(rows)

    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters' shards (``DTensor``) by name, each tied one once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work``, in which the model may be used, forward with or without gradient."""
        found = cast(T, cast(nn.Module, self._root)(work))
        if not torch.is_grad_enabled():
            for unit in (self._root, *self._ends.values()):
                cast(FSDPModule, unit).reshard()  # nothing follows that would; kept, it would be stale after an update
        return found

    def with_head(self, work: Callable[[Tensor], T], hidden: Tensor) -> T:
        """``work(hidden)``, in which the head's weight may be used; within `run`."""
        return self._head.with_weights(work, hidden) if self._ends else work(hidden)

    def begin_pass(self, *, last: bool) -> None:
        """Told before each pass of a mini-batch: which sums over ranks wait for the last one."""
        placement = self._placement
        # FSDP waits for a gradient on its way to the host's memory only where a backward pass is the last
        self._root.set_is_last_backward(last or placement.offload_optimizer)
        if placement.reduce_once:
            self._root.set_requires_gradient_sync(last)
        else:
            # FSDP adds micro-batches up in the precision of the sum, until copies of the model exchange theirs
            self._root.set_requires_all_reduce(last or placement.reduce_dtype == "bfloat16")

    @contextlib.contextmanager
    def whole(self, unit: FSDPModule) -> Generator[None]:
        """Within, the unit's own parameters are whole, in the compute precision."""
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()

    def units(self) -> list[tuple[str, FSDPModule]]:
        """Layers, embedding and head by the start of their parameters' names, then (as ``""``) what is left."""
        named = {**self._layers, **self._ends}
        return [*((f"{name}.", cast(FSDPModule, unit)) for name, unit in named.items()), ("", self._root)]

    @torch.no_grad()
    def weights(self, keep: bool) -> dict[str, Tensor]:
        """All weights by their names before sharding, LoRA merged, in the compute precision on the CPU, or {}."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.stream():
            if keep:
                found[name] = tensor.detach().to("cpu", copy=True)
        names = [_plain(name) for name, _ in self.model.named_parameters() if ".lora_" not in name]
        return {name: found[name] for name in names} if keep else {}

    @torch.no_grad()
    def adapters(self, keep: bool) -> dict[str, Tensor]:
        """The LoRA adapters by PEFT's names, whole, in the compute precision on the CPU, or {}."""
        assert self.lora is not None
        found: dict[str, Tensor] = {}
        for name, layer in self._layers.items():  # adapters are in decoder layers alone
            with self.whole(cast(FSDPModule, layer)):
                if keep:
                    part = self.lora.tensors(f"{name}.")
                    found |= {name: tensor.to(self._dtype).cpu().clone() for name, tensor in part.items()}
        return found

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights as `weights` has them, each until the next is asked for; all ranks go to its end."""
        prefixes = tuple(prefix for prefix, _ in self.units() if prefix)
        for prefix, unit in self.units():
            with self.whole(unit):
                yield from self._part(prefix, prefixes).items()

    def _part(self, prefix: str, layers: tuple[str, ...]) -> Mapping[str, Tensor]:
        if prefix[:-1] in self._layers and self.lora is not None:
            return self.lora.merged_weights(prefix)
        named = dict(self.model.named_parameters())
        mine = (n for n in named if (n.startswith(prefix) if prefix else not n.startswith(layers)))
        return {name: named[name] for name in mine}


def _plain(name: str) -> str:
    """A weight's name in a model without adapters."""
    return name.replace(".base_layer.", ".")


class ShardOptimizer(MasterOptimizer):
    """``MasterOptimizer`` whose masters are the local rows of sharded float32 parameters (``DTensor``).

    Sums over ranks are exchanged on ``device``. ``dtype`` is what the gathered weights compute in.
    """

    def __init__(
        self, sharded: Mapping[str, nn.Parameter], config: AdamWConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._sharded = {name: cast(DTensor, parameter) for name, parameter in sharded.items()}
        self._device = device
        self._shards = next(iter(self._sharded.values())).device_mesh.get_group(-1)
        # the same memory: what AdamW changes here is what FSDP gathers
        local = {name: nn.Parameter(p.to_local().detach()) for name, p in self._sharded.items()}
        super().__init__(local, config, torch.float32)
        self.loss_scale = LossScale(dynamic=dtype == torch.float16)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's rows of the gradients, summed over ranks already."""
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                self._compute[name].grad = cast(DTensor, parameter.grad).to_local()
        return super().gradients()

    def gradient_norm(self) -> float:
        """Global L2 norm, the same on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in self.gradients().values():
            total += square_sum(gradient).to(self._device)
        dist.all_reduce(total, group=self._shards)  # of one copy: every copy has the same
        return math.sqrt(float(total))

    def weights_are_finite(self) -> bool:
        """Whether every rank's masters are."""
        found = torch.tensor(int(super().weights_are_finite()), device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    def forget(self) -> None:
        """Drop the collected gradients."""
        for parameter in self._sharded.values():
            parameter.grad = None
        super().forget()

    def sharded_state(self) -> dict[str, DTensor]:
        """The tensors of ``state`` as shards of whole ones, under the same keys; they share memory with it."""
        local = {key: value for key, value in self.state().items() if isinstance(value, Tensor)}
        return {key: self._as_shard(key, value) for key, value in local.items()}

    def empty_state(self, steps: int) -> dict[str, DTensor]:
        """Shards as ``sharded_state`` after ``steps`` steps, their values yet to be read."""
        kinds = ("weights", "exp_avg", "exp_avg_sq") if steps else ("weights",)
        shapes = {f"{kind}/{name}": p for kind in kinds for name, p in self._sharded.items()}
        return {key: self._as_shard(key, torch.empty_like(p.to_local())) for key, p in shapes.items()}

    def restore_shards(self, shards: Mapping[str, DTensor], meta: Mapping[str, Any]) -> None:
        """Take this rank's rows of ``shards`` (keys as ``empty_state``); ``meta`` as ``state`` has it."""
        local = {key: value.to_local() for key, value in shards.items()}
        self.restore({**local, "meta": meta})

    def restore_whole(
        self, shapes: Mapping[str, tuple[int, ...]], whole: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> None:
        """Take over a state of these ``shapes``, whose tensors are in ``whole`` on rank 0 and nowhere else.

        Raises:
            ValueError: the state's parameters are not this model's, on every rank.
        """
        shards = self.empty_state(int(meta["optimizer_steps"]))
        _check_shapes("the checkpoint", shapes, shards)
        for key, shard in shards.items():
            given = whole[key] if whole else torch.empty(shard.shape, dtype=shard.dtype)
            given = given.to(self._device, shard.dtype).contiguous()
            part = distribute_tensor(given, shard.device_mesh, shard.placements)
            shard.to_local().copy_(part.to_local())
        self.restore_shards(shards, meta)

    def _as_shard(self, key: str, local: Tensor) -> DTensor:
        like = self._sharded[key.split("/", 1)[1]]
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def whole_state(self, keep: bool) -> dict[str, Any]:
        """The tensors of ``state`` gathered one by one to the CPU; kept where ``keep`` is true."""
        found: dict[str, Any] = {}
        for key, shard in self.sharded_state().items():
            tensor = cast(DTensor, shard.to(self._device)).full_tensor()
            if keep:
                found[key] = tensor.cpu().clone() if tensor.device.type == "cpu" else tensor.cpu()
        return found


def rows_of(shard: DTensor) -> tuple[int, int]:
    """Which rows this rank has: FSDP gives all ranks as many, and the last ones what is left, maybe none."""
    assert shard.placements[-1] == Shard(0)
    each = -(-shard.shape[0] // shard.device_mesh.size(-1))
    first = shard.device_mesh.get_local_rank(-1) * each
    return min(first, shard.shape[0]), min(first + each, shard.shape[0])


class ShardWriter:
    """Writes a rank's rows of the state beside training, as ``torch.distributed.checkpoint`` reads them.

    Nothing is exchanged with other ranks. torch's own ``async_save`` exchanges plans, and its writer for safetensors
    makes one ``bytes`` of a whole shard under Python's lock, which training waits for.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "shards")
        self._begun: Future[WrittenShard] | None = None

    def begin(self, folder: Path, state: Mapping[str, DTensor]) -> None:
        """Copy this rank's rows to the host's memory and begin to write them; of several copies of the model the
        first one's ranks write."""
        mine = {key: shard for key, shard in state.items() if _writes(shard)}
        rows = host_copy({key: shard.to_local() for key, shard in mine.items()})
        offsets = {key: [rows_of(shard)[0], *[0] * (shard.ndim - 1)] for key, shard in mine.items()}
        # as the reader wants it
        header = {"DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": found} for key, found in offsets.items()})}
        file = folder / f"shard-{dist.get_rank() + 1:05d}.safetensors"
        self._begun = self._thread.submit(_written, file, rows, header)

    def written(self, *, wait: bool) -> WrittenShard | None:
        """What became of it; None while it is being written."""
        assert self._begun is not None, "it was begun"
        return self._begun.result() if wait or self._begun.done() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """What became of a rank's rows."""

    file: tuple[str, str] | None = None  # name and SHA-256; None: it holds no rows
    error: str | None = None  # why they are not written


def _writes(shard: DTensor) -> bool:
    first, stop = rows_of(shard)
    return stop > first and (shard.device_mesh.ndim == 1 or shard.device_mesh.get_local_rank(0) == 0)


def _written(file: Path, rows: dict[str, Tensor], header: dict[str, str]) -> WrittenShard:
    if not rows:
        return WrittenShard()
    try:
        save_file(rows, file, header)
        with file.open("rb") as written:
            os.fsync(written.fileno())  # here: another machine cannot do it for this one
        return WrittenShard(file=(file.name, sha256_of(file)))
    except (OSError, SafetensorError) as error:
        return WrittenShard(error=str(error))


def verify_shards(folder: Path, files: Mapping[str, str], rank: int, ranks: int) -> None:
    """Raise ``ValueError`` if one of this rank's part of the files is missing or is not what was written."""
    for name in sorted(files)[rank::ranks]:
        file = folder / name
        if not file.is_file() or sha256_of(file) != files[name]:
            what = "does not have the checksum it was written with" if file.is_file() else "is missing"
            raise ValueError(f"{file} {what}; resume from the checkpoint before it")


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill ``into`` (shards, or whole tensors in one process) from ``folder``; ``ValueError`` if it holds others."""
    reader = HuggingFaceStorageReader(str(folder))
    found = {key: tuple(entry.size) for key, entry in reader.read_metadata().state_dict_metadata.items()}  # pyright: ignore[reportAttributeAccessIssue]
    _check_shapes(str(folder), found, into)
    # each rank plans for itself: one that finds a fault alone would leave the others waiting in a collective
    load(dict(into), storage_reader=reader, no_dist=True)


def _check_shapes(what: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]) -> None:
    expected = {key: tuple(tensor.shape) for key, tensor in wanted.items()}
    if dict(found) != expected:
        differing = sorted(set(found.items()) ^ set(expected.items()))[:3]
        raise ValueError(
            f"{what} does not belong to this model: it differs in {[name for name, _ in differing]} "
            f"({len(found)} tensors there, {len(expected)} expected); resume with the recipe that wrote it"
        )


NOTHING = TrainSample(
    # some tokens: a compiled layer would have a graph of its own for one
    prompt_tokens=frozen_tokens([0] * 16),
    tokens=frozen_tokens([0]),
    advantage=0.0,
    group_index=0,
    sample_index=0,
    sampler_logprobs=frozen_floats([0.0]),
    policy_version=0,
    loss_mask=np.zeros(1, dtype=np.bool_),
    old_logprobs=frozen_floats([0.0]),
    ref_logprobs=frozen_floats([0.0]),
    policy_mask=np.ones(1, dtype=np.bool_),
)
"""A sample without loss: what a rank passes through the model while others still have work."""


class ShardedScorer(PolicyScorer):
    """``PolicyScorer`` whose passes gather the model as they go; every rank makes as many passes as the others."""

    def __init__(self, sharded: ShardedModel, **settings: Any) -> None:
        self._sharded = sharded
        super().__init__(sharded.model, **settings)

    @property
    def device(self) -> torch.device:
        return self._sharded.device

    def micro_batches(self, samples: Sequence[TrainSample]) -> Iterator[tuple[list[int], PackedBatch]]:
        """As many on every rank, since each pass gathers weights: a rank with fewer ends with empty ones."""
        plan, shared = self.plan(samples)
        most = torch.tensor(max(1, len(plan)), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        passes = plan + [[] for _ in range(int(most) - len(plan))]
        for number, members in enumerate(passes, start=1):
            self._sharded.begin_pass(last=number == len(passes))
            yield members, self.pack([samples[i] for i in members] or [NOTHING], shared=shared)

    def forward(
        self, batch: PackedBatch, temperature: float, *, head_gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``PolicyScorer.forward``; with sequence parallelism every rank of the group has the whole result."""
        assert head_gradient is None, "a shard's gradient is summed over ranks, the head's among them"
        group = self._sharded.meshes.sequence
        if group is None:
            return self._sharded.run(lambda: super(ShardedScorer, self).forward(batch, temperature))
        part = SequenceSlice.of(batch, group)

        def own() -> tuple[Tensor, Tensor]:
            hidden = self._hidden(part.input_ids, part.position_ids, part.attention)
            return self._head(hidden.index_select(0, part.predict_index), part.targets, temperature)

        logprobs, entropies = self._sharded.run(own)
        return part.gathered(logprobs, group), part.gathered(entropies, group)

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._sharded.with_head(
            lambda given: super(ShardedScorer, self)._head(given, targets, temperature, gradient), hidden
        )

    @torch.no_grad()
    def _use_memory_efficient_layers(self) -> None:
        """The probe of each layer needs its weights whole."""
        units = self._sharded.units()
        layers = {unit for prefix, unit in units if prefix}
        inside = {module for layer in layers for module in layer.modules()}  # pyright: ignore[reportAttributeAccessIssue]
        for prefix, unit in units:
            with self._sharded.whole(unit):
                outside = [m for m in self.model.modules() if m not in inside and not list(m.children())]
                for module in [unit] if prefix else outside:
                    use_memory_efficient_layers(module)  # pyright: ignore[reportArgumentType]

    def _within(self, work: Callable[[], Tensor]) -> Tensor:
        return self._sharded.run(work)

    def _check_model(self) -> None:
        with torch.no_grad():
            self._sharded.run(super()._check_model)
