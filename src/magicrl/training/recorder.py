"""Records of a run: its folder (metrics, events, evaluations, provenance), and its observers.

``RunFolder`` is the only code that writes a run folder. An observer displays the run: a live display, plain lines, a
test, nothing.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from magicrl.config.loader import config_hash, custom_files, leaves, live_parts, to_toml
from magicrl.config.paths import counted_from
from magicrl.config.schema import CheckpointConfig, LoggingConfig, TrainConfig
from magicrl.evaluation.provenance import environment_facts, now
from magicrl.evaluation.samples import differences
from magicrl.files import named_errors, unwritable, write_atomically
from magicrl.models.model_files import find_model, weights_fingerprint
from magicrl.records import StepMetrics
from magicrl_verifiers.references import live_text
from magicrl_verifiers.secrets import without_secrets
from magicrl_verifiers.several import live_names


@runtime_checkable
class RunObserver(Protocol):
    """Receives run events. Observers must not change the run."""

    def step(self, metrics: StepMetrics) -> None:
        """Handle the end of a training step; ``metrics`` is its line of ``metrics.jsonl``."""
        ...

    def event(self, event: Mapping[str, object]) -> None:
        """Handle another event: a line of ``events.jsonl`` with at least ``kind`` and ``message``."""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """Handle progress inside a step or an evaluation: ``done`` of ``total`` units of ``phase`` (``rollout``)."""
        ...


class Observers:
    """Several observers, called in order."""

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
    """An observer that does nothing."""


SCHEMA_VERSION = 1
_BEFORE_A_RUN = ("config.toml", "rollouts", "evaluations")
"""Files of a process that was killed before it wrote ``run.json``."""


class RunFolder:
    """Files of one run.

    Attributes:
        resumed: Whether the folder held a run already.
        owner: Owner that the run's checkpoints name: the hash of the configuration it was started with.

    Args:
        held: Called before records are written. It raises ``OSError`` if the folder is another one by now.

    Raises:
        ValueError: As ``check_folder``.
    """

    def __init__(
        self, path: Path, config: TrainConfig, *, resume: bool, held: Callable[[], None] = lambda: None
    ) -> None:
        self._held = held
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
            raise unwritable(path, error) from None

        # A resumed run keeps the hash of its checkpoints: settings that may change would change it.
        self.owner = str(self._facts()["config_hash"]) if self.resumed else config_hash(config)

    def _facts(self) -> dict[str, Any]:
        try:
            facts: Any = json.loads(self._run.read_text())
            if not isinstance(facts, dict) or not {"config_hash", "environments"} <= facts.keys():
                raise ValueError("it does not hold what magicrl writes")
            return cast("dict[str, Any]", facts)
        except ValueError as error:
            raise ValueError(
                f"{self._run} is damaged ({error}); restore it from a copy, or start a new run with another --output"
            ) from None

    def start(self, config: TrainConfig, facts: Mapping[str, Any]) -> None:
        """Write ``run.json``: versions, machine, git commit, data fingerprints. A resume extends its history."""
        known = ("threads", "kernels", "start_weights", "start_files")
        environment = {**environment_facts(), **{name: facts.get(name) for name in known}}
        reference, teacher = config.reference, config.teacher
        frozen = {
            "reference_weights": reference.model if reference.mode != "none" else None,
            "teacher_weights": None if teacher is None else teacher.local_model,
        }
        environment |= {key: weights_fingerprint(find_model(model)) for key, model in frozen.items() if model}
        custom = custom_files(config)
        if custom:
            environment["custom"] = custom
        live = [name for reference in live_parts(config).values() for name in live_names(reference)]
        given = {name: live_text(name) for name in live}
        if given:
            environment["live"] = {key: text and without_secrets(text) for key, text in given.items()}
        if self.resumed:
            document = self._facts()
            if changed := _other_task(document, environment, facts, config):
                raise ValueError(
                    f"{self.path}: since the run started, {' and '.join(changed)} changed, so results before and after "
                    "the resume could not be compared; restore them, or start a new run with another --output"
                )
            # One environment per attempt: only in the first one's environment is a resume bit-identical.
            document["environments"].append(environment)
            for ending in ("error", "ended", "learning"):
                document.pop(ending, None)  # of the previous attempt
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
        """Return the differences between the first and current environment. Without any, a resume is bit-identical."""
        environments = self._facts()["environments"]
        first, last = environments[0], environments[-1]
        keys = ("versions", "machine", "python", "threads", "kernels", "start_weights")
        # an environment of an earlier version lacks some
        other = [key for key in keys if first.get(key, last.get(key)) != last.get(key)]
        return [
            *(f"{key}: was {first.get(key)}, is {last.get(key)}" for key in other),
            *(f"the file of {key} has changed since the run started" for key in _changed_files(first, last)),
        ]

    def finish(self, status: str, **facts: Any) -> None:
        """Mark the run as ``finished``, ``stopped`` or ``failed``."""
        self._held()
        document = self._facts()
        # An error may quote a URL that contains a password.
        shown = {key: without_secrets(value) if isinstance(value, str) else value for key, value in facts.items()}
        document |= {"status": status, "ended": now(), **shown}
        write_atomically(self._run, json.dumps(document, indent=1))

    def account(self, totals: Mapping[str, float]) -> None:
        """Add this attempt's usage of a served judge to that of earlier attempts."""
        if totals:
            self._held()
            document = self._facts()
            before: Mapping[str, float] = document.get("judge", {})
            document["judge"] = {key: before.get(key, 0) + value for key, value in totals.items()}
            write_atomically(self._run, json.dumps(document, indent=1))

    def step(self, metrics: StepMetrics) -> None:
        """Append a line to ``metrics.jsonl``."""
        self._held()
        row = {"step": metrics.step, "stage": metrics.stage, "values": dict(metrics.values)}
        _append(self._metrics, row)

    def event(self, event: Mapping[str, object]) -> None:
        """Append a line to ``events.jsonl``."""
        self._held()
        _append(self._events, {"time": now(), **event})

    def has_event(self, kind: object, message: object) -> bool:
        """Return whether the log has this event, from this process or from one that was killed."""
        if not self._events.exists():
            return False
        rows = [json.loads(line) for line in self._events.read_text().splitlines()]
        return any(row.get("kind") == kind and row.get("message") == message for row in rows)

    def settle(self) -> None:
        """Flush the appended lines to disk: no checkpoint may be newer than the lines of its steps."""
        for path in (self._metrics, self._events, self.timeline):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def metrics(self) -> list[StepMetrics]:
        """Return the steps recorded so far."""
        if not self._metrics.exists():
            return []
        rows = [json.loads(line) for line in self._metrics.read_text().splitlines()]
        return [StepMetrics(step=r["step"], stage=r["stage"], values=r["values"]) for r in rows]

    def rewind(self, step: int) -> list[int]:
        """Drop the records after ``step``, since a resumed run writes them again.

        Returns:
            Steps up to ``step`` without metrics, where the file was damaged from outside.
        """
        for path in (self._metrics, self._events, self.timeline):
            if path.exists():
                fields = ("step", "stage", "values") if path == self._metrics else ()
                # A kill may truncate a line in the middle of a character.
                lines = path.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _step_of(line, fields) <= step]
                write_atomically(path, "".join(line + "\n" for line in kept))
        for path in (*self.rollouts.glob("step-*.parquet"), *self.evaluations.glob("step-*.json")):
            number = path.stem.split("-")[1]
            if number.isdigit() and int(number) > step:
                path.unlink()
        recorded = {metrics.step for metrics in self.metrics()}
        return [number for number in range(1, step + 1) if number not in recorded]

    def write_evaluation(self, name: str, document: Mapping[str, Any]) -> None:
        self._held()
        write_atomically(self.evaluations / f"{name}.json", json.dumps(document, indent=1))

    def read_evaluation(self, name: str) -> dict[str, Any] | None:
        path = self.evaluations / f"{name}.json"
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it to run that evaluation again") from None


def _live_note(config: TrainConfig) -> str:
    """Return the header of a recipe that no command can run, since it names Python objects."""
    live = sorted(set(live_parts(config).values()))
    if not live:
        return ""
    return (
        f"# No command can run this recipe: {', '.join(live)} was passed in Python and is in no file that it names.\n"
        "# Its text, where it has one, is in run.json. Resume the run from Python, with the same object.\n\n"
    )


_GRADES = re.compile(r"\.(verifier|environment)(\.\d+)?$")
"""Settings whose files decide what a response is worth."""


def _changed_files(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """Return the settings whose custom files differ between two environments."""
    # The name in version 0.1.
    files: list[dict[str, str]] = [one.get("custom", one.get("brought", {})) for one in (first, last)]
    # Version 0.2 did not record modules.
    return [key for key in sorted(files[0].keys() & files[1].keys()) if files[0][key] != files[1][key]]


def _other_task(
    document: Mapping[str, Any], environment: Mapping[str, Any], facts: Mapping[str, Any], config: TrainConfig
) -> list[str]:
    """Return what a resume changes of the task: problems, files that grade them, and the models next to the policy."""
    first, before, now = document["environments"][0], document.get("data", {}), facts.get("data", {})
    # a run of version 0.2 recorded the checksum with the folders of custom files
    known = {name: {one.get("sha256"), one.get("sha256_with_folders")} for name, one in now.items()}
    names = [name for name in before if name in known and before[name]["sha256"] not in known[name]]
    found = [f"the problems of data.{name.replace('/', '.')}" for name in names]
    found += [f"the file of {key}" for key in _changed_files(first, environment) if _GRADES.search(key)]
    models = {
        "start_files": "the configuration, tokenizer or chat template of the start model",
        "reference_weights": "the weights of reference.model",
        "teacher_weights": "the weights of teacher.model",
    }
    # Checkpoints hold all weights of the policy, but with LoRA only those of the adapters.
    if config.model.lora is not None:
        models["start_weights"] = "the weights of the start model, the base of the adapters,"
    elif config.reference.mode != "none" and config.reference.model is None:
        models["start_weights"] = "the weights of the start model, the reference,"
    # an environment of an earlier version lacks some
    found += [text for key, text in models.items() if first.get(key, environment.get(key)) != environment.get(key)]
    return found


def check_folder(path: Path, config: TrainConfig, *, resume: bool) -> None:
    """Refuse a run folder that this run cannot use. Nothing is written.

    Raises:
        ValueError: The folder holds another run without ``resume``, a run with other settings, or other files; it
            cannot be written; or another process is writing it.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder; choose another --output")
    if (path / "run.json").exists():
        if not resume:
            raise ValueError(f"{path} already holds a run; add --resume to continue it, or choose another --output")
        # The settings that decide results must be equal. A setting added since then has its default in the old recipe.
        _check_same_objects(path, config)
        try:
            tree = tomllib.loads((path / "config.toml").read_text())
            written = TrainConfig.model_validate(tree, context=counted_from(path / "config.toml"))
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(
                f"{path / 'config.toml'} cannot be read as a recipe of this magicrl: {error}\n"
                "resume the run with the version that started it, or choose another --output"
            ) from None
        changed = differences(*(_deciding(each).model_dump(mode="json") for each in (written, config)))
        if changed:
            raise ValueError(
                f"{path} was started with another configuration:\n" + "\n".join(f"  {line}" for line in changed) + "\n"
                "resume it with the same recipe and --set, or choose another --output"
            )
    elif path.is_dir():
        # With results in it, a folder is another run's: this run would take them for its own.
        foreign = sorted(
            p.name
            for p in path.iterdir()
            if not p.name.startswith(".") and (p.name not in _BEFORE_A_RUN or (p.is_dir() and any(p.iterdir())))
        )
        if foreign:
            raise ValueError(
                f"{path} holds other files ({', '.join(foreign[:3])}{' ...' if len(foreign) > 3 else ''}), and a run "
                "needs a separate folder; choose another --output"
            )
    # The nearest existing folder: the others will be created in it.
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "is not writable" if there.is_dir() else "is a file"
        raise ValueError(f"{path} cannot be written: {there} {reason}; choose another --output")


def _check_same_objects(path: Path, config: TrainConfig) -> None:
    """Require the objects that were passed in Python again: the folder cannot restore them."""
    try:
        written = leaves(tomllib.loads((path / "config.toml").read_text()))
    except (ValueError, FileNotFoundError):
        return  # reported where the recipe is compared
    now = live_parts(config)
    for key, reference in written.items():
        if isinstance(reference, str) and live_names(reference) and now.get(key) != reference:
            raise ValueError(
                f"{path} was started in Python with {key} = {reference}, but this call passes {now.get(key, 'none')}: "
                "resume it from Python with the same object (its text, where it has one, is in run.json), or "
                "choose another --output"
            )


def _append(path: Path, row: Mapping[str, object]) -> None:
    with named_errors(path), path.open("a") as file:
        # JSON has no NaN, and other programs read these lines.
        file.write(json.dumps(row, allow_nan=False) + "\n")


def _deciding(config: TrainConfig) -> TrainConfig:
    """Return the configuration without settings that may change between attempts and decide no result."""
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
    """Return the step of a record, or a huge number for a line that is no record with these fields."""
    beyond = 1 << 62  # truncated by a kill, so written again
    try:
        document = json.loads(line)
        return int(document.get("step", 0)) if all(field in document for field in fields) else beyond
    except (ValueError, TypeError, AttributeError):
        return beyond
