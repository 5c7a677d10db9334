"""Sources: every known set in the shape of its real file, and unreadable records set aside with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from magicrl.config.data_schema import SourceConfig
from magicrl.config.errors import RecipeError
from magicrl.data.sources import load_source
from magicrl.pipeline import import_source
from magicrl.pipeline.judge_step import problems_of
from magicrl.pipeline.parts import Part
from magicrl.pipeline.pipeline_schema import known_kinds
from magicrl.pipeline.stats import counts_of
from magicrl.records import prompt_key

# one synthetic record in the columns of each real file, and the reference answers or tests and the solutions that are
# read from it
LINES = Path(__file__).with_name("records.jsonl").read_text(encoding="utf-8").splitlines()
RECORDS: dict[str, dict[str, Any]] = {row["kind"]: row for row in map(json.loads, LINES)}


def test_every_known_kind_has_a_record_here() -> None:
    assert RECORDS.keys() == known_kinds().keys()


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_in_the_columns_of_the_real_set_is_read(kind: str, write_rows: Callable[..., Path], run: Any) -> None:
    expected = RECORDS[kind]
    path = write_rows("rows.jsonl", [expected["record"]])
    for form in (kind, "auto"):
        run({"sources": [{"kind": form, "name": form, "path": str(path)}]})
        assert run.dropped(f"sources/{form}") == []
        (entry,) = run.kept(f"sources/{form}")
        if "references" in expected:
            assert (entry.ability, list(entry.references)) == ("math", expected["references"])
            assert "\\boxed" in entry.prompt
        else:
            assert entry.ability == "code"
            assert json.loads(entry.references[0]).items() >= expected["tests"].items()
        assert list(entry.solutions) == expected["solutions"]
    if kind == "released":
        assert (entry.data_source, entry.difficulty) == ("train-math", {"R1-7B": 3})


def test_a_conversation_goes_through_the_pipeline_into_training(write_rows: Callable[..., Path], run: Any) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    run({"sources": [{"name": "chat", "path": str(write_rows("r.jsonl", [{"messages": turns, "answer": "5"}]))}]})
    (entry,) = run.kept("sources/chat")
    assert (entry.problem, [turn.role for turn in entry.context]) == ("2 + 3?", ["system"])
    (part,) = (run.output / "sources" / "chat" / "kept").glob("*.parquet")
    ((problem,), _, _) = load_source(SourceConfig(path=str(part)))
    assert [turn.role for turn in problem.messages] == ["system", "user"]
    assert problem.prompt.startswith("2 + 3?\n\nPlease reason")


def test_a_row_of_the_pipeline_is_the_problem_that_it_was(write_rows: Callable[..., Path], run: Any) -> None:
    run({"sources": [{"name": "own", "path": str(write_rows("r.jsonl", [{"question": "2 + 3?", "answer": "5"}]))}]})
    (part,) = (run.output / "sources" / "own" / "kept").glob("*.parquet")
    ((problem,), _, _) = load_source(SourceConfig(path=str(part)))
    assert problem.prompt != "2 + 3?"
    assert problem.key == prompt_key("2 + 3?"), "the instruction around it makes no other problem of it"


def test_columns_name_what_a_known_form_does_not(write_rows: Callable[..., Path], run: Any) -> None:
    rows = [{"q": {"text": "2 + 3?"}, "reference": 5, "why": "because \\boxed{5}", "nr": "x1", "set": "a"}]
    columns = {"prompt": "q.text", "answer": "reference", "solutions": ["why"], "id": "nr", "notes": ["set"]}
    run({"sources": [{"name": "own", "path": str(write_rows("r.jsonl", rows)), "fields": columns}]})
    (entry,) = run.kept("sources/own")
    assert (entry.id, entry.problem, entry.references) == ("own/x1", "2 + 3?", ("5",))
    assert (entry.solutions, entry.notes) == (("because \\boxed{5}",), {"set": "a"})


def test_subsets_and_years_that_are_not_asked_for_are_counted(write_rows: Callable[..., Path], run: Any) -> None:
    numina = RECORDS["numina_math_1_5"]["record"]
    aime = RECORDS["aime_1983_2023"]["record"]
    sources = [
        {
            "kind": "numina_math_1_5",
            "name": "numina",
            "path": str(write_rows("n.jsonl", [numina, {**numina, "source": "orca_math"}])),
            "only": {"source": ["amc_aime"]},
        },
        {"kind": "aime_1983_2023", "path": str(write_rows("a.jsonl", [aime, {**aime, "Year": 2024, "ID": "2024-1"}]))},
    ]
    run({"sources": sources})
    assert len(run.kept("sources/numina")) == len(run.kept("sources/aime_1983_2023")) == 1
    dropped = [*run.dropped("sources/numina"), *run.dropped("sources/aime_1983_2023")]
    assert [(row["reason"], row["detail"]) for row in dropped] == [
        ("not asked for", "source is 'orca_math'"),
        ("not asked for", "Year 2024 is not before 2024"),
    ]


def test_a_record_without_the_year_that_its_kind_is_chosen_by_is_set_aside(
    write_rows: Callable[..., Path], run: Any
) -> None:
    aime = RECORDS["aime_1983_2023"]["record"]
    unknown = {name: value for name, value in aime.items() if name != "Year"} | {"ID": "2024-I-3"}
    run({"sources": [{"kind": "aime_1983_2023", "path": str(write_rows("a.jsonl", [aime, unknown]))}]})
    (row,) = run.dropped("sources/aime_1983_2023")
    assert row["reason"] == "unreadable record"
    assert "no column Year or year: of kind 'aime_1983_2023' only records before 2024 are read" in row["detail"]


def test_the_earlier_turns_of_a_conversation_belong_to_its_problem(write_rows: Callable[..., Path], run: Any) -> None:
    def turns(number: int, system: str) -> dict[str, Any]:
        said = [("system", system), ("user", f"x is {number}."), ("assistant", "Yes."), ("user", "What is x plus 1?")]
        messages = [{"role": role, "content": text} for role, text in said]
        return {"messages": messages, "answer": str(number + 1)}

    rows = [turns(1, "Be brief."), turns(2, "Be brief."), turns(1, "Be kind.")]
    against = {"held": {"path": str(write_rows("test.jsonl", [turns(2, "Be brief.")]))}}
    steps = [
        {"use": "dedup", "settings": {"stages": ["exact"]}},
        {"use": "decontaminate", "against": against, "settings": {"use_embedding": False, "drop": ["verbatim"]}},
    ]
    run({"sources": [{"name": "chat", "path": str(write_rows("r.jsonl", rows))}], "steps": steps})
    assert run.reasons("01-dedup") == {"chat/chat-2": "duplicate (exact)"}
    assert run.reasons("02-decontaminate") == {"chat/chat-1": "in test set held"}
    part = run.output / "01-dedup" / "kept" / "chat.00000.parquet"
    asked = problems_of([Part(name="chat.00000", path=part, key="")])
    assert [problem.text for problem in asked] == [f"x is {n}.\n\nYes.\n\nWhat is x plus 1?" for n in (1, 2)]


def test_the_first_of_two_reference_answers_is_kept_and_the_other_is_counted_apart(
    write_rows: Callable[..., Path], run: Any
) -> None:
    question = "What is the sum of 170 and 23 in the decimal system?"
    rows = [{"question": question, "answer": answer} for answer in ("193", "2000", "193.00", "$193$")]
    run(
        {
            "sources": [{"name": "sums", "path": str(write_rows("r.jsonl", rows))}],
            "steps": [{"use": "dedup", "settings": {"stages": ["exact"]}}],
        }
    )
    assert [entry.references for entry in run.kept("01-dedup")] == [("193",)]
    (other,) = [row for row in run.dropped("01-dedup") if row["reason"] == "duplicate with another reference"]
    assert (other["id"], other["detail"]) == ("sums/sums-1", "of sums/sums-0, similarity 1.0; 2000, not 193")
    assert counts_of(run.output)[1].reasons == {"duplicate (exact)": 2, "duplicate with another reference": 1}


def test_an_import_whose_answers_count_from_one_is_refused_each_time(
    write_rows: Callable[..., Path], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_source, "PART_ROWS", 2)
    rows = [{"question": f"{n}?", "choices": ["a", "b"], "answer": n} for n in (2, 1, 1)]
    source = {"name": "r", "path": str(write_rows("r.jsonl", rows))}
    for _ in range(2):  # the second time no part of the first is used
        with pytest.raises(ValueError, match=r"r.jsonl, line 1: .* count the options from 1"):
            run({"sources": [source]})


def test_an_import_that_was_killed_is_refused_for_its_first_rows_too(
    write_rows: Callable[..., Path], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_source, "PART_ROWS", 2)
    # 1 is the text of the third option in the first rows, and can only be the place of the second one in the others
    options = [["5", "7", "1"]] * 2 + [["5", "7", "9"]] * 2
    rows = [{"question": f"{n}?", "choices": choices, "answer": "1"} for n, choices in enumerate(options)]
    source = {"name": "r", "path": str(write_rows("r.jsonl", rows))}
    really = import_source.EntryReader.entry

    def entry(self: Any, row: Any, given: Any) -> Any:
        if row.index == 2:
            raise KeyboardInterrupt
        return really(self, row, given)

    with monkeypatch.context() as patch:
        patch.setattr(import_source.EntryReader, "entry", entry)
        with pytest.raises(KeyboardInterrupt):
            run({"sources": [source]})
    assert len(run.kept("sources/r")) == 2
    with pytest.raises(
        ValueError, match=r"line 1: the answer is the text of an option, but in .*line 3 it can only be"
    ):
        run({"sources": [source]})
    rows[2:] = rows[:2]
    write_rows("r.jsonl", rows)
    run({"sources": [source]})
    assert {path.name for path in (run.output / "sources" / "r").iterdir()} == {"kept", "dropped", "source.json"}


def test_a_level_beyond_64_bits_is_set_aside_and_dates_are_notes(tmp_path: Path, run: Any) -> None:
    (tmp_path / "r.jsonl").write_text(
        '{"problem": "2 + 3?", "answer": "5", "level": 1e30}\n'.replace("1e30", "9" * 30)
        + json.dumps({"problem": "2 + 4?", "answer": "6"})
    )
    columns = {"problem": ["2 + 3?"], "answer": ["5"], "year": [date(2024, 1, 2)], "difficulty": [Decimal("1.5")]}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    run({"sources": [{"path": "r.jsonl"}, {"path": "d.parquet"}]})
    (row,) = run.dropped("sources/r")
    assert "line 1: level is 9999" in row["detail"]
    (entry,) = run.kept("sources/d")
    assert entry.notes == {"year": "2024-01-02", "difficulty": "1.5"}


def test_rows_of_another_run_that_are_not_asked_for_are_left_out(write_rows: Callable[..., Path], run: Any) -> None:
    rows = [{"problem": f"{number} + 3?", "answer": str(number + 3), "level": number} for number in range(3)]
    run({"sources": [{"name": "own", "path": str(write_rows("r.jsonl", rows))}]})
    (part,) = (run.output / "sources" / "own" / "kept").glob("*.parquet")
    run({"sources": [{"name": "some", "path": str(part), "only": {"level": ["1", "2"]}}]})
    assert [entry.level for entry in run.kept("sources/some")] == [1, 2]


def test_a_path_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path: Path, run: Any) -> None:
    (tmp_path / "set [v2].jsonl").write_text('{"problem": "2 + 3?", "answer": "5"}\n')
    run({"sources": [{"name": "own", "path": "set [v2].jsonl"}]})
    assert len(run.kept("sources/own")) == 1


def test_rows_that_cannot_be_read_are_set_aside_with_the_reason(tmp_path: Path, run: Any) -> None:
    good = json.dumps({"problem": "2 + 3?", "answer": "5"}).encode()
    lines = [
        good,
        b'{"problem": "2 + 3?", "answer": ',
        b'{"problem": "caf\xe9?", "answer": "5"}',
        b'{"problem": "2 + 3?", "answer": NaN}',
        b'{"problem": "2 + 3?", "answer": null}',
        b'{"problem": "", "answer": "5"}',
        b'{"frage": "2 + 3?"}',
        b"[1, 2]",
        json.dumps({"problem": "x" * 5000, "answer": "5"}).encode(),
        b'{"problem": "2 + 3?", "answer": "5", "solution": "so \\ud800"}',
        good,
    ]
    (tmp_path / "r.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    run({"sources": [{"path": "r.jsonl"}], "max_field_characters": 4000})
    assert [entry.id for entry in run.kept("sources/r")] == ["r/r-0", "r/r-10"]
    dropped = run.dropped("sources/r")
    assert [row["id"] for row in dropped] == [f"r/r-{place}" for place in range(1, 10)]
    said = [
        "broken JSON",
        "not UTF-8",
        "no answer: field 'answer' holds nan",
        "no answer: field 'answer' holds None",
        "is empty",
        "no column of the problem is known. It has: frage",
        "an object",
        "more than max_field_characters",
        "field 'solution' holds half a character",
    ]
    for row, words in zip(dropped, said, strict=True):
        assert words in row["detail"]
        assert "r.jsonl, line" in row["detail"]
        assert row["reason"] == "unreadable record"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("r.jsonl", "\n  \n\n", "holds no records, only blank lines or none"),
        ("r.csv", "problem,answer\n\n", "holds no records"),
        ("r.jsonl", '{"problem": "2 + 3?"}\n', "all 1 rows were dropped: 1 unreadable record (the first: "),
        ("r.jsonl", '{"problem": "2 + 3?", "answer": "5", "set": "b"}\n', "1 not asked for (the first: set is 'b')"),
        ("r.jsonl", '{"problem": "2?", "answer": "5", "sets": "set"}\n', "no column 'set', which `only` names; it has"),
    ],
)
def test_a_source_without_a_usable_row_is_an_error(tmp_path: Path, run: Any, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    source = {"path": name} | ({"only": {"set": ["a"]}} if 'set"' in text else {})
    # the second time the import is found unchanged
    for _ in range(2):
        with pytest.raises(ValueError, match="the source 'r'") as raised:
            run({"sources": [source], "steps": [{"use": "clean"}]})
        assert f"{tmp_path / name})" in str(raised.value)
        assert words in str(raised.value)
        assert not (run.output / "01-clean").exists()


def test_a_step_that_drops_every_row_is_an_error(write_rows: Callable[..., Path], run: Any) -> None:
    path = write_rows("r.jsonl", [{"problem": "Prove it.", "answer": "proof"}])
    with pytest.raises(ValueError, match=r"the step '01-clean': all 1 rows were dropped: 1 .*01-clean/dropped"):
        run({"sources": [{"path": str(path)}], "steps": [{"use": "clean"}, {"use": "dedup"}]})
    assert not (run.output / "02-dedup").exists()


def test_a_hundred_megabyte_field_is_set_aside_and_the_rest_is_read(tmp_path: Path, run: Any) -> None:
    with (tmp_path / "r.jsonl").open("w") as file:
        file.write('{"problem": "2 + 3?", "answer": "5"}\n{"problem": "')
        for _ in range(100):
            file.write("x" * (1 << 20))
        file.write('", "answer": "5"}\n{"problem": "3 + 3?", "answer": "6"}\n')
    run({"sources": [{"path": "r.jsonl"}]})
    assert [entry.id for entry in run.kept("sources/r")] == ["r/r-0", "r/r-2"]
    (row,) = run.dropped("sources/r")
    assert "104857600 characters" in row["detail"]
    assert len(row["detail"]) < 5000


def test_a_broken_parquet_file_is_a_clear_error(tmp_path: Path, run: Any) -> None:
    table = pa.table({"problem": ["2 + 3?"] * 100, "answer": ["5"] * 100})
    pq.write_table(table, tmp_path / "r.parquet")
    whole = (tmp_path / "r.parquet").read_bytes()
    (tmp_path / "r.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"r\.parquet: not a readable parquet file .* Copy it again"):
        run({"sources": [{"path": "r.parquet"}]})
    (tmp_path / "r.parquet").write_bytes(whole)
    run({"sources": [{"path": "r.parquet"}]})
    assert len(run.kept("sources/r")) == 100


def test_a_parquet_row_that_is_no_text_is_set_aside_and_the_others_are_read(tmp_path: Path, run: Any) -> None:
    text = pa.array([b"2 + 3?", b"caf\xe9?", b"3 + 3?"], pa.binary())
    # pyarrow does not check that the bytes are UTF-8
    column = pa.StringArray.from_buffers(3, text.buffers()[1], text.buffers()[2])
    pq.write_table(pa.table({"problem": column, "answer": [5.0, 5.0, float("nan")]}), tmp_path / "r.parquet")
    run({"sources": [{"path": "r.parquet"}]})
    assert [entry.id for entry in run.kept("sources/r")] == ["r/r-0"]
    first, second = run.dropped("sources/r")
    assert "r.parquet, row 2: not UTF-8 text" in first["detail"]
    assert "row 3: no answer: field 'answer' holds nan" in second["detail"]


def test_records_are_numbered_through_all_files_of_a_source(write_rows: Callable[..., Path], run: Any) -> None:
    for part in range(2):
        write_rows(f"part{part}.jsonl", [{"problem": f"{part} + {i}?", "answer": str(part + i)} for i in range(2)])
    run({"sources": [{"name": "own", "path": "part*.jsonl"}]})
    assert [(entry.id, entry.problem) for entry in run.kept("sources/own")] == [
        ("own/own-0", "0 + 0?"),
        ("own/own-1", "0 + 1?"),
        ("own/own-2", "1 + 0?"),
        ("own/own-3", "1 + 1?"),
    ]


def test_a_folder_is_read_by_datasets(tmp_path: Path, run: Any) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"question": "2 + 3?", "answer": "#### 5"}\n')
    run({"sources": [{"kind": "gsm8k", "path": "set"}]})
    assert [entry.references for entry in run.kept("sources/gsm8k")] == [("5",)]


def test_a_folder_is_read_by_the_split_of_its_kind_and_a_file_has_none(tmp_path: Path, run: Any) -> None:
    (tmp_path / "set").mkdir()
    record = RECORDS["omni_math"]["record"]
    for name, answer in (("train", "1"), ("test", "2")):
        (tmp_path / "set" / f"{name}.jsonl").write_text(json.dumps({**record, "answer": answer}))
    for split, answer in ({}, "2"), ({"split": "train"}, "1"):
        run({"sources": [{"kind": "omni_math", "path": "set", **split}]})
        assert [entry.references for entry in run.kept("sources/omni_math")] == [(answer,)]
    for name in ("split", "subset"):
        with pytest.raises(RecipeError, match=rf"sources\.0\.{name}: .*test\.jsonl: a file has no {name}, got 'test'"):
            run({"sources": [{"path": "set/test.jsonl", name: "test"}]})


@pytest.mark.parametrize(
    ("kind", "path", "count"),
    [
        ("gsm8k", "math/sets/gsm8k/train.jsonl", 300),
        ("math", "math/sets/math_test/test.jsonl", 300),
        ("math", "math/sets/math_train/math.json", 300),
        ("deepmath", "math/sets/deepmath_5k/math_deepmath_deal.jsonl", 300),
        ("aime_1983_2023", "math/sets/aime_1983_2023/aime.json", 300),
        ("olympiadbench", "math/sets/olympiadbench/olympiad_bench.json", 300),
        ("svamp", "math/sets/svamp/SVAMP.json", 300),
        ("released", "math/sets/aime24/aime24.parquet", 30),
        ("leetcode", "code/sets/leetcode_train_v020_first600/data.jsonl", 100),
        ("humaneval", "code/sets/humaneval/data.jsonl", 100),
        ("mbpp", "code/sets/mbpp_full/data.jsonl", 300),
        ("apps", "code/sets/apps_train5/data.jsonl", 5),
    ],
)
def test_real_files_are_read(kind: str, path: str, count: int, shared_data: Path, run: Any) -> None:
    run({"sources": [{"kind": kind, "name": "real", "path": str(shared_data / path), "limit": count}]})
    entries, dropped = run.kept("sources/real"), run.dropped("sources/real")
    assert len(entries) + len(dropped) == count
    assert len(dropped) <= 1, [row["detail"][:200] for row in dropped]
    assert all(entry.problem.strip() and entry.references for entry in entries)
    (part,) = (run.output / "sources" / "real" / "kept").glob("*.parquet")
    problems, set_aside, _ = load_source(SourceConfig(path=str(part)))
    assert not set_aside, "what is imported is what training's reader takes"
    assert len(problems) == len(entries)
    if kind not in ("deepmath", "svamp", "released") and "math_train" not in path:
        assert all(entry.solutions for entry in entries)


READ = """
from magicrl.records import Problem

def cards(count, verifier="maths"):
    for i in range(count):
        yield {"question": f"What is {i} + 1?", "answer": str(i + 1)}
    yield Problem(id="own", prompt="What is 6 x 7?", references=("42",), verifier=verifier, source="mine", level=2)
    yield "no record"
"""


def test_a_source_of_ones_own_is_read_into_the_pipeline(run: Any, tmp_path: Path) -> None:
    (tmp_path / "read.py").write_text(READ)
    tree: dict[str, Any] = {"sources": [{"source": "read.py:cards", "options": {"count": 2}}]}
    run(tree)
    kept = run.kept("sources/read")
    assert [(entry.id, entry.references) for entry in kept] == [
        ("read/read-0", ("1",)),
        ("read/read-1", ("2",)),
        ("read/own", ("42",)),
    ]
    assert (kept[-1].prompt, kept[-1].data_source, kept[-1].level) == ("What is 6 x 7?", "mine", 2)
    assert kept[0].prompt != kept[0].problem, "a record has the text around it that a file's has"
    (dropped,) = run.dropped("sources/read")
    assert "expected a record (a dict)" in dropped["detail"]
    before = run.files()
    run(tree)
    assert run.files() == before
    (tmp_path / "read.py").write_text(READ.replace("6 x 7", "7 x 6"))
    run(tree)
    assert run.kept("sources/read")[-1].prompt == "What is 7 x 6?", "a changed function is called anew"
    tree["sources"][0]["options"]["verifier"] = "exact"
    run(tree)
    assert "read problems of maths and code" in run.dropped("sources/read")[0]["detail"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"source": "red.py:cards"}, r"there is no file .*red\.py"),
        ({"source": "card"}, "unknown source 'card'.*Known: "),
        ({"source": "read.py:card"}, r"has no 'card'; did you mean 'cards'\?"),
        ({"source": "read.py:cards"}, "missing a required argument: 'count'"),
        ({"source": "read.py:cards", "hub": "a/b"}, "one of path, hub, source; given: hub, source"),
        ({"path": "x.jsonl", "options": {"count": 1}}, "options are the arguments of a function"),
        ({"path": "x.jsonl", "revision": "v2"}, "revision = 'v2' is for hub data sets; remove it"),
        ({"source": "read.py:cards", "split": "test"}, "split = 'test' is for folders and hub data sets; remove it"),
    ],
)
def test_a_source_that_cannot_be_is_refused_before_anything_is_read(
    run: Any, tmp_path: Path, source: dict[str, Any], said: str
) -> None:
    (tmp_path / "read.py").write_text(READ)
    with pytest.raises(ValueError, match=said):
        run({"sources": [source]})
    assert not run.output.exists()


def test_rows_of_another_run_get_the_settings_of_their_source(write_rows: Callable[..., Path], run: Any) -> None:
    run({"sources": [{"path": str(write_rows("a.jsonl", [{"problem": "1 + 1?", "answer": "2"}]))}]})
    (part,) = (run.output / "sources" / "a" / "kept").glob("*.parquet")
    (before,) = run.kept("sources/a")
    again = type(run)(run.base)
    for number, (settings, prompt) in enumerate(
        [({}, before.prompt), ({"template": "Be brief. {prompt}", "ability": "math"}, "Be brief. 1 + 1?")]
    ):
        again.output = run.base / str(number)
        again({"sources": [{"name": "b", "path": str(part), **settings}]})
        assert again.kept("sources/b") == [replace(before, prompt=prompt)]
    for settings, reason in (
        ({"ability": "code"}, "is a math problem, and the source is said to hold code"),
        ({"fields": {"prompt": "problem"}}, "has its columns already; leave out the source's fields"),
    ):
        again.output = run.base / reason[:5]
        with pytest.raises(ValueError, match=reason):
            again({"sources": [{"name": "b", "path": str(part), **settings}]})
