"""Protocols between the training loop and the learner: one process, or FSDP2 ranks behind the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from magicrl.records import FloatArray, TrainBatch, TrainSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """Settings of one update that stage and controllers decide. The recipe fixes everything else about the loss.

    Attributes:
        alpha: Entropy coefficient alpha_k >= 0.
        clip_low: eps_low. The ratio is clipped below at 1 - eps_low.
        clip_high: eps_high. The ratio is clipped above at 1 + eps_high.
        temperature: tau. Divides the logits before log-probs and entropy are computed.
        learning_rate: Learning rate of this update.
        kl_coefficient: beta of the k3 term.
        teacher_coefficient: Weight of the teacher in each token's advantage.
        coefficients: Further coefficients of the controller by name, for loss rows that read them.
    """

    alpha: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    temperature: float = 1.0
    learning_rate: float = 1e-6
    kl_coefficient: float = 0.0
    teacher_coefficient: float = 0.0
    coefficients: Mapping[str, float] = field(default_factory=dict[str, float])


class TrainingStopped(RuntimeError):
    """Training cannot continue. The text says why and what to do."""


class NotFiniteError(FloatingPointError):
    """A loss, gradient norm or updated weight is NaN or infinite. The step must not be kept.

    Attributes:
        culprit: (group_index, sample_index) of the first sample that causes it alone; None if none does.
    """

    def __init__(self, message: str, culprit: tuple[int, int] | None) -> None:
        super().__init__(message)
        self.culprit = culprit

    @classmethod
    def of(cls, message: str, samples: Sequence[TrainSample], culprit: int | None) -> NotFiniteError:
        """Return the error of a mini-batch of which the sample with index ``culprit`` causes it."""
        return cls(message, None if culprit is None else (samples[culprit].group_index, samples[culprit].sample_index))


@runtime_checkable
class Learner(Protocol):
    """Owner of the trained weights and their optimizer."""

    @property
    def version(self) -> int:
        """Version of the weights: the number of updates so far."""
        ...

    def update(self, batch: TrainBatch, controls: Controls) -> Mapping[str, float]:
        """Make one update from ``batch`` (Eq. 3.1 or another row of the loss table).

        Returns:
            Its metrics, with the keys of ``metrics.jsonl`` without the ``learner/`` prefix. Always present: ``loss``,
            ``policy_loss``, ``entropy`` (mean nats over the loss tokens), ``grad_norm`` (before clipping),
            ``clip_ratio`` (share of tokens on which the clip acted, see `Surrogate`), ``ratio_mean``, ``ratio_max``,
            ``ratio_min``, ``sampler_gap_mean``, ``sampler_gap_max`` (absolute difference of old and sampler
            log-probs), ``tokens``, ``learning_rate``. With a reference model also ``kl``.

        Raises:
            NotFiniteError: The loss or the gradient norm is not finite. The weights are unchanged.
        """
        ...

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token, ``[T]`` per sample, without gradient."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """Return the weights by HF parameter name, for engines. Valid until the next update."""
        ...

    def adapters(self) -> Mapping[str, Any]:
        """Return only the LoRA adapters, by PEFT's names. Valid until the next update."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return everything to resume bit for bit: tensors by name (weights and moments) and JSON scalars."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        ...

    def save_hf(
        self,
        folder: Path,
        *,
        extra_files: Mapping[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a model folder that ``transformers`` loads, LoRA merged, with the adapters in its folder ``adapter``.

        Args:
            folder: Folder to write.
            extra_files: Further text files by name.
            generation: Recommended generation settings.
        """
        ...


class Reference(Protocol):
    """Frozen reference model."""

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token, ``[T]`` per sample."""
        ...


@runtime_checkable
class WritesShards(Protocol):
    """A learner whose state is on several devices, which write and read it without gathering it."""

    def begin_shards(self, folder: Path) -> Future[Mapping[str, Any]]:
        """Copy the state and start writing the tensors into ``folder``. Updates may follow at once.

        Returns:
            A future that resolves in ``update`` or ``finish_shards``, to what else is needed to read the files, JSON-
                able: ``optimizer_steps`` is the number of updates, ``files`` each file's name and SHA-256, the rest is
                the ``meta`` of a whole state. It holds an ``OSError`` if a file could not be written.
        """
        ...

    def finish_shards(self) -> None:
        """Wait until the shards are written, or have failed."""
        ...

    def read_shards(self, folder: Path, meta: Mapping[str, Any]) -> None:
        """Restore what ``begin_shards`` wrote, whatever the number of devices that wrote it.

        Raises:
            ValueError: A file is missing, damaged, or of another model.
        """
        ...

    def shards_kept(self, folder: Path) -> None:
        """Note that the last shards are now in ``folder`` and stay until the next call. Called from any thread."""
        ...


@runtime_checkable
class OnDevices(Protocol):
    """A part of a run that knows its devices."""

    @property
    def devices(self) -> Sequence[str]:
        """CUDA's name of each of its accelerators; ``cpu`` for each process without one."""
        ...

    def peak_mb(self) -> float:
        """Return the peak memory in MiB of the fullest device: of its own process on an accelerator, else of the whole
        process."""
        ...


class WorkSpan(NamedTuple):
    """Work of a worker from ``begin`` to ``end``, in seconds of this process's ``time.perf_counter``."""

    worker: str
    what: str
    begin: float
    end: float


@runtime_checkable
class RemoteWorkers(Protocol):
    """A part of a run whose workers are in other processes: replicas, ranks, nodes."""

    lost: list[str]
    """Workers that were lost and replaced so far, each with the reason, in order."""

    def observations(self) -> Mapping[str, float]:
        """Return metrics by key (``area/name/stat``) since the last call."""
        ...

    def spans(self) -> Sequence[WorkSpan]:
        """Return the workers' spans since the last call, for the timeline."""
        ...
