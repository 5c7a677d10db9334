"""The validation set: what drives stages and the best checkpoint, measured while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicrl.config.schema import EvaluationConfig
from magicrl.evaluation.sampling import Encode, Progress, evaluation_seed, sample_problems, score
from magicrl.records import Problem
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.weight_lag import newest_weights
from magicrl.verifiers.base import VerifierService


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best validated step so far."""

    step: int
    accuracy: float


class Validation:
    """Measures the validation set every so many steps and remembers the best.

    Args:
        config: how often, how many samples, at which temperature.
        problems: the validation set; empty means that nothing is ever due.
        max_tokens: T of the validation.
        seed: the run seed; each step's validation has a seed of its own.
        progress: told ``(done, total)``.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        problems: Sequence[Problem],
        *,
        max_tokens: int,
        seed: int,
        progress: Progress,
    ) -> None:
        self._config = config
        self._problems = problems
        self._max_tokens = max_tokens
        self._seed = seed
        self._progress = progress
        self.best: Best | None = None

    @property
    def active(self) -> bool:
        """Whether this run validates at all."""
        return bool(self._config.every and self._problems)

    def measure(self, step: int, engine: RolloutEngine, judge: VerifierService, encode: Encode) -> dict[str, float]:
        """Metrics ``validation/...`` with the weights after ``step``; {} where none is due."""
        if not self.active or step % self._config.every:
            return {}
        temperature = self._config.validation_temperature
        with newest_weights(engine):
            groups = sample_problems(
                engine,
                judge,
                self._problems,
                encode,
                samples=1 if temperature == 0 else self._config.validation_samples,
                temperature=temperature,
                max_tokens=self._max_tokens,
                seed=evaluation_seed(self._seed, f"validation/{step}"),
                progress=self._progress,
            )
        result = score(groups)
        if self.best is None or result.accuracy.mean > self.best.accuracy:
            self.best = Best(step=step, accuracy=result.accuracy.mean)
        values = {
            "validation/accuracy/mean": result.accuracy.mean,
            "validation/accuracy/standard_error": result.accuracy.standard_error,
            "validation/length/mean": result.length.mean,
            "validation/truncation/ratio": result.truncation.mean,
        }
        return values if result.entropy is None else {**values, "validation/entropy/mean": result.entropy}

    def state(self) -> list[Any] | None:
        """JSON-able."""
        return None if self.best is None else [self.best.step, self.best.accuracy]

    def restore(self, state: Sequence[Any] | None) -> None:
        """Inverse of ``state``."""
        self.best = Best(step=int(state[0]), accuracy=float(state[1])) if state else None
