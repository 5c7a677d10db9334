"""Short runs of the quickstart's task that go wrong on purpose, one a health rule, recorded for the rules' tests.

python benchmarks/health_runs.py --output tests/training/recorded_health_runs.json [--runs FOLDER] [NAME ...]

Each is a real run of the shipped recipe with the settings below: a few seconds each on one thread. Kept are the
metrics that the rules read. `--good FOLDER` adds a run that is well, as a run folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.config.loader import load_train_recipe
from magicrl.config.paths import find_recipe
from magicrl.records import StepMetrics
from magicrl.training.health import RULES, findings_of
from magicrl.training.protocols import TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.session import train

RECIPE = find_recipe(Path("quickstart"))

COMMON = (
    "data.train.0.count=1000", "data.test={}", "logging.samples=0", "logging.rollouts_every=0", "checkpoint.every=100",
    "entropy.controller=none", "stages.0.rollout_batch=8", "stages.0.min_steps=0", "stages.0.max_steps=40",
    "stages.0.transition.rule=fixed", "stages.1.rollout_batch=8", "stages.1.min_steps=0", "stages.1.max_steps=1",
)  # fmt: skip

REPLAYED = "entropy_estimators_disagree"

SICK: dict[str, tuple[str, ...]] = {
    "entropy_collapse": ("rollout.temperature=0.5", "algorithm.reuse=4"),
    "entropy_growth": ("entropy.controller=fixed", "entropy.alpha=1.0", "optimizer.learning_rate=1e-3"),
    "response_shortening": ("stages.0.max_tokens=6", "stages.0.rollout_batch=32"),
    "early_plateau": ("optimizer.learning_rate=1e-7", "stages.0.max_steps=60"),
    "groups_rejected": ("stages.0.max_tokens=6", "algorithm.stop_after_empty_steps=100", "stages.0.max_steps=60"),
    "clip_never_acts": ("optimizer.learning_rate=1e-7", "algorithm.reuse=2", "stages.0.max_steps=25"),
    "clip_share_high": ("optimizer.learning_rate=3e-3", "algorithm.reuse=4", "stages.0.max_steps=15"),
    "sampler_gap": ("optimizer.learning_rate=3e-3", "rollout.weight_lag=4", "stages.0.max_steps=15"),
    "length_explosion": ("optimizer.learning_rate=3e-3", "rollout.weight_lag=4", "stages.0.max_tokens=128"),
    "truncation_stuck": ("optimizer.learning_rate=1e-7", "stages.0.max_tokens=24"),
    REPLAYED: ("optimizer.learning_rate=1e-7", "stages.0.max_steps=25", "logging.rollouts_every=1"),
}  # Rule -> settings of a run that has its sign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rules; default: all")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/health"))
    parser.add_argument("--good", type=Path, action="append", default=[], help="a run folder that is well")
    arguments = parser.parse_args()
    recorded = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for name in arguments.names or SICK:
        settings = [*COMMON, *SICK[name]]
        rows = run(arguments.runs / name, settings)
        if name == REPLAYED:
            mistold(arguments.runs / name / "rollouts", arguments.runs / "mistold")
            settings += ["rollout.engine=replay", f"rollout.replay={(arguments.runs / 'mistold').resolve()}"]
            rows = run(arguments.runs / f"{name}-replayed", settings)
        recorded[name] = kept(rows, SICK[name])
        write(arguments.output, recorded)
        report(name, rows)
    for folder in arguments.good:
        rows = read(folder)
        recorded[f"well: {json.loads((folder / 'run.json').read_text())['name']}"] = kept(rows, ())
        write(arguments.output, recorded)
        report(str(folder), rows)


def write(path: Path, recorded: Mapping[str, Any]) -> None:
    """A line a run."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded))
    path.write_text(f"{{\n{lines}\n}}\n")


def run(folder: Path, settings: Sequence[str]) -> list[StepMetrics]:
    """Train with these settings from scratch; a run that stops by itself (nothing to learn) is recorded as far."""
    shutil.rmtree(folder, ignore_errors=True)
    config = load_train_recipe(RECIPE, settings)
    with contextlib.suppress(TrainingStopped):
        train(config, folder, NullObserver(), resume=False)
    return read(folder)


def read(folder: Path) -> list[StepMetrics]:
    """The steps of a run folder."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [StepMetrics(step=row["step"], stage=row["stage"], values=row["values"]) for row in rows]


def mistold(source: Path, target: Path) -> None:
    """The recorded rollouts as an engine would tell them that reports the log-probs of another temperature."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in source.glob("*.parquet"):
        table = pq.read_table(path)
        place = table.schema.get_field_index("sampler_logprobs")
        wrong = [[0.7 * value for value in row] for row in table.column(place).to_pylist()]
        column = pa.array(wrong, type=table.schema.field(place).type)
        pq.write_table(table.set_column(place, table.schema.field(place), column), target / path.name)


def kept(rows: Sequence[StepMetrics], settings: Sequence[str]) -> dict[str, Any]:
    """What the rules read, a list a metric, to six digits."""
    keys = dict.fromkeys(key for rule in RULES for key in rule.keys)

    def short(values: Mapping[str, Any], key: str) -> float | None:
        value = values.get(key)
        return None if value is None else float(f"{value:.6g}")

    return {
        "settings": list(settings),
        "step": [row.step for row in rows],
        "stage": [row.stage for row in rows],
        "metrics": {key: [short(row.values, key) for row in rows] for key in keys},
    }


def report(name: str, rows: Sequence[StepMetrics]) -> None:
    print(f"{name}: {len(rows)} steps", flush=True)
    for finding in findings_of(rows):
        print(f"  step {finding.step}, {finding.rule}: {finding.message}", flush=True)


if __name__ == "__main__":
    main()
