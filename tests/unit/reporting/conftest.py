"""A small recorded run on disk: two stages, tests before and after, hostile text in one response."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from builders import completion, problem, request
from tokenizers import Tokenizer, decoders, models

from magicrl.records import (
    FinishReason,
    Outcome,
    RolloutGroup,
    ScoredGroup,
    Verdict,
    frozen_floats,
)
from magicrl.rollout.recording import write_rollouts

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></pre>\x1b[31m\x00\u202eexe.gnp \ud800 {{ 7*7 }}"

CONFIG = """[run]
name = "small"

[[stages]]
max_tokens = 32
rollout_batch = 8
group_size = 4
max_steps = 20

[[stages]]
max_tokens = 64
rollout_batch = 8
mini_batch = 4
group_size = 4
max_steps = 20
temperature = 0.7
kl_coefficient = 0.001
"""


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": max(0.0, mean - 0.03), "high": min(1.0, mean + 0.03)}


def evaluation(name: str, accuracy: dict[float, float], text: str, outcome: str) -> dict[str, Any]:
    scores: dict[str, Any] = {
        str(t): {
            "accuracy": interval(a),
            "per_problem": [a] * 100,
            "problems": 100,
            "samples": 16 if t else 1,
            "length_mean": 12.0,
            "truncation": 0.01,
            "entropy": 0.3,
            "boxed_and_stopped": 0.875,
        }
        for t, a in accuracy.items()
    }
    scores["1.0"]["pass_at"] = {"16": interval(0.9)}
    response = {
        "temperature": 1.0,
        "text": text,
        "outcome": outcome,
        "status": "matched",
        "decided_by": "string",
        "extracted": "7",
        "finish_reason": "stop",
        "tokens": 5,
    }
    sample = {
        "problem_id": "sum/1",
        "prompt": "What is 3 + 4 <b>?</b>",
        "reference": ["7", "seven"],
        "responses": [response],
    }
    return {"name": name, "set": "test", "model": "m", "temperatures": scores, "samples": [sample]}


def values(step: int) -> dict[str, Any]:
    second = step > 20
    return {
        "train/accuracy/mean": 0.4 + 0.01 * step,
        "train/accuracy_nontruncated/mean": 0.5 + 0.01 * step,
        "train/truncation/ratio": 0.2 if step < 3 else 0.0,
        "entropy/exact/mean": 0.5 - 0.005 * step,
        "entropy/target": 0.2,
        "entropy/alpha": 0.001 * step,
        "entropy/c": 0.001 * step,
        "length/mean": 10.0 + step / 4,
        "groups/sampled": 8,
        "groups/rejected/ratio": 0.25,
        "groups/rejected/all_correct": 2,
        "groups/rejected/all_wrong": 0,
        "learner/clip_ratio": None,
        "learner/sgd_steps": 1,
        "time/rollout": 1.0,
        "time/train": 0.5,
        "time/other": 0.25,
        "time/step": 1.75,
        "tokens/sampled": 320,
        "stage/max_tokens": 64 if second else 32,
    }


def write_run(folder: Path) -> Path:
    (folder / "evaluations").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    run = {
        "schema_version": 1,
        "name": "small",
        "seed": 3,
        "status": "finished",
        "environments": [
            {"started": "2026-01-02T03:04:05+00:00", "machine": "two cores", "versions": {"numpy": "2.1"}}
        ],
    }
    (folder / "run.json").write_text(json.dumps(run))
    rows = [{"step": s, "stage": int(s > 20), "values": values(s)} for s in range(1, 41)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [
        {"kind": "stage_end", "step": 20, "stage": 0, "message": "converged: bound 0.01"},
        {"kind": "stage_start", "step": 21, "stage": 1, "message": "T 64", "removed": 5},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    before = evaluation("before", {0.0: 0.40, 0.6: 0.47, 1.0: 0.46}, HOSTILE, "wrong")
    after = evaluation("after", {0.0: 0.95, 0.6: 0.94, 1.0: 0.90}, "<think>3 + 4</think> 7", "correct")
    (folder / "evaluations" / "before.json").write_text(json.dumps(before))
    (folder / "evaluations" / "after.json").write_text(json.dumps(after))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes the run into a folder of a given name."""
    return lambda name: write_run(tmp_path / name)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


TOKENS = (
    " 3",
    " +",
    " 4",
    "</pre><script>document.title='hit'</script>",
    "\u202e",
    "\x1b[31m",
    "W" * 3000,
    " 7",
    "[end]",
)
"""Tokens of a hostile vocabulary; the last one ends a response."""


def write_rollout_recording(folder: Path) -> None:
    """Write steps 1, 20, 21 and 40 of the run with three responses each, and their tokenizer."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(TOKENS)}, unk_token=TOKENS[-1]))
    tokenizer.decoder = decoders.Fuse()
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    for step in (1, 20, 21, 40):
        write_rollouts(folder / "rollouts" / f"step-{step:06d}.parquet", step, [scored_group(step)])


def scored_group(draw: int) -> ScoredGroup:
    """Return a right response, a hostile wrong one and a truncated one."""
    asked = problem("sum/<1>", "3 + 4", "7", source="sums")
    written = (([7, 8], "stop", "correct"), ([3, 4, 5, 6, 8], "stop", "wrong"), ([0, 1, 2, 0, 1, 2], "length", "wrong"))
    completions = tuple(
        completion(
            ids,
            sampler_entropies=frozen_floats(np.linspace(0.0, 2.5, len(ids))),
            finish_reason=FinishReason(end),
            text="".join(TOKENS[i] for i in ids),
        )
        for ids, end, _ in written
    )
    verdicts = tuple(
        Verdict(outcome=Outcome(outcome), status="matched", decided_by="string") for _, _, outcome in written
    )
    return ScoredGroup(
        group=RolloutGroup(request=request(draw, [0, 1, 2], size=3, limit=6, asked=asked), completions=completions),
        verdicts=verdicts,
        rewards=frozen_floats([1.0, 0.0, 0.0]),
        counted=np.array([True, True, True]),
    )


def write_timeline(folder: Path) -> None:
    """Write generation and training of each step, with judging that overlaps generation."""
    rows = [
        {"worker": worker, "kind": kind, "what": what, "step": step, "start": start, "end": end}
        for step in range(1, 41)
        for worker, kind, what, start, end in (
            ("local", "rollout", "rollout", 0.0, 1.0 + step / 40),
            ("judge", "other", "verify", 0.5, 1.5),
            ("local", "train", "train", 1.0 + step / 40, 2.5),
        )
    ]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def rich_run(run_folder: Path) -> Path:
    """Write the run with everything that a run may record."""
    write_rollout_recording(run_folder)
    write_timeline(run_folder)
    return run_folder


def write_variant(
    folder: Path,
    seed: int,
    *,
    loss: str = "magic",
    steps: int = 40,
    shift: float = 0.0,
    status: str = "finished",
    without: tuple[str, ...] = (),
) -> Path:
    """Write the run with another seed, loss and length.

    ``shift`` is added to its accuracy; ``without`` lists missing metrics.
    """
    write_run(folder)
    config = CONFIG.replace('name = "small"', f'name = "small"\nseed = {seed}') + f'\n[algorithm]\nloss = "{loss}"\n'
    (folder / "config.toml").write_text(config)
    facts = json.loads((folder / "run.json").read_text()) | {"seed": seed, "status": status}
    (folder / "run.json").write_text(json.dumps(facts | {"data": {"test/test": {"sha256": "a", "problems": 4}}}))
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        told = values(step) | {"train/accuracy/mean": 0.4 + 0.01 * step + shift, "learner/ratio_max": 1.0 + seed / 10}
        rows.append(
            {"step": step, "stage": int(step > 20), "values": {k: v for k, v in told.items() if k not in without}}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, shares in (("before", [0.0, 0.5, 0.5, 1.0]), ("after", [0.5, 0.5, 1.0, 1.0])):
        path = folder / "evaluations" / f"{name}.json"
        document = json.loads(path.read_text())
        moved = [min(1.0, share + (shift if name == "after" else 0.0)) for share in shares]
        document["temperatures"]["1.0"] |= {"per_problem": moved, "problems": 4}
        path.write_text(json.dumps(document))
    return folder


@pytest.fixture
def variant_folders(tmp_path: Path) -> list[Path]:
    """Write two variants with two seeds each: another loss, 0.1 and 0.2 better after training."""
    return [
        write_variant(tmp_path / "runs" / "magic-0", 0),
        write_variant(tmp_path / "runs" / "magic-1", 1, shift=0.02),
        write_variant(tmp_path / "runs" / "ppo-0", 0, loss="ppo", shift=0.1),
        write_variant(tmp_path / "runs" / "ppo-1", 1, loss="ppo", shift=0.2),
    ]


def write_evaluation(
    folder: Path,
    right: dict[str, list[bool]],
    *,
    name: str = "sums",
    model: str = "models/start",
    temperature: float = 1.0,
    text: str = HOSTILE,
    tokens: int = 40,
) -> Path:
    """Write the files of ``magicrl eval``: scored samples by problem (right or not), of ``tokens`` tokens and more."""
    from magicrl.evaluation.options import arguments
    from magicrl.evaluation.results import write_results
    from magicrl.evaluation.samples import EvaluationFolder, Job, SampleFile, sample_row

    sampling = {"temperature": temperature, "top_p": 1.0, "max_tokens": 128, "seed": 0}
    checksum = "-".join(sorted(right))
    engine = {"engine": "in_process", "dtype": "float32"}
    judging = {"extract": "box", "reasoning": "auto", "time_limit": 10.0}
    decides = {"benchmark": name, "problems": {"sha256": checksum}, "engine": engine}
    job = Job(
        decides=decides | {"sampling": sampling, "judging": judging},
        samples=len(next(iter(right.values()))),
        recorded={
            "benchmark": {"title": name, "whole": True, "set_aside": []},
            "engine": {"model": model, "device": "cpu"},
            "environment": {"started": "2026-01-02T03:04:05+00:00", "git": "abc", "machine": "two cores"},
            "knows_limit": False,
            "preset": None,
        },
    )
    problems = [problem(key, f"Add <b>{key}</b>", "7", source=name) for key in right]
    place = EvaluationFolder(folder / name)
    place.begin(job, problems)
    file = SampleFile(place.path / "samples-0-of-1.jsonl")
    for i, (key, outcomes) in enumerate(right.items()):
        for sample, correct in enumerate(outcomes):
            length = tokens + 8 * i + sample
            sampled = completion([sample % 3] * length, sampler_entropies=frozen_floats([0.2] * length), text=text)
            verdict = Verdict(
                outcome=Outcome.CORRECT if correct else Outcome.WRONG,
                status="matched" if correct else "mismatch",
                decided_by="string",
                extracted="7" if correct else "8",
            )
            file.append(sample_row(key, sample, sampled, verdict, keep_tokens=True))
    file.close()
    write_results(arguments(output=folder), [name])
    return folder


@pytest.fixture
def evaluation_folders(tmp_path: Path) -> list[Path]:
    """Write evaluations of two models on three problems with two samples each: one problem gained, one lost."""
    base = tmp_path / "evals"
    first = {"a": [True, True], "b": [False, False], "c": [True, True]}
    second = {"a": [False, False], "b": [True, True], "c": [True, False]}
    return [
        write_evaluation(base / "start", first),
        write_evaluation(base / "trained", second, model="runs/better/model", tokens=20),
    ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a headless browser."""
    from .browsing import chromium

    with chromium() as started:
        yield started
