"""The page of ``magicrl plan``. Only ``--page`` imports it, because drawing takes a second to import."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from magicrl.commands.plan import TIMES
from magicrl.reporting.charts import Bar, Chart, FigureView, Series, bars_view, chart_view
from magicrl.reporting.page import PageBlock, block, figures_block, render_page, write_page
from magicrl.reporting.wording import number_text, percent
from magicrl_verifiers.progress import duration

Facts = Mapping[str, Any]
"""The JSON object of a plan."""
PLAN_LEFT = 136
"""Width reserved for the names of bars, in SVG units."""


def write_plan_page(facts: Facts, output: Path, command: str = "") -> Path:
    """Write the page of a plan (``magicrl plan --json``) and return its path.

    Raises:
        ValueError: the page cannot be written.
    """
    layout = facts["layout"]
    split = f"engine {layout['rollout_gpus']}, learner {layout['learner_gpus']}"
    shown = [
        ("parameters", f"{facts['parameters'] / 1e9:.3g} billion"),
        ("layout", "in turn on all" if layout["colocated"] else split),
        ("tensor parallel", str(layout["tensor_parallel"])),
        ("sequence parallel", str(layout["sequence_parallel"])),
        ("staleness", str(facts["staleness"])),
        ("all stages", duration(3600 * facts["hours"])),
        ("range", " to ".join(duration(3600 * hours) for hours in facts["hours_90_percent"])),
        ("accelerator-hours", number_text(facts["gpu_hours"])),
    ]
    if "cost" in facts:
        shown.append(("cost", f"{facts['cost']:,.2f}"))
    if "budget_hours" in facts:
        total = sum(stage["steps"] for stage in facts["stages"])
        shown.append((f"in {facts['budget_hours']:g} h", f"{facts['steps_in_budget']} of {total} steps"))
    title = f"{facts['model']} on {facts['gpus']} × {facts['gpu']}"
    return write_page(render_page(title, shown, plan_blocks(facts), command, kind="plan"), output)


def plan_blocks(facts: Facts) -> list[PageBlock | None]:
    """Return the sections of the page in order."""
    # the alternatives of --compare; a refused one has its reason
    others = [{"refused": "", "hours": None, "gpu_hours": None, "stages": ()} | o for o in facts.get("compare", ())]
    rows = [o | {"steps": ", ".join(f"{stage['step_seconds']:.4g} s" for stage in o["stages"])} for o in others]
    return [
        block("plan", "Plan", {key: facts[key] for key in ("stages", "calibration", "dtype")}),
        block("instead", "Alternatives", {"rows": rows} if rows else None, template="plan_instead"),
        figures_block("memory", "Memory", [[view] for view in memory_views(facts)]),
        figures_block("time", "Time of a step", [[view] for view in _time_views(facts)]),
        figures_block("changes", "Effect of changes", [[view] for view in _change_views(facts)]),
        _more_gpus(facts),
    ]


def memory_views(facts: Facts) -> list[FigureView]:
    """Return figures of the GiB of one accelerator by term, of learner and engine, without terms that round to 0."""
    memory = facts["memory_gib"]
    verdict = "fits" if memory["fits"] else "does not fit"
    sides = (
        ("learner", "Learner at its peak", f"GiB of one accelerator, by term. The plan {verdict}.", 1),
        ("engine", "Engine while it samples", "The cache takes the rest. A larger cache lets more responses decode at "
         "once.", 0),
    )  # fmt: skip
    views: list[FigureView] = []
    for side, title, note, color in sides:
        terms: Mapping[str, float] = memory[side]
        rows = {name: value for name, value in terms.items() if value >= 0.005} | {"together": sum(terms.values())}
        bars = [(name, value, f"{value:.2f}") for name, value in rows.items()]
        limit = (memory["budget"], f"usable, {memory['budget']:.1f} GiB")
        views.append(bars_view(f"memory_{side}", title, "GiB of one accelerator", bars, note, color=color, limit=limit))
    return views


def _time_views(facts: Facts) -> list[FigureView]:
    """Return figures of the parts of each stage's step, and of the hours of 1000 steps."""
    parts = (("sampling t_R", "rollout_seconds"), ("updates t_T", "learn_seconds"), ("other t_O", "other_seconds"))
    several = len(facts["stages"]) > 1
    bars: list[Bar] = []
    hours: list[Bar] = []
    for i, stage in enumerate(facts["stages"], start=1):
        name = f"{i}: " if several else ""
        bars += [(name + label, stage[key], f"{number_text(stage[key])} s") for label, key in parts]
        value = stage["hours_per_1000_steps"]
        hours.append((f"{name}T = {stage['max_tokens']}", value, f"{number_text(value)} h"))
    note = f"{TIMES} " + ("With staleness the parts overlap." if facts["staleness"] else "The parts follow each other.")
    title = "Parts of a step, by stage" if several else "Parts of a step"
    whole, lengths = "Hours of 1000 steps, by stage", "At the stage's own T, D_R and lengths."
    return [
        bars_view("step_parts", title, "seconds", bars, note, left=PLAN_LEFT),
        bars_view("hours_per_1000_steps", whole, "hours", hours, lengths, color=2, left=PLAN_LEFT - 32),
    ]


def _change_views(facts: Facts) -> list[FigureView]:
    """Return a figure of the step time of the longest stage under each change that fits."""
    fitting = [change for change in facts["what_if"] if change["seconds"] is not None]
    if not fitting:
        return []
    now = max(facts["stages"], key=lambda stage: stage["hours"])
    bars: list[Bar] = [("as planned", now["step_seconds"], f"{number_text(now['step_seconds'])} s")]
    bars += [
        (one["change"], one["seconds"], f"{number_text(one['seconds'])} s (x {one['ratio']:.2f})") for one in fitting
    ]
    note = f"The stage with T = {now['max_tokens']}. Each change by itself, on its own best layout."
    return [bars_view("step_by_change", "Time of a step by change", "seconds", bars, note, left=PLAN_LEFT)]


def _more_gpus(facts: Facts) -> PageBlock | None:
    """Return step time by accelerators, and the saving of each doubling; None for a machine with one accelerator."""
    points = [point for point in facts["over_gpus"] if point["step_seconds"] is not None]
    if len(points) < 2:
        return None
    missing = [str(point["gpus"]) for point in facts["over_gpus"] if point["step_seconds"] is None]
    lead = f"The stage with T = {facts['over_gpus_max_tokens']}, each number of accelerators in its own best layout."
    if missing:
        lead += f" On {', '.join(missing)} nothing fits."
    saved: list[Bar] = []
    for a, b in itertools.pairwise(points):
        share = 1 - b["step_seconds"] / a["step_seconds"]
        words = f"{percent(share)} (ideal {percent(1 - a['gpus'] / b['gpus'])})"
        saved.append((f"{a['gpus']} → {b['gpus']}", max(0.0, share), words))
    hours = [p["step_seconds"] / 3.6 for p in points]  # of 1000 steps
    cost = [(str(p["gpus"]), p["gpus"] * h, f"{number_text(h)} h") for p, h in zip(points, hours, strict=True)]
    title, x_name = "Time saved by more accelerators", "share of the step's time"
    note = "More accelerators share the responses. None makes the longest response shorter."
    doubling = bars_view("doubling", title, x_name, saved, note, unit="percent", color=2)
    note = "After a bar: wall clock of the 1000 steps."
    costs = bars_view("gpu_hours_by_gpus", "Cost of 1000 steps", "accelerator-hours", cost, note, color=1)
    views = [[chart_view(gpu_chart(points))], [doubling, costs], [chart_view(cost_chart(points, facts.get("price")))]]
    return figures_block("more", "More accelerators", views, lead)


def cost_chart(points: Sequence[Facts], price: float | None) -> Chart:
    """Return a chart of the hours of 1000 steps by their cost, with the numbers of accelerators on the frontier.

    A number is on the frontier if none other is both faster and cheaper.
    """
    unit, each = ("accelerator-hours", 1.0) if price is None else ("cost", price)
    hours = {p["gpus"]: p["step_seconds"] / 3.6 for p in points}
    whole = sorted((gpus * hour * each, hour, gpus) for gpus, hour in hours.items())
    best = [one for i, one in enumerate(whole) if all(one[1] < other[1] for other in whole[:i])]
    names = ", ".join(f"{gpus}: {number_text(hour)} h for {number_text(paid)}" for paid, hour, gpus in best)
    frontier = "none is both faster and cheaper"
    return Chart(
        key="hours_over_cost",
        title="Hours of 1000 steps by cost",
        y_low=0.0,
        series=(
            Series(label="numbers of accelerators", points=tuple((c, h) for c, h, _ in whole), dots=True),
            Series(label=frontier, points=tuple((c, h) for c, h, _ in best), color=2, dots=True),
        ),
        x_name=unit,
        x_word=unit,
        note=f"Numbers of accelerators on the frontier: {names}.",
    )


def gpu_chart(points: Sequence[Facts]) -> Chart:
    """Return a chart of the step time with its interval, the rollout time, and the curve a + b/N through both ends."""
    first, last = points[0], points[-1]
    slope = (first["step_seconds"] - last["step_seconds"]) / (1 / first["gpus"] - 1 / last["gpus"])
    base = last["step_seconds"] - slope / last["gpus"]
    xs = tuple(float(point["gpus"]) for point in points)
    step, rollout = (tuple((float(p["gpus"]), p[key]) for p in points) for key in ("step_seconds", "rollout_seconds"))
    band = tuple((float(p["gpus"]), *p["step_seconds_90_percent"]) for p in points)
    curve = tuple((x, base + slope / x) for x in xs)
    return Chart(
        key="step_over_gpus",
        title="Time of a step",
        unit="seconds",
        y_low=0.0,
        series=(
            Series(label="step, with its range", points=step, band=band, dots=True),
            Series(label="sampling t_R", points=rollout, color=1, dots=True),
            Series(label="a + b/N through the ends", points=curve, color=4),
        ),
        x_name="accelerators",
        x_word="accelerators",
        x_log=True,
        x_ticks=xs,
        note="Nine of ten measured steps were in this range. The points of one plan move up and down together.",
    )
