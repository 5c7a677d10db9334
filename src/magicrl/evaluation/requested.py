"""A requested evaluation compared with the results that a folder holds: which settings differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from magicrl.evaluation.benchmarks import LoadedBenchmark
from magicrl.evaluation.comparison import read_benchmarks
from magicrl.evaluation.runner import EvaluationSettings, decides_of
from magicrl.evaluation.samples import AskedProblem, EvaluationFolder, differences
from magicrl.records import Problem
from magicrl_verifiers.records import JudgeOptions
from magicrl_verifiers.secrets import without_secrets

_ENGINE = ("engine", "engine_sha256", "dtype", "head_dtype")
"""Facts of an engine that are known before it has loaded a model."""
_READING = ("source", "window", "limit", "limit_seed", "template")
"""Facts of a benchmark that decide its problems. A reader learns nothing from a checksum of the problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requested:
    """Everything that decides the results of a checkpoint, apart from its weights."""

    benchmarks: Sequence[LoadedBenchmark]
    settings: EvaluationSettings
    judging: JudgeOptions  # with the default of ``reasoning`` for this model
    engine: Mapping[str, Any]  # of ``_ENGINE``, without those that are None

    def differences(self, output: Path) -> list[str]:
        """Return what the results in ``output`` were made with otherwise, one line per setting and benchmark.

        Raises:
            ValueError: ``output`` has no results, or a file that holds none.
        """
        results = read_benchmarks(output)
        found: list[str] = []
        for benchmark in self.benchmarks:
            result = results.get(benchmark.name)
            if result is None:
                found.append(f"{benchmark.name}: was not evaluated, is now requested")
            else:
                folder = EvaluationFolder(output / benchmark.name)
                found += [f"{benchmark.name}: {line}" for line in self._changed(benchmark, result, folder)]
        return found

    def _changed(self, benchmark: LoadedBenchmark, result: Mapping[str, Any], folder: EvaluationFolder) -> list[str]:
        engine = result["settings"]["engine"]
        then = {**result["settings"], "engine": {name: engine[name] for name in _ENGINE if name in engine}}
        now = decides_of(benchmark, self.settings, self.judging, self.settings.max_tokens)
        lines = differences(then, {**now, "engine": dict(self.engine)})
        if any(line.startswith("problems.") for line in lines):
            read = differences(
                _reading(result["source"], folder.problems()), _reading(benchmark.facts, benchmark.problems)
            )
            lines = [*read, *(line for line in lines if not (read and line.startswith("problems.")))]
        ask, scores = self.settings.ask, result["scaling"]["fresh"]
        pairs: list[tuple[str, Any, Any]] = [
            ("samples", result["samples"], self.settings.samples_for(benchmark.name)),
            # k and limits beyond those that are requested do no harm, and k without a request are defaults
            ("pass_at", [int(k) for k in result["pass_at"]], ask.pass_at),
            # where nothing is voted on, such as programs, no k can be added
            ("majority_at", [int(k) for k in result["majority_at"]], ask.majority_at if result["majority_at"] else ()),
            ("fresh_limits", [point["limit"] for point in scores], ask.fresh_limits),
        ]
        for name, then, now in pairs:
            differs = bool({*(now or ())} - {*then}) if isinstance(then, list) else then != now
            if differs:
                lines.append(f"{name}: was {_words(then)}, is now {_words(now)}")
        return lines


def _reading(facts: Mapping[str, Any], problems: Sequence[AskedProblem | Problem]) -> dict[str, Any]:
    known = {name: facts.get(name) for name in _READING}
    verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
    return known | {"source": without_secrets(str(facts.get("source"))), "verifier": verifiers}


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(one) for one in cast("Sequence[Any]", value)) or "none"
    return str(value)
