"""Fill the figures of docs/evidence/benchmarks.md, docs/reference/maths-verifier.md and docs/guides/planning.md.

    python -m tools.benchmark_page

A marker follows each number and names its place in ``benchmarks/results``. In benchmarks.md the marker
``<!--=rollout:cases.NAME.key-->`` is a path in ``bench-rollout.json``; in maths-verifier.md a marker is a path in
``maths-verifier.json``. ``make bench`` runs this script at its end, and a test compares pages and files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""File and path of each ratio of speed, magicrl to its peer, that the page compares between machines."""
Point = Mapping[str, Any]
Varied = Callable[[Point], object]
SWEEPS: dict[str, tuple[str, Varied]] = {
    "rows decoded at once": ("rows", lambda point: point["prompts"] * point["samples"]),
    "tokens of context, 4 rows": ("context", lambda point: point["prompt_tokens"]),
    "samples per prompt of 256 tokens, 16 rows": ("group", lambda point: point["samples"]),
    "million parameters, 16 rows": ("model", lambda point: f"{point['parameters'] / 1e6:.1f}"),
}
"""Sweeps of growth-rollout.json: title, name, and the number that varies."""
LEARNER_SWEEPS: dict[str, tuple[str, Varied]] = {
    "response tokens": ("length", lambda point: point["tokens"]),
    "response tokens, checkpointed": ("length-checkpointed", lambda point: point["tokens"]),
    "responses per update": ("batch", lambda point: point["groups"] * point["samples"]),
    "responses per group": ("group", lambda point: point["samples"]),
    "million parameters": ("model", lambda point: f"{point['parameters'] / 1e6:.4g}"),
}
"""The same for growth-learner.json."""


def value_at(marker: str) -> Any:
    """Return the value at a marker's path.

    Raises:
        KeyError: nothing is at this path.
    """
    file, _, path = marker.partition(":")
    return figure_at(RESULTS, f"bench-{file}.json", path)


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


def growth() -> list[str]:
    """Return the tables of rates and memory against length, batch, group size and model size."""
    rollout, learner = (json.loads((RESULTS / f"growth-{part}.json").read_text()) for part in ("rollout", "learner"))
    lines = [
        "**Rollout**: the in-process engine on an Intel Xeon, bfloat16, one thread; SmolLM2-135M, or random weights of",
        "another size. Memory is above the weights.",
    ]
    for title, (name, varied) in SWEEPS.items():
        points = [point for point in rollout["points"] if point["question"] == name]
        lines += _swept(
            title,
            {
                "tokens decoded per CPU second": [f"{p['decode_tokens_per_cpu_s']:.4g}" for p in points],
                "with prefill": [f"{p['whole_tokens_per_cpu_s']:.4g}" for p in points],
                "MiB": [f"{p['memory_mib']:.4g}" for p in points],
            },
            map(varied, points),
        )
    lines += [
        "",
        "**Learner**: an AMD EPYC, bfloat16, one thread; Llamas with random weights, prompts of 64 tokens, 4 layers of",
        "width 256 unless the sweep changes them. Memory is what an update adds to weights, gradients and moments.",
    ]
    for title, (name, varied) in LEARNER_SWEEPS.items():
        points = learner["sweeps"][name]
        rows = {
            "tokens per CPU second": [f"{p['response_tokens_per_cpu_s']:.0f}" for p in points],
            "MiB": [f"{p['mib_above_state']:.0f}" for p in points],
        }
        lines += _swept(title, rows, map(varied, points))
    return [*lines, "", "`python benchmarks/growth.py rollout` and `learner` at commit 60df598f."]


def _swept(title: str, rows: Mapping[str, Sequence[str]], varied: Iterable[object]) -> list[str]:
    return ["", *table(" | ".join([title, *map(str, varied)]), ([name, *cells] for name, cells in rows.items()))]


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
    put_section(PAGE, "growth", growth())
    put_section(PAGE, "second-machine", second_machine())
    fill(VERIFIERS, lambda path: figure_at(RESULTS, "maths-verifier.json", path))
    put_section(PLANNING, "held-out", held_out())
