"""Low-rank adapters by PEFT: an option of the learner, imported only where it is used."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from magicrl.config.errors import RecipeError
from magicrl.config.schema import LoraConfig

_ADAPTER = "default"
_SEED = 0


class LoraAdapters:
    """Adapters injected into ``model``: the model's own weights are frozen, the adapters' are trained.

    B starts at 0, so the policy starts as the model itself. A starts from a fixed seed.

    Raises:
        RecipeError: the model has no such layers.
        ValueError: peft is not installed, or the output head or embedding would be adapted.
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
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        # the learner decides about precision: adapters have float32 masters like any other weight
        try:
            with torch.random.fork_rng():  # what PEFT draws is drawn again below
                self._peft: Any = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
        except ValueError as error:
            linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
            named = f"{list(config.target_modules)} are no layers of this model"
            raise RecipeError(
                f"{named}; it has: {', '.join(sorted(linear))}", key="model.lora.target_modules"
            ) from error
        self.model = cast(PreTrainedModel, self._peft.get_base_model())
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

    def start_values(self) -> dict[str, Tensor]:
        """What the adapters start from, by parameter name, on the CPU: A by ``nn.Linear``'s rule, B 0.

        It depends on the adapters' names and shapes alone, so that ranks with an empty model find the same.
        """
        generator = torch.Generator().manual_seed(_SEED)
        values: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            a, b = (torch.zeros(half[_ADAPTER].weight.shape) for half in (layer.lora_A, layer.lora_B))
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            values |= {f"{name}.lora_A.{_ADAPTER}.weight": a, f"{name}.lora_B.{_ADAPTER}.weight": b}
        return values

    @torch.no_grad()
    def merged_weights(self, prefix: str = "") -> dict[str, Tensor]:
        """The model's weights with the adapters added in float32, by the names it had without adapters.

        Args:
            prefix: only weights whose names begin with it, such as ``model.layers.3.``.
        """
        weights: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name.startswith(prefix) and ".lora_" not in name:
                weights[name.replace(".base_layer.", ".")] = parameter.detach()
        for name, layer in self._layers.items():
            if not name.startswith(prefix):
                continue
            base = weights[f"{name}.weight"]
            wide = torch.promote_types(base.dtype, torch.float32)
            delta = layer.get_delta_weight(_ADAPTER).to(wide)
            weights[f"{name}.weight"] = (base.to(wide) + delta).to(base.dtype)
        return weights

    def merged_model(self) -> PreTrainedModel:
        """A copy of the model without adapters, their effect merged into its weights."""
        plain = cast(PreTrainedModel, copy.deepcopy(self._peft).unload())
        plain.load_state_dict(self.merged_weights(), strict=False)
        return plain
