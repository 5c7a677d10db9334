"""Recorded rollouts are read back unchanged, and replay serves them only to the run that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import completion, problem, request

from magicrl.records import (
    Episode,
    FinishReason,
    Outcome,
    RolloutGroup,
    ScoredGroup,
    Verdict,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.recording import ReplayEngine, read_rollouts, write_rollouts

Make = Callable[..., Any]


def scored_group(draw: int, lengths: tuple[int, ...] = (3, 1, 5), *, entropies: bool = True) -> ScoredGroup:
    asked = request(
        draw,
        [7, draw],
        size=len(lengths),
        temperature=0.6,
        limit=5,
        seed=9,
        asked=problem(f"p{draw}", "what?", "4", source="sums", level=2),
    )
    completions = tuple(
        completion(
            np.arange(n) + draw,
            text=f"réponse {n}",
            sampler_logprobs=frozen_floats(-np.arange(n) / 7),
            sampler_entropies=frozen_floats(np.arange(n) / 3) if entropies else None,
            finish_reason=FinishReason.LENGTH if n == 5 else FinishReason.STOP,
            policy_version=draw * 10 + n,
            seconds=n / 4,
        )
        for n in lengths
    )
    verdicts = tuple(
        Verdict(outcome=Outcome.CORRECT, status="matched", reason="same", decided_by="string", extracted="4")
        if n != 1
        else Verdict(outcome=Outcome.NOT_JUDGED, status="worker_died")
        for n in lengths
    )
    counted = np.array([v.outcome is not Outcome.NOT_JUDGED for v in verdicts])
    rewards = frozen_floats([float(v.correct and not c.truncated) for v, c in zip(verdicts, completions, strict=True)])
    group = RolloutGroup(request=asked, completions=completions)
    return ScoredGroup(group=group, verdicts=verdicts, rewards=rewards, counted=counted)


def same(left: RolloutGroup, right: RolloutGroup) -> bool:
    if len(left.completions) != len(right.completions):
        return False
    for a, b in zip(left.completions, right.completions, strict=True):
        for name in ("text", "finish_reason", "policy_version", "seconds"):
            if getattr(a, name) != getattr(b, name):
                return False
        for name in ("tokens", "sampler_logprobs", "sampler_entropies"):
            x, y = getattr(a, name), getattr(b, name)
            if (x is None) != (y is None) or (x is not None and (x.dtype != y.dtype or x.tobytes() != y.tobytes())):
                return False
    return True


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Use two steps, groups of different sizes, one without entropies. Files are read in draw order."""
    first, second = scored_group(4), scored_group(2, (5, 5), entropies=False)
    third = scored_group(11, (2, 0, 4))
    write_rollouts(tmp_path / "step-000002.parquet", 2, [third])
    write_rollouts(tmp_path / "step-000001.parquet", 1, [second, first])
    groups = read_rollouts(tmp_path)
    assert [g.request.draw for g in groups] == [2, 4, 11]
    for group, scored in zip(groups, (second, first, third), strict=True):
        assert same(group, scored.group)
        assert group.request.sampling == scored.group.request.sampling
        assert group.request.prompt_tokens.tolist() == scored.group.request.prompt_tokens.tolist()
        assert (group.request.problem.id, group.request.problem.level) == (scored.group.request.problem.id, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]


def test_spans_of_versions_are_kept_and_older_recordings_have_none(tmp_path: Path) -> None:
    scored = scored_group(4, (3, 5))
    spanning = replace(scored.group.completions[0], policy_version=7, version_spans=((7, 1), (9, 2)))
    group = replace(scored.group, completions=(spanning, scored.group.completions[1]))
    write_rollouts(tmp_path / "a.parquet", 1, [replace(scored, group=group)])
    (read,) = read_rollouts(tmp_path)
    assert [c.version_spans for c in read.completions] == [((7, 1), (9, 2)), ()]
    assert read.completions[0].token_versions.tolist() == [7, 9, 9]
    assert read.completions[1].token_versions.tolist() == [45] * 5
    pq.write_table(pq.read_table(tmp_path / "a.parquet").drop_columns("version_spans"), tmp_path / "a.parquet")
    (older,) = read_rollouts(tmp_path)
    assert [c.version_spans for c in older.completions] == [(), ()]


def test_episodes_are_kept_and_older_recordings_have_none(tmp_path: Path) -> None:
    verdict = Verdict(outcome=Outcome.WRONG, status="score_below", decided_by="environment", score=0.25)
    episodes = [
        Episode(observed=((1, 2), (4, 1)), answer="5", verdict=verdict, metrics={"guesses": 3.0}, cut=1),
        Episode(observed=(), answer="réponse 1"),
        None,
    ]
    scored = scored_group(4, (6, 1, 3))
    pairs = zip(scored.group.completions, episodes, strict=True)
    group = replace(scored.group, completions=tuple(replace(c, episode=e) for c, e in pairs))
    write_rollouts(tmp_path / "a.parquet", 1, [replace(scored, group=group)])
    (read,) = read_rollouts(tmp_path)
    assert [c.episode for c in read.completions] == episodes
    assert [c.num_sampled for c in read.completions] == [3, 1, 3]
    # T = 5 limits the model's tokens: the response of six tokens has three, and the context holds the others as well
    engine = ReplayEngine([read])
    assert engine.max_context == 2 + 5 + 3
    asked = read.request
    engine.submit([replace(asked, sampling=replace(asked.sampling, max_tokens=3))])
    assert [c.episode for group in engine.finished() for c in group.completions] == episodes
    with pytest.raises(ValueError, match="3 tokens, max_tokens is now 2"):
        engine.submit([replace(asked, sampling=replace(asked.sampling, max_tokens=2))])
    pq.write_table(pq.read_table(tmp_path / "a.parquet").drop_columns("episode"), tmp_path / "a.parquet")
    (older,) = read_rollouts(tmp_path)
    assert [c.episode for c in older.completions] == [None] * 3


def test_verdicts_and_rewards_are_recorded(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.parquet", 3, [scored_group(4)])
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [(r["step"], r["draw"], r["sample"]) for r in rows] == [(3, 4, 0), (3, 4, 1), (3, 4, 2)]
    assert [r["outcome"] for r in rows] == ["correct", "not_judged", "correct"]
    assert [r["reward"] for r in rows] == [1.0, 0.0, 0.0]
    assert [r["counted"] for r in rows] == [True, False, True]
    assert [r["extracted"] for r in rows] == ["4", None, "4"]
    assert rows[0]["decided_by"] == "string"
    assert rows[2]["finish_reason"] == "length"


def test_a_step_may_hold_nothing(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.parquet", 1, [])
    write_rollouts(tmp_path / "b.parquet", 2, [scored_group(0)])
    assert len(read_rollouts(tmp_path)) == 1


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, 1, [scored_group(0)])

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        write_rollouts(path, 1, [scored_group(1)])
    assert [g.request.draw for g in read_rollouts(tmp_path)] == [0]


def test_unreadable_recordings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no recorded rollouts"):
        read_rollouts(tmp_path / "absent")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"a\.parquet is no parquet file"):
        read_rollouts(tmp_path)
    pq.write_table(pa.table({"step": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet"):
        read_rollouts(tmp_path)
    write_rollouts(tmp_path / "a.parquet", 1, [scored_group(5)])
    write_rollouts(tmp_path / "b.parquet", 2, [scored_group(5)])
    with pytest.raises(ValueError, match=r"b\.parquet: draw 5 was recorded before"):
        read_rollouts(tmp_path)


def test_replay_gives_the_recorded_groups(tmp_path: Path) -> None:
    recorded = [scored_group(draw) for draw in range(3)]
    write_rollouts(tmp_path / "a.parquet", 1, recorded)
    engine = ReplayEngine(read_rollouts(tmp_path))
    assert isinstance(engine, RolloutEngine)
    assert engine.capabilities.entropies
    without = scored_group(3, entropies=False).group
    assert not ReplayEngine([*read_rollouts(tmp_path), without]).capabilities.entropies, "one response has none"
    assert engine.max_context == 7
    engine.load_weights({}, 8)
    assert engine.policy_version == 8
    engine.submit([recorded[1].group.request, recorded[0].group.request])
    groups = list(engine.finished())
    assert [g.request for g in groups] == [recorded[1].group.request, recorded[0].group.request]
    assert all(same(g, r.group) for g, r in zip(groups, (recorded[1], recorded[0]), strict=True))
    engine.submit([recorded[2].group.request])
    assert engine.interrupt() == [recorded[2].group.request]
    assert list(engine.finished()) == []


def test_replay_refuses_another_run() -> None:
    group = scored_group(3).group
    asked = group.request
    engine = ReplayEngine([group])
    sampling = asked.sampling
    for changed, message in (
        (replace(asked, draw=4), "draw 4 .* was not recorded"),
        (replace(asked, problem=replace(asked.problem, id="other")), "problem p3, but the request has other"),
        (replace(asked, prompt_tokens=frozen_tokens([1])), "prompt"),
        (replace(asked, group_size=2), "group size 3, but the request has 2"),
        (replace(asked, sampling=replace(sampling, temperature=1.0)), "temperature 0.6"),
        (replace(asked, sampling=replace(sampling, max_tokens=4)), "5 tokens, max_tokens is now 4"),
        (replace(asked, sampling=replace(sampling, max_tokens=6)), "truncated at 5 tokens, max_tokens is now 6"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit([asked, changed])
    assert list(engine.finished()) == []
    with pytest.raises(ValueError, match="no recorded rollouts"):
        ReplayEngine([])


def test_the_engines_own_rollouts_survive_the_round_trip(
    tmp_path: Path, make_reference: Make, make_engine: Make, make_requests: Make
) -> None:
    engine = make_engine(make_reference("llama"), end_tokens=frozenset({2, 5}))
    engine.submit(make_requests())
    groups = sorted(engine.finished(), key=lambda g: g.request.draw)
    scored = [
        ScoredGroup(
            group=g,
            verdicts=tuple(Verdict(outcome=Outcome.WRONG, status="mismatch") for _ in g.completions),
            rewards=frozen_floats(np.zeros(len(g.completions))),
            counted=np.ones(len(g.completions), dtype=np.bool_),
        )
        for g in groups
    ]
    write_rollouts(tmp_path / "a.parquet", 1, scored)
    assert all(same(a, b) for a, b in zip(read_rollouts(tmp_path), groups, strict=True))
