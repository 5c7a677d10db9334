"""A run of the command with trackers: they end with the values of ``metrics.jsonl``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from magicrl.commands.train import command as train


def test_tensorboard_and_wandb_hold_the_metrics_of_a_run(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    output = tmp_path / "run"
    chosen = ['logging.trackers=["tensorboard", "wandb"]', "stages.0.max_steps=2", "stages.1.max_steps=1"]
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    assert train(toy_recipe, settings=chosen, output=output) == 0
    assert "WANDB_SERVICE" not in os.environ, "a later process would share this one's service, and survive no kill"
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    for key in ("train/accuracy/mean", "entropy/exact/mean", "stage/max_tokens", "time/step"):
        shown = [(e.step, e.value) for e in events.Scalars(key)]
        assert shown == [(row["step"], pytest.approx(row["values"][key])) for row in rows]
    stages = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("events/stage_start")]
    assert [text.split(":")[0] for text in stages] == ["stage 1", "stage 2"]
    after = json.loads((output / "evaluations" / "after-held_out.json").read_text())
    measured = after["temperatures"]["1.0"]["accuracy"]["mean"]
    assert [(e.step, e.value) for e in events.Scalars("test_after/held_out_t1/mean")] == [(3, pytest.approx(measured))]
    assert len(list((output / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    warnings = [line for line in (output / "events.jsonl").read_text().splitlines() if "tracker" in line]
    assert warnings == []
