"""Ctrl-C as a user has it: the command, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PATIENCE = 600.0
"""Seconds after which the command is taken to hang: a limit, not a measurement."""


def test_ctrl_c_ends_the_command_with_a_report_and_a_run_that_goes_on(
    toy_recipe: Path, tmp_path: Path, until: Callable[[Callable[[], bool]], None]
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "magicrl", "train", str(toy_recipe), "--output", str(run), "--resume"]
    command += ["--set", "stages.0.max_steps=2000", "--set", "checkpoint.every=2000", "--set", "evaluation.every=0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    metrics = run / "metrics.jsonl"
    until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0))
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to the whole group
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "finishing this step, then stopping" in said
    assert "report so far" in said
    assert "--resume continues a run" in said
    assert "Traceback" not in said
    steps = metrics.read_bytes().count(b"\n")
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert (run / "report.html").is_file()
