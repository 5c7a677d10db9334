"""What a run tells while it goes on: its folder (metrics, events, evaluations, provenance) and its observers.

``RunFolder`` is the one place that knows how a run folder is written. An observer shows what happens: a live display,
plain lines, a test, nothing.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from magicrl.config.loader import brought_files, config_hash, leaves, live_parts, to_toml
from magicrl.config.paths import counted_from
from magicrl.config.schema import CheckpointConfig, LoggingConfig, TrainConfig
from magicrl.evaluation.provenance import environment_facts, now
from magicrl.evaluation.samples import differences
from magicrl.files import write_atomically
from magicrl.records import StepMetrics
from magicrl_verifiers.references import LIVE, live_text
from magicrl_verifiers.secrets import without_secrets


@runtime_checkable
class RunObserver(Protocol):
    """Is told what happens while it happens. It only watches: nothing it does may change the run."""

    def step(self, metrics: StepMetrics) -> None:
        """One training step is over; ``metrics`` is its line of ``metrics.jsonl``."""
        ...

    def event(self, event: Mapping[str, object]) -> None:
        """Something rarer happened: the line of ``events.jsonl``, with at least ``kind`` and ``message``."""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """Work inside a step or an evaluation: ``done`` of ``total`` units of ``phase`` (e.g. ``rollout``)."""
        ...


class Observers:
    """Tells several observers, in their order."""

    _observers: tuple[RunObserver, ...] = ()

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def step(self, metrics: StepMetrics) -> None:
        for observer in self._observers:
            observer.step(metrics)

    def event(self, event: Mapping[str, object]) -> None:
        for observer in self._observers:
            observer.event(event)

    def progress(self, phase: str, done: int, total: int) -> None:
        for observer in self._observers:
            observer.progress(phase, done, total)


class NullObserver(Observers):
    """Watches nothing."""


SCHEMA_VERSION = 1
_BEFORE_A_RUN = ("config.toml", "rollouts", "evaluations")
"""What a process that was killed before ``run.json`` may leave."""


class RunFolder:
    """The files of one run.

    Attributes:
        resumed: the folder held a run already.
        owner: what the run's checkpoints say they belong to: the hash of the configuration it was begun with.

    Raises:
        ValueError: as ``check_folder``.
    """

    def __init__(self, path: Path, config: TrainConfig, *, resume: bool) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self.evaluations = path / "evaluations"
        self.model = path / "model"
        self.timeline = path / "timeline.jsonl"
        self._metrics = path / "metrics.jsonl"
        self._events = path / "events.jsonl"
        self._run = path / "run.json"
        self.resumed = self._run.exists()
        check_folder(path, config, resume=resume)
        try:
            for folder in (path, self.rollouts, self.evaluations):
                folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "config.toml", _live_note(config) + to_toml(config, path.absolute()))
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error}; choose another --output") from None

        # of a resumed run the one that its checkpoints carry: settings that may change would change the hash
        self.owner = str(self._facts()["config_hash"]) if self.resumed else config_hash(config)

    def _facts(self) -> dict[str, Any]:
        try:
            facts: Any = json.loads(self._run.read_text())
            if not isinstance(facts, dict) or not {"config_hash", "environments"} <= facts.keys():
                raise ValueError("it does not hold what magicrl writes")
            return cast("dict[str, Any]", facts)
        except ValueError as error:
            raise ValueError(
                f"{self._run} is damaged ({error}); put it back from a copy, or start anew with another --output"
            ) from None

    def start(self, config: TrainConfig, facts: Mapping[str, Any]) -> None:
        """Write ``run.json``: versions, machine, git commit, data fingerprints. A resume adds to its history."""
        environment = {**environment_facts(), "threads": facts.get("threads")}
        brought = brought_files(config)
        if brought:
            environment["brought"] = brought
        given = {reference: live_text(reference) for reference in live_parts(config).values()}
        if given:
            environment["live"] = {key: text and without_secrets(text) for key, text in given.items()}
        if self.resumed:
            document = self._facts()
            # one an attempt: only in the first one's environment a resume is bit-identical
            document["environments"].append(environment)
            for ending in ("error", "ended", "learning"):
                document.pop(ending, None)  # of the attempt before
        else:
            document = {
                "schema_version": SCHEMA_VERSION,
                "name": config.run.name,
                "seed": config.run.seed,
                "config_hash": self.owner,
                "environments": [environment],
                **facts,
            }
        document["status"] = "running"
        write_atomically(self._run, json.dumps(document, indent=1))

    def environment_changes(self) -> list[str]:
        """What differs between the first and the present environment; only without any is a resume bit-identical."""
        environments = self._facts()["environments"]
        first, last = environments[0], environments[-1]
        keys = ("versions", "machine", "python", "threads")
        other = [key for key in keys if first.get(key) != last.get(key)]
        files: tuple[dict[str, str], dict[str, str]] = (first.get("brought", {}), last.get("brought", {}))
        changed = [key for key in sorted({*files[0], *files[1]}) if files[0].get(key) != files[1].get(key)]
        return [
            *(f"{key}: was {first.get(key)}, is {last.get(key)}" for key in other),
            *(f"the file of {key} has another text than when the run began" for key in changed),
        ]

    def finish(self, status: str, **facts: Any) -> None:
        """Mark the run as ``finished``, ``stopped`` or ``failed``."""
        document = self._facts()
        # an error may quote a URL with the password in it
        shown = {key: without_secrets(value) if isinstance(value, str) else value for key, value in facts.items()}
        document |= {"status": status, "ended": now(), **shown}
        write_atomically(self._run, json.dumps(document, indent=1))

    def account(self, totals: Mapping[str, float]) -> None:
        """Add what this attempt asked a served judge for to what the attempts before it did."""
        if totals:
            document = self._facts()
            before: Mapping[str, float] = document.get("judge", {})
            document["judge"] = {key: before.get(key, 0) + value for key, value in totals.items()}
            write_atomically(self._run, json.dumps(document, indent=1))

    def step(self, metrics: StepMetrics) -> None:
        """Append a line to ``metrics.jsonl``."""
        row = {"step": metrics.step, "stage": metrics.stage, "values": dict(metrics.values)}
        _append(self._metrics, row)

    def event(self, event: Mapping[str, object]) -> None:
        """Append a line to ``events.jsonl``."""
        _append(self._events, {"time": now(), **event})

    def has_event(self, kind: object, message: object) -> bool:
        """Whether this was told before, by this process or by one that was killed after telling it."""
        if not self._events.exists():
            return False
        rows = [json.loads(line) for line in self._events.read_text().splitlines()]
        return any(row.get("kind") == kind and row.get("message") == message for row in rows)

    def settle(self) -> None:
        """Force what was appended to the disk: no checkpoint may be newer than the lines of its steps."""
        for path in (self._metrics, self._events, self.timeline):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def metrics(self) -> list[StepMetrics]:
        """The steps recorded so far."""
        if not self._metrics.exists():
            return []
        rows = [json.loads(line) for line in self._metrics.read_text().splitlines()]
        return [StepMetrics(step=r["step"], stage=r["stage"], values=r["values"]) for r in rows]

    def rewind(self, step: int) -> list[int]:
        """Drop what was recorded after ``step``, since a resumed run records it again.

        Returns:
            Steps up to ``step`` whose metrics are not there: the file was damaged from outside.
        """
        for path in (self._metrics, self._events, self.timeline):
            if path.exists():
                fields = ("step", "stage", "values") if path == self._metrics else ()
                # a kill may tear a line in the middle of a character
                lines = path.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _step_of(line, fields) <= step]
                write_atomically(path, "".join(line + "\n" for line in kept))
        recorded = {metrics.step for metrics in self.metrics()}
        return [number for number in range(1, step + 1) if number not in recorded]

    def write_evaluation(self, name: str, document: Mapping[str, Any]) -> None:
        write_atomically(self.evaluations / f"{name}.json", json.dumps(document, indent=1))

    def forget_evaluations(self, name: str) -> None:
        """Remove the tests of this name, so that they are made again."""
        for path in self.evaluations.glob(f"{name}-*.json"):
            path.unlink()

    def read_evaluation(self, name: str) -> dict[str, Any] | None:
        path = self.evaluations / f"{name}.json"
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it to run that test again") from None


def _live_note(config: TrainConfig) -> str:
    """The head of a recipe that no command can run: what it names was given in Python."""
    live = sorted(set(live_parts(config).values()))
    if not live:
        return ""
    return (
        f"# Not to be run by a command: {', '.join(live)} was given in Python and is in no file that this recipe "
        "names.\n# What is known of it stands in run.json; the run is resumed from Python, with the same object.\n\n"
    )


def check_folder(path: Path, config: TrainConfig, *, resume: bool) -> None:
    """Refuse a run folder that this run cannot have; nothing is written.

    Raises:
        ValueError: it holds another run and ``resume`` was not asked for, or was begun with other settings; it holds
            somebody else's files; it cannot be written; or another process is writing it.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder; choose another --output")
    if (path / "run.json").exists():
        if not resume:
            raise ValueError(f"{path} already holds a run; add --resume to continue it, or choose another --output")
        _check_same_recipe(path, config)
    elif path.is_dir():
        foreign = sorted(p.name for p in path.iterdir() if p.name not in _BEFORE_A_RUN and not p.name.startswith("."))
        if foreign:
            raise ValueError(
                f"{path} holds other files ({', '.join(foreign[:3])}{' ...' if len(foreign) > 3 else ''}), and a run "
                "needs a folder of its own; choose another --output"
            )
    # the nearest folder that is there: the others will be made in it
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "is not writable" if there.is_dir() else "is a file"
        raise ValueError(f"{path} cannot be written: {there} {reason}; choose another --output")


def _check_same_objects(path: Path, config: TrainConfig) -> None:
    """What was given in Python has to be given again: nothing of the folder can bring it back."""
    try:
        written = leaves(tomllib.loads((path / "config.toml").read_text()))
    except (ValueError, FileNotFoundError):
        return  # told where the recipe is compared
    now = live_parts(config)
    for key, reference in written.items():
        if isinstance(reference, str) and reference.startswith(LIVE) and now.get(key) != reference:
            raise ValueError(
                f"{path} was begun in Python with {key} = {reference}, and this call gives {now.get(key, 'none')}: "
                "resume it from Python with the same object (its text, where it has one, stands in run.json), or "
                "choose another --output"
            )


def _check_same_recipe(path: Path, config: TrainConfig) -> None:
    """Settings that decide results must be as they were; a setting this version added has its default there."""
    _check_same_objects(path, config)
    try:
        tree = tomllib.loads((path / "config.toml").read_text())
        written = TrainConfig.model_validate(tree, context=counted_from(path / "config.toml"))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{path / 'config.toml'} cannot be read as a recipe of this magicrl: {error}\n"
            "resume the run with the version that began it, or choose another --output"
        ) from None
    changed = differences(*(_deciding(each).model_dump(mode="json") for each in (written, config)))
    if changed:
        raise ValueError(
            f"{path} was started with another configuration:\n" + "\n".join(f"  {line}" for line in changed) + "\n"
            "resume it with the same recipe and --set, or choose another --output"
        )


def _append(path: Path, row: Mapping[str, object]) -> None:
    with path.open("a") as file:
        # NaN is no JSON, and other programs read these lines
        file.write(json.dumps(row, allow_nan=False) + "\n")


def _deciding(config: TrainConfig) -> TrainConfig:
    """The configuration without what may change from one attempt to the next: nothing of it decides a result."""
    run = config.run.model_copy(update={"output": None, "expected_minutes": None})
    return config.model_copy(
        update={
            "run": run,
            "verifier": config.verifier.deciding(),
            "logging": LoggingConfig(),
            "checkpoint": CheckpointConfig(),
            "cluster": None,
        }
    )


def _step_of(line: str, fields: Sequence[str] = ()) -> int:
    """The step of a record; beyond every step for one that is no record with these fields."""
    beyond = 1 << 62  # torn by a kill: it is written again
    try:
        document = json.loads(line)
        return int(document.get("step", 0)) if all(field in document for field in fields) else beyond
    except (ValueError, TypeError, AttributeError):
        return beyond
