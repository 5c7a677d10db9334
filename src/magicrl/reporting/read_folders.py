"""Reading the folders of `magicrl train` and `magicrl eval`: typed, or an error that names the file and the place."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from magicrl.evaluation.samples import RESULTS, SCHEMA_VERSION, AskedProblem, EvaluationFolder, SampleRow
from magicrl.records import StepMetrics
from magicrl.training.diagnosis import SUCCESS, Measure, measure_of

RUN_SCHEMA_VERSION = 1


class RunFolderError(ValueError):
    """A run folder that cannot be read; the text names the file, the place in it and the remedy."""


class _Document(BaseModel):
    """A part of an evaluation file. Further keys are left alone: newer versions may write more."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


Document = TypeVar("Document", bound=_Document)


class Interval(_Document):
    """A share or a mean reward (or a difference of them) with its 95 % interval."""

    mean: float
    low: float
    high: float


class TemperatureScore(_Document):
    """The test at one temperature."""

    accuracy: Interval
    reward: Interval | None = None  # where rewards are graded
    problems: int
    samples: int
    length_mean: float | None = None  # tokens
    truncation: float | None = None
    entropy: float | None = None  # nats per token
    # the share that ended by itself and holds a box
    boxed: float | None = Field(default=None, validation_alias=AliasChoices("boxed", "boxed_and_stopped"))
    per_problem: tuple[float | None, ...]  # share of right responses, None where none was judged
    reward_per_problem: tuple[float | None, ...] = ()  # mean reward of its responses, where rewards are graded
    clusters: tuple[int, ...] = ()  # equal for problems of one prompt or template
    pass_at: dict[int, Interval] = Field(default_factory=dict[int, Interval])

    def score(self, measure: Measure) -> Interval | None:
        """Its score in this measure, None where it was not told."""
        return getattr(self, measure.key)

    def by_problem(self, measure: Measure) -> tuple[float | None, ...]:
        """The same by problem."""
        return getattr(self, measure.per_problem)


class SampledResponse(_Document):
    """One recorded response with its verdict; it is shown like a ``SampleRow``."""

    temperature: float
    text: str
    outcome: str
    status: str = ""
    decided_by: str = ""
    reason: str = ""
    extracted: str | None = None
    finish_reason: str = ""
    tokens: int | None = None
    entropy: float | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def correct(self) -> bool:
        return self.outcome == "correct" and not self.truncated


class EvaluatedSample(_Document):
    """One test problem with some of its responses."""

    problem_id: str
    prompt: str
    reference: str | tuple[str, ...]
    responses: tuple[SampledResponse, ...]


class Evaluation(_Document):
    """One file of ``evaluations/``: a test set, before or after training."""

    name: str
    set_name: str = Field(alias="set", default="test")
    model: str = ""
    temperatures: dict[float, TemperatureScore]
    samples: tuple[EvaluatedSample, ...] = ()


class _Answers(_Document):
    mixed: float
    truncated: float
    answered: float | None = None


class _LearningFacts(_Document):
    steps: int
    updates: int
    weights_changed: bool | None = None
    tokens_share: float | None = None
    answers: _Answers | None = None


class Learning(_Document):
    """The verdict on a run (``training.diagnosis``), as ``run.json`` has it."""

    outcome: str
    title: str
    reason: str
    advice: tuple[str, ...] = ()
    facts: _LearningFacts

    @property
    def failed(self) -> bool:
        """The run went to its end and learned nothing."""
        return self.outcome not in SUCCESS


class StageSpan(NamedTuple):
    """The steps of one stage: first and last training step, and T (None if it was not recorded)."""

    stage: int
    first_step: int
    last_step: int
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run as its folder tells it."""

    path: Path
    run: Mapping[str, Any]  # run.json
    config_text: str  # config.toml as written; empty if there is none
    config: Mapping[str, Any]
    metrics: tuple[StepMetrics, ...]  # one a training step, in order
    events: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def name(self) -> str:
        """The recipe's name for the run, else the folder's."""
        return str(self.run.get("name") or self.path.resolve().name)

    @property
    def status(self) -> str:
        return str(self.run.get("status", "unknown"))

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """Versions, machine and commit of each session, the start first."""
        recorded = cast("list[Any]", self.run.get("environments") or [])
        return [cast("Mapping[str, Any]", e) for e in recorded if isinstance(e, Mapping)]

    @property
    def learning(self) -> Learning | None:
        """Did it learn? None while it runs, and for runs of versions that did not say.

        Raises:
            RunFolderError: ``run.json`` holds no such verdict.
        """
        document: object = self.run.get("learning")
        return None if document is None else _validated(Learning, document, f"{self.path / 'run.json'}: learning.")

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the test sets: in the order of the recipe, then those that it does not name."""
        measured = dict.fromkeys(e.set_name for e in self.evaluations if e.name in ("before", "after"))
        data: object = self.config.get("data")
        named: object = cast("Mapping[str, object]", data).get("test") if isinstance(data, Mapping) else None
        order = list(cast("Mapping[str, object]", named)) if isinstance(named, Mapping) else []
        return tuple(sorted(measured, key=lambda name: order.index(name) if name in order else len(order)))

    def evaluation(self, name: str, set_name: str) -> Evaluation | None:
        """The test ``before`` or ``after`` on a set."""
        return next((e for e in self.evaluations if (e.name, e.set_name) == (name, set_name)), None)

    def points(self, *keys: str) -> tuple[tuple[float, float], ...]:
        """(step, value) of the first of ``keys`` that a step has; steps without any are left out."""
        found: list[tuple[float, float]] = []
        for row in self.metrics:
            value = next((v for v in (row.values.get(k) for k in keys) if isinstance(v, (int, float))), None)
            if value is not None and math.isfinite(value):
                found.append((float(row.step), float(value)))
        return tuple(found)

    @property
    def measure(self) -> Measure:
        """What its training steps' success is told in."""
        return measure_of(self.metrics)

    @property
    def stages(self) -> tuple[StageSpan, ...]:
        """The stages that the recorded steps went through."""
        spans: list[StageSpan] = []
        for stage, group in groupby(self.metrics, key=lambda row: row.stage):
            rows = list(group)
            told = (row.values.get("stage/max_tokens") for row in rows)
            limits = [int(limit) for limit in told if isinstance(limit, (int, float))]
            spans.append(StageSpan(stage, rows[0].step, rows[-1].step, limits[-1] if limits else None))
        return tuple(spans)


def read_run(folder: Path) -> RecordedRun:
    """Read the run folder at ``folder``, finished or not.

    ``run.json`` must be there; what a young run has not written yet is empty.

    Raises:
        RunFolderError: no run folder, or a file in it that is corrupt.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder; give the run folder that `magicrl train` wrote")
    if not (folder / "run.json").is_file():
        raise RunFolderError(f"{folder}: no run folder (run.json is missing); `magicrl train` writes it as it starts")
    run = _read_object(folder / "run.json", RUN_SCHEMA_VERSION)
    recipe = folder / "config.toml"
    config_text = _read_text(recipe) if recipe.exists() else ""
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise RunFolderError(f"{recipe}: not valid TOML: {error}") from None
    return RecordedRun(
        path=folder,
        run=run,
        config_text=config_text,
        config=config,
        metrics=read_metrics(folder / "metrics.jsonl"),
        events=tuple(row for _, row in read_lines(folder / "events.jsonl")),
        evaluations=tuple(
            _validated(Evaluation, _read_object(path), f"{path}: ")
            for path in sorted((folder / "evaluations").glob("*.json"))
        ),
    )


def _validated(model: type[Document], document: object, place: str) -> Document:
    """``document`` as the model has it; an error names ``place`` and the field behind it."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunFolderError(f"{place}{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path}: cannot be read: {error}") from None


def _read_object(path: Path, version: int | None = None) -> dict[str, Any]:
    """A JSON object whose ``schema_version`` is at most ``version``."""
    try:
        document: object = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(document, dict):
        raise RunFolderError(f"{path}: expected a JSON object, found {type(document).__name__}")
    table = cast("dict[str, Any]", document)
    told = table.get("schema_version", version)
    if version is not None and (not isinstance(told, int) or told > version):
        raise RunFolderError(f"{path}: schema_version {told!r} is newer than this magicrl reads ({version}); update it")
    return table


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSON Lines file. A last line torn by a kill is left out."""
    if not path.exists():
        return []
    rows: list[tuple[int, dict[str, Any]]] = []
    lines = _read_text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: object = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no line end after it: the writer was killed in the middle
                break
            raise RunFolderError(f"{path}:{number}: not valid JSON: {error.msg}; mend or remove the line") from None
        if not isinstance(row, dict):
            raise RunFolderError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        rows.append((number, cast("dict[str, Any]", row)))
    return rows


def read_metrics(path: Path) -> tuple[StepMetrics, ...]:
    """The steps in order; where a resumed run recorded a step again, what it recorded last."""
    rows: list[StepMetrics] = []
    for number, row in read_lines(path):
        step, stage, values = row.get("step"), row.get("stage"), row.get("values")
        if not isinstance(step, int) or not isinstance(stage, int) or not isinstance(values, dict):
            raise RunFolderError(f"{path}:{number}: a line needs step and stage (whole numbers) and values (a table)")
        while rows and rows[-1].step >= step:
            rows.pop()
        rows.append(StepMetrics(step=step, stage=stage, values=cast("dict[str, float | int | str | None]", values)))
    return tuple(rows)


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


class BenchmarkResult(_Document):
    """One benchmark of ``results.json``."""

    title: str = ""
    problems: int
    samples: int
    accuracy: Interval
    reward: Interval | None = None
    pass_at: dict[int, Interval] = Field(default_factory=dict[int, Interval])
    majority_at: dict[int, Interval] = Field(default_factory=dict[int, Interval])
    length: Interval
    truncation: Interval
    not_judged: int = 0
    scored_sha256: str = ""
    whole_set: bool = False
    settings: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    table13: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    scaling: Scaling = Scaling()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvaluation:
    """An evaluation as its folder tells it: its benchmarks by name, in the order of the results."""

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
    if not path.exists():
        raise RunFolderError(
            f"{path}: no results yet; finish the evaluation with the same magicrl eval command, or score what its "
            f"shards have with magicrl eval --merge --output {folder}"
        )
    document = _read_object(path, SCHEMA_VERSION)
    results: object = document.get("benchmarks")
    if not isinstance(results, dict):
        raise RunFolderError(f"{path}: no results of magicrl eval (no table of benchmarks)")
    named = cast("dict[str, Any]", results).items()
    benchmarks = {name: _validated(BenchmarkResult, result, f"{path}: ") for name, result in named}
    return RecordedEvaluation(path=folder, written=str(document.get("written", "")), benchmarks=benchmarks)


def evaluated(folder: Path, samples: int) -> tuple[list[AskedProblem], list[SampleRow]]:
    """One benchmark's folder: its problems, and the samples that were scored, each once; empty where files are missing.

    Raises:
        RunFolderError: a broken line.
    """
    try:
        return EvaluationFolder(folder).problems(), EvaluationFolder(folder).rows(samples)
    except ValueError as error:
        raise RunFolderError(str(error)) from None


def by_benchmark(evaluations: Sequence[RecordedEvaluation]) -> dict[str, list[tuple[int, BenchmarkResult]]]:
    """Each benchmark with the (index, result) of the evaluations that have it, in the order of first appearance."""
    found: dict[str, list[tuple[int, BenchmarkResult]]] = {}
    for i, evaluation in enumerate(evaluations):
        for name, result in evaluation.benchmarks.items():
            found.setdefault(name, []).append((i, result))
    return found
