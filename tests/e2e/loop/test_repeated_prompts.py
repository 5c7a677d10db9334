"""A file with every prompt twice: a solved prompt removes all its problems, and all of them are counted."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from magicrl.config.loader import load_train_recipe
from magicrl.data.families import make_family
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training


def test_the_unfiltered_accuracy_counts_the_twins_of_solved_prompts(toy_recipe: Path, tmp_path: Path) -> None:
    stream = make_family("running_sum", {}).stream(seed=3, split="train", levels=None)
    asked = [json.dumps({"question": p.prompt, "reference": p.references[0]}) + "\n" for p in islice(stream, 30)]
    (tmp_path / "twice.jsonl").write_text("".join(2 * asked))
    settings = (
        'data.train=[{path="twice.jsonl", verifier="exact"}]',
        "data.test={}",
        "data.validation=[]",
        "evaluation.every=0",
        "stages.0.group_size=2",
        "stages.0.rollout_batch=20",
        "stages.0.max_steps=3",
        "stages.1.max_steps=2",
    )
    run_training(
        load_train_recipe(toy_recipe, settings, overrides_from=tmp_path), tmp_path / "run", NullObserver(), resume=False
    )

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]

    (event,) = [event for event in lines("events.jsonl") if event["kind"] == "filter"]
    removed, kept = event["removed"], event["kept"]
    assert removed == 2 * event["removed_prompts"] > 0
    assert removed + kept == 60
    for line in lines("metrics.jsonl")[3:]:
        accuracy = line["values"]["train/accuracy/mean"]
        unfiltered = (kept * accuracy + removed) / 60
        assert line["values"]["train/accuracy_unfiltered/mean"] == pytest.approx(unfiltered)
