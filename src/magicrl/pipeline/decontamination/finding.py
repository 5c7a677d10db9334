"""Find test problems in training texts: equal, in other dress, contained, reworded, renumbered, near in embedding."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from magicrl.files import write_atomically
from magicrl.pipeline.decontamination.grams import GramIndex, masked
from magicrl.pipeline.decontamination.settings import DecontaminationSettings, Hit, HitKind
from magicrl.pipeline.documents import Document
from magicrl.pipeline.similarity.canonical import tokens_of
from magicrl.pipeline.similarity.disguise import keys_of
from magicrl.pipeline.similarity.embedders import Embedder, make_embedder
from magicrl.pipeline.similarity.guard import are_different, numbers_of
from magicrl.pipeline.similarity.texts import Texts
from magicrl.records import prompt_key

CHUNK = 2048
_FITTED = 200_000  # documents whose words the hashed embedder counts; more would not change what is rare
_VERSION = 2
_WHOLE, _LONGER = 0.9, 1.3  # share of a test problem's n-grams, and times its length, of a text that contains it
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")


def find_contamination(
    documents: Iterable[Document],
    references: Mapping[str, Iterable[Document]],
    settings: DecontaminationSettings,
    *,
    folder: Path,
) -> Iterator[Hit]:
    """Hits in the order of the documents; several for a document that repeats several test problems.

    Args:
        documents: training texts, read once; they go to disk.
        references: the problems of each test set, by its name; they stay in memory.
        folder: for the texts and for hits so far: a call that was killed goes on after the last whole chunk. It may
            be deleted afterwards.

    Raises:
        ValueError: there is no test problem.
        ServerError: an embedding server refused.
    """
    held = [(name, document) for name, members in references.items() for document in members]
    if not held:
        raise ValueError("nothing to decontaminate against: every reference set is empty")
    ids, texts, digest = _spooled(documents, folder)
    for name, document in held:
        digest.update(repr((name, document.id, document.text)).encode("utf-8", "surrogatepass"))
    digest.update(f"{_VERSION} {settings.model_dump_json()}".encode())
    state = folder / f"hits-{digest.hexdigest()[:24]}"
    state.mkdir(parents=True, exist_ok=True)
    search: _Search | None = None
    try:
        for first in range(0, len(texts), CHUNK):
            path = state / f"{first:010d}.jsonl"
            if not path.is_file():
                search = search or _Search(held, settings, texts)
                last = min(first + CHUNK, len(texts))
                hits = search.hits(ids[first:last], [texts[number] for number in range(first, last)])
                write_atomically(path, "".join(json.dumps(asdict(hit)) + "\n" for hit in hits))
            with path.open(encoding="utf-8") as file:
                yield from (Hit(**json.loads(line)) for line in file)
    finally:
        if search is not None:
            search.close()


def _spooled(documents: Iterable[Document], folder: Path) -> tuple[list[str], Texts, Any]:
    """The documents' ids, their texts on disk, and a digest of both."""
    ids: list[str] = []
    digest = hashlib.sha256()

    def read() -> Iterator[str]:
        for document in documents:
            ids.append(document.id)
            digest.update(repr((document.id, len(document.text))).encode())
            digest.update(document.text.encode("utf-8", "surrogatepass"))
            yield document.text

    Texts.write(folder / "documents", read())
    return ids, Texts(folder / "documents"), digest


class _Reference:
    """A test problem with what is compared of it."""

    def __init__(self, name: str, document: Document) -> None:
        self.set = name
        self.id = document.id
        self.text = document.text
        self.tokens = tokens_of(document.text)
        self.key = prompt_key(document.text)
        self.canonical = " ".join(self.tokens)
        self.numbers = _numbers(self.tokens)
        self.words = sum(len(token) > 1 and token.isalpha() for token in self.tokens)


class _Search:
    """Compares chunks of documents with all test problems."""

    def __init__(self, held: Sequence[tuple[str, Document]], settings: DecontaminationSettings, texts: Texts) -> None:
        self._settings = settings
        self._references = [_Reference(name, document) for name, document in held]
        self._equal: dict[str | int, list[int]] = {}
        for number, reference in enumerate(self._references):
            for key in (reference.key, reference.canonical, *keys_of(reference.text)[0]):
                self._equal.setdefault(key, []).append(number)
        least = min(settings.least_words, settings.ngram_words)
        tokens = [reference.tokens for reference in self._references]
        self._grams = GramIndex(tokens, length=settings.ngram_words, least=least)
        self._masked = GramIndex([masked(t) for t in tokens], length=settings.ngram_words, least=least)
        self._embedder: Embedder | None = None
        if settings.use_embedding:
            hidden = [_hidden(reference.text, settings) for reference in self._references]
            self._embedder = make_embedder(settings.embedder, lambda: _corpus(hidden, texts, settings))
            self._vectors = self._embedder.embed(hidden)

    def hits(self, ids: Sequence[str], texts: Sequence[str]) -> Iterator[Hit]:
        """Hits of one chunk."""
        tokens = [tokens_of(text) for text in texts]
        plain = self._grams.overlaps(tokens, self._settings.overlap)
        hidden = self._masked.overlaps([masked(t) for t in tokens], self._settings.overlap)
        near = self._neighbours(texts)
        for row, text in enumerate(texts):
            own, inside = keys_of(text)
            named = (prompt_key(text), " ".join(tokens[row]))
            equal = {number for key in (*named, *own[:1]) if key for number in self._equal.get(key, ())}
            held = {number for key in (*own[1:], *inside) for number in self._equal.get(key, ())}
            for number in sorted({*equal, *held, *plain[row], *hidden[row], *near[row]}):
                reference = self._references[number]
                score = max(plain[row].get(number, 0), hidden[row].get(number, 0), near[row].get(number, 0))
                kind = self._kind(text, tokens[row], reference, plain[row].get(number, 0.0))
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
        """Give the embedder's model or connections back."""
        if self._embedder is not None:
            self._embedder.close()

    def _neighbours(self, texts: Sequence[str]) -> list[dict[int, float]]:
        if self._embedder is None:
            return [{} for _ in texts]
        scores = self._embedder.embed([_hidden(text, self._settings) for text in texts]) @ self._vectors.T
        found: list[dict[int, float]] = [{} for _ in texts]
        for row, number in zip(*np.nonzero(scores >= self._settings.embedding_similarity), strict=True):
            found[int(row)][int(number)] = min(float(scores[row, number]), 1.0)
        return found

    def _kind(self, text: str, tokens: Sequence[str], reference: _Reference, overlap: float) -> HitKind | None:
        """How a text and a test problem agree, which are near in one way at least; None where it is too little."""
        if prompt_key(text) == reference.key:
            return "verbatim"
        if " ".join(tokens) == reference.canonical:
            return "reformatted"
        longer = len(tokens) > _LONGER * len(reference.tokens)
        if overlap >= _WHOLE and longer and reference.words >= self._settings.least_words:
            return "contained"
        numbers = _numbers(tokens)
        if numbers == reference.numbers:
            return "neighbour" if are_different(text, reference.text, wording=False) else "reworded"
        if reference.words < self._settings.least_words:
            return None
        hidden = _DIGITS.sub("#", text), _DIGITS.sub("#", reference.text)
        same = len(numbers) == len(reference.numbers) and not are_different(*hidden, wording=False)
        return "renumbered" if same else "neighbour"


def _numbers(tokens: Sequence[str]) -> list[str]:
    return sorted(value for _, value in numbers_of(tokens))


def _hidden(text: str, settings: DecontaminationSettings) -> str:
    """What is embedded. The hashed embedder would see a changed number as a changed word; models see the text."""
    if settings.embedder.kind != "hashed":
        return text
    return _DIGITS.sub("#", text)


def _corpus(references: Sequence[str], texts: Texts, settings: DecontaminationSettings) -> Iterator[Sequence[str]]:
    yield references
    for first, chunk in texts.chunks(CHUNK):
        if first >= _FITTED:
            return
        yield [_hidden(text, settings) for text in chunk]
