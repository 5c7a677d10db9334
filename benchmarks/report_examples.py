"""What the documentation's pictures of comparisons show, made by magicrl's own commands: runs, evaluations, a plan.

``report_screenshots.py --make FOLDER`` calls this. What is in the folder already is not made again: it may be stopped
at any time. Nine short runs of the quickstart recipe (three arms, three seeds): half a minute of one core each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from magicrl.config.loader import load_train_recipe
from magicrl.data.sources import load_problems

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "src" / "magicrl" / "recipes" / "quickstart.toml"
ARMS = {"adaptive": (), "none": ('entropy.controller="none"',), "reuse": ("algorithm.reuse=2",)}
SEEDS = (0, 1, 2)
SHORT = (
    "evaluation.samples=4",
    "evaluation.temperatures=[0.0, 1.0]",
    "evaluation.pass_at=[4]",
    "evaluation.start_pass_at=4",
    "stages.0.max_steps=60",
    "stages.0.min_steps=10",
    "stages.1.max_steps=30",
    "logging.rollouts_every=10",
)
PLAN = ("studies/bases/paper-7b.toml", "--gpus", "32", "--gpu", "H800-80G", "--hours", "24")
PLAN += ("--cost-per-gpu-hour", "2.5", "--compare", "gpus=64", "--compare", "staleness=1")


def magicrl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "magicrl", *words], check=True, cwd=ROOT)


def short_run(folder: Path, arm: str, seed: int) -> Path:
    """The run of an arm and seed, trained or gone on with unless it is finished."""
    output = folder / "runs" / f"{arm}-{seed}"
    record = output / "run.json"
    if not (record.exists() and json.loads(record.read_text())["status"] == "finished"):
        settings = (f"run.seed={seed}", f"run.name={arm}", *SHORT, *ARMS[arm])
        words = [word for setting in settings for word in ("--set", setting)]
        magicrl("train", str(QUICKSTART), *words, "--output", str(output), "--resume")
    return output


def comparison_page(folder: Path) -> Path:
    """Three arms of three seeds."""
    runs = [short_run(folder, arm, seed) for arm in ARMS for seed in SEEDS]
    page = folder / "comparison.html"
    magicrl("report", *map(str, runs), "--output", str(page))
    return page


def evaluation_page(folder: Path) -> Path:
    """The start and two trained models on problems that no training saw."""
    runs = [short_run(folder, arm, 0) for arm in ("adaptive", "reuse")]
    start = json.loads((runs[0] / "run.json").read_text())["start_model"]
    problems = folder / "sums.jsonl"
    source = load_train_recipe(QUICKSTART).data.test["held_out"]
    rows = [
        {"id": problem.id, "problem": problem.prompt, "answer": problem.golds[0]}
        for problem in load_problems(source)[:60]
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outputs: list[str] = []
    models = {"start": start, **{run.name: str(run / "model") for run in runs}}
    options = ["--samples", "8", "--temperature", "1", "--max-tokens", "128", "--template", "{prompt}"]
    options += ["--verifier", "exact", "--keep-tokens", "--threads", "1", "--workers", "1"]
    for name, model in models.items():
        outputs.append(str(folder / "evaluations" / name))
        magicrl("eval", "--model", model, "--benchmark", f"sums={problems}", *options, "--output", outputs[-1])
    page = folder / "evaluation.html"
    magicrl("report", *outputs, "--output", str(page))
    return page


def plan_page(folder: Path) -> Path:
    """The 7B recipe of the report on 32 GPUs."""
    page = folder / "plan.html"
    magicrl("plan", *PLAN, "--page", str(page))
    return page


MAKERS = {"comparison": comparison_page, "evaluation": evaluation_page, "plan": plan_page}
