"""Texts to unit vectors: without a download, with a Hugging Face model, or by a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from magicrl.pipeline.similarity.hashed import HashedEmbedder, Matrix
from magicrl.pipeline.similarity.serving import Requests
from magicrl.pipeline.similarity.settings import EmbeddingSettings
from magicrl.rollout.openai_http import ServerError, ServerSettings

Corpus = Callable[[], Iterable[Sequence[str]]]


class Embedder(Protocol):
    """Texts to unit vectors."""

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors ``[len(texts), d]``."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


def make_embedder(settings: EmbeddingSettings, corpus: Corpus) -> Embedder:
    """The embedder that the settings name.

    Args:
        corpus: chunks of the texts that will be compared; only ``hashed`` reads them, for word frequencies.

    Raises:
        ValueError: the model cannot be loaded, or the server's key is not set.
    """
    match settings.kind:
        case "hashed":
            return _Hashed(corpus(), settings)
        case "model":
            return ModelEmbedder(settings)
        case "server":
            return ServerEmbedder(settings)


class _Hashed(HashedEmbedder):
    def __init__(self, corpus: Iterable[Sequence[str]], settings: EmbeddingSettings) -> None:
        super().__init__(corpus, dimensions=settings.dimensions, seed=settings.seed)

    def close(self) -> None:
        """Nothing is held."""


class ModelEmbedder:
    """A Hugging Face model; a text's vector is the mean of the last hidden states of its tokens.

    Raises:
        ValueError: the model cannot be found or loaded.
    """

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
        """Unit vectors ``[len(texts), hidden]``; a text's does not depend on the others of its batch."""
        import torch

        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of one length need little padding
        vectors: list[Any] = [None] * len(texts)
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
            if not mask.shape[1]:  # nothing but texts without tokens
                continue
            with torch.no_grad():
                states = self._model(**inputs).last_hidden_state.float()
            means = torch.where(mask, states, 0.0).sum(1) / mask.sum(1).clamp(min=1)
            for i, vector in zip(chosen, means.numpy(), strict=True):
                vectors[i] = vector
        empty = np.zeros(self._model.config.hidden_size, dtype=np.float32)
        return _unit(np.stack([empty if vector is None else vector for vector in vectors]))

    def close(self) -> None:
        """Free the weights."""
        self._model = None


class ServerEmbedder:
    """An OpenAI-compatible ``/embeddings`` endpoint.

    Raises:
        ValueError: the address is none, or the key is named and not set.
    """

    def __init__(self, settings: EmbeddingSettings) -> None:
        self._settings = settings
        self._server = ServerSettings(
            base_url=settings.base_url,
            model=settings.model,
            key_variable=settings.key_variable,
            concurrency=settings.concurrency,
        )
        self._requests: Requests[int] = Requests(self._server, "/embeddings")

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors ``[len(texts), d]``.

        Raises:
            ServerError: a request was refused, or its answer does not hold a vector a text.
        """
        batch = self._settings.batch
        model = {"model": self._settings.model} if self._settings.model else {}
        bodies = (
            (first, model | {"input": [text or " " for text in texts[first : first + batch]]})
            for first in range(0, len(texts), batch)
        )
        parts: dict[int, Matrix] = {}
        for first, answer in self._requests.all(bodies):
            if isinstance(answer, ServerError):
                raise answer
            parts[first] = self._vectors(answer, len(texts[first : first + batch]))
        return _unit(np.concatenate([parts[first] for first in sorted(parts)]))

    def close(self) -> None:
        """Close the connections."""
        self._requests.close()

    def _vectors(self, answer: dict[str, Any], count: int) -> Matrix:
        where = f"POST {self._server.shown('/embeddings')}"
        rows = answer.get("data")
        try:
            ordered = sorted(cast("list[dict[str, Any]]", rows), key=lambda row: int(row["index"]))
            vectors = np.asarray([row["embedding"] for row in ordered], dtype=np.float32)
        except (TypeError, KeyError, ValueError) as error:
            raise ServerError(
                f"{where}: the answer holds no embeddings ({type(error).__name__}); does this server embed?",
                status=200,
                retryable=False,
            ) from None
        if vectors.ndim != 2 or len(vectors) != count or not np.isfinite(vectors).all():
            raise ServerError(
                f"{where}: {count} texts were sent and vectors of shape {vectors.shape} came back, or not all finite",
                status=200,
                retryable=False,
            )
        return vectors


def _unit(vectors: Matrix) -> Matrix:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
