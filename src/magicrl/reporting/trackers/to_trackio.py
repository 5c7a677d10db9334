"""trackio: a local database (TRACKIO_DIR, default ``~/.cache/huggingface/trackio``), shown by ``trackio show``.

Nothing leaves the machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says so.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator, Mapping
from typing import Any

import trackio

from magicrl.reporting.trackers.base import TrackedRun


class TrackioTracker:
    """One trackio run a run folder; a resumed run adds the steps that are not there yet."""

    name = "trackio"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: TrackedRun) -> int:
        with _silence():
            self._run = trackio.init(
                project=run.project,
                name=f"{run.title} {run.identity}",  # trackio resumes by name
                config=run.facts,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # the only thing that tells it for a local database, a Space and a server alike
        return int(self._run._next_step) - 1

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def event(self, step: int, kind: str, message: str) -> None:
        self._run.log({f"events/{kind}": message}, step=step)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        if self._run is not None:
            with _silence():
                trackio.finish()  # not the run's own: trackio would finish that again at exit, aloud
            self._run = None


@contextlib.contextmanager
def _silence() -> Generator[None]:
    """trackio prints where it logs to; the display of the run owns the terminal."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
