"""Does the rounding gap between sampler and learner matter? The quickstart's task with `model.exact` and without.

The claim (written down in docs/claims.md before the deciding runs) is C8. A seed has its own supervised start, prompts
and sampling; its arms share the start.

    python benchmarks/exact_study.py --seeds 1 2 3 4     # writes docs/figures/exact-study.json, a run as it ends
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from arm_study import columns, interval, make_row, settings_hash
from common import FIGURES, RECIPES, ROOT, parser_of, rounded

from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.training.sft import run_sft

RECIPE, START = RECIPES / "quickstart.toml", RECIPES / "quickstart-sft.toml"
PRECISIONS = {
    "bfloat16": ["model.dtype=bfloat16"],
    "bfloat16 exact": ["model.dtype=bfloat16", "model.exact=true"],
    "float16": ["model.dtype=float16"],
}
STEPS = {1: 32, 4: 8}  # N_SGD and its mini-batch, of rollout batches of 32 prompts
ARMS = {
    f"{name}, N_SGD {count}": [*settings, *(f"stages.{stage}.mini_batch={size}" for stage in (0, 1))]
    for count, size in STEPS.items()
    for name, settings in PRECISIONS.items()
}
SHORTER = [
    "stages.0.max_tokens=48", "stages.0.max_steps=70", "stages.1.max_steps=30", "stages.0.transition.horizon=20",
    "stages.0.transition.window=20", "entropy.target=0.1", "entropy.step=0.01", "entropy.maximum=0.3",
    "evaluation.samples=8", "evaluation.start_pass_at=16",
]  # fmt: skip
COMMAND = "python benchmarks/exact_study.py --seeds 1 2 3 4"


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "exact-study.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "exact-study")
    arguments = parser.parse_args()
    head = {"command": COMMAND, "arms": ARMS, "shorter": SHORTER}
    for seed in arguments.seeds:
        start = run_sft(load_sft_recipe(START, [f"run.seed={seed}", "run.threads=1"]), arguments.runs / f"start-{seed}")
        for arm in arguments.arms:
            settings = [*SHORTER, *ARMS[arm]]
            key = {"arm": arm, "seed": seed, "settings": settings_hash(settings, RECIPE.read_text(), START.read_text())}
            overrides = [*settings, f"model={start.folder}", f"run.seed={seed}", "run.threads=1"]
            folder = arguments.runs / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
            make_row(load_train_recipe(RECIPE, overrides), key, folder, arguments.output, head, described)


def described(run: Path, steps: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "accuracy": {
            tau: {name: interval(run, name, "accuracy", tau) for name in ("before", "after")} for tau in ("0.0", "1.0")
        },
        "steps": len(steps),
        "sampler_gap_mean": rounded(mean(columns(steps, "learner/sampler_gap_mean"))),
        "sampler_gap_max": rounded(max(columns(steps, "learner/sampler_gap_max"))),
        "clip_ratio": rounded(mean(columns(steps, "learner/clip_ratio"))),
        "entropy_end": rounded(mean(columns(steps, "learner/entropy")[-10:])),
    }


if __name__ == "__main__":
    main()
