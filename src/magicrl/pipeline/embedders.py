"""Embedders, which turn texts into unit vectors: hashed n-grams (no download), a Hugging Face model, or a server.

The hashed embedder sees shared wording. Word order, inflection, a few replaced words and other names of people change a
vector little. It does not see meaning: paraphrases in different words, and translations, are far apart.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from magicrl.pipeline.canonical import WORDS, tokens_of
from magicrl.pipeline.pipeline_schema import EmbeddingSettings
from magicrl.pipeline.texts import mixed, shingles
from magicrl_verifiers.served import ServerError, ServerSettings, ServerUsage, Transport

Matrix = NDArray[np.float32]

_SPACES = re.compile(" {2,}")
_FEATURES = 1 << 18
_NAMES = 1 << 18
_SPREAD = 8
"""Number of coordinates per feature. With more, projected cosines are nearer to the true ones."""
_GRAM = 4
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Z]?[a-z]{2,}(?![A-Za-z])")
# a word inside a sentence: neither the first of the text nor behind the end of a sentence or formula
_INSIDE = re.compile(rf"""(?:(?<=[^.?!:\n"'$ ])|(?<=[^.?!:\n"'$ ] )){_WORD.pattern}""")
_NAME_SHARE = 0.8  # a word is a name if this share of its occurrences inside sentences is capitalised


class Embedder(Protocol):
    """An object that turns texts into unit vectors."""

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Return unit vectors ``[len(texts), d]``."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...


def make_embedder(settings: EmbeddingSettings, corpus: Callable[[], Iterable[Sequence[str]]]) -> Embedder:
    """Return the embedder that the settings name.

    Args:
        settings: Kind, model and sizes.
        corpus: Returns chunks of the texts that will be compared. Only ``hashed`` reads them, for word frequencies.

    Raises:
        ValueError: The model cannot be loaded, or the server's key is not set.
    """
    match settings.kind:
        case "hashed":
            return HashedEmbedder(corpus(), dimensions=settings.dimensions, seed=settings.seed)
        case "model":
            return ModelEmbedder(settings)
        case "server":
            return ServerEmbedder(settings)


class HashedEmbedder:
    """Embedder of wording: hashed words, word pairs and character n-grams with TF-IDF weights.

    Args:
        corpus: Chunks of raw texts, read once to learn how common each feature is and which words are names.
        dimensions: Length of a vector.
        seed: Seed of the hashes.
    """

    def __init__(self, corpus: Iterable[Sequence[str]], *, dimensions: int, seed: int) -> None:
        self._seed = seed
        documents = 0
        counts = np.zeros(_FEATURES, dtype=np.int64)
        capitals, places = np.zeros(_NAMES, dtype=np.int64), np.zeros(_NAMES, dtype=np.int64)
        for texts in corpus:
            documents += len(texts)
            # how often each word occurs inside sentences, and how often it is capitalised there
            found: Counter[str] = Counter()
            for text in texts:
                found.update(_INSIDE.findall(_SPACES.sub(" ", text) if "  " in text else text))
            for word, count in found.items():
                slot = _slot(word.lower())
                places[slot] += count
                capitals[slot] += count * word[0].isupper()
            counts += np.bincount(self._features(texts, None).indices, minlength=_FEATURES)
        # a word seen capitalised only once is as likely the subject of one problem as a name
        self._names = (capitals >= 2) & (capitals > _NAME_SHARE * places)
        # the smoothed inverse document frequency: a feature that every text has still weighs 1
        self._weights = np.log((1 + documents) / (1 + counts)).astype(np.float32) + 1
        self._projection = _projection(dimensions, seed)

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Return unit vectors ``[len(texts), dimensions]``, zeros for a text without words."""
        features = self._features(texts, self._names)
        # the square root of a count: a word that occurs four times weighs twice as much
        features.data = np.sqrt(features.data) * self._weights[features.indices]
        return _unit((features @ self._projection).toarray().astype(np.float32))

    def close(self) -> None:
        """Do nothing: this embedder holds no resources."""

    def _features(self, texts: Sequence[str], names: NDArray[np.bool_] | None) -> Any:
        """Return the counts ``[texts, _FEATURES]`` of words, word pairs and character n-grams as a sparse matrix."""
        rows = [_words(text, names) for text in texts]
        words = np.asarray([_hash(word) for row in rows for word in row], dtype=np.uint64)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        inside = np.ones(max(0, len(words) - 1), dtype=bool)
        # no pair across two texts
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
    """Return a sparse random projection ``[_FEATURES, dimensions]`` with ``_SPREAD`` random signs per feature."""
    # hashes instead of a generator: every process computes the same matrix
    numbers = mixed(np.arange(_FEATURES * _SPREAD, dtype=np.uint64), seed + 101)
    columns = (numbers % np.uint64(dimensions)).astype(np.int64)
    signs = np.where((numbers >> np.uint64(40)) & np.uint64(1), 1.0, -1.0).astype(np.float32)
    rows = np.repeat(np.arange(_FEATURES), _SPREAD)
    return sparse.csr_matrix((signs, (rows, columns)), shape=(_FEATURES, dimensions))


def _words(text: str, names: NDArray[np.bool_] | None) -> list[str]:
    """Return the canonical tokens without common words. Every name is ``@``."""
    if names is not None:
        text = _WORD.sub(lambda m: "@" if m[0][0].isupper() and names[_slot(m[0].lower())] else m[0], text)
    return [token for token in tokens_of(text) if token not in WORDS.common]


def _slot(word: str) -> int:
    return _hash(word) % _NAMES


@lru_cache(1 << 16)
def _hash(word: str) -> int:
    """Return a hash that is equal in every process, unlike Python's own."""
    return crc32(word.encode("utf-8", "surrogatepass"))


class ModelEmbedder:
    """Embedder with a Hugging Face model. A vector is the mean of the last hidden states of the tokens."""

    def __init__(self, settings: EmbeddingSettings) -> None:
        from transformers import AutoModel, AutoTokenizer

        from magicrl.models.model_files import find_model

        folder = find_model(settings.model)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self._model: Any = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"embedder model {settings.model!r}: {error}") from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        limit = getattr(self._model.config, "max_position_embeddings", None) or settings.max_tokens
        self._longest = min(settings.max_tokens, limit)
        self._batch = settings.batch

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Return unit vectors ``[len(texts), hidden]``. A vector does not depend on the rest of its batch."""
        import torch

        vectors = np.zeros((len(texts), self._model.config.hidden_size), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of one length need little padding
        for first in range(0, len(texts), self._batch):
            chosen = order[first : first + self._batch]
            inputs = self._tokenizer(
                [texts[i] or " " for i in chosen],
                padding=True,
                truncation=True,
                max_length=self._longest,
                return_tensors="pt",
            )
            mask = inputs["attention_mask"].unsqueeze(-1) > 0
            if mask.shape[1]:  # 0 columns if no text has a token
                with torch.no_grad():
                    states = self._model(**inputs).last_hidden_state.float()
                # leave padding out of the mean, so that a vector does not depend on its batch
                vectors[chosen] = (torch.where(mask, states, 0.0).sum(1) / mask.sum(1).clamp(min=1)).numpy()
        return _unit(vectors)

    def close(self) -> None:
        """Free the weights."""
        self._model = None


class ServerEmbedder:
    """Embedder with an OpenAI-compatible ``/embeddings`` endpoint."""

    def __init__(self, settings: EmbeddingSettings) -> None:
        self._settings = settings
        self._server = ServerSettings(
            base_url=settings.base_url,
            model=settings.model,
            key_variable=settings.key_variable,
            concurrency=settings.concurrency,
        )
        self._transport = Transport(self._server, ServerUsage())
        self._runner = asyncio.Runner()

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Return unit vectors ``[len(texts), d]``.

        Raises:
            ServerError: The server refused a request, or its response does not hold one vector per text.
        """
        size = self._settings.batch
        batches = [texts[first : first + size] for first in range(0, len(texts), size)]
        return _unit(np.concatenate(self._runner.run(self._ask(batches))))

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._transport.close())
        self._runner.close()

    async def _ask(self, batches: Sequence[Sequence[str]]) -> list[Matrix]:
        model = {"model": self._settings.model} if self._settings.model else {}
        places = asyncio.Semaphore(self._settings.concurrency)

        async def one(batch: Sequence[str]) -> Matrix:
            async with places:
                body = model | {"input": [text or " " for text in batch]}
                answer = await self._transport.send("POST", "/embeddings", body)
                where = f"POST {self._server.shown('/embeddings')}"
                try:
                    # the API guarantees the indices, not the order
                    ordered = sorted(answer["data"], key=lambda row: int(row["index"]))
                    vectors = np.asarray([row["embedding"] for row in ordered], dtype=np.float32)
                except (TypeError, KeyError, ValueError) as error:
                    text = f"{where}: the answer holds no embeddings ({type(error).__name__}); does this server embed?"
                    raise ServerError(text, status=200, retryable=False) from None
                if vectors.ndim != 2 or len(vectors) != len(batch) or not np.isfinite(vectors).all():
                    text = (
                        f"{where}: {len(batch)} texts were sent and vectors of shape {vectors.shape} came back, or not "
                        "all finite"
                    )
                    raise ServerError(text, status=200, retryable=False)
                return vectors

        return await asyncio.gather(*map(one, batches))


def _unit(vectors: Matrix) -> Matrix:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
