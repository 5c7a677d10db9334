"""A step of `magicrl train` by part: wall clock, waiting for verdicts, and the time to the first step.

    python -m benchmarks.speed.step_parts            # minutes; writes benchmarks/results/bench-step.json
    python -m benchmarks.speed.step_parts --quick    # seconds: shows that the script runs

Each case is trained twice from one initial checkpoint, the first time until its first step, so the second run's time to
that excludes SFT. Parts are those of the second run's metrics; the remainder of a step is its rest.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared import FIGURES, document, parser_of, rounded, with_tcmalloc, write_case


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A recipe and its changes."""

    name: str  # of the case in the JSON
    recipe: str
    settings: tuple[str, ...] = ()

    def train(self, folder: Path, *, whole: bool) -> tuple[float, float]:
        """Train in ``folder``, to the end if ``whole``. Return the wall-clock seconds until the metrics held the first
        step: since the command, and since the supervised start was written.
        """
        given = (f"--set={setting}" for setting in (*self.settings, f"run.output={folder}"))
        begun = time.perf_counter()
        command = [sys.executable, "-m", "magicrl", "train", self.recipe, *given]
        # Where it is set, every start would compile torch and transformers again, as no user's second run does.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            metrics, first, since = folder / "metrics.jsonl", None, 0.0
            while process.poll() is None:
                if first is None and metrics.exists() and metrics.stat().st_size:
                    first = time.perf_counter() - begun
                    (start,) = (folder.parent / "models").glob("*/sft.json")
                    since = time.time() - start.stat().st_mtime
                    if not whole:
                        process.kill()
                time.sleep(0.02)
            assert process.stderr is not None
            if process.returncode and (whole or first is None):
                raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr.read()[-2000:]}")
        assert first is not None, "it ended without a step"
        return first, since


CASES = (Case(name="quickstart", recipe="quickstart"),)
QUICK = (Case(name="tiny", recipe="tiny", settings=("stages.0.max_steps=2", "stages.1.max_steps=2")),)


def run_case(case: Case) -> dict[str, Any]:
    """Return the figures of the second of two runs."""
    with tempfile.TemporaryDirectory() as scratch:
        with_start, since_start = case.train(Path(scratch, "first"))
        folder = Path(scratch, "second")
        first_step, _ = case.train(folder)
        return {
            "case": asdict(case),
            "first_step_s": rounded(first_step),
            "first_step_with_supervised_start_s": rounded(with_start),
            "first_step_after_supervised_start_s": rounded(since_start),
            **parts_of(folder),
        }


def parts_of(folder: Path) -> dict[str, Any]:
    """Return medians over the steps of a run without the first: seconds by part, and shares of the step."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows: list[dict[str, float]] = []
    for values in (step["values"] for step in steps[1:]):
        others = {key.removeprefix("time/"): value for key, value in values.items() if key.startswith("time/other/")}
        rest = values["time/other"] - sum(others.values())
        rows.append({part: values[f"time/{part}"] for part in ("step", "rollout", "train")} | others | {"rest": rest})
    names = list(dict.fromkeys(name for row in rows for name in row))
    seconds = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}
    shares = {
        name: sum(row.get(name, 0.0) for row in rows) / sum(row["step"] for row in rows)
        for name in names
        if name != "step"
    }
    return {
        "steps": len(rows),
        "median_s": {name: rounded(value) for name, value in seconds.items()},
        "share_of_steps": {name: round(value, 4) for name, value in shares.items()},
    }


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "bench-step.json")
    parser.add_argument("--quick", action="store_true", help="the smallest recipe, seconds")
    parser.add_argument("--allocator", choices=("tcmalloc", "system"), default="tcmalloc")
    parser.add_argument("--case", action="append", help="measure only these cases; the file keeps the others")
    arguments = parser.parse_args()
    known = QUICK if arguments.quick else CASES
    head = document({"clock": "wall clock, all cores"})
    for case in known:
        if not arguments.case or case.name in arguments.case:
            result = run_case(case)
            print(case.name, result["first_step_s"], result["share_of_steps"])
            write_case(arguments.output, head, case.name, result, [c.name for c in known])


if __name__ == "__main__":
    with_tcmalloc()
    main()
