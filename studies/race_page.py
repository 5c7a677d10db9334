"""The race's pages: who takes part (`methods_table`), and what its finished stages found (`results_page`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from magicrl.reporting.charts import IntervalRow, interval_file
from magicrl.reporting.read_folders import Interval
from magicrl.training.diagnosis import ACCURACY
from studies.claims import LEVEL, Verdict, holm, students
from studies.definition import Result, parse_measure
from studies.pages import markdown_table
from studies.racing import (
    Candidate,
    Condition,
    Family,
    Race,
    Stage,
    entropy_error,
    failures,
    fit_sigmoid,
    ranking_agreement,
    regrets,
    score,
    stages,
)

TEMPERATURES = ("0", "0.6", "1")
Compared = TypeVar("Compared")
Scored = Callable[[Result], float]


def methods_table(race: Race) -> str:
    """A row for each method, in Markdown."""
    rows: list[tuple[str, ...]] = []
    for method in race.methods:
        own = "; ".join(", ".join(f"`{o}`" for o in setting) for setting in method.own if setting) or "none"
        doors = ", ".join(f"`{override}`" for override in method.set if not override.startswith("entropy.target"))
        kind = "" if method.kind == "method" else f" ({method.kind})"
        cells = (
            f"{method.name}{kind}",
            method.source,
            f"`{method.formula}`",
            doors or "below",
            own,
            f"`{method.shown_by}`",
        )
        rows.append(tuple(cell.replace("|", "\\|") for cell in cells))
    return markdown_table(("method", "source", "formula", "through", "own settings tried", "shown by"), rows)


def results_page(race: Race, results: Mapping[str, Result]) -> str:
    """What the stages found that have all their results, in Markdown."""
    text = [
        "# The race: results",
        "Written by `python -m studies race`. The score is test accuracy after training at the best of greedy, 0.6 "
        "and 1. Rules, methods and conditions: [the race](../race.md).",
    ]
    for stage in stages(race, results):
        if stage.missing(results):
            text.append(
                f"{stage.name.capitalize()}: {len(stage.missing(results))} of {len(stage.runs)} runs are missing."
            )
        elif stage.name == "tuning":
            text += ["## Tuning", _tuning_table(race, stage, results)]
        elif stage.name == "one rate":
            text += [
                "## At one learning rate",
                _round_table(race, stage, results),
                _one_rate_table(race, stage, results),
            ]
        elif stage.name == "final":
            text += ["## Final", *_final(race, stage, results)]
        else:
            text += [f"## {stage.name.capitalize()}", _round_table(race, stage, results)]
    return "\n\n".join(text) + "\n"


def final_figure(race: Race, results: Mapping[str, Result]) -> str | None:
    """The yardstick beside the finalist with the least regret, by condition, as SVG; None before the final is whole."""
    *_, stage = stages(race, results)
    if stage.name != "final" or stage.missing(results):
        return None
    lost = regrets(_by_family(race, stage, results))
    yardstick = next(entrant for entrant in stage.entrants if entrant.method == race.yardstick)
    other = min((e for e in stage.entrants if e is not yardstick), key=lambda entrant: lost[entrant.method])

    def interval(entrant: Candidate, condition: Condition) -> Interval:
        starts = sorted({s for _, _, _, s in stage.runs})
        means = [_mean(_of(stage, results, score, entrant=entrant, condition=condition, start=s)) for s in starts]
        found = students(entrant.method, starts, np.array(means), bar=0.0)
        return Interval(mean=found.effect, low=found.low, high=found.high)

    rows = [IntervalRow(str(c), interval(yardstick, c), interval(other, c)) for c in race.conditions.every()]
    words = (f"{yardstick.method} at {_rate(yardstick)}", f"{other.method} at {_rate(other)}")
    return str(interval_file("Test accuracy by condition, three families", rows, words=words, measure=ACCURACY))


def _tuning_table(race: Race, stage: Stage, results: Mapping[str, Result]) -> str:
    """A method's best setting, and how much its own numbers and the learning rate move it."""
    tried = stage.scores(results, score)
    rows: list[tuple[str, ...]] = []
    for method in race.methods:
        own = {c: tried[c] for c in stage.entrants if c.method == method.name}
        best = max(own, key=lambda c: own[c])
        by_setting = _best_by(own, lambda c: c.set[:-1])
        by_rate = _best_by(own, lambda c: c.set[-1])
        rows.append(
            (
                method.name,
                f"{own[best]:.3f}",
                _rate(best),
                ", ".join(f"`{o}`" for o in best.set[len(method.set) : -1]) or "none",
                f"{np.median(list(own.values())):.3f}",
                f"{max(by_setting) - min(by_setting):.3f}" if len(by_setting) > 1 else "none",
                f"{max(by_rate) - min(by_rate):.3f}",
            )
        )
    rows.sort(key=lambda row: -float(row[1]))
    told = f"{race.conditions.tuning}, {race.families[0].name}, starts {', '.join(map(str, race.tuning_starts))}."
    columns = ("method", "best", "its learning rate", "its own setting", "median of nine", "spread by own", "by rate")
    note = (
        'A "spread" is the best of the settings that share one number, over those numbers, largest less smallest: '
        "what a wrong choice of it costs."
    )
    return "\n\n".join((told, markdown_table(columns, rows), note))


def _best_by(scores: Mapping[Candidate, float], shared: Callable[[Candidate], object]) -> list[float]:
    found: dict[object, float] = {}
    for candidate, value in scores.items():
        found[shared(candidate)] = max(found.get(shared(candidate), 0.0), value)
    return list(found.values())


def _round_table(race: Race, stage: Stage, results: Mapping[str, Result]) -> str:
    whole = stage.scores(results, score)
    conditions = list(dict.fromkeys(condition for _, _, condition, _ in stage.runs))
    rows = [
        (
            entrant.method,
            _rate(entrant),
            f"{whole[entrant]:.3f}",
            *(f"{_mean(_of(stage, results, score, entrant=entrant, condition=c)):.3f}" for c in conditions),
            _failed(race, stage, results, entrant),
        )
        for entrant in sorted(whole, key=lambda entrant: -whole[entrant])
    ]
    columns = ("method", "its learning rate", "score", *map(str, conditions), "collapse, blow-up, destruction")
    return markdown_table(columns, rows)


def _rate(entrant: Candidate) -> str:
    return entrant.set[-1].partition("=")[2]


def _failed(race: Race, stage: Stage, results: Mapping[str, Result], entrant: Candidate) -> str:
    runs = [results[run.key] for (_, own, _, _), run in stage.runs.items() if own == entrant]
    found = [name for run in runs for name in failures(run, race.bounds)]
    return ", ".join(str(found.count(name)) for name in ("collapse", "blow-up", "destruction")) + f" of {len(runs)}"


def _of(
    stage: Stage,
    results: Mapping[str, Result],
    of: Scored,
    *,
    entrant: Candidate,
    family: Family | None = None,
    condition: Condition | None = None,
    start: int | None = None,
) -> list[float]:
    """A measure of an entrant's runs in a stage, of one family, condition or start where these are given."""
    return [
        of(results[run.key])
        for (named, own, c, s), run in stage.runs.items()
        if own == entrant
        and (family is None or named == family.name)
        and (condition is None or c == condition)
        and (start is None or s == start)
    ]


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


def _final(race: Race, stage: Stage, results: Mapping[str, Result]) -> list[str]:
    return [
        _round_table(race, stage, results),
        "### By family",
        _family_table(race, stage, results),
        "### A default that needs no tuning per family",
        _default_table(race, stage, results),
        "### At equal cost, and by fitted curves",
        "Runs with fresh weights: training curves are of what was sampled. A fit counts where half of its rise is "
        "within the run.",
        _cost_table(race, stage, results),
        "### Which rankings survive",
        _agreement_table(race, stage, results),
    ]


def _family_table(race: Race, stage: Stage, results: Mapping[str, Result]) -> str:
    """Scores with 95 % intervals over starts, and regret against each family's best."""
    lost = regrets(_by_family(race, stage, results))
    rows = []
    for entrant in stage.entrants:
        cells = [_with_interval(stage, results, entrant, family) for family in race.families]
        rows.append((entrant.method, *cells, f"{lost[entrant.method]:.3f}"))
    return markdown_table(("method", *(f.name for f in race.families), "mean regret"), rows)


def _by_family(race: Race, stage: Stage, results: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    return {
        family.name: {e.method: _mean(_of(stage, results, score, entrant=e, family=family)) for e in stage.entrants}
        for family in race.families
    }


def _by_start(
    stage: Stage, results: Mapping[str, Result], entrant: Candidate, family: Family
) -> tuple[list[int], NDArray[np.float64]]:
    """The family's starts, and the entrant's mean over conditions from each."""
    starts = sorted({s for named, _, _, s in stage.runs if named == family.name})
    values = [_mean(_of(stage, results, score, entrant=entrant, family=family, start=s)) for s in starts]
    return starts, np.array(values)


def _with_interval(stage: Stage, results: Mapping[str, Result], entrant: Candidate, family: Family) -> str:
    found = students(entrant.method, *_by_start(stage, results, entrant, family), bar=0.0)
    return f"{found.effect:.3f} ({found.low:.3f} to {found.high:.3f})"


def _default_table(race: Race, stage: Stage, results: Mapping[str, Result]) -> str:
    """Distances from each family's best, paired by start, and whether they lie within the margin (C15).

    Which is the best is decided by the same runs, which makes every other look worse than it is, and the best itself is
    not tested.
    """
    found: dict[tuple[Candidate, str], Verdict] = {}
    for family in race.families:
        values = {entrant: _by_start(stage, results, entrant, family) for entrant in stage.entrants}
        best = max(values, key=lambda entrant: values[entrant][1].mean())
        for entrant in stage.entrants:
            if entrant is not best:
                starts, own = values[entrant]
                found[entrant, family.name] = students(entrant.method, starts, own - values[best][1], bar=-race.margin)
    words = _decided(found, holds="within", fails="beyond")

    def cell(entrant: Candidate, family: Family) -> tuple[str, bool]:
        if (one := found.get((entrant, family.name))) is None:
            return "the best", True
        word = words[entrant, family.name]
        return f"{_effect(one)}, {word}", word == "within"

    rows: list[tuple[str, ...]] = []
    defaults: list[str] = []
    for entrant in stage.entrants:
        cells = [cell(entrant, family) for family in race.families]
        rows.append((entrant.method, *(text for text, _ in cells)))
        if all(near for _, near in cells):
            defaults.append(entrant.method)
    told = (
        f"Distance from the best of each family; within {race.margin:g} of it, Holm over both sides of all, {LEVEL:g}. "
        f"In every family: {', '.join(defaults) or 'none'}."
    )
    return "\n\n".join((told, markdown_table(("method", *(f.name for f in race.families)), rows)))


def _decided(found: Mapping[Compared, Verdict], *, holds: str, fails: str) -> dict[Compared, str]:
    """Which side of its bar each mean is on, or ``undecided``: Holm over both sides of all."""
    corrected = holm([p for verdict in found.values() for p in (verdict.p_holds, verdict.p_fails)])
    sides = zip(corrected[::2], corrected[1::2], strict=True)
    return {
        key: holds if above < LEVEL else fails if below < LEVEL else "undecided"
        for key, (above, below) in zip(found, sides, strict=True)
    }


def _effect(one: Verdict) -> str:
    return f"{one.effect:+.3f} ({one.low:+.3f} to {one.high:+.3f})"


def _one_rate_table(race: Race, stage: Stage, results: Mapping[str, Result]) -> str:
    """How far each finalist ends above each baseline at one rate, paired by start, against the margin (C16)."""
    family = race.families[0]
    values = {entrant: _by_start(stage, results, entrant, family) for entrant in stage.entrants}
    baselines = [entrant for entrant in stage.entrants if entrant.number == race.budget]
    finalists = [entrant for entrant in stage.entrants if entrant not in baselines]
    found = {
        (ours, theirs): students(ours.method, values[ours][0], values[ours][1] - values[theirs][1], bar=race.margin)
        for ours, theirs in product(finalists, baselines)
    }
    words = _decided(found, holds="holds", fails="does not hold")
    rows = [
        (ours.method, *(f"{_effect(found[ours, theirs])}, {words[ours, theirs]}" for theirs in baselines))
        for ours in finalists
    ]
    told = f"Distance above a baseline, tested against {race.margin:g}; Holm over both sides of all, {LEVEL:g}."
    columns = ("method", *(f"above {theirs.method} at {_rate(theirs)}" for theirs in baselines))
    return "\n\n".join((told, markdown_table(columns, rows)))


def _cost_table(race: Race, stage: Stage, results: Mapping[str, Result]) -> str:
    """Training accuracy where the cheapest run of a condition ends, entropy about its target, and ScaleRL's sigmoid.

    Curves are of what was sampled, so that only runs with fresh weights tell of the trained policy.
    """
    target = {family.name: family.target for family in race.families}
    rows = []
    for entrant in stage.entrants:
        fresh = [p for p in stage.runs if p[1] == entrant and p[2].staleness == 0]
        own = [(p, row) for p in fresh if not (row := results[stage.runs[p].key])["stopped"]]
        at = {cost: _mean(_at_equal(stage, results, place, row, cost) for place, row in own) for cost in COSTS}
        error = _mean(entropy_error(row["curves"], target[place[0]]) for place, row in own)
        fits = [fit_sigmoid(*_course(row)) for _, row in own]
        found = [fit for fit in fits if fit is not None]
        rows.append(
            (
                entrant.method,
                *(f"{at[cost]:.3f}" for cost in COSTS),
                f"{error:.3f}",
                f"{np.median([fit.asymptote for fit in found]):.3f}" if found else "none",
                f"{np.median([fit.midpoint for fit in found]):.0f}" if found else "none",
                f"{len(found)} of {len(fresh)}",
            )
        )
    columns = (
        "method",
        *(f"equal {cost}" for cost in COSTS),
        "entropy error, nats",
        "asymptote",
        "midpoint, tokens",
        "fits",
    )
    return markdown_table(columns, rows)


COSTS = ("tokens", "updates", "seconds")


def _course(row: Result) -> tuple[list[float], list[float | None], float]:
    accuracy = list(row["curves"]["accuracy"])
    known = [value for value in accuracy[:3] if value is not None]
    return list(row["curves"]["tokens"]), accuracy, float(np.mean(known)) if known else 0.0


def _at_equal(
    stage: Stage, results: Mapping[str, Result], place: tuple[str, Candidate, Condition, int], row: Result, cost: str
) -> float:
    """Training accuracy at what the cheapest entrant spent, of those that did not stop, in the same place."""
    family, _, condition, start = place
    beside = [results[stage.runs[family, entrant, condition, start].key] for entrant in stage.entrants]
    amount = min(_spent(other, cost) for other in beside if not other["stopped"])
    # seconds are the clock's, of a busy machine: the run's CPU seconds, spread over its steps as the clock's were
    share = amount * row["curves"][cost][-1] / _spent(row, cost) if _spent(row, cost) else 0.0
    return parse_measure(f"accuracy@{cost}:{math.floor(1000 * share) / 1000}")(row)


def _spent(row: Result, cost: str) -> float:
    return float(row["cpu_seconds"]) if cost == "seconds" else float(row["curves"][cost][-1])


def _agreement_table(race: Race, stage: Stage, results: Mapping[str, Result]) -> str:
    """Mean Kendall's tau of the entrants' rankings over pairs of starts, temperatures, families and conditions."""
    starts = sorted({s for _, _, _, s in stage.runs})
    conditions = race.conditions.every()

    def ranked(of: Scored = score, **only: object) -> dict[str, float]:
        return {e.method: _mean(_of(stage, results, of, entrant=e, **only)) for e in stage.entrants}  # type: ignore[arg-type]

    rankings: Mapping[str, Sequence[Mapping[str, float]]] = {
        "starts": [ranked(start=start) for start in starts],
        "test temperatures": [ranked(partial(score, temperature=temperature)) for temperature in TEMPERATURES],
        "families": [ranked(family=family) for family in race.families],
        "conditions": [ranked(condition=condition) for condition in conditions],
    }
    rows = [(name, str(len(own)), f"{ranking_agreement(own):.2f}") for name, own in rankings.items()]
    return markdown_table(("over pairs of", "how many", "mean Kendall's tau"), rows)
