"""Worker processes for environments, which are killed at their limits, like those of isolated rewards.

An episode stays with its worker. The episodes of a lost worker are replayed from their turns in its successor. An
exception, a wrong result or a timeout of an environment makes the episode *not judged*, never a 0, since the response
is not to blame. `EnvironmentPool` is in the run's process, `EnvironmentHandler` in the worker.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from magicrl.config.schema import EnvironmentConfig
from magicrl.environments.base import Environment, EnvironmentSpec, Step, environment_spec
from magicrl.records import Problem, Verdict
from magicrl_verifiers.isolated import limit_cpu, limit_memory
from magicrl_verifiers.references import place_of
from magicrl_verifiers.rewards import MAX_REASON, Failures, number, own_code_plan, told
from magicrl_verifiers.workers import (
    ATTEMPTS,
    Closing,
    Exhausted,
    Lost,
    Refused,
    RequestHandler,
    Send,
    WorkerProcess,
    WorkerRefusal,
    WorkerSlot,
    WorkerStartError,
)

MAX_OBSERVATION = 1 << 16
"""Most characters of an observation. In JSON each may take twelve bytes, and a reply holds at most one MiB."""
HANGS, LATER_HANGS = 3, 12
"""Episodes in a row that end at the time limit before the run stops: at the start, and after others have ended. Each
takes as long as the limit, so that a step of an environment that always hangs would take hours."""
NOT_REPEATABLE = (
    "not repeatable: played again from its turns it answered otherwise; what an environment does may depend on the "
    "problem and the turns alone"
)
_PACKAGE = Path(__file__).parents[1]
_PROBLEM = TypeAdapter(Problem)
_STEP = TypeAdapter(Step)


@dataclass(kw_only=True, eq=False)
class Play:
    """A running episode: its problem, and its turns with their observations."""

    number: int
    problem: Problem
    place: WorkerPlace
    history: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    worker: WorkerProcess | None = None  # the process that holds the episode


class EnvironmentPool(Closing):
    """A pool that plays episodes. Each environment has its own worker processes, which start with its first turn.

    Args:
        config: limits and the number of workers.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._places: dict[str, list[WorkerPlace]] = {}
        self._numbers = itertools.count()
        self._closing = threading.Event()

    def begin(self, problem: Problem) -> Play:
        """Return a new episode of ``problem``. Its environment is made with the first turn.

        Raises:
            ValueError: the problem's environment cannot be found.
        """
        name, number = problem.environment, next(self._numbers)
        assert name is not None, f"problem {problem.id!r} has no environment"
        if name not in self._places:
            spec = environment_spec(name)
            self._places[name] = [WorkerPlace(spec, self._config, self._closing) for _ in range(self._config.workers)]
        places = self._places[name]
        return Play(number=number, problem=problem, place=places[number % len(places)])

    def steps(self, turns: Sequence[tuple[Play, str]]) -> list[Step | Verdict]:
        """Return the answers of the environments to these turns, in order.

        An answer is a verdict if the episode cannot continue. Workers run at the same time. An episode that is done, or
        has a verdict, is over.

        Raises:
            WorkerRefusal: an environment cannot be made on this machine; says why.
        """
        found: list[Future[Step | Verdict]] = [play.place.submit(play, text) for play, text in turns]
        return [future.result() for future in found]

    def end(self, play: Play) -> None:
        """Forget an episode that is not over."""
        play.place.forget(play)

    def fail(self, play: Play, reason: str) -> Verdict:
        """Return the verdict on an episode that cannot continue. The first failure of each kind is reported."""
        self.end(play)
        return play.place.failed(play, reason)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the running workers."""
        places = [place for some in self._places.values() for place in some]
        # Read once: a place's thread sets it to None when it loses its worker.
        return tuple(worker.pid for place in places if (worker := place.slot.worker) is not None)

    def close(self) -> None:
        """Kill the workers. Safe to call twice."""
        self._closing.set()
        for places in self._places.values():
            for place in places:
                place.close()
        self._places.clear()


class WorkerPlace:
    """One worker of an environment, and the thread that sends it one call after the other."""

    def __init__(self, spec: EnvironmentSpec, config: EnvironmentConfig, closing: threading.Event) -> None:
        self.spec = spec
        self._seconds = spec.time_limit or config.time_limit
        plan = own_code_plan(
            "magicrl.environments.pool:EnvironmentHandler", spec.reference, self._seconds, config.memory_limit_mb
        )
        self.slot = WorkerSlot(plan, closing)
        self._closing = closing
        self._thread = ThreadPoolExecutor(1, "environment-worker")
        self._items = itertools.count()
        self._failures = Failures("environment", spec.reference, "failed in an episode of")
        self._hung, self._most_hung = 0, HANGS

    def submit(self, play: Play, text: str) -> Future[Step | Verdict]:
        """Send a turn to the environment."""
        return self._thread.submit(self._answer, play, text)

    def forget(self, play: Play) -> None:
        """Let the worker forget the episode, now: it may hold a session of a server until then."""
        worker, play.worker = play.worker, None
        if play.history:  # an episode that ended before its first turn says nothing of the environment
            self._ended()
        if worker is not None and not self._closing.is_set():
            self._thread.submit(self._end, worker, play)

    def close(self) -> None:
        """Kill the worker and end the thread."""
        # the thread may be waiting in `ask`, where it then finds a lost worker
        if self.slot.worker is not None:
            self.slot.worker.interrupt()
        self._thread.shutdown(cancel_futures=True)
        self.slot.drop()

    def _answer(self, play: Play, text: str) -> Step | Verdict:
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                found = self._played(self.slot.ready(), play, text)
            except WorkerRefusal:
                raise  # not the fault of an episode, and the next worker would refuse as well
            except WorkerStartError as error:
                found = Lost(str(error))
            if isinstance(found, Step):
                if found.done:
                    play.worker = None
                    self._ended()
                play.history.append((text, found.observation))
                return found
            if isinstance(found, str):
                return self.failed(play, found)
            reason = found.reason
            if found.stalled:  # it waits for something, and would wait again
                return self.failed(play, f"timeout: {reason}")
        return self.failed(play, reason)

    def _played(self, worker: WorkerProcess, play: Play, text: str) -> Step | str | Lost:
        """Return the answer to a turn, after replaying earlier turns that the worker does not know."""
        if play.worker is not worker:
            begun = self._ask(worker, play, problem=told(play.problem))
            if not isinstance(begun, Step):
                return begun
            for turn, observation in play.history:
                again = self._ask(worker, play, text=turn)
                if not isinstance(again, Step):
                    return again
                if again.done or again.observation != observation:
                    self._end(worker, play)
                    return NOT_REPEATABLE
            play.worker = worker
        return self._ask(worker, play, text=text)

    def _end(self, worker: WorkerProcess, play: Play) -> None:
        worker.ask({"item": next(self._items), "over": play.number})

    def _ask(self, worker: WorkerProcess, play: Play, **what: Any) -> Step | str | Lost:
        """Call the environment and return its answer, the reason of a failure, or that the worker was lost."""
        outcome = worker.ask({"item": next(self._items), "episode": play.number, **what})
        if isinstance(outcome, Exhausted):
            return (
                f"timeout: a call used up {self._seconds:g} s of CPU time"
                if outcome.kind == "timeout"
                else "crash: a call ended its worker"
            )
        if isinstance(outcome, Lost):
            return outcome
        if "failed" in outcome:
            return str(outcome["failed"])
        try:
            return _STEP.validate_python(outcome.get("step"))
        except ValueError:
            return Lost("the worker sent a malformed step")

    def failed(self, play: Play, reason: str) -> Verdict:
        """Return the verdict on an episode that cannot continue. The first failure of each kind is reported.

        Raises:
            RuntimeError: It hangs in every episode.
        """
        play.worker = None
        if reason.startswith("timeout:"):
            self._hung += 1
        else:
            self._ended()
        if self._hung >= self._most_hung:
            setting = "time_limit of its class" if self.spec.time_limit else "environment.time_limit"
            raise RuntimeError(
                f"environment {self.spec.reference!r}: {self._hung} episodes in a row reached the limit of a call, the "
                f"last one of problem {play.problem.id!r} ({reason.removeprefix('timeout: ')}). Correct the "
                f"environment, or raise {setting} from {self._seconds:g} CPU seconds"
            )
        return self._failures.verdict(play.problem, reason)

    def _ended(self) -> None:
        """Count an episode that ended before the time limit."""
        self._hung, self._most_hung = 0, LATER_HANGS


class EnvironmentHandler(RequestHandler):
    """The running episodes inside a worker."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        sys.path += [place for place in hello["path"] if place not in sys.path]
        try:
            self._spec = environment_spec(hello["reference"])
        except ValueError as error:
            raise Refused(str(error)) from error
        self._cpu_limit: float = hello["cpu_limit"]
        self._episodes: dict[int, Environment] = {}
        limit_memory(hello["memory_limit_mb"])

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        limit_cpu(self._cpu_limit)
        if "over" in request:
            self._episodes.pop(request["over"], None)
            return {"retire": False}
        name: int = request["episode"]
        try:
            if "problem" in request:
                self._episodes[name] = self._spec.make()
                self._episodes[name].reset(_PROBLEM.validate_python(request["problem"]))
                step = Step()
            else:
                step = checked(self._episodes[name].step(request["text"]))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code: whatever it raises, the episode is not judged
            self._episodes.pop(name, None)
            full, place = isinstance(error, MemoryError), place_of(error, _PACKAGE)
            return {"failed": f"{type(error).__name__}: {error}"[: MAX_REASON - len(place)] + place, "retire": full}
        if step.done:
            del self._episodes[name]
        return {"step": dataclasses.asdict(step), "retire": False}


def checked(step: Any) -> Step:
    """Check the return value of an environment, and convert its numbers to floats.

    Raises:
        TypeError, ValueError: it is no step, or one of its fields is unusable.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must return a magicrl.environments.base.Step, got {type(step).__name__}")
    kinds = {"observation": ("str", str), "done": ("bool", bool | np.bool_), "metrics": ("Mapping", Mapping)}
    for field_name, (wanted, kind) in kinds.items():
        value = getattr(step, field_name)
        if not isinstance(value, kind):
            raise TypeError(f"{field_name} of a step must be {wanted}, got {type(value).__name__}")
    if len(step.observation) > MAX_OBSERVATION:
        raise ValueError(f"an observation of {len(step.observation)} characters; give at most {MAX_OBSERVATION}")
    if half := re.search("[\ud800-\udfff]", step.observation):  # as in file names that are not UTF-8
        raise ValueError(f"an observation that holds half a character ({half.group()!r}), which no tokenizer reads")
    if step.reward is not None and not step.done:
        raise ValueError("a reward goes with the last step, where done is True")
    reward = None if step.reward is None else number("reward", step.reward)
    metrics = {str(name): number(f"metric {name}", value) for name, value in step.metrics.items()}
    return dataclasses.replace(step, done=bool(step.done), reward=reward, metrics=metrics)
