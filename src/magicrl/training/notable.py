"""Which training steps of a run are worth looking at, from its metrics: a sentence with figures for each.

A step is held against the ``BEFORE`` steps of its stage before it. It stands out where it lies further from their
median than ``FAR`` of their typical deviations and than a least share of the median, so that neither noise nor a quiet
curve makes findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from magicrl.records import StepMetrics
from magicrl.training.diagnosis import column
from magicrl.training.health import ACCURACY, EXACT, LENGTH, MEAN_REWARD, REJECTED, SAMPLED, this_stage

BEFORE, LEAST, FAR = 10, 5, 5.0
"""Steps that a step is held against; fewest of them; typical deviations from which one stands out."""
MOST = 10
APART = 5
"""Steps within which findings of one kind are one: the strongest is told."""
WINDOW = 20
"""Steps of each side where a rise of the reward is held against the validation."""


class Notable(NamedTuple):
    """A step worth looking at: what kind of sign, why in a sentence, and how far it stands out."""

    step: int
    sign: str
    why: str
    strength: float


class _Sign(NamedTuple):
    """A metric, the direction that is a sign (1 up, -1 down, 0 both), its least share of the median, its words."""

    name: str
    keys: tuple[str, ...]
    direction: int
    share: float
    words: str


_SIGNS = (
    _Sign("loss of entropy", (EXACT, SAMPLED), -1, 0.25, "entropy is {now:.3g} nats a token, {times} the {was:.3g}"),
    _Sign("jump in length", (LENGTH,), 0, 0.25, "responses have {now:.3g} tokens on average, {times} the {was:.3g}"),
    _Sign("gradient spike", ("learner/grad_norm",), 1, 1.0, "the gradient's norm is {now:.3g}, {times} the {was:.3g}"),
)


def notable_steps(rows: Sequence[StepMetrics]) -> list[Notable]:
    """The steps that stand out, strongest first, at most ``MOST``."""
    found = [one for sign in _SIGNS for one in _apart(_standing_out(rows, sign))]
    found += _reward_alone(rows)
    return sorted(found, key=lambda one: (-one.strength, one.step))[:MOST]


def _standing_out(rows: Sequence[StepMetrics], sign: _Sign) -> list[Notable]:
    found: list[Notable] = []
    for at, row in enumerate(rows):
        now, before = column([row], *sign.keys), column(this_stage(rows[: at + 1])[-BEFORE - 1 : -1], *sign.keys)
        if not now or len(before) < LEAST:
            continue
        middle = float(np.median(before))
        typical = 1.4826 * float(np.median(np.abs(np.array(before) - middle)))  # a normal curve's deviation
        change = now[0] - middle
        if change * sign.direction < 0 or abs(change) <= max(FAR * typical, sign.share * abs(middle)):
            continue
        times = f"{now[0] / middle:.2g} times" if middle else "against"
        words = sign.words.format(now=now[0], was=middle, times=times)
        why = f"{words} of the {len(before)} steps before"
        found.append(Notable(row.step, sign.name, why, abs(change) / max(typical, 0.01 * abs(middle), 1e-12)))
    return found


def _apart(found: Sequence[Notable]) -> list[Notable]:
    """The strongest of each episode."""
    kept: list[Notable] = []
    for one in sorted(found, key=lambda one: -one.strength):
        if all(abs(one.step - other.step) > APART for other in kept):
            kept.append(one)
    return kept


def _reward_alone(rows: Sequence[StepMetrics]) -> list[Notable]:
    """Reward without learning: it rose and the validation did not, or was earned with nothing left to learn from."""
    found: list[Notable] = []
    rewards, validated = (_points(rows, key) for key in (MEAN_REWARD, "validation/accuracy/mean"))
    if len(rewards) >= 2 * WINDOW and len(validated) >= 2:
        (early, late), (first, last) = (_ends(rewards), (validated[0][1], validated[-1][1]))
        if late - early > 0.1 and last - first < 0.2 * (late - early):
            rises = [(b[1] - a[1], b[0]) for a, b in zip(rewards, rewards[WINDOW // 2 :], strict=False)]
            why = (
                f"the reward rose from {early:.2f} to {late:.2f} while validation went from {first:.2f} to {last:.2f}; "
                "it rose most up to here"
            )
            found.append(Notable(max(rises)[1], "reward without learning", why, (late - early) * 100))
    for row in rows:
        rejected, reward = column([row], REJECTED), column([row], MEAN_REWARD, ACCURACY)
        if rejected and reward and rejected[0] >= 0.9 and reward[0] > 0:
            why = (
                f"the mean reward is {reward[0]:.2f}, and {rejected[0]:.0%} of the groups have equal rewards: "
                "nothing is learned from these"
            )
            found.append(Notable(row.step, "reward without learning", why, FAR + 10 * rejected[0]))
    return _apart(found)


def _points(rows: Sequence[StepMetrics], key: str) -> list[tuple[int, float]]:
    return [(row.step, values[0]) for row in rows if (values := column([row], key))]


def _ends(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    values = [value for _, value in points]
    return float(np.mean(values[:WINDOW])), float(np.mean(values[-WINDOW:]))
