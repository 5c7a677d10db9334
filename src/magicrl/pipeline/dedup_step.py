"""The dedup step: duplicates inside each source, or over all of them, the cheapest comparison first.

Of every cluster the best-specified copy stays.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from magicrl.files import whole_file, write_atomically
from magicrl.pipeline.canonical import canonical
from magicrl.pipeline.disguise import keys_of
from magicrl.pipeline.embedders import make_embedder
from magicrl.pipeline.entry import Document
from magicrl.pipeline.frame import Context, Decide, Decision, Drop, Step, by_id
from magicrl.pipeline.guard import number_key
from magicrl.pipeline.near_duplicates import (
    CHUNK,
    LINK,
    Links,
    NeighbourSearch,
    Vectors,
    buckets,
    link_near,
    write_bands,
)
from magicrl.pipeline.parts import Part, StepFolder, read_part
from magicrl.pipeline.pipeline_schema import DedupSettings, DedupStep, Stage
from magicrl.pipeline.texts import Texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """A dropped document.

    Attributes:
        id: of the dropped document.
        kept: id of the copy that stays in its place.
        stage: which stage found it.
        similarity: of the pair that the stage found, in 0..1: 1 (exact, disguised), Jaccard (near), cosine (embedding).
        twin: the other document of that pair; it is ``kept`` itself, or was dropped for it in turn.
    """

    id: str
    kept: str
    stage: Stage
    similarity: float
    twin: str


@dataclass(frozen=True, kw_only=True)
class DuplicateClusters:
    """All duplicates of one call.

    Attributes:
        documents: how many were read.
        dropped: in the order of the input.
        pairs_guarded: by stage, pairs that were similar enough and differ in a number, a formula or a deciding word.
    """

    documents: int
    dropped: tuple[Duplicate, ...]
    pairs_guarded: Mapping[Stage, int]

    @cached_property
    def by_id(self) -> Mapping[str, Duplicate]:
        """The dropped documents by id; whoever is not in it is kept."""
        return {duplicate.id: duplicate for duplicate in self.dropped}


_VERSION = 1  # raised whenever equal documents and settings would give other files


class Steps:
    """Arrays made by steps, each kept under a key of everything that decides it.

    Args:
        folder: is made.
        inputs: digest of the documents.
    """

    def __init__(self, folder: Path, inputs: str) -> None:
        self.folder = folder
        self._inputs = inputs
        self._record = folder / "steps.json"
        folder.mkdir(parents=True, exist_ok=True)

    def key(self, *decides: Any) -> str:
        """A digest of the documents and of JSON values."""
        text = json.dumps([_VERSION, self._inputs, *decides], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def is_done(self, name: str, key: str) -> bool:
        """Whether the step's files are of this key."""
        return self._read().get(name) == key

    def finish(self, name: str, key: str) -> None:
        """Record that the step's files are whole."""
        write_atomically(self._record, json.dumps(self._read() | {name: key}))

    def array(self, name: str, key: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array of a step, from its file or made now."""
        path = self.folder / f"{name}.npy"
        if not self.is_done(name, key):
            made = make()
            with whole_file(path) as file:
                np.save(file, made)
            self.finish(name, key)
        return np.load(path)

    def _read(self) -> dict[str, str]:
        if not self._record.is_file():
            return {}
        return cast("dict[str, str]", json.loads(self._record.read_text()))


_ORDER: tuple[Stage, ...] = (
    "exact",
    "disguised",
    "near",
    "embedding",
)  # cheap ones first, whatever order they are listed in


def find_duplicates(documents: Iterable[Document], settings: DedupSettings, *, folder: Path) -> DuplicateClusters:
    """Which documents are copies of better ones.

    A dropped document always has a kept one that is at least as well specified; likeness is not passed on beyond what
    was compared. The same documents and settings give the same clusters.

    Args:
        documents: read once; texts go to disk; ids, ranks and, in the embedding stage, vectors in half precision are
            in memory.
        folder: for what is on disk; a call that was killed goes on from the steps that are done there. It holds the
            texts and may be deleted afterwards.

    Raises:
        ValueError: an id comes twice, or qualities are of different lengths.
        ServerError: an embedding server refused.
    """
    found = _Documents(documents, folder)
    if not found.ids:
        return DuplicateClusters(documents=0, dropped=(), pairs_guarded={})
    search = _Search(found, settings, Steps(folder, found.digest))
    stages: dict[Stage, NDArray[np.void]] = {stage: search.links(stage) for stage in _ORDER if stage in settings.stages}
    return _clusters(found, stages, search.guarded)


class _Documents:
    """The documents on disk, and what of them stays in memory."""

    def __init__(self, documents: Iterable[Document], folder: Path) -> None:
        self.ids: list[str] = []
        self._digest = hashlib.sha256()
        quality: list[tuple[float, ...]] = []
        Texts.write(folder / "raw", self._spooled(documents, quality))
        self.texts = Texts(folder / "raw")
        self.digest = self._digest.hexdigest()
        columns = np.asarray(quality, dtype=np.float64).reshape(len(quality), len(quality[0]) if quality else 0)
        order = np.lexsort([np.arange(len(quality)), *(-columns.T[::-1])])
        self.rank = np.empty(len(quality), dtype=np.int64)
        self.rank[order] = np.arange(len(quality))

    def _spooled(self, documents: Iterable[Document], quality: list[tuple[float, ...]]) -> Iterator[str]:
        seen: set[str] = set()
        for document in documents:
            if document.id in seen:
                raise ValueError(f"two documents have the id {document.id!r}; ids must be unique within one call")
            if quality and len(document.quality) != len(quality[0]):
                raise ValueError(
                    f"document {document.id!r}: its quality has {len(document.quality)} values, that of "
                    f"{self.ids[0]!r} has {len(quality[0])}"
                )
            seen.add(document.id)
            self.ids.append(document.id)
            quality.append(document.quality)
            self._digest.update(repr((document.id, document.quality, len(document.text))).encode())
            self._digest.update(document.text.encode("utf-8", "surrogatepass"))
            yield document.text


class _Search:
    """Runs the stages, or takes what an earlier call left of them."""

    def __init__(self, documents: _Documents, settings: DedupSettings, steps: Steps) -> None:
        self._documents = documents
        self._settings = settings
        self._steps = steps
        self._alive = np.ones(len(documents.ids), dtype=bool)
        self._before: list[str] = []  # keys of the stages so far: each sees only what they left
        self.guarded: dict[Stage, int] = {}
        path = steps.folder / "canonical"
        key = steps.key("canonical")
        if not (steps.is_done("canonical", key) and Texts.exist(path)):
            Texts.write(path, (canonical(text) for text in documents.texts))
            steps.finish("canonical", key)
        self._texts = Texts(path)

    def links(self, stage: Stage) -> NDArray[np.void]:
        """The stage's links; what they drop is gone for the next stage."""
        ways = {"exact": self._exact, "disguised": self._disguised, "near": self._near, "embedding": self._embedding}
        run = ways[stage]
        settings = self._settings.model_dump(mode="json")
        own = {name: settings[name] for name in (stage, "compare_numbers") if name in settings}
        key = self._steps.key(stage, own, self._before)
        rows = self._steps.array(stage, key, lambda: self._made(run))
        # the last row counts the pairs that the guard kept apart
        self.guarded[stage] = int(rows[-1]["dropped"])
        self._before.append(key)
        self._alive[rows[:-1]["dropped"]] = False
        return rows[:-1]

    def _made(self, run: object) -> NDArray[np.void]:
        links = Links(len(self._alive), self._alive, self._documents.rank)
        assert callable(run)
        run(links)
        last = np.asarray([(links.guarded, -1, 0.0)], dtype=LINK)
        return np.concatenate([links.as_array(), last])

    def _exact(self, links: Links) -> None:
        keys = np.empty(len(self._texts), dtype=np.uint64)
        for number, text in enumerate(self._texts):
            # of a text without words and numbers its own characters count
            digest = hashlib.blake2b((text or self._documents.texts[number]).encode("utf-8", "surrogatepass"))
            keys[number] = int.from_bytes(digest.digest()[:8], "little")

        def equal(a: int, b: int) -> float | None:
            return 1.0 if self._texts[a] == self._texts[b] else None

        for bucket in buckets(keys, np.arange(len(keys))):
            links.resolve(bucket.tolist(), equal)

    def _disguised(self, links: Links) -> None:
        """Equal but for the names of variables and people and for text around it."""
        keys, owners, whole = array("Q"), array("q"), bytearray()  # whole: the key is of all that the document asks
        for number in np.flatnonzero(self._alive).tolist():
            own, inside = keys_of(self._documents.texts[number])
            keys.extend(own + inside)
            owners.extend([number] * (len(own) + len(inside)))
            whole += bytes([True] * len(own) + [False] * len(inside))
        of, is_whole = np.asarray(owners, dtype=np.int64), np.asarray(whole, dtype=np.uint8)
        for bucket in buckets(np.asarray(keys, dtype=np.uint64), np.arange(len(of))):
            asking = set(of[bucket][is_whole[bucket] > 0].tolist())

            def equal(a: int, b: int, asking: set[int] = asking) -> float | None:
                return 1.0 if a in asking or b in asking else None  # two that share a part only are two problems

            if asking:
                links.resolve(sorted({*of[bucket].tolist()}), equal)

    def _near(self, links: Links) -> None:
        near = self._settings.near
        path = self._steps.folder / "bands.npy"
        key = self._steps.key("bands", near.shingle_characters, near.permutations, near.rows, near.seed)
        if not (self._steps.is_done("bands", key) and path.is_file()):
            write_bands(path, self._texts, near)
            self._steps.finish("bands", key)
        bands = np.load(path, mmap_mode="r")
        guard = self._settings.compare_numbers
        link_near(links, self._texts, self._documents.texts, bands, self._numbers(), near, guard=guard)

    def _embedding(self, links: Links) -> None:
        stage = self._settings.embedding
        members = np.flatnonzero(self._alive)
        raw = self._documents.texts

        def texts(first: int, last: int) -> Sequence[str]:
            return [raw[int(number)] for number in members[first:last]]

        folder = self._steps.folder / "vectors"
        key = self._steps.key("vectors", stage.embedder.model_dump(mode="json"), self._before)
        if not self._steps.is_done("vectors", key):
            shutil.rmtree(folder, ignore_errors=True)
            self._steps.finish("vectors", key)  # from here on the files of the folder are of this key
        vectors = Vectors(folder, len(members))

        def corpus() -> Iterator[Sequence[str]]:
            return (texts(first, first + CHUNK) for first in range(0, len(members), CHUNK))

        vectors.fill(lambda: make_embedder(stage.embedder, corpus), texts)
        rows = np.full(len(self._alive), -1, dtype=np.int64)
        rows[members] = np.arange(len(members))
        search = NeighbourSearch(
            links,
            raw,
            rows,
            vectors.load(),
            similarity=stage.similarity,
            guard=self._settings.compare_numbers,
        )
        search.run(self._numbers())

    def _numbers(self) -> NDArray[np.uint64]:
        def made() -> NDArray[np.uint64]:
            return np.fromiter((number_key(text.split()) for text in self._texts), np.uint64, len(self._texts))

        return self._steps.array("numbers", self._steps.key("numbers"), made)


def _clusters(
    documents: _Documents, stages: dict[Stage, NDArray[np.void]], guarded: dict[Stage, int]
) -> DuplicateClusters:
    links: dict[int, tuple[Stage, int, float]] = {}
    for stage, rows in stages.items():
        for dropped, kept, similarity in rows.tolist():
            links[dropped] = (stage, kept, similarity)

    def last(number: int) -> int:
        while number in links:
            number = links[number][1]
        return number

    ids = documents.ids
    dropped = tuple(
        Duplicate(id=ids[number], kept=ids[last(number)], stage=stage, similarity=similarity, twin=ids[twin])
        for number, (stage, twin, similarity) in sorted(links.items())
    )
    return DuplicateClusters(documents=len(ids), dropped=dropped, pairs_guarded=guarded)


_COLUMNS = ("id", "problem", "solutions", "reward_model", "notes")


class Dedup(Step[DedupStep]):
    """Looks at all statements first; then rows are dropped by id."""

    use = "dedup"

    def identity(self, context: Context) -> Any:
        return {"scope": self._settings.scope, **self._settings.settings.model_dump(mode="json")}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, key: str, context: Context) -> None:
        path = folder.work / "duplicates.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["key"] == key:
            return
        drops: dict[str, tuple[str, str, float, str]] = {}
        guarded = 0
        for name, group in self._groups(parts):
            own = folder.work / key[:12] / name
            own.mkdir(parents=True, exist_ok=True)
            found = find_duplicates(documents(group), self._settings.settings, folder=own)
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

    def decide(self, folder: StepFolder) -> Decide:
        drops: dict[str, Any] = json.loads((folder.work / "duplicates.json").read_text(encoding="utf-8"))["drops"]

        def one(name: str) -> Decision:
            if name not in drops:
                return None
            kept, stage, similarity, twin = drops[name]
            through = "" if twin == kept else f", found beside {twin}"
            return Drop(f"duplicate ({stage})", f"of {kept}, similarity {similarity}{through}")

        return by_id(one)

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
