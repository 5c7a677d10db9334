"""A quantile instead of the mean as the group's baseline (QAE, Wu et al. 2025, arXiv 2509.22611).

    magicrl train tiny --set algorithm.advantage=studies/race/qae.py:k40

With rewards of 0 and 1 the K-quantile is 0 if at most 1 - K of a group are right, and 1 otherwise. So in hard groups
only the right answers are reinforced, and in easy groups only the wrong ones are discouraged.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from magicrl.algorithms.advantages import STD_EPSILON, AdvantageInputs, over_groups


def of_group(rewards: Tensor, quantile: float) -> Tensor:
    """Return (r - b) / (std + 1e-6), b the smallest reward that at least ``quantile`` of the group do not exceed."""
    # Rounded, because 0.4 * 5 must give 2 and not 2.0000000000000004, whose ceiling is 3.
    place = max(1, math.ceil(round(quantile * len(rewards), 9)))
    return (rewards - rewards.sort().values[place - 1]) / (rewards.std() + STD_EPSILON)


def advantages(a: AdvantageInputs, *, quantile: float) -> Tensor:
    """Return the advantage of each response, ``[N]``."""
    return over_groups(a, partial(of_group, quantile=quantile))


k20 = partial(advantages, quantile=0.2)
k40 = partial(advantages, quantile=0.4)  # the paper's
k60 = partial(advantages, quantile=0.6)
