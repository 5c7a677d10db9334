"""Judged samples as rows: what an evaluation writes, reads again and scores.

A row says all that a score needs, so that a result can be computed anew, and by somebody else, from the files alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from magicrl.records import Completion, FinishReason, Outcome, Verdict


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
