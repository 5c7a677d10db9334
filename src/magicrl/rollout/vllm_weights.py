"""New weights into a running vLLM. Only this module knows how vLLM 0.32 takes them.

From this process: vLLM's ``reload_weights`` runs in every worker. An only worker lives in this process and is given the
tensors themselves. Several workers (tensor parallel) read them from a folder in shared memory. On a CPU vLLM multiplies
with packed copies of the weights. Its reload packs them again, except for an output head that is tied to the embedding,
which would silently keep the old weights. Every layer that keeps its weight next to the packed copy is therefore packed
again. Experts are packed once, after the first loading: a reload would copy plain weights over packed ones, so they
are reset first.

From the learner's ranks to the workers, by vLLM's weight transfer with one engine of `TRANSPORTS` per placement:

- On separate devices, workers and rank 0 of the learner form a `WeightGroup` (NCCL; gloo on CPUs), and rank 0
  broadcasts. vLLM's own NCCL engine is not used: none of its waits has a limit, and its sender copies weights on other
  streams than the one on which FSDP2 gathers them.
- On the ranks' devices, each rank lends its worker one bucket after the other (vLLM's CUDA IPC engine; on CPUs a file
  in memory; see `weight_buckets`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from magicrl.models.model_files import weight_paths
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo, opened, shared_memory, update_info

Placed = Literal["apart", "colocated"]
"""Placement of an engine's workers: on separate devices, or on those of the learner's ranks."""
TRANSPORTS: Mapping[tuple[Placed, bool], str] = {
    ("apart", True): "magicrl_group",
    ("apart", False): "magicrl_group",
    ("colocated", True): "ipc",  # NCCL joins no two processes on one GPU
    ("colocated", False): "magicrl_memory",
}
"""Names of engines in vLLM's registry, by placement and whether on GPUs; those that begin with magicrl are ours."""


def transport(placed: Placed) -> str:
    """Return the backend for vLLM's ``weight_transfer_config`` in this process; registers it if it is ours."""
    name = TRANSPORTS[placed, torch.cuda.is_available()]
    if name in _OWN_ENGINES:
        from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
            WeightTransferEngineFactory,
        )

        with contextlib.suppress(ValueError):  # registered by an earlier engine of this process
            WeightTransferEngineFactory.register_engine(name, _OWN_ENGINES[name]())
    return name


class WeightGroup:
    """A process group of rank 0 of the learner and all workers of the engines, next to torch's default group.

    Args:
        store: the store at which they meet. Rank 0 has held its port open since before it named it.
        place: number of this process in the group; 0 sends.
        size: processes in the group.
        seconds: limit of every wait. NCCL aborts its communicator at this limit, so that both sides can continue.
        device: where the weights are: "cuda" or "cpu".

    Raises:
        RuntimeError: some process did not come within ``seconds``.
    """

    def __init__(self, store: TCPStore, place: int, size: int, seconds: float, device: str) -> None:
        self._limit = timedelta(seconds=seconds)
        keys = [f"here/{member}" for member in range(size)]
        store.set(keys[place], "")
        store.wait(keys, self._limit)  # NCCL would wait without a limit for a process that never comes
        if device == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            # With a blocking wait torch starts no watchdog, which would end the process. At its limit the wait aborts
            # the communicator and raises (`WorkNCCL::wait` in torch's ProcessGroupNCCL.cpp).
            with mock.patch.dict(os.environ, TORCH_NCCL_BLOCKING_WAIT="1"):
                self._group: Any = dist.ProcessGroupNCCL(PrefixStore("weights", store), place, size, options)
        else:
            self._group = dist.ProcessGroupGloo(PrefixStore("weights", store), place, size, self._limit)

    def broadcast(self, weight: Tensor) -> None:
        """Send ``weight`` from rank 0, receive it in place elsewhere; returns when it has come.

        Waiting for each weight keeps the broadcast in order with the stream on which FSDP2 gathers and drops it.
        """
        # Sent as bytes, because gloo does not support every dtype.
        content = weight.detach().contiguous().view(-1).view(torch.uint8)
        self._group.broadcast([content], dist.BroadcastOptions()).wait(self._limit)

    def close(self) -> None:
        """Leave the group without waiting for the others, who may be gone."""
        self._group.abort()


def join_group(store: tuple[str, int], place: int, size: int, seconds: float, device: str) -> WeightGroup:
    """Return the group whose rank 0 holds the store at ``store`` (host, port); for all others than rank 0."""
    limit = timedelta(seconds=seconds)
    met = TCPStore(*store, is_master=False, timeout=limit, wait_for_workers=False)
    return WeightGroup(met, place, size, seconds, device)


def _group_receiver() -> Any:
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferInitInfo,
    )
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLWeightTransferEngine,
    )

    @dataclass
    class Meeting(WeightTransferInitInfo):
        store: tuple[str, int]
        place: int
        size: int
        seconds: float

    class GroupWeightTransferEngine(NCCLWeightTransferEngine):
        """vLLM's receiver of whole weights, with a `WeightGroup` in place of its communicator."""

        init_info_cls = Meeting
        group: WeightGroup | None = None

        def init_transfer_engine(self, init_info: Any) -> None:
            self.shutdown()
            place = init_info.place + self.parallel_config.rank
            self.group = join_group(init_info.store, place, init_info.size, init_info.seconds, self.device.type)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            given = self.parse_update_info(update_info)
            assert self.group is not None, "init_weight_transfer_engine comes first"
            model: Any = self.model
            for name, dtype, shape in zip(given.names, given.dtype_names, given.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.group.broadcast(weight)
                model.load_weights([(name, weight)])
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        def shutdown(self) -> None:
            if self.group is not None:
                self.group.close()
            self.group = None

    return GroupWeightTransferEngine


def _memory_receiver() -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
        IPCWeightTransferEngine,
    )
    from vllm.distributed.weight_transfer.packed_tensor import (  # pyright: ignore[reportMissingImports]
        unpack_tensor,
    )

    class MemoryWeightTransferEngine(IPCWeightTransferEngine):
        """vLLM's receiver of packed buckets with a file in memory in a CUDA handle's place."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # nothing else runs on a CPU

        def receive_weights(self, update_info: Any) -> None:
            content = opened(update_info.ipc_handles)[: sum(update_info.tensor_sizes)]
            dtypes = [getattr(torch, name) for name in update_info.dtype_names]
            given = unpack_tensor(content, update_info.names, update_info.shapes, dtypes, update_info.tensor_sizes)
            model: Any = self.model
            # Layers keep the given tensors until they have all of their weights, but the bucket is overwritten.
            model.load_weights([(name, weight.clone()) for name, weight in given])

    return MemoryWeightTransferEngine


_OWN_ENGINES: Mapping[str, Callable[[], Any]] = {"magicrl_group": _group_receiver, "magicrl_memory": _memory_receiver}
Shapes = dict[str, tuple[int, ...]]


class VllmWeights:
    """Loads a learner's weights into vLLM's ``LLMEngine``, which was started from the model ``folder``."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine = engine
        self._shapes = saved_shapes(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self._tied = bool(config.get_text_config().tie_word_embeddings)
        self._folder = folder
        self.begun = False
        """Whether an update has started and not finished, so that old and new weights are mixed."""
        self._came: Shapes = {}  # weights in the buckets of the current update

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights. The caller must reset the KV cache.

        Raises:
            ValueError: A weight is missing, unknown or of another shape. Nothing is changed then.
        """
        if (set(weights) ^ set(self._shapes)) - {"lm_head.weight"}:
            weights = as_saved(weights, self._folder)
        # Before the first worker changes anything: an interrupted reload would leave old and new weights mixed.
        check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, self._shapes, tied=self._tied)
        self.abandon()
        if not torch.cuda.is_available():
            self._engine.apply_model(expect_plain_experts)
        with torch.no_grad():
            if self._engine.vllm_config.parallel_config.world_size == 1:
                self._rpc("reload_weights", weights_iterator=iter(weights.items()), is_checkpoint_format=True)
            else:
                size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
                with tempfile.TemporaryDirectory(prefix="magicrl-weights-", dir=shared_memory(size)) as folder:
                    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
                    save_file(tensors, Path(folder) / "model.safetensors")
                    self._rpc("reload_weights", weights_path=folder, is_checkpoint_format=True)
        self._pack()

    def join(self, store: tuple[str, int], place: int, size: int, seconds: float) -> None:
        """Make the workers meet the sending rank, which holds ``store``. The first worker gets number ``place``."""
        info = {"store": store, "place": place, "size": size, "seconds": seconds}
        self._rpc("init_weight_transfer_engine", init_info=info)

    def take(self, infos: Sequence[WeightInfo]) -> None:
        """Do as `load`, with the weights that the joined rank sends at the same time."""
        # vLLM silently ignores some unknown names.
        check_shapes({weight.name: weight.shape for weight in infos}, self._shapes, tied=self._tied)
        self._start()
        self._rpc("update_weights", update_info=update_info(infos))
        self._finish()
        self._pack()

    def receive(self, bucket: WeightBucket) -> None:
        """Copy the weights of a bucket. After the last bucket no worker has its memory open."""
        if bucket.first:
            self.abandon()
            self._rpc("init_weight_transfer_engine", init_info={"packed": True})
            self._start()
            self._came = {}
        self._came |= {weight.name: weight.shape for weight in bucket.weights}
        self._rpc("update_weights", update_info=bucket.update_info())
        if bucket.last:
            check_shapes(self._came, self._shapes, tied=self._tied)
            self._finish()

    def complete(self) -> None:
        """Make the workers compute with the received weights."""
        assert not self.begun, "the last bucket was received"
        self._pack()

    def abandon(self) -> None:
        """End an update that will not be completed. vLLM has mixed weights until it loads others."""
        if not self.begun:
            return
        with contextlib.suppress(Exception):  # workers without a failure still have an update open and refuse a new one
            self._rpc("start_weight_update")
        self._finish()

    def _start(self) -> None:
        self.begun = True
        self._rpc("start_weight_update")

    def _finish(self) -> None:
        self._rpc("finish_weight_update")
        self.begun = False

    def _pack(self) -> None:
        # vLLM's CPU layers multiply with packed copies, and its reload does not pack the tied head again.
        if not torch.cuda.is_available():
            self._engine.apply_model(pack_again)

    def _rpc(self, method: str, **arguments: Any) -> None:
        self._engine.collective_rpc(method, kwargs=arguments)


def expect_plain_experts(model: torch.nn.Module) -> int:
    """Reset vLLM's CPU experts so that the next loading sets them up and packs them again. Return their number."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    experts: list[Any] = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in experts:
        method.moe_kernel = None
    return len(experts)


def pack_again(model: torch.nn.Module) -> int:
    """Pack again every layer of vLLM's CPU model that kept its weight. Return their number."""
    from vllm.model_executor.layers.utils import (  # pyright: ignore[reportMissingImports]
        dispatch_cpu_unquantized_gemm,
    )

    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    kept = [layer for layer in layers if layer.weight is not None and layer.weight.numel()]
    for layer in kept:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return len(kept)


def saved_shapes(folder: Path) -> Shapes:
    """Return names and shapes of the weights in a model folder, read from the files' headers."""
    shapes: Shapes = {}
    for path in weight_paths(folder, str(folder)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def as_saved(weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Convert a learner's weights to the layout of the files in ``folder``, which vLLM reads.

    The experts of a mixture are one tensor in the learner and may be one tensor each in the files. Weights that are not
    trained (the bias by which DeepSeek-V3 chooses experts) are only in the files.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    untrained = {name for name, _ in model.named_buffers()} - set(weights)
    found: dict[str, Tensor] = {}
    for path in weight_paths(folder, str(folder)):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in untrained.intersection(file.keys())}
    return found | revert_weight_conversion(model, dict(weights))


def check_shapes(given: Shapes, wanted: Shapes, *, tied: bool) -> None:
    """Raise ``ValueError`` unless ``given`` are exactly a model's weights. A tied head may be given or not."""
    free = {"lm_head.weight"} if tied else set[str]()
    for trouble, names in (
        ("no weights were given for", set(wanted) - set(given) - free),
        ("weights for parameters that the engine's model does not have", set(given) - set(wanted) - free),
        (
            "weights of another shape than the engine's model has",
            {name for name in set(given) & set(wanted) if given[name] != wanted[name]},
        ),
    ):
        if names:
            raise ValueError(f"{trouble}: {', '.join(sorted(names)[:5])}")
