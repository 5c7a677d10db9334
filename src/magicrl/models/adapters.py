"""LoRA adapters: in a model, where only they are trained, and as folders in PEFT's format.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``, which PEFT, transformers and vLLM read.
Tensors are named after the layers, ``base_model.model.LAYER.lora_A.weight`` (``[rank, inputs]``) and ``.lora_B.weight``
(``[outputs, rank]``). A layer's weight becomes W + ``alpha / rank * B A``.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from magicrl.config.errors import RecipeError, under
from magicrl.config.model_schema import LoraConfig
from magicrl.models.model_files import read_object, weights_fingerprint
from magicrl.models.routing import experts_of

ADAPTER = "adapter"
"""Name of the adapter folder inside the folder of the merged model."""
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
BASE = "magicrl.json"
"""File with a checksum of the weights that the adapters were trained on."""
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
    "alora_invocation_tokens": None,
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations of PEFT that also change the model's own weights, which a folder of adapters does not hold."""
_ADAPTER = "default"
_SEED = 0
_HALVES = ("lora_A", "lora_B")


class LoraAdapters:
    """Adapters in ``model``, whose own weights are frozen.

    Without ``config.start`` B starts at 0, so that the policy starts as the model itself, and A from a fixed seed.

    Raises:
        RecipeError: The model lacks layers of ``config``, or ``config.start`` holds adapters of another model.
        ValueError: PEFT is not installed.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        try:
            import peft
        except ImportError as error:
            raise ValueError("model.lora needs PEFT; install it with: pip install 'magicrl[lora]'") from error
        config = fitted(config, model)
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=cast(int, config.alpha),
            target_modules=list(config.target_modules),
            # No dropout, as in the whole model: rho compares two log-probs of one distribution.
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        # The learner decides the precision: adapters have float32 masters like other weights.
        with torch.random.fork_rng():  # PEFT's values are replaced below
            self._peft: Any = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
        self.config = config
        self.model = cast(PreTrainedModel, self._peft.get_base_model())
        self.base = str(self.model.name_or_path)
        self._layers: dict[str, Any] = {
            name: module for name, module in self.model.named_modules() if hasattr(module, "lora_A")
        }
        for name, value in self.start_values().items():
            self.model.get_parameter(name).data.copy_(value)

    def _names(self) -> dict[str, str]:
        """Return the parameter names by PEFT's names in files, with the two of a layer next to each other."""
        return {tensor_name(n, half): f"{n}.{half}.{_ADAPTER}.weight" for n in self._layers for half in _HALVES}

    def start_values(self) -> dict[str, Tensor]:
        """Return the adapters' initial values by parameter name, on the CPU: ``config.start``, or A as in ``nn.Linear``
        and B 0.

        The latter depend only on the adapters' names and shapes, so that ranks with an empty model get the same.
        """
        names = self._names()
        shapes = {name: tuple(self.model.get_parameter(own).shape) for name, own in names.items()}
        if self.config.start is not None:
            with under("model.lora.start"):
                check_adapters(Path(self.config.start), self.config, self.base)
                found = read_adapters(Path(self.config.start), shapes, self.base)
            return {own: found[name].float() for name, own in names.items()}
        generator = torch.Generator().manual_seed(_SEED)
        values: dict[str, Tensor] = {}
        for name, own in names.items():
            values[own] = torch.zeros(shapes[name])
            if ".lora_A." in own:
                torch.nn.init.kaiming_uniform_(values[own], a=math.sqrt(5), generator=generator)
        return values

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the adapters of layers that start with ``prefix``, by PEFT's names, in the compute precision."""
        return {
            name: self.model.get_parameter(own).detach()
            for name, own in self._names().items()
            if own.startswith(prefix)
        }

    def write(self, folder: Path) -> None:
        """Write the adapters in PEFT's format."""
        write_adapters(folder, self.tensors(), self.config, self.base)

    @torch.no_grad()
    def merged_weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the model's weights with the adapters added in float32, by the names without adapters.

        Only those whose names start with ``prefix``, such as ``model.layers.3.``.
        """
        weights: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name.startswith(prefix) and ".lora_" not in name:
                weights[plain_name(name)] = parameter.detach()
        for name, layer in self._layers.items():
            if not name.startswith(prefix):
                continue
            base = weights[f"{name}.weight"]
            # Added before rounding: in bfloat16 most of a small delta would be lost, like small updates.
            wide = torch.promote_types(base.dtype, torch.float32)
            delta = layer.get_delta_weight(_ADAPTER).to(wide)
            weights[f"{name}.weight"] = (base.to(wide) + delta).to(base.dtype)
        return weights

    def merged_model(self) -> PreTrainedModel:
        """Return a copy of the model without adapters, their effect merged into its weights."""
        # From a copy, since the learner's model keeps its adapters.
        plain = cast(PreTrainedModel, copy.deepcopy(self._peft).unload())
        plain.load_state_dict(self.merged_weights(), strict=False)
        return plain


def plain_name(name: str) -> str:
    """Return a weight's name in a model without adapters."""
    return name.replace(".base_layer.", ".")


def fitted(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Return ``config`` with the target modules that ``model`` has.

    Raises:
        RecipeError: The model has none of them, or lacks a name that is not from the default list.
    """
    # The head's matrix may be the embedding's, and `head.py` computes with it.
    layers = {name: one for name, one in model.named_modules() if one is not model.get_output_embeddings()}
    names = {name.rpartition(".")[2] for name, module in layers.items() if isinstance(module, nn.Linear)}
    names -= {name for name in config.target_modules if _means_experts(name, model)}
    found = tuple(name for name in config.target_modules if name in names)
    missing = [name for name in config.target_modules if name not in names]
    if not missing:
        return config
    text = (
        f"{', '.join(missing)}: this model has no linear layers with these names that can be adapted; it has: "
        f"{', '.join(sorted(names))}" + " (experts are not linear layers)" * bool(experts_of(model.config))
    )
    if not found or not set(missing).issubset(LoraConfig().target_modules):
        raise RecipeError(text, key="model.lora.target_modules")
    return config.model_copy(update={"target_modules": found})


def _means_experts(name: str, model: PreTrainedModel) -> bool:
    """Return whether PEFT takes the name of linear layers for that of experts, and adapts these tensors instead."""
    try:
        import peft
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # earlier versions adapt linear layers
        return False
    settings: Any = peft.LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(settings, model, None)
    except ValueError:  # of experts, and to be named with another
        return True
    return name not in settings.target_modules


def tensor_name(layer: str, half: str) -> str:
    """Return PEFT's name of ``half`` (``lora_A`` or ``lora_B``) of a layer's adapter."""
    return f"{_PREFIX}{layer}.{half}.weight"


def adapter_shapes(model: PreTrainedModel, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of adapters for ``model``, by PEFT's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    modules = fitted(config, model).target_modules
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in modules:
            shapes[tensor_name(name, "lora_A")] = (config.rank, layer.in_features)
            shapes[tensor_name(name, "lora_B")] = (layer.out_features, config.rank)
    return shapes


def write_adapters(folder: Path, tensors: Mapping[str, Tensor], config: LoraConfig, base: str = "") -> None:
    """Write adapters (by PEFT's names) into ``folder``, which is created.

    ``base`` names the model that they belong to, whose weights are then recorded. An engine that has it needs no name.
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
    if base and Path(base).is_dir():  # a hub name names its weights
        (folder / BASE).write_text(
            json.dumps({"base_weights": weights_fingerprint(Path(base))}) + "\n", encoding="utf-8"
        )
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS)


def check_adapters(folder: Path, config: LoraConfig, base: str) -> None:
    """Raise unless a folder holds adapters of this configuration and of the model ``base``.

    magicrl records a checksum of the model's weights. PEFT records its folder or hub name only. The same model may have
    another path here, so then the last part of both names must agree.

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
    begun = str(found.get("init_lora_weights"))
    if begun.startswith(_CHANGES_BASE):
        raise RecipeError(
            f"{folder} has init_lora_weights = {begun!r}, which changed the model's own weights as well; convert the "
            "adapters to plain LoRA: save_pretrained(folder, path_initial_model_for_weight_conversion=...) of PEFT",
            key="",
        )
    of = str(found.get("base_model_name_or_path") or "")
    other, whose = bool(of and base and Path(of).name != Path(base).name), ""
    if (folder / BASE).is_file() and Path(base).is_dir():
        other = read_object(folder / BASE).get("base_weights") != weights_fingerprint(Path(base))
        whose = " with other weights"
    if other:
        raise RecipeError(
            f"{folder} holds adapters of {of}{whose}, and the start model is {base}; give adapters that were trained "
            "on it",
            key="",
        )
    # The layers are those of the tensors, which `read_adapters` compares.
    for name, value, wanted in (
        ("rank", found.get("r"), config.rank),
        ("alpha", found.get("lora_alpha"), config.alpha),
    ):
        if value != wanted:
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
