"""New weights into a running vLLM: the one place that knows how this version of vLLM takes them.

vLLM's ``reload_weights`` runs in every worker. Where the only worker lives in this process it is given the tensors
themselves; several workers (tensor parallel) read them from a folder in shared memory, each its own shard. On a CPU
vLLM multiplies with packed copies of the weights. Its reload packs anew what it packed away, but not an output head
that is the embedding (tied): that one would go on multiplying with the old weights, with nothing but a warning. So
every layer that keeps its weight beside the packed copy is packed again. (vLLM 0.32.)
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from magicrl.rollout.vllm_transfer import Meeting, Told, worker_meeting, worker_update

Shapes = dict[str, tuple[int, ...]]
_TIED_HEAD = "lm_head.weight"


class VllmWeights:
    """Gives a vLLM engine the weights of a learner.

    Args:
        engine: vLLM's ``LLMEngine``.
        folder: the model folder it was started from; tells which weights there are.

    Raises:
        ValueError: the folder's weights cannot be read.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine = engine
        self._shapes = saved_shapes(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self._tied = bool(config.get_text_config().tie_word_embeddings)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; what was computed with the old ones is forgotten.

        Requests in flight keep their tokens and go on under the new weights.

        Raises:
            ValueError: a weight is missing, unknown or of another shape; nothing is changed then.
        """
        check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, self._shapes, tied=self._tied)
        with torch.no_grad():
            if self._workers() == 1:
                self._rpc("reload_weights", weights_iterator=iter(weights.items()), is_checkpoint_format=True)
            else:
                self._reload_from_shared_memory(weights)
        self._forget()

    def join(self, meeting: Meeting, place: int) -> None:
        """Have the workers meet the rank that sends, the first of them as number ``place`` of the group."""
        self._rpc("init_weight_transfer_engine", init_info=worker_meeting(meeting, place))

    def take(self, told: Sequence[Told]) -> None:
        """As `load`, with what the rank that was met sends at the same time."""
        self._rpc("start_weight_update")
        self._rpc("update_weights", update_info=worker_update(told))
        self._rpc("finish_weight_update")
        self._forget()

    def _forget(self) -> None:
        """What was made of the old weights."""
        if not torch.cuda.is_available():
            self._engine.apply_model(pack_again)
        # keys and values of the old weights: of finished prompts, and of what runs, which is computed again
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _workers(self) -> int:
        return int(self._engine.vllm_config.parallel_config.world_size)

    def _rpc(self, method: str, **arguments: Any) -> None:
        self._engine.collective_rpc(method, kwargs=arguments)

    def _reload_from_shared_memory(self, weights: Mapping[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        with tempfile.TemporaryDirectory(prefix="magicrl-weights-", dir=_shared_memory(size)) as folder:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, Path(folder) / "model.safetensors")
            self._rpc("reload_weights", weights_path=folder, is_checkpoint_format=True)


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


def check_shapes(given: Shapes, wanted: Shapes, *, tied: bool) -> None:
    """Raise ``ValueError`` unless ``given`` are all the weights that a model has; a tied head may stand or not."""
    free = {_TIED_HEAD} if tied else set[str]()
    for trouble, names in (
        ("no weights were given for", set(wanted) - set(given) - free),
        ("weights for parameters that the engine's model does not have", set(given) - set(wanted) - free),
        (
            "weights of another shape than the engine's model has",
            {name for name in set(given) & set(wanted) if given[name] != wanted[name]},
        ),
    ):
        if names:
            raise ValueError(f"{trouble}: {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _shared_memory(size: int) -> str | None:
    """Linux's memory file system if ``size`` bytes fit with room to spare, else the ordinary temporary folder."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and shutil.disk_usage(folder).free > 1.1 * size else None
