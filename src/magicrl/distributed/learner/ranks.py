"""How the driver speaks to ranks, wherever they run: start them, call all of them, tell what became of a lost one."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from magicrl.config.errors import RecipeError


class LearnerLost(RuntimeError):
    """A rank died, failed or did not answer: the learner's processes are of no more use.

    ``DistributedLearner.rebuild`` starts new ones and brings them to where the lost ones were.

    Attributes:
        rank: which one; None if none can be named.
        cause: what became of it.
        mistake: the error as a user's mistake, where the rank said that it is one.
    """

    def __init__(self, rank: int | None, cause: str, waiting_for: str, mistake: ValueError | None = None) -> None:
        who = "the learner's ranks" if rank is None else f"learner rank {rank}"
        super().__init__(f"{who} {cause}, while the run waited for: {waiting_for}")
        self.rank = rank
        self.cause = cause
        self.mistake = mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Why a rank has no answer.

    Attributes:
        died: its process is gone; otherwise it raised.
        kind: the exception's type, or ``""``.
        text: what happened.
        key: the recipe's key, where it is a recipe's mistake.
    """

    died: bool
    kind: str
    text: str
    key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A rank's answer to a call: a value, or why there is none."""

    value: Any = None
    fault: Fault | None = None


class RankGroup(Protocol):
    """Running ranks."""

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float, waiting_for: str) -> list[Any]:
        """Call ``LearnerRank.<method>`` on every rank with its own arguments; what each gave, in order.

        Raises:
            LearnerLost: a rank died, failed, or did not answer in time.
            ValueError: every rank raised it; the ranks may go on.
        """
        ...

    def stop(self) -> None:
        """End all ranks, whatever they are doing."""
        ...


class Launcher(Protocol):
    """Starts ranks where the caller wants them."""

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """Start ``ranks`` processes, each with a ``LearnerRank``.

        Raises:
            LearnerLost: one could not be placed or started in ``timeout`` seconds.
        """
        ...


def answered(target: object, method: str, arguments: tuple[Any, ...]) -> Answer:
    """Call a method in a rank's process; an exception becomes a ``Fault``."""
    try:
        return Answer(value=getattr(target, method)(*arguments))
    except Exception as error:  # noqa: BLE001 - the border of a worker: whatever it is, the driver must be told
        told = f"{type(error).__name__}: {error}"
        if not isinstance(error, ValueError):
            told += "\n" + "".join(traceback.format_exception(error)).rstrip()
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        text = str(error) if isinstance(error, ValueError) else told
        return Answer(fault=Fault(died=False, kind=kind, text=text, key=getattr(error, "key", None)))


def settled(answers: Sequence[Answer | None], *, waiting_for: str, seconds: float) -> list[Any]:
    """The values of a call's answers, or the error that tells most.

    Args:
        answers: one a rank; None where there was none in time.
        waiting_for: what the call was for.
        seconds: how long was waited.

    Raises:
        LearnerLost: some rank has no value. Named is one that died, before one that raised an error of its own,
            before one whose error may be no more than the loss of another.
        ValueError: all ranks raised it.
    """
    faults = {rank: answer.fault for rank, answer in enumerate(answers) if answer is not None and answer.fault}
    mistakes = [fault for fault in faults.values() if fault.kind == "ValueError"]
    if mistakes and len(mistakes) == len(answers):
        raise _mistake(mistakes[0])
    if faults:
        rank = min(faults, key=lambda r: (not faults[r].died, faults[r].kind != "ValueError", _secondary(faults[r]), r))
        fault = faults[rank]
        cause = fault.text if fault.died else f"failed: {fault.text}"
        raise LearnerLost(rank, cause, waiting_for, _mistake(fault) if fault.kind == "ValueError" else None)
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    if silent:
        raise LearnerLost(silent[0], f"gave no answer in {seconds:g} s", waiting_for)
    return [answer.value for answer in answers if answer is not None]


def _mistake(fault: Fault) -> ValueError:
    return ValueError(fault.text) if fault.key is None else RecipeError(fault.text, key=fault.key)


def _secondary(fault: Fault) -> bool:
    """Whether an error looks like the loss of another rank, as gloo and NCCL tell it."""
    return any(word in fault.text for word in ("gloo", "NCCL", "Connection", "closed by peer", "Broken pipe"))
