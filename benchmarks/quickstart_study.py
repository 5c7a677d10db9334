"""The quickstart over several seeds, beside a control arm that only imitates its own successes.

The claim (written down in docs/claims.md before the deciding run): over seeds that vary the supervised start,
the prompts and the sampling, MAGIC lifts held-out accuracy at temperature 1 by 25 points or more, and lies at
least 10 points above the start's best temperature in every seed; behind the automatic switch length and accuracy rise.

The control arm takes the same start, samples it at temperature 1, keeps its correct responses, and makes
supervised steps on them until it has learned from as many tokens as the reinforcement-learning run did. What
it gains is what cooling down gains.

    python benchmarks/quickstart_study.py --seeds 3 4 5 6 7 --output docs/figures/quickstart.json

Each seed's result is written as it ends; seeds that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_study import evaluation
from common import FIGURES, RECIPES, parser_of, write_figure

from magicrl.config.loader import config_hash, load_sft_recipe, load_train_recipe
from magicrl.config.schema import RunConfig, StartConfig, TrainConfig
from magicrl.evaluation.job import evaluation_seed, sample_problems
from magicrl.evaluation.statistics import paired_difference
from magicrl.records import TrainSample
from magicrl.training.assemble import build, set_threads
from magicrl.training.demonstrations import supervised_sample
from magicrl.training.held_out import held_out_test
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.recorder import NullObserver, environment_facts
from magicrl.training.session import train
from magicrl.training.sft import SUPERVISED, run_sft, supervised_steps
from magicrl.training.start_checks import check_run

RECIPE, START = RECIPES / "quickstart.toml", RECIPES / "quickstart-sft.toml"
CONTROL_BATCH = 64


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "quickstart.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5, 6, 7])  # 0 to 2 were tuned on
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart-study"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        one_seed(seed, arguments)


def one_seed(seed: int, arguments: argparse.Namespace) -> None:
    """Supervised start, MAGIC, control arm; the row goes into the result file."""
    folder = arguments.runs / f"seed-{seed}"
    clock = time.process_time()
    start = run_sft(load_sft_recipe(START, [f"run.seed={seed}", f"run.threads={arguments.threads}"]), folder / "start")
    start_cpu = time.process_time() - clock
    overrides = [f"model={start.folder}", f"run.seed={seed}", f"run.threads={arguments.threads}"]
    config = load_train_recipe(RECIPE, overrides)
    done = read_rows(arguments.output)
    key = study_key(seed)
    if any(row["config_hash"] == key for row in done):
        return
    clock = time.process_time()
    run = train(config, folder / "run", NullObserver(), resume=(folder / "run").exists())
    cpu = time.process_time() - clock
    rows = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(int(row["tokens/trained"]) for row in rows)
    before, after = evaluation(run, "before"), evaluation(run, "after")
    control = control_arm(config, start.folder, tokens)
    row = {
        "seed": seed,
        "config_hash": key,
        "before": accuracies(before),
        "after": accuracies(after),
        "control": accuracies(control),
        "start_pass_at": {k: e["mean"] for k, e in before["temperatures"]["1.0"]["pass_at"].items()},
        "after_pass_at": {k: e["mean"] for k, e in after["temperatures"]["1.0"]["pass_at"].items()},
        "rise_at_1": paired(after, before, "1.0"),
        "rise_over_best": best_rise(after, before),
        "entropy": {"start": before["temperatures"]["1.0"]["entropy"], **entropy_tail(rows)},
        "length": [before["temperatures"]["1.0"]["length_mean"], after["temperatures"]["1.0"]["length_mean"]],
        "steps": len(rows),
        "stages": stage_ends(rows),
        "tokens_sampled": sum(int(row["tokens/sampled"]) for row in rows),
        "tokens_trained": tokens,
        "cpu_seconds": {"supervised_start": start_cpu, "run": cpu},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    write_rows(arguments.output, [*done, row])


def study_key(seed: int) -> str:
    """Identifies what decides a seed's result: both recipes, without names, threads and other run settings."""
    run = RunConfig(seed=seed)
    recipes = (load_train_recipe(RECIPE), load_sft_recipe(START))
    return "-".join(config_hash(recipe.model_copy(update={"run": run})) for recipe in recipes)


def control_arm(config: TrainConfig, start: Path, tokens: int) -> dict[str, Any]:
    """Supervised steps on the start's own correct samples, as many response tokens as ``tokens``; then the test."""
    set_threads(config)
    config = config.model_copy(update={"start": StartConfig(model=str(start))})
    ready = check_run(config, start.parent / "not-written", resume=False)
    with config.verifier.pool() as judge:
        built = build(config, ready, start)
        built.engine.load_weights(built.learner.weights(), 0)
        samples: list[TrainSample] = []
        learned, turn = 0, 0
        while learned < tokens:
            groups = sample_problems(
                built.engine,
                judge,
                built.data.train[(turn * 500) % len(built.data.train) :][:500],
                built.encoder.encode,
                samples=config.stages[0].group_size,
                temperature=config.rollout.temperature,
                max_tokens=config.stages[-1].max_tokens,
                seed=evaluation_seed(config.run.seed, f"control/{turn}"),
            )
            for group in groups:
                for good, completion in zip(group.correct, group.group.completions, strict=True):
                    if good and learned < tokens:
                        prompt = group.group.request.prompt_tokens
                        samples.append(supervised_sample(prompt, completion.tokens, len(samples)))
                        learned += len(completion)
            turn += 1
        learner = LocalLearner(
            built.start.model,
            LearnerSettings(algorithm=SUPERVISED, optimizer=config.optimizer, model=config.model),
            valid_vocab=built.start.valid_vocab,
        )
        batches = [samples[i : i + CONTROL_BATCH] for i in range(0, len(samples), CONTROL_BATCH)]
        list(supervised_steps(learner, batches, lambda _: config.optimizer.learning_rate))
        built.engine.load_weights(learner.weights(), learner.version)
        label, problems = next(iter(built.data.test.items()))
        return held_out_test(
            "control",
            label,
            problems,
            config.evaluation,
            (built.engine, judge, built.encoder.encode),
            max_tokens=config.stages[-1].max_tokens,
            seed=config.run.seed,
            shown=0,
            start=False,
            progress=lambda *_: None,
        )


def accuracies(document: dict[str, Any]) -> dict[str, list[float]]:
    """temperature -> [mean, low, high]."""
    return {
        tau: [round(score["accuracy"][key], 4) for key in ("mean", "low", "high")]
        for tau, score in document["temperatures"].items()
    }


def paired(after: dict[str, Any], before: dict[str, Any], tau_before: str) -> list[float]:
    """[mean, low, high] of the rise at temperature 1 over the start at ``tau_before``, problem by problem."""
    new = after["temperatures"]["1.0"]["per_problem"]
    old = before["temperatures"][tau_before]["per_problem"]
    result = paired_difference(new, old, after["temperatures"]["1.0"]["clusters"])
    return [round(x, 4) for x in (result.mean, result.low, result.high)]


def best_rise(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The rise at temperature 1 over the start's best temperature."""
    best = max(before["temperatures"], key=lambda tau: before["temperatures"][tau]["accuracy"]["mean"])
    return {"start_temperature": float(best), "rise": paired(after, before, best)}


def stage_ends(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Of each stage its T, its steps, and mean length and training accuracy of its first ten and last ten."""
    found: list[dict[str, float]] = []
    for limit in dict.fromkeys(row["stage/max_tokens"] for row in rows):
        own = [row for row in rows if row["stage/max_tokens"] == limit]
        told = {"max_tokens": limit, "steps": len(own)}
        for name, key in (("length", "length/mean"), ("accuracy", "train/accuracy_unfiltered/mean")):
            values = [row[key] for row in own]
            told |= {f"{name}_first": round(fmean(values[:10]), 4), f"{name}_last": round(fmean(values[-10:]), 4)}
        found.append(told)
    return found


def entropy_tail(rows: list[dict[str, Any]]) -> dict[str, float]:
    tail = [row["entropy/exact/mean"] for row in rows[-20:]]
    return {"target": rows[-1].get("entropy/target"), "last_20_steps": sum(tail) / len(tail)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["seeds"] if path.exists() else []


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    ordered = sorted(rows, key=lambda row: row["seed"])
    document = {"command": "python benchmarks/quickstart_study.py", "machine": environment_facts(), "seeds": ordered}
    write_figure(path, document)


if __name__ == "__main__":
    main()
