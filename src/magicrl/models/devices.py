"""What a model computes on: the device's name, and the most memory that it took there."""

from __future__ import annotations

import resource

import torch


def device_name(device: torch.device) -> str:
    """What CUDA calls the device; ``cpu`` for anything else."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_mb(device: torch.device) -> float:
    """Most memory so far, MiB: what torch held of the GPU for this process; on a CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
