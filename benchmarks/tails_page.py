"""The section on long tails of docs/performance.md, from what `rollout_tails.py` found."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

SCHEDULES = {
    "lock_step": "batches, no refill",
    "issued": "refill, issue order",
    "past_lengths": "refill, longest first by past lengths",
    "oracle": "refill, longest first by an oracle",
    "ahead": "refill, issue order, one step ahead",
}


def section(studies: Sequence[dict[str, Any]], engine: dict[str, Any], shapes: Sequence[dict[str, Any]]) -> str:
    """What the page says."""
    issued, first, alone = (engine[name] for name in ("issued", "longest_first", "longest_alone"))
    parts = [
        "## Long tails",
        _wrapped(
            "A step waits for its longest response. `python benchmarks/rollout_tails.py` plays steps again, recorded "
            "ones and a made-up long tail (log-normal, median 2,000 tokens, at most 16,384), on fewer rows than "
            "responses. Time is counted in passes of the model (a device bound by reading weights) and in CPU seconds "
            "at SmolLM2's measured pass costs. The *bound* is the larger of the longest response alone and all tokens "
            "at the best rate of so many rows; a step that was asked for ahead can be below it, since its responses "
            "began before it."
        ),
        _schedule_table(studies),
        _wrapped(
            "How much past lengths save depends on how far they predict: "
            + "; ".join(_predicts(study) for study in studies)
            + ". Where they do not, their order is as good as any, so that `longest_first` stays the default of "
            "`rollout.start_order`; where every response has a row at once nothing is reordered."
        ),
        _wrapped(
            f"The engine itself (tiny model, {engine['responses']} responses on {engine['rows']} rows): "
            f"{issued['passes']} passes and {issued['cpu_s']:.2f} CPU seconds in issue order, {first['passes']} and "
            f"{first['cpu_s']:.2f} longest first by an oracle; the longest response alone {alone['passes']} and "
            f"{alone['cpu_s']:.2f}."
        ),
        _wrapped(
            "**Over-sampling with an early stop** is not offered. A step that asks for a third more groups than it "
            "uses and drops those that are not complete in time takes this much time for each group that it uses, "
            "against waiting for all, and what it keeps differs from what was drawn:"
        ),
        _dropping_table(studies),
        _wrapped(
            "MAGIC's objective is over the prompts drawn and all of their responses, and its stages need long "
            "responses to be seen and cut at T, so what dropping gains it pays with a biased batch. Asking one step "
            "ahead (`rollout.max_staleness = 1`, the last schedule above) fills the same empty rows, uses every group "
            "in the order of its draw and drops none; its price is staleness, which a correction answers for "
            "([asynchronous mode](asynchronous.md))."
        ),
        _wrapped(
            "**Fixed shapes for CUDA graphs** ([engines](engines.md#decoding-on-a-gpu)). One step of the made-up long "
            "tail, prompts of 200 tokens: the graphs that it needs, which later steps find captured, and what rounding "
            "up computes and reads beyond what is needed. Times on a GPU are not known."
        ),
        _shape_table(shapes),
    ]
    return "\n\n".join(parts)


def _shape_table(shapes: Sequence[dict[str, Any]]) -> str:
    lines = ["| rows | passes | graphs | rows computed / needed | cache read / held |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['rows']} | {row['passes']} | {row['graphs']} | {row['rows_computed_over_needed']:.2f} | "
        f"{row['cache_read_over_held']:.2f} |"
        for row in shapes
    ]
    return "\n".join(lines)


def _predicts(study: dict[str, Any]) -> str:
    """The correlation and the gain of one source, on the fewest rows."""
    row = study["cases"][-1]["schedules"]["past_lengths"]
    gain = f"{row['passes_over_issued']:.2f} (standard error {row['passes_over_issued_standard_error']:.2f})"
    return f"{study['name']}, correlation {study['past_correlation']:.2f}, passes over issue order {gain}"


def _schedule_table(studies: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| steps | rows | schedule | passes / longest alone | passes / bound | CPU time / bound "
        "| passes / issue order |",
        "|---|---|---|---|---|---|---|",
    ]
    for study in studies:
        for case in study["cases"]:
            for name, label in SCHEDULES.items():
                row = case["schedules"][name]
                cells = [row[f"passes_over_{what}"] for what in ("longest_alone", "bound")]
                cells += [row["seconds_over_bound"], row["passes_over_issued"]]
                where = f"{study['name']} | {study['responses']} on {case['rows']}"
                lines.append(f"| {where} | {label} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def _dropping_table(studies: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| steps | rows | passes a used group | mean tokens kept / all | accuracy kept / all | truncated kept / all "
        "| groups with signal kept / all |",
        "|---|---|---|---|---|---|---|",
    ]
    for study in studies:
        for case in study["cases"]:
            drop = case["dropping"]
            kinds = {"mean_tokens": ".0f", "accuracy": ".3f", "truncated": ".3f", "mixed_groups": ".3f"}
            cells = [_pair(drop.get(key), form) for key, form in kinds.items()]
            lines.append(
                f"| {study['name']} | {study['responses']} on {case['rows']} | x {drop['passes_per_used_group']:.2f} | "
                f"{' | '.join(cells)} |"
            )
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _pair(values: dict[str, float] | None, form: str) -> str:
    return "" if values is None else f"{values['kept']:{form}} / {values['all']:{form}}"
