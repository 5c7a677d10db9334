"""Two evaluations of the same problems: paired difference, interval, permutation test, token efficiency."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from magicrl.evaluation.folder import RESULTS, differences
from magicrl.evaluation.scaling import accuracy_at_mean_length
from magicrl.evaluation.statistics import paired_difference, permutation_test


def compare(before: Path, after: Path) -> dict[str, Any]:
    """How the evaluation in ``after`` differs from the one in ``before``, per benchmark.

    A benchmark is compared where both put the very same problems (by checksum); where settings differ beside the
    model, the difference is given and says so, since it is then one of model and settings together.

    Raises:
        ValueError: a folder without results, or no benchmark in common.
    """
    old, new = _results(before), _results(after)
    names = [name for name in old if name in new]
    if not names:
        raise ValueError(f"{before} and {after} have no benchmark in common: {', '.join(old)} and {', '.join(new)}")
    return {
        "before": str(before),
        "after": str(after),
        "benchmarks": {name: _compared(old[name], new[name]) for name in names},
        "only_in_one": sorted({*old} ^ {*new}),
    }


def _results(folder: Path) -> dict[str, Any]:
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
    if settings_old["problems"] != settings_new["problems"]:
        changed = differences(settings_old["problems"], settings_new["problems"])
        return {"comparable": False, "why": "other problems: " + "; ".join(changed)}
    differ = differences(_shared(settings_old, old["samples"]), _shared(settings_new, new["samples"]))
    pairs = [
        (a["accuracy"], b["accuracy"], b["mean_tokens"] - a["mean_tokens"])
        for a, b in zip(old["per_problem"], new["per_problem"], strict=True)
        if a["accuracy"] is not None and b["accuracy"] is not None
    ]
    if not pairs:
        return {"comparable": False, "why": "no problem was judged in both"}
    first, second, longer = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    difference = paired_difference(second, first)
    return {
        "comparable": True,
        "settings_differ": differ,
        "problems": len(pairs),
        "before": float(first.mean()),
        "after": float(second.mean()),
        "difference": {"mean": difference.mean, "low": difference.low, "high": difference.high},
        "p_value": permutation_test(second - first),
        "better": int(np.sum(second > first)),
        "worse": int(np.sum(second < first)),
        "tokens_difference": float(longer.mean()),
        "efficiency": _efficiency(old, new),
    }


def _shared(settings: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Settings that should agree: all but what the model itself is. Seeds may differ: they are chance."""
    kept = {key: value for key, value in settings.items() if key not in ("problems", "benchmark")}
    kept["engine"] = {k: v for k, v in settings["engine"].items() if k != "model" and not k.endswith("sha256")}
    kept["sampling"] = {key: value for key, value in settings["sampling"].items() if key != "seed"}
    return kept | {"samples": samples}


def _efficiency(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy of both at the mean length of the thriftier one, read off their curves over limits."""
    length = min(old["length"]["mean"], new["length"]["mean"])
    curves = (old["scaling"]["over_limits"], new["scaling"]["over_limits"])
    before, after = (accuracy_at_mean_length(curve, length) for curve in curves)
    return {"mean_tokens": length, "before": before, "after": after}
