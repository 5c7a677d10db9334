"""Cost of `model.exact`: CPU time of decoding and of an update with it over CPU time without, in one thread, in turns.

    python -m benchmarks.speed.exact_cost           # minutes; writes benchmarks/results/exact.json
    python -m benchmarks.speed.exact_cost --quick   # seconds, the tiny model only

Cases are those of `rollout_speed.py` and, with the same prompts and responses per model, updates of `learner_speed.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.shared import FIGURES, document, rounded, with_tcmalloc, write_case
from benchmarks.speed import learner_cases, learner_speed, rollout_speed
from benchmarks.speed.measure import Turn, chosen, more_if_brief, speed_parser, timed
from benchmarks.speed.models import SMOLLM2, TINY

DECODED = {case.name: rollout_speed.runnable(case) for case in rollout_speed.CASES}
DTYPE = DECODED["smollm2-equal"].dtype
UPDATED = {case.name: replace(case, dtype=DTYPE) for case in learner_cases.CASES if case.dtype == "bfloat16"}
CASES = {
    f"SmolLM2-135M, {DTYPE}": (DECODED["smollm2-equal"], UPDATED["bf16-equal"]),
    f"SmolLM2-135M, {DTYPE}, long tail": (DECODED["smollm2-long-tail"], UPDATED["bf16-long-tail"]),
    "quickstart, float32": (
        DECODED["tiny-equal"],
        replace(UPDATED["bf16-equal"], model=TINY, dtype="float32", prompts=16, samples=8, prompt_tokens=11, tokens=64),
    ),
}  # (decoding, update) by label


def cost(make: Callable[[bool], Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Return median CPU seconds without and with exact mode, and their ratio. ``make`` gets whether it is exact."""
    sides = {"plain_s": make(False), "exact_s": make(True)}
    for run in sides.values():
        timed(run, 1)  # kernels are prepared here
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in more_if_brief([Turn(threads=1)] * repetitions, lambda: max(found[-1] for found in times.values())):
        for name, run in sides.items():
            times[name].append(timed(run, turn.threads)[0].cpu)
    found = {name: rounded(statistics.median(seconds)) for name, seconds in times.items()}
    return {**found, "ratio": rounded(found["exact_s"] / found["plain_s"])}


def main() -> None:
    arguments = speed_parser(__doc__, FIGURES / "exact.json").parse_args()
    head = document({"repetitions": arguments.repetitions, "threads": 1})
    for label, (decoded, updated) in CASES.items():
        if not chosen([decoded], arguments.case) or (arguments.quick and decoded.model == SMOLLM2):
            continue
        result = {
            "decode": cost(lambda exact, case=decoded: rollout_speed.Ours(case, exact=exact), arguments.repetitions),
            "update": cost(lambda e, case=updated: learner_speed.Ours(case, exact=e).update, arguments.repetitions),
        }
        print(label, {name: found["ratio"] for name, found in result.items()})
        write_case(arguments.output, head, label, result, list(CASES))


if __name__ == "__main__":
    with_tcmalloc()
    main()
