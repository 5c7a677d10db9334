"""Health of a run: what goes wrong in runs of this recipe, told with its remedy while it happens.

A rule is a predicate over the steps so far, with the metrics it reads, its severity and its remedy. Rules are pure, so
that the live display, the event log and the report say the same; a metric that is missing keeps its rule quiet. The
signs are those of section 12 of the recipe, the thresholds are ours. A finding is told once an episode: again only
after its rule has been quiet for ``REARM_STEPS``. Losses that are not finite are not among them: the learner stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from magicrl.records import StepMetrics
from magicrl.training.diagnosis import (
    ANY_JUDGING,
    STEP_KEYS,
    Judging,
    SampledAnswers,
    Series,
    answers_in,
    change,
    column,
    diagnose,
    mean,
    percent,
    tail,
    this_stage,
    trend,
)

Severity: TypeAlias = Literal["info", "warning", "critical"]

RECENT = 5
"""Steps that make up "now"."""
EARLY_STEPS = 100
"""Steps that make up "early", from the start of the run or of the stage."""

ENTROPY = ("entropy/exact/mean", "entropy/sampled/mean")
ACCURACY = "train/accuracy/mean"
SOLVED = 0.95
"""Train accuracy from which low entropy is what certainty looks like, not collapse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRule:
    """One warning sign.

    Attributes:
        name: its key in events.
        severity: ``info`` is expected behaviour worth knowing, ``critical`` usually ruins the run.
        keys: the metrics it reads; what the monitor must remember.
        sign: what it looks for, in a sentence.
        check: the steps so far (oldest first, never empty) to a message, or None when all is well; answers instead of
            a message are diagnosed, which gives message and remedy.
        remedy: what to change, in the recipe's settings.
    """

    name: str
    severity: Severity
    keys: tuple[str, ...]
    sign: str
    check: Callable[[Series], str | SampledAnswers | None]
    remedy: str


def rule(
    *, severity: Severity, keys: tuple[str, ...], remedy: str
) -> Callable[[Callable[[Series], str | SampledAnswers | None]], HealthRule]:
    """Makes a predicate the rule of its name; its docstring's first line is the sign."""

    def made(check: Callable[[Series], str | SampledAnswers | None]) -> HealthRule:
        sign = (check.__doc__ or "").partition("\n")[0]
        return HealthRule(name=check.__name__, severity=severity, keys=keys, sign=sign, check=check, remedy=remedy)

    return made


@rule(
    severity="critical",
    keys=(*ENTROPY, ACCURACY),
    remedy="Sample at temperature 1 (rollout.temperature), take one SGD step per training step (algorithm.reuse = 1"
    " and mini_batch = rollout_batch), or hold entropy at a target (entropy.controller = 'adaptive').",
)
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


@rule(
    severity="critical",
    keys=(*ENTROPY, "entropy/target"),
    remedy="Lower the entropy coefficient (entropy.alpha, or entropy.step and entropy.maximum), or lower "
    "algorithm.clip_high. Where neither acts, lower optimizer.learning_rate and see whether any answer is right.",
)
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


@rule(
    severity="info",
    keys=(ACCURACY, "train/accuracy_nontruncated/mean"),
    remedy="Expected early in a stage with a short T: the policy learns to finish in time. Nothing to change; "
    "accuracy of finished responses recovers later.",
)
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


@rule(
    severity="warning",
    keys=(ACCURACY,),
    remedy="Enlarge the batch (rollout_batch, group_size) or look at the data: wrong golds, problems that are all "
    "too hard or too easy (data.difficulty_filter).",
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


@rule(
    severity="warning",
    keys=STEP_KEYS,
    remedy="By cause: a larger T, a form of answer that the verifier reads, or other problems.",
)
def groups_rejected(series: Series) -> SampledAnswers | None:
    """More than three quarters of the groups without any advantage over ten steps, or all of them in three."""
    rejected = tail(series, 2 * RECENT, "groups/rejected/ratio")
    often = len(rejected) == 2 * RECENT and mean(rejected) > 0.75
    return answers_in(series[-2 * RECENT :]) if often or (len(rejected) >= 3 and min(rejected) == 1) else None


def _off_policy(series: Series) -> bool:
    steps = column(series[-1:], "learner/sgd_steps")
    return bool(steps) and steps[-1] > 1


@rule(
    severity="info",
    keys=("learner/clip_ratio", "learner/sgd_steps"),
    remedy="The policy hardly moves between the SGD steps of one batch: optimizer.learning_rate may be too low.",
)
def clip_never_acts(series: Series) -> str | None:
    """Several SGD steps a training step, and not one token clipped in twenty of them."""
    recent = series[-4 * RECENT :]
    clipped = column(recent, "learner/clip_ratio")
    if not _off_policy(series) or len(clipped) < 4 * RECENT or any(clipped):
        return None
    sgd_steps = column(series[-1:], "learner/sgd_steps")[-1]
    return f"not one token clipped in {len(clipped)} training steps of {sgd_steps:.0f} SGD steps each"


@rule(
    severity="warning",
    keys=("learner/clip_ratio",),
    remedy="The policy leaves its own data within a step: lower optimizer.learning_rate, or take fewer SGD steps "
    "(larger mini_batch, algorithm.reuse = 1).",
)
def clip_share_high(series: Series) -> str | None:
    """More than a tenth of the tokens clipped over the last steps."""
    clipped = tail(series, RECENT, "learner/clip_ratio")
    if len(clipped) < RECENT or mean(clipped) <= 0.1:
        return None
    return f"{percent(mean(clipped))} of the tokens clipped over the last {RECENT} steps"


@rule(
    severity="warning",
    keys=("learner/sampler_gap_mean",),
    remedy="Sample in the learner's precision (rollout.dtype = model.dtype), or correct for the gap "
    "(algorithm.correction = 'tis'); older weights (rollout.max_staleness, rollout.weight_lag) widen it too.",
)
def sampler_gap(series: Series) -> str | None:
    """Sampler and learner disagree by more than 0.07 nats a token; bf16 alone explains about 0.05."""
    gap = tail(series, RECENT, "learner/sampler_gap_mean")
    if len(gap) < RECENT or mean(gap) <= 0.07:
        return None
    return f"sampler and learner differ by {mean(gap):.3f} nats per token (mean of {RECENT} steps)"


@rule(
    severity="critical",
    keys=ENTROPY,
    remedy="The sampler's log-probs are not those of the distribution it samples from: check its temperature "
    "and top_p.",
)
def entropy_estimators_disagree(series: Series) -> str | None:
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


@rule(
    severity="warning",
    keys=("length/mean", ACCURACY),
    remedy="Look at the longest rollouts for loops; lower the entropy coefficient or the learning rate, or "
    "shorten T for a while.",
)
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


@rule(
    severity="warning",
    keys=("train/truncation/ratio",),
    remedy="Raise the stage's max_tokens, and use algorithm.advantage_mask = 'none': masking truncated responses "
    "takes away the pressure to finish.",
)
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


RULES: tuple[HealthRule, ...] = (
    entropy_collapse,
    entropy_growth,
    response_shortening,
    early_plateau,
    groups_rejected,
    clip_never_acts,
    clip_share_high,
    sampler_gap,
    entropy_estimators_disagree,
    length_explosion,
    truncation_stuck,
)
"""Every rule, in the order in which findings of one step are told."""


REARM_STEPS = 10
"""Steps a rule must be quiet before it may speak again."""


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
        return {
            "kind": "health",
            "step": self.step,
            "stage": self.stage,
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "remedy": self.remedy,
        }


class HealthMonitor:
    """Watches a run step by step.

    It remembers only the metrics that its rules read, so its state stays small enough for every checkpoint.

    Args:
        judging: the verifier's settings, which some remedies depend on.
        rules: what it watches for.
    """

    def __init__(self, judging: Judging = ANY_JUDGING, rules: Sequence[HealthRule] = RULES) -> None:
        self._judging = judging
        self._rules = tuple(rules)
        self._keys = tuple(dict.fromkeys(key for rule in self._rules for key in rule.keys))
        self._series: list[StepMetrics] = []
        self._quiet: dict[str, int] = {}

    def observe(self, metrics: StepMetrics) -> list[HealthFinding]:
        """Take one training step in; return what has newly gone wrong (or been noticed) at it."""
        kept = {key: metrics.values[key] for key in self._keys if metrics.values.get(key) is not None}
        self._series.append(StepMetrics(step=metrics.step, stage=metrics.stage, values=kept))
        findings: list[HealthFinding] = []
        for rule in self._rules:
            seen = rule.check(self._series)
            if seen is None:
                self._count_quiet(rule.name)
                continue
            if rule.name not in self._quiet:
                findings.append(self._finding(rule, seen, metrics))
            self._quiet[rule.name] = 0
        return findings

    def _finding(self, rule: HealthRule, seen: str | SampledAnswers, metrics: StepMetrics) -> HealthFinding:
        if isinstance(seen, SampledAnswers):
            found = diagnose(replace(seen, judging=self._judging))
            message, remedy = found.message, found.remedy
        else:
            message, remedy = seen, rule.remedy
        return HealthFinding(
            rule=rule.name,
            severity=rule.severity,
            step=metrics.step,
            stage=metrics.stage,
            message=message,
            remedy=remedy,
        )

    @property
    def active(self) -> tuple[str, ...]:
        """Rules whose episode is not over."""
        return tuple(rule.name for rule in self._rules if rule.name in self._quiet)

    def _count_quiet(self, name: str) -> None:
        if name in self._quiet:
            self._quiet[name] += 1
            if self._quiet[name] >= REARM_STEPS:
                del self._quiet[name]

    def state(self) -> dict[str, Any]:
        """All it remembers, as JSON."""
        return {
            "series": [[row.step, row.stage, dict(row.values)] for row in self._series],
            "quiet": dict(self._quiet),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self._series = [
            StepMetrics(step=int(step), stage=int(stage), values=dict(values))
            for step, stage, values in state["series"]
        ]
        self._quiet = {str(name): int(count) for name, count in state["quiet"].items()}


def findings_of(series: Series) -> list[HealthFinding]:
    """Every finding of a recorded run, in order: what a monitor would have told while it ran."""
    monitor = HealthMonitor()
    return [finding for row in series for finding in monitor.observe(row)]
