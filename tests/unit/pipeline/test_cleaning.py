"""Cleaning: each rule on texts that break it and on similar ones that do not; answers and references by verifiers."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magicrl.pipeline.clean_step import CodeCleaner, MathsCleaner
from magicrl.pipeline.entry import Entry
from magicrl.pipeline.frame import Decision, Drop
from magicrl.pipeline.judge_step import FLAWED
from magicrl.pipeline.maths_rules import maths_fault
from magicrl.pipeline.pipeline_schema import CodeCleaning, MathsCleaning
from magicrl_verifiers.service import VerifierPool


def maths(problem: str, reference: str = "5", solution: str | None = None, **notes: Any) -> Entry:
    return Entry(
        id="s/1", source="s", data_source="s", ability="math", problem=problem, prompt=problem, references=(reference,),
        solutions=() if solution is None else (solution,), notes=notes,
    )  # fmt: skip


def reason(decision: Decision) -> str | None:
    return decision.reason if isinstance(decision, Drop) else None


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (maths("Prove that $n^2 + n$ is even."), "proof"),
        (maths("Show that the angles are equal."), "proof"),
        (maths("Prove that $n^2 + 3$ is never a square when $n > 1$."), "proof"),
        (maths("What is 2 + 3?", "proof"), "proof"),
        (maths("What is 2 + 3?", "notfound"), "proof"),
        (maths("Find $n$.", question_type="proof"), "proof"),
        (maths("Find the smallest $n$ for which one can prove that $a_n > 7$."), None),
        (maths("Find $n$.", problem_is_valid="Incomplete"), "marked invalid by its source"),
        (maths("Find $n$.", problem_is_valid="Yes", solution_is_valid="Yes"), None),
        (maths("Find $n$.", problem_is_valid="Yes", solution_is_valid="No"), "marked invalid by its source"),
        (maths("See ![](https://cdn.example/1.png) and find $x$."), "external link or image"),
        (maths("Find $x$ in [asy] draw((0,0)--(1,1)); [/asy]."), "needs a figure"),
        (maths("As shown in the figure, $AB = 3$. Find $BC$."), "needs a figure"),
        (maths("In the diagram below, find the area."), "needs a figure"),
        (maths("The graph of $y = x^2$ meets $y = 4$. How many points?"), None),
        (maths("How many figures has $2^{100}$ in base ten?"), None),
        (maths("What is $1+1$? (A) 1 (B) 2 (C) 3 (D) 4", "B"), "multiple choice"),
        (maths("It is? $\\textbf{(A) } 1 \\qquad \\textbf{(B) } 2 \\qquad \\textbf{(C) } 3$", "2"), "multiple choice"),
        (maths("Points A, B and C lie on a line. Find AB + BC.", "7"), None),
        (maths("Which of the following numbers equals 33 million?", "33000000"), "options missing"),
        (maths("Which of the following is larger: $2^{10}$ or $10^3$?", "2^{10}"), None),
        (maths("(a) Find $x$. (b) Find $y$."), "multi-part"),
        (maths("Answer both.\n1) Find $x$.\n2) Find $y$."), "multi-part"),
        (maths("The triangle ABC is given.\n(i) Show that it is right-angled; (ii) what is its area?"), "multi-part"),
        (maths("Let $a_n$ satisfy (i) $a_1 = 1$ and (ii) $a_{2n} = n a_n$, which is given. What is $a_8$?"), None),
        (maths("A player plays so:\n1) He chooses a row.\n2) He takes what he finds.\nHow many games exist?"), None),
        (maths("For how many $n$ is it true that (a) $n < 50$, (b) $n^2 + n$ has a divisor to find?"), None),
        (maths("The counts are shown below. \\begin{tabular}{c|c} 1 & 2 \\end{tabular} What is the mean?"), None),
        (maths("Wins are shown in the table.\n| A | 2 |\n| --- | --- |\n| B | $x$ |\nFind $x$."), None),
        (maths("The chart below gives the counts. What is the mean?"), "needs a figure"),
        (maths("In the figure, $x$ is the angle. \\[ x + y = 3 \\] Find $x$."), "needs a figure"),
        (maths("Three or four pupils are in the picture. How many pictures must they take?"), None),
        (maths("In a scale drawing of a park one inch shows that far. How long is a line in the drawing?"), None),
        (maths("With $\\frac{\\sqrt{A} + \\sqrt{B} + \\sqrt{C}}{D}$ in lowest terms find $A + B$."), None),
        (maths("How many satisfy all of the following? \\[ a < 16 \\\\ b < 8 \\]", "6"), None),
        (maths("Which of the following is true: (a) it is open. (b) it is closed.", "b"), "multiple choice"),
        (maths("Let $f(a) = a + 1$ and $g(b) = b$. Find $f(2)$."), None),
        (maths("Ann has 60 cows. How many? Ann has 60 cows. How many?"), "statement stands twice"),
        (maths("Find $x$. Translated into English, retaining the format."), "speaks of its own translation"),
        (maths("What is 2 + 3?", "1" * 400), "answer too long"),
        (replace(maths("What is 2 + 3?"), references=("5", "1" * 400)), "answer too long"),
        (maths("  "), "no statement"),
    ],
    ids=lambda value: value.problem[:40] if isinstance(value, Entry) else str(value),
)  # fmt: skip
def test_rules_on_the_text(entry: Entry, expected: str | None) -> None:
    assert reason(maths_fault(entry, MathsCleaning())) == expected


def test_rules_can_be_switched_off() -> None:
    off = MathsCleaning(
        proofs=False,
        invalid=False,
        links=False,
        figures=False,
        multiple_choice="keep",
        multi_part=False,
        repeated=False,
    )
    for text in ("Prove it is odd.", "As shown in the figure, find x.", "(a) Find $x$. (b) Find $y$.", "www.a.b"):
        assert maths_fault(maths(text), off) is None
    with_values = MathsCleaning(multiple_choice="values")
    assert maths_fault(maths("What is it? (A) 1 (B) 2 (C) 3", "2"), with_values) is None
    assert reason(maths_fault(maths("What is it? (A) 1 (B) 2 (C) 3", "B"), with_values)) == "multiple choice"
    marked = maths("What is it? (A) 1 (B) 2 (C) 3", "2", question_type="MCQ")
    assert reason(maths_fault(marked, with_values)) == "multiple choice"


def test_of_the_six_flawed_problems_four_are_found_without_a_judge() -> None:
    found = {one.id: reason(maths_fault(maths(one.text), MathsCleaning())) for one in FLAWED}
    assert {name for name, why in found.items() if why is None} == {"flawed/blank", "flawed/label"}


@pytest.fixture(scope="module")
def pool() -> Generator[VerifierPool]:
    with VerifierPool(time_limit=10.0) as one:
        yield one


def test_answers_are_taken_from_the_solution_anew(pool: VerifierPool) -> None:
    cleaner = MathsCleaner(MathsCleaning(), pool)
    entries = [
        maths("Find it.", "5", "It is $\\boxed{5}$."),
        maths("Find it.", "0.5", "It is $\\boxed{\\frac12}$."),
        maths("Find it.", "5", "It is $\\boxed{6}$."),
        maths("Find it.", "72", "The answer is near 71, so:\n#### 72"),
        maths("Find it.", "72", "Nobody knows, the end is open."),
        maths("Find it.", "\\frac{x+1}{2}", "So $\\boxed{\\frac{1+x}{2}}$."),
        maths("Find it.", "5"),
        maths("Find it.", "~~~ ???"),
        # chat templates may write the opening tag: the text before the closing one is reasoning
        maths("Find it.", "5", "Is it $\\boxed{5}$?</think> Nobody knows, the end is open."),
    ]
    decisions = cleaner.decide(entries)
    assert [reason(one) for one in decisions] == [
        None, None, "solution disagrees", None, "solution does not state the answer", None, None,
        "reference answer unreadable",
        "solution does not state the answer",
    ]  # fmt: skip
    assert [isinstance(one, Entry) and one.notes.get("answer_agrees") for one in decisions[:2]] == [True, True]
    assert decisions[6] is None
    drop = decisions[2]
    assert isinstance(drop, Drop)
    assert drop.detail == "reference answer '5', the solution gives '6' (mismatch)"
    strict = MathsCleaner(MathsCleaning(without_solution="drop"), pool)
    assert reason(strict.decide([maths("Find it.", "5")])[0]) == "no solution to agree with"
    lenient = MathsCleaner(MathsCleaning(unreadable_references="keep"), pool)
    assert lenient.decide([maths("Find it.", "~~~ ???")]) == [None]


def program(reference: dict[str, Any] | str, *solutions: str) -> Entry:
    tests = reference if isinstance(reference, str) else json.dumps(reference)
    return replace(maths("Add two numbers."), ability="code", references=(tests,), solutions=solutions)


ADD, ADD_AGAIN = "print(sum(map(int, input().split())))", "a, b = input().split(); print(int(a) + int(b))"
SUM = {"inputs": ["1 2", "2 2"], "outputs": ["3", "4"]}
ANY = {"inputs": ["3"], "outputs": ["1 2"]}


def test_tests_references_and_disagreements() -> None:
    entries = [
        program(SUM, ADD),
        program(SUM, "print(3)"),
        program(SUM, "print(3)", ADD),
        program(SUM),
        program("[broken", ADD),
        program({"inputs": [], "outputs": []}, ADD),
        program({"inputs": ["1 2", "2 2", "5 5"], "outputs": ["3", ""]}, ADD),
        program({"inputs": ["1 2"], "outputs": [""]}, ADD),
        program(SUM, ADD, ADD_AGAIN),
        program(ANY, "input(); print(1, 2)", "input(); print(2, 1)"),
        program({"assert_case": ["assert f(1) == "]}, "def f(x): return x"),
        program({"inputs": ["1 2"], "outputs": ["3", "4"]}, ADD),
    ]
    with CodeCleaner(CodeCleaning(), workers=1) as cleaner:
        decisions = cleaner.decide(entries)
    assert [reason(one) for one in decisions] == [
        None, "reference fails its tests", None, "no reference solution", "broken tests",
        "empty or incomplete tests", None, "empty or incomplete tests", None, None, "broken tests", None,
    ]  # fmt: skip
    passing, cut, agreeing, differing = (decisions[place] for place in (2, 6, 8, 9))
    assert isinstance(passing, Entry)
    assert passing.solutions == (ADD, "print(3)")
    assert isinstance(cut, Entry)
    assert json.loads(cut.references[0]) == {"inputs": ["1 2"], "outputs": ["3"]}
    assert cut.notes["tests_taken_out"] == 2
    assert isinstance(agreeing, Entry)
    assert "needs_checker" not in agreeing.notes
    assert isinstance(differing, Entry)
    assert differing.notes["needs_checker"] == [0]
    failed = decisions[1]
    assert isinstance(failed, Drop)
    assert "passed 1 of 2" in failed.detail
    surplus = decisions[11]
    assert isinstance(surplus, Entry)
    assert json.loads(surplus.references[0]) == {"inputs": ["1 2"], "outputs": ["3"]}


def test_limits_on_reference_solutions() -> None:
    entries = [program(SUM, "print(3)", ADD), program(SUM, f"x = bytearray(1 << 29)\n{ADD}"), program(SUM, ADD)]
    with CodeCleaner(CodeCleaning(max_solutions=1, memory_limit_mb=256), workers=1) as cleaner:
        decisions = cleaner.decide(entries)
    assert [reason(one) for one in decisions] == [*["reference fails its tests"] * 2, None]


def test_cleaning_as_a_step_keeps_the_order_of_both_kinds(write_rows: Callable[..., Path], run: Any) -> None:
    rows = [
        {"problem": "What is 2 + 3?", "answer": "5", "solution": "\\boxed{5}"},
        {"prompt": "Add.", "tests": SUM, "reference_solution": ADD},
        {"problem": "What is 2 + 4?", "answer": "6", "solution": "\\boxed{7}"},
        {"prompt": "Add.", "tests": SUM, "reference_solution": "print(1)"},
        {"problem": "What is 2 + 5?", "answer": "7", "solution": "\\boxed{7}"},
    ]
    sources = [{"path": str(write_rows("r.jsonl", rows))}]
    run({"sources": sources, "steps": [{"use": "clean"}]})
    assert [entry.index for entry in run.kept("01-clean")] == [0, 1, 4]
    assert run.reasons("01-clean") == {"r/r-2": "solution disagrees", "r/r-3": "reference fails its tests"}
    run({"sources": sources, "steps": [{"use": "clean", "code": {"reference": False}}]})
    assert run.reasons("01-clean") == {"r/r-2": "solution disagrees"}, "changed rules clean the same rows again"
