"""Current behaviour equals the record: help, settings, run folder, evaluation, data pipeline, verdicts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("magicrl_frozen", Path(__file__).with_name("frozen.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
frozen = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = frozen  # dataclasses look up their own module
_SPEC.loader.exec_module(frozen)


def test_the_help_is_as_recorded() -> None:
    """Run in a separate process: other tests leave consoles of other widths behind."""
    command = [sys.executable, str(Path(frozen.__file__)), "check", "help"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["run", "evaluation", "pipeline"])
def test_a_part_is_as_recorded(name: str) -> None:
    lines = frozen.check(name)
    assert lines == [], frozen.report(name, lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maths", "code"])
def test_verdicts_are_as_recorded(name: str, shared_data: Path) -> None:
    lines = frozen.check(name)
    assert lines == [], frozen.report(name, lines)


def test_a_changed_row_is_named_with_both_texts_and_rounding_is_no_change() -> None:
    before = {"a": "[0.123456, 8]", "b": "x", "c": "gone", "e": "0.5 of 8"}
    after = {"a": "[0.1234561, 8]", "b": "y", "d": "new", "e": "0.5 of 9"}
    named = ["b: x -> y", "c: gone -> (none)", "e: 0.5 of 8 -> 0.5 of 9", "d: (none) -> new"]
    assert frozen.differences("evaluation", before, after) == named
    assert frozen.differences("pipeline", {"a": "12e45678"}, {"a": "13e45678"}) == ["a: 12e45678 -> 13e45678"]
    assert "make frozen-accept WHAT=help" in frozen.report("help", named)
    many = frozen.report("help", [f"{n}: x -> y" for n in range(100)])
    assert len(many.splitlines()) <= frozen.MOST_LINES + 2


def test_a_changed_verdict_is_named_and_one_that_time_decides_is_not_compared() -> None:
    before = {"math500 6 bare box": "n", "math500 6 boxed box": "M0123abcd", "math500 8 bare box": "~"}
    after = {"math500 6 bare box": "n~", "math500 6 boxed box": "x89abcdef", "math500 8 bare box": "x01234567"}
    (line,) = frozen.differences("maths", before, after)
    assert " ".join(line.split()) == "math500 row 6 boxed box: matched [M0123abcd] -> mismatch [x89abcdef]"


def test_verdicts_survive_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "RECORDS", tmp_path)
    rows = {"a 0 bare box": "n", "a 0 bare lenient": "M0123abcd", "a 0 boxed box": "M0123abcd", "b 7 program": "P3/3"}
    frozen.write("maths", rows | {"a 2 bare box": "M0123abcd~"})
    assert frozen.read("maths") == rows | {"a 2 bare box": "~"}


def test_what_is_not_compared_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "RECORDS", tmp_path)
    monkeypatch.setattr(frozen, "SHARED", tmp_path)
    monkeypatch.setattr(frozen, "LOG", tmp_path / "log.md")
    today = {"a 0 program": "P3/3", "a 1 program": "P1/1", "a 2 program": "W0/3"}

    def judged() -> dict[str, str]:
        return {key: token for key, token in today.items() if key not in frozen.uncompared}

    monkeypatch.setitem(frozen.PARTS, "code", frozen.Part(judged, verdicts=True))
    frozen.write("code", today | {"a 1 program": "~", "a 2 program": "P3/3"})
    frozen.accept(["code"], "stricter")
    assert frozen.read("code") == today | {"a 1 program": "~"}
    today.update({"a 0 program": "P3/3~", "a 2 program": "P2/3"})  # slow today
    frozen.accept(["code"], "stricter")
    assert frozen.read("code") == {"a 0 program": "P3/3", "a 1 program": "~", "a 2 program": "P2/3"}


def test_rows_keep_their_order_and_new_ones_are_next_to_their_neighbours() -> None:
    before = {"a": "1", "b": "2", "gone": "3", "c": "4"}
    after = {"top": "0", "c": "4", "new": "5", "newer": "6", "b": "7", "a": "1"}
    assert " ".join(frozen.in_order(before, after)) == "top a b c new newer"
    assert frozen.in_order(before, after) == after


def test_nothing_is_accepted_without_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "LOG", tmp_path / "log.md")
    for what, reason, said in (("pipeline", " ", "REASON"), ("pipelin", "better", "WHAT"), ("", "better", "WHAT")):
        with pytest.raises(SystemExit, match=said):
            frozen.accept(what.split(), reason)
    frozen.accept(["pipeline"], "better")
    assert not frozen.LOG.exists(), "nothing changed"
    monkeypatch.setattr(frozen, "RECORDS", tmp_path)
    frozen.accept(["pipeline"], "better names")
    assert "`pipeline`" in frozen.LOG.read_text()
    assert "better names" in frozen.LOG.read_text()
    assert frozen.check("pipeline") == []
    first, *rest = frozen.read("pipeline").items()
    frozen.write("pipeline", {**dict(rest), first[0]: "another"})
    frozen.accept(["pipeline"], "the first again")
    assert [*frozen.read("pipeline").items()] == [*rest, first]
