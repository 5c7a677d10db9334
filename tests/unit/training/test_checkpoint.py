"""Checkpoints: complete or absent, kept as configured, rejected with a reason when damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from magicrl.training import checkpoint
from magicrl.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    join_state,
    load_latest,
    split_state,
)
from magicrl.training.protocols import TrainingStopped

RoomFor = Callable[[int], AbstractContextManager[None]]


def make(step: int) -> Checkpoint:
    return Checkpoint(step=step, tensors={"learner/w": torch.full((3,), float(step))}, state={"x": {"c": 0.1 * step}})


def saved(root: Path, checkpoint: Checkpoint, **kept: Any) -> Path:
    """Write it, and wait for the end."""
    with CheckpointWriter(root) as writer:
        writer.begin(checkpoint, **kept)
        folder = writer.wait()
    assert folder is not None
    return folder


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    saved(tmp_path, make(3), keep_last=2)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 3
    assert loaded.state == {"x": {"c": 0.1 * 3}}
    assert torch.equal(loaded.tensors["learner/w"], make(3).tensors["learner/w"])


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        saved(tmp_path, make(step), keep_last=2, keep=frozenset({2}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]
    latest = load_latest(tmp_path)
    assert latest is not None
    assert latest.step == 5
    for step in (999_999, 1_000_000):  # one digit more is a later step, though its name is sorted earlier
        saved(tmp_path, make(step), keep_last=2)
    latest = load_latest(tmp_path)
    assert latest is not None
    assert latest.step == 1_000_000


def test_rows_of_ranks_are_joined_by_their_place_and_not_by_the_name_of_their_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, make(1), keep_last=2)
    whole = torch.arange(24.0).view(12, 2)
    (folder / "learner").mkdir()
    for rank in range(12):
        place = {"weights/w": {"saved_offsets": [rank, 0]}}
        rows = {"weights/w": whole[rank : rank + 1].clone()}
        save_file(rows, folder / "learner" / f"shard-{rank}.safetensors", {"DCP_SHARDING_INFO": json.dumps(place)})
    names = {path.name: {} for path in (folder / "learner").iterdir()}
    edit(folder, shards={"optimizer_steps": 3, "files": names})
    loaded = load_latest(tmp_path)
    assert loaded is not None
    state = loaded.learner_state()
    assert torch.equal(state["weights/w"], whole)
    assert state["meta"] == {"optimizer_steps": 3}


@pytest.mark.parametrize("size", [0, 40, 130])
def test_a_full_disk_leaves_the_last_good_one_and_gives_its_space_back(
    tmp_path: Path, room_for: RoomFor, size: int
) -> None:
    """130 bytes suffice for the tensors but not for the state."""
    saved(tmp_path, make(1), keep_last=2)
    with (
        room_for(size),
        pytest.raises(TrainingStopped, match=r"step-000002 could not be written: .*last good one is step-000001"),
    ):
        saved(tmp_path, make(2), keep_last=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1


class Held:
    """Writes of tensors that wait until they are released."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        self.begun = threading.Event()
        patch.setattr(checkpoint, "save_file", self._write)

    def let_go(self) -> None:
        self._go.set()

    def _write(self, *given: Any) -> None:
        self.begun.set()
        assert self._go.wait(10)
        save_file(*given)


def test_what_is_written_is_the_state_of_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    tensor, visits = torch.zeros(4, 2), [1]
    living = Checkpoint(step=1, tensors={"w": tensor, "columns": tensor.t()}, state={"visits": visits})
    with CheckpointWriter(tmp_path) as writer:
        writer.begin(living, keep_last=1)
        assert held.begun.wait(60), "training goes on before the tensors are written"
        tensor += 1
        visits.append(2)
        writer.check()
        held.let_go()
    found = load_latest(tmp_path)
    assert found is not None
    assert found.state == {"visits": [1]}
    assert all(not value.any() for value in found.tensors.values())


def test_older_ones_stay_until_the_next_is_whole_and_the_end_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, make(1), keep_last=1)
    settled: list[list[str]] = []
    held = Held(monkeypatch)
    with CheckpointWriter(tmp_path) as writer:
        writer.begin(make(2), keep_last=1, settle=lambda: settled.append(sorted(p.name for p in tmp_path.iterdir())))
        assert held.begun.wait(60)
        names = sorted(p.name for p in tmp_path.iterdir())
        assert names[1:] == ["step-000001"]
        assert names[0].startswith(".writing-step-000002-")
        threading.Timer(0.2, held.let_go).start()
        writer.begin(make(3), keep_last=1)  # waits for the previous one
        assert (tmp_path / "step-000002").is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]
    assert settled == [names], "the lines of its steps are on the disk before it has its name"


class Ranks:
    """Ranks that write when they have to finish, or fail."""

    def __init__(self, error: OSError | None = None) -> None:
        self.kept: list[Path] = []
        self._error, self._end = error, Future[Mapping[str, Any]]()

    def begin_shards(self, folder: Path) -> Future[Mapping[str, Any]]:
        self._folder = folder
        return self._end

    def finish_shards(self) -> None:
        if self._error is None:
            save_file({}, self._folder / "shard.safetensors")
            self._end.set_result({"optimizer_steps": 3, "files": {}})
        else:
            self._end.set_exception(self._error)

    def read_shards(self, folder: Path, meta: Mapping[str, Any]) -> None:
        raise AssertionError

    def shards_kept(self, folder: Path) -> None:
        self.kept.append(folder)
        assert sorted(p.name for p in folder.parent.parent.iterdir()) == ["step-000001", "step-000002"]


def test_ranks_are_waited_for_and_let_go_of_an_older_one_before_it_is_removed(tmp_path: Path) -> None:
    saved(tmp_path, make(1), keep_last=1)
    ranks = Ranks()
    with CheckpointWriter(tmp_path, ranks) as writer:
        writer.begin(make(2), keep_last=1)
        assert not (tmp_path / "step-000002").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    assert ranks.kept == [tmp_path / "step-000002" / "learner"]
    found = load_latest(tmp_path)
    assert found is not None
    assert found.shards == {"optimizer_steps": 3, "files": {}}


def test_a_rank_without_room_is_named(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, Ranks(OSError("learner rank 1: no room")))
    writer.begin(make(1), keep_last=1)
    with pytest.raises(TrainingStopped, match="could not be written: learner rank 1: no room; there is none yet"):
        writer.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ending", "told"),
    [(None, TrainingStopped), (KeyboardInterrupt("stop"), TrainingStopped), (ArithmeticError("why"), ArithmeticError)],
)
def test_an_error_of_the_thread_is_told_at_the_next_step_or_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException | None, told: type[BaseException]
) -> None:
    def full(*_given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)

    def checked() -> None:
        while True:
            writer.check()

    def block() -> None:
        with writer:
            writer.begin(make(2), keep_last=1)
            if ending is not None:
                raise ending

    writer = CheckpointWriter(tmp_path)
    writer.begin(make(1), keep_last=1)
    with pytest.raises(TrainingStopped, match="No space left"):
        checked()
    with pytest.raises(told):
        block()


def test_what_a_kill_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path, make(1), keep_last=2)
    assert list(tmp_path.iterdir()), "what was written is still there"
    assert load_latest(tmp_path) is None
    saved(tmp_path, make(2), keep_last=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, make(1), keep_last=2)
    (folder / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged .*delete that folder"):
        load_latest(tmp_path)


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path, make(1), keep_last=2) / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not have the checksum"):
        load_latest(tmp_path)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("schema", [1, 99])
def test_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    edit(saved(tmp_path, make(1), keep_last=2), schema_version=schema)
    with pytest.raises(CheckpointError, match=rf"schema {schema}, this magicrl reads 2; resume it with the version"):
        load_latest(tmp_path)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, replace(make(1), owner="theirs"), keep_last=2)
    assert load_latest(tmp_path, owner="theirs") is not None
    with pytest.raises(CheckpointError, match=r"another configuration \(hash theirs, this run's is mine\)"):
        load_latest(tmp_path, owner="mine")


def test_state_splits_and_joins() -> None:
    state = {"w": torch.ones(2), "meta": {"step": 1}}
    tensors, rest = split_state("learner", state)
    assert set(tensors) == {"learner/w"}
    joined = join_state("learner", {**tensors, "engine/z": torch.zeros(1)}, rest)
    assert set(joined) == {"w", "meta"}


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "none") is None
