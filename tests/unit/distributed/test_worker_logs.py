"""Output of a worker: a file keeps all of it, the error names the file, and secrets are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.distributed.engine_pool import EnginePool
from magicrl.distributed.learner.launchers import Fault, LearnerLost, collect_values
from magicrl.distributed.replica import Replica

SECRET = "a-secret-of-16-letters"
WORKER = """
import os, subprocess, sys
from magicrl.distributed.worker_logs import keep_output
keep_output(sys.argv[1])
print("a line of Python's,", os.environ["SOME_TOKEN"], flush=True)
subprocess.run([sys.executable, "-c", "import sys; print('of a child', file=sys.stderr)"])
os.write(2, b"last words, \\xff")
os.kill(os.getpid(), 9)
"""


def _told(file: Path, enough: Callable[[str], bool]) -> str:
    end = time.monotonic() + 60
    while True:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if enough(text) or time.monotonic() > end:
            return text
        time.sleep(0.05)


def test_a_killed_workers_last_words_are_kept_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "run" / "workers" / "learner-0.log"
    for _ in range(2):  # a successor appends to it
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(file)],
            env={**os.environ, "SOME_TOKEN": SECRET},
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == -9
        assert (done.stdout, done.stderr) == (b"", b"")
        text = _told(file, lambda text: text.endswith("last words, \ufffd"))
        assert "a line of Python's, ***SOME_TOKEN***\nof a child\nlast words" in text
        assert SECRET not in text
        file.write_text(text + "\n", encoding="utf-8")
    assert text.count("--- process ") == 2


def test_a_worker_without_its_folder_goes_on(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("no folder")
    program = (
        "import sys; from magicrl.distributed.worker_logs import keep_output; keep_output(sys.argv[1]); print('on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "workers" / "x.log")], capture_output=True, check=True
    )
    assert done.stdout == b"on\n"


@pytest.mark.slow
def test_what_a_replica_says_on_rays_nodes_is_kept(three_nodes: Any, tmp_path: Path) -> None:
    def make() -> Any:
        sys.stdout.write("as an engine's loader tells\n")
        raise ValueError("no such model")

    file = tmp_path / "replica-0.log"
    with pytest.raises(ValueError, match=rf"no such model \(its output: {file}\)"):
        EnginePool(
            lambda _: ray.remote(Replica).options(num_cpus=0).remote(make, 1, (), str(file)),
            1,
            timeouts=ClusterTimeouts(start=120.0),
            file=lambda _: str(file),
        )
    assert "as an engine's loader tells\n" in _told(file, lambda text: "loader" in text)


@pytest.mark.parametrize("answers", [{1: Fault(died=True, text="died")}, {1: Fault(died=False, text="E: no")}, {}])
def test_the_error_names_the_file(answers: dict[int, Fault]) -> None:
    with pytest.raises(LearnerLost, match=r"rank 1 .*\(its output: run/workers/learner-1\.log\)"):
        collect_values(
            {0: 1, **answers},
            2,
            waiting_for="x",
            seconds=1.0,
            files=["run/workers/learner-0.log", "run/workers/learner-1.log"],
        )
