"""Curricula: samplers that choose the training problems of a step, named by ``data.sampler``.

A sampler is a class or function of ``(problems, seed, **options)`` that returns an object with the methods of
`Curriculum`. It sees the outcome of every visit, and its state is in the checkpoint. Random choices must depend on the
seed and the state only, so that a resumed run draws the same problems.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from magicrl.records import Problem
from magicrl.registry import resolve

Mask = NDArray[np.bool_]


class Curriculum(Protocol):
    """Sampler of training problems."""

    def next(self, n: int, remaining: Sequence[Problem]) -> Sequence[str]:
        """Return the ids of the next ``n`` problems, chosen from those that no filter removed."""
        ...

    def observe(self, problem: Problem, correct: int, judged: int) -> None:
        """Receive a visit: how many of the judged responses were right. Called once per group, in draw order."""
        ...

    def state(self) -> Any:
        """Return the state needed to continue, as JSON values."""
        ...

    def restore(self, state: Any) -> None:
        """Restore what ``state`` returned."""
        ...


def make_curriculum(
    reference: str, problems: Sequence[Problem], seed: int, options: Mapping[str, Any]
) -> Curriculum | None:
    """Return the sampler that ``data.sampler`` names; None for ``uniform``, the order of `PromptSampler`.

    Raises:
        ValueError: It is unknown, refuses the options, or lacks a method.
    """
    if reference == "uniform":
        if options:
            raise ValueError(f'the sampler "uniform" has no options, got {", ".join(options)}')
        return None
    try:
        made: Any = resolve("sampler", reference)(problems, seed, **options)
    except TypeError as error:
        raise ValueError(f"sampler {reference!r} cannot be made with the options {dict(options)}: {error}") from error
    lacking = [name for name in ("next", "observe", "state", "restore") if not callable(getattr(made, name, None))]
    if lacking:
        raise ValueError(f"sampler {reference!r} made a {type(made).__name__} without the method {lacking[0]}()")
    return made


class LeastRecent(ABC):
    """Draws from a pool of problems the one whose last draw is longest ago; ties in an order that the seed shuffles.

    Within a pool, every problem is therefore visited once before any is visited again.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self._index = {problem.id: place for place, problem in enumerate(problems)}
        self._ids = [problem.id for problem in problems]
        self._seed = seed
        self._draws = 0
        # Draw number of the last visit. Before any visit, a negative number that shuffles the problems.
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed]))).permutation(len(problems))
        self._last = order.astype(np.int64) - len(problems)

    @abstractmethod
    def pool(self, left: Mask) -> Mask:
        """Return the problems that the next draw chooses from, ``[P]``: a non-empty part of those ``left``."""

    def next(self, n: int, remaining: Sequence[Problem]) -> list[str]:
        """Return the ids of the next ``n`` problems."""
        left = np.zeros(len(self._ids), dtype=np.bool_)
        left[[self._index[problem.id] for problem in remaining]] = True
        drawn: list[str] = []
        for _ in range(n):
            candidates = np.flatnonzero(self.pool(left))
            place = int(candidates[self._last[candidates].argmin()])
            self._last[place] = self._draws
            self._draws += 1
            drawn.append(self._ids[place])
        return drawn

    def observe(self, problem: Problem, correct: int, judged: int) -> None:
        """Ignore a visit."""
        del problem, correct, judged

    def state(self) -> dict[str, Any]:
        """Return the state needed to continue, as JSON values."""
        return {"draws": self._draws, "last": self._last.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self._draws = int(state["draws"])
        self._last = np.array(state["last"], dtype=np.int64)


class DifficultyPools(LeastRecent):
    """Draws by the pass rate of each problem's last visit: mostly medium problems, few that are easy or hard.

    Problems without a visit are medium. An empty pool is replaced by the medium one, then by the hard and easy ones.

    Args:
        problems: Training problems.
        seed: Seed of the run.
        easy_from: Pass rate from which a problem is easy.
        hard_to: Pass rate up to which a problem is hard.
        easy_share: Share of the draws from easy problems.
        hard_share: Share of the draws from hard problems.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int,
        *,
        easy_from: float = 0.8,
        hard_to: float = 0.1,
        easy_share: float = 0.1,
        hard_share: float = 0.2,
    ) -> None:
        super().__init__(problems, seed)
        if not 0 <= hard_to < easy_from <= 1:
            raise ValueError(f"hard_to = {hard_to} must be below easy_from = {easy_from}, both from 0 to 1")
        if min(easy_share, hard_share) < 0 or easy_share + hard_share > 1:
            raise ValueError(f"easy_share = {easy_share} and hard_share = {hard_share} must be at most 1 together")
        self._limits, self._shares = (hard_to, easy_from), (easy_share, hard_share)
        self._rates = np.full(len(problems), np.nan)

    def pool(self, left: Mask) -> Mask:
        """Return one of the three pools, chosen at random with the shares."""
        (hard_to, easy_from), (easy_share, hard_share) = self._limits, self._shares
        easy, hard = left & (self._rates >= easy_from), left & (self._rates <= hard_to)
        medium = left & ~easy & ~hard
        # A function of seed and draw, so that the checkpoint needs no state of a generator.
        chance = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, self._draws]))).random()
        first = easy if chance < easy_share else hard if chance < easy_share + hard_share else medium
        return next(pool for pool in (first, medium, hard, easy) if pool.any())

    def observe(self, problem: Problem, correct: int, judged: int) -> None:
        """Remember the pass rate. A visit without a judged response changes nothing."""
        if judged:
            self._rates[self._index[problem.id]] = correct / judged

    def state(self) -> dict[str, Any]:
        """Return the state needed to continue, as JSON values."""
        rates = {self._ids[place]: float(self._rates[place]) for place in np.flatnonzero(~np.isnan(self._rates))}
        return {**super().state(), "rates": rates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        super().restore(state)
        self._rates[:] = np.nan
        for name, rate in state["rates"].items():
            self._rates[self._index[name]] = rate


class ShortFirst(LeastRecent):
    """Draws from the shortest prompts first, and from more and more of them.

    Args:
        problems: Training problems.
        seed: Seed of the run.
        start: Share of the problems, the shortest ones, that the first draws choose from.
        draws: Number of draws after which all problems take part; between, the share rises linearly.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, *, start: float = 0.2, draws: int = 1000) -> None:
        super().__init__(problems, seed)
        if not 0 < start <= 1 or draws < 1:
            raise ValueError(f"start = {start} must be above 0 and at most 1, and draws = {draws} at least 1")
        self._start, self._until = start, draws
        self._lengths = np.array([sum(len(message.content) for message in p.messages) for p in problems])

    def pool(self, left: Mask) -> Mask:
        """Return the shortest of the problems that are left."""
        share = self._start + (1 - self._start) * min(1.0, self._draws / self._until)
        lengths = self._lengths[left]
        # Prompts as long as the longest of the share belong to it too.
        longest = np.sort(lengths)[max(0, round(share * len(lengths)) - 1)]
        return left & (self._lengths <= longest)
