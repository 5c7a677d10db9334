"""A target of entropy that is no constant: a share of the start's own entropy.

    magicrl train quickstart --set entropy.controller=studies/anchored.py:make --set entropy.target=0.5

Otherwise it is the adaptive controller; an arm of the suite ``target``.
"""

from __future__ import annotations

from collections.abc import Mapping

from magicrl.algorithms.entropy import PRESETS, AdaptiveEntropyController, ControllerSettings


class Anchored(AdaptiveEntropyController):
    """The adaptive controller; its target is ``share`` times the entropy that the first step measured."""

    def __init__(self, share: float, step: float, c_max: float) -> None:
        super().__init__(0.0, step, c_max=c_max)
        self.share = share
        self.first: float | None = None

    def observe(self, entropy: float) -> None:
        if self.first is None:
            self._anchor(entropy)
        super().observe(entropy)

    def _anchor(self, first: float | None) -> None:
        self.first = first
        self.target = self.share * (first or 0.0)

    def state(self) -> dict[str, float | None]:
        return {**super().state(), "first": self.first}

    def restore(self, state: Mapping[str, float | None]) -> None:
        super().restore(state)
        self._anchor(state["first"])


def make(s: ControllerSettings) -> Anchored:
    """``entropy.target`` is the share (default 0.5), ``step`` and ``maximum`` are as in the preset small."""
    small = PRESETS["small"]
    share, step, c_max = (
        own if value is None else value
        for value, own in zip((s.target, s.step, s.maximum), (0.5, small["step"], small["c_max"]), strict=True)
    )
    return Anchored(share, step, c_max)
