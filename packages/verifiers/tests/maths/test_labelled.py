"""The maths verifier on labelled and hostile answers of ``../shared/data``, and on near misses of real references."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from maths_sets import hostile, labelled, references
from near_misses import near_misses

from magicrl.records import Outcome, Problem
from magicrl_verifiers import VerifierPool
from magicrl_verifiers.maths.maths_verifier import MathsVerifier
from magicrl_verifiers.maths.notation import close_braces
from magicrl_verifiers.records import JudgeOptions

MOST_FALSE_NEGATIVES = 0.03


def test_errors_on_the_labelled_pairs(shared_data: Path) -> None:
    verifier = MathsVerifier(JudgeOptions())
    pairs = labelled()
    said = [verifier.judge(pair.references, pair.response).correct for pair in pairs]
    assert [pair.number for pair, one in zip(pairs, said, strict=True) if one and not pair.label] == []
    missed = [pair.number for pair, one in zip(pairs, said, strict=True) if pair.label and not one]
    assert len(missed) <= MOST_FALSE_NEGATIVES * sum(pair.label for pair in pairs), missed


def test_hostile_answers_through_the_pool(shared_data: Path) -> None:
    cases = hostile()
    with VerifierPool(workers=1) as pool:
        pool.warm_up()
        for case in cases:
            problem = Problem(
                id=str(case.number), prompt="", references=case.references, verifier="maths", source="hostile"
            )
            (verdict,) = pool.judge(problem, [case.response])
            assert (verdict.outcome is Outcome.CORRECT) == case.label, case.kind
        assert len(pool.worker_pids) == 1


def test_near_misses_of_real_references_are_wrong(shared_data: Path) -> None:
    verifier = MathsVerifier(JudgeOptions())
    accepted = [
        (name, reference, wrong)
        for name, reference, wrong in islice(near_misses(references(), seed=7), 3000)
        if verifier.judge([reference], f"\\boxed{{{wrong}}}").correct
    ]
    assert len(accepted) <= 3, accepted


def test_every_reference_that_math_verify_cannot_read_can_be_earned(shared_data: Path) -> None:
    verifier = MathsVerifier(JudgeOptions())
    with (shared_data / "math" / "gold_unmatchable.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line)["gold"] for line in file]
    # some reference answers are truncated too early: an honest answer closes its braces
    assert [
        reference
        for reference in rows
        if not verifier.judge([reference], f"\\boxed{{{close_braces(reference)}}}").correct
    ] == []
