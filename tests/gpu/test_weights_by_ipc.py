"""A rank's buckets opened by another process on the same GPU, by CUDA IPC. Skipped without a CUDA device."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from typing import Any

import pytest
import torch

from magicrl.rollout.weight_buckets import device_identity, in_buckets

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# opens memory like vLLM's workers: once per allocation, one copy of each weight, released at the end
WORKER = """
import json, pickle, struct, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

device = torch.cuda.get_device_properties(0)
memory, opened, sums = None, None, {}
while True:
    (size,) = struct.unpack("q", sys.stdin.buffer.read(8))
    if not size:
        break
    info = pickle.loads(sys.stdin.buffer.read(size))
    given = list(info["ipc_handles"][str(device.uuid)])
    given[6] = 0
    if given != opened:
        memory, opened = rebuild_cuda_tensor(*given), given
    parts = memory[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
    for name, dtype, shape, part in zip(info["names"], info["dtype_names"], info["shapes"], parts):
        weight = part.view(getattr(torch, dtype)).view(shape).clone()
        sums[name] = [str(weight.dtype), list(weight.shape), weight.view(-1).view(torch.uint8).long().sum().item()]
    torch.cuda.synchronize()
    if info["last"]:
        del part, parts, memory
    print("copied", flush=True)
print(json.dumps(sums), flush=True)
"""


@pytest.mark.parametrize("setting", ["", "expandable_segments:True"], ids=["fixed-segments", "growing-segments"])
def test_another_process_copies_each_bucket_before_the_next(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    if setting:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
        torch._C._accelerator_setAllocatorSettings(setting)
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    weights = {f"w{n}": torch.randn(64, 96, generator=generator, device=device).bfloat16() for n in range(40)}
    weights["large"] = torch.randn(700, 512, generator=generator, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        sent = 0
        for bucket in in_buckets(lambda: iter(weights.items()), device, size=100_000):
            assert list(bucket.handles) == [device_identity(device)]
            told = pickle.dumps({**bucket.update_info(), "last": bucket.last})
            worker.stdin.write(struct.pack("q", len(told)) + told)
            worker.stdin.flush()
            assert worker.stdout.readline() == b"copied\n"
            sent += 1
        worker.stdin.write(struct.pack("q", 0))
        worker.stdin.flush()
        found: dict[str, Any] = json.loads(worker.stdout.readline())
    finally:
        worker.kill()
        worker.wait()
        if setting:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert sent == 6, "eight of 12,288 bytes each, five times, and the large one"
    for name, weight in weights.items():
        total = int(weight.view(-1).view(torch.uint8).long().sum())
        assert found[name] == [str(weight.dtype), list(weight.shape), total]
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before, "both sides have let the buckets go"
