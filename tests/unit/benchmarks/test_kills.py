"""Every place at which `benchmarks.resume.kills` kills a run exists: a run dies at a few of them, drawn by chance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ARRANGE_ALL = """
from benchmarks.resume.kills import FATES, Place, Watcher, arrange
for fate in FATES:
    arrange(fate, Watcher(Place(), fate, 0), Place())
"""


def test_every_place_to_die_exists() -> None:
    done = subprocess.run([sys.executable, "-c", ARRANGE_ALL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
