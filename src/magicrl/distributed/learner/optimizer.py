"""The single learner's optimizer on one rank's shards: each rank steps its own rows, norms are over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from magicrl.config.schema import OptimizerConfig
from magicrl.training.optimizer import MasterOptimizer, square_sum


class ShardOptimizer(MasterOptimizer):
    """``MasterOptimizer`` whose masters are the local rows of sharded float32 parameters.

    Args:
        sharded: trained parameters by name; their data are ``DTensor``.
        config: AdamW's settings.
        device: where sums over ranks are exchanged.
    """

    def __init__(self, sharded: Mapping[str, nn.Parameter], config: OptimizerConfig, device: torch.device) -> None:
        self._sharded = {name: cast(DTensor, parameter) for name, parameter in sharded.items()}
        self._device = device
        # the same memory: what AdamW changes here is what FSDP gathers
        local = {name: nn.Parameter(p.to_local().detach()) for name, p in self._sharded.items()}
        super().__init__(local, config, torch.float32)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's rows of the gradients, summed over ranks already."""
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                self._compute[name].grad = cast(DTensor, parameter.grad).to_local()
        return super().gradients()

    def gradient_norm(self) -> float:
        """Global L2 norm, the same on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in self.gradients().values():
            total += square_sum(gradient).to(self._device)
        dist.all_reduce(total)
        return math.sqrt(float(total))

    def weights_are_finite(self) -> bool:
        """Whether every rank's masters are."""
        found = torch.tensor(int(super().weights_are_finite()), device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    def forget(self) -> None:
        """Drop the collected gradients."""
        for parameter in self._sharded.values():
            parameter.grad = None
        super().forget()

    def sharded_state(self) -> dict[str, DTensor]:
        """The tensors of ``state`` as shards of whole ones, under the same keys; they share memory with it."""
        local = {key: value for key, value in self.state().items() if isinstance(value, Tensor)}
        return {key: self._as_shard(key, value) for key, value in local.items()}

    def empty_state(self, steps: int) -> dict[str, DTensor]:
        """Shards as ``sharded_state`` after ``steps`` steps, their values yet to be read."""
        kinds = ("weights", "exp_avg", "exp_avg_sq") if steps else ("weights",)
        shapes = {f"{kind}/{name}": p for kind in kinds for name, p in self._sharded.items()}
        return {key: self._as_shard(key, torch.empty_like(p.to_local())) for key, p in shapes.items()}

    def restore_shards(self, shards: Mapping[str, DTensor], steps: int) -> None:
        """Take this rank's rows of ``shards`` (keys as ``empty_state``)."""
        local = {key: value.to_local() for key, value in shards.items()}
        self.restore({**local, "meta": {"optimizer_steps": steps}})

    def restore_whole(self, shapes: Mapping[str, tuple[int, ...]], whole: Mapping[str, Tensor], steps: int) -> None:
        """Take over a state whose tensors are whole on rank 0 and nowhere else.

        Args:
            shapes: of all its tensors, the same on every rank.
            whole: on rank 0 the tensors, elsewhere nothing.
            steps: updates made.

        Raises:
            ValueError: the state's parameters are not this model's, on every rank.
        """
        shards = self.empty_state(steps)
        expected = {key: tuple(shard.shape) for key, shard in shards.items()}
        if dict(shapes) != expected:
            differing = sorted(set(shapes.items()) ^ set(expected.items()))[:3]
            raise ValueError(
                f"the checkpoint does not belong to this model: it differs in {[name for name, _ in differing]} "
                f"({len(shapes)} tensors there, {len(expected)} expected); resume with the recipe that wrote it"
            )
        for key, shard in shards.items():
            given = whole[key] if whole else torch.empty(expected[key], dtype=shard.dtype)
            given = given.to(self._device, shard.dtype).contiguous()
            part = distribute_tensor(given, shard.device_mesh, shard.placements)
            shard.to_local().copy_(part.to_local())
        self.restore_shards(shards, steps)

    def _as_shard(self, key: str, local: Tensor) -> DTensor:
        like = self._sharded[key.split("/", 1)[1]]
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def whole_state(self, keep: bool) -> dict[str, Any]:
        """The tensors of ``state`` gathered one by one to the CPU; kept where ``keep`` is true."""
        found: dict[str, Any] = {}
        for key, shard in self.sharded_state().items():
            tensor = cast(DTensor, shard.to(self._device)).full_tensor()
            if keep:
                found[key] = tensor.cpu().clone() if tensor.device.type == "cpu" else tensor.cpu()
        return found
