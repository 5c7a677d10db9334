"""A whole toy run: its files, numbers that add up, and a resumed run that equals the uninterrupted one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from magicrl.commands.train import command
from magicrl.config.loader import load_train_recipe
from magicrl.records import StepMetrics, TrainBatch
from magicrl.rollout.recording import read_rollouts
from magicrl.training.objective import Objective
from magicrl.training.protocols import TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training


def run(recipe: Path, output: Path, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    config = load_train_recipe(recipe, overrides)
    run_training(config, output, NullObserver(), resume=resume)
    return metrics_of(output)


def metrics_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return metrics without those that depend on the clock."""
    clocked = ("time/", "speed/", "memory/", "tokens/per_second", "verify/seconds")
    return [{**row, "values": {k: v for k, v in row["values"].items() if not k.startswith(clocked)}} for row in rows]


def test_a_run_leaves_everything_and_its_numbers_add_up(toy_recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    rows = run(toy_recipe, output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["stage"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["values"]["stage/max_tokens"] for row in rows] == [8, 8, 8, 24, 24, 24]
    for row in rows:
        values = row["values"]
        parts = values["time/rollout"] + values["time/train"] + values["time/other"]
        assert parts == pytest.approx(values["time/step"], rel=0.01)
        assert 0 < values["time/longest_response"] <= values["time/rollout"], "no response takes longer than all"
        assert values["time/rollout_cpu"] > 0
        assert (values["time/train_cpu"] > 0) == (values["learner/sgd_steps"] > 0)
        assert sum(v for k, v in values.items() if k.startswith("time/other/")) <= values["time/other"]
        sampled = values["speed/engine/tokens_per_second"] * values["time/rollout"]
        assert sampled == pytest.approx(values["tokens/sampled"])
        assert ("flops/learner" in values) == (values["learner/sgd_steps"] > 0)
        assert values["memory/learner/peak_mb"] > 0
        assert not any(key.endswith("/mfu") for key in values), "a CPU's peak is not known"
        if values["learner/sgd_steps"]:
            assert values["learner/ratio_mean"] == 1.0  # on-policy: rho is exactly 1
            assert values["learner/ratio_max"] == 1.0
            assert values["learner/sampler_gap_max"] < 1e-3
        j = values["train/accuracy/mean"]
        if values["train/accuracy_nontruncated/mean"] is not None:
            identity = (1 - values["train/truncation/ratio"]) * values["train/accuracy_nontruncated/mean"]
            assert j == pytest.approx(identity, abs=1e-6)  # J = E[p_nontrunc * r_nontrunc]
    assert "validation/accuracy/mean" in rows[1]["values"]
    status = json.loads((output / "run.json").read_text())
    assert status["status"] == "finished"
    assert status["data"]["train"]["problems"] == 60
    assert status["devices"] == 1  # factor of the device hours in reports
    for name in ("before-held_out", "after-held_out"):
        evaluation = json.loads((output / "evaluations" / f"{name}.json").read_text())
        assert evaluation["max_tokens"] == 24, "of the last stage, before training too"
        assert set(evaluation["temperatures"]) == {"0.0", "1.0"}
        assert {tau: found["samples"] for tau, found in evaluation["temperatures"].items()} == {"0.0": 1, "1.0": 4}
        assert evaluation["temperatures"]["1.0"]["pass_at"]["4"]["problems"] == 10
    events = [json.loads(line)["kind"] for line in (output / "events.jsonl").read_text().splitlines()]
    assert (events.count("stage_start"), events.count("stage_end"), events.count("evaluation")) == (2, 2, 2)
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    assert sum(p.numel() for p in model.parameters()) > 0
    groups = read_rollouts(output / "rollouts")
    assert len(groups) == 48
    assert sum(g.num_tokens for g in groups) == sum(row["values"]["tokens/sampled"] for row in rows)


def test_the_policy_changes_and_the_start_model_does_not(toy_recipe: Path, toy_model: Path, tmp_path: Path) -> None:
    before = load_file(toy_model / "model.safetensors")
    run(toy_recipe, tmp_path / "run")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.values(), load_file(toy_model / "model.safetensors").values(), strict=True)
    )


@pytest.mark.parametrize("keep", [2, 3, 4])
def test_a_resumed_run_is_the_same_run(toy_recipe: Path, tmp_path: Path, keep: int) -> None:
    whole = tmp_path / "whole"
    rows = run(toy_recipe, whole, "checkpoint.keep_last=9", "algorithm.refill=until_full")
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for folder in (cut / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > keep:
            shutil.rmtree(folder)
    shutil.rmtree(cut / "model")
    (cut / "evaluations" / "after-held_out.json").unlink()
    again = run(toy_recipe, cut, "checkpoint.keep_last=9", "algorithm.refill=until_full", resume=True)
    assert timeless(again) == timeless(rows)
    states = [
        json.loads((folder / "checkpoints" / "step-000006" / "state.json").read_text())["state"]
        for folder in (whole, cut)
    ]
    assert states[0]["best"] == states[1]["best"] is not None
    expected = load_file(whole / "model" / "model.safetensors")
    found = load_file(cut / "model" / "model.safetensors")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_resume_on_another_task_is_refused(toy_recipe: Path, toy_model: Path, tmp_path: Path) -> None:
    model, tests, reward = tmp_path / "start", tmp_path / "tests.jsonl", tmp_path / "mine.py"
    shutil.copytree(toy_model, model)
    tests.write_text("".join(json.dumps({"prompt": f"L {n} 2 :", "answer": str(n)}) + "\n" for n in range(4)))
    reward.write_text("def score(problem, response):\n    return len(response) % 2\n")
    settings = [
        f"start.model={model}",
        f"data.test.held_out={{path = '{tests}'}}",
        f"data.train.0.verifier={reward}:score",
        "reference.mode=monitor",
        "stages.1.max_steps=1",
        "data.validation=[]",
        "evaluation.every=0",
    ]
    output = tmp_path / "run"
    run(toy_recipe, output, *settings)
    (output / "evaluations" / "after-held_out.json").unlink()
    described = model / "tokenizer_config.json"
    files = {
        path: path.read_bytes() for path in (tests, reward, model / "model.safetensors", described, output / "run.json")
    }
    template = {"chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}"}
    weights = {name: weight + 0.01 for name, weight in load_file(model / "model.safetensors").items()}
    others = tests.read_text().replace(" 2 :", " 3 :")
    changes = {
        r"the problems of data\.test\.held_out changed": lambda: tests.write_text(others),
        r"the file of data\.train\.0\.verifier changed": lambda: reward.write_text("def score(p, r): return 1"),
        "the weights of the start model, the reference, changed": lambda: save_file(
            weights, model / "model.safetensors", {"format": "pt"}
        ),
        "the configuration, tokenizer or chat template of the start model changed": lambda: described.write_text(
            json.dumps(json.loads(described.read_text()) | template)
        ),
    }
    for named, change in changes.items():
        change()
        with pytest.raises(ValueError, match=named):
            run(toy_recipe, output, *settings, resume=True)
        assert (output / "run.json").read_bytes() == files[output / "run.json"]
        for path, content in files.items():
            path.write_bytes(content)
    run(toy_recipe, output, *settings, resume=True)


def test_a_lost_evaluation_before_training_is_made_with_the_initial_weights(toy_recipe: Path, tmp_path: Path) -> None:
    settings = ("stages.0.max_steps=2", "stages.1.max_steps=1", "data.validation=[]", "evaluation.every=0")
    run(toy_recipe, tmp_path / "run", *settings)
    evaluation = tmp_path / "run" / "evaluations" / "before-held_out.json"
    written = evaluation.read_text()
    evaluation.unlink()
    run(toy_recipe, tmp_path / "run", *settings, resume=True)
    assert evaluation.read_text() == written


def test_an_old_checkpoint_that_a_kill_left_is_removed(toy_recipe: Path, tmp_path: Path) -> None:
    settings = ("checkpoint.keep_last=1", "checkpoint.keep_best=false")
    run(toy_recipe, tmp_path / "run", *settings)
    checkpoints = tmp_path / "run" / "checkpoints"
    (last,) = checkpoints.iterdir()
    shutil.copytree(last, checkpoints / "step-000004")  # the kill came after the last one was written
    shutil.rmtree(tmp_path / "run" / "model")
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    document["environments"][0] |= {"threads": 7, "kernels": "another's"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(document))
    run(toy_recipe, tmp_path / "run", *settings, resume=True)
    assert list(checkpoints.iterdir()) == [last]
    events = (tmp_path / "run" / "events.jsonl").read_text()
    changes = re.search('resumed in another environment, not bit-identical: ([^"]*)', events)
    assert changes is not None
    assert re.fullmatch("threads: was 7, is 1; kernels: was another's, is (magicrl|torch)'s", changes[1])


def test_a_run_whose_checkpoints_are_gone_is_evaluated_again(toy_recipe: Path, tmp_path: Path) -> None:
    settings = ("stages.0.max_steps=1", "stages.1.max_steps=1", "data.validation=[]", "evaluation.every=0")
    run(toy_recipe, tmp_path / "run", *settings)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    evaluation = tmp_path / "run" / "evaluations" / "after-held_out.json"
    written = evaluation.read_text()
    evaluation.write_text(written.replace('"policy_version": 2', '"policy_version": 7'))  # of other weights
    run(toy_recipe, tmp_path / "run", *settings, resume=True)
    assert evaluation.read_text() == written


def test_off_policy_with_reuse_makes_the_stated_number_of_updates(toy_recipe: Path, tmp_path: Path) -> None:
    rows = run(
        toy_recipe,
        tmp_path / "run",
        "stages.0.mini_batch=4",
        "stages.1.mini_batch=4",
        "algorithm.reuse=2",
        "algorithm.reject_zero_advantage=false",
    )
    assert [row["values"]["learner/sgd_steps"] for row in rows] == [4] * 6
    assert any(row["values"]["learner/ratio_max"] > 1.0 for row in rows)


def test_the_reference_is_watched_without_changing_the_run(toy_recipe: Path, tmp_path: Path) -> None:
    plain = run(toy_recipe, tmp_path / "plain")
    watched = run(toy_recipe, tmp_path / "watched", "reference.mode=monitor")
    key = "learner/grad_norm"
    assert [r["values"].get(key) for r in plain] == [r["values"].get(key) for r in watched]
    assert [r["values"].get("learner/kl") for r in watched if r["values"].get("learner/kl")], "KL was measured"
    # the first step's policy is the starting model: its distance is 0 to that model only
    other = (f"reference.model={tmp_path / 'plain' / 'model'}", "stages.0.max_steps=1", "stages.1.max_steps=1")
    far = run(toy_recipe, tmp_path / "other", "reference.mode=monitor", *other, "data.test={}", "evaluation.every=0")
    assert watched[0]["values"]["learner/kl"] < 1e-9 < 1e-6 < far[0]["values"]["learner/kl"]


def test_without_a_reference_there_is_no_kl(toy_recipe: Path, tmp_path: Path) -> None:
    assert not any("learner/kl" in row["values"] for row in run(toy_recipe, tmp_path / "plain"))


def test_alpha_and_c_are_of_the_same_step(toy_recipe: Path, tmp_path: Path) -> None:
    rows = run(toy_recipe, tmp_path / "run", "entropy.target=100.0", "entropy.step=0.01", "entropy.maximum=1.0")
    assert [row["values"]["entropy/c"] for row in rows] == pytest.approx([0.01 * n for n in range(len(rows))])
    assert [row["values"]["entropy/alpha"] for row in rows] == [row["values"]["entropy/c"] for row in rows]


def test_dr_grpo_divides_by_the_present_stages_limit(toy_recipe: Path, tmp_path: Path) -> None:
    seen: list[tuple[int | None, float]] = []
    weights = Objective.sample_weights

    def watched(self: Objective, batch: TrainBatch) -> Tensor:
        found = weights(self, batch)
        seen.append((batch.max_response_tokens, 1 / (float(found[0]) * len(batch.samples))))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "sample_weights", watched)
        refill = ("algorithm.refill=until_full", "algorithm.refill_rounds=40")
        run(toy_recipe, tmp_path / "run", "algorithm.loss=dr_grpo", *refill)
    assert {limit for limit, _ in seen} == {8, 24}
    assert all(divisor == pytest.approx(limit) for limit, divisor in seen)


def test_a_lag_with_one_update_a_step_is_warned_of(toy_recipe: Path, tmp_path: Path) -> None:
    run(toy_recipe, tmp_path / "run", "rollout.weight_lag=1", "algorithm.reject_zero_advantage=false")
    assert (tmp_path / "run" / "events.jsonl").read_text().count("rho is exactly 1") == 1
    assert (tmp_path / "run" / "events.jsonl").read_text().count("entropy of the weights that sampled") == 1
    run(toy_recipe, tmp_path / "two", "rollout.weight_lag=1", "stages.0.mini_batch=4")
    assert "rho is exactly 1" not in (tmp_path / "two" / "events.jsonl").read_text()


def test_lagged_weights_sample_older_versions(toy_recipe: Path, tmp_path: Path) -> None:
    run(toy_recipe, tmp_path / "run", "rollout.weight_lag=2", "algorithm.reject_zero_advantage=false")
    versions = {
        g.request.draw // 8: g.completions[0].policy_version for g in read_rollouts(tmp_path / "run" / "rollouts")
    }
    assert versions == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    after = json.loads((tmp_path / "run" / "evaluations" / "after-held_out.json").read_text())
    assert after["policy_version"] == 6, "the test is of the newest weights"


def test_nothing_to_learn_stops_with_a_remedy(toy_recipe: Path, tmp_path: Path) -> None:
    # one response token can never be an answer that ended by itself: every group is all wrong
    overrides = ["stages.0.max_tokens=1", "stages.0.max_steps=9", "algorithm.stop_after_empty_steps=2"]
    with pytest.raises(TrainingStopped, match="every group of 2 steps in a row was rejected"):
        run(toy_recipe, tmp_path / "run", *overrides)
    rows = metrics_of(tmp_path / "run")
    assert [row["values"]["learner/sgd_steps"] for row in rows] == [0, 0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_empty_steps_count_only_in_a_row_and_over_a_restart(toy_recipe: Path, tmp_path: Path) -> None:
    """Stages of T = 1 have nothing to learn from. The stage between them has."""
    text = toy_recipe.read_text()
    stage = text[text.rindex("[[stages]]") : text.index("[evaluation]")]
    toy_recipe.write_text(text.replace("[evaluation]", stage + "[evaluation]"))
    steps = [f"stages.{i}.max_steps={n}" for i, n in enumerate((1, 1, 4))]
    settings = (*steps, "stages.0.max_tokens=1", "stages.2.max_tokens=1", "data.test={}", "evaluation.every=0")
    limit = ("algorithm.stop_after_empty_steps=3", "checkpoint.every=1")
    with pytest.raises(TrainingStopped, match="every group of 3 steps in a row"):
        run(toy_recipe, tmp_path / "run", *settings, *limit)
    assert [row["values"]["learner/sgd_steps"] > 0 for row in metrics_of(tmp_path / "run")] == [
        False,
        True,
        *[False] * 3,
    ]
    with pytest.raises(TrainingStopped, match="every group of 3 steps in a row"):
        run(toy_recipe, tmp_path / "run", *settings, *limit, resume=True)
    assert len(metrics_of(tmp_path / "run")) == 5, "the two empty steps before the checkpoint count"


def test_a_stage_end_and_the_best_step_are_in_checkpoints(toy_recipe: Path, tmp_path: Path) -> None:
    run(toy_recipe, tmp_path / "run", "checkpoint.every=100", "checkpoint.keep_last=9", "evaluation.every=2")
    found = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    rows = metrics_of(tmp_path / "run")
    validated = {row["step"]: row["values"].get("validation/accuracy/mean", -1.0) for row in rows}
    best = [step for step, value in validated.items() if value > max([-1.0, *list(validated.values())[: step - 1]])]
    assert best
    assert found == {3, 6, *best}
    # the number of kept checkpoints may change between attempts, and the best one stays
    shutil.rmtree(tmp_path / "run" / "model")
    run(toy_recipe, tmp_path / "run", "checkpoint.keep_last=1", "evaluation.every=2", resume=True)
    found = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert found == {best[-1], 6}


def test_a_run_is_not_overwritten_and_not_resumed_with_another_recipe(toy_recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(toy_recipe, output, "stages.1.max_steps=1", "stages.0.max_steps=1")
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        run(toy_recipe, output)
    with pytest.raises(
        ValueError, match=r"another configuration:\n  optimizer\.learning_rate: was 0\.001, is now 0\.01\nresume"
    ):
        run(
            toy_recipe,
            output,
            "stages.1.max_steps=1",
            "stages.0.max_steps=1",
            "optimizer.learning_rate=1e-2",
            resume=True,
        )


def test_t_over_the_models_context_is_refused(toy_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"stages\.1\.max_tokens: 60 .*context of .* \(64 tokens\); lower it to at most 53"
    ):
        run(toy_recipe, tmp_path / "run", "stages.1.max_tokens=60")


def test_the_difficulty_filter_keeps_what_can_teach(toy_recipe: Path, tmp_path: Path) -> None:
    run(
        toy_recipe, tmp_path / "run", "data.difficulty_filter.samples=4", "stages.1.max_steps=1", "stages.0.max_steps=1"
    )
    document = json.loads((tmp_path / "run" / "difficulty.json").read_text())
    kept = sum(row["kept"] for row in document["table"])
    assert kept == sum(0 < c < n for c, n in document["counts"].values())
    assert document["answers"]["max_tokens"] == 8, "T of the first stage"
    assert 0 < kept < 60
    asked = {g.request.problem.key for g in read_rollouts(tmp_path / "run" / "rollouts")}
    assert asked <= {key for key, (c, n) in document["counts"].items() if 0 < c < n}


def test_a_difficulty_filter_that_keeps_less_than_a_step_draws_says_why(toy_recipe: Path, tmp_path: Path) -> None:
    settings = ("data.difficulty_filter.samples=4", "stages.0.rollout_batch=64", "stages.0.max_steps=1")
    run(toy_recipe, tmp_path / "run", *settings, "stages.1.max_steps=1")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event.get("rule") == "filter_keeps_little"]
    kept = sum(row["kept"] for row in json.loads((tmp_path / "run" / "difficulty.json").read_text())["table"])
    assert f"kept {kept} problems, fewer than a step draws (D_R = 64)" in told["message"]
    assert "groups have answers with different rewards" in told["message"]
    assert told["remedy"]


def test_metrics_are_records(toy_recipe: Path, tmp_path: Path) -> None:
    seen: list[StepMetrics] = []

    class Watcher(NullObserver):
        def step(self, metrics: StepMetrics) -> None:
            seen.append(metrics)

    config = load_train_recipe(toy_recipe, ["stages.1.max_steps=1", "stages.0.max_steps=1"])
    run_training(config, tmp_path / "run", Watcher(), resume=False)
    assert [m.step for m in seen] == [1, 2]


def test_the_online_filter_tells_what_it_removed_by_source_and_difficulty(toy_recipe: Path, tmp_path: Path) -> None:
    run(toy_recipe, tmp_path / "run", "stages.0.max_steps=2", "stages.1.max_steps=1")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (event,) = [e for e in map(json.loads, lines) if e["kind"] == "filter"]
    assert event["kept"] + event["removed"] == 60
    for counts in (event["by_source"], event["by_difficulty"]):
        assert [sum(column) for column in zip(*counts.values(), strict=True)] == [event["removed"], 60]
    assert len(event["by_difficulty"]) > 1, "a level each"


def test_a_run_whose_problems_are_all_solved_keeps_them(toy_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "kind.py").write_text("def score(problem, response):\n    return 1.0\n")
    settings = [f"data.train.0.{key}" for key in (f"verifier={tmp_path}/kind.py:score", "count=4")]
    stages = ["stages.0.max_tokens=40", "stages.0.max_steps=1", "stages.1.max_steps=1", "data.online_filter=true"]
    run(toy_recipe, tmp_path / "run", *settings, *stages, "data.validation=[]", "data.test={}", "evaluation.every=0")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (warning,) = [event["message"] for event in events if event["kind"] == "warning"]
    assert warning.startswith("the online filter leaves none of 4 problems")
    assert "it removes none of them" in warning


def test_a_run_that_cannot_learn_says_so_everywhere(
    toy_recipe: Path, toy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a box is an answer, and the model writes none: every advantage is 0, and no weight changes."""
    output = tmp_path / "run"
    settings = ("verifier.extract=box", "stages.0.max_tokens=24", "stages.0.max_steps=2", "stages.1.max_steps=1")
    assert command(toy_recipe, settings=settings, output=output) == 3
    learning = json.loads((output / "run.json").read_text())["learning"]
    assert learning["outcome"] == "nothing_to_learn"
    assert learning["facts"]["updates"] == 0
    assert learning["facts"]["weights_changed"] is False
    said = " ".join(capsys.readouterr().out.split())
    page, card = (output / "report.html").read_text(), (output / "model" / "README.md").read_text()
    assert "Did it learn? nothing to learn from: no group had an advantage" in said
    assert page.index("nothing to learn from") < page.index('id="learning"'), "at the top"
    assert "verifier.extract = &#34;lenient&#34;" in page
    assert 'verifier.extract = "lenient"' in said
    assert "**Nothing to learn from**" in card
    assert "reinforcement" not in card
    start, end = load_file(toy_model / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    assert all(torch.equal(end[name], start[name]) for name in end)
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event.get("rule") == "groups_rejected"]
    assert "lenient" in told["remedy"]
