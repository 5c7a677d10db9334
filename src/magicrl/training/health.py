"""Health rules of a run, and its notable steps.

A rule is a pure function of the steps so far, so that the live display, the event log and the report agree. A metric
that is missing from the steps it reads disables it. The signs are those of section 12 of the recipe, the thresholds are
ours. A finding is reported once per episode: again only after its rule was quiet for ``REARM_STEPS``. Losses that are
not finite are not among the rules, since the learner stops.

A notable step is compared with the ``BEFORE`` steps of its stage before it. It must differ from their median by more
than ``FAR`` typical deviations and by a minimum share of the median, so that neither noise nor a smooth curve gives
findings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from magicrl.records import StepMetrics
from magicrl.training.diagnosis import (
    ANY_JUDGING,
    REWARD,
    STEP_KEYS,
    UNJUDGED,
    Judging,
    SampledAnswers,
    answers_in,
    column,
    diagnose,
    mean,
    measure_of,
)
from magicrl_verifiers.progress import plural

Series: TypeAlias = Sequence[StepMetrics]
"""Training steps so far, oldest first, never empty."""
Severity: TypeAlias = Literal["info", "warning", "critical"]
Check: TypeAlias = Callable[[Series], str | SampledAnswers | None]

RECENT = 5
"""Number of steps that count as "now"."""
EARLY_STEPS = 100
"""Number of steps that count as "early", from the start of the run or of the stage."""
REARM_STEPS = 10
"""Steps that a rule must be quiet before it may report again."""
SOLVED = 0.95
"""Training accuracy above which low entropy means certainty, not collapse."""

EXACT, SAMPLED, TARGET = "entropy/exact/mean", "entropy/sampled/mean", "entropy/target"
ACCURACY, FINISHED_ACCURACY = "train/accuracy/mean", "train/accuracy_nontruncated/mean"
MEAN_REWARD = "train/reward/mean"
NOT_JUDGED = "train/not_judged/ratio"
LENGTH, TRUNCATION, REJECTED = "length/mean", "train/truncation/ratio", "groups/rejected/ratio"
TEACHER_KL = "learner/teacher_kl"
CLIPPED, SGD_STEPS, SAMPLER_GAP = "learner/clip_ratio", "learner/sgd_steps", "learner/sampler_gap_mean"
LARGEST_RATIO = "learner/ratio_max"
KEPT = sorted(
    {*STEP_KEYS, TARGET, FINISHED_ACCURACY, NOT_JUDGED, LENGTH, TEACHER_KL}
    | {CLIPPED, SGD_STEPS, SAMPLER_GAP, LARGEST_RATIO}
)
"""Metrics that the rules read. The monitor stores no others, so that its state fits into every checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRule:
    """One warning sign.

    Attributes:
        name: Key in events.
        severity: ``info`` is expected behaviour worth knowing, ``critical`` usually ruins the run.
        sign: Description of the sign, in a sentence.
        check: Function of the steps so far. Returns a message, or None if all is well, or answers whose diagnosis gives
            message and remedy.
        remedy: Advice in the recipe's settings.
    """

    name: str
    severity: Severity
    sign: str
    check: Check
    remedy: str


RULES: list[HealthRule] = []
"""Every rule, in the order in which findings of one step are reported."""


def rule(severity: Severity, *, remedy: str) -> Callable[[Check], Check]:
    """Return a decorator that adds a function to the rules. The first line of its docstring is the sign."""

    def added(check: Check) -> Check:
        sign = (check.__doc__ or "").partition("\n")[0]
        RULES.append(HealthRule(name=check.__name__, severity=severity, sign=sign, check=check, remedy=remedy))
        return check

    return added


def last(series: Series, count: int, *keys: str) -> list[float]:
    """Return the first of ``keys`` in each of the last ``count`` steps; [] unless all of them have it."""
    found = column(series[-count:], *keys)
    return found if len(found) == count else []


def this_stage(series: Series) -> Series:
    """Return the steps of the last step's stage."""
    return [row for row in series if row.stage == series[-1].stage]


def right(series: Series, key: str) -> list[float]:
    """Return a share of correct answers per step; [] where rewards are graded, which may rise without any."""
    return [] if measure_of(series) is REWARD else column(series, key)


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the difference of two windows' means and its standard error, from the scatter inside the windows."""
    variance = sum(float(np.var(window, ddof=1)) / len(window) for window in (before, after) if len(window) > 1)
    return mean(after) - mean(before), variance**0.5


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Return the rise of the least-squares line over ``values`` (three or more), and its standard error."""
    y, x = np.array(values) - mean(values), np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(x @ y / (x @ x))
    residual = float(((y - slope * x) ** 2).sum())
    steps = len(values) - 1
    return slope * steps, (residual / (steps - 1) / float(x @ x)) ** 0.5 * steps


@rule(
    "critical",
    remedy="Sample at temperature 1 (rollout.temperature), make one update per training step (algorithm.reuse = 1"
    " and mini_batch = rollout_batch), lower the learning rate, or hold entropy at a target"
    " (entropy.controller = 'adaptive').",
)
def entropy_collapse(series: Series) -> str | None:
    """Mean of the last steps below 0.05 nats, within the first 120 steps, on problems not yet solved."""
    entropy, accuracy = last(series, RECENT, EXACT, SAMPLED), last(series, RECENT, ACCURACY)
    # "within about 100 steps", section 12 of the recipe
    if len(series) > 1.2 * EARLY_STEPS or not entropy or mean(entropy) >= 0.05:
        return None
    if accuracy and mean(accuracy) >= SOLVED:
        return None
    return f"entropy {mean(entropy):.3f} nats per token after {len(series)} steps"


@rule(
    "critical",
    remedy="Lower the entropy coefficient (entropy.alpha, or entropy.step and entropy.maximum), or lower "
    "algorithm.clip_high. If neither helps, lower optimizer.learning_rate and check whether any answer is correct.",
)
def entropy_growth(series: Series) -> str | None:
    """Twice the start's and the target's entropy, and still rising."""
    recent, target = last(series, 2 * RECENT, EXACT, SAMPLED), last(series, 1, TARGET)
    first = column(series[:RECENT], EXACT, SAMPLED)[:2]  # No more steps: it may double within a few.
    if not recent or not first:
        return None
    start, earlier, now = mean(first), mean(recent[:RECENT]), mean(recent[-RECENT:])
    # 0.1: a start of nearly no entropy doubles without harm. 1.03: a plateau is not growth.
    if now < 2 * max(start, 0.1, *target) or now < 1.03 * earlier:
        return None
    return f"entropy has risen from {start:.2f} to {now:.2f} nats per token"


@rule(
    "info",
    remedy="Expected early in a stage with a short T: the policy learns to finish in time. Nothing to change; "
    "accuracy of finished responses recovers later.",
)
def response_shortening(series: Series) -> str | None:
    """Early in a stage: accuracy rises, accuracy of complete responses falls, both by more than twice their error."""
    stage, window = this_stage(series), 2 * RECENT
    total, finished = right(stage, ACCURACY), right(stage, FINISHED_ACCURACY)
    if len(stage) > EARLY_STEPS or min(len(total), len(finished)) < 2 * window:
        return None
    up, up_error = change(total[:window], total[-window:])
    down, down_error = change(finished[:window], finished[-window:])
    if up < max(0.03, 2 * up_error) or -down < max(0.03, 2 * down_error):
        return None
    return f"train accuracy {100 * up:+.0f} points, accuracy of finished responses {100 * down:+.0f}"


@rule(
    "warning",
    remedy="Enlarge the batch (rollout_batch, group_size) or check the data: wrong references, problems that are "
    "all too hard or too easy (data.difficulty_filter). If accuracy falls, check the sign of a custom loss, advantage "
    "or reward, and lower optimizer.learning_rate.",
)
def early_plateau(series: Series) -> str | None:
    """First stage, steps 40 to 200, well below solved: a line through the last 40 to 60 steps does not rise.

    With 95 % confidence it rises by less than half a point in ten steps, so that noise gives no finding.
    """
    accuracy = right(series[-12 * RECENT :], ACCURACY)
    if series[0].stage != series[-1].stage or len(series) > 2 * EARLY_STEPS or len(accuracy) < 8 * RECENT:
        return None
    (rise, error), now = trend(accuracy), mean(accuracy[-RECENT:])
    # 1.645: one-sided 95 %. 0.0005 per step is half a point in ten.
    if now >= 0.9 or rise + 1.645 * error >= 0.0005 * len(accuracy):
        return None
    return f"train accuracy {now:.0%}, {100 * rise:+.1f} points over the last {len(accuracy)} steps of the first stage"


@rule(
    "warning",
    remedy="By cause: a larger T, a form of answer that the verifier reads, or other problems.",
)
def groups_rejected(series: Series) -> SampledAnswers | None:
    """More than three quarters of the groups without any advantage over ten steps, or all of them in three.

    A teacher teaches in these groups too. Where most responses have no verdict, that is the cause.
    """
    unjudged = last(series, 3, NOT_JUDGED)
    if TEACHER_KL in series[-1].values or (unjudged and mean(unjudged) > 0.5):
        return None
    often, three = last(series, 2 * RECENT, REJECTED), last(series, 3, REJECTED)
    if (often and mean(often) > 0.75) or (three and min(three) == 1):
        return answers_in(series[-2 * RECENT :])
    return None


@rule(
    "warning",
    remedy="The verifier, reward or environment fails: its first error is in the log, the others are next to their "
    "responses in the recorded rollouts. Accuracy and advantages only use responses with a verdict, which are not a "
    "random sample.",
)
def answers_not_judged(series: Series) -> str | None:
    """More than a tenth of the responses not judged over the last steps, or more than half in the first ones."""
    share = last(series, min(RECENT, len(series)), NOT_JUDGED)
    if not share or mean(share) <= (UNJUDGED if len(share) == RECENT else 0.5):
        return None
    return f"{mean(share):.0%} of the responses of the last {plural(len(share), 'step')} could not be judged"


@rule(
    "info",
    remedy="The policy hardly moves between the updates of one batch: optimizer.learning_rate may be too low.",
)
def clip_never_acts(series: Series) -> str | None:
    """Several updates per training step, and no clipped token in twenty steps."""
    clipped, sgd_steps = last(series, 4 * RECENT, CLIPPED), last(series, 1, SGD_STEPS)
    # With one update the ratio is exactly 1 and nothing can be clipped.
    if not clipped or any(clipped) or not sgd_steps or sgd_steps[0] <= 1:
        return None
    # A loss without a clip reports no clipped token however far the policy moves.
    if max(last(series, 4 * RECENT, LARGEST_RATIO), default=1.0) > 1.2:
        return None
    return f"no token clipped in {len(clipped)} training steps of {sgd_steps[0]:.0f} updates each"


@rule(
    "warning",
    remedy="The policy moves far from its own data within a step: lower optimizer.learning_rate, or make fewer updates "
    "(larger mini_batch, algorithm.reuse = 1).",
)
def clip_share_high(series: Series) -> str | None:
    """More than a tenth of the tokens clipped over the last steps."""
    clipped, largest = last(series, RECENT, CLIPPED), last(series, RECENT, LARGEST_RATIO)
    if not clipped or mean(clipped) <= 0.1:
        return None
    # Bounds as narrow as those of gspo (0.0003) are passed without a far move.
    if largest and max(largest) < 1.1:
        return None
    return f"{mean(clipped):.0%} of the tokens clipped over the last {RECENT} steps"


@rule(
    "warning",
    remedy="Sample in the learner's precision (rollout.dtype = model.dtype), in one that rounds less (model.dtype = "
    "'float16'), or correct for the gap (algorithm.correction = 'tis'); older weights (rollout.max_staleness, "
    "rollout.weight_lag) widen it too.",
)
def sampler_gap(series: Series) -> str | None:
    """Sampler and learner differ by more than 0.07 nats per token; bf16 alone explains about 0.05."""
    gap = last(series, RECENT, SAMPLER_GAP)
    if not gap or mean(gap) <= 0.07:
        return None
    return f"sampler and learner differ by {mean(gap):.3f} nats per token (mean of {RECENT} steps)"


@rule(
    "critical",
    remedy="The sampler's log-probs do not belong to the distribution it samples from: check its temperature "
    "and top_p.",
)
def entropy_estimators_disagree(series: Series) -> str | None:
    """The exact and the sampled estimate, whose means are equal, differ by five standard errors."""
    exact, sampled = last(series, 4 * RECENT, EXACT), last(series, 4 * RECENT, SAMPLED)
    if not exact or not sampled:
        return None
    # Compared with 0, which has no scatter, so that the error is that of the differences.
    offset, error = change([0.0], [s - e for s, e in zip(sampled, exact, strict=True)])
    if abs(offset) <= max(5 * error, 0.02 * mean(exact), 1e-3):
        return None
    return f"sampled entropy is {offset:+.3f} nats off the exact one ({mean(exact):.3f}), error {error:.3f}"


@rule(
    "warning",
    remedy="Check the longest rollouts for loops; lower the entropy coefficient or the learning rate, or "
    "shorten T for a while.",
)
def length_explosion(series: Series) -> str | None:
    """Responses twice as long as at the start of the stage, without a gain in accuracy."""
    stage = this_stage(series)
    length, accuracy = column(stage, LENGTH), right(stage, ACCURACY)
    if min(len(length), len(accuracy)) < 3 * RECENT:
        return None
    start, now = mean(length[:RECENT]), mean(length[-RECENT:])
    gain, _ = change(accuracy[:RECENT], accuracy[-RECENT:])
    if now < 2 * start or gain >= 0.02:
        return None
    return f"mean length {start:.0f} -> {now:.0f} tokens in this stage, accuracy {100 * gain:+.1f} points"


@rule(
    "warning",
    remedy="Raise the stage's max_tokens (or environment.max_turns), and use algorithm.advantage_mask = 'none': "
    "masking truncated responses removes the incentive to finish.",
)
def truncation_stuck(series: Series) -> str | None:
    """After thirty steps of a stage more than 30 % are truncated, hardly fewer than twenty steps ago."""
    cut, window = column(this_stage(series), TRUNCATION), 2 * RECENT
    if len(cut) < 3 * window:
        return None
    now, earlier = mean(cut[-window:]), mean(cut[-3 * window : -2 * window])
    if now <= 0.3 or now < 0.9 * earlier:
        return None
    return f"{now:.0%} of the responses truncated at T after {len(cut)} steps of this stage ({earlier:.0%} before)"


class HealthMonitor:
    """Health rules applied to a run step by step.

    Args:
        judging: Settings of the verifier, for remedies that depend on them.
    """

    def __init__(self, judging: Judging = ANY_JUDGING) -> None:
        self._judging = judging
        self._series: list[StepMetrics] = []
        self._quiet: dict[str, int] = {}  # steps since its rule last fired, per current episode

    def observe(self, metrics: StepMetrics) -> list[dict[str, Any]]:
        """Observe one training step and return its new findings, each as a line of ``events.jsonl``."""
        kept = {k: metrics.values[k] for k in KEPT if metrics.values.get(k) is not None}
        self._series.append(StepMetrics(step=metrics.step, stage=metrics.stage, values=kept))
        # After enough quiet steps an episode is over, and its rule may report again.
        self._quiet = {name: steps + 1 for name, steps in self._quiet.items() if steps < REARM_STEPS}
        findings: list[dict[str, Any]] = []
        for rule in RULES:
            message, remedy = rule.check(self._series), rule.remedy
            if message is None:
                continue
            if rule.name not in self._quiet:
                if isinstance(message, SampledAnswers):
                    found = diagnose(replace(message, judging=self._judging))
                    message, remedy = found.message, found.remedy
                place = {"step": metrics.step, "stage": metrics.stage}
                rest = {"message": message, "remedy": remedy}
                findings.append({"kind": "health", "rule": rule.name, "severity": rule.severity, **place, **rest})
            self._quiet[rule.name] = 0
        return findings

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state."""
        return {
            "series": [[row.step, row.stage, dict(row.values)] for row in self._series],
            "quiet": dict(self._quiet),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self._series = [StepMetrics(step=step, stage=stage, values=values) for step, stage, values in state["series"]]
        self._quiet = dict(state["quiet"])


BEFORE, LEAST, FAR = 10, 5, 5.0
"""Number of steps that a step is compared with; fewest of them; typical deviations of a notable step."""
MOST_STEPS = 10
"""Most steps that are reported."""
APART = 5
"""Steps within which findings of one kind are one: the strongest is reported."""
WINDOW = 20
"""Steps at each end of a run whose mean rewards are compared, next to the validation."""


Notable: TypeAlias = dict[str, Any]
"""A notable step, as ``magicrl explain --json`` prints it: ``step``, kind of ``sign``, reason in a sentence (``why``),
``strength``."""


_SIGNS = (
    ("loss of entropy", (EXACT, SAMPLED), -1, 0.25, "entropy is {now:.3g} nats per token, {times} the {was:.3g}"),
    ("jump in length", (LENGTH,), 0, 0.25, "responses have {now:.3g} tokens on average, {times} the {was:.3g}"),
    ("gradient spike", ("learner/grad_norm",), 1, 1.0, "the gradient's norm is {now:.3g}, {times} the {was:.3g}"),
)
"""Name, metrics, the direction that counts (1 up, -1 down, 0 both), minimum share of the median, wording."""


def notable_steps(rows: Sequence[StepMetrics]) -> list[Notable]:
    """Return the notable steps, strongest first, at most ``MOST_STEPS``."""
    found = [one for sign in _SIGNS for one in _apart(_standing_out(rows, *sign))]
    found += _reward_alone(rows)
    return sorted(found, key=lambda one: (-one["strength"], one["step"]))[:MOST_STEPS]


def _standing_out(
    rows: Sequence[StepMetrics], name: str, keys: Sequence[str], direction: int, share: float, words: str
) -> list[Notable]:
    found: list[Notable] = []
    for at, row in enumerate(rows):
        now, before = column([row], *keys), column(this_stage(rows[: at + 1])[-BEFORE - 1 : -1], *keys)
        if not now or len(before) < LEAST:
            continue
        middle = float(np.median(before))
        # standard deviation of a normal distribution
        typical = 1.4826 * float(np.median(np.abs(np.array(before) - middle)))
        change = now[0] - middle
        if change * direction < 0 or abs(change) <= max(FAR * typical, share * abs(middle)):
            continue
        times = f"{now[0] / middle:.2g} times" if middle else "against"
        why = f"{words.format(now=now[0], was=middle, times=times)} of the {len(before)} steps before"
        strength = abs(change) / max(typical, 0.01 * abs(middle), 1e-12)
        found.append({"step": row.step, "sign": name, "why": why, "strength": strength})
    return found


def _apart(found: Sequence[Notable]) -> list[Notable]:
    """Return the strongest finding of each episode."""
    kept: list[Notable] = []
    for one in sorted(found, key=lambda one: -one["strength"]):
        if all(abs(one["step"] - other["step"]) > APART for other in kept):
            kept.append(one)
    return kept


def _reward_alone(rows: Sequence[StepMetrics]) -> list[Notable]:
    """Return steps with reward but no learning: it rose without the validation, or nearly all groups were rejected."""
    found: list[Notable] = []
    sign = "reward without learning"
    rewards, validated = (
        [(row.step, values[0]) for row in rows if (values := column([row], key))]
        for key in (MEAN_REWARD, "validation/accuracy/mean")
    )
    if len(rewards) >= 2 * WINDOW and len(validated) >= 2:
        early, late = (float(np.mean([value for _, value in end])) for end in (rewards[:WINDOW], rewards[-WINDOW:]))
        first, last = validated[0][1], validated[-1][1]
        if late - early > 0.1 and last - first < 0.2 * (late - early):
            rises = [(b[1] - a[1], b[0]) for a, b in zip(rewards, rewards[WINDOW // 2 :], strict=False)]
            why = (
                f"the reward rose from {early:.2f} to {late:.2f} while validation went from {first:.2f} to {last:.2f}; "
                "it rose most up to here"
            )
            found.append({"step": max(rises)[1], "sign": sign, "why": why, "strength": (late - early) * 100})
    for row in rows:
        rejected, reward = column([row], REJECTED), column([row], MEAN_REWARD, ACCURACY)
        if rejected and reward and rejected[0] >= 0.9 and reward[0] > 0:
            why = (
                f"the mean reward is {reward[0]:.2f}, and {rejected[0]:.0%} of the groups have equal rewards: "
                "nothing is learned from these"
            )
            found.append({"step": row.step, "sign": sign, "why": why, "strength": FAR + 10 * rejected[0]})
    return _apart(found)
