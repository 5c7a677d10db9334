"""A custom entropy controller: proportional control, and a second coefficient for the loss.

    magicrl train tiny --set entropy.controller=examples/controller.py:make --set entropy.target=0.3

``coefficients`` is optional. A surrogate reads the result as ``s.coefficients``, and it is logged as
``entropy/coefficient/NAME``. ``state`` and ``restore`` are saved in checkpoints, so that a resumed run is the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from magicrl.algorithms.entropy import ControllerSettings

GAIN = 0.05


class Proportional:
    """Controller with alpha = GAIN * max(0, target - entropy); ``trend`` is the change since the last step."""

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
    """Return the controller for the settings of the recipe's ``[entropy]``."""
    return Proportional(0.2 if settings.target is None else settings.target)
