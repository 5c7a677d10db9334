"""The frame of steps: every row accounted for, only changes computed again, a killed run continues to the same files.

Also how far labelled problems came in a run, step by step.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from magicrl.config.errors import RecipeError
from magicrl.files import only_writer
from magicrl.pipeline import import_source
from magicrl.pipeline import parts as part_files
from magicrl.pipeline.import_source import EntryReader
from magicrl.pipeline.stats import counts_of, way_of

RULES = {"maths": {"agreement": False, "unreadable_references": "keep"}}


@pytest.fixture
def pipeline(write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return two sources in parts of four rows; cleaning, which drops a third of them; dedup; a mixture with a cap."""
    monkeypatch.setattr(import_source, "PART_ROWS", 4)

    def problem(place: int) -> str:
        return f"Prove that {place} is odd." if place % 3 == 0 else f"What is {place} + {place * place}?"

    for name, count in (("a", 10), ("b", 7)):
        rows = [{"problem": problem(place + 5 * (name == "b")), "answer": str(place)} for place in range(count)]
        write_rows(f"{name}.jsonl", rows)
    return {
        "sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}],
        "steps": [
            {"use": "clean", **RULES},
            {"use": "dedup", "settings": {"stages": ["exact"]}},
            {"use": "mix", "caps": {"b": 2}},
        ],
    }


class Told:
    """Observer that records how many parts each step had to make."""

    def __init__(self) -> None:
        self.missing: dict[str, int] = {}

    def step(self, name: str, parts: int, missing: int) -> None:
        self.missing[name] = missing

    def progress(self, name: str, done: int, total: int, unit: str) -> None: ...

    def note(self, text: str) -> None: ...


def test_every_row_is_kept_or_dropped_with_a_reason_at_every_step(pipeline: dict[str, Any], run: Any) -> None:
    run(pipeline)
    counts = counts_of(run.output)
    assert [one.step for one in counts] == ["import", "01-clean", "02-dedup", "03-mix"]
    assert counts[0].entered == 17
    for before, after in pairwise(counts):
        assert after.entered == before.kept
        assert after.entered == after.kept + sum(after.reasons.values())
    assert counts[1].reasons == {"proof": 6}
    assert counts[2].reasons == {"duplicate with another reference": 3}
    assert counts[3].sources["b"] == {"in": 2, "kept": 2, "dropped": {}}
    assert {row["step"] for row in run.dropped("01-clean")} == {"01-clean"}


def test_the_way_of_a_problem_ends_where_it_was_dropped(pipeline: dict[str, Any], run: Any) -> None:
    run(pipeline)
    first, second = way_of(run.output, "a/a-3")
    assert first[:2] == ("import", True)
    assert second[:2] == ("01-clean", False)
    assert second[2]["reason"] == "proof"
    assert "Prove that" in second[2]["detail"]
    assert [kept for _, kept, _ in way_of(run.output, "a/a-1")] == [True] * 4
    with pytest.raises(ValueError, match=r"no problem has the id 'a/a-33'; near ones: .*a/a-3"):
        way_of(run.output, "a/a-33")


def test_a_second_run_makes_nothing_and_a_change_only_what_follows_it(
    pipeline: dict[str, Any], run: Any, tmp_path: Path
) -> None:
    run(pipeline)
    before = run.files()
    told = Told()
    run(pipeline, told)
    assert told.missing == {"01-clean": 0, "02-dedup": 0, "03-mix": 0}
    mixture = run.output / "mixture"
    for name in ("card.json", "train.parquet"):  # removed by hand
        (mixture / name).unlink()
        run(pipeline, told)
        assert (mixture / name).is_file()
    assert told.missing == {"01-clean": 0, "02-dedup": 0, "03-mix": 0}
    pipeline["steps"][2]["caps"] = {"b": 1}
    run(pipeline, told)
    assert told.missing == {"01-clean": 0, "02-dedup": 0, "03-mix": 5}
    # one more row in b: cleaning works on single parts, so it repeats only b's
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"problem": "What is 8 + 8?", "answer": "16"}\n')
    run(pipeline, told)
    assert told.missing == {"01-clean": 2, "02-dedup": 5, "03-mix": 5}
    assert run.files()["01-clean/kept/a.00000.parquet"] == before["01-clean/kept/a.00000.parquet"]
    # a removed source takes its parts with it, and steps that still hold its rows no longer count
    run({**pipeline, "sources": pipeline["sources"][:1], "steps": pipeline["steps"][:1]}, told)
    assert not [name for name in run.files() if name.startswith("01-clean") and "/b." in name]
    (left,) = [one for one in counts_of(run.output) if one.step != "import"]
    assert (left.step, list(left.sources)) == ("01-clean", ["a"])


def test_what_is_made_again_is_unfinished_until_its_end(
    pipeline: dict[str, Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stops(Told):
        def progress(self, name: str, done: int, total: int, unit: str) -> None:
            if name == "01-clean":
                raise KeyboardInterrupt

    run(pipeline)
    assert len(counts_of(run.output)) == 4
    pipeline["steps"][0] = {"use": "clean", "maths": {**RULES["maths"], "figures": False}}
    with pytest.raises(KeyboardInterrupt):
        run(pipeline, Stops())
    assert [one.step for one in counts_of(run.output)] == ["import"], "its parts are those of two settings"
    state = run.output / "sources" / "a" / "source.json"
    assert state.is_file()

    changed = {**pipeline, "sources": [{"path": "a.jsonl", "template": "{prompt}!"}, *pipeline["sources"][1:]]}
    monkeypatch.setattr(import_source, "PART_ROWS", 1)
    read, entry = [], EntryReader.entry

    def stops(*given: Any) -> Any:
        read.append(given)
        if len(read) in (1, 3):
            raise KeyboardInterrupt
        return entry(*given)

    monkeypatch.setattr(EntryReader, "entry", stops)
    with pytest.raises(KeyboardInterrupt):
        run(changed)
    assert state.is_file(), "nothing has changed yet"
    with pytest.raises(KeyboardInterrupt):
        run(changed)
    assert not state.exists()


def test_steps_and_sources_of_an_earlier_pipeline_in_the_folder_are_of_another_run(
    pipeline: dict[str, Any], run: Any
) -> None:
    run(pipeline)
    clean, dedup, _ = pipeline["steps"]
    run({"sources": pipeline["sources"][:1], "steps": [dedup, clean, {"use": "mix"}]})
    steps = ["import", "01-dedup", "02-clean", "03-mix"]
    assert [(one.step, list(one.sources)) for one in counts_of(run.output)] == [(step, ["a"]) for step in steps]
    card = json.loads((run.output / "mixture" / "card.json").read_text())
    assert [one["step"] for one in card["steps"]] == steps
    # a step of the same name that read other rows
    run({"sources": pipeline["sources"][1:]})
    assert [(one.step, list(one.sources)) for one in counts_of(run.output)] == [("import", ["b"])]


def test_rows_of_one_run_are_counted_together_and_never_taken_twice(
    pipeline: dict[str, Any], run: Any, tmp_path: Path
) -> None:
    run({"sources": pipeline["sources"][:1]})
    first, *others = sorted((run.output / "sources" / "a" / "kept").glob("*.parquet"))
    again = type(run)(tmp_path)
    again.output = tmp_path / "again"
    sources: list[dict[str, Any]] = [{"name": "x", "path": str(first)}, {"name": "y", "path": [*map(str, others)]}]
    again({"sources": sources})
    assert counts_of(again.output)[0].sources == {"a": {"in": 10, "kept": 10, "dropped": {}}}
    sources[1]["path"].append(str(first))
    with pytest.raises(ValueError, match=r"the sources 'x' and 'y' both hold the row 'a/a-0'; take the rows"):
        again({"sources": sources, "steps": pipeline["steps"]})


class Workers(Told):
    """Observer of the signals that the workers of cleaning ignore, as the kernel's masks."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored: dict[int | None, int] = {}

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        for child in multiprocessing.active_children() if name == "01-clean" else ():
            status = Path(f"/proc/{child.pid}/status").read_text()
            # the last sample counts: a worker that is only starting ignores nothing yet
            for mask in re.findall(r"^SigIgn:\s*(\w+)", status, re.M):
                self.ignored[child.pid] = int(mask, 16)


def test_processes_give_the_same_files(pipeline: dict[str, Any], run: Any) -> None:
    run(pipeline)
    alone = {name: data for name, data in run.files().items() if not name.startswith("sources")}
    for path in run.output.glob("0*/kept/*.parquet"):
        path.unlink()
    watched = Workers()
    run({**pipeline, "workers": 2, "sources": pipeline["sources"]}, watched)
    assert watched.ignored
    assert all(mask & 1 << signal.SIGINT - 1 for mask in watched.ignored.values()), "Ctrl-C is left to the main process"
    assert {name: data for name, data in run.files().items() if not name.startswith("sources")} == alone


class Killed(BaseException):
    """Stand-in for SIGKILL: no handler of an error catches it."""


def test_a_run_interrupted_before_any_file_goes_on_to_the_same_files(
    pipeline: dict[str, Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pipeline)
    whole = run.files()
    writes = 0
    really = Path.replace

    def replace(self: Path, target: Any) -> Any:
        nonlocal writes
        if writes == 0:
            raise Killed
        writes -= 1
        return really(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    for stop in range(0, 60, 13):
        for path in sorted(run.output.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        interruptions = 0
        while True:
            writes = stop if interruptions == 0 else 10
            try:
                run(pipeline)
                break
            except Killed:
                interruptions += 1
        assert interruptions > 0
        assert run.files() == whole


def test_an_import_that_was_killed_reads_only_the_records_it_had_not(
    write_rows: Callable[..., Path], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_source, "PART_ROWS", 4)
    # the third record is unreadable; the first and the last have one id
    rows = [{"problem": "?" * (i != 2), "answer": "5", "id": f"x{i % 9}"} for i in range(10)]
    tree = {"sources": [{"path": str(write_rows("a.jsonl", rows)), "fields": {"id": "id"}}]}
    run(tree)
    assert [entry.id for entry in run.kept("sources/a")][-1] == "a/x0#9"
    whole = run.files()
    (run.output / "sources" / "a" / "source.json").unlink()
    for folder in ("kept", "dropped"):
        (run.output / "sources" / "a" / folder / "a.00002.parquet").unlink()
    read: list[int] = []
    really = EntryReader.entry

    def entry(self: EntryReader, row: Any, given: Any) -> Any:
        read.append(row.index)
        return really(self, row, given)

    monkeypatch.setattr(EntryReader, "entry", entry)
    run(tree)
    assert read == [8, 9], "two parts of four records were there"
    assert run.files() == whole


def test_a_part_whose_bytes_changed_is_an_error_and_never_other_rows(pipeline: dict[str, Any], run: Any) -> None:
    run({**pipeline, "steps": pipeline["steps"][:1]})
    path = run.output / "01-clean" / "kept" / "a.00000.parquet"
    data = path.read_bytes()
    meta = pq.read_metadata(path).row_group(0)
    columns = [meta.column(number) for number in range(meta.num_columns)]
    statements = next(column for column in columns if column.path_in_schema == "problem")

    def changed(place: int) -> bytes:
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    def is_read(part: bytes) -> bool:
        with suppress(OSError, pa.ArrowException):
            return pq.read_table(pa.BufferReader(part))["problem"].to_pylist() != whole
        return False

    # one bit of a statement's text: without a checksum another statement would be read
    whole = pq.read_table(path)["problem"].to_pylist()
    end = statements.data_page_offset + statements.total_compressed_size
    path.write_bytes(next(part for place in range(end - 1, 0, -1) if is_read(part := changed(place))))
    with pytest.raises(ValueError, match=r"a\.00000\.parquet is damaged .*delete it and run again"):
        run(pipeline)


def test_a_damaged_part_is_named_and_made_anew_when_deleted(pipeline: dict[str, Any], run: Any) -> None:
    run(pipeline)
    whole = run.files()
    path = run.output / "01-clean" / "kept" / "a.00001.parquet"
    path.write_bytes(path.read_bytes()[:300])
    assert part_files.part_key(path) is None
    run(pipeline)
    assert run.files() == whole


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_or_quota_without_room_is_an_error_with_its_remedy(code: int, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no room; free some space"), part_files.told_when_full(tmp_path):
        raise OSError(code, "no room")
    short = OSError("19200 requested and 4080 written")
    with pytest.raises(RuntimeError, match="No space left on device; free"), part_files.told_when_full(tmp_path):
        raise short
    with pytest.raises(PermissionError), part_files.told_when_full(tmp_path):
        raise PermissionError(errno.EACCES, "not allowed")


def test_copies_in_another_source_stay_where_only_each_source_is_searched(
    write_rows: Callable[..., Path], run: Any
) -> None:
    texts = {"a": ["1 + 1?", "1 + 2?", "1 + 1?"], "b": ["2 + 2?", "1 + 2?"]}
    rows = {name: [{"problem": text, "answer": "5"} for text in held] for name, held in texts.items()}
    sources = [{"path": str(write_rows(f"{name}.jsonl", held))} for name, held in rows.items()]
    step = {"use": "dedup", "settings": {"stages": ["exact"]}}
    run({"sources": sources, "steps": [{**step, "scope": "within"}]})
    assert run.reasons("01-dedup") == {"a/a-2": "duplicate (exact)"}
    # rows of another run keep their sources, also in one input
    kept = [str(path) for name in "ab" for path in (run.output / "sources" / name / "kept").glob("*.parquet")]
    again = type(run)(run.base)
    again.output = run.base / "again"
    again({"sources": [{"name": "both", "path": kept}], "steps": [{**step, "scope": "within"}]})
    assert again.reasons("01-dedup") == {"a/a-2": "duplicate (exact)"}
    run({"sources": sources, "steps": [{**step, "scope": "across"}]})
    assert run.reasons("01-dedup") == dict.fromkeys(("a/a-2", "b/b-1"), "duplicate (exact)")


def test_only_one_process_writes_a_run(pipeline: dict[str, Any], run: Any) -> None:
    with only_writer(run.output, wait=False), pytest.raises(ValueError, match="is being written by another process"):
        run(pipeline)


def test_a_run_of_other_sources_is_not_replaced(pipeline: dict[str, Any], run: Any) -> None:
    run(pipeline)
    files = run.files()
    other = {**pipeline["sources"][0], "name": "other"}
    with pytest.raises(ValueError, match=r"holds a run of other sources \(a, b\)"):
        run({**pipeline, "sources": [other], "steps": []}, replace=False)
    assert run.files() == files
    settings = (run.output / "pipeline.toml").read_bytes()
    run({**pipeline, "sources": [pipeline["sources"][0], other], "steps": []}, replace=False)  # one is the same
    assert (run.output / "pipeline.toml").read_bytes() != settings
    (run.output / "run.json").write_text("{}")  # of version 0.1
    run({**pipeline, "sources": [other], "steps": []}, replace=False)


def test_errors_of_settings_name_their_place(pipeline: dict[str, Any], run: Any) -> None:
    with pytest.raises(RecipeError, match=r"sources\.1\.path: .*none\.jsonl: no such file"):
        run({**pipeline, "sources": [pipeline["sources"][0], {"path": "none.jsonl"}]})
    pipeline["steps"][2]["weights"] = {"c": 1}
    with pytest.raises(RecipeError, match=r"steps\.2\.weights: no source is called 'c'; known: a, b"):
        run(pipeline)
