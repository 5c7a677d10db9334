"""Scripts that measure; what they share with tests is in tests/helpers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
