"""Weights & Biases: online, or offline in ``<run>/wandb`` for a later ``wandb sync``.

Everything but the project comes from W&B's own settings: ``wandb login`` or WANDB_API_KEY, WANDB_MODE,
WANDB_ENTITY, WANDB_BASE_URL. The API key is W&B's alone; magicrl never reads it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import wandb
from wandb.errors import UsageError

from magicrl.reporting.trackers.base import NOTHING, TrackedRun

_EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 255}
_FINISH_SECONDS = 300.0
_SERVICE = "WANDB_SERVICE"


class WandbTracker:
    """One W&B run a run folder, also over resumes.

    Online, W&B keeps the steps that it has and the rest is added. Offline, W&B cannot append to an earlier
    process's file, so a resumed run writes the whole history into a new one with the same run id: the newest
    file is complete, and syncing it (or all of them in order) gives one run without gaps.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: TrackedRun) -> int:
        settings: dict[str, Any] = {"console": "off", "silent": True}
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = _FINISH_SECONDS  # a dead network must not hold up the report for ever
        with _service_of_this_process():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or run.project,
                id=run.identity,
                name=run.title,
                dir=str(run.recorded.path),
                config=run.facts,
                resume="allow",
                settings=wandb.Settings(**settings),
            )
        return int(self._run.step) - 1 if self._run.resumed else NOTHING

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def event(self, step: int, kind: str, message: str) -> None:
        self._run.log({f"events/{kind}": message}, step=step)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def close(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES[status])
            self._run = None


@contextmanager
def _service_of_this_process() -> Generator[None]:
    """Leave no address of W&B's service behind in the environment.

    W&B puts it there for its own child processes. A run that this process starts later would share the service, which
    outlives a kill of that run and then refuses to resume it ("run ID is in use").
    """
    given = os.environ.get(_SERVICE)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_SERVICE, None)


@_service_of_this_process()
def check_login() -> None:
    """Log in to W&B, unless it is offline; asks in a terminal.

    Raises:
        ValueError: no API key.
    """
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        known = wandb.login(verify=False)  # whether the key is right shows as the run opens
    except UsageError as error:
        known, reason = False, f" ({error})"
    else:
        reason = ""
    if not known:
        raise ValueError(
            f"logging.trackers names wandb, and W&B has no API key{reason}: run `wandb login` or set WANDB_API_KEY, "
            "or set WANDB_MODE=offline to keep the run on disk"
        )
