"""Random models of transformers' configurations."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from magicrl.models.packing import ATTENTION_NAME, register_attention


def made(config: Any, dtype: torch.dtype) -> Any:
    """Return a random model whose biases and norms are not zeros and ones."""
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.uniform_(-0.3, 1.5)
    return model.to(dtype).eval()
