"""Votes of LLM judges on whether a problem is well posed: requests, parsing, cache on disk, and decisions."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from magicrl.config.loader import shipped_table
from magicrl.config.section import Section
from magicrl.files import only_writer
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import JudgingSettings, VotingJudge
from magicrl_verifiers.served import (
    AnswerFile,
    ServerError,
    ServerSettings,
    ServerUsage,
    Transport,
    UnreadableAnswer,
    after_reasoning,
    content_of,
    json_objects,
    key_of,
    usage_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """A vote of a judge on a problem.

    ``valid``: the response holds a verdict. ``unreadable``: no attempt gave a verdict. ``failed``: the server refused
    the problem.
    """

    problem: str  # id
    judge: str  # name of the judge
    index: int  # number of the vote, from 0
    status: Literal["valid", "unreadable", "failed"]
    keep: bool | None  # the verdict; None unless valid
    reasons: str  # text before the verdict, or the error
    criteria: dict[str, bool]  # verdict on each criterion that the response holds
    prompt_tokens: int = 0  # as the server counted them, else 0
    completion_tokens: int = 0
    attempts: int = 0  # responses that could not be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """All votes on a problem, and the decision."""

    problem: str  # id
    votes: tuple[Vote, ...]  # in the order of judges and indices
    valid: int  # number of readable votes
    keeps: int  # number of votes that say that the problem is well posed
    keep: bool  # the decision

    @property
    def decided(self) -> bool:
        """True if at least half of the votes are valid."""
        return 2 * self.valid >= len(self.votes)


class JudgingTexts(Section):
    """Contents of ``judging.toml``."""

    instructions: str
    form: str
    criteria: dict[str, str]
    flawed: dict[str, str]


TEXTS = shipped_table("pipeline/judging.toml", JudgingTexts)
CRITERIA = TEXTS.criteria
_INSTRUCTIONS = TEXTS.instructions.format(
    criteria="\n".join(f"{number}. {name}: {text}" for number, (name, text) in enumerate(CRITERIA.items(), 1))
)
_FORM = TEXTS.form.format(names=", ".join(f'"{name}"' for name in CRITERIA))
Structure = Literal["json_schema", "json_object", "none"]
_YES = frozenset({"keep", "yes", "true", "good", "pass"})
_NO = frozenset({"drop", "no", "false", "bad", "fail", "reject"})
_PLAIN = re.compile(r"\bverdict\W{0,12}(keep|drop)\b", re.I)


def messages(problem: str, instructions: str) -> list[dict[str, str]]:
    """Return the chat for a vote. The problem is between tags, so that its text is not read as an instruction."""
    text = f"{instructions or _INSTRUCTIONS}\n\n<problem>\n{problem}\n</problem>\n\n{_FORM}"
    return [{"role": "user", "content": text}]


def response_format(structure: Structure, reasons_characters: int | None = None) -> dict[str, Any]:
    """Return the request fields that set the format of the response. A schema can limit the length of the reasons."""
    if structure == "none":
        return {}
    if structure == "json_object":
        return {"response_format": {"type": "json_object"}}
    length = {} if reasons_characters is None else {"maxLength": reasons_characters}
    # the model writes properties in this order: reasons before verdicts
    properties = {
        "reasons": {"type": "string", **length},
        **{name: {"type": "boolean"} for name in CRITERIA},
        "verdict": {"type": "string", "enum": ["keep", "drop"]},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    review = {"name": "review", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": review}}


def read_answer(text: str) -> tuple[bool, str, dict[str, bool]]:
    """Return verdict, reasons and criteria of a judge's response. Reasoning before ``</think>`` is ignored.

    Raises:
        UnreadableAnswer: The response has no verdict, or two that differ.

    Example:
        >>> read_answer('{"reasons": "No options are given.", "complete_information": false, "verdict": "drop"}')
        (False, 'No options are given.', {'complete_information': False})
    """
    said = after_reasoning(text)
    found = [o for o in json_objects(said) if "verdict" in o]
    # a response with both verdicts counts for neither
    verdicts = {_verdict(o["verdict"]) for o in found}
    if verdicts - {None}:
        if len(verdicts) > 1:
            raise UnreadableAnswer(f"several verdicts: {said[:200]!r}")
        last = found[-1]
        criteria = {name: last[name] for name in CRITERIA if isinstance(last.get(name), bool)}
        return bool(_verdict(last["verdict"])), str(last.get("reasons", "")), criteria
    plain = {match.lower() for match in _PLAIN.findall(said)}
    if len(plain) != 1:
        raise UnreadableAnswer(f"no verdict: {said[:200]!r}" if not plain else f"several verdicts: {said[:200]!r}")
    return plain == {"keep"}, said.strip(), {}


def _verdict(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    word = str(value).strip().strip(".\"'").lower()
    return True if word in _YES else False if word in _NO else None


_WEAKER: dict[Structure, Structure] = {"json_schema": "json_object", "json_object": "none"}
_ABOUT_FORM = re.compile(r"response.?format|json.?(schema|object)|structured|guided|grammar|extra.*(field|input)", re.I)
_REFUSED = frozenset({400, 413, 422})  # errors about this request, rather than about all requests


class JudgeClient:
    """Client of a judge. All methods must run in one event loop."""

    def __init__(self, settings: VotingJudge, judging: JudgingSettings) -> None:
        self.settings = settings
        self._judging = judging
        self._structure: Structure = "json_schema" if settings.structured == "auto" else settings.structured
        self._answered = False
        self._gap = 60.0 / settings.requests_per_minute if settings.requests_per_minute else 0.0
        self._next = 0.0
        server = ServerSettings(
            base_url=settings.base_url,
            model=settings.model,
            mode="chat",
            key_variable=settings.key_variable,
            concurrency=settings.concurrency,
            attempts=settings.attempts,
            attempt_seconds=settings.attempt_seconds,
        )
        self._transport = Transport(server, ServerUsage())

    async def vote(self, problem: Document, vote: Vote, key: bytes, stopped: Callable[[], bool]) -> Vote:
        """Request a vote, again while the response cannot be read, after the attempts of ``vote``.

        Raises:
            ServerError: The server cannot be reached, refuses the key or the model, or fails for too long.
        """
        while vote.attempts < self.settings.unreadable_attempts:
            structure = self._structure
            try:
                answer = await self._send(self._body(problem.text, key, vote.attempts), stopped)
            except ServerError as error:
                if error.status not in _REFUSED:
                    raise self._named(error) from None
                # this does not use up an attempt: the server said nothing about the problem
                if self._weakened(structure, str(error)):
                    continue
                # no request has succeeded yet, so the server may be at fault instead of the problem
                if not self._answered:
                    await self._probe(error)
                return replace(vote, status="failed", reasons=str(error))
            self._answered = True
            prompt, completion = usage_of(answer) or (0, 0)
            paid, written = vote.prompt_tokens + prompt, vote.completion_tokens + completion
            vote = replace(vote, prompt_tokens=paid, completion_tokens=written)
            try:
                keep, reasons, criteria = read_answer(content_of(answer))
            except UnreadableAnswer as error:
                vote = replace(vote, status="unreadable", reasons=str(error), attempts=vote.attempts + 1)
                continue
            return replace(vote, status="valid", keep=keep, reasons=reasons, criteria=criteria)
        return vote

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def _body(self, problem: str, key: bytes, attempt: int) -> dict[str, Any]:
        settings = self.settings
        # another seed for each attempt, or the same unreadable response would come again
        drawn = hashlib.sha256(f"{self._judging.seed} {key.hex()} {attempt}".encode()).digest()
        body = {
            "model": settings.model,
            "messages": messages(problem, self._judging.instructions),
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            # 31 bits: some servers store an int32
            "seed": int.from_bytes(drawn[:4], "little") >> 1,
            **response_format(self._structure, settings.reasons_characters),
            **settings.extra,
        }
        return {name: value for name, value in body.items() if value is not None}

    async def _send(self, body: dict[str, Any], stopped: Callable[[], bool]) -> dict[str, Any]:
        if self._gap:
            # reserve a time before waiting, so that concurrent requests are spaced by the gap, too
            now = time.monotonic()
            self._next = max(self._next, now) + self._gap
            await asyncio.sleep(self._next - self._gap - now)
        return await self._transport.send("POST", "/chat/completions", body, stopped=stopped)

    def _weakened(self, structure: Structure, refusal: str) -> bool:
        """Return whether the server refused the format of the response, and switch to a weaker format if so."""
        if self.settings.structured != "auto" or structure not in _WEAKER or not _ABOUT_FORM.search(refusal):
            return False
        if structure == self._structure:  # concurrent requests may have switched it already
            self._structure = _WEAKER[structure]
        return True

    async def _probe(self, refusal: ServerError) -> None:
        """Send a harmless problem. A server that refuses it refuses every problem."""
        try:
            await self._send(self._body("What is 1 + 1?", b"", 0), lambda: False)
        except ServerError:
            raise self._named(refusal) from None
        self._answered = True

    def _named(self, error: ServerError) -> ServerError:
        text = f"judge {self.settings.shown_name!r}: {error}"
        return ServerError(text, status=error.status, retryable=error.retryable)


_VERSION = 1  # raised when the wording of the request changes, which makes older votes obsolete


def vote_key(problem: Document, judge: VotingJudge, index: int, judging: JudgingSettings) -> bytes:
    """Return a 12-byte hash of everything that decides a vote. Address, retries and prices do not."""
    decides = [
        _VERSION,
        problem.text,
        judge.model,
        judge.temperature,
        judge.max_tokens,
        judge.structured,
        judge.extra,
        index,
        judging.instructions,
        judging.seed,
    ]
    # only if it is set, so that votes from before this setting existed keep their keys
    if judge.reasons_characters is not None:
        decides.append({"reasons_characters": judge.reasons_characters})
    return key_of(decides)


@contextmanager
def open_cache(folder: Path) -> Generator[AnswerFile]:
    """Open the votes in a folder, by key. Only one process may have them open."""
    with only_writer(folder, wait=False), (folder / "votes.jsonl").open("a+b") as file:
        yield AnswerFile(file)


CHUNK = 64
"""Number of problems that are judged together. Only their votes are in memory."""


def judge_problems(problems: Iterable[Document], settings: JudgingSettings, *, folder: Path) -> Iterator[Judgement]:
    """Yield a judgement for each problem, in order.

    Every vote is written to ``folder/votes.jsonl`` as it arrives, under a key of everything that decides it. No vote is
    requested twice after a kill, an error or a change of the threshold, and another judge costs only its own votes.

    Raises:
        ValueError: Another process writes the folder, an API key is not set, or two of 64 problems have the same id.
        ServerError: A judge cannot be reached, refuses the key or the model, or fails for too long. Votes that had
            arrived are kept.
    """
    waiting = iter(problems)
    # one event loop for all chunks, so that connections stay open between them
    with open_cache(folder) as cache, asyncio.Runner() as runner:
        judges = [JudgeClient(one, settings) for one in settings.judges]
        try:
            while chunk := list(islice(waiting, CHUNK)):
                names = [problem.id for problem in chunk]
                if len(set(names)) < len(names):
                    doubled = next(name for name in names if names.count(name) > 1)
                    raise ValueError(f"two problems have the id {doubled!r}; ids must be unique")
                votes = runner.run(_ask(chunk, settings, cache, judges))
                for problem in chunk:
                    # equal problems share votes
                    own = [
                        replace(votes[key], problem=problem.id, judge=judge.shown_name, index=index)
                        for key, judge, index in _keyed(problem, settings)
                    ]
                    yield decide(problem.id, own, settings.threshold, undecided=settings.undecided == "keep")
        finally:
            for judge in judges:
                runner.run(judge.close())


def votes_missing(problems: Iterable[Document], settings: JudgingSettings, *, folder: Path) -> dict[str, int]:
    """Return the number of votes that ``judge_problems`` would request, by judge."""
    missing = {judge.shown_name: 0 for judge in settings.judges}
    with open_cache(folder) as cache:
        for problem in problems:
            for _, name, _, ask in _wanted([problem], settings, cache).values():
                missing[name] += ask
    return missing


def decide(problem: str, votes: Sequence[Vote], threshold: int, *, undecided: bool) -> Judgement:
    """Keep a problem if at least ``threshold`` votes say so.

    Args:
        problem: Id of the problem.
        votes: All its votes.
        threshold: Fewest votes that keep it.
        undecided: Decision if fewer than half of the votes are readable.
    """
    valid = sum(vote.status == "valid" for vote in votes)
    keeps = sum(vote.keep is True for vote in votes)
    found = Judgement(problem=problem, votes=tuple(votes), valid=valid, keeps=keeps, keep=keeps >= threshold)
    return found if found.decided else replace(found, keep=undecided)


async def _ask(
    chunk: Sequence[Document], settings: JudgingSettings, cache: AnswerFile, judges: Sequence[JudgeClient]
) -> dict[bytes, Vote]:
    """Return all votes on the problems by key. The missing ones of all judges are requested concurrently, and each is
    written as it arrives.

    After an error no new request is sent, but votes of running requests are still written, since they cost money.
    """
    failed: list[ValueError | RuntimeError] = []
    wanted = _wanted(chunk, settings, cache)
    votes = {key: vote for key, (_, _, vote, _) in wanted.items()}

    async def work(judge: JudgeClient, waiting: Iterator[tuple[bytes, Document]]) -> None:
        for key, problem in waiting:
            if failed:
                return
            try:
                votes[key] = await judge.vote(problem, votes[key], key, lambda: bool(failed))
                cache.put(key, asdict(votes[key]))
            except (ValueError, RuntimeError) as error:  # of the judge, or of a full disk
                failed.append(error)

    workers: list[Any] = []
    for judge in judges:
        name = judge.settings.shown_name
        waiting = iter([(key, problem) for key, (problem, owner, _, ask) in wanted.items() if ask and owner == name])
        # the workers of a judge share an iterator, so that each vote is requested once
        workers += [work(judge, waiting) for _ in range(judge.settings.concurrency)]
    await asyncio.gather(*workers)
    if failed:
        raise failed[0]
    return votes


def _wanted(
    problems: Sequence[Document], settings: JudgingSettings, cache: AnswerFile
) -> dict[bytes, tuple[Document, str, Vote, bool]]:
    """Return problem, judge and stored vote of each key, and whether to request it. Equal problems share votes.

    Votes to request are not stored, failed, or were unreadable in fewer attempts than are allowed now.
    """
    found: dict[bytes, tuple[Document, str, Vote, bool]] = {}
    for problem in problems:
        for key, judge, index in _keyed(problem, settings):
            if key in found:
                continue
            name = judge.shown_name
            vote = Vote(
                problem=problem.id, judge=name, index=index, status="unreadable", keep=None, reasons="", criteria={}
            )
            if key in cache:
                # earlier versions recorded no attempts, and made the default number of them
                stored: dict[str, Any] = {"attempts": 3, **cache.get(key)}
                vote = Vote(**stored)
            more = vote.status == "unreadable" and vote.attempts < judge.unreadable_attempts
            found[key] = problem, name, vote, more or vote.status == "failed"
    return found


def _keyed(problem: Document, settings: JudgingSettings) -> Iterator[tuple[bytes, VotingJudge, int]]:
    """Yield key, judge and index of each vote on a problem.

    The keys of judges with the same model are counted on, because equal keys would be one vote that counts twice.
    """
    counted: Counter[bytes] = Counter()
    for judge in settings.judges:
        same = vote_key(problem, judge, 0, settings)
        for index in range(judge.votes):
            yield vote_key(problem, judge, counted[same] + index, settings), judge, index
        counted[same] += judge.votes
