"""`magicrl.train`, the step-wise handle and ``magicrl train`` make the same run, and live objects are recorded so."""

from __future__ import annotations

import asyncio
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import magicrl
from magicrl.commands.main import app
from magicrl.training.recorder import RunObserver

TIMES = ("time/", "speed/", "memory/", "tokens/per_second", "verify/seconds")
SHORT = {"stages.0.max_steps": 2, "stages.1.max_steps": 1, "evaluation.samples": 2, "evaluation.pass_at": [2]}


def figures(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` without values that depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row["values"].items() if not k.startswith(TIMES)} for row in rows]


def evaluations_of(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "evaluations").glob("*.json"))}


def test_one_run_by_three_ways(toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    words = ["train", str(toy_recipe), *sets, "--output", str(tmp_path / "command")]
    assert app(words, result_action="return_value") in (0, 3)
    whole = magicrl.train(toy_recipe, settings=SHORT, output=tmp_path / "whole", progress=False)
    recipe = tomllib.loads(toy_recipe.read_text())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with magicrl.start(recipe, settings=SHORT, output="steps") as run:
        steps = []
        monkeypatch.chdir("elsewhere")  # as a notebook may
        while not run.done:
            steps.append(run.step())
            if len(steps) == 1:
                between = run.evaluate()  # changes nothing in the run
        with pytest.raises(ValueError, match=r"every stage of .* has ended; finish\(\)"):
            run.step()
        finished = run.finish()
    command = figures(tmp_path / "command")
    assert figures(whole.path) == command
    assert figures(finished.path) == command
    by_step = [{k: v for k, v in step.metrics.items() if not k.startswith(TIMES)} for step in steps]
    assert by_step == command
    assert [(step.number, step.stage, len(step.groups)) for step in steps] == [(1, 0, 8), (2, 0, 8), (3, 1, 8)]
    assert "groups=" not in repr(steps[0]), "its arrays fill thousands of lines"
    first = evaluations_of(tmp_path / "command")
    assert evaluations_of(whole.path) == first
    assert {k: v for k, v in evaluations_of(finished.path).items() if not k.startswith("step-")} == first
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (tmp_path / "command", finished.path)]
    assert weights[0] == weights[1]
    assert set(between["test"]) == {"step-000001"}
    assert list(between["temperature"]) == [0.0, 1.0]
    assert finished.status == "finished"
    assert finished.verdict
    assert (finished.path / "report.html").stat().st_size > 10_000
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.chdir(tmp_path)
    again = magicrl.load_run("steps")
    monkeypatch.chdir("elsewhere")
    assert len(again.rollouts()) == len(finished.rollouts()) > 0


def test_a_run_as_data_frames_and_in_a_notebook(toy_recipe: Path, tmp_path: Path) -> None:
    magicrl.train(toy_recipe, settings=SHORT, output=tmp_path / "run", progress=False)
    run = magicrl.load_run(tmp_path / "run")
    assert list(run.metrics.index) == [1, 2, 3]
    assert run.metrics["train/accuracy/mean"].notna().all()
    assert list(run.metrics["stage"]) == [0, 0, 1]
    rollouts = run.rollouts()
    assert len(rollouts) == 3 * 8 * 4
    assert "tokens" not in rollouts
    assert len(run.rollouts([2], tokens=True)["tokens"]) == 32
    assert rollouts.groupby("step")["reward"].mean()[1] == pytest.approx(run.metrics["train/accuracy/mean"][1])
    assert set(run.evaluations["test"]) == {"before", "after"}
    assert {"accuracy", "accuracy_low", "accuracy_high", "pass@2"} <= set(run.evaluations.columns)
    assert not run.events.empty
    page = run._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "Did it learn?" in page
    assert len(page) < 3_000_000
    assert page.count('"') == 6, "a quotation mark of the page would end it: these are three attributes of the frame"
    assert "<svg" not in run.figures("learning")._repr_html_()  # escaped: its style cannot leak into the notebook
    assert "&lt;svg" in run.figures("learning")._repr_html_()
    with pytest.raises(ValueError, match=r"no figures losses of the run in .*; it has learning, policy, time"):
        run.figures("losses")
    with pytest.raises(ValueError, match="has no step 9; it has steps 1 to 3"):
        run.rollouts([9])
    with pytest.raises(ValueError, match="has no step '1'; it has steps 1 to 3"):
        run.rollouts("1")  # pyright: ignore[reportArgumentType]
    assert set(run.rollouts(2).step) == {2}
    again = magicrl.train(run.path / "config.toml", output=tmp_path / "again", progress=False)
    assert run.config["run"]["name"] == "toy"
    assert figures(again.path) == figures(run.path)


def test_a_live_reward_and_live_data(toy_recipe: Path, tmp_path: Path) -> None:
    wanted = 4
    asked: list[str] = []

    @magicrl.reward(right_from=0.9)
    def near(problem: magicrl.Problem, response: str) -> float:
        asked.append(problem.id)
        return 1 / (1 + abs(len(response) - wanted))

    rows = pd.DataFrame({"question": [f"L 5 2 3 0 1 0 0 0 {n} :" for n in range(10)], "answer": ["1"] * 10})
    settings = SHORT | {"data.holdout": 2, "run.name": "live", "algorithm.reject_zero_advantage": False}

    def train(data: Any = rows, reward: Any = near, resume: bool = False) -> magicrl.Run:
        return magicrl.train(
            toy_recipe,
            settings=settings,
            data=data,
            reward=reward,
            output=tmp_path / "run",
            resume=resume,
            progress=False,
        )

    run = train()
    assert asked
    assert run.evaluations["reward"].notna().all()
    assert run.rollouts()["reward"].nunique() > 2
    # no message claims that a command could repeat it
    recipe = (run.path / "config.toml").read_text()
    assert recipe.startswith("# No command can run this recipe: live:data@")
    assert "near@" in recipe.splitlines()[0]
    (environment,) = json.loads((run.path / "run.json").read_text())["environments"]
    texts = list(environment["live"].values())
    assert any("abs(len(response) - wanted)" in text for text in texts)
    assert any(text.startswith("10 records, SHA-256 ") for text in texts)
    assert "no command can reproduce it" in (run.model / "README.md").read_text()
    # resumed with the same objects only
    assert train(resume=True).status == "finished"
    with pytest.raises(
        ValueError, match=r"was started in Python with data.train.0.verifier = live:near@.*, but this call passes"
    ):
        train(reward=lambda problem, response: 1.0, resume=True)
    with pytest.raises(ValueError, match=r"was started in Python with data.train.0.source = live:data@"):
        train(data=rows.to_dict("records")[1:], resume=True)
    with pytest.raises(
        ValueError, match="already holds a run; pass resume=True to continue it, or choose another output"
    ):
        train()


def test_a_test_that_a_reward_judges_in_part_decides_nothing(toy_recipe: Path, tmp_path: Path) -> None:
    def brief(problem: magicrl.Problem, response: str) -> float:
        if len(response) % 3 == 0:
            raise KeyError(response)
        return 1 / len(response)

    settings = SHORT | {"algorithm.reject_zero_advantage": False}
    run = magicrl.train(toy_recipe, settings=settings, reward=brief, output=tmp_path / "run", progress=False)
    documents = evaluations_of(run.path).values()
    scores = [score for document in documents for score in document["temperatures"].values()]
    lost, drawn = (sum(score[key] for score in scores) for key in ("not_judged", "drawn"))
    assert 0.1 * drawn < lost < drawn
    assert "of the responses of a test could not be judged" in run.verdict
    (before, _) = run.events.query("kind == 'evaluation'").message
    assert "responses could not be judged" in before


@pytest.fixture
def threads() -> Iterator[int]:
    """Return the number of torch threads of the caller, which a run must restore."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    yield before + 2
    torch.set_num_threads(before)


def test_a_run_left_early_is_resumed(toy_recipe: Path, tmp_path: Path, threads: int) -> None:
    whole = magicrl.train(toy_recipe, settings=SHORT, output=tmp_path / "whole", progress=False)
    assert torch.get_num_threads() == threads
    run = magicrl.start(toy_recipe, settings=SHORT, output=tmp_path / "run")
    with pytest.raises(ValueError, match=r"it is this one: close\(\) that run, or choose another output"):
        magicrl.start(toy_recipe, settings=SHORT, output=tmp_path / "run", resume=True)
    run.step()
    assert torch.get_num_threads() == threads, "what the caller computes between two steps"
    assert run.save().name.endswith("1")
    run.close()
    run.close()
    assert magicrl.load_run(run.path).status == "stopped"
    assert torch.get_num_threads() == threads, "the caller's"
    with pytest.raises(ValueError, match=r"is closed; magicrl.start\(..., resume=True\) continues it"):
        run.step()
    again = magicrl.start(toy_recipe, settings=SHORT, output=run.path, resume=True)
    assert again.steps_done == 1
    with pytest.raises(RuntimeError), again:
        raise RuntimeError("no answer from https://me:hidden@host/v1")
    assert magicrl.load_run(run.path).status == "failed"
    error = json.loads((run.path / "run.json").read_text())["error"]
    assert "no answer from https://" in error
    assert "hidden" not in error, "an error may quote a URL with a password"
    with magicrl.start(toy_recipe, settings=SHORT, output=run.path, resume=True) as run:
        shutil.rmtree(run.path / "checkpoints" / "step-000001")
        early = run.finish()  # before its stages have ended: what follows resumes from the checkpoint that it writes
    assert early.status == "finished"
    with magicrl.start(toy_recipe, settings=SHORT, output=run.path, resume=True) as run:
        assert [step.number for step in run] == [2, 3]
        finished = run.finish()
    assert figures(finished.path) == figures(whole.path)
    assert evaluations_of(finished.path) == evaluations_of(whole.path)


@pytest.mark.slow
def test_two_runs_take_turns(toy_recipe: Path, tmp_path: Path) -> None:
    one_step = SHORT | {"stages.0.max_steps": 1, "data.validation": [], "data.test": {}}
    alone = magicrl.train(toy_recipe, settings=one_step, output=tmp_path / "alone", progress=False)
    threads: set[int] = set()

    def counting(problem: magicrl.Problem, response: str) -> float:
        threads.add(torch.get_num_threads())
        return float(len(response) % 2)

    other = one_step | {"run.seed": 1, "run.threads": 2}
    with (
        magicrl.start(toy_recipe, settings=one_step, output=tmp_path / "one") as one,
        magicrl.start(toy_recipe, settings=other, reward=counting, output=tmp_path / "two") as two,
    ):
        one.step()
        two.step()
        one.step()
        assert (one.done, two.done) == (True, False)
    assert figures(tmp_path / "one") == figures(alone.path)
    assert threads == {2}


def test_inside_a_running_event_loop_as_a_notebook_has_it(toy_recipe: Path, tmp_path: Path) -> None:
    async def kind(problem: magicrl.Problem, response: str) -> float:
        await asyncio.sleep(0)
        return float(len(response) % 2)

    class Told:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def step(self, metrics: Any) -> None:
            self.steps.append(metrics.step)

        def event(self, event: Any) -> None: ...

        def progress(self, phase: str, done: int, total: int) -> None: ...

    told = Told()
    assert isinstance(told, RunObserver)

    async def cell() -> magicrl.Run:
        return magicrl.train(toy_recipe, settings=SHORT, reward=kind, output=tmp_path / "run", progress=told)

    assert asyncio.run(cell()).status == "finished"
    assert told.steps == [1, 2, 3]


def test_evaluations_in_python(
    toy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: int
) -> None:
    problems = [{"id": f"p{n}", "question": f"L 5 2 3 0 1 0 0 0 {n} :", "answer": "1"} for n in range(4)]
    options: dict[str, Any] = {"max_tokens": 8, "samples": 2, "reward": "exact", "workers": 1, "template": "{prompt}"}
    found = magicrl.evaluate(toy_model, {"mine": problems}, output=tmp_path / "live", **options, threads=1)
    assert torch.get_num_threads() == threads
    assert "mine: 4 problems x 2 samples" in capsys.readouterr().out
    assert found.scores.loc["mine", "problems"] == 4
    assert len(found.samples()) == 8
    assert found.samples()["prompt"].iloc[0].startswith("L 5 2 3")
    assert found._repr_html_().startswith("<iframe")
    # the command, on a file of the same records
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in problems))
    words = f"eval --model {toy_model} --benchmark {file} --max-tokens 8 --samples 2 --verifier exact --workers 1"
    words += " --template {prompt}"
    assert app([*words.split(), "--output", str(tmp_path / "command")], result_action="return_value") == 0
    same = json.loads((tmp_path / "command" / "results.json").read_text())["benchmarks"]["mine"]
    assert same["accuracy"]["mean"] == found.scores.loc["mine", "accuracy"]
    longest = magicrl.evaluate(
        toy_model,
        {"mine": problems},
        output=tmp_path / "own",
        **options | {"reward": lambda problem, response: len(response)},
        seed=3,
        progress=False,
    )
    assert longest.scores.loc["mine", "reward"] > 1
    assert json.loads((tmp_path / "own" / "mine" / "job.json").read_text())["decides"]["sampling"]["seed"] == 3
    liked = options | {"reward": lambda problem, response: 1.0, "max_tokens": 1}
    short = magicrl.evaluate(toy_model, {"mine": problems}, output=tmp_path / "short", **liked, progress=False)
    rows = short.samples()
    assert set(rows["outcome"][rows["truncated"]]) == {"correct"}, "the reward likes every response"
    assert (rows["correct"] == ~rows["truncated"]).all()
    assert rows["correct"].mean() == pytest.approx(short.scores.loc["mine", "accuracy"])
    with pytest.raises(ValueError, match="samples of which benchmark"):
        found.samples("other")
