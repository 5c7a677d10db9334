"""The dedup step: duplicates inside each source, or over all of them, the best-specified copy kept."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pyarrow as pa

from magicrl.files import write_atomically
from magicrl.pipeline.dedup.clusters import DuplicateClusters
from magicrl.pipeline.documents import Document
from magicrl.pipeline.parts import Part, StepFolder, read_part
from magicrl.pipeline.settings import DedupStep
from magicrl.pipeline.steps.base import Context, Decide, Decision, Drop

_COLUMNS = ("id", "problem", "solutions", "reward_model", "notes")


class Dedup:
    """Looks at all statements first; then rows are dropped by id."""

    use = "dedup"
    version = 1
    whole = True
    parallel = False

    def __init__(self, settings: DedupStep) -> None:
        self._settings = settings

    def identity(self, context: Context) -> Any:
        return {"scope": self._settings.scope, **self._settings.settings.model_dump(mode="json")}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, key: str, context: Context) -> None:
        path = folder.work / "duplicates.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["key"] == key:
            return
        from magicrl.pipeline.dedup.finding import find_duplicates

        drops: dict[str, tuple[str, str, float, str]] = {}
        guarded = 0
        for name, group in self._groups(parts):
            own = folder.work / key[:12] / name
            own.mkdir(parents=True, exist_ok=True)
            found: DuplicateClusters = find_duplicates(documents(group), self._settings.settings, folder=own)
            guarded += sum(found.pairs_guarded.values())
            drops |= {one.id: (one.kept, one.stage, round(one.similarity, 4), one.twin) for one in found.dropped}
            context.watcher.progress(self.use, len(drops), len(drops), f"duplicates ({name})")
        write_atomically(path, json.dumps({"key": key, "pairs_guarded": guarded, "drops": drops}))

    def _groups(self, parts: Sequence[Part]) -> Iterator[tuple[str, list[Part]]]:
        """The parts that are compared with each other."""
        if self._settings.scope == "across":
            yield "all", list(parts)
            return
        for source, group in groupby(parts, key=lambda part: part.name.rpartition(".")[0]):
            yield source, list(group)

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        drops: dict[str, Any] = json.loads((folder.work / "duplicates.json").read_text(encoding="utf-8"))["drops"]

        def one(name: str) -> Decision:
            if name not in drops:
                return None
            kept, stage, similarity, twin = drops[name]
            through = "" if twin == kept else f", found beside {twin}"
            return Drop(f"duplicate ({stage})", f"of {kept}, similarity {similarity}{through}")

        def decide(table: pa.Table) -> list[Decision]:
            return [one(name) for name in table.column("id").to_pylist()]

        yield decide

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """``work/clusters.json``: each kept problem with its copies, the largest clusters first."""
        document = json.loads((folder.work / "duplicates.json").read_text(encoding="utf-8"))
        clusters: dict[str, list[Any]] = {}
        for name, (kept, stage, similarity, _) in document["drops"].items():
            clusters.setdefault(kept, []).append([name, stage, similarity])
        ordered = sorted(clusters.items(), key=lambda item: (-len(item[1]), item[0]))
        sizes: dict[int, int] = {}
        for _, copies in ordered:
            sizes[len(copies) + 1] = sizes.get(len(copies) + 1, 0) + 1
        told = {"pairs_guarded": document["pairs_guarded"], "sizes": sizes, "clusters": dict(ordered)}
        write_atomically(folder.work / "clusters.json", json.dumps(told, indent=1))


def documents(parts: Sequence[Part]) -> Iterator[Document]:
    """Every statement, with how well its problem is specified: checked, solved, more accepted answers or tests."""
    for part in parts:
        for row in read_part(part.path, _COLUMNS).to_pylist():
            notes: dict[str, Any] = json.loads(row["notes"]) if row["notes"] else {}
            checked = bool(notes.get("answer_agrees") or notes.get("reference_passes"))
            quality = (float(checked), float(bool(row["solutions"])), float(len(row["reward_model"]["ground_truth"])))
            yield Document(row["id"], row["problem"], quality)
