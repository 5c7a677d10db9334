"""Statistics of a pipeline run: rows kept and dropped by each step, and the path of one problem."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicrl.pipeline.frame import count_rows
from magicrl.pipeline.parts import StepFolder, hash_of, read_part


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Row counts of a step."""

    step: str  # name of the step; ``import`` for reading the sources
    sources: dict[str, dict[str, Any]]  # rows by source: ``in``, ``kept``, and ``dropped`` by reason
    seconds: float | None = None  # duration of its last run; None for the import

    @property
    def entered(self) -> int:
        return sum(one["in"] for one in self.sources.values())

    @property
    def kept(self) -> int:
        return sum(one["kept"] for one in self.sources.values())

    @property
    def reasons(self) -> dict[str, int]:
        """Dropped rows by reason, most frequent first."""
        total = Counter[str]()
        for one in self.sources.values():
            total.update(one["dropped"])
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def source_folders(output: Path) -> list[StepFolder]:
    """Return the folders of a run's sources, in order, without those that an earlier run left there.

    Raises:
        ValueError: The folder holds no run.
    """
    folder = output / "sources"
    if not folder.is_dir():
        raise ValueError(f"{output} holds no run of a data pipeline; give the folder that magicrl data build wrote")
    names = recorded_run(output).get("sources")
    paths = sorted(folder.iterdir()) if names is None else [folder / name for name in names]
    return [StepFolder(path) for path in paths if path.is_dir()]


def step_folders(output: Path) -> list[StepFolder]:
    """Return the folders of a run's finished steps, in order.

    A step belongs to another run if it has another name, or did not read the rows that the previous step left. This
    happens when a changed run stopped early. Such a step and all later ones are not returned.

    Raises:
        ValueError: The folder holds no run.
    """
    recorded = recorded_run(output)
    # version 0.1 did not record the sources, so the rows that the first step must have read are unknown
    left = _imported(source_folders(output)) if "sources" in recorded else None
    names = recorded.get("steps", [])
    found: list[StepFolder] = []
    for path in sorted(output.glob("[0-9][0-9]-*/step.json")):
        number = int(path.parent.name[:2])
        # a changed pipeline may have had another step at this place
        if number <= len(names) and path.parent.name != names[number - 1]:
            continue
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["inputs"] != (left or document["inputs"]):
            break
        left = document["made"]
        found.append(StepFolder(path.parent))
    return found


def recorded_run(output: Path) -> dict[str, Any]:
    """Return ``run.json``, empty if there is none. Runs of version 0.1 did not record their sources and steps."""
    path = output / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _imported(sources: list[StepFolder]) -> str:
    """Return the hash of the imported parts, which the first step must have read."""
    keys: list[str] = []
    for folder in sources:
        path = folder.path / "source.json"
        state: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"parts": [["", ""]]}
        keys += [key for _, key in state["parts"]]
    return hash_of(keys)


def _levels(output: Path) -> list[tuple[str, list[StepFolder]]]:
    """Return the import and each finished step with their folders."""
    return [("import", source_folders(output)), *((step.path.name, [step]) for step in step_folders(output))]


def counts_of(output: Path) -> list[StepCounts]:
    """Return the row counts of the import and of every finished step, in order."""
    (_, imported), *steps = _levels(output)
    found = [StepCounts(step="import", sources=count_rows(*imported))]
    for name, (folder,) in steps:
        document = json.loads(folder.summary.read_text(encoding="utf-8"))
        found.append(StepCounts(step=name, sources=document["sources"], seconds=document["seconds"]))
    return found


def way_of(output: Path, problem: str) -> list[tuple[str, bool, dict[str, Any]]]:
    """Return the decision of each step on a problem, up to the step that dropped it.

    Returns:
        For each step its name, whether it kept the problem, and the row. Rows of ``dropped`` hold reason and detail.

    Raises:
        ValueError: No problem has this id.
    """
    way: list[tuple[str, bool, dict[str, Any]]] = []
    near: set[str] = set()
    for name, folders in _levels(output):
        seen = len(way)
        places = [place for one in folders for place in (one.kept, one.dropped)]
        for path in [path for place in places for path in sorted(place.glob("*.parquet"))]:
            ids = read_part(path, ["id"]).column("id").to_pylist()
            if len(near) < 20_000:  # difflib compares with each of them
                near.update(ids)
            if problem in ids:
                row = read_part(path).slice(ids.index(problem), 1).to_pylist()[0]
                way.append((name, path.parent.name == "kept", row))
                break
        # no later step has seen it
        if len(way) == seen or not way[-1][1]:
            break
    if not way:
        close = difflib.get_close_matches(problem, near, n=3, cutoff=0.6)
        hint = f"; near ones: {', '.join(close)}" if close else "; ids are SOURCE/NAME, as in the rows' column id"
        raise ValueError(f"{output}: no problem has the id {problem!r}{hint}")
    return way
