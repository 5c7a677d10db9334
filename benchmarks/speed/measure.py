"""Shared parts of the speed benchmarks: clocks, interleaved repetitions, memory, and the bound.

Machines are shared and load changes wall clock, so every figure is CPU time of this process in one thread, with wall
clock at all threads for comparison. Both sides run in one process, in turns. The JSON holds the load average.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shared import parser_of, rounded
from magicrl.training.learner import release_free_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one measurement: CPU time of all threads of this process, and wall clock."""

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
    """One entry in the order of measurements: everything once at ``threads`` threads."""

    threads: int
    warm_up: bool = False


def turns(repetitions: int, *, most_threads: int | None = None) -> list[Turn]:
    """Return the order: a warm-up, half of ``repetitions`` (at least one) at all threads, then all in one thread."""
    cores = min(len(os.sched_getaffinity(0)), most_threads or sys.maxsize)
    counts = [cores] * (max(1, repetitions // 2) if cores > 1 else 0) + [1] * repetitions
    return [Turn(threads=cores, warm_up=True), *(Turn(threads=count) for count in counts)]


def more_if_brief(order: Sequence[Turn], seconds: Callable[[], float]) -> Iterator[Turn]:
    """Yield the turns, and the last one 12 more times if it took less than a second: such runs vary by a fifth."""
    yield from order
    if seconds() < 1:
        yield from [order[-1]] * 12


def timed(action: Callable[[], Any], threads: int) -> tuple[Times, Any]:
    """Run ``action`` with ``threads`` torch threads; return its times and its result."""
    torch.set_num_threads(threads)
    gc.collect()
    clock = Clock()
    result = action()
    return clock.read(), result


def summary(measured: Sequence[tuple[Turn, Times]], work: Mapping[str, float]) -> dict[str, Any]:
    """Return medians and all values of the measurements by thread count, with rates of ``work`` per second.

    ``cpu_s`` counts in one thread and ``wall_s`` at all threads; every thread count has both.
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
    """Return how many times ours is faster: CPU time in one thread, wall clock at all threads."""
    most = max(ours, key=lambda key: int(key.removeprefix("threads_")))
    found = {"cpu_one_thread": rounded(theirs["threads_1"]["cpu_s"] / ours["threads_1"]["cpu_s"])}
    if most == "threads_1":
        return found
    return {**found, "wall_all_threads": rounded(theirs[most]["wall_s"] / ours[most]["wall_s"])}


def plausible(result: Mapping[str, Any], sides: Sequence[str]) -> bool:
    """Return whether no side was faster than the bound; else clock or machine were disturbed."""
    return all(result[side]["share_of_gemm_bound"] <= 1 for side in sides)


def speed_parser(description: str | None, output: Path | None = None) -> argparse.ArgumentParser:
    """Return the options of a script that runs cases of two sides."""
    parser = parser_of(description, output)
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--case", action="append", help="measure only these cases; the file keeps the others")
    parser.add_argument("--repetitions", type=int, default=2, help="measurements per side in one thread")
    parser.add_argument(
        "--allocator", choices=("tcmalloc", "system"), default="tcmalloc", help="allocator of all sides"
    )
    parser.add_argument("--one-thread", action="store_true", help="leave out the measurements at all threads")
    return parser


def chosen(known: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    """Return the cases of these names, or all."""
    return [case for case in known if not names or case.name in names]


class PeakMemory:
    """Peak resident size of this process since ``start`` (Linux)."""

    def start(self) -> None:
        gc.collect()
        release_free_memory()
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark

    def read(self) -> int:
        """Return the peak in bytes."""
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


class _Count(TorchDispatchMode):
    """Dispatch mode that adds up the storages of operator results while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.present = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    self.present += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.present)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.present -= size


def peak_of(action: Callable[[], object], device: str) -> int:
    """Return the peak bytes above what exists before ``action``, including its result."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = action()
        found = torch.cuda.max_memory_allocated() - before
    else:
        with _Count() as count:
            kept = action()
        found = count.peak
    del kept
    return found


TRAINING_ROWS = (256, 512, 1024)


class GemmBound:
    """The bound of the speed benchmarks: the time of a model's matrix products only, in one thread.

    Results go into existing memory: page faults of a fresh result of a few hundred MiB cost a quarter of a float32
    product, which a learner that works in chunks never pays. Each product runs with several numbers of rows, and the
    best counts. Its time is the least ever seen, as the bound runs between the measurements. Layers run in order with
    their own weights, so weights come from the same place as in a real pass.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        self._body = [m for m in model.get_decoder().modules() if isinstance(m, nn.Linear)]
        self._head = [head]
        self._dtype = head.weight.dtype
        self._least: dict[tuple[int, str, int], float] = {}
        self.body_elements = sum(m.weight.numel() for m in self._body)
        self.head_elements = int(head.weight.numel())

    def forward(self, body_rows: int, head_rows: int, repetitions: int = 3) -> float:
        """Return seconds of a forward pass: ``body_rows`` tokens in the layers, ``head_rows`` in the head."""
        for _ in range(repetitions):
            self._run(self._body, body_rows, backward=False)
            self._run(self._head, head_rows, backward=False)
        return self._sum(self._body, [body_rows], ("out",)) * body_rows + (
            self._sum(self._head, [head_rows], ("out",)) * head_rows
        )

    def training(self, tokens: int) -> tuple[float, float]:
        """Return seconds per token of a forward and backward pass (gradients of inputs and weights): layers, head.

        Args:
            tokens: Largest number of tokens in one product.
        """
        sizes = [rows for rows in TRAINING_ROWS if rows <= tokens] or [tokens]
        kinds = ("out", "input_gradient", "weight_gradient")
        for rows in sizes:
            self._run(self._body, rows, backward=True)
            self._run(self._head, rows, backward=True)
        return self._sum(self._body, sizes, kinds), self._sum(self._head, sizes, kinds)

    def flops(self, body_rows: int, head_rows: int, *, backward: bool) -> float:
        """Return multiplications and additions of the same."""
        return (6.0 if backward else 2.0) * (body_rows * self.body_elements + head_rows * self.head_elements)

    def _sum(self, layers: Sequence[nn.Linear], sizes: Sequence[int], kinds: Sequence[str]) -> float:
        """Return seconds per token, each product at its best number of rows."""
        return sum(min(self._least[id(m), kind, rows] / rows for rows in sizes) for m in layers for kind in kinds)

    @torch.inference_mode()
    def _run(self, layers: Sequence[nn.Linear], rows: int, *, backward: bool) -> None:
        torch.set_num_threads(1)
        widths = {width for layer in layers for width in layer.weight.shape}
        given = {width: torch.randn(rows, width, dtype=self._dtype) for width in widths}
        made = {width: torch.empty_like(tensor) for width, tensor in given.items()}
        gradients = {m.weight.shape: torch.empty_like(m.weight) for m in layers} if backward else {}
        for tensor in (*made.values(), *gradients.values()):
            tensor.zero_()  # allocates its pages before the clock starts
        for layer in layers:
            out_width, in_width = layer.weight.shape
            weight: Tensor = layer.weight
            products: dict[str, Callable[[], object]] = {
                "out": lambda w=weight, i=in_width, o=out_width: torch.mm(given[i], w.T, out=made[o])
            }
            if backward:
                products["input_gradient"] = lambda w=weight, i=in_width, o=out_width: torch.mm(
                    given[o], w, out=made[i]
                )
                products["weight_gradient"] = lambda w=weight, i=in_width, o=out_width: torch.mm(
                    given[o].T, given[i], out=gradients[w.shape]
                )
            for kind, product in products.items():
                start = time.process_time()
                product()
                key = (id(layer), kind, rows)
                self._least[key] = min(time.process_time() - start, self._least.get(key, float("inf")))
