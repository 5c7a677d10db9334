"""The page of a plan: what ``magicrl plan`` found, as one self-contained file. It reads the plan's JSON object."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from magicrl.reporting.charts import Bar, BarPlot, Chart, FigureView, Series, bars_view, chart_view
from magicrl.reporting.page import Block, block, figures_block, render_page, write_page
from magicrl.reporting.wording import duration, number, percent

LEFT = 136
"""Room for the names of bars."""


def write_plan_page(facts: Mapping[str, Any], output: Path, command: str = "") -> Path:
    """Write the page of a plan's facts (``magicrl plan --json``) and return its path.

    Raises:
        ValueError: it cannot be written.
    """
    title = f"{facts['model']} on {facts['gpus']} × {facts['gpu']}"
    return write_page(render_page(title, _head(facts), plan_blocks(facts), command, kind="plan"), output)


def plan_blocks(facts: Mapping[str, Any]) -> tuple[Block, ...]:
    """The sections of the page, in order; those without data are left out."""
    blocks = (
        block("plan", "Plan", {"stages": facts["stages"], "source": facts["calibration"]["source"]}),
        _alternatives(facts),
        figures_block("memory", "Memory", [[view] for view in memory_views(facts)]),
        figures_block("time", "Time of a step", [[view] for view in time_views(facts)]),
        more_block(facts),
        _batches(facts),
    )
    return tuple(block for block in blocks if block is not None)


def _head(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    layout = facts["layout"]
    sides = (
        "in turn on all"
        if layout["colocated"]
        else f"engine {layout['rollout_gpus']}, learner {layout['learner_gpus']}"
    )
    shown = [
        ("parameters", f"{facts['parameters'] / 1e9:.3g} billion"),
        ("layout", sides),
        ("tensor parallel", str(layout["tensor_parallel"])),
        ("sequence parallel", str(layout["sequence_parallel"])),
        ("staleness", str(facts["staleness"])),
        ("all stages", duration(3600 * facts["hours"])),
        ("accelerator-hours", number(facts["gpu_hours"])),
    ]
    if "cost" in facts:
        shown.append(("cost", f"{facts['cost']:,.2f}"))
    if "budget_hours" in facts:
        total = sum(stage["steps"] for stage in facts["stages"])
        shown.append((f"{facts['budget_hours']:g} h hold", f"{facts['steps_in_budget']} of {total} steps"))
    return shown


def _alternatives(facts: Mapping[str, Any]) -> Block | None:
    """What ``--compare`` asked for; a refusal stands with its reason."""
    rows: list[dict[str, Any]] = []
    for other in facts.get("compare", ()):
        stages: Sequence[Mapping[str, Any]] = other.get("stages", ())
        rows.append(
            {
                "change": other["change"],
                "refused": other.get("refused", ""),
                "steps": ", ".join(f"{stage['step_seconds']:.4g} s" for stage in stages),
                "hours": other.get("hours"),
                "gpu_hours": other.get("gpu_hours"),
            }
        )
    if not rows:
        return None
    return Block(key="instead", title="Instead", template="plan_instead.html.j2", data={"rows": rows})


def memory_views(facts: Mapping[str, Any]) -> list[FigureView]:
    """GiB of one accelerator by term, learner and engine, against what it has."""
    memory = facts["memory_gib"]
    learner = memory_plot("learner", "Learner at its peak", memory["learner"], memory["budget"], 1)
    engine = memory_plot("engine", "Engine while it samples", memory["engine"], memory["budget"], 0)
    verdict = "fits" if memory["fits"] else "does not fit"
    return [
        bars_view(learner, f"GiB of one accelerator, by term. The plan {verdict}."),
        bars_view(engine, "The cache takes what is left; more of it lets more responses decode at once."),
    ]


def memory_plot(side: str, title: str, terms: Mapping[str, float], budget: float, color: int) -> BarPlot:
    """A bar a term and one for their sum; terms that round to nothing are left out."""
    rows = {name: value for name, value in terms.items() if value >= 0.005} | {"together": sum(terms.values())}
    return BarPlot(
        key=f"memory_{side}",
        title=title,
        x_name="GiB of one accelerator",
        bars=tuple(Bar(name=name, value=value, words=f"{value:.2f}") for name, value in rows.items()),
        color=color,
        limit=(budget, f"usable, {budget:.1f} GiB"),
    )


def time_views(facts: Mapping[str, Any]) -> list[FigureView]:
    """Parts of each stage's step, and hours of 1000 steps."""
    parts = (("rollout t_R", "rollout_seconds"), ("updates t_T", "learn_seconds"), ("other t_O", "other_seconds"))
    several = len(facts["stages"]) > 1
    bars: list[Bar] = []
    hours: list[Bar] = []
    for i, stage in enumerate(facts["stages"], start=1):
        name = f"{i}: " if several else ""
        bars += [Bar(name=name + label, value=stage[key], words=f"{number(stage[key])} s") for label, key in parts]
        value = stage["hours_per_1000_steps"]
        hours.append(Bar(name=f"{name}T = {stage['max_tokens']}", value=value, words=f"{number(value)} h"))
    note = "A step alone on its accelerators"
    note += "; with staleness the parts overlap." if facts["staleness"] else "; the parts follow each other."
    return [
        bars_view(
            BarPlot(
                key="step_parts",
                title="Parts of a step, by stage" if several else "Parts of a step",
                x_name="seconds",
                bars=tuple(bars),
                left=LEFT,
            ),
            note,
        ),
        bars_view(
            BarPlot(
                key="hours_per_1000_steps",
                title="Hours of 1000 steps, by stage",
                x_name="hours",
                bars=tuple(hours),
                color=2,
                left=LEFT - 32,
            ),
            "At the stage's own T, D_R and lengths.",
        ),
    ]


def more_block(facts: Mapping[str, Any]) -> Block | None:
    """Step time against accelerators, and what each doubling takes off it; None for a machine with one."""
    points = [point for point in facts["over_gpus"] if point["step_seconds"] is not None]
    if len(points) < 2:
        return None
    chart = gpu_chart(points)
    missing = [str(point["gpus"]) for point in facts["over_gpus"] if point["step_seconds"] is None]
    lead = f"The stage with T = {facts['over_gpus_max_tokens']}, each number of accelerators in its own best layout."
    if missing:
        lead += f" On {', '.join(missing)} nothing fits."
    steps = [
        Bar(
            name=f"{a['gpus']} → {b['gpus']}",
            value=1 - b["step_seconds"] / a["step_seconds"],
            words=f"{percent(1 - b['step_seconds'] / a['step_seconds'])} (ideal {percent(1 - a['gpus'] / b['gpus'])})",
        )
        for a, b in itertools.pairwise(points)
    ]
    bars = BarPlot(
        key="doubling",
        title="Time that more accelerators take off a step",
        x_name="share of the step's time",
        unit="percent",
        bars=tuple(bar if bar.value > 0 else Bar(name=bar.name, value=0.0, words=bar.words) for bar in steps),
        color=2,
    )
    cost = BarPlot(
        key="gpu_hours_by_gpus",
        title="What 1000 steps cost",
        x_name="accelerator-hours",
        bars=tuple(
            Bar(
                name=str(p["gpus"]),
                value=p["gpus"] * p["step_seconds"] / 3.6,
                words=number(p["step_seconds"] / 3.6) + " h",
            )
            for p in points
        ),
        color=1,
    )
    views = [
        [chart_view(chart)],
        [
            bars_view(bars, "More accelerators share the responses; none makes the longest response shorter."),
            bars_view(cost, "Behind a bar: wall clock of the 1000 steps."),
        ],
    ]
    return figures_block("more", "More accelerators", views, lead)


def gpu_chart(points: Sequence[Mapping[str, Any]]) -> Chart:
    """Seconds of a step with their interval, of its rollout, and the plain curve through both ends."""
    first, last = points[0], points[-1]
    slope = (first["step_seconds"] - last["step_seconds"]) / (1 / first["gpus"] - 1 / last["gpus"])
    base = last["step_seconds"] - slope / last["gpus"]
    xs = [float(point["gpus"]) for point in points]
    return Chart(
        key="step_over_gpus",
        title="Time of a step",
        unit="seconds",
        y_low=0.0,
        series=(
            Series(
                label="step, with its 80 % interval",
                points=tuple((float(p["gpus"]), p["step_seconds"]) for p in points),
                band=tuple((float(p["gpus"]), *p["step_seconds_80_percent"]) for p in points),
                dots=True,
            ),
            Series(
                label="rollout t_R",
                points=tuple((float(p["gpus"]), p["rollout_seconds"]) for p in points),
                color=1,
                dots=True,
            ),
            Series(label="a + b/N through the ends", points=tuple((x, base + slope / x) for x in xs), color=4),
        ),
        x_name="accelerators",
        x_word="accelerators",
        x_log=True,
        x_ticks=tuple(xs),
        note="The interval is that of the efficiencies alone: not of lengths, survivors, failures or the network.",
    )


def _batches(facts: Mapping[str, Any]) -> Block | None:
    """A step with another D_R or group size, and what a response then costs."""
    points = [point for point in facts["over_batches"] if point["step_seconds"] is not None]
    if len(points) < 2:
        return None
    stage = facts["stages"][facts["longest_stage"]]
    names = [f"{point['rollout_batch']} × {point['group_size']}" for point in points]
    here = f"{stage['rollout_batch']} × {stage['group_size']}"
    shown = [f"{name} (now)" if name == here else name for name in names]
    step = BarPlot(
        key="step_over_batches",
        title="Time of a step",
        x_name="seconds",
        bars=tuple(
            Bar(name=name, value=p["step_seconds"], words=f"{number(p['step_seconds'])} s")
            for name, p in zip(shown, points, strict=True)
        ),
        left=LEFT,
    )
    each = BarPlot(
        key="response_over_batches",
        title="Time of a step for each response",
        x_name="seconds a response",
        bars=tuple(
            Bar(name=name, value=p["seconds_a_response"], words=f"{number(p['seconds_a_response'])} s")
            for name, p in zip(shown, points, strict=True)
        ),
        color=2,
        left=LEFT,
    )
    lead = (
        f"D_R × group size at T = {stage['max_tokens']} on the same accelerators; the tail is waited for once a step."
    )
    return figures_block("batches", "D_R and group size", [[bars_view(step)], [bars_view(each)]], lead)
