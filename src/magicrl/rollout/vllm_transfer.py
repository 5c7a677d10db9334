"""Weights from the learner's ranks straight into vLLM's workers, by vLLM's own weight transfer.

On GPUs that is its NCCL engine as it stands; NCCL has no CPUs, so there the same calls go over gloo, by two small
engines registered with vLLM. Rank 0 of the group sends; it is the learner's. Whoever owns both sides asks the workers
(``start``, ``update``, ``finish``) and the learner's ranks (``send``) at the same time. (vLLM 0.32.)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

_log = logging.getLogger(__name__)
Backend = Literal["nccl", "gloo"]
GLOO = "magicrl_gloo"
"""The name of the CPU engine in vLLM's registry."""
_RECEIVER_SECONDS = 600.0  # vLLM hands a receiver no limit of ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where sender and receivers meet.

    Attributes:
        host: the sender's.
        port: free on it.
        size: the sender and all workers.
        seconds: after which an exchange over gloo gives up; NCCL's ends with its process.
    """

    host: str
    port: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Told:
    """What a receiver has to know beforehand of one weight.

    Attributes:
        name: as in a checkpoint.
        dtype: torch's name, ``bfloat16``.
        shape: of the whole weight.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, weight: Tensor) -> Told:
        """Of a whole weight."""
        return Told(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))


def backend_here() -> Backend:
    """What this process would transfer weights with."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def worker_backend() -> str:
    """The name for vLLM's ``weight_transfer_config`` in this process; registers the CPU engine."""
    if backend_here() == "nccl":
        return "nccl"
    from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    with contextlib.suppress(ValueError):  # registered for an engine of this process before
        WeightTransferEngineFactory.register_engine(GLOO, _gloo_receiver())
    return GLOO


def worker_meeting(meeting: Meeting, place: int) -> dict[str, Any]:
    """For the workers' ``init_weight_transfer_engine``; ``place`` is the first worker's rank in the group."""
    info: dict[str, Any] = {
        "master_address": meeting.host,
        "master_port": meeting.port,
        "rank_offset": place,
        "world_size": meeting.size,
        "packed": backend_here() == "nccl",
    }
    return info


def worker_update(told: Sequence[Told]) -> dict[str, Any]:
    """For the workers' ``update_weights``."""
    return {
        "names": [weight.name for weight in told],
        "dtype_names": [weight.dtype for weight in told],
        "shapes": [list(weight.shape) for weight in told],
    }


class WeightSender:
    """The learner's side, on every one of its ranks; only rank 0 has the group.

    Args:
        meeting: see there.
        rank: of the learner.
        told: all weights in the order in which ``stream`` yields them.
        stream: a fresh pass over (name, whole weight); yielding may be a collective of the learner's ranks.

    Attributes:
        ready: all workers came, and none was lost since.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        told: Sequence[Told],
        stream: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        self._rank, self._stream = rank, stream
        self._engine: Any = None
        self._group: Any = None
        self.ready = True
        try:
            if backend_here() == "nccl":
                self._engine = _nccl_sender(meeting, rank, told, stream)
            elif rank == 0:
                self._group = gloo_group(meeting, 0)
        except RuntimeError as error:
            self._give_up("the workers of the rollout engines did not come", error)

    def send(self) -> None:
        """Give every weight to all workers; all ranks of the learner call it together."""
        if self._engine is not None:
            self._engine.send_weights()
            return
        for _, weight in self._stream():  # to its end in any case, or the other ranks would wait
            if self._group is not None:
                try:
                    gloo_broadcast(self._group, weight.detach().cpu().contiguous())
                except RuntimeError as error:
                    self._give_up("a worker of the rollout engines was lost while weights were sent", error)

    def _give_up(self, what: str, error: RuntimeError) -> None:
        _log.warning("%s: %s", what, " ".join(str(error).split()))
        self.close()
        self.ready = False

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._group = None


def gloo_group(meeting: Meeting, rank: int) -> Any:
    """A gloo group beside torch's default one."""
    limit = timedelta(seconds=meeting.seconds)
    store = TCPStore(meeting.host, meeting.port, meeting.size, is_master=rank == 0, timeout=limit)
    return dist.ProcessGroupGloo(PrefixStore("weights", store), rank, meeting.size, limit)


def gloo_broadcast(group: Any, tensor: Tensor) -> None:
    """From rank 0, in place elsewhere; a contiguous CPU tensor of any dtype."""
    group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()


def _nccl_sender(
    meeting: Meeting, rank: int, told: Sequence[Told], stream: Callable[[], Iterator[tuple[str, Tensor]]]
) -> Any:
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        ParamMeta,
        WeightSource,
    )
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
    )

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(weight.name, getattr(torch, weight.dtype), weight.shape) for weight in told]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            # vLLM packs on streams of its own, after the unit that a weight belongs to is sharded again
            return ((name, weight.detach().clone()) for name, weight in stream())

    info = NCCLTrainerInitInfo(
        master_address=meeting.host, master_port=meeting.port, world_size=meeting.size, rank=rank
    )
    return NCCLTrainerWeightTransferEngine.trainer_init(info, client=_AskedElsewhere(), source=Source())


class _AskedElsewhere:
    """A ``VLLMWeightSyncClient`` for a sender whose workers are asked by the process that owns both sides."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _gloo_receiver() -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLWeightTransferEngine,
    )

    class GlooWeightTransferEngine(NCCLWeightTransferEngine):
        """vLLM's receiver with gloo in NCCL's place: the same information, the same reload of layers."""

        def init_transfer_engine(self, init_info: Any) -> None:
            meeting = Meeting(
                host=init_info.master_address,
                port=init_info.master_port,
                size=init_info.world_size,
                seconds=_RECEIVER_SECONDS,
            )
            self._gloo: Any = gloo_group(meeting, init_info.rank_offset + self.parallel_config.rank)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # nothing runs beside it on a CPU

        def receive_weights(self, update_info: Any) -> None:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                gloo_broadcast(self._gloo, weight)
                model: Any = self.model
                model.load_weights([(name, weight)])

        def shutdown(self) -> None:
            self._gloo = None

    return GlooWeightTransferEngine
