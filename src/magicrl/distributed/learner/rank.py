"""One rank of the distributed learner: a plain object in a process of its own, driven from outside.

All ranks get the same calls in the same order; between calls they hold nothing open, but for `next_bucket`, which is
called until it has given all weights.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from magicrl.algorithms.loss_terms import LossMetrics
from magicrl.distributed.learner.seats import Seat
from magicrl.distributed.learner.sharding import (
    LOCAL_RANK,
    NOTHING,
    Meshes,
    RankSettings,
    ShardedModel,
    ShardedScorer,
    ShardOptimizer,
    ShardWriter,
    WrittenShard,
    read_shards,
    verify_shards,
)
from magicrl.distributed.tensors import Payload, pack, unpack
from magicrl.models.loading import device_name, peak_mb, resolve_dtype
from magicrl.models.scorer import scorer_settings
from magicrl.planning.memory import host_memory
from magicrl.records import FloatArray, TrainSample
from magicrl.rollout.vllm_weights import WeightGroup
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo, in_buckets
from magicrl.training.objective import MicroBatch, Objective, not_finite_loss, not_finite_weights
from magicrl.training.protocols import Controls

_log = logging.getLogger(__name__)
COLLECTIVE_SECONDS = 600.0
"""Longest wait for the other ranks inside one exchange of tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rank's part of a mini-batch."""

    samples: Sequence[TrainSample]
    indices: Sequence[int]  # their places in the mini-batch, ascending
    weights: NDArray[np.float64]  # ``[samples]`` what their loss tokens weigh
    total: int  # samples of the whole mini-batch
    statistics: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the loss wants to know of all of it


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUpdate:
    """What a rank tells of an update."""

    values: Mapping[str, float]  # metrics of the whole mini-batch, the same on every rank; empty where it failed
    failure: str | None = None  # why weights were not changed or are of no more use
    culprit: int | None = None  # index of the first sample that is not finite by itself
    version: int = 0  # updates made so far
    tokens: int = 0  # of this rank's samples, prompts included
    seconds: float = 0.0  # wall-clock, waits for other ranks included
    cpu_seconds: float = 0.0  # of this rank's process
    peak_mb: float = 0.0  # most memory so far: of the GPU, else of the process


class LearnerRank:
    """One rank; ``configure`` gives it its number.

    Args:
        node: a name of the node that it runs on.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._rank, self._ranks = 0, 0
        self._receivers: WeightGroup | None = None  # with the workers of rollout engines, on rank 0
        self._writer = ShardWriter()
        self._buckets: Iterator[WeightBucket] | None = None

    def seat(self, device: str, ranks: int) -> Seat:
        """Where it runs, as one of ``ranks``."""
        if device == "cpu":
            return Seat(node=self._node, memory=host_memory() / ranks)
        return Seat(node=self._node, memory=float(torch.cuda.get_device_properties(_device(device)).total_memory))

    def answers(self) -> None:
        """Do nothing: the rank has started once this returns."""

    def open_store(self) -> tuple[str, int]:
        """Host and port of a store where ranks find each other. It is open from now on: a port that was only free would
        be another process's by the time it is wanted, and the others would wait until they give up."""
        host = _own_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def open_receivers_store(self) -> tuple[str, int]:
        """As `open_store`, where rank 0 and the workers of rollout engines find each other."""
        host = _own_address()
        self._receivers_store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._receivers_store.port

    def configure(self, settings: RankSettings, store: tuple[str, int], rank: int, ranks: int) -> str:
        """As ``rank``, join the others at rank 0's ``store`` and take a share of the start model; its device's name.

        A former model is dropped. ``ValueError`` says why a model cannot be loaded or trained like this.
        """
        self.close()
        self._rank, self._ranks = rank, ranks
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = _device(settings.device)
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        if rank:
            self._store = TCPStore(*store, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store.set_timeout(timeout)
        # NCCL watches its exchanges and ends the process after the time-out; gloo raises where it waits
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=self._store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=timeout,
        )
        meshes = Meshes.make(device.type, settings.placement.sequence_parallel, settings.placement.shard_ranks)
        sharded = ShardedModel(settings, meshes, device)
        self._sharded, self._settings = sharded, settings
        model = settings.learning.model
        self._optimizer = ShardOptimizer(
            sharded.trained(), settings.learning.optimizer, device, resolve_dtype(model.dtype)
        )
        self._scorer = ShardedScorer(sharded, **scorer_settings(model, settings.valid_vocab))
        if settings.reference is not None:
            frozen = ShardedModel(settings, meshes, device, frozen=True)
            self._reference = ShardedScorer(frozen, **scorer_settings(model, settings.reference_vocab, frozen=True))
        self._objective = Objective(settings.learning)
        return device_name(device)

    def update(self, share: Share, controls: Controls) -> RankUpdate:
        """This rank's part of one SGD step; the decision whether it is kept is the same everywhere."""
        began, cpu_began = time.perf_counter(), time.process_time()
        # sums over all ranks: what one finds not finite, all do, and begin again together
        metrics, norm = self._optimizer.collect(
            lambda scale: self._accumulate(share, range(len(share.samples)), controls, scale)
        )
        values = metrics.values()
        for name, value in (("loss", values["loss"]), ("gradient norm", norm)):
            if not math.isfinite(value):
                failure = not_finite_loss(name, value, self._optimizer.steps + 1)
                culprit = self._culprit(share, controls)
                self._optimizer.forget()
                return RankUpdate(values={}, failure=failure, culprit=culprit, version=self._optimizer.steps)
        self._optimizer.step(controls.learning_rate, norm)
        failure = None
        if not self._optimizer.weights_are_finite():
            failure = not_finite_weights(self._optimizer.steps, controls.learning_rate)
        further = {"grad_norm": norm, "learning_rate": controls.learning_rate, **self._optimizer.loss_scale.metrics()}
        return RankUpdate(
            values={**values, **further},
            failure=failure,
            version=self._optimizer.steps,
            tokens=sum(len(sample) for sample in share.samples),
            seconds=time.perf_counter() - began,
            cpu_seconds=time.process_time() - cpu_began,
            peak_mb=peak_mb(self._scorer.device),
        )

    def gradients(self, share: Share, controls: Controls) -> Payload | None:
        """Whole gradients of a mini-batch by parameter name, on rank 0; weights stay. For checks, not for training."""
        self._accumulate(share, range(len(share.samples)), controls)
        self._optimizer.gradients()
        found: dict[str, Tensor] = {}
        for name, parameter in self._sharded.trained().items():
            assert parameter.grad is not None, "every pass reaches every parameter"
            found[name] = parameter.grad.to(self._scorer.device).full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]
        self._optimizer.forget()
        return pack(found) if self._rank == 0 else None

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of every response token of this rank's samples."""
        return self._scorer.score(samples, temperature)

    def reference_logprobs(
        self, samples: Sequence[TrainSample], temperature: float
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        """As `logprobs`, under the frozen reference."""
        return self._reference.score(samples, temperature)

    def weights(self) -> Payload | None:
        """All weights for engines, on rank 0; see ``ShardedModel.weights``."""
        found = self._sharded.weights(keep=self._rank == 0)
        self._make_room()
        return pack(found) if self._rank == 0 else None

    def _make_room(self) -> None:
        if self._settings.shares_gpus and torch.cuda.is_available():
            torch.cuda.ipc_collect()  # buckets that an engine has let go
            torch.cuda.empty_cache()  # what torch keeps for the next update is the engine's meanwhile

    def adapters(self) -> Payload | None:
        """The LoRA adapters alone, on rank 0; see ``ShardedModel.adapters``."""
        found = self._sharded.adapters(keep=self._rank == 0)
        return pack(found) if self._rank == 0 else None

    def join_receivers(self, size: int, seconds: float) -> tuple[WeightInfo, ...] | None:
        """Form the group of ``size`` with all workers of rollout engines, who come to `open_receivers_store`.

        Returns:
            All weights in the order in which they will be sent; None if a worker did not come within ``seconds``.
        """
        told = tuple(WeightInfo.of(name, weight) for name, weight in self._sharded.stream())
        self._leave_receivers()
        if self._rank == 0:
            try:
                self._receivers = WeightGroup(self._receivers_store, 0, size, seconds, self._scorer.device.type)
            except RuntimeError as error:
                _log.warning("the workers of the rollout engines did not come: %s", " ".join(str(error).split()))
                return None
        return told

    def send_weights(self) -> None:
        """Send all weights to the engines' workers; those that have not got everything say so themselves."""
        for _, weight in self._sharded.stream():  # to its end in any case, or the other ranks would wait
            if self._receivers is not None:
                try:
                    self._receivers.broadcast(weight)
                except RuntimeError as error:
                    text = " ".join(str(error).split())
                    _log.warning("a worker of the rollout engines was lost while weights were sent: %s", text)
                    self._leave_receivers()

    def _leave_receivers(self) -> None:
        if self._receivers is not None:
            self._receivers.close()
        self._receivers = None

    def next_bucket(self) -> WeightBucket | None:
        """The weights that follow, for the engine's worker on this rank's device; None: it has had all of them.

        They lie where the bucket before them lay: whoever opened that one has copied it before this call.
        """
        if self._buckets is None:
            self._buckets = in_buckets(self._sharded.stream, self._scorer.device)
        bucket = next(self._buckets, None)
        if bucket is None:
            self._buckets = None
        self._make_room()
        return bucket

    def state(self) -> tuple[Payload, Mapping[str, Any]] | None:
        """The single learner's state, tensors and what else it holds, on rank 0."""
        found = self._optimizer.whole_state(keep=self._rank == 0)
        return (pack(found), self._optimizer.meta()) if self._rank == 0 else None

    def restore(self, shapes: Mapping[str, tuple[int, ...]], whole: Payload, meta: Mapping[str, Any]) -> int:
        """Take over a state, its tensors on rank 0 alone; returns the updates made."""
        self._optimizer.restore_whole(shapes, unpack(whole, writable=True), meta)
        return self._optimizer.steps

    def begin_shards(self, folder: str) -> Mapping[str, Any]:
        """Copy this rank's rows of the state and begin to write them; what the state holds beside tensors."""
        self._writer.begin(Path(folder), self._optimizer.sharded_state())
        return self._optimizer.meta()

    def shards_written(self, wait: bool) -> WrittenShard | None:
        """What became of the rows; None while they are being written, which `wait` waits for."""
        return self._writer.written(wait=wait)

    def read_shards(self, folder: str, meta: Mapping[str, Any]) -> int:
        """Take over a state that any number of ranks has written; returns the updates made.

        ``meta`` holds ``files``, the names and SHA-256 of the shards: each rank looks at some of them.
        """
        verify_shards(Path(folder), meta["files"], self._rank, self._ranks)
        empty = self._optimizer.empty_state(int(meta["optimizer_steps"]))
        read_shards(Path(folder), empty)
        self._optimizer.restore_shards(empty, meta)
        return self._optimizer.steps

    def close(self) -> None:
        """Leave the others; the rank may be configured again."""
        self._buckets = None
        self._leave_receivers()
        # so that their memory is free before the next model's
        for name in ("_sharded", "_optimizer", "_scorer", "_reference"):
            self.__dict__.pop(name, None)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the others may be gone already
                dist.destroy_process_group()

    def _accumulate(
        self, share: Share, chosen: Sequence[int], controls: Controls, loss_scale: float = 1.0
    ) -> LossMetrics:
        """Gradients of these of the share's samples and whatever the other ranks give; metrics of all."""
        samples, weights = [share.samples[i] for i in chosen], torch.from_numpy(share.weights)[list(chosen)]

        def jobs() -> Iterator[MicroBatch]:
            for members, batch in self._scorer.micro_batches(samples):
                given = [samples[i] for i in members] or [NOTHING]
                own = weights[members] if members else torch.zeros(1, dtype=torch.float64)
                yield MicroBatch(given, own, batch)

        own = self._objective.accumulate(
            self._scorer, jobs(), controls, statistics=share.statistics, loss_scale=loss_scale
        )
        return self._over_ranks(own)

    def _over_ranks(self, metrics: LossMetrics) -> LossMetrics:
        """Sums, maxima and minima over shares; ranks of one share have the same and count once."""
        group = self._sharded.meshes.sequence
        counts = 1.0 if group is None or group.rank() == 0 else 0.0

        def reduced(values: Mapping[str, Tensor], op: Any) -> dict[str, Tensor]:
            stacked = torch.stack([values[name] for name in sorted(values)])
            if op == dist.ReduceOp.SUM:
                stacked = stacked if counts else torch.zeros_like(stacked)
            dist.all_reduce(stacked, op)
            return dict(zip(sorted(values), stacked.unbind(), strict=True))

        return LossMetrics(
            sums=reduced(metrics.sums, dist.ReduceOp.SUM),
            maxima=reduced(metrics.maxima, dist.ReduceOp.MAX),
            minima=reduced(metrics.minima, dist.ReduceOp.MIN),
        )

    def _culprit(self, share: Share, controls: Controls) -> int | None:
        """The first sample of the mini-batch whose own loss or gradient is not finite. Spoils the gradients."""
        for index in range(share.total):
            own = [place for place, i in enumerate(share.indices) if i == index]
            self._optimizer.forget()
            metrics = self._accumulate(share, own, controls)
            if not (math.isfinite(metrics.values()["loss"]) and math.isfinite(self._optimizer.gradient_norm())):
                return index
        return None


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("this learner rank sees no CUDA device; give it one, or set run.device = 'cpu'")
    # under Ray a rank sees its own GPU alone; ranks started on one machine share them out
    device = torch.device("cuda", int(os.environ.get(LOCAL_RANK, "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _own_address() -> str:
    """The address by which this node is reached; loopback where it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
