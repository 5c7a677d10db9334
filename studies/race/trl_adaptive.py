"""TRL's adaptive entropy coefficient (``use_adaptive_entropy``, TRL 1.16), the baseline of another library.

    magicrl train tiny --set entropy.controller=studies/race/trl_adaptive.py:make --set entropy.target=0.2

The bonus is paid where the entropy of the step before was at or below the target; the coefficient then rises by D,
and falls by D where it was above, within [0, 1]. That is the built-in controller a step late, with a ceiling, and up
at equality. TRL moves it once an update, here it moves once a step.
"""

from __future__ import annotations

from magicrl.algorithms.entropy import AdaptiveEntropyController, ControllerSettings


class UpAtEquality(AdaptiveEntropyController):
    """c rises at the target too."""

    def observe(self, entropy: float) -> None:
        super().observe(entropy)
        if entropy == self.target:
            self.c = min(self.c + self.step, self.c_max)


def make(s: ControllerSettings) -> UpAtEquality:
    """``entropy.target``, ``step``, ``maximum``; TRL's are 0.2, 0.005 and 1."""
    target, step, maximum = (
        own if value is None else value
        for value, own in zip((s.target, s.step, s.maximum), (0.2, 0.005, 1.0), strict=True)
    )
    return UpAtEquality(target, step, c_max=maximum, lagged=True)
