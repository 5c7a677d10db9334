"""The table of deliberate faults: what makes it untrue is told, and a sample of it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parents[2]


def fault(name: str, *edits: tuple[str, str, str], tests: tuple[str, ...] = ()) -> mutants.Fault:
    return mutants.Fault(name=name, table="package/part", edits=edits, breaks="all", tests=tests)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project of two files with functions, a method and a constant."""
    package = tmp_path / "src" / "magicrl"
    package.mkdir(parents=True)
    (package / "part.py").write_text("def add(a, b):\n    return a + b  # a plus b\n\n\nLIMIT: int = 3\n")
    (package / "other.py").write_text(
        "class Sum:\n    @staticmethod\n    def add(a, b):\n        return a + b\n\n\n"
        "def add(a, b):\n    return b + a\n"
    )
    return tmp_path


def test_a_fault_changes_what_it_names_and_nothing_else(root: Path) -> None:
    found = mutants.changed(fault("minus", ("add", "return a + b", "return a - b"), ("LIMIT", "3", "4")), root)
    assert found == {"part.py": "def add(a, b):\n    return a - b  # a plus b\n\n\nLIMIT: int = 4\n"}


def test_a_symbol_is_found_in_whichever_file_it_is(root: Path) -> None:
    assert list(mutants.changed(fault("method", ("Sum.add", "@staticmethod", "@classmethod")), root)) == ["other.py"]
    package = root / "src" / "magicrl"
    (package / "deeper").mkdir()
    (package / "part.py").rename(package / "deeper" / "moved.py")
    mutants._symbols.cache_clear()
    mutants._text.cache_clear()
    assert list(mutants.changed(fault("limit", ("LIMIT", "3", "4")), root)) == ["deeper/moved.py"]


def test_a_name_of_two_files_needs_the_text_or_the_file(root: Path) -> None:
    with pytest.raises(mutants.TableError, match="found 2 times in add"):
        mutants.changed(fault("which", ("add", "(a, b)", "(a)")), root)
    assert list(mutants.changed(fault("this", ("other.py:add", "(a, b)", "(b, a)")), root)) == ["other.py"]
    assert list(mutants.changed(fault("that", ("add", "b + a", "b - a")), root)) == ["other.py"]


def test_every_row_that_is_not_true_any_more_is_named(root: Path) -> None:
    rows = [
        fault("gone", ("add", "return a * b", "return 0")),
        fault("no symbol", ("subtract", "return", "pass")),
        fault("twice there", ("part.py", "a plus", "c"), ("part.py", "return", "pass"), ("part.py", "b", "c")),
        fault("no Python", ("add", "return a + b", "return a +")),
        fault("no test", ("add", "return a + b", "return 0"), tests=("tests/test_part.py::test_add",)),
        fault("doubled", ("add", "return a + b", "return 0")),
        fault("doubled", ("add", "return a + b", "return 1")),
    ]
    with pytest.raises(SystemExit) as told:
        mutants.check_tables(rows, root)
    text = str(told.value)
    for part in (
        "gone: its old text is found 0 times in add:\nreturn a * b",
        "no symbol: its old text is found 0 times in subtract",
        "twice there: its old text is found 3 times in part.py",
        "no Python: part.py would be no Python",
        "no test: there is no tests/test_part.py::test_add",
        "doubled is there twice",
    ):
        assert part in text


@pytest.mark.slow
def test_a_sample_of_the_faults_is_killed(tmp_path: Path) -> None:
    """A minute or two of a core; the table must fit the source, and each of these faults turns a test red."""
    output = tmp_path / "mutants.json"
    options = ["--sample", "8", "--seed", "7", "--work", str(tmp_path / "work"), "--output", str(output)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "mutants.py"), *options], check=False, capture_output=True, text=True
    )
    assert output.exists(), done.stdout[-3000:] + done.stderr
    found = json.loads(output.read_text())
    assert found["tried"] == 8
    assert done.returncode == 0, found["survivors"]
