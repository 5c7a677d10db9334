"""The folder of an evaluation: which job it holds, its samples, and whether this call may go on with it.

``OUTPUT/NAME/job.json`` says everything that decides the samples, ``problems.jsonl`` what was asked,
``samples-I-of-N.jsonl`` holds what a shard generated, ``usage/`` an account of each call, ``fresh/LIMIT/`` the same for
samples drawn anew at another limit, ``OUTPUT/results.json`` the scores of all benchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from magicrl.evaluation.samples import SampleRow, read_samples
from magicrl.files import only_writer, write_atomically
from magicrl.records import Problem, prompt_key

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
    before, after = dict(_flat(old)), dict(_flat(new))
    return [
        f"{key}: was {before.get(key, 'not set')}, is now {after.get(key, 'not set')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(problem: Problem) -> dict[str, Any]:
    """A problem for a reader; the tests of a code problem are left out, they may be megabytes."""
    golds = None if problem.verifier == "code" else list(problem.golds)
    before = [{"role": turn.role, "content": turn.content} for turn in problem.context] or None
    known = {"id": problem.id, "context": before, "prompt": problem.prompt, "golds": golds, "level": problem.level}
    shown = {name: value for name, value in known.items() if value is not None}
    return shown | {"verifier": problem.verifier, "cluster": problem.cluster}
