"""LoRA adapters in a running vLLM, which applies them itself. The base weights do not change (vLLM 0.32).

One adapter with a fixed name and number is replaced after each update, and every request uses it. The workers load it
from a folder in PEFT's format in shared memory, as vLLM always does. vLLM silently ignores an adapter for a layer that
it does not know by that name. Therefore the first adapters have no zeros and are looked up in vLLM's layers, and an
engine that lacks some is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from magicrl.config.model_schema import LoraConfig
from magicrl.models.adapters import write_adapters
from magicrl.rollout.weight_buckets import shared_memory

_NAME, _NUMBER = "policy", 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks for which vLLM can reserve memory


class AdaptersRefused(ValueError):
    """Error for adapters that vLLM cannot apply. Merged weights are used instead."""


def adapters_fault(
    config: LoraConfig, *, wanted: bool | None, dtype: str, on_gpu: bool, sleeps: bool, direct_weights: bool
) -> str | None:
    """Return the reason to give vLLM merged weights instead, as far as it is known before vLLM starts, or None."""
    if wanted is False:
        return "rollout.vllm.adapters = false"
    if wanted is None and not on_gpu:
        return "with adapters its CPU build samples slower; rollout.vllm.adapters = true sends them all the same"
    if config.rank > _RANKS[-1]:
        return f"rank {config.rank} is above vLLM's largest, {_RANKS[-1]}"
    if direct_weights:
        return 'cluster.rollout.weight_copy = "direct" sends whole weights'
    if on_gpu and dtype == "float32":
        return "vLLM's LoRA kernels on a GPU have no float32"
    if on_gpu and sleeps:
        return "an engine that lends its GPU to the learner gives up the base's weights, too"
    return None


def adapter_options(config: LoraConfig) -> dict[str, Any]:
    """Return the arguments for vLLM's ``EngineArgs``."""
    rank = next(rank for rank in _RANKS if rank >= config.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


class VllmAdapters:
    """Loads a learner's adapters into vLLM's ``LLMEngine``, which was started with `adapter_options`.

    Args:
        engine: The engine.
        config: Configuration of the adapters.
        shapes: Their shapes by PEFT's names.

    Raises:
        AdaptersRefused: vLLM does not have all of their layers.
    """

    def __init__(self, engine: Any, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._engine, self._config, self._shapes = engine, config, dict(shapes)
        try:
            self.load({name: torch.ones(shape) for name, shape in shapes.items()})
        except (ValueError, RuntimeError) as error:
            raise AdaptersRefused(" ".join(str(error).split())[:300]) from error
        wanted = len(shapes) // 2
        if (found := min(engine.apply_model(filled))) != wanted:
            raise AdaptersRefused(f"it has {found} of {wanted} adapted layers under their names")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapters. The caller must reset the KV cache.

        Raises:
            ValueError: Their shapes are others. Nothing is changed then.
        """
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if given != self._shapes:
            differing = sorted(name for name, _ in given.items() ^ self._shapes.items())
            raise ValueError(f"these are not the adapters that the engine was made for: {', '.join(differing[:3])}")
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="magicrl-adapters-", dir=shared_memory(size)) as folder:
            write_adapters(Path(folder), tensors, self._config)
            self._engine.add_lora(self.request(folder, replace=True))

    def request(self, folder: str = "loaded", *, replace: bool = False) -> Any:
        """Return a ``LoRARequest``: by default that of a request for samples, which uses the loaded adapters."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        return LoRARequest(_NAME, _NUMBER, folder, load_inplace=replace)


def filled(model: torch.nn.Module) -> int:
    """Return the number of adapters in a worker's model that are not 0. vLLM joins some layers, with one adapter per
    slice."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_b_stacked")]
    return sum(bool(part[0].any()) for layer in layers for part in layer.lora_b_stacked)
