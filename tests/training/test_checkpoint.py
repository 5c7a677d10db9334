"""Checkpoints: whole or absent, kept as asked, refused with a reason when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magicrl.training import checkpoint as module
from magicrl.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    join_state,
    load_latest,
    save_checkpoint,
    split_state,
)


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


def test_a_kill_while_writing_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1), keep_last=2)

    def full_disk(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, make(2), keep_last=2)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    save_checkpoint(tmp_path, make(2), keep_last=2)
    assert not list(tmp_path.glob(".writing*"))


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path, make(1), keep_last=2)
    (folder / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged .*delete that folder"):
        load_latest(tmp_path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, make(1), keep_last=2)
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(CheckpointError, match="schema 99"):
        load_latest(tmp_path)


def test_state_splits_and_joins() -> None:
    state = {"w": torch.ones(2), "meta": {"step": 1}}
    tensors, rest = split_state("learner", state)
    assert set(tensors) == {"learner/w"}
    joined = join_state("learner", {**tensors, "engine/z": torch.zeros(1)}, rest)
    assert set(joined) == {"w", "meta"}


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "none") is None
