"""A custom sampler of training problems: levels in order, the next one once most responses of the last are right.

    magicrl train tiny --set data.sampler=examples/sampler.py:LevelByLevel --output runs/levels

`next` chooses problems, `observe` sees the outcome of every visit. Random choices depend on the seed and the state
only, so that a killed run continues with the same problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from magicrl.records import Problem


class LevelByLevel:
    """Sampler of one level at a time. ``right`` is the share of right responses that ends a level."""

    def __init__(self, problems: Sequence[Problem], seed: int, right: float = 0.8) -> None:
        self.levels = sorted({problem.level or 0 for problem in problems})
        self.seed, self.right = seed, right
        self.draws = self.level = 0
        self.rate = 0.0

    def next(self, n: int, remaining: Sequence[Problem]) -> list[str]:
        """Return ``n`` ids of the current level; of all levels, if a filter removed its last problem."""
        level = self.levels[self.level]
        pool = [problem.id for problem in remaining if (problem.level or 0) == level] or [p.id for p in remaining]
        rng = np.random.Generator(np.random.PCG64([self.seed, self.draws]))
        self.draws += 1
        return [pool[place] for place in rng.integers(len(pool), size=n)]

    def observe(self, problem: Problem, correct: int, judged: int) -> None:
        """Follow the pass rate of the current level with a moving mean."""
        if judged and (problem.level or 0) == self.levels[self.level]:
            self.rate = 0.9 * self.rate + 0.1 * correct / judged
        if self.rate >= self.right and self.level + 1 < len(self.levels):
            self.level, self.rate = self.level + 1, 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        return {"draws": self.draws, "level": self.level, "rate": self.rate}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.draws, self.level, self.rate = state["draws"], state["level"], state["rate"]
