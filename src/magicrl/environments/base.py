"""What an environment is: a task that answers back.

An episode is one response to one problem. The model writes a turn, which ends with its end token; the environment reads
the turn's text and answers with an observation, after which the model writes its next turn, until the environment says
that it is done or the limit T is reached. Observations are put behind the turn's own tokens, and nothing is tokenised
again; they are in the context and in nothing else: not in the loss, the entropy, the KL, T_k or T.

A reference of kind ``environment`` names a class (or function) that is called without arguments for every episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from magicrl.records import Problem


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
    A class may set ``tools`` (JSON schemas of functions, which the model's chat template shows it), ``time_limit``
    (seconds of CPU time of one call) and ``right_from`` (the least reward of a right answer, 1.0).
    """

    def reset(self, problem: Problem) -> None:
        """Begin the episode of ``problem``."""
        ...

    def step(self, text: str) -> Step:
        """Answer a turn of the model; ``text`` is what a model wrote, so hostile input."""
        ...
