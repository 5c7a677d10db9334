"""Stages of a run: transitions, the offline difficulty filter, and evaluation on held-out problems.

The offline filter samples every training prompt N times and drops those with 0/N or N/N correct answers. Evaluations on
test sets before and after training support claims. Validation during training drives stages and selects the best
checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from magicrl.algorithms.convergence import ConvergenceTest, TruncationRule
from magicrl.algorithms.filters import PassCount, offline_filter
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.evaluation.job import Encode, Progress, evaluation_seed, sample_problems, score
from magicrl.evaluation.samples import whole_prompt
from magicrl.evaluation.statistics import Score
from magicrl.files import write_atomically
from magicrl.records import Problem, ScoredGroup
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.diagnosis import Diagnosis, Judging, SampledAnswers, diagnose, judging_of, unjudged_text
from magicrl.training.metrics import answers_of, first_reason
from magicrl.training.protocols import TrainingStopped
from magicrl_verifiers.records import VerifierService

_log = logging.getLogger(__name__)


class StageSchedule:
    """State machine over the stages of a recipe.

    A stage ends when its rule says so and it had ``min_steps``, or at ``max_steps``. The convergence test reads
    validation accuracy where it is measured, else training accuracy before rejection, corrected for the prompts that a
    filter removed. Where rewards are graded, it reads the mean reward instead.
    """

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        self._stages = tuple(stages)
        self.index = 0  # current stage, or the number of stages after the last
        self._steps = 0
        self._converged = False
        self._test = self._make_test()

    @property
    def stage(self) -> StageConfig | None:
        """Current stage, None after the last."""
        return self._stages[self.index] if self.index < len(self._stages) else None

    def observe_accuracy(self, accuracy: float, standard_error: float | None) -> None:
        """Observe one measured accuracy or mean reward (of validation, or of training without validation)."""
        if isinstance(self._test, ConvergenceTest):
            # Steps of this stage only: a curve never extends over a change of T.
            self._converged = self._test.observe(self._steps, accuracy, standard_error)

    def observe_truncation(self, ratio: float) -> None:
        """Observe the share of truncated responses of a training step."""
        if isinstance(self._test, TruncationRule):
            self._converged = self._test.observe(ratio)

    def finish_step(self) -> tuple[int, int, str] | None:
        """Count one training step. At the end of a stage, start the next one and return (index, steps, reason) of the
        ended one."""
        stage = self.stage
        assert stage is not None, "finish_step after the last stage"
        self._steps += 1
        # A convergence before min_steps stays valid; a truncated share is that of the last steps.
        early = self._converged and self._steps >= stage.min_steps
        if not early and self._steps < stage.max_steps:
            return None
        rule = stage.transition
        reason = f"max_steps = {stage.max_steps} reached"
        if early and rule.rule == "truncation":
            reason = f"truncated share below {rule.truncation_below} for {rule.window} steps"
        elif early:
            gain = f"{rule.horizon} more steps gain less than {rule.delta} at {rule.confidence:.0%} confidence"
            reason = f"converged: {gain}"
        ended = (self.index, self._steps, reason)
        # The next stage has another T, so its curve starts again.
        self.index += 1
        self._steps = 0
        self._converged = False
        self._test = self._make_test()
        return ended

    def _make_test(self) -> ConvergenceTest | TruncationRule | None:
        stage = self.stage
        if stage is None or stage.transition.rule == "fixed":
            return None
        rule = stage.transition
        if rule.rule == "truncation":
            return TruncationRule(below=rule.truncation_below, window=rule.window)
        return ConvergenceTest(horizon=rule.horizon, delta=rule.delta, window=rule.window, confidence=rule.confidence)

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state."""
        return {
            "index": self.index,
            "steps": self._steps,
            "converged": self._converged,
            "test": self._test.state() if self._test else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self.index = int(state["index"])
        self._steps = int(state["steps"])
        self._converged = bool(state["converged"])
        self._test = self._make_test()
        if self._test:
            # The settings come from the recipe, only the curve from the checkpoint.
            self._test.restore(state["test"])


Removals: TypeAlias = dict[str, dict[str, tuple[int, int]]]
"""``source`` and ``difficulty`` -> name -> (removed, all)."""


def removals(problems: Sequence[Problem], removed: Collection[str]) -> Removals:
    """Count how many of ``problems`` have a key in ``removed``, by source and by difficulty.

    The difficulty is a generated problem's level, else the released schema's ``model_difficulty``: the number of failed
    samples of each model, so that such a problem counts once per model. Problems without either are ``unknown``.

    Example:
        >>> easy = Problem(id="a", prompt="1+1?", references=("2",), verifier="exact", source="sums", level=1)
        >>> hard = Problem(id="b", prompt="9+9?", references=("18",), verifier="exact", source="sums", level=2)
        >>> removals([easy, hard], {easy.key})
        {'source': {'sums': (1, 2)}, 'difficulty': {'level 1': (1, 1), 'level 2': (0, 1)}}
    """
    gone = set(removed)
    found: Removals = {"source": {}, "difficulty": {}}
    for problem in problems:
        names = [("source", problem.source), *(("difficulty", name) for name in difficulties_of(problem))]
        for kind, name in names:
            dropped, total = found[kind].get(name, (0, 0))
            found[kind][name] = (dropped + (problem.key in gone), total + 1)
    return {kind: dict(sorted(counts.items())) for kind, counts in found.items()}


def difficulties_of(problem: Problem) -> list[str]:
    """Return the known difficulties of a problem."""
    if problem.level is not None:
        return [f"level {problem.level}"]
    info: Any = problem.extra.get("extra_info")
    table: Any = info.get("model_difficulty") if isinstance(info, Mapping) else None
    if not isinstance(table, Mapping) or not table:
        return ["unknown"]
    return [f"{model}: {failed} failed" for model, failed in table.items() if failed is not None]


def in_words(counts: Mapping[str, tuple[int, int]]) -> str:
    """Return counts as in ``sums 1 of 2, stories 0 of 5``."""
    return ", ".join(f"{name} {removed} of {total}" for name, (removed, total) in counts.items())


def filter_by_difficulty(
    config: TrainConfig,
    problems: Sequence[Problem],
    sampler: tuple[RolloutEngine, VerifierService, Encode],
    path: Path,
    progress: Callable[[int, int], None],
) -> tuple[list[str], dict[str, PassCount], Diagnosis]:
    """Apply the offline filter ``data.difficulty_filter``.

    Returns the keys of the problems that it keeps, those that it removes, and the diagnosis of the answers.
    It is measured once per run, and once per prompt. ``path`` stores the counts, which a resumed run reads again.

    Raises:
        ValueError: No problem is kept, or the file is damaged.
        RuntimeError: No answer has a verdict.
    """
    judging = judging_of(config.verifier, problems)
    if not path.exists():
        try:
            document = _measured(config, problems, sampler, judging, progress)
        except ValueError as error:
            raise ValueError(f"data.difficulty_filter: {error}") from None
        write_atomically(path, json.dumps(document, indent=1))
    try:
        # Also read when it was just written, so that a new and a resumed run use the same bytes.
        document = json.loads(path.read_text())
        counts = {name: PassCount(correct=c, counted=n) for name, (c, n) in document["counts"].items()}
        answers = SampledAnswers(**document["answers"], judging=judging)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to measure the difficulty again") from None
    found = diagnose(answers)
    by_key = {p.key: counts[p.id] for p in problems if p.id in counts}
    try:
        removed = offline_filter(by_key)
    except ValueError as error:
        remedies = list(found.advice)
        if answers.reward is not None:  # graded rewards teach without a correct response
            remedies[:0] = [
                "A response is correct if its reward reaches the right_from of the reward (1 by default): lower it, or "
                "switch the filter off (--set data.difficulty_filter=none)."
            ]
        seen = " ".join([f"{found.message}.", *remedies])
        raise ValueError(f"data.difficulty_filter: {error} (the counts are in {path}): {seen}") from None
    return [key for key in by_key if key not in removed], removed, found


def _measured(
    config: TrainConfig,
    problems: Sequence[Problem],
    sampler: tuple[RolloutEngine, VerifierService, Encode],
    judging: Judging,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    settings = config.data.difficulty_filter
    assert settings is not None, "called without a filter"
    engine, judge, encode = sampler
    # Problems are identified by their prompt: two with one key would be measured twice.
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.key, problem)
    # By default the T of the first stage: a prompt whose answers are always truncated there has no advantage.
    max_tokens = settings.max_tokens or config.stages[0].max_tokens
    groups = sample_problems(
        engine,
        judge,
        list(first.values()),
        encode,
        samples=settings.samples,
        temperature=settings.temperature,
        max_tokens=max_tokens,
        seed=evaluation_seed(config.run.seed, "difficulty"),
        progress=progress,
    )
    counts = {g.group.request.problem.key: PassCount.of(g) for g in groups}
    try:
        answers = asdict(answers_of(groups, max_tokens=max_tokens, judging=judging))
    except RuntimeError as error:
        raise RuntimeError(f"data.difficulty_filter: {error}") from None
    return {
        "samples": settings.samples,
        "temperature": settings.temperature,
        "table": filter_table(problems, counts),
        "answers": {key: value for key, value in answers.items() if key != "judging"},
        "counts": {p.id: [counts[p.key].correct, counts[p.key].counted] for p in problems},  # by id, for readers
    }


def filter_table(problems: Sequence[Problem], counts: Mapping[str, PassCount]) -> list[dict[str, Any]]:
    """Return per level how many problems were never (0/N), always (N/N) and sometimes solved (kept)."""
    by_level: dict[int | None, list[PassCount]] = {}
    # Problems without a level come last.
    for problem in sorted(problems, key=lambda p: math.inf if p.level is None else p.level):
        by_level.setdefault(problem.level, []).append(counts[problem.key])
    return [
        {
            "level": level,
            "problems": len(found),
            "never": sum(c.all_wrong for c in found),
            "always": sum(c.all_correct for c in found),
            "kept": sum(0 < c.correct < c.counted for c in found),
        }
        for level, found in by_level.items()
    ]


def evaluation_tokens(config: TrainConfig) -> int:
    """Return T of validation and tests: one limit for all, so that only the weights differ."""
    return config.evaluation.max_tokens or config.stages[-1].max_tokens


def held_out_test(
    name: str,
    label: str,
    problems: Sequence[Problem],
    config: TrainConfig,
    sampler: tuple[RolloutEngine, VerifierService, Encode],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Evaluate the engine's current weights on a test set at every temperature. Returns a document of ``evaluations/``.

    Args:
        name, label: Names of the evaluation and of the set. ``before`` has the larger pass@k of the initial model.
        problems: Problems of the set.
        config: The recipe.
        sampler: Engine, verifier service and prompt encoder.
        progress: Called with the phase, the number of finished problems and their total.

    Raises:
        TrainingStopped: No response could be judged.
    """
    engine, judge, encode = sampler
    settings, max_tokens = config.evaluation, evaluation_tokens(config)
    scores: dict[str, dict[str, Any]] = {}
    read: dict[str, list[dict[str, Any]]] = {}
    for temperature in settings.temperatures:
        larger = {settings.start_pass_at} if name == "before" and settings.start_pass_at else set[int]()
        ks = tuple(sorted({*settings.pass_at, *larger})) if temperature == 1.0 else ()
        groups = sample_problems(
            engine,
            judge,
            problems,
            encode,
            # greedy decoding has one response per problem
            samples=max([1 if temperature == 0 else settings.samples, *ks]),
            temperature=temperature,
            max_tokens=max_tokens,
            # The same seed before and after, so that only the weights differ.
            seed=evaluation_seed(config.run.seed, f"test/{label}/{temperature}"),
            progress=lambda i, n, t=temperature: progress(f"{label} {name} training, temperature {t:g}", i, n),
        )
        if not any(group.counted.any() for group in groups):
            raise TrainingStopped(
                f"test set {label!r} {name} training: {unjudged_text(first_reason(groups))}. Check that the verifier "
                "or its server works, then continue with --resume"
            )
        scores[str(float(temperature))] = score_document(score(groups, ks))
        for group in groups[: config.logging.samples]:
            # The same problems at every temperature, next to each other.
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
                "prompt": whole_prompt(by_id[key]),
                "reference": ", ".join(by_id[key].references),
                "responses": rows,
            }
            for key, rows in read.items()
        ],
    }


def score_document(result: Score) -> dict[str, Any]:
    """Return a score as JSON, with the values per problem (and mean rewards) for paired comparisons."""

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
        "not_judged": result.not_judged,
        "drawn": result.drawn,
        "pass_at": {str(k): estimate.as_dict() for k, estimate in result.pass_at.items()},
        "length_mean": result.length.mean,
        "truncation": result.truncation.mean,
        "entropy": result.entropy,
        "answered_and_stopped": result.answered_and_stopped,
        "clusters": list(result.clusters),
        "per_problem": rounded(result.per_problem),
    }


def _shown(judged: ScoredGroup, temperature: float) -> dict[str, Any]:
    completion, verdict = judged.group.completions[0], judged.verdicts[0]
    return {
        "temperature": temperature,
        "text": completion.text,
        # A truncated response is wrong, whatever the verifier found in its text, as in training.
        "outcome": "wrong" if completion.truncated else verdict.outcome.value,
        "status": "truncated" if completion.truncated else verdict.status,
        "decided_by": verdict.decided_by,
        "extracted": verdict.extracted,
        "finish_reason": completion.finish_reason.value,
        "tokens": completion.num_sampled,
    }


class Validation:
    """Validation every few steps, with the best step so far.

    Args:
        config: The recipe.
        problems: Validation set. If it is empty, there is no validation.
        progress: Called with ``(done, total)``.
    """

    def __init__(self, config: TrainConfig, problems: Sequence[Problem], progress: Progress) -> None:
        self._config, self._problems, self._progress = config, problems, progress
        self.best: tuple[int, float] | None = None
        """Best validated step and its accuracy, or mean reward where the reward is graded."""

    @property
    def active(self) -> bool:
        """Whether this run validates at all."""
        return bool(self._config.evaluation.every and self._problems)

    def measure(self, step: int, engine: RolloutEngine, judge: VerifierService, encode: Encode) -> dict[str, float]:
        """Return metrics ``validation/...`` with the weights after ``step``; {} if none is due or judged."""
        settings = self._config.evaluation
        if not self.active or step % settings.every:
            return {}
        temperature = settings.validation_temperature
        with engine.newest_weights():
            groups = sample_problems(
                engine,
                judge,
                self._problems,
                encode,
                samples=1 if temperature == 0 else settings.validation_samples,
                temperature=temperature,
                max_tokens=evaluation_tokens(self._config),
                # With one seed for all steps, all points of the curve would share the same sampling error.
                seed=evaluation_seed(self._config.run.seed, f"validation/{step}"),
                progress=self._progress,
            )
        if not any(group.counted.any() for group in groups):
            _log.warning("step %d: no validation: %s", step, unjudged_text(first_reason(groups)))
            return {}
        result = score(groups)
        measured = {"accuracy": result.accuracy, **({} if result.reward is None else {"reward": result.reward})}
        found = result.reward or result.accuracy
        # Among equal steps the earlier one is kept.
        if self.best is None or found.mean > self.best[1]:
            self.best = (step, found.mean)
        return {
            **{f"validation/{name}/mean": estimate.mean for name, estimate in measured.items()},
            **{f"validation/{name}/standard_error": estimate.standard_error for name, estimate in measured.items()},
            "validation/length/mean": result.length.mean,
            "validation/truncation/ratio": result.truncation.mean,
            **({} if result.entropy is None else {"validation/entropy/mean": result.entropy}),
        }

    def state(self) -> list[Any] | None:
        """Return the JSON-able state."""
        return None if self.best is None else list(self.best)

    def restore(self, state: Sequence[Any] | None) -> None:
        """Restore what ``state`` returned."""
        self.best = (int(state[0]), float(state[1])) if state else None
