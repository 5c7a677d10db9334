"""Each health rule on recorded and synthetic runs that have the symptom and on runs that do not; the episodes.

The recorded ones are real runs of the quickstart's task that were made to fail on purpose; each names the settings
that caused it. The synthetic ones show curves that look similar and are healthy.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magicrl.records import StepMetrics
from magicrl.training.diagnosis import ANY_JUDGING, Judging
from magicrl.training.health import KEPT, RULES, HealthMonitor, HealthRule

Values = dict[str, float | int | str | None]
Curve = Callable[[int], float]


def run(steps: int, stage_starts: tuple[int, ...] = (1,), **curves: Curve) -> list[StepMetrics]:
    """Return recorded metrics: one curve per metric (``area__name__stat``), a function of the step from 1."""
    rows: list[StepMetrics] = []
    for step in range(1, steps + 1):
        stage = sum(start <= step for start in stage_starts) - 1
        values: Values = {name.replace("__", "/"): curve(step) for name, curve in curves.items()}
        rows.append(StepMetrics(step=step, stage=stage, values=values))
    return rows


def noisy(curve: Curve, spread: float, seed: int = 0) -> Curve:
    rng = random.Random(seed)
    return lambda step: curve(step) + rng.gauss(0, spread)


def ramp(start: float, end: float, steps: int, first: int = 1) -> Curve:
    """Return a curve from ``start`` to ``end`` over ``steps`` steps, then flat."""
    return lambda step: start + (end - start) * min(1.0, max(0.0, (step - first) / steps))


def flat(value: float) -> Curve:
    return lambda step: value


def good_run() -> list[StepMetrics]:
    """Return a healthy run: two stages, entropy down to its target and kept there, one SGD step."""
    entropy = noisy(ramp(0.6, 0.2, 40), 0.01)
    return run(
        120,
        (1, 61),
        train__accuracy__mean=noisy(ramp(0.45, 0.95, 90), 0.04, 1),
        train__accuracy_nontruncated__mean=noisy(ramp(0.5, 0.96, 90), 0.04, 2),
        train__truncation__ratio=lambda s: 0.3 * math.exp(-s / 10) if s < 61 else 0.02,
        entropy__exact__mean=entropy,
        entropy__sampled__mean=noisy(ramp(0.6, 0.2, 40), 0.03, 3),
        entropy__target=flat(0.2),
        length__mean=ramp(10, 24, 100),
        groups__rejected__ratio=noisy(ramp(0.2, 0.6, 100), 0.05, 4),
        learner__clip_ratio=flat(0.0),
        learner__sgd_steps=flat(1),
        learner__sampler_gap_mean=flat(0.004),
    )


SICK: dict[str, list[StepMetrics]] = {
    "entropy_collapse": run(60, entropy__exact__mean=ramp(0.4, 0.02, 40), train__accuracy__mean=noisy(flat(0.6), 0.03)),
    "entropy_growth": run(60, entropy__exact__mean=lambda s: 0.3 * 1.05**s, entropy__target=flat(0.2)),
    "response_shortening": run(
        40,
        train__accuracy__mean=noisy(ramp(0.3, 0.5, 30), 0.02),
        train__accuracy_nontruncated__mean=noisy(ramp(0.7, 0.55, 30), 0.02, 1),
    ),
    "early_plateau": run(120, train__accuracy__mean=noisy(ramp(0.3, 0.5, 30), 0.02)),
    "groups_rejected": run(
        40,
        groups__rejected__ratio=ramp(0.5, 0.95, 20),
        groups__sampled=flat(8),
        train__accuracy__mean=ramp(0.6, 0.98, 20),
        train__truncation__ratio=flat(0.0),
        train__answered__ratio=flat(0.99),
        stage__max_tokens=flat(64),
    ),
    "answers_not_judged": run(30, train__not_judged__ratio=ramp(0.0, 0.4, 20)),
    "clip_never_acts": run(30, learner__clip_ratio=flat(0.0), learner__sgd_steps=flat(4)),
    "clip_share_high": run(30, learner__clip_ratio=ramp(0.01, 0.3, 20), learner__ratio_max=flat(1.3)),
    "sampler_gap": run(30, learner__sampler_gap_mean=ramp(0.01, 0.2, 20)),
    "entropy_estimators_disagree": run(
        30, entropy__exact__mean=flat(0.3), entropy__sampled__mean=noisy(flat(0.36), 0.02)
    ),
    "length_explosion": run(40, length__mean=ramp(30, 100, 30), train__accuracy__mean=noisy(flat(0.5), 0.01)),
    "truncation_stuck": run(50, train__truncation__ratio=noisy(flat(0.5), 0.02)),
}


RECORDED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("recorded_health_runs.json").read_text())
WELL = [name for name in RECORDED if name.startswith("well: ")]


def recorded(name: str) -> list[StepMetrics]:
    """Return a run of ``recorded_health_runs.json``."""
    entry = RECORDED[name]
    return [
        StepMetrics(step=step, stage=stage, values={key: column[i] for key, column in entry["metrics"].items()})
        for i, (step, stage) in enumerate(zip(entry["step"], entry["stage"], strict=True))
    ]


def findings_of(rows: list[StepMetrics]) -> list[dict[str, Any]]:
    monitor = HealthMonitor()
    return [finding for row in rows for finding in monitor.observe(row)]


def names(rows: list[StepMetrics]) -> list[str]:
    return [finding["rule"] for finding in findings_of(rows)]


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_rule_speaks_on_a_run_that_has_its_sign(rule: str) -> None:
    findings = [finding for finding in findings_of(SICK[rule]) if finding["rule"] == rule]
    assert len(findings) == 1, "once an episode"
    assert any(character.isdigit() for character in findings[0]["message"]), "the message names numbers"
    assert findings[0]["remedy"]


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_rule_speaks_on_a_recorded_run_that_has_its_sign(rule: str) -> None:
    assert rule in names(recorded(rule)), RECORDED[rule]["settings"]


@pytest.mark.parametrize("run", WELL)
def test_a_recorded_run_that_is_well_has_no_finding(run: str) -> None:
    assert len(recorded(run)) >= 50
    assert names(recorded(run)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_reads_only_metrics_that_the_monitor_stores(rule: HealthRule) -> None:
    """Otherwise it would work only in a report."""
    read: set[str] = set()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    for rows in (*SICK.values(), good_run()):
        watched = [StepMetrics(step=row.step, stage=row.stage, values=Watched(row.values)) for row in rows]
        for end in range(1, len(rows) + 1):
            rule.check(watched[:end])
    assert read <= set(KEPT)
    assert read, "it reads something"
    assert rule.sign


def test_a_good_run_has_no_finding() -> None:
    assert names(good_run()) == []


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        # certainty on a solved task is not collapse
        ("entropy_collapse", run(60, entropy__exact__mean=ramp(0.4, 0.02, 40), train__accuracy__mean=flat(0.99))),
        # low only after a long run
        ("entropy_collapse", run(200, entropy__exact__mean=ramp(0.4, 0.02, 190), train__accuracy__mean=flat(0.6))),
        # an adaptive bonus that raises a low initial value to its target
        ("entropy_growth", run(60, entropy__exact__mean=ramp(0.05, 0.2, 30), entropy__target=flat(0.2))),
        # a doubling long ago is reported once, at that time; falling or steady entropy never
        ("entropy_growth", run(60, entropy__exact__mean=noisy(flat(0.7), 0.05), entropy__target=flat(0.1))),
        # both accuracies rise
        (
            "response_shortening",
            run(40, train__accuracy__mean=ramp(0.3, 0.5, 30), train__accuracy_nontruncated__mean=ramp(0.6, 0.7, 30)),
        ),
        # still rising, under noise; flat in the second stage only; flat at the top
        ("early_plateau", run(200, train__accuracy__mean=noisy(ramp(0.3, 0.6, 200), 0.035))),
        ("early_plateau", run(140, (1, 41), train__accuracy__mean=ramp(0.3, 0.6, 40))),
        ("early_plateau", run(120, train__accuracy__mean=ramp(0.3, 0.97, 30))),
        ("groups_rejected", run(40, groups__rejected__ratio=flat(0.6))),
        # a teacher gives these groups a gradient
        (
            "groups_rejected",
            run(
                40,
                groups__rejected__ratio=ramp(0.5, 0.95, 20),
                groups__sampled=flat(8),
                train__accuracy__mean=ramp(0.6, 0.98, 20),
                train__truncation__ratio=flat(0.0),
                train__answered__ratio=flat(0.99),
                stage__max_tokens=flat(64),
                learner__teacher_kl=flat(0.1),
            ),
        ),
        # most responses have no verdict, which is the cause
        (
            "groups_rejected",
            run(
                40,
                groups__rejected__ratio=flat(1.0),
                groups__sampled=flat(8),
                train__accuracy__mean=flat(0.0),
                train__truncation__ratio=flat(0.1),
                train__not_judged__ratio=flat(0.9),
                stage__max_tokens=flat(64),
            ),
        ),
        # a single step without any advantage
        (
            "groups_rejected",
            run(
                40,
                groups__rejected__ratio=lambda s: 1.0 if s == 20 else 0.6,
                groups__sampled=flat(8),
                train__accuracy__mean=flat(0.5),
                train__truncation__ratio=flat(0.0),
                stage__max_tokens=flat(64),
            ),
        ),
        ("answers_not_judged", run(40, train__not_judged__ratio=noisy(flat(0.05), 0.02))),
        ("answers_not_judged", run(2, train__not_judged__ratio=flat(0.4))),
        # on-policy: the ratio is exactly 1, nothing can be clipped
        ("clip_never_acts", run(30, learner__clip_ratio=flat(0.0), learner__sgd_steps=flat(1))),
        ("clip_never_acts", run(30, learner__clip_ratio=flat(0.001), learner__sgd_steps=flat(4))),
        (
            "clip_never_acts",
            run(30, learner__clip_ratio=flat(0.0), learner__sgd_steps=flat(4), learner__ratio_max=flat(1.5)),
        ),
        ("clip_share_high", run(30, learner__clip_ratio=flat(0.02), learner__sgd_steps=flat(4))),
        # gspo's bounds are narrow
        ("clip_share_high", run(30, learner__clip_ratio=flat(0.3), learner__ratio_max=flat(1.001))),
        ("sampler_gap", run(30, learner__sampler_gap_mean=flat(0.05))),
        (
            "entropy_estimators_disagree",
            run(30, entropy__exact__mean=flat(0.3), entropy__sampled__mean=noisy(flat(0.3), 0.05)),
        ),
        # longer and better
        ("length_explosion", run(40, length__mean=ramp(10, 40, 30), train__accuracy__mean=ramp(0.4, 0.8, 30))),
        # lengths jump at the stage change, not within the stage
        (
            "length_explosion",
            run(40, (1, 21), length__mean=lambda s: 30 if s < 21 else 100, train__accuracy__mean=flat(0.5)),
        ),
        ("truncation_stuck", run(50, train__truncation__ratio=ramp(0.6, 0.25, 50))),
        ("truncation_stuck", run(50, train__truncation__ratio=flat(0.2))),
    ],
)
def test_each_rule_is_quiet_on_a_run_that_looks_alike(rule: str, rows: list[StepMetrics]) -> None:
    assert rule not in names(rows)


def test_entropy_that_triples_within_ten_steps_and_stays_is_told() -> None:
    findings = findings_of(run(100, entropy__exact__mean=ramp(0.28, 0.9, 10), entropy__target=flat(0.1)))
    assert [f["rule"] for f in findings] == ["entropy_growth"]
    assert findings[0]["step"] <= 12


def test_a_first_stage_of_forty_flat_steps_is_a_plateau() -> None:
    assert names(run(100, (1, 41), train__accuracy__mean=noisy(flat(0.1), 0.012))) == ["early_plateau"]


def test_rejected_groups_say_why_and_what_helps_with_this_verifier() -> None:
    def remedy(accuracy: float, truncated: float, answered: float, judging: Judging = ANY_JUDGING) -> str:
        monitor = HealthMonitor(judging)
        series = run(
            3,
            groups__rejected__ratio=flat(1.0),
            groups__sampled=flat(8),
            train__accuracy__mean=flat(accuracy),
            train__truncation__ratio=flat(truncated),
            train__answered__ratio=flat(answered),
            stage__max_tokens=flat(64),
        )
        (finding,) = [finding for row in series for finding in monitor.observe(row)]
        assert finding["step"] == 3, "three empty steps are enough"
        return finding["remedy"]

    assert "solved already" in remedy(1.0, 0.0, 1.0)
    assert "easier problems" in remedy(0.0, 0.1, 0.9)
    assert "T = 64: raise max_tokens" in remedy(0.0, 0.8, 0.1)
    assert 'verifier.extract = "lenient"' in remedy(0.0, 0.1, 0.02, Judging("box", "auto"))
    assert "lenient" not in remedy(0.0, 0.1, 0.02, Judging("lenient", "auto"))


def test_a_finding_comes_back_only_after_a_quiet_spell() -> None:
    def gap(step: int) -> float:
        return 0.5 if step in range(10, 20) or step in range(24, 30) or step in range(60, 70) else 0.0

    steps = [finding["step"] for finding in findings_of(run(80, learner__sampler_gap_mean=gap))]
    assert len(steps) == 2, "10-19 and 24-29 are one episode, 60-69 is another"
    assert steps[0] < 20
    assert steps[1] >= 60


@pytest.mark.parametrize("cut", [1, 12, 33, 47])
def test_a_restored_monitor_tells_the_same(cut: int) -> None:
    rows = [
        StepMetrics(step=a.step, stage=a.stage, values={**a.values, **b.values})
        for a, b in zip(SICK["length_explosion"], SICK["truncation_stuck"][:40], strict=True)
    ] + run(20, learner__sampler_gap_mean=flat(0.5))
    whole = findings_of(rows)
    first = HealthMonitor()
    told = [finding for row in rows[:cut] for finding in first.observe(row)]
    second = HealthMonitor()
    second.restore(json.loads(json.dumps(first.state())))
    told += [finding for row in rows[cut:] for finding in second.observe(row)]
    assert told == whole
    assert len(whole) >= 2


def test_missing_and_non_finite_metrics_keep_the_rules_quiet() -> None:
    rows = [
        StepMetrics(
            step=i, stage=0, values={"train/accuracy/mean": None, "entropy/exact/mean": math.nan, "length/mean": "x"}
        )
        for i in range(1, 60)
    ]
    assert findings_of(rows) == []
    assert findings_of([StepMetrics(step=i, stage=0, values={}) for i in range(1, 60)]) == []


def test_sampled_entropy_stands_in_for_the_exact_one() -> None:
    rows = run(60, entropy__sampled__mean=ramp(0.4, 0.02, 40), train__accuracy__mean=flat(0.5))
    assert "entropy_collapse" in names(rows)


def test_a_finding_is_a_line_of_the_event_log() -> None:
    finding = findings_of(SICK["sampler_gap"])[0]
    event = json.loads(json.dumps(finding))
    assert event["kind"] == "health"
    assert (event["rule"], event["severity"], event["step"]) == ("sampler_gap", "warning", finding["step"])


def test_unjudged_answers_of_the_first_steps() -> None:
    check = next(rule.check for rule in RULES if rule.name == "answers_not_judged")
    assert check(run(1, train__not_judged__ratio=flat(0.6))) == (
        "60% of the responses of the last 1 step could not be judged"
    )
