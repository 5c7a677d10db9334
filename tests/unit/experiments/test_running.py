"""From a definition to runs, results and pages: shared variants, seeds, budget, resumption, on very small models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from studies import runs as planning
from studies.__main__ import app
from studies.definition import SCALES, Ablation, chosen, load_ablations, shipped_ablations
from studies.pages import write_pages
from studies.results import append_result, pack, read_results, working_file
from studies.runs import PlannedRun, by_arm, do_run, folder_of, outlook, plan_runs, run_study

ABLATION = """
id = "6"
title = "Steps"
question = "Do more steps pay?"
says = "They do not."

[scales.tiny]
base = "first.toml"
starts = 2
minutes = 0.1
set = [
  "stages.0.max_tokens=8", "stages.0.max_steps=2", "stages.0.rollout_batch=2", "stages.0.group_size=2",
  "data.train.0.count=8", "data.test.held_out.count=4", "evaluation.samples=1", "evaluation.pass_at=[1]",
  "algorithm.reject_zero_advantage=false",
]
arms = [
  { name = "one", set = [] },
  { name = "two", set = ["stages.0.mini_batch=1"] },
  { name = "longer", after = "one", set = ["reference.mode=monitor"] },
]

[[claims]]
id = "6.end"
says = "Two steps end lower."
kind = "difference"
measure = "test@1.0"
arm = "two"
than = "one"
direction = "lower"
effect = 0.1
premise = { says = "One learns.", arm = "one", measure = "rise@best", direction = "above", bound = 0.2 }
"""


@pytest.fixture
def ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ablation:
    """Return an ablation whose supervised start takes two steps instead of 1,500."""
    whole = planning.load_sft_recipe

    def short(path: Path, overrides: list[str]) -> Any:
        return whole(path, [*overrides, "phases.0.steps=1", "phases.1.steps=1", "phases.0.batch_size=2"])

    monkeypatch.setattr(planning, "load_sft_recipe", short)
    file = tmp_path / "06.toml"
    file.write_text(ABLATION)
    return load_ablations(file)[0]


def test_a_file_is_an_ablation_for_each_of_its_families(tmp_path: Path) -> None:
    file = tmp_path / "families.toml"
    text = ABLATION.replace('"6"', '"<id>"').replace('"6.', '"<id>.').replace("effect = 0.1", 'effect = "<least>"')
    families = [
        "[[families]]\nid = 6\nleast = 0.1\n",
        '[[families]]\nid = 7\nleast = 0.2\narms = [{ name = "of its own" }]\n',
    ]
    file.write_text(text + "".join(families))
    first, second = load_ablations(file)
    assert [first.id, second.id] == ["6", "7"]
    assert [claim.id.partition(".")[0] for claim in (*first.claims, *second.claims)] == ["6", "7"]
    assert (first.claims[0].effect, second.claims[0].effect) == (0.1, 0.2)  # type: ignore[union-attr]
    own = [arm.name for arm in second.scales["tiny"].arms]
    assert own == [*(arm.name for arm in first.scales["tiny"].arms), "of its own"]


def result(run: PlannedRun, accuracy: float = 0.5) -> dict[str, Any]:
    """Return a line like a run's result."""
    return {
        "schema_version": 1,
        "key": run.key,
        "scale": run.scale,
        "start": run.unit[0],
        "seed": run.unit[1],
        "arms": [list(pair) for pair in run.arms],
        "stopped": None,
        "steps": 2,
        "cpu_seconds": 30.0,
        "curves": {"accuracy": [0.1, accuracy], "entropy": [0.5, 0.4], "tokens": [4, 8], "seconds": [1, 2]},
        "tests": {"before": {"1.0": 0.1}, "after": {"1.0": accuracy}},
        "machine": {},
    }


def test_seeds_arms_and_keys(ablation: Ablation) -> None:
    runs = plan_runs([ablation], "tiny")
    assert [(run.arms[0][1], run.unit) for run in runs] == [
        (a, (s, 0)) for s in (0, 1) for a in ("one", "two", "longer")
    ]
    assert len({run.key for run in runs}) == 6
    assert runs[2].after == runs[0].key
    assert {run.start.key for run in runs[:3] if run.start} == {runs[0].start.key}  # type: ignore[union-attr]
    assert runs[0].start != runs[3].start
    first, other = (run.start.chain() for run in (runs[0], runs[3]))  # type: ignore[union-attr]
    assert first[0] == other[0], "but for its first phase, which is made once"
    assert [run.key for run in plan_runs([ablation], "tiny")] == [run.key for run in runs]
    assert plan_runs([ablation], "small") == []


def test_each_start_and_seed_has_prompts_of_its_own(ablation: Ablation) -> None:
    runs = plan_runs([ablation], "tiny", [0, 7], [0, 1])
    assert [run.unit for run in runs[::3]] == [(0, 0), (7, 0), (0, 1), (7, 1)]
    assert len({run.config.run.seed for run in runs}) == 4
    assert runs[0].start == runs[6].start, "another seed goes on from the same start"
    tiny = ablation.scales["tiny"].model_copy(update={"screened": True})
    (own, *_) = plan_runs([ablation.model_copy(update={"scales": {"tiny": tiny}})], "tiny", [7])
    assert own.start is not None
    assert own.start.chain()[0].recipe.run.seed == 7, "screened: its first phase too"


def test_what_does_not_decide_the_result_does_not_change_the_key(ablation: Ablation) -> None:
    def keys(override: str) -> list[str]:
        tiny = ablation.scales["tiny"].model_copy(update={"set": (*ablation.scales["tiny"].set, override)})
        return [run.key for run in plan_runs([ablation.model_copy(update={"scales": {"tiny": tiny}})], "tiny")]

    assert keys("run.name=other") == keys("logging.samples=3") == keys("checkpoint.every=1")
    assert not set(keys("optimizer.learning_rate=1e-5")) & set(keys("run.name=other"))


def test_a_scale_like_another_adds_its_own_settings(tmp_path: Path) -> None:
    own = '[scales.small]\nlike = "tiny"\nstarts = 1\nset = ["stages.0.max_steps=9"]\n'
    own += 'start_set = ["model.tiny.layers=3"]\n[[claims]]'
    file = tmp_path / "06.toml"
    file.write_text(ABLATION.replace("[[claims]]", own))
    small, tiny = (plan_runs(load_ablations(file), scale) for scale in ("small", "tiny"))
    assert [run.arms for run in small] == [run.arms for run in tiny[:3]]
    assert {run.config.stages[0].max_steps for run in small} == {9}
    assert {run.config.stages[0].max_tokens for run in small} == {8}, "kept from tiny"
    assert {run.start.recipe.model.tiny.layers for run in small} == {3}  # type: ignore[union-attr]
    assert all(run.minutes is None for run in small), "another model takes another time"


def test_arms_that_resolve_alike_share_a_run(ablation: Ablation) -> None:
    twin = ablation.model_copy(update={"id": "9", "claims": ()})
    runs = plan_runs([ablation, twin], "tiny")
    assert len(runs) == 6
    assert runs[1].arms == (("6", "two"), ("9", "two"))
    found = by_arm([ablation, twin], "tiny", {runs[1].key: result(runs[1])})
    assert found == {"6": {"two": {(0, 0): result(runs[1])}}, "9": {"two": {(0, 0): result(runs[1])}}}


def test_shipped_ablations_resolve_at_every_scale() -> None:
    known = shipped_ablations()
    assert [a.id for a in known] == [str(i) for i in range(13)]
    for scale in SCALES:
        assert all(run.config.stages for run in plan_runs(known, scale))
    assert all({"tiny", "small"} <= set(a.scales) for a in known)
    assert [a.id for a in known if "paper" not in a.scales] == ["0"], "the gate is our own"
    runs = plan_runs(known, "tiny")
    assert sum(len(run.arms) for run in runs) > len(runs), "ablations share arms"
    assert all(len({run.unit for run in runs if arm in run.arms}) >= 5 for arm in {a for r in runs for a in r.arms})
    with pytest.raises(ValueError, match="no ablation '99'; known: 0, 1, 2"):
        chosen(["99"], known)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('arm = "two"', 'arm = "three"', "names 'three', which is no arm"),
        ('id = "6.end"', 'id = "7.end"', "must begin with 6."),
        ('measure = "test@1.0"', 'measure = "tset@1.0"', "no measure 'tset@1.0'|no curve 'tset'"),
        ('after = "one"', 'after = "none"', "comes after 'none'"),
        ("starts = 2", "satrts = 2", "scales.tiny.satrts"),
        ('arm = "one", measure', 'arm = "none", measure', "names 'none', which is no arm"),
        ("[[claims]]", '[scales.small]\nlike = "paper"\n[[claims]]', "scale small is like 'paper'"),
        ("[[claims]]", "[[claims", "not TOML"),
    ],
)
def test_a_wrong_definition_is_refused_by_file_and_place(old: str, new: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "06.toml"
    file.write_text(ABLATION.replace(old, new))
    with pytest.raises(ValueError, match=says) as caught:
        load_ablations(file)
    assert str(file) in str(caught.value)


def test_the_outlook_uses_what_runs_of_other_seeds_took(ablation: Ablation) -> None:
    runs = plan_runs([ablation], "tiny")
    assert outlook(runs, {}).cpu_minutes == pytest.approx(6 * 0.1)
    look = outlook(runs, {runs[0].key: result(runs[0])})
    assert (look.done, len(look.missing)) == (1, 5)
    assert look.cpu_minutes == pytest.approx(0.5 + 4 * 0.1), "the other seed of the same arm: 30 seconds"


def test_a_run_leaves_its_curves_and_tests(ablation: Ablation, tmp_path: Path) -> None:
    one, _, longer = plan_runs([ablation], "tiny", [0])
    row = do_run(one, tmp_path)
    assert row["steps"] == 2
    assert row["stopped"] is None
    assert {"accuracy", "entropy", "length", "tokens", "seconds"} <= set(row["curves"])
    assert all(len(curve) == 2 for curve in row["curves"].values())
    assert row["curves"]["tokens"][1] >= row["curves"]["tokens"][0]
    assert set(row["tests"]["before"]) == set(row["tests"]["after"]) == {"0.0", "1.0"}
    second = do_run(longer, tmp_path)
    assert second["tests"]["before"] == row["tests"]["after"], "it goes on from that model"
    recorded = (folder_of(longer.key, tmp_path) / "config.toml").read_text()
    assert f"starts/{one.start.key}" in recorded, "the reference is the supervised start"  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_study_is_done_in_processes_and_goes_on_where_it_stopped(ablation: Ablation, tmp_path: Path) -> None:
    runs = plan_runs([ablation], "tiny", [0])
    file, work, said = tmp_path / "results.jsonl", tmp_path / "work", list[str]()
    assert run_study(runs[:2], file, work, workers=2, tell=said.append) == 0
    assert set(read_results(file)) == {run.key for run in runs[:2]}
    assert not folder_of(runs[0].key, work).exists(), "a run folder that nothing goes on from is removed"
    # the third continues from the first, whose model must be made again; its result is kept once
    assert run_study(runs, file, work, workers=2, budget_minutes=60, tell=said.append) == 0
    assert [json.loads(line)["key"] for line in file.read_text().splitlines()].count(runs[0].key) == 1
    assert len(read_results(file)) == 3
    assert run_study(runs, file, work, workers=2, tell=lambda text: pytest.fail(text)) == 0


ORPHAN = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from studies.runs import end_with_parent

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_a_worker_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(ORPHAN)
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "study.py"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([worker], timeout=600)[1] == [] or worker.status() == psutil.STATUS_ZOMBIE


def test_no_run_is_begun_that_does_not_fit_the_budget(ablation: Ablation, tmp_path: Path) -> None:
    runs = plan_runs([ablation], "tiny", [0])
    assert run_study(runs, tmp_path / "r.jsonl", tmp_path, workers=1, budget_minutes=0.01) == 3
    assert not (tmp_path / "r.jsonl").exists()


def test_several_seeds_behind_one_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, ...] | None] = []

    def planned(ablations: Any, scale: str, *units: tuple[int, ...] | None) -> list[PlannedRun]:
        asked.extend(units)
        return []

    monkeypatch.setattr(planning, "plan_runs", planned)
    app(
        ["run", "6", "--starts", "100", "101", "--seeds", "1000", "1001", "--results", str(tmp_path / "r.jsonl")],
        result_action="return_value",
    )
    assert asked == [(100, 101), (1000, 1001)]


def test_pages_say_what_the_runs_decide(ablation: Ablation, tmp_path: Path) -> None:
    tiny = ablation.scales["tiny"].model_copy(update={"starts": 3})
    ablation = ablation.model_copy(update={"scales": {"tiny": tiny}})
    accuracy: Mapping[str, float] = {"one": 0.9, "two": 0.5, "longer": 0.9}
    file = tmp_path / "results.jsonl"
    for run in plan_runs([ablation], "tiny"):
        append_result(file, result(run, accuracy[run.arms[0][1]] + 0.01 * run.unit[0]))
    index = write_pages([ablation], "tiny", read_results(file), tmp_path / "pages")
    assert "1 claims: holds 1." in index.read_text()
    page = (index.parent / "6.md").read_text()
    assert "6.end Two steps end lower. | holds | 0.4 (0.4 to 0.4)" in page
    assert "![Training accuracy](6-accuracy.svg)" in page
    assert (index.parent / "6-accuracy.svg").read_text().startswith("<svg")
    assert "6-kl.svg" not in page, "nothing measured it"


def test_rows_of_a_parquet_file_wait_until_they_are_packed(
    ablation: Ablation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "results" / "six.parquet"
    first, second, *_ = plan_runs([ablation], "tiny")
    rows = [result(first), {**result(second), "stopped": "FloatingPointError: loss", "passes": {"after": {"4": 0.5}}}]
    rows[0]["curves"]["kl"] = [None, 1.234e-5]
    append_result(file, rows[0])
    pack(file)
    assert not working_file(file).exists()
    append_result(file, rows[1])
    assert read_results(file)[second.key] == rows[1], "as it was appended"
    pack(file)
    pack(file)  # nothing waits
    found = read_results(file)
    assert found == {first.key: {**rows[0], "passes": None}, second.key: rows[1]}


def test_a_broken_results_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"schema_version": 1, "key": "a"}\n{"key":\n')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2: not a result"):
        read_results(file)
    file.write_text('{"schema_version": 9, "key": "a"}\n')
    with pytest.raises(ValueError, match="schema_version 9"):
        read_results(file)
