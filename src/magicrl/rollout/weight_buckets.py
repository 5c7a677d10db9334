"""Weights for a process on the same device: a bucket at a time, which that process opens where it lies.

NCCL joins no two processes on one GPU, and the weights need not leave it: the sender packs them into one buffer and
tells how another process opens that memory, by CUDA IPC on a GPU, on a CPU by a file in memory. The message is that of
vLLM's packed IPC transfer (vLLM 0.32), whose own engine opens it on GPUs. The receiver copies what it opened before the
sender is asked for the next bucket, which lies in the same memory.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUCKET = 256 << 20  # bytes of weights that are sent together; one larger weight goes alone


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """What a receiver has to know beforehand of one weight."""

    name: str  # as in a checkpoint
    dtype: str  # torch's name, ``bfloat16``
    shape: tuple[int, ...]  # of the whole weight

    @staticmethod
    def of(name: str, weight: Tensor) -> WeightInfo:
        """Of a whole weight."""
        return WeightInfo(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Weights that lie in shared memory now, one after the other without gaps."""

    weights: tuple[WeightInfo, ...]
    sizes: tuple[int, ...]  # bytes of each
    handles: Mapping[str, tuple[Any, ...]]  # by `place_of` the sender's device: how a process there opens its buffer
    first: bool  # of all weights
    last: bool  # likewise

    @staticmethod
    def merged(given: Sequence[WeightBucket]) -> WeightBucket:
        """The same weights as senders on several devices have them."""
        first = given[0]
        assert all(bucket.weights == first.weights for bucket in given), "all ranks go through the weights in one order"
        handles = {place: handle for bucket in given for place, handle in bucket.handles.items()}
        return replace(first, handles=handles)

    def update_info(self) -> dict[str, Any]:
        """For ``update_weights`` of vLLM's workers."""
        return {
            "names": [weight.name for weight in self.weights],
            "dtype_names": [weight.dtype for weight in self.weights],
            "shapes": [list(weight.shape) for weight in self.weights],
            "ipc_handles": dict(self.handles),
            "tensor_sizes": list(self.sizes),
        }


def place_of(device: torch.device) -> str:
    """What a sender and a receiver on ``device`` both call it: a GPU's UUID, the host's name for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def in_buckets(
    stream: Callable[[], Iterator[tuple[str, Tensor]]], device: torch.device, size: int = BUCKET
) -> Iterator[WeightBucket]:
    """All of ``stream``'s weights in its order, in buckets; one is overwritten when the next is asked for.

    Args:
        stream: a fresh pass over (name, whole weight), each valid until the next; may be a collective of ranks.
        device: of the weights and of the bucket.
        size: bytes of a bucket; a larger weight gets one of its own size.
    """
    buffer, weights, sizes, first = _Shared(size, device), list[WeightInfo](), list[int](), True
    try:
        for name, weight in stream():
            # as bytes; a bucket may hold several dtypes, each weight where its dtype may begin
            content = weight.detach().contiguous().view(-1).view(torch.uint8)
            used = sum(sizes)
            if weights and (used + content.numel() > buffer.size or used % weight.element_size()):
                yield buffer.filled(weights, sizes, first=first, last=False)
                weights, sizes, used, first = [], [], 0, False
            if content.numel() > buffer.size:
                buffer.close()
                buffer = _Shared(content.numel(), device)
            buffer.bytes[used : used + content.numel()].copy_(content)
            weights.append(WeightInfo.of(name, weight))
            sizes.append(content.numel())
        yield buffer.filled(weights, sizes, first=first, last=True)
    finally:
        buffer.close()


class _Shared:
    """Memory of ``size`` bytes that other processes on its device can open."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self._device = size, device
        self._file: int | None = None
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            self.bytes = _unmovable(size, device)
            self._handle = reduce_tensor(self.bytes)[1]
        else:
            # without a name: it is gone with the last process that has it open, however that one ends
            self._file = os.memfd_create("magicrl-bucket")
            os.truncate(self._file, size)
            name = f"/proc/{os.getpid()}/fd/{self._file}"
            self.bytes = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
            self._handle = (name, size)

    def filled(self, weights: Sequence[WeightInfo], sizes: Sequence[int], *, first: bool, last: bool) -> WeightBucket:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # another process waits for no stream of this one
        handles = {place_of(self._device): self._handle}
        return WeightBucket(tuple(weights), tuple(sizes), handles, first, last)

    def close(self) -> None:
        """Give the memory up; on a GPU it is free once its receiver, too, has let it go."""
        del self.bytes
        if self._file is not None:
            os.close(self._file)
        elif torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


def _unmovable(size: int, device: torch.device) -> Tensor:
    """Bytes outside the allocator's growing segments, which another process could open by ptrace alone."""
    told = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:True" not in told:
        return torch.empty(size, dtype=torch.uint8, device=device)
    settings: Callable[[str], None] = torch._C._accelerator_setAllocatorSettings  # pyright: ignore
    settings("expandable_segments:False")
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        settings(told)


def opened(handles: Mapping[str, tuple[Any, ...]]) -> Tensor:
    """The bytes of a bucket that a sender on this host's CPUs told of, ``[size]``."""
    here = place_of(torch.device("cpu"))
    if here not in handles:
        raise ValueError(f"no learner rank on host {here} has a bucket, only on: {', '.join(sorted(handles))}")
    name, size = handles[here]
    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)


def shared_memory(size: int) -> str | None:
    """Linux's memory file system if ``size`` bytes fit with room to spare, else the ordinary temporary folder."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and shutil.disk_usage(folder).free > 1.1 * size else None
