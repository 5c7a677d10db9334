"""Comparison of evaluations on the same problems: paired differences, intervals, permutation tests, curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from magicrl.config.errors import RecipeError
from magicrl.evaluation.provenance import now
from magicrl.evaluation.samples import RESULTS, SCHEMA_VERSION, differences
from magicrl.evaluation.scaling import (
    Marked,
    accuracy_at_mean_length,
    from_marks,
    limit_for_mean_length,
    mean_length_within,
    paired_within,
)
from magicrl.evaluation.statistics import holm, paired_difference, permutation_test
from magicrl.files import write_atomically

_UNLIMITED = 2**31


def compare_pair(before: Path, after: Path) -> dict[str, Any]:
    """Compare the evaluation in ``after`` with the one in ``before``, per benchmark.

    A benchmark is compared if both used the same problems (by checksum). Settings that differ in addition to the model
    are listed, since the difference is then one of model and settings together.

    Raises:
        ValueError: a folder has no results, or there is no common benchmark.
    """
    old, new = read_benchmarks(before), read_benchmarks(after)
    names = [name for name in old if name in new]
    if not names:
        raise ValueError(f"{before} and {after} have no benchmark in common: {', '.join(old)} and {', '.join(new)}")
    return {
        "before": str(before),
        "after": str(after),
        "benchmarks": {name: _compared(old[name], new[name]) for name in names},
        "only_in_one": sorted({*old} ^ {*new}),
    }


def read_benchmarks(folder: Path) -> dict[str, Any]:
    """Return the result of each benchmark in the ``results.json`` of an evaluation.

    Raises:
        ValueError: there is none, or it is no results file.
    """
    path = folder / RESULTS if folder.is_dir() else folder
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))["benchmarks"])
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no results; finish the evaluation first (magicrl eval ... --output {folder})"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no results file of magicrl eval ({error})") from None


def _compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    settings_old, settings_new = old["settings"], new["settings"]
    # by checksum: a paired difference needs the very same problems in the same order
    if settings_old["problems"] != settings_new["problems"]:
        changed = differences(settings_old["problems"], settings_new["problems"])
        # The checksum is one of whole prompts.
        what = "other problems or another template: " if len(changed) == 1 else "other problems: "
        return {"comparable": False, "why": what + "; ".join(changed)}
    differ = differences(_shared(settings_old, old["samples"]), _shared(settings_new, new["samples"]))
    # problems without a judged sample in one of the two are left out of both
    pairs = [
        (a["accuracy"], b["accuracy"], b["mean_tokens"] - a["mean_tokens"], cluster)
        for a, b, cluster in zip(old["per_problem"], new["per_problem"], _clusters(old), strict=True)
        if a["accuracy"] is not None and b["accuracy"] is not None
    ]
    if not pairs:
        return {"comparable": False, "why": "no problem was judged in both"}
    *columns, clusters = zip(*pairs, strict=True)
    first, second, longer = (np.array(column, dtype=np.float64) for column in columns)
    p_value = permutation_test(second - first, clusters)
    difference = paired_difference(second, first, clusters, p_value=p_value)
    return {
        "comparable": True,
        "settings_differ": differ,
        "problems": difference.problems,
        "clusters": difference.clusters,
        "before": float(first.mean()),
        "after": float(second.mean()),
        "difference": {"mean": difference.mean, "low": difference.low, "high": difference.high},
        "p_value": p_value,
        "better": int(np.sum(second > first)),
        "worse": int(np.sum(second < first)),
        "tokens_difference": float(longer.mean()),
        "efficiency": common_efficiency(old, new),
    }


def correct(rows: Sequence[dict[str, Any]]) -> str:
    """Add ``p_corrected`` to these rows of `compare_pair`: Holm's correction over all that are comparable.

    Returns:
        A sentence that says so; empty for a single comparison.
    """
    tested = [row for row in rows if row["comparable"]]
    for row, p_value in zip(tested, holm([row["p_value"] for row in tested]), strict=True):
        row["p_corrected"] = p_value
    return f"p: Holm's correction for {len(tested)} comparisons; intervals are not corrected" * (len(tested) > 1)


def _shared(settings: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Return the settings that should agree: all except the model and the seeds."""
    kept = {key: value for key, value in settings.items() if key not in ("problems", "benchmark")}
    engine = settings["engine"].items()
    kept["engine"] = {key: value for key, value in engine if key != "served_model" and not key.endswith("sha256")}
    kept["sampling"] = {key: value for key, value in settings["sampling"].items() if key != "seed"}
    return kept | {"samples": samples}


def common_efficiency(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accuracy of both at the shorter of their mean lengths, and the paired difference there."""
    first, second, named = _samples_of(old), _samples_of(new), _clusters(old)
    # Beyond the shorter mean the samples of that model give no information. Those without a verdict do not count.
    length = min(mean_length_within(samples, _UNLIMITED) for samples in (first, second))
    before, after = (accuracy_at_mean_length(samples, length, named) for samples in (first, second))
    # each model at its own limit, so that both spend the same tokens on average
    limits = [limit_for_mean_length(samples, length) for samples in (second, first)]
    found = None
    if limits[0] is not None and limits[1] is not None:
        found = paired_within(second, first, (limits[0], limits[1]), named)
    return {
        "mean_tokens": length,
        "before": None if before is None else before.mean,
        "after": None if after is None else after.mean,
        "difference": None if found is None else asdict(found[1]),
    }


def _samples_of(result: Mapping[str, Any]) -> list[list[Marked]]:
    """Return the samples of every problem in a result: verdicts and lengths."""
    return [from_marks(problem["outcomes"], problem["tokens"]) for problem in result["per_problem"]]


def _clusters(result: Mapping[str, Any]) -> list[int]:
    return [problem["cluster"] for problem in result["per_problem"]]


def compare_all(folders: Sequence[Path]) -> dict[str, Any]:
    """Compare two or more evaluations with the first, and align their curves.

    Returns:
        ``comparisons``: `compare_pair` of the first and each further folder. ``note``: see `correct`. ``curves``: by
        benchmark, the curves of each folder over limits (truncated and fresh) and samples, and the accuracy at common
        mean lengths (None if its responses are shorter), each with its interval.

    Raises:
        ValueError: fewer than two folders, a folder without results, or no common benchmark.
    """
    if len(folders) < 2:
        raise RecipeError("--compare needs two folders or more; the first is what the others are compared with")
    every = {str(folder): read_benchmarks(folder) for folder in folders}
    if len(every) < len(folders):
        raise RecipeError("--compare: a folder is named twice")
    names = list(dict.fromkeys(name for results in every.values() for name in results))
    comparisons = [compare_pair(folders[0], other) for other in folders[1:]]
    note = correct([row for pair in comparisons for row in pair["benchmarks"].values()])
    return {
        "schema_version": SCHEMA_VERSION,
        "written": now(),
        "comparisons": comparisons,
        "note": note,
        "curves": {name: _curves({f: r[name] for f, r in every.items() if name in r}) for name in names},
    }


def _curves(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves of one benchmark's results by folder, with the accuracy at the mean lengths of all."""
    lengths = sorted({point["mean_tokens"] for result in results.values() for point in result["scaling"]["efficiency"]})
    models: list[dict[str, Any]] = []
    for folder, result in results.items():
        samples, named = _samples_of(result), _clusters(result)
        found = [accuracy_at_mean_length(samples, tokens, named) for tokens in lengths]
        models.append(
            {
                "folder": folder,
                "model": result["model"]["model"],
                "problems_sha256": result["settings"]["problems"]["sha256"],
                "accuracy": result["accuracy"],
                "length": result["length"],
                **{name: result["scaling"][name] for name in ("over_limits", "exact", "fresh", "over_samples")},
                "efficiency": [None if estimate is None else estimate.as_dict() for estimate in found],
            }
        )
    return {"mean_tokens": lengths, "models": models}


def save_comparison(document: Mapping[str, Any], output: Path) -> Path:
    """Write ``comparison.json`` into the folder ``output``, which is created if absent."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "comparison.json"
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False))
    return path
