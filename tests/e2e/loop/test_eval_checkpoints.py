"""``magicrl eval --run``, and evaluation during a run: neither changes the run."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from magicrl.commands.eval import evaluate_checkpoints, requested
from magicrl.commands.main import app
from magicrl.config.loader import load_train_recipe
from magicrl.data.families import make_family, unique_problems
from magicrl.evaluation.options import EvaluationOptions, arguments
from magicrl.rollout.recording import read_rollouts
from magicrl.training.checkpoint import checkpoint_folders, export_checkpoint
from magicrl.training.curriculum import Validation
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

SHORT = ("stages.0.max_steps=2", "stages.1.max_steps=2")
NEVER = (*SHORT, "evaluation.every=0")
OFTEN = (*SHORT, "evaluation.every=1", "evaluation.validation_samples=3", "evaluation.validation_temperature=0.7")


def run(recipe: Path, output: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], list[list[list[int]]]]:
    """Return the final weights and every response token that training sampled."""
    run_training(load_train_recipe(recipe, overrides), output, NullObserver(), resume=False)
    groups = sorted(read_rollouts(output / "rollouts"), key=lambda group: group.request.draw)
    tokens = [[completion.tokens.tolist() for completion in group.completions] for group in groups]
    return load_file(output / "model" / "model.safetensors"), tokens


def random_states() -> list[Any]:
    numpys: Any = np.random.get_state()  # noqa: NPY002 - the global state is what must not move
    return [random.getstate(), numpys[1].tolist(), numpys[2], torch.get_rng_state().tolist()]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_with_evaluation_is_the_run_without(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    lagged = f"rollout.weight_lag={lag}"
    without, sampled_without = run(toy_recipe, tmp_path / "without", *NEVER, lagged)
    measured: list[dict[str, float]] = []
    original = Validation.measure

    def watched(self: Validation, *given: Any, **named: Any) -> dict[str, float]:
        before = random_states()
        values = original(self, *given, **named)
        assert random_states() == before
        measured.append(values)
        return values

    monkeypatch.setattr(Validation, "measure", watched)
    with_it, sampled_with = run(toy_recipe, tmp_path / "with", *OFTEN, lagged)
    assert [set(values) >= {"validation/accuracy/mean"} for values in measured] == [True] * 4
    assert sampled_with == sampled_without
    assert with_it.keys() == without.keys()
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_every_validation_draws_anew(toy_recipe: Path, tmp_path: Path) -> None:
    """With constant weights, two validations differ only by chance."""
    run(toy_recipe, tmp_path / "run", *OFTEN, "optimizer.learning_rate=1e-12")
    rows = [json.loads(line)["values"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len({row["validation/length/mean"] for row in rows}) > 1
    # evaluations before and after training use the same random numbers
    before, after = (
        json.loads((tmp_path / "run" / "evaluations" / f"{name}-held_out.json").read_text())
        for name in ("before", "after")
    )
    assert before["temperatures"]["1.0"]["per_problem"] == after["temperatures"]["1.0"]["per_problem"]
    assert before["samples"] == after["samples"]


@pytest.fixture
def finished(toy_recipe: Path, tmp_path: Path) -> Path:
    run_training(
        load_train_recipe(toy_recipe, (*NEVER, "checkpoint.keep_last=9")),
        tmp_path / "run",
        NullObserver(),
        resume=False,
    )
    return tmp_path / "run"


DIFFERENT: tuple[tuple[dict[str, Any], list[str]], ...] = (
    ({}, []),
    ({"seed": 1}, ["sampling.seed: was 0, is now 1"]),
    ({"samples": 3}, ["samples: was 2, is now 3"]),
    ({"max_tokens": 17}, ["sampling.max_tokens: was 16, is now 17"]),
    (
        {"preset": "released-code", "max_tokens": 16},
        ["judging.extract: was lenient, is now box", "sampling.temperature: was 1.0, is now 0.6"],
    ),
    ({"top_p": 0.95}, ["sampling.top_p: was 1.0, is now 0.95"]),
    ({"top_k": 20}, ["sampling.top_k: was not set, is now 20"]),
    ({"reward": "maths"}, ["verifier: was exact, is now maths"]),
    ({"limit": 6}, []),  # this limit covers all problems
    ({"limit": 5, "limit_seed": 1}, ["limit: was None, is now 5", "limit_seed: was None, is now 1"]),
    ({"extract": "box"}, ["judging.extract: was lenient, is now box"]),
    ({"reasoning": "required"}, ["judging.reasoning: was auto, is now required"]),
    ({"reasoning": "auto"}, []),
    ({"time_limit": 5.0}, ["judging.time_limit: was 10.0, is now 5.0"]),
    ({"dtype": "bfloat16"}, ["engine.dtype: was float32, is now bfloat16"]),
    ({"pass_at": "1"}, ["pass_at: was 2, is now 1"]),
    ({"pass_at": "2", "majority_at": "2"}, []),
    ({"fresh_limits": "8"}, ["fresh_limits: was none, is now 8"]),
    ({"workers": 2, "max_rows": 3, "price_in": 1.0, "price_out": 2.0}, []),
)
"""Options that differ from those of the evaluation, and the reported difference."""


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_checkpoint_is_evaluated_and_compared_and_the_run_is_untouched(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = unique_problems(make_family("running_sum", {}), seed=1, split="test", count=6)
    file = tmp_path / "sums.jsonl"
    records = [{"problem": p.prompt, "answer": p.references[0], "level": 1 + i % 2} for i, p in enumerate(problems)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    before, output = snapshot(finished), tmp_path / "eval"
    words = f"eval --run {finished} --follow --benchmark {file} --verifier exact --samples 2 --max-tokens 16"
    words += f" --threads 1 --workers 1 --output {output} --template"
    command = [*words.split(), "{prompt}"]
    assert app(command, result_action="return_value") == 0
    steps = [folder.name for folder in checkpoint_folders(finished)]
    assert steps == ["step-000002", "step-000004"]
    comparison = json.loads((output / "comparison.json").read_text())
    assert [Path(m["folder"]).name for m in comparison["curves"]["sums"]["models"]] == steps
    results = [json.loads((output / step / "results.json").read_text())["benchmarks"]["sums"] for step in steps]
    checksums = {result["settings"]["engine"]["weights_sha256"] for result in results}
    assert len(checksums) == 2, "two checkpoints are two models"
    assert snapshot(finished) == before
    assert not any((output / "models").rglob("*.safetensors")), "the weights are not kept twice"
    last = export_checkpoint(finished, checkpoint_folders(finished)[-1], tmp_path / "last")
    there, saved = load_file(last / "model.safetensors"), load_file(finished / "model" / "model.safetensors")
    assert there.keys() == saved.keys()
    assert all(torch.equal(there[name], saved[name]) for name in saved), "the last checkpoint is the run's model"
    capsys.readouterr()
    written = snapshot(output / steps[0])
    assert app(command, result_action="return_value") == 0
    assert "step-" not in capsys.readouterr().out.replace(str(output), ""), "the same settings: nothing to evaluate"
    assert snapshot(output / steps[0]) == written
    given: dict[str, Any] = {"benchmarks": [str(file)], "reward": "exact", "samples": 2, "max_tokens": 16}
    given["template"] = "{prompt}"
    more = tmp_path / "more.jsonl"
    more.write_text(file.read_text())
    for changed, lines in DIFFERENT:
        found = requested(arguments(**given | changed), finished)(output / steps[0])
        assert [line.partition(": ")[2] for line in found] == lines, changed
    new = requested(arguments(**given | {"benchmarks": [str(file), str(more)]}), finished)(output / steps[0])
    assert new == ["more: was not evaluated, is now requested"]
    other = [*" ".join(command).replace("--samples 2", "--samples 1").split(), "--limit", "4", "--temperature", "0.5"]
    assert app(other, result_action="return_value") == 0
    said = capsys.readouterr().out
    lines = ("limit: was None, is now 4", "sampling.temperature: was 1.0, is now 0.5", "samples: was 2, is now 1")
    assert f"{steps[0]} of {finished}, evaluated again: {'; '.join(f'sums: {line}' for line in lines)}\n" in said
    for step in steps:
        result = json.loads((output / step / "results.json").read_text())["benchmarks"]["sums"]
        assert (result["problems"], result["samples"], result["settings"]["sampling"]["temperature"]) == (4, 1, 0.5)
    kept = output / steps[0] / "earlier" / "sums-1" / "samples-0-of-1.jsonl"
    assert kept.read_bytes() == written["sums/samples-0-of-1.jsonl"], "samples of other settings are not deleted"
    assert str(kept.parent) in said


def nothing_changed(given: EvaluationOptions, run: Path) -> Callable[[Path], list[str]]:
    return lambda folder: []


def test_a_run_that_goes_on_is_followed_and_a_removed_checkpoint_left_out(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magicrl.commands.eval.requested", nothing_changed)
    first, second = checkpoint_folders(finished)
    later = shutil.move(second, tmp_path / "later")
    status = finished / "run.json"
    ended = status.read_text()
    status.write_text(json.dumps(json.loads(ended) | {"status": "running"}))
    seen: list[str] = []

    def evaluate(given: EvaluationOptions) -> int:
        folder = Path(given.output)
        assert (Path(given.model) / "model.safetensors").exists()
        seen.append(folder.name)
        (folder / "results.json").write_text(json.dumps({"benchmarks": {}}))
        if folder.name == first.name:  # meanwhile the run continues, removes old checkpoints and ends
            shutil.rmtree(first)
            shutil.move(later, second)
            status.write_text(ended)
        return 0

    assert (
        evaluate_checkpoints(arguments(), finished, tmp_path / "stopped", lambda _: 130, Console(), follow=True) == 130
    )
    with pytest.raises(ValueError, match="no benchmark in common"):  # these results are empty
        evaluate_checkpoints(arguments(), finished, tmp_path / "out", evaluate, Console(), follow=True)
    assert seen == [first.name, second.name]
    with pytest.raises(ValueError, match="is not a run folder"):
        evaluate_checkpoints(arguments(), tmp_path, tmp_path / "out", evaluate, Console(), follow=True)


def test_results_of_another_run_are_not_those_of_this_one(
    finished: Path,
    toy_recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("magicrl.commands.eval.requested", nothing_changed)
    other, output, seen = tmp_path / "other", tmp_path / "out", list[str]()
    recipe = load_train_recipe(toy_recipe, (*NEVER, "checkpoint.keep_last=9", "run.seed=7"))
    run_training(recipe, other, NullObserver(), resume=False)

    def evaluate(given: EvaluationOptions) -> int:
        results = Path(given.output) / "results.json"
        assert not results.exists(), "after an interruption they would be those of this checkpoint"
        seen.append(results.parent.name)
        results.write_text(json.dumps({"benchmarks": {}}))
        return 0

    def evaluated(run: Path) -> list[str]:
        seen.clear()
        with suppress(ValueError):  # these results have no benchmark to compare
            evaluate_checkpoints(arguments(), run, output, evaluate, Console(width=200), follow=False)
        return [*seen]

    steps = ["step-000002", "step-000004"]
    assert [evaluated(run) for run in (finished, finished, other)] == [steps, [], steps]
    said = capsys.readouterr().out
    assert f"step-000002 of {other}, evaluated again: its results are of another checkpoint, or an unknown one" in said
    shutil.rmtree(checkpoint_folders(other)[0])
    assert evaluated(other) == []
    assert "is not compared" not in capsys.readouterr().out, "the run has removed it since"
    shutil.rmtree(checkpoint_folders(finished)[0])
    assert evaluated(finished) == steps[1:]
    assert (
        "step-000002 is not compared: its results are of another checkpoint, or an unknown one"
        in capsys.readouterr().out
    )
    (output / "step-000002" / "checkpoint.json").unlink()
    evaluated(finished)
    assert "is not compared" not in capsys.readouterr().out, "an earlier version made them, and nothing else is left"


def test_a_shard_visits_each_checkpoint_once_and_keeps_the_copies_of_others(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, list[str]] = {}
    monkeypatch.setattr("magicrl.commands.eval.requested", lambda given, run: lambda f: changes.get(f.name, []))
    output, seen = tmp_path / "out", list[str]()

    def evaluate(given: EvaluationOptions) -> int:
        folder = Path(given.output)
        seen.append(folder.name)
        assert len(seen) <= 5, "a shard came back to a checkpoint"
        if given.shard == "1/2":
            (folder / "results.json").write_text(json.dumps({"benchmarks": {}}))
        elif given.shard == "0/2" and folder.name == "step-000002":  # meanwhile the other has its turn
            evaluate_checkpoints(arguments(shard="1/2"), finished, output, evaluate, Console(), follow=False)
        assert (Path(given.model) / "model.safetensors").exists()
        return 0

    # no sibling has begun: there are no results yet
    alone = arguments(shard="0/3")
    assert evaluate_checkpoints(alone, finished, tmp_path / "alone", evaluate, Console(), follow=False) == 0
    assert seen == ["step-000002", "step-000004"]
    seen.clear()
    changes["step-000002"] = ["sums: samples: was 2, is now 1"]
    assert evaluate_checkpoints(arguments(shard="0/2"), finished, output, evaluate, Console(), follow=False) == 0
    assert seen == ["step-000002", "step-000002", "step-000004"]
    assert "step-000002 is not compared: sums: samples: was 2, is now 1" in capsys.readouterr().out


def test_a_killed_run_is_named_while_its_next_checkpoint_is_awaited(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = finished / "run.json"
    ended, waits = status.read_text(), list[float]()
    status.write_text(json.dumps(json.loads(ended) | {"status": "running"}))
    gone = subprocess.Popen(["true"])
    gone.wait()
    (finished / ".lock").write_text(str(gone.pid))

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            status.write_text(ended)

    monkeypatch.setattr("magicrl.commands.eval.time.sleep", wait)
    evaluate_checkpoints(arguments(), finished, tmp_path / "out", lambda _: 0, Console(), follow=True)
    assert capsys.readouterr().out.count(f"its process {gone.pid} is not on this machine") == 1
