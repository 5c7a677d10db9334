"""The scripts of `benchmarks/` import each other by plain names, as when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(SCRIPTS))
