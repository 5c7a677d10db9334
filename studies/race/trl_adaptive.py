"""TRL's adaptive entropy coefficient (``use_adaptive_entropy``, TRL 1.16), as a baseline.

    magicrl train tiny --set entropy.controller=studies/race/trl_adaptive.py:make --set entropy.target=0.2

The bonus applies if the entropy of the previous step was at or below the target. The coefficient then rises by D, and
otherwise falls by D, within [0, 1]. This is the built-in controller one step later, with a maximum, and rising at
equality. TRL changes it once per update, here it changes once per step.
"""

from __future__ import annotations

from magicrl.algorithms.entropy import AdaptiveEntropyController, ControllerSettings


class UpAtEquality(AdaptiveEntropyController):
    """Adaptive controller whose coefficient also rises at the target."""

    def observe(self, entropy: float) -> None:
        super().observe(entropy)
        if entropy == self.target:
            self.c = min(self.c + self.step, self.c_max)


def make(s: ControllerSettings) -> UpAtEquality:
    """Make it from ``entropy.target``, ``step`` and ``maximum``; TRL's values are 0.2, 0.005 and 1."""
    target, step, maximum = (
        own if value is None else value
        for value, own in zip((s.target, s.step, s.maximum), (0.2, 0.005, 1.0), strict=True)
    )
    return UpAtEquality(target, step, c_max=maximum, lagged=True)
