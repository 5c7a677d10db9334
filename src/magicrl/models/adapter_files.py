"""LoRA adapter folders in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT, transformers and vLLM read them. Tensors are named after the layers, ``base_model.model.LAYER.lora_A.weight``
(``[rank, inputs]``) and ``.lora_B.weight`` (``[outputs, rank]``). A layer's weight becomes W + ``alpha / rank * B A``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from magicrl.config.errors import RecipeError
from magicrl.config.model_schema import LoraConfig
from magicrl.models.model_files import read_object

ADAPTER = "adapter"
"""Name of the adapter folder inside the folder of the merged model."""
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Options of PEFT that are not plain LoRA. Each one changes the meaning of the tensors.
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
}


def tensor_name(layer: str, half: str) -> str:
    """Return PEFT's name of ``half`` (``lora_A`` or ``lora_B``) of a layer's adapter."""
    return f"{_PREFIX}{layer}.{half}.weight"


def adapter_shapes(model: nn.Module, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of adapters for ``model``, by PEFT's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in config.target_modules:
            shapes[tensor_name(name, "lora_A")] = (config.rank, layer.in_features)
            shapes[tensor_name(name, "lora_B")] = (layer.out_features, config.rank)
    return shapes


def write_adapters(folder: Path, tensors: Mapping[str, Tensor], config: LoraConfig, base: str) -> None:
    """Write adapters (by PEFT's names) into ``folder``, which is created. ``base`` names the model that they belong
    to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.target_modules),
        "lora_dropout": 0.0,
        "inference_mode": True,
        **{name: value for name, value in _PLAIN.items() if value is not None},
    }
    (folder / CONFIG).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS)


def check_adapters(folder: Path, config: LoraConfig, base: str) -> None:
    """Raise unless a folder holds adapters of this configuration and of the model ``base``.

    PEFT records the folder or hub name of the model. The same model may have another path here, so only the last part
    of both names must agree.

    Raises:
        RecipeError: The message says what differs (key "", the setting that holds the folder).
    """
    if not (folder / CONFIG).is_file() or not (folder / TENSORS).is_file():
        raise RecipeError(f"{folder} holds no adapters in PEFT's format ({CONFIG} and {TENSORS})", key="")
    found = read_object(folder / CONFIG)
    if found.get("peft_type") != "LORA":
        raise RecipeError(f"{folder} holds {found.get('peft_type')} adapters; only LORA can be trained", key="")
    further = [name for name, value in _PLAIN.items() if (found.get(name) or None) not in (value or None, None)]
    if further:
        raise RecipeError(f"{folder} sets {', '.join(further)}; only plain LoRA can be trained", key="")
    of = str(found.get("base_model_name_or_path") or "")
    if of and base and Path(of).name != Path(base).name:
        raise RecipeError(
            f"{folder} holds adapters of {of}, and the start model is {base}; give adapters that were trained on it",
            key="",
        )
    modules = found.get("target_modules")
    given = sorted(map(str, modules)) if isinstance(modules, list) else modules
    for name, value, wanted in (
        ("rank", found.get("r"), config.rank),
        ("alpha", found.get("lora_alpha"), config.alpha),
        ("target_modules", given, config.target_modules),
    ):
        if value != (sorted(config.target_modules) if name == "target_modules" else wanted):
            raise RecipeError(
                f"{folder} holds adapters with {name} = {value}, and the recipe's model.lora.{name} is {wanted}; "
                "set it to theirs",
                key="",
            )


def read_adapters(folder: Path, shapes: Mapping[str, Collection[int]], base: str) -> dict[str, Tensor]:
    """Return the tensors of a folder by PEFT's names, which must match ``shapes``.

    Raises:
        RecipeError: A tensor is missing, unknown, or has another shape, so the adapters are another model's (key "").
    """
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{folder / TENSORS} cannot be read: {error}", key="") from None
    differing = sorted(
        name
        for name in tensors.keys() | shapes.keys()
        if name not in tensors or name not in shapes or tuple(tensors[name].shape) != tuple(shapes[name])
    )
    if differing:
        name = differing[0]
        there = list(tensors[name].shape) if name in tensors else "missing"
        here = list(shapes[name]) if name in shapes else "no such layer"
        raise RecipeError(
            f"{folder} holds adapters of another model than {base}: {len(differing)} tensors differ, first "
            f"{name.removeprefix(_PREFIX)} ({there} there, {here} for this model)",
            key="",
        )
    return tensors
