"""Pages of a study: one an ablation, an index, settings, questions, costs, figures, and the verdicts as JSON Lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magicrl.experiments.advice import advice_page, check_advice, fill, load_advice
from magicrl.experiments.claims import Runs, Verdict, decide
from magicrl.experiments.costs import costs_page, mean_text
from magicrl.experiments.definition import Ablation, Arm, Claim, LevelClaim, Scale, shipped_ablations
from magicrl.experiments.measures import Result, parse_measure
from magicrl.experiments.report_figures import curve_chart, figures_page, write_chart
from magicrl.experiments.results import by_arm, rounded
from magicrl.experiments.wording import WORDS, numbers_of, seeds_of
from magicrl.reporting.charts import Unit

_TEST, _ENTROPY = parse_measure("test@1.0"), parse_measure("entropy@late")
CLAIMS_FILE = "claims.jsonl"
FIGURES: tuple[tuple[str, str, Unit], ...] = (
    ("accuracy", "Training accuracy", "percent"),
    ("accuracy_nontruncated", "Training accuracy of responses that were not cut", "percent"),
    ("validation", "Validation accuracy", "percent"),
    ("entropy", "Entropy of the rollouts, nats a token", "number"),
    ("truncation", "Truncated responses", "percent"),
    ("length", "Mean response length, tokens", "number"),
    ("clip", "Tokens whose ratio is clipped", "percent"),
    ("kl", "KL to the reference", "number"),
)


def write_pages(ablations: Sequence[Ablation], scale: Scale, results: Mapping[str, Result], folder: Path) -> Path:
    """Write the pages of ``ablations`` from ``results`` into ``folder``; returns the index.

    Args:
        ablations: all of them are corrected together, so that a verdict depends on which are given; those that are not
            defined at this scale are left out.
        scale: whose results.
        results: by key.
        folder: gets ``index.md``, a page and its figures an ablation, ``settings.md``, ``questions.md``, ``costs.md``,
            ``figures.md`` and ``claims.jsonl``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ablations = [ablation for ablation in ablations if scale in ablation.scales]
    found = by_arm(ablations, scale, results)
    claims = [claim for ablation in ablations for claim in ablation.claims]
    verdicts = {verdict.claim: verdict for verdict in decide(claims, found)}
    rows = [claim_row(a, claim, verdicts[claim.id]) for a in ablations for claim in a.claims]
    (folder / CLAIMS_FILE).write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    for ablation in ablations:
        page = ablation_page(ablation, scale, found.get(ablation.id, {}), verdicts, folder)
        (folder / f"{ablation.id}.md").write_text(page)
    advice = load_advice()
    check_advice(advice, [*shipped_ablations(), *ablations])
    for name in ("settings", "questions"):
        (folder / f"{name}.md").write_text(advice_page(name, ablations, verdicts, advice))
    (folder / "costs.md").write_text(costs_page(ablations, found))
    (folder / "figures.md").write_text(figures_page(found, folder))
    index = folder / "index.md"
    index.write_text(index_page(ablations, scale, verdicts, results))
    return index


def claim_row(ablation: Ablation, claim: Claim, verdict: Verdict) -> dict[str, Any]:
    """A line of ``claims.jsonl``: numbers that were not measured are null."""
    numbers = {key: value for key, value in asdict(verdict).items() if key not in ("claim", "decision", "null")}
    if isinstance(claim, LevelClaim) and claim.direction == "below":  # tested turned round; told as it was measured
        numbers |= {"effect": -verdict.effect, "low": -verdict.high, "high": -verdict.low, "bar": claim.bound}
    numbers = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in numbers.items()}
    return {
        "ablation": ablation.id,
        "claim": claim.id,
        "says": claim.says,
        "kind": claim.kind,
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
        claims = {claim.id: claim for claim in ablation.claims}
        parts.append(f"## What it means\n\n{fill(ablation.notes, verdicts, claims)}\n")
    charts = [curve_chart(runs, f"{ablation.id}-{name}", name, title, unit) for name, title, unit in FIGURES]
    shown = [write_chart(chart, folder) for chart in charts if chart is not None]
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
        "| arm | settings | seeds | CPU s a run | test accuracy | entropy in the end |",
        "|---|---|---|---|---|---|",
    ]
    for arm in definition.arms:
        rows = list(runs.get(arm.name, {}).values())
        seconds = [row["cpu_seconds"] for row in rows]
        mean = f"{sum(seconds) / len(seconds):.0f}" if seconds else ""
        ends = " | ".join(mean_text([measure(row) for row in rows]) for measure in (_TEST, _ENTROPY))
        lines.append(f"| {arm.name} | {_arm_settings(arm)} | {len(seconds)} | {mean} | {ends} |")
    if "paper" in ablation.scales and scale != "paper":
        theirs = ablation.scales["paper"]
        lines += ["", f"The report's: base recipe `{theirs.base}`" + _listed(theirs.set), ""]
        lines += ["| arm | settings |", "|---|---|"]
        lines += [f"| {arm.name} | {_arm_settings(arm)} |" for arm in theirs.arms]
    return "\n".join(lines)


def _arm_settings(arm: Arm) -> str:
    after = f"goes on from {arm.after}; " if arm.after else ""
    return after + (", ".join(f"`{text}`" for text in arm.set) or "as the base")


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
        numbers = numbers_of(claim, verdict)
        lines.append(
            f"| {claim.id} {claim.says} | {WORDS[verdict.decision]} | {numbers.effect} ({numbers.interval}) "
            f"| {numbers.bar} | {verdict.p:.2g} | {seeds_of(verdict)} |"
        )
    return "\n".join(lines)


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
        + ". Seeds are the unit; p-values are as measured, the verdicts corrected by Holm over all claims of this "
        "page. A level is printed as measured; the effect of an equality is what is left of its margin.\n",
    ]
    lines.append(
        "[Which settings should I use?](settings.md) [What readers ask](questions.md) [At equal cost](costs.md) "
        "[The report's figures](figures.md)\n"
    )
    for ablation in ablations:
        lines.append(f"## [{ablation.id}. {ablation.title}]({ablation.id}.md)\n")
        lines.append(f"{ablation.question} The report: {ablation.says}\n")
        lines.append(verdict_table(ablation.claims, verdicts) + "\n")
    return "\n".join(lines)
