"""A custom task family: an endless stream of sums to a target ("which number added to 7 gives 12?").

In a recipe, in the folder of this file:

    [[data.train]]
    family = "family.py:MissingAddend"
    count = 1000
    options = { largest = 50 }
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np

from magicrl.records import Problem

SPLITS = ("train", "train", "train", "train", "validation", "test")


class MissingAddend:
    """Problems ``a + ? = b``; the level is the number of digits of b.

    `magicrl train` needs only ``stream``. `magicrl sft` also needs ``demonstration``, and ``vocabulary`` for a tiny
    model that is trained from scratch.
    """

    name = "missing_addend"
    vocabulary = None

    def __init__(self, largest: int = 99) -> None:  # ``options`` of the recipe
        if largest < 2:
            raise ValueError(f"largest must be at least 2, got {largest}")
        self.largest = largest

    def stream(self, *, seed: int, split: str, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Yield problems. Equal arguments give equal problems, and the splits share no problem."""
        rng = np.random.default_rng(seed)
        while True:
            total = int(rng.integers(1, self.largest + 1))
            part = int(rng.integers(0, total + 1))
            name = f"{part}-{total}"
            level = len(str(total))
            if SPLITS[crc32(name.encode()) % len(SPLITS)] == split and (levels is None or level in levels):
                prompt = f"Which number added to {part} gives {total}?"
                reference = (str(total - part),)
                yield Problem(
                    id=name, prompt=prompt, references=reference, verifier="maths", source=self.name, level=level
                )

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        """Return a worked response."""
        return f"It is \\boxed{{{problem.references[0]}}}."
