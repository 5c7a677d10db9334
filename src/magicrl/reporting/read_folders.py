"""Readers of the folders that `magicrl train` and `magicrl eval` write. An error names the file and the place in it."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from magicrl.evaluation.samples import RESULTS, SCHEMA_VERSION, EvaluationFolder, SampleRow
from magicrl.evaluation.statistics import Interval
from magicrl.records import Problem, StepMetrics
from magicrl.training.diagnosis import SUCCESS, Measure, measure_of

RUN_SCHEMA_VERSION = 1
LAST_STEPS = 5
"""Number of steps that the final value of a metric is averaged over."""


class RunFolderError(ValueError):
    """A folder that cannot be read. The text names the file, the place in it and the remedy."""


class _Document(BaseModel):
    """Base of what is read from a file. Unknown keys are ignored, since newer versions may write more."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


Document = TypeVar("Document", bound=_Document)


class TemperatureScore(_Document):
    """The score of a test set at one temperature."""

    accuracy: Interval
    reward: Interval | None = None  # only where rewards are graded
    problems: int
    samples: int  # per problem
    length_mean: float | None = None  # tokens
    truncation: float | None = None
    entropy: float | None = None  # nats per token
    # share of the responses that ended without truncation and have an answer to judge
    answered_and_stopped: float | None = Field(
        default=None, validation_alias=AliasChoices("answered_and_stopped", "boxed_and_stopped", "boxed")
    )
    per_problem: tuple[float | None, ...]  # share of correct responses, None where none was judged
    reward_per_problem: tuple[float | None, ...] = ()  # mean reward, where rewards are graded
    clusters: tuple[int, ...] = ()  # equal for problems of one prompt or template
    pass_at: dict[int, Interval] = Field(default_factory=dict[int, Interval])

    def score(self, measure: Measure) -> Interval | None:
        """Return the score in this measure, None where it was not recorded."""
        return getattr(self, measure.key)

    def by_problem(self, measure: Measure) -> tuple[float | None, ...]:
        """Return the scores of the problems in this measure."""
        return getattr(self, measure.per_problem)


def _by_temperature(responses: object) -> object:
    """Turn the list of responses of a file into rows of samples by temperature."""
    if not isinstance(responses, list):
        return responses
    found: dict[object, list[dict[str, Any]]] = {}
    for response in cast("list[dict[str, Any]]", responses):
        # fields that only rows of `magicrl eval` have, or that old runs lack
        row = {"status": "", "decided_by": "", "reason": "", "finish_reason": "", "tokens": 0} | response
        row |= {"problem": "", "sample": 0, "seconds": 0.0}
        found.setdefault(response.get("temperature"), []).append(row)
    return found


class EvaluatedProblem(_Document):
    """A test problem with some of its responses."""

    problem_id: str
    prompt: str
    references: str | tuple[str, ...] = Field(validation_alias=AliasChoices("reference", "gold"))
    responses: Annotated[dict[float, tuple[SampleRow, ...]], BeforeValidator(_by_temperature)]  # by temperature


class SetEvaluation(_Document):
    """One file of ``evaluations/``: the scores of a test set, before or after training."""

    name: str
    set_name: str = Field(alias="set", default="test")
    model: str = ""
    max_tokens: int | None = None  # per response; None where it was not recorded
    temperatures: dict[float, TemperatureScore]
    samples: tuple[EvaluatedProblem, ...] = ()


class Learning(_Document):
    """The verdict on a run in ``run.json``, written by ``training.diagnosis.Conclusion.as_dict``."""

    outcome: str
    title: str
    reason: str
    advice: tuple[str, ...] = ()
    facts: dict[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the run reached its end without learning anything."""
        return self.outcome not in SUCCESS


def lost_writer(folder: Path) -> int | None:
    """Return the process that last held the run folder's lock if it is not on this machine, else None."""
    try:
        writer = int((folder / ".lock").read_text())
    except (OSError, ValueError):
        return None
    return None if Path(f"/proc/{writer}").exists() else writer


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """The contents of a run folder."""

    path: Path
    run: Mapping[str, Any]  # run.json
    config_text: str  # config.toml as written; empty if there is none
    config: Mapping[str, Any]
    metrics: tuple[StepMetrics, ...]  # one per training step, in order
    events: tuple[Mapping[str, Any], ...]
    evaluations: tuple[SetEvaluation, ...]

    @property
    def name(self) -> str:
        """The recipe's name for the run, else the folder's name."""
        return str(self.run.get("name") or self.path.resolve().name)

    @property
    def status(self) -> str:
        return str(self.run.get("status", "unknown"))

    @property
    def shown_status(self) -> str:
        """The status, or ``killed?`` where the process of a running run is not on this machine."""
        return "killed?" if self.status == "running" and lost_writer(self.path) is not None else self.status

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """Versions, machine and commit of each session, the first session first."""
        recorded = cast("list[Any]", self.run.get("environments") or [])
        return [cast("Mapping[str, Any]", e) for e in recorded if isinstance(e, Mapping)]

    @property
    def devices(self) -> int:
        """Number of accelerators (or CPU machines) of the run; 1 where it was not recorded."""
        recorded = self.run.get("devices")
        return recorded if isinstance(recorded, int) and recorded > 0 else 1

    @property
    def learning(self) -> Learning | None:
        """The verdict on the run; None while it is running, and for runs of versions without a verdict.

        Raises:
            RunFolderError: ``run.json`` has an invalid verdict.
        """
        document: object = self.run.get("learning")
        return None if document is None else _validated(Learning, document, f"{self.path / 'run.json'}: learning.")

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the test sets: those of the recipe in its order, then the others."""
        measured = dict.fromkeys(e.set_name for e in self.evaluations if e.name in ("before", "after"))
        data: object = self.config.get("data")
        named: object = cast("Mapping[str, object]", data).get("test") if isinstance(data, Mapping) else None
        order = list(cast("Mapping[str, object]", named)) if isinstance(named, Mapping) else []
        return tuple(sorted(measured, key=lambda name: order.index(name) if name in order else len(order)))

    def evaluation(self, name: str, set_name: str) -> SetEvaluation | None:
        """Return the evaluation of a test set ``before`` or ``after`` training."""
        return next((e for e in self.evaluations if (e.name, e.set_name) == (name, set_name)), None)

    def points(self, *keys: str) -> tuple[tuple[float, float], ...]:
        """Return (step, value) of the first of ``keys`` that a step has. Steps without any are left out."""
        found: list[tuple[float, float]] = []
        for row in self.metrics:
            value = next((v for v in (row.values.get(k) for k in keys) if isinstance(v, (int, float))), None)
            if value is not None and math.isfinite(value):
                found.append((float(row.step), float(value)))
        return tuple(found)

    def last_mean(self, *keys: str) -> float | None:
        """Return the mean of a metric over the last ``LAST_STEPS`` steps that have it, None where no step has it."""
        values = [value for _, value in self.points(*keys)[-LAST_STEPS:]]
        return sum(values) / len(values) if values else None

    @property
    def training_seconds(self) -> float | None:
        """Sum of the wall clocks of the training steps of all sessions; None where no step recorded it."""
        steps = self.points("time/step")
        return sum(seconds for _, seconds in steps) if steps else None

    @property
    def measure(self) -> Measure:
        """The measure of success in training: accuracy or mean reward."""
        return measure_of(self.metrics)

    def training_temperature(self, *evaluations: SetEvaluation) -> float | None:
        """Return the temperature of training's end, if an evaluation has it; else the highest that one has."""
        measured = {t for evaluation in evaluations for t in evaluation.temperatures}
        stages = cast("list[Mapping[str, Any]]", self.config.get("stages") or [])
        rollout = cast("Mapping[str, Any]", self.config.get("rollout") or {})
        trained: float = {"temperature": 1.0, **rollout, **(stages[-1] if stages else {})}["temperature"]
        return trained if trained in measured else max(measured, default=None)

    @property
    def stages(self) -> list[tuple[int, int, int, int | None]]:
        """Number, first and last step, and T (None if it was not recorded) of each stage of the recorded steps."""
        spans: list[tuple[int, int, int, int | None]] = []
        for stage, group in groupby(self.metrics, key=lambda row: row.stage):
            rows = list(group)
            limits = [int(t) for row in rows if isinstance(t := row.values.get("stage/max_tokens"), (int, float))]
            spans.append((stage, rows[0].step, rows[-1].step, limits[-1] if limits else None))
        return spans


def is_run(names: Iterable[str]) -> bool:
    """Return whether these are the files of a run folder, of which a young run has only recipe and lock."""
    return "run.json" in (found := set(names)) or {"config.toml", ".lock"} <= found


def read_run(folder: Path) -> RecordedRun:
    """Read the run folder at ``folder``, whether the run has finished or not.

    Whatever a young run has not written yet is empty: while its initial model is trained it has no ``run.json``.

    Raises:
        RunFolderError: not a run folder, or a file in it is corrupt.
    """
    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "no such folder"
        raise RunFolderError(f"{folder}: {what}; give the run folder that `magicrl train` wrote")
    recipe = folder / "config.toml"
    if not is_run(path.name for path in folder.iterdir()):
        below = ", ".join(str(path.parent) for path in sorted(folder.glob("*/run.json"))[:4])
        raise RunFolderError(
            f"{folder}: no run folder (run.json is missing); "
            + (f"give a run in it: {below}" if below else "`magicrl train` writes it as it starts")
        )
    young = not (folder / "run.json").exists()
    run = {} if young else _read_object(folder / "run.json", RUN_SCHEMA_VERSION)
    config_text = _read_text(recipe) if recipe.exists() else ""
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise RunFolderError(f"{recipe}: not valid TOML: {error}") from None
    if young:
        started = datetime.fromtimestamp(recipe.stat().st_mtime, UTC).isoformat(timespec="seconds")
        known = {key: config.get("run", {}).get(key) for key in ("name", "seed")}
        run = {**known, "status": "running", "environments": [{"started": started}]}
    return RecordedRun(
        path=folder,
        run=run,
        config_text=config_text,
        config=config,
        metrics=read_metrics(folder / "metrics.jsonl"),
        events=tuple(row for _, row in read_lines(folder / "events.jsonl")),
        evaluations=tuple(
            _validated(SetEvaluation, _read_object(path), f"{path}: ")
            for path in sorted((folder / "evaluations").glob("*.json"))
        ),
    )


def _validated(model: type[Document], document: object, place: str) -> Document:
    """Return ``document`` as ``model``. An error names ``place`` and the invalid field."""
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
    """Read a JSON object whose ``schema_version`` is at most ``version``."""
    try:
        document: object = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(document, dict):
        raise RunFolderError(f"{path}: expected a JSON object, found {type(document).__name__}")
    table = cast("dict[str, Any]", document)
    found = table.get("schema_version", version)
    if version is not None and (not isinstance(found, int) or found > version):
        raise RunFolderError(
            f"{path}: schema_version {found!r} is newer than this magicrl reads ({version}); update magicrl"
        )
    return table


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read line numbers and objects of a JSON Lines file, without an incomplete last line."""
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
            if number == len(lines):  # without a line end: the process was killed while it wrote the line
                break
            raise RunFolderError(f"{path}:{number}: not valid JSON: {error.msg}; repair or remove the line") from None
        if not isinstance(row, dict):
            raise RunFolderError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        rows.append((number, cast("dict[str, Any]", row)))
    return rows


def read_metrics(path: Path) -> tuple[StepMetrics, ...]:
    """Read the steps in order. Where a resumed run recorded a step again, the later record counts."""
    rows: list[StepMetrics] = []
    for number, row in read_lines(path):
        step, stage, values = row.get("step"), row.get("stage"), row.get("values")
        if not isinstance(step, int) or not isinstance(stage, int) or not isinstance(values, dict):
            raise RunFolderError(f"{path}:{number}: a line needs step and stage (whole numbers) and values (a table)")
        while rows and rows[-1].step >= step:
            rows.pop()
        rows.append(StepMetrics(step=step, stage=stage, values=cast("dict[str, float | int | str | None]", values)))
    return tuple(rows)


class BenchmarkResult(_Document):
    """The result of one benchmark in ``results.json``, written by ``evaluation.results.result_of``."""

    title: str = ""
    problems: int
    samples: int  # per problem
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
    scaling: Mapping[str, Any] = Field(default_factory=dict[str, Any])  # curves of test-time scaling


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvaluation:
    """The contents of an evaluation folder: its benchmarks by name, in the order of the results."""

    path: Path
    written: str
    benchmarks: Mapping[str, BenchmarkResult]

    @property
    def model(self) -> str:
        """The evaluated model as the command named it."""
        return next((str(b.model["model"]) for b in self.benchmarks.values() if b.model.get("model")), self.path.name)


def read_evaluation_folder(folder: Path) -> RecordedEvaluation:
    """Read ``results.json`` of an evaluation folder.

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


def scored_samples(folder: Path, samples: int) -> tuple[list[Problem], list[SampleRow]]:
    """Read one benchmark's problems and its scored samples, each once. Both are empty where the files are missing.

    Raises:
        RunFolderError: a line is corrupt.
    """
    try:
        return EvaluationFolder(folder).problems(), EvaluationFolder(folder).rows(samples)
    except ValueError as error:
        raise RunFolderError(str(error)) from None


def by_benchmark(evaluations: Sequence[RecordedEvaluation]) -> dict[str, list[tuple[int, BenchmarkResult]]]:
    """Return by benchmark the (index, result) of the evaluations that have it, in the order of first appearance."""
    found: dict[str, list[tuple[int, BenchmarkResult]]] = {}
    for i, evaluation in enumerate(evaluations):
        for name, result in evaluation.benchmarks.items():
            found.setdefault(name, []).append((i, result))
    return found
