"""The study over independent starting models: its families, their screening, and its definition."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from magicrl.algorithms.entropy import ControllerSettings, make_controller
from magicrl.records import Problem
from studies import runs as planning
from studies import screening
from studies.__main__ import app
from studies.definition import SUITES, parse_measure, shipped_ablations
from studies.families import ChainOptions, TinyStories, WordChains, tiny_stories, word_chains
from studies.runs import plan_runs, read_screened, starts_of_definition, suite_results
from studies.screening import reason_of, screen, starts_page

STARTS = shipped_ablations("starts")
FAMILIES = (word_chains, tiny_stories)


def test_a_story_is_worked_by_hand() -> None:
    family = TinyStories(ChainOptions(phase="skill", stops="6:1.0", noise=0.0))
    prompt = "ann has 5 . she buys 3 . she loses 2 . how many ?"
    assert family.read(prompt) == [5, 3, -2]
    assert family.asked(5, [3, -2]) == prompt
    problem = Problem(id="x", prompt=prompt, references=("6",), verifier="exact", source="tiny_stories", level=2)
    worked = {family.demonstration(problem, np.random.default_rng(seed)) for seed in range(40)}
    assert worked == {"5 + 3 is 8 ; answer 8", "5 + 3 is 8 ; 8 - 2 is 6 ; answer 6"}, "it stops after one step or both"


def test_a_chain_follows_its_table_and_every_verb_can_be_undone() -> None:
    family = WordChains(ChainOptions(noise=0.0, verbose=0.0, stops="1:1.0"))
    prompt = "chain red spin fold :"
    assert family.read(prompt) == [0, 0, 1]
    second = family.after(0, 0)
    problem = Problem(id="x", prompt=prompt, references=("?",), verifier="exact", source="word_chains", level=2)
    word = family.words[second]
    assert family.demonstration(problem, np.random.default_rng(0)) == f"red spin {word} ; answer {word}"
    for verb in range(len(family.verbs)):
        assert sorted(family.after(state, verb) for state in range(8)) == list(range(8))


@pytest.mark.parametrize("make", FAMILIES)
def test_families_are_deterministic_split_and_spelt_in_their_vocabulary(make: Any) -> None:
    family, rng = make(), np.random.default_rng(0)
    by_split = {s: list(islice(family.stream(seed=1, split=s), 200)) for s in ("train", "validation", "test")}
    assert by_split["train"] == list(islice(make().stream(seed=1, split="train"), 200))
    prompts = {split: {problem.prompt for problem in problems} for split, problems in by_split.items()}
    assert not prompts["train"] & prompts["test"]
    assert not prompts["validation"] & (prompts["train"] | prompts["test"])
    assert {problem.level for problem in by_split["train"]} == {1, 2, 3, 4, 5, 6}
    for problem in by_split["train"]:
        state, *steps = family.read(problem.prompt)
        for step in steps:
            state = family.after(state, step)
        assert problem.references == (family.words[state],)
        assert len(steps) == problem.level
        assert {*problem.prompt.split(), *family.demonstration(problem, rng).split()} <= set(family.vocabulary)
    with pytest.raises(ValueError, match=r"has the levels \[1, 2, 3, 4, 5, 6\], got \[9\]"):
        family.stream(seed=1, split="train", levels=[9])
    with pytest.raises(ValueError, match="stops names 7, outside"):
        make(stops="7:1.0")


def test_the_rule_of_the_screening() -> None:
    assert reason_of(0.1, 0.2) is None
    assert reason_of(0.45, 0.9) is None
    assert reason_of(0.09, 0.9) == "accuracy 0.090 below 0.1"
    assert reason_of(0.46, 0.9) == "accuracy 0.460 above 0.45"
    assert reason_of(0.3, 0.39) == "pass@16 0.390 within 0.1 of the accuracy 0.300"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten supervised starts to two steps."""
    whole = planning.load_sft_recipe

    def load(path: Path, overrides: list[str]) -> Any:
        return whole(path, [*overrides, "phases.0.steps=1", "phases.1.steps=1", "phases.0.batch_size=2"])

    monkeypatch.setattr(planning, "load_sft_recipe", load)
    monkeypatch.setattr(screening, "PROBLEMS", 3)
    monkeypatch.setattr(screening, "BAND", (0.99, 1.0))


@pytest.mark.usefixtures("short")
def test_starts_are_made_screened_and_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, told = tmp_path / "starts.jsonl", list[str]()
    assert screen("chains.toml", 1, 4, tmp_path, file, told.append) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["start"] for row in rows] == [4, 5, 6], "three candidates for one start, and none that can do anything"
    assert all(row["reason"].endswith("below 0.99") for row in rows)
    assert len({row["key"] for row in rows}) == 3, "every start is its own from its first phase on"
    assert all(set(row["before"]) == {"greedy", "at_1", "pass@16"} for row in rows), "before its last phase too"
    page = starts_page(read_screened(file))
    assert "below 0.99 |" in page
    before = rows[0]["before"]
    assert f"| chains-start | 4 | {before['greedy']:.3f}, {before['at_1']:.3f} | {rows[0]['greedy']:.3f} |" in page
    unknown = starts_page({"chains-start": {4: {**rows[0], "before": None}}})
    assert "| chains-start | 4 | not measured |" in unknown
    monkeypatch.setattr(screening, "make_start", lambda *_: pytest.fail("made again"))
    assert screen("chains.toml", 1, 4, tmp_path, file, told.append) == 0

    chains = STARTS[1].scales["tiny"].model_copy(update={"starts": 1})
    monkeypatch.setattr(planning, "STARTS_FILE", file)
    with pytest.raises(ValueError, match=r"chains-start: 0 starts have passed .* studies starts chains\.toml"):
        starts_of_definition(chains)
    file.write_text("".join(json.dumps(row | {"accepted": row["start"] > 4}) + "\n" for row in rows))
    assert starts_of_definition(chains) == [5]
    assert starts_of_definition(chains.model_copy(update={"starts": 2})) == [5, 6]
    made: list[str] = []

    def make(start: planning.PlannedStart, work: Path) -> None:
        made.append(start.key)

    monkeypatch.setattr(screening, "make_start", make)
    assert screen("chains.toml", 1, 4, tmp_path, file, told.append) == 1
    assert made == [rows[1]["key"]], "an accepted start is made where its model is not there, and not screened again"
    file.write_text("".join(json.dumps(row | {"accepted": True, "key": "of another recipe"}) + "\n" for row in rows))
    with pytest.raises(ValueError, match="0 starts have passed"):
        starts_of_definition(chains)


def test_the_study_is_what_was_stated() -> None:
    runs = plan_runs(STARTS, "tiny", range(8))
    assert len(runs) == 512
    assert len({run.unit for run in runs}) == 16
    assert {run.start.chain()[0].recipe.run.seed for run in runs if run.start} == set(range(8))
    claims = [claim.id for ablation in STARTS for claim in ablation.claims]
    assert claims == [f"{number}.{claim}" for number in (20, 21, 22) for claim in ("loss", "control", "clip", "rate")]
    assert SUITES["starts"].looks == 1
    assert len(plan_runs(STARTS, "quick")) == 12


def test_the_suite_of_the_recipes_choices_is_what_was_stated() -> None:
    recipe = shipped_ablations("recipe")
    runs = plan_runs(recipe, "tiny", range(8))
    assert len(runs) == 168
    assert len({run.unit for run in runs}) == 8
    on_policy = {run.key for run in runs if run.arms[0][1] == "on-policy"}
    assert on_policy < {run.key for run in plan_runs(STARTS, "tiny", range(8))}, "the first arm is that of C9"
    claims = [claim.id for ablation in recipe for claim in ablation.claims]
    assert claims == [f"{n}.{c}" for n in (30, 31, 32) for c in ("length", "accuracy", "before", "temperature", "kl")]
    assert SUITES["recipe"].looks == 1


def test_the_suite_of_targets_is_what_was_stated() -> None:
    target = shipped_ablations("target")
    runs = plan_runs(target, "tiny", range(8))
    assert len(runs) == 192
    shared = {run.key for run in runs} & {run.key for run in plan_runs(shipped_ablations("recipe"), "tiny", range(8))}
    assert len(shared) == 48, "two arms are those of C11"
    claims = [claim.id for ablation in target for claim in ablation.claims]
    assert claims == [f"{n}.{c}" for n in (40, 41, 42) for c in ("control", "high", "falling", "anchored")]
    half = next(run.config for run in runs if run.arms[0][1] == "half of the start's")
    controller = make_controller(half.entropy.controller, ControllerSettings(target=0.5, step=0.02, maximum=0.5))
    coefficients = []
    for entropy in (0.6, 0.31, 0.29, 0.29):
        coefficients.append(controller.coefficient(entropy))
        controller.observe(entropy)
    assert coefficients == [0.0, 0.0, 0.0, 0.02], "the target is 0.3: c rises below it and is paid there"
    later = make_controller(half.entropy.controller, ControllerSettings(target=0.5, step=0.02, maximum=0.5))
    later.restore(controller.state())
    assert later.coefficient(0.29) == controller.coefficient(0.29) == 0.04
    assert later.coefficient(0.31) == 0.0


def test_the_suite_of_stale_data_and_small_batches_is_what_was_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])  # where suites look for their results
    noise = shipped_ablations("noise")
    runs = plan_runs(noise, "tiny", range(8))
    assert len(runs) == 192
    known = suite_results("noise", "tiny")
    new = [run for run in runs if "fresh small batches" in dict(run.arms).values()]
    assert {run.key for run in runs} - {run.key for run in new} < known.keys(), "C9's are not run again"
    assert len(new) == 48
    stages = [run.config.stages[0] for run in new]
    assert {(s.rollout_batch, s.mini_batch, s.max_steps) for s in stages} == {(4, None, 400)}, (
        "samples and updates of C9's"
    )
    assert [claim.id for a in noise for claim in a.claims] == [
        f"{n}.{c}" for n in (60, 61, 62) for c in ("noise", "stale")
    ]


def test_the_suite_of_the_clip_is_what_was_stated() -> None:
    first, conditions = shipped_ablations("clip")
    assert [claim.id for claim in (*first.claims, *conditions.claims)] == [
        f"{n}.{c}" for n in (70, 71) for c in ("ce-gppo", "kl3")
    ]
    runs, seen = plan_runs([conditions], "tiny"), plan_runs([first], "tiny")
    assert len({run.key for run in runs}) == len(runs) == 180, "variants made of others have no runs"
    assert {run.unit[0] for run in seen} == {s + b for s in range(3) for b in (0, 1000)}
    assert {run.unit[0] for run in runs} == {s + b for s in range(3, 8) for b in (0, 1000)}, "unseen checkpoints"
    assert [run.unit for run in runs[::18]] == [(s + b, 0) for s in range(3, 8) for b in (0, 1000)]
    assert {run.config.run.name for run in runs} == {"chains", "stories"}
    starts = {run.unit[0] // 1000: run.start.chain()[0].recipe.run.name for run in runs if run.start}
    assert starts == {0: "chains-start", 1: "stories-start"}
    settings = Counter(
        (c.stages[0].mini_batch, c.algorithm.reuse, c.rollout.weight_lag, c.algorithm.correction)
        for c in (run.config for run in runs)
    )
    assert settings == {(4, 1, 0, "none"): 60, (4, 4, 0, "none"): 60, (4, 1, 8, "tis"): 60}
    assert {run.config.optimizer.learning_rate for run in runs} == {7e-5, 2.1e-4}


def test_a_mean_of_variants_averages_the_best_accuracy_of_each_checkpoint() -> None:
    def result(before: float, greedy: float, sampled: float, seconds: float) -> dict[str, Any]:
        tests = {"before": {"1.0": before}, "after": {"0.0": greedy, "1.0": sampled}}
        return {"key": "k", "tests": tests, "curves": {}, "cpu_seconds": seconds}

    one = {(0, 0): result(0.1, 0.5, 0.4, 10.0), (1, 0): result(0.1, 0.5, 0.4, 10.0)}
    other = {(0, 0): result(0.3, 0.2, 0.9, 20.0)}
    ((unit, row),) = planning.averaged([one, other]).items()
    assert unit == (0, 0), "only checkpoints that all variants have"
    assert parse_measure("test@best")(row) == pytest.approx(0.7)
    assert parse_measure("start@best")(row) == pytest.approx(0.2)
    assert row["cpu_seconds"] == 30.0
    assert "key" not in row, "it is no run"


def test_the_better_variant_is_chosen_on_the_other_half_of_the_starting_models() -> None:
    def results(accuracies: dict[int, float]) -> dict[tuple[int, int], Any]:
        return {(start, 0): {"tests": {"after": {"1.0": value}, "before": {}}} for start, value in accuracies.items()}

    # The low rate is better on starts 1 and 3, the high rate on 0 and 2 and on the other task.
    low = results({0: 0.1, 1: 0.8, 2: 0.2, 3: 0.7, 1000: 0.1, 1001: 0.2})
    high = results({0: 0.5, 1: 0.3, 2: 0.6, 3: 0.4, 1000: 0.9, 1001: 0.8, 1002: 0.9})
    found = {start: row["tests"]["after"]["1.0"] for (start, _), row in planning.better([low, high]).items()}
    assert found == {0: 0.1, 1: 0.3, 2: 0.2, 3: 0.4, 1000: 0.9, 1001: 0.8}
    assert planning.better([low, {}]) == {}
    assert planning.better([results({0: 0.1}), results({0: 0.2})]) == {}, "nothing to choose on"


def test_the_suite_of_the_pretrained_model_is_what_was_stated() -> None:
    (ablation,) = shipped_ablations("smollm2")
    runs = plan_runs([ablation], "tiny", range(3))
    assert len(runs) == 18
    assert {run.start.chain()[0].recipe.run.seed for run in runs if run.start} == set(range(3))
    mini_batches = {name: run.config.stages[0].mini_batch for run in runs for _, name in run.arms}
    assert mini_batches == {"on-policy": None, "N_SGD 4": 2, "N_SGD 4, control": 2}
    assert {run.config.stages[0].rollout_batch for run in runs} == {8}
    assert [claim.id for claim in ablation.claims] == ["50.loss", "50.control"]


@pytest.mark.slow
def test_the_quick_form_runs_and_is_told(tmp_path: Path) -> None:
    results, pages = str(tmp_path / "r.jsonl"), tmp_path / "pages"
    suite = ["--suite", "starts", "--results", results]
    run = ["run", "20", "--quick", *suite, "--work", str(tmp_path / "work")]
    assert app(run, result_action="return_value") == 0
    report = ["report", *suite, "--scale", "quick", "--output", str(pages)]
    assert app(report, result_action="return_value") == 0
    index = " ".join((pages / "index.md").read_text().split())  # paragraphs are wrapped
    assert re.search(r"undecided \d+, not run \d+( \(.*?\))?\. \d+ runs at scale `quick`, \d+ CPU minutes\.", index), (
        f"two starts decide nothing: {index[:600]}"
    )
    assert "pass@16" in (pages / "starts.md").read_text()
    assert "pass@2" not in (pages / "20.md").read_text(), "columns are those of the study"
