"""What a generated task family is, and the registry of those that ship."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, Protocol

import numpy as np

from magicrl.records import Problem

Split = Literal["train", "validation", "test"]
OptionValue = float | int | str | bool


class TaskFamily(Protocol):
    """Generates verifiable problems and worked demonstrations; it never judges.

    Every family is deterministic: the same options and arguments give the same problems, on any machine.
    """

    @property
    def name(self) -> str: ...

    @property
    def verifier(self) -> str:
        """Name of the verifier its problems carry."""
        ...

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        """Every whitespace-separated symbol of its texts, for tiny models; None for natural language."""
        ...

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Endless problems. No instance of one split ever appears in another, whatever the seeds."""
        ...

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        """A worked response to ``problem``, drawn from the family's distribution of demonstrations."""
        ...


Factory = Callable[[Mapping[str, OptionValue]], TaskFamily]
_FACTORIES: dict[str, Factory] = {}


def register_family(name: str, factory: Factory) -> None:
    """Make a family known by name; ``factory`` gets the recipe's options and rejects unknown ones."""
    _FACTORIES[name] = factory


def make_family(name: str, options: Mapping[str, OptionValue] | None = None) -> TaskFamily:
    """The family of this name.

    Raises:
        ValueError: unknown name (with the nearest known one) or unknown option.
    """
    if name not in _FACTORIES:
        near = difflib.get_close_matches(name, _FACTORIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown task family {name!r}{hint} Known: {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[name](options or {})


def unique_problems(
    family: TaskFamily, *, seed: int, split: str, count: int, levels: Sequence[int] | None = None
) -> list[Problem]:
    """The first ``count`` distinct problems of a stream.

    Raises:
        ValueError: the family has too few distinct instances at these levels, or the split is unknown.
    """
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split must be train, validation or test, got {split!r}")
    found: dict[str, Problem] = {}
    stream = family.stream(seed=seed, split=split, levels=levels)
    for problem in islice(stream, 50 * count + 1000):
        found.setdefault(problem.id, problem)
        if len(found) == count:
            return list(found.values())
    raise ValueError(
        f"family {family.name!r} gave only {len(found)} distinct problems of the {count} asked for "
        f"(split {split}, levels {levels}); ask for fewer or widen the levels"
    )
