"""LoRA adapters in the learner's model, through PEFT. Only the adapters are trained."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from magicrl.config.errors import RecipeError, under
from magicrl.config.model_schema import LoraConfig
from magicrl.models.adapter_files import check_adapters, read_adapters, tensor_name, write_adapters

_ADAPTER = "default"
_SEED = 0
_HALVES = ("lora_A", "lora_B")


class LoraAdapters:
    """Adapters in ``model``, whose own weights are frozen.

    Without ``config.start`` B starts at 0, so that the policy starts as the model itself, and A from a fixed seed.

    Raises:
        RecipeError: The model has no such layers, or ``config.start`` holds adapters of another model.
        ValueError: PEFT is not installed, or the output head or embedding would be adapted.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        try:
            import peft
        except ImportError as error:
            raise ValueError("model.lora needs PEFT; install it with: pip install 'magicrl[lora]'") from error
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
        try:
            with torch.random.fork_rng():  # PEFT's values are replaced below
                self._peft: Any = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
        except ValueError as error:
            linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
            named = f"{list(config.target_modules)} are not layers of this model"
            raise RecipeError(
                f"{named}; it has: {', '.join(sorted(linear))}", key="model.lora.target_modules"
            ) from error
        self.config = config
        self.model = cast(PreTrainedModel, self._peft.get_base_model())
        self.base = str(self.model.name_or_path)
        self._layers: dict[str, Any] = {
            name: module for name, module in self.model.named_modules() if hasattr(module, "lora_A")
        }
        for name, value in self.start_values().items():
            self.model.get_parameter(name).data.copy_(value)
        for part in (self.model.get_output_embeddings(), self.model.get_input_embeddings()):
            if part in self._layers.values():
                raise ValueError(
                    f"model.lora.target_modules {list(config.target_modules)} holds the output head or the embedding; "
                    "only layers of the decoder can be adapted"
                )

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
                weights[name.replace(".base_layer.", ".")] = parameter.detach()
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
