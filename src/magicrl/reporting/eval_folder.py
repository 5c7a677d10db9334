"""Reading the folder of ``magicrl eval``: its results, and some of its samples to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from magicrl.evaluation.samples import RESULTS, SCHEMA_VERSION, SampleRow, read_samples
from magicrl.reporting.run_folder import Interval, RunFolderError


class _Document(BaseModel):
    """A part of a results file. Further keys are left alone: newer versions may write more."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class LimitPoint(_Document):
    """Accuracy, truncation and mean tokens at one response limit; ``samples`` where they were drawn anew."""

    limit: int
    accuracy: Interval
    truncation: Interval | None = None
    mean_tokens: Interval | None = None
    samples: int | None = None


class SamplePoint(_Document):
    """pass@k and maj@k of one k."""

    k: int
    passed: Interval = Field(alias="pass")
    majority: Interval | None = None


class LengthPoint(_Document):
    """Accuracy at the limit at which a response costs ``mean_tokens`` on average."""

    mean_tokens: float
    accuracy: Interval
    limit: int | None = None


class Scaling(_Document):
    """The curves of test-time scaling; ``exact``: the sampler did not know the limit."""

    over_limits: tuple[LimitPoint, ...] = ()
    exact: bool = True
    over_samples: tuple[SamplePoint, ...] = ()
    fresh: tuple[LimitPoint, ...] = ()
    efficiency: tuple[LengthPoint, ...] = ()


class ProblemScore(_Document):
    """One problem: its share of right samples, None where none was judged."""

    id: str
    accuracy: float | None = None
    correct: int = 0
    counted: int = 0
    mean_tokens: float = 0.0
    truncated: int = 0


class BenchmarkResult(_Document):
    """One benchmark of ``results.json``."""

    title: str = ""
    problems: int
    samples: int
    accuracy: Interval
    pass_at: dict[int, Interval] = Field(default_factory=dict[int, Interval])
    majority_at: dict[int, Interval] = Field(default_factory=dict[int, Interval])
    length: Interval
    truncation: Interval
    entropy: float | None = None
    not_judged: int = 0
    scored_sha256: str = ""
    whole_set: bool = False
    preset: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    table13: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    scaling: Scaling = Scaling()
    per_problem: tuple[ProblemScore, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedProblem:
    """One line of ``problems.jsonl``."""

    id: str
    prompt: str
    golds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvaluation:
    """An evaluation as its folder tells it.

    Attributes:
        path: the folder.
        written: when its results were written.
        benchmarks: by name, in the order of the results.
    """

    path: Path
    written: str
    benchmarks: Mapping[str, BenchmarkResult]

    @property
    def model(self) -> str:
        """What was evaluated, as it was named."""
        return next((str(b.model["model"]) for b in self.benchmarks.values() if b.model.get("model")), self.path.name)


def read_evaluation_folder(folder: Path) -> RecordedEvaluation:
    """Read ``results.json`` of an evaluation's folder.

    Raises:
        RunFolderError: no results, or a file that this version cannot read.
    """
    path = folder / RESULTS
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(
            f"{path}: no results yet; finish the evaluation with the same magicrl eval command, or score what its "
            f"shards have with magicrl eval --merge --output {folder}"
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: no results of magicrl eval: {error}") from None
    version = document.get("schema_version", SCHEMA_VERSION) if isinstance(document, dict) else None
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunFolderError(
            f"{path}: schema_version {version!r}; this magicrl reads up to {SCHEMA_VERSION}: update it"
        )
    try:
        benchmarks = {
            str(name): BenchmarkResult.model_validate(result)
            for name, result in cast("Mapping[str, Any]", document["benchmarks"]).items()
        }
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise RunFolderError(f"{path}: {field}: {first['msg']}") from None
    except (KeyError, AttributeError):
        raise RunFolderError(f"{path}: no results of magicrl eval (no table of benchmarks)") from None
    return RecordedEvaluation(path=folder, written=str(document.get("written", "")), benchmarks=benchmarks)


def asked_problems(folder: Path) -> list[AskedProblem]:
    """The problems of one benchmark's folder, in order; none where the file is missing.

    Raises:
        RunFolderError: a broken line.
    """
    path = folder / "problems.jsonl"
    if not path.exists():
        return []
    found: list[AskedProblem] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                golds = tuple(str(gold) for gold in row.get("golds") or ())
                found.append(AskedProblem(id=str(row["id"]), prompt=str(row.get("prompt", "")), golds=golds))
            except (ValueError, KeyError, AttributeError) as error:
                raise RunFolderError(f"{path}, line {number}: no problem ({error})") from None
    return found


def sample_rows(folder: Path, samples: int) -> Iterator[SampleRow]:
    """The samples of one benchmark's folder that were scored, each once; none where the files are missing.

    Raises:
        RunFolderError: a broken line.
    """
    seen: set[tuple[str, int]] = set()
    try:
        for row in read_samples(sorted(folder.glob("samples-*.jsonl"))):
            key = (row.problem, row.sample)
            if row.sample < samples and key not in seen:
                seen.add(key)
                yield row
    except ValueError as error:
        raise RunFolderError(str(error)) from None


def by_benchmark(evaluations: Sequence[RecordedEvaluation]) -> dict[str, list[tuple[int, BenchmarkResult]]]:
    """Each benchmark with the (index, result) of the evaluations that have it, in the order of first appearance."""
    found: dict[str, list[tuple[int, BenchmarkResult]]] = {}
    for i, evaluation in enumerate(evaluations):
        for name, result in evaluation.benchmarks.items():
            found.setdefault(name, []).append((i, result))
    return found
