"""The report's figures 6, 8 and 13, drawn from this study's runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from magicrl.experiments.claims import Runs
from magicrl.experiments.costs import Found, mean_text
from magicrl.experiments.measures import Result, parse_measure
from magicrl.reporting.charts import Chart, Points, Series, Unit
from magicrl.reporting.curves import arm_curve, smoothed
from magicrl.reporting.svg import draw

LIMITS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Response limits of Fig. 8, tokens."""
LEAST_ENTROPY = 0.003
"""Drawn in place of less, nats a token: the axis is logarithmic."""
ENTROPY_ARMS = ("0", "6", "8", "9")
"""Ablations whose arms make Fig. 13: one task, one start a seed, entropy moved in different ways."""


def curve_series(arm: str, slot: int, rows: Sequence[Result], name: str) -> Series:
    """An arm's curve: the mean over its runs, and a band from the lowest to the highest where there are several."""
    curve = arm_curve([smoothed(_points(row, name), ()) for row in rows])
    return Series(
        label=arm,
        points=tuple((p.step, p.mean) for p in curve.points),
        band=tuple((p.step, p.low, p.high) for p in curve.points) if len(rows) > 1 else (),
        color=slot % 6,
    )


def _points(row: Result, name: str) -> Points:
    values: Sequence[float | None] = row["curves"].get(name, ())
    return tuple((float(step), value) for step, value in enumerate(values, start=1) if value is not None)


def curve_chart(runs: Runs, key: str, name: str, title: str, unit: Unit) -> Chart | None:
    """One curve of all arms; None where no run has it or all of it is 0."""
    lines = [curve_series(arm, slot, list(by_seed.values()), name) for slot, (arm, by_seed) in enumerate(runs.items())]
    drawn = tuple(line for line in lines if line.points)
    if not any(y for line in drawn for _, y in line.points):
        return None
    return Chart(key=key, title=title, series=drawn, unit=unit, y_low=0.0)


def write_chart(chart: Chart, folder: Path) -> str:
    """Write the chart as SVG beside the page; returns the Markdown that shows it."""
    (folder / f"{chart.key}.svg").write_text(str(draw(chart, alone=True)))
    return f"![{chart.title}]({chart.key}.svg)\n"


def figures_page(found: Found, folder: Path) -> str:
    """The page of redrawn figures; those without results are left out."""
    parts = [
        "# The report's figures, from our runs\n",
        "Lines are means over seeds, bands reach from the lowest seed to the highest.\n",
    ]
    if runs := found.get("3"):
        parts += _figure_6(runs, folder)
    if runs := found.get("2"):
        parts += _figure_8(runs, folder)
    parts += _figure_13(found, folder)
    return "\n".join(parts)


def _figure_6(runs: Runs, folder: Path) -> list[str]:
    wanted: tuple[tuple[str, str], ...] = (
        ("accuracy", "Training accuracy"),
        ("accuracy_nontruncated", "Accuracy of the responses that were not cut"),
        ("truncation", "Share of cut responses"),
    )
    charts = [curve_chart(runs, f"figure-6-{name}", name, title, "percent") for name, title in wanted]
    drawn = [write_chart(chart, folder) for chart in charts if chart is not None]
    text = (
        "## Figure 6: what a short limit does at first\n\n"
        "Ablation 3's arms at T = 48. Accuracy is the product of the share that was not cut and the accuracy of those, "
        "an identity; what the runs tell is which factor carried the gain. In the table each gain is the difference of "
        "logarithms from the start; the two columns add up to the gain.\n"
    )
    return [text, *drawn, _factors(runs, 20) + "\n"]


def _factors(runs: Runs, step: int) -> str:
    lines = [
        f"| arm | accuracy at the start | at step {step} | log gain by fewer cuts | by right answers, uncut |",
        "|---|---|---|---|---|",
    ]
    for arm, rows in runs.items():
        cells: list[list[float]] = [[], [], [], []]
        for row in rows.values():
            start, later = (_two_factors(row, place) for place in ("start", str(step)))
            kept, right = (math.log(b / a) if a > 0 and b > 0 else math.nan for a, b in zip(start, later, strict=True))
            for cell, value in zip(cells, (start[0] * start[1], later[0] * later[1], kept, right), strict=True):
                cell.append(value)
        lines.append(f"| {arm} | " + " | ".join(mean_text(cell, 2) for cell in cells) + " |")
    return "\n".join(lines)


def _two_factors(row: Result, place: str) -> tuple[float, float]:
    kept = 1.0 - parse_measure(f"truncation@{place}")(row)
    return kept, parse_measure(f"accuracy_nontruncated@{place}")(row)


def _figure_8(runs: Runs, folder: Path) -> list[str]:
    series: list[Series] = []
    first = next(iter(runs.values()))
    curves: dict[str, list[Mapping[int, float]]] = {"start": [limited(row, "before") for row in first.values()]}
    curves |= {arm: [limited(row, "after") for row in rows.values()] for arm, rows in runs.items()}
    for slot, (label, found) in enumerate(curves.items()):
        known = [one for one in found if one]
        if not known:
            continue
        band = [(float(x), [one[x] for one in known]) for x in LIMITS]
        series.append(
            Series(
                label=label,
                points=tuple((x, sum(v) / len(v)) for x, v in band),
                band=tuple((x, min(v), max(v)) for x, v in band),
                color=slot,
                dots=True,
            )
        )
    if not series:
        return []
    chart = Chart(
        key="figure-8",
        title="Accuracy against the response limit",
        series=tuple(series),
        unit="percent",
        y_low=0.0,
        x_name="response limit, tokens",
        x_word="limit",
        x_log=True,
        x_ticks=tuple(float(x) for x in LIMITS),
    )
    text = (
        "## Figure 8: accuracy against the response limit\n\n"
        "Ablation 2's models after training, one response to each test problem at temperature 1 and the long limit. A "
        "response that is longer than a limit counts as wrong there: sampling goes from left to right, so that a "
        "shorter limit would have cut that very response.\n"
    )
    return [text, write_chart(chart, folder)]


def limited(row: Result, name: str) -> dict[int, float]:
    """Accuracy by response limit, from the lengths of the right responses; empty where none were recorded."""
    lengths = row.get("lengths", {}).get(name)
    if not lengths:
        return {}
    return {limit: sum(n <= limit for n in lengths["right"]) / lengths["responses"] for limit in LIMITS}


def _figure_13(found: Found, folder: Path) -> list[str]:
    series: list[Series] = []
    for ablation in ENTROPY_ARMS:
        points = sorted(
            (parse_measure("entropy@late")(row), parse_measure("test@1.0")(row))
            for arm, rows in found.get(ablation, {}).items()
            for row in rows.values()
            if "other data" not in arm
        )
        finite = tuple((max(x, LEAST_ENTROPY), y) for x, y in points if math.isfinite(x) and math.isfinite(y))
        if finite:
            series.append(Series(label=f"ablation {ablation}", points=finite, color=len(series), style="marks"))
    if not series:
        return []
    chart = Chart(
        key="figure-13",
        title="Test accuracy against entropy in the end",
        series=tuple(series),
        unit="percent",
        y_low=0.0,
        x_name="entropy over the last tenth, nats a token",
        x_word="entropy",
        x_log=True,
        x_ticks=(0.03, 0.1, 0.3, 1.0, 3.0),
        x_whole=False,
    )
    text = (
        "## Figure 13: entropy and test accuracy\n\n"
        "A mark a run, of the ablations that move entropy on one task by the start, by SGD steps, by a fixed "
        "coefficient and by control. The report's figure has collapse and low accuracy together; whether "
        "more entropy is better is another question.\n"
    )
    return [text, write_chart(chart, folder), _correlations(series)]


def _correlations(series: Sequence[Series]) -> str:
    lines = ["| runs of | number | rank correlation of entropy and accuracy |", "|---|---|---|"]
    pooled = [point for one in series for point in one.points]
    for label, points in [*((s.label, s.points) for s in series), ("all", pooled)]:
        lines.append(f"| {label} | {len(points)} | {spearman(points):.2f} |")
    return "\n".join(lines) + "\n"


def spearman(points: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of x and y; ties share their mean rank; 0 where one of them does not vary.

    Example:
        >>> spearman([(1, 10), (2, 30), (3, 20)])
        0.5
    """
    import numpy as np
    from scipy.stats import rankdata

    ranks = [rankdata([point[i] for point in points]) for i in (0, 1)]
    if len(points) < 2 or any(float(np.ptp(r)) == 0 for r in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
