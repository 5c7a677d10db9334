"""Several rewards per response: the reward of a response, GDPO, rejection. Expectations are computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from magicrl.algorithms.advantages import (
    Signal,
    advantage_of,
    gdpo,
    group_relative,
    group_signal,
    reject_zero_advantage,
    score_group,
    scored_advantages,
)
from magicrl.records import Outcome, ScoredGroup, Verdict
from magicrl.training.metrics import rollout_metrics

Row = tuple[float | None, ...]


@pytest.fixture
def scored(make_group):
    """Return a builder: ``scored([(1, 0), (0, None)], "..", weights=(1, 0.5))`` has a row of scores per response."""

    def build(
        rows: Sequence[Row], finish: str | None = None, *, weights: Sequence[float] = (1.0, 1.0), draw: int = 0
    ) -> ScoredGroup:
        group = make_group("w" * len(rows), finish, draw=draw).group
        verdicts = [
            Verdict(
                outcome=Outcome.NOT_JUDGED if row[0] is None else Outcome.CORRECT if row[0] == 1 else Outcome.WRONG,
                status="",
                parts={name: (w, score) for name, w, score in zip("ab", weights, row, strict=True)},
            )
            for row in rows
        ]
        return score_group(group, verdicts)

    return build


def test_the_reward_is_the_weighted_mean(scored) -> None:
    group = scored([(1, 0), (0, 1), (1, 1)], weights=(1.0, 0.25))
    assert group.rewards.tolist() == pytest.approx([0.8, 0.2, 1.0])
    assert group.correct.tolist() == [True, False, True]


def test_a_part_that_was_not_judged_is_the_groups_mean_of_it(scored) -> None:
    group = scored([(0, 1.0), (0, 0.5), (0, None)])
    assert group.counted.all()
    assert group.rewards.tolist() == pytest.approx([0.5, 0.25, 0.375])
    # a reward that judged nobody is left out, with its weight
    assert scored([(1, None), (0, None)]).rewards.tolist() == [1, 0]
    # a response that does not count is not part of that mean
    assert scored([(0, 1.0), (None, 0.0), (0, None)]).rewards.tolist() == [0.5, 0, 0.5]


def test_truncation_pays_nothing_in_any_part(scored) -> None:
    assert scored([(1, 1.0), (1, -1.0), (1, 1.0)], "tt.").rewards.tolist() == [0, -0.5, 1]


def advantages(groups: Sequence[ScoredGroup], **options) -> list[list[float]]:
    return [part.tolist() for part in scored_advantages(groups, **options)]


def by_hand(groups: Sequence[Sequence[Row]], weights: Sequence[float]) -> list[float]:
    """Compute GDPO with plain loops: standardise each reward in its group, add, standardise over the batch."""
    sums: list[float] = []
    for rows in groups:
        total = [0.0] * len(rows)
        for part, weight in enumerate(weights):
            values = [row[part] for row in rows if row[part] is not None]
            mean = sum(values) / len(values)
            deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
            for place, row in enumerate(rows):
                if row[part] is not None and deviation:
                    total[place] += weight * (row[part] - mean) / (deviation + 1e-6)
        sums += total
    mean = sum(sums) / len(sums)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in sums) / (len(sums) - 1))
    return [(v - mean) / (deviation + 1e-6) for v in sums]


def test_gdpo_is_the_formula_of_the_paper(scored) -> None:
    rows: list[list[Row]] = [[(1, 0.2), (0, 0.9), (1, 0.4)], [(0, 1.0), (1, None), (0, 0.3)]]
    weights = (1.0, 0.3)
    groups = [scored(part, weights=weights, draw=draw) for draw, part in enumerate(rows)]
    found = [value for part in advantages(groups, advantage=gdpo) for value in part]
    assert found == pytest.approx(by_hand(rows, weights), abs=1e-9)
    # weights do not rescale it
    doubled = [scored(part, weights=(2.0, 0.6), draw=draw) for draw, part in enumerate(rows)]
    assert [v for part in advantages(doubled, advantage=gdpo) for v in part] == pytest.approx(found, abs=1e-5)
    # a single judged score of a group gives no deviation, and no NaN
    lone = [scored([(1, 0.5), (0, None)]), scored([(1, 0.1), (0, 0.7)], draw=1)]
    assert all(math.isfinite(v) for part in advantages(lone, advantage=gdpo) for v in part)


def test_gdpo_distinguishes_what_the_sum_does_not(scored) -> None:
    """Use the paper's example: rewards (0, 1) and (0, 2) in groups of two have the same advantages under GRPO."""
    groups = [scored([(0, 0), (0, 1)]), scored([(0, 0), (1, 1)], draw=1)]
    summed = advantages(groups, advantage=group_relative)
    assert summed[0] == pytest.approx(summed[1], abs=1e-4)
    apart = advantages(groups, advantage=gdpo)
    assert apart[1][1] == pytest.approx(2 * apart[0][1], rel=1e-4)


def test_gdpo_of_single_rewards_is_the_group_advantage_over_the_batch(make_group) -> None:
    groups = [make_group("cwwc"), make_group("cwww", draw=1)]
    sums = [v for part in advantages(groups, advantage=group_relative) for v in part]
    spread = math.sqrt(sum(v * v for v in sums) / (len(sums) - 1))  # their mean is 0
    found = [v for part in advantages(groups, advantage=advantage_of("gdpo")) for v in part]
    assert found == pytest.approx([v / (spread + 1e-6) for v in sums], abs=1e-6)


def test_rejection_reads_the_sum_or_for_gdpo_every_reward(scored) -> None:
    level, apart = scored([(1, 0), (0, 1)]), scored([(1, 0), (0, 0)], draw=1)
    same = scored([(0, 1), (0, 1)], draw=2)
    logged = scored([(1, 1), (1, 0)], weights=(1, 0), draw=3)
    missing = scored([(1, 1), (1, None)], draw=4)
    groups = [level, apart, same, logged, missing]
    assert reject_zero_advantage(groups).kept == (1,)
    assert reject_zero_advantage(groups, by_parts=True).kept == (0, 1)
    assert group_signal(logged, by_parts=True) is Signal.ALL_CORRECT
    assert gdpo.by_parts
    # truncated responses do not decide under the mask `before`
    cut = scored([(1, 0), (0, 1), (1, 0)], ".t.")
    assert group_signal(cut, "before", by_parts=True) is not Signal.MIXED


def test_each_reward_is_a_metric(scored) -> None:
    values = rollout_metrics([scored([(1, 0.5), (0, None)]), scored([(1, 1.0), (1, 1.0)], ".t", draw=1)])
    assert values["reward/a/mean"] == pytest.approx((1 + 0 + 1 + 0) / 4)
    assert values["reward/b/mean"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert values["reward/b/not_judged/ratio"] == 0.25
    assert values["reward/a/not_judged/ratio"] == 0
    assert values["train/accuracy/mean"] == 0.5
