"""A rank that dies, fails or stays silent: the report names it, and a rebuilt learner has the state of the lost one."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import termios
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import local_ranks
import psutil
import pytest
import torch
from local_ranks import LocalLauncher, LocalRanks

from magicrl.config.cluster_schema import ClusterTimeouts, LearnerPlacement
from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.distributed.learner.launchers import (
    Fault,
    LearnerLost,
    answer_call,
    collect_values,
)
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.records import TrainBatch, TrainSample
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

CONTROLS = Controls(alpha=0.05, temperature=0.8, learning_rate=1e-3)
DIED = Fault(died=True, kind="", text="was killed by signal 9")
ALONE = Fault(
    died=False, kind="RuntimeError", text="RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"
)
OWN = Fault(died=False, kind="KeyError", text="KeyError: 'x'")
MISTAKE = Fault(died=False, kind="ValueError", text="rank 3 is too large")


@pytest.mark.parametrize(
    ("faults", "rank", "told"),
    [
        ([ALONE, DIED], 1, r"learner rank 1 was killed by signal 9, while the run waited for: update 3"),
        ([ALONE, OWN], 1, r"learner rank 1 failed: KeyError: 'x', while"),
        ([None, ALONE], 1, r"learner rank 1 failed: RuntimeError: .gloo"),
        (["silent", None], 0, r"learner rank 0 gave no answer in 7 s, while the run waited for: update 3"),
        ([ALONE, MISTAKE], 1, r"learner rank 1 failed: rank 3 is too large"),
    ],
    ids=["a death before its echo", "an error of its own before an echo", "one error", "silence", "one mistake"],
)
def test_the_rank_that_is_to_blame_is_named(faults: Sequence[Any], rank: int, told: str) -> None:
    answers = {rank: fault or 1 for rank, fault in enumerate(faults) if fault != "silent"}
    with pytest.raises(LearnerLost, match=told) as caught:
        collect_values(answers, len(faults), waiting_for="update 3", seconds=7)
    assert caught.value.rank == rank
    assert (caught.value.mistake is None) is (faults[rank] is not MISTAKE)


def test_a_mistake_that_all_ranks_tell_is_no_loss() -> None:
    with pytest.raises(ValueError, match="rank 3 is too large"):
        collect_values({0: MISTAKE, 1: MISTAKE}, 2, waiting_for="a state", seconds=1)
    assert collect_values({1: None, 0: 3}, 2, waiting_for="", seconds=1) == [3, None]
    assert answer_call("abc", "upper", ()) == "ABC"
    fault = answer_call("abc", "index", ("z",))
    assert (fault.kind, fault.text) == ("ValueError", "substring not found")


class Watched:
    """A ``LocalLauncher`` whose processes a test may reach."""

    def __init__(self) -> None:
        self._launcher = LocalLauncher(environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        self.started: list[LocalRanks] = []
        self.again: LocalRanks | None = None

    def start(self, ranks: int, *, timeout: float) -> LocalRanks:
        if self.again is not None:
            return self.again
        group = self._launcher.start(ranks, timeout=timeout)
        assert isinstance(group, LocalRanks)
        self.started.append(group)
        return group


def unread(socket: int) -> int:
    """Return the bytes that the other side of a Unix socket has not read yet."""
    size = array.array("i", [0])
    fcntl.ioctl(socket, termios.TIOCOUTQ, size)
    return size[0]


def learner(loaded: Callable[[], Any], launcher: Any, ranks: int = 2, **more: Any) -> DistributedLearner:
    return DistributedLearner(
        loaded(),
        LearnerSettings(
            optimizer=OptimizerConfig(max_grad_norm=0.5), model=ModelConfig(dtype="float32", micro_batch_tokens=70)
        ),
        launcher=launcher,
        placement=LearnerPlacement(ranks=ranks),
        threads=1,
        **more,
    )


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_step_is_repeated(
    loaded: Callable[[], Any],
    recorded: list[TrainSample],
    tmp_path: Path,
    until: Callable[[Callable[[], bool]], None],
) -> None:
    """Kill when idle, in an update and after shards were written: the bits equal an undisturbed run."""
    batches = [TrainBatch.of(recorded[:7]), TrainBatch.of(recorded[7:]), TrainBatch.of(recorded)]
    watched = Watched()
    many = learner(loaded, watched)
    many.update(batches[0], CONTROLS)
    watched.started[-1].processes[1].kill()
    with pytest.raises(LearnerLost, match="learner rank 1 was killed by signal 9, while the run waited for: update 2"):
        many.update(batches[1], CONTROLS)
    assert many.version == 1
    many.update(batches[1], CONTROLS)

    folder = tmp_path / "kept"
    folder.mkdir()
    many.begin_shards(folder)
    many.finish_shards()
    many.shards_kept(folder)
    many._rebuilds = 1
    victim = watched.started[-1].processes[0]
    os.kill(victim.pid, signal.SIGSTOP)  # alive when the call is sent, killed in the middle of it
    until(lambda: psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED)
    pipe = watched.started[-1]._pipes[0]

    def kill_when_called() -> None:
        until(lambda: unread(pipe.fileno()) > 0)
        victim.kill()

    killer = threading.Thread(target=kill_when_called)
    killer.start()
    many.update(batches[2], CONTROLS)
    killer.join()
    assert len(many.lost) == 1
    assert many.lost[0].startswith("learner rank 0 ")
    assert many.version == 3

    disturbed = many.state()
    watched.again = watched.started[-1]
    undisturbed = learner(loaded, watched)
    for batch in batches:
        undisturbed.update(batch, CONTROLS)
    expected = undisturbed.state()
    assert disturbed["meta"] == expected["meta"]
    assert all(torch.equal(disturbed[k], expected[k]) for k in expected if k != "meta")

    # a hanging rank reaches the time limit, and no process remains
    undisturbed._timeouts = ClusterTimeouts(learner=3.0)
    os.kill(watched.again.processes[1].pid, signal.SIGSTOP)
    with pytest.raises(LearnerLost, match=r"gave no answer in 3 s, while the run waited for: log-probs of a batch"):
        undisturbed.logprobs(recorded, 1.0)
    assert all(process.poll() is not None for group in watched.started for process in group.processes)


def test_the_driver_never_gathers_the_state_by_itself(
    loaded: Callable[[], Any], recorded: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 7B learner's state is 91 GB. A rebuild repeats the updates since the last checkpoint."""
    many = DistributedLearner.__new__(DistributedLearner)
    called: list[str] = []
    monkeypatch.setattr(DistributedLearner, "_running", lambda self: None)
    monkeypatch.setattr(DistributedLearner, "_update", lambda self, *_: {})
    monkeypatch.setattr(DistributedLearner, "_call", lambda self, method, *_: called.append(method))
    many.__init__(loaded(), launcher=None, placement=LearnerPlacement(ranks=2))  # type: ignore[arg-type, misc]
    batch = TrainBatch.of(recorded[:1])
    for _ in range(65):
        many.update(batch, CONTROLS)
    assert called == []
    assert len(many._updates) == 65


HELD = """
import time
from magicrl.distributed.learner import sharding

save = sharding.save_file


def held(rows, file, header):
    while (file.parent / "hold").exists():
        time.sleep(0.01)
    save(rows, file, header)


sharding.save_file = held
"""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return ranks that do not write into a folder with a file ``hold``."""
    monkeypatch.setattr(local_ranks, "CHILD", HELD + local_ranks.CHILD)
    return Watched()


def held(folder: Path) -> Path:
    folder.mkdir()
    (folder / "hold").touch()
    return folder


def holds(many: DistributedLearner, folder: Path, meta: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether the ranks' files in ``folder`` have this state. Afterwards the learner has its earlier one."""
    state = many.state()
    many.read_shards(folder, meta)
    found = many.state()
    many.restore(state)
    return found["meta"] == expected["meta"] and all(torch.equal(found[k], expected[k]) for k in found if k != "meta")


@pytest.mark.slow
def test_two_ranks_write_the_state_of_the_copy_while_updates_go_on(
    loaded: Callable[[], Any], watched: Watched, recorded: list[TrainSample], tmp_path: Path
) -> None:
    """Delay the write, so that the next update comes first."""
    many, folder = learner(loaded, watched), held(tmp_path / "copy")
    many.update(TrainBatch.of(recorded[:7]), CONTROLS)
    expected = dict(many.state())
    begun = many.begin_shards(folder)
    many.update(TrainBatch.of(recorded[7:]), CONTROLS)
    (folder / "hold").unlink()
    many.finish_shards()
    assert holds(many, folder, begun.result(), expected)

    # a rank that cannot write is named, and the ranks continue
    (tmp_path / "full" / "shard-00002.safetensors").mkdir(parents=True)
    begun = many.begin_shards(tmp_path / "full")
    many.finish_shards()
    with pytest.raises(OSError, match=r"learner rank 1: .*directory"):
        begun.result()
    assert many.update(TrainBatch.of(recorded), CONTROLS)
    many.close()


@pytest.mark.slow
def test_a_lost_rank_takes_its_copy_with_it_and_a_rebuild_makes_it_again(
    loaded: Callable[[], Any], watched: Watched, recorded: list[TrainSample], tmp_path: Path
) -> None:
    batches = [TrainBatch.of(recorded[:7]), TrainBatch.of(recorded[7:]), TrainBatch.of(recorded)]
    folder = held(tmp_path / "copy")
    many = learner(loaded, watched, rebuilds=1)
    many.update(batches[0], CONTROLS)
    begun = many.begin_shards(folder)
    many.update(batches[1], CONTROLS)
    watched.started[-1].processes[1].kill()
    many.update(batches[2], CONTROLS)
    assert len(many.lost) == 1
    (folder / "hold").unlink()
    many.finish_shards()
    # another thread may save the copy at any time: a rebuild continues from it and repeats the updates since
    many.shards_kept(folder)
    before = many.weights()
    watched.started[-1].processes[0].kill()
    after = many.weights()
    assert len(many.lost) == 2
    assert all(torch.equal(before[name], after[name]) for name in before)
    watched.again = watched.started[-1]
    one = learner(loaded, watched)
    one.update(batches[0], CONTROLS)
    assert holds(one, folder, begun.result(), dict(one.state()))
