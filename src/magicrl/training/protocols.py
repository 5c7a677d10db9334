"""The seam between the loop and whatever learns: one process, or FSDP2 ranks behind the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from magicrl.records import FloatArray, TrainBatch, TrainSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """What stage and controllers decide for one SGD step; everything else about the loss is fixed by the recipe.

    Attributes:
        alpha: entropy coefficient alpha_k; adaptive control never makes it negative, a controller of one's own may.
        clip_low: eps_low; the ratio is clipped below at 1 - eps_low.
        clip_high: eps_high; clipped above at 1 + eps_high.
        temperature: tau; divides the logits before log-probs and entropy are taken.
        learning_rate: the rate of this update.
        kl_coefficient: beta of the k3 term.
        coefficients: further ones of the controller, by name; a row's surrogate reads them.
    """

    alpha: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    temperature: float = 1.0
    learning_rate: float = 1e-6
    kl_coefficient: float = 0.0
    coefficients: Mapping[str, float] = field(default_factory=dict[str, float])


class TrainingStopped(RuntimeError):
    """Training cannot go on; the text names the cause and the remedy."""


class NotFiniteError(FloatingPointError):
    """A loss, a gradient norm or an updated weight that is NaN or infinite; the step must not be kept.

    Attributes:
        culprit: (group_index, sample_index) of the first sample that gives it by itself; None if none does.
    """

    def __init__(self, message: str, culprit: tuple[int, int] | None) -> None:
        super().__init__(message)
        self.culprit = culprit


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateMetrics:
    """What one SGD step reports; keys as in ``metrics.jsonl`` without the ``learner/`` prefix.

    Always there: ``loss``, ``policy_loss``, ``entropy`` (mean nats over the loss tokens),
    ``grad_norm`` (before clipping), ``clip_ratio`` (share of tokens whose gradient the clip zeroed),
    ``ratio_mean``, ``ratio_max``, ``ratio_min``, ``sampler_gap_mean``, ``sampler_gap_max`` (absolute
    difference of old and sampler log-probs), ``tokens``, ``learning_rate``. With a reference also ``kl``.
    """

    values: Mapping[str, float]


@runtime_checkable
class Learner(Protocol):
    """Owns the trained weights and their optimizer."""

    @property
    def version(self) -> int:
        """Number of updates made: the version of the weights."""
        ...

    def update(self, batch: TrainBatch, controls: Controls) -> UpdateMetrics:
        """One SGD step on ``batch`` (Eq. 3.1 or another row of the loss table).

        Raises:
            NotFiniteError: the loss or the gradient norm is not finite; weights are left unchanged.
        """
        ...

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of every response token, ``[T]`` a sample, without gradient."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """Present weights by HF parameter name, for engines; valid until the next update."""
        ...

    def adapters(self) -> Mapping[str, Any]:
        """Of a learner with LoRA: the adapters alone, by PEFT's names; valid until the next update."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Everything to resume bit for bit: tensors by name (weights and moments) and JSON scalars."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        ...

    def save_hf(
        self,
        folder: Path,
        *,
        extra_files: Mapping[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a model folder that ``transformers`` loads (LoRA merged, the adapters in the folder ``adapter``), with
        further text files by name and recommended generation settings."""
        ...


class Reference(Protocol):
    """The frozen reference model."""

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of every response token, ``[T]`` a sample."""
        ...


@runtime_checkable
class WritesShards(Protocol):
    """A learner whose state lies on several devices and is written and read by them, not gathered."""

    def begin_shards(self, folder: Path) -> Future[Mapping[str, Any]]:
        """Copy the state and begin to write the copy's tensors into ``folder``; updates may follow at once.

        The future, which learns of the end in ``update`` or ``finish_shards``, has what else is needed to read them,
        JSON-able: ``optimizer_steps`` are the updates made, ``files`` each file's name and its SHA-256; the rest is
        what a whole state's ``meta`` holds. It has an ``OSError`` where a file could not be written.
        """
        ...

    def finish_shards(self) -> None:
        """Wait until what was begun is written, or has failed."""
        ...

    def read_shards(self, folder: Path, meta: Mapping[str, Any]) -> None:
        """Take over what ``begin_shards`` wrote, whatever the number of devices that did.

        Raises:
            ValueError: a file is missing, damaged, or another model's.
        """
        ...

    def shards_kept(self, folder: Path) -> None:
        """What was written last lies in ``folder`` now, and stays until this is called again; from any thread."""
        ...


@runtime_checkable
class OnDevices(Protocol):
    """A part of a run that knows what it computes on."""

    @property
    def devices(self) -> Sequence[str]:
        """What CUDA calls each of its accelerators; ``cpu`` for each process without one."""
        ...

    def peak_mb(self) -> float:
        """Most memory so far, MiB, of the fullest of them: the process's own on an accelerator; without, all of it."""
        ...


class WorkSpan(NamedTuple):
    """A worker had work from ``begin`` to ``end``, seconds of this process's ``time.perf_counter``."""

    worker: str
    what: str
    begin: float
    end: float


@runtime_checkable
class Remote(Protocol):
    """A part of a run whose workers are elsewhere: replicas, ranks, nodes."""

    lost: list[str]
    """Workers that were lost and replaced so far, each named with the reason, in order."""

    def observations(self) -> Mapping[str, float]:
        """Metrics by key (``area/name/stat``) since the last call."""
        ...

    def spans(self) -> Sequence[WorkSpan]:
        """When the workers worked since the last call, for the timeline."""
        ...
