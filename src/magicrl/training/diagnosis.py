"""Why sampled answers give nothing to learn from, and what helps: numbers in, cause and advice out.

A policy learns from groups whose answers do not all earn the same. Where those are rare, the answers say why: they are
cut at T, they hold no answer that the verifier reads, they are all wrong, or all right. Whatever names such a cause
(health findings, the stop of a run without signal, the difficulty filter, the verdict on a run, ``magicrl init``)
takes its words from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from magicrl.config.schema import VerifierConfig
from magicrl.evaluation.sampling import JudgedGroup
from magicrl.records import Problem, StepMetrics
from magicrl.training.health_series import column, mean
from magicrl.training.metrics import answered_share
from magicrl.verifiers.base import Extract, Reasoning

Cause: TypeAlias = Literal["enough", "truncated", "no_answer", "all_wrong", "all_right"]

ENOUGH = 0.25
"""Share of groups with a signal from which a run learns at a fair price; and the share of the answers from which a
cause is named beside the largest one."""
NEVER_ENDS = 0.9
"""Share of truncated answers from which a model more likely never ends than thinks for long."""
UNJUDGED = "no answer could be judged; look at the gold answers and at what the verifier says"
SUPERVISED_START = "a short supervised start ([start] sft)"


class Judging(NamedTuple):
    """How the recipe's verifier reads answers; None where it has no such setting (code)."""

    extract: Extract | None = None
    reasoning: Reasoning | None = None


ANY_JUDGING = Judging()
"""Where the verifier's settings are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAnswers:
    """What came of problems that were sampled several times each. Shares are in [0, 1].

    Attributes:
        groups: groups sampled.
        max_tokens: response limit, T.
        mixed: share of the groups whose answers do not all earn the same.
        correct: share of the judged answers that are right.
        truncated: share cut at T.
        answered: share that ended by itself and held an answer that the verifier read; None where unknown.
        judging: the verifier's settings.

    Example:
        100 problems of which 2.2 % of the answers are boxed: ``SampledAnswers(groups=100, max_tokens=256,
        mixed=0.02, correct=0.005, truncated=0.06, answered=0.022, judging=Judging("box", "auto"))``.
    """

    groups: int
    max_tokens: int
    mixed: float
    correct: float
    truncated: float
    answered: float | None = None
    judging: Judging = ANY_JUDGING

    def failures(self) -> dict[Cause, float]:
        """Share of the answers that each cause made fail; with ``correct`` they add up to one."""
        answered = 1.0 - self.truncated if self.answered is None else self.answered
        return {
            "truncated": self.truncated,
            "no_answer": max(0.0, 1.0 - self.truncated - answered),
            "all_wrong": max(0.0, answered - self.correct),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What keeps a model from learning from its answers.

    Attributes:
        cause: the first one; ``enough``: nothing does.
        message: what was seen, with numbers.
        advice: what helps, first things first, each a sentence in the recipe's settings.
    """

    cause: Cause
    message: str
    advice: tuple[str, ...]

    @property
    def text(self) -> str:
        """What was seen and what helps."""
        return f"{self.message}. {self.remedy}"

    @property
    def remedy(self) -> str:
        """The advice in one line."""
        return " ".join(self.advice)


def judging_of(verifier: VerifierConfig, problems: Iterable[Problem]) -> Judging:
    """The settings as far as they count for these problems: code has none of its own."""
    read = any(problem.verifier != "code" for problem in problems)
    return Judging(verifier.extract, verifier.reasoning) if read else ANY_JUDGING


def diagnose(answers: SampledAnswers) -> Diagnosis:
    """The cause of the largest share of the answers, with the advice against it and every other large one."""
    if answers.mixed >= ENOUGH:
        return Diagnosis(cause="enough", message=_seen(answers), advice=())
    causes: list[Cause] = ["all_right"]
    if answers.correct <= 0.5:
        shares = answers.failures()
        ordered = sorted(shares, key=lambda cause: -shares[cause])
        causes = [cause for i, cause in enumerate(ordered) if i == 0 or shares[cause] >= ENOUGH]
    return Diagnosis(cause=causes[0], message=_seen(answers), advice=tuple(_advice(cause, answers) for cause in causes))


def answers_of(groups: Sequence[JudgedGroup], *, max_tokens: int, judging: Judging) -> SampledAnswers:
    """The numbers of groups that were sampled and judged.

    Raises:
        ValueError: no answer was judged.
    """
    judged = [group for group in groups if group.counted.any()]
    if not judged:
        raise ValueError(UNJUDGED)
    right = [group.correct[group.counted] for group in judged]
    return SampledAnswers(
        groups=len(groups),
        max_tokens=max_tokens,
        mixed=sum(0 < group.mean() < 1 for group in right) / len(groups),
        correct=float(np.concatenate(right).mean()),
        truncated=float(np.mean([c.truncated for group in judged for c in group.group.completions])),
        answered=answered_share([g.group.completions for g in judged], [g.verdicts for g in judged]),
        judging=judging,
    )


STEP_KEYS = (
    "groups/rejected/ratio",
    "groups/sampled",
    "train/accuracy/mean",
    "train/truncation/ratio",
    "train/answered/ratio",
    "stage/max_tokens",
)
"""The metrics that ``answers_in`` reads."""


def answers_in(steps: Sequence[StepMetrics], judging: Judging = ANY_JUDGING) -> SampledAnswers | None:
    """The numbers of recorded training steps, their means; None where they do not say."""
    rejected, correct, truncated, answered = (
        column(steps, key) for key in (STEP_KEYS[0], STEP_KEYS[2], STEP_KEYS[3], STEP_KEYS[4])
    )
    limits = column(steps, STEP_KEYS[5])
    if not (rejected and correct and truncated and limits):
        return None
    return SampledAnswers(
        groups=round(sum(column(steps, STEP_KEYS[1]))),
        max_tokens=round(limits[-1]),
        mixed=1.0 - mean(rejected),
        correct=mean(correct),
        truncated=mean(truncated),
        answered=mean(answered) if answered else None,
        judging=judging,
    )


def _advice(cause: Cause, answers: SampledAnswers) -> str:
    if cause == "truncated":
        longer = f"Answers are cut at T = {answers.max_tokens}: raise max_tokens of the stage."
        ending = f" If they do not end at any length, make {SUPERVISED_START}, or ask for brevity in the template."
        return longer + (ending if answers.truncated >= NEVER_ENDS else "")
    if cause == "no_answer":
        extract, reasoning = answers.judging
        ways = [
            'also take answers without a box (verifier.extract = "lenient")' if extract == "box" else "",
            'do not require a closed <think> (verifier.reasoning = "auto")' if reasoning == "required" else "",
            "ask for the form of the answer in the template of the data"
            + (' (e.g. "{prompt} Put the answer in \\\\boxed{}.")' if extract == "box" else ""),
            f"or make {SUPERVISED_START}",
        ]
        return f"Answers end without anything that the verifier reads: {', '.join(way for way in ways if way)}."
    if cause == "all_wrong":
        return (
            "Answers are readable and wrong: easier problems, a filter that finds those solved sometimes "
            "([data.difficulty_filter]), or more samples a problem (group_size of the stage)."
        )
    return (
        "The problems are solved already: harder ones, or those not always solved ([data.difficulty_filter], "
        "data.online_filter); more samples a problem (group_size of the stage) find the rare mistake."
    )


def _seen(answers: SampledAnswers) -> str:
    form = "boxed" if answers.judging.extract == "box" else "readable"
    parts = [
        f"{_percent(answers.mixed)} of {answers.groups} groups have answers of differing reward",
        f"{_percent(answers.correct)} of the answers are right",
        "" if answers.answered is None else f"{_percent(answers.answered)} end with a {form} answer",
        f"{_percent(answers.truncated)} are cut at T = {answers.max_tokens}",
    ]
    return ", ".join(part for part in parts if part)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"
