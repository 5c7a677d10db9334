"""The table of deliberate faults: what makes it untrue is told, and a sample of it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parents[2]


def fault(name: str, *edits: tuple[str, str], tests: tuple[str, ...] = ()) -> mutants.Fault:
    return mutants.Fault(name=name, file="part.py", edits=edits, breaks="all", tests=tests)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project whose only file adds two numbers."""
    package = tmp_path / "src" / "magicrl"
    package.mkdir(parents=True)
    (package / "part.py").write_text("def add(a, b):\n    return a + b  # a plus b\n")
    return tmp_path


def test_a_fault_changes_what_it_names_and_nothing_else(root: Path) -> None:
    text = mutants.changed(fault("minus", ("return a + b", "return a - b"), ("# a plus b", "#")), root)
    assert text == "def add(a, b):\n    return a - b  #\n"


def test_every_row_that_is_not_true_any_more_is_named(root: Path) -> None:
    rows = [
        fault("gone", ("return a * b", "return 0")),
        fault("twice there", ("b", "c")),
        fault("no Python", ("return a + b", "return a +")),
        fault("no test", ("return a + b", "return 0"), tests=("tests/test_part.py::test_add",)),
        fault("doubled", ("return a + b", "return 0")),
        fault("doubled", ("return a + b", "return 1")),
    ]
    with pytest.raises(SystemExit) as told:
        mutants.check_table(rows, root)
    text = str(told.value)
    for part in (
        "gone: its old text stands 0 times in part.py:\nreturn a * b",
        "twice there: its old text stands 3 times",
        "no Python: part.py would be no Python",
        "no test: there is no tests/test_part.py::test_add",
        "doubled stands twice",
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
