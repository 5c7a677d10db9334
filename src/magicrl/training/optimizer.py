"""AdamW on master weights, which may be more precise than the weights that the model computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from magicrl.config.schema import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")
_WIDEN_CHUNK = 1 << 20
_NORM_CHUNK = 1 << 12


class MasterOptimizer:
    """Float32 masters, AdamW and gradient clipping for a model that computes in ``compute_dtype``.

    In bfloat16 a weight of 1 cannot move by less than 1/256, so steps of 1e-6 would be lost, and so would
    small gradients added to large ones: weights, gradients and moments are kept in float32, the model holds a
    rounded copy. Where the model already computes in the masters' precision the two are the same tensors.

    Args:
        parameters: the trained parameters by name, each tied one once; float32 (or float64, for tests).
            Their data are given ``compute_dtype`` here.
        config: AdamW's settings; the learning rate is given at each step.
        compute_dtype: what the model computes in.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, compute_dtype: torch.dtype
    ) -> None:
        assert parameters, "nothing to train"
        self._config = config
        self._compute = dict(parameters)
        self._masters: dict[str, Tensor] = {}
        for name, parameter in self._compute.items():
            if compute_dtype in (torch.float32, torch.float64):
                parameter.data = parameter.data.to(compute_dtype)
                self._masters[name] = parameter
                continue
            master = parameter.detach().to(torch.float32, copy=True).requires_grad_()
            master.grad = torch.zeros_like(master)
            self._masters[name] = master
            parameter.data = parameter.data.to(compute_dtype)
            # at once, so that no more than a layer's gradients exist twice
            parameter.register_post_accumulate_grad_hook(partial(_collect, master))
        self._shared = all(m is self._compute[name] for name, m in self._masters.items())
        self._adam = torch.optim.AdamW(
            list(self._masters.values()),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.steps = 0

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """What a backward pass may add ``parameter``'s gradient to itself; None if it is not trained."""
        for name, trained in self._compute.items():
            if trained is parameter:
                master = self._masters[name]
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                return master.grad
        return None

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of all backward passes since the last step, by parameter name; zeros where nothing flowed."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def gradient_norm(self) -> float:
        """Global L2 norm of the collected gradients."""
        return math.sqrt(sum(float(square_sum(gradient)) for gradient in self.gradients().values()))

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_norm: float) -> None:
        """Clip to ``max_grad_norm``, take one AdamW step, refresh the model's copy, forget the gradients.

        Args:
            learning_rate: of this step.
            gradient_norm: what ``gradient_norm()`` gave.
        """
        gradients = self.gradients().values()
        if gradient_norm > self._config.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(self._config.max_grad_norm / gradient_norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.steps += 1
        self.forget()
        self._refresh()

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """Whether every master is; a sum is enough to see, and one look at the device."""
        return bool(torch.stack([master.sum() for master in self._masters.values()]).isfinite().all())

    def forget(self) -> None:
        """Drop the collected gradients."""
        for name, master in self._masters.items():
            if master is self._compute[name]:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()
                self._compute[name].grad = None

    def state(self) -> dict[str, Any]:
        """``weights/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>`` (from the first step on) and ``meta``.

        The tensors are the living ones: they change with the next step.
        """
        tensors = {f"weights/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for moment in _MOMENTS:
                if master in self._adam.state:
                    tensors[f"{moment}/{name}"] = self._adam.state[master][moment]
        return {**tensors, "meta": {"optimizer_steps": self.steps}}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            ValueError: the state's parameters are not this model's (the first differences are named).
        """
        steps = int(state["meta"]["optimizer_steps"])
        expected = {f"weights/{name}": master.shape for name, master in self._masters.items()}
        if steps:
            expected |= {f"{m}/{name}": master.shape for name, master in self._masters.items() for m in _MOMENTS}
        given = {name: value.shape for name, value in state.items() if isinstance(value, Tensor)}
        if given != expected:
            differing = sorted(set(given.items()) ^ set(expected.items()))[:3]
            raise ValueError(
                f"the checkpoint does not belong to this model: it differs in {[name for name, _ in differing]} "
                f"({len(given)} tensors there, {len(expected)} expected); resume with the recipe that wrote it"
            )
        self._adam.state.clear()
        for name, master in self._masters.items():
            master.copy_(state[f"weights/{name}"])
            if steps:
                self._adam.state[master] = {
                    "step": torch.tensor(float(steps), device=master.device),
                    **{m: torch.empty_like(master).copy_(state[f"{m}/{name}"]) for m in _MOMENTS},
                }
        self.steps = steps
        self.forget()
        self._refresh()

    def _refresh(self) -> None:
        if not self._shared:
            for name, parameter in self._compute.items():
                parameter.data.copy_(self._masters[name])


def _collect(master: Tensor, parameter: Tensor) -> None:
    """Add a parameter's gradient to its master's, and drop it."""
    if parameter.grad is not None:
        assert master.grad is not None
        _add_widened(master.grad, parameter.grad)
        parameter.grad = None


def _add_widened(total: Tensor, part: Tensor) -> None:
    """``total += part`` for a narrower ``part``, through a small buffer: six times as fast as torch's mixed sum."""
    flat_total, flat_part = total.view(-1), part.reshape(-1)
    buffer = torch.empty(min(_WIDEN_CHUNK, len(flat_total)), dtype=total.dtype, device=total.device)
    for into, piece in zip(flat_total.split(_WIDEN_CHUNK), flat_part.split(_WIDEN_CHUNK), strict=True):
        into.add_(buffer[: len(piece)].copy_(piece))


def square_sum(values: Tensor) -> Tensor:
    """Sum of squares, float64. In one float32 sum over an embedding's gradient the third digit is wrong already."""
    flat = values.reshape(-1)
    whole = len(flat) // _NORM_CHUNK * _NORM_CHUNK
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_CHUNK), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    return rows.square().sum() + rest.square()
