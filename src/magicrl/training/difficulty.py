"""The offline difficulty filter: sample every training prompt N times, drop those that are 0/N or N/N."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from magicrl.algorithms.filters import FilterResult, PassCount, offline_filter
from magicrl.config.schema import DifficultyFilterConfig
from magicrl.evaluation.sampling import Encode, evaluation_seed, sample_problems
from magicrl.files import write_atomically
from magicrl.records import Problem
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.diagnosis import Diagnosis, Judging, SampledAnswers, answers_of, diagnose
from magicrl.verifiers.base import VerifierService


@dataclass(frozen=True, kw_only=True, slots=True)
class DifficultyFilter:
    """Applies the filter once a run; its table is kept in ``difficulty.json`` and read again on a resume.

    Attributes:
        config: N, temperature, limit.
        max_tokens: T of the samples.
        seed: the run seed.
        path: where the counts are kept.
        judging: the verifier's settings, for the advice.
    """

    config: DifficultyFilterConfig
    max_tokens: int
    seed: int
    path: Path
    judging: Judging

    def apply(
        self,
        problems: Sequence[Problem],
        engine: RolloutEngine,
        judge: VerifierService,
        encode: Encode,
        progress: Callable[[int, int], None],
    ) -> tuple[FilterResult, Diagnosis]:
        """What stays, by key (problems of one prompt are sampled once), and what the answers say.

        Raises:
            ValueError: nothing stays, or the table is damaged.
        """
        if not self.path.exists():
            document = self._measure(problems, engine, judge, encode, progress)
            write_atomically(self.path, json.dumps(document, indent=1))
        counts, answers = self._read(problems)
        found = diagnose(answers)
        try:
            return offline_filter(counts), found
        except ValueError as error:
            raise ValueError(f"data.difficulty_filter: {error} (the counts are in {self.path}): {found.text}") from None

    def _read(self, problems: Sequence[Problem]) -> tuple[dict[str, PassCount], SampledAnswers]:
        try:
            document = json.loads(self.path.read_text())
            counts = {name: PassCount(correct=c, counted=n) for name, (c, n) in document["counts"].items()}
            answers = SampledAnswers(**document["answers"], judging=self.judging)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is damaged ({error}); delete it to measure the difficulty anew") from None
        return {p.key: counts[p.id] for p in problems if p.id in counts}, answers

    def _measure(
        self,
        problems: Sequence[Problem],
        engine: RolloutEngine,
        judge: VerifierService,
        encode: Encode,
        progress: Callable[[int, int], None],
    ) -> dict[str, Any]:
        max_tokens = self.config.max_tokens or self.max_tokens
        groups = sample_problems(
            engine,
            judge,
            list({p.key: p for p in reversed(problems)}.values())[::-1],
            encode,
            samples=self.config.samples,
            temperature=self.config.temperature,
            max_tokens=max_tokens,
            seed=evaluation_seed(self.seed, "difficulty"),
            progress=progress,
        )
        counts = {
            g.group.request.problem.key: PassCount(
                correct=int((g.correct & g.counted).sum()), counted=int(g.counted.sum())
            )
            for g in groups
        }
        try:
            answers = asdict(answers_of(groups, max_tokens=max_tokens, judging=self.judging))
        except ValueError as error:
            raise ValueError(f"data.difficulty_filter: {error}") from None
        return {
            "samples": self.config.samples,
            "temperature": self.config.temperature,
            "table": filter_table(problems, counts),
            "answers": {key: value for key, value in answers.items() if key != "judging"},
            "counts": {p.id: [counts[p.key].correct, counts[p.key].counted] for p in problems},
        }


def filter_table(problems: Sequence[Problem], counts: Mapping[str, PassCount]) -> list[dict[str, Any]]:
    """Per level: how many problems were never (0/N), always (N/N) and sometimes solved (kept)."""
    levels = sorted({p.level for p in problems}, key=lambda level: math.inf if level is None else level)
    rows: list[dict[str, Any]] = []
    for level in levels:
        found = [counts[p.key] for p in problems if p.level == level and p.key in counts]
        rows.append(
            {
                "level": level,
                "problems": len(found),
                "never": sum(c.all_wrong for c in found),
                "always": sum(c.all_correct for c in found),
                "kept": sum(not c.all_wrong and not c.all_correct and c.counted > 0 for c in found),
            }
        )
    return rows
