"""Write the section on GPUs of docs/evidence/benchmarks.md from bench-gpu.json, or that nothing was measured.

python -m tools.gpu_page FILE...   # first adds the cases of these files, written by `gpu.sh`, to bench-gpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from magicrl.files import write_atomically
from tools.pages import RESULTS, ROOT, put_section, table

JSON, PAGE = RESULTS / "bench-gpu.json", ROOT / "docs" / "evidence" / "benchmarks.md"
WHAT = "`benchmarks/gpu.sh` measures kernels, engine, learner, gap and two recipes on one CUDA device."
Cases = dict[str, dict[str, Any]]
Rows: TypeAlias = Iterator[Sequence[object]]


def section(cases: Cases) -> list[str]:
    """Return the section: a table for each part that was measured, or a line that none was."""
    if not cases:
        return ["## On a GPU", "", f"{WHAT} **Not measured** yet."]
    lines = ["## On a GPU", "", WHAT, ""]
    runs = {(case["run"]["machine"]["started"][:10], case["run"]["settings"]["device"]) for case in cases.values()}
    lines.append("; ".join(f"{device}, {date}" for date, device in sorted(runs)) + ".")
    for columns, rows_of in TABLES.items():
        if rows := list(rows_of(cases)):
            lines += ["", *table(columns, rows)]
    return lines


def write(page: Path, figures: Path) -> None:
    """Write the section into ``page``, from ``figures`` if that file exists."""
    put_section(page, "gpu", section(json.loads(figures.read_text())["cases"] if figures.exists() else {}))


def _of(cases: Cases, part: str, key: str) -> dict[str, dict[str, Any]]:
    """Return the cases of a part that have figures under ``key``."""
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


def _tests(cases: Cases) -> Rows:
    for part in ("tests", "ranks"):
        for name, c in _of(cases, part, "tests").items():
            yield [f"{part}-{name}", c["tests"], c["skipped"], c["failures"] + c["errors"]]


def _tiles(cases: Cases) -> Rows:
    for name, c in _of(cases, "tiles", "both_s").items():
        yield [name, c["tokens"], c["width"], f"{c['forward_tflop_per_s']:.0f}", f"{c['both_tflop_per_s']:.0f}"]


def _gaps(cases: Cases) -> Rows:
    for name, c in _of(cases, "gap", "mean_gap").items():
        yield [name, c["tokens"], f"{c['mean_gap']:.2g}", f"{c['max_gap']:.2g}", f"{c['kl']:.1e}"]


def _packs(cases: Cases) -> Rows:
    for name, c in _of(cases, "packs", "seconds").items():
        yield [name, c["tokens"], f"{1000 * c['seconds']:.2f}", _gib(c["peak_memory_gib"])]


def _runs(cases: Cases) -> Rows:
    for name, c in _of(cases, "runs", "runs").items():
        for device, run in c["runs"].items():
            rewards = run["reward"]
            ends = [f"{rewards[i]:.3f}" for i in (0, -1)] if rewards else ["", ""]
            yield [name, device, run["exit"], len(rewards), *ends]


def _weights(cases: Cases) -> Rows:
    for name, c in _of(cases, "weights", "times_of_a_copy").items():
        yield [name, _gib(c["gib"]), f"{c['seconds']:.3f}", f"{c['times_of_a_copy']:.1f}"]


def _without(cases: Cases) -> Rows:
    """Yield the cases without a figure, with the reason."""
    yield from ([name, c[key]] for name, c in cases.items() for key in ("out_of_memory", "failed") if key in c)


TABLES: dict[str, Callable[[Cases], Rows]] = {
    "head | tokens | side | time / four products | memory / naive": _heads,
    "engine | prompts x samples | mean context | tokens/s | ms per step | of the bound | tokens/s, all | GiB": _engines,
    "update | trained | seconds | MFU | of a plain product | GiB | GiB planned": _learners,
    "profile | kind | ms | share": _kinds,
    "tests | all | skipped | failed": _tests,
    "head's tiles | tokens | width | TFLOP/s forward | TFLOP/s with gradients": _tiles,
    "sampler and learner | tokens | mean gap | largest gap | KL": _gaps,
    "packs | tokens | ms forward and backward | GiB": _packs,
    "run | device | exit | steps | first reward | last reward": _runs,
    "weights | GiB | seconds | times of a copy": _weights,
    "without a figure | why": _without,
}


def add(figures: Path, files: Sequence[Path]) -> None:
    """Add the cases of ``files`` to ``figures``; a later file replaces cases of the same name."""
    cases: Cases = json.loads(figures.read_text())["cases"] if figures.exists() else {}
    for file in files:
        cases |= json.loads(file.read_text())["cases"]
    write_atomically(figures, json.dumps({"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        add(JSON, [Path(name) for name in sys.argv[1:]])
    write(PAGE, JSON)
