"""Agreement by hand, and on planted problems with votes of known agreement; cost; known flaws."""

from __future__ import annotations

import random

import pytest

from magicrl.pipeline.judge_step import FLAWED, agreement, as_text, cost, estimated_cost, flawed_figures, report_of
from magicrl.pipeline.judge_votes import Judgement, Vote, decide
from magicrl.pipeline.pipeline_schema import JudgingSettings, VotingJudge

NAMES = ("sure", "coin")
SETTINGS = JudgingSettings(
    judges=tuple(
        VotingJudge(name=name, base_url="http://x", model=name, votes=16, dollars_per_million_output=2.0)
        for name in NAMES
    )
)


def vote(problem: str, judge: str, index: int, keep: bool | None) -> Vote:
    status = "valid" if keep is not None else "unreadable"
    return Vote(
        problem=problem,
        judge=judge,
        index=index,
        status=status,
        keep=keep,
        reasons="",
        criteria={},
        completion_tokens=50,
    )


def judged(name: str, votes: list[Vote]) -> Judgement:
    return decide(name, votes, SETTINGS.threshold, undecided=True)


def voted(good: bool, name: str, rng: random.Random, right: float = 0.9) -> Judgement:
    """Return votes: judge ``sure`` is right with this probability, judge ``coin`` with one half."""
    votes = [vote(name, "sure", i, good if rng.random() < right else not good) for i in range(16)]
    return judged(name, votes + [vote(name, "coin", i, rng.random() < 0.5) for i in range(16)])


def test_agreement_by_hand() -> None:
    # 3 votes each: all three pairs agree, all three, one of three, one of three
    assert agreement([(3, 0), (0, 3), (2, 1), (1, 2)]) == pytest.approx(2 / 3)
    # 4 votes: 6 of 6 pairs, 3 of 6, 2 of 6
    assert agreement([(4, 0), (3, 1), (2, 2)]) == pytest.approx(11 / 18)
    # a single vote has no agreement
    assert agreement([(2, 0), (1, 1), (0, 1)]) == pytest.approx(1 / 2)
    assert agreement([(1, 0), (0, 1)]) is None


def test_majorities_of_two_judges_by_hand() -> None:
    """Use votes of ``sure`` and ``coin``: on c the first is a tie, on d the second has no readable vote."""
    said = {
        "a": ((True, True), (True, True)),
        "b": ((True, True, False), (False,)),
        "c": ((True, False), (False,)),
        "d": ((False,), (None,)),
    }
    judgements: list[Judgement] = []
    for name, both in said.items():
        votes = [vote(name, NAMES[judge], i, keep) for judge in (0, 1) for i, keep in enumerate(both[judge])]
        judgements.append(judged(name, votes))
    report = report_of(judgements, SETTINGS)
    assert report["between_judges"] == {"sure / coin": 1 / 2}
    assert "between sure / coin: 0.50 of majorities agree" in as_text(report)
    assert report_of(judgements[2:], SETTINGS)["between_judges"] == {"sure / coin": None}


def test_votes_of_known_agreement() -> None:
    """Two votes that are right with probability q agree with probability q^2 + (1 - q)^2."""
    rng = random.Random(0)
    report = report_of((voted(place % 10 != 0, f"p{place}", rng) for place in range(1000)), SETTINGS)
    assert report["judges"]["sure"]["agreement_with_itself"] == pytest.approx(0.9**2 + 0.1**2, abs=0.01)
    assert report["judges"]["coin"]["agreement_with_itself"] == pytest.approx(0.5, abs=0.01)
    # pairs of one judge, of the other, and of both: 120, 120 and 256 of 496
    assert report["agreement"] == pytest.approx((120 * 0.82 + 120 * 0.5 + 256 * 0.5) / 496, abs=0.01)
    assert report["judges"]["coin"]["says_keep"] == pytest.approx(0.5, abs=0.01)
    assert report["judges"]["sure"]["dollars"] == pytest.approx(1000 * 16 * 50 * 2 / 1e6)


def test_figures_of_the_flawed_ones() -> None:
    assert len({problem.text for problem in FLAWED}) == 6
    rng = random.Random(1)
    judgements = [voted(False, problem.id, rng, 0.95) for problem in FLAWED[:5]]
    told = flawed_figures(judgements)
    assert told["judged"] == 5
    assert told["found_by_judges"] + len(told["missed_by_judges"]) == 5


def test_cost_is_told_before_and_after() -> None:
    judge = VotingJudge(
        base_url="http://x", model="m", max_tokens=100, dollars_per_million_input=3, dollars_per_million_output=10
    )
    settings = JudgingSettings(judges=(judge,))
    assert cost(judge, 1_000_000, 500_000) == pytest.approx(8.0)
    told = estimated_cost(settings, {"m": 1000}, characters=350)["m"]
    assert told["votes"] == 1000
    # three requests a vote, if two responses cannot be read: 3000 of 500 tokens and 100 tokens
    assert (told["most_prompt_tokens"], told["most_completion_tokens"]) == (1_500_000, 300_000)
    assert told["most_dollars"] == pytest.approx(1.5 * 3 + 0.3 * 10)
    longer = settings.model_copy(update={"instructions": "?" * 1750})
    assert estimated_cost(longer, {"m": 1000}, characters=350)["m"]["most_prompt_tokens"] == 3_000_000
