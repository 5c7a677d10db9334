"""Planted curves: notable steps are found, each with a sentence that quotes its figures; noise is not."""

from __future__ import annotations

import numpy as np

from magicrl.records import StepMetrics
from magicrl.training.health import notable_steps


def curves(steps: int = 60, **planted: dict[int, float]) -> list[StepMetrics]:
    """Return noisy but even curves with values planted at steps."""
    rng = np.random.default_rng(0)
    levels = {"entropy/exact/mean": 0.5, "length/mean": 100.0, "learner/grad_norm": 0.7, "train/reward/mean": 0.4}
    rows: list[StepMetrics] = []
    for step in range(1, steps + 1):
        values = {key: level * (1 + 0.05 * rng.standard_normal()) for key, level in levels.items()}
        values |= {"groups/rejected/ratio": 0.3}
        values |= {key: at[step] for key, at in planted.items() if step in at}
        rows.append(StepMetrics(step=step, stage=0, values=values))
    return rows


def test_even_curves_have_nothing_to_look_at() -> None:
    assert notable_steps(curves()) == []


def test_each_sign_is_found_where_it_was_planted() -> None:
    cases = {
        "gradient spike": ("learner/grad_norm", 4.2, "the gradient's norm is 4.2"),
        "loss of entropy": ("entropy/exact/mean", 0.1, "entropy is 0.1 nats per token"),
        "jump in length": ("length/mean", 180.0, "responses have 180 tokens on average"),
    }
    for sign, (key, value, words) in cases.items():
        (found,) = notable_steps(curves(**{key: {33: value}}))
        assert (found["step"], found["sign"]) == (33, sign)
        assert found["why"].startswith(words)
        assert found["why"].endswith("of the 10 steps before")
    # the strongest of neighbouring steps
    assert [one["step"] for one in notable_steps(curves(**{"learner/grad_norm": {33: 4.2, 35: 9.0, 50: 4.2}}))] == [
        35,
        50,
    ]


def test_a_change_of_stage_is_no_sign() -> None:
    rows = curves(**{"length/mean": dict.fromkeys(range(31, 61), 300.0)})
    assert notable_steps(rows)[0]["step"] == 31
    staged = [StepMetrics(step=r.step, stage=int(r.step > 30), values=r.values) for r in rows]
    assert notable_steps(staged) == []


def test_a_reward_that_teaches_nothing() -> None:
    (found,) = notable_steps(curves(**{"groups/rejected/ratio": {20: 0.97}, "train/reward/mean": {20: 0.98}}))
    assert (found["step"], found["sign"]) == (20, "reward without learning")
    assert found["why"].startswith("the mean reward is 0.98, and 97% of the groups have equal rewards")
    rising = {step: 0.2 + 0.01 * step for step in range(1, 61)}
    even = {1: 0.5, 60: 0.51}
    (found,) = notable_steps(curves(**{"train/reward/mean": rising, "validation/accuracy/mean": even}))
    assert found["why"].startswith("the reward rose from 0.31 to 0.71 while validation went from 0.50 to 0.51")
    improving = {1: 0.2, 60: 0.6}
    assert notable_steps(curves(**{"train/reward/mean": rising, "validation/accuracy/mean": improving})) == []
