"""What an environment is: a task that answers back.

An episode is one response to one problem. The model writes a turn, which ends with its end token; the environment reads
the turn's text and answers with an observation, after which the model writes its next turn, until the environment says
that it is done or the limit T is reached. Observations are put behind the turn's own tokens, and nothing is tokenised
again; they are in the context and in nothing else: not in the loss, the entropy, the KL, T_k or T.

A reference of kind ``environment`` names a class (or function) that is called without arguments for every episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from magicrl.records import Problem, Verdict
from magicrl.registry import resolve
from magicrl_verifiers.records import make_verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What an environment says to a turn.

    Attributes:
        observation: what the model reads next; empty at the end of an episode.
        reward: the episode's reward, given with its last step; None: the problem's verifier judges the last turn.
        done: the episode has ended.
        metrics: further numbers of the episode, given with its last step, averaged over a training step.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """One episode of a task that answers back; made anew for every response.

    What it does may depend on the problem and on the turns alone: an episode that was lost with its worker, or was
    under way at a checkpoint, is played again from its turns, and the responses of a group must meet the same task.
    A class may set ``tools`` (JSON schemas of functions, which the model's chat template shows it; where they depend on
    the problem, a static method ``tools_of(problem)`` gives them), ``time_limit`` (seconds of CPU time of one call) and
    ``right_from`` (the least reward of a right answer, 1.0).
    """

    def reset(self, problem: Problem) -> None:
        """Begin the episode of ``problem``."""
        ...

    def step(self, text: str) -> Step:
        """Answer a turn of the model; ``text`` is what a model wrote, so hostile input."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """What a reference of kind ``environment`` names, with what the class says of itself (see `Environment`)."""

    reference: str
    make: Callable[[], Environment]
    tools: tuple[Mapping[str, Any], ...] = ()
    time_limit: float | None = None
    right_from: float = 1.0

    def verdict(self, last: Step) -> Verdict | None:
        """What an episode's last step found; None where it leaves that to the problem's verifier."""
        if last.reward is None:
            return None
        status = "score_reached" if last.reward >= self.right_from else "score_below"
        return replace(make_verdict(status, decided_by="environment"), score=last.reward)


def environment_spec(reference: str) -> EnvironmentSpec:
    """The environment of this name; its module is imported.

    Raises:
        ValueError: unknown name (says the nearest known one), or what it names is no environment.
    """
    found: Any = resolve("environment", reference)
    name = f"environment {reference!r}"
    if not callable(found):
        raise ValueError(f"{name} is no class or function but {type(found).__name__}")
    lacking = [method for method in ("reset", "step") if not hasattr(found, method)]
    if isinstance(found, type) and lacking:
        raise ValueError(f"{name} has no {' and no '.join(lacking)}; write what magicrl.environments.base shows")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ValueError(f"{name} is called without arguments for every episode: {error}") from None
    tools, limit = tuple(getattr(found, "tools", ())), getattr(found, "time_limit", None)
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{name}: tools must be a list of JSON schemas (dicts), got {tools!r:.100}")
    if limit is not None and not limit > 0:
        raise ValueError(f"{name}: time_limit must be positive seconds, got {limit}")
    right_from = float(getattr(found, "right_from", 1.0))
    make = cast("Callable[[], Environment]", found)
    return EnvironmentSpec(reference=reference, make=make, tools=tools, time_limit=limit, right_from=right_from)
