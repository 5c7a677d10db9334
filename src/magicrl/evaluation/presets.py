"""Settings of published evaluations by name (RECIPE sections 5, 6 and 11), and Table 13 beside a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from magicrl.config.loader import shipped_table
from magicrl.config.schema import Section
from magicrl.verifiers.base import Extract

TABLE13_SETS = ("aime24", "aime25", "livecodebench")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A way to evaluate.

    Attributes:
        name: what ``--preset`` says.
        temperature, top_p, max_tokens: of sampling.
        samples: a problem, by benchmark; ``other_samples`` for the rest.
        extract: whether an answer must stand in a box.
        mean_of: sets whose mean is the preset's own figure; empty: none.
        source: where it comes from, and what of it is a decision of this project.
    """

    name: str
    temperature: float
    top_p: float
    max_tokens: int
    samples: Mapping[str, int]
    other_samples: int
    extract: Extract
    mean_of: tuple[str, ...]
    source: str

    def samples_for(self, benchmark: str) -> int:
        return self.samples.get(benchmark, self.other_samples)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for the record of a job."""
        return asdict(self)


_REPORT = Preset(
    name="report",
    temperature=1.0,
    top_p=1.0,
    max_tokens=32768,
    samples={"aime24": 32, "aime25": 32, "livecodebench": 4},
    other_samples=4,
    extract="box",
    mean_of=(),
    source="Table 13 of the report; 4 samples for sets it does not have are a decision of magicrl",
)
_RELEASED = replace(
    _REPORT,
    name="released-code",
    temperature=0.6,
    source="temperature of the released evaluation scripts (RECIPE section 11); the rest as in `report`",
)
_STUDY = replace(
    _REPORT,
    name="study",
    samples={"aime24": 8, "aime25": 8, "livecodebench": 1},
    other_samples=8,
    mean_of=TABLE13_SETS,
    source="the ablations' test metric (RECIPE section 6): mean of AIME24 avg@8, AIME25 avg@8, LiveCodeBench "
    "pass@1; the limit is Table 13's, since the study's is not stated",
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in (_REPORT, _RELEASED, _STUDY)}


class Table13Row(Section):
    """One model of Table 13, in per cent; None where the report has no figure."""

    model: str
    aime24: float | None = None
    aime25: float | None = None
    livecodebench: float | None = None


class Table13(Section):
    """``table13.toml``."""

    rows: tuple[Table13Row, ...]
    note: str


def table13() -> Table13:
    """Table 13 of the report."""
    return shipped_table("evaluation/table13.toml", Table13)


def average(row: Table13Row) -> float | None:
    """The mean of a row's three figures, computed; None if one is missing."""
    values = (row.aime24, row.aime25, row.livecodebench)
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def against_table13(benchmark: str, settings: Mapping[str, Any], *, samples: int, whole: bool) -> list[str]:
    """Why a result is not comparable with Table 13's column of this benchmark; empty where it is.

    Args:
        benchmark: name in the catalogue.
        settings: temperature, top_p and max_tokens.
        samples: samples a problem.
        whole: all problems of the set were put.
    """
    if benchmark not in TABLE13_SETS:
        return ["Table 13 has no such set"]
    report = PRESETS["report"]
    wanted = {"temperature": report.temperature, "top_p": report.top_p, "max_tokens": report.max_tokens}
    reasons = [
        f"{name} {settings.get(name)} instead of {value}"
        for name, value in wanted.items()
        if settings.get(name) != value
    ]
    if samples != report.samples[benchmark]:
        reasons.append(f"{samples} samples a problem instead of {report.samples[benchmark]}")
    if not whole:
        reasons.append("not the whole set as it was loaded by the report")
    return reasons


def beside(results: Mapping[str, float], model: str = "this result") -> list[dict[str, Any]]:
    """Table 13 with a row of one's own: per cent by set and the computed average.

    Args:
        results: accuracy in [0, 1] by benchmark, for those that are comparable.
        model: name of the row.
    """
    own = Table13Row(model=model, **{name: 100 * results[name] for name in TABLE13_SETS if name in results})
    return [row.model_dump() | {"average": average(row)} for row in (*table13().rows, own)]
