"""A custom advantage: responses that are better than their group get a positive advantage, all others 0.

    magicrl train tiny --set algorithm.advantage=examples/advantage.py:only_better

The function receives the responses of all kept groups of a step and returns one number per response. `over_groups`
applies a function to the rewards of each group. It leaves out responses that were not judged, or that are truncated
under the mask `before`, and returns 0 for groups whose rewards are all equal.
"""

from __future__ import annotations

from torch import Tensor

from magicrl.algorithms.advantages import AdvantageInputs, over_groups


def only_better(a: AdvantageInputs) -> Tensor:
    """Return max(r - mean of the group, 0): a wrong response is not made less likely."""
    return over_groups(a, lambda rewards: (rewards - rewards.mean()).clamp(min=0))
