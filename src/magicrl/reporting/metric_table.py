"""The metrics of a training step, one row each: what it is, how it is written, which way is better, where it is drawn.

A run's page draws the rows that name a ``figure``, a comparison those that have a ``compared`` key. A further figure
is a row.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

from magicrl.reporting.charts import Unit


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as pages show it. ``key`` is that of ``metrics.jsonl``."""

    key: str
    label: str = ""  # in the legend and the CSV of a figure
    _: KW_ONLY
    unit: Unit = "number"
    title: str = ""  # title and note where it has a figure of its own
    note: str = ""
    better: Literal["higher", "lower", ""] = ""
    figure: str = ""  # of a run's page, in which it is a line
    color: int = 0  # slot of the palette
    # smooth: a running mean before the raw values; dots: each measurement is marked
    look: Literal["smooth", "line", "steps", "dots"] = "line"
    error: str | None = None  # metric of its standard error, drawn as a 95 % band; of a share inside [0, 1]
    ends: tuple[str, str] | None = None  # metrics of the ends of a band
    share_of: str | None = None  # metric that the values are divided by
    unlike: str | None = None  # left out where it equals this metric at every step
    silent: float | None = None  # left out where all its values (and ends) are this one
    compared: str = ""  # key of its figure in a comparison
    instead: str = ""  # metric that a comparison takes at steps without this one
    exact: bool = False  # a comparison shows its values as they are, without running mean
    y_low: float | None = 0.0  # ends of the y axis in a comparison
    y_high: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run's page; its lines are the metrics that name it, its other fields those of ``Chart``.

    Without ``title`` and ``note`` it has those of its only metric.
    """

    key: str
    _: KW_ONLY
    title: str = ""
    note: str = ""
    y_low: float | None = 0.0
    y_high: float | None = None
    target: str | None = None  # a metric
    stacked: bool = False
    compact: bool = False
    tests: bool = False  # the test's scores are in it too


class Group(NamedTuple):
    """Metrics and figures under one heading. ``panels`` holds figures that share a card and its x axis."""

    key: str
    title: str
    metrics: tuple[Metric, ...]
    panels: tuple[tuple[Figure, ...], ...]


# fmt: off
LEARNING = Group(
    key="learning",
    title="Learning curves",
    metrics=(
        Metric("train/accuracy/mean", "train", unit="percent", title="Training accuracy",
            note="Over all responses sampled in the step.", better="higher", figure="accuracy", look="smooth",
            compared="accuracy"),
        Metric("train/accuracy_nontruncated/mean", "train, not truncated", unit="percent",
            title="Training accuracy of what was not cut", note="Over the responses that ended by themselves.",
            better="higher", figure="accuracy", color=1, look="smooth", compared="accuracy_nontruncated"),
        Metric("train/accuracy_unfiltered/mean", "train, filtered prompts as solved", unit="percent",
            figure="accuracy", color=5, look="smooth", unlike="train/accuracy/mean"),
        Metric("validation/accuracy/mean", "validation", unit="percent", title="Validation accuracy",
            note="On problems that are not trained on.", better="higher", figure="accuracy", color=2, look="dots",
            error="validation/accuracy/standard_error", compared="validation", exact=True),
        # what a graded reward teaches; the accuracy then counts the responses whose score reaches `right_from`
        Metric("train/reward/mean", "train", title="Mean reward",
            note="Graded rewards: mean over all responses sampled in the step.", better="higher", figure="reward",
            look="smooth", unlike="train/accuracy/mean", compared="reward", y_low=None),
        Metric("validation/reward/mean", "validation", figure="reward", color=2, look="dots",
            error="validation/reward/standard_error"),
        Metric("entropy/exact/mean", "exact", title="Entropy",
            note="Nats per response token, before rejection; exact where it was recorded, else the estimate.",
            figure="entropy", compared="entropy", instead="entropy/sampled/mean"),
        Metric("entropy/sampled/mean", "sampled estimate", figure="entropy", color=4),
        Metric("train/truncation/ratio", "truncated", unit="percent", title="Truncated responses",
            note="Share of the sampled responses that were cut at T; they earn no reward.", better="lower",
            figure="truncation", color=1, look="smooth", compared="truncation"),
        Metric("length/mean", "mean", title="Mean response length",
            note="Tokens per response, the end token included.", figure="length", compared="length"),
        Metric("length/q50", "median", figure="length", color=2),
        Metric("length/q90", "90th percentile", figure="length", color=1),
        Metric("length/q99", "99th percentile", figure="length", color=5),
        Metric("stage/max_tokens", "limit T", figure="length", color=4, look="steps"),
        Metric("groups/rejected/ratio", unit="percent", title="Rejected groups",
            note="Share of the sampled groups that teach nothing, since all their rewards are equal.", better="lower",
            compared="rejected"),
        Metric("groups/rejected/all_wrong", "all answers wrong", unit="percent", figure="rejected", color=1,
            share_of="groups/sampled"),
        Metric("groups/rejected/all_correct", "all answers right", unit="percent", figure="rejected", color=2,
            share_of="groups/sampled"),
        Metric("groups/not_judged", "not judged", unit="percent", figure="rejected", color=4,
            share_of="groups/sampled", silent=0.0),
        Metric("groups/refilled", "refilled", figure="refilled", color=4, look="smooth", silent=0.0),
        Metric("entropy/alpha", "α, in the loss", title="Entropy coefficient α", note="As it stood in the loss.",
            figure="alpha", color=3, silent=0.0, compared="alpha", exact=True),
        Metric("entropy/c", "c, held by the controller", figure="alpha", color=4, silent=0.0),
    ),
    panels=(
        (
            Figure("accuracy", title="Accuracy", y_high=1.0, tests=True,
                note="Training: over all responses sampled in the step, and over those that were not cut at T. "
                     "Validation and test have their 95 % intervals; the test is measured before and after training."),
            Figure("truncation", compact=True),
        ),
        (
            Figure("reward", title="Mean reward", y_low=None,
                note="Graded rewards, over all responses; accuracy is the share of those whose score counts as right. "
                     "Validation has its 95 % interval."),
        ),
        (
            Figure("entropy", title="Entropy against its target", target="entropy/target",
                note="Nats per response token, over the whole buffer before rejection. The bonus is on at or below "
                     "the target."),
            Figure("alpha", title="Entropy coefficient", compact=True,
                note="α is c where entropy is at or below its target, else 0."),
        ),
        (
            Figure("length", title="Response length", note="Tokens per response, the end token included."),
        ),
        (
            Figure("rejected", title="Rejected groups", y_high=1.0, stacked=True,
                note="Share of the sampled groups that teach nothing, since all their rewards are equal, or that "
                     "could not be judged."),
            Figure("refilled", title="Groups sampled to refill the batch",
                note="Further groups of the step, in place of rejected ones.", compact=True),
        ),
    ),
)

POLICY = Group(
    key="policy",
    title="Policy and sampler",
    metrics=(
        Metric("learner/ratio_mean", "ρ", figure="ratio", ends=("learner/ratio_min", "learner/ratio_max"), silent=1.0),
        Metric("learner/ratio_max", title="Largest probability ratio ρ",
            note="Of any token of the step; exactly 1 when each batch is used once.", compared="ratio_max", y_low=None),
        Metric("learner/ratio_min", title="Smallest probability ratio ρ", note="Of any token of the step.",
            compared="ratio_min", y_low=None),
        Metric("learner/clip_ratio", "clipped", unit="percent", title="Clipped tokens",
            note="Share of the tokens whose gradient the clip took away. None can be when each batch is used once.",
            figure="clip", color=1, look="smooth", silent=0.0, compared="clip"),
        Metric("learner/kl", "KL", title="KL to the reference", note="Mean of the k3 estimate, nats per token.",
            figure="kl", color=3, look="smooth", silent=0.0, compared="kl"),  # zeros: no reference
        Metric("learner/grad_norm", "gradient norm", title="Gradient norm", note="Before clipping.",
            figure="gradient_norm", look="smooth", compared="gradient_norm"),
        Metric("learner/sampler_gap_mean", "mean", title="Gap between sampler and learner",
            note="Absolute difference of the log-probabilities that sampler and learner give to a token, in nats.",
            better="lower", figure="sampler_gap", look="smooth", compared="sampler_gap"),
        Metric("learner/sampler_gap_max", "largest", figure="sampler_gap_max", color=1, look="smooth"),
        Metric("staleness/mean", "tokens", figure="staleness", look="smooth"),
        Metric("staleness/max", "oldest group", figure="staleness", color=1, look="smooth"),
        Metric("staleness/older/ratio", "older policies", unit="percent", figure="corrected", look="smooth"),
        Metric("learner/corrected_ratio", "corrected", unit="percent", figure="corrected", color=1, look="smooth",
            silent=0.0),
    ),
    panels=(
        (
            Figure("ratio", title="Probability ratio ρ", y_low=None,
                note="Mean, with the band from the smallest to the largest token. Exactly 1 when each batch is used "
                     "once."),
        ),
        (Figure("clip"),),
        (
            Figure("sampler_gap"),
            Figure("sampler_gap_max", title="Its largest value", compact=True, note="Of any token of the step."),
        ),
        (
            Figure("staleness", title="Staleness",
                note="Asynchronous runs: training steps between the policy that sampled and the learner, mean over "
                     "tokens, and the most of any group since it began."),
            Figure("corrected", title="Stale and corrected tokens", compact=True,
                note="Share of the tokens that older policies sampled, and of those whose weight the correction "
                     "capped or masked."),
        ),
        (Figure("gradient_norm"),),
        (Figure("kl"),),
    ),
)

TIME = Group(
    key="time",
    title="Time",
    metrics=(
        Metric("time/step", unit="seconds", title="Time of a step", note="Wall clock of a whole training step.",
            better="lower", compared="step_time"),
        Metric("time/rollout", "rollout t_R", unit="seconds", figure="step_time"),
        Metric("time/train", "training t_T", unit="seconds", figure="step_time", color=1),
        Metric("time/other", "other t_O", unit="seconds", figure="step_time", color=4),
        Metric("time/rollout", unit="percent", title="Share of generation in a step",
            note="Wall clock of the rollout over that of the step.", share_of="time/step", compared="rollout_share",
            y_high=1.0),
        Metric("tokens/per_second", "tokens per second", title="Tokens per second",
            note="Sampled response tokens over the step's wall clock.", better="higher", figure="throughput", color=2,
            look="smooth", compared="throughput"),
        Metric("time/longest_response", "longest response", unit="percent", figure="longest_response", color=3,
            look="smooth", share_of="time/rollout"),
        Metric("verify/seconds", "work", unit="seconds", figure="judging", color=2, look="smooth"),
        Metric("time/verify_waited", "waited for", unit="seconds", figure="judging", color=1, look="smooth"),
        Metric("idle/learner/seconds", "learner", unit="seconds", figure="idle", look="smooth"),
        Metric("idle/engine/seconds", "engine", unit="seconds", figure="idle", color=1, look="smooth"),
    ),
    panels=(
        (
            Figure("step_time", title="Time of a step", stacked=True,
                note="The three parts add up to the step's wall clock; work that overlaps is counted once."),
            Figure("longest_response", title="Longest response's share of the rollout", compact=True, y_high=1.0,
                note="Seconds of the response that took longest over t_R: near 100 %, more accelerators would not "
                     "shorten it."),
        ),
        (
            Figure("throughput", compact=True),
            Figure("judging", title="Judging", compact=True,
                note="Seconds of all verifier workers together, and how long the step waited for them after "
                     "generation."),
        ),
        (
            Figure("idle", title="Waiting",
                note="Asynchronous runs: seconds of the step in which the learner waited for rollouts and verdicts, "
                     "and in which the engine generated nothing."),
        ),
    ),
)

METRICS = (LEARNING, POLICY, TIME)
# fmt: on
