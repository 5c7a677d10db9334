"""Draw the curves of docs/guides/preflight-and-explain.md: ``python -m tools.symptom_figures``.

The runs are those of ``tests/unit/training/test_health.py``: the quickstart's task with the harmful settings that
``tests/unit/training/recorded_health_runs.json`` names. A dashed line marks the step at which the rule fired.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from magicrl.records import StepMetrics
from magicrl.reporting.charts import Chart, Series, Unit, draw
from magicrl.training.health import HealthMonitor

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "unit" / "training" / "recorded_health_runs.json"
RUNS: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
FOLDER = ROOT / "docs" / "figures" / "symptoms"

ACCURACY = ("train/accuracy/mean", "accuracy")
FINISHED = ("train/accuracy_nontruncated/mean", "accuracy of what was not cut")
CUT = ("train/truncation/ratio", "cut at T")
ENTROPY, SAMPLED = ("entropy/exact/mean", "entropy"), ("entropy/sampled/mean", "sampled estimate")
CLIPPED = ("learner/clip_ratio", "clipped tokens")
REJECTED = ("groups/rejected/ratio", "rejected groups")
GAP = ("learner/sampler_gap_mean", "gap of sampler and learner")
NOT_JUDGED = ("train/not_judged/ratio", "not judged")
LENGTH = ("length/mean", "mean length")

# rule: title, unit, lines
FIGURES: dict[str, tuple[str, Unit, tuple[tuple[str, str], ...]]] = {
    "entropy_collapse": ("Entropy, nats per token", "number", (ENTROPY,)),
    "entropy_growth": ("Entropy, nats per token", "number", (ENTROPY,)),
    "early_plateau": ("Training accuracy", "percent", (ACCURACY,)),
    "groups_rejected": ("Rejected groups, and accuracy", "percent", (REJECTED, ACCURACY, CUT)),
    "answers_not_judged": ("Responses that were not judged", "percent", (NOT_JUDGED,)),
    "truncation_stuck": ("Cut responses, and accuracy", "percent", (CUT, ACCURACY)),
    "response_shortening": ("Accuracy, of all and of what was not cut", "percent", (ACCURACY, FINISHED)),
    "length_explosion": ("Mean length, tokens", "number", (LENGTH,)),
    "clip_share_high": ("Clipped tokens", "percent", (CLIPPED,)),
    "clip_never_acts": ("Clipped tokens, and accuracy", "percent", (CLIPPED, ACCURACY)),
    "sampler_gap": ("Gap of sampler and learner, nats per token", "number", (GAP,)),
    "entropy_estimators_disagree": ("Entropy, nats per token", "number", (ENTROPY, SAMPLED)),
}


def picture(rule: str) -> str:
    """Return the curve of the rule's run as an SVG file, with a mark where the rule fired first."""
    run = RUNS[rule]
    rows = [
        StepMetrics(step=step, stage=stage, values={key: values[i] for key, values in run["metrics"].items()})
        for i, (step, stage) in enumerate(zip(run["step"], run["stage"], strict=True))
    ]
    monitor = HealthMonitor()
    spoke = next(finding["step"] for row in rows for finding in monitor.observe(row) if finding["rule"] == rule)
    title, unit, lines = FIGURES[rule]
    series = tuple(
        Series(
            label=label,
            color=slot,
            points=tuple(
                (float(row.step), float(row.values[key] or 0.0)) for row in rows if row.values[key] is not None
            ),
        )
        for slot, (key, label) in enumerate(lines)
    )
    high = 1.0 if unit == "percent" and rule != "clip_share_high" else None
    marks = ((float(spoke), "told here"),)
    chart = Chart(key=rule, title=title, series=series, unit=unit, y_low=0.0, y_high=high, marks=marks, compact=True)
    return str(draw(chart, alone=True))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        (FOLDER / f"{name}.svg").write_text(picture(name))
