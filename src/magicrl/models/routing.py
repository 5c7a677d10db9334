"""Expert choices of mixture-of-experts routers: recorded in one pass, replayed in another.

Two passes over the same tokens round differently, and choose different experts where two scores are nearly equal. With
router replay the learner uses the sampler's choice and computes the weights of these experts with its own router, so
that gradients reach it ("rollout routing replay", arXiv:2510.11370).

Every router of transformers calls ``torch.topk`` once over its scores of all experts. `Routers` intercepts that call
inside the routers' forward, whatever the model does before and after it. It therefore needs no code for specific
models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from magicrl.models.recurrent import decoder_of
from magicrl.records import ExpertArray

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_USE = "leave out model.router_replay, or use a mixture of docs/guides/models.md"


def experts_of(config: Any) -> int:
    """Return the number of experts of each mixture from a model's configuration, 0 if there is no mixture."""
    return next((int(n) for name in _EXPERTS if (n := getattr(config, name, None))), 0)


class Routers:
    """Routers of a causal LM in the order of its layers. From now on their forward goes through this object.

    If several are made of one model, only the last one records.

    Attributes:
        layers: Index of the layer of each router.
        given: ``[tokens, routers, k]`` int64, experts for the tokens of the next passes. None lets the routers choose.
            A backward pass that recomputes layers reads it again.

    Raises:
        ValueError: The model has no routers, or unknown ones (the message names them).
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = cast(Any, model).config.get_text_config()
        count = experts_of(config)
        found = [
            (name, module)
            for name, module in decoder_of(model).named_modules()
            # A class of the same name from another package may compute something else.
            if type(module).__module__.startswith("transformers.models.") and type(module).__name__.endswith("Router")
        ]
        if not count or not found:
            what = "has no routers that are known" if count else "is no mixture of experts"
            raise ValueError(f"{type(model).__name__} (model type {config.model_type!r}) {what}; {_USE}")
        self.layers = tuple(next(int(part) for part in name.split(".") if part.isdigit()) for name, _ in found)
        self.given: Tensor | None = None
        self._names = [f"{name} ({type(module).__name__})" for name, module in found]
        self._chosen: list[Tensor | None] = [None] * len(found)
        self._dtype = np.uint8 if count <= 256 else np.uint16
        for index, (_, module) in enumerate(found):
            # Not a closure: the router of a copied model must find its own weights.
            module.forward = partial(_routed, module, _Listener(self, index, count))

    def chosen(self) -> ExpertArray:
        """Return the choice of the last pass, ``[tokens, routers, k]``. Raise ``ValueError`` for a router that made
        none.
        """
        silent = [name for name, chosen in zip(self._names, self._chosen, strict=True) if chosen is None]
        if silent:
            raise ValueError(f"{silent[0]} does not choose its experts by their greatest scores; {_USE}")
        found = torch.stack(cast("list[Tensor]", self._chosen), dim=1)
        self._chosen = [None] * len(self._chosen)  # each choice is returned once
        return found.cpu().numpy().astype(self._dtype)

    def choose(self, index: int, scores: Tensor, topk: Callable[[], Any]) -> Any:
        """Return the result of router ``index`` for its ``scores``, ``[tokens, experts]``, instead of that of
        ``topk``.
        """
        if self.given is None:
            found = topk()
            self._chosen[index] = found[1].detach()
            return found
        if self.given.shape[:2] != (len(scores), len(self.layers)):
            raise ValueError(
                f"experts were recorded for {tuple(self.given.shape[:2])} (tokens, routers), the pass has "
                f"{(len(scores), len(self.layers))}; sampler and learner must hold the same model"
            )
        experts = self.given[:, index]
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def _routed(module: nn.Module, listener: _Listener, *args: Any, **kwargs: Any) -> Any:
    with listener:
        return type(module).forward(module, *args, **kwargs)


class _Listener(TorchFunctionMode):
    """Torch-function mode that sends a router's choice among all experts to `Routers.choose`, and ignores choices
    among groups.
    """

    def __init__(self, routers: Routers, index: int, experts: int) -> None:
        super().__init__()
        self._routers, self._index, self._experts = routers, index, experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            scores = cast(Tensor, args[0] if args else named["input"])
            if scores.dim() == 2 and scores.shape[1] == self._experts:
                return self._routers.choose(self._index, scores, lambda: func(*args, **named))
        return func(*args, **named)
