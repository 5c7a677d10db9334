"""Why sampled answers give nothing to learn from, and whether a run learned: causes, advice and the verdict.

A policy learns from groups whose answers have different rewards. Where such groups are rare, the answers show why: they
are truncated, they hold no answer that the verifier reads, or they are all wrong or all correct. The texts of this
module appear in health findings, in the error that stops a run with nothing to learn, in the difficulty filter, in
``magicrl init`` and in the verdict on a finished run (terminal, report, model card, ``run.json``, exit status).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean as mean
from typing import Any, Literal, NamedTuple, TypeAlias

from magicrl.config.verifier_schema import VerifierConfig
from magicrl.evaluation.statistics import Interval, paired_difference, paired_scores
from magicrl.records import Problem, StepMetrics
from magicrl_verifiers.progress import plural
from magicrl_verifiers.records import Extract, Reasoning
from magicrl_verifiers.several import reward_names

Cause: TypeAlias = Literal["enough", "truncated", "no_answer", "all_wrong", "all_right", "same_reward"]

ENOUGH = 0.25
"""Share of groups with an advantage that suffices for learning. Also the share of answers from which a second cause is
named."""
EXPLORES = 1.0
"""Entropy in nats per token from which a model still tries many answers."""
FOUND_PER_STEP = 0.05
"""Chance of a group with an advantage per step from which rare ones may teach. Of 49 recorded runs with few of them in
the first steps 39 gained 5 points or more (docs/evidence/showcase.md#rare-rewards)."""
NEVER_ENDS = 0.9
"""Share of truncated answers above which the model probably never ends its answers, at any length."""


def unjudged_text(reason: str) -> str:
    """Return what to say if no answer could be judged, with the ``reason`` of one verdict (empty if none has one)."""
    return f"no answer could be judged: {reason or 'check the reference answers and the verifier'}"


SUPERVISED_START = "a short supervised start ([start] sft)"


def column(steps: Sequence[StepMetrics], *keys: str) -> list[float]:
    """Return the finite numbers of the first of ``keys`` that each step has. Steps without one are left out."""
    found: list[float] = []
    for row in steps:
        values = (row.values.get(key) for key in keys)
        found += [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)][:1]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Unit of success: the share of correct answers, or the mean reward where rewards are graded.

    Attributes:
        key: Key of a score in ``evaluations/``; a step has ``train/KEY/mean``.
        name: Name in words.
        per_problem: Key of a score's values by problem.
    """

    key: Literal["accuracy", "reward"]
    name: str
    per_problem: Literal["per_problem", "reward_per_problem"]

    def of(self, score: Mapping[str, Any]) -> Any:
        """Return the mean and its interval in a score of ``evaluations/``; None if it has none.

        An environment gives truncated episodes no reward. If all of a test are, its mean reward is the accuracy.
        """
        return score.get(self.key) or score.get("accuracy")

    def bare(self, value: float) -> str:
        """Return ``45.7`` in per cent, or a reward as ``0.457``."""
        return f"{100 * value:.1f}" if self.key == "accuracy" else f"{value:.3g}".replace("-", "−")

    def value(self, value: float | None) -> str:
        """Return the value with its unit, or a dash for None."""
        return "–" if value is None else self.bare(value) + (" %" if self.key == "accuracy" else "")

    def change(self, difference: float) -> str:
        """Return ``+12.3`` in percentage points, or a difference of rewards as ``+0.123``."""
        size = abs(difference)
        text = self.bare(size if size > 1e-9 else 0.0)  # Sums that cancel leave rounding errors.
        return text if not text.strip("0.") else ("+" if difference > 0 else "−") + text

    @property
    def unit(self) -> str:
        """Unit after a change."""
        return " points" if self.key == "accuracy" else ""

    def span(self, *per_problem: Sequence[float | None]) -> float:
        """Return the range of the problems' scores: 1 for shares; for rewards the observed range (1 where all are
        equal)."""
        known = [value for values in per_problem for value in values if value is not None]
        return (max(known, default=0.0) - min(known, default=0.0) or 1.0) if self.key == "reward" else 1.0


ACCURACY = Measure(key="accuracy", name="accuracy", per_problem="per_problem")
REWARD = Measure(key="reward", name="mean reward", per_problem="reward_per_problem")


def measure_of(steps: Iterable[StepMetrics] = (), rewards: Iterable[object] = ()) -> Measure:
    """Return ``REWARD`` where rewards are graded, else ``ACCURACY``.

    Rewards are graded where an evaluation has a mean reward (``rewards``: one per evaluation, or None) or a step's mean
    reward differs from its accuracy.
    """
    pairs = ([row.values.get(f"train/{measure.key}/mean") for measure in (ACCURACY, REWARD)] for row in steps)
    graded = any(reward is not None for reward in rewards) or any(
        None not in pair and pair[0] != pair[1] for pair in pairs
    )
    return REWARD if graded else ACCURACY


class Judging(NamedTuple):
    """Settings with which the recipe's verifier reads answers; None where it has none (code)."""

    extract: Extract | None = None
    reasoning: Reasoning | None = None


ANY_JUDGING = Judging()
"""Used where the verifier's settings are unknown."""


def judging_of(verifier: VerifierConfig, problems: Iterable[Problem]) -> Judging:
    """Return the settings that apply to these problems. Code and custom rewards have none."""
    read = any(reward_names(problem.verifier)[0] in ("maths", "exact") for problem in problems)
    return Judging(verifier.extract, verifier.reasoning) if read else ANY_JUDGING


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAnswers:
    """Figures of problems that were sampled several times each. Shares are in [0, 1].

    Attributes:
        groups: Number of groups sampled.
        max_tokens: Response limit, T.
        mixed: Share of groups whose answers have different rewards.
        correct: Share of correct answers among those with a verdict.
        truncated: Share of answers truncated at T.
        answered: Share of complete answers that the verifier could read; None where unknown.
        judging: Settings of the verifier.
        reward: Mean reward, where rewards are graded.
        entropy: Nats per token; None where unknown.
        groups_per_step: Groups of a training step; None where unknown.
        turns: Mean number of the model's turns with an environment, which has a limit of them; None where unknown.

    Example:
        100 problems, of whose answers 2.2 % are boxed: ``SampledAnswers(groups=100, max_tokens=256, mixed=0.02,
            correct=0.005, truncated=0.06, answered=0.022, judging=Judging("box", "auto"))``.
    """

    groups: int
    max_tokens: int
    mixed: float
    correct: float
    truncated: float
    answered: float | None = None
    judging: Judging = ANY_JUDGING
    reward: float | None = None
    entropy: float | None = None
    groups_per_step: int | None = None
    turns: float | None = None

    @property
    def limits(self) -> str:
        """Limits at which answers are truncated, in words."""
        return f"T = {self.max_tokens}" + ("" if self.turns is None else " or at environment.max_turns")

    @property
    def found_per_step(self) -> float | None:
        """Chance of at least one group with an advantage per step; None where the groups of a step are unknown."""
        return None if self.groups_per_step is None else 1.0 - (1.0 - self.mixed) ** self.groups_per_step

    def failures(self) -> dict[Cause, float]:
        """Return the share of answers that failed for each cause. With ``correct`` they add up to one."""
        # Where it is unknown, every complete answer counts as readable.
        answered = 1.0 - self.truncated if self.answered is None else self.answered
        rest: dict[Cause, float] = {"all_wrong": max(0.0, answered - self.correct)}
        return {
            "truncated": self.truncated,
            "no_answer": max(0.0, 1.0 - self.truncated - answered),
            **(rest if self.reward is None else {"same_reward": answered}),
        }


STEP_KEYS = (
    "groups/sampled",
    "stage/max_tokens",
    "groups/rejected/ratio",
    "train/accuracy/mean",
    "train/truncation/ratio",
    "train/answered/ratio",
    "train/reward/mean",
    "entropy/exact/mean",
    "entropy/sampled/mean",
    "environment/turns",
)
"""Metrics that ``answers_in`` reads."""


def answers_in(steps: Sequence[StepMetrics], judging: Judging = ANY_JUDGING) -> SampledAnswers | None:
    """Return the mean figures of recorded training steps, or None where metrics are missing."""
    groups, limits, rejected, correct, truncated, answered, rewards = (column(steps, key) for key in STEP_KEYS[:7])
    entropies, turns = column(steps, *STEP_KEYS[7:9]), column(steps, STEP_KEYS[9])
    if not (rejected and correct and truncated and limits):
        return None
    return SampledAnswers(
        groups=round(sum(groups)),
        max_tokens=round(limits[-1]),
        # Rejected groups include those with fewer than two verdicts: they have no advantage either.
        mixed=1.0 - mean(rejected),
        correct=mean(correct),
        truncated=mean(truncated),
        answered=mean(answered) if answered else None,
        judging=judging,
        reward=mean(rewards) if measure_of(steps) is REWARD else None,
        entropy=mean(entropies) if entropies else None,
        groups_per_step=round(mean(groups)) if groups else None,
        turns=mean(turns) if turns else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Cause that keeps a model from learning from its answers.

    Attributes:
        cause: The main cause, or ``enough`` where there is none.
        message: The figures, in a sentence.
        advice: Remedies, most important first, each a sentence with the recipe's settings.
        rare: Whether correct answers are rare, and may teach nevertheless.
    """

    cause: Cause
    message: str
    advice: tuple[str, ...]
    rare: bool = False

    @property
    def remedy(self) -> str:
        """The advice in one line."""
        return " ".join(self.advice)

    @property
    def text(self) -> str:
        """Message and advice."""
        return f"{self.message}. {self.remedy}"


def diagnose(answers: SampledAnswers, *, forms_tried: bool = False) -> Diagnosis:
    """Return the cause of most failed answers, with advice against it and against every other frequent cause.

    With ``forms_tried`` several templates and both extractions were tried: no advice recommends them.
    """
    if answers.mixed >= ENOUGH:
        return Diagnosis(cause="enough", message=_seen(answers), advice=())
    # More correct than wrong answers, and still few mixed groups: the problems are solved.
    causes: list[Cause] = ["all_right"]
    if answers.correct <= 0.5 or answers.reward is not None:
        shares = answers.failures()
        first, *others = sorted(shares, key=lambda cause: -shares[cause])
        causes = [first, *(cause for cause in others if shares[cause] >= ENOUGH)]
    advice = tuple(_advice(cause, answers, forms_tried=forms_tried) for cause in causes)
    found = answers.found_per_step
    # Groups with an advantage are rare, but may be frequent enough per step to teach.
    if causes[0] in ("all_right", "same_reward") or found is None or found < FOUND_PER_STEP:
        return Diagnosis(cause=causes[0], message=_seen(answers), advice=advice)
    if answers.entropy is None:
        tries = ""
    elif answers.entropy >= EXPLORES:
        tries = f", and at {answers.entropy:.2g} nats per token the model still tries many answers"
    else:
        tries = (
            f", but at {answers.entropy:.2g} nats per token the model tries few other answers "
            "(rollout.temperature = 1 and [entropy] decide that)"
        )
    return Diagnosis(
        cause=causes[0],
        message=_seen(answers),
        advice=(
            f"Groups with an advantage are rare and may teach nevertheless: {100 * found:.0f} % of the steps should "
            f"have one{tries}. "
            "Check optimizer.learning_rate first, then use more responses per step (rollout_batch, group_size).",
            *advice,
        ),
        rare=True,
    )


def percent(share: float) -> str:
    """Return ``12 %``, with a decimal below 10 %, and a tiny share with one digit: ``0.04 %``."""
    if 0 < share < 0.0005:
        return f"{100 * share:.1g} %"
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def _seen(answers: SampledAnswers) -> str:
    form = "boxed" if answers.judging.extract == "box" else "readable"
    ended = "" if answers.answered is None else f"{percent(answers.answered)} end with a {form} answer, "
    right = f"{percent(answers.correct)} of the answers are right"
    return (
        f"{percent(answers.mixed)} of {answers.groups} groups have answers with different rewards, "
        f"{right if answers.reward is None else f'the mean reward is {REWARD.value(answers.reward)}'}, {ended}"
        f"{percent(answers.truncated)} are truncated at {answers.limits}"
    )


def _advice(cause: Cause, answers: SampledAnswers, *, forms_tried: bool) -> str:
    if cause == "no_answer" and forms_tried:
        return (
            "With every template and extraction that was tried, answers end without an answer that the verifier can "
            f"read: use {SUPERVISED_START}, or a model that was trained to follow instructions."
        )
    if cause == "no_answer":
        boxed, closed = answers.judging.extract == "box", answers.judging.reasoning == "required"
        ways = [
            *(['also take answers without a box (verifier.extract = "lenient")'] if boxed else []),
            *(['do not require a closed <think> (verifier.reasoning = "auto")'] if closed else []),
            "ask for the form of the answer in the template of the data"
            + (' (e.g. "{prompt} Put the answer in \\\\boxed{}.")' if boxed else ""),
            f"or use {SUPERVISED_START}",
        ]
        return f"Answers end without an answer that the verifier can read: {', '.join(ways)}."
    ending = f" If they do not end at any length, use {SUPERVISED_START}, or ask for brevity in the template."
    return {
        "truncated": f"Answers are truncated at {answers.limits}: raise max_tokens of the stage"
        + ("." if answers.turns is None else f" or max_turns (they have {answers.turns:.2g} turns on average).")
        + (ending if answers.truncated >= NEVER_ENDS else ""),
        "all_wrong": "Answers are readable and wrong: use more samples per problem (group_size of the stage), a filter "
        "for those sometimes solved ([data.difficulty_filter]), or easier problems.",
        "same_reward": "Answers to a problem have the same reward: use a reward with more levels, other problems, or "
        "more samples per problem (group_size of the stage).",
        "all_right": "The problems are solved already: use harder ones, or those not always solved "
        "([data.difficulty_filter], data.online_filter). More samples per problem (group_size of the stage) find the "
        "rare mistake.",
    }[cause]


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
"""Outcomes of a successful run. After any other, ``magicrl train`` exits with ``NOTHING_LEARNED``."""
NOTHING_LEARNED = 3
"""Exit status of ``magicrl train`` after a finished run that learned nothing."""

NOTEWORTHY = 0.05
"""Smallest relevant rise, as a share of the scores' range. An interval that ends below it excludes a rise."""
UNJUDGED = 0.1
"""Share of responses without a verdict above which scores do not decide."""
SCARCE = 0.05
"""Share of groups with an advantage below which a run without a rise had nothing to learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRise:
    """First test set before and after training, paired by problem and clustered, at one temperature for both.

    ``span`` is the range of the problems' scores; ``graded`` says whether these are mean rewards; ``not_judged`` is the
    share of responses without a verdict, before or after, whichever is larger.
    """

    set_name: str
    temperature: float
    before: float
    after: float
    change: Interval
    span: float = 1.0
    graded: bool = False
    not_judged: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningFacts:
    """Facts that decide the verdict.

    Attributes:
        steps: Number of training steps.
        updates: Number of updates applied.
        weights_changed: Whether any weight of the saved model differs from the initial one; None where unknown.
        tokens_share: Share of the sampled tokens that an update used; None without a step.
        largest_gradient: Largest gradient norm of the training steps; None without an update.
        answers: Answers of all training steps; None without a step.
        rise: Result of the test set; None without an evaluation before and after, or with fewer than two problems.
        not_judged: Share of the training responses without a verdict.
        test_set: Name of the test set; empty without one.
    """

    steps: int
    updates: int
    weights_changed: bool | None
    tokens_share: float | None
    largest_gradient: float | None
    answers: SampledAnswers | None
    rise: ScoreRise | None
    not_judged: float = 0.0
    test_set: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """Verdict on a run: outcome, reason with figures, advice, and the facts behind it."""

    outcome: Outcome
    reason: str
    advice: tuple[str, ...]
    facts: LearningFacts

    @property
    def title(self) -> str:
        """Outcome in words."""
        return TITLES[self.outcome]

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in ``run.json``."""
        return {**asdict(self), "title": self.title}


def conclude(facts: LearningFacts) -> Conclusion:
    """Return the verdict on a finished run: first from its weights, then from its evaluation."""
    found = None if facts.answers is None else diagnose(facts.answers)
    seen = "" if found is None else f"; {found.message}"
    advice = () if found is None else found.advice
    updates = plural(facts.updates, "update")
    repair = (
        "Repair the verifier, reward or environment (its first error is in the log): judged responses are no random "
        "sample."
    )

    def verdict(outcome: Outcome, reason: str, *advice: str) -> Conclusion:
        if facts.not_judged > UNJUDGED:
            reason += f"; {percent(facts.not_judged)} of the training responses could not be judged"
            advice = tuple(dict.fromkeys((repair, *advice)))
        return Conclusion(outcome=outcome, reason=reason, advice=advice, facts=facts)

    # If no weight changed, training did not cause a rise.
    if facts.updates == 0:
        if found is None:
            return verdict("no_update", "no update was applied" if facts.steps else "there was no training step")
        why = f"no group had an advantage, so no update was applied{seen}"
        return verdict("no_update" if found.cause == "enough" else "nothing_to_learn", why, *advice)
    # Tested before the weights, since weight decay changes these without a gradient.
    if facts.largest_gradient == 0:
        parts = "Check algorithm.advantage and algorithm.loss: all advantages were 0, or the loss ignores the policy."
        why = f"the gradient was 0 in every update ({facts.updates}){seen}"
        # Where all rewards of each group are equal, advantages of 0 are no fault of these two.
        equal = facts.answers is not None and facts.answers.mixed == 0
        return verdict("nothing_to_learn", why, *((*advice, parts) if equal else (parts, *advice)))
    if facts.weights_changed is False:  # None means unknown.
        raised = "Raise optimizer.learning_rate: its updates are smaller than the precision of the weights."
        return verdict("no_update", f"{updates} left every weight of the saved model as it was{seen}", raised, *advice)
    if facts.rise is None and facts.test_set:
        few = f"fewer than two problems of test set {facts.test_set} have a verdict before and after training"
        more = "Use more test problems, or, if their responses could not be judged, repair what judges them."
        return verdict("undecided", f"{updates} changed the weights, but {few}{seen}", more, *advice)
    if facts.rise is None:
        why = f"{updates} changed the weights, but no test set measured the result{seen}"
        held_out = "Hold problems out (data.holdout) or name a test set ([data.test.NAME])."
        return verdict("undecided", why, held_out, *advice)
    tested, change = _in_words(facts.rise), facts.rise.change
    if facts.rise.not_judged > UNJUDGED:
        why = f"{tested}, but {percent(facts.rise.not_judged)} of the responses of a test could not be judged"
        return verdict("undecided", why, repair, *advice)
    if change.low > 0:
        return verdict("learned", tested)
    if change.high < 0:
        lower = "Lower optimizer.learning_rate, check the health findings, and the sign of a custom loss or advantage."
        return verdict("worse", tested, lower, *advice)
    # No rise and hardly a group with an advantage: that is the cause, whatever the interval's width.
    if facts.answers is not None and facts.answers.mixed < SCARCE:
        return verdict("nothing_to_learn", f"{tested}{seen}", *advice)
    more = "Use more test problems or samples (evaluation.samples) for a narrower interval, or train longer."
    if change.high >= NOTEWORTHY * facts.rise.span:
        return verdict("undecided", f"{tested}: the interval is too wide to decide", *advice, more)
    # An interval over a few problems that hardly differ is too narrow to exclude a rise.
    if too_few(change.clusters or change.problems):
        return verdict("undecided", f"{tested}: too few test problems to decide", *advice, more)
    return verdict("no_rise", tested, *advice, "Train longer, or with a larger optimizer.learning_rate.")


def too_few(problems: int) -> bool:
    """Return whether no result on so many test problems can exclude a noteworthy rise."""
    same = [0.0] * problems
    return paired_difference(same, same).high >= NOTEWORTHY


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
    """Return the facts of a recorded run, from its training steps and the documents of its first test set.

    Args:
        steps: Recorded training steps.
        before, after: Documents of the evaluations, None where missing.
        reuse: Passes over a step's buffer, by stage.
        temperature: Temperature of training. An evaluation without it counts at its highest temperature.
        weights_changed: Whether any weight changed; None where unknown.
        judging: Settings of the verifier.
    """
    sampled = sum(column(steps, "tokens/sampled"))
    # Every pass over the buffer counts the same tokens again.
    trained = sum(sum(column([step], "tokens/trained")) / reuse[step.stage] for step in steps)
    return LearningFacts(
        steps=len(steps),
        updates=round(sum(column(steps, "learner/sgd_steps"))),
        weights_changed=weights_changed,
        tokens_share=min(1.0, trained / sampled) if sampled else None,
        largest_gradient=max(column(steps, "learner/grad_norm"), default=None),
        answers=answers_in(steps, judging),
        rise=None if before is None or after is None else _rise(before, after, temperature),
        not_judged=mean(column(steps, "train/not_judged/ratio") or (0.0,)),
        test_set="" if before is None or after is None else str(after["set"]),
    )


def _rise(before: Mapping[str, Any], after: Mapping[str, Any], temperature: float) -> ScoreRise | None:
    old, new = ({float(tau): score for tau, score in test["temperatures"].items()} for test in (before, after))
    both = old.keys() & new.keys()
    if not both:
        return None
    # One temperature for both, so that a change of temperature is not a rise.
    at = temperature if temperature in both else max(both)
    measure = measure_of(rewards=[score.get("reward") for score in (old[at], new[at])])
    scores = [score.get(measure.per_problem) or score.get(ACCURACY.per_problem, ()) for score in (old[at], new[at])]
    span = measure.span(*scores)
    change = paired_scores(scores[1], scores[0], new[at].get("clusters"), span=span)
    if change is None:
        return None
    means = [float(measure.of(score)["mean"]) for score in (old[at], new[at])]
    return ScoreRise(
        set_name=str(after["set"]),
        temperature=at,
        before=means[0],
        after=means[1],
        change=change,
        span=span,
        graded=measure is REWARD,
        not_judged=max(score.get("not_judged", 0) / score.get("drawn", 1) for score in (old[at], new[at])),
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
