"""Which responses a page holds, and what a problem counts as."""

from __future__ import annotations

import pytest

from magicrl.reporting import samples as sample_browser
from magicrl.reporting.samples import Answer, AnswerRow, Browsed, Kind, browser, chosen, clipped, kinds_of

RIGHT, WRONG = Answer(text="7", outcome="correct"), Answer(text="8", outcome="wrong")
CUT = Answer(text="7", outcome="correct", truncated=True)
OPEN = Answer(text="", outcome="not_judged")


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        ([[RIGHT], [WRONG]], {"lost", "right", "wrong"}),
        ([[WRONG], [RIGHT]], {"won", "right", "wrong"}),
        ([[RIGHT], [RIGHT], [WRONG]], {"lost", "right", "wrong"}),
        ([[RIGHT, WRONG], [RIGHT, RIGHT]], {"right", "wrong"}),
        ([[RIGHT], [CUT]], {"lost", "right", "truncated"}),
        ([[OPEN], [RIGHT]], {"not_judged", "right"}),
        ([[], [RIGHT]], {"right"}),
        ([[WRONG]], {"wrong"}),
    ],
)
def test_what_a_problem_is(columns: list[list[Answer]], kinds: set[str]) -> None:
    assert kinds_of(columns) == kinds


def problem(name: str, *kinds: Kind, text: str = "t") -> Browsed:
    row = AnswerRow(label="", answers=(Answer(text=text, outcome="wrong"),))
    return Browsed(id=name, prompt="", gold="", marks=(), rows=(row,), kinds=frozenset(kinds))


def test_a_full_page_holds_some_of_every_kind_in_the_set_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_browser, "MOST_PROBLEMS", 4)
    problems = [*(problem(f"r{i}", "right") for i in range(9)), problem("w", "wrong"), problem("l", "lost", "wrong")]
    assert [p.id for p in chosen(problems)] == ["r0", "r1", "w", "l"]


def test_the_page_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_browser, "MOST_CHARACTERS", 250)
    problems = [problem(str(i), "wrong", text="x" * 100) for i in range(9)]
    shown = browser("s", ("m",), problems)
    assert (len(shown.items), shown.total) == (2, 9)
    assert shown.counts["wrong"] == 9


def test_a_single_column_has_nothing_that_changed() -> None:
    shown = browser("s", ("m",), [problem("a", "wrong", "right")])
    assert list(shown.kind_words) == ["wrong", "right"]
    assert browser("s", ("before", "after"), [problem("a", "lost")]).kind_words == {"lost": "right before, wrong after"}


def test_both_ends_of_a_long_response_are_shown() -> None:
    text = "a" * 5000 + "answer 7"
    shown = clipped(text)
    assert shown.endswith("answer 7")
    assert "1008 characters left out" in shown
    assert clipped("short") == "short"
