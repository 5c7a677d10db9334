"""``magicrl plan``: what a recipe needs and costs on given accelerators, before any is rented.

The plan is made into JSON values once (``api/planning.py``); text, ``--json`` and the plan's page show these.
"""

from __future__ import annotations

import json as json_text
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from magicrl.cli.options import Overrides, Several
from magicrl.cli.tables import figures


def plan(
    recipe: Path,
    /,
    *,
    gpus: int,
    gpu: str,
    model: str | None = None,
    set_: Overrides = None,
    staleness: int = 0,
    mean_length: float | None = None,
    lengths_from: Path | None = None,
    prompt_tokens: int | None = None,
    kept: float | None = None,
    other: float | None = None,
    hours: float | None = None,
    cost_per_gpu_hour: float | None = None,
    compare: Several = None,
    json: bool = False,
    page: Path | None = None,
) -> int:
    """Predict memory, step time and hours of a recipe on given accelerators, and what more of them would buy.

    Example: magicrl plan smollm2 --gpus 1 --gpu cpu-2core

    Example: magicrl plan my.toml --gpus 32 --gpu H800-80G --model Qwen3-8B --compare gpus=64 --compare staleness=1

    Parameters
    ----------
    recipe
        The training recipe (TOML).
    gpus
        Accelerators, all nodes together.
    gpu
        H100-80G, RTX-4090, cpu-2core, ... (an unknown name lists all), or a TOML file of one such table.
    model
        A name (Qwen3-32B), a model folder or the path of any config.json; default: the recipe's start.
    set_
        Override a setting of the recipe (repeatable).
    staleness
        Updates that rollouts may be behind: 0 synchronous, 1 one step off, more fully asynchronous.
    mean_length
        Mean response tokens at the largest T; default: those of an R1-distilled model, or half of a T below 4096.
    lengths_from
        A run folder whose last steps give lengths and survivors.
    prompt_tokens
        Mean prompt tokens; default 256, or T where that is less.
    kept
        Share of groups that survive rejection; default 0.6 where the recipe rejects.
    other
        Seconds a response outside rollout and GPU passes (judging, data handling); default for GPUs 0.053, which
        is the released code's and may be far too much for yours.
    hours
        A budget of wall-clock hours: how many steps it holds.
    cost_per_gpu_hour
        Price of an accelerator's hour: adds the cost.
    compare
        An alternative, settings with commas between: gpus=64 | gpu=H200,gpus=16 | staleness=1 |
        stages.0.rollout_batch=128 (repeatable).
    json
        One JSON object instead of text, with other numbers of accelerators.
    page
        Also write a page with plots to this file: one HTML file that needs no server.
    """
    for name, value in (("--hours", hours), ("--cost-per-gpu-hour", cost_per_gpu_hour), ("--mean-length", mean_length)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be above 0, got {value:g}")
    from magicrl.api.planning import alternative, neighbours, plan_facts, planned
    from magicrl.planning.planner import DoesNotFit, Options
    from magicrl.planning.workload import read_measured

    options = Options(
        gpus=gpus,
        staleness=staleness,
        mean_length=mean_length,
        prompt=prompt_tokens,
        kept=kept,
        measured=None if lengths_from is None else read_measured(lengths_from),
        other=other,
    )
    try:
        config, main = planned(recipe, set_ or [], model, gpu, options)
    except DoesNotFit as error:
        given = ["magicrl", "plan", str(recipe), "--gpu", gpu, *(() if model is None else ("--model", model))]
        given += [word for one in set_ or [] for word in ("--set", one)]
        commands = (f"{shlex.join(given)} {way.words}" for way in error.ways)
        raise ValueError("\n  ".join((str(error), *commands))) from None
    facts = plan_facts(main, hours, cost_per_gpu_hour)
    facts["compare"] = [
        {"change": text, **alternative(recipe, set_ or [], model, gpu, options, text, hours, cost_per_gpu_hour)}
        for text in compare or []
    ]
    if json or page is not None:
        facts |= neighbours(config, main)
    if json:
        sys.stdout.write(json_text.dumps(facts, indent=1) + "\n")
    else:
        _print(facts, Console(highlight=False))
    if page is not None:
        from magicrl.reporting.plan_page import write_plan_page

        written = write_plan_page(facts, page, "magicrl " + shlex.join(sys.argv[1:]))
        Console(stderr=True, highlight=False).print(f"page: {written}", markup=False, soft_wrap=True)
    if main.stated is not None and not main.stated.fits:
        raise ValueError(f"{recipe}: [cluster] does not fit: {'. Also: '.join(main.stated.faults)}")
    return 0


def _print(facts: dict[str, Any], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    layout, memory = facts["layout"], facts["memory_gib"]
    say(f"{facts['model']}, {facts['parameters'] / 1e9:.3g}B parameters, on {facts['gpus']} x {facts['gpu']}")
    split = f"engine {layout['rollout_gpus']}, learner {layout['learner_gpus']}"
    sides = "in turn on all" if layout["colocated"] else split
    degrees = f"tensor parallel {layout['tensor_parallel']}, sequence parallel {layout['sequence_parallel']}"
    say(f"layout: {sides}; {degrees}")
    say(f"settings: {' '.join(f'--set {one}' for one in facts['settings']) or 'as the recipe has them'}")
    for side in ("learner", "engine"):
        terms = ", ".join(f"{name} {value:.2f}" for name, value in memory[side].items() if value >= 0.005)
        say(f"{side}, GiB of {memory['budget']:.1f} an accelerator: {terms}")
    say(f"fits: the learner's peak is {memory['learner_total']:.1f} GiB")
    console.print(_stage_table(facts, console.width))
    bounds = ", ".join(_seconds(stage["flops_bound_seconds"]) for stage in facts["stages"])
    say(f"FLOPs at the data sheet's peak alone: {bounds} s a step")
    calibration = facts["calibration"]
    say(f"all stages: {_hours(facts)}, range {_span(facts['hours_90_percent'])} h")
    say(f"range: nine in ten are within a factor of {calibration['factor']:.2f}, from {calibration['factor_from']}")
    if "cost" in facts:
        say(f"cost: {facts['cost']:,.2f}")
    if "budget_hours" in facts:
        total = sum(stage["steps"] for stage in facts["stages"])
        say(f"{facts['budget_hours']:g} h hold {facts['steps_in_budget']} of {total} steps")
    if "stated" in facts:
        say(_stated_line(facts["stated"], facts["gpus"]))
    for change in facts["what_if"]:
        fits = change["seconds"] is not None
        then = f"{change['seconds']:.4g} s a step, x {change['ratio']:.2f}" if fits else "does not fit"
        say(f"with {change['change']}: {then}")
    for other in facts["compare"]:
        if "refused" in other:
            say(f"instead {other['change']}: refused: {other['refused']}")
            continue
        step = ", ".join(f"{stage['step_seconds']:.4g}" for stage in other["stages"])
        say(f"instead {other['change']}: {step} s a step, {_hours(other)}")
    say(
        f"efficiencies: {facts['calibration']['source']}. Lengths, survivors and prompts are assumed where not given; "
        "what is not proven: docs/planning.md"
    )


def _stated_line(stated: dict[str, Any], gpus: int) -> str:
    if "ranks" not in stated:
        return "as [cluster] states: its numbers do not go together"
    idle = f", {gpus - stated['gpus']} idle" if gpus > stated["gpus"] else ""
    text = (
        f"as [cluster] states: {stated['ranks']} learner ranks (sequence parallel {stated['sequence_parallel']}, "
        f"{stated['learner_gib']:.1f} GiB each), {stated['replicas']} replicas of {stated['tensor_parallel']} "
        f"({stated['engine_cache_gib']:.1f} GiB of cache an accelerator), {stated['gpus']} accelerators{idle}"
    )
    if "hours" not in stated:
        return f"{text}: does not fit"
    return f"{text}: all stages {_seconds(stated['hours'])} h, x {stated['times_the_plan']:.2f} of the layout above"


def _hours(facts: dict[str, Any]) -> str:
    return f"{_seconds(facts['hours'])} h, {_seconds(facts['gpu_hours'])} accelerator-hours"


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _span(values: list[float]) -> str:
    return "-".join(map(_seconds, values))


def _stage_table(facts: dict[str, Any], width: int) -> Table:
    names = ("T", "mean", "cut", "t_R s", "t_T s", "t_O s", "step s", "range", "batch", "h/1000", "steps", "h")
    rows: list[tuple[str, ...]] = []
    for stage in facts["stages"]:
        parts = ("rollout_seconds", "learn_seconds", "other_seconds", "step_seconds")
        rows.append(
            (
                str(stage["max_tokens"]),
                f"{stage['mean_length']:.0f}",
                f"{stage['truncated']:.0%}",
                *(_seconds(stage[key]) for key in parts),
                _span(stage["step_seconds_90_percent"]),
                _seconds(stage["mean_batch"]),
                f"{stage['hours_per_1000_steps']:.3g}",
                str(stage["steps"]),
                f"{stage['hours']:.3g}",
            )
        )
    return figures(names, rows, width, least=76)
