"""Efficiencies that were found once and are kept: ``calibration.toml``, written by the scripts that find them.

``published`` is for GPUs (``benchmarks/plan_published.py``); the tables of ``cpu-2core`` are for this project's own
machine (``benchmarks/plan_cpu.py``), one for each width of model, since small products reach less of the peak.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from math import exp, log

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from magicrl.planning.costs import Efficiency

SHARES = ("kv", "learner", "weights", "matmul", "network")
"""Efficiencies that are shares of a peak and cannot pass 1."""


class CalibrationEntry(BaseModel):
    """A table of ``calibration.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hardware: str
    """Accelerator that it is for; ``gpu`` for all that have none of their own."""
    hidden: int = Field(ge=1)
    """Width of the model that it was found on."""
    kv: float = Field(gt=0)
    step_overhead: float = Field(ge=0)
    learner: float = Field(gt=0)
    other: float = Field(ge=0)
    weights: float = Field(gt=0)
    matmul: float = Field(gt=0)
    network: float = Field(gt=0)
    row: float = Field(ge=0, default=0.0)
    unknowns: tuple[str, ...]
    """Those that were fitted."""
    covariance: tuple[tuple[float, ...], ...]
    """Of their logarithms."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Efficiencies and how sure they are.

    Attributes:
        name: of the table.
        efficiency: its values.
        unknowns: names of those that were fitted.
        covariance: ``[unknowns, unknowns]`` of their logarithms.
        source: what they were found from.
    """

    name: str
    efficiency: Efficiency
    unknowns: tuple[str, ...]
    covariance: NDArray[np.float64]
    source: str

    def drawn(self, count: int, seed: int = 0) -> list[Efficiency]:
        """Efficiencies drawn from their uncertainty; shares of a peak stay at 1 or below."""
        rng = np.random.default_rng(seed)
        middle = np.array([log(getattr(self.efficiency, name)) for name in self.unknowns])
        found = rng.multivariate_normal(middle, self.covariance, size=count, method="eigh")
        return [replace(self.efficiency, **self._values(row)) for row in found]

    def given(self, name: str, value: float) -> Calibration:
        """The same with one value known: it has no uncertainty any more."""
        kept = [i for i, unknown in enumerate(self.unknowns) if unknown != name]
        return replace(
            self,
            efficiency=replace(self.efficiency, **{name: value}),
            unknowns=tuple(self.unknowns[i] for i in kept),
            covariance=self.covariance[np.ix_(kept, kept)],
        )

    def _values(self, logarithms: NDArray[np.float64]) -> dict[str, float]:
        values = {name: exp(float(value)) for name, value in zip(self.unknowns, logarithms, strict=True)}
        return {name: min(value, 1.0) if name in SHARES else value for name, value in values.items()}


def load_calibration(hardware: str, hidden: int) -> Calibration:
    """The efficiencies for an accelerator and a model's width: its own where there are any, else the published ones."""
    text = resources.files("magicrl.planning").joinpath("calibration.toml").read_text(encoding="utf-8")
    entries = TypeAdapter(dict[str, CalibrationEntry]).validate_python(tomllib.loads(text))
    own = {name: e for name, e in entries.items() if e.hardware == hardware}
    candidates = own or {name: e for name, e in entries.items() if e.hardware == "gpu"}
    name, entry = min(candidates.items(), key=lambda item: abs(log(item[1].hidden / hidden)))
    kept = entry.model_dump(exclude={"covariance", "source", "hardware", "hidden", "unknowns"})
    return Calibration(
        name=name,
        efficiency=Efficiency(**kept),
        unknowns=entry.unknowns,
        covariance=np.array(entry.covariance),
        source=entry.source,
    )
