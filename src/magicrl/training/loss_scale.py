"""The factor on the loss that keeps float16 gradients inside float16's range.

float16 resolves finer than bfloat16 (10 bits of fraction to 7) and reaches less far: below 3e-8 a number becomes 0,
above 65504 infinite. A token's share of a mini-batch of 100,000 tokens pulls at an unlikely word's logit with less than
1e-8. So the loss is multiplied by a power of two before the backward pass, and the float32 sums of the gradients are
divided by it before anything reads them: exactly, so that clipping, moments and rates mean what they mean in other
precisions. Dynamic scaling is that of Micikevicius et al. (2018, section 3.2) with one difference: a mini-batch whose
gradients overflow is not skipped but computed again with half the factor, so that every mini-batch makes its update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

START = 2.0**16
LEAST = 1.0
"""Gradients that overflow even so are no matter of scale."""
GROWS_AFTER = 100
"""Updates without an overflow after which the factor is doubled: if it is then too high, one in 100 is made twice."""


class LossScale:
    """A power of two; 1 and constant unless ``dynamic``."""

    def __init__(self, *, dynamic: bool) -> None:
        self._dynamic = dynamic
        self.value = START if dynamic else 1.0
        """What the loss is multiplied by."""
        self._passed = 0

    def lower(self) -> bool:
        """After an overflow: half as much; False if there is no less."""
        if not self._dynamic or self.value <= LEAST:
            return False
        self.value, self._passed = self.value / 2, 0
        return True

    def passed(self) -> None:
        """After an update."""
        self._passed += self._dynamic
        if self._passed == GROWS_AFTER:
            self.value, self._passed = self.value * 2, 0

    def metrics(self) -> dict[str, float]:
        """``loss_scale``; nothing where it is constant."""
        return {"loss_scale": self.value} if self._dynamic else {}

    def state(self) -> dict[str, Any]:
        """For a checkpoint; empty where it is constant."""
        return {"loss_scale": self.value, "updates_at_loss_scale": self._passed} if self._dynamic else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; a state of another precision has none, and the factor starts anew."""
        if self._dynamic:
            self.value = float(state.get("loss_scale", START))
            self._passed = int(state.get("updates_at_loss_scale", 0))
