"""The predicates of the health rules: steps so far -> what is wrong, with numbers, or None.

Pure functions of the metrics, oldest step first, never empty. Missing metrics keep a rule quiet. The
thresholds are ours: the recipe names the signs, not their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from magicrl.records import StepMetrics

Series: TypeAlias = Sequence[StepMetrics]

RECENT = 5
"""Steps that make up "now"."""
EARLY_STEPS = 100
"""Steps that make up "early", from the start of the run or of the stage."""


def column(series: Series, *keys: str) -> list[float]:
    """The finite numbers of the first of ``keys`` that each step has; steps without one are left out."""
    found: list[float] = []
    for row in series:
        for key in keys:
            value = row.values.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.append(float(value))
                break
    return found


def tail(series: Series, count: int, *keys: str) -> list[float]:
    """The last ``count`` numbers of ``column``, oldest first, without reading the whole run for them."""
    found: list[float] = []
    for row in reversed(series):
        if len(found) == count:
            break
        found.extend(column([row], *keys))
    return found[::-1]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one number."""
    return sum(values) / len(values)


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Difference of two windows' means and its standard error, from the scatter inside the windows."""
    variance = 0.0
    for window in (before, after):
        if len(window) > 1:
            centre = mean(window)
            variance += sum((v - centre) ** 2 for v in window) / (len(window) - 1) / len(window)
    return mean(after) - mean(before), math.sqrt(variance)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Rise of the least-squares line over all of ``values`` (three or more), and its standard error."""
    n = len(values)
    centre, middle = mean(values), (n - 1) / 2
    spread = n * (n * n - 1) / 12
    slope = sum((i - middle) * (v - centre) for i, v in enumerate(values)) / spread
    residual = sum((v - centre - slope * (i - middle)) ** 2 for i, v in enumerate(values))
    return slope * (n - 1), math.sqrt(residual / (n - 2) / spread) * (n - 1)


def this_stage(series: Series) -> Series:
    """The steps of the stage that the last step belongs to."""
    first = len(series)
    while first > 0 and series[first - 1].stage == series[-1].stage:
        first -= 1
    return series[first:]


def percent(share: float) -> str:
    """``0.123`` as ``12 %``."""
    return f"{100 * share:.0f} %"


ENTROPY = ("entropy/exact/mean", "entropy/sampled/mean")
ACCURACY = "train/accuracy/mean"
SOLVED = 0.95
"""Train accuracy from which low entropy is what certainty looks like, not collapse."""


def entropy_collapse(series: Series) -> str | None:
    """Mean of the last steps below 0.05 nats, within the first 120 steps, on problems not yet solved."""
    if len(series) > 1.2 * EARLY_STEPS:
        return None
    entropy, accuracy = column(series, *ENTROPY), tail(series, RECENT, ACCURACY)
    if len(entropy) < RECENT:
        return None
    now = mean(entropy[-RECENT:])
    solved = bool(accuracy) and mean(accuracy) >= SOLVED
    if now >= 0.05 or solved:
        return None
    return f"entropy {now:.3f} nats per token after {len(series)} steps (it began at {entropy[0]:.3f})"


def entropy_growth(series: Series) -> str | None:
    """Twice the start's and the target's entropy, and still rising."""
    recent, target = tail(series, 2 * RECENT, *ENTROPY), tail(series, 1, "entropy/target")
    first = column(series[:RECENT], *ENTROPY)[:2]  # it may double within a few steps
    if len(recent) < 2 * RECENT or not first:
        return None
    start, earlier, now = mean(first), mean(recent[:RECENT]), mean(recent[-RECENT:])
    reference = max(start, target[-1] if target else 0.0, 0.1)
    if now < 2 * reference or now < 1.03 * earlier:
        return None
    aim = f", target {target[-1]:.2f}" if target else ""
    return f"entropy has risen from {start:.2f} to {now:.2f} nats per token{aim}"


def response_shortening(series: Series) -> str | None:
    """Early in a stage: accuracy up, accuracy among the finished down, both beyond twice their error."""
    stage = this_stage(series)
    window = 2 * RECENT
    if len(stage) > EARLY_STEPS:
        return None
    total, finished = column(stage, ACCURACY), column(stage, "train/accuracy_nontruncated/mean")
    if min(len(total), len(finished)) < 2 * window:
        return None
    up, up_error = change(total[:window], total[-window:])
    down, down_error = change(finished[:window], finished[-window:])
    if up < max(0.03, 2 * up_error) or -down < max(0.03, 2 * down_error):
        return None
    return (
        f"train accuracy {percent(mean(total[:window]))} -> {percent(mean(total[-window:]))} while accuracy of "
        f"finished responses {percent(mean(finished[:window]))} -> {percent(mean(finished[-window:]))}"
    )


def early_plateau(series: Series) -> str | None:
    """First stage, steps 40 to 200, well below solved: a line through the last 40 to 60 steps does not rise.

    With 95 % confidence it rises by less than half a point in ten steps, so that noise alone stays quiet.
    """
    if series[0].stage != series[-1].stage or len(series) > 2 * EARLY_STEPS:
        return None
    accuracy = tail(series, 12 * RECENT, ACCURACY)
    if len(accuracy) < 8 * RECENT:
        return None
    rise, error = trend(accuracy)
    if mean(accuracy[-RECENT:]) >= 0.9 or rise + 1.645 * error >= 0.0005 * len(accuracy):
        return None
    now = percent(mean(accuracy[-RECENT:]))
    return f"train accuracy {now}, {100 * rise:+.1f} points over the last {len(accuracy)} steps of the first stage"


def groups_rejected(series: Series) -> str | None:
    """More than three quarters of the groups without any advantage, over ten steps."""
    rejected = tail(series, 2 * RECENT, "groups/rejected/ratio")
    accuracy = tail(series, 2 * RECENT, ACCURACY)
    if len(rejected) < 2 * RECENT or mean(rejected) <= 0.75:
        return None
    share = percent(mean(rejected))
    if not accuracy:
        return f"{share} of the groups rejected over the last {2 * RECENT} steps"
    now = mean(accuracy)
    cause = "the problems are too easy now" if now > 0.5 else "the problems are too hard"
    return f"{share} of the groups rejected over the last {2 * RECENT} steps at accuracy {percent(now)}: {cause}"


def _off_policy(series: Series) -> bool:
    steps = column(series[-1:], "learner/sgd_steps")
    return bool(steps) and steps[-1] > 1


def clip_zero(series: Series) -> str | None:
    """Several SGD steps a training step, and not one token clipped in twenty of them."""
    recent = series[-4 * RECENT :]
    clipped = column(recent, "learner/clip_ratio")
    if not _off_policy(series) or len(clipped) < 4 * RECENT or any(clipped):
        return None
    sgd_steps = column(series[-1:], "learner/sgd_steps")[-1]
    return f"not one token clipped in {len(clipped)} training steps of {sgd_steps:.0f} SGD steps each"


def clip_high(series: Series) -> str | None:
    """More than a tenth of the tokens clipped over the last steps."""
    clipped = tail(series, RECENT, "learner/clip_ratio")
    if len(clipped) < RECENT or mean(clipped) <= 0.1:
        return None
    return f"{percent(mean(clipped))} of the tokens clipped over the last {RECENT} steps"


def sampler_gap(series: Series) -> str | None:
    """Sampler and learner disagree by more than 0.07 nats a token; bf16 alone explains about 0.05."""
    gap = tail(series, RECENT, "learner/sampler_gap_mean")
    if len(gap) < RECENT or mean(gap) <= 0.07:
        return None
    return f"sampler and learner differ by {mean(gap):.3f} nats per token (mean of {RECENT} steps)"


def entropy_estimators(series: Series) -> str | None:
    """The exact and the sampled estimate have the same mean; five standard errors apart they have not."""
    rows = [r for r in series[-4 * RECENT :] if column([r], ENTROPY[0]) and column([r], ENTROPY[1])]
    if len(rows) < 4 * RECENT:
        return None
    exact, sampled = column(rows, ENTROPY[0]), column(rows, ENTROPY[1])
    gaps = [s - e for s, e in zip(sampled, exact, strict=True)]
    offset, error = change([0.0], gaps)
    if abs(offset) <= max(5 * error, 0.02 * mean(exact), 1e-3):
        return None
    return f"sampled entropy is {offset:+.3f} nats off the exact one ({mean(exact):.3f}), error {error:.3f}"


def length_explosion(series: Series) -> str | None:
    """Responses twice as long as at the stage's start, without any accuracy to show for it."""
    stage = this_stage(series)
    length, accuracy = column(stage, "length/mean"), column(stage, ACCURACY)
    if min(len(length), len(accuracy)) < 3 * RECENT:
        return None
    start, now = mean(length[:RECENT]), mean(length[-RECENT:])
    gain, _ = change(accuracy[:RECENT], accuracy[-RECENT:])
    if now < 2 * start or gain >= 0.02:
        return None
    return f"mean length {start:.0f} -> {now:.0f} tokens in this stage, accuracy {100 * gain:+.1f} points"


def truncation_stuck(series: Series) -> str | None:
    """After thirty steps of a stage more than 30 % are cut, hardly fewer than twenty steps ago."""
    stage = this_stage(series)
    cut = column(stage, "train/truncation/ratio")
    window = 2 * RECENT
    if len(cut) < 3 * window:
        return None
    now, earlier = mean(cut[-window:]), mean(cut[-3 * window : -2 * window])
    if now <= 0.3 or now < 0.9 * earlier:
        return None
    return f"{percent(now)} of the responses cut at T after {len(cut)} steps of this stage ({percent(earlier)} before)"
