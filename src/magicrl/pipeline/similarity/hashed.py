"""The embedder that needs no download: hashed words and character n-grams, TF-IDF weighted, projected at random.

It sees shared wording: word order, inflection, a few other words and other names of people cost little. It does not
see meaning: two texts that say one thing in quite other words are far apart, and so is a translation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from magicrl.pipeline.similarity.canonical import tokens_of
from magicrl.pipeline.similarity.shingles import mixed, shingles
from magicrl.pipeline.similarity.words import listed

Matrix = NDArray[np.float32]

_FEATURES = 1 << 18
_NAMES = 1 << 18
_SPREAD = 8
"""Coordinates that a feature goes to; with more, projected cosines are nearer to the true ones."""
_GRAM = 4
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Z]?[a-z]{2,}(?![A-Za-z])")
_SENTENCE_END = frozenset(".?!:\n\"'$")
_NAME_SHARE = 0.8  # of a word's places inside sentences where it is capitalised, if it is a name
_STOP = listed(
    "the a an of to in is are was were be been and or that this it its with for as at by on from if then than how "
    "what which find determine compute calculate evaluate let suppose given there has have had he she they his her "
    "their many much do does did will can would each"
)


class HashedEmbedder:
    """Vectors of unit length for the wording of texts.

    Args:
        corpus: chunks of raw texts, read once: how common a feature is, and which words are names.
        dimensions: of a vector.
        seed: of the hashes.
    """

    def __init__(self, corpus: Iterable[Sequence[str]], *, dimensions: int, seed: int) -> None:
        self._seed = seed
        documents = 0
        counts = np.zeros(_FEATURES, dtype=np.int64)
        capitals, places = np.zeros(_NAMES, dtype=np.int64), np.zeros(_NAMES, dtype=np.int64)
        for texts in corpus:
            documents += len(texts)
            _count_capitals(texts, capitals, places)
            features = self._features(texts, None)
            counts += np.bincount(features.indices, minlength=_FEATURES)
        # a word seen capitalised only once is as likely the subject of one problem as a name
        self._names = (capitals >= 2) & (capitals > _NAME_SHARE * places)
        self._weights = np.log((1 + documents) / (1 + counts)).astype(np.float32) + 1
        self._projection = _projection(dimensions, seed)

    @property
    def dimensions(self) -> int:
        return int(self._projection.shape[1])

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors ``[len(texts), dimensions]``; all zero for a text without words."""
        features = self._features(texts, self._names)
        features.data = np.sqrt(features.data) * self._weights[features.indices]
        vectors: Matrix = (features @ self._projection).toarray().astype(np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(norms, 1e-12)

    def _features(self, texts: Sequence[str], names: NDArray[np.bool_] | None) -> Any:
        """Counts ``[texts, _FEATURES]`` of words, pairs of words and character n-grams."""
        rows = [_words(text, names) for text in texts]
        words = np.asarray([_hash(word) for row in rows for word in row], dtype=np.uint64)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        inside = np.ones(max(0, len(words) - 1), dtype=bool)
        inside[ends[(ends > 0) & (ends < len(words))] - 1] = False
        pairs = mixed(words[:-1] * np.uint64(31) + words[1:], 1)[inside] if len(words) else words
        grams, starts = shingles([" ".join(row) for row in rows], _GRAM, seed=2)
        gram_owners = np.repeat(np.arange(len(rows)), np.diff(starts))
        hashes = np.concatenate([mixed(words, self._seed), mixed(pairs, self._seed), mixed(grams, self._seed)])
        owner = np.concatenate([owners, owners[:-1][inside] if len(words) else owners, gram_owners])
        columns = (hashes % np.uint64(_FEATURES)).astype(np.int64)
        ones = np.ones(len(columns), dtype=np.float32)
        matrix = sparse.csr_matrix((ones, (owner, columns)), shape=(len(texts), _FEATURES))
        matrix.sum_duplicates()
        return matrix


def _projection(dimensions: int, seed: int) -> Any:
    """Each feature to ``_SPREAD`` coordinates with random signs ``[_FEATURES, dimensions]`` (a sparse projection)."""
    numbers = mixed(np.arange(_FEATURES * _SPREAD, dtype=np.uint64), seed + 101)
    columns = (numbers % np.uint64(dimensions)).astype(np.int64)
    signs = np.where((numbers >> np.uint64(40)) & np.uint64(1), 1.0, -1.0).astype(np.float32)
    rows = np.repeat(np.arange(_FEATURES), _SPREAD)
    return sparse.csr_matrix((signs, (rows, columns)), shape=(_FEATURES, dimensions))


def _words(text: str, names: NDArray[np.bool_] | None) -> list[str]:
    """Canonical tokens that carry content; a name is ``@``, whoever it is."""
    if names is not None:
        text = _WORD.sub(lambda m: "@" if m[0][0].isupper() and names[_slot(m[0].lower())] else m[0], text)
    return [token for token in tokens_of(text) if token not in _STOP]


def _count_capitals(texts: Sequence[str], capitals: NDArray[np.int64], places: NDArray[np.int64]) -> None:
    """Count, by word, its places inside sentences, and those where it is capitalised."""
    for text in texts:
        for match in _WORD.finditer(text):
            before = text[: match.start()].rstrip(" ")[-1:] if match.start() else "."
            if before in _SENTENCE_END:
                continue
            slot = _slot(match[0].lower())
            places[slot] += 1
            capitals[slot] += match[0][0].isupper()


def _slot(word: str) -> int:
    return _hash(word) % _NAMES


def _hash(word: str) -> int:
    """Equal in every process, as Python's own hash is not."""
    return crc32(word.encode("utf-8", "surrogatepass"))
