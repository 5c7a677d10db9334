"""Tests of the reward where the answer is known: references, empty and multiple answers, references of other rows.

Part of ``magicrl preflight``. Only ``maths`` and ``exact`` have reference answers that are also answers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from magicrl.config.verifier_schema import VerifierConfig
from magicrl.evaluation.statistics import Interval, paired_difference
from magicrl.records import Outcome, Problem, ScoredGroup, Verdict
from magicrl.registry import is_builtin
from magicrl_verifiers.extraction import CLOSE_TAG
from magicrl_verifiers.records import VerifierService
from magicrl_verifiers.several import reward_names

REFERENCES, MADE_UP, MADE_UP_SERVED = 200, 24, 4
"""Problems whose reference answer is verified, and those with made-up answers; the last with a served judge."""
OFFSETS = (-2, -1, 1, 2)
"""Row offsets of the reference answers that are tried."""
REPEATED = 50
AGREE, LEAST_ANSWERS = 0.75, 3
"""Share of a problem's answers, and least number of answers, for a consensus."""
REFERENCE, NOTHING, WRONG, SEVERAL, OFTEN, NO_PROGRAM = (
    "the reference answer",
    "an empty response",
    "another problem's reference answer",
    "the reference answer among others",
    f"the reference answer {REPEATED} times",
    "a program that does nothing",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """Answers compared with the reference answers ``offset`` rows further on in the data.

    ``own`` and ``there`` are shares of correct answers. ``rise`` is their difference, paired by problem. ``skill`` is
    ``own`` minus the mean share over all offsets, paired by problem: how much the answers depend on the problem.
    """

    offset: int
    own: float
    there: float
    rise: Interval
    skill: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFacts:
    """Results of the reward.

    Attributes:
        references: Number of reference answers submitted to their own problem's verifier; 0 where references are not
            answers.
        unread: Number of those that were not accepted.
        example: The first of these, with the reason.
        earned: Mean reward by kind of made-up answer.
        unsteady: Share of these answers to which the reward gives two different scores.
        noise: Variance of the scores of one answer, as a share of the variance of the sampled answers' rewards.
        fitting: Reward of the sampled answers that fit their reference, minus that of the others to the same problem;
            None where the verifier itself compares with the reference.
        neighbour: Offset whose reference answers fit the answers best; None where references are not answers.
        consensus: Number of problems whose answers mostly agree.
        against: Number of those whose agreed answer is not the reference answer: wrong labels, or habits of the model.
        second: Share of equal verdicts by another extraction or verifier, by its name.
        right: Share of correct answers by another extraction or verifier, by its name.
    """

    references: int = 0
    unread: int = 0
    example: str = ""
    earned: Mapping[str, float]
    unsteady: float = 0.0
    noise: float = 0.0
    fitting: Interval | None = None
    neighbour: Neighbour | None = None
    consensus: int = 0
    against: int = 0
    second: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    right: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


def probe_reward(
    judge: VerifierService, verifier: VerifierConfig, train: Sequence[Problem], groups: Sequence[ScoredGroup]
) -> RewardFacts:
    """Test the recipe's reward. ``groups`` are sampled answers to some of ``train``."""
    earned, unsteady, variance = _made_up(judge, verifier, [g.group.request.problem for g in groups])
    rewards = np.concatenate([g.rewards[g.counted] for g in groups])
    # Rewards that are all equal are another finding.
    noise = variance / float(np.var(rewards)) if len(np.unique(rewards)) > 1 else 0.0
    alone = [g for g in groups if _has_answer(g.group.request.problem)]
    if not alone:
        return RewardFacts(earned=earned, unsteady=unsteady, noise=noise, fitting=_fitting(verifier, groups))
    unread = _unread(judge, verifier, train)
    agreed = [agreed for group in alone if (agreed := _consensus(group.verdicts)) is not None]
    second = {name: _judged_again(verifier, alone, name) for name in ("box", "lenient", "maths", "exact")}
    equal = {name: pair for name, pair in second.items() if pair is not None}
    return RewardFacts(
        references=min(REFERENCES, sum(_has_answer(p) for p in train)),
        unread=len(unread),
        example=unread[0] if unread else "",
        earned=earned,
        unsteady=unsteady,
        noise=noise,
        neighbour=_neighbour(judge, train, alone),
        consensus=len(agreed),
        against=sum(not right for right in agreed),
        second={name: agreement for name, (agreement, _) in equal.items()},
        right={name: right for name, (_, right) in equal.items()},
    )


def _has_answer(problem: Problem) -> bool:
    # With several rewards, the first one decides and the others may pay for other things.
    judged = reward_names(problem.verifier)[0] in ("maths", "exact")
    return judged and bool(problem.references) and problem.environment is None


def _boxed(verifier: VerifierConfig, *answers: str) -> str:
    closed = f"{CLOSE_TAG}\n" if verifier.reasoning == "required" else ""
    return closed + " or else ".join(f"\\boxed{{{answer}}}" for answer in answers)


def _unread(judge: VerifierService, verifier: VerifierConfig, train: Sequence[Problem]) -> list[str]:
    """Return reference answers that their own problem's verifier does not accept."""
    asked = [p for p in train if _has_answer(p)][:REFERENCES]
    tickets = [judge.submit(p, [_boxed(verifier, p.references[0])]) for p in asked]
    found: list[str] = []
    for problem, ticket in zip(asked, tickets, strict=True):
        (verdict,) = judge.result(ticket)
        if not verdict.correct:
            found.append(f"{problem.references[0]!r:.60} of problem {problem.id!r}: {verdict.reason or verdict.status}")
    return found


def _made_up(
    judge: VerifierService, verifier: VerifierConfig, problems: Sequence[Problem]
) -> tuple[dict[str, float], float, float]:
    """Return the mean reward of each kind of made-up answer ({} where environments judge), `RewardFacts.unsteady`, and
    the mean variance of the two rewards of an answer. Each answer is judged twice.
    """
    served = any("judge" in reward_names(p.verifier) for p in problems)
    asked = [p for p in problems if p.environment is None][: MADE_UP_SERVED if served else MADE_UP]
    rewards: dict[str, list[float]] = {}
    differences: list[float] = []
    for place, problem in enumerate(asked):
        answers = _answers_to(problem, [*asked[place + 1 :], *asked[:place]], verifier)
        first, second = (judge.result(judge.submit(problem, list(answers.values()))) for _ in range(2))
        for kind, verdict, again in zip(answers, first, second, strict=True):
            rewards.setdefault(kind, []).append(verdict.reward)
            judged = Outcome.NOT_JUDGED not in (verdict.outcome, again.outcome)
            differences.append(verdict.reward - again.reward if judged else 0.0)
    found = np.array(differences or [0.0])
    earned = {kind: float(np.mean(values)) for kind, values in rewards.items()}
    return earned, float((found != 0).mean()), float((found**2).mean() / 2)


def _answers_to(problem: Problem, others: Sequence[Problem], verifier: VerifierConfig) -> dict[str, str]:
    if reward_names(problem.verifier)[0] == "code":
        return {NOTHING: "", NO_PROGRAM: "```python\npass\n```"}
    if not problem.references:
        return {NOTHING: ""}
    reference = problem.references[0]
    wrong = list(
        dict.fromkeys(p.references[0] for p in others if p.references and p.references[0] not in problem.references)
    )[:2]
    found = {NOTHING: "", REFERENCE: _boxed(verifier, reference), OFTEN: _boxed(verifier, *[reference] * REPEATED)}
    if wrong:
        found |= {WRONG: _boxed(verifier, wrong[0]), SEVERAL: _boxed(verifier, reference, *wrong)}
    return found


def _neighbour(judge: VerifierService, train: Sequence[Problem], groups: Sequence[ScoredGroup]) -> Neighbour | None:
    """Return the offset that fits the answers best, next to their own references. Truncated answers count too."""
    places = {problem.id: place for place, problem in enumerate(train)}
    own = [float(np.mean([v.correct for v in group.verdicts])) for group in groups]
    shares: dict[int, list[float]] = {offset: [] for offset in OFFSETS}
    for offset, there in shares.items():
        for group in groups:
            problem = group.group.request.problem
            other = train[(places[problem.id] + offset) % len(train)]
            asked = dataclasses.replace(problem, references=other.references)
            verdicts = judge.result(judge.submit(asked, [c.text for c in group.group.completions]))
            there.append(float(np.mean([v.correct for v in verdicts])))
    best = max(OFFSETS, key=lambda offset: sum(shares[offset]))
    return Neighbour(
        offset=best,
        own=float(np.mean(own)),
        there=float(np.mean(shares[best])),
        rise=paired_difference(shares[best], own),
        skill=paired_difference(own, np.mean(list(shares.values()), axis=0)),
    )


def _consensus(verdicts: Sequence[Verdict]) -> bool | None:
    """Return whether the most frequent answer is correct; None where the answers do not agree."""
    read = [verdict for verdict in verdicts if verdict.extracted]
    if len(read) < LEAST_ANSWERS:
        return None
    answer, count = Counter(v.extracted for v in read).most_common(1)[0]
    if count < AGREE * len(verdicts):
        return None
    return next(verdict.correct for verdict in read if verdict.extracted == answer)


def _judged_again(verifier: VerifierConfig, groups: Sequence[ScoredGroup], other: str) -> tuple[float, float] | None:
    """Return the shares of equal verdicts and of correct answers by another extraction or verifier; None for the
    recipe's."""
    reading = other in ("box", "lenient")
    mine = verifier.extract if reading else reward_names(groups[0].group.request.problem.verifier)[0]
    if other == mine:
        return None
    first = [v.correct for group in groups for v in group.verdicts]
    verdicts = _verdicts(verifier, groups, **({"extract": other} if reading else {"name": other}))
    second = [v.correct for group in verdicts for v in group]
    return float(np.mean(np.equal(first, second))), float(np.mean(second))


def _verdicts(
    verifier: VerifierConfig, groups: Sequence[ScoredGroup], *, extract: str = "", name: str = ""
) -> Iterator[Sequence[Verdict]]:
    """Yield the verdicts of each group's answers by another extraction or verifier."""
    # One worker is enough, and starts faster than several.
    changed = verifier.model_copy(update={"workers": 1, "extract": extract or verifier.extract})
    with changed.pool() as pool:
        for group in groups:
            problem = group.group.request.problem
            asked = dataclasses.replace(problem, verifier=name or problem.verifier)
            yield pool.result(pool.submit(asked, [c.text for c in group.group.completions]))


def _fitting(verifier: VerifierConfig, groups: Sequence[ScoredGroup]) -> Interval | None:
    """Return `RewardFacts.fitting`, by the maths verifier."""
    asked = [g for g in groups if _is_custom(g.group.request.problem)]
    fitting: list[float] = []
    others: list[float] = []
    for group, verdicts in zip(asked, _verdicts(verifier, asked, extract="lenient", name="maths"), strict=True):
        judged = [pair for pair in zip(group.verdicts, verdicts, strict=True) if pair[0].outcome != Outcome.NOT_JUDGED]
        rewards = [[mine.reward for mine, maths in judged if maths.correct == fits] for fits in (True, False)]
        if all(rewards):
            fitting.append(float(np.mean(rewards[0])))
            others.append(float(np.mean(rewards[1])))
    # The interval takes a problem's largest possible difference; rewards have any range.
    return paired_difference(fitting, others, span=float(np.ptp(fitting + others)) or 1.0) if fitting else None


def _is_custom(problem: Problem) -> bool:
    known = is_builtin("reward", reward_names(problem.verifier)[0])
    return not known and bool(problem.references) and problem.environment is None
