"""Measured on problems held out from training: the test before and after, and validation while training goes on.

Tests drive claims, validation drives stages and the best checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from magicrl.config.schema import EvaluationConfig
from magicrl.evaluation.job import Encode, Progress, evaluation_seed, sample_problems, score
from magicrl.evaluation.statistics import Score
from magicrl.records import Problem, ScoredGroup
from magicrl.rollout.protocol import RolloutEngine
from magicrl_verifiers.records import VerifierService


def held_out_test(
    name: str,
    label: str,
    problems: Sequence[Problem],
    config: EvaluationConfig,
    sampler: tuple[RolloutEngine, VerifierService, Encode],
    *,
    max_tokens: int,
    seed: int,
    shown: int,
    start: bool,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """A test set at every temperature with the engine's present weights: a file of ``evaluations/``.

    Args:
        name, label: of the test (``before``) and of the set.
        problems: the set.
        config: temperatures, samples, ks.
        sampler: what generates, judges and encodes.
        max_tokens: T of the test.
        seed: the run seed; each (set, temperature) has a seed of its own, the same before and after.
        shown: problems whose responses are kept for reading.
        start: adds the start model's larger pass@k.
        progress: told the phase, what is done, and of how much.
    """
    engine, judge, encode = sampler
    scores: dict[str, dict[str, Any]] = {}
    read: dict[str, list[dict[str, Any]]] = {}
    for temperature in config.temperatures:
        larger = {config.start_pass_at} if start and config.start_pass_at else set[int]()
        ks = tuple(sorted({*config.pass_at, *larger})) if temperature == 1.0 else ()
        groups = sample_problems(
            engine,
            judge,
            problems,
            encode,
            samples=max([1 if temperature == 0 else config.samples, *ks]),  # greedy has one response a problem
            temperature=temperature,
            max_tokens=max_tokens,
            # the same before and after: the two tests differ by the weights alone
            seed=evaluation_seed(seed, f"test/{label}/{temperature}"),
            progress=lambda i, n, t=temperature: progress(f"test {name} {label} at {t:g}", i, n),
        )
        scores[str(float(temperature))] = score_document(score(groups, ks))
        for group in groups[:shown]:
            # the same problems at every temperature, side by side
            read.setdefault(group.group.request.problem.id, []).append(_shown(group, temperature))
    by_id = {p.id: p for p in problems}
    return {
        "name": name,
        "set": label,
        "policy_version": engine.policy_version,
        "max_tokens": max_tokens,
        "temperatures": scores,
        "samples": [
            {
                "problem_id": key,
                "prompt": by_id[key].prompt,
                "reference": ", ".join(by_id[key].references),
                "responses": rows,
            }
            for key, rows in read.items()
        ],
    }


def score_document(result: Score) -> dict[str, Any]:
    """A score as JSON, with the per-problem shares (and mean rewards) so that two models can be compared pairwise."""

    def rounded(values: Sequence[float]) -> list[float | None]:
        return [None if math.isnan(value) else round(value, 6) for value in values]

    graded: dict[str, Any] = {}
    if result.reward is not None:
        graded = {"reward": result.reward.as_dict(), "reward_per_problem": rounded(result.reward_per_problem)}
    return {
        "accuracy": result.accuracy.as_dict(),
        **graded,
        "problems": result.accuracy.problems,
        "samples": result.samples,
        "pass_at": {str(k): estimate.as_dict() for k, estimate in result.pass_at.items()},
        "length_mean": result.length.mean,
        "truncation": result.truncation.mean,
        "entropy": result.entropy,
        "boxed_and_stopped": result.boxed_and_stopped,
        "clusters": list(result.clusters),
        "per_problem": rounded(result.per_problem),
    }


def _shown(judged: ScoredGroup, temperature: float) -> dict[str, Any]:
    completion, verdict = judged.group.completions[0], judged.verdicts[0]
    return {
        "temperature": temperature,
        "text": completion.text,
        # cut at T is wrong, whatever the verifier found in its text, as in training
        "outcome": "wrong" if completion.truncated else verdict.outcome.value,
        "status": "truncated" if completion.truncated else verdict.status,
        "decided_by": verdict.decided_by,
        "extracted": verdict.extracted,
        "finish_reason": completion.finish_reason.value,
        "tokens": completion.num_sampled,
    }


class Best(NamedTuple):
    """The best validated step so far, by accuracy, or by mean reward where the reward is graded."""

    step: int
    score: float


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
        with engine.newest_weights():
            groups = sample_problems(
                engine,
                judge,
                self._problems,
                encode,
                samples=1 if temperature == 0 else self._config.validation_samples,
                temperature=temperature,
                max_tokens=self._max_tokens,
                # with one seed for all steps every point of the curve would share its luck
                seed=evaluation_seed(self._seed, f"validation/{step}"),
                progress=self._progress,
            )
        result = score(groups)
        measured = {"accuracy": result.accuracy, **({} if result.reward is None else {"reward": result.reward})}
        found = result.reward or result.accuracy
        # of equal ones the earlier stays
        if self.best is None or found.mean > self.best.score:
            self.best = Best(step=step, score=found.mean)
        return {
            **{f"validation/{name}/mean": estimate.mean for name, estimate in measured.items()},
            **{f"validation/{name}/standard_error": estimate.standard_error for name, estimate in measured.items()},
            "validation/length/mean": result.length.mean,
            "validation/truncation/ratio": result.truncation.mean,
            **({} if result.entropy is None else {"validation/entropy/mean": result.entropy}),
        }

    def state(self) -> list[Any] | None:
        """JSON-able."""
        return None if self.best is None else list(self.best)

    def restore(self, state: Sequence[Any] | None) -> None:
        """Inverse of ``state``."""
        self.best = Best(step=int(state[0]), score=float(state[1])) if state else None
