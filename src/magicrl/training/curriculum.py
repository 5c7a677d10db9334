"""Which problems and which response limit a run trains on: stages, their transitions, the offline difficulty filter.

The offline filter samples every training prompt N times and drops those that are 0/N or N/N.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from magicrl.algorithms.convergence import ConvergenceTest, TruncationRule
from magicrl.algorithms.filters import FilterResult, PassCount, offline_filter
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.evaluation.job import Encode, evaluation_seed, sample_problems
from magicrl.files import write_atomically
from magicrl.records import Problem
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.diagnosis import Diagnosis, Judging, SampledAnswers, answers_of, diagnose, judging_of
from magicrl_verifiers.records import VerifierService


class StageEnd(NamedTuple):
    """The stage that ended (its index), the training steps it took, and why, a sentence for the log."""

    stage: int
    steps: int
    reason: str


class StageSchedule:
    """A state machine over the stages of a recipe.

    A stage ends when its rule says so and it has had ``min_steps``, or at ``max_steps``. The convergence test
    looks at validation accuracy where it is measured, else at training accuracy before rejection, corrected
    for the prompts that a filter removed.
    """

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        self._stages = tuple(stages)
        self.index = 0  # of the present stage; the number of stages once all are done
        self._steps = 0
        self._converged = False
        self._test = self._make_test()

    @property
    def stage(self) -> StageConfig | None:
        """The present stage, None when the run is over."""
        return self._stages[self.index] if self.index < len(self._stages) else None

    def observe_accuracy(self, accuracy: float, standard_error: float | None) -> None:
        """Take in one measured accuracy (of validation, or of training where none is measured)."""
        if isinstance(self._test, ConvergenceTest):
            # steps of the stage: a curve never reaches back over a change of T
            self._converged |= self._test.observe(self._steps, accuracy, standard_error)

    def observe_truncation(self, ratio: float) -> None:
        """Take in the share of truncated responses of a training step."""
        if isinstance(self._test, TruncationRule):
            self._converged |= self._test.observe(self._steps, ratio)

    def finish_step(self) -> StageEnd | None:
        """Count one training step; if it was the stage's last, move on and say why."""
        stage = self.stage
        assert stage is not None, "finish_step after the last stage"
        self._steps += 1
        # a verdict before min_steps waits, and holds
        early = self._converged and self._steps >= stage.min_steps
        if not early and self._steps < stage.max_steps:
            return None
        reason = self._reason(stage) if early else f"max_steps = {stage.max_steps} reached"
        end = StageEnd(stage=self.index, steps=self._steps, reason=reason)
        # the next stage has another T, so what the old curve showed says nothing of the new one
        self.index += 1
        self._steps = 0
        self._converged = False
        self._test = self._make_test()
        return end

    def _reason(self, stage: StageConfig) -> str:
        rule = stage.transition
        if rule.rule == "truncation":
            return f"truncated share below {rule.truncation_below} for {rule.window} steps"
        return f"converged: {rule.horizon} more steps gain less than {rule.delta} at {rule.confidence:.0%} confidence"

    def _make_test(self) -> ConvergenceTest | TruncationRule | None:
        stage = self.stage
        if stage is None or stage.transition.rule == "fixed":
            return None
        rule = stage.transition
        if rule.rule == "truncation":
            return TruncationRule(below=rule.truncation_below, window=rule.window)
        return ConvergenceTest(horizon=rule.horizon, delta=rule.delta, window=rule.window, confidence=rule.confidence)

    def state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "index": self.index,
            "steps": self._steps,
            "converged": self._converged,
            "test": self._test.state() if self._test else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self.index = int(state["index"])
        self._steps = int(state["steps"])
        self._converged = bool(state["converged"])
        self._test = self._make_test()
        if self._test:
            # its settings come from the recipe, the curve alone from the checkpoint
            self._test.restore(state["test"])


Removals: TypeAlias = dict[str, dict[str, tuple[int, int]]]
"""``source`` and ``difficulty`` -> name -> (removed, all)."""


def removals(problems: Sequence[Problem], removed: Collection[str]) -> Removals:
    """How many of ``problems`` have a key among ``removed``, by source and by difficulty.

    The difficulty is a generated problem's level, else the released schema's ``model_difficulty``: the number of failed
    samples of each model, so that such a problem counts once for every model. Problems without either are ``unknown``.

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
    """What is known of a problem's difficulty."""
    if problem.level is not None:
        return [f"level {problem.level}"]
    info: Any = problem.extra.get("extra_info")
    table: Any = info.get("model_difficulty") if isinstance(info, Mapping) else None
    if not isinstance(table, Mapping) or not table:
        return ["unknown"]
    return [f"{model}: {failed} failed" for model, failed in table.items() if failed is not None]


def in_words(counts: Mapping[str, tuple[int, int]]) -> str:
    """``sums 1 of 2, stories 0 of 5``."""
    return ", ".join(f"{name} {removed} of {total}" for name, (removed, total) in counts.items())


def filter_by_difficulty(
    config: TrainConfig,
    problems: Sequence[Problem],
    sampler: tuple[RolloutEngine, VerifierService, Encode],
    path: Path,
    progress: Callable[[int, int], None],
) -> tuple[FilterResult, Diagnosis]:
    """The offline filter of ``data.difficulty_filter``: what stays, by key, and what the answers say.

    It is measured once a run, problems of one prompt once. The counts are kept in ``path`` and read again on a resume.

    Raises:
        ValueError: nothing stays, nothing could be judged, or the file is damaged.
    """
    judging = judging_of(config.verifier, problems)
    if not path.exists():
        try:
            document = _measured(config, problems, sampler, judging, progress)
        except ValueError as error:
            raise ValueError(f"data.difficulty_filter: {error}") from None
        write_atomically(path, json.dumps(document, indent=1))
    try:
        # read also when it was just written: a new run and a resumed one go on from the same bytes
        document = json.loads(path.read_text())
        counts = {name: PassCount(correct=c, counted=n) for name, (c, n) in document["counts"].items()}
        found = diagnose(SampledAnswers(**document["answers"], judging=judging))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to measure the difficulty anew") from None
    try:
        return offline_filter({p.key: counts[p.id] for p in problems if p.id in counts}), found
    except ValueError as error:
        raise ValueError(f"data.difficulty_filter: {error} (the counts are in {path}): {found.text}") from None


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
    # a problem is its prompt: two of one key would be measured twice
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.key, problem)
    # by default the T under which the first stage will train on them: one that is always cut there teaches nothing
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
    counts = {
        g.group.request.problem.key: PassCount(correct=int((g.correct & g.counted).sum()), counted=int(g.counted.sum()))
        for g in groups
    }
    answers = asdict(answers_of(groups, max_tokens=max_tokens, judging=judging))
    return {
        "samples": settings.samples,
        "temperature": settings.temperature,
        "table": filter_table(problems, counts),
        "answers": {key: value for key, value in answers.items() if key != "judging"},
        "counts": {p.id: [counts[p.key].correct, counts[p.key].counted] for p in problems},  # by id: people read it
    }


def filter_table(problems: Sequence[Problem], counts: Mapping[str, PassCount]) -> list[dict[str, Any]]:
    """Per level: how many problems were never (0/N), always (N/N) and sometimes solved (kept)."""
    by_level: dict[int | None, list[PassCount]] = {}
    # those without a level come last
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
