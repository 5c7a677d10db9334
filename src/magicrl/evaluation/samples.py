"""Judged samples: a row each, the files they are in, and the folder of an evaluation.

A row says all that a score needs, so that a result can be computed anew, and by somebody else, from the files alone.
``OUTPUT/NAME/job.json`` says everything that decides the samples, ``problems.jsonl`` what was asked,
``samples-I-of-N.jsonl`` holds what a shard generated, ``usage/`` an account of each call, ``fresh/LIMIT/`` the same for
samples drawn anew at another limit, ``OUTPUT/results.json`` the scores of all benchmarks.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from magicrl.config.loader import leaves
from magicrl.files import only_writer, write_atomically
from magicrl.records import Completion, FinishReason, Outcome, Problem, Verdict, reward_earned


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One judged response."""

    problem: str  # its id
    sample: int  # index among the problem's samples
    outcome: str  # correct, wrong or not_judged, as the verifier said; a truncated response is wrong whatever it says
    status: str  # the verifier's own word
    decided_by: str  # the verifier's step
    extracted: str | None = None  # the answer it judged
    reason: str  # its sentence
    finish_reason: str  # stop, length (= truncated) or aborted
    tokens: int  # that the model wrote, the end token included
    entropy: float | None = None  # mean nats per token, None where the engine cannot tell
    logprob: float | None = None  # of the whole response under the sampling distribution, None where unknown
    seconds: float  # wall clock from the start of its prompt
    text: str
    prompt_tokens: int | None = None  # None where a server makes the prompt
    token_ids: tuple[int, ...] | None = None  # of what the model wrote, where they were asked for
    token_entropies: tuple[float, ...] | None = None
    score: float | None = None  # what a graded reward gave, None for other verifiers

    @property
    def truncated(self) -> bool:
        return self.finish_reason == FinishReason.LENGTH.value

    @property
    def counted(self) -> bool:
        """Whether scores include the response: it was judged, and it was not aborted before its end."""
        return self.outcome != Outcome.NOT_JUDGED.value and self.finish_reason != FinishReason.ABORTED.value

    @property
    def correct(self) -> bool:
        return self.outcome == Outcome.CORRECT.value and not self.truncated

    @property
    def reward(self) -> float:
        """As in training: 1 or 0, or the score; a truncated response earns nothing."""
        return reward_earned(float(self.correct) if self.score is None else self.score, truncated=self.truncated)


def row_of(
    problem: str,
    sample: int,
    completion: Completion,
    verdict: Verdict,
    *,
    prompt_tokens: int | None = None,
    keep_tokens: bool = False,
) -> SampleRow:
    """The row of a completion and its verdict."""
    logprobs, entropies = completion.sampler_logprobs, completion.sampler_entropies
    # of observations nothing was sampled
    entropies = None if entropies is None else completion.of_sampled(entropies)
    # float64: thousands of float32 summands would lose digits
    whole = float(np.sum(logprobs, dtype=np.float64)) if len(logprobs) == len(completion) else math.nan
    return SampleRow(
        problem=problem,
        sample=sample,
        outcome=verdict.outcome.value,
        status=verdict.status,
        decided_by=verdict.decided_by,
        extracted=verdict.extracted,
        reason=verdict.reason,
        finish_reason=completion.finish_reason.value,
        tokens=completion.num_sampled,
        entropy=None if entropies is None or not len(entropies) else float(np.mean(entropies, dtype=np.float64)),
        logprob=whole if math.isfinite(whole) else None,
        seconds=round(completion.seconds, 3),
        text=completion.text,
        prompt_tokens=prompt_tokens,
        token_ids=tuple(completion.of_sampled(completion.tokens).tolist()) if keep_tokens else None,
        token_entropies=tuple(round(float(e), 4) for e in entropies) if keep_tokens and entropies is not None else None,
        score=verdict.score,
    )


class SampleFile:
    """A JSON Lines file of samples that is appended to, sample by sample, and survives a kill at any instant.

    Args:
        path: made if it is absent. A last line that a kill tore is cut off.

    Raises:
        ValueError: a line in the middle is broken, or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                # a torn last line would otherwise be glued to the next one
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self._file = path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error}; choose another --output") from None

    def append(self, row: SampleRow) -> None:
        """Write one row; it is in the file when this returns (on the disk after ``close``)."""
        document = {key: value for key, value in asdict(row).items() if value is not None}
        self._file.write(json.dumps(document, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_samples(paths: Iterable[Path]) -> Iterator[SampleRow]:
    """Every row of these files, in order; a last line without its end is not one yet.

    Raises:
        ValueError: a broken line, naming file and line.
    """
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    yield _row_from(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number}: no sample of this version ({error}); delete that line to have the "
                        "sample generated again"
                    ) from None


def _row_from(document: Any) -> SampleRow:
    if not isinstance(document, dict):
        raise TypeError("not an object")
    known = cast("dict[str, Any]", document).items()
    fields: dict[str, Any] = {name: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for name, v in known}
    return SampleRow(**fields)


def by_problem(rows: Iterable[SampleRow], order: Sequence[str]) -> list[list[SampleRow]]:
    """Rows of each problem in the order of ``order``, sorted by sample; each sample once.

    Raises:
        ValueError: a sample stands twice, or belongs to no problem of ``order``.
    """
    found: dict[str, dict[int, SampleRow]] = {name: {} for name in order}
    for row in rows:
        if row.problem not in found:
            raise ValueError(f"sample {row.sample} of {row.problem!r} belongs to no problem of this evaluation")
        if row.sample in found[row.problem]:
            raise ValueError(f"sample {row.sample} of {row.problem!r} stands twice")
        found[row.problem][row.sample] = row
    return [[samples[index] for index in sorted(samples)] for samples in found.values()]


SCHEMA_VERSION = 1
RESULTS = "results.json"
_WARNED = ("python", "versions", "machine")


class Job(NamedTuple):
    """One benchmark's sampling job, as ``job.json`` has it."""

    decides: dict[str, Any]  # what the samples and verdicts depend on; another value is another job
    samples: int  # wanted a problem; more may be asked for later, and those that exist stay
    recorded: dict[str, Any]  # what else is worth knowing (versions, machine, licence, where the data came from)


class AskedProblem(NamedTuple):
    """One line of ``problems.jsonl``; ``cluster``: what the problem is dependent by (``Problem.cluster``)."""

    id: str
    prompt: str
    references: tuple[str, ...]
    cluster: str
    verifier: str


class EvaluationFolder:
    """The files of one benchmark in an evaluation's output, ``OUTPUT/NAME``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.usage = path / "usage"  # the accounts of the calls
        self._job = path / "job.json"
        self._problems = path / "problems.jsonl"

    def fresh_at(self, limit: int) -> EvaluationFolder:
        """The folder of samples that are drawn anew at this response limit."""
        return EvaluationFolder(self.path / "fresh" / str(limit))

    def fresh_limits(self) -> list[int]:
        """Limits at which samples were drawn anew, ascending."""
        found = (path.parent.name for path in self.path.glob("fresh/*/job.json"))
        return sorted(int(name) for name in found if name.isdecimal())

    def make_room(self, job: Job) -> tuple[list[str], Path] | None:
        """Move samples of other settings to ``OUTPUT/earlier/NAME-1`` (or -2, ...), where no later call reads them.

        Returns:
            What differs and the new place; None if the folder is empty or holds the samples of this job.
        """
        if not self._job.exists() or not differences(self.job().decides, job.decides):
            return None
        earlier = self.path.parent / "earlier"
        # another shard may have moved them since, and have begun this job
        with only_writer(earlier, wait=True):
            if not self._job.exists() or not (changed := differences(self.job().decides, job.decides)):
                return None
            place = next(p for n in itertools.count(1) if not (p := earlier / f"{self.path.name}-{n}").exists())
            return changed, self.path.rename(place)

    def begin(self, job: Job, problems: Sequence[Problem]) -> list[str]:
        """Write what the job is, or check that the folder holds this very job.

        Returns:
            What differs from the machine and versions that began it: samples may differ in their last bits.

        Raises:
            ValueError: the folder holds another job (says what differs), or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be written: {error}; choose another --output") from None
        if not self._job.exists():
            lines = [json.dumps(_shown(problem), ensure_ascii=False) + "\n" for problem in problems]
            write_atomically(self._problems, "".join(lines))
            self._write(job)
            return []
        former = self.job()
        changed = differences(former.decides, job.decides)
        if changed:
            raise ValueError(
                f"{self.path} holds the samples of another job:\n" + "\n".join(f"  {line}" for line in changed) + "\n"
                "give the settings it was begun with, or choose another --output"
            )
        # never fewer: samples that exist stay, and a larger job was asked for before
        if job.samples > former.samples:
            self._write(former._replace(samples=job.samples))
        then, now = (j.recorded.get("environment") or {} for j in (former, job))
        return differences({name: then.get(name) for name in _WARNED}, {name: now.get(name) for name in _WARNED})

    def _write(self, job: Job) -> None:
        write_atomically(self._job, json.dumps({"schema_version": SCHEMA_VERSION, **job._asdict()}, indent=1))

    def job(self) -> Job:
        """The job that the folder holds.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            document: Any = json.loads(self._job.read_text(encoding="utf-8"))
            return Job(document["decides"], document["samples"], document["recorded"])
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no evaluation (no job.json)") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self._job} is damaged ({error}); put it back from a copy, or start anew with another --output"
            ) from None

    def problems(self) -> list[AskedProblem]:
        """The problems, in order; none where the file is missing.

        Raises:
            ValueError: a broken line.
        """
        found: list[AskedProblem] = []
        for number, line in enumerate(self._problems.open(encoding="utf-8") if self._problems.exists() else (), 1):
            try:
                row: dict[str, Any] = json.loads(line)
                references = tuple(row.get("references", row.get("golds", ())))  # "golds" before 0.2
                found.append(AskedProblem(row["id"], row["prompt"], references, row["cluster"], row["verifier"]))
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{self._problems}, line {number}: no problem ({error})") from None
        return found

    def samples_path(self, shard: tuple[int, int]) -> Path:
        return self.path / f"samples-{shard[0]}-of-{shard[1]}.jsonl"

    @contextmanager
    def writing(self, shard: tuple[int, int]) -> Generator[Path]:
        """Hold a shard for oneself; gives the file of its samples.

        Raises:
            ValueError: another process generates this shard.
        """
        with only_writer(self.path / "shards" / f"{shard[0]}-of-{shard[1]}", wait=False):
            yield self.samples_path(shard)

    def rows(self, samples: int | None = None) -> list[SampleRow]:
        """Every shard's samples with an index below ``samples`` (None: all); what two shards generated counts once.

        Raises:
            ValueError: a broken line, or two different texts of one sample.
        """
        found: dict[tuple[str, int], SampleRow] = {}
        for row in read_samples(sorted(self.path.glob("samples-*.jsonl"))):
            if samples is None or row.sample < samples:
                known = found.setdefault((row.problem, row.sample), row)
                if known.text != row.text:
                    raise ValueError(
                        f"{self.path}: sample {row.sample} of {row.problem!r} stands twice with different texts; "
                        "remove one of the two lines"
                    )
        return list(found.values())


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What two nested tables say differently, one line a key.

    Example:
        >>> differences({"sampling": {"temperature": 1.0}}, {"sampling": {"temperature": 0.6}})
        ['sampling.temperature: was 1.0, is now 0.6']
    """
    before, after = leaves(old), leaves(new)
    return [
        f"{key}: was {before.get(key, 'not set')}, is now {after.get(key, 'not set')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _shown(problem: Problem) -> dict[str, Any]:
    """A problem for a reader; the tests of a code problem are left out, they may be megabytes."""
    references = None if problem.verifier == "code" else list(problem.references)
    before = [{"role": turn.role, "content": turn.content} for turn in problem.context] or None
    known = {
        "id": problem.id,
        "context": before,
        "prompt": problem.prompt,
        "references": references,
        "level": problem.level,
    }
    shown = {name: value for name, value in known.items() if value is not None}
    return shown | {"verifier": problem.verifier, "cluster": problem.cluster}
