"""Write the pages of a suite: one per ablation, an index, and for the report's suite questions, costs and figures.

Ablation pages show verdicts, curves and settings. The page of costs compares variants where each has spent as much as
the variant that spent least: sampled tokens, updates, seconds, and planned hours on the report's GPUs. The page of
figures redraws the report's figures 6, 8 and 13 from the runs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from magicrl.planning.hardware import load_hardware
from magicrl.planning.planner import Options, make_plan
from magicrl.planning.shapes import load_shape
from magicrl.reporting.charts import Chart, Points, Series, Unit, draw
from magicrl.reporting.curves import smoothed, variant_curve
from studies.advice import advice_page, check_advice, load_advice
from studies.claims import (
    WORDS,
    Runs,
    Verdict,
    decide,
    numbers_of,
    shown_premise,
    starts_of,
    word_of,
)
from studies.definition import (
    SUITES,
    Ablation,
    Arm,
    Claim,
    Result,
    Scale,
    ScaleDefinition,
    Suite,
    parse_measure,
    shipped_ablations,
)
from studies.distances import Found, distance_section, markdown_table, paragraph
from studies.results import STARTS_FILE
from studies.runs import by_arm, plan_runs, read_screened
from studies.screening import starts_page

COSTS: tuple[tuple[str, str], ...] = (
    ("tokens", "sampled tokens"),
    ("updates", "updates"),
    ("seconds", "seconds of steps"),
)
GPU = "H800-80G"


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """Format mean and range; return an empty text if no value is finite."""
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
    """Return a table of variants: accuracy at equal steps and equal costs, and the cost until ``bound``.

    The common amount of a cost is the least that a run has spent, rounded down to two digits.
    """
    rows_of_all = [row for rows in runs.values() for row in rows.values()]
    costs = [(cost, words) for cost, words in COSTS if all(row["curves"].get(cost) for row in rows_of_all)]
    amounts = {cost: _common(rows_of_all, cost) for cost, _ in costs}
    head = ["variant", "at the last step"]
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
    """Return the mean cost of the runs that reached the bound, and how many did."""
    best, took = _measured(rows, f"{curve}@max"), _measured(rows, f"{cost}:{curve}>{bound}")
    got = [value for value, top in zip(took, best, strict=True) if top > bound]
    if len(got) == len(rows):
        return mean_text(got)
    return f"{len(got)} of {len(rows)} runs" + (f": {mean_text(got)}" if got else "")


Planned: TypeAlias = tuple[str, int, float, float]
"""A variant on the report's GPUs: name, GPUs, planned seconds per step of the last stage, hours in all."""


def planned_arms(ablation: Ablation, gpus: Sequence[int]) -> list[Planned]:
    """Plan the ablation's variants at scale ``paper``, each on its number of GPUs."""
    found: list[Planned] = []
    for run, number in zip(plan_runs([ablation], "paper", [0]), gpus, strict=True):
        assert run.config.start.model is not None, "variants at scale paper start from a published model"
        plan = make_plan(run.config, load_shape(run.config.start.model), load_hardware(GPU), Options(gpus=number))
        name = next(arm for owner, arm in run.arms if owner == ablation.id)
        found.append((name, number, plan.stages[-1].seconds, plan.hours))
    return found


def equal_time_table(runs: Runs, planned: Sequence[Planned], arm_of: Callable[[int], str]) -> str:
    """Return a table of accuracies after equal planned time, on GPUs that grow with the variant.

    Args:
        runs: Runs at scale tiny.
        planned: The report's variants, in the order of ours.
        arm_of: Name of our variant by position.
    """
    arms = [arm_of(place) for place in range(len(planned))]
    least = min(
        len(row["curves"]["accuracy"]) * seconds
        for arm, (_, _, seconds, _) in zip(arms, planned, strict=True)
        for row in runs.get(arm, {}).values()
    )
    rows: list[list[object]] = []
    for arm, (name, gpus, seconds, _) in zip(arms, planned, strict=True):
        step = max(1, int(least / seconds))
        at = mean_text(_measured(runs.get(arm, {}), f"accuracy@{step}"))
        end = mean_text(_measured(runs.get(arm, {}), "test@1.0"))
        rows.append([arm, name, gpus, f"{seconds:.0f}", step, at, end])
    head = ("variant", "the report's", "GPUs", "planned s per step", "steps in equal time", "accuracy after them")
    return markdown_table([*head, "accuracy at the last step"], rows)


def costs_page(ablations: Sequence[Ablation], found: Found) -> str:
    """Return the page of comparisons at equal cost, without sections that have no results."""
    known = {ablation.id: ablation for ablation in ablations}
    parts = [
        "# Equal cost\n",
        paragraph(
            "Means over runs, with the range in brackets. Accuracy is the mean of five training steps at temperature "
            "1, on problems that the run had not seen. Seconds are wall clock on a shared machine. Planned seconds are "
            f"those of `magicrl plan` on {GPU} for the report's variants, with its assumed lengths."
        )
        + "\n",
    ]
    for number, title in (("6", "On-policy and off-policy"), ("7", "Small batches on-policy")):
        if found.get(number):
            parts.append(f"## {title}\n\n{equal_cost_table(found[number], 'accuracy', 0.8)}\n")
    if found.get("2"):
        parts.append(
            f"## A short first stage and the long limit throughout\n\n{equal_cost_table(found['2'], 'accuracy', 0.9)}\n"
        )
        if "2" in known and "paper" in known["2"].scales:
            parts.append(_stage_hours(known["2"]))
    for number, title in (("11", "Rollout batch"), ("12", "Group size")):
        arms = list(found.get(number, {}))
        if number in known and len(arms) == 3 and "paper" in known[number].scales:
            order = [arm.name for arm in known[number].scales["tiny"].arms]
            table = equal_time_table(found[number], planned_arms(known[number], (64, 32, 16)), lambda i, o=order: o[i])
            parts.append(f"## {title}: GPUs grow with it\n\n{table}\n")
            parts.append(f"At equal tokens on equal GPUs:\n\n{equal_cost_table(found[number], 'accuracy', 0.8)}\n")
    return "\n".join(parts)


def _stage_hours(ablation: Ablation) -> str:
    number = len(ablation.scales["paper"].arms)
    rows = [(name, f"{step:.0f}", f"{hours:.1f}") for name, _, step, hours in planned_arms(ablation, [64] * number)]
    table = markdown_table(("variant of the report", "planned s per step of the last stage", "hours"), rows)
    return f"Planned for the report's variants on 64 GPUs:\n\n{table}\n"


LIMITS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)  # response limits of Fig. 8, tokens.
LEAST_ENTROPY = 0.003  # nats per token; smaller values are drawn here, because the axis is logarithmic
ENTROPY_ARMS = ("0", "6", "8", "9")
"""Ablations of Fig. 13: one task, with entropy changed in different ways."""


def curve_series(arm: str, slot: int, rows: Sequence[Result], name: str) -> Series:
    """Return a variant's curve: the mean over its runs and, of several runs, a band from lowest to highest."""
    points, _ = variant_curve([smoothed(_points(row, name), ()) for row in rows])
    return Series(
        label=arm,
        points=tuple((step, mean) for step, mean, *_ in points),
        band=tuple((step, low, high) for step, _, low, high, _ in points) if len(rows) > 1 else (),
        color=slot % 6,
    )


def _points(row: Result, name: str) -> Points:
    values: Sequence[float | None] = row["curves"].get(name, ())
    return tuple((float(step), value) for step, value in enumerate(values, start=1) if value is not None)


def curve_chart(runs: Runs, key: str, name: str, title: str, unit: Unit) -> Chart | None:
    """Return the chart of one curve for all variants, or None if no run has a value other than 0."""
    lines = [curve_series(arm, slot, list(by_seed.values()), name) for slot, (arm, by_seed) in enumerate(runs.items())]
    drawn = tuple(line for line in lines if line.points)
    if not any(y for line in drawn for _, y in line.points):
        return None
    return Chart(key=key, title=title, series=drawn, unit=unit, y_low=0.0)


def write_chart(chart: Chart, folder: Path) -> str:
    """Write the chart as an SVG file into ``folder`` and return the Markdown that shows it."""
    (folder / f"{chart.key}.svg").write_text(str(draw(chart, alone=True)))
    return f"![{chart.title}]({chart.key}.svg)\n"


def figures_page(found: Found, folder: Path) -> str:
    """Return the page of redrawn figures, without those that have no results."""
    parts = [
        "# The report's figures, from our runs\n",
        "Lines are means over runs; bands reach from the lowest to the highest run.\n",
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
        ("accuracy_nontruncated", "Accuracy of responses that are not truncated"),
        ("truncation", "Share of truncated responses"),
    )
    charts = [curve_chart(runs, f"figure-6-{name}", name, title, "percent") for name, title in wanted]
    drawn = [write_chart(chart, folder) for chart in charts if chart is not None]
    text = (
        "## Figure 6: the first effect of a short limit\n\n"
        + paragraph(
            "Variants of ablation 3 at T = 48. Accuracy is the share of responses that are not truncated times the "
            "accuracy of those. The table splits the gain over the initial checkpoint, as a difference of logarithms, "
            "into these two factors; its last two columns add up to the gain."
        )
        + "\n"
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
    head = (
        "variant",
        "initial accuracy",
        f"at step {step}",
        "log gain by less truncation",
        "log gain by correct answers",
    )
    return markdown_table(head, table)


def _two_factors(row: Result, place: str) -> tuple[float, float]:
    kept = 1.0 - parse_measure(f"truncation@{place}")(row)
    return kept, parse_measure(f"accuracy_nontruncated@{place}")(row)


def _figure_8(runs: Runs, folder: Path) -> list[str]:
    series: list[Series] = []
    first = next(iter(runs.values()))
    curves: dict[str, list[Mapping[int, float]]] = {"initial": [limited(row, "before") for row in first.values()]}
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
        + paragraph(
            "Models of ablation 2 after training, one response per test problem at temperature 1 and the long limit. A "
            "response longer than a limit counts as wrong at that limit: sampling goes from left to right, so the "
            "shorter limit would have truncated this response."
        )
        + "\n"
    )
    return [text, write_chart(chart, folder)]


def limited(row: Result, name: str) -> dict[int, float]:
    """Return accuracy by response limit from the lengths of correct responses; empty if none are recorded."""
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
        title="Test accuracy against final entropy",
        series=tuple(series),
        unit="percent",
        y_low=0.0,
        x_name="entropy over the last tenth, nats per token",
        x_word="entropy",
        x_log=True,
        x_ticks=(0.03, 0.1, 0.3, 1.0, 3.0),
        x_whole=False,
    )
    text = (
        "## Figure 13: entropy and test accuracy\n\n"
        + paragraph(
            "One mark per run of the ablations that change entropy on one task: by the initial checkpoint, by updates, "
            "by a fixed coefficient and by control. In the report's figure collapse and low accuracy go together; "
            "whether more entropy is better is another question."
        )
        + "\n"
    )
    return [text, write_chart(chart, folder), _correlations(series)]


def _correlations(series: Sequence[Series]) -> str:
    pooled = [point for one in series for point in one.points]
    runs = [*((s.label, s.points) for s in series), ("all", pooled)]
    rows = [(label, len(points), f"{spearman(points):.2f}") for label, points in runs]
    return markdown_table(("runs of", "number", "rank correlation of entropy and accuracy"), rows) + "\n"


def spearman(points: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of x and y. Ties share their mean rank; without variation it is 0.

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
    ("test@best", "at the best"),
    ("pass@4", "pass@4"),
    ("collapse:0.2@0.6", "collapsed"),
    ("entropy@late", "final entropy"),
)
"""Columns of the results table; those that no run has are left out."""
FIGURES: tuple[tuple[str, str, Unit], ...] = (
    ("accuracy", "Training accuracy", "percent"),
    ("validation", "Validation accuracy", "percent"),
    ("entropy", "Entropy, nats per token", "number"),
    ("length", "Mean response length, tokens", "number"),
    ("kl", "KL to the reference", "number"),
)


_LINKS = "More from these runs: [questions of readers](questions.md), [equal cost](costs.md), [figures](figures.md).\n"


def write_pages(
    ablations: Sequence[Ablation], scale: Scale, results: Mapping[str, Result], folder: Path, suite: str = "report"
) -> Path:
    """Write the pages of ``ablations`` into ``folder`` and return the path of the index.

    Args:
        ablations: All are corrected together, so a verdict depends on which are given. Those not defined at this scale
            are left out.
        scale: Scale of the results.
        results: Results by key.
        folder: Gets ``index.md``, a page and figures per ablation and, for the suite ``report``, ``questions.md``,
            ``costs.md`` and ``figures.md``.
        suite: Suite of the ablations; its looks share the error.
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
        (folder / "questions.md").write_text(advice_page(ablations, verdicts, advice))
        (folder / "costs.md").write_text(costs_page(ablations, found))
        (folder / "figures.md").write_text(figures_page(found, folder))
    elif suite == "starts":
        (folder / "starts.md").write_text(starts_page(read_screened(STARTS_FILE)))
    index = folder / "index.md"
    used = [row for arms in found.values() for runs in arms.values() for row in runs.values() if "key" in row]
    links = _LINKS if suite == "report" else distance_section(SUITES[suite], ablations, scale, found, folder)
    index.write_text(index_page(SUITES[suite], ablations, scale, verdicts, {row["key"]: row for row in used}, links))
    return index


def ablation_page(
    ablation: Ablation, scale: Scale, runs: Runs, verdicts: Mapping[str, Verdict], folder: Path, suite: str
) -> str:
    """Return the page of one ablation and write its figures into ``folder``."""
    own = [verdicts[claim.id] for claim in ablation.claims]
    parts = [
        f"# {ablation.id}. {ablation.title}\n",
        paragraph(f"{ablation.question} {counted(own)}") + "\n",
        paragraph(f"The paper: {ablation.says}") + "\n",
        f"## Verdicts\n\n{verdict_table(ablation.claims, verdicts)}\n",
    ]
    if ablation.notes:
        paragraphs = [paragraph(text) for text in ablation.notes.strip().split("\n\n")]
        parts.append("\n\n".join(["## Interpretation", *paragraphs]) + "\n")
    chosen = {arm.name for arm in ablation.scales[scale].arms if arm.derived}
    drawn = {arm: rows for arm, rows in runs.items() if arm not in chosen}  # their runs are drawn once
    charts = [curve_chart(drawn, f"{ablation.id}-{name}", name, title, unit) for name, title, unit in FIGURES]
    shown = [write_chart(chart, folder) for chart in charts if chart is not None]
    if shown:
        caption = "Lines are means over the runs that have the step; bands reach from the lowest to the highest run.\n"
        parts.append("## Curves\n\n" + caption + "\n" + "\n".join(shown))
    parts.append(f"## Results and settings\n\n{_settings(ablation, scale, runs)}\n")
    parts.append(f"Reproduce: `python -m studies run {ablation.id} --suite {suite} --scale {scale}`\n")
    return "\n".join(parts)


def _settings(ablation: Ablation, scale: Scale, runs: Runs) -> str:
    definition = ablation.scales[scale]
    measured = [(parse_measure(name), title) for name, title in ENDS]
    ends = [e for e in measured if any(math.isfinite(e[0](row)) for rows in runs.values() for row in rows.values())]
    results: list[list[object]] = []
    counts: list[tuple[object, ...]] = []
    for arm in definition.arms:
        found = runs.get(arm.name, {})
        seconds = [row["cpu_seconds"] for row in found.values()]
        mean = f"{sum(seconds) / len(seconds):.0f}" if seconds else ""
        results.append([arm.name, *(mean_text([measure(row) for row in found.values()]) for measure, _ in ends)])
        counts.append((len({start for start, _ in found}), len(found), mean))
    table = markdown_table(("variant", *(title for _, title in ends)), results)
    collapsed = " Collapsed: entropy fell below 0.2 nats before accuracy reached 60 %."
    text = paragraph("Test accuracy after training, mean (range)." + collapsed) + f"\n\n{table}\n\n"
    text += _variants(definition, ("checkpoints", "runs", "CPU s per run"), counts)
    if "paper" in ablation.scales and scale != "paper":
        text += "\n\nThe paper's settings:\n\n" + _variants(ablation.scales["paper"])
    return text


def _variants(
    definition: ScaleDefinition, columns: Sequence[str] = (), cells: Sequence[tuple[object, ...]] | None = None
) -> str:
    """Return the base recipe and a table of variants; settings too long for a cell follow in a code block."""
    rows: list[list[object]] = []
    long: list[str] = []
    for arm, more in zip(definition.arms, cells or [()] * len(definition.arms), strict=True):
        shown = _arm_settings(arm)
        if len(shown) > 130:
            long += [f"{arm.name}:", *(f"    {text}" for text in arm.set)]
            shown = "below"
        rows.append([arm.name, shown, *more])
    text = " and ".join(f"`{base}`" for base in (definition.base, *definition.more_bases))
    text = f"Base recipe{'s' * bool(definition.more_bases)} {text}"
    common = [text for text in definition.set if len(text) <= 90]
    if common:
        text += ", with " + ", ".join(f"`{one}`" for one in common)
    long = [*(one for one in definition.set if len(one) > 90), *long]
    text = paragraph(f"{text}.") + "\n\n" + markdown_table(("variant", "settings", *columns), rows)
    return text + ("\n\n```text\n" + "\n".join(long) + "\n```" if long else "")


def _arm_settings(arm: Arm) -> str:
    if arm.better_of:
        return f"{' or '.join(arm.better_of)}, chosen on the other half of the checkpoints"
    if arm.mean_of:
        return f"mean of {', '.join(arm.mean_of)}"
    after = f"continues {arm.after}; " if arm.after else ""
    return after + (", ".join(f"`{text}`" for text in arm.set) or "as the base")


def verdict_table(claims: Sequence[Claim], verdicts: Mapping[str, Verdict]) -> str:
    """Return the table of claims with verdict, effect, interval, bar, p-values, checkpoints and premise."""
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
        "p holds; fails",
        "checkpoints",
        "premise",
    )
    return markdown_table(head, rows)


def short_table(claims: Sequence[Claim], verdicts: Mapping[str, Verdict]) -> str:
    """Return the table of an index: claim, verdict, effect with interval, and bar."""
    rows: list[tuple[str, ...]] = []
    for claim in claims:
        verdict = verdicts[claim.id]
        numbers = numbers_of(claim, verdict)
        run = verdict.decision != "not run"
        effect = f"{numbers.effect} ({numbers.interval})" if run else ""
        rows.append((f"{claim.id} {claim.says}", word_of(verdict), effect, numbers.bar if run else ""))
    return markdown_table(("claim", "verdict", "effect (95 % interval)", "tested against"), rows)


def counted(verdicts: Sequence[Verdict]) -> str:
    """Return a sentence with the number of claims by verdict."""
    if not verdicts:
        return ""
    counts = {word: sum(v.decision == word for v in verdicts) for word in WORDS}
    said = ", ".join(f"{word} {count}" for word, count in counts.items() if count)
    unmet = sum(v.premise is not None and not v.premise.met for v in verdicts)
    return f"Verdicts on {len(verdicts)} claims: {said}" + (f" ({unmet} with an unmet premise)." if unmet else ".")


def index_page(
    suite: Suite,
    ablations: Sequence[Ablation],
    scale: Scale,
    verdicts: Mapping[str, Verdict],
    results: Mapping[str, Result],
    first: str,
) -> str:
    """Return the index: all verdicts, after the section ``first``."""
    minutes = sum(row["cpu_seconds"] for row in results.values()) / 60
    looks = f", and each of {suite.looks} looks has its share of the error" if suite.looks > 1 else ""
    rule = (
        "The initial checkpoint is the unit. An effect is tested from both sides against the size that the claim "
        "states. Verdicts use Holm's correction over both sides of all claims of this page"
        f"{looks}; the pages of the ablations have uncorrected p-values and premises."
    )
    lines = [
        f"# {suite.title}\n",
        paragraph(
            f"{counted(list(verdicts.values()))} {len(results)} runs at scale `{scale}`, {minutes:.0f} CPU minutes."
        )
        + "\n",
        paragraph(f"{rule} {suite.about}") + "\n",
        first,
    ]
    for ablation in ablations:
        lines.append(f"## [{ablation.id}. {ablation.title}]({ablation.id}.md)\n")
        lines.append(paragraph(f"{ablation.question} The paper: {ablation.says}") + "\n")
        lines.append(short_table(ablation.claims, verdicts) + "\n")
    return "\n".join(lines)
