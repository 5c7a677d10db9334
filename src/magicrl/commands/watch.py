"""``magicrl watch``: a run that another process writes, followed through its folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from magicrl.records import StepMetrics
from magicrl.reporting.display import RunPanel, event_text, figure, start_panel
from magicrl.reporting.read_folders import lost_writer, read_lines, read_metrics, read_run
from magicrl.reporting.wording import print_prose, visible
from magicrl_verifiers.progress import duration

LATEST_EVENTS = 6  # events before the present that are shown


def watch(
    run: Path,
    /,
    *,
    once: bool = False,
    interval: float = 1.0,
    console: Annotated[Console | None, Parameter(parse=False)] = None,
) -> int:
    """Show a run of another process until it ends; Ctrl-C does not stop the run.

    Example: magicrl watch runs/quickstart

    Parameters
    ----------
    run
        The run folder.
    once
        Show the present state and return.
    interval
        Seconds between looks at the folder.
    """
    console = console or Console(emoji=False)
    seen = WatchedRun(run)
    events = seen.news()[1]
    earlier = len(events) - LATEST_EVENTS
    if earlier > 0:
        console.print(f"({earlier} earlier events)", style="dim")
    for event in events[-LATEST_EVENTS:]:
        print_prose(console, event_text(event))
    if once or seen.status != "running":
        if console.is_terminal:
            console.print(seen.panel)
        elif seen.panel.metrics is not None:
            print_prose(console, Text(seen.panel.step_line()))
        print_prose(console, Text(seen.state()))
        return 0
    live = start_panel(console, lambda: seen.panel)
    try:
        if live is None and seen.panel.metrics is not None:
            print_prose(console, Text(seen.panel.step_line()))
        while seen.status == "running":
            time.sleep(interval)
            steps, events = seen.news()
            for event in events:
                print_prose(console, event_text(event))
            if live is None and steps:
                print_prose(console, Text(seen.panel.step_line()))
    except KeyboardInterrupt:
        return 0  # the way out, not an interruption of the run
    finally:
        if live is not None:
            live.stop()
    print_prose(console, Text(seen.state()))
    return 0


class WatchedRun:
    """A run folder as it grows.

    Attributes:
        panel: Display, redrawn by ``news``.
        status: Status in ``run.json``: ``running``, ``finished``, ``stopped`` or ``failed``.
    """

    def __init__(self, folder: Path) -> None:
        recorded = read_run(folder)
        self._folder = folder
        self._name = recorded.name
        self._steps = [int(stage["max_steps"]) for stage in recorded.config.get("stages", [])]
        self._metrics = folder / "metrics.jsonl"
        self._run = recorded.run
        self._told: set[str] = set()
        self._read: object = None  # the file of metrics that was read last
        self.panel = self._new_panel()

    @property
    def status(self) -> str:
        return str(self._run.get("status", "unknown"))

    def news(self) -> tuple[Sequence[StepMetrics], list[dict[str, Any]]]:
        """Return all steps if any changed since the last call, and the events since then.

        Raises:
            RunFolderError: a corrupt line.
        """
        with contextlib.suppress(OSError, ValueError):  # a network file system may show nothing for a moment
            self._run = cast("dict[str, Any]", json.loads((self._folder / "run.json").read_text(encoding="utf-8")))
        found = self._metrics.stat() if self._metrics.exists() else None
        present = found and (found.st_ino, found.st_size, found.st_mtime_ns)
        steps: Sequence[StepMetrics] = ()
        if present != self._read:
            self._read, self.panel, steps = present, self._new_panel(), read_metrics(self._metrics)
            for metrics in steps:  # a resumed run has replaced some
                self.panel.step(metrics, figure(metrics, "time/step"))
        rows = [row for _, row in read_lines(self._folder / "events.jsonl")]
        events = [row for row in rows if json.dumps(row) not in self._told]
        self._told.update(json.dumps(row) for row in events)
        return steps, events

    def state(self) -> str:
        """Return ``quickstart: running, last step 12 s ago``, and what to do if the run stopped."""
        words = f"{visible(self._name)}: {self.status}"
        if self.status == "finished":
            learning: object = self._run.get("learning")
            if isinstance(learning, dict):
                words += f", {visible(str(cast('dict[str, Any]', learning).get('title', '')))}"
            return f"{words}; magicrl report {self._folder} writes its page"
        if self.status in ("stopped", "failed"):
            error = visible(str(self._run.get("error", ""))).strip()
            return f"{words}{f' ({error})' if error else ''}; continue with --resume"
        if self._metrics.exists():
            words += f", last step {duration(max(0.0, time.time() - self._metrics.stat().st_mtime))} ago"
        if (writer := lost_writer(self._folder)) is not None:
            words += f"; its process {writer} is not on this machine (killed? continue with --resume)"
        return words

    def _elapsed(self) -> float | None:
        """Return the seconds of the process that writes the run, or wrote it last."""
        environments: list[Mapping[str, Any]] = self._run.get("environments") or [{}]
        began = _moment(environments[-1].get("started"))
        ended = datetime.now(tz=UTC) if self.status == "running" else _moment(self._run.get("ended"))
        return None if began is None or ended is None else max(0.0, (ended - began).total_seconds())

    def _new_panel(self) -> RunPanel:
        steps = self._steps
        return RunPanel(title=self._name, max_steps=sum(steps) or None, stage_steps=steps, elapsed=self._elapsed)


def _moment(iso: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(iso))
    except ValueError:
        return None
