"""Two task families of the study over independent starts: chains of words, and stories of buying and losing.

Both are solved step by step. A response may stop after any step and give its present value as the answer, so a
response that stops too early is right only on short problems. A *strategy* is the number of steps after which a
response stops; the *level* of a problem is its number of steps. Demonstrations mostly stop too early, and some contain
runs of filler words that cost tokens and never change the answer. So the initial model has entropy, and the better
strategies are rare. Reinforcement learning must find them before the entropy is gone.

* ``word_chains``: eight words and six verbs, each of which maps every word to another by a fixed table.
  ``chain red spin fold :`` is solved as ``red spin owl ; owl fold sea ; answer sea``.
* ``tiny_stories``: a number between 0 and 12 that rises and falls.
  ``ann has 5 . she buys 3 . she loses 2 . how many ?`` is solved as ``5 + 3 is 8 ; 8 - 2 is 6 ; answer 6``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from magicrl.data.families import FamilyOptions, OptionValue, Split, hashed_split, read_options
from magicrl.data.running_sum import FILLERS, parse_shares
from magicrl.records import Problem

MARKS = (";", "?", "answer")
STEPS = 6  # steps of the longest problem
SKILL = "1:0.2 2:0.2 3:0.15 4:0.15 5:0.15 6:0.15"
"""Shares of the stopping points in demonstrations that teach the steps."""
HABITS = "1:0.8 2:0.12 4:0.05 6:0.03"
"""Shares of the stopping points in demonstrations that teach the habits: the better strategies are rare."""
LEVELS = "1:0.2 2:0.2 3:0.15 4:0.15 5:0.15 6:0.15"


class ChainOptions(FamilyOptions):
    """Options of both families."""

    phase: Literal["habits", "skill"] = "habits"
    stops: str = HABITS
    """Shares of the strategies in demonstrations of ``habits``: number of steps -> share."""
    level_shares: str = LEVELS
    noise: float = Field(default=0.02, ge=0, lt=1)
    """Share of wrong steps in a demonstration, which continues from them."""
    verbose: float = Field(default=0.35, ge=0, le=1)  # share of demonstrations of ``habits`` with filler words
    run_chance: float = Field(default=0.5, ge=0, le=1)  # chance of a run of filler words after each of their steps
    run_continue: float = Field(default=0.8, ge=0, lt=1)  # chance that a run continues by another word


class _Worked:
    """Base class of both families. A state is a number from 0, a step is a number that ``after`` interprets."""

    name: str
    verifier = "exact"
    words: tuple[str, ...]  # word of each state

    def __init__(self, options: ChainOptions) -> None:
        self.options = options
        self.levels = parse_shares(options.level_shares)
        self.stops = parse_shares(SKILL if options.phase == "skill" else options.stops)
        for name, shares in (("level_shares", self.levels), ("stops", self.stops)):
            if bad := [n for n in shares if not 1 <= n <= STEPS]:
                raise ValueError(f"{self.name}: {name} names {bad[0]}, outside 1..{STEPS} steps")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*MARKS, *FILLERS, *self.words, *self.own_words()]))

    def own_words(self) -> Sequence[str]:
        """Return symbols other than states, marks and fillers."""
        raise NotImplementedError

    def drawn(self, rng: np.random.Generator, level: int) -> list[int]:
        """Return a first state and ``level`` steps."""
        raise NotImplementedError

    def after(self, state: int, step: int) -> int:
        """Return the state after a step."""
        raise NotImplementedError

    def asked(self, start: int, steps: Sequence[int]) -> str:
        """Return the prompt."""
        raise NotImplementedError

    def told(self, state: int, step: int, result: int) -> list[str]:
        """Return the words of a step."""
        raise NotImplementedError

    def read(self, prompt: str) -> list[int]:
        """Return the first state and the steps of a prompt."""
        raise NotImplementedError

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Yield problems of one split without end, levels drawn by their shares. Short ones repeat under other ids.

        Raises:
            ValueError: a level that has no share.
        """
        wanted = list(self.levels) if levels is None else list(levels)
        if not wanted or not set(wanted) <= set(self.levels):
            raise ValueError(f"{self.name} has the levels {sorted(self.levels)}, got {wanted}")
        return self._generate(wanted, seed, split)

    def _generate(self, levels: Sequence[int], seed: int, split: Split) -> Iterator[Problem]:
        rng = np.random.default_rng(seed)
        shares = np.array([self.levels[level] for level in levels])
        index = 0
        while True:
            level = levels[int(rng.choice(len(levels), p=shares / shares.sum()))]
            prompt, states = "", [0]
            while not prompt or hashed_split(f"{self.name}:{prompt}") != split:  # the splits share no prompt
                start, *steps = self.drawn(rng, level)
                states = [start]
                for step in steps:
                    states.append(self.after(states[-1], step))
                prompt = self.asked(start, steps)
            yield Problem(
                id=f"{self.name}-{split}-{seed}-{index}",
                prompt=prompt,
                references=(self.words[states[-1]],),
                verifier=self.verifier,
                source=self.name,
                level=level,
            )
            index += 1

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        """Return a response by a drawn strategy: noisy steps, perhaps fillers, and its last state as the answer."""
        state, *steps = self.read(problem.prompt)
        o, numbers = self.options, list(self.stops)
        stop = numbers[int(rng.choice(len(numbers), p=[self.stops[n] for n in numbers]))]
        rambles = o.phase == "habits" and rng.random() < o.verbose
        out: list[str] = []
        for step in steps[:stop]:
            result = self.after(state, step)
            if rng.random() < o.noise:
                result = int(rng.integers(len(self.words)))
            out += [*self.told(state, step, result), ";"]
            state = result
            if rambles and rng.random() < o.run_chance:
                count = int(rng.geometric(1 - o.run_continue))
                out += [*(FILLERS[int(i)] for i in rng.integers(len(FILLERS), size=min(count, 12))), "?"]
        return " ".join([*out, "answer", self.words[state]])


class WordChains(_Worked):
    """Words and verbs; see the docstring of the module.

    Example:
        >>> problem = next(WordChains(ChainOptions()).stream(seed=0, split="train", levels=[2]))
        >>> len(problem.prompt.split())  # chain, a word, two verbs, the colon
        5
    """

    name = "word_chains"
    words = ("red", "owl", "sea", "tin", "oak", "fig", "ash", "ivy")
    verbs = ("spin", "fold", "melt", "toss", "wash", "dig")
    _TABLE = np.stack([np.random.default_rng([7, verb]).permutation(8) for verb in range(6)])

    def own_words(self) -> Sequence[str]:
        return ("chain", ":", *self.verbs)

    def drawn(self, rng: np.random.Generator, level: int) -> list[int]:
        return [int(rng.integers(len(self.words))), *rng.integers(len(self.verbs), size=level).tolist()]

    def after(self, state: int, step: int) -> int:
        return int(self._TABLE[step, state])

    def asked(self, start: int, steps: Sequence[int]) -> str:
        return " ".join(["chain", self.words[start], *(self.verbs[step] for step in steps), ":"])

    def told(self, state: int, step: int, result: int) -> list[str]:
        return [self.words[state], self.verbs[step], self.words[result]]

    def read(self, prompt: str) -> list[int]:
        _, start, *verbs, _ = prompt.split()
        return [self.words.index(start), *(self.verbs.index(verb) for verb in verbs)]


class TinyStories(_Worked):
    """Buying and losing; see the docstring of the module. A step is a number bought, or below 0 a number lost.

    Example:
        >>> next(TinyStories(ChainOptions()).stream(seed=0, split="train", levels=[1])).prompt.split()[:2]
        ['ann', 'has']
    """

    name = "tiny_stories"
    words = tuple(map(str, range(13)))
    most = 6  # largest number bought or lost at once

    def own_words(self) -> Sequence[str]:
        return ("ann", "has", ".", "she", "buys", "loses", "how", "many", "+", "-", "is")

    def drawn(self, rng: np.random.Generator, level: int) -> list[int]:
        start = state = int(rng.integers(1, len(self.words)))
        steps: list[int] = []
        for _ in range(level):
            fit = [n for n in range(-self.most, self.most + 1) if n and 0 <= state + n < len(self.words)]
            steps.append(fit[int(rng.integers(len(fit)))])
            state += steps[-1]
        return [start, *steps]

    def after(self, state: int, step: int) -> int:
        # A demonstration that continues from a wrong step may leave the range of known numbers.
        return min(max(state + step, 0), len(self.words) - 1)

    def asked(self, start: int, steps: Sequence[int]) -> str:
        events = (f"she {'buys' if step > 0 else 'loses'} {abs(step)} ." for step in steps)
        return " ".join([f"ann has {start} .", *events, "how many ?"])

    def told(self, state: int, step: int, result: int) -> list[str]:
        return [str(state), "+" if step > 0 else "-", str(abs(step)), "is", str(result)]

    def read(self, prompt: str) -> list[int]:
        first, *events = prompt.removesuffix(" how many ?").split(" . ")
        signs = {"buys": 1, "loses": -1}
        parts = [event.removesuffix(" .").split() for event in events]
        return [int(first.split()[2]), *(signs[verb] * int(number) for _, verb, number in parts)]


def word_chains(**options: OptionValue) -> WordChains:
    """Return the family with these fields of ``ChainOptions``."""
    return WordChains(read_options("word_chains", ChainOptions, options))


def tiny_stories(**options: OptionValue) -> TinyStories:
    """Return the family with these fields of ``ChainOptions``."""
    return TinyStories(read_options("tiny_stories", ChainOptions, options))
