"""What the head and its backends say to each other: settings, inputs, gradients' parts, the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tile sizes of the Triton kernels.

    Attributes:
        tokens: rows of a program.
        words: columns of one tile of logits.
        inner: of the hidden width, multiplied at a time.
        group: blocks of rows that follow each other before the next words.
        words_per_program: tiles that a program of the forward pass goes through, one after the other.
        warps: of a program.
        stages: of its pipeline.
    """

    tokens: int = 128
    words: int = 128
    inner: int = 64
    group: int = 16
    words_per_program: int = 16
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What lies between hidden states and log-probabilities, apart from the weights.

    Attributes:
        temperature: tau, > 0; divides the logits before the log-softmax (recipe section 2).
        valid_vocab: rows of the weight that are words. Later rows are padding: their probability is 0.
            None means all rows.
        chunk_tokens: a piece has as many logits as so many tokens have, whatever its shape.
        scale: constant factor on the logits, before soft-capping (Cohere, Granite).
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None for most models.
        backend: ``auto`` is Triton where the tensors are on CUDA and Triton is installed, else torch.
        tiles: of the Triton kernels; None is what suits the device.
    """

    temperature: float = 1.0
    valid_vocab: int | None = None
    chunk_tokens: int = 1024
    scale: float = 1.0
    softcap: float | None = None
    backend: Backend = "auto"
    tiles: Tiles | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0 to take log-probabilities, got {self.temperature}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadInputs:
    """What a backend works on: the weight's padded rows are gone, so their probability is exactly 0.

    Attributes:
        hidden: ``[tokens, d]``.
        weight: ``[vocab, d]`` in the dtype of ``hidden``.
        bias: ``[vocab]`` in the dtype of the statistics, or None.
        targets: ``[tokens]`` int64.
        options: see there.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    options: HeadOptions

    @property
    def dtype(self) -> torch.dtype:
        """Of softmax statistics: float32, or float64 for float64 inputs."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """What the logits' gradient is made of, ``[tokens]`` each, in the dtype of the statistics.

    Attributes:
        logprobs: gradient of the log-probabilities, g.
        entropies: gradient of the entropies, h; None if all are zero.
        log_sums: logsumexp of the logits, L.
        entropy_values: H.

    Arranged as ``p * (-(g + h (H - L)) - h z) + g onehot``: one exponential and two passes.
    """

    logprobs: Tensor
    entropies: Tensor | None
    log_sums: Tensor
    entropy_values: Tensor

    def constant(self, rows: slice) -> Tensor:
        """``-(g + h (H - L))``."""
        found = self.logprobs[rows]
        if self.entropies is not None:
            found = found + self.entropies[rows] * (self.entropy_values[rows] - self.log_sums[rows])
        return -found


class HeadBackend(Protocol):
    """Two passes over the logits."""

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the targets, entropies and logsumexps, ``[tokens]`` each."""
        ...

    def gradient(self, pull: Pull, rows: slice, words: slice) -> Tensor:
        """``[rows, words]`` gradient of the raw products of hidden states and weights, in their dtype."""
        ...
