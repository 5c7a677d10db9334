"""The single learner's scorer on a sharded model, over one rank's micro-batches or a slice of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicrl.distributed.learner.sharding import ShardedModel
from magicrl.distributed.learner.ulysses import SequenceSlice
from magicrl.models.memory_efficient import use_memory_efficient_layers
from magicrl.models.packing import PackedBatch
from magicrl.models.scorer import PolicyScorer


class ShardedScorer(PolicyScorer):
    """``PolicyScorer`` whose passes gather the model as they go; every rank makes as many passes as the others.

    Args:
        sharded: the model.
        settings: as ``PolicyScorer``'s.
    """

    def __init__(self, sharded: ShardedModel, **settings: Any) -> None:
        self._sharded = sharded
        super().__init__(sharded.model, **settings)

    @property
    def device(self) -> torch.device:
        return self._sharded.device

    def forward(
        self, batch: PackedBatch, temperature: float, *, head_gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``PolicyScorer.forward``; with sequence parallelism every rank of the group has the whole result."""
        assert head_gradient is None, "a shard's gradient is summed over ranks, the head's among them"
        group = self._sharded.meshes.sequence
        if group is None:
            return self._sharded.run(lambda: super(ShardedScorer, self).forward(batch, temperature))
        part = SequenceSlice.of(batch, group)

        def own() -> tuple[Tensor, Tensor]:
            hidden = self._hidden(part.input_ids, part.position_ids, part.attention)
            return self._head(hidden.index_select(0, part.predict_index), part.targets, temperature)

        logprobs, entropies = self._sharded.run(own)
        return part.gathered(logprobs, group), part.gathered(entropies, group)

    @torch.no_grad()
    def _use_memory_efficient_layers(self) -> None:
        """The probe of each layer needs its weights whole."""
        units = self._sharded.units()
        layers = {unit for prefix, unit in units if prefix}
        inside = {module for layer in layers for module in layer.modules()}  # pyright: ignore[reportAttributeAccessIssue]
        for prefix, unit in units:
            with self._sharded.whole(unit):
                outside = [m for m in self.model.modules() if m not in inside and not list(m.children())]
                for module in [unit] if prefix else outside:
                    use_memory_efficient_layers(module)  # pyright: ignore[reportArgumentType]

    def _check_model(self) -> None:
        with torch.no_grad():
            self._sharded.run(super()._check_model)
