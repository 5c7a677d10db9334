"""Sections of a recipe about the run itself: where it lives, how it is judged, tested, written down and kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from magicrl.config.paths import FilePath
from magicrl.config.section import Section


class RunConfig(Section):
    """Where and how the run lives."""

    name: str = "run"
    """Names the run folder and stands in the report."""
    seed: int = Field(default=0, ge=0)
    """Of prompts, sampling, mini-batches and splits."""
    output: FilePath | None = None
    """Run folder; ``--output`` overrides it; default ``runs/<name>``."""
    threads: int | None = Field(default=None, ge=1)
    """torch threads; default: the cores this process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is one."""
    expected_minutes: float | None = Field(default=None, gt=0)
    """Measured on two CPU cores; said before the run starts where a shipped recipe is run unchanged."""


class EvaluationConfig(Section):
    """Validation during the run, and the test before and after it."""

    every: int = Field(default=0, ge=0)
    """Training steps between validations; 0: none during the run."""
    validation_samples: int = Field(default=4, ge=1)
    """Responses a problem."""
    validation_temperature: float = Field(default=1.0, ge=0)
    """0: greedy, one response a problem."""
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)
    """Temperatures of the test before and after training."""
    samples: int = Field(default=16, ge=1)
    """Samples a problem and temperature in the test (one at temperature 0)."""
    pass_at: tuple[int, ...] = (16,)
    """k of pass@k, at temperature 1; needs at least k samples."""
    start_pass_at: int | None = Field(default=None, ge=1)
    """A larger k for the start model at temperature 1 (what sampling alone could find)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Response limit of the test; default: the last stage's T."""


class VerifierConfig(Section):
    """How answers are judged."""

    reasoning: Literal["auto", "required", "none"] = "auto"
    """What an unfinished ``<think>`` means (docs/verifiers.md)."""
    extract: Literal["lenient", "box"] = "box"
    """``box``: only a ``\\boxed{}`` is an answer; ``lenient``: also what the text ends with."""
    time_limit: float = Field(default=10.0, gt=0)
    """CPU seconds of one maths answer or of a program in one test. Ten for the programs, which share the setting; maths
    alone (`magicrl verify math`) takes two, and its formulas stop after less than one in any case."""
    workers: int = Field(default=1, ge=1)
    """Processes that judge."""
    memory_limit_mb: int = Field(default=4096, ge=256)
    """Of each worker; what needs more is judged wrong."""


class CheckpointConfig(Section):
    """When the run's whole state is written, and how many are kept."""

    every: int = Field(default=20, ge=1)
    """Training steps."""
    keep_last: int = Field(default=2, ge=1)
    """Older checkpoints are removed."""
    keep_best: bool = True
    """Keep the checkpoint of the best validation as well."""


class LoggingConfig(Section):
    """What is recorded beside the metrics."""

    rollouts_every: int = Field(default=1, ge=0)
    """Steps between recorded rollouts (parquet); 0: none."""
    samples: int = Field(default=6, ge=0)
    """Test problems whose responses are shown before and after."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where the metrics are copied to, beside ``metrics.jsonl``; each is an extra of the same name."""
    project: str = Field(default="magicrl", min_length=1)
    """Groups runs in W&B and trackio."""
