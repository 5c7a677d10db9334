"""A training step of a recorded run made again, bit for bit, and once more under other settings.

The run's files are read and never written: the step is made in a folder of its own, from the newest kept checkpoint
before it, or from the start. Whether it came out the same is told from hashes of what the run has recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq
import torch

from magicrl.config.errors import RecipeError
from magicrl.config.loader import live_parts, load_train_recipe, to_toml
from magicrl.config.schema import CheckpointConfig, LoggingConfig, StartConfig, TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.files import write_atomically
from magicrl.models.loading import LoadedModel
from magicrl.records import Problem, ScoredGroup, StepMetrics, TrainBatch, Verdict
from magicrl.rollout.recording import ReplayEngine
from magicrl.training.assemble import LocalParts, make_reference
from magicrl.training.attribution import Update, of_state, own_part
from magicrl.training.checkpoint import Checkpoint, checkpoint_folders, join_state, load_checkpoint, step_of
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings, entropy_controller
from magicrl.training.protocols import Controls, TrainingStopped, UpdateMetrics
from magicrl.training.recorder import NullObserver
from magicrl.training.session import StopRequest, open_session
from magicrl.training.start_checks import check_run
from magicrl.training.step import Parts, StepResult, Trainer

CLOCK = ("time/", "idle/", "speed/", "memory/", "tokens/per_second", "verify/seconds")
"""Metrics that the clock or the machine decides, by how their keys begin: no repetition has them again."""
KEEP_ALL = 1_000_000
Noted: TypeAlias = tuple[TrainBatch, Controls, float]
"""What an update was given, and the norm of its gradient."""
WHAT_IF = ("algorithm.", "entropy.", "optimizer.", "reference.coefficient=", "reward=")
"""What ``--what-if`` may change: settings of the update, and the reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A hash of what the run recorded, and of the same thing made again; None where nothing was recorded.

    ``note`` says what differs, or why there is nothing to compare with.
    """

    name: str
    recorded: str | None
    repeated: str
    note: str = ""

    @property
    def equal(self) -> bool | None:
        return None if self.recorded is None else self.recorded == self.repeated


class NotingLearner(LocalLearner):
    """Remembers what each update was given and found, of the step in progress."""

    noted: tuple[Noted, ...] = ()

    def __init__(self, config: TrainConfig, policy: LoadedModel) -> None:
        super().__init__(policy.model, LearnerSettings.of(config), valid_vocab=policy.valid_vocab)
        self.start, self.tokenizer = policy.folder, policy.tokenizer

    def update(self, batch: TrainBatch, controls: Controls) -> UpdateMetrics:
        found = super().update(batch, controls)
        self.noted = (*self.noted, (batch, controls, found.values["grad_norm"]))
        return found

    def again(self, start: Mapping[str, Any], noted: Sequence[Noted]) -> Iterator[Update]:
        """Updates made once more from the state ``start``, with the state on both sides of each."""
        self.restore(start)
        before = start
        for index, (batch, controls, norm) in enumerate(noted, 1):
            super().update(batch, controls)
            after = self.state() if index == len(noted) else copied(self.state())
            yield Update(batch=batch, controls=controls, grad_norm=norm, before=before, after=after)
            before = after


class _Parts(LocalParts):
    """A run's parts with a learner that remembers."""

    made: NotingLearner

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._recipe = config

    def learner(self, policy: LoadedModel) -> NotingLearner:
        self.made = NotingLearner(self._recipe, policy)
        return self.made


class _Watch(NullObserver):
    """Hears the warnings of the repetition, and tells each step."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self._tell = tell

    def step(self, metrics: StepMetrics) -> None:
        self._tell(f"step {metrics.step}")

    def event(self, event: Mapping[str, object]) -> None:
        if event["kind"] == "warning":
            self.warnings.append(str(event["message"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """A step that was made again.

    Attributes:
        config: of the run, its start model found on this machine.
        metrics: of the step, made again.
        begun: step of the checkpoint that it was made from; 0: the start.
        checkpoint: the whole state before the step.
        after: ``[P]``, the weights after it.
        groups: its whole buffer.
        updates: what each of its updates was given, and its gradient norm.
        learner: to make the updates again.
        checks: what was compared with the recording.
        warnings: what the run told on the way, such as another environment.
    """

    config: TrainConfig
    metrics: StepMetrics
    begun: int
    checkpoint: Checkpoint
    after: torch.Tensor
    groups: tuple[ScoredGroup, ...]
    updates: tuple[Noted, ...]
    learner: NotingLearner
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Everything that could be compared is the same."""
        return all(check.equal is not False for check in self.checks)

    def again(self) -> Iterator[Update]:
        """The step's updates with the learner's state on both sides, made once more."""
        return self.learner.again(self.checkpoint.learner_state(), self.updates)


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A learner's state that its next update leaves alone, on the CPU."""
    return {name: t.detach().cpu().clone() if isinstance(t, torch.Tensor) else t for name, t in state.items()}


def newest_before(run: Path, step: int) -> Path | None:
    """The newest checkpoint that the run keeps of before ``step``; None: only its start is left."""
    found = [path for path in checkpoint_folders(run) if step_of(path) < step]
    return found[-1] if found else None


def recorded_config(run: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The recipe that a run was made with, on this machine's start model.

    Raises:
        ValueError: it cannot be made again here; says why.
    """
    config = load_train_recipe(run / "config.toml", list(overrides))
    refused = {
        "cluster": config.cluster is not None and "other processes share its sums in another order",
        "rollout.engine": config.rollout.engine not in ("in_process", "replay")
        and f"{config.rollout.engine!r} does not promise the same tokens twice",
        "verifier.judge": config.verifier.judge is not None and "a served judge may answer otherwise, and is paid for",
    }
    for key, why in refused.items():
        if why:
            raise ValueError(f"{run}: a run with {key} is not repeated: {why}")
    if live := live_parts(config):
        raise ValueError(
            f"{run}: {next(iter(live.values()))} was given in Python and is in no file; it is not repeated"
        )
    start = str(json.loads((run / "run.json").read_text(encoding="utf-8")).get("start_model", ""))
    for folder in (run.parent / "models" / Path(start).name, Path(start)):
        if (folder / "config.json").exists():
            found = StartConfig.model_construct(model=str(folder.absolute()), sft=None)
            return config.model_copy(update={"start": found})
    return config  # it is made, or loaded, again


def repeat(run: Path, step: int, tell: Callable[[str], None] = lambda _: None) -> Repeated:
    """Make a step of a run again and compare it with what was recorded; the run's files stay as they are.

    Args:
        run: a run folder.
        step: from 1 to the last recorded one.
        tell: told each step that is made.

    Raises:
        ValueError: there is no such run or step, or the run cannot be made again here; says why.
    """
    rows = recorded_lines(run)
    if step not in rows:
        raise ValueError(f"{run} has no step {step}: it recorded the steps {min(rows)} to {max(rows)}; choose one")
    config, source = recorded_config(run), newest_before(run, step)
    with tempfile.TemporaryDirectory(prefix="magicrl-explain-") as scratch:
        folder = Path(scratch) / "run"
        made = _scratch(run, folder, config, source)
        ready = check_run(made, folder, resume=True)
        parts, watch = _Parts(made), _Watch(tell)
        with open_session(made, folder, watch, ready=ready, resume=True, stop=StopRequest(), parts=parts) as session:
            while session.steps_done < step - 1:
                if session.step() is None:
                    break
            parts.made.noted = ()
            before = load_checkpoint(session.save())
            found = session.step()
            if found is None:
                raise ValueError(f"{run}: made again, the run ended at step {session.steps_done}, before step {step}")
            metrics, groups = found
            after = copied(parts.made.state())
        checks = _checks(run, folder, rows[step], metrics, after)
    return Repeated(
        config=config,
        metrics=metrics,
        begun=0 if source is None else step_of(source),
        checkpoint=before,
        after=of_state(after, "weights"),
        groups=groups,
        updates=parts.made.noted,
        learner=parts.made,
        checks=checks,
        warnings=tuple(watch.warnings),
    )


def recorded_lines(run: Path) -> dict[int, dict[str, Any]]:
    """The lines of ``metrics.jsonl`` by step.

    Raises:
        ValueError: it is no run folder, or has no step yet.
    """
    checkpoint_folders(run)  # refuses what is no run folder
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {int(row["step"]): row for row in map(json.loads, lines)}
    if not found:
        raise ValueError(f"{run} has no training step yet")
    return found


def _scratch(run: Path, folder: Path, config: TrainConfig, source: Path | None) -> TrainConfig:
    """A folder from which the run goes on behind ``source``, and its recipe: nothing is removed or tracked."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "difficulty.json"):
        if (run / name).exists():
            shutil.copy(run / name, folder / name)
    # the tests are found there, so they are not made again
    if (run / "evaluations").is_dir():
        shutil.copytree(run / "evaluations", folder / "evaluations")
    if source is not None:
        (folder / "checkpoints" / source.name).symlink_to(source.absolute())
    made = config.model_copy(
        update={
            "checkpoint": CheckpointConfig(every=KEEP_ALL, keep_last=KEEP_ALL, keep_best=False),
            "logging": LoggingConfig(),
        }
    )
    write_atomically(folder / "config.toml", to_toml(made, folder.absolute()))
    return made


def _checks(
    run: Path, folder: Path, row: Mapping[str, Any], metrics: StepMetrics, after: Mapping[str, Any]
) -> tuple[Check, ...]:
    """The step's metrics, responses and weights against the recording."""
    name = f"step-{metrics.step:06d}"
    was, now = (_clockless(values) for values in (row["values"], json.loads(json.dumps(dict(metrics.values)))))
    differing = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
    told = "" if not differing else f"differs in {', '.join(differing[:4])}" + (" ..." if differing[4:] else "")
    checks = [Check(name="metrics", recorded=_digest(was), repeated=_digest(now), note=told)]
    rollouts = run / "rollouts" / f"{name}.parquet"
    again = _rollouts_hash(folder / "rollouts" / f"{name}.parquet")
    recorded = _rollouts_hash(rollouts) if rollouts.exists() else None
    note = "" if recorded else "the run did not record the responses of this step (logging.rollouts_every)"
    checks.append(Check(name="responses", recorded=recorded, repeated=again, note=note))
    kept, note = run / "checkpoints" / name, "the run keeps no checkpoint of this step"
    recorded = None
    if kept.exists():
        recorded, note = state_hash(load_checkpoint(kept).learner_state()), "weights and moments after the step"
    checks.append(Check(name="weights", recorded=recorded, repeated=state_hash(after), note=note))
    return tuple(checks)


def _clockless(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith(CLOCK)}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _rollouts_hash(path: Path) -> str:
    """Of every response and verdict, without the seconds they took."""
    return _digest(pq.read_table(path).drop_columns(["seconds"]).to_pylist())


def state_hash(state: Mapping[str, Any]) -> str:
    """SHA-256 of a learner's weights and moments, by name."""
    found = hashlib.sha256()
    for name in sorted(name for name, value in state.items() if isinstance(value, torch.Tensor)):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


class _Drawn(PromptSampler):
    """Gives a step's problems in the order in which they were drawn."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(list({problem.id: problem for problem in problems}.values()), seed=0)
        self._left = list(problems)

    def next(self, n: int) -> list[Problem]:
        if n > len(self._left):
            raise ValueError("it asks for more prompts than the step had sampled, and none is sampled for it")
        taken, self._left = self._left[:n], self._left[n:]
        return taken


class _Given:
    """Gives the verdicts that the step's responses have: a `VerifierService` without workers."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        self._verdicts: dict[tuple[str, tuple[str, ...]], tuple[Verdict, ...]] = {}
        for scored in groups:
            # what an environment has judged is not asked for
            asked = [
                (c.text if c.episode is None else c.episode.answer, verdict)
                for c, verdict in zip(scored.group.completions, scored.verdicts, strict=True)
                if c.episode is None or c.episode.verdict is None
            ]
            key = scored.group.request.problem.id, tuple(text for text, _ in asked)
            self._verdicts[key] = tuple(verdict for _, verdict in asked)

    def submit(self, problem: Problem, responses: Sequence[str]) -> tuple[Verdict, ...]:
        return self._verdicts[problem.id, tuple(responses)]

    def result(self, ticket: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
        return ticket

    def ready(self, ticket: tuple[Verdict, ...]) -> bool:
        del ticket
        return True

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Varied:
    """A step made of the same responses under other settings.

    ``own`` and ``moved`` are ``[P]``, as in `magicrl.training.attribution.Attributor`; ``after`` are the weights.
    """

    result: StepResult
    own: torch.Tensor
    moved: torch.Tensor
    after: torch.Tensor


def varied_config(run: Path, words: str) -> TrainConfig:
    """The run's recipe with the settings of one ``--what-if``: KEY=VALUE, several apart by spaces.

    Raises:
        ValueError: a setting that no step can be made with, or that says nothing of the update.
    """
    settings = words.split()
    for setting in settings:
        if not setting.startswith(WHAT_IF):
            raise RecipeError(
                f"--what-if {words}: the responses are those that the run sampled, so it changes settings of the "
                f"update alone ({', '.join(name.rstrip('.=') for name in WHAT_IF)}), as KEY=VALUE"
            )
    config = recorded_config(run, settings)
    if config.rollout.max_staleness:
        raise RecipeError(
            f"--what-if {words}: with rollout.max_staleness = {config.rollout.max_staleness} the step's buffer hangs "
            "on what is in flight; without --what-if the step is repeated as it was"
        )
    return config


def vary(repeated: Repeated, config: TrainConfig, words: str) -> Varied:
    """Make the step with other settings, from the same state and of the same responses.

    Verdicts are those of the step, unless ``words`` name another reward: then every response is judged by it.

    Raises:
        ValueError: it cannot be made with them; says why.
    """
    parts, state = LocalParts(config), repeated.checkpoint.state
    stage, start = repeated.metrics.stage, repeated.learner.start
    learner = NotingLearner(config, parts.policy(start))
    learner.restore(repeated.checkpoint.learner_state())
    rejudged = any(setting.startswith("reward=") for setting in words.split())
    problems = [group.group.request.problem for group in repeated.groups]
    if rejudged:
        problems = [replace(problem, verifier=config.data.train[0].verifier) for problem in problems]
    prompts = {p.id: g.group.request.prompt_tokens for p, g in zip(problems, repeated.groups, strict=True)}
    controller = entropy_controller(config.entropy)
    with contextlib.closing(parts.judge() if rejudged else _Given(repeated.groups)) as judge:
        engine = ReplayEngine([group.group for group in repeated.groups])
        engine.sync_weights(learner)
        trainer = Trainer(
            config,
            Parts(
                engine=engine,
                learner=learner,
                judge=judge,
                encode=lambda problem: prompts[problem.id],
                sampler=_Drawn(problems),
                controller=controller,
                reference=make_reference(config, start),
            ),
            lambda _what, _done, _of: None,
        )
        trainer.restore(join_state("trainer", repeated.checkpoint.tensors, {**state["trainer"], "again": []}))
        if config.entropy.controller == repeated.config.entropy.controller:
            controller.restore(state["controller"])
        try:
            result = trainer.step(config.stages[stage], stage)
        except (ValueError, TrainingStopped) as error:
            raise ValueError(f"--what-if {words}: {error}") from error
    start_state = repeated.checkpoint.learner_state()
    before = after = of_state(start_state, "weights")
    own = torch.zeros_like(before)
    for update in learner.again(start_state, learner.noted):
        own += own_part(config, update)
        after = of_state(update.after, "weights")
    return Varied(result=result, own=own, moved=after - before, after=after)
