"""How far labelled problems came in a run, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from magicrl.pipeline.stats import passages_of


def test_how_far_flawed_problems_came(write_rows: Callable[..., Path], run: Any) -> None:
    texts = ["Prove that 3 is odd.", "What is 1 + 1?", "What is 1 + 1?", "What is 2 + ____?"]
    rows = [{"problem": text, "answer": "2", "id": f"p{place}"} for place, text in enumerate(texts)]
    source = {"path": str(write_rows("r.jsonl", rows)), "fields": {"id": "id"}}
    steps = [{"use": "clean", "maths": {"agreement": False}}, {"use": "dedup", "settings": {"stages": ["exact"]}}]
    run({"sources": [source], "steps": steps})
    flawed = ["r/p0", "r/p2", "r/p3", "r/not-read"]
    told = [(one.step, one.reached, one.dropped, one.passed) for one in passages_of(run.output, flawed)]
    assert told == [
        ("import", 3, {}, 3),
        ("01-clean", 3, {"proof": 1}, 2),
        ("02-dedup", 2, {"duplicate (exact)": 1}, 1),
    ]
