"""Judged samples: a row each, the files they are in, and the folder of an evaluation.

A row says all that a score needs, so that a result can be computed anew, and by somebody else, from the files alone.
``OUTPUT/NAME/job.json`` says everything that decides the samples, ``problems.jsonl`` what was asked,
``samples-I-of-N.jsonl`` holds what a shard generated, ``usage/`` an account of each call, ``fresh/LIMIT/`` the same for
samples drawn anew at another limit, ``OUTPUT/results.json`` the scores of all benchmarks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from magicrl.files import only_writer, write_atomically
from magicrl.records import Completion, FinishReason, Outcome, Problem, Verdict, prompt_key


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One judged response.

    Attributes:
        problem: the problem's id.
        sample: index among the problem's samples.
        outcome: correct, wrong or not_judged, as the verifier said; a truncated response is wrong whatever it says.
        status: the verifier's own word.
        decided_by: the verifier's step.
        extracted: the answer it judged.
        reason: its sentence.
        finish_reason: stop or length (= truncated).
        tokens: response tokens, the end token included.
        entropy: mean nats per token, None where the engine cannot tell.
        logprob: summed log-probability of the response under the sampling distribution, None where unknown.
        seconds: wall-clock seconds from the start of its prompt.
        text: the response.
        prompt_tokens: of its prompt; None where a server makes the prompt, and in files of earlier versions.
        token_ids: the response tokens, where they were asked for.
        token_entropies: their entropies, where they were asked for.
        score: what a graded reward gave, None for other verifiers.
    """

    problem: str
    sample: int
    outcome: str
    status: str
    decided_by: str
    extracted: str | None
    reason: str
    finish_reason: str
    tokens: int
    entropy: float | None
    logprob: float | None
    seconds: float
    text: str
    prompt_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    token_entropies: tuple[float, ...] | None = None
    score: float | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == FinishReason.LENGTH.value

    @property
    def counted(self) -> bool:
        """Whether it was judged: what could not be judged is left out of every score."""
        return self.outcome != Outcome.NOT_JUDGED.value

    @property
    def correct(self) -> bool:
        return self.outcome == Outcome.CORRECT.value and not self.truncated

    @property
    def reward(self) -> float:
        """As in training: 1 or 0, or the score; a truncated response earns nothing."""
        earned = float(self.correct) if self.score is None else self.score
        return min(0.0, earned) if self.truncated else earned


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
    entropies = completion.sampler_entropies
    logprobs = completion.sampler_logprobs
    return SampleRow(
        problem=problem,
        sample=sample,
        outcome=verdict.outcome.value,
        status=verdict.status,
        decided_by=verdict.decided_by,
        extracted=verdict.extracted,
        reason=verdict.reason,
        finish_reason=completion.finish_reason.value,
        tokens=len(completion),
        entropy=None if entropies is None or not len(entropies) else float(np.mean(entropies, dtype=np.float64)),
        logprob=_known(float(np.sum(logprobs, dtype=np.float64))) if len(logprobs) == len(completion) else None,
        seconds=round(completion.seconds, 3),
        text=completion.text,
        prompt_tokens=prompt_tokens,
        token_ids=tuple(completion.tokens.tolist()) if keep_tokens else None,
        token_entropies=tuple(round(float(e), 4) for e in entropies) if keep_tokens and entropies is not None else None,
        score=verdict.score,
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
            _cut_torn_line(path)
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
    fields: dict[str, Any] = {"extracted": None, "entropy": None, "logprob": None, **document}
    for name in ("token_ids", "token_entropies"):
        if fields.get(name) is not None:
            fields[name] = tuple(fields[name])
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


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position:
            step = min(1 << 16, position)
            file.seek(position - step)
            block = file.read(step)
            newline = block.rfind(b"\n")
            if newline >= 0:
                position = position - step + newline + 1
                break
            position -= step
        if position < end:
            file.truncate(position)


SCHEMA_VERSION = 1
RESULTS = "results.json"
_WARNED = ("python", "versions", "machine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One benchmark's sampling job.

    Attributes:
        decides: what the samples and verdicts depend on; another value is another job.
        samples: wanted a problem. Not in ``decides``: more may be asked for later, and those that exist stay.
        recorded: what else is worth knowing (versions, machine, licence, where the data came from).
    """

    decides: dict[str, Any]
    samples: int
    recorded: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


class EvaluationFolder:
    """The files of one benchmark in an evaluation's output.

    Args:
        path: ``OUTPUT/NAME``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._job = path / "job.json"
        self._problems = path / "problems.jsonl"

    @property
    def usage(self) -> Path:
        """Where the accounts of the calls are."""
        return self.path / "usage"

    def fresh_at(self, limit: int) -> EvaluationFolder:
        """The folder of samples that are drawn anew at this response limit."""
        return EvaluationFolder(self.path / "fresh" / str(limit))

    def fresh_limits(self) -> list[int]:
        """Limits at which samples were drawn anew, ascending."""
        found = (path.parent.name for path in self.path.glob("fresh/*/job.json"))
        return sorted(int(name) for name in found if name.isdecimal())

    @property
    def exists(self) -> bool:
        return self._job.exists()

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
        if not self.exists:
            lines = [json.dumps(_shown(problem), ensure_ascii=False) + "\n" for problem in problems]
            write_atomically(self._problems, "".join(lines))
            write_atomically(self._job, json.dumps(job.as_dict(), indent=1))
            return []
        former = self.job()
        changed = differences(former.decides, job.decides)
        if changed:
            raise ValueError(
                f"{self.path} holds the samples of another job:\n" + "\n".join(f"  {line}" for line in changed) + "\n"
                "give the settings it was begun with, or choose another --output"
            )
        if job.samples > former.samples:
            more = Job(decides=former.decides, samples=job.samples, recorded=former.recorded)
            write_atomically(self._job, json.dumps(more.as_dict(), indent=1))
        then, now = (cast("Mapping[str, Any]", j.recorded.get("environment") or {}) for j in (former, job))
        return differences({name: then.get(name) for name in _WARNED}, {name: now.get(name) for name in _WARNED})

    def job(self) -> Job:
        """The job that the folder holds.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            document: Any = json.loads(self._job.read_text(encoding="utf-8"))
            return Job(decides=document["decides"], samples=document["samples"], recorded=document["recorded"])
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no evaluation (no job.json)") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self._job} is damaged ({error}); put it back from a copy, or start anew with another --output"
            ) from None

    def problem_ids(self) -> list[str]:
        """Ids of the problems, in order."""
        return [row["id"] for row in self._rows_of_problems()]

    def clusters(self) -> list[str]:
        """What each problem is dependent by (``Problem.cluster``), in order; of earlier versions' by its prompt."""
        return [row.get("cluster") or prompt_key(row["prompt"]) for row in self._rows_of_problems()]

    def _rows_of_problems(self) -> list[dict[str, Any]]:
        with self._problems.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def of_programs(self) -> bool:
        """Whether answers are programs: then no two of them are the same answer, and there is nothing to vote on."""
        return any(row.get("verifier") == "code" for row in self._rows_of_problems())

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
    before, after = flat_settings(old), flat_settings(new)
    return [
        f"{key}: was {before.get(key, 'not set')}, is now {after.get(key, 'not set')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def flat_settings(table: Mapping[str, Any], index: str = "[{}]") -> dict[str, Any]:
    """Nested tables as dotted key -> value, in their order; a list of plain values is one value.

    ``index`` is how a place in a list of tables is written.

    Example:
        >>> flat_settings({"run": {"seed": 1}, "stages": [{"max_tokens": 48}]})
        {'run.seed': 1, 'stages[0].max_tokens': 48}
    """
    found: dict[str, Any] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, inner in cast("Mapping[str, object]", value).items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for i, inner in enumerate(cast("list[object]", value)):
                walk(prefix + index.format(i), inner)
        else:
            found[prefix] = value

    walk("", table)
    return found


def _shown(problem: Problem) -> dict[str, Any]:
    """A problem for a reader; the tests of a code problem are left out, they may be megabytes."""
    golds = None if problem.verifier == "code" else list(problem.golds)
    before = [{"role": turn.role, "content": turn.content} for turn in problem.context] or None
    known = {"id": problem.id, "context": before, "prompt": problem.prompt, "golds": golds, "level": problem.level}
    shown = {name: value for name, value in known.items() if value is not None}
    return shown | {"verifier": problem.verifier, "cluster": problem.cluster}
