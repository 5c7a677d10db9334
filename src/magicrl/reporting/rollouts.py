"""A few recorded rollouts of a few steps: what the policy wrote while it learned, token by token.

The recording holds token ids, the tokenizer lies beside the model: where it can be read, prompts are shown and
tokens are coloured by their entropy; else the text as it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from magicrl.reporting.run_folder import RecordedRun, RunFolderError
from magicrl.reporting.wording import visible

MOST_STEPS = 6
MOST_PER_STEP = 4
MOST_TOKENS = 600
"""Of one response on the page; the parquet file has all."""
MOST_CHARACTERS = 6000
LEVELS = (0.1, 0.5, 1.0, 2.0)
"""Nats at which a token's colour deepens."""

_COLUMNS = (
    "draw", "sample", "problem_id", "level", "temperature", "max_tokens", "prompt_tokens", "tokens",
    "sampler_entropies", "finish_reason", "text", "policy_version",
    "outcome", "status", "reason", "decided_by", "extracted", "reward",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Neighbouring tokens of one colour: ``level`` 0 (below 0.1 nats) to 4, ``nats`` of a single token."""

    text: str
    level: int
    nats: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One recorded response. ``prompt`` is None where no tokenizer was found; ``why`` says why it was
    chosen, ``left_out`` what is not shown, in words."""

    step: int
    why: str
    problem_id: str
    level: int | None
    sample: int
    group_right: int
    group_size: int
    prompt: str | None
    pieces: tuple[Piece, ...]
    left_out: str
    coloured: bool
    tokens: int
    entropy: float | None
    temperature: float
    max_tokens: int
    outcome: str
    status: str
    reason: str
    decided_by: str
    extracted: str | None
    reward: float | None
    finish_reason: str


def shown_rollouts(run: RecordedRun) -> list[list[Rollout]]:
    """A few rollouts a step, of the first and last recorded step of each stage.

    Raises:
        RunFolderError: a recording that is no parquet file of rollouts.
    """
    paths = recordings(run.path / "rollouts")
    tokenizer = run_tokenizer(run)
    return [_step(step, paths[step], tokenizer) for step in chosen_steps(run, sorted(paths))]


def recordings(folder: Path) -> dict[int, Path]:
    """The recorded steps of a run's ``rollouts`` folder."""
    found: dict[int, Path] = {}
    for path in folder.glob("step-*.parquet"):
        digits = path.stem.removeprefix("step-")
        if digits.isdigit():
            found[int(digits)] = path
    return found


def chosen_steps(run: RecordedRun, recorded: Sequence[int]) -> list[int]:
    """The first and last recorded step of each stage, at most ``MOST_STEPS``."""
    chosen: set[int] = set()
    for stage in run.stages:
        inside = [step for step in recorded if stage.first_step <= step <= stage.last_step]
        if inside:
            chosen |= {inside[0], inside[-1]}
    if len(chosen) == 2:  # one stage: its middle too
        inside = [step for step in recorded if min(chosen) <= step <= max(chosen)]
        chosen.add(inside[len(inside) // 2])
    ordered = sorted(chosen)
    return ordered if len(ordered) <= MOST_STEPS else [*ordered[:1], *ordered[1 - MOST_STEPS :]]


def run_tokenizer(run: RecordedRun) -> Tokenizer | None:
    """The saved model's tokenizer, else the start model's."""
    start = run.run.get("start_model")
    folders = [run.path / "model", *([Path(start)] if isinstance(start, str) and start else [])]
    for folder in folders:
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                return Tokenizer.from_file(str(path))
            except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a broken file
                raise RunFolderError(f"{path}: no tokenizer: {error}") from None
    return None


def _step(step: int, path: Path, tokenizer: Tokenizer | None) -> list[Rollout]:
    try:
        rows = cast("list[dict[str, Any]]", pq.read_table(path, columns=list(_COLUMNS)).to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise RunFolderError(f"{path}: no recording of rollouts: {error}; remove the file") from None
    groups = {draw: list(group) for draw, group in groupby(rows, key=lambda row: row["draw"])}
    return [_rollout(step, why, row, groups[row["draw"]], tokenizer) for why, row in _chosen(rows)]


def _chosen(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The first right, wrong and cut one and the one of highest mean entropy; each only once."""
    wanted: list[tuple[str, list[Mapping[str, Any]]]] = [
        ("the first right one", [r for r in rows if r["outcome"] == "correct"][:1]),
        ("the first wrong one", [r for r in rows if r["outcome"] == "wrong" and r["finish_reason"] != "length"][:1]),
        ("the first cut at T", [r for r in rows if r["finish_reason"] == "length"][:1]),
        ("the least certain", sorted(rows, key=lambda r: -(_mean(r["sampler_entropies"]) or 0.0))),
    ]
    chosen: list[tuple[str, Mapping[str, Any]]] = []
    for why, candidates in wanted:
        fresh = next((r for r in candidates if all(r is not taken for _, taken in chosen)), None)
        if fresh is not None:
            chosen.append((why, fresh))
    return chosen[:MOST_PER_STEP]


def _rollout(
    step: int, why: str, row: Mapping[str, Any], group: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None
) -> Rollout:
    tokens = cast("list[int]", row["tokens"])
    entropies = cast("list[float] | None", row["sampler_entropies"])
    shown = _token_texts(tokenizer, tokens[:MOST_TOKENS]) if tokenizer is not None else None
    if shown is not None and entropies is not None:
        pieces = coloured_pieces(shown, entropies)
        words = f"{len(tokens) - MOST_TOKENS} more tokens" if len(tokens) > MOST_TOKENS else ""
    else:
        text = str(row["text"])
        pieces = (Piece(text=visible(text[:MOST_CHARACTERS]), level=0, nats=None),)
        words = f"{len(text) - MOST_CHARACTERS} more characters" if len(text) > MOST_CHARACTERS else ""
    return Rollout(
        step=step,
        why=why,
        problem_id=str(row["problem_id"]),
        level=row["level"],
        sample=int(row["sample"]),
        group_right=sum(r["outcome"] == "correct" for r in group),
        group_size=len(group),
        prompt=None if tokenizer is None else _prompt(tokenizer, row["prompt_tokens"]),
        pieces=pieces,
        left_out=words,
        coloured=shown is not None and entropies is not None,
        tokens=len(tokens),
        entropy=_mean(entropies),
        temperature=float(row["temperature"]),
        max_tokens=int(row["max_tokens"]),
        outcome=str(row["outcome"] or "not_judged"),
        status=str(row["status"] or ""),
        reason=str(row["reason"] or ""),
        decided_by=str(row["decided_by"] or ""),
        extracted=row["extracted"],
        reward=row["reward"],
        finish_reason=str(row["finish_reason"]),
    )


def _prompt(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids[-MOST_TOKENS:]), skip_special_tokens=False))


def _token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """A text a token; a token that ends inside a character is empty, and the next one has it whole."""
    stream = DecodeStream(skip_special_tokens=False)
    return [str(stream.step(tokenizer, token) or "") for token in ids]


def coloured_pieces(texts: Sequence[str], entropies: Sequence[float]) -> tuple[Piece, ...]:
    """Tokens as pieces of text: certain neighbours together, each other token by itself with its entropy.

    At most ``MOST_CHARACTERS`` in all: a token's text may be as long as its vocabulary allows.
    """
    pieces: list[Piece] = []
    room = MOST_CHARACTERS
    for text, nats in zip(texts, entropies, strict=False):  # the texts may have been cut
        shown = visible(text[:room])
        room -= len(text[:room])
        level = sum(nats >= edge for edge in LEVELS)
        if not shown:
            continue
        if level == 0 and pieces and pieces[-1].level == 0:
            pieces[-1] = Piece(text=pieces[-1].text + shown, level=0, nats=None)
        else:
            pieces.append(Piece(text=shown, level=level, nats=nats if level else None))
    return tuple(pieces)


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
