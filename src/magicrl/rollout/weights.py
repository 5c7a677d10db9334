"""Copy a learner's weights into an engine's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy ``weights`` (HF parameter names to tensors) into ``model``, cast to its precision and device.

    A tied parameter (an ``lm_head`` that is the embedding) needs one of its names; further names must hold the
    same values. Nothing is written unless every name and shape fits.

    Raises:
        ValueError: a parameter is missing, unknown, of another shape, or its tied names disagree.
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    unknown = set(weights) - set(targets)
    if unknown:
        raise ValueError(f"weights for parameters that the engine's model does not have: {_listed(unknown)}")
    chosen: dict[int, str] = {}
    for name, value in weights.items():
        target = targets[name]
        if tuple(value.shape) != tuple(target.shape):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the engine's model wants {tuple(target.shape)}")
        other = chosen.setdefault(id(target), name)
        twin = weights[other]
        if other != name and twin.data_ptr() != value.data_ptr() and not torch.equal(twin, value):
            raise ValueError(
                f"{name} and {other} are tied in the engine's model but differ in the given weights; "
                "load the engine's model with tie_word_embeddings as the learner's"
            )
    missing = {name for name, parameter in model.named_parameters() if id(parameter) not in chosen}
    if missing:
        raise ValueError(f"no weights were given for: {_listed(missing)}")
    for name in chosen.values():
        targets[name].copy_(weights[name])
