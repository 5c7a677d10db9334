"""The decontamination step: removes problems of test sets from training data and reports each hit with both texts.

A training text is a hit if it equals a test problem, differs only in typesetting, contains it, rewords or renumbers it,
or is near it in an embedding.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from magicrl.config.errors import RecipeError, under
from magicrl.files import write_atomically
from magicrl.pipeline.canonical import tokens_of
from magicrl.pipeline.dedup_step import documents
from magicrl.pipeline.disguise import keys_of, problem_of
from magicrl.pipeline.embedders import Embedder, make_embedder
from magicrl.pipeline.entry import Document
from magicrl.pipeline.frame import Context, Drop, PipelineStep, write_drops
from magicrl.pipeline.guard import are_different, numbers_of
from magicrl.pipeline.import_source import import_source, unreadable_records
from magicrl.pipeline.parts import Part, StepFolder, hash_of
from magicrl.pipeline.pipeline_schema import DecontaminateStep, DecontaminationSettings, HitKind
from magicrl.pipeline.texts import U64, Texts, mixed, spooled, window_hashes
from magicrl.records import prompt_key

Tokens = Sequence[str]


def masked(tokens: Tokens) -> list[str]:
    """Return the tokens with every number replaced by ``#``."""
    return ["#" if token[0].isdigit() else token for token in tokens]


class GramIndex:
    """Index of test problems by their n-grams.

    A problem shorter than n = ``length`` tokens is one n-gram; one shorter than ``least`` is not searched for. An
    n-gram that k problems share weighs 1/k, so that *Find the remainder when N is divided by* hardly counts.
    """

    def __init__(self, references: Sequence[Tokens], *, length: int, least: int) -> None:
        sizes = [min(length, len(tokens)) if len(tokens) >= least else 0 for tokens in references]
        self._lengths = sorted({size for size in sizes if size})
        sets = [
            np.unique(self._grams([tokens], size)[0]) if size else np.empty(0, dtype=np.uint64)
            for tokens, size in zip(references, sizes, strict=True)
        ]
        owners = np.repeat(np.arange(len(sets)), [len(grams) for grams in sets])
        self._keys, columns = np.unique(np.concatenate(sets), return_inverse=True)
        weights = 1.0 / np.bincount(columns)[columns]
        self._weights: Any = sparse.csr_matrix((weights, (columns, owners)), shape=(len(self._keys), len(sets)))
        # not 0, because it is a divisor
        self._totals = np.maximum(np.bincount(owners, weights, len(sets)), 1e-12)

    def overlaps(self, texts: Sequence[Tokens], least: float) -> list[dict[int, float]]:
        """Return for each text the test problems of whose weighted n-grams it contains at least the share ``least``."""
        found: list[dict[int, float]] = [{} for _ in texts]
        if not len(self._keys):
            return found
        rows: list[NDArray[np.int64]] = []
        columns: list[NDArray[np.int64]] = []
        for length in self._lengths:
            hashes, starts = self._grams(texts, length)
            places = np.minimum(np.searchsorted(self._keys, hashes), len(self._keys) - 1)
            known = self._keys[places] == hashes
            rows.append(np.repeat(np.arange(len(texts)), np.diff(starts))[known])
            columns.append(places[known])
        # an n-gram counts once per text
        pairs = np.unique(np.stack([np.concatenate(rows), np.concatenate(columns)]), axis=1)
        held: Any = sparse.csr_matrix((np.ones(pairs.shape[1]), tuple(pairs)), shape=(len(texts), len(self._keys)))
        scores = (held @ self._weights).tocoo()
        for row, owner, weight in zip(scores.row.tolist(), scores.col.tolist(), scores.data.tolist(), strict=True):
            share = float(weight / self._totals[owner])
            if share >= least:
                found[row][owner] = min(share, 1.0)
        return found

    def _grams(self, texts: Sequence[Tokens], length: int) -> tuple[U64, NDArray[np.int64]]:
        words = np.asarray([crc32(t.encode("utf-8", "surrogatepass")) for text in texts for t in text], dtype=np.uint64)
        sizes = np.asarray([len(text) for text in texts], dtype=np.int64)
        return window_hashes(mixed(words, 7), sizes, length, seed=length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A training text that repeats a test problem."""

    document: str  # id of the training text
    reference: str  # id of the test problem
    reference_set: str
    kind: HitKind
    score: float  # share of n-grams or cosine, in 0..1; 1 for equal texts
    document_text: str
    reference_text: str


def write_report(hits: Iterable[Hit], folder: Path) -> None:
    """Write ``hits.jsonl`` and ``hits.md``, hits as they arrive, because there may be many."""
    counts: Counter[tuple[str, str]] = Counter()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "hits.jsonl").open("w", encoding="utf-8") as lines:
        for hit in hits:
            counts[hit.reference_set, hit.kind] += 1
            lines.write(json.dumps(asdict(hit), ensure_ascii=False) + "\n")
    with (folder / "hits.md").open("w", encoding="utf-8") as page:
        page.write("# Test problems found in training texts\n\n| test set | kind | hits |\n|---|---|---|\n")
        page.writelines(f"| {name} | {kind} | {count} |\n" for (name, kind), count in sorted(counts.items()))
        for hit in read_hits(folder / "hits.jsonl"):
            title = f"{hit.document} repeats {hit.reference} of {hit.reference_set}: {hit.kind}, {hit.score:.2f}"
            texts = f"Training text:\n\n{_quoted(hit.document_text)}\n\nTest problem:\n\n{_quoted(hit.reference_text)}"
            page.write(f"\n## {title}\n\n{texts}\n")


def read_hits(path: Path) -> Iterator[Hit]:
    """Yield the hits in a file of JSON Lines."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Hit(**json.loads(line))


def _quoted(text: str) -> str:
    """Return a Markdown code block of the text, with a fence longer than any in the text."""
    fence = "````"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


CHUNK = 2048
_FITTED = 200_000  # documents whose words the hashed embedder counts; more would not change which words are rare
_VERSION = 7
# a text contains a test problem if it has this share of its n-grams and is longer by this factor
_WHOLE, _LONGER = 0.9, 1.3
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")


def find_contamination(
    documents: Iterable[Document],
    references: Mapping[str, Iterable[Document]],
    settings: DecontaminationSettings,
    *,
    folder: Path,
) -> Iterator[Hit]:
    """Yield hits in the order of the documents. A document may repeat several test problems.

    Args:
        documents: Training texts, read once and written to disk.
        references: Problems of each test set, by its name.
        settings: Thresholds and kinds of hits.
        folder: Folder for texts and hits. A call that was killed continues after the last complete chunk.

    Raises:
        ValueError: There is no test problem.
        ServerError: An embedding server refused a request.
    """
    held = [(name, document) for name, members in references.items() for document in members]
    if not held:
        raise ValueError("nothing to decontaminate against: every reference set is empty")
    ids, _, texts, digest = spooled(documents, folder / "documents.arrow")
    asked = [(name, document.id, document.text) for name, document in held]
    state = folder / f"hits-{hash_of(_VERSION, digest, asked, settings.model_dump(mode='json'))[:24]}"
    state.mkdir(parents=True, exist_ok=True)
    search: _Search | None = None
    try:
        for first in range(0, len(texts), CHUNK):
            path = state / f"{first:010d}.jsonl"
            if not path.is_file():
                search = search or _Search(
                    held, settings, texts
                )  # created here, so that a finished call opens no embedder
                last = min(first + CHUNK, len(texts))
                hits = search.hits(ids[first:last], [texts[number] for number in range(first, last)])
                write_atomically(path, "".join(json.dumps(asdict(hit)) + "\n" for hit in hits))
            yield from read_hits(path)
    finally:
        if search is not None:
            search.close()


class _Reference:
    """A test problem in the forms that are compared."""

    def __init__(self, name: str, document: Document) -> None:
        self.set, self.id, self.text = name, document.id, document.text
        self.problem = problem_of(document.text)
        self.tokens = tokens_of(self.problem)
        self.key = prompt_key(document.text)
        self.canonical = " ".join(self.tokens)
        self.numbers = sorted(numbers_of(self.tokens))
        self.words = sum(len(token) > 1 and token.isalpha() for token in self.tokens)


class _Search:
    """Compares documents with all test problems, one chunk at a time."""

    def __init__(self, held: Sequence[tuple[str, Document]], settings: DecontaminationSettings, texts: Texts) -> None:
        self._settings = settings
        self._references = [_Reference(name, document) for name, document in held]
        self._equal: dict[str | int, list[int]] = {}
        for number, reference in enumerate(self._references):
            # only the key of the whole test problem: a text that shares a part of it is another problem
            for key in (reference.key, reference.canonical, *keys_of(reference.problem)[:1]):
                self._equal.setdefault(key, []).append(number)
        least = min(settings.least_words, settings.ngram_words)
        tokens = [reference.tokens for reference in self._references]
        self._grams = GramIndex(tokens, length=settings.ngram_words, least=least)
        self._masked = GramIndex([masked(t) for t in tokens], length=settings.ngram_words, least=least)
        self._embedder: Embedder | None = None
        if settings.use_embedding:
            hidden = [_hidden(reference.problem, settings) for reference in self._references]
            self._embedder = make_embedder(settings.embedder, lambda: _corpus(hidden, texts, settings))
            self._vectors = self._embedder.embed(hidden)

    def hits(self, ids: Sequence[str], texts: Sequence[str]) -> Iterator[Hit]:
        """Yield the hits of one chunk."""
        problems = [problem_of(text) for text in texts]
        tokens = [tokens_of(problem) for problem in problems]
        plain = self._grams.overlaps(tokens, self._settings.overlap)
        hidden = self._masked.overlaps([masked(t) for t in tokens], self._settings.overlap)
        near: list[dict[int, float]] = [{} for _ in texts]
        if self._embedder is not None:
            scores = self._embedder.embed([_hidden(text, self._settings) for text in problems]) @ self._vectors.T
            for row, number in zip(*np.nonzero(scores >= self._settings.embedding_similarity), strict=True):
                near[int(row)][int(number)] = min(float(scores[row, number]), 1.0)
        for row, text in enumerate(texts):
            keys = keys_of(problems[row])
            named = (prompt_key(text), " ".join(tokens[row]))
            # equal as a whole; a key without surrounding sentences means that the text contains the test problem
            equal = {number for key in (*named, *keys[:1]) if key for number in self._equal.get(key, ())}
            held = {number for key in keys[1:] for number in self._equal.get(key, ())}
            for number in sorted({*equal, *held, *plain[row], *hidden[row], *near[row]}):
                reference = self._references[number]
                score = max(plain[row].get(number, 0), hidden[row].get(number, 0), near[row].get(number, 0))
                kind = self._kind(text, problems[row], tokens[row], reference, plain[row].get(number, 0.0))
                # a weaker kind only if the direct comparisons did not find equality
                if kind not in ("verbatim", "reformatted") and number in equal | held:
                    kind = "renamed" if number in equal else "contained"
                if kind is not None and kind in self._settings.kinds:
                    yield Hit(
                        document=ids[row],
                        reference=reference.id,
                        reference_set=reference.set,
                        kind=kind,
                        score=1.0 if number in equal | held else round(float(score), 4),
                        document_text=text,
                        reference_text=reference.text,
                    )

    def close(self) -> None:
        """Release the embedder's model or connections."""
        if self._embedder is not None:
            self._embedder.close()

    def _kind(self, text: str, problem: str, tokens: Tokens, reference: _Reference, overlap: float) -> HitKind | None:
        """Return how a text and a test problem that are similar in some way agree; None if they agree too little."""
        if prompt_key(text) == reference.key:
            return "verbatim"
        if " ".join(tokens) == reference.canonical:
            return "contained" if problem != text else "reformatted"
        longer = problem != text or len(tokens) > _LONGER * len(reference.tokens)
        # at equal length the same n-grams mean a reworded copy, not a contained one
        if overlap >= _WHOLE and longer and reference.words >= self._settings.least_words:
            return "contained"
        numbers = sorted(numbers_of(tokens))
        if numbers == reference.numbers:
            return "neighbour" if are_different(problem, reference.problem, wording=False) else "reworded"
        # "Compute 3 + 5" with other numbers repeats nothing
        if reference.words < self._settings.least_words:
            return None
        # hide the numbers, so that only formulas and words can differ
        hidden = _DIGITS.sub("#", problem), _DIGITS.sub("#", reference.problem)
        same = len(numbers) == len(reference.numbers) and not are_different(*hidden, wording=False)
        return "renumbered" if same else "neighbour"


def _hidden(text: str, settings: DecontaminationSettings) -> str:
    """Return the text to embed. Numbers are masked for the hashed embedder, which sees a number as a word."""
    if settings.embedder.kind != "hashed":
        return text
    return _DIGITS.sub("#", text)


def _corpus(references: Sequence[str], texts: Texts, settings: DecontaminationSettings) -> Iterator[Sequence[str]]:
    yield references
    for first, chunk in texts.chunks(CHUNK):
        if first >= _FITTED:
            return
        yield [_hidden(text, settings) for text in chunk]


class Decontaminate(PipelineStep[DecontaminateStep]):
    """Searches all statements for test problems first, then drops rows by id."""

    use = "decontaminate"
    version = 2

    def identity(self, context: Context) -> Any:
        against = {name: hash_of([part.key for part in parts]) for name, parts in self._references(context)}
        return {"against": against, **self._settings.settings.model_dump(mode="json")}

    def _references(self, context: Context) -> Iterator[tuple[str, list[Part]]]:
        """Yield the test sets, imported like any source into separate folders, also problems without an answer."""
        for name, source in self._settings.against.items():
            named = source if source.name is not None else source.model_copy(update={"name": name})
            folder = context.output / "references" / named.label
            with under(f"against.{name}"):
                parts = import_source(named, folder, context.max_field_characters, statements=True)
                unreadable = unreadable_records(StepFolder(folder))
                if unreadable:
                    raise RecipeError(
                        f"{len(unreadable)} records of the test set cannot be read, and copies of them would stay in "
                        f"the training data; the first: {unreadable[0]}; correct them, or name a copy without them",
                        key="",
                    )
                yield name, parts

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        references = {name: list(documents(found)) for name, found in self._references(context)}
        for name, texts in references.items():
            if not texts:
                raise ValueError(f"against.{name}: the test set holds no problem that can be read; see references/")
        settings = self._settings.settings
        best: dict[str, Hit] = {}

        def hits() -> Iterator[Hit]:
            for hit in find_contamination(documents(parts), references, settings, folder=folder.work / "search"):
                former = best.get(hit.document)
                # hits of other kinds are only reported
                if hit.kind in settings.drop and (former is None or hit.score > former.score):
                    best[hit.document] = hit
                yield hit

        write_report(hits(), folder.work)
        drops = {
            name: Drop(
                f"in test set {hit.reference_set}",
                f"{hit.kind}, score {hit.score:.3f}: {hit.reference}: {hit.reference_text[:300]!r}",
            )
            for name, hit in best.items()
        }
        write_drops(folder, drops)
