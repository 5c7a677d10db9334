"""Both sides of the time-to-accuracy benchmark train the same model on the same prompts and are measured alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import time_to_accuracy
from transformers import AutoTokenizer
from transformers import logging as hf_logging

from magicrl.config.schema import TinyModelConfig
from magicrl.data.families import make_family
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny

CASE = replace(
    time_to_accuracy.CASES["small"],
    overrides=(
        "data.train.0.count=16",
        "data.test.held_out.count=4",
        "stages.0.max_tokens=6",
        "stages.0.rollout_batch=2",
        "stages.0.group_size=2",
        "algorithm.reject_zero_advantage=false",
    ),
    trl={"per_device_batch": 4, "bf16": False},
    every=1,
    problems=4,
    samples=2,
    steps=1,
)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    hf_logging.set_verbosity_error()
    words = make_family("running_sum").vocabulary
    assert words is not None
    model, tokenizer = make_tiny(TinyModelConfig(), words, seed=0)
    save_policy(model, tokenizer, tmp_path / "start")
    return tmp_path / "start"


def test_both_sides_start_alike_and_leave_a_curve(start: Path, tmp_path: Path) -> None:
    output = tmp_path / "figure.json"
    for side in time_to_accuracy.SIDES:
        for _ in range(2):  # an arm that is there is not run again
            time_to_accuracy.run_arm("small", CASE, side, 0, start, tmp_path, output)
    arms = json.loads(output.read_text())["arms"]
    assert [arm["key"]["side"] for arm in arms] == ["magicrl", "trl", "magicrl-plain"]
    assert {arm["key"]["start"] for arm in arms} == {"start"}
    assert arms[0]["curve"][0] == arms[1]["curve"][0] == arms[2]["curve"][0]
    for arm in arms:
        assert len(arm["products_s"]) == 2
        assert [point["updates"] for point in arm["curve"]] == [0, 1]
        assert arm["curve"][1]["cpu_s"] > 0
        assert arm["to_target"] is None, "a random model has not learned to add"


def test_a_prompt_that_trl_reads_otherwise_is_refused(start: Path, tmp_path: Path) -> None:
    recipe = time_to_accuracy.ROOT / "src" / "magicrl" / "recipes" / CASE.recipe
    config = time_to_accuracy.load_train_recipe(recipe, [*CASE.overrides, f"model={start}"])
    ready = time_to_accuracy.check_run(config, tmp_path / "not-written", resume=False)
    built = time_to_accuracy.build(config, ready, start)
    assert time_to_accuracy.peer_prompts(built) == [p.prompt for p in built.data.train]
    other = AutoTokenizer.from_pretrained(start)
    other.chat_template = "{% for m in messages %}{{ m['content'] }} {{ m['content'] }}{% endfor %}"
    twice = replace(built, start=replace(built.start, tokenizer=other))
    with pytest.raises(RuntimeError, match="encode the prompt differently"):
        time_to_accuracy.peer_prompts(twice)


def arm(side: str, seed: int, seconds: float | None, products: tuple[float, ...] = ()) -> dict[str, object]:
    reached = None if seconds is None else {"cpu_s": seconds, "updates": 6}
    return {"key": {"case": "small", "side": side, "seed": seed}, "to_target": reached, "products_s": products}


def test_ratios_are_of_seeds_that_both_sides_ended() -> None:
    arms = [arm("magicrl", 0, 10), arm("trl", 0, 20), arm("magicrl", 1, 10), arm("trl", 1, 80), arm("trl", 2, None)]
    found = time_to_accuracy.ratios(arms)
    both = {"times_faster": {"0": 2.0, "1": 8.0}, "geometric_mean": 4.0, "updates_of_trl_over_ours": {"0": 1, "1": 1}}
    assert found == {"small": {"magicrl": both}}


def test_arms_whose_products_took_other_times_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alike = [arm("trl", 0, 20, (1.0, 1.1)), arm("magicrl", 0, 10, (1.05, 1.0))]
    for other in [(1.2, 1.2), (1.0, 2.0), (0.8, 0.8)]:  # another machine, a disturbed one, a faster one
        arms = [*alike, arm("trl", 1, 20, (1.0, 1.0)), arm("magicrl", 1, 10, other)]
        assert time_to_accuracy.ratios(arms)["small"]["magicrl"]["times_faster"] == {"0": 2.0}
        (tmp_path / "arms.json").write_text(json.dumps({"arms": arms}))
        monkeypatch.setattr("sys.argv", ["time_to_accuracy.py", "--output", str(tmp_path / "arms.json")])
        monkeypatch.setattr(time_to_accuracy, "run_arm", lambda *_: None)
        with pytest.raises(SystemExit, match="small, seed 1, magicrl; take"):
            time_to_accuracy.main()


def test_the_crossing_lies_on_the_line_between_two_measurements() -> None:
    curve = object.__new__(time_to_accuracy.Curve)
    curve._case = replace(CASE, target=0.75)
    curve.points = [
        {"updates": 0, "cpu_s": 0.0, "wall_s": 0.0, "accuracy": 0.4},
        {"updates": 5, "cpu_s": 10.0, "wall_s": 20.0, "accuracy": 0.7},
        {"updates": 10, "cpu_s": 18.0, "wall_s": 40.0, "accuracy": 0.8},
    ]
    assert curve.to_target() == {"updates": 7.5, "cpu_s": 14.0, "wall_s": 30.0}
