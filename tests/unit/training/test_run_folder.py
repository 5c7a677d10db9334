"""What a run takes over from its folder: its own records up to the checkpoint, never those of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from magicrl.config.loader import load_train_recipe
from magicrl.training.recorder import RunFolder, _other_task, check_folder

CONFIG = load_train_recipe(Path("tiny"))


@pytest.mark.parametrize("left", ["evaluations/before-exam.json", "rollouts/step-000003.parquet"])
def test_a_new_run_refuses_the_results_of_an_older_one(left: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder(run, CONFIG, resume=False)
    check_folder(run, CONFIG, resume=False)  # empty folders are those of a killed process
    (run / left).write_text("{}")
    with pytest.raises(ValueError, match=rf"holds other files \({left.partition('/')[0]}\).*choose another --output"):
        check_folder(run, CONFIG, resume=False)


def test_a_resumed_run_drops_the_results_after_its_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, resume=False)
    for step in (2, 3):
        (folder.rollouts / f"step-{step:06d}.parquet").touch()
        folder.write_evaluation(f"step-{step:06d}-exam", {})
    folder.write_evaluation("before-exam", {})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "stage": 0, "values": {}}) + "\n")
    folder.rewind(2)
    assert [path.name for path in folder.rollouts.iterdir()] == ["step-000002.parquet"]
    assert sorted(path.stem for path in folder.evaluations.iterdir()) == ["before-exam", "step-000002-exam"]


def test_a_run_of_version_0_2_recorded_checksums_with_the_folders_of_rewards() -> None:
    document = {"environments": [{}], "data": {"train": {"sha256": "old"}}}
    environment = {"start_weights": "w"}

    def changed(with_folders: str) -> list[str]:
        now = {"train": {"sha256": "new", "sha256_with_folders": with_folders}}
        return _other_task(document, environment, {"data": now}, CONFIG)

    assert changed("old") == []
    assert changed("other") == ["the problems of data.train"]


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ([], []),
        (["model.lora.rank=4"], ["the weights of the start model, the base of the adapters,"]),
        (["reference.mode=monitor"], ["the weights of the start model, the reference,"]),
        (["reference.mode=monitor", "reference.model=./another"], []),
    ],
)
def test_other_weights_of_the_start_model_matter_where_no_checkpoint_holds_them(
    settings: list[str], changed: list[str]
) -> None:
    config = load_train_recipe(Path("tiny"), settings)
    assert _other_task({"environments": [{"start_weights": "a"}]}, {"start_weights": "b"}, {}, config) == changed
    assert _other_task({"environments": [{}]}, {"start_weights": "b"}, {}, config) == [], "not recorded by version 0.1"


@pytest.mark.parametrize(
    ("table", "more"),
    [
        ("reference", ["reference.mode=monitor"]),
        ("teacher", ["algorithm.reject_zero_advantage=false", "algorithm.refill=none"]),
    ],
)
def test_another_frozen_model_is_refused(
    table: str, more: list[str], tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_models[0], tmp_path / "frozen")
    config = load_train_recipe(Path("tiny"), [f"{table}.model={tmp_path / 'frozen'}", *more])
    RunFolder(tmp_path / "run", config, resume=False).start(config, {})
    RunFolder(tmp_path / "run", config, resume=True).start(config, {})
    shutil.copy(tiny_models[1] / "model.safetensors", tmp_path / "frozen")
    with pytest.raises(ValueError, match=rf"since the run started, the weights of {table}\.model changed"):
        RunFolder(tmp_path / "run", config, resume=True).start(config, {})
