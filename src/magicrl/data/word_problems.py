"""Task family ``word_problems``: arithmetic stories in plain English, one to three steps, with worked solutions.

A problem combines a story (``word_stories.toml``) with a sequence of events (a start, gains, losses, groups, a
division, a comparison) and random numbers. The level is the number of steps. Instances (the computation with its
numbers) of validation and test never occur in training. With ``held_out = "template"`` their stories do not either: a
story belongs to one split, and its sentences occur in no other split.

A demonstration answers at once, stops too early, or works through the steps. A step may be decomposed, checked, wrong
and repaired, or wrong without notice. This variety keeps the entropy of the trained model high enough for reinforcement
learning.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from operator import add, floordiv, mul, sub
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from magicrl.data.families import FamilyOptions, OptionValue, Split, read_options
from magicrl.records import Problem

_REFERENCE = re.compile(r"s(\d+)")

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv}
_SYMBOLS = {"+": "+", "-": "-", "*": "x", "/": "/"}
_INVERSES = {"+": "{v} - {r} = {l}", "-": "{v} + {r} = {l}", "*": "{v} / {l} = {r}", "/": "{v} x {r} = {l}"}


class WordOptions(FamilyOptions):
    """Options of the family: the style of the demonstrations, its numbers, and what is held out."""

    direct: float = Field(default=0.25, ge=0, le=1)  # share of answers without any working
    partial: float = Field(default=0.15, ge=0, le=1)
    """Share that stops before the last step, for problems with several steps."""
    slips: float = Field(default=0.15, ge=0, le=1)
    """Share of worked demonstrations with an unnoticed error, whose answer is wrong."""
    repairs: float = Field(default=0.1, ge=0, le=1)
    """Share of worked demonstrations with an error that is noticed and corrected."""
    plans: float = Field(default=0.3, ge=0, le=1)  # share of worked demonstrations that start with a plan
    checks: float = Field(default=0.2, ge=0, le=1)  # mean number of checks by the inverse operation per demonstration
    decompositions: float = Field(default=0.3, ge=0, le=1)  # share of steps computed by tens and ones
    plain: float = Field(default=0.3, ge=0, le=1)  # share of steps written as equations
    max_number: int = Field(default=40, ge=10)  # largest number that a story starts with, gains or loses
    max_factor: int = Field(default=5, ge=3)  # largest number of groups, and of parts in a division
    max_unit: int = Field(default=12, ge=4)  # largest size of one group
    held_out: Literal["template", "instance"] = "template"
    """``template``: validation and test have separate stories. ``instance``: all splits share all stories.
    Instances are disjoint in both cases."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        for a, b in (("direct", "partial"), ("slips", "repairs")):
            if (total := getattr(self, a) + getattr(self, b)) > 1:
                raise ValueError(f"{a} + {b} must be at most 1, they are {total:g}")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class SolutionStep:
    """An arithmetic step with its operands and the written result."""

    operator: str
    left: int
    right: int
    value: int


def apply(operator: str, left: int, right: int) -> int:
    """Return ``left operator right``. A division must have no remainder."""
    assert operator != "/" or left % right == 0, f"no whole number: {left} / {right}"
    return _OPERATORS[operator](left, right)


def evaluate_steps(steps: Sequence[str], slip: tuple[int, int] | None = None) -> list[SolutionStep] | None:
    """Work out all steps; with ``slip = (index, value)`` that step is written with this value.

    Returns:
        The steps, or None when a slip makes a later step senseless (a result below 2, an uneven division).
    """
    done: list[SolutionStep] = []
    for index, step in enumerate(steps):
        left, operator, right = step.split(" ")
        named = [(word, _REFERENCE.fullmatch(word)) for word in (left, right)]
        a, b = (int(word) if found is None else done[int(found[1])].value for word, found in named)
        if operator == "/" and a % b:
            assert slip is not None
            return None
        value = slip[1] if slip is not None and slip[0] == index else apply(operator, a, b)
        if value < 2:
            return None
        done.append(SolutionStep(operator=operator, left=a, right=b, value=value))
    return done


def expression(steps: Sequence[str]) -> str:
    """The whole computation in one line, e.g. ``4 x 6 + 12``."""

    def write(index: int) -> tuple[str, str]:
        left, operator, right = steps[index].split(" ")
        sides: list[str] = []
        for word, is_right in ((left, False), (right, True)):
            reference = _REFERENCE.fullmatch(word)
            if reference is None:
                sides.append(word)
                continue
            inner, inner_operator = write(int(reference[1]))
            binds = operator in "*/" or (operator == "-" and is_right)
            needs = inner_operator in "+-" and binds
            sides.append(f"({inner})" if needs else inner)
        return f"{sides[0]} {_SYMBOLS[operator]} {sides[1]}", operator

    return write(len(steps) - 1)[0]


def write_chain(steps: Sequence[str], *, items: str, tell: str, style: WordOptions, rng: np.random.Generator) -> str:
    """Return a random demonstration.

    Args:
        steps: The solution.
        items: Plural noun of the counted objects.
        tell: The sentence that answers the question, with the slot ``{answer}``.
        style: Frequencies of the styles.
        rng: Source of every choice.
    """
    solution = evaluate_steps(steps)
    assert solution is not None
    route = rng.random()
    if route < style.direct:
        return _closing(solution[-1].value, items, tell, rng)
    repair: int | None = None
    if len(steps) > 1 and route < style.direct + style.partial:
        stop = int(rng.integers(1, len(steps)))
        solution, steps = solution[:stop], steps[:stop]
    else:
        fate = rng.random()
        if fate < style.slips:
            solution = with_slip(steps, solution, rng)
        elif fate < style.slips + style.repairs:
            repair = int(rng.integers(len(steps)))
    parts: list[str] = []
    if rng.random() < style.plans:
        if rng.random() < 0.7:
            parts.append(_pick("plans", rng).format(e=expression(steps)))
        else:
            numbers = [word for step in steps for word in step.split(" ")[::2] if word.isdigit()]
            parts.append(_pick("lists", rng).format(e=", ".join(numbers[:-1]) + " and " + numbers[-1]))
    for index, step in enumerate(solution):
        kind = "first_leads" if index == 0 else "last_leads" if index == len(solution) - 1 else "later_leads"
        lead = _pick(kind, rng)
        noun = f" {items}" if rng.random() < 0.3 else ""
        # a slip before may have made the step uneven
        uneven = step.operator == "/" and step.left % step.right != 0
        right = not uneven and apply(step.operator, step.left, step.right) == step.value
        if repair == index:
            wrong = replace(step, value=_wrong_value(step, rng))
            parts.append(_sentence(lead + _equation(wrong, style, rng)))
            parts.append(_pick("repairs", rng).format(e=_equation(step, style, rng)))
        elif right and (split := _decomposed(step, rng)) is not None and rng.random() < style.decompositions:
            parts.append(_sentence(lead + split))
        else:
            parts.append(_sentence(lead + _equation(step, style, rng) + noun))
        if right and rng.random() < style.checks / len(solution):
            inverse = _INVERSES[step.operator].format(l=step.left, r=step.right, v=step.value)
            parts.append(_pick("checks", rng).format(e=inverse))
    return " ".join([*parts, _closing(solution[-1].value, items, tell, rng)])


def with_slip(steps: Sequence[str], solution: Sequence[SolutionStep], rng: np.random.Generator) -> list[SolutionStep]:
    """Return the steps with one wrong value, from which later steps continue and which changes the final answer."""
    start = int(rng.integers(len(steps)))
    for index in [start, *reversed(range(len(steps)))]:
        wrong = evaluate_steps(steps, (index, _wrong_value(solution[index], rng)))
        # a slip may cancel out in a later step: only one that changes the answer will do
        if wrong is not None and wrong[-1].value != solution[-1].value:
            return wrong
    raise AssertionError(f"a slip in the last step is always possible: {steps}")


def _wrong_value(step: SolutionStep, rng: np.random.Generator) -> int:
    """A value that a hurried person might write: off by one or by a carry, or from the opposite operation."""
    candidates = [step.value + d for d in (-1, 1, -2, 2, -10, 10)]
    if step.operator in "+-":
        candidates.append(step.left - step.right if step.operator == "+" else step.left + step.right)
    candidates = [c for c in candidates if c >= 2 and c != step.value]
    return candidates[int(rng.integers(len(candidates)))]


def _equation(step: SolutionStep, style: WordOptions, rng: np.random.Generator) -> str:
    forms: Sequence[str] = _data()["phrases"]["equations"][step.operator]
    # the plain equation is the commonest way to write it
    form = forms[0] if rng.random() < style.plain else forms[int(rng.integers(len(forms)))]
    return form.format(l=step.left, r=step.right, v=step.value)


def _decomposed(step: SolutionStep, rng: np.random.Generator) -> str | None:
    """The step through tens and ones, None where its numbers are too small for that."""
    l, r, v = step.left, step.right, step.value
    if step.operator in "+-" and r > 10 and r % 10:
        tens, ones = r // 10 * 10, r % 10
        first, second = (tens, ones) if rng.random() < 0.7 else (ones, tens)
        middle = apply(step.operator, l, first)
        return f"{l} {step.operator} {first} = {middle} and {middle} {step.operator} {second} = {v}"
    if step.operator == "*":
        if r > 10 and r % 10:
            return f"{l} x 10 = {l * 10}, {l} x {r - 10} = {l * (r - 10)} and {l * 10} + {l * (r - 10)} = {v}"
        if l <= 4:
            return f"{l} x {r} = {' + '.join([str(r)] * l)} = {v}"
    if step.operator == "/":
        return f"{r} x {v} = {l}, so {l} / {r} = {v}"
    return None


def _closing(answer: int, items: str, tell: str, rng: np.random.Generator) -> str:
    form = tell if rng.random() < 0.4 else _pick("closings", rng)
    return form.format(answer=f"\\boxed{{{answer}}}", items=items)


def _pick(kind: str, rng: np.random.Generator) -> str:
    """One of the data file's phrases of a kind."""
    choices: Sequence[str] = _data()["phrases"][kind]
    return choices[int(rng.integers(len(choices)))]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """One template."""

    key: str  # its name
    split: Split  # the split that may use it when templates are held out
    who: str | None  # the hero when it is not a person, e.g. ``the library``.
    items: tuple[str, ...]  # plural nouns the story may be about
    # what may happen, by kind (see the head of the data file); each kind has phrasings
    sentences: Mapping[str, tuple[str, ...]]


@cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("magicrl.data").joinpath("word_stories.toml").read_text(encoding="utf-8"))


_SHE = {"He": "She", "he": "she", "him": "her", "his": "her", "His": "Her"}
_HE = {slot: slot for slot in _SHE}


def people() -> dict[str, dict[str, str]]:
    """Each name with the pronouns that go with it."""
    names: Mapping[str, list[str]] = _data()["people"]
    return dict.fromkeys(names["she"], _SHE) | dict.fromkeys(names["he"], _HE)


@cache
def load_stories() -> tuple[Story, ...]:
    """Every story that ships, in file order."""
    found: list[Story] = []
    for row in _data()["story"]:
        said = {kind: row[kind] for kind in row.keys() - {"key", "split", "who", "items"}}
        sentences = {kind: (text,) if isinstance(text, str) else tuple(text) for kind, text in said.items()}
        items = tuple(row["items"])
        found.append(Story(key=row["key"], split=row["split"], who=row.get("who"), items=items, sentences=sentences))
    return tuple(found)


NAME = "word_problems"
INSTRUCTION = "End with the answer in \\boxed{}."
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_MOVES = ("add", "sub")
_GROUP_MOVES = ("add_groups", "sub_groups")
_COMPARE = ("more", "fewer")

SHAPES: Mapping[int, tuple[tuple[str, ...], ...]] = {
    1: (
        *(("open", move) for move in _MOVES),
        ("open_groups",),
        ("open", "share"),
        *(("open", compare) for compare in _COMPARE),
    ),
    2: (
        *(("open", a, b) for a in _MOVES for b in _MOVES),
        *(("open_groups", move) for move in _MOVES),
        *(("open", move, "share") for move in _MOVES),
        *(("open", group) for group in _GROUP_MOVES),
        *(("open", compare, "both") for compare in _COMPARE),
    ),
    3: (
        *(("open_groups", a, b) for a in _MOVES for b in _MOVES),
        *(("open", a, b, "share") for a in _MOVES for b in _MOVES),
        *(("open", group, move) for group in _GROUP_MOVES for move in _MOVES),
        *(("open_groups", move, "share") for move in _MOVES),
        *(("open_groups", compare, "both") for compare in _COMPARE),
    ),
}  # sequences of events by level; ``both`` combines the hero's and the friend's amounts


class WordProblems:
    """English arithmetic word problems (see the module's docstring)."""

    name = NAME
    verifier = "maths"
    vocabulary: tuple[str, ...] | None = None

    def __init__(self, options: WordOptions | None = None) -> None:
        self.options = options or WordOptions()

    def stories(self, split: Split) -> tuple[Story, ...]:
        """Return the stories of a split."""
        if self.options.held_out == "instance":
            return load_stories()
        return tuple(story for story in load_stories() if story.split == split)

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Endless problems, the levels equally often (default: all).

        Raises:
            ValueError: a level that does not exist.
        """
        wanted = tuple(levels) if levels is not None else tuple(SHAPES)
        if not wanted or not set(wanted) <= set(SHAPES):
            raise ValueError(f"{NAME} has the levels {', '.join(map(str, SHAPES))}; got {list(wanted)}")
        return self._stream(seed, split, wanted)

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        """A worked (or hasty, or mistaken) solution in English that ends with a box."""
        extra = problem.extra
        return write_chain(extra["steps"], items=extra["items"], tell=extra["tell"], style=self.options, rng=rng)

    def _stream(self, seed: int, split: Split, levels: tuple[int, ...]) -> Iterator[Problem]:
        # the split in the seed: no split's stream follows another's
        rng = np.random.default_rng([seed, _SPLITS.index(split), 0x57])
        stories = self.stories(split)
        seen: set[str] = set()
        while True:
            level = levels[int(rng.integers(len(levels)))]
            # a draw that yields nothing is redrawn at its level, so that the levels keep their shares
            problem = None
            while problem is None or problem.id in seen:
                problem = self._problem(stories[int(rng.integers(len(stories)))], level, split, rng)
            seen.add(problem.id)
            yield problem

    def _problem(self, story: Story, level: int, split: Split, rng: np.random.Generator) -> Problem | None:
        """One problem of this story, or None when the draw allows no sensible one or belongs to another split."""
        shapes = [shape for shape in SHAPES[level] if set(shape) <= {*story.sentences, "both"}]
        if not shapes:
            return None
        told = self._tell(story, shapes[int(rng.integers(len(shapes)))], rng)
        if told is None:
            return None
        sentences, steps, ending = told
        solution = evaluate_steps(steps)
        if solution is None or instance_split(steps) != split:
            return None
        assert len(solution) == level
        questions = story.sentences["ask" + ending]
        which = int(rng.integers(len(questions)))
        pronouns = people()
        names = list(pronouns)
        first, second = (names[int(i)] for i in rng.choice(len(names), size=2, replace=False))
        hero = story.who or first
        slots = {
            **pronouns[first],
            "who": hero,
            "Who": hero[0].upper() + hero[1:],
            "friend": second,
            "Friend": second,
            "items": story.items[int(rng.integers(len(story.items)))],
        }
        text = " ".join([*sentences, questions[which]]).format(**slots)
        prompt = f"{text} {INSTRUCTION}"
        return Problem(
            id=f"word-{hashlib.sha256(prompt.encode()).hexdigest()[:16]}",
            prompt=prompt,
            references=(str(solution[-1].value),),
            verifier=self.verifier,
            source=NAME,
            level=level,
            template=story.key,
            extra={
                "story": story.key,
                "steps": tuple(steps),
                "items": slots["items"],
                "tell": story.sentences["tell" + ending][which].format(**slots, answer="{answer}"),
            },
        )

    def _tell(
        self, story: Story, shape: Sequence[str], rng: np.random.Generator
    ) -> tuple[list[str], list[str], str] | None:
        """Draw numbers and phrasings. Return the story's sentences, its steps, and the end of the question's key.

        None when the draw allows no sensible story.
        """
        sentences: list[str] = []
        steps: list[str] = []
        operand, value, ending = "", 0, ""  # the first two are what the hero has now

        def step(left: str | int, operator: str, right: str | int) -> str:
            steps.append(f"{left} {operator} {right}")
            return f"s{len(steps) - 1}"

        said: set[str] = set()
        for event in shape:
            if event == "both":
                step(operand, "+", f"s{len(steps) - 1}")
                ending = "_both"
                continue
            numbers = self._numbers(event, value, rng)
            phrasings = [p for p in story.sentences[event] if p not in said]
            if numbers is None or not phrasings:
                return None
            k, n = numbers
            phrase = phrasings[int(rng.integers(len(phrasings)))]
            said.add(phrase)
            sentences.append(phrase.replace("{k}", str(k)).replace("{n}", str(n)))
            ending = ""
            if event == "open":
                operand, value = str(n), n
            elif event == "open_groups":
                operand, value = step(k, "*", n), k * n
            elif event in _COMPARE:
                step(operand, "+" if event == "more" else "-", n)
                ending = "_friend"
            elif event == "share":
                operand, value = step(operand, "/", k), value // k
                ending = "_share"
            else:
                operator = "+" if event.startswith("add") else "-"
                amount, other = (k * n, step(k, "*", n)) if event in _GROUP_MOVES else (n, str(n))
                operand, value = step(operand, operator, other), apply(operator, value, amount)
        return sentences, steps, ending

    def _numbers(self, event: str, value: int, rng: np.random.Generator) -> tuple[int, int] | None:
        """``(k, n)`` for an event when the hero has ``value``; None when none fit."""
        o = self.options
        k = int(rng.integers(2, o.max_factor + 1))
        if event == "open":
            return k, int(rng.integers(max(6, o.max_number // 4), o.max_number + 1))
        if event in ("open_groups", "add_groups"):
            return k, int(rng.integers(2, o.max_unit + 1))
        if event == "share":
            return (k, 0) if value % k == 0 and value // k >= 2 else None
        room = value - 2  # something is left after a loss
        if event == "sub_groups":
            return (k, int(rng.integers(2, min(o.max_unit, room // k) + 1))) if room // k >= 2 else None
        most = o.max_number // 2 if event in _COMPARE else o.max_number
        if event in ("sub", "fewer"):
            most = min(most, room)
        return (k, int(rng.integers(2, most + 1))) if most >= 2 else None


def instance_split(steps: Sequence[str]) -> Split:
    """The split that owns this computation: a tenth each for validation and test, by hash."""
    bucket = hashlib.sha256("; ".join(steps).encode()).digest()[0] % 10
    return _SPLITS[1] if bucket == 0 else _SPLITS[2] if bucket == 1 else _SPLITS[0]


def make_word_problems(**options: OptionValue) -> WordProblems:
    """The family with these fields of ``WordOptions``."""
    return WordProblems(read_options(NAME, WordOptions, options))
