"""Tests of minutes: the shipped quickstart from the command line, and a run killed at random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "magicrl", *arguments]


def evaluation(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / "evaluations" / f"{name}-held_out.json").read_text())["temperatures"]


def test_the_quickstart_does_what_it_promises(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    done = subprocess.run(
        command("train", str(ROOT / "src" / "magicrl" / "recipes" / "quickstart.toml"), "--output", str(run)),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "minutes" in done.stdout.splitlines()[0]
    before, after = evaluation(run, "before"), evaluation(run, "after")
    assert before["0.0"]["accuracy"]["mean"] <= 0.6
    assert before["1.0"]["pass_at"]["16"]["mean"] >= 0.8
    best = max(score["accuracy"]["mean"] for score in before.values())
    assert after["1.0"]["accuracy"]["mean"] >= before["1.0"]["accuracy"]["mean"] + 0.25
    assert after["1.0"]["accuracy"]["mean"] >= best + 0.10
    page = (run / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "src=" not in page


def test_a_run_killed_again_and_again_is_the_same_run(tmp_path: Path) -> None:
    figures = tmp_path / "kills.json"
    recipe = ROOT / "src" / "magicrl" / "recipes" / "tiny.toml"
    options = ["--kills", "12", "--work", str(tmp_path / "work"), "--output", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resume.kills", str(recipe), *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    document = json.loads(figures.read_text())
    assert document["kills"] >= 12  # more follow while a state was not met
    assert document["workers_killed"] > 0
    assert min(kills for what, kills in document["to_restore"].items() if what != "work in flight") > 0
