"""The protocol of environments: multi-turn tasks.

An episode is one response to one problem. The model writes a turn, which ends with its end token. The environment reads
the text of the turn and answers with an observation, after which the model writes its next turn. The episode ends when
the environment is done or the limit T is reached. Observations are appended to the tokens of the turn, and nothing is
tokenised again. They are context only: they do not count in the loss, the entropy, the KL, T_k or T.

A reference of kind ``environment`` names a class (or function) that is called without arguments for every episode.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, cast

from magicrl.records import Problem, Verdict
from magicrl.registry import resolve
from magicrl_verifiers.records import check_seconds, make_verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The answer of an environment to a turn.

    Attributes:
        observation: text that the model reads next; empty at the end of an episode.
        reward: the episode's reward, on its last step only; None: the problem's verifier judges the last turn.
        done: whether the episode has ended.
        metrics: further numbers of the episode, on its last step only; averaged over a training step.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """One episode of a multi-turn task. Each response gets its own object.

    Its answers may depend only on the problem and the turns. An episode that was lost with its worker, or was running
    at a checkpoint, is replayed from its turns, and all responses of a group must get the same task.

    A class may set ``tools`` (JSON schemas of functions, which the model's chat template shows; a static method
    ``tools_of(problem)`` returns them where they depend on the problem), ``time_limit`` (seconds of CPU time per call)
    and ``right_from`` (the lowest reward of a right answer, 1.0).
    """

    def reset(self, problem: Problem) -> None:
        """Begin the episode of ``problem``."""
        ...

    def step(self, text: str) -> Step:
        """Answer a turn of the model. ``text`` is untrusted input."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """An environment by its reference, with the attributes of its class (see `Environment`)."""

    reference: str
    make: Callable[[], Environment]
    tools: tuple[Mapping[str, Any], ...] = ()
    time_limit: float | None = None
    right_from: float = 1.0

    def verdict(self, last: Step) -> Verdict | None:
        """Return the verdict of an episode's last step; None if the problem's verifier judges."""
        if last.reward is None:
            return None
        status = "score_reached" if last.reward >= self.right_from else "score_below"
        return replace(make_verdict(status, decided_by="environment"), score=last.reward)


def environment_spec(reference: str) -> EnvironmentSpec:
    """Return the environment of this reference. Its module is imported.

    Raises:
        ValueError: the name is unknown (the message has the nearest known one), or it is no environment.
    """
    found: Any = resolve("environment", reference)
    name = f"environment {reference!r}"
    if not callable(found):
        raise ValueError(f"{name} is no class or function but {type(found).__name__}")
    lacking = [method for method in ("reset", "step") if not hasattr(found, method)]
    if isinstance(found, type) and lacking:
        raise ValueError(f"{name} has no {' and no '.join(lacking)}; see magicrl.environments.base.Environment")
    awaited = [method for method in ("reset", "step") if inspect.iscoroutinefunction(getattr(found, method, None))]
    if awaited:
        raise ValueError(f"{name}: {' and '.join(awaited)} must not be async; use asyncio.run inside")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ValueError(f"{name} is called without arguments for every episode: {error}") from None
    tools, limit = tuple(getattr(found, "tools", None) or ()), getattr(found, "time_limit", None)
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{name}: tools must be a list of JSON schemas (dicts), got {tools!r:.100}")
    right_from = getattr(found, "right_from", 1.0)
    for field_name, value in (("time_limit", 0 if limit is None else limit), ("right_from", right_from)):
        # No reward is at least NaN: every answer would be wrong.
        if not isinstance(value, Real) or math.isnan(value):
            raise ValueError(f"{name}: {field_name} must be a number, got {value!r}")
    if limit is not None:
        check_seconds(f"{name}: time_limit", limit)
    make = cast("Callable[[], Environment]", found)
    return EnvironmentSpec(reference=reference, make=make, tools=tools, time_limit=limit, right_from=float(right_from))
