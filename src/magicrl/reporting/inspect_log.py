"""Evaluations as logs of Inspect (``inspect_ai``, log version 2), for ``inspect view`` and its Python functions.

A log is a ZIP archive of JSON documents. It is written without the package, whose dependencies exclude versions that
magicrl uses.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from magicrl.evaluation.samples import SampleRow
from magicrl.evaluation.statistics import Interval
from magicrl.files import write_atomically
from magicrl.records import Problem
from magicrl.reporting.read_folders import BenchmarkResult, RecordedEvaluation, scored_samples

_STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
_SUMMARY = ("id", "epoch", "input", "target", "metadata", "scores", "model_usage", "total_time")
"""Fields of a sample that the list of samples shows."""


def write_inspect_logs(evaluation: RecordedEvaluation, folder: Path) -> list[Path]:
    """Write one log per benchmark, ``BENCHMARK.eval``, and return their paths. Existing ones are replaced.

    A sample of a problem is an epoch. A response that was not judged has no score; its outcome is in its metadata.

    Raises:
        RunFolderError: a file of the samples is corrupt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, result in evaluation.benchmarks.items():
        problems, rows = scored_samples(evaluation.path / name, result.samples)
        asked = {problem.id: problem for problem in problems}
        samples = [_sample(asked[row.problem], row, evaluation.model) for row in rows if row.problem in asked]
        documents: dict[str, Any] = {"header.json": _header(evaluation, name, result, samples)}
        # Inspect finds a sample by this name, with the slashes of its id
        documents |= {f"samples/{s['id']}_epoch_{s['epoch']}.json": s for s in samples}
        documents["summaries.json"] = [{key: s[key] for key in _SUMMARY if key in s} for s in samples]
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for entry, document in documents.items():
                file.writestr(entry, json.dumps(document))
        paths.append(folder / f"{name}.eval")
        write_atomically(paths[-1], archive.getvalue())
    return paths


def _header(
    evaluation: RecordedEvaluation, name: str, result: BenchmarkResult, samples: list[dict[str, Any]]
) -> dict[str, Any]:
    graded = {} if result.reward is None else _metrics("reward", result.reward)
    metrics = _metrics("accuracy", result.accuracy) | graded
    for k, interval in result.pass_at.items():
        metrics |= _metrics(f"pass_at_{k}", interval)
    for k, interval in result.majority_at.items():
        metrics |= _metrics(f"majority_at_{k}", interval)
    settings = dict(result.settings)
    judged = sum("scores" in sample for sample in samples)
    score = {"name": "magicrl", "scorer": "magicrl", "metrics": metrics}
    sampling: Mapping[str, Any] = settings.get("sampling", {})
    generation = {
        key: sampling[key] for key in ("temperature", "top_p", "top_k", "max_tokens", "seed") if key in sampling
    }
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": result.scored_sha256[:22],  # the same log again has the same id
            "created": evaluation.written,
            "task": name,
            "dataset": {"name": result.title or name, "samples": result.problems},
            "model": evaluation.model,
            "model_generate_config": generation,
            "config": {"epochs": result.samples},
            "metadata": {"settings": settings, "model": dict(result.model)},
        },
        "plan": {"name": "plan", "steps": [{"solver": "generate"}], "config": generation},
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": [score | {"scored_samples": judged, "unscored_samples": len(samples) - judged}],
        },
    }


def _metrics(name: str, interval: Interval) -> dict[str, dict[str, Any]]:
    """Return a figure and the ends of its 95 % interval."""
    ends = {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: {"name": key, "value": value} for key, value in ends.items()}


def _sample(problem: Problem, row: SampleRow, model: str) -> dict[str, Any]:
    answer: Mapping[str, Any] = {"role": "assistant", "content": row.text, "source": "generate", "model": model}
    choice = {"message": answer, "stop_reason": _STOP_REASONS.get(row.finish_reason, "unknown")}
    usage = {"input_tokens": row.prompt_tokens or 0, "output_tokens": row.tokens}
    usage["total_tokens"] = sum(usage.values())
    asked = [{"role": turn.role, "content": turn.content} for turn in problem.messages]
    score = {"value": row.reward, "answer": row.extracted, "explanation": row.reason or row.status}
    sample: dict[str, Any] = {
        "id": problem.id,
        "epoch": row.sample + 1,
        "input": asked if problem.context else problem.prompt,
        "target": list(problem.references) or "",
        "messages": [*asked, answer],
        "output": {"model": model, "choices": [choice], "usage": usage},
        "metadata": {key: getattr(row, key) for key in ("outcome", "status", "decided_by", "entropy", "truncated")},
        "model_usage": {model: usage},
        "total_time": row.seconds,
    }
    return sample | ({"scores": {"magicrl": score}} if row.counted else {})
