"""The code verifier under load: many runs in one process, many items in the pool. Part of `code_verifier.py`."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from magicrl.records import Problem
from magicrl_verifiers.code.judge import CodeJudge
from magicrl_verifiers.code.pool import CodePool
from magicrl_verifiers.code.suite import parse_suite

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
_QUEUED = 4000


def tests_of(count: int) -> dict[str, list[str]]:
    """Tests that `PROGRAM` passes."""
    return {
        "inputs": [f"{i} {i + 1}\n" for i in range(count)],
        "outputs": [f"{2 * i + 1}\n" for i in range(count)],
    }


_SOAK = {
    "right": PROGRAM,
    "wrong": "print(0)",
    "raises": "raise ValueError(1)",
    "exits": "import sys\nsys.exit(3)",
    "writes a file": "open('/tmp/x', 'w').write('1' * 1000)\na, b = map(int, input().split())\nprint(a + b)",
    "forks": "import os\nos.fork()",
    "kills": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "asks the kernel": "import ctypes\nctypes.CDLL(None).unshare(0x10000000)",
    "does not parse": "print(",
    "threads": "import threading\n[threading.Thread(target=print, args=(1,)).start() for _ in range(5)]",
}


def measure_soak(runs: int, minutes: float) -> dict[str, Any]:
    """Runs one test each, programs of ten kinds in turn; memory, descriptors, processes and files at start and end.

    Ends after so many minutes with the runs that there were until then.
    """
    suite = parse_suite(tests_of(1))
    me = psutil.Process()

    def state() -> dict[str, Any]:
        below = me.children(recursive=True)
        return {
            "resident_mb": round(me.memory_info().rss / 2**20, 1),
            "resident_below_mb": round(sum(p.memory_info().rss for p in below) / 2**20, 1),
            "descriptors": me.num_fds(),
            "descriptors_below": sum(p.num_fds() for p in below),
            "processes_below": len(below),
            "files_made": len(list(Path(judge_folder).iterdir())),
        }

    statuses: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    names = list(_SOAK)
    judge_folder = tempfile.mkdtemp()
    with contextlib.chdir(judge_folder), CodeJudge() as judge:
        for index in range(200):
            judge.judge_program(_SOAK[names[index % len(names)]], suite)
        before, start = state(), time.perf_counter()
        done = 0
        for index in range(runs):
            if time.perf_counter() - start > 60 * minutes:
                break
            done += 1
            name = names[index % len(names)]
            statuses[name][judge.judge_program(_SOAK[name], suite).status] += 1
        after = state()
    left = len(me.children(recursive=True))
    return {
        "runs": done,
        "hours": round((time.perf_counter() - start) / 3600, 2),
        "before": before,
        "after": after,
        "processes_left_at_end": left,
        "statuses": {name: dict(counter) for name, counter in statuses.items()},
    }


def measure_scaling(rounds: int) -> dict[str, Any]:
    """Thousands of programs queued at once, judged by one worker and by two, in turn; items a second of wall clock.

    ``load`` is the machine's before a round: other jobs on the same cores take what a second worker would use.
    """
    problem = Problem(id="p", prompt="", golds=(json.dumps(tests_of(1)),), verifier="code", source="load")
    answers = [PROGRAM, "print(1)", "print(2)", PROGRAM]
    expected = [index % 4 != 2 for index in range(_QUEUED)]
    found: dict[int, list[float]] = {1: [], 2: []}
    loads: list[float] = []
    queued = 0.0
    for _ in range(rounds):
        for workers, rates in found.items():
            with CodePool(workers=workers) as pool:
                pool.warm_up()
                loads.append(round(os.getloadavg()[0], 1))
                start = time.perf_counter()
                tickets = [pool.submit(problem, answers, bare=True) for _ in range(_QUEUED // 4)]
                queued = time.perf_counter() - start
                verdicts = [verdict for ticket in tickets for verdict in pool.result(ticket)]
                rates.append(_QUEUED / (time.perf_counter() - start))
                assert [verdict.correct for verdict in verdicts] == expected
    middle = {workers: sorted(rates)[len(rates) // 2] for workers, rates in found.items()}
    return {
        "rounds": rounds,
        "queued_at_once": _QUEUED,
        "ms_to_queue_them": round(1000 * queued, 1),
        "items_per_second_1_worker": round(middle[1], 1),
        "items_per_second_2_workers": round(middle[2], 1),
        "two_workers_over_one": round(middle[2] / middle[1], 2),
        "best_two_over_best_one": round(max(found[2]) / max(found[1]), 2),
        "load": loads,
    }
