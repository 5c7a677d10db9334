"""What the speed benchmarks share: clocks, interleaved repetitions, memory.

Machines are shared and wall clock lies under load, so every figure is CPU time of this process at one thread, with
the wall clock at all threads beside it, both sides in one process, in turns. The load average stands in the JSON.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import parser_of, rounded

from magicrl.training.learner import release_free_memory


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


def speed_parser(description: str | None, output: Path | None = None) -> argparse.ArgumentParser:
    """The options of a script that runs cases of two sides."""
    parser = parser_of(description, output)
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--case", action="append", help="measure only these cases; others stay in the file")
    parser.add_argument("--repetitions", type=int, default=2, help="measurements a side at one thread")
    parser.add_argument("--allocator", choices=("tcmalloc", "system"), default="tcmalloc", help="of all sides")
    parser.add_argument("--one-thread", action="store_true", help="leave out the measurements at all threads")
    return parser


def chosen(known: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    """The cases of these names, or all."""
    return [case for case in known if not names or case.name in names]


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
