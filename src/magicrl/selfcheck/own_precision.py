"""A float64 model that is float64 throughout: transformers' RMSNorm computes in float32 whatever its input.

With it, layouts that compute a prompt once or many times round the gradient differently, at 1e-6; that would hide any
error smaller than that.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)


def in_own_precision(model: Model) -> Model:
    """Let every RMSNorm of ``model`` compute in the precision of its input; returns the model."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
    return model


def _norm(self: Any, hidden: Tensor) -> Tensor:
    return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
