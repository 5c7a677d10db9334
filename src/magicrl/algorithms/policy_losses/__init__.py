"""The policy losses, one file each: its name is the recipe's ``algorithm.loss``, its ``ROW`` a ``LossRow``.

This file lists them without loading them, so that a recipe is checked where there is no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import iter_modules


def names_in(folders: Iterable[str]) -> tuple[str, ...]:
    """The losses whose files lie in ``folders``, in alphabetical order."""
    return tuple(sorted(module.name for module in iter_modules(folders)))


NAMES = names_in(__path__)
"""What ``algorithm.loss`` may be."""
