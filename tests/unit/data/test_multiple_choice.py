"""Multiple choice: options in the forms of real data sets become part of the prompt; letters and texts are correct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import magicrl
from magicrl.config.data_schema import SourceConfig
from magicrl.data.schemas import Quarantined, Read, RecordReader
from magicrl.data.sources import Place, load_source, read_problems, recognise
from magicrl.evaluation.benchmarks import load_benchmark, parse_asked
from magicrl.evaluation.options import EvaluationOptions

QUESTION = "Capital of France?"
SHOWN = "Capital of France?\nA) Rome\nB) Paris"


def read(tmp_path: Path, **record: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": QUESTION, **record}))
    return recognise(path)


@pytest.mark.parametrize(
    "record",
    [
        {"choices": ["Rome", "Paris"], "answer": 1},  # MMLU
        {"choices": ["Rome", "Paris"], "answer": "1"},
        {"choices": ["A) Rome", "B) Paris"], "answer": "(B)"},
        {"Options": ["Rome", "Paris"], "answer": "paris"},
        {"options": {"A": "Rome", "B": "Paris"}, "answer": "b"},
        {"choices": [{"label": "A", "text": "Rome"}, {"label": "B", "text": "Paris"}], "answer": "B."},
        {"choices": {"text": ["Rome", "Paris"], "label": ["A", "B"]}, "answerKey": "B"},  # ARC
        {"A": "Rome", "B": "Paris", "answer": "B"},
        {"question": SHOWN, "choices": ["Rome", "Paris"], "answer": 1},  # the question already shows the options
    ],
)
def test_options_are_shown_and_both_answers_are_right(record: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, **record)
    problem = found.first.problem
    assert problem.prompt == SHOWN
    assert problem.references == ("B", "Paris")
    right = (r"\boxed{B}", r"\boxed{Paris}", r"\boxed{\text{B) Paris}}", "The answer is B.")
    wrong = (r"\boxed{A}", r"\boxed{Rome}", "The answer is A) Rome")
    rows = [{"response": text, "reference": list(problem.references)} for text in (*right, *wrong)]
    assert [verdict.correct for verdict in magicrl.verify(rows, workers=1)] == [True] * 4 + [False] * 3


def test_labels_of_the_data_are_kept(tmp_path: Path) -> None:
    found = read(tmp_path, choices={"text": ["Rome", "Paris"], "label": ["1", "2"]}, answer="2")
    assert found.first.problem.prompt == "Capital of France?\n1) Rome\n2) Paris"
    assert found.first.problem.references == ("2", "Paris")


def test_a_text_that_is_the_label_of_another_option_is_not_right(tmp_path: Path) -> None:
    assert read(tmp_path, choices=["O", "a", "B", "AB"], answer="B").first.problem.references == ("B",)
    found = read(tmp_path, choices={"text": ["4", "2", "3", "1"], "label": ["1", "2", "3", "4"]}, answer="1")
    assert found.first.problem.references == ("1",)


@pytest.mark.parametrize("answer", [2, 2.0, "2"])
@pytest.mark.parametrize(
    "options",
    [
        {"1": "Rome", "2": "Paris", "3": "Oslo"},
        {"label": ["1", "2", "3"], "text": ["Rome", "Paris", "Oslo"]},
        [{"label": 1, "text": "Rome"}, {"label": 2, "text": "Paris"}, {"label": 3, "text": "Oslo"}],
    ],
)
def test_a_number_is_the_label_where_the_labels_are_numbers(options: Any, answer: Any, tmp_path: Path) -> None:
    assert read(tmp_path, options=options, answer=answer).first.problem.references == ("2", "Paris")
    ((_, rejected),) = read(tmp_path, options=options, answer=0).rejected
    assert str(rejected) == "the answer 0 is none of the options 1, 2, 3"


def test_an_answer_that_is_no_option_is_set_aside(tmp_path: Path) -> None:
    ((_, rejected),) = read(tmp_path, choices=["Rome", "Paris"], answer="C").rejected
    assert str(rejected) == "the answer 'C' is none of the options A, B"
    ((_, rejected),) = read(tmp_path, choices=["Rome", "Paris"], answer=None).rejected
    assert str(rejected) == "no answer: field 'answer' holds None"


def test_answers_that_count_from_one_are_refused_for_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    said = r"rows.jsonl, line 3: .* and no row has the answer 0.*; give letters \(A, B, ...\) or numbers from 0"

    def write(*answers: Any) -> None:
        rows = [{"question": f"{n}?", "choices": ["Rome", "Paris"], "answer": one} for n, one in enumerate(answers)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    for answers in ([1, 1, 2], ["1", "1", "2"], [1.0, 1.0, 2.0]):
        write(*answers)
        for read_all in (
            lambda: recognise(path),
            lambda: load_source(SourceConfig(path=str(path))),
            lambda: load_benchmark(
                parse_asked(f"rows={path}"), EvaluationOptions("model", [f"rows={path}"], output=tmp_path)
            ),
        ):
            with pytest.raises(ValueError, match=said):
                read_all()
    # with a 0 only the third row is wrong
    write(1, 0, 2)
    ((_, rejected),) = recognise(path).rejected
    assert str(rejected) == "the answer 2 is none of the options A, B"


def test_numbers_that_are_texts_in_some_rows_and_places_in_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def write(*answers: Any) -> None:
        rows = [{"question": f"{n}?", "choices": ["2", "1", "7"], "answer": one} for n, one in enumerate(answers)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("2", "0", "B")
    said = r"rows.jsonl, line 1: the answer is the text of an option, but in \S*rows.jsonl, line 2 it can only be the p"
    with pytest.raises(ValueError, match=said):
        recognise(path)
    for all_texts in (["2", "1", "7"], [7, "2", "A"]):
        write(*all_texts)
        assert recognise(path).problems == 3
    write(0, 2, "B")
    assert recognise(path).problems == 3


def test_columns_that_nothing_reads_are_named(tmp_path: Path) -> None:
    found = read(tmp_path, id="q1", choices=["Rome", "Paris"], answer=1, hint="Not in Italy")
    assert found.first.unused == ("hint",)


def test_other_columns_of_these_names_are_no_options(tmp_path: Path) -> None:
    none: list[Any] = [[], "", "none", "[]", [None, None], {"label": [], "text": []}, {"A": None, "B": None}, 4]
    for extra in (*({"choices": value} for value in none), {"A": "first", "C": "third"}):
        assert read(tmp_path, answer="Paris", **extra).first.problem.prompt == QUESTION


@pytest.mark.parametrize("choices", ["Rome;Paris", ["Rome", "Paris", None], ["Paris"], [["Rome"], ["Paris"]]])
def test_options_that_cannot_be_read_set_the_row_aside(choices: Any, tmp_path: Path) -> None:
    ((_, rejected),) = read(tmp_path, choices=choices, answer="B").rejected
    assert isinstance(rejected, Quarantined)
    assert str(rejected).startswith(f"field 'choices' has no options that can be read, got {type(choices).__name__};")
    # a custom reward may read the column itself
    path = tmp_path / "rows.jsonl"
    reader = RecordReader(stem="rows", verifier="reward.py:right")
    ((_, found),) = read_problems(Place(path=path), reader)
    assert isinstance(found, Read)
    assert found.problem.extra["choices"] == choices


def test_options_that_only_other_rows_have_are_left_out(tmp_path: Path) -> None:
    # a parquet file gives every row the keys of all rows
    options = {"A": "Rome", "B": "Paris", "C": None}
    assert read(tmp_path, options=options, answer="B").first.problem.prompt == SHOWN


def test_the_last_turn_of_a_conversation_is_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    path.write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "4"}]}))
    first = recognise(path).first
    assert first is not None
    assert (first.problem.prompt, first.problem.references) == ("2 + 2?", ("4",))
    path.write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "We add.\nThat is four."}]}))
    ((_, rejected),) = recognise(path).rejected
    assert "put the answer into a column of its own, or use a custom reward" in str(rejected)
