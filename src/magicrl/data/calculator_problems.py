"""Task family ``calculator_problems``: the stories of ``word_problems`` with numbers that a small model cannot add.

The problems use the environment ``calculator``. A share of the demonstrations (``tool_share``) calls the calculator,
with the whole computation or step by step, and answers with its result. The others compute by hand, mostly with an
error. Calls lead to more correct answers, which reinforcement learning has to discover.

``digits_apart`` is for tiny models trained from scratch: a whitespace-separated vocabulary of the stories' words and of
single digits (``4 7 3 apples``), calls as ``<calc> 4 7 3 + 2 8 5 </calc>``, and the verifier ``exact``. Without it
texts are plain English, calls have the format of chat models, and the chat template shows the tool.

Computations are held out as in ``word_problems``, and stories with ``held_out = "template"``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from magicrl.data.families import FamilyOptions, OptionValue, Split, read_options
from magicrl.data.word_problems import (
    INSTRUCTION,
    SolutionStep,
    WordOptions,
    WordProblems,
    evaluate_steps,
    expression,
    load_stories,
    people,
    with_slip,
)
from magicrl.environments.calculator import ERRORS, apart, calculate
from magicrl.records import Problem, prompt_key

NAME = "calculator_problems"


class CalculatorOptions(FamilyOptions):
    """Options of the family."""

    max_number: int = Field(default=900, ge=10)  # largest number that a story starts with, gains or loses
    max_factor: int = Field(default=9, ge=3)  # largest number of groups, and of parts in a division
    max_unit: int = Field(default=90, ge=4)  # largest size of one group
    held_out: str = Field(default="template", pattern="^(template|instance)$")
    """See ``word_problems``. Models trained from scratch need ``instance``: they know only words of their stories."""
    tool_share: float = Field(default=0.3, ge=0, le=1)  # share of the demonstrations that call the calculator
    stepwise: float = Field(default=0.3, ge=0, le=1)  # share of these, of several steps, that make a call for each step
    slips: float = Field(default=0.7, ge=0, le=1)  # share of the demonstrations by hand with a wrong result
    digits_apart: bool = False


class CalculatorProblems:
    r"""Task family ``calculator_problems``; see the module docstring.

    Example:
        >>> family = CalculatorProblems(CalculatorOptions(digits_apart=True, tool_share=1, held_out="instance"))
        >>> problem = next(family.stream(seed=7, split="train", levels=[1]))
        >>> problem.prompt.split(". ")[:2]
        ['Ana prepares 2 6 9 cups of lemonade ', 'Leo prepares 1 4 5 fewer cups than Ana ']
        >>> family.demonstration(problem, np.random.default_rng(0))
        ('<calc> 2 6 9 - 1 4 5 </calc>', '1 2 4', 'Leo prepares \\boxed{ 1 2 4 } cups .')
    """

    name = NAME
    environment = "calculator"

    def __init__(self, options: CalculatorOptions) -> None:
        self.options = options
        told = options.model_dump(include={"max_number", "max_factor", "max_unit", "held_out"})
        self._stories = WordProblems(WordOptions.model_validate(told))
        self.verifier = "exact" if options.digits_apart else "maths"
        self.vocabulary = _vocabulary() if options.digits_apart else None

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Endless problems, the levels (numbers of steps, 1 to 3) equally often.

        Raises:
            ValueError: a level that does not exist.
        """
        return map(self._problem, self._stories.stream(seed=seed, split=split, levels=levels))

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> tuple[str, ...]:
        """With the calculator (call, result, answer), or by hand in one turn."""
        called = rng.random() < self.options.tool_share
        play = self._called if called else self._by_hand
        texts = play(problem.extra["steps"], problem.extra["tell"], rng)
        return tuple(map(apart, texts)) if self.options.digits_apart else texts

    def _called(self, steps: Sequence[str], tell: str, rng: np.random.Generator) -> tuple[str, ...]:
        asked = [expression(steps)]
        if len(steps) > 1 and rng.random() < self.options.stepwise:
            solution = evaluate_steps(steps)
            assert solution is not None
            asked = [_written(step) for step in solution]
        results = [calculate(text) for text in asked]
        played = [text for pair in zip(map(self._call, asked), results, strict=True) for text in pair]
        return (*played, _told(tell, results[-1]))

    def _call(self, text: str) -> str:
        if self.options.digits_apart:
            return f"<calc>{text}</calc>"
        call = json.dumps({"name": self.environment, "arguments": {"expression": text}})
        return f"<tool_call>\n{call}\n</tool_call>"

    def _by_hand(self, steps: Sequence[str], tell: str, rng: np.random.Generator) -> tuple[str, ...]:
        solution = evaluate_steps(steps)
        assert solution is not None
        if rng.random() < self.options.slips:
            solution = with_slip(steps, solution, rng)
        lines = [f"{_written(step)} = {step.value}." for step in solution]
        return (" ".join([*lines, _told(tell, str(solution[-1].value))]),)

    def _problem(self, told: Problem) -> Problem:
        steps, tell = told.extra["steps"], told.extra["tell"]
        prompt, references = told.prompt, told.references
        if self.options.digits_apart:
            # a tiny model is taught how an answer ends, and pays for every word
            prompt, references = apart(prompt.removesuffix(f" {INSTRUCTION}")), tuple(map(apart, references))
        return replace(
            told,
            prompt=prompt,
            key=prompt_key(prompt),
            references=references,
            verifier=self.verifier,
            source=NAME,
            extra={"steps": steps, "tell": tell, "digits_apart": self.options.digits_apart},
            environment=self.environment,
        )


def _written(step: SolutionStep) -> str:
    return expression([f"{step.left} {step.operator} {step.right}"])


def _told(tell: str, answer: str) -> str:
    return tell.format(answer=f"\\boxed{{{answer}}}")


def _vocabulary() -> tuple[str, ...]:
    """Every symbol of the stories and of calls, results and errors, digits and signs first."""
    words: list[str] = []
    slot = re.compile(r"\{\w+\}")
    for story in load_stories():
        words += [slot.sub(" ", text) for texts in story.sentences.values() for text in texts]
        words += [*([] if story.who is None else [story.who, story.who[0].upper() + story.who[1:]]), *story.items]
    for name, pronouns in people().items():
        words += [name, *pronouns.values()]
    signs = [*"0123456789+-*x/^().=", "<calc>", "</calc>", "\\boxed{", "}"]
    return tuple(dict.fromkeys([*signs, *apart(" ".join([*ERRORS, *words])).split()]))


def make_calculator_problems(**options: OptionValue) -> CalculatorProblems:
    """The family with these fields of ``CalculatorOptions``."""
    return CalculatorProblems(read_options(NAME, CalculatorOptions, options))
