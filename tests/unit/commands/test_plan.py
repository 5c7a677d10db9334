"""``magicrl plan`` as a user calls it: shipped recipes, JSON, alternatives, rejections and their exit status."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from magicrl.commands.main import app, main
from magicrl.registry import BUILTINS, resolve

ROOT = Path(__file__).resolve().parents[3]
PAPER = str(ROOT / "studies/bases/paper-7b.toml")


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert app(["plan", *words], result_action="return_value") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("recipe", "model"), [("quickstart", "tiny"), ("smollm2", "SmolLM2-135M")])
def test_shipped_recipes_on_this_machine(recipe: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(ROOT / "src" / "magicrl" / "recipes" / f"{recipe}.toml"), "--gpus", "1", "--gpu", "cpu-2core"]
    text = plan(capsys, *words)
    assert text.startswith(model)
    assert "does not fit" not in text
    facts = json.loads(plan(capsys, *words, "--json"))
    assert facts["calibration"]["name"] == f"cpu-2core-{recipe}"
    assert len(facts["stages"]) == 2
    assert all("accelerators" not in change["change"] for change in facts["what_if"])  # there is no second accelerator


def test_json_says_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = [PAPER, "--gpus", "32", "--gpu", "H800-80G", "--hours", "24", "--cost-per-gpu-hour", "2", "--json"]
    change = "gpus=64,staleness=1,stages.0.group_size=32"
    facts = json.loads(plan(capsys, *words, "--compare", change, "--compare", "gpus=1"))
    (stage,) = facts["stages"]
    assert facts["steps_in_budget"] == int(24 * 3600 / stage["step_seconds"])
    assert facts["cost"] == pytest.approx(facts["hours"] * 32 * 2, rel=1e-3)
    assert facts["cost"] == round(facts["cost"], 2), "money has two decimals"
    factor = facts["calibration"]["factor"]
    for value, (low, high) in (
        (stage["step_seconds"], stage["step_seconds_90_percent"]),
        (facts["hours"], facts["hours_90_percent"]),
    ):
        assert (low, high) == pytest.approx((value / factor, value * factor), rel=1e-4)
    assert stage["flops_bound_seconds"] < stage["step_seconds"]
    learner = facts["memory_gib"]["learner"]
    assert sum(learner.values()) == pytest.approx(facts["memory_gib"]["learner_total"], abs=0.02)
    assert facts["memory_gib"]["learner_total"] < facts["memory_gib"]["budget"]
    larger, refused = facts["compare"]
    assert (larger["gpus"], larger["staleness"]) == (64, 1)
    assert (larger["stages"][0]["group_size"], larger["change"]) == (32, change)
    assert "does not fit on 1 x H800-80G" in refused["refused"]


def test_the_text_says_cost_budget_and_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    words = [PAPER, "--gpus", "32", "--gpu", "H800-80G", "--hours", "24", "--cost-per-gpu-hour", "2"]
    words += ["--compare", "gpus=64", "--compare", "gpus=1"]
    facts = json.loads(plan(capsys, *words, "--json"))
    text = " ".join(plan(capsys, *words).split())
    steps = sum(stage["steps"] for stage in facts["stages"])
    assert f"cost: {facts['cost']:,.2f}" in text
    assert f"24 h are enough for {facts['steps_in_budget']} of {steps} steps" in text
    assert "instead gpus=64: " in text
    assert f"{facts['compare'][0]['hours']:.1f} h," in text.partition("instead gpus=64: ")[2]
    assert "instead gpus=1: refused: " in text


def test_memory_follows_the_precision_and_the_text_says_that_times_do_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["smollm2", "--gpu", "cpu-2core"]

    def memory(*settings: str) -> tuple[dict[str, float], dict[str, float]]:
        facts = json.loads(plan(capsys, *words, "--json", *(word for one in settings for word in ("--set", one))))
        return facts["memory_gib"]["learner"], facts["memory_gib"]["engine"]

    (learner, engine), (wide, wide_engine) = memory(), memory("model.dtype=float32")
    assert wide["activations"] == pytest.approx(2 * learner["activations"], rel=0.01)
    assert (wide["master"], wide["gathered"]) == (learner["master"], 0), "the master weights are those of the forward"
    assert wide_engine["weights"] == pytest.approx(2 * engine["weights"], rel=0.01)
    assert memory("rollout.dtype=float32") == (learner, wide_engine | {"learner": engine["learner"]})
    said = "the memory is that of model.dtype float32, but the times are those of bfloat16"
    assert said in plan(capsys, *words, "--set", "model.dtype=float32")
    assert "but the times" not in plan(capsys, *words)
    assert "but the times" not in plan(capsys, "quickstart", "--gpu", "cpu-2core"), "its times are of float32"
    page = tmp_path / "plan.html"
    plan(capsys, *words, "--set", "model.dtype=float32", "--page", str(page))
    assert "the times are those of bfloat16" in page.read_text()


def test_the_staleness_of_a_plan_is_the_recipe_s_unless_another_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deepseek/1.5b-node", "--gpus", "8", "--gpu", "H100-80G"]
    for one in ("rollout.max_staleness=1", "algorithm.correction=tis", "entropy.estimator=exact"):
        words += ["--set", one]
    own, synchronous = (json.loads(plan(capsys, *words, "--json", *more)) for more in ((), ("--staleness", "0")))
    assert (own["staleness"], synchronous["staleness"]) == (1, 0)
    assert not any(one.startswith("rollout.max_staleness") for one in own["settings"])
    assert own["stated"]["hours"] == synchronous["stated"]["hours"], "[cluster] is timed as the recipe runs"
    assert "rollout.max_staleness" not in plan(capsys, *words)
    text = " ".join(plan(capsys, *words, "--staleness", "0").split())
    assert "these settings end the recipe's asynchronous training: --staleness 0" in text
    assert "accelerators, the recipe's rollout.max_staleness 1: all stages" in text


def test_staleness_has_no_effect_where_engine_and_learner_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quickstart", "--gpu", "H100-80G", "--compare", "staleness=1"]
    why = "has no effect: in the fastest layout engine and learner take turns"
    text = " ".join(plan(capsys, *words, "--staleness", "2").split())
    assert f"as in the recipe staleness 2 {why} learner" in text
    assert f"accelerator-hours; staleness 1 {why} efficiencies" in text
    facts = json.loads(plan(capsys, *words, "--staleness", "2", "--json"))
    assert (facts["staleness"], facts["requested_staleness"]) == (0, 2)
    assert "staleness" not in plan(capsys, *words[:3])


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
def test_what_cannot_fit_exits_2_and_says_what_would(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--prompt-tokens", "300", "--kept", "0.5"]
    monkeypatch.setattr("sys.argv", ["magicrl", "plan", PAPER, "--gpus", "1", "--gpu", "H800-80G", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "does not fit on 1 x H800-80G" in error
    (command,) = [line.strip() for line in error.splitlines() if line.strip().endswith("--set model.lora.rank=16")]
    assert shlex.join(words) in command, "another prompt would be another problem"
    assert app(shlex.split(command)[1:], result_action="return_value") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H900"], "no hardware called 'H900'"),
        (["--gpu", "H200", "--model", "nowhere"], "no model folder and no known model 'nowhere'"),
        (["--gpu", "H200", "--compare", "gpus"], "is not KEY=VALUE"),
        (["--gpu", "H200", "--compare", "gpus=2,gpus=4"], "gpus is given twice; two alternatives are two --compare"),
        (["--gpu", "H200", "--compare", "gpus=many"], "--compare gpus=many: gpus needs a whole number"),
        (["--gpu", "H200", "--compare", "gpus=0"], "--compare gpus=0: --gpus must be at least 1"),
        (["--gpu", "H200", "--compare", "gpu=H900"], "--compare gpu=H900: no hardware called 'H900'"),
        (["--gpu", "H200", "--compare", "stages.0.max_token=1"], "--compare stages.0.max_token=1: unknown key"),
        (["--gpu", "H200", "--model", "."], "[.]: this folder has no config.json"),
        (["--gpu", "H200", "--hours", "-1"], "--hours must be above 0"),
        (["--gpu", "H200", "--mean-length", "20000"], "does not fit T = 16384"),
    ],
)
def test_mistakes_name_their_value(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        app(["plan", PAPER, "--gpus", "8", *words], result_action="return_value")


def test_an_incomplete_hardware_file_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[mine]\nmemory_gib = 80\nbf16_tflops = "fast"\ngpus_per_node = 8\n')
    with pytest.raises(ValueError, match=r"file: mine.bf16_tflops = 'fast': .*; mine.memory_tb_s is missing"):
        app(["plan", PAPER, "--gpu", str(tmp_path / "mine.toml")], result_action="return_value")


def test_a_response_longer_than_the_context_is_refused_as_in_training(tmp_path: Path) -> None:
    words = ["plan", "quickstart", "--gpu", "cpu-2core", "--set", "stages.0.max_tokens=100000"]
    with pytest.raises(ValueError, match="T = 100000 and the prompt exceed the context of tiny"):
        app(words, result_action="return_value")
    words = ["quickstart", "--gpu", "cpu-2core", "--prompt-tokens", "1000000"]
    with pytest.raises(ValueError, match="the prompt exceed the context of tiny"):
        app(["plan", *words], result_action="return_value")


def test_the_time_of_a_tiny_run_is_not_rounded_to_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    one = (f"stages.{i}.{key}=1" for i in range(2) for key in ("min_steps", "max_steps"))
    words = ["quickstart", "--gpu", "cpu-2core", "--json", *(word for setting in one for word in ("--set", setting))]
    facts = json.loads(plan(capsys, *words, "--cost-per-gpu-hour", "0.01"))
    assert facts["hours"] == pytest.approx(sum(s["step_seconds"] for s in facts["stages"]) / 3600, rel=0.01)
    assert facts["cost"] == pytest.approx(facts["hours"] * 0.01, rel=1e-3)


def test_a_reference_that_only_a_brought_loss_asks_for_is_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import replace\nfrom magicrl.algorithms.losses import MAGIC\n"
        "PLAIN = replace(MAGIC)\nROW = replace(MAGIC, needs=(*MAGIC.needs, 'ref_logprobs'))\n"
    )
    words = ["smollm2", "--gpus", "1", "--gpu", "cpu-2core", "--json", "--set"]

    def facts(setting: str) -> tuple[float, float]:
        told = json.loads(plan(capsys, *words, setting))
        return told["memory_gib"]["learner"].get("reference", 0.0), told["stages"][0]["step_seconds"]

    assert facts(f"algorithm.loss={mine}:PLAIN") == facts("reference.mode=none")
    counted = facts(f"algorithm.loss={mine}:ROW")
    assert counted == facts("reference.mode=monitor")
    assert counted[0] > 0
    assert counted[1] > facts("reference.mode=none")[1]


def test_no_built_in_asks_for_a_reference() -> None:
    """Otherwise a plan would import torch."""
    for kind in ("loss", "correction"):
        assert not any("ref_logprobs" in resolve(kind, name).needs for name in BUILTINS[kind])
