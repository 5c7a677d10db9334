"""Reading the folders of `magicrl train` and `magicrl eval`: typed, or an error that names the file and the place."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from magicrl.evaluation.samples import RESULTS, SCHEMA_VERSION, SampleRow, read_samples
from magicrl.records import StepMetrics
from magicrl.training.diagnosis import SUCCESS

RUN_SCHEMA_VERSION = 1


class RunFolderError(ValueError):
    """A run folder that cannot be read; the text names the file, the place in it and the remedy."""


class _Document(BaseModel):
    """A part of an evaluation file. Further keys are left alone: newer versions may write more."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


Document = TypeVar("Document", bound=_Document)


class Interval(_Document):
    """A share (or a difference of shares) with its 95 % interval."""

    mean: float
    low: float
    high: float


class TemperatureScore(_Document):
    """The test at one temperature.

    ``entropy`` in nats per token, ``length_mean`` in tokens; ``boxed``: the share that ended by itself and holds
    a box; ``per_problem``: each problem's share of right responses, None where none was judged; ``clusters``: equal
    numbers for problems of one prompt or template (runs of earlier versions do not tell them).
    """

    accuracy: Interval
    problems: int
    samples: int
    length_mean: float | None = None
    truncation: float | None = None
    entropy: float | None = None
    boxed: float | None = Field(default=None, validation_alias=AliasChoices("boxed", "boxed_and_stopped"))
    per_problem: tuple[float | None, ...] = ()
    clusters: tuple[int, ...] = ()
    pass_at: dict[int, Interval] = Field(default_factory=dict[int, Interval])


class SampledResponse(_Document):
    """One recorded response with its verdict."""

    temperature: float
    text: str
    outcome: str
    status: str = ""
    decided_by: str = ""
    extracted: str | None = None
    finish_reason: str = ""
    tokens: int | None = None


class EvaluatedSample(_Document):
    """One test problem with some of its responses."""

    problem_id: str
    prompt: str
    gold: str | tuple[str, ...]
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
    """The verdict on a run (``training.conclusion``), as ``run.json`` has it."""

    outcome: str
    title: str
    reason: str
    advice: tuple[str, ...] = ()
    facts: _LearningFacts

    @property
    def failed(self) -> bool:
        """The run went to its end and learned nothing."""
        return self.outcome not in SUCCESS


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpan:
    """The steps of one stage: first and last training step, and T (None if it was not recorded)."""

    stage: int
    first_step: int
    last_step: int
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run as its folder tells it.

    Attributes:
        path: the folder.
        run: ``run.json``.
        config_text: ``config.toml`` as written; empty if there is none.
        config: the same, parsed.
        metrics: one a training step, in order.
        events: one an event, in order.
        evaluations: the tests.
    """

    path: Path
    run: Mapping[str, Any]
    config_text: str
    config: Mapping[str, Any]
    metrics: tuple[StepMetrics, ...]
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
    def learning(self) -> Learning | None:
        """Did it learn? None while it runs, and for runs of versions that did not say.

        Raises:
            RunFolderError: ``run.json`` holds no such verdict.
        """
        document: object = self.run.get("learning")
        if document is None:
            return None
        return _validated(Learning, document, f"{self.path / 'run.json'}: learning.")

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
            if value is not None and value == value and abs(value) != float("inf"):
                found.append((float(row.step), float(value)))
        return tuple(found)

    @property
    def stages(self) -> tuple[StageSpan, ...]:
        """The stages that the recorded steps went through."""
        spans: list[StageSpan] = []
        for stage, group in groupby(self.metrics, key=lambda row: row.stage):
            rows = list(group)
            told = (row.values.get("stage/max_tokens") for row in rows)
            limits = [int(limit) for limit in told if isinstance(limit, (int, float))]
            last = limits[-1] if limits else None
            spans.append(StageSpan(stage=stage, first_step=rows[0].step, last_step=rows[-1].step, max_tokens=last))
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
    run = _read_object(folder / "run.json")
    version = run.get("schema_version", RUN_SCHEMA_VERSION)
    if not isinstance(version, int) or version > RUN_SCHEMA_VERSION:
        raise RunFolderError(
            f"{folder / 'run.json'}: schema_version {version!r} is newer than this magicrl reads "
            f"({RUN_SCHEMA_VERSION}); update magicrl"
        )
    config_text, config = _read_config(folder / "config.toml")
    return RecordedRun(
        path=folder,
        run=run,
        config_text=config_text,
        config=config,
        metrics=_read_metrics(folder / "metrics.jsonl"),
        events=tuple(row for _, row in read_lines(folder / "events.jsonl")),
        evaluations=tuple(_read_evaluation(path) for path in sorted((folder / "evaluations").glob("*.json"))),
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


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document: object = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(document, dict):
        raise RunFolderError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return cast("dict[str, Any]", document)


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    if not path.exists():
        return "", {}
    text = _read_text(path)
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RunFolderError(f"{path}: not valid TOML: {error}") from None


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSON Lines file. A last line torn by a kill is left out."""
    if not path.exists():
        return []
    rows: list[tuple[int, dict[str, Any]]] = []
    text = _read_text(path)
    lines = text.split("\n")
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


def _read_metrics(path: Path) -> tuple[StepMetrics, ...]:
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


def _read_evaluation(path: Path) -> Evaluation:
    return _validated(Evaluation, _read_object(path), f"{path}: ")


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
            str(name): _validated(BenchmarkResult, result, f"{path}: ")
            for name, result in cast("Mapping[str, Any]", document["benchmarks"]).items()
        }
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
