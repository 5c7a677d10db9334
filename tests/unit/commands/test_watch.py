"""``magicrl watch``: output of a terminal and of a pipe for a run that another process writes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from magicrl.commands.watch import WatchedRun, watch

STARTED = "2026-01-02T03:04:05+00:00"
PATIENCE = 600.0
"""Time limit in seconds for a watched text to appear. It is a limit, not a measurement."""


class Run:
    """A run folder that a test writes like a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "config.toml").write_text(
            "[[stages]]\nmax_tokens = 32\nmax_steps = 20\n[[stages]]\nmax_tokens = 64\nmax_steps = 30\n"
        )
        self.say("running")

    def say(self, status: str, **more: Any) -> None:
        document = {"schema_version": 1, "name": "demo", "status": status, "environments": [{"started": STARTED}]}
        partial = self.folder / ".run.json"
        partial.write_text(json.dumps(document | more))
        partial.replace(self.folder / "run.json")

    def row(self, step: int, stage: int = 0, accuracy: float | None = None) -> str:
        values = {
            "train/accuracy/mean": step / 100 if accuracy is None else accuracy,
            "time/step": 2.0,
            "stage/max_tokens": 32,
        }
        return json.dumps({"step": step, "stage": stage, "values": values}) + "\n"

    def step(self, *steps: int, stage: int = 0) -> None:
        self.append("metrics.jsonl", "".join(self.row(step, stage) for step in steps))

    def event(self, step: int, message: str) -> None:
        self.append(
            "events.jsonl", json.dumps({"time": STARTED, "kind": "note", "step": step, "message": message}) + "\n"
        )

    def append(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)

    def rewind(self, step: int) -> None:
        """Rewind like a resume: both records are replaced by their part up to the checkpoint."""
        for name in ("metrics.jsonl", "events.jsonl"):
            path = self.folder / name
            kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
            partial = path.with_name(f".{name}")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def shown_once(folder: Path, *, terminal: bool = False, width: int = 100) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    assert watch(folder, once=True, interval=1.0, console=console) == 0
    return out.getvalue()


def test_a_run_before_its_first_step_is_shown(run: Run) -> None:
    assert shown_once(run.folder) == "demo: running\n"
    assert "demo" in shown_once(run.folder, terminal=True)


@pytest.mark.parametrize(
    ("status", "more", "words"),
    [
        ("finished", {"ended": "2026-01-02T04:04:05+00:00"}, "demo: finished; magicrl report"),
        ("finished", {"learning": {"title": "no weight changed"}}, "demo: finished, no weight changed; magicrl report"),
        (
            "stopped",
            {"error": "KeyboardInterrupt: \x1b[31m"},
            "stopped (KeyboardInterrupt: ␛[31m); continue with --resume",
        ),
        ("failed", {"error": "FloatingPointError: loss"}, "failed (FloatingPointError: loss); continue with --resume"),
    ],
)
def test_a_run_that_ended_is_shown_without_waiting(run: Run, status: str, more: dict[str, Any], words: str) -> None:
    run.step(1, 2, 3)
    run.say(status, **more)
    out = io.StringIO()
    assert watch(run.folder, once=False, interval=1e9, console=Console(file=out, width=100)) == 0
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 3, stage 1, accuracy 3.0 %")
    assert words in lines[1]


def test_the_panel_knows_the_stages_and_how_long_the_run_took(run: Run) -> None:
    run.step(*range(1, 13))
    run.step(13, 14, stage=1)
    run.say("finished", ended="2026-01-02T04:06:05+00:00")
    text = shown_once(run.folder, terminal=True)
    assert "demo · stage 2 (T = 32) · step 14 of at most 42" in text
    assert "elapsed 1 h 2 min · 2.0 s per step · left at most 56 s" in text
    twice = [{"started": STARTED}, {"started": "2026-03-02T03:04:05+00:00"}]
    run.say("finished", environments=twice, ended="2026-03-02T03:07:05+00:00")
    assert "elapsed 3 min" in shown_once(run.folder, terminal=True), "of the process that continued the run"
    run.say("failed")  # without its end
    assert "elapsed" not in shown_once(run.folder, terminal=True)


def test_only_the_latest_events_are_told_again(run: Run) -> None:
    for i in range(9):
        run.event(0, f"event {i}")
    lines = shown_once(run.folder).splitlines()
    assert lines[0] == "(3 earlier events)"
    assert lines[1:7] == [f"[step 0] note: event {i}" for i in range(3, 9)]


def test_a_killed_writer_is_told_from_a_slow_one(run: Run) -> None:
    run.step(1)
    (run.folder / ".lock").write_text(str(os.getpid()))
    assert "killed?" not in shown_once(run.folder)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (run.folder / ".lock").write_text(str(gone.pid))
    assert f"its process {gone.pid} is not on this machine (killed? continue with --resume)" in shown_once(run.folder)


def test_a_resumed_run_is_read_again_and_its_events_are_told_once(run: Run) -> None:
    run.step(1, 2, 3)
    run.event(1, "kept")
    run.event(3, "lost")
    watched = WatchedRun(run.folder)
    assert [m.step for m in watched.news()[0]] == [1, 2, 3]
    run.rewind(2)
    run.event(2, "resumed")
    run.append("metrics.jsonl", run.row(3, accuracy=0.9))
    steps, events = watched.news()
    assert [m.step for m in steps] == [1, 2, 3]
    assert [event["message"] for event in events] == ["resumed"]
    assert "accuracy 90.0 %" in watched.panel.step_line()
    assert watched.panel.most_steps_left == 47


def test_half_a_line_waits_for_its_end(run: Run) -> None:
    run.step(1)
    run.append("metrics.jsonl", run.row(2)[:20])
    watched = WatchedRun(run.folder)
    assert [m.step for m in watched.news()[0]] == [1]
    run.append("metrics.jsonl", run.row(2)[20:])
    assert [m.step for m in watched.news()[0]] == [1, 2]
    assert watched.news() == ((), [])


@contextmanager
def watching(folder: Path, *, columns: int = 0, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start ``magicrl watch`` in a terminal of that width, or with a pipe for 0. Return the end to read from."""
    command = [sys.executable, "-m", "magicrl", "watch", str(folder), "--interval", "0.05"]
    given = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    given |= {"TERM": "xterm-256color", **environment}
    if columns:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    else:
        ours, theirs = os.pipe()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=given)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(descriptor: int, wanted: str, text: str = "") -> str:
    """Read until ``wanted`` appears, or to the end for an empty ``wanted``."""
    limit = time.monotonic() + PATIENCE
    while (not wanted or wanted not in text) and time.monotonic() < limit:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # a terminal whose other side has closed
            data = b""
        if not data:
            break
        text += data.decode("utf-8", "replace")
    assert wanted in text
    return text


def test_a_narrow_terminal_follows_a_growing_run_until_ctrl_c(run: Run) -> None:
    run.step(1, 2)
    with watching(run.folder, columns=60) as (process, screen):
        read_until(screen, "step 2 of at most 50")
        run.event(2, "something happened")
        run.step(3)
        text = read_until(screen, "step 3 of at most 50")
        text = read_until(screen, "╰", text)
        process.send_signal(signal.SIGINT)
        text += read_until(screen, "")
        assert process.wait(PATIENCE) == 0
    assert "[step 2] note: something happened" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "\x1b[?25h" in text, "the cursor is shown again"
    assert "Traceback" not in text
    assert "interrupted" not in text, "leaving a view interrupts no run"
    rows = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", row) for row in text.replace("\r", "\n").split("\n")]
    assert max(len(row) for row in rows if "│" in row or "╭" in row) <= 60
    assert json.loads((run.folder / "run.json").read_text())["status"] == "running"


def test_a_pipe_gets_plain_lines_until_the_run_ends(run: Run) -> None:
    run.step(1)
    with watching(run.folder) as (process, pipe):
        text = read_until(pipe, "step 1, stage 1")
        run.step(2)
        text = read_until(pipe, "step 2, stage 1", text)
        run.say("finished", ended=STARTED)
        text = read_until(pipe, "", text)
        assert process.wait(PATIENCE) == 0
    assert "\x1b" not in text
    assert "demo: finished" in text.splitlines()[-1]


def test_an_output_without_unicode_does_not_stop_it(run: Run) -> None:
    run.event(0, "τ → 1")
    run.say("finished", ended=STARTED)
    with watching(run.folder, PYTHONIOENCODING="ascii") as (process, pipe):
        text = read_until(pipe, "")
        assert process.wait(PATIENCE) == 0
    assert "note: ? ? 1" in text


def test_no_run_folder_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "magicrl", "watch", str(tmp_path / "none")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no such folder; give the run folder" in done.stderr
