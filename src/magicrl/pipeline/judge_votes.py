"""Votes of language models on whether a problem is well posed: asked for, read, kept on disk, and what they decide."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from magicrl.config.loader import shipped_table
from magicrl.config.schema import Section
from magicrl.files import only_writer
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import JudgeSettings, JudgingSettings
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
    """One answer of one judge.

    ``valid``: a verdict was read; ``unreadable``: the judge answered something else, every time it was asked;
    ``failed``: the server refused this problem for good.
    """

    problem: str  # id
    judge: str  # its name
    index: int  # of the vote, from 0
    status: Literal["valid", "unreadable", "failed"]
    keep: bool | None  # the verdict; None unless valid
    reasons: str  # what the judge wrote before it, or the error
    criteria: dict[str, bool]  # its verdict on each, by name, as far as it gave them
    prompt_tokens: int = 0  # as the server counted them; 0 where it did not
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """All votes on one problem."""

    problem: str  # id
    votes: tuple[Vote, ...]  # of every judge, in the order of judges and indices
    valid: int  # how many were readable
    keeps: int  # how many of these say that the problem is well posed
    keep: bool  # at least the threshold; what the settings say where too few votes are valid

    @property
    def decided(self) -> bool:
        """Whether at least half of the votes are valid."""
        return 2 * self.valid >= len(self.votes)


class JudgingTexts(Section):
    """``judging.toml``."""

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
    """The chat of one vote. The problem stands between marks, and what it says is no instruction."""
    text = f"{instructions or _INSTRUCTIONS}\n\n<problem>\n{problem}\n</problem>\n\n{_FORM}"
    return [{"role": "user", "content": text}]


def response_format(structure: Structure, reasons_characters: int | None = None) -> dict[str, Any]:
    """The request's fields that ask for the answer's form; with a schema the reasons may be held to a length."""
    if structure == "none":
        return {}
    if structure == "json_object":
        return {"response_format": {"type": "json_object"}}
    length = {} if reasons_characters is None else {"maxLength": reasons_characters}
    # the order of properties is the order of writing: reasons before verdicts
    properties = {
        "reasons": {"type": "string", **length},
        **{name: {"type": "boolean"} for name in CRITERIA},
        "verdict": {"type": "string", "enum": ["keep", "drop"]},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    review = {"name": "review", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": review}}


def read_answer(text: str) -> tuple[bool, str, dict[str, bool]]:
    """Verdict, reasons and criteria of a judge's answer; reasoning before ``</think>`` is passed over.

    Raises:
        UnreadableAnswer: there is no verdict, or there are two.

    Example:
        >>> read_answer('{"reasons": "No options are given.", "complete_information": false, "verdict": "drop"}')
        (False, 'No options are given.', {'complete_information': False})
    """
    said = after_reasoning(text)
    found = [o for o in json_objects(said) if "verdict" in o]
    # a judge that says both is not counted for either
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
_REFUSED = frozenset({400, 413, 422})  # what a server says of this request, rather than of all


@dataclass(frozen=True, slots=True)
class Wanted:
    """A vote to be asked for."""

    problem: Document
    index: int
    key: bytes


class JudgeClient:
    """Asks one model for votes. Everything but the constructor belongs to one event loop."""

    def __init__(self, settings: JudgeSettings, judging: JudgingSettings) -> None:
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

    async def vote(self, wanted: Wanted, stopped: Callable[[], bool]) -> Vote:
        """One vote, asked for again while the answer cannot be read.

        Raises:
            ServerError: the server cannot be reached, refuses the key or the model, or fails for too long.
        """
        vote = Vote(
            problem=wanted.problem.id,
            judge=self.settings.shown_name,
            index=wanted.index,
            status="unreadable",
            keep=None,
            reasons="",
            criteria={},
        )
        attempt = 0
        while attempt < self.settings.unreadable_attempts:
            structure = self._structure
            try:
                answer = await self._send(self._body(wanted.problem.text, wanted.key, attempt), stopped)
            except ServerError as error:
                if error.status not in _REFUSED:
                    raise self._named(error) from None
                # no attempt is used up: nothing about the problem was answered
                if self._weakened(structure, str(error)):
                    continue
                # nothing has been answered yet: it may be the server's mistake, not this problem's
                if not self._answered:
                    await self._probe(error)
                return replace(vote, status="failed", reasons=str(error))
            self._answered = True
            attempt += 1
            prompt, completion = usage_of(answer) or (0, 0)
            paid, written = vote.prompt_tokens + prompt, vote.completion_tokens + completion
            vote = replace(vote, prompt_tokens=paid, completion_tokens=written)
            try:
                keep, reasons, criteria = read_answer(content_of(answer))
            except UnreadableAnswer as error:
                vote = replace(vote, reasons=str(error))
                continue
            return replace(vote, status="valid", keep=keep, reasons=reasons, criteria=criteria)
        return vote

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def _body(self, problem: str, key: bytes, attempt: int) -> dict[str, Any]:
        settings = self.settings
        # another seed for each attempt, or an unreadable answer would come again
        drawn = hashlib.sha256(f"{self._judging.seed} {key.hex()} {attempt}".encode()).digest()
        body = {
            "model": settings.model,
            "messages": messages(problem, self._judging.instructions),
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            # 31 bits: some servers keep an int32
            "seed": int.from_bytes(drawn[:4], "little") >> 1,
            **response_format(self._structure, settings.reasons_characters),
            **settings.extra,
        }
        return {name: value for name, value in body.items() if value is not None}

    async def _send(self, body: dict[str, Any], stopped: Callable[[], bool]) -> dict[str, Any]:
        if self._gap:
            # places are taken before waiting: requests that begin together still go out one gap apart
            now = time.monotonic()
            self._next = max(self._next, now) + self._gap
            await asyncio.sleep(self._next - self._gap - now)
        return await self._transport.send("POST", "/chat/completions", body, stopped=stopped)

    def _weakened(self, structure: Structure, refusal: str) -> bool:
        """Whether it was the answer's form that was refused; the next request then asks for a weaker one."""
        if self.settings.structured != "auto" or structure not in _WEAKER or not _ABOUT_FORM.search(refusal):
            return False
        if structure == self._structure:  # others of the same form may have been under way
            self._structure = _WEAKER[structure]
        return True

    async def _probe(self, refusal: ServerError) -> None:
        """Ask about a problem that nothing is wrong with: a server that refuses it, too, refuses all."""
        try:
            await self._send(self._body("What is 1 + 1?", b"", 0), lambda: False)
        except ServerError:
            raise self._named(refusal) from None
        self._answered = True

    def _named(self, error: ServerError) -> ServerError:
        text = f"judge {self.settings.shown_name!r}: {error}"
        return ServerError(text, status=error.status, retryable=error.retryable)


_VERSION = 1  # raised when the questions' wording changes: older votes answered another question


def vote_key(problem: Document, judge: JudgeSettings, index: int, judging: JudgingSettings) -> bytes:
    """What decides a vote, as 12 bytes. The judge's address, its retries and its prices do not."""
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
    # only where it is set, so that votes from before there was this setting keep their keys
    if judge.reasons_characters is not None:
        decides.append({"reasons_characters": judge.reasons_characters})
    return key_of(decides)


class VoteCache:
    """Votes by key, from ``open_cache``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rows = AnswerFile(file)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def get(self, key: bytes, problem: str, judge: str) -> Vote:
        """The vote, under the names that problem and judge have now."""
        return replace(Vote(**self._rows.get(key)), problem=problem, judge=judge)

    def put(self, key: bytes, vote: Vote) -> None:
        """Write a vote; when this returns, it outlives the process."""
        self._rows.put(key, asdict(vote))


@contextmanager
def open_cache(folder: Path) -> Generator[VoteCache]:
    """The folder's votes, for one process at a time: it is an error that another one writes them."""
    with only_writer(folder, wait=False), (folder / "votes.jsonl").open("a+b") as file:
        yield VoteCache(file)


CHUNK = 64
"""Problems that are judged at once; their votes are in memory, and so are no others."""


def judge_problems(problems: Iterable[Document], settings: JudgingSettings, *, folder: Path) -> Iterator[Judgement]:
    """A judgement for each problem, in order.

    Every vote is written to ``folder/votes.jsonl`` as it arrives, under a key of everything that decides it: after a
    kill, an error or a change of threshold no vote is asked for twice, and another judge costs only its own votes.

    Raises:
        ValueError: another process writes the folder, a key is not set, or an id comes twice among 64 problems.
        ServerError: a judge cannot be reached, refuses the key or the model, or fails for too long. All that had
            arrived is kept.
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
                runner.run(_ask(chunk, settings, cache, judges))
                for problem in chunk:
                    votes = [
                        cache.get(vote_key(problem, judge, index, settings), problem.id, judge.shown_name)
                        for judge in settings.judges
                        for index in range(judge.votes)
                    ]
                    yield decide(problem.id, votes, settings.threshold, undecided=settings.undecided == "keep")
        finally:
            for judge in judges:
                runner.run(judge.close())


def votes_missing(problems: Iterable[Document], settings: JudgingSettings, *, folder: Path) -> dict[str, int]:
    """Votes that ``judge_problems`` would ask for, by judge: what a cost estimate starts from."""
    missing = {judge.shown_name: 0 for judge in settings.judges}
    with open_cache(folder) as cache:
        for problem in problems:
            for judge in settings.judges:
                missing[judge.shown_name] += len(_wanted([problem], judge, settings, cache))
    return missing


def decide(problem: str, votes: Sequence[Vote], threshold: int, *, undecided: bool) -> Judgement:
    """Keep a problem if at least ``threshold`` votes say so; ``undecided`` says whether to keep it where fewer than
    half of its votes could be read.
    """
    valid = sum(vote.status == "valid" for vote in votes)
    keeps = sum(vote.keep is True for vote in votes)
    found = Judgement(problem=problem, votes=tuple(votes), valid=valid, keeps=keeps, keep=keeps >= threshold)
    return found if found.decided else replace(found, keep=undecided)


async def _ask(
    chunk: Sequence[Document], settings: JudgingSettings, cache: VoteCache, judges: Sequence[JudgeClient]
) -> None:
    """Ask all judges at once for what is missing, and write each vote as it arrives.

    After an error nothing new is asked for, but what is under way is paid for and still taken.
    """
    failed: list[ValueError] = []

    async def work(judge: JudgeClient, waiting: Iterator[Wanted]) -> None:
        for wanted in waiting:
            if failed:
                return
            try:
                vote = await judge.vote(wanted, lambda: bool(failed))
                if wanted.key not in cache:  # judges of one model share their votes
                    cache.put(wanted.key, vote)
            except ValueError as error:
                failed.append(error)

    workers: list[Any] = []
    for judge in judges:
        waiting = iter(_wanted(chunk, judge.settings, settings, cache))
        # all workers of a judge draw from one iterator: each vote is asked for once
        workers += [work(judge, waiting) for _ in range(judge.settings.concurrency)]
    await asyncio.gather(*workers)
    if failed:
        raise failed[0]


def _wanted(
    problems: Sequence[Document], judge: JudgeSettings, settings: JudgingSettings, cache: VoteCache
) -> list[Wanted]:
    wanted: dict[bytes, Wanted] = {}  # by key: equal problems share their votes
    for problem in problems:
        for index in range(judge.votes):
            key = vote_key(problem, judge, index, settings)
            if key not in cache:
                wanted[key] = Wanted(problem, index, key)
    return list(wanted.values())
