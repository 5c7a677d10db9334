"""The rise over the initial checkpoint's best temperature and its interval; the words that page and terminal share."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from magicrl.evaluation.statistics import Interval
from magicrl.reporting.page import render_page
from magicrl.reporting.read_folders import TemperatureScore, read_run
from magicrl.reporting.run_page import run_blocks
from magicrl.reporting.scores import comparisons, headline, rise, summary
from magicrl.reporting.wording import moment, number_text, percent, points, temperature_text, unjudged_note, visible
from magicrl_verifiers.progress import duration


def test_the_rise_is_stated_against_the_start_s_best_temperature(run_folder: Path) -> None:
    (comparison,) = comparisons(read_run(run_folder))
    assert comparison.initial_best is not None
    assert comparison.initial_best[0] == 0.6, "0.47 at 0.6 beats 0.46 at 1 and 0.40 at 0"
    assert comparison.training_temperature == 1.0
    rise = comparison.rise_over_best()
    assert rise is not None
    assert rise[3].mean == pytest.approx(0.90 - 0.47)
    assert rise[3].low > 0
    assert [p.temperature for p in comparison.pairs] == [0.0, 0.6, 1.0]
    same = comparison.pairs[2].rise
    assert same is not None
    assert same.mean == pytest.approx(0.90 - 0.46)


def test_the_rise_is_paired_by_problem_where_the_shares_are_told() -> None:
    """Every problem gains 0.1 or 0.2, whatever its share was."""

    def score(shares: tuple[float | None, ...]) -> TemperatureScore:
        return TemperatureScore(
            accuracy=Interval(mean=0.5, low=0.2, high=0.8), problems=3, samples=5, per_problem=shares
        )

    before, after = score((0.0, 0.4, 0.8, None)), score((0.1, 0.6, 1.0, 0.1))
    paired = rise(before, after)
    assert paired is not None
    # the bootstrap has 0.1 to 0.2; three problems that rise have p = 0.25
    assert (paired.mean, paired.low, paired.high) == pytest.approx((0.5 / 3, 0.0, 0.2))
    assert rise(before, score((0.2, 0.6, 1.0))) is None, "other problems"
    moved = score((0.3, 0.5, 0.9, 0.1))
    wide = rise(before, moved.model_copy(update={"clusters": (0, 1, 1, 1)}))
    alone = rise(before, moved)
    assert wide is not None
    assert alone is not None
    assert wide.mean == alone.mean
    assert wide.low < alone.low, "two problems of one template are one observation"


def test_the_temperature_of_training_is_the_recipe_s(run_folder: Path) -> None:
    config = run_folder / "config.toml"
    for text, at in (
        ("", 1.0),
        ("[rollout]\ntemperature = 0.6", 0.6),
        ("[rollout]\ntemperature = 0.6\n[[stages]]\ntemperature = 1.0\n[[stages]]\ntemperature = 0.0", 0.0),
        ("[rollout]\ntemperature = 0.6\n[[stages]]\nmax_tokens = 8", 0.6),
        ("[rollout]\ntemperature = 0.7", 1.0),  # not measured
    ):
        config.write_text(text)
        (comparison,) = comparisons(read_run(run_folder))
        assert comparison.training_temperature == at, text


def test_a_run_without_its_after_has_no_rise(run_folder: Path) -> None:
    (run_folder / "evaluations" / "after.json").unlink()
    (comparison,) = comparisons(read_run(run_folder))
    assert comparison.training_temperature == 1.0, "what the start was tested at"
    assert comparison.rise_over_best() is None
    assert all(p.rise is None for p in comparison.pairs)
    assert [(k, before is None, after is None) for k, _, before, after in comparison.passes] == [(16, False, True)]


def grade(folder: Path) -> None:
    """Make the run's tests graded: every problem's mean reward rises by 2."""
    for name, mean in (("before", -0.75), ("after", 1.25)):
        path = folder / "evaluations" / f"{name}.json"
        document = json.loads(path.read_text())
        for score in document["temperatures"].values():
            score["reward"] = {"mean": mean, "low": mean - 0.25, "high": mean + 0.25}
            score["reward_per_problem"] = [mean + (-1) ** i for i in range(len(score["per_problem"]))]
        path.write_text(json.dumps(document))


def printed(folder: Path, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(summary(read_run(folder), width), crop=False)
    return out.getvalue()


def test_the_summary_fits_a_terminal_and_says_what_matters(run_folder: Path) -> None:
    (run_folder / "report.html").write_text("")
    text = printed(run_folder)
    assert "46.0 (43.0–49.0)" in text
    assert "90.0 (87.0–93.0)" in text
    assert "+44.0" in text
    assert "compared with the initial checkpoint's best" in " ".join(text.split())
    assert "pass@16" in text
    assert "40 training steps in 1 min 10 s (finished)" in text
    assert f"report  {run_folder / 'report.html'}\n" in text, "a path to copy stays whole"
    assert "…" not in text, "nothing was cut off"


def test_a_narrow_terminal_gets_every_number_on_a_line_of_its_own(run_folder: Path) -> None:
    text = printed(run_folder, width=60)
    assert max(len(line) for line in text.splitlines() if not line.startswith("metrics")) <= 60
    assert "temperature 1\n  before: 46.0 (43.0–49.0)\n  after: 90.0 (87.0–93.0)\n  rise in points: +44.0" in text
    assert "\npass@16, " in text
    assert "  truncated: " in text


def test_the_summary_of_a_run_without_tests_is_short(run_folder: Path) -> None:
    for path in (run_folder / "evaluations").glob("*"):
        path.unlink()
    assert printed(run_folder).startswith("40 training steps")
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    assert printed(run_folder).startswith("1 training step in ")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "–"), (2.41, "2.4 s"), (59.7, "1 min 0 s"), (75, "1 min 15 s"), (3725, "1 h 2 min"), (float("nan"), "–")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.20349, "0.203"), (24.1, "24.1"), (1234.5, "1234"), (100.0, "100"), (2e-7, "2.00e-07"), (None, "–")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_other_words() -> None:
    assert percent(0.4567) == "45.7 %"
    # one truncated response of 2,400 is not none
    assert (percent(0.0), percent(1 / 2400), percent(0.003, 0)) == ("0.0 %", "0.04 %", "0.3 %")
    assert points(-0.05) == "−5.0"
    assert temperature_text(0.0) == "0 (greedy)"
    assert moment("2026-01-02T03:04:05+01:00") == "2026-01-02 02:04 UTC"
    assert moment("yesterday") == "yesterday"


def test_visible_shows_what_would_act() -> None:
    assert visible("a\tb\r\nc\x1b[0m\x00\x7f\x9b\u202e\ud800") == "a\tb\nc␛[0m␀␡⟨U+009B⟩⟨U+202E⟩⟨U+D800⟩"


def test_the_terminal_tells_the_mean_reward_where_rewards_are_graded(run_folder: Path) -> None:
    assert "mean reward" not in printed(run_folder)
    grade(run_folder)
    text = printed(run_folder)
    assert "test (mean reward, with 95 % intervals)" in text
    assert "1.25 (1–1.5)" in text
    assert "−0.75 (−1 to −0.5)" in text, "a dash would look like a sign"
    assert "At temperature 1: 1.25, +2 (+1." in text
    assert "accuracy" not in text
    assert "…" not in printed(run_folder, 60), "nothing was cut off"
    assert "90.0 (87.0–93.0) %" in text, "pass@k counts right answers"


def test_a_mean_without_a_known_interval_has_none(run_folder: Path) -> None:
    grade(run_folder)
    path = run_folder / "evaluations" / "before.json"
    document = json.loads(path.read_text())
    for score in document["temperatures"].values():
        score["reward"] = {"mean": 0.0, "low": 0.0, "high": 0.0}
    path.write_text(json.dumps(document))
    assert "(0–0)" not in printed(run_folder)
    assert "0 to 0" not in render_page("graded", [], run_blocks(read_run(run_folder)))


def test_a_test_of_truncated_episodes_has_no_rewards_and_counts_as_its_accuracy(run_folder: Path) -> None:
    grade(run_folder)
    path = run_folder / "evaluations" / "before.json"
    document = json.loads(path.read_text())
    for score in document["temperatures"].values():
        del score["reward"], score["reward_per_problem"]
        score["accuracy"] |= {"mean": 0.0, "low": 0.0, "high": 0.2}
        score["per_problem"] = [0.0] * len(score["per_problem"])
    path.write_text(json.dumps(document))
    assert "At temperature 1: 1.25, +1.25 (+" in printed(run_folder)


def test_the_page_tells_the_mean_reward_where_rewards_are_graded(run_folder: Path) -> None:
    grade(run_folder)
    run = read_run(run_folder)
    made = headline(run)
    assert made is not None
    (told,) = made["sets"]
    assert [(tile["value"], tile["label"]) for tile in told["tiles"][:2]] == [
        ("−0.75 → 1.25", "mean reward at temperature 1"),
        ("+2", "over the initial checkpoint's best temperature, 0 (greedy): −0.75"),
    ]
    assert told["view"].title == "Mean reward by temperature"
    page = " ".join(render_page("graded", [], run_blocks(run)).split())
    assert "−0.75<small>−1 to −0.5</small>" in page
    assert "Accuracy by temperature" not in page
    assert "train accuracy, first" in page, "its training was not graded"


def test_samples_that_nobody_could_judge_are_told_with_what_is_left() -> None:
    assert unjudged_note(91, 100, 0.05) == "91 of 100 samples could not be judged and count nowhere"
    assert unjudged_note(91, 100, 0.09).endswith("; the others were truncated, so that no complete answer was judged")
