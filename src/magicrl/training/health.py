"""Health of a run: what goes wrong in runs of this recipe, told with its remedy while it happens.

A rule is a pure predicate over the steps so far, so that the live display, the event log and the report say the same. A
metric that is missing from the steps it looks at keeps it quiet. The signs are those of section 12 of the recipe, the
thresholds are ours. A finding is told once an episode: again only after its rule has been quiet for ``REARM_STEPS``.
Losses that are not finite are not among them: the learner stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from magicrl.records import StepMetrics
from magicrl.training.diagnosis import (
    ANY_JUDGING,
    REWARD,
    STEP_KEYS,
    Judging,
    SampledAnswers,
    answers_in,
    column,
    diagnose,
    mean,
    measure_of,
)

Series: TypeAlias = Sequence[StepMetrics]
"""The training steps so far, oldest first, never empty."""
Severity: TypeAlias = Literal["info", "warning", "critical"]
Check: TypeAlias = Callable[[Series], str | SampledAnswers | None]

RECENT = 5
"""Steps that make up "now"."""
EARLY_STEPS = 100
"""Steps that make up "early", from the start of the run or of the stage."""
REARM_STEPS = 10
"""Steps a rule must be quiet before it may speak again."""
SOLVED = 0.95
"""Train accuracy from which low entropy is what certainty looks like, not collapse."""

EXACT, SAMPLED, TARGET = "entropy/exact/mean", "entropy/sampled/mean", "entropy/target"
ACCURACY, FINISHED_ACCURACY = "train/accuracy/mean", "train/accuracy_nontruncated/mean"
MEAN_REWARD = "train/reward/mean"
NOT_JUDGED = "train/not_judged/ratio"
LENGTH, TRUNCATION, REJECTED = "length/mean", "train/truncation/ratio", "groups/rejected/ratio"
CLIPPED, SGD_STEPS, SAMPLER_GAP = "learner/clip_ratio", "learner/sgd_steps", "learner/sampler_gap_mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRule:
    """One warning sign.

    Attributes:
        name: its key in events.
        severity: ``info`` is expected behaviour worth knowing, ``critical`` usually ruins the run.
        keys: the metrics it reads; what the monitor must remember.
        sign: what it looks for, in a sentence.
        check: the steps so far to a message, or None when all is well; answers instead of a message are diagnosed,
            which gives message and remedy.
        remedy: what to change, in the recipe's settings.
    """

    name: str
    severity: Severity
    keys: tuple[str, ...]
    sign: str
    check: Check
    remedy: str


def rule(severity: Severity, *keys: str, remedy: str) -> Callable[[Check], HealthRule]:
    """Makes a predicate the rule of its name; its docstring's first line is the sign."""

    def made(check: Check) -> HealthRule:
        sign = (check.__doc__ or "").partition("\n")[0]
        return HealthRule(name=check.__name__, severity=severity, keys=keys, sign=sign, check=check, remedy=remedy)

    return made


def last(series: Series, count: int, *keys: str) -> list[float]:
    """The first of ``keys`` in each of the last ``count`` steps; [] unless every one of them has it."""
    found = column(series[-count:], *keys)
    return found if len(found) == count else []


def this_stage(series: Series) -> Series:
    """The steps of the stage that the last step belongs to; stages follow one another."""
    return [row for row in series if row.stage == series[-1].stage]


def right(series: Series, key: str) -> list[float]:
    """A share of right answers by step; [] where rewards are graded, which may rise while nothing is right."""
    return [] if measure_of(series) is REWARD else column(series, key)


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Difference of two windows' means and its standard error, from the scatter inside the windows."""
    variance = sum(float(np.var(window, ddof=1)) / len(window) for window in (before, after) if len(window) > 1)
    return mean(after) - mean(before), variance**0.5


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Rise of the least-squares line over all of ``values`` (three or more), and its standard error."""
    y, x = np.array(values) - mean(values), np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(x @ y / (x @ x))
    residual = float(((y - slope * x) ** 2).sum())
    steps = len(values) - 1
    return slope * steps, (residual / (steps - 1) / float(x @ x)) ** 0.5 * steps


@rule(
    "critical",
    EXACT,
    SAMPLED,
    ACCURACY,
    remedy="Sample at temperature 1 (rollout.temperature), take one SGD step per training step (algorithm.reuse = 1"
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
    EXACT,
    SAMPLED,
    TARGET,
    remedy="Lower the entropy coefficient (entropy.alpha, or entropy.step and entropy.maximum), or lower "
    "algorithm.clip_high. Where neither acts, lower optimizer.learning_rate and see whether any answer is right.",
)
def entropy_growth(series: Series) -> str | None:
    """Twice the start's and the target's entropy, and still rising."""
    recent, target = last(series, 2 * RECENT, EXACT, SAMPLED), last(series, 1, TARGET)
    first = column(series[:RECENT], EXACT, SAMPLED)[:2]  # no more: it may double within a few steps
    if not recent or not first:
        return None
    start, earlier, now = mean(first), mean(recent[:RECENT]), mean(recent[-RECENT:])
    # 0.1: a start of nearly no entropy doubles without any harm; 1.03: a plateau is no growth
    if now < 2 * max(start, 0.1, *target) or now < 1.03 * earlier:
        return None
    return f"entropy has risen from {start:.2f} to {now:.2f} nats per token"


@rule(
    "info",
    ACCURACY,
    FINISHED_ACCURACY,
    MEAN_REWARD,
    remedy="Expected early in a stage with a short T: the policy learns to finish in time. Nothing to change; "
    "accuracy of finished responses recovers later.",
)
def response_shortening(series: Series) -> str | None:
    """Early in a stage: accuracy up, accuracy among the finished down, both beyond twice their error."""
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
    ACCURACY,
    MEAN_REWARD,
    remedy="Enlarge the batch (rollout_batch, group_size) or look at the data: wrong references, problems that are "
    "all too hard or too easy (data.difficulty_filter).",
)
def early_plateau(series: Series) -> str | None:
    """First stage, steps 40 to 200, well below solved: a line through the last 40 to 60 steps does not rise.

    With 95 % confidence it rises by less than half a point in ten steps, so that noise alone stays quiet.
    """
    accuracy = right(series[-12 * RECENT :], ACCURACY)
    if series[0].stage != series[-1].stage or len(series) > 2 * EARLY_STEPS or len(accuracy) < 8 * RECENT:
        return None
    (rise, error), now = trend(accuracy), mean(accuracy[-RECENT:])
    # 1.645: one-sided 95 %; 0.0005 a step is half a point in ten
    if now >= 0.9 or rise + 1.645 * error >= 0.0005 * len(accuracy):
        return None
    return f"train accuracy {now:.0%}, {100 * rise:+.1f} points over the last {len(accuracy)} steps of the first stage"


@rule(
    "warning",
    *STEP_KEYS,
    remedy="By cause: a larger T, a form of answer that the verifier reads, or other problems.",
)
def groups_rejected(series: Series) -> SampledAnswers | None:
    """More than three quarters of the groups without any advantage over ten steps, or all of them in three."""
    often, three = last(series, 2 * RECENT, REJECTED), last(series, 3, REJECTED)
    if (often and mean(often) > 0.75) or (three and min(three) == 1):
        return answers_in(series[-2 * RECENT :])
    return None


@rule(
    "warning",
    NOT_JUDGED,
    remedy="What judges fails: its first error is in the log, the others are beside their responses in the recorded "
    "rollouts. Until then accuracy and advantages are of the judged responses alone, which are no random sample.",
)
def answers_not_judged(series: Series) -> str | None:
    """More than a tenth of the responses not judged over the last steps."""
    share = last(series, RECENT, NOT_JUDGED)
    if not share or mean(share) <= 0.1:
        return None
    return f"{mean(share):.0%} of the responses of the last {RECENT} steps could not be judged"


@rule(
    "info",
    CLIPPED,
    SGD_STEPS,
    remedy="The policy hardly moves between the SGD steps of one batch: optimizer.learning_rate may be too low.",
)
def clip_never_acts(series: Series) -> str | None:
    """Several SGD steps a training step, and not one token clipped in twenty of them."""
    clipped, sgd_steps = last(series, 4 * RECENT, CLIPPED), last(series, 1, SGD_STEPS)
    # with one SGD step the ratio is exactly 1 and nothing can be clipped
    if not clipped or any(clipped) or not sgd_steps or sgd_steps[0] <= 1:
        return None
    return f"not one token clipped in {len(clipped)} training steps of {sgd_steps[0]:.0f} SGD steps each"


@rule(
    "warning",
    CLIPPED,
    remedy="The policy leaves its own data within a step: lower optimizer.learning_rate, or take fewer SGD steps "
    "(larger mini_batch, algorithm.reuse = 1).",
)
def clip_share_high(series: Series) -> str | None:
    """More than a tenth of the tokens clipped over the last steps."""
    clipped = last(series, RECENT, CLIPPED)
    if not clipped or mean(clipped) <= 0.1:
        return None
    return f"{mean(clipped):.0%} of the tokens clipped over the last {RECENT} steps"


@rule(
    "warning",
    SAMPLER_GAP,
    remedy="Sample in the learner's precision (rollout.dtype = model.dtype), in one that rounds less (model.dtype = "
    "'float16'), or correct for the gap (algorithm.correction = 'tis'); older weights (rollout.max_staleness, "
    "rollout.weight_lag) widen it too.",
)
def sampler_gap(series: Series) -> str | None:
    """Sampler and learner disagree by more than 0.07 nats a token; bf16 alone explains about 0.05."""
    gap = last(series, RECENT, SAMPLER_GAP)
    if not gap or mean(gap) <= 0.07:
        return None
    return f"sampler and learner differ by {mean(gap):.3f} nats per token (mean of {RECENT} steps)"


@rule(
    "critical",
    EXACT,
    SAMPLED,
    remedy="The sampler's log-probs are not those of the distribution it samples from: check its temperature "
    "and top_p.",
)
def entropy_estimators_disagree(series: Series) -> str | None:
    """The exact and the sampled estimate have the same mean; five standard errors apart they have not."""
    exact, sampled = last(series, 4 * RECENT, EXACT), last(series, 4 * RECENT, SAMPLED)
    if not exact or not sampled:
        return None
    # against 0, which has no scatter: the error is that of the differences alone
    offset, error = change([0.0], [s - e for s, e in zip(sampled, exact, strict=True)])
    if abs(offset) <= max(5 * error, 0.02 * mean(exact), 1e-3):
        return None
    return f"sampled entropy is {offset:+.3f} nats off the exact one ({mean(exact):.3f}), error {error:.3f}"


@rule(
    "warning",
    LENGTH,
    ACCURACY,
    MEAN_REWARD,
    remedy="Look at the longest rollouts for loops; lower the entropy coefficient or the learning rate, or "
    "shorten T for a while.",
)
def length_explosion(series: Series) -> str | None:
    """Responses twice as long as at the stage's start, without any accuracy to show for it."""
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
    TRUNCATION,
    remedy="Raise the stage's max_tokens, and use algorithm.advantage_mask = 'none': masking truncated responses "
    "takes away the pressure to finish.",
)
def truncation_stuck(series: Series) -> str | None:
    """After thirty steps of a stage more than 30 % are cut, hardly fewer than twenty steps ago."""
    cut, window = column(this_stage(series), TRUNCATION), 2 * RECENT
    if len(cut) < 3 * window:
        return None
    now, earlier = mean(cut[-window:]), mean(cut[-3 * window : -2 * window])
    if now <= 0.3 or now < 0.9 * earlier:
        return None
    return f"{now:.0%} of the responses cut at T after {len(cut)} steps of this stage ({earlier:.0%} before)"


RULES: tuple[HealthRule, ...] = (
    entropy_collapse,
    entropy_growth,
    response_shortening,
    early_plateau,
    groups_rejected,
    answers_not_judged,
    clip_never_acts,
    clip_share_high,
    sampler_gap,
    entropy_estimators_disagree,
    length_explosion,
    truncation_stuck,
)
"""Every rule, in the order in which findings of one step are told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthFinding:
    """A rule that spoke: what was seen, with numbers, and what helps."""

    rule: str
    severity: Severity
    step: int
    stage: int
    message: str
    remedy: str

    def as_event(self) -> dict[str, Any]:
        """Its line of ``events.jsonl``."""
        return {"kind": "health", **asdict(self)}


class HealthMonitor:
    """Watches a run step by step.

    Args:
        judging: the verifier's settings, which some remedies depend on.
    """

    def __init__(self, judging: Judging = ANY_JUDGING) -> None:
        self._judging = judging
        # what no rule reads is forgotten, so that the state stays small enough for every checkpoint
        self._keys = {key for rule in RULES for key in rule.keys}
        self._series: list[StepMetrics] = []
        self._quiet: dict[str, int] = {}  # of each episode that goes on: steps since its rule last spoke

    def observe(self, metrics: StepMetrics) -> list[HealthFinding]:
        """Take one training step in; return what has newly gone wrong (or been noticed) at it."""
        # sorted: a set's order differs between processes, and a resumed run is to write the same state
        kept = {k: metrics.values[k] for k in sorted(self._keys) if metrics.values.get(k) is not None}
        self._series.append(StepMetrics(step=metrics.step, stage=metrics.stage, values=kept))
        # an episode that was quiet for long enough is over, and its rule may speak again
        self._quiet = {name: steps + 1 for name, steps in self._quiet.items() if steps < REARM_STEPS}
        findings: list[HealthFinding] = []
        for rule in RULES:
            seen = rule.check(self._series)
            if seen is None:
                continue
            if rule.name not in self._quiet:
                findings.append(self._finding(rule, seen, metrics))
            self._quiet[rule.name] = 0
        return findings

    def _finding(self, rule: HealthRule, seen: str | SampledAnswers, metrics: StepMetrics) -> HealthFinding:
        message, remedy = seen, rule.remedy
        if isinstance(message, SampledAnswers):
            found = diagnose(replace(message, judging=self._judging))
            message, remedy = found.message, found.remedy
        return HealthFinding(
            rule=rule.name,
            severity=rule.severity,
            step=metrics.step,
            stage=metrics.stage,
            message=message,
            remedy=remedy,
        )

    def state(self) -> dict[str, Any]:
        """All it remembers, as JSON."""
        return {
            "series": [[row.step, row.stage, dict(row.values)] for row in self._series],
            "quiet": dict(self._quiet),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self._series = [StepMetrics(step=step, stage=stage, values=values) for step, stage, values in state["series"]]
        self._quiet = dict(state["quiet"])


def findings_of(series: Series) -> list[HealthFinding]:
    """Every finding of a recorded run, in order: what a monitor would have told while it ran."""
    monitor = HealthMonitor()
    return [finding for row in series for finding in monitor.observe(row)]
