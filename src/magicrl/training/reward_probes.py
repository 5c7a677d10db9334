"""What the reward says where the answer is known: to references, to nothing, to several, by other rows' references.

Part of ``magicrl preflight``; only ``maths`` and ``exact`` have reference answers that are answers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from magicrl.config.verifier_schema import VerifierConfig
from magicrl.evaluation.statistics import Difference, paired_difference
from magicrl.records import Problem, ScoredGroup, Verdict
from magicrl_verifiers.extraction import CLOSE_TAG
from magicrl_verifiers.records import VerifierService

REFERENCES, MADE_UP, MADE_UP_SERVED = 200, 24, 4
"""Problems whose reference answer is judged, and that made-up answers are given to; the last where a server judges."""
OFFSETS = (-2, -1, 1, 2)
"""Rows by which reference answers are tried."""
REPEATED = 50
AGREE, LEAST_ANSWERS = 0.75, 3
"""Share of a problem's answers, and their least number, that make a consensus."""
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
    """Answers judged by the reference answers of the rows ``offset`` further on in the data.

    ``own`` and ``there`` are shares of right answers; ``rise`` is their difference, paired by problem. ``skill`` is
    ``own`` minus the mean share over all offsets, paired by problem: what the answers have to do with the problem.
    """

    offset: int
    own: float
    there: float
    rise: Difference
    skill: Difference


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFacts:
    """What the reward said.

    Attributes:
        references: reference answers that were put to their own problem's verifier; 0 where reference answers
        are no answers.
        unread: how many of them were not found right.
        example: the first of these, and why.
        earned: mean reward by kind of made-up answer.
        neighbour: the offset whose reference answers the answers fit best; None where reference answers are no answers.
        consensus: problems whose answers mostly agree.
        against: of these, how many agree on an answer that is not the reference answer: wrong labels, or habits of the
            model.
        second: a second way of judging the same answers -> share of equal verdicts.
        right: the same ways -> share of right answers by them.
    """

    references: int = 0
    unread: int = 0
    example: str = ""
    earned: Mapping[str, float]
    neighbour: Neighbour | None = None
    consensus: int = 0
    against: int = 0
    second: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    right: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


def probe_reward(
    judge: VerifierService, verifier: VerifierConfig, train: Sequence[Problem], groups: Sequence[ScoredGroup]
) -> RewardFacts:
    """Ask the recipe's judge; ``groups`` are sampled answers to some of ``train``."""
    earned = _made_up(judge, verifier, [g.group.request.problem for g in groups])
    alone = [g for g in groups if _has_answer(g.group.request.problem)]
    if not alone:
        return RewardFacts(earned=earned)
    unread = _unread(judge, verifier, train)
    agreed = [agreed for group in alone if (agreed := _consensus(group.verdicts)) is not None]
    second = {name: _judged_again(verifier, alone, name) for name in ("box", "lenient", "maths", "exact")}
    equal = {name: pair for name, pair in second.items() if pair is not None}
    return RewardFacts(
        references=min(REFERENCES, sum(_has_answer(p) for p in train)),
        unread=len(unread),
        example=unread[0] if unread else "",
        earned=earned,
        neighbour=_neighbour(judge, train, alone),
        consensus=len(agreed),
        against=sum(not right for right in agreed),
        second={name: agreement for name, (agreement, _) in equal.items()},
        right={name: right for name, (_, right) in equal.items()},
    )


def _has_answer(problem: Problem) -> bool:
    return problem.verifier in ("maths", "exact") and bool(problem.references) and problem.environment is None


def _boxed(verifier: VerifierConfig, *answers: str) -> str:
    closed = f"{CLOSE_TAG}\n" if verifier.reasoning == "required" else ""
    return closed + " or else ".join(f"\\boxed{{{answer}}}" for answer in answers)


def _unread(judge: VerifierService, verifier: VerifierConfig, train: Sequence[Problem]) -> list[str]:
    """Reference answers that their own problem's verifier does not find right."""
    asked = [p for p in train if _has_answer(p)][:REFERENCES]
    tickets = [judge.submit(p, [_boxed(verifier, p.references[0])]) for p in asked]
    found: list[str] = []
    for problem, ticket in zip(asked, tickets, strict=True):
        (verdict,) = judge.result(ticket)
        if not verdict.correct:
            found.append(f"{problem.references[0]!r:.60} of problem {problem.id!r}: {verdict.reason or verdict.status}")
    return found


def _made_up(judge: VerifierService, verifier: VerifierConfig, problems: Sequence[Problem]) -> dict[str, float]:
    """Mean reward of each kind of made-up answer; {} where environments judge."""
    served = any(p.verifier == "judge" for p in problems)
    asked = [p for p in problems if p.environment is None][: MADE_UP_SERVED if served else MADE_UP]
    rewards: dict[str, list[float]] = {}
    for place, problem in enumerate(asked):
        answers = _answers_to(problem, [*asked[place + 1 :], *asked[:place]], verifier)
        verdicts = judge.result(judge.submit(problem, list(answers.values())))
        for kind, verdict in zip(answers, verdicts, strict=True):
            rewards.setdefault(kind, []).append(verdict.reward)
    return {kind: float(np.mean(values)) for kind, values in rewards.items()}


def _answers_to(problem: Problem, others: Sequence[Problem], verifier: VerifierConfig) -> dict[str, str]:
    if problem.verifier == "code":
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
    """The offset under which the answers fit best, against their own references; truncated answers count too."""
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
    """Whether the answer that most responses give is right; None where they do not agree."""
    told = [verdict for verdict in verdicts if verdict.extracted]
    if len(told) < LEAST_ANSWERS:
        return None
    answer, count = Counter(v.extracted for v in told).most_common(1)[0]
    if count < AGREE * len(verdicts):
        return None
    return next(verdict.correct for verdict in told if verdict.extracted == answer)


def _judged_again(verifier: VerifierConfig, groups: Sequence[ScoredGroup], other: str) -> tuple[float, float] | None:
    """Share of verdicts that another reading or verifier shares, and of right answers by it; None where it is none."""
    reading = other in ("box", "lenient")
    mine = verifier.extract if reading else groups[0].group.request.problem.verifier
    if other == mine:
        return None
    # a worker is enough, and starts faster than several
    changed = verifier.model_copy(update={"workers": 1} | ({"extract": other} if reading else {}))
    first: list[bool] = []
    second: list[bool] = []
    with changed.pool() as pool:
        for group in groups:
            problem = group.group.request.problem
            asked = problem if reading else dataclasses.replace(problem, verifier=other)
            verdicts = pool.result(pool.submit(asked, [c.text for c in group.group.completions]))
            first += [v.correct for v in group.verdicts]
            second += [v.correct for v in verdicts]
    return float(np.mean(np.equal(first, second))), float(np.mean(second))
