"""What judges see and what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VoteStatus = Literal["valid", "unreadable", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedProblem:
    """A problem to be judged.

    Attributes:
        id: unique among the problems of one folder.
        text: the statement, as a model would get it.
    """

    id: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """One answer of one judge.

    Attributes:
        problem: id of the problem.
        judge: name of the judge.
        index: of the vote, from 0.
        status: ``valid``: a verdict was read; ``unreadable``: the judge answered something else, every time it was
            asked; ``failed``: the server refused this problem for good.
        keep: the verdict; None unless valid.
        reasons: what the judge wrote before it, or the error.
        criteria: its verdict on each criterion, by name, as far as it gave them.
        prompt_tokens, completion_tokens: as the server counted them; 0 where it did not.
    """

    problem: str
    judge: str
    index: int
    status: VoteStatus
    keep: bool | None
    reasons: str
    criteria: dict[str, bool]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """All votes on one problem.

    Attributes:
        problem: its id.
        votes: of every judge, in the order of judges and indices.
        valid: how many were readable.
        keeps: how many of these say that the problem is well posed.
        keep: whether that is at least the threshold; what the settings say where too few votes are valid.
    """

    problem: str
    votes: tuple[Vote, ...]
    valid: int
    keeps: int
    keep: bool

    @property
    def decided(self) -> bool:
        """Whether at least half of the votes are valid."""
        return 2 * self.valid >= len(self.votes)
