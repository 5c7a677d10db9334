"""Protocol of generated task families, and the function that creates one from a recipe's name and options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from magicrl.config.section import first_mistake
from magicrl.records import Problem
from magicrl.registry import resolve
from magicrl_verifiers.references import did_you_mean

Split = Literal["train", "validation", "test"]
OptionValue = float | int | str | bool


class TaskFamily(Protocol):
    """Generator of verifiable problems and worked demonstrations.

    A family is deterministic: the same options and arguments give the same problems on any machine. Problem ids are
    unique within a stream. A level with few instances may repeat them under other ids, to keep the shares of the
    levels.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        """All whitespace-separated symbols of the texts, for tiny models; None for natural language. Only ``magicrl
        sft`` uses this, and demonstrations."""
        ...

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Yield problems without end. No instance of a split appears in another split, for any seeds."""
        ...

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str | tuple[str, ...]:
        """Return a worked response, drawn from the family's distribution of demonstrations.

        For a problem with an environment: turn, observation, turn, ..., turn. Only the turns are learned.
        """
        ...


class FamilyOptions(BaseModel):
    """Base class of a family's options: typed and frozen. Unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def hashed_split(text: str) -> Split:
    """Return the split of an instance with this text: 60 % train, 20 % validation, 20 % test."""
    bucket = hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % 5
    return "train" if bucket < 3 else "validation" if bucket == 3 else "test"


OptionsT = TypeVar("OptionsT", bound=FamilyOptions)


def read_options(family: str, schema: type[OptionsT], options: Mapping[str, OptionValue]) -> OptionsT:
    """Validate the options of a recipe with the family's schema.

    Raises:
        ValueError: An option is unknown or its value is wrong (names the family, the option and its value).
    """
    for name in options:
        if name not in schema.model_fields:
            known = sorted(schema.model_fields)
            hint = did_you_mean(name, known)
            raise ValueError(f"task family {family!r} has no option {name!r}{hint} Known: {', '.join(known)}")
    try:
        return schema.model_validate(dict(options))
    except ValidationError as error:
        where, _, message = first_mistake(error)
        value = f" = {options[where]!r}" if where in options else ""
        raise ValueError(
            f"task family {family!r}: option {where}{value}: {message}".replace(": option :", ":")
        ) from error


def make_family(reference: str, options: Mapping[str, OptionValue] | None = None) -> TaskFamily:
    """Create a family: call the class or function that a reference names with the options as keyword arguments.

    Raises:
        ValueError: The name or an option is unknown.
    """
    make: Callable[..., TaskFamily] = resolve("family", reference)
    given = dict(options or {})
    check_options("task family", reference, make, given)
    return make(**given)


def check_options(kind: str, reference: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that a custom class or function accepts these keyword arguments.

    Raises:
        ValueError: It does not (names its parameters).
    """
    try:
        # checked before the call, because a TypeError inside the function has another cause
        signature(function).bind(**options)
    except TypeError as error:
        raise ValueError(f"{kind} {reference!r}: {error}; it takes {signature(function)}") from None


def unique_problems(
    family: TaskFamily, *, seed: int, split: str, count: int, levels: Sequence[int] | None = None
) -> list[Problem]:
    """Return the first ``count`` problems of a stream with distinct ids, or distinct prompts for validation and test.

    In training a repeated prompt is a weight that keeps the shares of the levels. In scores every prompt counts once.

    Raises:
        ValueError: The family has too few distinct instances at these levels, or the split is unknown.
    """
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split must be train, validation or test, got {split!r}")
    found: dict[str, Problem] = {}
    stream = family.stream(seed=seed, split=split, levels=levels)
    # bounded, because with few distinct instances the stream would repeat them forever
    for problem in islice(stream, 50 * count + 1000):
        found.setdefault(problem.id if split == "train" else problem.key, problem)
        if len(found) == count:
            return list(found.values())
    raise ValueError(
        f"family {family.name!r} gave only {len(found)} distinct problems of the {count} requested "
        f"(split {split}, levels {levels}); ask for fewer or widen the levels"
    )
