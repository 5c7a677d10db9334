"""Reproduction of the committed losses and gradient norms; see ``regenerate.py`` in this folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("regenerate.py")
_SPEC = importlib.util.spec_from_file_location("magicrl_golden_regenerate", _SCRIPT)
assert _SPEC is not None
assert _SPEC.loader is not None
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)


def test_the_trajectory_is_the_committed_one_and_the_same_twice() -> None:
    first = golden.trajectory()
    committed = json.loads(golden.GOLDEN.read_text(encoding="utf-8"))
    assert len(first) == len(committed) == 5
    for step, (ours, theirs) in enumerate(zip(first, committed, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-5), f"update {step + 1} departs from {golden.GOLDEN.name}"
    assert golden.trajectory() == first  # bit for bit
