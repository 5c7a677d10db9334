"""Pages for readers: conditions, inserted numbers, comparisons at equal cost, redrawn figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from studies.__main__ import app
from studies.advice import Advice, Entry, Text, advice_page, check_advice, load_advice, said
from studies.claims import Found, Verdict, decide, numbers_of, shown_premise, shown_verdict, starts_of
from studies.definition import SUITES, DifferenceClaim, LevelClaim, Premise, shipped_ablations
from studies.distances import control_section, distances, of_base
from studies.pages import (
    equal_cost_table,
    equal_time_table,
    figures_page,
    limited,
    planned_arms,
    spearman,
    write_pages,
)
from studies.results import append_result, read_results
from studies.runs import plan_runs, suite_results

STEPS = 40
PREMISE = Premise(says="It learns.", arm="a", measure="test@1.0", direction="above", bound=0.0)
BELOW = LevelClaim(
    id="4.low", says="It is low.", measure="entropy@late", arm="a", direction="below", bound=0.1, premise=PREMISE
)
MORE = DifferenceClaim(
    id="4.more",
    says="It is more.",
    measure="test@1.0",
    arm="a",
    than="b",
    direction="higher",
    effect=0.1,
    premise=PREMISE,
)


def row(accuracy: float, *, tokens_a_step: float = 100.0, updates_a_step: float = 1.0) -> dict[str, Any]:
    """Return a run whose accuracy rises evenly to ``accuracy``."""
    steps = range(1, STEPS + 1)
    return {
        "scale": "tiny",
        "cpu_seconds": 1.0,
        "curves": {
            "accuracy": [accuracy * step / STEPS for step in steps],
            "accuracy_nontruncated": [accuracy * step / STEPS for step in steps],
            "truncation": [0.1] * STEPS,
            "entropy": [accuracy / 2] * STEPS,
            "tokens": [tokens_a_step * step for step in steps],
            "updates": [updates_a_step * step for step in steps],
            "seconds": [0.5 * step for step in steps],
        },
        "tests": {"before": {"1.0": 0.1}, "after": {"1.0": accuracy}},
        "lengths": {"after": {"responses": 10, "right": [3, 3, 9, 20, 60]}},
    }


def verdict(**changes: Any) -> Verdict:
    made: dict[str, Any] = {
        "claim": "4.more",
        "decision": "holds",
        "effect": 0.2,
        "low": 0.15,
        "high": 0.25,
        "bar": 0.1,
        "p_holds": 0.001,
        "p_fails": 0.999,
        "starts": 5,
        "seeds": 5,
        "premise": Found(value=0.5, met=True),
    }
    return Verdict(**{**made, **changes})


def test_a_level_is_told_as_it_was_measured() -> None:
    (decided,) = decide([BELOW], {"4": {"a": {(start, 0): row(0.1 + 0.001 * start) for start in range(5)}}})
    assert decided.decision == "holds"
    assert numbers_of(BELOW, decided).effect == "0.051"
    assert numbers_of(BELOW, decided).bar == "below 0.1"
    assert decided.effect == pytest.approx(0.051)
    assert decided.low < decided.effect < decided.high < decided.bar == 0.1


def test_undecided_says_how_many_starts_would_decide() -> None:
    undecided = verdict(decision="undecided", starts_needed=11)
    assert starts_of(undecided) == "5 (about 11 would decide)"
    assert starts_of(verdict(seeds=10)) == "5 (10 seeds)"
    assert shown_verdict(MORE, undecided).startswith(
        "(4.more undecided: 0.2, 0.15 to 0.25; needed 0.1; checkpoints 5 (about"
    )
    unmet = verdict(decision="undecided", premise=Found(value=-1.0, met=False))
    assert shown_verdict(MORE, unmet).startswith("(4.more undecided, premise unmet: 0.2")
    assert shown_premise(MORE, unmet) == "It learns. unmet: -1, needed above 0"
    assert shown_verdict(MORE, verdict(decision="not run")) == "(not run)"


def test_advice_follows_the_verdicts() -> None:
    texts = (
        Text(when=("4.more holds", "4.low holds"), text="both"),
        Text(when=("4.more holds",), text="more: {4.more}"),
        Text(text="neither"),
    )
    entry = Entry(about="This", texts=texts, claims=("4.more",))
    claims = {"4.more": MORE, "4.low": BELOW}
    assert said(entry, {"4.more": verdict(), "4.low": verdict(claim="4.low")}, claims) == "both"
    assert said(entry, {"4.more": verdict()}, claims) == f"more: {shown_verdict(MORE, verdict())}"
    assert said(entry, {"4.more": verdict(decision="does not hold")}, claims) == "neither"


def test_advice_names_claims_that_exist() -> None:
    shipped = shipped_ablations()
    check_advice(load_advice(), shipped)
    page = advice_page(shipped, {}, load_advice())
    for question in ("penalising truncation", "while the bonus is off", "Fig. 8", "0.28", "levels 0-8", "brevity"):
        assert question in page
    entry = Entry(about="This", texts=(Text(text="{99.no}"),))
    with pytest.raises(ValueError, match=r"names the claim '99\.no', which no ablation has"):
        check_advice(Advice(entries=(entry,)), shipped)
    with pytest.raises(ValueError, match="must have no condition"):
        Entry(about="This", texts=(Text(when=("4.more holds",), text="only then"),))


def test_equal_cost_reads_arms_off_where_they_have_spent_as_much() -> None:
    runs = {
        "lean": {(0, 0): row(0.8)},
        "dear": {(0, 0): row(0.8, tokens_a_step=200.0, updates_a_step=4.0)},
    }
    table = [line.split(" | ") for line in equal_cost_table(runs, "accuracy", 0.5).splitlines()]
    head, _, lean, dear = table
    at = head.index("at 4,000 sampled tokens")
    assert lean[at].startswith("0.78")  # the mean of its last three steps
    assert dear[at].startswith("0.400"), "half of the steps"
    reached = head.index("sampled tokens to 50%")
    assert (lean[reached], dear[reached]) == ("2,800 (2,800-2,800)", "5,600 (5,600-5,600)")
    never = equal_cost_table({"low": {(0, 0): row(0.3)}}, "accuracy", 0.5)
    assert "0 of 1 runs" in never


def test_equal_time_gives_the_faster_arm_more_steps() -> None:
    ablation = next(a for a in shipped_ablations() if a.id == "11")
    planned = planned_arms(ablation, (64, 32, 16))
    assert [name for name, *_ in planned] == ["64", "32", "16"]
    runs = {arm: {(0, 0): row(0.8)} for arm in ("big", "mid", "small")}
    table = equal_time_table(runs, planned, lambda place: list(runs)[place])
    steps = [int(line.split(" | ")[4]) for line in table.splitlines()[2:]]
    slowest = max(range(3), key=lambda i: planned[i][2])
    assert steps[slowest] == min(steps)
    assert max(steps) <= STEPS


def test_a_shorter_limit_is_read_off_the_lengths() -> None:
    found = limited(row(0.5), "after")
    assert (found[4], found[12], found[24], found[128]) == (0.2, 0.3, 0.4, 0.5)
    assert limited(row(0.5), "before") == {}


def test_rank_correlation() -> None:
    assert spearman([(1, 10), (2, 30), (3, 20)]) == pytest.approx(0.5)
    assert spearman([(1, 1), (2, 1)]) == 0


def test_redrawn_figures(tmp_path: Path) -> None:
    runs = {arm: {(start, 0): row(0.5 + 0.1 * start) for start in range(2)} for arm in ("a", "b")}
    page = figures_page({"2": runs, "3": runs, "8": runs}, tmp_path)
    drawn = {path.stem for path in tmp_path.glob("*.svg")}
    assert drawn == {
        "figure-6-accuracy",
        "figure-6-accuracy_nontruncated",
        "figure-6-truncation",
        "figure-8",
        "figure-13",
    }
    assert all(f"({name}.svg)" in page for name in drawn)
    assert "| ablation 8 | 4 | 1.00 |" in page, "entropy is half of the accuracy in these runs"


def test_every_shipped_ablation_has_a_page_at_every_scale(tmp_path: Path) -> None:
    shipped = shipped_ablations()
    for run in plan_runs(shipped, "tiny", [0, 1]):
        made = {**row(0.5 + 0.01 * run.unit[0]), "schema_version": 1, "key": run.key}
        append_result(tmp_path / "results.jsonl", made)
    index = write_pages(shipped, "tiny", read_results(tmp_path / "results.jsonl"), tmp_path / "pages")
    pages = {path.stem for path in index.parent.glob("*.md")}
    assert pages == {"index", "questions", "costs", "figures", *(a.id for a in shipped)}
    assert "planned s per step" in (index.parent / "costs.md").read_text()
    assert "{" not in (index.parent / "questions.md").read_text(), "every number is filled in"
    small = write_pages(shipped, "quick", {}, tmp_path / "quick")
    assert {path.stem for path in small.parent.glob("[0-9]*.md")} == {a.id for a in shipped if "quick" in a.scales}


@pytest.mark.parametrize("suite", SUITES)
def test_committed_verdicts_are_those_of_the_committed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str
) -> None:
    """Pages are generated: after a change of a definition or of results, run `python -m studies report`."""
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)  # where suites look for their results
    study = root / SUITES[suite].pages
    write_pages(shipped_ablations(suite), "tiny", suite_results(suite, "tiny"), tmp_path, suite)
    command = f"python -m studies report --suite {suite}"
    for made in sorted(tmp_path.iterdir()):
        assert made.read_text() == (study / made.name).read_text(), f"{made.name}: {command}"


def test_distances_are_paired_by_start_and_seed_and_told_in_points() -> None:
    units = {(start, seed): row(0.2 * start + 0.1 * seed) for start in range(3) for seed in range(2)}
    # 10, 20 and 30 points below; two seeds of one starting model are no further evidence
    lower = {(start, seed): row(0.2 * start + 0.1 * seed - 0.1 * (start + 1)) for start, seed in units}
    (found,) = distances({"on-policy": units, "reuse 4": lower}).values()
    assert found.effect == pytest.approx(-20)
    assert found.starts == 3
    half = 4.3027 * 10 / 3**0.5  # Student's quantile of two degrees of freedom, the means' deviation
    assert (found.low, found.high) == pytest.approx((-20 - half, -20 + half), rel=1e-4)


def test_a_distance_is_from_the_variant_with_the_same_ending() -> None:
    runs = {
        arm: {(start, 0): row(accuracy) for start in (0, 1, 1000, 1001)}
        for arm, accuracy in (("clip, low", 0.1), ("clip, high", 0.4), ("KL3, low", 0.3), ("KL3, high", 0.5))
    }
    found = distances(runs, "clip, {}")
    assert {arm: round(verdict.effect) for arm, verdict in found.items()} == {"KL3, low": 20, "KL3, high": 10}
    assert {unit for rows in of_base(runs, 1).values() for unit in rows} == {(1000, 0), (1001, 0)}


def test_a_better_rate_is_compared_with_a_better_rate_and_control_by_temperature() -> None:
    def runs(accuracy: float) -> dict[tuple[int, int], Any]:
        tests = {"before": {}, "after": {"0.0": accuracy + 0.2, "1.0": accuracy}}
        return {(start, 0): {**row(accuracy), "tests": tests} for start in range(2)}

    family = {"on-policy": runs(0.1), "on-policy, better rate": runs(0.5), "reuse 4, better rate": runs(0.4)}
    assert {arm: round(v.effect) for arm, v in distances(family).items()} == {"reuse 4, better rate": -10}
    (section,) = control_section({"sums": {"reuse 4": runs(0.3), "reuse 4, control": runs(0.25)}})
    *_, line = section.strip().splitlines()
    assert line.startswith("| sums | reuse 4 | 50.0 | 45.0 | -5 ("), "greedy"
    assert "| 30.0 | 25.0 | -5 (" in line, "at temperature 1"
    assert control_section({"sums": {"reuse 4": runs(0.3)}}) == []


@pytest.mark.slow
def test_the_quick_study_runs_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, work, pages = tmp_path / "results.jsonl", tmp_path / "work", tmp_path / "pages"
    run = ["run", "3", "7", "--quick", "--results", str(results), "--work", str(work)]
    report = ["report", "--scale", "quick", "--results", str(results), "--output", str(pages)]
    assert app(run, result_action="return_value") == 0
    assert app(report, result_action="return_value") == 0
    assert not any(pages.glob("7.md")), "ablation 7 has no quick form"
    lines = [line.strip("| ").split(" | ") for line in (pages / "3.md").read_text().splitlines()]
    told = {cells[0].partition(" ")[0]: cells[1:] for cells in lines if len(cells) == 7}
    assert told["3.truncation"][4].split()[0] == "2"
    assert told["3.truncation"][0] == "undecided", "two starts decide nothing"
    assert "figure-6-truncation.svg" in (pages / "figures.md").read_text()
    assert app(run, result_action="return_value") == 0
    assert "0 to do" in capsys.readouterr().out
