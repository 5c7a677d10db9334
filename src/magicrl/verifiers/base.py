"""What a verifier is, the words its verdicts use, and how a problem names one.

A verifier states a fact about one answer; rewards are made elsewhere, so that training and evaluation
share one judge. Blame is decided by the status alone: whatever an answer exhausts by itself (CPU seconds,
memory, depth) is wrong, because hanging the judge must not pay; only what is not the answer's doing (a
lost worker, a gold that cannot be read) is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from magicrl.records import Completion, Outcome, Problem, Verdict
from magicrl.registry import resolve

if TYPE_CHECKING:
    from magicrl.config.verifier_schema import JudgeConfig
    from magicrl.verifiers.pool import WorkerProtocol
    from magicrl.verifiers.served_judge import ServedJudge

Reasoning = Literal["auto", "required", "none"]
Extract = Literal["lenient", "box"]
Progress = Callable[[str], None]
"""Called by an isolated verifier with the phase it enters (``gold``, ``answer``), so that blame can be laid."""

_STATUSES = {
    Outcome.CORRECT: "matched passed score_reached",
    Outcome.WRONG: """
        mismatch no_answer unparsable undecided timeout memory crash
        wrong_answer runtime_error time_limit memory_limit output_limit syntax_error no_code security
        score_below
    """,
    Outcome.NOT_JUDGED: "gold_unparsable worker_lost infrastructure_error reward_failed environment_failed",
}
OUTCOME_OF_STATUS = MappingProxyType(
    {status: outcome for outcome, statuses in _STATUSES.items() for status in statuses.split()}
)
"""Every status of the built-in verifiers, and of rewards that return a number, with its outcome."""

NO_ANSWER = frozenset({"no_answer", "no_code"})
"""Statuses of responses that hold nothing to judge."""

MAX_EXTRACTED = 1000
"""Characters of the extracted answer that a verdict keeps."""


def make_verdict(
    status: str, *, reason: str = "", decided_by: str = "", extracted: str | None = None, seconds: float = 0.0
) -> Verdict:
    """The verdict of this status, its outcome taken from `OUTCOME_OF_STATUS`."""
    if extracted is not None and len(extracted) > MAX_EXTRACTED:
        extracted = extracted[:MAX_EXTRACTED] + "..."
    return Verdict(
        outcome=OUTCOME_OF_STATUS[status],
        status=status,
        reason=reason,
        decided_by=decided_by,
        extracted=extracted,
        seconds=seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeOptions:
    """How the answer is found in a response.

    Attributes:
        reasoning: ``auto``: a ``<think>`` that is never closed means no answer, no tag at all means that
            the whole text is the answer; ``required``: no ``</think>``, no answer; ``none``: tags mean nothing.
        extract: ``box``: only a ``\\boxed{}`` counts; ``lenient``: an answer without a box counts too.
    """

    reasoning: Reasoning = "auto"
    extract: Extract = "lenient"

    def __post_init__(self) -> None:
        if self.reasoning not in ("auto", "required", "none"):
            raise ValueError(f"reasoning must be auto, required or none, got {self.reasoning!r}")
        if self.extract not in ("lenient", "box"):
            raise ValueError(f"extract must be lenient or box, got {self.extract!r}")


class Verifier(Protocol):
    """Judges whether a response gives any of the golds. Pure: depends on the two and the options alone."""

    def judge(self, golds: Sequence[str], response: str) -> Verdict: ...


class IsolatedVerifier(Verifier, Protocol):
    """A verifier that reads hostile text with heavy machinery and therefore lives in a killable process."""

    def distrust(self, golds: Sequence[str]) -> None:
        """Never parse these golds again: doing so exhausted a worker. Plain string equality still counts."""


class VerifierService(Protocol):
    """What the training loop sees: submit while the engine generates, collect afterwards.

    ``submit`` queues one problem's responses and returns a ticket at once; ``result`` waits for its verdicts, in the
    order of the responses; ``ready`` says whether it would return at once. ``close`` may be called twice.
    """

    def submit(self, problem: Problem, responses: Sequence[str]) -> Any: ...

    def result(self, ticket: Any) -> tuple[Verdict, ...]: ...

    def ready(self, ticket: Any) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Submitted:
    """Completions on their way to verdicts: those that environments gave, and the judge's ticket of the others."""

    own: tuple[Verdict | None, ...]
    ticket: Any


def submit_completions(judge: VerifierService, problem: Problem, completions: Sequence[Completion]) -> Submitted:
    """Have completions judged by their text, episodes by their last turn where their environments did not judge."""
    own = tuple(None if c.episode is None else c.episode.verdict for c in completions)
    left = [c for c, given in zip(completions, own, strict=True) if given is None]
    texts = [c.text if c.episode is None else c.episode.answer for c in left]
    return Submitted(own, judge.submit(problem, texts) if texts else None)


def verdicts_of(judge: VerifierService, submitted: Submitted) -> tuple[Verdict, ...]:
    """A verdict a completion, in their order; waits for those that the judge has to give."""
    judged = iter(() if submitted.ticket is None else judge.result(submitted.ticket))
    return tuple(next(judged) if given is None else given for given in submitted.own)


Judge = Callable[[Problem, Sequence[str]], "Sequence[Verdict] | Future[list[Verdict]]"]
"""Judges responses to a problem in the calling process, at once or in a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierSpec:
    """A verifier that a problem may name: judged in the calling process, in worker processes or by a server.

    Attributes:
        name: what ``Problem.verifier`` says.
        in_process: makes a judge for the calling process, or None.
        protocol: how it is judged in worker processes, from (options, seconds, MiB), or None.
        served: makes what asks a server, or None. Exactly one of the three is given.
        isolated: makes the verifier inside a worker, for those of `isolated.IsolatedProtocol`.
        warm_up: a (gold, response) pair judged once when such a worker starts, so that no item pays for loading.
        needs_gold: whether it can judge nothing without a gold answer.
    """

    name: str
    in_process: Callable[[JudgeOptions], Judge] | None = None
    protocol: Callable[[JudgeOptions, float, int], WorkerProtocol] | None = None
    served: Callable[[JudgeConfig, JudgeOptions], ServedJudge] | None = None
    isolated: Callable[[JudgeOptions, Progress], IsolatedVerifier] | None = None
    warm_up: tuple[str, str] = ("1", "\\boxed{1}")
    needs_gold: bool = True

    def __post_init__(self) -> None:
        assert [self.in_process, self.protocol, self.served].count(None) == 2, self.name

    def check_golds(self, problem: Problem) -> None:
        """Raise ValueError for a problem without the gold answer that this verifier needs."""
        if self.needs_gold and not problem.golds:
            raise ValueError(f"problem {problem.id!r} has no gold answer (a code problem: no tests); give it one")


def _exact(options: JudgeOptions) -> Judge:
    from magicrl.verifiers.exact import ExactVerifier

    verifier = ExactVerifier(options)
    return lambda problem, responses: [verifier.judge(problem.golds, response) for response in responses]


def _maths(options: JudgeOptions, progress: Progress) -> IsolatedVerifier:
    # imported in the worker only: the calling process never loads sympy
    from magicrl.verifiers.maths.maths_verifier import MathsVerifier

    return MathsVerifier(options, progress)


def _maths_protocol(options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> WorkerProtocol:
    from magicrl.verifiers.isolated import IsolatedProtocol

    return IsolatedProtocol("maths", options, time_limit, memory_limit_mb)


def _code(options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> WorkerProtocol:
    from magicrl.verifiers.code.judge import CodeOptions
    from magicrl.verifiers.code.pool import CodeProtocol
    from magicrl.verifiers.code.sandbox import Limits

    return CodeProtocol(CodeOptions(limits=Limits(cpu_seconds=time_limit, memory_mb=memory_limit_mb), judge=options))


def _judge(config: JudgeConfig, options: JudgeOptions) -> ServedJudge:
    from magicrl.verifiers.served_judge import ServedJudge

    return ServedJudge(config, options)


EXACT = VerifierSpec(name="exact", in_process=_exact)
MATHS = VerifierSpec(
    name="maths",
    protocol=_maths_protocol,
    isolated=_maths,
    # a pair that only Math-Verify can judge: no item pays for loading it
    warm_up=(r"\int_0^1 2x \, dx", r"\boxed{\int_0^1 2y \, dy}"),
)
CODE = VerifierSpec(name="code", protocol=_code)
JUDGE = VerifierSpec(name="judge", served=_judge, needs_gold=False)


def verifier_spec(name: str) -> VerifierSpec:
    """The verifier of this name: a built-in one, or a reward of the user's as `magicrl.registry` finds it.

    Raises:
        ValueError: unknown name (says the nearest known one), or what it names is no reward.
    """
    found = resolve("reward", name)
    if isinstance(found, VerifierSpec):
        return found
    from magicrl.verifiers.rewards import function_spec

    return function_spec(name, found)
