"""What a run kept and dropped, counted from its rows; and the way of one problem through it."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from magicrl.pipeline.frame import count_rows
from magicrl.pipeline.parts import StepFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """One step of a run.

    Attributes:
        step: its name; ``import`` for what was read.
        sources: by source, rows ``in``, ``kept``, and ``dropped`` by reason.
        seconds: that its last run took; None for the import.
    """

    step: str
    sources: dict[str, dict[str, Any]]
    seconds: float | None = None

    @property
    def entered(self) -> int:
        return sum(one["in"] for one in self.sources.values())

    @property
    def kept(self) -> int:
        return sum(one["kept"] for one in self.sources.values())

    @property
    def reasons(self) -> dict[str, int]:
        """Dropped rows by reason, the most frequent first."""
        total: dict[str, int] = {}
        for one in self.sources.values():
            for reason, count in one["dropped"].items():
                total[reason] = total.get(reason, 0) + count
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True, kw_only=True, slots=True)
class Station:
    """One step's word on a problem: ``kept``, or why not."""

    step: str
    kept: bool
    reason: str
    detail: str
    row: dict[str, Any]


def step_folders(output: Path) -> list[StepFolder]:
    """The folders of a run's finished steps, in order.

    A step that read other rows than the one before it left (a run with changes that stopped early) is not of this run,
    and no step after it is.

    Raises:
        ValueError: the folder holds no run.
    """
    if not (output / "sources").is_dir():
        raise ValueError(f"{output} holds no run of a data pipeline; give the folder that magicrl data build wrote")
    found: list[StepFolder] = []
    left: str | None = None
    for path in sorted(output.glob("[0-9][0-9]-*/step.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if left is not None and document["inputs"] != left:
            break
        left = document["made"]
        found.append(StepFolder(path.parent))
    return found


def _sources(output: Path) -> list[StepFolder]:
    return [StepFolder(path) for path in sorted((output / "sources").iterdir()) if path.is_dir()]


def _levels(output: Path) -> list[tuple[str, list[StepFolder]]]:
    """The import, then each finished step, with their folders."""
    return [("import", _sources(output)), *((step.path.name, [step]) for step in step_folders(output))]


def counts_of(output: Path) -> list[StepCounts]:
    """Counts of the import and of every finished step, in order.

    Raises:
        ValueError: the folder holds no run, or a part is damaged.
    """
    steps = step_folders(output)
    imported: dict[str, dict[str, Any]] = {}
    for source in _sources(output):
        imported |= count_rows(source)
    found = [StepCounts(step="import", sources=imported)]
    for folder in steps:
        document = json.loads(folder.summary.read_text(encoding="utf-8"))
        found.append(StepCounts(step=document["step"], sources=document["sources"], seconds=document["seconds"]))
    return found


def way_of(output: Path, problem: str) -> list[Station]:
    """What each step said of a problem, up to the one that dropped it.

    Raises:
        ValueError: no row has that id (says near ones).
    """
    stations: list[Station] = []
    near: set[str] = set()
    for name, folders in _levels(output):
        found = next((one for folder in folders if (one := _look(folder, name, problem, near))), None)
        if found is None:
            break
        stations.append(found)
        if not found.kept:
            break
    if not stations:
        close = difflib.get_close_matches(problem, near, n=3, cutoff=0.6)
        hint = f"; near ones: {', '.join(close)}" if close else "; ids are SOURCE/NAME, as in the rows' column id"
        raise ValueError(f"{output}: no problem has the id {problem!r}{hint}")
    return stations


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """What one step did with some problems: so many reached it, so many it dropped, by reason."""

    step: str
    reached: int
    dropped: dict[str, int]

    @property
    def passed(self) -> int:
        return self.reached - sum(self.dropped.values())


def passages_of(output: Path, problems: Collection[str]) -> list[Passage]:
    """How far some problems came (those that a person labelled as flawed, say): the import, then each step in order.

    Problems that the run never read do not count.

    Raises:
        ValueError: the folder holds no run, or a part is damaged.
    """
    wanted = set(problems)
    told: list[Passage] = []
    for name, folders in _levels(output):
        kept, dropped = 0, Counter[str]()
        for folder in folders:
            for table in folder.tables("kept", ["id"]):
                kept += sum(name in wanted for name in table.column("id").to_pylist())
            for table in folder.tables("dropped", ["id", "reason"]):
                dropped.update(row["reason"] for row in table.to_pylist() if row["id"] in wanted)
        told.append(Passage(step=name, reached=kept + dropped.total(), dropped=dict(dropped.most_common())))
    return told


def _look(folder: StepFolder, name: str, problem: str, near: set[str]) -> Station | None:
    for kept, parts in ((True, folder.kept), (False, folder.dropped)):
        for path in sorted(parts.glob("*.parquet")):
            import pyarrow.parquet as pq

            ids = pq.read_table(path, columns=["id"]).column("id")
            place = pc.index(ids, pa.scalar(problem)).as_py()
            if len(near) < 20_000:
                near |= set(ids.to_pylist())
            if place >= 0:
                row = pq.read_table(path).slice(place, 1).to_pylist()[0]
                reason, detail = row.pop("reason", "") or "", row.pop("detail", "") or ""
                return Station(step=name, kept=kept, reason=reason, detail=detail, row=row)
    return None
