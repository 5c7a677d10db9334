"""Weights for a process on the same device, in buckets of shared memory.

NCCL joins no two processes on one GPU, and the weights need not leave it. The sender packs them into one buffer and
sends a handle by which another process opens that memory: CUDA IPC on a GPU, a file in memory on a CPU. The message is
that of vLLM's packed IPC transfer (vLLM 0.32), whose own engine opens it on GPUs. The next bucket uses the same memory,
so the receiver copies a bucket before it requests the next one.
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

BUCKET = 256 << 20  # bytes of weights that are sent together; a larger weight is sent separately


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """Metadata of one weight, which a receiver needs in advance."""

    name: str  # name in a checkpoint
    dtype: str  # torch's name, such as ``bfloat16``
    shape: tuple[int, ...]  # shape of the full weight

    @staticmethod
    def of(name: str, weight: Tensor) -> WeightInfo:
        """Return the metadata of a full weight."""
        return WeightInfo(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Weights in shared memory, one after the other without gaps."""

    weights: tuple[WeightInfo, ...]
    sizes: tuple[int, ...]  # bytes of each weight
    handles: Mapping[str, tuple[Any, ...]]  # handles to open the sender's buffer, by `device_identity` of its device
    first: bool  # whether this is the first bucket of all weights
    last: bool  # whether this is the last one

    @staticmethod
    def merged(given: Sequence[WeightBucket]) -> WeightBucket:
        """Return one bucket with the handles of senders on several devices, which have the same weights."""
        first = given[0]
        assert all(bucket.weights == first.weights for bucket in given), "all ranks go through the weights in one order"
        handles = {place: handle for bucket in given for place, handle in bucket.handles.items()}
        return replace(first, handles=handles)

    def update_info(self) -> dict[str, Any]:
        """Return the arguments for ``update_weights`` of vLLM's workers."""
        return update_info(self.weights) | {"ipc_handles": dict(self.handles), "tensor_sizes": list(self.sizes)}


def update_info(weights: Sequence[WeightInfo]) -> dict[str, Any]:
    """Return the arguments for ``update_weights`` of vLLM's workers that describe these weights."""
    return {
        "names": [weight.name for weight in weights],
        "dtype_names": [weight.dtype for weight in weights],
        "shapes": [list(weight.shape) for weight in weights],
    }


def device_identity(device: torch.device) -> str:
    """Return a name of ``device`` that is the same in every process: a GPU's UUID, or the host's name for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def in_buckets(
    stream: Callable[[], Iterator[tuple[str, Tensor]]], device: torch.device, size: int = BUCKET
) -> Iterator[WeightBucket]:
    """Yield all of ``stream``'s weights in order, in buckets. Requesting the next bucket overwrites the last.

    Args:
        stream: Starts a pass over (name, full weight), each valid until the next. It may be a collective of ranks.
        device: Device of the weights and of the buckets.
        size: Bytes of a bucket. A larger weight gets a bucket of its size.
    """
    buffer, weights, sizes, first = _Shared(size, device), list[WeightInfo](), list[int](), True
    try:
        for name, weight in stream():
            # Copied as bytes: a bucket may hold several dtypes, each weight aligned to its own.
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
            # Without a name, so that it disappears with the last process that has it open, however that one ends.
            self._file = os.memfd_create("magicrl-bucket")
            os.truncate(self._file, size)
            name = f"/proc/{os.getpid()}/fd/{self._file}"
            self.bytes = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
            self._handle = (name, size)

    def filled(self, weights: Sequence[WeightInfo], sizes: Sequence[int], *, first: bool, last: bool) -> WeightBucket:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # other processes cannot wait for this stream
        handles = {device_identity(self._device): self._handle}
        return WeightBucket(tuple(weights), tuple(sizes), handles, first, last)

    def close(self) -> None:
        """Release the memory. On a GPU it is free when its receiver has released it as well."""
        del self.bytes
        if self._file is not None:
            os.close(self._file)
        elif torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


def _unmovable(size: int, device: torch.device) -> Tensor:
    """Allocate bytes outside of expandable segments, which another process could open only by ptrace."""
    configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:True" not in configured:
        return torch.empty(size, dtype=torch.uint8, device=device)
    settings: Callable[[str], None] = torch._C._accelerator_setAllocatorSettings  # pyright: ignore
    settings("expandable_segments:False")
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        settings(configured)


def opened(handles: Mapping[str, tuple[Any, ...]]) -> Tensor:
    """Return the bytes ``[size]`` of a bucket from a sender on this host's CPUs."""
    here = device_identity(torch.device("cpu"))
    if here not in handles:
        raise ValueError(f"no learner rank on host {here} has a bucket, only on: {', '.join(sorted(handles))}")
    name, size = handles[here]
    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)


def shared_memory(size: int) -> str | None:
    """Return Linux's memory file system if ``size`` bytes fit with a margin, else None for the default temporary
    folder."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and shutil.disk_usage(folder).free > 1.1 * size else None
