"""Task family ``guess_number``: find a hidden number in as few guesses as halving needs (environment ``guessing``).

A problem is a range and a secret number in it. Level k has 2^(k-1) to 2^k - 1 numbers and k guesses. Bisection always
finds the number; random guesses among the remaining numbers often run out of guesses.

A hash assigns each range to a split, so a range of the test split (``from 12 to 42``) occurs in no training problem.
The test therefore shows that the search strategy works on new ranges. All secrets of a range have the same prompt. They
are separate problems, but one unit in confidence intervals.

Demonstrations guess at random among the remaining numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from magicrl.data.families import FamilyOptions, OptionValue, Split, hashed_split, read_options
from magicrl.environments.guessing import NO_GUESS, TOO_HIGH, TOO_LOW, Guessing
from magicrl.records import Problem, prompt_key

NAME = "guess_number"
PROMPT = "Find my number from {low} to {high} within {guesses} guesses. Write one number a turn."
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class GuessOptions(FamilyOptions):
    """Options of the family."""

    largest: int = Field(default=99, ge=31, le=9999)
    """Largest number of a range."""
    levels: int = Field(default=5, ge=2, le=12)
    """Highest level. Levels from 2 are equally frequent; level k has 2^(k-1) to 2^k - 1 numbers and k guesses."""
    spare: int = Field(default=0, ge=0, le=20)
    """Number of guesses in addition to those that bisection needs."""
    halving: float = Field(default=0.0, ge=0, le=1)
    """Share of guesses in demonstrations at the middle of the remaining range; the others are random."""


def range_split(low: int, high: int) -> Split:
    """Return the split of a range."""
    return hashed_split(f"{NAME}:{low}-{high}")


class GuessNumber:
    """Task family ``guess_number``; see the module docstring.

    Example:
        >>> problem = next(GuessNumber(GuessOptions()).stream(seed=0, split="train", levels=[5]))
        >>> problem.extra["high"] - problem.extra["low"] + 1 in range(16, 32), problem.extra["guesses"]
        (True, 5)
    """

    name = NAME
    verifier = "exact"
    environment = "guessing"

    def __init__(self, options: GuessOptions) -> None:
        self.options = options
        if 2**options.levels - 1 > options.largest:
            raise ValueError(f"level {options.levels} has {2**options.levels - 1} numbers; raise largest to match")
        words = " ".join([PROMPT.format(low="", high="", guesses=""), TOO_LOW, TOO_HIGH, NO_GUESS]).split()
        self.vocabulary = (*dict.fromkeys(words), *map(str, range(options.largest + 1)))

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Yield problems of one split without end, the levels equally often. Instances repeat under other ids.

        Raises:
            ValueError: A level does not exist.
        """
        known = range(2, self.options.levels + 1)
        wanted = list(known) if levels is None else list(levels)
        if not wanted or not set(wanted) <= set(known):
            raise ValueError(f"{NAME} has the levels 2 to {self.options.levels}, got {wanted}; see its option levels")
        return self._stream(seed, split, wanted)

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> tuple[str, ...]:
        """Return an episode of random guesses that respect the answers: turn, observation, turn, ..., turn."""
        game = Guessing()
        game.reset(problem)
        low, high = problem.extra["low"], problem.extra["high"]
        texts: list[str] = []
        while True:
            halves = rng.random() < self.options.halving
            guess = (low + high) // 2 if halves else int(rng.integers(low, high + 1))
            texts.append(str(guess))
            step = game.step(texts[-1])
            if step.done:
                return tuple(texts)
            texts.append(step.observation)
            low, high = (guess + 1, high) if step.observation == TOO_LOW else (low, guess - 1)

    def _stream(self, seed: int, split: Split, wanted: Sequence[int]) -> Iterator[Problem]:
        # the split in the seed: no split's stream follows another's
        rng = np.random.default_rng([seed, _SPLITS.index(split), 0x6E])
        index = 0
        while True:
            level = wanted[int(rng.integers(len(wanted)))]
            size = int(rng.integers(2 ** (level - 1), 2**level))
            low = int(rng.integers(1, self.options.largest - size + 2))
            if range_split(low, low + size - 1) == split:
                secret, high, guesses = int(rng.integers(low, low + size)), low + size - 1, level + self.options.spare
                prompt = PROMPT.format(low=low, high=high, guesses=guesses)
                yield Problem(
                    id=f"{NAME}-{split}-{seed}-{index}",
                    prompt=prompt,
                    references=(str(secret),),
                    verifier=self.verifier,
                    source=NAME,
                    level=level,
                    # the prompt does not identify the problem, because the secret is not part of it
                    key=prompt_key(f"{prompt} {secret}"),
                    template=f"{low}-{high}",
                    extra={"secret": secret, "low": low, "high": high, "guesses": guesses},
                    environment=self.environment,
                )
                index += 1


def make_guess_number(**options: OptionValue) -> GuessNumber:
    """Return the family with these fields of ``GuessOptions``."""
    return GuessNumber(read_options(NAME, GuessOptions, options))
