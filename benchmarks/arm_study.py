"""Arms over seeds: each run is a row of a JSON, keyed by what decides it, written as it ends and never made twice."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import document, rounded, write_figure

from magicrl.config.schema import TrainConfig
from magicrl.training.recorder import NullObserver
from magicrl.training.session import train

Row = dict[str, Any]
Describe = Callable[[Path, list[dict[str, float]]], Row]


def settings_hash(*decides: object) -> str:
    """Identifies what decides an arm beside its seed; no folder of this machine may be in it."""
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


def rows_of(path: Path) -> list[Row]:
    return json.loads(path.read_text())["runs"] if path.exists() else []


def make_row(config: TrainConfig, key: Row, folder: Path, output: Path, head: Row, describe: Describe) -> None:
    """Train once, unless ``output`` has a row of this ``key``, and put there what ``describe`` says of the run.

    Args:
        key: arm, seed and `settings_hash`.
        folder: the run's; a run that was stopped goes on.
        head: what the JSON says above its rows; ``command`` at least.
        describe: of run folder and each step's metrics.
    """
    if any(row["key"] == key for row in rows_of(output)):
        return
    clock = time.process_time()
    run = train(config, folder, NullObserver(), resume=folder.exists())
    steps = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    row: Row = {
        "key": key,
        **describe(run, steps),
        "cpu_seconds": round(time.process_time() - clock),
        "run": {**document({}), "command": head["command"]},
    }
    # read again: another process may have written an arm meanwhile
    rows = sorted([*rows_of(output), row], key=lambda row: (row["key"]["seed"], row["key"]["arm"]))
    write_figure(output, {**head, "runs": rows})


def evaluation(run: Path, name: str) -> dict[str, Any]:
    """The evaluation ``name`` of the held-out problems, as its file has it."""
    return json.loads((run / "evaluations" / f"{name}-held_out.json").read_text())


def interval(run: Path, name: str, measure: str, tau: str = "1.0") -> list[float]:
    """A held-out score of the evaluation ``name`` with its 95 % interval."""
    found = evaluation(run, name)["temperatures"][tau][measure]
    return [rounded(found[key]) for key in ("mean", "low", "high")]


def columns(steps: Sequence[dict[str, float]], name: str) -> list[float]:
    return [step[name] for step in steps if name in step]
