"""Scripts that measure speed and correctness; code shared with tests is in tests/helpers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
