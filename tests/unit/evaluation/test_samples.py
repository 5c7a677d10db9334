"""Rows of samples: written one by one, read after a kill, scored from the files only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
from scipy import stats

from magicrl.evaluation.job import SamplingPlan, requests_for, run_job, sample_problems
from magicrl.evaluation.samples import (
    EvaluationFolder,
    SampleFile,
    SampleRow,
    by_problem,
    read_samples,
    sample_row,
    whole_prompt,
)
from magicrl.evaluation.statistics import majority_at_k, mean_of, score_rows, votes
from magicrl.records import (
    Completion,
    Episode,
    FinishedSample,
    FinishReason,
    Message,
    Outcome,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    Verdict,
    frozen_floats,
    frozen_tokens,
)
from magicrl_verifiers.service import VerifierPool


def completion(text: str, *, tokens: int = 3, cut: bool = False, entropy: float = 0.25) -> Completion:
    end = FinishReason.LENGTH if cut else FinishReason.STOP
    entropies = frozen_floats([entropy] * tokens)
    return builders.completion(range(tokens), text=text, sampler_entropies=entropies, finish_reason=end)


def row(name: str, sample: int, outcome: str = "correct", **changes: Any) -> SampleRow:
    verdict = Verdict(outcome=Outcome(outcome), status="matched", extracted=changes.pop("extracted", "4"))
    return sample_row(name, sample, completion("4", **changes), verdict)


class Scripted:
    """Engine whose answers depend only on (draw, sample)."""

    max_context = 100
    policy_version = 0

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[RolloutRequest] = []
        self._left = stop_after

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.asked.extend(requests)

    def finished_samples(self) -> Iterator[FinishedSample]:
        for request in self.asked:
            for index in request.indices:
                if self._left == 0:
                    raise KeyboardInterrupt
                self._left = None if self._left is None else self._left - 1
                text = str(4 + (request.draw + index) % 3)
                yield FinishedSample(request=request, index=index, completion=completion(text))


PROBLEMS = [builders.problem(f"p{i}", prompt="?", reference="4") for i in range(5)]
PLAN = SamplingPlan(samples=4, sampling=SamplingParams(temperature=1.0, max_tokens=8, seed=3))


def encode(_problem: Problem) -> Any:
    return frozen_tokens([1, 2])


def run(path: Path, engine: Scripted, plan: SamplingPlan = PLAN) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    done = list(read_samples([path])) if path.exists() else []
    file = SampleFile(path)
    try:
        with VerifierPool() as judge:
            run_job(
                PROBLEMS,
                plan,
                engine,  # type: ignore[arg-type]
                judge,
                encode,
                write=file.append,
                done=done,
                progress=lambda i, n: told.append((i, n)),
            )
    finally:
        file.close()
    return told


def test_a_full_disk_names_the_file_of_the_samples(
    tmp_path: Path, room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    file = SampleFile(tmp_path / "s.jsonl")
    with room_for(0):
        for write in (lambda: file.append(row("p", 0)), file.close):
            with pytest.raises(OSError, match=r"s\.jsonl'$"):
                write()


def test_a_job_that_stops_anywhere_goes_on_to_the_sample(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(whole, Scripted())[-1] == (20, 20)
    with pytest.raises(KeyboardInterrupt):
        run(cut, Scripted(stop_after=7))
    with cut.open("a") as file:
        file.write('{"problem": "p4", "sam')  # a line truncated by a kill
    again = Scripted()
    assert run(cut, again)[0] == (7, 20)
    assert sum(len(request.indices) for request in again.asked) == 13, "nothing is generated twice"
    assert by_problem(read_samples([cut]), [p.id for p in PROBLEMS]) == by_problem(
        read_samples([whole]), [p.id for p in PROBLEMS]
    )


class Silent(Scripted):
    """Engine that ends one sample and waits until it has been written."""

    def __init__(self, written: threading.Event) -> None:
        super().__init__()
        self._written = written

    def finished_samples(self) -> Iterator[FinishedSample]:
        samples = super().finished_samples()
        yield next(samples)
        assert self._written.wait(600), "a sample waits for the next one to end"
        yield from samples


def test_a_judged_sample_is_written_while_the_engine_is_silent() -> None:
    written = threading.Event()
    rows: list[SampleRow] = []

    def write(row: SampleRow) -> None:
        rows.append(row)
        written.set()

    with VerifierPool() as judge:
        run_job(PROBLEMS, PLAN, Silent(written), judge, encode, write=write)  # type: ignore[arg-type]
    assert len(rows) == 20


def test_a_write_that_fails_ends_the_job_and_nothing_more_is_written() -> None:
    failed, calls = threading.Event(), [0]

    def write(row: SampleRow) -> None:
        calls[0] += 1
        failed.set()
        raise OSError(28, "no space left")

    with VerifierPool() as judge, pytest.raises(OSError, match="no space left"):
        run_job(PROBLEMS, PLAN, Silent(failed), judge, encode, write=write)  # type: ignore[arg-type]
    assert calls == [1]


def test_shards_make_up_the_whole(tmp_path: Path) -> None:
    run(tmp_path / "whole.jsonl", Scripted())
    for index in range(3):
        run(tmp_path / f"{index}.jsonl", Scripted(), replace(PLAN, shard=(index, 3)))
    shards = by_problem(read_samples(sorted(tmp_path.glob("[0-9].jsonl"))), [p.id for p in PROBLEMS])
    assert shards == by_problem(read_samples([tmp_path / "whole.jsonl"]), [p.id for p in PROBLEMS])
    assert [r.draw for r in requests_for(PROBLEMS, replace(PLAN, shard=(1, 3)), encode, {})] == [1, 4]


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"problem": "p"}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 1: no sample of this version"):
        list(read_samples([path]))
    with pytest.raises(ValueError, match=r"sample 0 of 'p' appears twice"):
        by_problem([row("p", 0), row("p", 0)], ["p"])
    with pytest.raises(ValueError, match="belongs to no problem"):
        by_problem([row("q", 0)], ["p"])


def test_a_score_counts_truncated_as_wrong_and_leaves_out_what_was_not_judged() -> None:
    rows = [
        [row("a", 0), row("a", 1, cut=True, tokens=9, entropy=1.0), row("a", 2, "wrong"), row("a", 3, "not_judged")],
        [row("b", i) for i in range(4)],
    ]
    found = score_rows(rows, ["a", "b"], pass_at=[2])
    assert found.per_problem == pytest.approx((1 / 3, 1.0))
    assert (found.not_judged, found.drawn) == (1, 8)
    assert found.answered_and_stopped == 7 / 8, "a reward extracts nothing from the answer that it scores"
    silent = replace(rows[0][2], status="no_answer")
    assert score_rows([[silent, rows[0][0]]], ["a"]).answered_and_stopped == 1 / 2
    assert found.pass_at[2].mean == pytest.approx((1 - 1 / 3 + 1) / 2)
    assert found.truncation.mean == pytest.approx((1 / 4 + 0) / 2)
    assert found.length.mean == pytest.approx(((3 + 9 + 3 + 3) / 4 + 3) / 2)
    assert found.entropy == pytest.approx((9 * 1.0 + 21 * 0.25) / 30), "per token of all responses"


def test_what_an_environment_wrote_is_not_the_models() -> None:
    played = Episode(observed=((1, 2),), answer="4")
    answer = replace(completion("4", tokens=5), episode=played, sampler_entropies=frozen_floats([0.5, 0, 0, 1, 1.5]))
    found = sample_row("a", 0, answer, Verdict(outcome=Outcome.CORRECT, status="matched"), keep_tokens=True)
    assert (found.tokens, found.entropy, found.token_ids) == (3, 1.0, (0, 3, 4))


def test_a_test_of_a_run_keeps_the_problems_order_and_counts_truncated_as_wrong() -> None:
    class Late(Scripted):
        """Engine that ends the groups in reverse order; the answers of the second problem are truncated."""

        def finished(self) -> Iterator[RolloutGroup]:
            for request in reversed(self.asked):
                answers = (completion("4", cut=request.draw == 1) for _ in request.indices)
                yield RolloutGroup(request=request, completions=tuple(answers))

    with VerifierPool() as judge:
        limits = {"samples": 2, "temperature": 1.0, "max_tokens": 8, "seed": 0}
        groups = sample_problems(Late(), judge, PROBLEMS, encode, **limits)  # type: ignore[arg-type]
    assert [judged.group.request.problem.id for judged in groups] == [p.id for p in PROBLEMS]
    assert [judged.correct.tolist() for judged in groups] == [[n != 1] * 2 for n in range(5)]


def test_votes_tell_wrong_answers_apart_and_right_ones_not() -> None:
    rows = [row("a", 0, extracted="4"), row("a", 1, extracted="8/2")]
    rows += [
        row("a", 2, "wrong", extracted=" X "),
        row("a", 3, "wrong", extracted="x"),
        row("a", 4, "wrong", extracted="y"),
    ]
    rows += [row("a", 5, "wrong", extracted=None), row("a", 6, "wrong", extracted="x", cut=True)]
    assert votes(rows) == (2, [2, 1], 2)
    numbers = ["8", "8.0", "+8", r"\frac{16}{2}", r"8\text{ apples}", "$8$", "-8", "8,0", "8x"]
    rows = [row("a", place, "wrong", extracted=text) for place, text in enumerate(numbers)]
    assert votes(rows) == (0, [6, 1, 1, 1], 0), "other signs, lists and formulas are other answers"


def test_earlier_turns_of_a_conversation_are_read_again(tmp_path: Path) -> None:
    asked = replace(builders.problem("p", prompt="1 + 1?"), key="", context=(Message("system", "Be brief."),))
    folder = EvaluationFolder(tmp_path / "sums")
    folder.begin({"decides": {}, "samples": 1, "recorded": {}}, [asked, builders.problem("q", prompt="2?")])
    first, second = folder.problems()
    assert [(turn.role, turn.content) for turn in first.messages] == [("system", "Be brief."), ("user", "1 + 1?")]
    assert [whole_prompt(one) for one in (first, second)] == ["system: Be brief.\n\nuser: 1 + 1?", "2?"]
    path = folder.path / "problems.jsonl"
    path.write_text(path.read_text().replace('"role"', '"who"'))
    with pytest.raises(ValueError, match=r"problems\.jsonl, line 1: no problem \("):
        folder.problems()


def test_majority_of_all_samples_shares_ties() -> None:
    assert majority_at_k(3, [2, 2], 0, 7) == 1.0
    assert majority_at_k(2, [2], 3, 7) == 0.5
    assert majority_at_k(1, [2], 0, 3) == 0.0
    assert majority_at_k(0, [], 4, 4) == 0.0
    assert majority_at_k(3, [1], 0, 1) == 0.75
    with pytest.raises(ValueError, match="maj@5 needs at least 5 samples, there are 4"):
        majority_at_k(1, [3], 0, 5)


def test_majority_of_some_samples_agrees_with_enumeration() -> None:
    labels = ["r", "r", "r", "a", "a", "b", "none"]

    def won(drawn: tuple[str, ...]) -> float:
        counts = {label: drawn.count(label) for label in set(drawn) - {"none"}}
        most = [label for label, n in counts.items() if n == max(counts.values())]
        return "r" in most and 1 / len(most)

    exact = np.mean([won(drawn) for drawn in combinations(labels, 4)])
    assert majority_at_k(3, [2, 1], 1, 4, draws=200_000) == pytest.approx(exact, abs=0.005)


def test_a_mean_has_students_interval() -> None:
    values = [3.0, 4.5, 8.0, 1.0, 2.5]
    found = mean_of(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert mean_of([2.0]).low == 2.0
