"""Why sampled answers give nothing to learn from, and whether a run learned: numbers in, cause, advice and verdict out.

A policy learns from groups whose answers do not all earn the same. Where those are rare, the answers say why: they are
cut at T, they hold no answer that the verifier reads, they are all wrong, or all right. Health findings, the stop of a
run without signal, the difficulty filter, ``magicrl init`` and the verdict on a finished run (in the terminal, the
report, the model card, ``run.json`` and the exit status) take their words from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean as mean
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from magicrl.config.verifier_schema import VerifierConfig
from magicrl.evaluation.statistics import Difference, paired_scores
from magicrl.records import Completion, Problem, ScoredGroup, StepMetrics, Verdict
from magicrl_verifiers.records import NO_ANSWER, Extract, Reasoning

Cause: TypeAlias = Literal["enough", "truncated", "no_answer", "all_wrong", "all_right", "same_reward"]

ENOUGH = 0.25
"""Share of groups with a signal from which a run learns at a fair price; and the share of the answers from which a
cause is named beside the largest one."""
NEVER_ENDS = 0.9
"""Share of truncated answers from which a model more likely never ends than thinks for long."""


def unjudged_text(reason: str) -> str:
    """Return what to say if no answer could be judged, with the ``reason`` of one verdict (empty if none has one)."""
    return f"no answer could be judged: {reason or 'look at the reference answers and at the verifier'}"


SUPERVISED_START = "a short supervised start ([start] sft)"


def column(steps: Sequence[StepMetrics], *keys: str) -> list[float]:
    """The finite numbers of the first of ``keys`` that each step has; steps without one are left out."""
    found: list[float] = []
    for row in steps:
        values = (row.values.get(key) for key in keys)
        found += [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)][:1]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """What success is told in: the share of right answers, or the mean reward where rewards are graded.

    Attributes:
        key: of a score in ``evaluations/``; of a step, ``train/KEY/mean``.
        name: in words.
        per_problem: key of a score's values by problem.
    """

    key: Literal["accuracy", "reward"]
    name: str
    per_problem: Literal["per_problem", "reward_per_problem"]

    def bare(self, value: float) -> str:
        """``45.7``, in per cent, or a reward as ``0.457``."""
        return f"{100 * value:.1f}" if self.key == "accuracy" else f"{value:.3g}".replace("-", "−")

    def value(self, value: float | None) -> str:
        """The same with its unit; a dash for what was not measured."""
        return "–" if value is None else self.bare(value) + (" %" if self.key == "accuracy" else "")

    def change(self, difference: float) -> str:
        """``+12.3``, in percentage points, or a difference of rewards as ``+0.123``."""
        size = abs(difference)
        text = self.bare(size if size > 1e-9 else 0.0)  # a sum that cancels leaves its last bits
        return text if not text.strip("0.") else ("+" if difference > 0 else "−") + text

    @property
    def unit(self) -> str:
        """What stands behind a change."""
        return " points" if self.key == "accuracy" else ""

    def span(self, *per_problem: Sequence[float | None]) -> float:
        """The range of the scores of problems: 1 for shares; of rewards what was seen (1 where all are equal)."""
        told = [value for values in per_problem for value in values if value is not None]
        return (max(told, default=0.0) - min(told, default=0.0) or 1.0) if self.key == "reward" else 1.0


ACCURACY = Measure(key="accuracy", name="accuracy", per_problem="per_problem")
REWARD = Measure(key="reward", name="mean reward", per_problem="reward_per_problem")


def measure_of(steps: Iterable[StepMetrics] = (), rewards: Iterable[object] = ()) -> Measure:
    """``REWARD`` where rewards are graded: a test told a mean reward (``rewards``: what each told, None for none), or
    a step's mean reward is not its accuracy."""
    pairs = ([row.values.get(f"train/{measure.key}/mean") for measure in (ACCURACY, REWARD)] for row in steps)
    graded = any(reward is not None for reward in rewards) or any(
        None not in pair and pair[0] != pair[1] for pair in pairs
    )
    return REWARD if graded else ACCURACY


class Judging(NamedTuple):
    """How the recipe's verifier reads answers; None where it has no such setting (code)."""

    extract: Extract | None = None
    reasoning: Reasoning | None = None


ANY_JUDGING = Judging()
"""Where the verifier's settings are not known."""


def judging_of(verifier: VerifierConfig, problems: Iterable[Problem]) -> Judging:
    """The settings as far as they count for these problems: code and a reward of the user's have none of their own."""
    read = any(problem.verifier in ("maths", "exact") for problem in problems)
    return Judging(verifier.extract, verifier.reasoning) if read else ANY_JUDGING


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
        reward: the mean, where rewards are graded.

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
    reward: float | None = None

    def failures(self) -> dict[Cause, float]:
        """Share of the answers that each cause made fail; with ``correct`` they add up to one."""
        # unknown: what was not cut is taken as answered
        answered = 1.0 - self.truncated if self.answered is None else self.answered
        rest: dict[Cause, float] = {"all_wrong": max(0.0, answered - self.correct)}
        return {
            "truncated": self.truncated,
            "no_answer": max(0.0, 1.0 - self.truncated - answered),
            **(rest if self.reward is None else {"same_reward": answered}),
        }


def answers_of(groups: Sequence[ScoredGroup], *, max_tokens: int, judging: Judging) -> SampledAnswers:
    """The numbers of groups that were sampled and judged.

    Raises:
        ValueError: no answer was judged.
    """
    judged = [group for group in groups if group.counted.any()]
    if not judged:
        raise ValueError(unjudged_text(next((v.reason for g in groups for v in g.verdicts if v.reason), "")))
    right = [group.correct[group.counted] for group in judged]
    return SampledAnswers(
        groups=len(groups),
        max_tokens=max_tokens,
        # by reward, as training rejects; of all groups: one that nobody could judge gave no signal either
        mixed=sum(len(np.unique(group.rewards[group.counted])) > 1 for group in judged) / len(groups),
        correct=float(np.concatenate(right).mean()),
        truncated=float(np.mean([c.truncated for group in judged for c in group.group.completions])),
        answered=answered_share([g.group.completions for g in judged], [g.verdicts for g in judged]),
        judging=judging,
    )


def answered_share(completions: Iterable[Sequence[Completion]], verdicts: Iterable[Sequence[Verdict]]) -> float:
    """Share of responses that ended by themselves and held an answer that the verifier read; a sequence a group."""
    pairs = [pair for c, v in zip(completions, verdicts, strict=True) for pair in zip(c, v, strict=True)]
    return float(np.mean([not completion.truncated and v.status not in NO_ANSWER for completion, v in pairs]))


STEP_KEYS = (
    "groups/sampled",
    "stage/max_tokens",
    "groups/rejected/ratio",
    "train/accuracy/mean",
    "train/truncation/ratio",
    "train/answered/ratio",
    "train/reward/mean",
)
"""The metrics that ``answers_in`` reads."""


def answers_in(steps: Sequence[StepMetrics], judging: Judging = ANY_JUDGING) -> SampledAnswers | None:
    """The numbers of recorded training steps, their means; None where they do not say."""
    groups, limits, rejected, correct, truncated, answered, rewards = (column(steps, key) for key in STEP_KEYS)
    if not (rejected and correct and truncated and limits):
        return None
    return SampledAnswers(
        groups=round(sum(groups)),
        max_tokens=round(limits[-1]),
        # groups with fewer than two judged answers are among the rejected ones: they teach nothing either
        mixed=1.0 - mean(rejected),
        correct=mean(correct),
        truncated=mean(truncated),
        answered=mean(answered) if answered else None,
        judging=judging,
        reward=mean(rewards) if measure_of(steps) is REWARD else None,
    )


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
    def remedy(self) -> str:
        """The advice in one line."""
        return " ".join(self.advice)

    @property
    def text(self) -> str:
        """What was seen and what helps."""
        return f"{self.message}. {self.remedy}"


def diagnose(answers: SampledAnswers) -> Diagnosis:
    """The cause of the largest share of the answers, with the advice against it and every other large one."""
    if answers.mixed >= ENOUGH:
        return Diagnosis(cause="enough", message=_seen(answers), advice=())
    # more right than wrong and still few mixed groups: what is left to learn from is solved
    causes: list[Cause] = ["all_right"]
    if answers.correct <= 0.5 or answers.reward is not None:
        shares = answers.failures()
        first, *others = sorted(shares, key=lambda cause: -shares[cause])
        causes = [first, *(cause for cause in others if shares[cause] >= ENOUGH)]
    return Diagnosis(cause=causes[0], message=_seen(answers), advice=tuple(_advice(cause, answers) for cause in causes))


def _seen(answers: SampledAnswers) -> str:
    def percent(share: float) -> str:
        return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"

    form = "boxed" if answers.judging.extract == "box" else "readable"
    ended = "" if answers.answered is None else f"{percent(answers.answered)} end with a {form} answer, "
    right = f"{percent(answers.correct)} of the answers are right"
    return (
        f"{percent(answers.mixed)} of {answers.groups} groups have answers of differing reward, "
        f"{right if answers.reward is None else f'the mean reward is {REWARD.value(answers.reward)}'}, {ended}"
        f"{percent(answers.truncated)} are cut at T = {answers.max_tokens}"
    )


def _advice(cause: Cause, answers: SampledAnswers) -> str:
    if cause == "no_answer":
        return _advice_on_the_form(answers.judging)
    ending = f" If they do not end at any length, make {SUPERVISED_START}, or ask for brevity in the template."
    return {
        "truncated": f"Answers are cut at T = {answers.max_tokens}: raise max_tokens of the stage."
        + (ending if answers.truncated >= NEVER_ENDS else ""),
        "all_wrong": "Answers are readable and wrong: easier problems, a filter that finds those solved sometimes "
        "([data.difficulty_filter]), or more samples a problem (group_size of the stage).",
        "same_reward": "Answers to a problem earn the same: a reward that tells more of them apart, other problems, or "
        "more samples a problem (group_size of the stage).",
        "all_right": "The problems are solved already: harder ones, or those not always solved "
        "([data.difficulty_filter], data.online_filter); more samples a problem (group_size of the stage) find the "
        "rare mistake.",
    }[cause]


def _advice_on_the_form(judging: Judging) -> str:
    boxed = judging.extract == "box"
    ways = [
        *(['also take answers without a box (verifier.extract = "lenient")'] if boxed else []),
        *(['do not require a closed <think> (verifier.reasoning = "auto")'] if judging.reasoning == "required" else []),
        "ask for the form of the answer in the template of the data"
        + (' (e.g. "{prompt} Put the answer in \\\\boxed{}.")' if boxed else ""),
        f"or make {SUPERVISED_START}",
    ]
    return f"Answers end without anything that the verifier reads: {', '.join(ways)}."


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
"""A rise, as a share of the scores' range, that a test excludes when its interval ends below: then there is none; else
the test cannot tell."""
SCARCE = 0.05
"""Share of groups with a signal below which a run without a rise had nothing to learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRise:
    """The first test set before and after training, paired by problem and clustered, at one temperature for both.

    ``span`` is the range of the problems' scores, ``graded`` whether these are mean rewards.
    """

    set_name: str
    temperature: float
    before: float
    after: float
    change: Difference
    span: float = 1.0
    graded: bool = False


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
    """The verdict: in a word, in a sentence with numbers, what helps, and what it rests on."""

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
        return {**asdict(self), "title": self.title}


def conclude(facts: LearningFacts) -> Conclusion:
    """The verdict on a run that went to its end: on its weights first, then on its test."""
    found = None if facts.answers is None else diagnose(facts.answers)
    seen = "" if found is None else f"; {found.message}"
    advice = () if found is None else found.advice
    updates = f"{facts.updates} {'update' if facts.updates == 1 else 'updates'}"

    def verdict(outcome: Outcome, reason: str, *advice: str) -> Conclusion:
        return Conclusion(outcome=outcome, reason=reason, advice=advice, facts=facts)

    # the weights first: where none changed, a rise is not the training's
    if facts.updates == 0:
        if found is None:
            return verdict("no_update", "no training step was made")
        why = f"not one group had a signal, so no update was applied{seen}"
        return verdict("no_update" if found.cause == "enough" else "nothing_to_learn", why, *advice)
    if facts.weights_changed is False:  # None: it cannot be told, which is not unchanged
        raised = "Raise optimizer.learning_rate: its steps are lost in the precision of the weights."
        return verdict("no_update", f"{updates} left every weight of the saved model as it was{seen}", raised, *advice)
    if facts.rise is None:
        why = f"{updates} changed the weights, and no test set says whether for the better{seen}"
        held_out = "Hold problems out (data.holdout) or name a test set ([data.test.NAME])."
        return verdict("undecided", why, held_out, *advice)
    tested, change = _in_words(facts.rise), facts.rise.change
    if change.low > 0:
        return verdict("learned", tested)
    if change.high < 0:
        return verdict("worse", tested, "Lower optimizer.learning_rate, and see the health findings.", *advice)
    # no rise shown, and hardly a group to learn from: that is the cause, whatever the interval's width
    if facts.answers is not None and facts.answers.mixed < SCARCE:
        return verdict("nothing_to_learn", f"{tested}{seen}", *advice)
    if change.high < NOTEWORTHY * facts.rise.span:
        return verdict("no_rise", tested, *advice, "Train longer, or with a larger optimizer.learning_rate.")
    more = "More test problems or samples (evaluation.samples) make the interval narrower; more steps the rise larger."
    return verdict("undecided", f"{tested}: too wide to tell", *advice, more)


def learning_facts(
    steps: Sequence[StepMetrics],
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    *,
    reuse: Sequence[int],
    temperature: float,
    weights_changed: bool | None,
    judging: Judging,
) -> LearningFacts:
    """The facts of a recorded run, from its training steps and the documents of its first test set.

    ``reuse`` is the number of passes over a step's buffer, by stage; ``temperature`` is that of training: where the
    test has none at it, its highest counts.
    """
    sampled = sum(column(steps, "tokens/sampled"))
    # every pass over the buffer counts the same tokens again
    trained = sum(sum(column([step], "tokens/trained")) / reuse[step.stage] for step in steps)
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
    # one temperature for both, so that a mere change of temperature is no rise
    at = temperature if temperature in both else max(both)
    measure = measure_of(rewards=[score.get("reward") for score in (old[at], new[at])])
    scores = [score.get(measure.per_problem, ()) for score in (old[at], new[at])]
    span = measure.span(*scores)
    change = paired_scores(scores[1], scores[0], new[at].get("clusters"), span=span)
    if change is None:
        return None
    means = [float(score[measure.key]["mean"]) for score in (old[at], new[at])]
    return ScoreRise(
        set_name=str(after["set"]),
        temperature=at,
        before=means[0],
        after=means[1],
        change=change,
        span=span,
        graded=measure is REWARD,
    )


def _in_words(rise: ScoreRise) -> str:
    change, measure = rise.change, REWARD if rise.graded else ACCURACY
    what = f"{measure.name} " if rise.graded else ""
    mean, low, high = (measure.change(value) for value in (change.mean, change.low, change.high))
    clusters = f" of {change.clusters} prompts or templates" if change.clusters < change.problems else ""
    return (
        f"{rise.set_name} at temperature {rise.temperature:g}: {what}{measure.value(rise.before)} before, "
        f"{measure.value(rise.after)} after, {mean}{measure.unit} (95 %: {low} to {high}, {change.problems} "
        f"problems{clusters})"
    )
