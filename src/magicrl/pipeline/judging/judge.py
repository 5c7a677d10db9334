"""Votes of every judge on every problem, kept on disk, and what they decide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from threading import Event, Lock

from magicrl.pipeline.judging.asking import Judge, Wanted
from magicrl.pipeline.judging.cache import VoteCache, open_cache, vote_key
from magicrl.pipeline.judging.problems import JudgedProblem, Judgement, Vote
from magicrl.pipeline.judging.settings import JudgeSettings, JudgingSettings

CHUNK = 64
"""Problems that are judged at once; their votes are in memory, and so are no others."""


def judge_problems(
    problems: Iterable[JudgedProblem], settings: JudgingSettings, *, folder: Path
) -> Iterator[Judgement]:
    """A judgement for each problem, in order.

    Every vote is written to ``folder/votes.jsonl`` as it arrives, under a key of everything that decides it: after a
    kill, an error or a change of threshold no vote is asked for twice, and another judge costs only its own votes.

    Raises:
        ValueError: another process writes the folder, a key is not set, or an id comes twice among 64 problems.
        ServerError: a judge cannot be reached, refuses the key or the model, or fails for too long. All that had
            arrived is kept.
    """
    waiting = iter(problems)
    with open_cache(folder) as cache, ExitStack() as judges:
        opened: list[Judge] = []
        for one in settings.judges:
            judge = Judge(one, settings)
            judges.callback(judge.close)
            opened.append(judge)
        while chunk := list(islice(waiting, CHUNK)):
            yield from _judged(chunk, settings, cache, opened)


def votes_missing(problems: Iterable[JudgedProblem], settings: JudgingSettings, *, folder: Path) -> dict[str, int]:
    """Votes that ``judge_problems`` would ask for, by judge: what a cost estimate starts from."""
    missing = {judge.shown_name: 0 for judge in settings.judges}
    with open_cache(folder) as cache:
        for problem in problems:
            for judge in settings.judges:
                missing[judge.shown_name] += len(_wanted([problem], judge, settings, cache))
    return missing


def decide(problem: str, votes: Sequence[Vote], settings: JudgingSettings) -> Judgement:
    """What votes decide: at least the threshold of them, in number, say keep."""
    valid = sum(vote.status == "valid" for vote in votes)
    keeps = sum(vote.keep is True for vote in votes)
    keep = keeps >= settings.threshold if 2 * valid >= len(votes) else settings.undecided == "keep"
    return Judgement(problem=problem, votes=tuple(votes), valid=valid, keeps=keeps, keep=keep)


def _judged(
    chunk: Sequence[JudgedProblem], settings: JudgingSettings, cache: VoteCache, judges: Sequence[Judge]
) -> Iterator[Judgement]:
    ids = [problem.id for problem in chunk]
    if len(set(ids)) < len(ids):
        doubled = next(name for name in ids if ids.count(name) > 1)
        raise ValueError(f"two problems have the id {doubled!r}; ids must be unique")
    _ask(chunk, settings, cache, judges)
    for problem in chunk:
        votes = [
            cache.get(_key(problem, judge, index, settings), problem.id, judge.shown_name)
            for judge in settings.judges
            for index in range(judge.votes)
        ]
        yield decide(problem.id, votes, settings)


def _ask(chunk: Sequence[JudgedProblem], settings: JudgingSettings, cache: VoteCache, judges: Sequence[Judge]) -> None:
    """Ask all judges at once for what is missing, and write it."""
    lock, stop = Lock(), Event()

    def run(judge: Judge) -> None:
        try:
            for wanted, vote in judge.votes(_wanted(chunk, judge.settings, settings, cache), stop):
                with lock:
                    if wanted.key not in cache:  # two equal problems share their votes
                        cache.put(wanted.key, vote)
        except BaseException:
            stop.set()  # the others end with what is under way
            raise

    with ThreadPoolExecutor(len(judges)) as pool:
        for done in [pool.submit(run, judge) for judge in judges]:
            done.result()


def _wanted(
    problems: Sequence[JudgedProblem], judge: JudgeSettings, settings: JudgingSettings, cache: VoteCache
) -> list[Wanted]:
    wanted: dict[bytes, Wanted] = {}
    for problem in problems:
        for index in range(judge.votes):
            key = _key(problem, judge, index, settings)
            if key not in cache:
                wanted[key] = Wanted(problem, index, key)
    return list(wanted.values())


def _key(problem: JudgedProblem, judge: JudgeSettings, index: int, settings: JudgingSettings) -> bytes:
    return vote_key(problem, judge, index, instructions=settings.instructions, seed=settings.seed)
