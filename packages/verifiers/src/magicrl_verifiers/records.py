"""Problems, verdicts and the protocols of what judges; what makes two problems the same one.

A verifier states a fact about one answer; rewards are made elsewhere, so that training and evaluation
share one judge. Only the status decides who is to blame: whatever an answer exhausts by itself (CPU seconds,
memory, depth) is wrong, because hanging the judge must not pay; only what is not the answer's doing (a
lost worker, a reference answer that cannot be read) is not judged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, cast

Reasoning = Literal["auto", "required", "none"]
Extract = Literal["lenient", "box"]
Function = TypeVar("Function", bound=Callable[..., Any])

# raised and lowered characters and fractions, of which NFKC would make plain digits and letters
_APART = re.compile("([ª²³¹º¼-¾ʰ-ʸˠ-ˤᴬ-ᵪᵸᶛ-ᶿ⁰-ₜ⅐-⅟↉])")
# soft hyphen, zero-width characters and marks of direction, variation selectors, byte-order mark
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff]")
# four single quotes and the prime, four double ones and theirs, four hyphens and dashes and the minus sign
_TYPED = str.maketrans("‘’‚‛′“”„‟″‐‑‒–−", "'" * 5 + '"' * 5 + "-" * 5)


def check_seconds(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is a usable time limit: positive seconds, at most a day."""
    # NaN would make every answer wrong, and the timers of the system overflow
    if not 0 < value <= 86_400:
        raise ValueError(f"{name} must be positive seconds, at most 86400 (a day), got {value}")


class RepeatedKey(ValueError):
    """A JSON object with a repeated key, of which Python would keep the last value."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose keys appear once (``object_pairs_hook`` of `json.loads`).

    Raises:
        RepeatedKey: a key appears twice.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        key = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise RepeatedKey(f"the key {key!r} appears twice in one object; remove one of them")
    return record


def plain_typography(text: str) -> str:
    """Return ``text`` in the characters that a keyboard would give, case and whitespace as they are.

    Unicode's NFKC, but raised and lowered characters and fractions stay what they are (it would make 23 of ``2³``);
    typographic quotes, hyphens and the minus sign become ASCII; what cannot be seen (zero-width characters, soft
    hyphens) goes.

    Example:
        >>> plain_typography("Ｆind\\u00a0“x²” − 3\\u200b")
        'Find "x²" - 3'
    """
    if text.isascii():
        return text
    pieces = _APART.split(_UNSEEN.sub("", text).translate(_TYPED))
    # every second piece is the text between those that stay as they are
    pieces[::2] = [unicodedata.normalize("NFKC", piece) for piece in pieces[::2]]
    return "".join(pieces)


def prompt_key(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the identity of a prompt: 16 hexadecimal digits, equal for prompts that ask the same in the same words.

    Whitespace counts as one space, case and typography (see ``plain_typography``) do not count; words, numbers,
    punctuation and LaTeX do. Two prompts that differ only by case are rarely two problems. Taking them for one costs a
    training problem; taking one for two lets a test problem into training. Of a list of messages all count, with their
    roles and in order; one user message is its text.

    Example:
        >>> prompt_key("What is  2 + 3?\\n") == prompt_key("what is 2 + 3?") != prompt_key("What is 2 - 3?")
        True
    """
    if not isinstance(prompt, str) and len(prompt) == 1 and prompt[0].get("role", "user") == "user":
        prompt = prompt[0]["content"] if isinstance(prompt[0].get("content"), str) else prompt
    text = prompt if isinstance(prompt, str) else json.dumps(list(prompt), sort_keys=True, ensure_ascii=False)
    # the text, not its tokens: a key is the same for every model
    words = " ".join(plain_typography(text).casefold().split())
    # 64 bits: of a million prompts two meet with a chance of 3 in 10^8; a lone surrogate in a source must not stop it
    return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Outcome(StrEnum):
    """All that the algorithms read of a verdict.

    ``NOT_JUDGED`` means that the answer is not to blame (a worker died from outside, the reference answer does not
    parse): the completion leaves its group instead of scoring 0.
    """

    CORRECT = "correct"
    WRONG = "wrong"
    NOT_JUDGED = "not_judged"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; ``role`` is ``system``, ``user``, ``assistant`` or ``tool``."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One verifiable problem.

    Attributes:
        id: unique within its data set; recorded with every rollout.
        prompt: the user's text, the last turn of ``messages``.
        references: the accepted answers; any one earns the reward.
        verifier: name of the verifier that judges it (``exact``, ``maths``, ``code``; for code, tests are JSON in
            ``references[0]``).
        source: where it comes from (data set or task family).
        level: difficulty level, a whole number from 0; None if it has none.
        extra: further fields of the source row, carried along untouched.
        key: its identity, ``prompt_key`` of what the source asks; made of ``prompt`` where it is not given, and kept by
            ``dataclasses.replace``, so that instructions put around a prompt make no other problem of it. Two problems
            of one key are the same problem, whatever their ids: together in a hold-out, a filter, a removal.
        template: name of the template that a generated prompt was filled into, if it has one.
        context: the turns before the prompt: a system prompt, an earlier exchange; mostly none.
        environment: name of the environment that answers the response's turns (`magicrl.environments`); mostly none.

    Example:
        >>> Problem(id="add-0", prompt="What is 2 + 3?", references=("5",), verifier="maths", source="doc").level
    """

    id: str
    prompt: str
    references: tuple[str, ...]
    verifier: str
    source: str
    level: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    key: str = field(default="", repr=False)
    template: str | None = None
    context: tuple[Message, ...] = ()
    environment: str | None = None

    def __post_init__(self) -> None:
        if not self.key:
            turns = [{"role": message.role, "content": message.content} for message in self.messages]
            object.__setattr__(self, "key", prompt_key(turns if self.context else self.prompt))

    @property
    def golds(self) -> tuple[str, ...]:
        """The name of ``references`` before version 0.2."""
        text = "problem.golds is now problem.references; version 0.3 will not know the old name"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return self.references

    @property
    def cluster(self) -> str:
        """Unit of a confidence interval: the template, else the key. Problems of one cluster are dependent."""
        return self.key if self.template is None else f"{self.source}/{self.template}"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that the model continues; its chat template renders it."""
        return (*self.context, Message("user", self.prompt))


def renamed_argument(old: str, new: str) -> Callable[[Function], Function]:
    """Decorate a function so that it also takes the keyword argument ``new`` under its name before version 0.2."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            if old in named:
                where = getattr(function, "__qualname__", "").removesuffix(".__init__")
                text = f"{where}: the argument {old!r} is now {new!r}; version 0.3 will not know the old name"
                warnings.warn(text, FutureWarning, stacklevel=2)
                named[new] = named.pop(old)
            return function(*values, **named)

        return cast(Function, call)

    return decorate


Problem.__init__ = renamed_argument("golds", "references")(Problem.__init__)


def require_references(problem: Problem) -> None:
    """Raise ValueError for a problem without a reference answer (for code, without tests)."""
    if not problem.references and problem.environment is not None:
        raise ValueError(
            f"environment {problem.environment!r} ended problem {problem.id!r} without a reward, and there is no "
            "reference answer to judge it by; give a reward in the last Step, or the problem a reference answer"
        )
    if not problem.references:
        raise ValueError(f"problem {problem.id!r} has no reference answer (a code problem: no tests); give it one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a verifier; a fact, not a reward.

    Attributes:
        outcome: correct, wrong or not_judged: what is counted as right, in accuracy, pass@k and filters.
        status: the verifier's own word, e.g. ``matched``, ``mismatch``, ``no_answer``, ``timeout``.
        reason: one sentence for a person.
        decided_by: the step that decided, e.g. ``string``, ``math_verify``.
        extracted: the answer that was judged, if one was found.
        seconds: CPU seconds of the judgement, with those of a program; wall-clock seconds of a reward function, and
            where a worker was lost.
        score: what a graded reward gives the response; None: 1 for a correct one, else 0.
        metrics: further numbers of a graded reward, averaged over a step.
        parts: weight and score of each reward, if there are several (`several`); a score of None is not judged.
    """

    outcome: Outcome
    status: str
    reason: str = ""
    decided_by: str = ""
    extracted: str | None = None
    seconds: float = 0.0
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    parts: Mapping[str, tuple[float, float | None]] = field(default_factory=dict[str, tuple[float, float | None]])

    @property
    def correct(self) -> bool:
        return self.outcome is Outcome.CORRECT

    @property
    def answered(self) -> bool:
        """Whether the response holds something to judge: any status that is not in `NO_ANSWER`."""
        return self.status not in NO_ANSWER

    @property
    def reward(self) -> float:
        """Reward of the response before truncation is considered."""
        return float(self.correct) if self.score is None else self.score

    def earned(self, *, truncated: bool) -> float:
        """Return the reward in training; see `reward_earned`."""
        return reward_earned(self.reward, truncated=truncated)


def reward_earned(reward: float, *, truncated: bool) -> float:
    """Return the reward in training: a truncated response earns at most 0, since truncation must not pay."""
    return min(0.0, reward) if truncated else reward


# Each kind of status once: its outcome, whether the response holds something to judge, and the statuses.
_STATUSES = (
    (Outcome.CORRECT, True, "matched passed score_reached"),
    (Outcome.WRONG, True, "mismatch unparsable undecided timeout memory crash"),
    (Outcome.WRONG, True, "wrong_answer runtime_error time_limit memory_limit output_limit syntax_error security"),
    (Outcome.WRONG, True, "score_below"),
    (Outcome.WRONG, False, "no_answer no_code"),
    (Outcome.NOT_JUDGED, True, "reference_unparsable worker_lost infrastructure_error"),
    (Outcome.NOT_JUDGED, True, "reward_failed environment_failed"),
)
OUTCOME_OF_STATUS = MappingProxyType({one: outcome for outcome, _, names in _STATUSES for one in names.split()})
"""Every status of the built-in verifiers, and of rewards that return a number, with its outcome."""

NO_ANSWER = frozenset(one for _, answered, names in _STATUSES if not answered for one in names.split())
"""Statuses of responses that hold nothing to judge."""

MAX_EXTRACTED = 1000
"""Characters of the extracted answer that a verdict keeps."""


def make_verdict(
    status: str, *, reason: str = "", decided_by: str = "", extracted: str | None = None, seconds: float = 0.0
) -> Verdict:
    """Return the verdict of this status, its outcome taken from `OUTCOME_OF_STATUS`.

    Raises:
        ValueError: The status is unknown.
    """
    if status not in OUTCOME_OF_STATUS:
        raise ValueError(
            f"status {status!r} is unknown; give one of {', '.join(sorted(OUTCOME_OF_STATUS))}, or make a Verdict with "
            "an outcome and a status of any name"
        )
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
    """Judges whether a response gives any of the reference answers. Pure: depends only on the two and the options."""

    def judge(self, references: Sequence[str], response: str) -> Verdict: ...


class VerifierService(Protocol):
    """Interface to the training loop: submit while the engine generates, collect afterwards.

    ``submit`` queues one problem's responses and returns a ticket at once; ``result`` waits for its verdicts, in the
    order of the responses; ``ready`` says whether it would return at once. ``close`` may be called twice.
    """

    def submit(self, problem: Problem, responses: Sequence[str]) -> Any: ...

    def result(self, ticket: Any) -> tuple[Verdict, ...]: ...

    def ready(self, ticket: Any) -> bool: ...

    def close(self) -> None: ...


Judge = Callable[[Problem, Sequence[str]], "Sequence[Verdict] | Future[list[Verdict]]"]
"""Judges responses to a problem in the calling process, at once or in a while."""
