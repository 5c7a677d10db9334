"""Custom rewards: every form of a function, where it is judged, and the meaning of its failures."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from magicrl.algorithms.advantages import Signal, group_signal, score_group, scored_advantages
from magicrl.algorithms.filters import PassCount
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.records import (
    Completion,
    FinishReason,
    Outcome,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredGroup,
    Verdict,
    frozen_floats,
    frozen_tokens,
)
from magicrl.training.metrics import rollout_metrics
from magicrl_verifiers import VerifierPool, reward
from magicrl_verifiers.records import make_verdict
from magicrl_verifiers.rewards import RewardFunction
from magicrl_verifiers.table import verifier_spec

REWARDS = """
import asyncio, os, psutil, resource, sys
from magicrl.records import Outcome, Verdict
from magicrl_verifiers import reward

def plain(problem, response):
    return len(response) / 4

def logged(problem, response):
    return {"score": len(response) / 4, "length": len(response)}

def verdict(problem, response):
    right = response in problem.references
    return Verdict(outcome=Outcome.CORRECT if right else Outcome.WRONG, status="mine", score=float(right) / 2)

@reward(batched=True, right_from=0.5)
def batched(problems, responses):
    return [len(response) / 4 for response in responses]

@reward(batched=True)
def short_list(problems, responses):
    return [1.0]

class Scores:
    def __iter__(self):
        raise KeyboardInterrupt

@reward(batched=True)
async def interrupted_scores(problems, responses):
    return Scores()

async def waits(problem, response):
    await asyncio.sleep(0.2)
    return len(response) / 4

@reward(batched=True, time_limit=0.1)
async def too_long(problems, responses):
    await asyncio.sleep(3)

running = most = 0

@reward(concurrency=2)
async def counted(problem, response):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.02)
    running -= 1
    return most

@reward(isolated=True, time_limit=0.5, memory_limit_mb=256)
def isolated(problem, response):
    if response == "loop":
        while True: pass
    if response == "memory":
        "x" * (1 << 30)
    if response == "exit":
        os._exit(3)
    if response == "raise":
        with open(__file__ + ".raised", "a") as file:
            file.write("once ")
        raise ValueError("no score")
    return {"score": len(response) / 4, "pid": os.getpid(), "extra": problem.extra["n"], "turns": len(problem.context)}

@reward(isolated=True)
def bounded(problem, response):
    return {"score": 1, "room": (resource.getrlimit(resource.RLIMIT_AS)[0] - psutil.Process().memory_info().vms) >> 20}

def raises(problem, response):
    raise KeyError(response)

def quotes(problem, response):
    raise ValueError("\\x1b[2J " * 200)

async def from_inside(problem, response):
    raise TimeoutError("the server is slow")

def cancelled(problem, response):
    raise asyncio.CancelledError("by a library")

async def cancelled_while_waiting(problem, response):
    raise asyncio.CancelledError("by a library")

async def presses_ctrl_c(problem, response):
    raise KeyboardInterrupt

def forgets(problem, response):
    pass

def infinite(problem, response):
    return float("inf")

def huge(problem, response):
    return 1e300

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


def problem(file: Path, name: str, references: tuple[str, ...] = ()) -> Problem:
    extra = {"n": 7, "read": date(2026, 1, 31)}  # a Parquet file has columns that JSON cannot represent
    return Problem(id="p", prompt="?", references=references, verifier=f"{file}:{name}", source="doc", extra=extra)


def judged(file: Path, name: str, *responses: str, references: tuple[str, ...] = ()) -> tuple[Verdict, ...]:
    with VerifierPool() as pool:
        return pool.judge(problem(file, name, references), responses)


def scores(verdicts: tuple[Verdict, ...]) -> list[float | None]:
    return [verdict.score for verdict in verdicts]


@pytest.mark.parametrize("name", ["plain", "logged", "batched", "waits"])
def test_every_form_gives_its_scores_in_order(file: Path, name: str) -> None:
    verdicts = judged(file, name, "a", "abcd", "ab", "")
    assert scores(verdicts) == [0.25, 1.0, 0.5, 0.0]
    right_from = 0.5 if name == "batched" else 1.0
    assert [verdict.correct for verdict in verdicts] == [score >= right_from for score in (0.25, 1.0, 0.5, 0.0)]


def test_a_verdict_is_taken_as_it_is(file: Path) -> None:
    right, wrong = judged(file, "verdict", "7", "8", references=("7",))
    assert (right.outcome, right.status, right.score) == (Outcome.CORRECT, "mine", 0.5)
    assert (wrong.outcome, wrong.score) == (Outcome.WRONG, 0.0)


def test_async_calls_wait_together_and_beside_the_caller(file: Path) -> None:
    with VerifierPool() as pool:
        start = time.perf_counter()
        ticket = pool.submit(problem(file, "waits"), ["a"] * 50)
        assert not pool.ready(ticket)
        assert len(pool.result(ticket)) == 50
        assert time.perf_counter() - start < 50 * 0.2
        waiting = pool.submit(problem(file, "waits"), ["a"])
    with pytest.raises(RuntimeError, match="closed"):
        pool.result(waiting)


def test_the_limit_of_concurrent_calls_holds_over_all_groups(file: Path) -> None:
    with VerifierPool() as pool:
        tickets = [pool.submit(problem(file, "counted"), ["a"] * 3) for _ in range(3)]
        assert max(verdict.score or 0.0 for ticket in tickets for verdict in pool.result(ticket)) == 2.0


def test_threads_call_functions_of_this_process_in_turn() -> None:
    # On a cluster an actor calls from many threads, and this reward redirects stdout of the whole process.

    def printed(problem: Problem, response: str) -> float:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            time.sleep(0.005)
            sys.stdout.write(response)
            return float(text.getvalue() == response)

    asked = problem(Path("reward.py"), "printed")
    made = [RewardFunction(name, printed) for name in "ab"]
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(made[n % 2].judge, asked, [str(n)]) for n in range(16)]
    assert all(call.result()[0].correct for call in calls)


def test_workers_import_what_the_run_imports_and_have_the_recipes_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(file.parent)
    with VerifierConfig(memory_limit_mb=300).pool() as pool:
        (verdict,) = pool.judge(replace(problem(file, ""), verifier=f"{file.stem}:bounded"), ["a"])
    assert verdict.correct, verdict.reason
    assert 100 < verdict.metrics["room"] <= 300


def test_an_isolated_call_is_killed_at_its_limits_and_judges_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), VerifierPool() as pool:
        first, loop, memory, gone, raised, last = pool.judge(
            problem(file, "isolated"), ["ab", "loop", "memory", "exit", "raise", "abcd"]
        )
        assert (first.score, first.metrics["extra"], first.metrics["turns"]) == (0.5, 7.0, 0.0)
        assert last.correct
        assert first.metrics["pid"] != last.metrics["pid"], "the one that hung was replaced"
    assert {v.outcome for v in (loop, memory, gone, raised)} == {Outcome.NOT_JUDGED}
    assert Path(f"{file}.raised").read_text() == "once ", "what raised would raise again"
    assert "0.5 s of CPU time" in loop.reason
    assert "MemoryError" in memory.reason
    warnings = [record.message for record in caplog.records if record.name == "magicrl_verifiers.rewards"]
    assert len(warnings) == 4
    assert all(f"{file}:isolated" in message for message in warnings)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'a' (mine.py, line "),
        ("quotes", "(mine.py, line "),
        ("from_inside", "TimeoutError: the server is slow (mine.py, line "),
        ("cancelled", "CancelledError: by a library (mine.py, line "),
        ("cancelled_while_waiting", "CancelledError: by a library (mine.py, line "),
        ("presses_ctrl_c", "KeyboardInterrupt:  (mine.py, line "),
        ("interrupted_scores", "KeyboardInterrupt:  (mine.py, line "),
        ("forgets", "must be a number, got None"),
        ("infinite", "must be finite"),
        ("huge", "must be within 1e+30 of 0, got 1e+300; scale it"),
        ("short_list", "must return 2 scores, got 1"),
        ("too_long", "no score within 0.1 s"),
    ],
)
def test_what_fails_is_not_judged_and_told_once(
    file: Path, name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = problem(file, name)
    with caplog.at_level(logging.WARNING), VerifierPool() as pool:
        verdicts = [v for id in ("p", "q") for v in pool.judge(replace(asked, id=id), ["a", "a"])]
    assert [(v.outcome, v.status, v.score) for v in verdicts] == [(Outcome.NOT_JUDGED, "reward_failed", None)] * 4
    assert reason in verdicts[0].reason
    assert verdicts[0].reason.isprintable()
    (record,) = (record for record in caplog.records if record.name == "magicrl_verifiers.rewards")
    assert reason in record.message
    assert f"{file}:{name}" in record.message


def test_what_is_no_reward_is_refused(file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown reward 'math'; did you mean 'maths'\? Known: code, exact, judge, maths"
    ):
        verifier_spec("math")
    with pytest.raises(ValueError, match="has no 'plane'; did you mean 'plain'"):
        verifier_spec(f"{file}:plane")
    with pytest.raises(ValueError, match="is no function but int"):
        verifier_spec(f"{file}:number")
    with pytest.raises(ValueError, match="time_limit of a reward must be positive"):
        reward(time_limit=0.0)
    with VerifierPool() as pool, pytest.raises(ValueError, match="no reference answer"):
        pool.submit(Problem(id="p", prompt="?", references=(), verifier="exact", source="doc"), ["1"])


# --- effect of scores on advantages ------------------------------------------------------------------------------


def group(*given: float | None, right_from: float = 1.0, cut: tuple[int, ...] = ()) -> ScoredGroup:
    """Return a group whose responses have these scores; None is a failed reward."""
    completions = tuple(
        Completion(
            tokens=frozen_tokens([1]),
            text="",
            finish_reason=FinishReason.LENGTH if index in cut else FinishReason.STOP,
            sampler_logprobs=frozen_floats([0.0]),
            sampler_entropies=None,
            policy_version=0,
        )
        for index in range(len(given))
    )
    verdicts = [
        make_verdict("reward_failed")
        if score is None
        else Verdict(
            outcome=Outcome.CORRECT if score >= right_from else Outcome.WRONG,
            status="",
            score=score,
            metrics={"length": index},
        )
        for index, score in enumerate(given)
    ]
    request = RolloutRequest(
        draw=0,
        problem=Problem(id="p", prompt="?", references=(), verifier="x", source="doc"),
        prompt_tokens=frozen_tokens([1]),
        group_size=len(given),
        sampling=SamplingParams(temperature=1.0, max_tokens=4),
    )
    return score_group(RolloutGroup(request=request, completions=completions), verdicts)


def test_scores_are_the_rewards_and_being_cut_never_pays() -> None:
    found = group(0.25, 0.5, -1.0, None, cut=(1, 2))
    assert found.rewards.tolist() == [0.25, 0.0, -1.0, 0.0]
    assert found.counted.tolist() == [True, True, True, False]
    assert not found.correct.any()


def test_advantages_and_rejection_follow_scores_counts_follow_what_is_right() -> None:
    mixed = group(0.2, 0.4, 0.6)
    assert group_signal(mixed) is Signal.MIXED, "nobody is right, and there is something to learn"
    (advantages,) = scored_advantages([mixed], normalise_std=False)
    assert np.allclose(advantages, [-0.2, 0.0, 0.2])
    assert group_signal(group(0.5, 0.5)) is Signal.ALL_WRONG
    assert group_signal(group(0.5, 0.5, right_from=0.5)) is Signal.ALL_CORRECT
    assert group_signal(group(2.0, 3.0)) is Signal.MIXED, "both right, one better"
    assert PassCount.of(group(0.5, 1.5, 2.0)) == PassCount(correct=2, counted=3)


def test_accuracy_is_of_right_answers_and_the_reward_is_the_mean_score() -> None:
    values = rollout_metrics([group(0.5, 1.0, None), group(0.0, 0.5)])
    assert values["train/accuracy/mean"] == pytest.approx(0.25)
    assert values["train/reward/mean"] == pytest.approx(0.5)
    assert values["train/accuracy/standard_error"] is None, "two draws of one prompt are one observation"
    assert values["reward/length"] == pytest.approx((0 + 1 + 0 + 1) / 4), "of what was judged"


def test_an_unknown_status_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"status 'too_long' is unknown; give one of crash, .*, wrong_answer, or make"):
        make_verdict("too_long")
