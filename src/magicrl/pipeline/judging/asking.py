"""One judge behind its server: votes asked for, read, asked for again where they cannot be read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

from magicrl.pipeline.judging.problems import JudgedProblem, Vote
from magicrl.pipeline.judging.prompt import Structure, UnreadableAnswer, messages, read_answer, response_format
from magicrl.pipeline.judging.settings import JudgeSettings, JudgingSettings
from magicrl.pipeline.similarity.serving import Requests
from magicrl.rollout.openai_engine import usage_of
from magicrl.rollout.openai_http import ServerError, ServerSettings

_WEAKER: dict[Structure, Structure] = {"json_schema": "json_object", "json_object": "none"}
_ABOUT_FORM = re.compile(r"response.?format|json.?(schema|object)|structured|guided|grammar|extra.*(field|input)", re.I)
_REFUSED = frozenset({400, 413, 422})  # what a server says of this request, rather than of all
_PROBE = JudgedProblem(id="probe", text="What is 1 + 1?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A vote to be asked for."""

    problem: JudgedProblem
    index: int
    key: bytes


@dataclass(slots=True)
class _Try:
    """A vote on its way: answers so far that could not be read, and the tokens they cost."""

    wanted: Wanted
    structure: Structure = "none"
    attempt: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Judge:
    """Asks one model for votes.

    Raises:
        ValueError: the address is none, or the key's variable is named and not set.
    """

    def __init__(self, settings: JudgeSettings, judging: JudgingSettings) -> None:
        self.settings = settings
        self._instructions = judging.instructions
        self._seed = judging.seed
        self._structure: Structure = "json_schema" if settings.structured == "auto" else settings.structured
        self._answered = False
        server = ServerSettings(
            base_url=settings.base_url,
            model=settings.model,
            mode="chat",
            key_variable=settings.key_variable,
            concurrency=settings.concurrency,
            attempts=settings.attempts,
            attempt_seconds=settings.attempt_seconds,
        )
        self._where = f"judge {settings.shown_name!r}"
        self._requests: Requests[int] = Requests(server, "/chat/completions", per_minute=settings.requests_per_minute)

    @property
    def retries(self) -> int:
        """Requests sent again so far, because the server failed them."""
        return self._requests.usage.retries

    def votes(self, wanted: Sequence[Wanted], stop: Event) -> Iterator[tuple[Wanted, Vote]]:
        """Votes as they arrive. When ``stop`` is set no new one is asked for.

        Raises:
            ServerError: the server cannot be reached, refuses the key or the model, or fails for too long; votes that
                had arrived were yielded.
        """
        open_tries = [_Try(one) for one in wanted]
        while open_tries and not stop.is_set():
            again: list[_Try] = []
            failure: ServerError | None = None
            bodies = ((i, self._body(t)) for i, t in enumerate(open_tries) if not (failure or stop.is_set()))
            for number, answer in self._requests.all(bodies):
                current = open_tries[number]
                try:
                    vote = self._vote(current, answer)
                except ServerError as error:  # of the first; what is under way is paid for and still taken
                    failure = failure or error
                    continue
                if vote is None:
                    again.append(current)
                else:
                    yield current.wanted, vote
            if failure is not None:
                raise failure
            open_tries = again

    def close(self) -> None:
        """Close the connections."""
        self._requests.close()

    def _body(self, current: _Try) -> dict[str, Any]:
        settings, wanted = self.settings, current.wanted
        current.structure = self._structure
        drawn = f"{self._seed} {wanted.key.hex()} {current.attempt}"
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": messages(wanted.problem.text, self._instructions),
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "seed": int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:4], "little") >> 1,
        }
        body |= response_format(current.structure, settings.reasons_characters) | settings.extra
        return {name: value for name, value in body.items() if value is not None}

    def _vote(self, current: _Try, answer: dict[str, Any] | ServerError) -> Vote | None:
        """The vote that an answer is; None when it must be asked for again."""
        if isinstance(answer, ServerError):
            return self._refusal(current, answer)
        self._answered = True
        counted = usage_of(answer) or (0, 0)
        current.prompt_tokens += counted[0]
        current.completion_tokens += counted[1]
        current.attempt += 1
        try:
            keep, reasons, criteria = read_answer(_content(answer))
        except UnreadableAnswer as error:
            if current.attempt < self.settings.unreadable_attempts:
                return None
            return self._made(current, "unreadable", None, str(error), {})
        return self._made(current, "valid", keep, reasons, criteria)

    def _refusal(self, current: _Try, error: ServerError) -> Vote | None:
        """A refusal of the answer's form is met with a weaker one; one of this problem is a failed vote.

        Raises:
            ServerError: one that concerns every request.
        """
        text = str(error)
        if error.status not in _REFUSED:
            raise self._named(error)
        if self.settings.structured == "auto" and current.structure in _WEAKER and _ABOUT_FORM.search(text):
            if current.structure == self._structure:  # others of the same form may have been under way
                self._structure = _WEAKER[current.structure]
            return None
        if not self._answered:
            self._probe(error)
        return self._made(current, "failed", None, text, {})

    def _probe(self, error: ServerError) -> None:
        """See whether the server refuses one problem or all: ask about one that nothing is wrong with.

        Raises:
            ServerError: it refuses all.
        """
        try:
            self._requests.one(self._body(_Try(Wanted(_PROBE, 0, b""))))
        except ServerError:
            raise self._named(error) from None
        self._answered = True

    def _named(self, error: ServerError) -> ServerError:
        return ServerError(f"{self._where}: {error}", status=error.status, retryable=error.retryable)

    def _made(
        self,
        current: _Try,
        status: Any,
        keep: bool | None,
        reasons: str,
        criteria: dict[str, bool],
    ) -> Vote:
        return Vote(
            problem=current.wanted.problem.id,
            judge=self.settings.shown_name,
            index=current.wanted.index,
            status=status,
            keep=keep,
            reasons=reasons,
            criteria=criteria,
            prompt_tokens=current.prompt_tokens,
            completion_tokens=current.completion_tokens,
        )


def _content(answer: dict[str, Any]) -> str:
    """The text of the first choice.

    Raises:
        UnreadableAnswer: there is none.
    """
    choices = answer.get("choices")
    first: Any = cast("list[Any]", choices)[0] if isinstance(choices, list) and choices else None
    message: Any = cast("dict[str, Any]", first).get("message") if isinstance(first, dict) else None
    content: Any = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        raise UnreadableAnswer("the answer holds no message with text")
    return content
