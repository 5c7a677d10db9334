"""The decontamination step: problems of test sets out, each hit reported with both texts."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from magicrl.config.errors import under
from magicrl.files import write_atomically
from magicrl.pipeline.documents import Document
from magicrl.pipeline.parts import Part, StepFolder, hash_of
from magicrl.pipeline.settings import DecontaminateStep
from magicrl.pipeline.sources.importing import import_source
from magicrl.pipeline.steps.base import Context, Decide, Decision, Drop
from magicrl.pipeline.steps.dedup import documents


class Decontaminate:
    """Looks for every test problem in all statements first; then rows are dropped by id."""

    use = "decontaminate"
    version = 1
    whole = True
    parallel = False

    def __init__(self, settings: DecontaminateStep) -> None:
        self._settings = settings

    def identity(self, context: Context) -> Any:
        return {
            "against": dict(self._reference_keys(context)),
            **self._settings.settings.model_dump(mode="json"),
        }

    def _references(self, context: Context) -> Iterator[tuple[str, list[Part]]]:
        """The test sets, imported like any source into a folder of their own."""
        for name, source in self._settings.against.items():
            named = source if source.name is not None else source.model_copy(update={"name": name})
            folder = context.output / "references" / named.label
            with under(f"against.{name}"):
                yield name, import_source(named, folder, context.max_field_characters)

    def _reference_keys(self, context: Context) -> Iterator[tuple[str, str]]:
        for name, parts in self._references(context):
            yield name, hash_of([part.key for part in parts])

    def prepare(self, parts: Sequence[Part], folder: StepFolder, key: str, context: Context) -> None:
        marker = folder.work / "hits.key"
        if marker.exists() and marker.read_text() == key:
            return
        from magicrl.pipeline.decontamination.finding import find_contamination
        from magicrl.pipeline.decontamination.report import write_report

        references: dict[str, list[Document]] = {
            name: list(documents(found)) for name, found in self._references(context)
        }
        for name, texts in references.items():
            if not texts:
                raise ValueError(f"against.{name}: the test set holds no problem that can be read; see references/")
        own = folder.work / key[:12]
        own.mkdir(parents=True, exist_ok=True)
        write_report(find_contamination(documents(parts), references, self._settings.settings, folder=own), folder.work)
        write_atomically(marker, key)

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        hits: dict[str, dict[str, Any]] = {}
        with (folder.work / "hits.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                hit = json.loads(line)
                if hit["kind"] not in self._settings.settings.drop:
                    continue  # reported only
                former = hits.get(hit["document"])
                if former is None or hit["score"] > former["score"]:
                    hits[hit["document"]] = hit

        def one(name: str) -> Decision:
            hit = hits.get(name)
            if hit is None:
                return None
            detail = f"{hit['kind']}, score {hit['score']:.3f}: {hit['reference']}: {hit['reference_text'][:300]!r}"
            return Drop(f"in test set {hit['reference_set']}", detail)

        def decide(table: pa.Table) -> list[Decision]:
            return [one(name) for name in table.column("id").to_pylist()]

        yield decide

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        return None
