"""Curves over limits and samples, the permutation test and Table 13, against hand values, scipy and enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from builders import sample_row
from scipy import stats

from magicrl.evaluation.comparison import common_efficiency
from magicrl.evaluation.presets import PRESETS, differs_from_preset, rows_with, table13
from magicrl.evaluation.results import means
from magicrl.evaluation.samples import SampleRow
from magicrl.evaluation.scaling import (
    accuracy_at_mean_length,
    from_marks,
    limit_curve,
    limit_for_mean_length,
    mark,
    sample_curve,
    scaling,
)
from magicrl.evaluation.statistics import permutation_test


def row(problem: str, sample: int, tokens: int, *, right: bool, cut: bool = False, answer: str = "4") -> SampleRow:
    outcome, end = "correct" if right else "wrong", "length" if cut else "stop"
    return sample_row(problem, sample, outcome=outcome, extracted=answer, finish_reason=end, tokens=tokens)


PROBLEMS = [
    [row("a", 0, 10, right=True), row("a", 1, 40, right=True)],
    [row("b", 0, 20, right=True), row("b", 1, 100, right=True, cut=True)],
]


def test_accuracy_against_the_limit_by_hand() -> None:
    curve = limit_curve(PROBLEMS, [10, 30, 100])
    assert [point["accuracy"]["mean"] for point in curve] == [0.25, 0.5, 0.75]
    assert [point["truncation"]["mean"] for point in curve] == [0.75, 0.5, 0.25]
    assert [point["mean_tokens"]["mean"] for point in curve] == [10.0, (20 + 25) / 2, (25 + 60) / 2]


def test_efficiency_is_the_accuracy_at_the_limit_that_costs_so_many_tokens() -> None:
    """At limit 30, responses cost (10 + 30) / 2 and (20 + 30) / 2 tokens, so 22.5 on average; at 29 they cost 22."""
    assert limit_for_mean_length(PROBLEMS, 22.5) == 30
    assert limit_for_mean_length(PROBLEMS, 22.4) == 29
    at = accuracy_at_mean_length(PROBLEMS, 22.5)
    assert at is not None
    assert (at.mean, at.problems) == (0.5, 2)
    longest = accuracy_at_mean_length(PROBLEMS, (25 + 60) / 2)
    assert longest is not None
    assert longest.mean == 0.75
    assert accuracy_at_mean_length(PROBLEMS, 43) is None, "what longer responses would have become nobody knows"
    assert accuracy_at_mean_length(PROBLEMS, 0.5) is None


def test_curves_over_samples_match_enumeration() -> None:
    wrong = ["7", "7", "9"]
    rows = [row("a", i, 5, right=i < 2) for i in range(2)]
    rows += [row("a", 2 + i, 5, right=False, answer=text) for i, text in enumerate(wrong)]
    answers = ["4", "4", *wrong]
    found = {point["k"]: point for point in sample_curve([rows], [1, 2, 3, 5])}
    for k in (1, 2, 3, 5):
        chosen = list(combinations(answers, k))
        assert found[k]["pass"]["mean"] == pytest.approx(np.mean(["4" in group for group in chosen]))
        majority = []
        for group in chosen:
            most = max(group.count(answer) for answer in group)
            winners = {answer for answer in group if group.count(answer) == most}
            majority.append(("4" in winners) / len(winners))
        tolerance = 1e-9 if k in (1, 5) else 0.04  # in between, maj@k is the mean of 2000 draws
        assert found[k]["majority"]["mean"] == pytest.approx(np.mean(majority), abs=tolerance)


@pytest.mark.parametrize(("unjudged", "most"), [(0, 4), (1, 4), (2, 2)])
def test_the_largest_k_covers_nearly_all_problems(unjudged: int, most: int) -> None:
    """Of 20 problems at most one is left out of pass@k, and the number of those that are in is recorded."""
    rows = [[row(f"{n}", i, 5, right=n % 2 == 0) for i in range(4)] for n in range(20)]
    for problem in rows[:unjudged]:
        problem[3] = replace(problem[3], outcome="not_judged")
        problem[2] = replace(problem[2], outcome="not_judged")
    points = scaling(rows, 16, knows_limit=False)["over_samples"]
    assert points[-1]["k"] == most
    assert points[-1]["pass"]["problems"] == points[-1]["majority"]["problems"] == 20 - unjudged % 2


def test_scaling_says_what_it_takes_for_granted() -> None:
    assert scaling(PROBLEMS, 100, knows_limit=False)["exact"]
    known = scaling(PROBLEMS, 100, knows_limit=True)
    assert not known["exact"]
    assert [point["limit"] for point in known["over_limits"]] == [25, 50, 100]
    assert [point["k"] for point in known["over_samples"]] == [1, 2]


@pytest.mark.parametrize("turns", [True, False])
def test_a_response_truncated_before_the_limit_is_wrong_at_every_limit(turns: bool) -> None:
    """The turns of an environment end it at every limit; how it continues that a server truncated nobody knows."""
    found = scaling(PROBLEMS, 200, knows_limit=False, turns=turns)
    assert [point["accuracy"]["mean"] for point in found["over_limits"]] == [0.5, 0.75, 0.75, 0.75]
    assert [point["truncation"]["mean"] for point in found["over_limits"]] == [0.5, 0.25, 0.25, 0.25]
    assert (found["exact"], found["truncated_early"]) == (turns, 1)


def test_fresh_samples_stand_beside_the_cut_ones() -> None:
    fresh = {
        30: [[row("a", 0, 20, right=True), row("a", 1, 30, right=False)], [row("b", 0, 30, right=False, cut=True)]],
        200: [[row("a", 0, 150, right=True)], [row("b", 0, 120, right=True)]],
    }
    shorter, longer = scaling(PROBLEMS, 100, knows_limit=False, fresh=fresh)["fresh"]
    assert (shorter["limit"], shorter["accuracy"]["mean"], shorter["samples"]) == (30, 0.25, 2)
    assert shorter["truncation"]["mean"] == 0.5
    assert shorter["cut"] == limit_curve(PROBLEMS, [30])[0]["accuracy"]
    assert shorter["difference"]["mean"] == (0.5 - 0.5 + 0.0 - 0.5) / 2, "fresh minus cut, problem by problem"
    assert shorter["difference"]["low"] <= -0.25 <= shorter["difference"]["high"]
    assert (longer["accuracy"]["mean"], longer["cut"], longer["difference"]) == (1.0, None, None)


def test_efficiency_at_common_lengths_ends_at_the_samples_own() -> None:
    points = scaling(PROBLEMS, 100, knows_limit=False)["efficiency"]
    assert [point["mean_tokens"] for point in points] == [16.0, 32.0, 42.5]
    assert [point["accuracy"]["mean"] for point in points] == [0.25, 0.75, 0.75]
    assert points[-1]["limit"] == 100


def test_marks_keep_what_a_curve_needs() -> None:
    rows = [
        *PROBLEMS[0],
        *PROBLEMS[1],
        replace(row("c", 0, 7, right=True), outcome="not_judged"),
        row("c", 1, 8, right=False),
    ]
    marks = "".join(mark(r) for r in rows)
    assert marks == "+++~?-"
    again = from_marks(marks, [r.tokens for r in rows])
    assert [(m.tokens, m.correct, m.truncated, m.counted) for m in again] == [
        (r.tokens, r.correct and r.counted, r.truncated, r.counted) for r in rows
    ]
    with pytest.raises(ValueError, match="no record of samples"):
        from_marks("++", [1])


def test_permutation_test_enumerates_few_problems() -> None:
    delta = [0.5, -0.25, 0.75, 0.0, 1.0]
    moved = [d for d in delta if d]
    sums = [abs(sum(s * abs(d) for s, d in zip(signs, moved, strict=True))) for signs in product((1, -1), repeat=4)]
    assert permutation_test(delta) == np.mean([value >= sum(delta) - 1e-12 for value in sums])
    assert permutation_test([0.0, 0.0]) == 1.0
    assert permutation_test([1.0] * 10) == 2 / 2**10
    with pytest.raises(ValueError, match="no problems"):
        permutation_test([])


@pytest.mark.parametrize("count", [12, 40])
def test_permutation_test_agrees_with_scipy(count: int) -> None:
    delta = np.random.Generator(np.random.PCG64(count)).normal(0.2, 0.5, count)

    def statistic(x: Any, axis: int = 0) -> Any:
        return np.mean(x, axis=axis)

    peer = stats.permutation_test(
        (delta,),
        statistic,
        permutation_type="samples",
        n_resamples=20_000,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    assert permutation_test(delta) == pytest.approx(peer.pvalue, abs=0.01)


def test_table13_averages_are_computed_and_differ_from_the_abstract_as_its_note_says() -> None:
    averages = {r["model"]: r["average"] for r in rows_with({})}
    assert averages["R1-Distill-Qwen-32B"] == pytest.approx(63.0, abs=0.05)
    assert averages["R1-Distill-Qwen-7B"] == pytest.approx(44.1, abs=0.05)
    assert averages["Skywork-OR1-32B"] == pytest.approx(72.8, abs=0.05)
    assert averages["Skywork-OR1-7B"] == pytest.approx(57.5, abs=0.05)
    assert averages["Light-R1-32B"] is None
    rows, note = table13()
    assert len(rows) == 13
    assert "57.8" in note
    own = rows_with({"aime24": 0.5, "aime25": 0.25, "livecodebench": 0.3})[-1]
    assert own == {"model": "this result", "aime24": 50.0, "aime25": 25.0, "livecodebench": 30.0, "average": 35.0}


def settings(benchmark: str, **sampling: float) -> dict[str, Any]:
    at = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 32768, "seed": 1} | sampling
    judging = {"extract": "box", "reasoning": "auto", "time_limit": 10.0}
    return {"benchmark": benchmark, "sampling": at, "judging": judging, "engine": {"engine": "in_process"}}


def differences_from(name: str, of: dict[str, Any], samples: int, verifier: str = "maths", **source: Any) -> list[str]:
    return differs_from_preset(PRESETS[name], of, {"whole": True} | source, samples=samples, verifiers=[verifier])


def test_a_result_stands_beside_table13_only_at_its_settings() -> None:
    assert differences_from("report", settings("aime24"), 32) == []
    assert differences_from("report", settings("livecodebench"), 4, "code") == []
    assert differences_from("study", settings("livecodebench", top_k=0), 1, "code") == []
    sampled = settings("aime25", temperature=0.6, top_k=1)
    assert differences_from("report", sampled, 8, whole=False) == [
        "top_k 1 instead of 0",
        "temperature 0.6 instead of 1.0",
        "samples per problem 8 instead of 32",
        "not known to be the whole set",
    ]
    served = settings("aime25") | {"engine": {"extra": {"temperature": None, "top_k": 1, "seed": None}}}
    assert differences_from("report", served, 32) == [
        "top_k 1 instead of 0",
        "temperature of the server instead of 1.0",
    ]
    judged = settings("aime25") | {"judging": {"extract": "lenient", "reasoning": "none"}, "environments": {}}
    assert differences_from("report", judged, 32, "mine.py:score", template_given=True) == [
        "extract lenient instead of box",
        "verifier mine.py:score instead of maths",
        "reasoning none",
        "an environment",
        "another text around the prompts",
    ]
    assert PRESETS["released-code"].temperature == 0.6
    assert [PRESETS["study"].samples_for(name) for name in ("aime24", "livecodebench", "gsm8k")] == [8, 1, 8]


def test_the_study_mean_needs_its_three_sets_at_its_settings() -> None:
    def result(name: str, mean: float, error: float, *presets: str, samples: int = 8) -> dict[str, Any]:
        accuracy = {"mean": mean, "standard_error": error}
        return {"accuracy": accuracy, "settings": settings(name), "samples": samples, "settings_of": presets}

    results = {name: result(name, m, 0.1, "study") for name, m in (("aime24", 0.6), ("aime25", 0.3))}
    assert set(means(results)) == {"all"}
    results["livecodebench"] = result("livecodebench", 0.3, 0.2, "report", samples=4)
    assert set(means(results)) == {"all"}, "sampled at other settings"
    assert means(results)["all"]["settings_differ"] == ["samples"]
    results["livecodebench"]["settings_of"] = ["study"]
    found = means(results)["study"]
    assert found["mean"] == pytest.approx(0.4)
    assert found["standard_error"] == pytest.approx((0.01 + 0.01 + 0.04) ** 0.5 / 3)
    assert means({"gsm8k": results["aime24"]}) == {}


def test_samples_that_were_not_judged_do_not_count_for_the_common_length() -> None:
    def result(outcomes: str, tokens: list[int]) -> dict[str, Any]:
        row = {"outcomes": outcomes, "tokens": tokens, "cluster": 0}
        return {"length": {"mean": sum(tokens) / len(tokens)}, "per_problem": [row]}

    found = common_efficiency(result("+-?", [10, 10, 100]), result("++", [20, 40]))
    assert (found["mean_tokens"], found["before"]) == (10.0, 0.5)
    assert found["difference"] is not None
