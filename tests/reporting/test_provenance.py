"""Where a run comes from, as the page tells it."""

from __future__ import annotations

import json
from pathlib import Path

from magicrl.reporting.read_folders import read_run
from magicrl.reporting.run_page import provenance, write_report


def test_a_resumption_on_other_versions_shows_both(run_folder: Path) -> None:
    run = json.loads((run_folder / "run.json").read_text())
    run["environments"].append(
        {"started": "2026-01-03T00:00:00+00:00", "versions": {"numpy": "2.2"}, "git": "abc+changes", "threads": 2}
    )
    run["data"] = {
        "train": {"problems": 4000, "sha256": "f" * 64, "dropped": 3},
        "validation": {"problems": 0, "sha256": "0"},
        "test/held_out": {"problems": 200, "sha256": "e" * 64},
    }
    run["dropped_overlong"] = 0
    (run_folder / "run.json").write_text(json.dumps(run))
    told = provenance(read_run(run_folder))
    assert ("numpy", "2.1 → 2.2") in told["software"]
    assert [(s["name"], s["problems"], s["rest"]) for s in told["sets"]] == [
        ("train", "4,000", "dropped 3"),
        ("test, held_out", "200", ""),
    ]
    assert told["sessions"][1] == {"started": "2026-01-03 00:00 UTC", "git": "abc+changes", "machine": "2 threads"}
    assert ("dropped overlong", 0) in told["facts"]
    page = write_report(run_folder).read_text()
    for word in ("abc+changes", "f" * 64, "2.1 → 2.2", "two cores"):
        assert word in page


def test_what_is_no_table_is_borne_with(run_folder: Path) -> None:
    (run_folder / "run.json").write_text('{"schema_version": 1, "environments": ["?"], "data": {"train": "abc"}}')
    told = provenance(read_run(run_folder))
    assert told["sets"][0]["sha256"] == "abc"
    assert told["sessions"] == []


def test_the_page_states_the_command_that_makes_it(run_folder: Path) -> None:
    output = run_folder / "page.html"
    assert f"magicrl report {run_folder} --output {output}" in write_report(run_folder, output).read_text()
