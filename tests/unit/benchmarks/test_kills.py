"""Every place at which `benchmarks.resume.kills` kills a run exists, and what it kills is a run that removed problems.

A run dies at a few of the places, drawn by chance.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.resume import kills

ROOT = Path(__file__).resolve().parents[3]
ARRANGE_ALL = """
from benchmarks.resume.kills import FATES, Place, Watcher, arrange
for fate in FATES:
    arrange(fate, Watcher(Place(), fate, 0), Place())
"""


def test_every_place_to_die_exists() -> None:
    done = subprocess.run([sys.executable, "-c", ARRANGE_ALL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def study_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removing_seed: int) -> kills.Study:
    """Return a study whose runs remove a problem at ``removing_seed`` only, without running them."""
    arguments = argparse.Namespace(recipe=Path("tiny"), set=None, work=tmp_path, models=None, seed=0, kills=1)
    monkeypatch.setattr(kills.Study, "_finish", lambda *_: None)
    last = f"whole-{removing_seed}"
    monkeypatch.setattr(kills, "to_restore", lambda run: {"problems removed": run.parent.name == last})
    return kills.Study(arguments)


def test_the_killed_run_is_one_that_removes_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(tmp_path, monkeypatch, removing_seed=2)
    whole, _ = study._undisturbed()
    assert whole.parent.name == "whole-2"
    assert study.config.run.seed == 2  # the killed runs are of the same seed


def test_without_such_a_run_there_is_nothing_to_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="problems removed"):
        study_of(tmp_path, monkeypatch, removing_seed=9)._undisturbed()
