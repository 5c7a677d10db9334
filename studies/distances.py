"""Distances of a suite's variants from its reference: the section of the index, with a figure of pairs."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from magicrl.evaluation.statistics import Interval
from magicrl.reporting.charts import IntervalRow, interval_file
from magicrl.training.diagnosis import Measure
from studies.claims import Runs, Verdict, paired_values, students
from studies.definition import BASE_STRIDE, Ablation, Scale, Suite

Found: TypeAlias = Mapping[str, Runs]
"""Results by ablation, variant and (checkpoint, seed)."""
BETTER = "better rate"
_POINTS = Measure(key="reward", name="points from on-policy", per_problem="reward_per_problem")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def paragraph(text: str, first: str = "", rest: str = "") -> str:
    """Wrap one paragraph at 118 columns; ``first`` and ``rest`` indent its lines."""
    return textwrap.fill(
        " ".join(text.split()),
        118,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def distances(runs: Runs, reference: str = "on-policy") -> dict[str, Verdict]:
    """Return by variant its test accuracy minus that of the reference in points, paired by checkpoint and seed.

    "{}" in ``reference`` is the variant's ending: "CE-GPPO, 7e-5" minus "clip 0.20, 7e-5" for "clip 0.20, {}". A
    variant at its better rate is compared with the reference at its better rate.
    """
    found: dict[str, Verdict] = {}
    for arm in runs:
        ending = arm.partition(", ")[2]
        than = f"{reference}, {ending}" if ending == BETTER and "{}" not in reference else reference.format(ending)
        if arm != than and (verdict := _points(arm, than, "test@best", runs)):
            found[arm] = verdict
    return found


def _points(arm: str, than: str, measure: str, runs: Runs) -> Verdict | None:
    """Return ``arm`` minus ``than`` in points; None with fewer than two checkpoints that have both."""
    units, values = paired_values([(arm, measure), (than, measure)], runs)
    return students(arm, units, 100 * (values[:, 0] - values[:, 1]), bar=0.0) if len(set(units)) > 1 else None


def of_base(runs: Runs, place: int) -> Runs:
    """Return the results over the checkpoints of one base recipe."""
    return {
        arm: {unit: row for unit, row in rows.items() if unit[0] // BASE_STRIDE == place} for arm, rows in runs.items()
    }


def distance_section(suite: Suite, ablations: Sequence[Ablation], scale: Scale, found: Found, folder: Path) -> str:
    """Return the sections of distances from the reference, with a figure of pairs of variants, and of entropy control.

    The pairs are ``Suite.beside``, or each variant and the same with entropy control.
    """
    by_family = defaultdict[str, dict[str, Verdict]](dict)
    for a in ablations:
        runs, definition = found.get(a.id, {}), a.scales[scale]
        by_family[a.title.partition(", ")[2]] |= distances(runs, suite.reference)
        bases = (definition.base, *definition.more_bases) if definition.more_bases else ()
        for place, base in enumerate(bases):
            by_family[base.removesuffix(".toml")] |= distances(of_base(runs, place), suite.reference)
    arms = list(dict.fromkeys(arm for arms in by_family.values() for arm in arms))
    rows = [
        [
            arm,
            *(_shown(of.get(arm)) for of in by_family.values()),
        ]
        for arm in arms
    ]
    reference = suite.reference.format("equal rate")
    parts = [
        f"## Distance from {reference}\n",
        paragraph(
            f"Points of test accuracy at the best temperature above (+) or below (-) {reference}, with 95 % intervals "
            "over initial checkpoints. Uncorrected and without premises; the verdicts are below."
        )
        + "\n",
        markdown_table(["variant", *by_family], rows) + "\n",
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
        title = "Off-policy and entropy control" if suite.beside is None else f"{words[0]} and {words[1]}"
        (folder / "distances.svg").write_text(str(interval_file(title, drawn, words=words, measure=_POINTS)))
        parts.append(f"![{title}](distances.svg)\n")
    return "\n".join([*parts, *control_section({a.title.partition(", ")[2]: found.get(a.id, {}) for a in ablations})])


def control_section(by_family: Found) -> list[str]:
    """Return the section of entropy control by test temperature; nothing if no variant has a twin with control."""
    rows: list[list[str]] = []
    for family, runs in by_family.items():
        for arm in runs:
            if (control := f"{arm}, control") in runs:
                cells = [family, arm]
                for measure in ("test@0.0", "test@1.0"):
                    _, values = paired_values([(arm, measure), (control, measure)], runs)
                    cells += [*(f"{100 * mean:.1f}" for mean in values.mean(axis=0))]
                    cells.append(_shown(_points(control, arm, measure, runs)))
                rows.append(cells)
    if not rows:
        return []
    head = ("task", "variant", "greedy", "with control", "control gains", "at 1", "with control", "control gains")
    text = "Percent of test problems, greedy and at temperature 1, with 95 % intervals over initial checkpoints."
    return [f"## Entropy control, greedy and at temperature 1\n\n{text}\n\n{markdown_table(head, rows)}\n"]


def _shown(verdict: Verdict | None) -> str:
    return "" if verdict is None else f"{verdict.effect:+.0f} ({verdict.low:+.0f} to {verdict.high:+.0f})"


def _interval(verdict: Verdict) -> Interval:
    return Interval(mean=verdict.effect, low=verdict.low, high=verdict.high)
