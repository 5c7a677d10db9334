"""The step's wall clock, split without gaps into t_R + t_T + t_O (section 5 of the report)."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from magicrl.training.protocols import WorkSpan

Part = Literal["rollout", "train", "other"]


@dataclass(kw_only=True)
class StepClock:
    """Measures one step. Whatever is not inside ``rollout`` or ``train`` is ``other``, so the parts always add up.

    Rewards, old and reference log-probs, weight copies and bookkeeping are t_O, as in the report;
    verification that hides behind generation costs nothing here and is counted once.
    """

    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    """When ``times`` was last called."""
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
        self.ended = time.perf_counter()
        total = self.ended - self.started
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

    def append_timeline(self, path: Path, step: int, workers: Iterable[WorkSpan] = ()) -> None:
        """Append its spans, and what of ``workers`` lies inside it, to ``timeline.jsonl``: seconds since its start."""
        rows: list[dict[str, object]] = []
        for name, begin, end in self.spans:
            part, _, what = name.partition("/")
            rows.append({"worker": "local", "kind": part, "what": what, **self._place(step, begin, end)})
        for span in workers:
            begin, end = max(span.begin, self.started), min(span.end, self.ended)
            if begin < end:
                rows.append({"worker": span.worker, "what": span.what, **self._place(step, begin, end)})
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def _place(self, step: int, begin: float, end: float) -> dict[str, object]:
        return {"step": step, "start": round(begin - self.started, 6), "end": round(end - self.started, 6)}
