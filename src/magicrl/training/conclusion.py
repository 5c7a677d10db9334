"""Did it learn? One verdict on a finished run with its reason, from what was recorded.

The terminal, the report, the model card, ``run.json`` and the exit status say this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from magicrl.evaluation.statistics import Difference, paired_scores
from magicrl.records import StepMetrics
from magicrl.training.diagnosis import Judging, SampledAnswers, answers_in, diagnose
from magicrl.training.health_series import column

Outcome: TypeAlias = Literal["learned", "no_rise", "worse", "nothing_to_learn", "no_update", "undecided"]

TITLES: Mapping[Outcome, str] = {
    "learned": "it learned",
    "no_rise": "no measurable rise",
    "worse": "it got worse",
    "nothing_to_learn": "nothing to learn from",
    "no_update": "no weight changed",
    "undecided": "undecided",
}
SUCCESS: frozenset[str] = frozenset({"learned", "undecided"})
"""Outcomes of a run that did what was asked; after any other ``magicrl train`` ends with ``NOTHING_LEARNED``."""
NOTHING_LEARNED = 3
"""Exit status of ``magicrl train`` after a run that went to its end and learned nothing."""

NOTEWORTHY = 0.05
"""A rise that a test excludes when its interval ends below: then there is none; else the test cannot tell."""
SCARCE = 0.05
"""Share of groups with a signal below which a run without a rise had nothing to learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRise:
    """The first test set before and after training, paired by problem and clustered, at one temperature for both."""

    set_name: str
    temperature: float
    before: float
    after: float
    change: Difference


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningFacts:
    """What a verdict rests on.

    Attributes:
        steps: training steps.
        updates: SGD updates applied.
        weights_changed: whether any weight of the saved model differs from the start's; None where it cannot be told.
        tokens_share: share of the sampled tokens that an update learnt from; None without a step.
        answers: all training steps' answers together; None without a step.
        rise: None without a test before and after.
    """

    steps: int
    updates: int
    weights_changed: bool | None
    tokens_share: float | None
    answers: SampledAnswers | None
    rise: ScoreRise | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """The verdict.

    Attributes:
        outcome: in a word.
        reason: in a sentence, with numbers.
        advice: what helps, where something is to be helped.
        facts: what it rests on.
    """

    outcome: Outcome
    reason: str
    advice: tuple[str, ...]
    facts: LearningFacts

    @property
    def title(self) -> str:
        """The outcome in words."""
        return TITLES[self.outcome]

    def as_dict(self) -> dict[str, Any]:
        """Its place in ``run.json``."""
        return {
            "outcome": self.outcome,
            "title": self.title,
            "reason": self.reason,
            "advice": list(self.advice),
            "facts": asdict(self.facts),
        }


def conclude(facts: LearningFacts) -> Conclusion:
    """The verdict on a run that went to its end: on its weights first, then on its test."""
    rise, found = facts.rise, None if facts.answers is None else diagnose(facts.answers)
    seen = "" if found is None else f"; {found.message}"
    advice = () if found is None else found.advice
    if facts.updates == 0:
        why = "no training step was made" if found is None else "not one group had a signal, so no update was applied"
        outcome: Outcome = "no_update" if found is None or found.cause == "enough" else "nothing_to_learn"
        return Conclusion(outcome=outcome, reason=f"{why}{seen}", advice=advice, facts=facts)
    applied = f"{facts.updates} {'update' if facts.updates == 1 else 'updates'}"
    if facts.weights_changed is False:
        return Conclusion(
            outcome="no_update",
            reason=f"{applied} left every weight of the saved model as it was{seen}",
            advice=("Raise optimizer.learning_rate: its steps are lost in the precision of the weights.", *advice),
            facts=facts,
        )
    if rise is None:
        return Conclusion(
            outcome="undecided",
            reason=f"{applied} changed the weights, and no test set says whether for the better{seen}",
            advice=("Hold problems out (data.holdout) or name a test set ([data.test.NAME]).", *advice),
            facts=facts,
        )
    tested = _in_words(rise)
    if rise.change.low > 0:
        return Conclusion(outcome="learned", reason=tested, advice=(), facts=facts)
    if rise.change.high < 0:
        lower = "Lower optimizer.learning_rate, and see what the health findings say."
        return Conclusion(outcome="worse", reason=tested, advice=(lower, *advice), facts=facts)
    if facts.answers is not None and facts.answers.mixed < SCARCE:
        return Conclusion(outcome="nothing_to_learn", reason=f"{tested}{seen}", advice=advice, facts=facts)
    if rise.change.high < NOTEWORTHY:
        longer = "Train longer, or with a larger optimizer.learning_rate."
        return Conclusion(outcome="no_rise", reason=tested, advice=(*advice, longer), facts=facts)
    more = "More test problems or samples (evaluation.samples) make the interval narrower; more steps the rise larger."
    return Conclusion(outcome="undecided", reason=f"{tested}: too wide to tell", advice=(*advice, more), facts=facts)


def learning_facts(
    steps: Sequence[StepMetrics],
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    *,
    reuse: int,
    temperature: float,
    weights_changed: bool | None,
    judging: Judging,
) -> LearningFacts:
    """The facts of a recorded run.

    Args:
        steps: its training steps.
        before, after: the documents of its first test set.
        reuse: passes over each step's buffer.
        temperature: of training; where the test has none at it, its highest counts.
        weights_changed: see ``LearningFacts``.
        judging: the verifier's settings, for the advice.
    """
    sampled, trained = sum(column(steps, "tokens/sampled")), sum(column(steps, "tokens/trained")) / reuse
    return LearningFacts(
        steps=len(steps),
        updates=round(sum(column(steps, "learner/sgd_steps"))),
        weights_changed=weights_changed,
        tokens_share=min(1.0, trained / sampled) if sampled else None,
        answers=answers_in(steps, judging),
        rise=None if before is None or after is None else _rise(before, after, temperature),
    )


def _rise(before: Mapping[str, Any], after: Mapping[str, Any], temperature: float) -> ScoreRise | None:
    old, new = ({float(tau): score for tau, score in test["temperatures"].items()} for test in (before, after))
    both = old.keys() & new.keys()
    if not both:
        return None
    at = temperature if temperature in both else max(both)
    change = paired_scores(new[at]["per_problem"], old[at]["per_problem"], new[at].get("clusters"))
    if change is None:
        return None
    means = [float(score["accuracy"]["mean"]) for score in (old[at], new[at])]
    return ScoreRise(set_name=str(after["set"]), temperature=at, before=means[0], after=means[1], change=change)


def _in_words(rise: ScoreRise) -> str:
    points = [
        f"{100 * share:+.1f}".replace("-", "−") for share in (rise.change.mean, rise.change.low, rise.change.high)
    ]
    few = rise.change.clusters < rise.change.problems
    clusters = f" of {rise.change.clusters} prompts or templates" if few else ""
    return (
        f"{rise.set_name} at temperature {rise.temperature:g}: {100 * rise.before:.1f} % before, "
        f"{100 * rise.after:.1f} % after, {points[0]} points (95 %: {points[1]} to {points[2]}, "
        f"{rise.change.problems} problems{clusters})"
    )
