"""Model, optimizer, scorer and state of the single learner, sharded with FSDP2.

Each decoder layer is one FSDP unit, and so are an embedding and an untied head. Everything else (the last norm, and an
embedding that is also the head) is one unit. Parameters are float32 shards along dimension 0, gathered in the compute
precision one unit at a time. Gradients are summed over ranks, never averaged, because every rank's loss is an additive
part of the mini-batch's loss. With fewer shards than ranks (HSDP), a micro-batch's gradients are summed within one copy
of the model, and the copies exchange their sums once per update. The state is written as safetensors under the keys of
the single learner's checkpoint, one file per rank in the format of ``torch.distributed.checkpoint``. Any number of
ranks, or a single process, can read it.
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
from typing import Any, Literal, TypeAlias, TypeVar, cast

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
from transformers.modeling_layers import GradientCheckpointingLayer

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.model_schema import AdamWConfig, ModelConfig
from magicrl.distributed.learner.ulysses import SequenceSlice, check_degree
from magicrl.files import sha256_of
from magicrl.models.adapters import LoraAdapters, plain_name
from magicrl.models.loading import load_empty, resolve_dtype
from magicrl.models.memory_efficient import use_memory_efficient_layers
from magicrl.models.model_files import WeightFiles, find_model
from magicrl.models.packing import PackedBatch
from magicrl.models.scorer import PolicyScorer
from magicrl.records import TrainSample, frozen_floats, frozen_tokens
from magicrl.training.checkpoint import host_copy
from magicrl.training.learner import LossScale, MasterOptimizer, check_state_shapes, square_sum
from magicrl.training.objective import LearnerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """Settings that are the same on all ranks."""

    folder: str  # the starting model: a folder that every rank can read, or a hub name
    learning: LearnerSettings = field(default_factory=LearnerSettings)
    valid_vocab: int | None = None  # rows of the output head that are tokens; None means all
    # Here a ``shard_ranks`` of None means all ranks, because the learner has already resolved the default.
    placement: LearnerPlacement = field(default_factory=LearnerPlacement)
    device: Literal["cpu", "cuda"] = "cpu"  # ``cuda`` gives every rank one GPU
    shares_gpus: bool = False  # rollout engines and ranks use the same GPUs in turns
    threads: int | None = None  # torch threads of a rank; None leaves torch's default
    reference: str | None = None  # the frozen reference model, as ``folder``; None for no reference
    reference_vocab: int | None = None  # ``valid_vocab`` of the reference


T = TypeVar("T")


def _apply(work: Callable[[Tensor], T], hidden: Tensor) -> T:
    return work(hidden)


class _Root(nn.Module):
    """Root FSDP unit. It runs a function while the parameters outside the layers (embeddings, head, last norm) are
    gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


Meshes: TypeAlias = tuple[DeviceMesh, dist.ProcessGroup | None]
"""Ranks of one copy of the model (with several copies ``[copies, ranks per copy]``), and those that share this rank's
micro-batches (None if no other does)."""


def make_meshes(device: str, sequence_parallel: int, shard_ranks: int | None = None) -> Meshes:
    """Group neighbouring ranks: those that hold one copy of the model, and those that share sequences."""
    ranks = dist.get_world_size()
    each = shard_ranks or ranks
    # One dimension without copies: torch's HSDP path would otherwise add an all-reduce over a group of one.
    copies = {"copy": ranks // each} if each < ranks else {}
    shards = init_device_mesh(device, (*copies.values(), each), mesh_dim_names=(*copies, "shard"))
    if sequence_parallel == 1:
        return shards, None
    grid = (ranks // sequence_parallel, sequence_parallel)
    return shards, init_device_mesh(device, grid, mesh_dim_names=("share", "sequence"))["sequence"].get_group()


class ShardedModel:
    """Policy sharded over all ranks. All ranks must call every method in the same order.

    Outside of `run` and `whole`, the parameters of ``model`` are shards. Without ``fill`` they have shapes but no data
    (a dry run). With ``frozen`` this is the reference model: nothing is trained, and shards are in the compute
    precision.
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
        self.device, self._placement = device, settings.placement
        self._shards, self.sequence = meshes
        self._dtype = resolve_dtype(settings.learning.model.dtype)
        source = settings.reference if frozen else settings.folder
        assert source is not None, "there is a reference"
        shell = load_empty(source)
        check_degree(shell.config, settings.placement.sequence_parallel)
        files = WeightFiles(find_model(source), shell, source) if fill else None
        shell.requires_grad_(not frozen)
        lora = None if frozen else settings.learning.model.lora
        self.lora = None if lora is None else LoraAdapters(shell, lora)
        self.model = shell if self.lora is None else self.lora.model
        for parameter in self.model.parameters():
            if not parameter.requires_grad:  # frozen weights are in the compute precision
                parameter.data = parameter.data.to(self._dtype)
        self._layers = {
            name: layer for name, layer in self.model.named_modules() if isinstance(layer, GradientCheckpointingLayer)
        }
        if not self._layers:
            raise ValueError(f"{type(self.model).__name__} has no decoder layers that transformers marks as such")
        embedding: Any = self.model.get_input_embeddings()
        self._head: Any = self.model.get_output_embeddings()
        # A tied weight is needed first and last, so it belongs to the root unit.
        ends = () if embedding.weight is self._head.weight else (embedding, self._head)
        self._ends = {name: module for name, module in self.model.named_modules() if module in ends}
        self._root = self._sharded(settings.placement)
        if files is not None:
            self._fill(files, "cpu" if settings.placement.offload_optimizer else self.device)
            self.run(lambda: None)  # FSDP determines the root unit in the first forward pass
            self._root.reshard()

    def _sharded(self, placement: LearnerPlacement) -> FSDPModule:
        narrow = self._dtype if self._dtype != torch.float32 else None
        options: dict[str, Any] = {
            "mesh": self._shards,
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
            # The head's backward pass directly follows its forward pass.
            fully_shard(module, reshard_after_forward=module is not self._head, **options)
            if module in self._ends.values() and module is not self._head:
                # The gradient of a look-up does not need the weight.
                cast(FSDPModule, module).set_unshard_in_backward(unshard_in_backward=False)
        # The other parameters are gathered once per micro-batch and stay gathered until the backward pass ends.
        root = fully_shard(_Root(self.model), reshard_after_forward=False, **options)
        # Hidden states are an argument, so that FSDP reshards the head after their gradient.
        if self._ends:
            self._head.with_weights = _apply
            register_fsdp_forward_method(self._head, "with_weights")
        for unit in (*self._layers.values(), *self._ends.values(), root):
            # FSDP averages by default. A loss here is already divided by the tokens of the whole mini-batch.
            cast(FSDPModule, unit).set_gradient_divide_factor(1.0)
            cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)
        return root

    def _fill(self, files: WeightFiles, device: torch.device | str) -> None:
        """Load all buffers and this rank's rows of the starting model, reading and converting one parameter at a
        time."""
        # Keep the computed buffers (rotary frequencies), since ``to_empty`` discards them and files rarely store them.
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
            # FSDP gives the last ranks no rows if there are fewer rows than ranks.
            if start == stop:
                continue
            rows = adapters[name][start:stop] if name in adapters else files.rows(plain_name(name), start, stop)
            shard.to_local().copy_(rows)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the shards (``DTensor``) of the trained parameters by name, a tied one once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` with the model usable in forward passes, with or without gradient, and return its result."""
        found = cast(T, cast(nn.Module, self._root)(work))
        if not torch.is_grad_enabled():
            for unit in (self._root, *self._ends.values()):
                # Without a backward pass nothing else reshards, and gathered weights would be stale after an update.
                cast(FSDPModule, unit).reshard()
        return found

    def with_head(self, work: Callable[[Tensor], T], hidden: Tensor) -> T:
        """Return ``work(hidden)``, called with the head's weight gathered. Only inside `run`."""
        return self._head.with_weights(work, hidden) if self._ends else work(hidden)

    def begin_pass(self, *, last: bool) -> None:
        """Choose which reductions over ranks wait for the last pass. Called before each pass of a mini-batch."""
        placement = self._placement
        # FSDP waits for the copy of a gradient to CPU memory only in the last backward pass.
        self._root.set_is_last_backward(last or placement.offload_optimizer)
        if placement.reduce_once:
            self._root.set_requires_gradient_sync(last)
        else:
            # Until copies of the model exchange gradients, FSDP accumulates them in the precision of the reduction.
            self._root.set_requires_all_reduce(last or placement.reduce_dtype == "bfloat16")

    @contextlib.contextmanager
    def whole(self, unit: FSDPModule) -> Generator[None]:
        """Gather the unit's own parameters, in the compute precision, inside this context."""
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()

    def units(self) -> list[tuple[str, FSDPModule]]:
        """Layers, embedding and head by the start of their parameters' names, then (as ``""``) the rest."""
        named = {**self._layers, **self._ends}
        return [*((f"{name}.", cast(FSDPModule, unit)) for name, unit in named.items()), ("", self._root)]

    @torch.no_grad()
    def weights(self, keep: bool) -> dict[str, Tensor]:
        """All weights by their names before sharding, LoRA merged, in the compute precision on the CPU, or {}."""
        found: dict[str, Tensor] = {}
        # All ranks read every weight, because each gather is a collective. Only rank 0 keeps a copy.
        for name, tensor in self.stream():
            if keep:
                found[name] = tensor.detach().to("cpu", copy=True)
        names = [plain_name(name) for name, _ in self.model.named_parameters() if ".lora_" not in name]
        return {name: found[name] for name in names} if keep else {}

    @torch.no_grad()
    def adapters(self, keep: bool) -> dict[str, Tensor]:
        """Return the full LoRA adapters by PEFT's names, in the compute precision on the CPU; {} without ``keep``."""
        assert self.lora is not None
        found: dict[str, Tensor] = {}
        for name, layer in self._layers.items():  # only decoder layers have adapters
            with self.whole(cast(FSDPModule, layer)):
                if keep:
                    part = self.lora.tensors(f"{name}.")
                    found |= {name: tensor.to(self._dtype).cpu().clone() for name, tensor in part.items()}
        return found

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full weights as in `weights`. Each is valid until the next is requested. All ranks read to
        the end."""
        prefixes = tuple(prefix for prefix, _ in self.units() if prefix)
        for prefix, unit in self.units():
            with self.whole(unit):
                if prefix[:-1] in self._layers and self.lora is not None:
                    yield from self.lora.merged_weights(prefix).items()
                    continue
                for name, weight in self.model.named_parameters():
                    if name.startswith(prefix) if prefix else not name.startswith(prefixes):
                        yield name, weight


class ShardOptimizer(MasterOptimizer):
    """``MasterOptimizer`` whose master weights are the local rows of sharded float32 parameters (``DTensor``).

    Sums over ranks are computed on ``device``. ``dtype`` is the compute precision of the gathered weights.
    """

    def __init__(
        self, sharded: Mapping[str, nn.Parameter], config: AdamWConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._sharded = {name: cast(DTensor, parameter) for name, parameter in sharded.items()}
        self._device = device
        # The last dimension of the mesh is one copy of the model; the norm must not count the other copies.
        self._shards = next(iter(self._sharded.values())).device_mesh.get_group(-1)
        # The same memory: FSDP gathers what AdamW changes here.
        local = {name: nn.Parameter(p.to_local().detach()) for name, p in self._sharded.items()}
        super().__init__(local, config, torch.float32)
        self.loss_scale = LossScale(dynamic=dtype == torch.float16)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's rows of the gradients, which are already summed over ranks."""
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                self._compute[name].grad = cast(DTensor, parameter.grad).to_local()
        return super().gradients()

    def gradient_norm(self) -> float:
        """Return the global L2 norm, the same on every rank."""
        # In float64, so that the norm hardly depends on the number of ranks over which the squares are spread.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in self.gradients().values():
            total += square_sum(gradient).to(self._device)
        dist.all_reduce(total, group=self._shards)  # within one copy: every copy has the same gradients
        return math.sqrt(float(total))

    def weights_are_finite(self) -> bool:
        """Return whether the master weights of every rank are finite."""
        found = torch.tensor(int(super().weights_are_finite()), device=self._device)
        # All ranks must decide alike: if only one rank raised, the others would stay in a collective.
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        for parameter in self._sharded.values():
            parameter.grad = None
        super().forget()

    def sharded_state(self) -> dict[str, DTensor]:
        """Return the tensors of ``state`` under the same keys as shards of full tensors. They share memory with the
        state."""
        local = {key: value for key, value in self.state().items() if isinstance(value, Tensor)}
        return {key: self._as_shard(key, value) for key, value in local.items()}

    def empty_state(self, steps: int) -> dict[str, DTensor]:
        """Return shards as in `sharded_state` after ``steps`` updates, with values to be read later."""
        kinds = ("weights", "exp_avg", "exp_avg_sq") if steps else ("weights",)
        shapes = {f"{kind}/{name}": p for kind in kinds for name, p in self._sharded.items()}
        return {key: self._as_shard(key, torch.empty_like(p.to_local())) for key, p in shapes.items()}

    def restore_shards(self, shards: Mapping[str, DTensor], meta: Mapping[str, Any]) -> None:
        """Restore this rank's rows of ``shards`` (keys as in `empty_state`); ``meta`` as in ``state``."""
        local = {key: value.to_local() for key, value in shards.items()}
        self.restore({**local, "meta": meta})

    def restore_whole(
        self, shapes: Mapping[str, tuple[int, ...]], whole: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> None:
        """Restore a state of these ``shapes`` whose full tensors ``whole`` are on rank 0 only.

        Raises:
            ValueError: The state's parameters are not this model's. Every rank raises it.
        """
        shards = self.empty_state(int(meta["optimizer_steps"]))
        check_state_shapes("the checkpoint", shapes, {key: tuple(shard.shape) for key, shard in shards.items()})
        for key, shard in shards.items():
            # Every rank needs a tensor of the full shape for the scatter, but only rank 0's values are read.
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
        """Gather the tensors of ``state`` one by one to the CPU; keep them if ``keep`` is true."""
        found: dict[str, Any] = {}
        for key, shard in self.sharded_state().items():
            tensor = cast(DTensor, shard.to(self._device)).full_tensor()
            if keep:
                found[key] = tensor.cpu().clone() if tensor.device.type == "cpu" else tensor.cpu()
        return found


def rows_of(shard: DTensor) -> tuple[int, int]:
    """Return the first row of this rank and the one after its last. FSDP gives the last ranks fewer rows, maybe
    none."""
    assert shard.placements[-1] == Shard(0)
    each = -(-shard.shape[0] // shard.device_mesh.size(-1))
    first = shard.device_mesh.get_local_rank(-1) * each
    return min(first, shard.shape[0]), min(first + each, shard.shape[0])


WrittenShard: TypeAlias = dict[str, str] | str
"""Name and SHA-256 of the file with a rank's rows (empty if it has none), or why they could not be written."""


class ShardWriter:
    """Writes a rank's rows of the state in the background, in the format of ``torch.distributed.checkpoint``.

    Nothing is exchanged with other ranks. torch's ``async_save`` exchanges plans, and its safetensors writer makes one
    ``bytes`` object of a whole shard while it holds the GIL, which would stop training.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "shards")
        self._begun: Future[WrittenShard] | None = None

    def begin(self, folder: Path, state: Mapping[str, DTensor]) -> None:
        """Copy this rank's rows to CPU memory and start writing them. With several copies of the model the first one
        writes."""
        mine: dict[str, DTensor] = {}
        for key, shard in state.items():
            first, stop = rows_of(shard)
            # All copies of the model hold equal rows, so the first copy's files are the whole state.
            if stop > first and (shard.device_mesh.ndim == 1 or shard.device_mesh.get_local_rank(0) == 0):
                mine[key] = shard
        rows = host_copy({key: shard.to_local() for key, shard in mine.items()})
        offsets = {key: [rows_of(shard)[0], *[0] * (shard.ndim - 1)] for key, shard in mine.items()}
        # The format of `HuggingFaceStorageReader`.
        header = {"DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": found} for key, found in offsets.items()})}
        file = folder / f"shard-{dist.get_rank() + 1:05d}.safetensors"
        self._begun = self._thread.submit(_written, file, rows, header)

    def written(self, *, wait: bool) -> WrittenShard | None:
        """Return the result, or None while writing is in progress."""
        assert self._begun is not None, "it was begun"
        return self._begun.result() if wait or self._begun.done() else None


def _written(file: Path, rows: dict[str, Tensor], header: dict[str, str]) -> WrittenShard:
    if not rows:
        return {}
    try:
        save_file(rows, file, header)
        with file.open("rb") as written:
            os.fsync(written.fileno())  # no other machine can do it for this one
        return {file.name: sha256_of(file)}
    except (OSError, SafetensorError) as error:
        return str(error)


def verify_shards(folder: Path, files: Mapping[str, str], rank: int, ranks: int) -> None:
    """Verify this rank's part of the files.

    Raises:
        ValueError: A file is missing or does not have its checksum.
    """
    # Hashing all files on every rank would read the state as often as there are ranks.
    for name in sorted(files)[rank::ranks]:
        file = folder / name
        if not file.is_file() or sha256_of(file) != files[name]:
            what = "does not have the checksum it was written with" if file.is_file() else "is missing"
            raise ValueError(f"{file} {what}; resume from the checkpoint before it")


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill ``into`` (shards, or full tensors in a single process) from ``folder``.

    Raises:
        ValueError: The folder holds other tensors.
    """
    reader = HuggingFaceStorageReader(str(folder))
    found = {key: tuple(entry.size) for key, entry in reader.read_metadata().state_dict_metadata.items()}  # pyright: ignore[reportAttributeAccessIssue]
    check_state_shapes(str(folder), found, {key: tuple(tensor.shape) for key, tensor in into.items()})
    # Each rank plans by itself: if only one found a fault, the others would wait in a collective.
    load(dict(into), storage_reader=reader, no_dist=True)


NOTHING = TrainSample(
    # More than one token, for which a compiled layer would need another graph.
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
    teacher_logprobs=frozen_floats([0.0]),
    policy_mask=np.ones(1, dtype=np.bool_),
)
"""Sample without loss. A rank passes it through the model while other ranks still have work."""


class ShardedScorer(PolicyScorer):
    """``PolicyScorer`` whose passes gather the model as they go. Every rank makes the same number of passes."""

    def __init__(
        self, sharded: ShardedModel, settings: ModelConfig, valid_vocab: int | None, *, frozen: bool = False
    ) -> None:
        self._sharded = sharded
        super().__init__(sharded.model, settings, valid_vocab=valid_vocab, frozen=frozen)

    @property
    def device(self) -> torch.device:
        return self._sharded.device

    def micro_batches(self, samples: Sequence[TrainSample]) -> Iterator[tuple[list[int], PackedBatch]]:
        """Yield the micro-batches, equally many on every rank because each pass gathers weights. Missing ones are
        empty."""
        plan, shared = self.plan(samples)
        # At least one pass, even for an empty share: the other ranks' gathers wait for this rank.
        most = torch.tensor(max(1, len(plan)), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        passes = plan + [[] for _ in range(int(most) - len(plan))]
        for number, members in enumerate(passes, start=1):
            self._sharded.begin_pass(last=number == len(passes))
            yield members, self.pack([samples[i] for i in members] or [NOTHING], shared=shared)

    def forward(
        self, batch: PackedBatch, temperature: float, *, head_gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute as ``PolicyScorer.forward``. With sequence parallelism every rank of the group has the full
        result."""
        assert head_gradient is None, "a shard's gradient is summed over ranks, the head's among them"
        group = self._sharded.sequence
        if group is None:
            return self._sharded.run(lambda: super(ShardedScorer, self).forward(batch, temperature))
        # Log-probs of all slices are gathered, because the loss of a response may need all its tokens.
        part = SequenceSlice(batch, group)

        def own() -> tuple[Tensor, Tensor]:
            hidden = self._hidden(part.input_ids, part.position_ids, part.attention)
            return self._head(hidden.index_select(0, part.predict_index), part.targets, temperature)

        logprobs, entropies = self._sharded.run(own)
        return part.gathered(logprobs), part.gathered(entropies)

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._sharded.with_head(
            lambda given: super(ShardedScorer, self)._head(given, targets, temperature, gradient), hidden
        )

    @torch.no_grad()
    def _use_memory_efficient_layers(self) -> None:
        """Replace layers one unit at a time, because the probe of each layer needs its gathered weights."""
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
