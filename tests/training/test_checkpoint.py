"""Checkpoints: whole or absent, kept as asked, refused with a reason when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from magicrl.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    join_state,
    load_latest,
    save_checkpoint,
    split_state,
)

RoomFor = Callable[[int], AbstractContextManager[None]]


def make(step: int) -> Checkpoint:
    return Checkpoint(step=step, tensors={"learner/w": torch.full((3,), float(step))}, state={"x": {"c": 0.1 * step}})


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(3), keep_last=2)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 3
    assert loaded.state == {"x": {"c": 0.1 * 3}}
    assert torch.equal(loaded.tensors["learner/w"], make(3).tensors["learner/w"])


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, make(step), keep_last=2, keep=frozenset({2}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]
    latest = load_latest(tmp_path)
    assert latest is not None
    assert latest.step == 5


@pytest.mark.parametrize("size", [0, 40, 130])
def test_a_full_disk_leaves_the_last_good_one_and_gives_its_space_back(
    tmp_path: Path, room_for: RoomFor, size: int
) -> None:
    """130 bytes hold the tensors but not the state."""
    save_checkpoint(tmp_path, make(1), keep_last=2)
    with (
        room_for(size),
        pytest.raises(CheckpointError, match=r"step-000002 could not be written: .*last good one is step-000001"),
    ):
        save_checkpoint(tmp_path, make(2), keep_last=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1


def test_what_a_kill_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, make(1), keep_last=2)
    assert list(tmp_path.iterdir()), "what was written is still there"
    assert load_latest(tmp_path) is None
    save_checkpoint(tmp_path, make(2), keep_last=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path, make(1), keep_last=2)
    (folder / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged .*delete that folder"):
        load_latest(tmp_path)


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make(1), keep_last=2) / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not have the checksum"):
        load_latest(tmp_path)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    edit(save_checkpoint(tmp_path, make(1), keep_last=2), schema_version=99)
    with pytest.raises(CheckpointError, match=r"schema 99, this magicrl reads 2; resume it with the version"):
        load_latest(tmp_path)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, replace(make(1), owner="theirs"), keep_last=2)
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
