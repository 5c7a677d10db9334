"""Put the results in benchmarks/results into pages: docs/evidence/benchmarks.md, docs/reference/maths-verifier.md
and docs/guides/planning.md.

    python -m tools.benchmark_page

A number before a marker is what stands at the marker's path. In docs/evidence/benchmarks.md the marker
``<!--=rollout:cases.NAME.key-->`` means ``bench-rollout.json`` and the path within it, in
docs/reference/maths-verifier.md a marker is
a path in ``maths-verifier.json``. ``make bench`` runs this at its end; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.pages import RESULTS, ROOT, fill, put_section, table, value_in

PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
VERIFIERS = ROOT / "docs" / "reference" / "maths-verifier.md"
PLANNING = ROOT / "docs" / "guides" / "planning.md"
SECOND = RESULTS / "second-machine"
RATIOS = {
    **{
        f"{what}, {case.replace('-', ' ')}": (f"bench-{file}.json", f"cases.{case}.times_faster.cpu_one_thread")
        for what, file, cases in (
            ("decoding beside transformers", "rollout", ("smollm2-equal", "smollm2-long-tail", "tiny-equal")),
            ("decoding beside vLLM", "rollout-vllm", ("smollm2-equal", "smollm2-long-tail")),
            ("decoding with own kernels beside torch's", "decode-kernels", ("smollm2-equal", "smollm2-long-tail")),
            ("an update beside TRL", "learner", ("bf16-equal", "bf16-long-tail", "fp32-equal")),
        )
        for case in cases
    },
    **{
        f"judging programs beside LiveCodeBench's way, tests: {tests}": (
            "code-verifier.json",
            f"speed.ours_B, {tests} tests.times_lcb",
        )
        for tests in (1, 10, 50)
    },
    "judging answers beside Math-Verify": ("maths-verifier.json", "speed.ratio_items_per_second"),
}
"""What is compared between machines, where: how many times as fast as the peer magicrl is."""


def value_at(marker: str) -> Any:
    """What a marker points at; ``KeyError`` where nothing is."""
    file, _, path = marker.partition(":")
    return figure_at(RESULTS, f"bench-{file}.json", path)


def figure_at(folder: Path, file: str, path: str) -> Any:
    """What stands in a file of a folder of figures; ``KeyError`` or ``FileNotFoundError`` where nothing does."""
    return value_in(json.loads((folder / file).read_text()), path)


def second_machine() -> list[str]:
    """The table of both machines."""
    rows = [
        (what, f"{here:.2f}", f"{there:.2f}", f"{there / here - 1:+.0%}".replace("%", " %"))
        for what, place in RATIOS.items()
        for here, there in [(figure_at(RESULTS, *place), figure_at(SECOND, *place))]
    ]
    return table("times as fast as the peer | this page's machine | the second | difference", rows)


def held_out() -> list[str]:
    """The table of docs/guides/planning.md: the planner against published runs of other systems."""
    columns = "system | row | published s | planned s | error | FLOPs at the peak, s"
    rows = json.loads((RESULTS / "plan-held-out.json").read_text())["rows"]
    return table(
        columns,
        (
            (
                row["system"],
                row["row"],
                f"{row['published_seconds']:.3g}",
                f"{row['planned_seconds']:.3g}",
                f"{100 * row['error']:+.0f} %",
                "" if row["flops_bound_seconds"] is None else f"{row['flops_bound_seconds']:.3g}",
            )
            for row in rows
        ),
    )


if __name__ == "__main__":
    fill(PAGE, value_at)
    put_section(PAGE, "second-machine", second_machine())
    fill(VERIFIERS, lambda path: figure_at(RESULTS, "maths-verifier.json", path))
    put_section(PLANNING, "held-out", held_out())
