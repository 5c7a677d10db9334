"""Task family ``running_sum``: sums that a tiny model solves in part, with a better strategy that it rarely uses.

The prompt is ``L x1 x2 ... xK :``, K digits. The answer is their sum mod 10. A response adds the operands from
the left, one block each, and ends with its running total: the answer that the ``exact`` verifier reads.

    L t2            t2 = x1 + x2  (mod 10)
    S3 x3 t3        t3 = t2 + x3
    S4 x4 t4        ...

A *strategy* is where it stops: after 2 operands (two tokens) up to all K. The *level* of an instance is the place of
its last non-zero operand, so a response that stops there or later is correct. Demonstrations mostly stop too early: at
every tier stopping is the greedy choice, and reinforcement learning finds the longer strategies one by one. Some
ramble:

* ``ramble = "run"``: after blocks, runs of filler words, each closed by the restated total (``hm so hm ? t``);
* ``ramble = "tail"``: after the last block only, re-checks ``? t``, many, whatever the strategy was
  (``recheck_filler`` begins some of them with a filler word instead).

Either way the last token stays the running total, so that rambling costs tokens and never the answer.

``variant`` presets (K = 9; any single option overrides its part):

* ``stages``  tail rambling, long at the start: shows what a short first stage saves, and truncation masks;
* ``first``   runs of filler: entropy control, KL;
* ``ladder``  the better strategies are rare (2.9 % and 0.15 %), no rambling: temperature, clip-higher, off-policy.

``phase`` presets of the supervised start: ``skill`` (half of the demonstrations go beyond two operands, no rambling,
so that the modular step is learned; problems keep all levels, since zeros late in a sum let a model learn to copy
the operand before it must add it), then ``habits`` (the variant's own).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from magicrl.data.families import FamilyOptions, OptionValue, Split, read_options
from magicrl.records import Problem

NAME = "running_sum"
FILLERS = ("hm", "so", "well", "ok")
RESTATE = "?"
START = "L"
ASK = ":"

Shares: TypeAlias = dict[int, float]
Ramble: TypeAlias = Literal["none", "run", "tail"]

_STOPS: dict[str, Shares] = {
    "first": {2: 0.62, 4: 0.21, 6: 0.10, 9: 0.07},
    "stages": {2: 0.68, 4: 0.17, 6: 0.08, 9: 0.07},
    "ladder": {2: 0.97, 5: 0.0285, 9: 0.0015},
    "skill": {2: 0.5, 3: 0.16, 4: 0.10, 5: 0.07, 6: 0.05, 7: 0.04, 8: 0.04, 9: 0.04},
}
"""Shares of the strategies, by variant or phase."""
_LEVELS: Shares = {2: 0.3, 3: 0.1, 4: 0.2, 5: 0.08, 6: 0.12, 7: 0.06, 8: 0.07, 9: 0.07}
_LADDER_LEVELS: Shares = {2: 0.4, 4: 0.15, 5: 0.15, 7: 0.1, 8: 0.1, 9: 0.1}
_RAMBLES: dict[str, Ramble] = {"first": "run", "stages": "tail", "ladder": "none", "skill": "none"}
_VERBOSE: dict[Ramble, float] = {"none": 0.0, "run": 0.35, "tail": 0.75}


def parse_shares(text: str) -> Shares:
    """Return shares that are written as ``"2:0.7 9:0.3"``.

    Raises:
        ValueError: The text is malformed, a number occurs twice, a share is not positive, or the sum is not 1.
    """
    shares: Shares = {}
    for part in text.replace(",", " ").split():
        key, _, value = part.partition(":")
        try:
            number, share = int(key), float(value)
        except ValueError:
            raise ValueError(f"cannot read {part!r} in {text!r}; write shares like '2:0.7 9:0.3'") from None
        if number in shares or not share > 0:
            raise ValueError(f"{part!r} in {text!r}: every number once, every share above 0")
        shares[number] = share
    if abs(sum(shares.values()) - 1) > 1e-9:
        raise ValueError(f"the shares in {text!r} sum to {sum(shares.values()):g}, not to 1")
    return shares


class RunningSumOptions(FamilyOptions):
    """Options of the family; those left out come from ``variant`` and ``phase``."""

    variant: Literal["first", "stages", "ladder"] = "stages"
    phase: Literal["habits", "skill"] = "habits"
    operands: int = Field(default=9, ge=3, le=30)  # K. Another K than 9 needs ``stops`` and ``level_shares``.
    stops: str | None = None
    """Shares of the strategies in demonstrations, e.g. ``"2:0.7 9:0.3"``: operands added -> share."""
    level_shares: str | None = None  # shares of the levels among problems, written the same way
    noise: float = Field(default=0.02, ge=0, lt=1)
    """Share of wrong running totals in demonstrations, from which later steps continue."""
    ramble: Ramble | None = None
    verbose: float | None = Field(default=None, ge=0, le=1)
    """Share of the demonstrations that ramble; default 0.35 (``run``), 0.75 (``tail``)."""
    run_chance: float = Field(default=0.5, ge=0, le=1)
    """``run``: chance of a run of filler after a block of a rambling demonstration."""
    run_continue: float = Field(default=0.8, ge=0, lt=1)  # ``run``: chance of another filler word in a run
    recheck_continue: float = Field(default=0.97, ge=0, lt=1)  # ``tail``: chance that another re-check follows
    recheck_filler: float = Field(default=0.0, ge=0, le=1)
    """``tail``: chance that a re-check after the first begins with a filler word in place of ``?`` (``hm t``): gives
    rambling entropy, and leaves its lengths and the greedy choice of strategy as they are."""
    max_tokens: int = Field(default=108, ge=2)
    """Rambling never makes a demonstration longer than this many tokens (end token not counted)."""

    @model_validator(mode="after")
    def _fits_operands(self) -> Self:
        for name, shares in (("stops", self.stop_shares()), ("level_shares", self.levels())):
            bad = [number for number in shares if not 2 <= number <= self.operands]
            if bad:
                raise ValueError(f"{name} names {bad[0]}, outside 2..{self.operands} (operands); set {name} to match")
        return self

    @property
    def preset(self) -> str:
        return "skill" if self.phase == "skill" else self.variant

    def stop_shares(self) -> Shares:
        return _STOPS[self.preset] if self.stops is None else parse_shares(self.stops)

    def levels(self) -> Shares:
        if self.level_shares is not None:
            return parse_shares(self.level_shares)
        return _LADDER_LEVELS if self.preset == "ladder" else _LEVELS

    def rambling(self) -> tuple[Ramble, float]:
        """Return the kind of rambling and the share of the demonstrations that have it."""
        kind = self.ramble or _RAMBLES[self.preset]
        return kind, _VERBOSE[kind] if self.verbose is None else self.verbose


class _Categorical:
    """Draws keys with their shares, one uniform number a draw."""

    def __init__(self, shares: Mapping[int, float]) -> None:
        self.keys = sorted(shares)
        self.edges = np.cumsum([shares[key] for key in self.keys])
        self.edges /= self.edges[-1]

    def draw(self, rng: np.random.Generator) -> int:
        return self.keys[min(int(np.searchsorted(self.edges, rng.random(), side="right")), len(self.keys) - 1)]


def split_of(operands: Sequence[int]) -> Split:
    """Return the split of an instance by a hash of its digits: 60 % train, 20 % validation, 20 % test."""
    text = " ".join(str(x) for x in operands)
    bucket = int.from_bytes(hashlib.blake2b(f"{NAME}:{text}".encode(), digest_size=8).digest(), "big") % 5
    if bucket < 3:
        return "train"
    return "validation" if bucket == 3 else "test"


def parse_prompt(prompt: str) -> list[int]:
    """Return the operands of a prompt ``L x1 ... xK :``.

    Raises:
        ValueError: The text is no prompt of this family.
    """
    symbols = prompt.split()
    digits = symbols[1:-1]
    if symbols[:1] != [START] or symbols[-1:] != [ASK] or len(digits) < 2 or any(d not in "0123456789" for d in digits):
        raise ValueError(f"not a {NAME} prompt: {prompt!r}; expected '{START} x1 ... xK {ASK}' with digits x")
    return [int(digit) for digit in digits]


class RunningSum:
    """Task family ``running_sum``; see the module docstring.

    Example:
        >>> family = RunningSum(RunningSumOptions())
        >>> problem = next(family.stream(seed=0, split="train", levels=[4]))
        >>> problem.prompt.split()[5:]  # operands after the level's are 0
        ['0', '0', '0', '0', '0', ':']
    """

    name = NAME
    verifier = "exact"

    def __init__(self, options: RunningSumOptions) -> None:
        self.options = options
        digits = map(str, range(10))
        steps = (f"S{place}" for place in range(3, options.operands + 1))
        self.vocabulary = (START, ASK, RESTATE, *digits, *steps, *FILLERS)
        self._stops = _Categorical(options.stop_shares())
        self._ramble, self._verbose = options.rambling()

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Yield problems of one split without end, levels drawn with their shares (renormalised for ``levels``).

        Short instances repeat under other ids (level 2 has 90 in all).

        Raises:
            ValueError: A level has no share.
        """
        shares = self.options.levels()
        wanted = list(shares) if levels is None else list(levels)
        missing = [level for level in wanted if level not in shares]
        if missing or not wanted:
            raise ValueError(
                f"{NAME} has no level {missing[:1] or wanted}; levels: {sorted(shares)} (see level_shares)"
            )
        return self._generate(_Categorical({level: shares[level] for level in wanted}), seed, split)

    def _generate(self, levels: _Categorical, seed: int, split: Split) -> Iterator[Problem]:
        rng = np.random.Generator(np.random.PCG64(seed))
        index = 0
        while True:
            level = levels.draw(rng)
            operands = self._operands(rng, level)
            # drawn until the hash says that it is this split's: the splits share no instance
            while split_of(operands) != split:
                operands = self._operands(rng, level)
            yield Problem(
                id=f"{NAME}-{split}-{seed}-{index}",
                prompt=" ".join([START, *(str(x) for x in operands), ASK]),
                references=(str(sum(operands) % 10),),
                verifier=self.verifier,
                source=NAME,
                level=level,
            )
            index += 1

    def _operands(self, rng: np.random.Generator, level: int) -> list[int]:
        digits = rng.integers(0, 10, size=level - 1).tolist()
        # the last one is not 0, or the instance would be of a lower level
        return [*digits, int(rng.integers(1, 10)), *([0] * (self.options.operands - level))]

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        """Return a response by a drawn strategy: noisy running totals, perhaps rambling, and the total at the end.

        Raises:
            ValueError: The prompt is not of this family, or the number of operands is not K.
        """
        operands = parse_prompt(problem.prompt)
        if len(operands) != self.options.operands:
            raise ValueError(f"problem {problem.id} has {len(operands)} operands, the family {self.options.operands}")
        stop = self._stops.draw(rng)
        runs = self._ramble == "run" and rng.random() < self._verbose
        total = self._noisy(operands[0] + operands[1], rng)
        out = [START, str(total)]
        # tokens available for rambling: the block of each further operand has three tokens
        left = self.options.max_tokens - len(out) - 3 * (stop - 2)
        for place in range(2, stop + 1):
            if place > 2:
                total = self._noisy(total + operands[place - 1], rng)
                out += [f"S{place}", str(operands[place - 1]), str(total)]
            if runs:
                run = self._run(total, rng, left)
                left -= len(run)
                out += run
        if self._ramble == "tail" and rng.random() < self._verbose:
            out += self._rechecks(total, rng, left)
        return " ".join(out)

    def _noisy(self, total: int, rng: np.random.Generator) -> int:
        """Return ``total`` mod 10, or with chance ``noise`` one of the nine other digits."""
        if rng.random() < self.options.noise:
            total += int(rng.integers(1, 10))
        return total % 10

    def _run(self, total: int, rng: np.random.Generator, left: int) -> list[str]:
        """Return filler words and the restated total, or nothing; at most ``left`` tokens."""
        if rng.random() >= self.options.run_chance or left < 3:
            return []
        length = min(int(rng.geometric(1 - self.options.run_continue)), left - 2)
        words = [FILLERS[i] for i in rng.integers(0, len(FILLERS), size=length).tolist()]
        return [*words, RESTATE, str(total)]

    def _rechecks(self, total: int, rng: np.random.Generator, left: int) -> list[str]:
        """Return one or more re-checks, at most ``left`` tokens."""
        number = max(0, min(int(rng.geometric(1 - self.options.recheck_continue)), left // 2))
        if not self.options.recheck_filler:
            return [RESTATE, str(total)] * number
        fillers = rng.random(number) < self.options.recheck_filler
        # the first begins with `?`, so that the greedy choice whether to ramble stays what it was
        fillers[:1] = False
        words = rng.integers(0, len(FILLERS), size=number)
        begins = [FILLERS[word] if filler else RESTATE for filler, word in zip(fillers, words, strict=True)]
        return [symbol for begin in begins for symbol in (begin, str(total))]


def make_running_sum(**options: OptionValue) -> RunningSum:
    """Return the family with these fields of ``RunningSumOptions``."""
    return RunningSum(read_options(NAME, RunningSumOptions, options))
