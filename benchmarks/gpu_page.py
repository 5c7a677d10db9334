"""The section on GPUs of docs/performance.md, from what `gpu.py` found; where that is nothing it says so.

python benchmarks/gpu_page.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from common import FIGURES, PERFORMANCE, put_section, table

JSON = FIGURES / "bench-gpu.json"
WHAT = (
    "`python benchmarks/gpu.py` measures on one CUDA device (80 GB or more) the head's kernels beside their matrix "
    "products, the engine's steps at 1K and 16K tokens with CUDA graphs and without beside the reading of weights and "
    "cache, the learner's MFU and memory at 16K and 32K tokens beside what `magicrl plan` expects (1.5B and 7B "
    "architectures, random weights), and where the time of a step goes. `--parts head,engine,learner,profile` runs "
    "some of it. It writes `bench-gpu.json` beside the other figures, and this section."
)
Cases = dict[str, dict[str, Any]]
Rows: TypeAlias = Iterator[Sequence[object]]


def section(cases: Cases) -> list[str]:
    """The page's part: tables of what is there, or that nothing is."""
    lines = ["## On a GPU", "", WHAT, ""]
    if not cases:
        return [*lines, "**Not measured**: it has not been run on a GPU yet."]
    runs = {(case["run"]["machine"]["started"][:10], case["run"]["settings"]["device"]) for case in cases.values()}
    lines.append("; ".join(f"{device}, {date}" for date, device in sorted(runs)) + ".")
    for columns, rows_of in TABLES.items():
        if rows := list(rows_of(cases)):
            lines += ["", *table(columns, rows)]
    return lines


def write(page: Path, figures: Path) -> None:
    """Put the section made from ``figures``, if these exist, into ``page``."""
    put_section(page, "gpu", section(json.loads(figures.read_text())["cases"] if figures.exists() else {}))


def _of(cases: Cases, part: str, key: str) -> dict[str, dict[str, Any]]:
    """Cases of a part that have figures under ``key``."""
    return {name.partition("-")[2]: c for name, c in cases.items() if name.startswith(f"{part}-") and key in c}


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _heads(cases: Cases) -> Rows:
    for name, c in _of(cases, "head", "sides").items():
        for side, s in c["sides"].items():
            of_products, memory = f"{s['times_of_four_products']:.2f}", _share(s["share_of_naive_memory"])
            yield [name, c["tokens"], side, of_products, memory]


def _engines(cases: Cases) -> Rows:
    for name, c in _of(cases, "engine", "last_half").items():
        late = c["last_half"]
        yield [
            name, f"{c['prompts']} x {c['samples']}", f"{late['context_tokens']:.0f}", f"{late['tokens_per_s']:.0f}",
            f"{1000 * late['seconds_a_step']:.2f}", _share(late["share_of_bound"]),
            f"{c['whole']['tokens_per_s']:.0f}", _gib(c["peak_memory_gib"]),
        ]  # fmt: skip


def _learners(cases: Cases) -> Rows:
    for name, c in _of(cases, "learner", "planned_gib").items():
        measured = ["does not fit by plan", "", "", ""]
        if "seconds" in c:
            shares = [_share(c["mfu"]), _share(c["share_of_product"])]
            measured = [f"{c['seconds']:.2f}", *shares, _gib(c["peak_memory_gib"])]
        yield [name, c["trained"], *measured, _gib(c["planned_gib"]["without_runtime"])]


def _kinds(cases: Cases) -> Rows:
    for name, c in _of(cases, "profile", "device").items():
        for kind, k in c.get("plain", c).get("kinds", {}).items():
            yield [name, kind, f"{1000 * k['seconds']:.2f}", _share(k["share"])]


def _without(cases: Cases) -> Rows:
    """Cases that found nothing, with the reason."""
    yield from ([name, c[key]] for name, c in cases.items() for key in ("out_of_memory", "failed") if key in c)


TABLES: dict[str, Callable[[Cases], Rows]] = {
    "head | tokens | side | time / four products | memory / naive": _heads,
    "engine | prompts x samples | mean context | tokens/s | ms a step | of the bound | tokens/s, all | GiB": _engines,
    "update | trained | seconds | MFU | of a plain product | GiB | GiB planned": _learners,
    "profile | kind | ms | share": _kinds,
    "without a figure | why": _without,
}


if __name__ == "__main__":
    write(PERFORMANCE, JSON)
