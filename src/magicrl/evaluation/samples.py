"""Judged samples: one row each, their files, and the folder of an evaluation.

A row holds everything that a score needs, so that anybody can compute a result again from the files.
``OUTPUT/NAME/job.json`` holds everything that decides the samples, ``problems.jsonl`` the problems,
``samples-I-of-N.jsonl`` the samples of a shard, ``usage/`` an account of each call, ``fresh/LIMIT/`` the same files for
fresh samples at another limit, ``OUTPUT/results.json`` the scores of all benchmarks.
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
from typing import Any, TypeAlias, cast

import numpy as np

from magicrl.config.loader import leaves
from magicrl.files import named_errors, only_writer, unwritable, write_atomically
from magicrl.records import Completion, FinishReason, Message, Outcome, Problem, Verdict, reward_earned


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One judged response."""

    problem: str  # id of the problem
    sample: int  # index among the problem's samples
    outcome: str  # the verifier's: correct, wrong or not_judged; a truncated response is wrong in any case
    status: str  # the verifier's status
    decided_by: str  # the verifier's deciding step
    extracted: str | None = None  # the answer that was judged
    reason: str  # the verifier's explanation
    finish_reason: str  # stop, length (= truncated) or aborted
    tokens: int  # tokens that the model wrote, including the end token
    entropy: float | None = None  # mean nats per token; None if the engine does not report it
    logprob: float | None = None  # of the whole response under the sampling distribution; None if unknown
    seconds: float  # wall time from the start of the prompt
    text: str
    prompt_tokens: int | None = None  # None if a server makes the prompt
    token_ids: tuple[int, ...] | None = None  # tokens that the model wrote, with ``keep_tokens``
    token_entropies: tuple[float, ...] | None = None
    score: float | None = None  # score of a graded reward; None for other verifiers

    @property
    def truncated(self) -> bool:
        return self.finish_reason == FinishReason.LENGTH.value

    @property
    def counted(self) -> bool:
        """Whether scores include the response: it was judged and not aborted."""
        return self.outcome != Outcome.NOT_JUDGED.value and self.finish_reason != FinishReason.ABORTED.value

    @property
    def correct(self) -> bool:
        return self.outcome == Outcome.CORRECT.value and not self.truncated

    @property
    def reward(self) -> float:
        """Reward as in training: 1 or 0, or the score; a truncated response earns nothing."""
        return reward_earned(float(self.correct) if self.score is None else self.score, truncated=self.truncated)


def sample_row(
    problem: str,
    sample: int,
    completion: Completion,
    verdict: Verdict,
    *,
    prompt_tokens: int | None = None,
    keep_tokens: bool = False,
) -> SampleRow:
    """Return the row of a completion and its verdict."""
    logprobs, entropies = completion.sampler_logprobs, completion.sampler_entropies
    # observations were not sampled
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
    """A JSON Lines file that grows sample by sample and survives a kill at any instant.

    Args:
        path: created if absent. An incomplete last line is removed.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                # the next line would otherwise be appended to an incomplete one
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self._file = path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise unwritable(path, error) from None

    def append(self, row: SampleRow) -> None:
        """Write one row. It is in the file when this returns, and on the disk after `close`."""
        document = {key: value for key, value in asdict(row).items() if value is not None}
        with named_errors(self._path):
            self._file.write(json.dumps(document, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Flush to the disk."""
        with named_errors(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def read_samples(paths: Iterable[Path]) -> Iterator[SampleRow]:
    """Yield every row of these files, in order, except an incomplete last line.

    Raises:
        ValueError: a broken line; names file and line.
    """
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    document = json.loads(line)
                    if not isinstance(document, dict):
                        raise TypeError("not an object")
                    known = cast("dict[str, Any]", document).items()
                    fields: dict[str, Any] = {
                        name: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for name, v in known
                    }
                    yield SampleRow(**fields)
                except (ValueError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number}: no sample of this version ({error}); delete that line to have the "
                        "sample generated again"
                    ) from None


def by_problem(rows: Iterable[SampleRow], order: Sequence[str]) -> list[list[SampleRow]]:
    """Return the rows of each problem of ``order``, sorted by sample.

    Raises:
        ValueError: a sample appears twice, or belongs to no problem of ``order``.
    """
    found: dict[str, dict[int, SampleRow]] = {name: {} for name in order}
    for row in rows:
        if row.problem not in found:
            raise ValueError(f"sample {row.sample} of {row.problem!r} belongs to no problem of this evaluation")
        if row.sample in found[row.problem]:
            raise ValueError(f"sample {row.sample} of {row.problem!r} appears twice")
        found[row.problem][row.sample] = row
    return [[samples[index] for index in sorted(samples)] for samples in found.values()]


SCHEMA_VERSION = 1
RESULTS = "results.json"
_WARNED = ("python", "versions", "machine", "device")
Job: TypeAlias = dict[str, Any]
"""One benchmark's sampling job, in the form of ``job.json``.

- ``decides``: everything that the samples and verdicts depend on; with another value it is another job.
- ``samples``: requested number per problem. A later call may request more, and existing samples stay.
- ``recorded``: further facts (versions, machine, licence, source of the data).
"""


class EvaluationFolder:
    """The files of one benchmark in an evaluation's output, ``OUTPUT/NAME``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.usage = path / "usage"  # accounts of the calls
        self._job = path / "job.json"
        self._problems = path / "problems.jsonl"

    def fresh_at(self, limit: int) -> EvaluationFolder:
        """Return the folder of fresh samples at this response limit."""
        return EvaluationFolder(self.path / "fresh" / str(limit))

    def fresh_limits(self) -> list[int]:
        """Return the limits with fresh samples, ascending."""
        found = (path.parent.name for path in self.path.glob("fresh/*/job.json"))
        return sorted(int(name) for name in found if name.isdecimal())

    def make_room(self, job: Job) -> tuple[list[str], Path] | None:
        """Move samples of other settings to ``OUTPUT/earlier/NAME-1`` (or -2, ...), where no later call reads them.

        Returns:
            The differences and the new place; None if the folder is empty or holds the samples of this job.
        """
        if not self._job.exists() or not differences(self.job()["decides"], job["decides"]):
            return None
        earlier = self.path.parent / "earlier"
        # another shard may have moved them in between, and have begun this job
        with only_writer(earlier, wait=True):
            if not self._job.exists() or not (changed := differences(self.job()["decides"], job["decides"])):
                return None
            place = next(p for n in itertools.count(1) if not (p := earlier / f"{self.path.name}-{n}").exists())
            return changed, self.path.rename(place)

    def begin(self, job: Job, problems: Sequence[Problem]) -> list[str]:
        """Write the job, or check that the folder holds this job.

        Returns:
            Differences from the machine and versions that began the job: samples may differ in their last bits.

        Raises:
            ValueError: the folder holds another job (the message lists the differences), or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from None
        if not self._job.exists():
            lines = [json.dumps(_shown(problem), ensure_ascii=False) + "\n" for problem in problems]
            write_atomically(self._problems, "".join(lines))
            self._write(job)
            return []
        former = self.job()
        changed = differences(former["decides"], job["decides"])
        if any(line.startswith("problems.") for line in changed):
            # a reader learns nothing from another checksum: filter, source or template say why it differs
            changed += differences(*(one["recorded"].get("benchmark", {}) for one in (former, job)))
        if changed:
            raise ValueError(
                f"{self.path} holds the samples of another job:\n" + "\n".join(f"  {line}" for line in changed) + "\n"
                "give the settings it was begun with, or choose another --output"
            )
        # never fewer: existing samples stay, since an earlier call requested them
        if job["samples"] > former["samples"]:
            self._write({**former, "samples": job["samples"]})
        recorded = (one["recorded"] for one in (former, job))
        facts = [{**(known.get("environment") or {}), **(known.get("engine") or {})} for known in recorded]
        then, now = ({name: known.get(name) for name in _WARNED} for known in facts)
        return differences(then, now)

    def _write(self, job: Job) -> None:
        write_atomically(self._job, json.dumps({"schema_version": SCHEMA_VERSION, **job}, indent=1))

    def job(self) -> Job:
        """Return the job of the folder.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            document: Any = json.loads(self._job.read_text(encoding="utf-8"))
            if document["decides"]["engine"].get("engine") == "openai" and document["recorded"]["knows_limit"]:
                document["decides"]["engine"].setdefault("dialect", "openai")  # earlier versions did not record it
            return {name: document[name] for name in ("decides", "samples", "recorded")}
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no evaluation (no job.json)") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self._job} is damaged ({error}); restore it from a copy, or choose another --output"
            ) from None

    def problems(self) -> list[Problem]:
        """Return the problems, in order; none if the file is missing. Code problems have no tests.

        Raises:
            ValueError: a broken line.
        """
        found: list[Problem] = []
        for number, line in enumerate(self._problems.open(encoding="utf-8") if self._problems.exists() else (), 1):
            try:
                row: dict[str, Any] = json.loads(line)
                references = tuple(row.get("references", row.get("golds", ())))  # "golds" before 0.2
                known = {name: row[name] for name in ("id", "prompt", "verifier")}
                known["context"] = tuple(Message(**turn) for turn in row.get("context", ()))
                # the cluster alone is recorded: of a problem without a template it is the key
                found.append(Problem(**known, references=references, source=self.path.name, key=row["cluster"]))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{self._problems}, line {number}: no problem ({error})") from None
        return found

    @contextmanager
    def writing(self, shard: tuple[int, int]) -> Generator[Path]:
        """Lock a shard for this process, and return the path of its samples.

        Raises:
            ValueError: another process generates this shard.
        """
        name = f"{shard[0]}-of-{shard[1]}"
        with only_writer(self.path / "shards" / name, wait=False):
            yield self.path / f"samples-{name}.jsonl"

    def rows(self, samples: int | None = None) -> list[SampleRow]:
        """Return the samples of all shards with an index below ``samples`` (None: all), each sample once.

        Raises:
            ValueError: a broken line, or two different texts of one sample.
        """
        found: dict[tuple[str, int], SampleRow] = {}
        for row in read_samples(sorted(self.path.glob("samples-*.jsonl"))):
            if samples is None or row.sample < samples:
                known = found.setdefault((row.problem, row.sample), row)
                if known.text != row.text:
                    raise ValueError(
                        f"{self.path}: sample {row.sample} of {row.problem!r} appears twice with different texts; "
                        "remove one of the two lines"
                    )
        return list(found.values())


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of two nested tables, one line per key.

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


def whole_prompt(problem: Problem) -> str:
    """Return a problem's prompt as text; in a conversation each turn follows its role."""
    if not problem.context:
        return problem.prompt
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in problem.messages)


def _shown(problem: Problem) -> dict[str, Any]:
    """Return a problem without the tests of a code problem, which may be megabytes."""
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
