"""Efficiencies that were found once and are kept: ``calibration.toml``, written by the scripts that find them.

``published`` is for GPUs (``benchmarks/plan_published.py``), ``cpu-2core`` for this project's own machine
(``benchmarks/plan_cpu.py``).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from magicrl.planning.costs import Efficiency
from magicrl.planning.fit import unknowns_of, with_unknowns


class CalibrationEntry(BaseModel):
    """A table of ``calibration.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv: float = Field(gt=0)
    step_overhead: float = Field(ge=0)
    learner: float = Field(gt=0)
    other: float = Field(ge=0)
    weights: float = Field(gt=0)
    matmul: float = Field(gt=0)
    network: float = Field(gt=0)
    covariance: tuple[tuple[float, ...], ...]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Efficiencies and how sure they are.

    Attributes:
        name: of the table.
        efficiency: its values.
        covariance: ``[4, 4]`` of the logarithms of the unknowns, in the order of ``fit.UNKNOWNS``.
        source: what they were found from.
    """

    name: str
    efficiency: Efficiency
    covariance: NDArray[np.float64]
    source: str

    def drawn(self, count: int, seed: int = 0) -> list[Efficiency]:
        """Efficiencies drawn from their uncertainty; shares of a peak stay below 1."""
        rng = np.random.default_rng(seed)
        middle = unknowns_of(self.efficiency)
        found = rng.multivariate_normal(middle, self.covariance, size=count, method="eigh")
        found[:, [0, 2]] = np.minimum(found[:, [0, 2]], 0.0)
        return [with_unknowns(row, self.efficiency) for row in found]


def load_calibration(hardware: str) -> Calibration:
    """The efficiencies for an accelerator: its own where there are any, else the published ones."""
    text = resources.files("magicrl.planning").joinpath("calibration.toml").read_text(encoding="utf-8")
    entries = TypeAdapter(dict[str, CalibrationEntry]).validate_python(tomllib.loads(text))
    name = hardware if hardware in entries else "published"
    entry = entries[name]
    values = {key: value for key, value in entry.model_dump().items() if key not in ("covariance", "source")}
    return Calibration(
        name=name,
        efficiency=Efficiency(**values),
        covariance=np.array(entry.covariance),
        source=entry.source,
    )
