"""What the speed benchmarks share: clocks, interleaved repetitions, memory, the JSON they write.

Machines are shared and wall clock lies under load, so every figure is CPU time of this process at one thread, with
the wall clock at all threads beside it, both sides in one process, in turns. The load average stands in the JSON.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from magicrl.training.learner import release_free_memory
from magicrl.training.recorder import environment_facts, write_atomically

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one measured stretch: CPU time of all threads of this process, and wall clock."""

    cpu: float
    wall: float

    def __add__(self, other: Times) -> Times:
        return Times(cpu=self.cpu + other.cpu, wall=self.wall + other.wall)


class Clock:
    """Both clocks, started at construction."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> Times:
        return Times(cpu=time.process_time() - self._cpu, wall=time.perf_counter() - self._wall)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One place in the order of measurements: everything once at ``threads`` threads."""

    threads: int
    warm_up: bool = False


def turns(repetitions: int, *, most_threads: int | None = None) -> list[Turn]:
    """A warm-up, half of ``repetitions`` (at least one) at all threads (at most ``most_threads``), then all at one."""
    cores = min(len(os.sched_getaffinity(0)), most_threads or sys.maxsize)
    counts = [cores] * (max(1, repetitions // 2) if cores > 1 else 0) + [1] * repetitions
    return [Turn(threads=cores, warm_up=True), *(Turn(threads=count) for count in counts)]


def timed(action: Callable[[], Any], threads: int) -> tuple[Times, Any]:
    """Run ``action`` at ``threads`` torch threads; its times and what it returned."""
    torch.set_num_threads(threads)
    gc.collect()
    clock = Clock()
    result = action()
    return clock.read(), result


def summary(measured: Sequence[tuple[Turn, Times]], work: Mapping[str, float]) -> dict[str, Any]:
    """Medians and all values of the measurements, by thread count, with rates of ``work`` per second.

    ``cpu_s`` is the figure at one thread, ``wall_s`` the one at all; both stand for every thread count.
    """
    found: dict[str, Any] = {}
    for threads in sorted({turn.threads for turn, _ in measured}):
        times = [t for turn, t in measured if turn.threads == threads and not turn.warm_up]
        cpu, wall = statistics.median(t.cpu for t in times), statistics.median(t.wall for t in times)
        found[f"threads_{threads}"] = {
            "cpu_s": rounded(cpu),
            "wall_s": rounded(wall),
            "all_cpu_s": [rounded(t.cpu) for t in times],
            "all_wall_s": [rounded(t.wall) for t in times],
            **{f"{name}_per_cpu_s": rounded(amount / cpu) for name, amount in work.items()},
            **{f"{name}_per_wall_s": rounded(amount / wall) for name, amount in work.items()},
        }
    return found


def rounded(value: float) -> float:
    """Four significant digits: more is noise."""
    return float(f"{value:.4g}")


def ratio(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float]:
    """How many times ours is faster, from two summaries: CPU time at one thread, wall clock at all threads."""
    most = max(ours, key=lambda key: int(key.removeprefix("threads_")))
    found = {"cpu_one_thread": rounded(theirs["threads_1"]["cpu_s"] / ours["threads_1"]["cpu_s"])}
    if most == "threads_1":
        return found
    return {**found, "wall_all_threads": rounded(theirs[most]["wall_s"] / ours[most]["wall_s"])}


def plausible(result: Mapping[str, Any], sides: Sequence[str]) -> bool:
    """Whether no side beat the bound, which nothing can: else the clock or the machine was disturbed."""
    return all(result[side]["share_of_gemm_bound"] <= 1 for side in sides)


# memory


class PeakMemory:
    """The highest resident size of this process since ``start`` (Linux)."""

    def start(self) -> None:
        gc.collect()
        release_free_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts anew

    def read(self) -> int:
        """Bytes."""
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


# the document


def document(settings: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """The head of a benchmark's JSON: command, machine, date, versions, commit, load, settings."""
    facts = environment_facts()
    facts["versions"] |= {name: importlib.metadata.version(name) for name in packages}
    load = [rounded(value) for value in os.getloadavg()]
    return {
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]),
        "machine": {**facts, "memory_gib": rounded(psutil.virtual_memory().total / 2**30), "cpu": _cpu_name()},
        "load_average_at_start": load,
        "settings": dict(settings),
    }


def _cpu_name() -> str:
    """Model and the vector units that decide how fast products are."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in lines.items()}
    units = [u for u in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if u in found.get("flags", "").split()]
    return f"{found.get('model name', 'unknown')} ({', '.join(units) or 'no vector units known'})"


def write_case(path: Path, head: Mapping[str, Any], name: str, result: Mapping[str, Any], known: Sequence[str]) -> None:
    """Put a case with the ``document`` of its run into the JSON; other ``known`` cases there stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    run = {**head, "load_average_at_end": [rounded(value) for value in os.getloadavg()]}
    cases[name] = {"run": run, **result}
    whole = {"cases": {name: cases[name] for name in known if name in cases}}
    write_atomically(path, json.dumps(whole, indent=1, allow_nan=False) + "\n")
