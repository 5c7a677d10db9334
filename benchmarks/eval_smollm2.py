"""SmolLM2 before and after its RL run on real benchmarks, through ``magicrl eval`` as a user runs it.

Random parts of GSM8K, SVAMP, MATH-500, HumanEval and MBPP (fixed seeds), each model in turn, then the paired
comparisons of every two. It may be stopped at any time; the same command goes on to the sample. Only scores are
written to the figure, no problem and no response.

    python benchmarks/eval_smollm2.py --output runs/eval-smollm2 --data ../shared/data \
        --model instruct=runs/models/SmolLM2-135M-Instruct --model start=runs/models/smollm2-start-5f84288fd650da7b \
        --model trained=runs/smollm2/model --figure docs/figures/eval-smollm2.json
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from common import parser_of, write_figure

from magicrl.evaluation.comparison import compare
from magicrl.evaluation.results import Ask, Incomplete, result_of, write_results
from magicrl.evaluation.samples import EvaluationFolder

BOX = "{prompt} End with the answer in \\boxed{}."
PARTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "maths": (
        {
            "gsm8k": "math/sets/gsm8k/simple_gsm8k_test.jsonl",
            "svamp": "math/sets/svamp/SVAMP.json",
            "math500": "math/sets/math500/simple_math500.jsonl",
        },
        ["--limit", "60", "--samples", "2", "--max-tokens", "192", "--template", BOX],
    ),
    "code": (
        {"humaneval": "code/sets/humaneval/data.jsonl", "mbpp": "code/sets/mbpp_full/data.jsonl"},
        ["--limit", "40", "--samples", "2", "--max-tokens", "256"],
    ),
}
COMMON = ["--limit-seed", "0", "--dtype", "bfloat16", "--max-rows", "64"]
COMMON += ["--threads", "1", "--workers", "1"]
KEPT = ("title", "problems", "samples", "accuracy", "pass_at", "majority_at", "length", "truncation", "usage")


def command(part: str, model: str, data: Path, output: Path) -> list[str]:
    """The words after ``magicrl`` that evaluate ``model`` on a part of the sets."""
    sets, options = PARTS[part]
    benchmarks = [word for name, path in sets.items() for word in ("--benchmark", f"{name}={data / path}")]
    return ["eval", "--model", model, *benchmarks, *options, *COMMON, "--output", str(output)]


def complete(folder: Path) -> list[str]:
    """Benchmarks of an evaluation whose samples are all there; they are scored on the way."""
    names = sorted(path.parent.name for path in folder.glob("*/job.json"))
    done: list[str] = []
    for name in names:
        with contextlib.suppress(Incomplete):
            result_of(EvaluationFolder(folder / name), Ask())
            done.append(name)
    if done:
        write_results(folder, done, Ask())
    return done


def figure(output: Path, models: dict[str, str]) -> dict[str, Any]:
    """What stands in the figure: scores and account of what is complete, what is not, and the comparisons."""
    commands = ["magicrl " + shlex.join(command(part, "MODEL", Path("DATA"), Path("DIR"))) for part in PARTS]
    scores: dict[str, dict[str, Any]] = {name: {} for name in models}
    missing: list[str] = []
    comparisons: dict[str, dict[str, Any]] = {}
    for part, (sets, _) in PARTS.items():
        done = {name: complete(output / part / name) for name in models}
        missing += [f"{name}: {benchmark}" for name in models for benchmark in sets if benchmark not in done[name]]
        for name in (name for name in models if done[name]):
            results = json.loads((output / part / name / "results.json").read_text())
            for benchmark, result in results["benchmarks"].items():
                scores[name][benchmark] = {key: result[key] for key in KEPT} | {
                    "written": results["written"],
                    "environment": result["environment"],
                    "weights_sha256": result["settings"]["engine"]["weights_sha256"],
                }
        for first, second in combinations([name for name in models if done[name]], 2):
            if set(done[first]) & set(done[second]):
                compared = compare(output / part / first, output / part / second)["benchmarks"]
                comparisons.setdefault(f"{first} to {second}", {}).update(compared)
    return {"commands": commands, "models": models, "scores": scores, "not_run": missing, "comparisons": comparisons}


def main() -> None:
    """Evaluate what is missing, then write the figure."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, in order")
    parser.add_argument("--data", type=Path, required=True, help="folder with math/sets and code/sets")
    parser.add_argument("--output", type=Path, required=True, help="samples and results")
    parser.add_argument("--figure", type=Path, required=True, help="JSON to write")
    parser.add_argument("--score", action="store_true", help="only score what is complete; what is not is named")
    given = parser.parse_args()
    models = dict(text.split("=", 1) for text in given.model)
    for part in () if given.score else PARTS:
        for name, folder in models.items():
            words = command(part, folder, given.data, given.output / part / name)
            subprocess.run([sys.executable, "-m", "magicrl", *words], check=True)
    write_figure(given.figure, figure(given.output, models))
    sys.stdout.write(f"{given.figure}\n")


if __name__ == "__main__":
    main()
