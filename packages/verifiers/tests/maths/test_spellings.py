"""Answers in every common notation: each reference answer with correct spellings and with wrong neighbours.

The tables are text files in this folder: ``=`` marks a reference answer, ``+`` an equal answer, ``-`` a different one,
``~`` an equal answer that is known to be rejected. The "unmet" tables and the one on equality were complete before
they were run. The rows of ``pairs.txt`` begin with their reference answer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import magicrl_verifiers
from magicrl_verifiers.maths.maths_verifier import MathsVerifier
from magicrl_verifiers.records import JudgeOptions

VERIFIER = MathsVerifier(JudgeOptions())
# like a worker: the imports of the first integral would count against its CPU limit
VERIFIER.judge([r"\int_0^1 2x \, dx"], r"\boxed{\int_0^1 2y \, dy}")


@pytest.fixture(scope="module", autouse=True)
def as_small_as_a_worker() -> Iterator[None]:
    """Keep the garbage collector from scanning objects of other tests during an answer's CPU time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass
class Row:
    reference: str
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def table(name: str) -> list[Row]:
    rows: list[Row] = []
    beside = Path(__file__).with_name(name)  # two sets ship with the package, for `magicrl selfcheck`
    path = beside if beside.exists() else Path(magicrl_verifiers.__file__).with_name("maths") / name
    for line in path.read_text(encoding="utf-8").splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "=":
            rows.append(Row(rest))
        elif mark in ("+", "-"):
            (rows[-1].right if mark == "+" else rows[-1].wrong).extend(rest.split(" || "))
    assert all(row.wrong for row in rows)
    return rows


def pairs(mark: str) -> list[list[str]]:
    lines = Path(__file__).with_name("pairs.txt").read_text(encoding="utf-8").splitlines()
    return [line[2:].split(" || ") for line in lines if line.startswith(mark)]


def accepts(reference: str, answer: str) -> bool:
    return VERIFIER.judge([reference], f"\\boxed{{{answer}}}").correct


TABLES = (
    "spellings.txt", "unmet_first.txt", "unmet_second.txt", "equality.txt", "outsiders_first.txt", "blind_boxed.txt",
    "hostile_boxed.txt", "counted_boxes.txt", "counted_blind.txt",
)  # fmt: skip
BOXED = [row for name in TABLES for row in table(name)]
RUNNING = [
    row
    for name in ("text", "first", "second", "third", "fourth", "fifth", "sixth", "blind", "hostile")
    for row in table(f"running_{name}.txt")
]


@pytest.mark.parametrize("row", BOXED, ids=lambda row: row.reference)
def test_in_a_box(row: Row) -> None:
    assert [one for one in (row.reference, *row.right) if not accepts(row.reference, one)] == []
    assert [one for one in row.wrong if accepts(row.reference, one)] == []


@pytest.mark.parametrize(("reference", "answers"), [(reference, answers) for reference, *answers in pairs("+")])
def test_the_same_answer_in_another_way(reference: str, answers: list[str]) -> None:
    assert [one for one in answers if not accepts(reference, one)] == []


@pytest.mark.parametrize(("reference", "answers"), [(reference, answers) for reference, *answers in pairs("-")])
def test_a_neighbour_that_says_something_else(reference: str, answers: list[str]) -> None:
    assert [one for one in answers if accepts(reference, one)] == []


@pytest.mark.parametrize(("reference", "right", "wrong"), pairs("*"))
def test_notation_in_both_directions(reference: str, right: str, wrong: str) -> None:
    assert accepts(reference, right)
    assert accepts(right, reference)
    assert not accepts(reference, wrong)
    assert not accepts(wrong, reference)


@pytest.mark.parametrize(("reference", "right", "wrong"), pairs(">"))
def test_an_answer_in_running_text(reference: str, right: str, wrong: str) -> None:
    assert VERIFIER.judge([reference], right).correct
    assert not VERIFIER.judge([reference], wrong).correct


@pytest.mark.parametrize("row", RUNNING, ids=lambda row: row.reference)
def test_in_running_text(row: Row) -> None:
    assert [one for one in row.right if not VERIFIER.judge([row.reference], one).correct] == []
    assert [one for one in row.wrong if VERIFIER.judge([row.reference], one).correct] == []


@pytest.mark.parametrize(
    ("response", "reference", "correct"),
    [
        ("So answer = 48, no: one more.\n#### 66", "66", True),
        ("So answer = 48, no: one more.\n#### 66", "48", False),
        ("The answer is 48.\n#### 1,066\n", "1066", True),
        ("### Final answer\n18", "18", True),  # a heading, and the answer below it
        ("#### 66\nThe answer is 48.", "48", True),  # the line is not the last one
        ("The answer is 48.\n#### Conclusion", "48", True),  # a heading
        ("We add both.\n\\[\n7x - 2\n\\]", "7x-2", True),
        ("We add both.\n\\[\n7x + 2\n\\]", "7x-2", False),
    ],
)
def test_the_last_line_is_the_answer_behind_four_hashes_or_in_a_display(
    response: str, reference: str, correct: bool
) -> None:
    assert VERIFIER.judge([reference], response).correct is correct


HEDGES = (
    "{0}, {1}",
    r"{0} \text{{ or }} {1}",
    r"\{{{0}, {1}\}}",
    r"[{0}, {1}]",
    r"{0} \neq {1}",
    r"{0} = {1}",
    r"{1} = {0}",
    r"{0} \text{{ not }} {1}",
    r"{0} \approx {1}",
    r"\text{{either }} {0} \text{{ or }} {1}",
    r"\min({0}, {1}), \max({0}, {1})",
    r"x = {0}, x = {1}",
    "{0}; {1}",
    r"{0} \pm {1}",
    r"{0} \cup {1}",
    r"\begin{{pmatrix}} {0} \\ {1} \end{{pmatrix}}",
)


@pytest.mark.parametrize("hedge", HEDGES)
@pytest.mark.parametrize(
    ("reference", "other"), [("5", "6"), (r"\frac{1}{2}", "2"), (r"\sqrt{3}", "7"), ("(1,2)", "(2,1)")]
)
def test_both_answers_are_none(reference: str, other: str, hedge: str) -> None:
    for text in (hedge.format(reference, other), hedge.format(other, reference)):
        assert not accepts(reference, text), text


def test_all_numbers_are_no_answer() -> None:
    numbers = ",".join(map(str, range(100)))
    assert not accepts("42", numbers)
    assert not accepts("42", rf"\{{{numbers}\}}")


def test_dots_between_terms_are_read() -> None:
    """Math-Verify drops the dots."""
    assert accepts(r"x_1+\ldots+x_9", r"x_1+\ldots+x_9")
    assert not accepts(r"x_1+\ldots+x_9", "x_1+x_9")


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("5", r"\text{The maximum value is } 5", r"\text{The maximum value is not } 5"),
        (r"\vec{AB}=(1,2)", r"\vec{AB}=(1,2)", r"\vec{BA}=(1,2)"),
        (r"3\mathbf{i}-4\mathbf{j}", r"(3,-4)", r"3\mathbf{i}-4\mathbf{j}+5"),
        # the 5 is no component, although it would make the coefficients 8 and 1
        ("(8,1)", r"8\mathbf{i}+\mathbf{j}", r"3\mathbf{i}-4\mathbf{j}+5"),
        ("2^{3000000}+1", "4^{1500000}+1", "4^{1500000}+3"),
    ],
)
def test_what_is_left_of_an_answer_counts(reference: str, right: str, wrong: str) -> None:
    assert accepts(reference, right)
    assert not accepts(reference, wrong)


def test_several_boxes_are_one_list_only_for_a_reference_that_is_one() -> None:
    row = r"$\boxed{3}$ and $\boxed{7}$"
    assert VERIFIER.judge(["3, 7"], row).decided_by == "boxes"
    assert not VERIFIER.judge(["3"], row).correct
    assert not VERIFIER.judge(["7"], row).correct  # two boxed guesses must not earn a reward
    assert VERIFIER.judge(["7"], r"$\boxed{7}$, or $\boxed{7.0}$").correct
    assert VERIFIER.judge(["7"], r"\boxed{3}. No, it is \boxed{7}").correct  # the last answer counts
    assert not VERIFIER.judge(["3, 7"], r"\boxed{3}. No, it is \boxed{7}").correct
    assert not VERIFIER.judge(["3, 7"], r"\boxed{3}, \boxed{5}, \boxed{7}").correct


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("2,3", r"$x = \boxed{2}$ and $x = \boxed{3}$", r"$x = \boxed{2}$ and $x = \boxed{4}$"),
        ("3", r"$x = \boxed{3}$ and $x = \boxed{3}$", r"$x = \boxed{2}$ or $x = \boxed{3}$"),
        ("2,3", r"$x_1 = \boxed{2}$, $x_2 = \boxed{3}$", r"$x_1 = \boxed{2}$, $x_2 = \boxed{3}$, $x_3 = \boxed{4}$"),
        ("p=2,q=3", r"$p=\boxed{2}$, $q=\boxed{3}$", r"$p=\boxed{3}$, $q=\boxed{2}$"),
        ("(2,3)", r"$\boxed{x=2}$ and $\boxed{y=3}$", r"$\boxed{x=3}$ and $\boxed{y=2}$"),
        ("(2,3)", r"$x=\boxed{2}$, $y=\boxed{3}$", r"$x=\boxed{2}$, $x=\boxed{3}$"),
        ("(2,3)", r"$x=\boxed{2}$, $y=\boxed{3}$", r"$y=\boxed{2}$, $x=\boxed{3}$"),
        ("(2,3)", r"$x=\boxed{2}$, $y=\boxed{3}$", r"$\boxed{2}$ and $\boxed{3}$"),
        (r"(-\infty,1)\cup(2,\infty)", r"$\boxed{x<1}$ or $\boxed{x>2}$", r"$\boxed{x<1}$ or $\boxed{x>3}$"),
        (
            r"(-\infty,1)\cup(2,\infty)",
            r"$\boxed{x<1}$ or $\boxed{x>2}$",
            r"$\boxed{x<1}$, $\boxed{x>2}$, $\boxed{x>4}$",
        ),
        ("2", r"$x=\boxed{3}$, no: $x=\boxed{2}$", r"$x=\boxed{2}$ or $x=\boxed{3}$"),
        ("[2,3]", r"$\boxed{[2,3]}$", r"$a=\boxed{2}$, $b=\boxed{3}$"),
    ],
)
def test_boxes_with_names_are_one_answer_only_where_it_has_as_many_parts(
    reference: str, right: str, wrong: str
) -> None:
    assert VERIFIER.judge([reference], right).correct
    assert not VERIFIER.judge([reference], wrong).correct


def test_any_reference_will_do_and_words_say_who_decided() -> None:
    verdict = VERIFIER.judge(["7", r"\sqrt{2}"], r"\boxed{2^{1/2}}")
    assert (verdict.status, verdict.decided_by) == ("matched", "structure")
    assert VERIFIER.judge(["B"], r"\boxed{\text{(B) } 15}").decided_by == "choice"


@pytest.mark.parametrize(
    "layout",
    [
        r"**{}**",
        r"`{}`",
        r"\bf {}",
        r"{{\bf {}}}",
        r"\rm{{{}}}",
        r"\underline{{{}}}",
        r"\color{{red}}{{{}}}",
        r"\textcolor{{blue}}{{{}}}",
        r"\Large {}",
        r"\therefore {}",
        r"{} \checkmark",
        r"{}\text{{.}}",
        r"\text{{The final answer is: }} {}",
        r"\begin{{equation*}} {} \end{{equation*}}",
        r"\begin{{align}} n &= {} \end{{align}}",
    ],
)
def test_layout(layout: str) -> None:
    assert accepts("23", layout.format("23"))
    assert not accepts("23", layout.format("32"))
    assert not accepts("23", layout.format(r"23 \text{ or } 32"))


@pytest.mark.parametrize("name", ["align", "aligned", "gather*", "eqnarray"])
def test_a_system_in_a_display(name: str) -> None:
    system = rf"\begin{{{name}}} x &= 8 \\ y &= 5 \end{{{name}}}"
    assert accepts("x=8, y=5", system)
    assert accepts(system, "(8, 5)")
    assert not accepts("x=5, y=8", system)
    assert not accepts(system, "(5, 8)")


def test_the_engine_reports_whose_text_it_reads_and_never_reads_a_distrusted_reference() -> None:
    phases: list[str] = []
    verifier = MathsVerifier(JudgeOptions(), progress=phases.append)
    same, other = r"\boxed{\int_0^1 2y \, dy}", r"\boxed{\int_0^1 3y \, dy}"
    reference = r"\int_0^1 2x \, dx"
    assert [verifier.judge([reference], text).status for text in (same, other)] == ["matched", "mismatch"]
    # a worker that dies in the second phase counts against the response
    assert phases == ["reference", "answer"] * 2
    # the steps before Math-Verify can parse the second one, but cannot decide
    for distrusted, response in (
        (reference, other),
        (r"\tanh(10^6)", r"\boxed{1}"),
        (r"\boxed{\tanh(10^7)}", r"\boxed{1}"),
    ):
        verifier.distrust([distrusted])
        assert verifier.judge([distrusted], response).status == "reference_unparsable"
        assert verifier.judge([distrusted], rf"\boxed{{{distrusted}}}").correct
    assert phases == ["reference", "answer"] * 2 + ["reference"] * 3
