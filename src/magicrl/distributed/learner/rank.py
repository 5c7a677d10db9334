"""One rank of the distributed learner: a plain object in a separate process, driven by calls from outside.

All ranks get the same calls in the same order. Nothing stays open between calls, except for `next_bucket`, which is
called until it has returned all weights.
"""

from __future__ import annotations

import contextlib
import logging
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
from magicrl.distributed.learner.sharding import (
    NOTHING,
    RankSettings,
    ShardedModel,
    ShardedScorer,
    ShardOptimizer,
    ShardWriter,
    WrittenShard,
    make_meshes,
    read_shards,
    verify_shards,
)
from magicrl.distributed.same_files import Digests, check_digests
from magicrl.distributed.tensors import Payload, pack, unpack
from magicrl.models.loading import device_name, peak_mb, resolve_dtype
from magicrl.planning.memory import host_memory
from magicrl.records import FloatArray, TrainSample
from magicrl.rollout.vllm_weights import WeightGroup
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo, in_buckets
from magicrl.training.objective import MicroBatch, Objective
from magicrl.training.protocols import Controls

_log = logging.getLogger(__name__)
COLLECTIVE_SECONDS = 600.0
"""Time limit of one collective operation between ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Part of a mini-batch for one rank."""

    samples: Sequence[TrainSample]
    indices: Sequence[int]  # their indices in the mini-batch, ascending
    weights: NDArray[np.float64]  # ``[samples]`` weight of each sample's loss tokens
    total: int  # number of samples of the whole mini-batch
    statistics: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the loss's statistics of the mini-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUpdate:
    """Result of an update on one rank."""

    values: Mapping[str, float]  # metrics of the whole mini-batch, the same on every rank; empty after a failure
    failure: str | None = None  # why the weights were not changed, or are unusable
    culprit: int | None = None  # index of the first sample that is not finite by itself
    version: int = 0  # number of updates made so far
    tokens: int = 0  # tokens of this rank's samples, including prompts
    seconds: float = 0.0  # wall-clock time, including waits for other ranks
    peak_mb: float = 0.0  # peak memory so far in MiB: of the GPU, else of the process


class LearnerRank:
    """One rank. `configure` gives it its number.

    Args:
        node: Name of the node on which it runs.
        address: The node's address, at which other ranks and rollout engines reach this one.
    """

    def __init__(self, node: str, address: str = "127.0.0.1") -> None:
        self._node, self._address = node, address
        self._rank, self._ranks = 0, 0
        self._receivers: WeightGroup | None = None  # group with the workers of rollout engines, on rank 0
        self._writer = ShardWriter()
        self._buckets: Iterator[WeightBucket] | None = None

    def location(self, device: str, ranks: int) -> tuple[str, float]:
        """Return the node's name and the rank's memory in bytes: of its GPU, or its part of the node's memory on
        CPUs."""
        if device == "cpu":
            return self._node, host_memory() / ranks
        return self._node, float(torch.cuda.get_device_properties(_device(device)).total_memory)

    def answers(self) -> None:
        """Do nothing. The rank has started when this returns."""

    def check_files(self, digests: Digests) -> None:
        """Raise ``ValueError`` if this node has other files of the model or of a custom part than the run."""
        check_digests(digests)

    def open_store(self) -> tuple[str, int]:
        """Open a store at which ranks find each other and return its host and port.

        The port stays open from now on. A port that was only found free could belong to another process by the time it
        is used, and the other ranks would wait until their time limit.
        """
        self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return self._address, self._store.port

    def open_receivers_store(self) -> tuple[str, int]:
        """Open a store at which rank 0 and the workers of rollout engines find each other; as `open_store`."""
        self._receivers_store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return self._address, self._receivers_store.port

    def configure(self, settings: RankSettings, store: tuple[str, int], rank: int, ranks: int) -> str:
        """Join the other ranks at rank 0's ``store`` as number ``rank`` and load a shard of the starting model.

        An earlier model is dropped.

        Returns:
            Name of the device.

        Raises:
            ValueError: The model cannot be loaded or trained with these settings.
        """
        # The process may serve a second model; both together might not fit into its memory.
        self.close()
        self._rank, self._ranks = rank, ranks
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = _device(settings.device)
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        if rank:
            self._store = TCPStore(*store, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store.set_timeout(timeout)
        # After the timeout NCCL's watchdog ends the process; gloo raises in the waiting call.
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=self._store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=timeout,
        )
        meshes = make_meshes(device.type, settings.placement.sequence_parallel, settings.placement.shard_ranks)
        sharded = ShardedModel(settings, meshes, device)
        self._sharded, self._settings = sharded, settings
        model = settings.learning.model
        self._optimizer = ShardOptimizer(
            sharded.trained(), settings.learning.optimizer, device, resolve_dtype(model.dtype)
        )
        self._scorer = ShardedScorer(sharded, model, settings.valid_vocab)
        if settings.reference is not None:
            frozen = ShardedModel(settings, meshes, device, frozen=True)
            self._reference = ShardedScorer(frozen, model, settings.reference_vocab, frozen=True)
        self._objective = Objective(settings.learning)
        return device_name(device)

    def update(self, share: Share, controls: Controls) -> RankUpdate:
        """Compute this rank's part of one update. All ranks decide alike whether the update is kept."""
        began = time.perf_counter()

        def accumulate(chosen: Sequence[int], scale: float) -> LossMetrics:
            # After a failure the optimizer looks for the culprit among subsets of the mini-batch's indices, which all
            # ranks search in the same order.
            own = [place for place, index in enumerate(share.indices) if index in chosen]
            return self._accumulate(share, own, controls, scale)

        # Sums over all ranks: if one rank finds a value that is not finite, all do, and all repeat the update.
        values, failure, culprit = self._optimizer.update(
            accumulate, share.total, controls.learning_rate, self._objective.advice
        )
        return RankUpdate(
            values=values,
            failure=failure,
            culprit=culprit,
            version=self._optimizer.steps,
            tokens=sum(len(sample) for sample in share.samples),
            seconds=time.perf_counter() - began,
            peak_mb=peak_mb(self._scorer.device),
        )

    def gradients(self, share: Share, controls: Controls) -> Payload | None:
        """Return the full gradients of a mini-batch by parameter name, on rank 0, without an update. For checks
        only."""
        # The gradient without scaling or clipping is what can be compared with the single learner's.
        self._accumulate(share, range(len(share.samples)), controls)
        self._optimizer.gradients()
        found: dict[str, Tensor] = {}
        for name, parameter in self._sharded.trained().items():
            assert parameter.grad is not None, "every pass reaches every parameter"
            found[name] = parameter.grad.to(self._scorer.device).full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]
        self._optimizer.forget()
        return pack(found) if self._rank == 0 else None

    def logprobs(
        self, samples: Sequence[TrainSample], temperature: float, frozen: bool
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token of this rank's samples.

        ``frozen`` selects the reference model.
        """
        return (self._reference if frozen else self._scorer).score(samples, temperature)

    def weights(self) -> Payload | None:
        """Return all weights for engines, on rank 0; see ``ShardedModel.weights``."""
        found = self._sharded.weights(keep=self._rank == 0)
        self._release_memory()
        return pack(found) if self._rank == 0 else None

    def _release_memory(self) -> None:
        """Release cached GPU memory, which a colocated engine needs."""
        if self._settings.shares_gpus and torch.cuda.is_available():
            torch.cuda.ipc_collect()  # buckets that an engine has released
            torch.cuda.empty_cache()  # the engine needs the memory that torch would keep for the next update

    def adapters(self) -> Payload | None:
        """Return only the LoRA adapters, on rank 0; see ``ShardedModel.adapters``."""
        found = self._sharded.adapters(keep=self._rank == 0)
        return pack(found) if self._rank == 0 else None

    def join_receivers(self, size: int, seconds: float) -> tuple[WeightInfo, ...] | None:
        """Form a group of ``size`` processes with all workers of rollout engines, which come to `open_receivers_store`.

        Returns:
            All weights in the order in which they will be sent. None if a worker did not come within ``seconds``.
        """
        # Every rank takes part, since all of them gather each weight, though only rank 0 sends.
        infos = tuple(WeightInfo.of(name, weight) for name, weight in self._sharded.stream())
        self._leave_receivers()
        if self._rank == 0:
            try:
                self._receivers = WeightGroup(self._receivers_store, 0, size, seconds, self._scorer.device.type)
            except RuntimeError as error:
                _log.warning("the workers of the rollout engines did not come: %s", " ".join(str(error).split()))
                return None
        return infos

    def send_weights(self) -> None:
        """Send all weights to the engines' workers. A worker that has not received everything reports it itself."""
        for _, weight in self._sharded.stream():  # always to the end, or the other ranks would wait
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
        """Return the next weights for the engine's worker on this rank's device, or None after the last.

        A bucket uses the memory of the bucket before it, so the worker must have copied that one before this call.
        """
        if self._buckets is None:
            self._buckets = in_buckets(self._sharded.stream, self._scorer.device)
        bucket = next(self._buckets, None)
        if bucket is None:
            self._buckets = None
        self._release_memory()
        return bucket

    def state(self) -> tuple[Payload, Mapping[str, Any]] | None:
        """Return the single learner's state on rank 0: its tensors and its metadata."""
        found = self._optimizer.whole_state(keep=self._rank == 0)
        return (pack(found), self._optimizer.meta()) if self._rank == 0 else None

    def restore(self, shapes: Mapping[str, tuple[int, ...]], whole: Payload, meta: Mapping[str, Any]) -> int:
        """Restore a state whose tensors are on rank 0 only. Return the number of updates made."""
        self._optimizer.restore_whole(shapes, unpack(whole, writable=True), meta)
        return self._optimizer.steps

    def begin_shards(self, folder: str) -> Mapping[str, Any]:
        """Copy this rank's rows of the state and start writing them. Return the state's metadata."""
        self._writer.begin(Path(folder), self._optimizer.sharded_state())
        return self._optimizer.meta()

    def shards_written(self, wait: bool) -> WrittenShard | None:
        """Return the result of writing, or None while it is in progress. ``wait`` waits for the end."""
        return self._writer.written(wait=wait)

    def read_shards(self, folder: str, meta: Mapping[str, Any]) -> int:
        """Load a state that any number of ranks has written. Return the number of updates made.

        ``meta`` holds ``files``, the names and SHA-256 of the shards. Each rank verifies some of them.
        """
        # Check the files before any row is overwritten, so that a damaged checkpoint leaves the rank's state whole.
        verify_shards(Path(folder), meta["files"], self._rank, self._ranks)
        empty = self._optimizer.empty_state(int(meta["optimizer_steps"]))
        read_shards(Path(folder), empty)
        self._optimizer.restore_shards(empty, meta)
        return self._optimizer.steps

    def close(self) -> None:
        """Leave the other ranks. The rank may be configured again."""
        self._buckets = None
        self._leave_receivers()
        # Free their memory before the next model is loaded.
        for name in ("_sharded", "_optimizer", "_scorer", "_reference"):
            self.__dict__.pop(name, None)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the others may be gone already
                dist.destroy_process_group()

    def _accumulate(
        self, share: Share, chosen: Sequence[int], controls: Controls, loss_scale: float = 1.0
    ) -> LossMetrics:
        """Accumulate the gradients of the chosen samples and of the other ranks' samples. Return the metrics of all."""
        samples, weights = [share.samples[i] for i in chosen], torch.from_numpy(share.weights)[list(chosen)]

        def jobs() -> Iterator[MicroBatch]:
            for members, batch in self._scorer.micro_batches(samples):
                given = [samples[i] for i in members] or [NOTHING]
                own = weights[members] if members else torch.zeros(1, dtype=torch.float64)
                yield given, own, batch

        metrics = self._objective.accumulate(
            self._scorer, jobs(), controls, statistics=share.statistics, loss_scale=loss_scale
        )
        # Ranks that have the same share count once.
        group = self._sharded.sequence
        counts = 1.0 if group is None or group.rank() == 0 else 0.0

        def reduced(values: Mapping[str, Tensor], op: Any) -> dict[str, Tensor]:
            # One collective for all metrics. Sorted names give every rank the same order, whatever the order of its
            # dictionary.
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


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("this learner rank sees no CUDA device; give it one, or set run.device = 'cpu'")
    device = torch.device("cuda", 0)  # under Ray a rank sees only its own GPU
    torch.cuda.set_device(device)
    return device
