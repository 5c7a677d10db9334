"""Figures of a finished run of a data pipeline: the funnel, the difficulty table, the judges, the data card.

    magicrl data build laptop --output runs/data/laptop
    magicrl train smollm2 --output runs/laptop --set stages.0.max_steps=3 --set stages.1.max_steps=2 \
        --set data.difficulty_filter.samples=4 --set 'data.train=[{path="runs/data/laptop/mixture/train.parquet"}]'
    python benchmarks/pipeline_laptop.py runs/data/laptop --training runs/laptop
        # docs/figures/pipeline-laptop.json, and the section of docs/pipeline.md
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from page_sections import put_section

from magicrl.evaluation.provenance import environment_facts
from magicrl.files import write_atomically
from magicrl.pipeline.judge_step import FLAWED
from magicrl.pipeline.judge_votes import stored_judgements
from magicrl.pipeline.stats import counts_of, step_folders

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "pipeline-laptop.json"


def of_step(folder: Path, name: str) -> Any:
    """A report in the step's ``work`` folder, None where the step has none."""
    path = folder / "work" / name
    return json.loads(path.read_text()) if path.is_file() else None


def votes_on_the_flawed(work: Path, threshold: int) -> dict[str, list[int]]:
    """By known flawed problem: votes for it, and readable votes."""
    found = stored_judgements(work, [problem.id for problem in FLAWED], threshold)
    return {one.problem: [one.keeps, one.valid] for one in found}


def trained(folder: Path) -> dict[str, Any]:
    """What the training run that took the file says of itself."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    facts = json.loads((folder / "run.json").read_text())
    return {"steps": len(lines), "first": lines[0], "last": lines[-1], "data": facts.get("data")}


def section(found: dict[str, Any]) -> str:
    """The run as docs/pipeline.md tells it."""
    steps: dict[str, list[int]] = {}
    for row in found["funnel"]:
        steps[row["step"]] = [row["in"], row["kept"]]
    lines = ["| step | in | kept |", "|---|---|---|", *(f"| {name} | {a} | {b} |" for name, (a, b) in steps.items())]
    judging = found["judging"]
    one = next(iter(judging["judges"].values()))
    flawed = judging["flawed"]
    lines += [
        "",
        f'{next(iter(judging["judges"]))}, served by vLLM\'s CPU build, said "keep" in {one["says_keep"]:.0%} of',
        f"{one['valid']} readable votes of {one['votes']}, found {flawed['found_by_judges']} of the {flawed['judged']}",
        f"known flawed problems, and agreed with itself at a Fleiss kappa of {judging['fleiss_kappa']:.2f}",
        f"({judging['agreement']}).",
    ]
    if "training" in found:
        first, last = (found["training"][end]["values"]["train/accuracy/mean"] for end in ("first", "last"))
        lines += [
            f"`magicrl train smollm2` on the mixture took its {found['training']['steps']} steps",
            f"(training accuracy {first:.2f} in the first, {last:.2f} in the last).",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--training", type=Path)
    parser.add_argument("--output", type=Path, default=FIGURES)
    options = parser.parse_args()
    document: dict[str, Any] = {
        "command": "magicrl data build laptop; python benchmarks/pipeline_laptop.py",
        "pipeline": tomllib.loads((options.run / "pipeline.toml").read_text()),
        "funnel": [
            {"step": one.step, "in": one.entered, "kept": one.kept, "seconds": one.seconds, "sources": one.sources}
            for one in counts_of(options.run)
        ],
    }
    for folder in step_folders(options.run):
        difficulty, judging = of_step(folder.path, "difficulty.json"), of_step(folder.path, "judging.json")
        if difficulty is not None:
            document["difficulty"] = difficulty
        if judging is not None:
            votes = votes_on_the_flawed(folder.work, judging["threshold"])
            document["judging"] = judging | {"votes_on_the_flawed": votes}
    card = options.run / "mixture" / "card.json"
    if card.is_file():
        document["card"] = json.loads(card.read_text())
    if options.training is not None:
        document["training"] = trained(options.training)
    document["built"] = json.loads((options.run / "run.json").read_text())
    document["environment"] = environment_facts()
    write_atomically(options.output, json.dumps(document, indent=1) + "\n")
    put_section(FIGURES.parents[1] / "pipeline.md", "laptop", section(document))


if __name__ == "__main__":
    main()
