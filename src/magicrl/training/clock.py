"""The step's wall clock, split without gaps into t_R + t_T + t_O (section 5 of the report)."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Part = Literal["rollout", "train", "other"]


@dataclass(kw_only=True)
class StepClock:
    """Measures one step. Whatever is not inside ``rollout`` or ``train`` is ``other``, so the parts always add up.

    Rewards, old and reference log-probs, weight copies and bookkeeping are t_O, as in the report;
    verification that hides behind generation costs nothing here and is counted once.
    """

    started: float = field(default_factory=time.perf_counter)
    spans: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    cpu: dict[str, float] = field(default_factory=dict[str, float])
    """CPU seconds of this process by part, all of its threads: what a busy machine does not distort."""

    @contextmanager
    def measure(self, part: Part, what: str | None = None) -> Generator[None, None, None]:
        """Time a block; ``what`` names it in the timeline. Blocks do not nest."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.spans.append((f"{part}/{what or part}", begin, time.perf_counter()))
            self.cpu[part] = self.cpu.get(part, 0.0) + time.process_time() - begin_cpu

    def times(self) -> dict[str, float]:
        """Seconds by part, ending now; ``step`` is their sum."""
        total = time.perf_counter() - self.started
        rollout = sum(end - begin for name, begin, end in self.spans if name.startswith("rollout/"))
        train = sum(end - begin for name, begin, end in self.spans if name.startswith("train/"))
        return {"rollout": rollout, "train": train, "other": total - rollout - train, "step": total}

    def others(self) -> dict[str, float]:
        """What is measured of t_O, in seconds by name."""
        found: dict[str, float] = {}
        for name, begin, end in self.spans:
            part, _, what = name.partition("/")
            if part == "other":
                found[what] = found.get(what, 0.0) + end - begin
        return found

    def append_timeline(self, path: Path, step: int) -> None:
        """Append the spans to ``timeline.jsonl``, seconds since the step's start."""
        with path.open("a") as file:
            for name, begin, end in self.spans:
                part, _, what = name.partition("/")
                row = {
                    "worker": "local",
                    "kind": part,
                    "what": what,
                    "step": step,
                    "start": round(begin - self.started, 6),
                    "end": round(end - self.started, 6),
                }
                file.write(json.dumps(row) + "\n")
