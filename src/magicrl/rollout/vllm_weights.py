"""New weights into a running vLLM: the one place that knows how this version of vLLM takes them (vLLM 0.32).

From this process: vLLM's ``reload_weights`` runs in every worker. Where the only worker lives in this process it is
given the tensors themselves; several workers (tensor parallel) read them from a folder in shared memory. On a CPU vLLM
multiplies with packed copies of the weights. Its reload packs anew what it packed away, but not an output head that is
the embedding (tied), which would go on multiplying with the old weights, with nothing but a warning. So every layer
that keeps its weight beside the packed copy is packed again. Experts are packed once, after the first loading: a reload
would copy plain weights over packed ones, so that they are made to forget that they were.

From the learner's ranks straight into the workers: vLLM's own weight transfer, by what `TRANSPORTS` has for the
placement. On devices of their own, workers and rank 0 of the learner form a group (NCCL), and rank 0 sends while they
take. On the ranks' devices each rank lends its worker one bucket after the other (CUDA IPC; `weight_buckets`). Neither
has CPUs: there the same calls go over gloo and files in memory, by small engines registered with vLLM. Whoever owns
both sides asks both.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from magicrl.rollout.weight_buckets import BUCKET, WeightBucket, WeightInfo, opened, shared_memory

_log = logging.getLogger(__name__)
Placed = Literal["apart", "colocated"]
"""Where a worker of an engine is: on a device of its own, or on that of a rank of the learner."""
TRANSPORTS: Mapping[tuple[Placed, bool], str] = {
    ("apart", True): "nccl",
    ("colocated", True): "ipc",  # NCCL joins no two processes on one GPU
    ("apart", False): "magicrl_gloo",
    ("colocated", False): "magicrl_memory",
}
"""Engines in vLLM's registry by placement and whether on GPUs; those of CPUs are ours."""
_RECEIVER_SECONDS = 600.0  # vLLM hands a receiver no limit of ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where sender and receivers meet."""

    host: str  # the sender's
    port: int  # free on it
    size: int  # the sender and all workers
    seconds: float  # after which an exchange over gloo gives up; NCCL's ends with its process


def transport(placed: Placed) -> str:
    """The name for vLLM's ``weight_transfer_config`` in this process; registers the CPU engines."""
    name = TRANSPORTS[placed, torch.cuda.is_available()]
    if name.startswith("magicrl_"):
        from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
            WeightTransferEngineFactory,
        )

        with contextlib.suppress(ValueError):  # registered for an engine of this process before
            WeightTransferEngineFactory.register_engine(name, _CPU_ENGINES[placed]())
    return name


class WeightSender:
    """The learner's side of a group, on every one of its ranks; only rank 0 belongs to it.

    Args:
        rendezvous: where the workers are met.
        rank: of the learner.
        told: all weights in the order in which ``stream`` yields them.
        stream: a fresh pass over (name, whole weight); yielding may be a collective of the learner's ranks.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        told: Sequence[WeightInfo],
        stream: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        self._rank, self._stream = rank, stream
        self._engine: Any = None
        self._group: Any = None
        self.ready = True  # all workers came, and none was lost since
        try:
            if torch.cuda.is_available():
                self._engine = _nccl_sender(rendezvous, rank, told, stream)
            elif rank == 0:
                self._group = gloo_group(rendezvous, 0)
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


def gloo_group(rendezvous: Rendezvous, rank: int) -> Any:
    """A gloo group beside torch's default one."""
    limit = timedelta(seconds=rendezvous.seconds)
    store = TCPStore(rendezvous.host, rendezvous.port, rendezvous.size, is_master=rank == 0, timeout=limit)
    return dist.ProcessGroupGloo(PrefixStore("weights", store), rank, rendezvous.size, limit)


def gloo_broadcast(group: Any, tensor: Tensor) -> None:
    """From rank 0, in place elsewhere; a contiguous CPU tensor of any dtype."""
    # as bytes: gloo does not know every dtype
    group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()


def _nccl_sender(
    rendezvous: Rendezvous, rank: int, told: Sequence[WeightInfo], stream: Callable[[], Iterator[tuple[str, Tensor]]]
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
        master_address=rendezvous.host,
        master_port=rendezvous.port,
        world_size=rendezvous.size,
        rank=rank,
        packed_buffer_size_bytes=BUCKET,
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
            rendezvous = Rendezvous(
                host=init_info.master_address,
                port=init_info.master_port,
                size=init_info.world_size,
                seconds=_RECEIVER_SECONDS,
            )
            self._gloo: Any = gloo_group(rendezvous, init_info.rank_offset + self.parallel_config.rank)

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
            self.receive_weights(self.parse_update_info(update_info))  # nothing runs beside it on a CPU

        def receive_weights(self, update_info: Any) -> None:
            content = opened(update_info.ipc_handles)[: sum(update_info.tensor_sizes)]
            dtypes = [getattr(torch, name) for name in update_info.dtype_names]
            given = unpack_tensor(content, update_info.names, update_info.shapes, dtypes, update_info.tensor_sizes)
            model: Any = self.model
            # the layers keep what they are given until they have all of theirs, and the bucket is filled anew
            model.load_weights([(name, weight.clone()) for name, weight in given])

    return MemoryWeightTransferEngine


_CPU_ENGINES: Mapping[Placed, Callable[[], Any]] = {"apart": _gloo_receiver, "colocated": _memory_receiver}
Shapes = dict[str, tuple[int, ...]]


class VllmWeights:
    """Gives vLLM's ``LLMEngine`` the weights of a learner; those that it has are in the model ``folder``."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine = engine
        self._shapes = saved_shapes(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self._tied = bool(config.get_text_config().tie_word_embeddings)
        self._folder = folder
        self.begun = False
        """Some new weights may have come, and others not."""
        self._came: Shapes = {}  # of the present update's buckets

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; keys and values of the old ones are the caller's to forget.

        Raises:
            ValueError: a weight is missing, unknown or of another shape; nothing is changed then.
        """
        if (set(weights) ^ set(self._shapes)) - {"lm_head.weight"}:
            weights = as_saved(weights, self._folder)
        # before the first worker is asked: a reload that breaks off would leave old and new weights mixed
        check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, self._shapes, tied=self._tied)
        self.abandon()
        if not torch.cuda.is_available():
            self._engine.apply_model(expect_plain_experts)
        with torch.no_grad():
            if self._engine.vllm_config.parallel_config.world_size == 1:
                self._rpc("reload_weights", weights_iterator=iter(weights.items()), is_checkpoint_format=True)
            else:
                self._reload_from_shared_memory(weights)
        self._pack()

    def join(self, rendezvous: Rendezvous, place: int) -> None:
        """Have the workers meet the rank that sends, the first of them as number ``place`` of the group."""
        info = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": place,
            "world_size": rendezvous.size,
            # vLLM's packing joins small weights into one buffer; the gloo receiver takes them one by one
            "packed": torch.cuda.is_available(),
            "packed_buffer_size_bytes": BUCKET,
        }
        self._rpc("init_weight_transfer_engine", init_info=info)

    def take(self, told: Sequence[WeightInfo]) -> None:
        """As `load`, with what the rank that was met sends at the same time."""
        # vLLM passes over some names that it does not know
        check_shapes({weight.name: weight.shape for weight in told}, self._shapes, tied=self._tied)
        update = {
            "names": [weight.name for weight in told],
            "dtype_names": [weight.dtype for weight in told],
            "shapes": [list(weight.shape) for weight in told],
        }
        self._start()
        self._rpc("update_weights", update_info=update)
        self._finish()
        self._pack()

    def receive(self, bucket: WeightBucket) -> None:
        """Take a copy of what is in a bucket now; after the last no worker has its memory open."""
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
        """Have the workers compute with what was received."""
        assert not self.begun, "the last bucket was received"
        self._pack()

    def abandon(self) -> None:
        """Give up weights that began to come and will not end: vLLM has a mixture then, until it is given others."""
        if not self.begun:
            return
        with contextlib.suppress(Exception):  # in workers in which it has not failed, it goes on, and vLLM says so
            self._rpc("start_weight_update")
        self._finish()

    def _start(self) -> None:
        self.begun = True
        self._rpc("start_weight_update")

    def _finish(self) -> None:
        self._rpc("finish_weight_update")
        self.begun = False

    def _pack(self) -> None:
        # vLLM's CPU layers multiply with packed copies, of which its reload misses the tied head
        if not torch.cuda.is_available():
            self._engine.apply_model(pack_again)

    def _rpc(self, method: str, **arguments: Any) -> None:
        self._engine.collective_rpc(method, kwargs=arguments)

    def _reload_from_shared_memory(self, weights: Mapping[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        with tempfile.TemporaryDirectory(prefix="magicrl-weights-", dir=shared_memory(size)) as folder:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, Path(folder) / "model.safetensors")
            self._rpc("reload_weights", weights_path=folder, is_checkpoint_format=True)


def expect_plain_experts(model: torch.nn.Module) -> int:
    """Let vLLM's CPU experts set themselves up as after the first loading, which packs; how many there were."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    experts: list[Any] = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in experts:
        method.moe_kernel = None
    return len(experts)


def pack_again(model: torch.nn.Module) -> int:
    """Pack anew every layer of vLLM's CPU model that kept its weight; how many there were."""
    from vllm.model_executor.layers.utils import (  # pyright: ignore[reportMissingImports]
        dispatch_cpu_unquantized_gemm,
    )

    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    kept = [layer for layer in layers if layer.weight is not None and layer.weight.numel()]
    for layer in kept:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return len(kept)


def saved_shapes(folder: Path) -> Shapes:
    """Names and shapes of the weights in a model folder, from the files' headers."""
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
    if not shapes:
        raise ValueError(f"{folder} has no .safetensors file: save the model in that format")
    return shapes


def as_saved(weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """A learner's weights as the files of ``folder`` have them, from which vLLM reads them.

    A mixture's experts are one tensor in the learner, and may be one each in files; what is not trained (the bias by
    which DeepSeek-V3 chooses experts) is in files alone.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    untrained = {name for name, _ in model.named_buffers()} - set(weights)
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in untrained.intersection(file.keys())}
    return found | revert_weight_conversion(model, dict(weights))


def check_shapes(given: Shapes, wanted: Shapes, *, tied: bool) -> None:
    """Raise ``ValueError`` unless ``given`` are all the weights that a model has; a tied head may stand or not."""
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
