"""The two environments that come with magicrl, over seeds: what the recipes `guessing` and `calculator` learn.

The claim (written down in docs/claims.md before the deciding runs) is C6. A seed has its own supervised start, prompts
and sampling. What the model does with the environment is measured on training prompts: in the first step, which samples
the start model, and over the last five.

    python benchmarks/environments_study.py --seeds 1 2 3

Each run's result is written as it ends; runs that are there already, of the same recipes, are not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import FIGURES, RECIPES, parser_of, write_figure
from quickstart_study import accuracies, evaluation, paired

from magicrl.config.loader import config_hash, load_sft_recipe, load_train_recipe
from magicrl.config.schema import RunConfig
from magicrl.training.recorder import NullObserver, environment_facts
from magicrl.training.session import train
from magicrl.training.sft import run_sft

LAST = 5


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "environments.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", default=["guessing", "calculator"])
    parser.add_argument("--runs", type=Path, default=Path("runs/environments-study"))
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for recipe in arguments.recipes:
            one_run(recipe, seed, arguments)


def one_run(recipe: str, seed: int, arguments: argparse.Namespace) -> None:
    """Supervised start and training; the row goes into the result file."""
    done: list[dict[str, Any]] = json.loads(arguments.output.read_text())["runs"] if arguments.output.exists() else []
    key = study_key(recipe, seed)
    if any(row["config_hash"] == key for row in done):
        return
    folder = arguments.runs / f"{recipe}-{seed}"
    clock = time.process_time()
    start = run_sft(load_sft_recipe(RECIPES / f"{recipe}-sft.toml", [f"run.seed={seed}"]), folder / "start")
    start_cpu = time.process_time() - clock
    config = load_train_recipe(RECIPES / f"{recipe}.toml", [f"model={start.folder}", f"run.seed={seed}"])
    clock = time.process_time()
    run = train(config, folder / "run", NullObserver(), resume=(folder / "run").exists())
    cpu = time.process_time() - clock
    rows = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = evaluation(run, "before"), evaluation(run, "after")
    row: dict[str, Any] = {
        "recipe": recipe,
        "seed": seed,
        "config_hash": key,
        "before": accuracies(before),
        "after": accuracies(after),
        "rise_at_1": paired(after, before, "1.0"),
        "problems": len(before["temperatures"]["1.0"]["per_problem"]),
        "clusters": len(set(before["temperatures"]["1.0"]["clusters"])),
        "curve": [round(row["train/accuracy/mean"], 4) for row in rows],
        "environment": {"first_step": played(rows[:1]), f"last_{LAST}_steps": played(rows[-LAST:])},
        "not_judged": max(row["train/not_judged/ratio"] for row in rows),
        "cpu_seconds": {"supervised_start": round(start_cpu), "run": round(cpu)},
    }
    order = sorted([*done, row], key=lambda row: (row["recipe"], row["seed"]))
    head = {"command": "python benchmarks/environments_study.py --seeds 1 2 3", "machine": environment_facts()}
    write_figure(arguments.output, {**head, "runs": order})


def study_key(recipe: str, seed: int) -> str:
    """Identifies what decides a run's result: both recipes, without names, threads and other run settings."""
    run = RunConfig(seed=seed)
    recipes = load_train_recipe(RECIPES / f"{recipe}.toml"), load_sft_recipe(RECIPES / f"{recipe}-sft.toml")
    return "-".join(config_hash(found.model_copy(update={"run": run})) for found in recipes)


def played(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What environments counted, in the mean of these steps."""
    names = sorted(name for name in rows[0] if name.startswith("environment/"))
    return {name.partition("/")[2]: round(sum(row[name] for row in rows) / len(rows), 4) for name in names}


if __name__ == "__main__":
    main()
