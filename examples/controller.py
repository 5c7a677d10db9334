"""An entropy controller of one's own: proportional control, and a second coefficient that a loss row may read.

    magicrl train tiny --set entropy.controller=examples/controller.py:make --set entropy.target=0.3

``coefficients`` is optional; what it gives is ``s.coefficients`` of a surrogate and ``entropy/coefficient/...`` of the
metrics. ``state`` and ``restore`` make a resumed run go on as it would have.
"""

from __future__ import annotations

from collections.abc import Mapping

from magicrl.algorithms.entropy import ControllerSettings

GAIN = 0.05


class Proportional:
    """alpha = gain * (target - entropy), never below 0; ``trend`` is the change since the step before."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.previous: float | None = None

    def coefficient(self, entropy: float) -> float:
        return max(0.0, GAIN * (self.target - entropy))

    def coefficients(self, entropy: float) -> dict[str, float]:
        return {"trend": 0.0 if self.previous is None else entropy - self.previous}

    def observe(self, entropy: float) -> None:
        self.previous = entropy

    def state(self) -> dict[str, float | None]:
        return {"previous": self.previous}

    def restore(self, state: Mapping[str, float | None]) -> None:
        self.previous = state["previous"]


def make(settings: ControllerSettings) -> Proportional:
    return Proportional(0.2 if settings.target is None else settings.target)
