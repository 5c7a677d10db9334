"""Runs that are stopped at any point and continue without any difference."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from magicrl.config.loader import load_train_recipe
from magicrl.config.schema import TrainConfig
from magicrl.files import only_writer
from magicrl.models.loading import LoadedModel
from magicrl.records import StepMetrics
from magicrl.training.assemble import LocalParts
from magicrl.training.checkpoint import CheckpointError, load_checkpoint
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Learner, TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.repeating import state_hash
from magicrl.training.session import Interrupted, run_training

PATIENCE = 600.0
"""Time limit in seconds, after which the command counts as hanging. It is a limit, not a measurement."""


def test_ctrl_c_ends_the_command_with_a_report_and_a_run_that_goes_on(
    toy_recipe: Path, tmp_path: Path, until: Callable[[Callable[[], bool]], None]
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "magicrl", "train", str(toy_recipe), "--output", str(run), "--resume"]
    command += ["--set", "stages.0.max_steps=2000", "--set", "checkpoint.every=2000", "--set", "evaluation.every=0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    metrics = run / "metrics.jsonl"
    until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0))
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to the whole group
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "finishing this step, then stopping" in said
    assert "report so far" in said
    assert said.splitlines()[-1].startswith("magicrl train ")
    assert said.count(" --resume") == 1, "the command that continues"
    assert "Traceback" not in said
    steps = metrics.read_bytes().count(b"\n")
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert (run / "report.html").is_file()


RoomFor = Callable[[int], AbstractContextManager[None]]

SHORT = ("checkpoint.every=100", "stages.0.max_steps=2", "stages.1.max_steps=2")


class Signals(NullObserver):
    """Observer that sends this process ``signals`` when step 2 has begun to generate, one per call."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = list(signals)
        self._steps = 0

    def step(self, metrics: StepMetrics) -> None:
        self._steps += 1

    def progress(self, phase: str, done: int, total: int) -> None:
        if phase == "rollout" and self._steps == 1 and self._signals:
            os.kill(os.getpid(), self._signals.pop(0))


def run(recipe: Path, output: Path, observer: NullObserver, *overrides: str, resume: bool = False) -> None:
    run_training(load_train_recipe(recipe, overrides), output, observer, resume=resume)


def status(output: Path) -> dict[str, Any]:
    return json.loads((output / "run.json").read_text())


def steps_of(output: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_finishes_the_step_and_nothing_is_lost(
    toy_recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run(toy_recipe, tmp_path / "whole", NullObserver(), *SHORT)
    output = tmp_path / "stopped"
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"stopped by {number.name}") as stopped:
        run(toy_recipe, output, Signals(number), *SHORT)
    assert stopped.value.signal_number == number
    assert signal.getsignal(number) == before
    assert steps_of(output) == [1, 2], "the step that the signal met is recorded"
    assert [p.name for p in (output / "checkpoints").iterdir()] == ["step-000002"], "and in a checkpoint"
    assert status(output)["status"] == "stopped"
    run(toy_recipe, output, NullObserver(), *SHORT, resume=True)
    assert "error" not in status(output)
    whole, again = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "whole", output))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


KILLED_WHILE_WRITING = """
import os, signal, sys, threading
from pathlib import Path

sys.path[:0] = sys.argv[4:]
from test_interruptions import on_ranks
from magicrl.config.loader import load_train_recipe
from magicrl.training import checkpoint
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

half, save = threading.Event(), checkpoint.save_file


def stuck(tensors, file):
    save(tensors, file)
    if "step-000004" in str(file):
        os.truncate(file, file.stat().st_size // 2)
        half.set()
        threading.Event().wait()


class Kills(NullObserver):
    def step(self, metrics):
        if metrics.step == 5:
            assert half.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)


checkpoint.save_file = stuck
config = load_train_recipe(Path(sys.argv[1]))
parts = on_ranks(config) if sys.argv[3] == "ranks" else None
run_training(config, Path(sys.argv[2]), Kills(), resume=False, parts=parts)
"""


def on_ranks(config: TrainConfig) -> LocalParts:
    """Return the parts of a run whose learner is two processes."""
    from local_ranks import LocalLauncher

    from magicrl.config.cluster_schema import LearnerPlacement
    from magicrl.distributed.learner.learner import DistributedLearner

    class Parts(LocalParts):
        def learner(self, policy: LoadedModel) -> Learner:
            return DistributedLearner(
                policy,
                LearnerSettings.of(config),
                launcher=LocalLauncher(environment={"OMP_NUM_THREADS": "1"}),
                placement=LearnerPlacement(ranks=2),
                threads=1,
            )

    return Parts(config)


@pytest.mark.parametrize("learner", ["local", pytest.param("ranks", marks=pytest.mark.slow)])
def test_killed_while_a_checkpoint_is_written_the_run_goes_on_from_the_one_before(
    toy_recipe: Path, tmp_path: Path, learner: str
) -> None:
    """Step 5 is made and recorded while step 4 is being written. Then comes kill -9."""
    config = load_train_recipe(toy_recipe)

    def parts() -> LocalParts | None:
        return on_ranks(config) if learner == "ranks" else None

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_training(config, whole, NullObserver(), resume=False, parts=parts())
    folders = Path(__file__).parent, Path(__file__).parents[2] / "helpers"
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, toy_recipe, killed, learner, *folders]
    ended = subprocess.run(command, timeout=PATIENCE, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert steps_of(killed) == [1, 2, 3, 4, 5]
    left = sorted(p.name for p in (killed / "checkpoints").iterdir())
    assert [name for name in left if name.startswith("step")][-1] == "step-000003", "the stage's end"
    assert [name for name in left if name.startswith(".writing-step-000004")]
    run_training(config, killed, NullObserver(), resume=True, parts=parts())

    def found(output: Path) -> tuple[Any, ...]:
        folders = sorted(path.name for path in (output / "checkpoints").iterdir())
        last = load_checkpoint(output / "checkpoints" / folders[-1])
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        learned = [{k: v for k, v in row["values"].items() if k.startswith(("learner", "train"))} for row in rows]
        return folders, last.state, state_hash(last.learner_state()), learned

    assert found(killed) == found(whole)


def test_a_second_signal_stops_at_once(toy_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(toy_recipe, tmp_path / "run", Signals(signal.SIGINT, signal.SIGINT), *SHORT)
    assert steps_of(tmp_path / "run") == [1]
    assert status(tmp_path / "run")["status"] == "stopped"


def test_a_disk_that_fills_up_stops_the_run_and_leaves_the_last_checkpoint(
    toy_recipe: Path, tmp_path: Path, room_for: RoomFor, until: Callable[[Callable[[], bool]], None]
) -> None:
    options = ("checkpoint.every=2", "logging.rollouts_every=0")
    run(toy_recipe, tmp_path / "whole", NullObserver(), *options)
    checkpoint = next((tmp_path / "whole" / "checkpoints").glob("*/tensors.safetensors")).stat().st_size
    first = tmp_path / "first"
    with room_for(checkpoint - 1), pytest.raises(TrainingStopped, match=r"could not be written: .*there is none yet"):
        run(toy_recipe, first, NullObserver(), *options, "stages.0.max_steps=6", "evaluation.every=0")
    assert status(first)["status"] == "failed"
    assert steps_of(first) in ([1, 2], [1, 2, 3]), "it was written while step 3 was made, at most"
    output = tmp_path / "full"

    class Full(NullObserver):
        def step(self, metrics: StepMetrics) -> None:
            if metrics.step == 3:  # from here on not one more byte
                until((output / "checkpoints" / "step-000002").is_dir)
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with (
        room_for(1 << 30),
        pytest.raises(TrainingStopped, match=r"could not be written: .*Free disk space"),
    ):
        run(toy_recipe, output, Full(), *options, resume=True)
    assert [p.name for p in (output / "checkpoints").iterdir()] == ["step-000002"]
    run(toy_recipe, output, NullObserver(), *options, resume=True)
    whole, again = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "whole", output))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_two_processes_do_not_write_one_run(toy_recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with (
        only_writer(output, wait=False),
        pytest.raises(ValueError, match=rf"being written by another process \(pid {os.getpid()}\)"),
    ):
        run(toy_recipe, output, NullObserver(), *SHORT)
    run(toy_recipe, output, NullObserver(), *SHORT)


@pytest.mark.parametrize("again", [True, False])
def test_a_run_whose_folder_is_replaced_writes_nothing_there(toy_recipe: Path, tmp_path: Path, again: bool) -> None:
    output = tmp_path / "run"

    class Replaced(NullObserver):
        def step(self, metrics: StepMetrics) -> None:
            output.rename(tmp_path / "before")
            if again:
                (output / "checkpoints").mkdir(parents=True)
                (output / ".lock").touch()

    with pytest.raises(TrainingStopped, match=r"deleted, renamed or replaced during the work\. Restore the folder"):
        run(toy_recipe, output, Replaced(), *SHORT, "checkpoint.every=100")
    assert again == output.exists()
    assert not again or sorted(path.name for path in output.iterdir()) == [".lock", "checkpoints"]


def test_a_run_that_loses_a_folder_ends_as_stopped(toy_recipe: Path, tmp_path: Path) -> None:
    class Deleting(NullObserver):
        def event(self, event: Mapping[str, object]) -> None:
            if event["kind"] == "stage_end":
                shutil.rmtree(tmp_path / "run" / "evaluations", ignore_errors=True)

    with pytest.raises(TrainingStopped, match=r"held_out.json.writing: No such file.*Restore the folder"):
        run(toy_recipe, tmp_path / "run", Deleting(), *SHORT)


def test_a_run_whose_start_model_is_deleted_ends_with_its_verdict(
    toy_text: str, toy_model: Path, tmp_path: Path
) -> None:
    start, recipe, output = tmp_path / "start", tmp_path / "toy.toml", tmp_path / "run"
    shutil.copytree(toy_model, start)
    recipe.write_text(toy_text.replace(str(toy_model), str(start)))

    class Deleting(NullObserver):
        def step(self, metrics: StepMetrics) -> None:
            shutil.rmtree(start, ignore_errors=True)

    with pytest.warns(UserWarning, match="are not compared with those of the start model: .*start"):
        run(recipe, output, Deleting(), *SHORT)
    assert status(output)["status"] == "finished"
    assert status(output)["learning"]


def test_a_checkpoint_that_lacks_a_part_is_refused(toy_recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(toy_recipe, output, Signals(signal.SIGINT), *SHORT)
    state = next((output / "checkpoints").glob("*/state.json"))
    document = json.loads(state.read_text())
    del document["state"]["sampler"]
    state.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"step-000002 does not fit this run \(KeyError: 'sampler'\)"):
        run(toy_recipe, output, NullObserver(), *SHORT, resume=True)
