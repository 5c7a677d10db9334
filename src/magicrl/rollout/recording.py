"""Rollouts as parquet files, one row per response in draw and sample order, and the engine that replays them.

A replayed step needs no sampling, so that learner and loss can be studied on the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.files import whole_file
from magicrl.records import (
    Completion,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredGroup,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.protocol import Capabilities, RolloutEngine
from magicrl.rollout.requests import EPISODE

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("draw", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("level", pa.int32()),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("sampler_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("sampler_entropies", pa.list_(pa.float32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("policy_version", pa.int64(), nullable=False),
        pa.field("version_spans", pa.list_(pa.int64())),
        pa.field("episode", pa.string()),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("outcome", pa.string()),
        pa.field("status", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("decided_by", pa.string()),
        pa.field("extracted", pa.string()),
        pa.field("reward", pa.float32()),
        pa.field("counted", pa.bool_()),
    ]
)
_LATER = ("version_spans", "episode")  # columns that older recordings do not have
_VERDICT = ("outcome", "status", "reason", "decided_by", "extracted", "reward", "counted")


def write_rollouts(path: Path, step: int, scored_groups: Sequence[ScoredGroup]) -> None:
    """Write the rollouts of one step with their verdicts. ``path`` is replaced as a whole."""
    # Rejected groups are recorded too: they are part of the step, and a replay needs every draw.
    rows = [row for group in scored_groups for row in _rows(step, group)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        pq.write_table(table, file, compression="zstd")


def read_rollouts(folder: Path) -> list[RolloutGroup]:
    """Return the groups recorded in ``folder/*.parquet``, in draw order, without their verdicts.

    Only id, source and level of a problem are recorded. Its prompt text and references are empty, and its key is the
    id.

    Raises:
        ValueError: there is no such folder or no file in it, a file is no recording, or a draw is recorded twice.
    """
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{folder} holds no recorded rollouts (*.parquet); give a run's rollouts folder")
    groups: dict[int, RolloutGroup] = {}
    for path in files:
        # Two runs in one folder would mix their draws without any other sign.
        for group in _read(path):
            draw = group.request.draw
            if draw in groups:
                raise ValueError(f"{path}: draw {draw} was recorded before; keep the files of one run only")
            groups[draw] = group
    return [groups[draw] for draw in sorted(groups)]


def _rows(step: int, scored: ScoredGroup) -> Iterator[dict[str, Any]]:
    request = scored.group.request
    common = {
        "step": step,
        "draw": request.draw,
        "problem_id": request.problem.id,
        "source": request.problem.source,
        "level": request.problem.level,
        "temperature": request.sampling.temperature,
        "max_tokens": request.sampling.max_tokens,
        "seed": request.sampling.seed,
        "prompt_tokens": request.prompt_tokens,
    }
    for sample, (completion, verdict) in enumerate(zip(scored.group.completions, scored.verdicts, strict=True)):
        yield common | {
            "sample": sample,
            "tokens": completion.tokens,
            "sampler_logprobs": completion.sampler_logprobs,
            "sampler_entropies": completion.sampler_entropies,
            "finish_reason": completion.finish_reason.value,
            "text": completion.text,
            "policy_version": completion.policy_version,
            "version_spans": list(chain.from_iterable(completion.version_spans)) or None,
            "episode": None if completion.episode is None else EPISODE.dump_json(completion.episode).decode(),
            "seconds": completion.seconds,
            "outcome": verdict.outcome.value,
            "status": verdict.status,
            "reason": verdict.reason,
            "decided_by": verdict.decided_by,
            "extracted": verdict.extracted,
            "reward": float(scored.rewards[sample]),
            "counted": bool(scored.counted[sample]),
        }


def _read(path: Path) -> Iterator[RolloutGroup]:
    try:
        there = pq.read_schema(path).names
        table = pq.read_table(path, columns=[name for name in there if name not in _VERDICT])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no parquet file of rollouts: {error}") from error
    # a replay needs no verdicts, and older recordings lack the later columns
    missing = [name for name in SCHEMA.names if name not in (*there, *_VERDICT, *_LATER)]
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}; it is no recording of rollouts")
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for draw, rows in groupby(range(len(table)), key=columns["draw"].to_pylist().__getitem__):
        group = [{name: _value(column[row]) for name, column in columns.items()} for row in rows]
        # A replay finds samples by their position, so a gap would shift all later ones.
        if [row["sample"] for row in group] != list(range(len(group))):
            raise ValueError(f"{path}: draw {draw} does not hold the samples 0, 1, 2, ... in their order")
        yield _group(group)


def _value(cell: pa.Scalar) -> Any:
    """Return a list as a numpy view of the file's buffers, another value as a Python object."""
    if isinstance(cell, pa.ListScalar) and cell.is_valid:
        return cell.values.to_numpy()
    return cell.as_py()


def _group(rows: Sequence[Mapping[str, Any]]) -> RolloutGroup:
    first = rows[0]
    problem_id = first["problem_id"]
    problem = Problem(
        id=problem_id,
        key=problem_id,
        prompt="",
        references=(),
        verifier="",
        source=first["source"],
        level=first["level"],
    )
    request = RolloutRequest(
        draw=first["draw"],
        problem=problem,
        prompt_tokens=frozen_tokens(first["prompt_tokens"]),
        group_size=len(rows),
        sampling=SamplingParams(temperature=first["temperature"], max_tokens=first["max_tokens"], seed=first["seed"]),
    )
    return RolloutGroup(request=request, completions=tuple(_completion(row) for row in rows))


def _completion(row: Mapping[str, Any]) -> Completion:
    entropies, spans, episode = row["sampler_entropies"], row.get("version_spans"), row.get("episode")
    return Completion(
        tokens=frozen_tokens(row["tokens"]),
        text=row["text"],
        sampler_logprobs=frozen_floats(row["sampler_logprobs"]),
        sampler_entropies=None if entropies is None else frozen_floats(entropies),
        finish_reason=FinishReason(row["finish_reason"]),
        policy_version=row["policy_version"],
        seconds=row["seconds"],
        version_spans=() if spans is None else tuple((int(v), int(n)) for v, n in spans.reshape(-1, 2)),
        episode=None if episode is None else EPISODE.validate_json(episode),
    )


class ReplayEngine(RolloutEngine):
    """An engine that returns the recorded group of each draw.

    Completions are those of the recording: tokens, log-probs, policy version, and what an environment answered and
    found. Weights are not used, and no environment runs.
    """

    def __init__(self, groups: Iterable[RolloutGroup]) -> None:
        """Raise ``ValueError`` if there is no group. Each has another draw."""
        # by draw, not by problem: one problem may be drawn twice
        self._recorded = {group.request.draw: group for group in groups}
        if not self._recorded:
            raise ValueError("there are no recorded rollouts to replay")
        # entropies are a capability only if every response has them
        known = all(c.sampler_entropies is not None for group in self._recorded.values() for c in group.completions)
        self.capabilities = Capabilities(entropies=known)
        # prompt, T and the longest observations of each group: the recording engine had at least this context
        self._max_context = max(
            len(group.request.prompt_tokens)
            + group.request.sampling.max_tokens
            + max(len(completion) - completion.num_sampled for completion in group.completions)
            for group in self._recorded.values()
        )

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; ``ValueError`` for one that differs from the recording of its draw."""
        # Check every request before any is queued, so that a refused step leaves nothing in flight.
        for request in requests:
            draw = request.draw
            if draw not in self._recorded:
                raise ValueError(
                    f"draw {draw} (problem {request.problem.id!r}) was not recorded; replay serves the training steps "
                    "of the recorded run only: stop where it stopped and leave out validation, test and filter"
                )
            group = self._recorded[draw]
            recorded = group.request
            pairs = {
                "problem": (recorded.problem.id, request.problem.id),
                "prompt": (recorded.prompt_tokens.tolist(), request.prompt_tokens.tolist()),
                "group size": (recorded.group_size, request.group_size),
                "samples": (recorded.indices, request.indices),
                "temperature": (recorded.sampling.temperature, request.sampling.temperature),
            }
            for what, (was, wanted) in pairs.items():
                if was != wanted:
                    raise ValueError(
                        f"draw {draw} was recorded with {what} {was}, but the request has {wanted}; replay a run with "
                        "its own data, seed and sampling settings"
                    )
            # no engine could have generated this response with a shorter T
            longest = max(completion.num_sampled for completion in group.completions)
            if longest > request.sampling.max_tokens:
                raise ValueError(
                    f"draw {draw} was recorded with a response of {longest} tokens, max_tokens is now "
                    f"{request.sampling.max_tokens}; replay with the recorded run's stages"
                )
            # With a longer T the engine would have continued a truncated response.
            # An episode also ends at its last turn.
            if request.sampling.max_tokens > recorded.sampling.max_tokens and any(
                completion.truncated and completion.num_sampled >= recorded.sampling.max_tokens
                for completion in group.completions
            ):
                raise ValueError(
                    f"draw {draw} was recorded with a response truncated at {recorded.sampling.max_tokens} tokens, "
                    f"max_tokens is now {request.sampling.max_tokens}; replay with the recorded run's stages"
                )
        super().submit(requests)

    def generate(self, request: RolloutRequest) -> Sequence[Completion]:
        return self._recorded[request.draw].completions

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self._version = version
