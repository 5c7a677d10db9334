"""Fill the figures of the pages benchmarks.md, claims.md, maths-verifier.md and planning.md.

    python -m tools.benchmark_page

A marker follows each number and names its place in ``benchmarks/results``. In benchmarks.md the marker
``<!--=rollout:cases.NAME.key-->`` is a path in ``bench-rollout.json``; in maths-verifier.md a marker is a path in
``maths-verifier.json``. ``make bench`` runs this script at its end, and a test compares pages and files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.pages import RESULTS, ROOT, fill, put_section, table, value_in

PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
CLAIMS = ROOT / "docs" / "evidence" / "claims.md"
VERIFIERS = ROOT / "docs" / "reference" / "maths-verifier.md"
PLANNING = ROOT / "docs" / "guides" / "planning.md"
SECOND = RESULTS / "second-machine"
RATIOS = {
    **{
        f"{what}, {case.replace('-', ' ')}": (f"bench-{file}.json", f"cases.{case}.times_faster.cpu_one_thread")
        for what, file, cases in (
            ("decoding against transformers", "rollout", ("smollm2-equal", "smollm2-long-tail", "tiny-equal")),
            ("decoding against vLLM", "rollout-vllm", ("smollm2-equal", "smollm2-long-tail")),
            ("decoding with our kernels against torch's", "decode-kernels", ("smollm2-equal", "smollm2-long-tail")),
            ("an update against TRL", "learner", ("bf16-equal", "bf16-long-tail", "fp32-equal")),
        )
        for case in cases
    },
    **{
        f"judging programs against LiveCodeBench's harness, tests: {tests}": (
            "code-verifier.json",
            f"speed.ours_B, {tests} tests.times_lcb",
        )
        for tests in (1, 10, 50)
    },
    "judging answers against Math-Verify": ("maths-verifier.json", "speed.ratio_items_per_second"),
}
"""File and path of each ratio of speed, magicrl to its peer, that claim C17 compares between machines."""


def value_at(marker: str) -> Any:
    """Return the value at a marker's path, ``NAME:path``, or ``FOLDER/NAME:path`` for another machine's results.

    Raises:
        KeyError: nothing is at this path.
    """
    file, _, path = marker.partition(":")
    folder, _, name = file.rpartition("/")
    return figure_at(RESULTS / folder, f"bench-{name}.json", path)


def figure_at(folder: Path, file: str, path: str) -> Any:
    """Return the value at ``path`` of a JSON file.

    Raises:
        KeyError: nothing is at this path.
        FileNotFoundError: the folder has no such file.
    """
    return value_in(json.loads((folder / file).read_text()), path)


def second_machine() -> list[str]:
    """Return the table that compares both machines."""
    rows = [
        (what, f"{here:.2f}", f"{there:.2f}", f"{there / here - 1:+.0%}".replace("%", " %"))
        for what, place in RATIOS.items()
        for here, there in [(figure_at(RESULTS, *place), figure_at(SECOND, *place))]
    ]
    return table("magicrl against its peer, ratio of speed | EPYC | Xeon | difference", rows)


def held_out() -> list[str]:
    """Return the table of docs/guides/planning.md that compares the planner with published runs of other systems."""
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
    put_section(CLAIMS, "second-machine", second_machine())
    fill(VERIFIERS, lambda path: figure_at(RESULTS, "maths-verifier.json", path))
    put_section(PLANNING, "held-out", held_out())
