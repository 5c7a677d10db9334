"""An advantage of one's own: only what is better than its group is learned from, and more where that is rare.

    magicrl train tiny --set algorithm.advantage=examples/advantage.py:only_better

It is given the responses of all surviving groups of a step and gives one number a response. `over_groups` does what all
such functions share: who counts (judged, and not cut under the mask `before`), and 0 for a group of equal rewards.
"""

from __future__ import annotations

from torch import Tensor

from magicrl.algorithms.advantages import AdvantageInputs, over_groups


def only_better(a: AdvantageInputs) -> Tensor:
    """r - mean where that is positive, else 0: a wrong response pushes nothing away."""
    return over_groups(a, lambda rewards: (rewards - rewards.mean()).clamp(min=0))
