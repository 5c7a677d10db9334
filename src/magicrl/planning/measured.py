"""Lengths and survivors of a run that exists, read from its ``metrics.jsonl``: the best assumption for the next one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from magicrl.planning.lengths import Lengths, lengths_of_mean
from magicrl.planning.published import SHARED, SIGMA

WINDOW = 20
"""Last steps that are averaged."""
NINTH_DECILE = 1.2815515655446004
"""Standard normal quantile of 0.9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run's last steps looked like.

    Attributes:
        lengths: under the T of those steps.
        kept: share of the groups that was trained on.
    """

    lengths: Lengths
    kept: float


def read_measured(folder: Path) -> Measured:
    """The last steps of a run folder.

    Raises:
        ValueError: no metrics, or fewer than one step.
    """
    path = folder / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not the metrics of a run: {error}; name a run folder of magicrl train") from None
    if not records:
        raise ValueError(f"{path}: holds no step yet")
    last = [record["values"] for record in records if record["stage"] == records[-1]["stage"]][-WINDOW:]
    limit = int(last[-1]["stage/max_tokens"])
    median, ninth = _mean(last, "length/q50"), _mean(last, "length/q90")
    inside = 0 < median < ninth < limit
    sigma = min(2.0, max(0.05, log(ninth / median) / NINTH_DECILE)) if inside else SIGMA
    kept = _mean(last, "groups/trained") / _mean(last, "groups/sampled")
    mean = min(_mean(last, "length/mean"), 0.99 * limit)
    return Measured(lengths=lengths_of_mean(mean, sigma, limit, SHARED), kept=min(1.0, max(kept, 0.01)))


def _mean(steps: Sequence[dict[str, Any]], key: str) -> float:
    return float(np.mean([values[key] for values in steps]))
