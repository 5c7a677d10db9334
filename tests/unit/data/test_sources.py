"""Sources of problems: kinds of files, field mappings, the released schema, mistakes of newcomers, families, real sets.

Also wrong labels (as many as requested, never correct by chance, and nested), and when two prompts are the same.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
import unicodedata
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import problem, write_lines

from magicrl.config.data_schema import FieldMapping, SourceConfig
from magicrl.config.errors import RecipeError
from magicrl.data.sources import MARK, load_parts, load_problems, load_source, problems_fingerprint, with_wrong_labels
from magicrl.records import Message, Problem, plain_typography, prompt_key


def load(folder: Path, name: str, **options: Any) -> list[Problem]:
    return load_problems(SourceConfig(path=str(folder / name), **options))


def released(
    reference: str, *, prompt: str = "What is 2 + 3?", ability: str = "math", role: str = "user"
) -> dict[str, Any]:
    return {
        "data_source": "train-math-numina",
        "prompt": [{"role": role, "content": prompt}],
        "ability": ability,
        "reward_model": {"ground_truth": reference, "style": "rule"},
        "extra_info": {"index": 7, "model_difficulty": {"m": 3}},
    }


TWO = [{"problem": "1+1?", "answer": "2", "note": "a"}, {"problem": "1+2?", "answer": "3", "note": "b"}]


# ---- every kind of file -------------------------------------------------------------------------


def test_jsonl_gives_problems_with_default_ids_and_extra_fields(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "sums.jsonl", TWO)
    path.write_text(path.read_text().replace("\n", "\n\n"))  # blank lines are no records
    assert load(tmp_path, "sums.jsonl") == [
        Problem(id="sums-0", prompt="1+1?", references=("2",), verifier="maths", source="sums", extra={"note": "a"}),
        Problem(id="sums-1", prompt="1+2?", references=("3",), verifier="maths", source="sums", extra={"note": "b"}),
    ]


def test_json_csv_and_parquet_give_the_same_problems(tmp_path: Path) -> None:
    write_lines(tmp_path / "sums.jsonl", TWO)
    (tmp_path / "sums.json").write_text(json.dumps(TWO))
    (tmp_path / "sums.csv").write_text("problem,answer,note\n1+1?,2,a\n1+2?,3,b\n")
    pq.write_table(pa.Table.from_pylist(TWO), tmp_path / "sums.parquet")
    expected = load(tmp_path, "sums.jsonl")
    for kind in ("json", "csv", "parquet"):
        assert load(tmp_path, f"sums.{kind}") == expected


def test_hub_sets_load_through_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    write_lines(folder / "train.jsonl", TWO)
    write_lines(folder / "test.jsonl", TWO[:1])
    source = SourceConfig(hub=str(folder), split="test")
    assert [p.id for p in load_problems(source)] == ["sums-0"]
    with pytest.raises(ValueError, match="unknown option 'nam'; known: subset, revision"):
        load_problems(SourceConfig(hub=str(folder), options={"nam": "x"}))
    with pytest.raises(ValueError, match=r"no split 'dev'; it has: train, test\. Set split .*, or name a file"):
        load_problems(SourceConfig(hub=str(folder), split="dev"))


# ---- field mapping ------------------------------------------------------------------------------


def test_mapping_reaches_into_nested_records(tmp_path: Path) -> None:
    record = {"q": {"text": "1+1?"}, "gold.value": 2, "meta": {"uid": 17, "level": "Level 5"}}
    write_lines(tmp_path / "n.jsonl", [record])
    fields = FieldMapping(prompt="q.text", answer="gold.value", id="meta.uid", level="meta.level")
    (problem,) = load(tmp_path, "n.jsonl", fields=fields)
    assert (problem.id, problem.prompt, problem.references, problem.level) == ("17", "1+1?", ("2",), 5)
    assert problem.extra == {"q": {"text": "1+1?"}, "meta": {"uid": 17, "level": "Level 5"}}


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("42", ("42",)),
        (42, ("42",)),
        (51.0, ("51",)),
        (0.25, ("0.25",)),
        (["1/2", 0.5], ("1/2", "0.5")),
        ("He eats 3.\nThen 2.\n#### 1,005\n", ("1,005",)),
        ("We add. 3+4=7. #### 7", ("7",)),
        ("#### is no mark\nhere", ("#### is no mark\nhere",)),
        ("none", ("none",)),
        ("Na", ("Na",)),
    ],
)
def test_answers_of_every_type(tmp_path: Path, answer: Any, references: tuple[str, ...]) -> None:
    write_lines(tmp_path / "a.jsonl", [{"problem": "?", "answer": answer}])
    assert load(tmp_path, "a.jsonl")[0].references == references


def test_a_decimal_of_parquet_is_a_number(tmp_path: Path) -> None:
    columns = {"problem": ["1?", "2?"], "answer": [Decimal("51.00"), Decimal("0.25")]}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    assert [problem.references for problem in load(tmp_path, "d.parquet")] == [("51",), ("0.25",)]


def test_template_wraps_prompts_and_leaves_their_braces_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "t.jsonl", [{"problem": r"\frac{1}{2}", "answer": "x"}])
    (problem,) = load(tmp_path, "t.jsonl", template=r"Q: {prompt} Answer in \boxed{}.")
    assert problem.prompt == r"Q: \frac{1}{2} Answer in \boxed{}."


def test_count_and_levels_choose(tmp_path: Path) -> None:
    write_lines(tmp_path / "l.jsonl", [{"problem": "?", "answer": i, "level": i % 3} for i in range(9)])
    fields = FieldMapping(level="level")
    assert [p.id for p in load(tmp_path, "l.jsonl", count=2)] == ["l-0", "l-1"]
    chosen = load(tmp_path, "l.jsonl", fields=fields, levels=(1, 2), count=3)
    assert [(p.id, p.level) for p in chosen] == [("l-1", 1), ("l-2", 2), ("l-4", 1)]
    with pytest.raises(ValueError, match=r"none of its 9 records has a level among \[7\]"):
        load(tmp_path, "l.jsonl", fields=fields, levels=(7,))
    with pytest.raises(ValueError, match=r"levels = \[1\] needs fields.level"):
        load(tmp_path, "l.jsonl", levels=(1,))


# ---- the released schema ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ground_truth", "references"),
    [
        (json.dumps(["\\frac{3}{2}"]), ("\\frac{3}{2}",)),
        (json.dumps(["a", "b"]), ("a", "b")),
        (json.dumps("7"), ("7",)),
        ("204", ("204",)),
        ("045", ("045",)),  # no JSON: the text itself, its zero kept
        ("336^\\circ", ("336^\\circ",)),
        ("[1, 2]", ("[1, 2]",)),  # an interval, not two answers
        ("1.50", ("1.50",)),
    ],
)
def test_released_references(tmp_path: Path, ground_truth: str, references: tuple[str, ...]) -> None:
    pq.write_table(pa.Table.from_pylist([released(ground_truth)]), tmp_path / "or1.parquet")
    (problem,) = load(tmp_path, "or1.parquet")
    assert problem.references == references
    assert (problem.id, problem.prompt, problem.source) == ("or1-0", "What is 2 + 3?", "train-math-numina")
    assert problem.extra["extra_info"] == {"index": 7, "model_difficulty": {"m": 3}}


def test_a_topic_in_the_column_of_the_bare_statement_is_no_identity(tmp_path: Path) -> None:
    rows = [{**released("5", prompt=prompt), "problem": "algebra"} for prompt in ("What is 2 + 3?", "What is 1 + 4?")]
    write_lines(tmp_path / "r.jsonl", rows)
    first, second = load(tmp_path, "r.jsonl")
    assert first.key != second.key


def test_code_rows_are_problems_of_the_code_verifier(tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    rows = [released('["5"]'), released(tests), released('["assert f(1) == 2"]', ability="code")]
    write_lines(tmp_path / "mix.jsonl", rows)
    problems, set_aside, _ = load_source(SourceConfig(path=str(tmp_path / "mix.jsonl")))
    assert [p.verifier for p in problems] == ["maths", "code", "code"]
    assert problems[1].references == (tests,)
    assert problems[2].references == ('{"assert_case": ["assert f(1) == 2"]}',)
    assert not set_aside


def test_code_rows_without_tests_are_set_aside_with_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [released('["5"]'), released("{}", ability="code"), released('{"inputs": []}', ability="code")]
    write_lines(tmp_path / "mix.jsonl", rows)
    problems, set_aside, _ = load_source(SourceConfig(path=str(tmp_path / "mix.jsonl")))
    assert [p.id for p in problems] == ["mix-0"]
    assert [where.rpartition(", ")[2] for where, _ in set_aside] == ["line 2", "line 3"]
    with caplog.at_level(logging.WARNING):
        load(tmp_path, "mix.jsonl")
    assert "2 records set aside: a code problem" in caplog.text
    write_lines(tmp_path / "code.jsonl", rows[1:])
    with pytest.raises(ValueError, match=r"code\.jsonl: no problems; all 2 records were set aside: a code problem"):
        load(tmp_path, "code.jsonl")


def test_test_rows_in_a_training_file_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "split": "Test" if n < 2 else "train"} for n in range(5)]
    write_lines(tmp_path / "all.jsonl", rows)
    assert len(load(tmp_path, "all.jsonl")) == 5
    assert "all.jsonl: its column 'split' holds train (3), test (2), and the problems of all are used" in caplog.text
    caplog.clear()
    write_lines(tmp_path / "one.jsonl", rows[:2])
    load(tmp_path, "one.jsonl")
    write_lines(tmp_path / "topics.jsonl", [row | {"split": topic} for row, topic in zip(rows, "ab", strict=False)])
    load(tmp_path, "topics.jsonl")
    assert not caplog.text


def test_tests_of_a_named_field(tmp_path: Path) -> None:
    tests = {"inputs": ["1"], "outputs": ["2"]}
    mapping = {"prompt": "q", "answer": "tests"}
    write_lines(tmp_path / "a.jsonl", [{"q": "x", "tests": tests}, {"q": "y", "tests": json.dumps(tests)}])
    first, second = load(tmp_path, "a.jsonl", fields=mapping, verifier="code")
    assert (first.verifier, first.references) == ("code", (json.dumps(tests),))
    assert second.references == first.references
    write_lines(tmp_path / "b.jsonl", [{"q": "x", "tests": {}}])
    with pytest.raises(ValueError, match="must be an object of tests"):
        load(tmp_path, "b.jsonl", fields=mapping, verifier="code")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_model": "5"}, r"'reward_model.ground_truth' has nothing named 'ground_truth' inside str"),
        ({"reward_model": {"style": "rule"}}, r"no field 'reward_model.ground_truth'"),
        ({"prompt": ["text"]}, r"'prompt' must be text or a list of \{role, content\} messages"),
        ({"prompt": [{"role": "system", "content": "x"}]}, r"must end in a user's message .* got the role 'system'"),
        ({"prompt": [{"role": "user", "content": " "}]}, r"message 1: the content must be text"),
        ({"prompt": [{"role": "speaker", "content": "x"}]}, r"message 1: the role 'speaker' is unknown; known: system"),
    ],
)
def test_released_errors_name_line_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_lines(tmp_path / "r.jsonl", [released("5"), {**released("5"), **change}])
    with pytest.raises(ValueError, match=r"r\.jsonl, line 2: .*" + message):
        load(tmp_path, "r.jsonl")


def test_the_recorded_difficulty_is_an_offline_filter(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for index, failed in enumerate((0, 1, 15, 16, None)):
        extra = {"index": index, "model_difficulty": {"Small": failed, "Large": 3}}
        rows.append({**released("5", prompt=f"What is {index} + 3?"), "extra_info": extra})
    write_lines(tmp_path / "r.jsonl", rows)
    problems, set_aside, _ = load_source(SourceConfig(path=str(tmp_path / "r.jsonl"), difficulty_of="Small"))
    assert [p.prompt for p in problems] == ["What is 1 + 3?", "What is 2 + 3?"]
    assert [reason.partition(" (")[0] for _, reason in set_aside] == [
        "Small solved it always",
        "Small solved it never",
        "extra_info.model_difficulty says nothing of Small",
    ]
    with pytest.raises(ValueError, match="says nothing of Tiny"):
        load_problems(SourceConfig(path=str(tmp_path / "r.jsonl"), difficulty_of="Tiny"))


# ---- mistakes of newcomers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"frage": "?", "answer": "1"},
            r"no column of the problem is known\. It has: frage \('\?'\), answer \('1'\)\."
            r".*--set data\.train\.0\.fields\.prompt=fr",
        ),
        ({"problems": "?", "answer": "1"}, r"no column of the problem is known.*fields\.prompt=problems;"),
        (
            {"prompt": "?", "question": "?", "answer": "1"},
            r"several columns may hold the problem: question, prompt\. .* --set data\.train\.0\.fields\.prompt=q",
        ),
        (
            {"problem": "?", "gold": "1", "target": "1"},
            r"several columns may hold the answer: gold, target",
        ),
        ({"problem": 3, "answer": "1"}, r"field 'problem' must be text, got int \('3'\)"),
        ({"problem": "  ", "answer": "1"}, r"field 'problem' is empty"),
        ({"problem": "?", "answer": True}, r"got bool"),
        ({"problem": "?", "answer": {"x": 1}}, r"got dict"),
    ],
)
def test_bad_records_are_named_by_line_and_field(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    write_lines(tmp_path / "bad.jsonl", [TWO[0], record])
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: .*" + message):
        load(tmp_path, "bad.jsonl")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"problem": "?", "answer": ""}, "field 'answer' is empty"),
        ({"problem": "?", "answer": None}, "field 'answer' holds None"),
        ({"problem": "?", "answer": float("nan")}, "field 'answer' holds nan"),
        ({"problem": "?", "answer": "NaN"}, "field 'answer' holds NaN"),
        ({"problem": "?", "answer": "None"}, "field 'answer' holds None"),
        ({"problem": "?", "answer": []}, "field 'answer' is an empty list"),
        ({"problem": "?", "answer": "#### "}, "field 'answer' is empty"),
        ({"problem": "?", "solution": "It is 5."}, "the text of field 'solution' has neither a box nor a last line"),
        (released("[]"), "field 'reward_model.ground_truth' is an empty list"),
        (released('[""]'), "field 'reward_model.ground_truth' is empty"),
    ],
)
def test_records_without_an_answer_are_set_aside(
    tmp_path: Path, record: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_lines(tmp_path / "some.jsonl", [TWO[0], record])
    with caplog.at_level(logging.WARNING):
        assert [p.references for p in load(tmp_path, "some.jsonl")] == [("2",)]
    assert f"1 records set aside: no answer: {reason}" in caplog.text
    assert "some.jsonl, line 2)" in caplog.text


@pytest.mark.parametrize("value", ["hard", True, None])
def test_bad_levels_and_ids_are_named(tmp_path: Path, value: Any) -> None:
    write_lines(tmp_path / "b.jsonl", [{"problem": "?", "answer": 1, "level": value}])
    with pytest.raises(ValueError, match=r"line 1: field 'level' must be an integer level"):
        load(tmp_path, "b.jsonl", fields=FieldMapping(level="level"))
    if value != "hard":
        with pytest.raises(ValueError, match=r"line 1: field 'level' must be a non-empty text or integer id"):
            load(tmp_path, "b.jsonl", fields=FieldMapping(id="level"))


def test_double_ids_name_both_places(tmp_path: Path) -> None:
    write_lines(tmp_path / "d.jsonl", [{**r, "id": "same"} for r in TWO])
    with pytest.raises(ValueError, match=r"line 2: id 'same' appears already in .*d\.jsonl, line 1"):
        load(tmp_path, "d.jsonl", fields=FieldMapping(id="id"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"problem": "?", "answer": 1}\n{"problem": \n', r"x\.jsonl, line 2: broken JSON at column"),
        (
            "x.jsonl",
            '{"problem": "?", "answer": 1, "answer": 2}',
            r"x\.jsonl, line 1: the key 'answer' appears twice in one object; remove one of them",
        ),
        ("x.jsonl", "[1, 2]\n", r"x\.jsonl, line 1: expected an object .*, got list .*one list .* ends in \.json"),
        ("x.jsonl", "", r"x\.jsonl: the file is empty"),
        ("x.jsonl", "\n\n", r"x\.jsonl: no problems; it holds no records"),
        ("x.json", "[", r"x\.json, line 1: broken JSON"),
        ("x.json", "{}", r"x\.json: expected a list of objects, got dict; keep only the list"),
        ("x.json", "[]", r"x\.json: no problems"),
        ("x.json", '[{"problem": "?", "answer": 1}, 3]', r"x\.json, row 2: expected an object"),
        ("x.csv", "problem,answer\n?,1\n?,1,2\n", r"x\.csv, line 3: the line has more or fewer cells than the 2"),
        ("x.csv", "problem,answer\n?\n", r"x\.csv, line 2: the line has more or fewer cells"),
        ("x.csv", 'problem,answer\n"?"z,1\n', r"x\.csv: broken CSV after line 1"),
        ("x.csv", "problem,answer\n?,1\n\xe9?,2\n", r"x\.csv, line 3: not UTF-8 text; convert the file to UTF-8"),
        ("x.json", '[{"problem": "?",\n"answer": "\xe9"}]', r"x\.json, line 2: not UTF-8 text"),
        ("x.json", f'[{{"problem": "?", "answer": {"7" * 5000}}}]', r"x\.json: a number has more than 4300 digits"),
        ("x.jsonl", "[" * 10**5, r"x\.jsonl, line 1: broken JSON \(brackets nested without end\)"),
        ("x.parquet", "text", r"x\.parquet: not a readable parquet file"),
        ("x.txt", "text", r"x\.txt: unknown kind of file '\.txt'; supported: \.jsonl, \.json, \.csv, \.parquet"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, name)


def test_missing_files_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no data files"):
        load(tmp_path, "a.jsonl")
    write_lines(tmp_path / "train.jsonl", TWO)
    with pytest.raises(ValueError, match=r"a\.jsonl: no such file; in .* there are: train\.jsonl"):
        load(tmp_path, "a.jsonl")
    with pytest.raises(ValueError, match=r"the folder .*sub does not exist"):
        load(tmp_path, "sub/a.jsonl")
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"dir\.jsonl: the folder holds no data file"):
        load(tmp_path, "dir.jsonl")
    lines = '{"problem": "?", "answer": 1}\n' * 1000  # beyond the decoder's first block
    (tmp_path / "latin.jsonl").write_bytes((lines + '{"problem": "é"}\n').encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 1001: not UTF-8 text"):
        load(tmp_path, "latin.jsonl")
    with pytest.raises(ValueError, match=r"options are for families, folders and hub data sets, got \['name'\]"):
        load(tmp_path, "train.jsonl", options={"name": "x"})


# ---- families, mixtures, provenance -------------------------------------------------------------


def test_families_load_by_name_with_their_options(tmp_path: Path) -> None:
    source = SourceConfig(family="running_sum", options={"variant": "ladder"}, count=20, levels=(5,), seed=3)
    problems = load_problems(source)
    assert len(problems) == 20
    assert {(p.level, p.verifier, p.source) for p in problems} == {(5, "exact", "running_sum")}
    assert problems == load_problems(source)
    other = source.model_copy(update={"verifier": "maths", "template": "Add: {prompt}"})
    first = load_problems(other)[0]
    assert (first.verifier, first.prompt) == ("maths", f"Add: {problems[0].prompt}")


def test_a_source_listed_twice_weighs_twice(tmp_path: Path) -> None:
    write_lines(tmp_path / "s.jsonl", TWO)
    source = SourceConfig(path=str(tmp_path / "s.jsonl"))
    parts = load_parts([source, source, source])
    assert [[p.id for p in part] for part in parts] == [["s-0", "s-1"], ["s-0#2", "s-1#2"], ["s-0#3", "s-1#3"]]
    assert parts[2][0].prompt == parts[0][0].prompt


def test_fingerprint_sees_every_field_that_matters_and_the_order(tmp_path: Path) -> None:
    write_lines(tmp_path / "s.jsonl", TWO)
    problems = load(tmp_path, "s.jsonl")
    base = problems_fingerprint(problems)
    assert base == problems_fingerprint(load(tmp_path, "s.jsonl"))
    assert base == "5421f24e8f6e1fd021617571970d5d9f9f9f7f4f5dcbeb3ffc12e5875ff2e897"
    first = replace(problems[0], extra={})
    changes = [{"id": "other"}, {"prompt": "other"}, {"references": ("9",)}, {"verifier": "exact"}, {"source": "other"}]
    changes += [{"level": 2}, {"environment": "calculator"}]
    changes += [{"context": (Message(role, "Be brief."),)} for role in ("system", "user")]
    changed = [replace(first, **change) for change in changes]
    prints = {problems_fingerprint([c, problems[1]]) for c in changed} | {
        problems_fingerprint(problems[::-1]),
        problems_fingerprint([first]),
    }
    assert len(prints | {base}) == 12
    assert problems_fingerprint([first, problems[1]]) == base


@pytest.mark.parametrize("reads", [{"environment": "guessing"}, {"verifier": "maths + mine.py:score"}])
def test_fingerprint_sees_further_columns_where_something_reads_them(tmp_path: Path, reads: dict[str, str]) -> None:
    """The secret of a guessing game, or a column that a reward requires, makes another problem."""
    write_lines(tmp_path / "s.jsonl", TWO)
    first = replace(load(tmp_path, "s.jsonl")[0], verifier="maths")

    def prints(**change: Any) -> set[str]:
        rows: list[dict[str, Any]] = [{"secret": 3, "low": 1}, {"low": 1, "secret": 3}, {"secret": 4, "low": 1}]
        return {problems_fingerprint([replace(first, extra=row, **change)]) for row in rows}

    assert len(prints()) == 1, "the maths verifier reads the reference answer only"
    assert len(prints(**reads)) == 2, "the order of the columns does not matter, their values do"
    objects = {problems_fingerprint([replace(first, extra={"image": object()}, **reads)]) for _ in range(2)}  # pyright: ignore[reportArgumentType]
    assert len(objects) == 1


def test_a_copied_folder_has_the_same_problems(tmp_path: Path) -> None:
    write_lines(tmp_path / "s.jsonl", TWO)
    first = load(tmp_path, "s.jsonl")[0]

    def prints(folder: str, weight: str, *, folders: bool = False) -> str:
        verifier, environment = f"maths + {weight} * {folder}/r.py:score", f"{folder}/e.py:Game"
        return problems_fingerprint([replace(first, verifier=verifier, environment=environment)], folders=folders)

    assert prints("/home/a b", "0.2") == prints("/home/b", "0.2") != prints("/home/b", "0.3")
    assert prints("/home/a b", "0.2", folders=True) != prints("/home/b", "0.2", folders=True)


# ---- real data sets, where present --------------------------------------------------------------


def test_the_released_evaluation_files_load_as_they_are(shared_data: Path) -> None:
    sets = shared_data / "math" / "sets"
    for year in ("aime24", "aime25"):
        problems = load(sets, f"{year}/{year}.parquet")
        assert len(problems) == 30
        assert problems[0].source == f"test-math-{year}"
        plain = load(sets, f"{year}/simple_{year}.jsonl", fields=FieldMapping(id="id"))
        assert [p.references for p in plain] == [p.references for p in problems]


@pytest.mark.parametrize(
    ("name", "fields", "count", "first"),
    [
        ("gsm8k/simple_gsm8k_test.jsonl", FieldMapping(id="id"), 1319, "18"),
        ("gsm8k/train.jsonl", FieldMapping(prompt="question"), 7473, "72"),
        ("svamp/simple_svamp.jsonl", FieldMapping(id="id"), 1000, "51"),
        ("svamp/SVAMP.json", FieldMapping(prompt="Question", answer="Answer", id="ID"), 1000, "51"),
    ],
)
def test_word_problem_sets_load(shared_data: Path, name: str, fields: FieldMapping, count: int, first: str) -> None:
    problems = load(shared_data / "math" / "sets", name, fields=fields)
    assert (len(problems), problems[0].references) == (count, (first,))
    assert all(len(p.references[0]) < 20 for p in problems)


def problems(references: list[str]) -> list[Problem]:
    return [problem(f"p{i}", f"q{i}", reference) for i, reference in enumerate(references)]


CLEAN = problems([str(i % 10) for i in range(2000)])


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_share_is_wrong_and_marked_and_the_rest_is_untouched(share: float) -> None:
    noisy = with_wrong_labels(CLEAN, share)
    changed = [(old, new) for old, new in zip(CLEAN, noisy, strict=True) if old.references != new.references]
    assert len(changed) / len(CLEAN) == pytest.approx(share, abs=0.03)
    assert all(new.extra[MARK] == "wrong" for _, new in changed)
    assert all(old is new for old, new in zip(CLEAN, noisy, strict=True) if old.references == new.references)


def test_every_other_answer_is_given_about_as_often() -> None:
    given = [
        p.references[0] for p in with_wrong_labels(problems(["0"] * 2000 + [str(i) for i in range(1, 10)]), 1.0)[:2000]
    ]
    counts = [given.count(str(i)) for i in range(1, 10)]
    assert given.count("0") == 0
    assert min(counts) > 150, counts


def test_no_wrong_label_shares_an_answer_with_the_right_ones() -> None:
    choices = [("A", "Rome"), ("A", "Bonn"), ("B", "Paris"), ("b", "Oslo")]
    asked = [replace(problem(f"p{i}", f"q{i}"), references=choices[i % 4]) for i in range(40)]
    for old, new in zip(asked, with_wrong_labels(asked, 1.0), strict=True):
        assert {old.references[0].lower(), new.references[0].lower()} == {"a", "b"}
    with pytest.raises(ValueError, match="no answer of another problem is wrong for 'p0'"):
        with_wrong_labels(asked[:2], 1.0)


def test_a_larger_share_adds_wrong_labels_and_moves_none() -> None:
    few, many = with_wrong_labels(CLEAN, 0.2), with_wrong_labels(CLEAN, 0.4)
    assert all(b.references == a.references for a, b in zip(few, many, strict=True) if MARK in a.extra)
    assert sum(MARK in p.extra for p in few) < sum(MARK in p.extra for p in many)


def test_it_is_a_setting_of_a_source(tmp_path: Path) -> None:
    def load(share: float) -> list[Problem]:
        return load_problems(SourceConfig(family="running_sum", count=100, label_noise=share))

    wrong = [a.prompt == b.prompt and a.references != b.references for a, b in zip(load(0.0), load(0.3), strict=True)]
    assert 15 < sum(wrong) < 45
    (tmp_path / "same.jsonl").write_text('{"problem": "a", "answer": "1"}\n{"problem": "b", "answer": "1"}\n')
    with pytest.raises(RecipeError, match=r"all 2 problems have one answer") as caught:
        load_problems(SourceConfig(path=str(tmp_path / "same.jsonl"), label_noise=0.5))
    assert caught.value.key == "label_noise"


SAME = [
    ("Find the sum of 2 and 3.", "  find  the SUM\nof 2 and\t3. "),
    ("It’s “x” – 3 − 2 … 5‑fold", 'it\'s "x" - 3 - 2 ... 5-fold'),
    ("Ｆｉｎｄ\u00a0the ﬁrst\u2009𝑥", "find the first x"),
    ("cafe\u0301", "café"),
    ("\ufeffWhat\u200b is 2\u00ad+3\u2060?", "what is 2+3?"),
    ("STRASSE", "straße"),
]
OTHER = [
    ("2³", "23"), ("x₁", "x1"), ("1½", "11/2"), ("2 + 3", "2 - 3"), ("2 3", "23"), ("1.5", "15"), ("ℵ", "a"),
    ("f'(x)", "f(x)"), (r"\frac12", r"\frac21"), ("x²", "x³"), ("10,0", "100"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_typesetting_makes_no_other_prompt(one: str, other: str) -> None:
    assert prompt_key(one) == prompt_key(other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_what_is_asked_does(one: str, other: str) -> None:
    assert prompt_key(one) != prompt_key(other)


def test_no_two_digits_of_another_value_are_folded_into_one() -> None:
    """Every character that Unicode folds into a plain digit is a digit of that value, and not raised or lowered."""
    for code in range(sys.maxunicode + 1):
        found = plain_typography(char := chr(code))
        if found != char and any(c.isdigit() for c in found):
            tag = unicodedata.decomposition(char).partition(" ")[0]
            assert tag not in ("<super>", "<sub>", "<fraction>"), f"U+{code:04X} {char} became {found}"


def test_all_messages_count() -> None:
    user, system = {"role": "user", "content": "What is 2 + 3?"}, {"role": "system", "content": "Be brief."}
    said = {"role": "assistant", "content": "5"}
    assert prompt_key([user]) == prompt_key("what is 2 + 3?")
    many = [
        [user],
        [system, user],
        [user, system],
        [user, said, user],
        [{"role": "system", "content": user["content"]}],
    ]
    assert len({prompt_key(one) for one in many}) == len(many)
    assert prompt_key([system, user]) == prompt_key([{"content": "be  BRIEF.", "role": "system"}, user])


def test_a_problem_keeps_its_identity_in_a_wrapping_and_on_its_way() -> None:
    one = problem("a", "What is 2 + 3?")
    wrapped = replace(one, prompt="Think. What is 2 + 3? Box it.", id="b")
    assert one.key == wrapped.key == pickle.loads(pickle.dumps(one)).key != problem("a", wrapped.prompt).key


def test_a_template_is_a_cluster() -> None:
    assert problem("a", "a").cluster == problem("a", " A").cluster != problem("a", "b").cluster
    assert problem("a", "a", template="t").cluster == problem("a", "b", template="t").cluster
