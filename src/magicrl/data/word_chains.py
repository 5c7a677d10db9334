"""Worked solutions of word problems in varied English: the demonstrations of the supervised start.

A solution is a list of steps such as ``("47 + 38", "s0 - 20")``; an operand ``s0`` is the result of step 0.
What a demonstration does with them is drawn: answer at once, stop too early, or work through, where each
step may be decomposed, checked, slipped and repaired, or slipped without notice. The variety is the point:
it keeps the entropy of the trained model high enough for reinforcement learning to have something to choose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from magicrl.data.families import FamilyOptions

Operator = Literal["+", "-", "*", "/"]
Strategy = Literal["direct", "partial", "worked"]
_REFERENCE = re.compile(r"s(\d+)")

_EQUATIONS: dict[str, tuple[str, ...]] = {
    "+": (
        "{l} + {r} = {v}",
        "{l} plus {r} is {v}",
        "{l} and {r} make {v}",
        "adding {r} to {l} gives {v}",
        "{r} more than {l} is {v}",
    ),
    "-": (
        "{l} - {r} = {v}",
        "{l} minus {r} is {v}",
        "taking {r} from {l} leaves {v}",
        "{l} less {r} is {v}",
        "taking away {r} from {l} gives {v}",
    ),
    "*": (
        "{l} x {r} = {v}",
        "{l} times {r} is {v}",
        "{l} groups of {r} make {v}",
        "{l} lots of {r} give {v}",
        "multiplying {l} by {r} gives {v}",
    ),
    "/": (
        "{l} / {r} = {v}",
        "{l} divided by {r} is {v}",
        "{l} shared by {r} gives {v}",
        "splitting {l} into {r} equal parts gives {v}",
    ),
}
_SYMBOLS = {"+": "+", "-": "-", "*": "x", "/": "/"}
_FIRST_LEADS = ("", "First, ", "To begin, ", "We start: ", "Step 1: ", "At the start, ")
_LATER_LEADS = ("", "Then ", "Next, ", "After that, ", "Now ", "So now ")
_LAST_LEADS = ("", "Then ", "Finally, ", "At last, ", "In the end, ", "So ")
_PLANS = (
    "We need {e}.",
    "The plan: {e}.",
    "I have to find {e}.",
    "This is {e}.",
    "In one line: {e}.",
    "Let us compute {e}.",
)
_LISTS = ("The numbers are {e}.", "Given: {e}.", "We know {e}.", "The story has {e}.")
_CHECKS = ("Check: {e}.", "To check, {e}.", "Going back, {e}.", "Test: {e}, good.", "Indeed {e}.")
_REPAIRS = (
    "No, {e}.",
    "Wait, {e}.",
    "That is wrong: {e}.",
    "Let me redo it: {e}.",
    "Not quite, {e}.",
    "I slipped, {e}.",
)
_CLOSINGS = (
    "The answer is {answer}.",
    "Answer: {answer}.",
    "So the answer is {answer}.",
    "That makes {answer} {items}.",
    "So it is {answer} {items}.",
    "Result: {answer} {items}.",
    "This gives {answer}.",
)


class ChainStyle(FamilyOptions):
    """How often demonstrations do what."""

    direct: float = Field(default=0.25, ge=0, le=1)
    """Share that answers without any working."""
    partial: float = Field(default=0.15, ge=0, le=1)
    """Share that stops before the last step (problems of several steps)."""
    slips: float = Field(default=0.15, ge=0, le=1)
    """Share of the worked ones with a slip that nobody notices: their answer is wrong."""
    repairs: float = Field(default=0.1, ge=0, le=1)
    """Share of the worked ones with a slip that is noticed and put right."""
    plans: float = Field(default=0.3, ge=0, le=1)
    """Share of the worked ones that say first what is to be computed."""
    checks: float = Field(default=0.2, ge=0, le=1)
    """Checks by the inverse operation, a solution."""
    decompositions: float = Field(default=0.3, ge=0, le=1)
    """Share of steps that go through tens and ones."""
    plain: float = Field(default=0.3, ge=0, le=1)
    """Share of equations in symbols whatever the other phrasings."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        for a, b in (("direct", "partial"), ("slips", "repairs")):
            if (total := getattr(self, a) + getattr(self, b)) > 1:
                raise ValueError(f"{a} + {b} must be at most 1, they are {total:g}")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One arithmetic step with its operands resolved, and what is written as its result."""

    operator: str
    left: int
    right: int
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A written demonstration.

    Attributes:
        text: what the model learns to write.
        strategy: direct, partial or worked.
        slipped: a slip was left standing.
        repaired: a slip was noticed and put right.
    """

    text: str
    strategy: Strategy
    slipped: bool
    repaired: bool


def apply(operator: str, left: int, right: int) -> int:
    """The value of ``left operator right``; division must come out even."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    assert operator == "/", operator
    assert left % right == 0, f"no whole number: {left} / {right}"
    return left // right


def evaluate(steps: Sequence[str], slip: tuple[int, int] | None = None) -> list[Step] | None:
    """Work out all steps; with ``slip = (index, value)`` that step is written with this value.

    Returns:
        The steps, or None when a slip makes a later step senseless (a result below 2, an uneven division).
    """
    done: list[Step] = []
    for index, step in enumerate(steps):
        left, operator, right = step.split(" ")
        a, b = (_operand(word, done) for word in (left, right))
        if operator == "/" and a % b:
            assert slip is not None
            return None
        value = apply(operator, a, b)
        if slip is not None and slip[0] == index:
            value = slip[1]
        if value < 2:
            return None
        done.append(Step(operator=operator, left=a, right=b, value=value))
    return done


def _operand(word: str, done: Sequence[Step]) -> int:
    reference = _REFERENCE.fullmatch(word)
    return done[int(reference[1])].value if reference else int(word)


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


def write_chain(steps: Sequence[str], *, items: str, tell: str, style: ChainStyle, rng: np.random.Generator) -> Chain:
    """Draw one demonstration.

    Args:
        steps: the solution.
        items: plural noun of what is counted.
        tell: the sentence that answers the question, with the slot ``{answer}``.
        style: shares of what may happen.
        rng: every choice is drawn from it.
    """
    solution = evaluate(steps)
    assert solution is not None
    route = rng.random()
    if route < style.direct:
        return Chain(
            text=_closing(solution[-1].value, items, tell, rng), strategy="direct", slipped=False, repaired=False
        )
    if len(steps) > 1 and route < style.direct + style.partial:
        stop = int(rng.integers(1, len(steps)))
        body = _body(solution[:stop], steps[:stop], items, style, rng, repair=None)
        text = f"{body} {_closing(solution[stop - 1].value, items, tell, rng)}"
        return Chain(text=text, strategy="partial", slipped=True, repaired=False)
    fate = rng.random()
    slipped = fate < style.slips
    repaired = not slipped and fate < style.slips + style.repairs
    repair = int(rng.integers(len(steps))) if repaired else None
    if slipped:
        solution = _with_slip(steps, solution, rng)
    body = _body(solution, steps, items, style, rng, repair=repair)
    text = f"{body} {_closing(solution[-1].value, items, tell, rng)}"
    return Chain(text=text, strategy="worked", slipped=slipped, repaired=repaired)


def _with_slip(steps: Sequence[str], solution: Sequence[Step], rng: np.random.Generator) -> list[Step]:
    """The steps with one wrong value that changes the final answer; later steps go on from it."""
    start = int(rng.integers(len(steps)))
    for index in [start, *reversed(range(len(steps)))]:
        wrong = evaluate(steps, (index, _wrong_value(solution[index], rng)))
        if wrong is not None and wrong[-1].value != solution[-1].value:
            return wrong
    raise AssertionError(f"a slip in the last step is always possible: {steps}")


def _wrong_value(step: Step, rng: np.random.Generator) -> int:
    """A value that a hurried person might write: off by one or by a carry, or from the opposite operation."""
    candidates = [step.value + d for d in (-1, 1, -2, 2, -10, 10)]
    if step.operator in "+-":
        candidates.append(step.left - step.right if step.operator == "+" else step.left + step.right)
    candidates = [c for c in candidates if c >= 2 and c != step.value]
    return candidates[int(rng.integers(len(candidates)))]


def _body(
    solution: Sequence[Step],
    steps: Sequence[str],
    items: str,
    style: ChainStyle,
    rng: np.random.Generator,
    *,
    repair: int | None,
) -> str:
    parts: list[str] = []
    if rng.random() < style.plans:
        parts.append(_plan(steps, rng))
    for index, step in enumerate(solution):
        if index == 0:
            lead = _pick(_FIRST_LEADS, rng)
        else:
            lead = _pick(_LAST_LEADS if index == len(solution) - 1 else _LATER_LEADS, rng)
        noun = f" {items}" if rng.random() < 0.3 else ""
        right = apply_or_none(step) == step.value
        if repair == index:
            wrong = Step(operator=step.operator, left=step.left, right=step.right, value=_wrong_value(step, rng))
            parts.append(_sentence(lead + _equation(wrong, style, rng)))
            parts.append(_pick(_REPAIRS, rng).format(e=_equation(step, style, rng)))
        elif right and (split := _decomposed(step, rng)) is not None and rng.random() < style.decompositions:
            parts.append(_sentence(lead + split))
        else:
            parts.append(_sentence(lead + _equation(step, style, rng) + noun))
        if right and rng.random() < style.checks / len(solution):
            parts.append(_pick(_CHECKS, rng).format(e=_inverse(step)))
    return " ".join(parts)


def apply_or_none(step: Step) -> int | None:
    """The true value of a step, None where a slip before it makes it uneven."""
    if step.operator == "/" and step.left % step.right:
        return None
    return apply(step.operator, step.left, step.right)


def _plan(steps: Sequence[str], rng: np.random.Generator) -> str:
    if rng.random() < 0.7:
        return _pick(_PLANS, rng).format(e=expression(steps))
    numbers = [word for step in steps for word in step.split(" ")[::2] if word.isdigit()]
    return _pick(_LISTS, rng).format(e=", ".join(numbers[:-1]) + " and " + numbers[-1])


def _equation(step: Step, style: ChainStyle, rng: np.random.Generator) -> str:
    forms = _EQUATIONS[step.operator]
    # the plain equation is the commonest way to write it
    form = forms[0] if rng.random() < style.plain else _pick(forms, rng)
    return form.format(l=step.left, r=step.right, v=step.value)


def _decomposed(step: Step, rng: np.random.Generator) -> str | None:
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


def _inverse(step: Step) -> str:
    l, r, v = step.left, step.right, step.value
    if step.operator == "+":
        return f"{v} - {r} = {l}"
    if step.operator == "-":
        return f"{v} + {r} = {l}"
    if step.operator == "*":
        return f"{v} / {l} = {r}"
    return f"{v} x {r} = {l}"


def _closing(answer: int, items: str, tell: str, rng: np.random.Generator) -> str:
    form = tell if rng.random() < 0.4 else _pick(_CLOSINGS, rng)
    return form.format(answer=f"\\boxed{{{answer}}}", items=items)


def _pick(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
