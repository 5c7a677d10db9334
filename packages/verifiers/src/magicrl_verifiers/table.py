"""Verifiers by name: the built-in ones, and any reward function that a reference names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from magicrl_verifiers.records import Judge, JudgeOptions, Problem, require_references
from magicrl_verifiers.references import LIVE, resolve_reference
from magicrl_verifiers.several import reward_terms

if TYPE_CHECKING:
    from magicrl_verifiers.judge_settings import JudgeSettings
    from magicrl_verifiers.served_judge import ServedJudge
    from magicrl_verifiers.workers import WorkerProtocol


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierSpec:
    """A verifier that a problem may name: judged in the calling process, in worker processes or by a server.

    Attributes:
        name: what ``Problem.verifier`` says.
        parts: the verifiers of several rewards, in order; empty for one.
        in_process: makes a judge for the calling process, or None.
        protocol: how it is judged in worker processes, from (options, seconds, MiB), or None.
        served: makes what asks a server, or None. Exactly one of the three is given, or ``parts``.
        needs_reference: whether it can judge nothing without a reference answer.
        check_problem: raises ValueError for a problem that a reward function cannot be called for.
        reads_extract: whether a verdict depends on ``extract``; a reward function gets the whole response.
        tries: copies of a response to judge outside of training: one response hides a list of a wrong length.
    """

    name: str
    in_process: Callable[[JudgeOptions], Judge] | None = None
    protocol: Callable[[JudgeOptions, float, int], WorkerProtocol] | None = None
    served: Callable[[JudgeSettings, JudgeOptions], ServedJudge] | None = None
    needs_reference: bool = True
    check_problem: Callable[[Problem], None] | None = None
    reads_extract: bool = True
    tries: int = 1
    parts: tuple[VerifierSpec, ...] = ()

    def __post_init__(self) -> None:
        given = [self.in_process, self.protocol, self.served, self.parts or None]
        assert given.count(None) == 3, self.name

    def check_references(self, problem: Problem) -> None:
        """Raise ValueError for a problem without the reference answer that this verifier needs."""
        if self.needs_reference:
            require_references(problem)
        if self.check_problem is not None:
            self.check_problem(problem)
        for part in self.parts:
            part.check_references(problem)


def _exact(options: JudgeOptions) -> Judge:
    from magicrl_verifiers.extraction import ExactVerifier

    verifier = ExactVerifier(options)
    return lambda problem, responses: [verifier.judge(problem.references, response) for response in responses]


def _maths(options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> WorkerProtocol:
    from magicrl_verifiers.maths.protocol import MathsProtocol

    # The module is imported in the workers only: the calling process never loads sympy. The pair to warm up with
    # is one that only Math-Verify can judge, so that no item pays for loading it.
    return MathsProtocol(
        "magicrl_verifiers.maths.maths_verifier:MathsVerifier",
        options,
        time_limit,
        memory_limit_mb,
        warm_up=(r"\int_0^1 2x \, dx", r"\boxed{\int_0^1 2y \, dy}"),
    )


def _code(options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> WorkerProtocol:
    from magicrl_verifiers.code.judge import CodeOptions, CodeProtocol
    from magicrl_verifiers.code.sandbox import Limits

    return CodeProtocol(CodeOptions(limits=Limits(cpu_seconds=time_limit, memory_mb=memory_limit_mb), judge=options))


def _judge(settings: JudgeSettings, options: JudgeOptions) -> ServedJudge:
    from magicrl_verifiers.served_judge import ServedJudge

    return ServedJudge(settings, options)


def _reasoning_gym(options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> WorkerProtocol:
    from magicrl_verifiers.gym import GymProtocol

    return GymProtocol(options, time_limit, memory_limit_mb)


def _check_entry(problem: Problem) -> None:
    from magicrl_verifiers.gym import check_problem

    check_problem(problem)


EXACT = VerifierSpec(name="exact", in_process=_exact)
MATHS = VerifierSpec(name="maths", protocol=_maths)
CODE = VerifierSpec(name="code", protocol=_code, reads_extract=False)
JUDGE = VerifierSpec(name="judge", served=_judge, needs_reference=False, reads_extract=False)
REASONING_GYM = VerifierSpec(
    name="reasoning_gym", protocol=_reasoning_gym, needs_reference=False, check_problem=_check_entry
)
VERIFIERS: Mapping[str, str] = MappingProxyType(
    {spec.name: f"{__name__}:{spec.name.upper()}" for spec in (CODE, EXACT, JUDGE, MATHS, REASONING_GYM)}
)
"""References of the built-in verifiers by name."""


def verifier_spec(name: str) -> VerifierSpec:
    """Return the built-in verifier of this name, or the reward function that it names (`references`).

    A name of several rewards (`several`) has their verifiers as parts.

    Raises:
        ValueError: unknown name (says the nearest known one), what it names is no reward, or a wrong weight.
    """
    names = [part for part, _ in reward_terms(name)]
    if len(names) > 1:
        parts = tuple(map(verifier_spec, names))
        needs, reads = (any(getattr(part, name) for part in parts) for name in ("needs_reference", "reads_extract"))
        tries = max(part.tries for part in parts)
        return VerifierSpec(name=name, parts=parts, needs_reference=needs, reads_extract=reads, tries=tries)
    (name,) = names
    found = resolve_reference("reward", name, VERIFIERS)
    return found if isinstance(found, VerifierSpec) else function_spec(name, found)


def function_spec(reference: str, function: Any) -> VerifierSpec:
    """Return the verifier that a reward function is.

    Raises:
        ValueError: it is no function, or its settings are wrong.
    """
    from magicrl_verifiers.rewards import RewardFunction, RewardProtocol, in_a_file, judge_here

    made = RewardFunction(reference, function)
    spec = functools.partial(
        VerifierSpec,
        name=reference,
        needs_reference=False,
        check_problem=made.check,
        reads_extract=False,
        tries=1 + made.settings.batched,
    )
    if not made.settings.isolated:
        return spec(in_process=lambda _: judge_here(made))
    if reference.startswith(LIVE):
        raise ValueError(f"{reference}: isolated=True calls a reward in processes of its own, {in_a_file(function)}")
    return spec(protocol=functools.partial(RewardProtocol, made))
