"""Reward functions with TRL's signature, and several reward functions as one.

``GRPOTrainer(reward_funcs=...)`` calls ``function(prompts=..., completions=..., COLUMN=...)`` with lists and takes a
list of floats. `adapted` wraps such a function, so that it is used here as it is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from magicrl_verifiers.records import Problem

_GIVEN = ("prompts", "completions")
_REFERENCE_NAMES = ("answer", "answers", "solution", "solutions", "ground_truth", "reference", "target", "label")
"""Parameters that receive the reference answer if the data has no column of that name."""


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
        """Return the columns of the problem's record, and the reference answer under the names that are asked for."""
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

    A function that returns None for a response has no opinion on it, as in TRL, and is left out of the sum.

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
        self._names = [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]
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
            known = {name: score for name, score in zip(self._names, row, strict=True) if score is not None}
            total = math.fsum(known.values()) if known else None
            found.append(None if total is None else {**known, "score": total})
        return found

    def _scores(self, part: Any, problems: Sequence[Problem], responses: Sequence[str]) -> list[float | None]:
        if getattr(part, "batched", False):
            returned = batch_scores(part(problems, responses), len(responses))
        else:
            returned = [part(problem, response) for problem, response in zip(problems, responses, strict=True)]
        scores = [one["score"] if isinstance(one, Mapping) else one for one in returned]
        return [None if score is None else float(score) for score in scores]
