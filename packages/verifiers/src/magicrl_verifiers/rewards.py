"""Custom rewards: any function ``(problem, response) -> score``, TRL's signature, or a list of functions.

A score is a number, a `Verdict`, or a mapping that holds ``score`` and further numbers to log; `reward` sets how the
function is called. An exception or a timeout means *not judged*, never a 0: the response is not to blame.

A function that asks to be isolated is judged in killable worker processes: `RewardProtocol` is the pool's end,
`RewardHandler` what runs in the worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
from pydantic import TypeAdapter

from magicrl_verifiers.isolated import limit_cpu, limit_memory
from magicrl_verifiers.records import JudgeOptions, Outcome, Problem, Verdict, check_seconds, make_verdict
from magicrl_verifiers.references import place_of, resolve_reference
from magicrl_verifiers.workers import Exhausted, Item, Refused, RequestHandler, Send, WorkerPlan, WorkerProtocol

_log = logging.getLogger(__name__)

_ASYNC_SECONDS = 60.0
SILENT_SECONDS = 30.0
"""Seconds after which a reward that has not returned is announced."""
_STALL_FACTOR = 10.0
_MIN_STALL_SECONDS = 10.0
MAX_REASON = 300

_PROBLEM = TypeAdapter(Problem)
_GIVEN = ("prompts", "completions")
_REFERENCE_NAMES = ("answer", "answers", "solution", "solutions", "ground_truth", "reference", "target", "label")
"""Parameters that receive the reference answer if the data has no column of that name."""

_turn = threading.RLock()
"""Turn to call a function in this process. Two at once would share stdout, the working folder and global variables."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class reward:
    """Says how a reward function is called. Each setting may also be set as an attribute of the function.

    Attributes:
        batched: it takes lists, ``(problems, responses)``, and returns a list of as many scores. A score may not depend
            on what else is in the lists: how responses are put together is not promised.
        isolated: call it in worker processes (as many as ``verifier.workers``), which are killed at its limits.
        time_limit: seconds of CPU time of one isolated call (default ``verifier.time_limit``; by the clock ten times as
            long), or seconds to wait for an ``async`` one (default 60). Other functions are not interrupted.
        memory_limit_mb: MiB that an isolated call may allocate; default ``verifier.memory_limit_mb``.
        right_from: the least score of a right answer. Accuracy, pass@k and the filters of easy and hard problems count
            right answers; advantages and rejection use the scores themselves.
        concurrency: calls of an ``async`` function that are awaited at once.

    Example:
        >>> @reward(isolated=True, time_limit=5.0, right_from=0.9)
        ... def score(problem: Problem, response: str) -> float:
        ...     return 1 / (1 + abs(len(response.split()) - 50))
    """

    batched: bool = False
    isolated: bool = False
    time_limit: float | None = None
    memory_limit_mb: int | None = None
    right_from: float = 1.0
    concurrency: int = 64

    def __post_init__(self) -> None:
        if self.time_limit is not None:
            check_seconds("time_limit of a reward", self.time_limit)
        if self.concurrency < 1:
            raise ValueError(f"concurrency of a reward must be at least 1, got {self.concurrency}")

    def __call__(self, function: Function) -> Function:
        for name, value in dataclasses.asdict(self).items():
            setattr(function, name, value)
        return function


class RewardFunction:
    """A user's function with its settings: calls it and makes verdicts of what it returns.

    Args:
        reference: how it was named; it appears in messages.
        function: what the reference names.

    Raises:
        ValueError: it is no function, or its settings are wrong.
    """

    def __init__(self, reference: str, function: Any) -> None:
        function = adapted(function)
        if not callable(function):
            raise ValueError(f"reward {reference!r} is no function but {type(function).__name__}")
        own: dict[str, Any] = {
            field.name: getattr(function, field.name, field.default) for field in dataclasses.fields(reward)
        }
        self.reference = reference
        self.settings = reward(**own)
        self._function: Callable[..., Any] = function
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._failures = Failures("reward", reference, "gave no score to a response to")

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Verdict]:
        """Return the verdicts of these responses, computed in this process."""
        if self.is_async:
            return asyncio.run(self.awaited(problem, responses, asyncio.Semaphore(self.settings.concurrency)))
        found: list[Verdict] = []
        with _turn, self._announced_if_silent(problem):
            for count, given in self._calls(problem, responses):
                start = time.perf_counter()
                try:
                    returned = self._function(*given)
                except KeyboardInterrupt:
                    raise
                # A user's code may raise anything: a panic in Rust and a cancelled task are not of Exception.
                except BaseException as error:  # noqa: BLE001
                    returned = error
                found += self._verdicts(problem, count, returned, time.perf_counter() - start)
        return found

    @contextmanager
    def _announced_if_silent(self, problem: Problem) -> Generator[None]:
        """Log what the run waits for if the calls take long; otherwise nothing would show that a function hangs."""
        text = "waiting for reward %s for more than %g s (problem %s); Ctrl-C stops the run"
        timer = threading.Timer(SILENT_SECONDS, _log.warning, (text, self.reference, SILENT_SECONDS, problem.id))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    async def awaited(self, problem: Problem, responses: Sequence[str], turns: asyncio.Semaphore) -> list[Verdict]:
        """Return the verdicts of an ``async`` function; ``turns`` limits the number of calls at a time."""
        limit = self.settings.time_limit or _ASYNC_SECONDS

        async def call(count: int, given: tuple[Any, Any]) -> list[Verdict]:
            async with turns:
                start = time.perf_counter()
                returned = await self._within(limit, given)
                return self._verdicts(problem, count, returned, time.perf_counter() - start)

        parts = await asyncio.gather(*(call(*one) for one in self._calls(problem, responses)))
        return [verdict for part in parts for verdict in part]

    async def _within(self, limit: float, given: tuple[Any, Any]) -> Any:
        """Await the user's function for at most ``limit`` seconds. What it raises is returned: raised in a task,
        SystemExit and KeyboardInterrupt would end the event loop, and nothing could be judged any more."""
        returned: Any = None
        try:
            async with asyncio.timeout(limit):
                try:
                    returned = await self._function(*given)
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise  # the limit, or the end of the pool
                    returned = error
                except BaseException as error:  # noqa: BLE001 - as in `judge`
                    _reraise_interrupt(error)
                    returned = error
        except TimeoutError:
            return TimeoutError(f"no score within {limit:g} s")
        return returned

    def check(self, problem: Problem) -> None:
        """Raise ValueError if the function requires what this problem does not have."""
        check = getattr(self._function, "check", None)
        if check is not None:
            check(problem)

    def _calls(self, problem: Problem, responses: Sequence[str]) -> list[tuple[int, tuple[Any, Any]]]:
        """Return the calls that judge these responses: the number of responses and the arguments of each."""
        if self.settings.batched:
            return [(len(responses), ([problem] * len(responses), [*responses]))]
        return [(1, (problem, response)) for response in responses]

    def _verdicts(self, problem: Problem, count: int, returned: Any, seconds: float) -> list[Verdict]:
        scores: list[Any] = [returned] * count
        if self.settings.batched and not isinstance(returned, BaseException):
            try:
                scores = batch_scores(returned, count)
            except BaseException as error:  # noqa: BLE001 - iterating over a user's object may raise as well
                _reraise_interrupt(error)
                scores = [error] * count
        return [self._judged(problem, score, seconds / max(1, count)) for score in scores]

    def _judged(self, problem: Problem, score: Any, seconds: float) -> Verdict:
        """Return the verdict for one score, or for the exception that is in its place."""
        try:
            if not isinstance(score, BaseException):
                return self._verdict(score, seconds)
        except BaseException as error:  # noqa: BLE001 - as in `judge`
            _reraise_interrupt(error)
            score = error
        place = place_of(score)
        reason = f"{type(score).__name__}: {score}"[: MAX_REASON - len(place)] + place
        return self.failed(problem, reason, seconds)

    def _verdict(self, returned: Any, seconds: float) -> Verdict:
        """Return the verdict for one returned score; raise TypeError or ValueError if it is no score."""
        if isinstance(returned, Verdict):
            # Texts count as wrong where an `Outcome` is compared, and a NaN would reach the advantages.
            if returned.outcome not in [*Outcome]:
                raise ValueError(f"outcome must be {', '.join(Outcome)}, got {returned.outcome!r:.60}")
            return dataclasses.replace(
                returned,
                outcome=Outcome(returned.outcome),
                score=None if returned.score is None else number("score", returned.score),
                metrics={str(name): number(f"metric {name}", value) for name, value in returned.metrics.items()},
                seconds=returned.seconds or seconds,
            )
        metrics: dict[str, float] = {}
        if isinstance(returned, Mapping):
            values = dict(cast("Mapping[str, Any]", returned))
            if "score" not in values:
                raise TypeError(f"a mapping needs a 'score', got {', '.join(map(str, values)) or 'nothing'}")
            score = number("score", values.pop("score"))
            metrics = {str(name): number(f"metric {name}", value) for name, value in values.items()}
        else:
            score = number("score", returned)
        right = score >= self.settings.right_from
        verdict = make_verdict("score_reached" if right else "score_below", decided_by="reward", seconds=seconds)
        return dataclasses.replace(verdict, score=score, metrics=metrics)

    def failed(self, problem: Problem, reason: str, seconds: float = 0.0) -> Verdict:
        """Return the verdict where there is no score, and log the first failure of its kind."""
        return self._failures.verdict(problem, reason, seconds)


def _reraise_interrupt(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


class Failures:
    """Failures of custom code: not judged, the first of each kind is logged, further ones are only counted.

    Args:
        kind: ``reward`` or ``environment``; the verdict's status is ``KIND_failed``.
        reference: Reference by which the code was named.
        doing: Words of the message between the name and the problem.
    """

    def __init__(self, kind: str, reference: str, doing: str) -> None:
        self._kind, self._reference, self._doing = kind, reference, doing
        self._warned: set[str] = set()

    def verdict(self, problem: Problem, reason: str, seconds: float = 0.0) -> Verdict:
        """Return the verdict of one failure; ``reason`` begins with the kind of error and a colon."""
        # It may quote a response, whose control characters must not reach a terminal.
        reason = "".join(one if one.isprintable() else " " for one in reason)
        error = reason.partition(":")[0]
        # one warning a kind of error: code that always fails would write one for every response
        if error not in self._warned:
            self._warned.add(error)
            text = "%s %s %s problem %s: %s (not judged; further ones are only counted)"
            _log.warning(text, self._kind, self._reference, self._doing, problem.id, reason)
        status = f"{self._kind}_failed"
        return make_verdict(status, reason=reason[:MAX_REASON], decided_by=self._kind, seconds=seconds)


_LARGEST = 1e30
"""Advantages are differences of rewards in float32."""


def number(name: str, value: Any) -> float:
    """Return ``value`` as a finite float; raise TypeError or ValueError, with its ``name``, if it is none."""
    # float("0.5") would work, and hide that the function returns text
    if isinstance(value, str) or value is None or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r:.60}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    if abs(number) > _LARGEST:
        raise ValueError(f"{name} must be within {_LARGEST:g} of 0, got {number}; scale it")
    return number


# --- TRL's signature, and lists of functions ----------------------------------------------------------------------


def adapted(function: Any) -> Any:
    """Return a function ``(problem, response) -> score`` for what a user gave.

    Args:
        function: such a function, which is returned as it is; one with TRL's signature; or a list of either, whose
            scores are added.

    Raises:
        ValueError: a function that takes neither a problem and a response nor completions, or an empty list.
    """
    if isinstance(function, list | tuple):
        return SummedRewards(cast("Sequence[Any]", function))
    if not callable(function):
        return function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return function
    if "completions" in signature.parameters:
        return TrlReward(function, signature)
    try:
        signature.bind(None, "")
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"reward {name}{signature} cannot be called with (problem, response): {error}. Write "
            f"def {name}(problem, response), or TRL's def {name}(completions, **kwargs)"
        ) from None
    return function


class TrlReward:
    """A reward function with TRL's signature, called for all responses to one problem.

    It receives ``prompts`` and ``completions`` as texts; if it fails on texts, as messages
    (``[{"role": "assistant", "content": ...}]``), as TRL gives them for conversational data. Further parameters are
    columns of the data, repeated for every response.

    Args:
        function: the user's function.
        signature: its parameters.
    """

    batched = True

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        parameters = signature.parameters.values()
        self._named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._messages: bool | None = None
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            raise ValueError(
                f"reward {self.__name__}: an async function with TRL's signature is not supported; "
                "write async def NAME(problem, response)"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # the settings of `reward` are attributes of the function

    def check(self, problem: Problem) -> None:
        """Raise ValueError if the function requires a column that this problem's record does not have."""
        columns = self._columns(problem)
        known = {*_GIVEN, "completion_ids", "trainer_state", *columns}
        missing = [one.name for one in self._named if one.default is one.empty and one.name not in known]
        if missing:
            has = ", ".join(problem.extra) or "no columns but prompt and answer"
            raise ValueError(
                f"reward {self.__name__} requires the column {missing[0]!r}, and the data has {has}: rename the "
                "parameter or the column"
            )

    def __call__(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Any]:
        if self._messages is None:
            try:
                found = self._call(problems[0], responses, messages=False)
                self._messages = False
                return found
            except Exception as on_texts:  # noqa: BLE001 - code for messages may fail on texts in any way
                try:
                    found = self._call(problems[0], responses, messages=True)
                except Exception:  # noqa: BLE001 - the error on texts is the one to report
                    raise on_texts from None
                self._messages = True
                return found
        return self._call(problems[0], responses, messages=self._messages)

    def _call(self, problem: Problem, responses: Sequence[str], *, messages: bool) -> list[Any]:
        prompt: Any = problem.prompt
        completions: list[Any] = list(responses)
        if messages:
            prompt = [{"role": message.role, "content": message.content} for message in problem.messages]
            completions = [[{"role": "assistant", "content": text}] for text in responses]
        given: dict[str, Any] = {"prompts": [prompt] * len(completions), "completions": completions}
        given |= {name: [value] * len(completions) for name, value in self._columns(problem).items()}
        if not self._all:
            given = {one.name: given[one.name] for one in self._named if one.name in given}
        if any(one.name == "trainer_state" and one.default is one.empty for one in self._named):
            given["trainer_state"] = None
        return batch_scores(self.__wrapped__(**given), len(completions))

    def _columns(self, problem: Problem) -> dict[str, Any]:
        """Return the columns of the record, and the reference answer under the names that the function takes."""
        columns = dict(problem.extra)
        if problem.references:
            wanted = {one.name for one in self._named}
            aliases = [name for name in _REFERENCE_NAMES if name not in columns and (self._all or name in wanted)]
            columns |= dict.fromkeys(aliases, problem.references[0])
        return columns


def batch_scores(returned: Any, count: int) -> list[Any]:
    """Return what a batched reward returned as a list.

    Raises:
        TypeError: It does not hold one score for each response.
    """
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise TypeError(f"a batched reward must return a list of {count} scores, got {returned!r:.60}")
    scores = list(cast("Iterable[Any]", returned))
    if len(scores) != count:
        raise TypeError(f"a batched reward must return {count} scores, got {len(scores)}")
    return scores


class SummedRewards:
    """Several reward functions as one: the sum of their scores, with each score as a metric.

    A function that returns None for a response has no opinion on it, as in TRL, and is left out of the sum. A response
    for which one raises has an exception in the place of its score.

    Args:
        functions: functions of either signature.
    """

    batched = True

    def __init__(self, functions: Sequence[Any]) -> None:
        if not functions:
            raise ValueError("an empty list of rewards: give at least one function")
        self._parts = [adapted(one) for one in functions]
        names = [getattr(one, "__name__", type(one).__name__) for one in self._parts]
        for place, one in enumerate(self._parts):
            if not callable(one):
                raise ValueError(f"reward {place} of the list is no function but {type(one).__name__}")
            if inspect.iscoroutinefunction(one):
                raise ValueError(f"reward {names[place]}: a list of rewards takes no async functions")
            own = [
                field.name
                for field in dataclasses.fields(reward)
                if field.name not in ("batched", "concurrency")
                and getattr(one, field.name, field.default) != field.default
            ]
            if own:
                raise ValueError(
                    f"reward {names[place]}: {', '.join(own)} would have no effect in a list. Leave them out, or "
                    f"name the functions as 'FILE.py:{names[0]} + FILE.py:...', whose weighted mean is the reward"
                )
        # "score" is the key of the sum
        once = [name for name in names if names.count(name) == 1 and name != "score"]
        self._names = [name if name in once else f"{name}_{place}" for place, name in enumerate(names)]
        self.__name__ = "+".join(self._names)

    def check(self, problem: Problem) -> None:
        """Raise ValueError if one of the functions requires a column that the problem's record does not have."""
        for part in self._parts:
            if hasattr(part, "check"):
                part.check(problem)

    def __call__(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Any]:
        columns = [self._scores(part, problems, responses) for part in self._parts]
        found: list[Any] = []
        for row in zip(*columns, strict=True):
            failed = next((one for one in row if isinstance(one, BaseException)), None)
            if failed is not None:
                found.append(failed)
                continue
            known = {name: score for name, score in zip(self._names, row, strict=True) if score is not None}
            total = math.fsum(known.values()) if known else None
            found.append(None if total is None else {**known, "score": total})
        return found

    def _scores(self, part: Any, problems: Sequence[Problem], responses: Sequence[str]) -> list[Any]:
        batched = getattr(part, "batched", False)
        given = batch_scores(part(problems, responses), len(responses)) if batched else responses
        found: list[Any] = []
        for problem, one in zip(problems, given, strict=True):
            try:
                score = one if batched else part(problem, one)
                score = score["score"] if isinstance(score, Mapping) else score
                found.append(None if score is None else number("score", score))
            except BaseException as error:  # noqa: BLE001 - as in `RewardFunction.judge`
                _reraise_interrupt(error)
                found.append(error)
        return found


# --- where it is called ---------------------------------------------------------------------------------------------


def in_a_file(function: Any) -> str:
    """Return why another process cannot call this function, and what to do."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        place = inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:
        place = ""
    # a notebook's cells have a place that is no file, a lambda has no name in its file
    named = f"{place}:{name}" if name.isidentifier() and Path(place).is_file() else "my_reward.py:NAME"
    return f"which have no object of this one; put it into a file and give its name, {named!r}, in its place"


def judge_here(made: RewardFunction) -> Callable[[Problem, Sequence[str]], Sequence[Verdict] | Future[list[Verdict]]]:
    if not made.is_async:
        return made.judge
    # one for all problems: the limit holds over all groups, not for each
    turns = asyncio.Semaphore(made.settings.concurrency)
    return lambda problem, responses: asyncio.run_coroutine_threadsafe(
        made.awaited(problem, responses, turns), event_loop()
    )


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of async rewards, in a separate thread, so that the caller continues to generate."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async-rewards", daemon=True).start()
    return loop


def _after_fork() -> None:
    global _turn
    _turn = threading.RLock()  # another thread of the parent may have held it
    event_loop.cache_clear()  # the loop is there without its thread


os.register_at_fork(after_in_child=_after_fork)


def own_code_plan(handler: str, reference: str, seconds: float, memory_limit_mb: int) -> WorkerPlan:
    """Return how to start a worker of custom code, which resolves ``reference`` itself."""
    return WorkerPlan(
        handler=handler,
        hello={
            "reference": reference,
            "path": sys.path,  # the worker finds what this process finds
            "cpu_limit": seconds,
            "memory_limit_mb": memory_limit_mb,
        },
        cpu_limit=seconds,
        stall_limit=max(_MIN_STALL_SECONDS, _STALL_FACTOR * seconds),
    )


def told(problem: Problem) -> Any:
    """Return a problem as JSON for a worker; values of ``extra`` that JSON cannot hold become text."""
    return json.loads(json.dumps(dataclasses.asdict(problem), default=str))


class RewardProtocol(WorkerProtocol):
    """Responses judged by a reward function in worker processes.

    Args:
        made: The reward function. Workers get its reference and resolve it themselves.
        time_limit: CPU seconds of one call, unless the function sets a limit.
        memory_limit_mb: Memory of one call in MiB, unless the function sets a limit.
    """

    own_words = True

    def __init__(self, made: RewardFunction, options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> None:
        self._made = made
        self._seconds = made.settings.time_limit or time_limit
        self.plan = own_code_plan(
            "magicrl_verifiers.rewards:RewardHandler",
            made.reference,
            self._seconds,
            made.settings.memory_limit_mb or memory_limit_mb,
        )

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        request: dict[str, Any] = {"response": item.text}
        if not repeat:
            request["problem"] = told(item.problem)
        return request

    def read(self, item: Item, message: Mapping[str, Any], seconds: float) -> Verdict:
        verdict = super().read(item, message, seconds)
        if verdict.status == "reward_failed":  # logged here, since nobody reads the log of the worker
            return self._made.failed(item.problem, verdict.reason, seconds)
        return verdict

    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> Verdict:
        limit = f"it used up {self._seconds:g} s of CPU time" if outcome.kind == "timeout" else "it crashed its worker"
        return self._made.failed(item.problem, limit, seconds)

    def final(self, item: Item, verdict: Verdict) -> bool:
        # a reward that raised would raise again; only a lost worker is worth a second try
        return verdict.status != "worker_lost"

    def give_up(self, item: Item, verdict: Verdict) -> None:
        self._made.failed(item.problem, verdict.reason)


class RewardHandler(RequestHandler):
    """Reward function in a worker process, and the problem of the last request."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        sys.path += [place for place in hello["path"] if place not in sys.path]
        try:
            self._made = RewardFunction(hello["reference"], resolve_reference("reward", hello["reference"]))
        except ValueError as error:
            raise Refused(str(error)) from error
        self._cpu_limit: float = hello["cpu_limit"]
        self._problem: Problem | None = None
        self._most_resident = psutil.Process().memory_info().rss + hello["memory_limit_mb"] * 2**19
        limit_memory(hello["memory_limit_mb"])

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if "problem" in request:
            self._problem = _PROBLEM.validate_python(request["problem"])
        assert self._problem is not None, "the first request about a problem holds it"
        limit_cpu(self._cpu_limit)
        (verdict,) = self._made.judge(self._problem, [request["response"]])
        grown = psutil.Process().memory_info().rss > self._most_resident
        return {"verdict": dataclasses.asdict(verdict), "retire": grown or verdict.reason.startswith("MemoryError")}
