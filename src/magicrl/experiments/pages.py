"""Pages of a study: one an ablation, with its curves and verdicts, an index, and the verdicts as JSON Lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magicrl.experiments.claims import Runs, Verdict, decide
from magicrl.experiments.definition import Ablation, Claim, Scale
from magicrl.experiments.measures import Result
from magicrl.experiments.results import by_arm, rounded
from magicrl.reporting.charts import Chart, Points, Series, Unit
from magicrl.reporting.curves import arm_curve, smoothed
from magicrl.reporting.svg import draw

CLAIMS_FILE = "claims.jsonl"
FIGURES: tuple[tuple[str, str, Unit], ...] = (
    ("accuracy", "Training accuracy", "percent"),
    ("entropy", "Entropy of the rollouts, nats a token", "number"),
    ("truncation", "Truncated responses", "percent"),
    ("length", "Mean response length, tokens", "number"),
    ("clip", "Tokens whose ratio is clipped", "percent"),
    ("kl", "KL to the reference", "number"),
)
WORDS = {"holds": "holds", "does not hold": "**does not hold**", "undecided": "undecided", "not run": "not run"}


def write_pages(ablations: Sequence[Ablation], scale: Scale, results: Mapping[str, Result], folder: Path) -> Path:
    """Write the pages of ``ablations`` from ``results`` into ``folder``; returns the index.

    Args:
        ablations: all of them are corrected together, so that a verdict depends on which are given.
        scale: whose results.
        results: by key.
        folder: gets ``index.md``, a page and its figures an ablation, and ``claims.jsonl``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = by_arm(ablations, scale, results)
    claims = [claim for ablation in ablations for claim in ablation.claims]
    verdicts = {verdict.claim: verdict for verdict in decide(claims, found)}
    rows = [claim_row(a, claim, verdicts[claim.id]) for a in ablations for claim in a.claims]
    (folder / CLAIMS_FILE).write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    for ablation in ablations:
        page = ablation_page(ablation, scale, found.get(ablation.id, {}), verdicts, folder)
        (folder / f"{ablation.id}.md").write_text(page)
    index = folder / "index.md"
    index.write_text(index_page(ablations, scale, verdicts, results))
    return index


def claim_row(ablation: Ablation, claim: Claim, verdict: Verdict) -> dict[str, Any]:
    """A line of ``claims.jsonl``: numbers that were not measured are null."""
    numbers = {
        key: (None if isinstance(value, float) and not math.isfinite(value) else value)
        for key, value in asdict(verdict).items()
        if key not in ("claim", "decision")
    }
    return {
        "ablation": ablation.id,
        "claim": claim.id,
        "says": claim.says,
        "verdict": verdict.decision,
        **{key: rounded(value) if isinstance(value, float) else value for key, value in numbers.items()},
    }


def ablation_page(ablation: Ablation, scale: Scale, runs: Runs, verdicts: Mapping[str, Verdict], folder: Path) -> str:
    """The page of one ablation; writes its figures beside it."""
    parts = [
        f"# {ablation.id}. {ablation.title}\n",
        f"{ablation.question}\n",
        f"The report: {ablation.says}\n",
        f"## Setting\n\n{_settings(ablation, scale, runs)}\n",
        f"## Verdicts\n\n{verdict_table(ablation.claims, verdicts)}\n",
    ]
    if ablation.notes:
        parts.append(f"## What it means\n\n{ablation.notes.strip()}\n")
    figures = [_figure(ablation, runs, name, title, unit, folder) for name, title, unit in FIGURES]
    shown = [figure for figure in figures if figure]
    if shown:
        caption = (
            "Lines are means over the seeds that every step has, bands reach from the lowest seed to the highest.\n"
        )
        parts.append("## Curves\n\n" + caption + "\n" + "\n".join(shown))
    parts.append(f"Reproduce: `magicrl experiment run {ablation.id} --scale {scale}`\n")
    return "\n".join(parts)


def _settings(ablation: Ablation, scale: Scale, runs: Runs) -> str:
    definition = ablation.scales[scale]
    lines = [
        f"Base recipe `{definition.base}`" + _listed(definition.set),
        "",
        "| arm | settings | seeds | CPU s a run |",
    ]
    lines.append("|---|---|---|---|")
    for arm in definition.arms:
        rows = runs.get(arm.name, {}).values()
        seconds = [row["cpu_seconds"] for row in rows]
        mean = f"{sum(seconds) / len(seconds):.0f}" if seconds else ""
        after = f"goes on from {arm.after}; " if arm.after else ""
        settings = after + (", ".join(f"`{text}`" for text in arm.set) or "as the base")
        lines.append(f"| {arm.name} | {settings} | {len(seconds)} | {mean} |")
    if "paper" in ablation.scales and scale != "paper":
        lines += ["", "The report's own arms: " + ", ".join(arm.name for arm in ablation.scales["paper"].arms) + "."]
    return "\n".join(lines)


def _listed(overrides: Sequence[str]) -> str:
    return (", with " + ", ".join(f"`{text}`" for text in overrides) if overrides else "") + "."


def verdict_table(claims: Sequence[Claim], verdicts: Mapping[str, Verdict]) -> str:
    """Claims with verdict, effect, interval, bar, p-value and seeds."""
    lines = [
        "| claim | verdict | effect (95 % interval) | least effect that counts | p, one-sided | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for claim in claims:
        verdict = verdicts[claim.id]
        if verdict.decision == "not run":
            lines.append(f"| {claim.id} {claim.says} | not run | | | | {verdict.seeds} |")
            continue
        effect = f"{verdict.effect:.3g} ({verdict.low:.3g} to {verdict.high:.3g})"
        seeds = str(verdict.seeds)
        if verdict.decision == "undecided":
            needed = verdict.seeds_needed
            seeds += f" (about {needed} would decide)" if needed else " (no number would decide)"
        lines.append(
            f"| {claim.id} {claim.says} | {WORDS[verdict.decision]} | {effect} | {verdict.bar:.3g} "
            f"| {verdict.p:.2g} | {seeds} |"
        )
    return "\n".join(lines)


def _figure(ablation: Ablation, runs: Runs, name: str, title: str, unit: Unit, folder: Path) -> str:
    """The Markdown of one figure, written as SVG; empty where no run has the curve or all of it is 0."""
    lines = [_line(arm, slot, list(by_seed.values()), name) for slot, (arm, by_seed) in enumerate(runs.items())]
    drawn = tuple(line for line in lines if line.points)
    if not any(y for line in drawn for _, y in line.points):
        return ""
    chart = Chart(key=name, title=title, series=drawn, unit=unit, y_low=0.0)
    path = folder / f"{ablation.id}-{name}.svg"
    path.write_text(str(draw(chart, alone=True)))
    return f"![{title}]({path.name})\n"


def _line(arm: str, slot: int, rows: Sequence[Result], name: str) -> Series:
    curve = arm_curve([smoothed(_points(row, name), ()) for row in rows])
    several = len(rows) > 1
    return Series(
        label=arm,
        points=tuple((p.step, p.mean) for p in curve.points),
        band=tuple((p.step, p.low, p.high) for p in curve.points) if several else (),
        color=slot % 6,
    )


def _points(row: Result, name: str) -> Points:
    values: Sequence[float | None] = row["curves"].get(name, ())
    return tuple((float(step), value) for step, value in enumerate(values, start=1) if value is not None)


def index_page(
    ablations: Sequence[Ablation], scale: Scale, verdicts: Mapping[str, Verdict], results: Mapping[str, Result]
) -> str:
    """All verdicts on one page."""
    used = [row for row in results.values() if row["scale"] == scale]
    counts = {word: sum(v.decision == word for v in verdicts.values()) for word in WORDS}
    lines = [
        "# The ablations of the report, run here\n",
        f"Scale `{scale}`: {len(used)} runs, {sum(row['cpu_seconds'] for row in used) / 60:.0f} CPU minutes. "
        + ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        + ". Seeds are the unit; p-values are corrected by Holm over all claims of this page.\n",
    ]
    for ablation in ablations:
        lines.append(f"## [{ablation.id}. {ablation.title}]({ablation.id}.md)\n")
        lines.append(f"{ablation.question} The report: {ablation.says}\n")
        lines.append(verdict_table(ablation.claims, verdicts) + "\n")
    return "\n".join(lines)
