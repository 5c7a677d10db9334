"""A whole training run: initial model, filter, evaluation before, the loop over stages, evaluation after, saved model.

``train`` is what ``magicrl train`` calls. ``open_session`` returns the run's ``Session`` to callers that write the
loop. All state is in the checkpoints, so that a run that was stopped anywhere continues from its last checkpoint. At
the first Ctrl-C or SIGTERM the current step is finished and kept. (A scheduler that sends SIGTERM before it kills
allows just enough time.) A second signal stops at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from magicrl.algorithms.filters import VisitRecord, accuracy_over_all, online_filter, reasons
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.data.curricula import make_curriculum
from magicrl.data.sampler import PromptSampler
from magicrl.files import NO_ROOM, only_writer, write_atomically
from magicrl.models.model_files import weights_differ
from magicrl.records import Problem, ScoredGroup, StepMetrics
from magicrl.registry import is_builtin
from magicrl.rollout.recording import write_rollouts
from magicrl.training.assemble import (
    Built,
    LocalParts,
    OwnedVerifiers,
    build_run,
    set_threads,
    start_model_folder,
)
from magicrl.training.checkpoint import (
    SHARDS,
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    check_json,
    join_state,
    load_latest,
    remove_leftovers,
    remove_old,
    split_state,
)
from magicrl.training.curriculum import (
    StageSchedule,
    Validation,
    filter_by_difficulty,
    held_out_test,
    in_words,
    removals,
)
from magicrl.training.diagnosis import conclude, judging_of, learning_facts, measure_of
from magicrl.training.health import HealthMonitor
from magicrl.training.learner import release_free_memory
from magicrl.training.meters import Throughput
from magicrl.training.metrics import mean_error
from magicrl.training.model_card import CARD, model_card, model_texts, recommended_sampling
from magicrl.training.objective import entropy_controller
from magicrl.training.protocols import RemoteWorkers, TrainingStopped, WorkSpan, WritesShards
from magicrl.training.recorder import RunFolder, RunObserver
from magicrl.training.start_checks import Ready, check_run, with_needed_reference
from magicrl.training.step import StepResult, Trainer
from magicrl_verifiers.progress import plural

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = b"\nfinishing this step, then stopping; a second signal stops at once (the last checkpoint stays)\n"


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run. The finished steps are kept."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class StopRequest:
    """Whether a signal asked this run to stop, and when it may stop."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._deferring = False

    @property
    def pending(self) -> bool:
        """Whether a stop is due at the end of the step."""
        return self._signal is not None

    @contextmanager
    def watching(self) -> Generator[StopRequest]:
        """Handle both signals during the block. In other threads than the main one nothing changes."""
        # Python allows only the main thread to set handlers.
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        former = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Generator[None]:
        """Defer a first signal to the end of the block, and raise ``Interrupted`` there."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        # Not reached if the block failed: its own error matters more.
        if self._signal is not None:
            raise Interrupted(self._signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferring and self._signal is None:
            self._signal = number
            # The display may be in the middle of its own write, and a buffered stream cannot be entered twice.
            os.write(2, _NOTICE)
            return
        # A second signal, or no step is in progress.
        raise Interrupted(number)


class Workers:
    """Parts of a run whose workers are in other processes, queried together.

    Args:
        parts: Engine, judge, learner. Parts without such workers are ignored.
    """

    def __init__(self, *parts: object) -> None:
        self._parts = [part for part in parts if isinstance(part, RemoteWorkers)]
        self._reported = [0] * len(self._parts)  # losses of each part

    def begin_step(self) -> None:
        """Discard what they measured since the last step, in evaluations and validation."""
        self.observations()
        self.spans()

    def observations(self) -> dict[str, float]:
        """Return metrics by key since the last call."""
        return {key: value for part in self._parts for key, value in part.observations().items()}

    def spans(self) -> list[WorkSpan]:
        """Return the workers' spans since the last call."""
        return [span for part in self._parts for span in part.spans()]

    def losses(self) -> list[str]:
        """Return what was lost and replaced since the last call, each with the reason."""
        found = [
            loss for part, reported in zip(self._parts, self._reported, strict=True) for loss in part.lost[reported:]
        ]
        self._reported = [len(part.lost) for part in self._parts]
        return found


def run_training(
    config: TrainConfig,
    output: Path,
    observer: RunObserver,
    *,
    resume: bool,
    parts: LocalParts | None = None,
) -> Path:
    """Run a recipe to its end and return the run folder.

    Args:
        config: Resolved recipe.
        output: Run folder.
        observer: Receives run events.
        resume: Continue the run in ``output`` from its last checkpoint, if there is one.
        parts: Creates the parts. Default: all in this process.

    Raises:
        ValueError: A setting, a file or the data is unusable.
        TrainingStopped: Training cannot continue.
        FloatingPointError: A loss or gradient was not finite.
        Interrupted: Ctrl-C or SIGTERM. A step in progress was finished and is in a checkpoint.
    """
    # Checked before the folder is created, so that a refused run leaves nothing behind.
    ready = check_run(config, output, resume=resume)
    with (
        StopRequest().watching() as stop,
        open_session(config, output, observer, ready=ready, resume=resume, stop=stop, parts=parts) as session,
    ):
        session.run()
    return output


@contextmanager
def open_session(
    config: TrainConfig,
    output: Path,
    observer: RunObserver,
    *,
    ready: Ready,
    resume: bool,
    stop: StopRequest,
    parts: LocalParts | None = None,
) -> Generator[Session]:
    """Yield the run's ``Session`` with everything built, before its first step. Its workers end with the block.

    ``run.json`` records an error that leaves the block. Arguments and errors are those of ``train``.
    """
    parts = parts or LocalParts(config)
    # A second process in the folder is refused at once: two would mix their lines and checkpoints.
    with only_writer(output, wait=False) as held:
        folder = RunFolder(output, config, resume=resume, held=held)
        # Set before anything is computed: sums, and so bits, depend on the number of threads.
        threads = set_threads(config)
        with contextlib.closing(parts.judge()) as judge:
            judge.warm_up(ready[0].verifiers())  # Finds a broken installation now, not after the cold start.
            start = start_model_folder(config.start, folder.path.parent / "models", observer.progress)
            built = build_run(config, ready, start, parts)
            folder.start(with_needed_reference(config), {**built.facts(), "threads": threads})
            with contextlib.closing(built.engine), _ending_noted(folder, judge):
                checkpoint = load_latest(folder.checkpoints, owner=folder.owner)
                remove_leftovers(folder.checkpoints)
                # Steps after the checkpoint run, and are recorded, again.
                lost = folder.rewind(checkpoint.step if checkpoint else 0)
                ranks = built.learner if isinstance(built.learner, WritesShards) else None
                with CheckpointWriter(folder.checkpoints, ranks) as writer:
                    session = Session(config, folder, observer, built, judge, stop, writer)
                    if lost:
                        session.warn(
                            f"metrics.jsonl lacks {plural(len(lost), 'step')}, e.g. {lost[0]}; training is not affected"
                        )
                    session.begin(checkpoint)
                    yield session


@contextmanager
def _ending_noted(folder: RunFolder, judge: OwnedVerifiers) -> Generator[None]:
    """Record in ``run.json`` what ends the block before the run's end, and in any case the usage of a served judge."""
    try:
        yield
    # BaseException includes Ctrl-C: run.json records it too.
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(OSError):  # the cause matters more than this failure, e.g. on a full disk
            folder.finish("stopped" if stopped else "failed", error=f"{type(error).__name__}: {error}")
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise TrainingStopped(
                f"{folder.path} could not be written: {error}. Free disk space and continue with --resume; "
                "the last checkpoint is complete"
            ) from error
        if (
            isinstance(error, OSError)
            and error.errno in (errno.ENOENT, errno.ESTALE)
            and str(error.filename).startswith(str(folder.path))
        ):
            what = f"{error.filename}: {error.strerror}"
            raise TrainingStopped(f"{what}. Restore the folder and continue with --resume, or start again") from error
        raise
    finally:
        with contextlib.suppress(OSError):
            folder.account(judge.totals())


class Session:
    """One run: the order in which its parts act, and its whole state."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        observer: RunObserver,
        built: Built,
        judge: OwnedVerifiers,
        stop: StopRequest,
        writer: CheckpointWriter,
    ) -> None:
        self._config = config
        self._in_stages = [config.in_stage(index) for index in range(len(config.stages))]
        self._stop = stop
        self._writer = writer
        self._folder = folder
        self._observer = observer
        self._judge = judge
        self._start = built.start.folder
        self._data = built.data
        self._encode = built.encoder.encode
        self._learner = built.learner
        self._engine = built.engine
        self._throughput = Throughput(config, built.start.model.config.to_dict())
        self._workers = Workers(built.engine.sampler, judge, built.learner)
        self._schedule = StageSchedule(config.stages)
        self._judging = judging_of(config.verifier, built.data.train)
        self._monitor = HealthMonitor(self._judging)
        self._visits = VisitRecord()
        # Prompts that the online filter removed. They stay in the accuracy curve as solved.
        self._solved = 0
        self.steps_done = 0
        """Number of training steps so far, including those before a resumption."""
        self._validation = Validation(config, built.data.validation, lambda i, n: observer.progress("validation", i, n))
        # An engine starts without weights, and the difficulty filter below samples from the initial model.
        self._engine.sync_weights(self._learner)
        problems, seed = self._filtered_training_set(), config.run.seed
        curriculum = make_curriculum(config.data.sampler, problems, seed, config.data.sampler_options)
        self._sampler = PromptSampler(problems, seed, curriculum)
        self._trainer = Trainer(
            config,
            engine=self._engine,
            learner=self._learner,
            judge=judge,
            encode=self._encode,
            sampler=self._sampler,
            controller=entropy_controller(config.entropy),
            reference=built.reference,
            teacher=built.teacher,
            progress=observer.progress,
        )
        # Their JSON-able state is in ``state.json`` of a checkpoint, next to that of learner, engine and trainer.
        self._small_parts: dict[str, Any] = {
            "schedule": self._schedule,
            "sampler": self._sampler,
            "visits": self._visits,
            "health": self._monitor,
            "best": self._validation,
        }

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Evaluate the initial model, restore ``checkpoint``, announce the first stage."""
        self._warn_of_older_weights()
        # Before a step is spent on what no checkpoint could hold.
        self._check_states()
        # The engine has the initial weights until a checkpoint is restored.
        self.examine("before")
        if checkpoint is not None:
            self._restore(checkpoint)
            # A kill between writing and removing leaves one checkpoint too many.
            keep_last = self._config.checkpoint.keep_last
            remove_old(self._folder.checkpoints, keep_last=keep_last, keep=self._best_kept())
        if self._schedule.stage is not None:
            # They are from a run that ended before its last stage, or whose checkpoints are gone, and run again.
            for path in self._folder.evaluations.glob("after-*.json"):
                path.unlink()
        changes = self._folder.environment_changes()
        if changes:
            self.warn("resumed in another environment, not bit-identical: " + "; ".join(changes))
        if self.steps_done == 0:
            self._announce_stage()

    def _warn_of_older_weights(self) -> None:
        """Warn where responses of older weights are treated as those of the learner."""
        lag, algorithm = self._config.rollout.weight_lag, self._config.algorithm
        single = all(
            stage.num_minibatches * recipe.algorithm.reuse == 1
            for stage, recipe in zip(self._config.stages, self._in_stages, strict=True)
        )
        if lag and single and algorithm.correction == "none":
            self._event_once(
                "warning",
                f"rollout.weight_lag = {lag} with one update per training step: rho is exactly 1, since its "
                "denominator is the learner's policy before the step. Set algorithm.correction to correct for the lag",
            )
        control = self._config.entropy.controller
        if (lag or self._config.rollout.engine == "replay") and control not in ("none", "fixed"):
            self._event_once(
                "warning",
                f"entropy.controller = {control!r} reads the entropy of the weights that sampled, which are not the "
                "learner's with rollout.weight_lag or recorded rollouts",
            )
        staleness = self._config.rollout.max_staleness
        if staleness and algorithm.correction == "none":
            self._event_once(
                "warning",
                f'rollout.max_staleness = {staleness} with algorithm.correction = "none": older weights sample, and '
                "nothing corrects for it; from staleness 2 on that destroyed learning in our measurements "
                '(docs/guides/engines.md). Set algorithm.correction = "tis"',
            )

    def run(self) -> None:
        """Train through all remaining stages and end the run."""
        while self.step() is not None:
            pass
        self.end()

    @property
    def stage(self) -> StageConfig | None:
        """Stage of the next step; None after the last."""
        return self._schedule.stage

    def step(self) -> tuple[StepMetrics, tuple[ScoredGroup, ...]] | None:
        """Run one training step and return its line of ``metrics.jsonl`` and its groups; None after the last stage.

        Raises:
            Interrupted: A signal asked to stop. The step is complete, and in a checkpoint at the end of
                `open_session`'s block.
            TrainingStopped: A checkpoint could not be written since the last step.
        """
        stage = self._schedule.stage
        if stage is None:
            return None
        # A first signal waits for the end of the step, so that a checkpoint contains its work.
        with self._stop.deferred():
            return self._one_step(stage)

    def end(self) -> None:
        """Evaluate the trained weights, write the model with its card, conclude."""
        self._writer.wait()
        self.examine("after")
        texts, sampling = model_texts(self._folder.path), recommended_sampling(self._config)
        self._learner.save_hf(self._folder.model, extra_files=texts, generation=sampling)
        # The verdict compares the two model folders, and the recipe's first test set decides it.
        first = next(iter(self._data.test), "")
        before, after = (self._folder.read_evaluation(f"{name}-{first}") for name in ("before", "after"))
        facts = learning_facts(
            self._folder.metrics(),
            before,
            after,
            reuse=[recipe.algorithm.reuse for recipe in self._in_stages],
            temperature=self._in_stages[-1].rollout.temperature,
            weights_changed=weights_differ(self._folder.model, str(self._start)),
            judging=self._judging,
        )
        found = conclude(facts)
        card = model_card(self._config, self._folder.path, found)
        write_atomically(self._folder.model / CARD, card)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        self._folder.finish("finished", steps=self.steps_done, peak_rss_mb=peak, learning=found.as_dict())

    def _one_step(self, stage: StageConfig) -> tuple[StepMetrics, tuple[ScoredGroup, ...]]:
        self._writer.check()
        index = self._schedule.index
        self._workers.begin_step()
        result = self._trainer.step(stage, index)
        # Read before the validation, which is not part of the step.
        observed, spans = self._workers.observations(), self._workers.spans()
        release_free_memory()
        self.steps_done = self._trainer.steps_done
        # Rejected groups too: they include the prompts that the online filter treats as solved.
        for group in result.groups:
            self._visits.observe(group)
            self._sampler.observe(group)
        validated = self._validation.measure(self.steps_done, self._engine, self._judge, self._encode)
        values = {**result.metrics.values}
        accuracy = values.get("train/accuracy/mean")
        if isinstance(accuracy, float):
            left = len(self._sampler.remaining)
            # Training accuracy as if the online filter had removed nothing.
            unfiltered = accuracy_over_all(accuracy, left, removed_correct=self._solved)
            values["train/accuracy_unfiltered/mean"] = unfiltered
        values |= {**validated, **observed}
        sampler = self._engine.sampler
        values |= self._throughput.metrics(result.groups, result.batches, values, learner=self._learner, engine=sampler)
        for loss in self._workers.losses():
            self._event("lost", f"lost and replaced: {loss}")
        metrics = StepMetrics(step=result.metrics.step, stage=index, values=values)
        # Recorded before the check, so that the cause of a stop can be inspected, and checked before it is in a
        # checkpoint.
        self._record(metrics, result, spans)
        self._trainer.check(metrics)
        self._observe_progress(metrics, result.groups)
        ended = self._schedule.finish_step()
        if ended is not None:
            _, steps, reason = ended
            self._event("stage_end", f"stage {index + 1} ended after {plural(steps, 'step')}: {reason}", stage=index)
            # After the last stage there is nothing to filter for.
            if self._schedule.stage is not None:
                self._filter_solved()
                self._announce_stage()
        due = self.steps_done % self._config.checkpoint.every == 0
        # The best step is written at once, since later steps change its weights.
        if due or self.steps_done in self._best_kept() or ended is not None or self._stop.pending:
            self._begin_checkpoint()
        return metrics, result.groups

    def _observe_progress(self, metrics: StepMetrics, groups: Sequence[ScoredGroup]) -> None:
        values = metrics.values
        truncation = values.get("train/truncation/ratio")
        if isinstance(truncation, float):
            self._schedule.observe_truncation(truncation)
        # The mean reward is the accuracy, except that a graded reward can rise while no response is fully correct.
        if self._validation.active:
            kind = "reward" if "validation/reward/mean" in values else "accuracy"
            measured, error = values.get(f"validation/{kind}/mean"), values.get(f"validation/{kind}/standard_error")
        else:
            measured, error = values["train/reward/mean"], mean_error(groups, lambda group: group.rewards)
            kept = len(self._sampler.remaining)
            if isinstance(measured, float):
                measured = accuracy_over_all(measured, kept, removed_correct=self._solved)
            if error is not None:
                error *= kept / (kept + self._solved)  # what was removed has no sampling error
        if isinstance(measured, float):
            self._schedule.observe_accuracy(measured, error if isinstance(error, float) else None)

    def _record(self, metrics: StepMetrics, result: StepResult, spans: Sequence[WorkSpan]) -> None:
        self._folder.step(metrics)
        result.clock.append_timeline(self._folder.timeline, metrics.step, spans)
        every = self._config.logging.rollouts_every
        if every and metrics.step % every == 0:
            write_rollouts(self._folder.rollouts / f"step-{metrics.step:06d}.parquet", metrics.step, result.groups)
        self._observer.step(metrics)
        for finding in self._monitor.observe(metrics):
            self._emit(finding)

    def _filter_solved(self) -> None:
        """Apply the online filter at a stage change."""
        # Visits count within one stage, whether a filter reads them or not.
        if not self._config.data.online_filter:
            self._visits.clear()
            return
        remaining = self._sampler.remaining
        try:
            solved = online_filter(self._visits.last_visits(), [p.key for p in remaining])
        except ValueError as error:
            # A run that has solved its problems keeps them, and ends with an evaluation and a model.
            self._visits.clear()
            self.warn(f"{error}; it removes none of them. Use harder problems, or fewer stages")
            return
        by = removals(remaining, solved)
        removed = self._sampler.remove(solved)
        self._solved += removed
        self._visits.clear()
        self._event(
            "filter",
            f"online filter removed {removed} of {len(remaining)} problems, all that ask one of the "
            f"{len(solved)} solved prompts: {in_words(by['source'])}",
            removed=removed,
            removed_prompts=len(solved),
            kept=len(remaining) - removed,
            by_source=by["source"],
            by_difficulty=by["difficulty"],
        )

    def _filtered_training_set(self) -> tuple[Problem, ...]:
        """Return the training problems that the offline filter keeps (all of them without one)."""
        settings = self._config.data.difficulty_filter
        if settings is None:
            return self._data.train
        # A resumed run repeats this: it reads the counts and reports the events only once.
        kept, removed, found = filter_by_difficulty(
            self._config,
            self._data.train,
            (self._engine, self._judge, self._encode),
            self._folder.path / "difficulty.json",
            lambda i, n: self._observer.progress("difficulty filter", i, n),
        )
        all_correct, all_wrong, not_judged = reasons(removed.values())
        self._event_once(
            "filter",
            f"difficulty filter (N = {settings.samples}) kept {len(kept)} of {len(kept) + len(removed)} prompts: "
            f"{all_wrong} never solved, {all_correct} always, {not_judged} not judged",
            kept=len(kept),
            all_wrong=all_wrong,
            all_correct=all_correct,
        )
        if len(kept) < (step := self._config.stages[0].rollout_batch):
            few = f"the difficulty filter kept {len(kept)} problems, fewer than a step draws (D_R = {step})"
            details = {"rule": "filter_keeps_little", "severity": "critical", "remedy": found.remedy}
            self._event_once("health", f"{few}: {found.message}", **details)
        chosen = set(kept)
        return tuple(p for p in self._data.train if p.key in chosen)

    def examine(self, name: str) -> None:
        """Evaluate the learner's current weights on the test sets. Sets with a recorded result are skipped."""
        found = {label: self._folder.read_evaluation(f"{name}-{label}") for label in self._data.test}
        for document in found.values():
            if document is not None:
                self._report_evaluation(name, document)
        missing = [label for label, document in found.items() if document is None]
        # An evaluation measures the learner's policy, but a lagging engine has an older one.
        with self._engine.newest_weights() if missing else nullcontext():
            for label in missing:
                document = held_out_test(
                    name,
                    label,
                    self._data.test[label],
                    self._config,
                    (self._engine, self._judge, self._encode),
                    self._observer.progress,
                )
                self._folder.write_evaluation(f"{name}-{label}", document)
                self._report_evaluation(name, document)

    def _report_evaluation(self, name: str, document: Mapping[str, Any]) -> None:
        temperatures = document["temperatures"]
        measure = measure_of(rewards=[found.get("reward") for found in temperatures.values()])
        scores = ", ".join(
            f"{measure.of(found)['mean']:.3f} at temperature {float(tau):g}" for tau, found in temperatures.items()
        )
        lost, drawn = (sum(found.get(key, 0) for found in temperatures.values()) for key in ("not_judged", "drawn"))
        unjudged = f"; {lost} of {drawn} responses could not be judged" if lost else ""
        self._event_once("evaluation", f"{document['set']} {name} training: {measure.name} {scores}{unjudged}")

    def save(self) -> Path:
        """Write a checkpoint of the whole state, wait until it is complete, and return its folder."""
        self._begin_checkpoint()
        written = self._writer.wait()
        assert written is not None, "a checkpoint was begun"
        return written

    def _begin_checkpoint(self) -> None:
        """Copy the whole state. It is written while the next step runs."""
        self._check_states()
        # If ranks write their own rows, no process has to hold the whole state.
        learner = {} if isinstance(self._learner, WritesShards) else self._learner.state()
        tensors: dict[str, Any] = {}
        state: dict[str, Any] = {name: part.state() for name, part in self._small_parts.items()}
        # The tensors of these three are written as safetensors, everything else as JSON. Nothing is pickled.
        large = {"learner": learner, "engine": self._engine.state(), "trainer": self._trainer.state()}
        for name, found in large.items():
            of_part, state[name] = split_state(name, found)
            tensors |= of_part
        state |= {"controller": self._trainer.controller.state(), "solved": self._solved}
        self._writer.begin(
            Checkpoint(step=self.steps_done, tensors=tensors, state=state, owner=self._folder.owner),
            keep_last=self._config.checkpoint.keep_last,
            keep=self._best_kept(),
            # The lines of its steps first: a resumed run drops newer ones, and never writes an older one again.
            settle=self._folder.settle,
        )

    def _check_states(self) -> None:
        """Raise ``ValueError`` if JSON would change the state of a custom part. Those of built-in ones can be large."""
        controller, sampler = self._config.entropy.controller, self._config.data.sampler
        if not is_builtin("controller", controller):
            check_json(f"entropy.controller = {controller!r}", self._trainer.controller.state())
        if not is_builtin("sampler", sampler):
            check_json(f"data.sampler = {sampler!r}", self._sampler.state())

    def _best_kept(self) -> frozenset[int]:
        """Return the step of the best validation if its checkpoint is to be kept."""
        best = self._validation.best
        return frozenset({best[0]}) if best is not None and self._config.checkpoint.keep_best else frozenset()

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            state = checkpoint.state
            if checkpoint.shards is not None and isinstance(self._learner, WritesShards):
                assert checkpoint.folder is not None, "the checkpoint was read from a folder"
                # Ranks read their own rows, so that no process has to hold the whole state.
                self._learner.read_shards(checkpoint.folder / SHARDS, checkpoint.shards)
            else:
                self._learner.restore(checkpoint.learner_state())
            self._engine.sync_weights(self._learner)
            # After the weights: requests in flight continue from them.
            self._engine.restore(join_state("engine", checkpoint.tensors, state["engine"]))
            self._trainer.restore(join_state("trainer", checkpoint.tensors, state["trainer"]))
            self.steps_done = self._trainer.steps_done
            self._trainer.controller.restore(state["controller"])
            self._solved = int(state["solved"])
            for name, part in self._small_parts.items():
                part.restore(state[name])
        except ValueError as error:  # the text says what does not fit and what to do
            raise CheckpointError(f"{checkpoint.folder} does not fit this run: {error}") from error
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{checkpoint.folder} does not fit this run ({type(error).__name__}: {error}); it may come from "
                "another model or version of magicrl. Delete that folder to resume from the checkpoint before it"
            ) from error
        self._emit({"kind": "resume", "step": checkpoint.step, "message": f"resumed from {checkpoint.folder}"})

    def _announce_stage(self) -> None:
        stage = self._schedule.stage
        assert stage is not None, "a stage begins"
        own = stage.own()
        self._event_once(
            "stage_start",
            f"stage {self._schedule.index + 1}: T = {stage.max_tokens}, D_R = {stage.rollout_batch}, "
            f"D_T = {stage.mini_batch or stage.rollout_batch}, M = {stage.group_size}, at most {stage.max_steps} steps"
            + "".join(f", {name} = {value:g}" for name, value in own.items()),
            max_tokens=stage.max_tokens,
            **own,
        )

    def warn(self, message: str) -> None:
        """Emit a warning that does not stop the run."""
        self._event("warning", message)

    def _event(self, kind: str, message: str, **data: object) -> None:
        place: dict[str, object] = {"step": self.steps_done, "stage": self._schedule.index}
        self._emit({"kind": kind, "message": message, **place, **data})

    def _event_once(self, kind: str, message: str, **data: object) -> None:
        """Emit an event unless the run's log has it: a resumed run repeats some events, and a killed process may have
        logged it."""
        if not self._folder.has_event(kind, message):
            self._event(kind, message, **data)

    def _emit(self, event: Mapping[str, object]) -> None:
        self._folder.event(event)
        self._observer.event(event)
