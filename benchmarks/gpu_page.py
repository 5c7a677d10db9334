"""The section on GPUs of docs/performance.md, from what `gpu.py` found; where that is nothing it says so.

python benchmarks/gpu_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measure import FIGURES, ROOT
from page_sections import put_section

PAGE = ROOT / "docs" / "performance.md"
JSON = FIGURES / "bench-gpu.json"
WHAT = (
    "`python benchmarks/gpu.py` measures on one CUDA device (80 GB or more) the head's kernels beside their matrix "
    "products, the engine's steps at 1K and 16K tokens with CUDA graphs and without beside the reading of weights and "
    "cache, the learner's MFU and memory at 16K and 32K tokens beside what `magicrl plan` expects (1.5B and 7B "
    "architectures, random weights), and where the time of a step goes. `--parts head,engine,learner,profile` runs "
    "some of it. It writes `bench-gpu.json` beside the other figures, and this section."
)
Cases = dict[str, dict[str, Any]]


def section(cases: Cases) -> str:
    """The page's part: tables of what is there, or that nothing is."""
    parts = ["## On a GPU", WHAT]
    if not cases:
        return "\n\n".join([*parts, "**Not measured**: it has not been run on a GPU yet."])
    runs = {(case["run"]["machine"]["started"][:10], case["run"]["settings"]["device"]) for case in cases.values()}
    parts.append("; ".join(f"{device}, {date}" for date, device in sorted(runs)) + ".")
    tables = (_heads(cases), _engines(cases), _learners(cases), _kinds(cases), _without(cases))
    return "\n\n".join([*parts, *(table for table in tables if table)])


def write(page: Path, figures: Path) -> None:
    """Put the section made from ``figures``, if these exist, into ``page``."""
    put_section(page, "gpu", section(json.loads(figures.read_text())["cases"] if figures.exists() else {}))


def _table(head: str, rows: list[list[str]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns, *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) if rows else ""


def _of(cases: Cases, part: str, key: str) -> dict[str, dict[str, Any]]:
    """Cases of a part that have figures under ``key``."""
    return {name.partition("-")[2]: c for name, c in cases.items() if name.startswith(f"{part}-") and key in c}


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _heads(cases: Cases) -> str:
    rows = [
        [name, f"{c['tokens']}", side, f"{s['times_of_four_products']:.2f}", _share(s["share_of_naive_memory"])]
        for name, c in _of(cases, "head", "sides").items()
        for side, s in c["sides"].items()
    ]
    return _table("head | tokens | side | time / four products | memory / naive", rows)


def _engines(cases: Cases) -> str:
    rows = [
        [
            name, f"{c['prompts']} x {c['samples']}", f"{c['last_half']['context_tokens']:.0f}",
            f"{c['last_half']['tokens_per_s']:.0f}", f"{1000 * c['last_half']['seconds_a_step']:.2f}",
            _share(c["last_half"]["share_of_bound"]), f"{c['whole']['tokens_per_s']:.0f}",
            "" if c["peak_memory_gib"] is None else f"{c['peak_memory_gib']:.1f}",
        ]
        for name, c in _of(cases, "engine", "last_half").items()
    ]  # fmt: skip
    head = "engine | prompts x samples | mean context | tokens/s | ms a step | of the bound | tokens/s, all | GiB"
    return _table(head, rows)


def _learners(cases: Cases) -> str:
    rows: list[list[str]] = []
    for name, c in _of(cases, "learner", "planned_gib").items():
        planned = f"{c['planned_gib']['without_runtime']:.1f}"
        if "seconds" not in c:
            rows.append([name, c["trained"], "does not fit by plan", "", "", "", planned])
            continue
        peak = "" if c["peak_memory_gib"] is None else f"{c['peak_memory_gib']:.1f}"
        mfu = [_share(c["mfu"]), _share(c["share_of_product"])]
        rows.append([name, c["trained"], f"{c['seconds']:.2f}", *mfu, peak, planned])
    return _table("update | trained | seconds | MFU | of a plain product | GiB | GiB planned", rows)


def _kinds(cases: Cases) -> str:
    rows: list[list[str]] = []
    for name, c in _of(cases, "profile", "device").items():
        kinds = c.get("plain", c).get("kinds", {})
        rows += [[name, kind, f"{1000 * k['seconds']:.2f}", _share(k["share"])] for kind, k in kinds.items()]
    return _table("profile | kind | ms | share", rows)


def _without(cases: Cases) -> str:
    """Cases that found nothing, with the reason."""
    rows = [[name, c[key]] for name, c in cases.items() for key in ("out_of_memory", "failed") if key in c]
    return _table("without a figure | why", rows)


if __name__ == "__main__":
    write(PAGE, JSON)
