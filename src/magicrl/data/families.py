"""What a generated task family is, and how one is made from a recipe's name and options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from magicrl.records import Problem
from magicrl.registry import resolve
from magicrl_verifiers.references import did_you_mean

Split = Literal["train", "validation", "test"]
OptionValue = float | int | str | bool


class TaskFamily(Protocol):
    """Generates verifiable problems and worked demonstrations; it never judges.

    Every family is deterministic: the same options and arguments give the same problems, on any machine.
    Problem ids are unique within a stream. A level with few instances repeats them (under other ids) where that
    is what keeps the shares of the levels.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        """Every whitespace-separated symbol of its texts, for tiny models; None for natural language. Only
        ``magicrl sft`` asks for it, and for demonstrations."""
        ...

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Endless problems. No instance of one split ever appears in another, whatever the seeds."""
        ...

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str | tuple[str, ...]:
        """A worked response to ``problem``, drawn from the family's distribution of demonstrations; where the problem
        has an environment turn, observation, turn, ..., turn: observations are context, turns are what is taught."""
        ...


class FamilyOptions(BaseModel):
    """Base of a family's options: typed, frozen, unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def hashed_split(text: str) -> Split:
    """The split that owns an instance with this text: 60 % train, 20 % validation, 20 % test."""
    bucket = hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % 5
    return "train" if bucket < 3 else "validation" if bucket == 3 else "test"


OptionsT = TypeVar("OptionsT", bound=FamilyOptions)


def read_options(family: str, schema: type[OptionsT], options: Mapping[str, OptionValue]) -> OptionsT:
    """The options of a recipe as the family's own schema.

    Raises:
        ValueError: naming the family, the option, its value and, for an unknown name, the nearest known one.
    """
    for name in options:
        if name not in schema.model_fields:
            known = sorted(schema.model_fields)
            hint = did_you_mean(name, known)
            raise ValueError(f"task family {family!r} has no option {name!r}{hint} Known: {', '.join(known)}")
    try:
        return schema.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        value = f" = {options[where]!r}" if where in options else ""
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"task family {family!r}: option {where}{value}: {message}".replace(": option :", ":")
        ) from error


def make_family(reference: str, options: Mapping[str, OptionValue] | None = None) -> TaskFamily:
    """The family that a reference names: a class or function, called with the recipe's options as keyword arguments.

    Raises:
        ValueError: unknown name (with the nearest known one), or unknown option.
    """
    make: Callable[..., TaskFamily] = resolve("family", reference)
    given = dict(options or {})
    check_options("task family", reference, make, given)
    return make(**given)


def check_options(kind: str, reference: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Whether a user's class or function takes these keyword arguments.

    Raises:
        ValueError: it does not; says what it takes.
    """
    try:
        # before the call: a TypeError from inside the function is another mistake
        signature(function).bind(**options)
    except TypeError as error:
        raise ValueError(f"{kind} {reference!r}: {error}; it takes {signature(function)}") from None


def unique_problems(
    family: TaskFamily, *, seed: int, split: str, count: int, levels: Sequence[int] | None = None
) -> list[Problem]:
    """The first ``count`` problems of a stream with distinct ids, and of validation and test with distinct prompts.

    In training a repeated prompt is a weight, which keeps the shares of the levels; where scores are made of problems
    every prompt counts once.

    Raises:
        ValueError: the family has too few distinct instances at these levels, or the split is unknown.
    """
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split must be train, validation or test, got {split!r}")
    found: dict[str, Problem] = {}
    stream = family.stream(seed=seed, split=split, levels=levels)
    # a bound: with few distinct instances the stream would repeat them for ever
    for problem in islice(stream, 50 * count + 1000):
        found.setdefault(problem.id if split == "train" else problem.key, problem)
        if len(found) == count:
            return list(found.values())
    raise ValueError(
        f"family {family.name!r} gave only {len(found)} distinct problems of the {count} asked for "
        f"(split {split}, levels {levels}); ask for fewer or widen the levels"
    )
