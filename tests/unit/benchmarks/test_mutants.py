"""The table of deliberate faults: stale rows are reported, and the tests detect a sample of the faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path("benchmarks", "mutants.py")


def checked(folder: Path, *rows: tuple[str, str, str, str]) -> str:
    """Return the script's report on rows (name, symbol, old text, new text) about a project of two files."""
    package = folder / "src" / "magicrl"
    (package / "deeper").mkdir(parents=True)
    (package / "deeper" / "part.py").write_text("def add(a, b):\n    return a + b  # a plus b\n\n\nLIMIT: int = 3\n")
    (package / "other.py").write_text(
        "class Sum:\n    @staticmethod\n    def add(a, b):\n        return a + b\n\n\n"
        "def add(a, b):\n    return b + a\n"
    )
    (folder / SCRIPT.parent / "faults").mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, folder / SCRIPT)
    (folder / "test_part.py").touch()
    table = '[part]\ntests = ["test_part.py"]\n'
    for name, *texts in rows:
        symbol, old, new = map(json.dumps, texts)
        table += f'[[part.faults]]\nname = "{name}"\nbreaks = "all"\nsymbol = {symbol}\nold = {old}\nnew = {new}\n'
    (folder / SCRIPT.parent / "faults" / "package.toml").write_text(table)
    done = subprocess.run(
        [sys.executable, str(folder / SCRIPT), "--check"], check=False, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_a_symbol_is_found_in_whichever_file_it_is(tmp_path: Path) -> None:
    said = checked(
        tmp_path,
        ("of the one text", "add", "return a + b  #", "return a - b  #"),
        ("of the one file", "other.py:add", "(a, b)", "(b, a)"),
        ("method", "Sum.add", "@staticmethod", "@classmethod"),
        ("constant", "LIMIT", "3", "4"),
    )
    assert said == "4 faults fit the source\n"


def test_every_row_that_is_not_true_any_more_is_named(tmp_path: Path) -> None:
    said = checked(
        tmp_path,
        ("gone", "add", "return a * b", "return 0"),
        ("no symbol", "subtract", "return", "pass"),
        ("two files", "add", "(a, b)", "(a)"),
        ("no Python", "add", "return b + a", "return b +"),
        ("doubled", "LIMIT", "3", "4"),
        ("doubled", "LIMIT", "3", "5"),
    )
    for part in (
        "gone: its old text is found 0 times in add:\nreturn a * b",
        "no symbol: its old text is found 0 times in subtract",
        "two files: its old text is found 2 times in add",
        "no Python: other.py would be no Python",
        "doubled is there twice",
    ):
        assert part in said


@pytest.mark.slow
def test_a_sample_of_the_faults_is_killed(tmp_path: Path) -> None:
    """Run a minute or two on one core. The table must fit the source, and each of these faults makes a test fail."""
    output = tmp_path / "mutants.json"
    options = ["--sample", "8", "--seed", "7", "--work", str(tmp_path / "work"), "--output", str(output)]
    done = subprocess.run([sys.executable, str(ROOT / SCRIPT), *options], check=False, capture_output=True, text=True)
    assert output.exists(), done.stdout[-3000:] + done.stderr
    found = json.loads(output.read_text())
    assert found["tried"] == 8
    assert done.returncode == 0, found["survivors"]
