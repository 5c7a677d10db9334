"""An adapter of Prime Intellect's ``verifiers`` (v1, wheel 0.4): tasks of a taskset as problems, and their environment.

    [[data.train]]
    source = "verifiers"
    environment = "verifiers"
    options = { taskset = "reverse-text" }

The data of an episode is in ``Problem.extra["verifiers"]``. The environment runs in the worker that plays the episode
(`verifiers_play`), and starts its tool servers and sandboxes there, by its own configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from magicrl.environments.base import Step
from magicrl.environments.verifiers_play import Stage, StageEpisode, content, stage, vf
from magicrl.records import Message, Problem

START_SECONDS = 120.0
"""Longest time to an episode's first call, by the clock: it may start tool servers."""
STEP_SECONDS = 60.0
"""Longest time from a turn to the environment's answer, by the clock."""


def tasks(taskset: str, *, config: str = "{}", limit: int | None = None, **fields: Any) -> Iterator[Problem]:
    """Yield the tasks of a v1 taskset as problems. This is a source for recipes, with these options.

    Args:
        taskset: id of an installed taskset (``reverse-text``), or a ``.py`` file with one.
        config: JSON of the package's ``[env]`` block, for settings beyond fields of the taskset: an environment's
            ``id``, its seats, nested settings.
        limit: number of tasks to read; required for an endless taskset.
        **fields: settings of the taskset.

    Raises:
        ValueError: there is no such taskset, its settings are wrong, or a task cannot be a problem; says why.
    """
    name, folder = _located(taskset)
    settings = _settings(config)
    settings["taskset"] = {**settings.get("taskset", {}), **fields, "id": name}
    with _children_find(folder):
        try:
            acting = Stage(settings)
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(f"verifiers, taskset {taskset!r}: {error}") from error
        try:
            yield from _read(acting, taskset, limit, {"config": settings, "folder": folder})
        finally:
            acting.close()


def _read(acting: Stage, taskset: str, limit: int | None, row: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a taskset that is ready to play."""
    if limit is None and not acting.env.taskset.bounded:
        raise ValueError(f"taskset {taskset!r} is endless; say in options.limit how many tasks to read")
    tools: Sequence[Mapping[str, Any]] | None = None
    for task in islice(iter(acting.env.taskset), limit):
        try:
            opening = None if tools is None else _stated(acting, task)
            # the first task has the tools of all, since they belong to the kind of task
            if opening is None:
                opening, tools = _opened(acting, task)
            yield _problem(acting, task, opening, {**row, "tools": list(tools or ())})
        except (RuntimeError, TimeoutError, ValueError) as error:
            raise ValueError(f"taskset {taskset!r}, task {task.data.idx}: {error}") from error


class VerifiersEnvironment:
    """An environment for problems of `tasks`: the package's environment answers, and its rewards judge.

    An observation is the text of the environment's messages: results of tools, or the words of its user.
    """

    time_limit = 60.0
    right_from = 1.0

    def __init__(self) -> None:
        self._episode: StageEpisode | None = None

    @staticmethod
    def tools_of(problem: Problem) -> Sequence[Mapping[str, Any]]:
        """Return JSON schemas of the tools of the problem's task."""
        return problem.extra["verifiers"]["tools"]

    def reset(self, problem: Problem) -> None:
        """Begin the episode.

        Raises:
            ValueError: the problem is none of `tasks`.
            RuntimeError: the environment failed, or began otherwise than when its tasks were read.
            TimeoutError: it did not begin in time.
        """
        row: Any = problem.extra.get("verifiers")
        if row is None:
            raise ValueError(f'problem {problem.id!r} is no task of a taskset; read it with source = "verifiers"')
        _reachable(row["folder"])
        with _children_find(row["folder"]):
            acting = stage(json.dumps(row["config"], sort_keys=True))
            self._episode = episode = acting.play(acting.task(row["task"]))
            weakref.finalize(self, episode.cancel).atexit = False
            first = episode.next(START_SECONDS)
        if isinstance(first, Step) or _digest(first[0]) != row["opening"]:
            raise RuntimeError("the environment opens in another way than before: it is not deterministic")

    def step(self, text: str) -> Step:
        """Pass the turn to the environment; ``RuntimeError`` or ``TimeoutError`` if it fails or does not answer."""
        assert self._episode is not None, "reset comes first"
        self._episode.answer(text)
        said = self._episode.next(STEP_SECONDS)
        if isinstance(said, Step):
            return said
        return Step(observation="\n".join(content(message) for message in said[0]))


def _settings(config: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(config)
    except ValueError as error:
        raise ValueError(f"options.config is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"options.config must be a JSON object, got {config[:60]!r}")
    return {**found}


def _located(taskset: str) -> tuple[str, str]:
    """Return name and folder of a taskset; the folder of a file becomes importable, an installed one has none."""
    if not taskset.endswith(".py"):
        return taskset, ""
    path = Path(taskset).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"taskset {taskset!r}: there is no file {path}")
    _reachable(str(path.parent))
    return path.stem, str(path.parent)


def _reachable(folder: str) -> None:
    """Make modules of ``folder`` importable, after all installed ones."""
    if folder and folder not in sys.path:
        sys.path.append(folder)


@contextmanager
def _children_find(folder: str) -> Generator[None]:
    """Let tool servers that are started inside this context find modules of ``folder``."""
    before = os.environ.get("PYTHONPATH")
    if folder:
        os.environ["PYTHONPATH"] = os.pathsep.join([before, folder] if before else [folder])
    try:
        yield
    finally:
        # other processes must not find them: a module there may have the name of a standard one
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def _stated(acting: Stage, task: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the opening messages of the task; None if its environment decides."""
    if not isinstance(acting.env, vf.SingleAgentEnv) or not isinstance(task.data.prompt, str):
        return None
    system = task.data.system_prompt
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": task.data.prompt}]


def _opened(acting: Stage, task: Any) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Play an episode up to its first call, and return the opening messages and the tools."""
    episode = acting.play(task)
    try:
        first = episode.next(START_SECONDS)
    finally:
        episode.cancel()
    if isinstance(first, Step):
        raise ValueError("its environment ended without a call of the model")
    return first


def _problem(acting: Stage, task: Any, opening: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Problem:
    data = task.data.model_dump(mode="json")
    if acting.task(data).data != task.data:
        raise ValueError("its data cannot be stored as JSON (a field has no JSON form, or is left out)")
    *before, last = [Message(message["role"], content(message)) for message in opening]
    if last.role != "user":
        raise ValueError(
            f"its conversation opens with a message of role {last.role!r}; the last one must be the user's"
        )
    answer = getattr(task.data, "answer", None)
    name = acting.env.taskset.config.id
    return Problem(
        id=f"{name}-{task.data.idx}",
        prompt=last.content,
        context=tuple(before),
        references=(answer,) if isinstance(answer, str) else (),
        verifier="exact",
        source=name,
        environment="verifiers",
        extra={"verifiers": {**row, "task": data, "opening": _digest(opening)}},
    )


def _digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a checksum of roles and texts, 16 hex digits."""
    text = json.dumps([[message["role"], content(message)] for message in messages])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
