"""Screening of tasks for the showcase: ``python -m studies.tasks NAME=FILE ...``.

Samples the published model on every usable task of reasoning-gym and on the files, and writes one row per task to
``studies/results/showcase/screening.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from magicrl.config.data_schema import SourceConfig
from magicrl.data.gym_tasks import GymTask, usable_tasks
from magicrl.data.sources import load_problems
from magicrl.records import Problem
from studies.showcase import RESULTS

TEMPLATE = "{prompt}\n\nRespond only with the final answer."
PROBLEMS, SAMPLES, SEED, TOKENS = 16, 8, 90, 16
LONGEST_PROMPT, LONGEST_ANSWER = 1_500, 24
"""Characters. Longer prompts cost too much, and longer answers do not fit the response limit."""
SLOW = ("acre", "futoshiki", "puzzle24", "zebra_puzzles")
"""Tasks that need more than 10 s on the loaded machine to generate their problems."""


def suitable(problems: Sequence[Problem]) -> list[Problem] | str:
    """Return the problems with the template around their prompts, or the reason why they are left out."""
    if any(not p.references for p in problems):
        return "has no reference answers"
    if (longest := max(len(p.prompt) for p in problems)) > LONGEST_PROMPT:
        return f"prompt of {longest} characters"
    if (longest := max(len(p.references[0]) for p in problems)) > LONGEST_ANSWER:
        return f"answer of {longest} characters"
    return [replace(p, prompt=TEMPLATE.replace("{prompt}", p.prompt)) for p in problems]


def screen(files: Mapping[str, str], work: Path) -> dict[str, Any]:
    """Sample the published model on all tasks in one evaluation, and return a row for each."""
    import magicrl

    found: dict[str, list[Problem] | str] = {
        name: suitable(load_problems(SourceConfig.model_validate({"path": file}))[:PROBLEMS])
        for name, file in files.items()
    }
    for task in usable_tasks():
        stream = GymTask(task).stream(seed=SEED, split="validation")
        found[task] = "problems are slow to generate" if task in SLOW else suitable(list(islice(stream, PROBLEMS)))
    clock = time.process_time()
    result = magicrl.evaluate(
        "smollm2",
        {name: problems for name, problems in found.items() if not isinstance(problems, str)},
        output=work,
        samples=SAMPLES,
        temperature=1.0,
        max_tokens=TOKENS,
        extract="lenient",
        dtype="bfloat16",
        threads=1,
        workers=1,
        max_rows=64,
        memory_limit_mb=1024,
        pass_at=[SAMPLES],
        progress=False,
    )
    rows: dict[str, dict[str, Any]] = {
        name: {"left_out": reason} for name, reason in found.items() if isinstance(reason, str)
    }
    for name, measured in result.recorded.benchmarks.items():
        frame = result.samples(name)
        outcomes: defaultdict[str, set[bool]] = defaultdict(set)
        for problem, right in zip(frame["problem"].tolist(), frame["correct"].tolist(), strict=True):
            outcomes[str(problem)].add(bool(right))
        rows[name] = {
            "accuracy": round(measured.accuracy.mean, 4),
            "found": round(measured.pass_at[SAMPLES].mean, 4),
            "mixed": round(sum(len(found) == 2 for found in outcomes.values()) / len(outcomes), 4),
            "length": round(measured.length.mean, 1),
            "truncated": round(measured.truncation.mean, 3),
        }
    return {"cpu_seconds": round(time.process_time() - clock), "rows": rows}


if __name__ == "__main__":
    document = screen(dict(text.split("=", 1) for text in sys.argv[1:]), Path("runs/screening"))
    (RESULTS / "screening.json").write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")
