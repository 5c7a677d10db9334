"""The reader of records: every common shape of columns, folders, conversations, and messages about other shapes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import write_lines

from magicrl.config.data_schema import FieldMapping, SourceConfig
from magicrl.config.errors import RecipeError
from magicrl.config.given import data_file, data_reference
from magicrl.data.data_files import Row, read_rows
from magicrl.data.schemas import Quarantined
from magicrl.data.sources import Place, load_problems, recognise
from magicrl.evaluation.benchmarks import load_benchmark, parse_asked
from magicrl.evaluation.options import arguments
from magicrl.records import Message, Problem

TURN = [{"role": "user", "content": "2 + 3?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
SHARE = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "2 + 3?"}]


def both(path: Path) -> list[Problem]:
    """Return the problems of a file for training and for evaluation, which may differ only around a prompt."""
    trained = load_problems(SourceConfig(path=str(path)))
    examined = load_benchmark(parse_asked(str(path)), arguments(template="{prompt}")).problems
    assert [(p.prompt, p.context, p.references, p.key) for p in trained] == [
        (p.prompt, p.context, p.references, p.key) for p in examined
    ]
    return trained


@pytest.mark.parametrize(
    ("record", "schema"),
    [
        ({"question": "2 + 3?", "answer": "5"}, "question, answer"),
        ({"prompt": "2 + 3?", "answer": 5}, "prompt, answer"),
        ({"problem": "2 + 3?", "answer": 5.0}, "problem, answer"),
        ({"Question": "2 + 3?", "Answer": "5", "Year": 1999, "ID": "1999-1"}, "Question, Answer"),
        ({"problem": "2 + 3?", "solution": "So \\boxed{5}."}, "problem, solution"),
        ({"problem": "2 + 3?", "solution": "So \\boxed{4}.", "answer": "5"}, "problem, answer"),
        ({"question": "2 + 3?", "answer": "Five.\n#### 5"}, "question, answer"),
        ({"prompt": "2 + 3?", "ground_truth": "$5$"}, "prompt, ground_truth"),
        ({"question": "2 + 3?", "final_answer": ["5"], "r1_solution_1": "a"}, "question, final_answer"),
        ({"instruction": "2 + 3?", "output": "It is \\boxed{5}."}, "instruction, output"),
        ({"problem": "2 + 3?", "answer": "5", "generations": ["x"], "messages": TURN}, "open_r1"),
        ({"prompt": TURN, "reward_model": {"ground_truth": "5", "style": "rule"}, "ability": "MATH"}, "released"),
        ({"prompt": "2 + 3?", "solution": "5", "reward_model": {"ground_truth": "5"}}, "released"),
        ({"messages": TURN, "answer": "5"}, "messages, answer"),
        ({"messages": json.dumps(TURN), "answer": "5"}, "messages, answer"),
        ({"conversations": [SHARE[1], {"from": "gpt", "value": "#### 5"}]}, "conversations, last turn"),
        ({"Body": "Ann has 2.", "Question": "2 + 3?", "Answer": 5.0}, "svamp"),
        ({"question": None, "problem": "2 + 3?", "answer": "5"}, "problem, answer"),
    ],
)
def test_columns_are_known_by_their_names(tmp_path: Path, record: dict[str, Any], schema: str) -> None:
    path = write_lines(tmp_path / "own.jsonl", [record] * 2)
    (problem, _) = both(path)
    assert problem.prompt.endswith("2 + 3?")
    assert problem.references == ("5",)
    found = recognise(path)
    assert (found.schema, found.problems, found.rejected) == (schema, 2, ())


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [SYSTEM, *TURN], "answer": "5"},
        {"messages": [SYSTEM, *TURN, {"role": "assistant", "content": "\\boxed{5}"}]},
        {"conversations": SHARE, "reference": "5"},
        {"prompt": [SYSTEM, *TURN], "reward_model": {"ground_truth": '["5"]'}},
    ],
)
def test_a_conversation_keeps_its_turns(tmp_path: Path, record: dict[str, Any]) -> None:
    (problem,) = both(write_lines(tmp_path / "chat.jsonl", [record]))
    assert problem.messages == (Message("system", "Be brief."), Message("user", "2 + 3?"))
    assert problem.references == ("5",)
    (bare,) = both(write_lines(tmp_path / "bare.jsonl", [{"prompt": TURN, "answer": "5"}]))
    assert bare.context == ()
    assert bare.key != problem.key, "a conversation is another problem than its last turn"


def test_messages_that_pandas_wrote_into_a_table_are_refused(tmp_path: Path) -> None:
    for record in ({"messages": str(TURN), "answer": "5"}, {"messages": str([*TURN, {"role": "assistant"}])}):
        pd.DataFrame([record]).to_csv(tmp_path / "own.csv")
        with pytest.raises(ValueError, match=r"line 2: field 'messages' is Python's text of a list"):
            load_problems(SourceConfig(path=str(tmp_path / "own.csv")))


@pytest.mark.parametrize("answer", ["['5', 'five']", '["5", "five"]', "['5' 'five']"])
def test_a_warning_names_an_answer_that_is_the_text_of_a_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    path = write_lines(tmp_path / "own.jsonl", [{"question": "2 + 3?", "answer": one} for one in ("[5, 6]", answer)])
    assert load_problems(SourceConfig(path=str(path)))[1].references == (answer,)
    assert "own.jsonl, line 2: the answer is the text of a list, and counts as one answer" in caplog.text


def test_a_data_frame_of_a_parquet_file_has_the_problems_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": [TURN], "answer": [["5", "five"]], "info": [{"index": [1]}]}), "own.parquet")
    frame = pd.read_parquet("own.parquet")
    (there,) = load_problems(SourceConfig(path="own.parquet"))
    for place in (SourceConfig(path=data_file(frame)), SourceConfig(source=data_reference("data", frame))):
        (here,) = load_problems(place)
        assert (here.prompt, here.references, here.extra) == (there.prompt, ("5", "five"), there.extra)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"messages": [SYSTEM, {"role": "user", "content": "\ud83d"}], "answer": "5"}, "messages"),
        ({"messages": [{"role": "system", "content": "\ud83d"}, *TURN], "answer": "5"}, "messages"),
        ({"question": "?", "choices": ["\ud83d", "5"], "answer": "B"}, "question, choices"),
        ({"question": "?", "answer": "5", "solution": "\ud83d"}, "solution"),
        ({"question": "?", "answer": "\ud83d"}, "answer"),
    ],
)
def test_half_a_character_is_named_with_row_and_field(tmp_path: Path, record: dict[str, Any], name: str) -> None:
    path = write_lines(tmp_path / "own.jsonl", [record])
    with pytest.raises(ValueError, match=rf"own\.jsonl, line 1: field '{name}' holds half a character"):
        load_problems(SourceConfig(path=str(path)))


def test_training_says_how_tests_call_the_program_as_evaluation_does(tmp_path: Path) -> None:
    tests = {"inputs": ["1"], "outputs": ["2"]}
    path = write_lines(tmp_path / "code.jsonl", [{"question": "Add one.", "tests": tests}])
    (trained,) = load_problems(SourceConfig(path=str(path)))
    (examined,) = load_benchmark(parse_asked(str(path)), arguments()).problems
    assert trained.prompt == examined.prompt
    assert trained.prompt.startswith("Add one.\n\nWrite a Python program that reads from standard input")
    (bare,) = load_problems(SourceConfig(path=str(path), template="{prompt}"))
    assert bare.prompt == "Add one."
    assert bare.key == trained.key


def test_the_box_is_asked_for_once_in_a_conversation(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Put the answer into \\boxed{}."}
    path = write_lines(tmp_path / "chat.jsonl", [{"messages": [system, *TURN], "answer": "5"}])
    assert load_benchmark(parse_asked(str(path)), arguments()).problems[0].prompt == "2 + 3?"


def test_what_is_rejected_is_told_with_place_and_reason(tmp_path: Path) -> None:
    good = {"question": "2 + 3?", "answer": "5"}
    rows = [good, {"question": "?", "answer": None}, {"q": "?", "answer": "1"}, {"question": 7, "answer": "1"}, good]
    path = write_lines(tmp_path / "own.jsonl", rows)
    path.write_text(path.read_text() + "{broken\n")
    found = recognise(path)
    assert found.problems == 2
    assert [where.rpartition(", ")[2] for where, _ in found.rejected] == ["line 2", "line 3", "line 4", "line 6"]
    assert [isinstance(error, Quarantined) for _, error in found.rejected] == [True, False, False, False]
    assert "no column of the problem" in str(found.rejected[1][1])
    with pytest.raises(ValueError, match="line 3: no column of the problem is known"):
        load_problems(SourceConfig(path=str(path)))
    named = recognise(path, FieldMapping(prompt="q"))
    assert named.problems == 1


def test_what_is_offered_can_be_write_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.jsonl", [{"Frage": "2 + 3?", "Text": "", "Lösung": "5"}])
    with pytest.raises(
        ValueError,
        match=r"It has: Frage \('2 \+ 3\?'\), Text \(''\), Lösung \('5'\)\. .*\.fields\.prompt=Frage --set data\.",
    ):
        load_problems(SourceConfig(path=str(path)))
    fields = FieldMapping(prompt="Frage")
    with pytest.raises(ValueError, match=r"no column of the answer is known.*fields\.answer=Text;"):
        load_problems(SourceConfig(path=str(path), fields=fields))
    fields = FieldMapping(prompt="Frage", answer="Lösung")
    (problem,) = load_problems(SourceConfig(path=str(path), fields=fields))
    assert (problem.prompt, problem.references) == ("2 + 3?", ("5",))


def test_folders_of_data_files_and_saved_data_sets(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 3?", "answer": str(n + 3)} for n in range(4)]
    plain = tmp_path / "plain"
    (plain / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows[:2]), plain / "data" / "train-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[2:3]), plain / "data" / "train-00001-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[3:]), plain / "data" / "test-00000-of-00001.parquet")
    saved = tmp_path / "saved"
    parts = {"train": datasets.Dataset.from_list(rows[:3]), "test": datasets.Dataset.from_list(rows[3:])}
    datasets.DatasetDict(parts).save_to_disk(str(saved))
    single = tmp_path / "single"
    parts["train"].save_to_disk(str(single))
    for folder in (plain, saved):
        trained = load_problems(SourceConfig(path=str(folder)))
        assert [p.references[0] for p in trained] == ["3", "4", "5"], folder
        assert len({p.id for p in trained}) == 3
        assert [p.references[0] for p in load_benchmark(parse_asked(str(folder)), arguments()).problems] == ["6"], (
            folder
        )
        with pytest.raises(RecipeError, match="no split 'dev'; it has: train, test"):
            load_problems(SourceConfig(path=str(folder), split="dev"))
    assert recognise(single).problems == 3
    for wrong, told in (({"split": "test"}, "remove split"), ({"options": {"subset": "a"}}, "remove options.subset")):
        with pytest.raises(RecipeError, match=told):
            load_problems(SourceConfig(path=str(single), **wrong))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="holds no data file"):
        recognise(tmp_path / "empty")


def test_nothing_that_is_given_is_dropped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train-00000.jsonl", [{"question": "2 + 3?", "answer": "5"}])
    with pytest.raises(RecipeError, match="a file has no splits, got split = 'test'"):
        load_problems(SourceConfig(path=str(path), split="test"))
    with pytest.raises(RecipeError, match=r"options\.revision is for hub data sets"):
        load_problems(SourceConfig(path=str(tmp_path), options={"revision": "main"}))
    for name in ("train-00000.jsonl.sha256", "test.jsonl.gz"):  # no data, and another split
        (tmp_path / name).write_text("0")
    assert len(load_problems(SourceConfig(path=str(tmp_path)))) == 1
    (tmp_path / "train-00001.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(RecipeError, match=r"train-00001\.jsonl\.gz: is compressed"):
        load_problems(SourceConfig(path=str(tmp_path)))
    pd.DataFrame([{"question": "?" * 200_000, "answer": "5"}]).to_csv(tmp_path / "long.csv")
    assert len(load_problems(SourceConfig(path=str(tmp_path / "long.csv")))[0].prompt) == 200_000


def test_rows_of_a_folder_need_not_be_alike(tmp_path: Path) -> None:
    """``datasets`` itself rejects a column that holds a number in one row and text in another."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"prompt": "?", "answer": 1}, {"prompt": "??", "answer": ["a", "b"]}])
    assert [p.references for p in load_problems(SourceConfig(path=str(folder)))] == [
        ("1",),
        ("a", "b"),
    ]


def test_a_hub_name_without_a_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert Place.of("openai/gsm8k").hub == "openai/gsm8k"
    assert Place.of("AI-MO/NuminaMath-1.5").hub == "AI-MO/NuminaMath-1.5"
    assert Place.of("data/own.jsonl").hub is None
    with pytest.raises(ValueError, match=r"hub data set 'openai/gsm8k'.*without network download it once elsewhere"):
        recognise("openai/gsm8k")
    with pytest.raises(ValueError, match="hub data set 'openai/gsm8k'"):
        load_benchmark(parse_asked("openai/gsm8k"), arguments())


def test_subset_and_revision_reach_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = [{"question": "2 + 3?", "answer": "5"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **settings: asked.append((names, settings)) or rows)
    options = {"subset": "main", "revision": "e53f048"}
    (problem,) = load_problems(SourceConfig(hub="openai/gsm8k", split="test", options=options))
    assert (problem.id, problem.references) == ("gsm8k-0", ("5",))
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": "e53f048"})]


def test_a_folder_that_is_there_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Place.of("own/sums").hub == "own/sums"
    (tmp_path / "own" / "sums").mkdir(parents=True)
    assert Place.of("own/sums").path == Path("own/sums")


def test_every_set_that_is_here_is_read_whole_by_every_command(shared_data: Path) -> None:
    sets = [*sorted(shared_data.glob("math/sets/*/*")), *sorted(shared_data.glob("code/sets/*/data.jsonl"))]
    assert len(sets) > 25
    for path in sets:
        found = recognise(path)
        bad = [error for _, error in found.rejected if not isinstance(error, Quarantined)]
        assert not bad, (path, bad[:2])
        assert len(found.rejected) <= 0.001 * (found.problems + len(found.rejected)), path
        assert found.first.problem.verifier == ("code" if "code" in path.parts else "maths"), path


def test_two_columns_of_a_parquet_file_with_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = [pa.array([text]) for text in ("What?", "4", "5")]
    pq.write_table(pa.table(columns, names=["question", "answer", "answer"]), path)
    with pytest.raises(ValueError, match=r"rows\.parquet: two columns are called 'answer'; rename one of them"):
        list(read_rows(path))


def test_two_columns_of_a_csv_with_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer,answer,,\nWhat?,4,5,,\n")
    with pytest.raises(ValueError, match=r"rows\.csv: two columns are called 'answer'; rename one of them"):
        list(read_rows(path))
    path.write_text("question,answer,,\nWhat?,4,,\n")
    (row,) = read_rows(path)
    assert isinstance(row, Row), "spreadsheets write empty columns without names"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_cells_of_a_csv_are_found_whatever_separates_them(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [("question", "answer", '"source, page; line"', "note (a/b)"), ("2 + 3?", "5", "x", "y")]
    rows += [('"a, b; or c?"', "c", "x", "y")]
    rows[0] = (*rows[0][:3], "note (page, line)") if separator == ";" else rows[0]
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    assert [(p.prompt, p.references) for p in load_problems(SourceConfig(path=str(path)))] == [
        ("2 + 3?", ("5",)),
        ("a, b; or c?", ("c",)),
    ]
