"""Decoding with magicrl's CPU kernels and with torch instead, in one process, in turns.

    python -m benchmarks.speed.decode_kernels           # minutes; writes benchmarks/results/bench-decode-kernels.json
    python -m benchmarks.speed.decode_kernels --quick   # seconds, a small model with random weights

Both sides run the bfloat16 cases of `rollout_speed.py`; the ratio is that of medians in one thread.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared import FIGURES, document, rounded, with_tcmalloc, write_case
from benchmarks.speed.measure import chosen, ratio, speed_parser, turns
from benchmarks.speed.models import TINY
from benchmarks.speed.rollout_parts import engine_parts
from benchmarks.speed.rollout_speed import CASES, QUICK, Case, Ours, attention_read_seconds, in_turns
from magicrl.models import cpu_kernels


@contextmanager
def torch_alone() -> Generator[None]:
    """Disable the kernels inside this context, as on a machine without a compiler."""
    with patch.object(cpu_kernels, "library", return_value=None):
        yield


class WithoutKernels(Ours):
    """Engine in which torch computes attention and norms."""

    def __init__(self, case: Case) -> None:
        with torch_alone():
            super().__init__(case)

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        with torch_alone():
            return super().__call__(limit)


def run_case(case: Case, repetitions: int) -> dict[str, Any]:
    """Measure both sides in turns, with the parts of each."""
    sides = {"kernels": Ours(case), "torch": WithoutKernels(case)}
    measured = in_turns(case, sides, turns(repetitions, most_threads=1))
    reading = attention_read_seconds(case, sides["torch"].model)
    return {
        "case": asdict(case),
        "kernels_missing": cpu_kernels.missing(),
        "attention_read_s": rounded(reading),
        **{name: {"measured": found, "parts": engine_parts(sides[name], reading)} for name, found in measured.items()},
        "times_faster": ratio(measured["torch"], measured["kernels"]),
    }


def main() -> None:
    arguments = speed_parser(__doc__, FIGURES / "bench-decode-kernels.json").parse_args()
    known = QUICK if arguments.quick else [case for case in CASES if case.model != TINY]
    head = document({"repetitions": arguments.repetitions, "threads": 1})
    for case in chosen(known, arguments.case):
        result = run_case(case, arguments.repetitions)
        print(case.name, result["times_faster"], result["kernels_missing"] or "with kernels")
        write_case(arguments.output, head, case.name, result, [c.name for c in known])


if __name__ == "__main__":
    with_tcmalloc()
    main()
