"""Pages of a study: one per ablation, an index, settings, questions, costs and figures.

The page of costs compares configurations at equal sampled tokens, SGD steps and wall clock, and by planned hours on
the report's GPUs. At equal steps some configurations cost more than others. They are therefore compared where each has
spent as much as the one that spent least in all, and by the cost of reaching an accuracy.

The page of figures has the report's figures 6, 8 and 13, drawn from this study's runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from magicrl.planning.hardware import load_hardware
from magicrl.planning.planner import Options, make_plan
from magicrl.planning.shapes import load_shape
from magicrl.reporting.charts import Chart, IntervalRow, Points, Series, Unit, draw, interval_file
from magicrl.reporting.curves import smoothed, variant_curve
from magicrl.reporting.read_folders import Interval
from magicrl.training.diagnosis import Measure
from studies.advice import advice_page, check_advice, fill, load_advice
from studies.claims import (
    WORDS,
    Runs,
    Verdict,
    decide,
    numbers_of,
    paired_values,
    shown_premise,
    starts_of,
    students,
    word_of,
)
from studies.definition import SUITES, Ablation, Arm, Claim, Result, Scale, Suite, parse_measure, shipped_ablations
from studies.results import STARTS_FILE
from studies.runs import by_arm, plan_runs, read_screened
from studies.screening import starts_page

COSTS: tuple[tuple[str, str], ...] = (
    ("tokens", "sampled tokens"),
    ("updates", "SGD steps"),
    ("seconds", "seconds of steps"),
)
GPU = "H800-80G"
Found: TypeAlias = Mapping[str, Runs]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """Return mean and range as text; empty if nothing is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    mean = sum(finite) / len(finite)
    if abs(mean) >= 10:
        return f"{mean:,.0f} ({min(finite):,.0f}-{max(finite):,.0f})"
    return f"{mean:.{digits}f} ({min(finite):.{digits}f}-{max(finite):.{digits}f})"


def _measured(rows: Mapping[tuple[int, int], Result], measure: str) -> list[float]:
    function = parse_measure(measure)
    return [function(row) for row in rows.values()]


def equal_cost_table(runs: Runs, curve: str, bound: float) -> str:
    """Return one row per configuration: accuracy at equal steps and equal cost, then the cost of reaching ``bound``.

    The common amount of a cost is the least that a run has spent, rounded down to two digits.
    """
    rows_of_all = [row for rows in runs.values() for row in rows.values()]
    costs = [(cost, words) for cost, words in COSTS if all(row["curves"].get(cost) for row in rows_of_all)]
    amounts = {cost: _common(rows_of_all, cost) for cost, _ in costs}
    head = ["arm", "at the last step"]
    head += [f"at {amounts[cost]:,} {words}" for cost, words in costs]
    head += [f"{words} to {bound:.0%}" for _, words in costs]
    table: list[list[str]] = []
    for arm, rows in runs.items():
        cells = [arm, mean_text(_measured(rows, f"{curve}@late"))]
        cells += [mean_text(_measured(rows, f"{curve}@{cost}:{amounts[cost]}")) for cost, _ in costs]
        cells += [_reached(rows, cost, curve, bound) for cost, _ in costs]
        table.append(cells)
    return markdown_table(head, table)


def _common(rows: Sequence[Result], cost: str) -> int:
    spent = min(float(row["curves"][cost][-1]) for row in rows)
    unit = 10 ** max(0, int(math.log10(max(spent, 1))) - 1)
    return int(spent // unit * unit)


def _reached(rows: Mapping[tuple[int, int], Result], cost: str, curve: str, bound: float) -> str:
    """Return the cost of the runs that reached the bound, and their number."""
    best, took = _measured(rows, f"{curve}@max"), _measured(rows, f"{cost}:{curve}>{bound}")
    got = [value for value, top in zip(took, best, strict=True) if top > bound]
    if len(got) == len(rows):
        return mean_text(got)
    return f"{len(got)} of {len(rows)} runs" + (f": {mean_text(got)}" if got else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Counterpart of a configuration at the report's scale."""

    name: str  # name of the configuration
    gpus: int  # number of GPUs
    seconds: float  # per step of its last stage, by ``magicrl plan``
    hours: float  # for all its steps


def planned_arms(ablation: Ablation, gpus: Sequence[int]) -> list[Planned]:
    """Return step times of the ablation's configurations at scale ``paper``, each on its number of GPUs."""
    found: list[Planned] = []
    for run, number in zip(plan_runs([ablation], "paper", [0]), gpus, strict=True):
        assert run.config.start.model is not None, "the report's arms start from a published model"
        plan = make_plan(run.config, load_shape(run.config.start.model), load_hardware(GPU), Options(gpus=number))
        name = next(arm for owner, arm in run.arms if owner == ablation.id)
        found.append(Planned(name=name, gpus=number, seconds=plan.stages[-1].seconds, hours=plan.hours))
    return found


def equal_time_table(runs: Runs, planned: Sequence[Planned], arm_of: Callable[[int], str]) -> str:
    """Compare our configurations with the report's: accuracy after equal time, on GPUs that grow with the batch.

    Args:
        runs: runs of the configurations at scale tiny.
        planned: the report's configurations, in the same order.
        arm_of: returns the name of our configuration by position.
    """
    arms = [arm_of(place) for place in range(len(planned))]
    least = min(
        len(row["curves"]["accuracy"]) * one.seconds
        for arm, one in zip(arms, planned, strict=True)
        for row in runs.get(arm, {}).values()
    )
    rows: list[list[object]] = []
    for arm, one in zip(arms, planned, strict=True):
        step = max(1, int(least / one.seconds))
        at = mean_text(_measured(runs.get(arm, {}), f"accuracy@{step}"))
        end = mean_text(_measured(runs.get(arm, {}), "test@1.0"))
        rows.append([arm, one.name, one.gpus, f"{one.seconds:.0f}", step, at, end])
    head = ("arm here", "the report's", "GPUs", "planned s per step", "steps in the same time", "accuracy there")
    return markdown_table([*head, "accuracy at the last step"], rows)


def costs_page(ablations: Sequence[Ablation], found: Found) -> str:
    """Return the page of comparisons at equal cost. Sections of ablations without results are left out."""
    known = {ablation.id: ablation for ablation in ablations}
    parts = [
        "# At equal cost\n",
        "Means over runs, the range in brackets. Accuracy is that of five training steps at temperature 1, on "
        "problems that were not seen before (an epoch is longer than a run). Seconds are wall clock on a shared "
        f"machine. Planned seconds are those of `magicrl plan` on {GPU} for the report's arms, lengths assumed as it "
        "assumes them.\n",
    ]
    for number, title in (("6", "On-policy against off-policy"), ("7", "Small batches on-policy")):
        if found.get(number):
            parts.append(f"## {title}\n\n{equal_cost_table(found[number], 'accuracy', 0.8)}\n")
    if found.get("2"):
        parts.append(
            f"## Stages against the long limit throughout\n\n{equal_cost_table(found['2'], 'accuracy', 0.9)}\n"
        )
        if "2" in known and "paper" in known["2"].scales:
            parts.append(_stage_hours(known["2"]))
    for number, title in (("11", "Rollout batch"), ("12", "Group size")):
        arms = list(found.get(number, {}))
        if number in known and len(arms) == 3 and "paper" in known[number].scales:
            order = [arm.name for arm in known[number].scales["tiny"].arms]
            table = equal_time_table(found[number], planned_arms(known[number], (64, 32, 16)), lambda i, o=order: o[i])
            parts.append(f"## {title}: GPUs that grow with it\n\n{table}\n")
            parts.append(f"At equal tokens, the GPUs the same:\n\n{equal_cost_table(found[number], 'accuracy', 0.8)}\n")
    return "\n".join(parts)


def _stage_hours(ablation: Ablation) -> str:
    number = len(ablation.scales["paper"].arms)
    rows = [(s.name, f"{s.seconds:.0f}", f"{s.hours:.1f}") for s in planned_arms(ablation, [64] * number)]
    table = markdown_table(("the report's arm", "planned s per step of its last stage", "hours"), rows)
    return f"The report's own arms on 64 GPUs, planned:\n\n{table}\n"


LIMITS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)  # response limits of Fig. 8 in tokens
LEAST_ENTROPY = 0.003  # smallest value drawn, in nats per token, because the axis is logarithmic
ENTROPY_ARMS = ("0", "6", "8", "9")
"""Ablations in Fig. 13: one task, one start per seed, entropy changed in different ways."""


def curve_series(arm: str, slot: int, rows: Sequence[Result], name: str) -> Series:
    """Return a configuration's curve: the mean over its runs, and with several runs a band from lowest to highest."""
    curve = variant_curve([smoothed(_points(row, name), ()) for row in rows])
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
    """Return a chart of one curve for all configurations; None if no run has it or it is always 0."""
    lines = [curve_series(arm, slot, list(by_seed.values()), name) for slot, (arm, by_seed) in enumerate(runs.items())]
    drawn = tuple(line for line in lines if line.points)
    if not any(y for line in drawn for _, y in line.points):
        return None
    return Chart(key=key, title=title, series=drawn, unit=unit, y_low=0.0)


def write_chart(chart: Chart, folder: Path) -> str:
    """Write the chart as SVG next to the page, and return the Markdown that shows it."""
    (folder / f"{chart.key}.svg").write_text(str(draw(chart, alone=True)))
    return f"![{chart.title}]({chart.key}.svg)\n"


def figures_page(found: Found, folder: Path) -> str:
    """Return the page of redrawn figures. Those without results are left out."""
    parts = [
        "# The report's figures, from our runs\n",
        "Lines are means over runs, bands reach from the lowest to the highest.\n",
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
    table: list[list[str]] = []
    for arm, rows in runs.items():
        cells: list[list[float]] = [[], [], [], []]
        for row in rows.values():
            start, later = (_two_factors(row, place) for place in ("start", str(step)))
            kept, right = (math.log(b / a) if a > 0 and b > 0 else math.nan for a, b in zip(start, later, strict=True))
            for cell, value in zip(cells, (start[0] * start[1], later[0] * later[1], kept, right), strict=True):
                cell.append(value)
        table.append([arm, *(mean_text(cell, 2) for cell in cells)])
    head = ("arm", "accuracy at the start", f"at step {step}", "log gain by fewer cuts", "by right answers, uncut")
    return markdown_table(head, table)


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
    """Return accuracy by response limit, from the lengths of right responses; empty if none were recorded."""
    lengths = (row.get("lengths") or {}).get(name)
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
    pooled = [point for one in series for point in one.points]
    runs = [*((s.label, s.points) for s in series), ("all", pooled)]
    rows = [(label, len(points), f"{spearman(points):.2f}") for label, points in runs]
    return markdown_table(("runs of", "number", "rank correlation of entropy and accuracy"), rows) + "\n"


def spearman(points: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of x and y. Ties share their mean rank; 0 if one of them does not vary.

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


ENDS: tuple[tuple[str, str], ...] = (
    ("test@0.0", "greedy"),
    ("test@0.6", "at 0.6"),
    ("test@1.0", "at 1"),
    ("test@best", "at its best temperature"),
    ("pass@4", "pass@4"),
    ("collapse:0.2@0.6", "share collapsed (0.2 nats before 60 %)"),
    ("entropy@late", "entropy in the end"),
)
"""Columns of a configuration; those that no run has are left out."""
FIGURES: tuple[tuple[str, str, Unit], ...] = (
    ("accuracy", "Training accuracy", "percent"),
    ("accuracy_nontruncated", "Training accuracy of responses that were not cut", "percent"),
    ("validation", "Validation accuracy", "percent"),
    ("entropy", "Entropy of the rollouts, nats a token", "number"),
    ("truncation", "Truncated responses", "percent"),
    ("length", "Mean response length, tokens", "number"),
    ("clip", "Tokens whose ratio is clipped", "percent"),
    ("kl", "KL to the reference", "number"),
)


_LINKS = (
    "[Which settings should I use?](settings.md) [What readers ask](questions.md) [At equal cost](costs.md) "
    "[The report's figures](figures.md)\n"
)
FIRST_ARM = "on-policy"
_POINTS = Measure(key="reward", name="points from on-policy", per_problem="reward_per_problem")


def distances(runs: Runs) -> dict[str, Verdict]:
    """Return each configuration's test accuracy minus that of on-policy in points, paired by start and seed."""
    found: dict[str, Verdict] = {}
    for arm in runs:
        if arm == FIRST_ARM:
            continue
        units, values = paired_values([(arm, "test@best"), (FIRST_ARM, "test@best")], runs)
        if len(set(units)) > 1:
            found[arm] = students(arm, units, 100 * (values[:, 0] - values[:, 1]), bar=0.0)
    return found


def distance_section(suite: Suite, ablations: Sequence[Ablation], found: Found, folder: Path) -> str:
    """Return how far each configuration ends from on-policy in each family, as a table and a figure of pairs.

    The pairs are ``Suite.beside``, or else each configuration with its counterpart with control.
    """
    by_family = {a.title.partition(", ")[2]: distances(found.get(a.id, {})) for a in ablations}
    arms = list(dict.fromkeys(arm for arms in by_family.values() for arm in arms))
    rows = [
        [
            arm,
            *(
                f"{v.effect:+.0f} ({v.low:+.0f} to {v.high:+.0f})" if (v := of.get(arm)) else ""
                for of in by_family.values()
            ),
        ]
        for arm in arms
    ]
    parts = [
        "## Distance from on-policy\n",
        "Points of test accuracy at the best temperature, with 95 % intervals over starts, from on-policy. "
        "Not corrected, without premises: the verdicts are below.\n",
        markdown_table(["arm", *by_family], rows) + "\n",
    ]
    pairs = [suite.beside] if suite.beside else [(arm, f"{arm}, control") for arm in arms]
    drawn = [
        IntervalRow(family if suite.beside else f"{one}, {family}", _interval(of[one]), _interval(of[other]))
        for one, other in pairs
        for family, of in by_family.items()
        if {one, other} <= of.keys()
    ]
    if drawn:
        words = suite.beside or ("without control", "with control")
        title = "Off-policy, and entropy control" if suite.beside is None else f"{words[0]} beside {words[1]}"
        (folder / "distances.svg").write_text(str(interval_file(title, drawn, words=words, measure=_POINTS)))
        parts.append(f"![{title}](distances.svg)\n")
    return "\n".join(parts)


def _interval(verdict: Verdict) -> Interval:
    return Interval(mean=verdict.effect, low=verdict.low, high=verdict.high)


def write_pages(
    ablations: Sequence[Ablation], scale: Scale, results: Mapping[str, Result], folder: Path, suite: str = "report"
) -> Path:
    """Write the pages of ``ablations`` from ``results`` into ``folder``, and return the path of the index.

    Args:
        ablations: all of them are corrected together, so a verdict depends on the whole list. Those without this scale
            are left out.
        scale: scale of the results.
        results: results by key.
        folder: receives ``index.md``, and a page with figures per ablation; for the report's suite also
            ``settings.md``, ``questions.md``, ``costs.md`` and ``figures.md``.
        suite: suite of the ablations, whose looks share the error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ablations = [ablation for ablation in ablations if scale in ablation.scales]
    found = by_arm(ablations, scale, results)
    claims = [claim for ablation in ablations for claim in ablation.claims]
    verdicts = {verdict.claim: verdict for verdict in decide(claims, found, looks=SUITES[suite].looks)}
    for ablation in ablations:
        page = ablation_page(ablation, scale, found.get(ablation.id, {}), verdicts, folder, suite)
        (folder / f"{ablation.id}.md").write_text(page)
    if suite == "report":
        advice = load_advice()
        check_advice(advice, [*shipped_ablations(), *ablations])
        for name in ("settings", "questions"):
            (folder / f"{name}.md").write_text(advice_page(name, ablations, verdicts, advice))
        (folder / "costs.md").write_text(costs_page(ablations, found))
        (folder / "figures.md").write_text(figures_page(found, folder))
    elif suite == "starts":
        (folder / "starts.md").write_text(starts_page(read_screened(STARTS_FILE)))
    index = folder / "index.md"
    used = [row for arms in found.values() for runs in arms.values() for row in runs.values()]
    links = _LINKS if suite == "report" else distance_section(SUITES[suite], ablations, found, folder)
    index.write_text(index_page(SUITES[suite], ablations, scale, verdicts, {row["key"]: row for row in used}, links))
    return index


def ablation_page(
    ablation: Ablation, scale: Scale, runs: Runs, verdicts: Mapping[str, Verdict], folder: Path, suite: str
) -> str:
    """Return the page of one ablation, and write its figures into ``folder``."""
    parts = [
        f"# {ablation.id}. {ablation.title}\n",
        f"{ablation.question}\n",
        f"The report: {ablation.says}\n",
        f"## Setting\n\n{_settings(ablation, scale, runs)}\n",
        f"## Verdicts\n\n{verdict_table(ablation.claims, verdicts)}\n",
    ]
    if ablation.notes:
        claims = {claim.id: claim for claim in ablation.claims}
        parts.append(f"## What it means\n\n{fill(ablation.notes, verdicts, claims)}\n")
    charts = [curve_chart(runs, f"{ablation.id}-{name}", name, title, unit) for name, title, unit in FIGURES]
    shown = [write_chart(chart, folder) for chart in charts if chart is not None]
    if shown:
        caption = "Lines are means over the runs that every step has, bands reach from the lowest to the highest.\n"
        parts.append("## Curves\n\n" + caption + "\n" + "\n".join(shown))
    parts.append(f"Reproduce: `python -m studies run {ablation.id} --suite {suite} --scale {scale}`\n")
    return "\n".join(parts)


def _settings(ablation: Ablation, scale: Scale, runs: Runs) -> str:
    definition = ablation.scales[scale]
    measured = [(parse_measure(name), title) for name, title in ENDS]
    ends = [e for e in measured if any(math.isfinite(e[0](row)) for rows in runs.values() for row in rows.values())]
    rows: list[list[object]] = []
    for arm in definition.arms:
        found = runs.get(arm.name, {})
        seconds = [row["cpu_seconds"] for row in found.values()]
        mean = f"{sum(seconds) / len(seconds):.0f}" if seconds else ""
        cells = (mean_text([measure(row) for row in found.values()]) for measure, _ in ends)
        rows.append([arm.name, _arm_settings(arm), len({start for start, _ in found}), len(found), mean, *cells])
    head = ("arm", "settings", "starts", "runs", "CPU s a run", *(title for _, title in ends))
    text = f"Base recipe `{definition.base}`{_listed(definition.set)}\n\n{markdown_table(head, rows)}"
    if "paper" in ablation.scales and scale != "paper":
        theirs = ablation.scales["paper"]
        table = markdown_table(("arm", "settings"), [(arm.name, _arm_settings(arm)) for arm in theirs.arms])
        text += f"\n\nThe report's: base recipe `{theirs.base}`{_listed(theirs.set)}\n\n{table}"
    return text


def _arm_settings(arm: Arm) -> str:
    after = f"goes on from {arm.after}; " if arm.after else ""
    return after + (", ".join(f"`{text}`" for text in arm.set) or "as the base")


def _listed(overrides: Sequence[str]) -> str:
    return (", with " + ", ".join(f"`{text}`" for text in overrides) if overrides else "") + "."


def verdict_table(claims: Sequence[Claim], verdicts: Mapping[str, Verdict]) -> str:
    """Return a table of claims with verdict, effect, interval, bar, p-values, starts and premise."""
    rows: list[list[object]] = []
    for claim in claims:
        verdict, told = verdicts[claim.id], f"{claim.id} {claim.says}"
        if verdict.decision == "not run":
            rows.append([told, "not run", "", "", "", verdict.starts, shown_premise(claim, verdict)])
            continue
        numbers = numbers_of(claim, verdict)
        effect = f"{numbers.effect} ({numbers.interval})"
        p = f"{verdict.p_holds:.2g}; {verdict.p_fails:.2g}"
        rows.append([told, word_of(verdict), effect, numbers.bar, p, starts_of(verdict), shown_premise(claim, verdict)])
    head = (
        "claim",
        "verdict",
        "effect (95 % interval)",
        "tested against",
        "p that it holds; fails",
        "starts",
        "premise",
    )
    return markdown_table(head, rows)


def index_page(
    suite: Suite,
    ablations: Sequence[Ablation],
    scale: Scale,
    verdicts: Mapping[str, Verdict],
    results: Mapping[str, Result],
    first: str,
) -> str:
    """Return the page of all verdicts, which follow the text ``first``."""
    counts = {word: sum(v.decision == word for v in verdicts.values()) for word in WORDS}
    unmet = sum(v.premise is not None and not v.premise.met for v in verdicts.values())
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    minutes = sum(row["cpu_seconds"] for row in results.values()) / 60
    lines = [
        f"# {suite.title}\n",
        f"Scale `{scale}`: {len(results)} runs, {minutes:.0f} CPU minutes. {said}"
        + (f" ({unmet} of them for an unmet premise)" if unmet else "")
        + ". The supervised start is the unit; an effect is tested against what the claim asks for, from both sides; "
        "p-values are as measured, verdicts corrected by Holm over both sides of all claims of this page"
        + (f", of which each of {suite.looks} looks has its share" if suite.looks > 1 else "")
        + f". {suite.about}\n",
        first,
    ]
    for ablation in ablations:
        lines.append(f"## [{ablation.id}. {ablation.title}]({ablation.id}.md)\n")
        lines.append(f"{ablation.question} The report: {ablation.says}\n")
        lines.append(verdict_table(ablation.claims, verdicts) + "\n")
    return "\n".join(lines)
