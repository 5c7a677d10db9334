"""Arms at equal cost: sampled tokens, SGD steps, wall clock, and simulated hours on the report's GPUs.

At equal steps the arms of some ablations cost different amounts. Here they are read off where each has spent as much
as the arm that spent least in all, and by what each needed to reach an accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from magicrl.experiments.claims import Runs
from magicrl.experiments.definition import Ablation
from magicrl.experiments.measures import Result, parse_measure
from magicrl.experiments.planning import plan_runs
from magicrl.planning.hardware import load_hardware
from magicrl.planning.planner import Options, make_plan
from magicrl.planning.shapes import load_shape

COSTS: tuple[tuple[str, str], ...] = (
    ("tokens", "sampled tokens"),
    ("updates", "SGD steps"),
    ("seconds", "seconds of steps"),
)
GPU = "H800-80G"
Found: TypeAlias = Mapping[str, Runs]


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """Mean and range; empty where nothing is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    mean = sum(finite) / len(finite)
    if abs(mean) >= 10:
        return f"{mean:,.0f} ({min(finite):,.0f}-{max(finite):,.0f})"
    return f"{mean:.{digits}f} ({min(finite):.{digits}f}-{max(finite):.{digits}f})"


def _measured(rows: Mapping[int, Result], measure: str) -> list[float]:
    function = parse_measure(measure)
    return [function(row) for row in rows.values()]


def equal_cost_table(runs: Runs, curve: str, bound: float) -> str:
    """A row an arm: accuracy at equal steps and at each equal cost, then what it took to reach ``bound``.

    The common amount of a cost is what every run has spent, rounded down to two digits.
    """
    rows_of_all = [row for rows in runs.values() for row in rows.values()]
    costs = [(cost, words) for cost, words in COSTS if all(row["curves"].get(cost) for row in rows_of_all)]
    amounts = {cost: _common(rows_of_all, cost) for cost, _ in costs}
    head = ["arm", "at the last step"]
    head += [f"at {amounts[cost]:,} {words}" for cost, words in costs]
    head += [f"{words} to {bound:.0%}" for _, words in costs]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm, rows in runs.items():
        cells = [mean_text(_measured(rows, f"{curve}@late"))]
        cells += [mean_text(_measured(rows, f"{curve}@{cost}:{amounts[cost]}")) for cost, _ in costs]
        cells += [_reached(rows, cost, curve, bound) for cost, _ in costs]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _common(rows: Sequence[Result], cost: str) -> int:
    spent = min(float(row["curves"][cost][-1]) for row in rows)
    unit = 10 ** max(0, int(math.log10(max(spent, 1))) - 1)
    return int(spent // unit * unit)


def _reached(rows: Mapping[int, Result], cost: str, curve: str, bound: float) -> str:
    """What the runs took that got there, and how many did."""
    best, took = _measured(rows, f"{curve}@max"), _measured(rows, f"{cost}:{curve}>{bound}")
    got = [value for value, top in zip(took, best, strict=True) if top > bound]
    if len(got) == len(rows):
        return mean_text(got)
    return f"{len(got)} of {len(rows)} runs" + (f": {mean_text(got)}" if got else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """An arm's counterpart at the report's scale.

    Attributes:
        name: of that arm.
        gpus: that it is given.
        seconds: a step of its last stage, by ``magicrl plan``'s simulator.
        hours: of all its steps.
    """

    name: str
    gpus: int
    seconds: float
    hours: float


def simulate(ablation: Ablation, gpus: Sequence[int]) -> list[Simulated]:
    """Step times of the ablation's arms at scale ``paper``, each on its number of GPUs."""
    found: list[Simulated] = []
    for run, number in zip(plan_runs([ablation], "paper", [0]), gpus, strict=True):
        assert run.config.start.model is not None, "the report's arms start from a published model"
        plan = make_plan(run.config, load_shape(run.config.start.model), load_hardware(GPU), Options(gpus=number))
        name = next(arm for owner, arm in run.arms if owner == ablation.id)
        found.append(Simulated(name=name, gpus=number, seconds=plan.stages[-1].timing.seconds, hours=plan.hours))
    return found


def equal_time_table(runs: Runs, simulated: Sequence[Simulated], arm_of: Callable[[int], str]) -> str:
    """Our arms beside the report's: accuracy where each would have run equally long on GPUs that grow with it.

    Args:
        runs: of the tiny arms.
        simulated: the report's arms, in the order of ours.
        arm_of: our arm's name by place.
    """
    arms = [arm_of(place) for place in range(len(simulated))]
    least = min(
        len(row["curves"]["accuracy"]) * one.seconds
        for arm, one in zip(arms, simulated, strict=True)
        for row in runs.get(arm, {}).values()
    )
    lines = [
        "| arm here | the report's | GPUs | simulated s a step | steps in the same time | accuracy there "
        "| accuracy at the last step |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, one in zip(arms, simulated, strict=True):
        step = max(1, int(least / one.seconds))
        at = mean_text(_measured(runs.get(arm, {}), f"accuracy@{step}"))
        end = mean_text(_measured(runs.get(arm, {}), "test@1.0"))
        lines.append(f"| {arm} | {one.name} | {one.gpus} | {one.seconds:.0f} | {step} | {at} | {end} |")
    return "\n".join(lines)


def costs_page(ablations: Sequence[Ablation], found: Found) -> str:
    """The page of comparisons at equal cost; sections of ablations without results are left out."""
    known = {ablation.id: ablation for ablation in ablations}
    parts = [
        "# At equal cost\n",
        "Means over seeds, the range in brackets. Accuracy is that of five training steps at temperature 1, on "
        "problems that were not seen before (an epoch is longer than a run). Seconds are wall clock on a shared "
        f"machine. Simulated seconds are those of `magicrl plan` on {GPU} for the report's arms, lengths assumed as it "
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
            table = equal_time_table(found[number], simulate(known[number], (64, 32, 16)), lambda i, o=order: o[i])
            parts.append(f"## {title}: GPUs that grow with it\n\n{table}\n")
            parts.append(f"At equal tokens, the GPUs the same:\n\n{equal_cost_table(found[number], 'accuracy', 0.8)}\n")
    return "\n".join(parts)


def _stage_hours(ablation: Ablation) -> str:
    lines = ["| the report's arm | simulated s a step of its last stage | hours |", "|---|---|---|"]
    number = len(ablation.scales["paper"].arms)
    lines += [f"| {s.name} | {s.seconds:.0f} | {s.hours:.1f} |" for s in simulate(ablation, [64] * number)]
    return "The report's own arms on 64 GPUs, simulated:\n\n" + "\n".join(lines) + "\n"
