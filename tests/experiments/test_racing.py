"""The race's rounds, failures and measures by hand, its curves on planted ones, and every method for two steps."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from magicrl.config.loader import load_train_recipe
from studies.race_page import final_figure, methods_table, results_page
from studies.racing import (
    DEFINITION,
    Bounds,
    Condition,
    Race,
    Sigmoid,
    candidates,
    entropy_error,
    failures,
    field_sizes,
    fit_sigmoid,
    load_race,
    next_stage,
    race_runs,
    ranking_agreement,
    regrets,
    score,
    stages,
    survivors,
)
from studies.runs import brought_files

ROOT = Path(__file__).resolve().parents[2]
RACE = load_race()
TUNING = RACE.conditions.tuning


def changed(**changes: Any) -> Race:
    return Race.model_validate({**RACE.model_dump(), **changes})


def test_every_method_tries_as_many_settings_and_no_two_alike() -> None:
    for method in RACE.methods:
        tried = candidates(RACE, method)
        assert len(tried) == RACE.budget == len({c.set for c in tried})
    tis = next(m for m in RACE.methods if m.name == "TIS")
    rates = [c.set[-1].partition("=")[2] for c in candidates(RACE, tis)]
    assert rates == ["7e-05", "0.00021", "0.0006"] * 3
    plain = next(m for m in RACE.methods if m.name == "clip 0.20")
    assert len({c.set[-1] for c in candidates(RACE, plain)}) == 9


def test_what_would_not_be_fair_is_refused() -> None:
    with pytest.raises(ValidationError, match="100 and up"):
        changed(tuning_starts=(0,))
    with pytest.raises(ValidationError, match="no method is called 'magic', a yardstick"):
        changed(yardstick="magic")
    with pytest.raises(ValidationError, match="no method is called 'clip', a yardstick or one to run at one rate"):
        changed(at_one_rate=("clip",))
    with pytest.raises(ValidationError, match="do not divide the budget"):
        changed(methods=(RACE.methods[0].model_copy(update={"own": ((), ("entropy.step=0.1",))}).model_dump(),))
    with pytest.raises(ValidationError, match="one name"):
        changed(methods=(RACE.methods[0].model_dump(), RACE.methods[0].model_dump()))
    with pytest.raises(ValidationError, match="the budget"):
        changed(learning_rates=(1e-3,))


def test_rounds_drop_half_until_at_most_four_are_left() -> None:
    assert field_sizes(21, 4) == [21, 11, 6, 3]
    assert field_sizes(4, 4) == [4]
    assert survivors({"a": 0.5, "b": math.nan, "c": 0.9, "d": 0.5}, 2) == ["c", "a"]
    assert survivors({"a": math.nan, "b": 0.0}, 1) == ["b"]


def test_the_named_tests_and_the_page_are_there() -> None:
    tests = "".join(
        (ROOT / "tests" / file).read_text()
        for file in ("experiments/test_race_methods.py", "algorithms/test_losses.py", "algorithms/test_entropy.py")
    )
    for method in RACE.methods:
        assert f"def {method.shown_by}(" in tests, method.name
    page = (ROOT / "docs" / "race.md").read_text()
    assert methods_table(RACE) in page, "docs/race.md: put in what studies.race_page.methods_table gives"
    settings = [text for method in RACE.methods for text in (*method.set, *chain.from_iterable(method.own))]
    raced = {file.stem for file in brought_files(settings)}
    assert raced == {file.stem for file in DEFINITION.parent.glob("*.py")} - {"__init__"}


def test_every_arm_is_a_recipe_and_its_key_holds_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    entrants = [candidates(RACE, method)[4] for method in RACE.methods]
    conditions = RACE.conditions.every()
    assert len(conditions) == 9
    runs = race_runs(RACE, entrants, RACE.families[0], conditions, [0])
    assert len(runs) == 9 * len(entrants)

    def config(name: str, **condition: Any) -> Any:
        entrant = next(e for e in entrants if e.method == name)
        return runs[entrant, Condition(**condition), 0].config

    stale = {"sgd_steps": "16", "staleness": 64}
    assert config("KL3", **stale).rollout.weight_lag == 64
    assert config("KL3", **stale).algorithm.reuse == 4
    assert config("KL3", **stale).algorithm.correction == "tis"
    assert config("clip 0.28", **stale).algorithm.correction == "none"  # the naive case
    assert config("M2PO", **stale).algorithm.correction == "m2po"
    assert config("KL3", sgd_steps="1", staleness=0).algorithm.correction == "none"
    assert config("EntroPIC", **stale).entropy.target == RACE.families[0].target
    before = {entrant.method: run.key for (entrant, c, _), run in runs.items() if c == TUNING}
    text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **how: text(self, **how) + ("#" if self.name == "kl3.py" else "")
    )
    after = race_runs(RACE, entrants, RACE.families[0], [TUNING], [0])
    moved = {entrant.method for (entrant, _, _), run in after.items() if run.key != before[entrant.method]}
    assert moved == {"KL3"}


def result(best: float, **curves: list[float]) -> dict[str, Any]:
    return {"curves": curves, "tests": {"before": {}, "after": {"0.0": best, "1.0": best / 2}}, "stopped": None}


def test_the_race_goes_from_the_tuning_to_the_final() -> None:
    methods = tuple(RACE.methods[i].model_dump() for i in range(6))
    race = changed(methods=methods, finalists=2)
    results: dict[str, Any] = {}
    seen: list[tuple[str, int, int]] = []
    for _ in range(5):
        stage = next_stage(race, results)
        seen.append((stage.name, len(stage.entrants), len(stage.missing(results))))
        for (_, entrant, _, _), run in stage.runs.items():
            # later methods are better, and of a method's settings the sixth is
            merit = [m.name for m in race.methods].index(entrant.method) / 10 + 0.01 * (entrant.number == 5)
            results[run.key] = result(merit)
    # 54 settings, once each; then half by half from 2 and 4 starts under 4 conditions, known runs not again; at one
    # rate from 8, of which two have 4 and MAGIC is there twice; the final under 9 in all families, less 2 x 8 x 4
    assert seen == [
        ("tuning", 54, 54),
        ("round 1", 6, 48),
        ("round 2", 3, 24),
        ("one rate", 4, 2 * 4 * 4 + 8 * 4),
        ("final", 2, 2 * 9 * 8 * 3 - 2 * 8 * 4),
    ]
    *_, one_rate, final = stages(race, results)
    assert {str(e): e.set[-1] for e in one_rate.entrants} == dict.fromkeys(
        ("MAGIC | 5", "TRL | 5", "clip 0.25 | 9", "MAGIC | 9"), "optimizer.learning_rate=0.0006"
    ), "the rate of TRL, which is the best"
    assert not final.missing(results)
    assert {str(e) for e in final.entrants} == {"MAGIC | 5", "TRL | 5"}
    assert final.scores(results, score)[final.entrants[1]] == pytest.approx(0.51)
    beside = next_stage(changed(methods=methods, finalists=2, yardstick="clip 0.20"), results)
    assert {str(e) for e in beside.entrants} == {"clip 0.20 | 5", "MAGIC | 5", "TRL | 5"}, "whatever its place"
    assert len(beside.missing(results)) == 216 - 2 * 4, "round 1 gave it two starts under four conditions"


def whole_result(merit: float, *, start: int, cost: float) -> dict[str, Any]:
    """Ten steps to the accuracy ``merit``, which the start moves by a hundredth; each costs ``cost``."""
    steps = np.arange(1, 11)
    best = merit + 0.01 * (start - 3.5)
    return {
        "curves": {
            "accuracy": (merit * steps / 10).tolist(),
            "entropy": [0.4] * 10,
            "grad_norm": [1.0] * 10,
            "tokens": (1000 * cost * steps).tolist(),
            "updates": (4.0 * steps).tolist(),
            "seconds": (2.0 * steps).tolist(),
        },
        "tests": {"before": {}, "after": {"0.0": best, "0.6": 0.9 * best, "1.0": 1 - best}},
        "stopped": None,
        "cpu_seconds": 10 * cost,
    }


def test_the_page_says_what_was_found_by_hand() -> None:
    methods = tuple(RACE.methods[i].model_dump() for i in range(3))
    race = changed(methods=methods, finalists=2, yardstick="clip 0.25", at_one_rate=("clip 0.20",))
    results: dict[str, Any] = {}
    assert "Tuning: 27 of 27 runs are missing." in results_page(race, results)
    for _ in range(4):
        for (_, entrant, _, start), run in next_stage(race, results).runs.items():
            place = [m.name for m in race.methods].index(entrant.method)
            merit = 0.7 + place / 10 - 0.02 * abs(entrant.number - 5)
            results[run.key] = whole_result(merit, start=3 if start >= 100 else start, cost=1.0 + place)
    page = results_page(race, results)
    # the sixth of nine rates, and what the worst of them costs
    assert "| clip 0.265 | 0.895 | 0.0003 | none | 0.855 | none | 0.100 |" in page
    # two starts of eight in the first round, whose mean is 0.03 below the merit
    assert "| clip 0.265 | 0.0003 | 0.870 | 0.870 | 0.870 | 0.870 | 0.870 | 0, 0, 0 of 8 |" in page
    # clip 0.20 with the sixth rate: four settings from the sixth, 0.08 below its best of 0.7
    assert "| clip 0.25 | +0.180 (+0.180 to +0.180), holds |" in page
    assert "| clip 0.265 | +0.280 (+0.280 to +0.280), holds |" in page
    # 2.365 deviations of 0.0245 over the root of 8; the best of every family, and 0.1 behind it
    assert "| clip 0.265 | 0.900 (0.880 to 0.920) | 0.900 (0.880 to 0.920) | 0.900 (0.880 to 0.920) | 0.000 |" in page
    assert "| clip 0.25 | 0.800 (0.780 to 0.820) | 0.800 (0.780 to 0.820) | 0.800 (0.780 to 0.820) | 0.100 |" in page
    # 0.1 behind from every start alike, which is beyond 0.05
    assert "In every family: clip 0.265." in page
    assert page.count("-0.100 (-0.100 to -0.100), beyond") == 3
    # clip 0.25 took 20,000 tokens and CPU seconds, clip 0.265 30,000: it is looked at after two thirds of its ten steps
    equal = next(line for line in page.splitlines() if line.startswith("| clip 0.265 |") and "of 72" in line)
    assert equal.startswith("| clip 0.265 | 0.630 | 0.810 | 0.630 | 0.100 |")
    assert "| starts | 8 | 1.00 |" in page
    assert "| test temperatures | 3 | -0.33 |" in page  # at temperature 1 the order turns
    figure = final_figure(race, results)
    assert figure is not None
    # the mean of three families that are alike, from eight starts
    assert "N_SGD 16, staleness 64: 80.0 % clip 0.25 at 0.0003, 90.0 % clip 0.265 at 0.0003" in figure
    assert final_figure(race, {}) is None
    *_, final = stages(race, results)
    stopped = next(r for (_, e, c, _), r in final.runs.items() if (e.method, c.staleness) == ("clip 0.25", 0))
    results[stopped.key] = {"curves": {}, "tests": {"before": {}, "after": {}}, "stopped": "NotFiniteError: step 1"}
    page = results_page(race, results)
    assert "0, 1, 0 of 216" in page
    # alone in its place it is looked at where it ends: (71 * 0.63 + 0.81) / 72
    same = next(line for line in page.splitlines() if line.startswith("| clip 0.265 |") and "of 72" in line)
    assert same.startswith("| clip 0.265 | 0.632 | 0.810 | 0.632 |"), "a run that stopped is nobody's measure"


BOUNDS = Bounds(collapse=0.01, won=0.9, entropy=3.0, grad_norm=10.0, destruction=0.02)


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ({"entropy": [0.5] * 5 + [0.001] * 5, "accuracy": [0.4] * 10}, ["collapse"]),
        ({"entropy": [0.5] * 5 + [0.001] * 5, "accuracy": [0.4] * 2 + [0.95] * 8}, []),  # won before it was certain
        ({"entropy": [0.5] * 6 + [0.001] * 4, "accuracy": [0.4] * 10}, []),  # four in a row are not five
        ({"entropy": [0.5] * 5 + [4.0] * 5, "accuracy": [0.4] * 10}, ["blow-up"]),
        ({"entropy": [0.5] * 10, "accuracy": [0.4] * 10, "grad_norm": [1.0] * 5 + [60.0] + [1.0] * 4}, ["blow-up"]),
        ({"entropy": [0.5] * 10, "accuracy": [0.4] * 5 + [0.3] * 5}, []),  # what was sampled decides no destruction
        ({}, []),
    ],
)
def test_failures_by_hand(curves: dict[str, list[float]], expected: list[str]) -> None:
    assert failures(result(0.5, **curves), BOUNDS) == expected


@pytest.mark.parametrize(("after", "expected"), [(0.37, ["destruction"]), (0.39, []), (0.5, [])])
def test_destruction_is_lost_test_accuracy(after: float, expected: list[str]) -> None:
    tests = {"before": {"0.0": 0.3, "1.0": 0.4}, "after": {"0.0": after, "1.0": 0.1}}
    assert failures({**result(0.5), "tests": tests}, BOUNDS) == expected  # each at its best temperature


def test_a_loss_that_is_not_finite_is_a_blow_up_and_an_empty_batch_is_none() -> None:
    assert failures({**result(0.5), "stopped": "NotFiniteError: step 3"}, BOUNDS) == ["blow-up"]
    assert failures({**result(0.5), "stopped": "TrainingStopped: nothing to learn"}, BOUNDS) == []


def test_measures_by_hand() -> None:
    assert score(result(0.8)) == 0.8  # the better temperature
    assert score({"tests": {"before": {}, "after": {}}}) == 0.0  # it did not get there
    # half of four steps: 0.3 and 0.1 about 0.1
    assert entropy_error({"entropy": [9.0, 9.0, 0.3, 0.1]}, 0.1) == pytest.approx(math.sqrt(0.02))
    assert math.isnan(entropy_error({}, 0.1))
    scores = {"first": {"a": 0.9, "b": 0.5}, "ladder": {"a": 0.5, "b": 0.7}}
    assert regrets(scores) == pytest.approx({"a": 0.1, "b": 0.2})
    up, down = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 3.0, "b": 2.0, "c": 1.0}
    assert ranking_agreement([up, up, down]) == pytest.approx((1 - 1 - 1) / 3)
    assert math.isnan(ranking_agreement([up]))


@pytest.mark.parametrize(
    "planted", [Sigmoid(0.1, 0.8, 2.0, 3e4), Sigmoid(0.3, 0.6, 1.0, 1e5), Sigmoid(0.0, 1.0, 4.0, 5e4)]
)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_planted_sigmoid_is_found(planted: Sigmoid, noise: float) -> None:
    spent = np.linspace(1e3, 3e5, 100)
    values = planted(spent) + np.random.default_rng(0).normal(0, noise, 100)
    found = fit_sigmoid(spent.tolist(), [None, *values[1:].tolist()], planted.start)
    assert found is not None
    assert found.asymptote == pytest.approx(planted.asymptote, abs=0.02 + 2 * noise)
    assert found.midpoint == pytest.approx(planted.midpoint, rel=0.1 + 10 * noise)
    if not noise:
        assert found.efficiency == pytest.approx(planted.efficiency, rel=0.15)


def test_a_method_that_is_only_faster_has_the_same_asymptote() -> None:
    spent = np.linspace(1e3, 3e5, 100)
    slow, fast = (fit_sigmoid(spent.tolist(), Sigmoid(0.1, 0.7, 2.0, mid)(spent).tolist(), 0.1) for mid in (1e5, 2e4))
    assert slow is not None
    assert fast is not None
    assert fast.asymptote == pytest.approx(slow.asymptote, abs=0.02)
    assert fast.midpoint < slow.midpoint / 3
    assert fit_sigmoid([1.0] * 7, [0.5] * 7, 0.1) is None
    late = Sigmoid(0.1, 0.9, 2.0, 9e5)(spent)
    assert fit_sigmoid(spent.tolist(), late.tolist(), 0.1) is None, "half of the rise lies behind the run's end"
    assert fit_sigmoid(spent.tolist(), (0.1 - 0.3 * late).tolist(), 0.1) is None, "it falls"


def test_a_method_is_also_named_by_its_file() -> None:
    for file in sorted(DEFINITION.parent.glob("*.py")):
        for key, name in re.findall(r"--set ([\w.]+)=studies/race/(\w+\.py:\w+)", file.read_text()):
            load_train_recipe(ROOT / "src/magicrl/recipes/tiny.toml", [f"{key}={DEFINITION.parent / name}"], ROOT)


@pytest.mark.slow
def test_every_method_trains(tmp_path: Path) -> None:
    results = tmp_path / "quick.jsonl"
    command = [sys.executable, "-m", "studies", "race", "--quick", "--results", str(results), "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    methods = {name.split(" | ")[0] for row in rows for _, name in row["arms"]}
    assert methods == {method.name for method in RACE.methods}
    for row in rows:
        assert row["steps"] == 2, row
        assert row["stopped"] is None, row
        assert all(value and value > 0 for value in row["curves"]["grad_norm"]), row
