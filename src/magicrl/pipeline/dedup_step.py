"""The dedup step: finds duplicates within each source or across all sources, cheapest comparison first.

The best-specified copy of every cluster is kept.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

from magicrl.files import whole_file, write_atomically
from magicrl.pipeline.canonical import canonical_text
from magicrl.pipeline.disguise import keys_of, problem_of
from magicrl.pipeline.embedders import Embedder, Matrix, make_embedder
from magicrl.pipeline.entry import Document, statement_of
from magicrl.pipeline.frame import Context, Drop, PipelineStep, write_drops
from magicrl.pipeline.guard import are_different, number_key
from magicrl.pipeline.parts import Part, StepFolder, hash_of, read_part
from magicrl.pipeline.pipeline_schema import DedupSettings, DedupStep, EmbeddingSettings, NearSettings, Stage
from magicrl.pipeline.texts import U64, Texts, jaccard, mixed, shingles, spooled


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """A dropped document."""

    id: str
    kept: str  # id of the copy that is kept instead
    stage: Stage  # the stage that found it
    similarity: float  # of this document and ``twin``: 1 (exact, disguised), Jaccard (near), cosine (embedding)
    twin: str  # id of the document it was compared with: ``kept``, or a duplicate of ``kept``


Numbers = NDArray[np.int64]
Similarity = Callable[[int, int], float | None]
"""Function that returns the similarity of two documents (by number), or None if they are not duplicates."""

_HEADS = 16
"""Largest number of kept documents that a member of a bucket is compared with, so that n members cost at most 16 n."""


class Links:
    """Documents dropped by one stage, as (dropped, kept, similarity) in ``found``. The lower rank of a pair is kept."""

    def __init__(self, alive: NDArray[np.bool_], rank: Numbers) -> None:
        self.alive = alive.copy()
        self.rank = rank
        self.guarded = 0  # similar pairs that are different problems
        self.found: list[tuple[int, int, float]] = []

    def drop(self, dropped: int, kept: int, similarity: float) -> None:
        """Drop a document in favour of ``kept``, which may itself be dropped later."""
        assert self.alive[dropped]
        assert dropped != kept
        self.alive[dropped] = False
        self.found.append((dropped, kept, similarity))

    def resolve(self, bucket: Sequence[int], similarity: Similarity) -> None:
        """Drop the duplicates among the documents of a bucket, keeping the better one of each pair."""
        heads: list[int] = []
        # best first, so that a head is never worse than what is dropped for it
        for document in sorted((d for d in bucket if self.alive[d]), key=lambda d: int(self.rank[d])):
            for head in heads:
                found = similarity(head, document)
                if found is not None:
                    self.drop(document, head, found)
                    break
            else:
                # keep the first heads, the best of the bucket, and the last, which are the likeliest neighbours
                if len(heads) == _HEADS:
                    del heads[_HEADS // 2]
                heads.append(document)


def buckets(keys: U64, members: Numbers) -> Iterator[Numbers]:
    """Yield the groups of at least two members with equal keys, in the order of the keys."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    for place in np.flatnonzero(np.diff(edges) > 1):
        yield members[order[edges[place] : edges[place + 1]]]


_CHUNK = 8192
_CACHED = 50_000
_CHECKED = 2_000_000


def bands_of(texts: Texts, settings: NearSettings) -> U64:
    """Return 64-bit keys ``[bands, documents]``. Two texts with equal keys in a band are a candidate pair."""
    keys = np.empty((settings.permutations // settings.rows, len(texts)), dtype=np.uint64)
    for first, chunk in texts.chunks(_CHUNK):
        hashes, starts = shingles(chunk, settings.shingle_characters, settings.seed)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            hashes, starts.astype(np.uint64), settings.permutations, settings.seed
        )
        rows = np.asarray(matrix.to_rows(), dtype=np.uint64)
        for band in range(len(keys)):
            # start from the band's number, so that equal rows in two bands give different keys
            key = np.full(len(chunk), band, dtype=np.uint64)
            for column in range(band * settings.rows, (band + 1) * settings.rows):
                key = mixed(key ^ rows[:, column], 0)
            keys[band, first : first + len(chunk)] = key
    return keys


def link_near(
    links: Links, texts: Texts, raw: Texts, bands: U64, numbers: U64, settings: NearSettings, *, guard: bool
) -> None:
    """Drop near duplicates, band by band. Each candidate pair is compared exactly.

    Args:
        texts: Canonical texts.
        raw: The same texts as they were read.
        bands: Keys from `bands_of`.
        numbers: A hash of the numbers in each text.
        guard: Never compare texts whose numbers differ.
    """

    @lru_cache(_CACHED)
    def shingles_of(number: int) -> U64:
        return np.unique(shingles([texts[number]], settings.shingle_characters, settings.seed)[0])

    @lru_cache(_CHECKED)  # a pair can be a candidate in every band, and the guard is slow
    def similarity(kept: int, other: int) -> float | None:
        found = jaccard(shingles_of(kept), shingles_of(other))
        if found < settings.similarity:
            return None
        if guard and are_different(raw[kept], raw[other]):
            links.guarded += 1
            return None
        return found

    for band in bands:
        members = np.flatnonzero(links.alive)  # again in each band, so that dropped documents are not compared again
        # numbers in the key, so that pairs which the guard would reject never share a bucket
        keys = mixed(band[members] ^ numbers[members], 0) if guard else np.asarray(band[members])
        for bucket in buckets(keys, members):
            links.resolve(bucket.tolist(), similarity)


_TILE = 1024
_BLOCK = 16384
"""Largest block in which all pairs are compared. A larger one is split by nearness to some of its members."""
_TRIED = 8


def link_neighbours(
    links: Links, raw: Texts, vectors: NDArray[np.float16], numbers: U64, *, similarity: float, guard: bool
) -> None:
    """Drop documents whose vector is near the vector of a better document.

    Args:
        vectors: Unit vectors ``[alive documents, d]``.
        numbers: A hash of the numbers in each text.
        similarity: Smallest cosine of duplicates.
        guard: Never compare texts whose numbers differ.
    """
    members = np.flatnonzero(links.alive)

    def settle(document: int, near: Numbers, scores: Matrix) -> None:
        # nearest first; the guard is slow, so only the nearest few are tried
        for place in np.argsort(-scores, kind="stable")[:_TRIED]:
            kept = int(near[place])
            if guard and are_different(raw[document], raw[kept]):
                links.guarded += 1
                continue
            links.drop(document, kept, float(scores[place]))
            return

    keys = numbers[members] if guard else np.zeros(len(members), dtype=np.uint64)
    # with the guard only texts with equal numbers can be duplicates, so pairs are compared within such a block only
    for block in buckets(keys, np.arange(len(members))):
        # best first, so that each row is compared with better ones only
        ranked = block[np.argsort(links.rank[members[block]], kind="stable")]
        for part in _parts(ranked, vectors):
            rows = part[links.alive[members[part]]]
            for place, near, scores in _near_rows(vectors[rows].astype(np.float32), similarity):
                others = members[rows[near]]
                left = links.alive[others]
                settle(int(members[rows[place]]), others[left], scores[left])


def _parts(block: Numbers, vectors: NDArray[np.float16]) -> Sequence[Numbers]:
    """Split a block into overlapping parts: each row joins the two nearest of some evenly spaced rows."""
    if len(block) <= _BLOCK:
        return [block]
    centres = 4 * -(-len(block) // _BLOCK)
    chosen = vectors[block[np.linspace(0, len(block) - 1, centres).astype(np.int64)]].astype(np.float32)
    nearest = np.empty(
        (len(block), 2), dtype=np.int64
    )  # two, so that neighbours on both sides of a border share a part
    for first in range(0, len(block), _TILE):
        scores = vectors[block[first : first + _TILE]].astype(np.float32) @ chosen.T
        nearest[first : first + _TILE] = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    return [block[(nearest == centre).any(axis=1)] for centre in range(centres)]


def _near_rows(vectors: Matrix, similarity: float) -> Iterable[tuple[int, Numbers, Matrix]]:
    """Yield each row that has near rows before it, with those rows and their cosines."""
    for first in range(0, len(vectors), _TILE):
        # one tile of rows against all rows before it: memory is [tile, rows] instead of [rows, rows]
        scores = vectors[first : first + _TILE] @ vectors[: first + _TILE].T
        near_rows, near = np.nonzero(scores >= similarity)
        # count each pair once, under its worse row, and no row with itself
        before = near < near_rows + first
        near_rows, near = near_rows[before], near[before]
        for row in np.unique(near_rows):
            columns = near[near_rows == row]
            yield int(row) + first, columns, scores[row, columns]


_VERSION = 6  # raised whenever the same documents and settings would give different files
_ORDER: tuple[Stage, ...] = (
    "exact",
    "disguised",
    "near",
    "embedding",
)  # cheap ones first, in whatever order the settings list them
_VECTORS = 4096  # vectors per file


def find_duplicates(
    documents: Iterable[Document], settings: DedupSettings, *, folder: Path
) -> tuple[dict[str, Duplicate], dict[Stage, int]]:
    """Find the documents that are copies of better-specified documents.

    Every dropped document has a kept one that is at least as well specified. The same documents and settings give the
    same clusters.

    Args:
        documents: Read once. Texts are written to disk; ids, ranks and half-precision vectors stay in memory.
        settings: Stages to run and their thresholds.
        folder: Folder for files. A call that was killed continues after the last stage finished there.

    Returns:
        The dropped documents by id, in the order of the input. By stage the number of pairs that were similar enough,
        but have another number, formula or deciding word.

    Raises:
        ValueError: Two documents have the same id, or qualities have different lengths.
        ServerError: An embedding server refused a request.
    """
    problems = (Document(each.id, problem_of(each.text), each.quality) for each in documents)
    ids, qualities, texts, digest = spooled(problems, folder / "raw.arrow")
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"two documents have the id {twice[0]!r}; ids must be unique within one call")
    for name, quality in zip(ids, qualities, strict=True):
        if len(quality) != len(qualities[0]):
            raise ValueError(
                f"document {name!r}: its quality has {len(quality)} values, that of {ids[0]!r} has {len(qualities[0])}"
            )
    if not ids:
        return {}, {}
    # the largest quality first, ties in the order of the input
    order = np.lexsort([np.arange(len(ids)), *(-np.asarray(qualities, dtype=np.float64).T[::-1])])
    rank = np.empty(len(ids), dtype=np.int64)
    rank[order] = np.arange(len(ids))
    # the folder is named after texts and settings, so that files of another call are never reused
    search = _Search(texts, rank, settings, folder / hash_of(_VERSION, digest, settings.model_dump(mode="json"))[:24])
    links: dict[int, tuple[Stage, int, float]] = {}
    guarded: dict[Stage, int] = {}
    for stage in _ORDER:
        if stage not in settings.stages:
            continue
        found = search.stage(stage)
        links |= {dropped: (stage, kept, similarity) for dropped, kept, similarity in found["links"]}
        guarded[stage] = int(found["guarded"])
    dropped: dict[str, Duplicate] = {}
    for number, (stage, twin, similarity) in sorted(links.items()):
        last = twin
        # a kept document may itself have been dropped in a later stage
        while last in links:
            last = links[last][1]
        name = ids[number]
        dropped[name] = Duplicate(id=name, kept=ids[last], stage=stage, similarity=similarity, twin=ids[twin])
    return dropped, guarded


class _Search:
    """Runs the stages, reusing results of an earlier call in ``folder``."""

    def __init__(self, raw: Texts, rank: Numbers, settings: DedupSettings, folder: Path) -> None:
        self._raw = raw
        self._rank = rank
        self._settings = settings
        self._folder = folder
        self._alive = np.ones(len(rank), dtype=bool)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "canonical.arrow"
        if not path.is_file():
            Texts.write(path, map(canonical_text, raw))
        self._texts = Texts(path)

    def stage(self, stage: Stage) -> dict[str, Any]:
        """Run a stage, or read its results. Later stages do not see the documents that it drops."""
        path = self._folder / f"{stage}.json"
        if not path.is_file():
            links, guard = Links(self._alive, self._rank), self._settings.compare_numbers
            match stage:
                case "exact":
                    self._exact(links)
                case "disguised":
                    self._disguised(links)
                case "near":
                    near = self._settings.near
                    bands = self._array("bands", lambda: bands_of(self._texts, near))
                    link_near(links, self._texts, self._raw, bands, self._numbers(), near, guard=guard)
                case "embedding":
                    near = self._settings.embedding
                    vectors, numbers = self._vectors(near.embedder), self._numbers()
                    link_neighbours(links, self._raw, vectors, numbers, similarity=near.similarity, guard=guard)
            write_atomically(path, json.dumps({"links": links.found, "guarded": links.guarded}))
        told = json.loads(path.read_text())
        self._alive[[dropped for dropped, _, _ in told["links"]]] = False
        return told

    def _exact(self, links: Links) -> None:
        keys = np.empty(len(self._texts), dtype=np.uint64)
        for number, text in enumerate(self._texts):
            # a text without words and numbers is compared by its own characters
            digest = hashlib.blake2b((text or self._raw[number]).encode("utf-8", "surrogatepass"), digest_size=8)
            keys[number] = int.from_bytes(digest.digest(), "little")

        def equal(a: int, b: int) -> float | None:
            return 1.0 if self._texts[a] == self._texts[b] else None

        for bucket in buckets(keys, np.arange(len(keys))):
            links.resolve(bucket.tolist(), equal)

    def _disguised(self, links: Links) -> None:
        """Drop documents that are equal except for names of variables and people and for surrounding text."""
        keys, owners, whole = array("Q"), array("q"), bytearray()  # whole: the key covers the complete text
        for number in np.flatnonzero(self._alive).tolist():
            found = keys_of(self._raw[number])
            keys.extend(found)
            owners.extend([number] * len(found))
            whole += bytes(place == 0 for place in range(len(found)))
        of, is_whole = np.asarray(owners, dtype=np.int64), np.asarray(whole, dtype=np.uint8)
        for bucket in buckets(np.asarray(keys, dtype=np.uint64), np.arange(len(of))):
            asking = set(of[bucket][is_whole[bucket] > 0].tolist())

            def equal(a: int, b: int, asking: set[int] = asking) -> float | None:
                return 1.0 if a in asking or b in asking else None  # two texts that only share a part are two problems

            if asking:
                links.resolve(sorted({*of[bucket].tolist()}), equal)

    def _vectors(self, settings: EmbeddingSettings) -> NDArray[np.float16]:
        """Return the vectors ``[n, d]`` of the remaining documents. Each file of 4,096 vectors is computed once."""
        members = np.flatnonzero(self._alive).tolist()
        chunks = [members[first : first + _VECTORS] for first in range(0, len(members), _VECTORS)]

        def texts(chunk: Sequence[int]) -> list[str]:
            return [self._raw[number] for number in chunk]

        embedder: Embedder | None = None
        found: list[NDArray[np.float16]] = []
        try:
            for number, chunk in enumerate(chunks):
                path = self._folder / f"vectors-{number:06d}.npy"
                if not path.is_file():
                    embedder = embedder or make_embedder(settings, lambda: map(texts, chunks))
                    self._save(path, embedder.embed(texts(chunk)).astype(np.float16))
                found.append(np.load(path))
        finally:
            if embedder is not None:
                embedder.close()
        return np.concatenate(found)

    def _numbers(self) -> U64:
        keys = (number_key(text.split()) for text in self._texts)
        return self._array("numbers", lambda: np.fromiter(keys, np.uint64, len(self._texts)))

    def _array(self, name: str, make: Callable[[], U64]) -> U64:
        """Return an array from its file, computing it if the file is missing."""
        path = self._folder / f"{name}.npy"
        if not path.is_file():
            self._save(path, make())
        return np.load(path, mmap_mode="r")

    def _save(self, path: Path, values: NDArray[Any]) -> None:
        with whole_file(path) as file:
            np.save(file, values)


_COLUMNS = ["id", "source", "ability", "prompt", "problem", "solutions", "reward_model", "notes"]


class Dedup(PipelineStep[DedupStep]):
    """Compares all statements first, then drops rows by id."""

    use = "dedup"
    version = 3

    def identity(self, context: Context) -> Any:
        return {"scope": self._settings.scope, **self._settings.settings.model_dump(mode="json")}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Write ``work/clusters.json``: each kept problem with its copies, the largest clusters first."""
        drops: dict[str, Drop] = {}
        clusters: dict[str, list[Any]] = {}
        guarded = 0
        # by the rows' source: an input may hold rows of several sources of another run
        groups: dict[str | None, list[Part]] = {None: [*parts]}
        if self._settings.scope == "within":
            groups = {}
            for part in parts:
                for name in read_part(part.path, ["source"]).column("source").unique().to_pylist():
                    groups.setdefault(name, []).append(part)
        for name, group in groups.items():
            found, apart = find_duplicates(
                documents(group, name), self._settings.settings, folder=folder.work / "search"
            )
            guarded += sum(apart.values())
            references = references_of(group, {*found, *(one.kept for one in found.values())})
            for one in found.values():
                similarity = round(one.similarity, 4)
                through = "" if one.twin == one.kept else f", found beside {one.twin}"
                detail = f"of {one.kept}, similarity {similarity}{through}"
                reason = f"duplicate ({one.stage})"
                own, other = references.get(one.id, []), references.get(one.kept, [])
                if own and other and not {*map(canonical_text, own)} & {*map(canonical_text, other)}:
                    reason = "duplicate with another reference"
                    detail += f"; {' or '.join(own)}, not {' or '.join(other)}"
                drops[one.id] = Drop(reason, detail)
                clusters.setdefault(one.kept, []).append([one.id, one.stage, similarity])
            context.watcher.progress(self.use, len(drops), len(drops), f"duplicates ({name or 'all'})")
        ordered = sorted(clusters.items(), key=lambda item: (-len(item[1]), item[0]))
        sizes = Counter(len(copies) + 1 for _, copies in ordered)
        told = {"pairs_guarded": guarded, "sizes": sizes, "clusters": dict(ordered)}
        write_atomically(folder.work / "clusters.json", json.dumps(told, indent=1))
        write_drops(folder, drops)


def references_of(parts: Iterable[Part], ids: Set[str]) -> dict[str, list[str]]:
    """Return the reference answers of the maths problems among ``ids``."""
    found: dict[str, list[str]] = {}
    for part in parts if ids else ():
        table = read_part(part.path, ["id", "ability", "reward_model"])
        chosen = [name in ids for name in table.column("id").to_pylist()]
        for row in table.filter(pa.array(chosen)).to_pylist():
            if row["ability"] == "math":
                found[row["id"]] = json.loads(row["reward_model"]["ground_truth"])
    return found


def documents(parts: Iterable[Part], source: str | None = None) -> Iterator[Document]:
    """Yield the statements, of one source or of all, with their quality.

    Quality is: checked by the verifier, solved, length of a program's tests. The length of a maths answer says nothing.
    """
    for part in parts:
        for row in read_part(part.path, _COLUMNS).to_pylist():
            if source not in (None, row["source"]):
                continue
            notes: dict[str, Any] = json.loads(row["notes"]) if row["notes"] else {}
            checked = bool(notes.get("answer_agrees") or notes.get("reference_passes"))
            tests = len(row["reward_model"]["ground_truth"]) if row["ability"] == "code" else 0
            quality = (float(checked), float(bool(row["solutions"])), float(tests))
            yield Document(row["id"], statement_of(row), quality)
