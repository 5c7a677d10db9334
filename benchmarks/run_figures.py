"""A run's figures as one small JSON: tests before and after, the paired rise, the filter, curves, time and memory.

python benchmarks/run_figures.py runs/smollm2 --output docs/figures/smollm2.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import parser_of, write_figure

from magicrl.evaluation.statistics import paired_scores

CURVES = (
    "train/accuracy/mean",
    "train/truncation/ratio",
    "entropy/exact/mean",
    "entropy/alpha",
    "length/mean",
    "groups/rejected/ratio",
    "learner/grad_norm",
    "learner/sampler_gap_mean",
    "time/rollout",
    "time/train",
    "time/other",
)
SAMPLES = 8
SCORE_KEYS = ("problems", "samples", "pass_at", "length_mean", "truncation", "entropy", "boxed_and_stopped")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    run: Path = arguments.run
    facts = json.loads((run / "run.json").read_text())
    rows = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    document = {
        "command": f"python benchmarks/run_figures.py {run}",
        "run": {
            key: facts.get(key) for key in ("name", "seed", "status", "config_hash", "threads", "data", "peak_rss_mb")
        },
        "environments": facts["environments"],
        "tests": {
            path.stem.removeprefix("before-"): test(run, path)
            for path in sorted((run / "evaluations").glob("before-*"))
        },
        "difficulty_filter": difficulty(run / "difficulty.json"),
        "samples": samples(run),
        "steps": len(rows),
        "curves": {
            key: [None if row.get(key) is None else round(float(row[key]), 5) for row in rows] for key in CURVES
        },
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_figure(arguments.output, document)


def test(run: Path, before_path: Path) -> dict[str, Any]:
    """One test set: scores before and after, and the paired rise at temperature 1 and over the start's best."""
    before = json.loads(before_path.read_text())
    after_path = before_path.with_name(before_path.name.replace("before-", "after-"))
    result: dict[str, Any] = {"max_tokens": before["max_tokens"], "before": scores(before)}
    if not after_path.exists():
        return result
    after = json.loads(after_path.read_text())
    best = max(before["temperatures"], key=lambda tau: before["temperatures"][tau]["accuracy"]["mean"])
    best_after = max(after["temperatures"], key=lambda tau: after["temperatures"][tau]["accuracy"]["mean"])
    return {
        **result,
        "after": scores(after),
        "rise": {
            "at_1": rise(after, "1.0", before, "1.0"),
            "at_1_over_the_starts_best": {"start_temperature": best, **rise(after, "1.0", before, best)},
            "best_over_best": {
                "after_temperature": best_after,
                "start_temperature": best,
                **rise(after, best_after, before, best),
            },
        },
    }


def rise(after: dict[str, Any], tau_after: str, before: dict[str, Any], tau_before: str) -> dict[str, float]:
    """Paired over the problems judged in both."""
    new, old = after["temperatures"][tau_after]["per_problem"], before["temperatures"][tau_before]["per_problem"]
    difference = paired_scores(new, old, after["temperatures"][tau_after].get("clusters"))
    assert difference is not None, "the same problems, two of them judged at least"
    return {"mean": round(difference.mean, 4), "low": round(difference.low, 4), "high": round(difference.high, 4)}


def scores(document: dict[str, Any]) -> dict[str, Any]:
    return {
        tau: {
            "accuracy": {key: round(score["accuracy"][key], 4) for key in ("mean", "low", "high")},
            **{key: score[key] for key in SCORE_KEYS},
        }
        for tau, score in document["temperatures"].items()
    }


def samples(run: Path) -> list[dict[str, Any]]:
    """What the first problems of each test got before and after, to read: (temperature, outcome, text)."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in ("before", "after"):
        for path in sorted((run / "evaluations").glob(f"{name}-*.json")):
            document = json.loads(path.read_text())
            for shown in document["samples"][:SAMPLES]:
                row = found.setdefault(
                    (document["set"], shown["problem_id"]), {"prompt": shown["prompt"], "gold": shown["gold"]}
                )
                row[name] = [[r["temperature"], r["outcome"], r["text"]] for r in shown["responses"]]
    return [{"set": key[0], "problem_id": key[1], **row} for key, row in found.items()]


def difficulty(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    return {key: document[key] for key in ("samples", "temperature", "table")}


if __name__ == "__main__":
    main()
