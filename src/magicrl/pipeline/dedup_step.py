"""The dedup step: duplicates inside each source, or over all of them, the cheapest comparison first.

Of every cluster the best-specified copy stays.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

from magicrl.files import whole_file, write_atomically
from magicrl.pipeline.canonical import canonical
from magicrl.pipeline.disguise import keys_of, problem_of
from magicrl.pipeline.embedders import Embedder, Matrix, make_embedder
from magicrl.pipeline.entry import Document
from magicrl.pipeline.frame import Context, Drop, Step, write_drops
from magicrl.pipeline.guard import are_different, number_key
from magicrl.pipeline.parts import Part, StepFolder, hash_of, read_part
from magicrl.pipeline.pipeline_schema import DedupSettings, DedupStep, EmbeddingSettings, NearSettings, Stage
from magicrl.pipeline.texts import U64, Texts, jaccard, mixed, shingles, spooled


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """A dropped document."""

    id: str
    kept: str  # id of the copy that stays in its place
    stage: Stage  # that found it
    similarity: float  # of the pair that the stage found: 1 (exact, disguised), Jaccard (near), cosine (embedding)
    twin: str  # the other document of that pair; it is ``kept`` itself, or was dropped for it in turn


@dataclass(frozen=True, kw_only=True)
class DuplicateClusters:
    """All duplicates of one call."""

    documents: int  # how many were read
    dropped: tuple[Duplicate, ...]  # in the order of the input
    pairs_guarded: Mapping[Stage, int]  # similar enough, but with another number, formula or deciding word

    @cached_property
    def by_id(self) -> dict[str, Duplicate]:
        """The dropped documents by their ids."""
        return {duplicate.id: duplicate for duplicate in self.dropped}


Numbers = NDArray[np.int64]
Similarity = Callable[[int, int], float | None]
"""Of two documents, by number; None when they are not duplicates."""

_HEADS = 16
"""Most kept documents of one bucket that a further member is compared with: a bucket of n costs no more than 16 n."""


class Links:
    """Documents dropped by one stage: ``found`` holds (dropped, kept, similarity); of a pair the lower rank stays."""

    def __init__(self, alive: NDArray[np.bool_], rank: Numbers) -> None:
        self.alive = alive.copy()
        self.rank = rank
        self.guarded = 0  # pairs that were alike and are different problems
        self.found: list[tuple[int, int, float]] = []

    def drop(self, dropped: int, kept: int, similarity: float) -> None:
        """``dropped`` goes for ``kept``, which may go for another one later."""
        assert self.alive[dropped]
        assert dropped != kept
        self.alive[dropped] = False
        self.found.append((dropped, kept, similarity))

    def resolve(self, bucket: Sequence[int], similarity: Similarity) -> None:
        """Drop the duplicates among the documents of a bucket; the best of each pair stays."""
        heads: list[int] = []
        # best first, so that a head is never worse than what is dropped for it
        for document in sorted((d for d in bucket if self.alive[d]), key=lambda d: int(self.rank[d])):
            for head in heads:
                found = similarity(head, document)
                if found is not None:
                    self.drop(document, head, found)
                    break
            else:
                # the first ones are the best of the bucket, the last ones the likeliest neighbours
                if len(heads) == _HEADS:
                    del heads[_HEADS // 2]
                heads.append(document)


def buckets(keys: U64, members: Numbers) -> Iterator[Numbers]:
    """Members with equal keys, where there are at least two, in the order of the keys."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    for place in np.flatnonzero(np.diff(edges) > 1):
        yield members[order[edges[place] : edges[place + 1]]]


_CHUNK = 8192
_CACHED = 50_000
_CHECKED = 2_000_000


def bands_of(texts: Texts, settings: NearSettings) -> U64:
    """``[bands, documents]`` 64-bit keys; two texts are candidates where a band's keys agree."""
    keys = np.empty((settings.permutations // settings.rows, len(texts)), dtype=np.uint64)
    for first, chunk in texts.chunks(_CHUNK):
        hashes, starts = shingles(chunk, settings.shingle_characters, settings.seed)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            hashes, starts.astype(np.uint64), settings.permutations, settings.seed
        )
        rows = np.asarray(matrix.to_rows(), dtype=np.uint64)
        for band in range(len(keys)):
            # from the band's number: equal rows in two bands give two keys
            key = np.full(len(chunk), band, dtype=np.uint64)
            for column in range(band * settings.rows, (band + 1) * settings.rows):
                key = mixed(key ^ rows[:, column], 0)
            keys[band, first : first + len(chunk)] = key
    return keys


def link_near(
    links: Links, texts: Texts, raw: Texts, bands: U64, numbers: U64, settings: NearSettings, *, guard: bool
) -> None:
    """Drop near duplicates, band by band; each candidate pair is compared exactly.

    ``texts`` are canonical, ``raw`` as they came. With ``guard`` texts of other ``numbers`` are never compared.
    """

    @lru_cache(_CACHED)
    def shingles_of(number: int) -> U64:
        return np.unique(shingles([texts[number]], settings.shingle_characters, settings.seed)[0])

    @lru_cache(_CHECKED)  # a pair may meet in every band, and the guard is slow
    def similarity(kept: int, other: int) -> float | None:
        found = jaccard(shingles_of(kept), shingles_of(other))
        if found < settings.similarity:
            return None
        if guard and are_different(raw[kept], raw[other]):
            links.guarded += 1
            return None
        return found

    for band in bands:
        members = np.flatnonzero(links.alive)  # anew in each band: what one dropped need not be compared again
        # numbers in the key: texts with other numbers never meet in a bucket, which the guard would have to part
        keys = mixed(band[members] ^ numbers[members], 0) if guard else np.asarray(band[members])
        for bucket in buckets(keys, members):
            links.resolve(bucket.tolist(), similarity)


_TILE = 1024
_BLOCK = 16384
"""Most texts that are compared each with each; a larger block is split by nearness to some of its members."""
_TRIED = 8


def link_neighbours(
    links: Links, raw: Texts, vectors: NDArray[np.float16], numbers: U64, *, similarity: float, guard: bool
) -> None:
    """Drop the documents whose vector is near a better document's.

    ``vectors`` ``[alive documents, d]`` have unit length. With ``guard`` texts of other ``numbers`` are never compared.
    """
    members = np.flatnonzero(links.alive)

    def settle(document: int, near: Numbers, scores: Matrix) -> None:
        # the nearest first; the guard is slow, so only some of them are tried
        for place in np.argsort(-scores, kind="stable")[:_TRIED]:
            kept = int(near[place])
            if guard and are_different(raw[document], raw[kept]):
                links.guarded += 1
                continue
            links.drop(document, kept, float(scores[place]))
            return

    keys = numbers[members] if guard else np.zeros(len(members), dtype=np.uint64)
    # with the guard only texts of the same numbers can be duplicates: all pairs are looked at within a block alone
    for block in buckets(keys, np.arange(len(members))):
        # best first: each row is then compared with better ones only
        ranked = block[np.argsort(links.rank[members[block]], kind="stable")]
        for part in _parts(ranked, vectors):
            rows = part[links.alive[members[part]]]
            for place, near, scores in _near_rows(vectors[rows].astype(np.float32), similarity):
                others = members[rows[near]]
                left = links.alive[others]
                settle(int(members[rows[place]]), others[left], scores[left])


def _parts(block: Numbers, vectors: NDArray[np.float16]) -> Sequence[Numbers]:
    """Overlapping parts: each row goes with the two of some evenly spaced ones that it is nearest to."""
    if len(block) <= _BLOCK:
        return [block]
    centres = 4 * -(-len(block) // _BLOCK)
    chosen = vectors[block[np.linspace(0, len(block) - 1, centres).astype(np.int64)]].astype(np.float32)
    nearest = np.empty((len(block), 2), dtype=np.int64)  # two: neighbours on both sides of a border meet in one part
    for first in range(0, len(block), _TILE):
        scores = vectors[block[first : first + _TILE]].astype(np.float32) @ chosen.T
        nearest[first : first + _TILE] = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    return [block[(nearest == centre).any(axis=1)] for centre in range(centres)]


def _near_rows(vectors: Matrix, similarity: float) -> Iterable[tuple[int, Numbers, Matrix]]:
    """Each row that has near ones before it, with these and their cosines."""
    for first in range(0, len(vectors), _TILE):
        # a tile of rows against all before them: [tile, rows] instead of [rows, rows] in memory
        scores = vectors[first : first + _TILE] @ vectors[: first + _TILE].T
        near_rows, near = np.nonzero(scores >= similarity)
        # of a symmetric pair the better one stands before, and nobody is near itself
        before = near < near_rows + first
        near_rows, near = near_rows[before], near[before]
        for row in np.unique(near_rows):
            columns = near[near_rows == row]
            yield int(row) + first, columns, scores[row, columns]


_VERSION = 5  # raised whenever equal documents and settings would give other files
_ORDER: tuple[Stage, ...] = ("exact", "disguised", "near", "embedding")  # cheap ones first, however they are listed
_VECTORS = 4096  # of a file


def find_duplicates(documents: Iterable[Document], settings: DedupSettings, *, folder: Path) -> DuplicateClusters:
    """Which documents are copies of better ones.

    A dropped document always has a kept one that is at least as well specified; likeness is not passed on beyond what
    was compared. The same documents and settings give the same clusters.

    Args:
        documents: read once; texts go to disk; ids, ranks and vectors in half precision are in memory.
        folder: for what is on disk; a call that was killed goes on from the stages that are done there.

    Raises:
        ValueError: an id comes twice, or qualities are of different lengths.
        ServerError: an embedding server refused.
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
        return DuplicateClusters(documents=0, dropped=(), pairs_guarded={})
    # the largest quality first, of equal ones the earliest
    order = np.lexsort([np.arange(len(ids)), *(-np.asarray(qualities, dtype=np.float64).T[::-1])])
    rank = np.empty(len(ids), dtype=np.int64)
    rank[order] = np.arange(len(ids))
    # the folder's name is made of texts and settings, so that files of another call are never taken up
    search = _Search(texts, rank, settings, folder / hash_of(_VERSION, digest, settings.model_dump(mode="json"))[:24])
    return _clusters(ids, {stage: search.stage(stage) for stage in _ORDER if stage in settings.stages})


class _Search:
    """Runs the stages, or takes what an earlier call left of them in ``folder``."""

    def __init__(self, raw: Texts, rank: Numbers, settings: DedupSettings, folder: Path) -> None:
        self._raw = raw
        self._rank = rank
        self._settings = settings
        self._folder = folder
        self._alive = np.ones(len(rank), dtype=bool)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "canonical.arrow"
        if not path.is_file():
            Texts.write(path, map(canonical, raw))
        self._texts = Texts(path)

    def stage(self, stage: Stage) -> dict[str, Any]:
        """The stage's links, and how many pairs it kept apart; what it drops is gone for the next stage."""
        path = self._folder / f"{stage}.json"
        if not path.is_file():
            links = Links(self._alive, self._rank)
            ways = {"exact": self._exact, "disguised": self._disguised}
            ways |= {"near": self._near, "embedding": self._embedding}
            ways[stage](links)
            write_atomically(path, json.dumps({"links": links.found, "guarded": links.guarded}))
        told = json.loads(path.read_text())
        self._alive[[dropped for dropped, _, _ in told["links"]]] = False
        return told

    def _exact(self, links: Links) -> None:
        keys = np.empty(len(self._texts), dtype=np.uint64)
        for number, text in enumerate(self._texts):
            # of a text without words and numbers its own characters count
            digest = hashlib.blake2b((text or self._raw[number]).encode("utf-8", "surrogatepass"), digest_size=8)
            keys[number] = int.from_bytes(digest.digest(), "little")

        def equal(a: int, b: int) -> float | None:
            return 1.0 if self._texts[a] == self._texts[b] else None

        for bucket in buckets(keys, np.arange(len(keys))):
            links.resolve(bucket.tolist(), equal)

    def _disguised(self, links: Links) -> None:
        """Equal but for the names of variables and people and for text around it."""
        keys, owners, whole = array("Q"), array("q"), bytearray()  # whole: the key is of all that the document asks
        for number in np.flatnonzero(self._alive).tolist():
            found = keys_of(self._raw[number])
            keys.extend(found)
            owners.extend([number] * len(found))
            whole += bytes(place == 0 for place in range(len(found)))
        of, is_whole = np.asarray(owners, dtype=np.int64), np.asarray(whole, dtype=np.uint8)
        for bucket in buckets(np.asarray(keys, dtype=np.uint64), np.arange(len(of))):
            asking = set(of[bucket][is_whole[bucket] > 0].tolist())

            def equal(a: int, b: int, asking: set[int] = asking) -> float | None:
                return 1.0 if a in asking or b in asking else None  # two that share a part only are two problems

            if asking:
                links.resolve(sorted({*of[bucket].tolist()}), equal)

    def _near(self, links: Links) -> None:
        near = self._settings.near
        bands = self._array("bands", lambda: bands_of(self._texts, near))
        guard = self._settings.compare_numbers
        link_near(links, self._texts, self._raw, bands, self._numbers(), near, guard=guard)

    def _embedding(self, links: Links) -> None:
        stage = self._settings.embedding
        vectors = self._vectors(stage.embedder)
        guard = self._settings.compare_numbers
        link_neighbours(links, self._raw, vectors, self._numbers(), similarity=stage.similarity, guard=guard)

    def _vectors(self, settings: EmbeddingSettings) -> NDArray[np.float16]:
        """Of the documents alive ``[n, d]``; each file of some thousand is made once."""
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
        def made() -> U64:
            return np.fromiter((number_key(text.split()) for text in self._texts), np.uint64, len(self._texts))

        return self._array("numbers", made)

    def _array(self, name: str, make: Callable[[], U64]) -> U64:
        """An array from its file, or made now."""
        path = self._folder / f"{name}.npy"
        if not path.is_file():
            self._save(path, make())
        return np.load(path, mmap_mode="r")

    def _save(self, path: Path, values: NDArray[Any]) -> None:
        with whole_file(path) as file:
            np.save(file, values)


def _clusters(ids: Sequence[str], stages: Mapping[Stage, Mapping[str, Any]]) -> DuplicateClusters:
    links: dict[int, tuple[Stage, int, float]] = {
        dropped: (stage, kept, similarity)
        for stage, told in stages.items()
        for dropped, kept, similarity in told["links"]
    }

    def last(number: int) -> int:
        # a document that others were dropped for may itself have gone in a later stage
        while number in links:
            number = links[number][1]
        return number

    dropped = tuple(
        Duplicate(id=ids[number], kept=ids[last(number)], stage=stage, similarity=similarity, twin=ids[twin])
        for number, (stage, twin, similarity) in sorted(links.items())
    )
    guarded: dict[Stage, int] = {stage: int(told["guarded"]) for stage, told in stages.items()}
    return DuplicateClusters(documents=len(ids), dropped=dropped, pairs_guarded=guarded)


_COLUMNS = ["id", "problem", "solutions", "reward_model", "notes"]


class Dedup(Step[DedupStep]):
    """Looks at all statements first; then rows are dropped by id."""

    use = "dedup"

    def identity(self, context: Context) -> Any:
        return {"scope": self._settings.scope, **self._settings.settings.model_dump(mode="json")}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """``work/clusters.json``: each kept problem with its copies, the largest clusters first."""
        drops: dict[str, Drop] = {}
        clusters: dict[str, list[Any]] = {}
        guarded = 0
        for name, group in self._groups(parts):
            found = find_duplicates(documents(group), self._settings.settings, folder=folder.work / name)
            guarded += sum(found.pairs_guarded.values())
            for one in found.dropped:
                similarity = round(one.similarity, 4)
                through = "" if one.twin == one.kept else f", found beside {one.twin}"
                detail = f"of {one.kept}, similarity {similarity}{through}"
                drops[one.id] = Drop(f"duplicate ({one.stage})", detail)
                clusters.setdefault(one.kept, []).append([one.id, one.stage, similarity])
            context.watcher.progress(self.use, len(drops), len(drops), f"duplicates ({name})")
        ordered = sorted(clusters.items(), key=lambda item: (-len(item[1]), item[0]))
        sizes = Counter(len(copies) + 1 for _, copies in ordered)
        told = {"pairs_guarded": guarded, "sizes": sizes, "clusters": dict(ordered)}
        write_atomically(folder.work / "clusters.json", json.dumps(told, indent=1))
        write_drops(folder, drops)

    def _groups(self, parts: Sequence[Part]) -> Iterator[tuple[str, list[Part]]]:
        """The parts that are compared with each other."""
        if self._settings.scope == "across":
            yield "all", list(parts)
            return
        # parts of a source lie side by side and are called SOURCE.NNNNN
        for source, group in groupby(parts, key=lambda part: part.name.rpartition(".")[0]):
            yield source, list(group)


def documents(parts: Sequence[Part]) -> Iterator[Document]:
    """Every statement, with how well its problem is specified: checked, solved, more accepted answers or tests."""
    for part in parts:
        for row in read_part(part.path, _COLUMNS).to_pylist():
            notes: dict[str, Any] = json.loads(row["notes"]) if row["notes"] else {}
            checked = bool(notes.get("answer_agrees") or notes.get("reference_passes"))
            quality = (float(checked), float(bool(row["solutions"])), float(len(row["reward_model"]["ground_truth"])))
            yield Document(row["id"], row["problem"], quality)
