"""Check that the library is as fast as its committed benchmarks: `make bench-check`, minutes, not part of CI.

    python -m benchmarks.speed.bench_check
    python -m benchmarks.speed.bench_check --against v0.1.0    # another commit on this machine

The check compares ratios, not times: magicrl against the peer measured in the same process. A ratio fails if it is
below the committed one by more than the noise: three times the spread (standard deviation over mean) of this run's
repetitions, and at least ``LEAST_BAND``, the difference of two runs of one commit on a loaded machine. If the spread
exceeds ``WIDEST_BAND``, the result is "too noisy".

A ratio belongs to a machine: with another speed of products it changes although the code does not. ``--against``
measures the other commit on this machine, with its own scripts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared import COMMITTED, parser_of, with_tcmalloc, write_figure
from benchmarks.speed import head_speed, learner_speed, rollout_speed
from benchmarks.speed.measure import Turn

LEAST_BAND = 0.15
WIDEST_BAND = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Comparison of one ratio."""

    name: str  # what was compared
    committed: float  # the ratio in ``benchmarks/results``, or of the other commit
    measured: tuple[float, ...]  # ratios of this run

    @property
    def band(self) -> float:
        """Share of the committed ratio that noise may explain."""
        if len(self.measured) < 2:
            return LEAST_BAND
        return max(LEAST_BAND, 3 * statistics.stdev(self.measured) / statistics.mean(self.measured))

    @property
    def verdict(self) -> str:
        """Verdict: ``ok``, ``slower`` or ``too noisy``."""
        if self.band > WIDEST_BAND:
            return "too noisy"
        return "ok" if statistics.median(self.measured) >= (1 - self.band) * self.committed else "slower"

    def __str__(self) -> str:
        shown = ", ".join(f"{value:.2f}" for value in self.measured)
        return f"{self.verdict:9}  {self.name}: {shown}; before {self.committed:.2f}, band {self.band:.0%}"


FIRST = next(iter(rollout_speed.PEERS))  # of transformers' settings


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, ...]:
    """Return the peer's time over ours for each measurement."""
    return tuple(their / our for their, our in zip(theirs, ours, strict=True))


def side_ratios(result: Mapping[str, Any], peer: str) -> tuple[float, ...]:
    """Return the ratio of CPU seconds of the peer's and our head, in one thread."""
    return ratios(*(result[side]["measured"]["threads_1"]["all_cpu_s"] for side in (peer, "magicrl")))


def learner_ratios(case: learner_speed.Case, repetitions: int) -> tuple[float, ...]:
    """Return the ratio of TRL's and our CPU seconds of one update."""
    return side_ratios(learner_speed.run_case(case, _one_thread(repetitions), {}, memory=False), "trl")


def rollout_ratios(case: rollout_speed.Case, repetitions: int, setting: str = FIRST) -> tuple[float, ...]:
    """Return the ratio of transformers' and our CPU seconds of one rollout."""
    return side_ratios(rollout_speed.run_case(case, _one_thread(repetitions), {setting: 0.0}), "transformers")


def head_ratios(case: head_speed.Case, repetitions: int) -> tuple[float, ...]:
    """Return the ratio of verl's formulation and our head over both passes."""
    found = [head_speed.run_case(case, "cpu", 1)["sides"] for _ in range(repetitions)]
    return ratios([f["verl"]["seconds"] for f in found], [f["magicrl"]["seconds"] for f in found])


def _one_thread(repetitions: int) -> list[Turn]:
    return [Turn(threads=1, warm_up=True), *(Turn(threads=1) for _ in range(repetitions))]


def committed(file: str, case: str) -> float:
    """Return a ratio of a committed benchmark."""
    found = committed_case(file, case)
    if file == "head":
        return found["sides"]["verl"]["seconds"] / found["sides"]["magicrl"]["seconds"]
    return found["times_faster"]["cpu_one_thread"]


def committed_case(file: str, case: str) -> Mapping[str, Any]:
    """Return a case of a committed benchmark.

    Raises:
        SystemExit: the file has no such case; ``make bench`` writes it.
    """
    path = COMMITTED / f"bench-{file}.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    if case not in cases:
        raise SystemExit(f"benchmarks/results/bench-{file}.json has no case {case}; `make bench` writes it")
    return cases[case]


def measured_at(commit: str, repetitions: int) -> dict[str, float]:
    """Measure ``commit`` on this machine and return its ratios by name.

    Raises:
        SystemExit: there is no such commit, or its scripts fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree, found = Path(folder) / "tree", Path(folder) / "found.json"
        added = subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], check=False)
        if added.returncode:
            raise SystemExit(f"--against {commit}: git has no such commit here")
        try:
            # It runs its own package and scripts; its comparison with its own figures is ignored.
            first = f"import sys; sys.path[:0] = ['{tree}/src', '{tree}']"
            code = f"{first}; from benchmarks.speed import bench_check; bench_check.main()"
            options = ["--repetitions", str(repetitions), "--output", str(found)]
            subprocess.run([sys.executable, "-P", "-c", code, *options], cwd=tree, stdout=sys.stderr, check=False)
            if not found.exists():
                raise SystemExit(f"--against {commit}: its benchmarks/speed/bench_check.py did not run to its end")
            return {name: statistics.median(one["measured"]) for name, one in json.loads(found.read_text()).items()}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=False)


def checks(repetitions: int) -> list[tuple[str, float, Callable[[], tuple[float, ...]]]]:
    """Yield name, committed ratio and measurement of each part."""
    rollout = rollout_speed.CASES[-1]
    setting = committed_case("rollout", rollout.name).get("peer", {"setting": FIRST})["setting"]
    parts: list[tuple[str, Any, Callable[..., tuple[float, ...]]]] = [
        ("head", head_speed.CASES["cpu"][0], head_ratios),
        ("rollout", rollout, partial(rollout_ratios, setting=setting)),
        ("learner", learner_speed.CASES[0], learner_ratios),
    ]
    return [
        (f"{part}, {case.name}", committed(part, case.name), partial(measured, case, repetitions))
        for part, case, measured in parts
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, measured on this machine")
    parser.add_argument("--output", type=Path, help="also write the outcomes as JSON")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    there = measured_at(arguments.against, arguments.repetitions) if arguments.against else {}
    for name, ratio, measured in checks(arguments.repetitions):
        ratio = there.get(name, ratio)
        outcomes.append(Outcome(name=name, committed=ratio, measured=measured()))
        print(outcomes[-1], flush=True)
    if arguments.output:
        found = {o.name: {"committed": o.committed, "measured": o.measured, "verdict": o.verdict} for o in outcomes}
        write_figure(arguments.output, found)
    if any(outcome.verdict == "slower" for outcome in outcomes):
        raise SystemExit(
            "slower than before, beyond noise; --against COMMIT tells a change of code from one of machine"
        )


if __name__ == "__main__":
    with_tcmalloc()
    main()
