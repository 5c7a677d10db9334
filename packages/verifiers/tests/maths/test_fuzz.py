"""Any text in a box: one verdict per item, in order, the pool survives, and equal texts are equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magicrl.records import Problem, Verdict
from magicrl_verifiers import VerifierPool
from magicrl_verifiers.maths.maths_verifier import MathsVerifier, readings, same_structure
from magicrl_verifiers.maths.notation import canonical_notation, lex
from magicrl_verifiers.maths.prose import final_answer
from magicrl_verifiers.records import JudgeOptions

PIECES = r"""
1 2 3 12 0.5 x y n k a f ( ) [ ] { } \{ \} , ; : = < > | + - * / ^ _ ! ' % & \\ $ ^2 _1 ^{2} _{10} \frac \sqrt
\pi \infty \pm \mp \cup \setminus \in \ne \le \ge \approx \cdot \times \sin \ln \log_2 \text{cm} \text{or}
\text{and} \mathrm{m} \mathbb{R} ^\circ \% \$ \ldots \sum \int \lim \begin{pmatrix} \end{pmatrix} \binom \left(
\right) \lfloor \rfloor \max \gcd and or e i percent to 12:30 pm degrees A B
"""
LATEX = st.lists(st.sampled_from(PIECES.split()), min_size=1, max_size=14).map(" ".join)
ANYTHING = st.one_of(LATEX, st.text(max_size=60), st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
QUICK = settings(max_examples=300, derandomize=True)
SLOW = settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=1) as shared:
        shared.warm_up()
        yield shared


@QUICK
@given(ANYTHING)
def test_every_text_is_read_or_not_but_never_an_error(text: str) -> None:
    spelled = canonical_notation(text)
    lex(spelled)
    for trusted in (True, False):
        list(readings(spelled, trusted=trusted))
    for choice in (True, False):
        final_answer(text, choice=choice)


@QUICK
@given(LATEX, LATEX)
def test_comparing_is_never_an_error(one: str, other: str) -> None:
    left, right = canonical_notation(one), canonical_notation(other)
    assert same_structure(left, right) in (True, False, None)


@QUICK
@given(ANYTHING)
def test_equal_texts_are_equal(text: str) -> None:
    verifier = MathsVerifier(JudgeOptions(reasoning="none", extract="box"))
    box = "\\boxed{" + text.replace("{", "").replace("}", "").replace("\\", "") + "}"
    verdict: Verdict = verifier.judge([box[7:-1]], box) if box[7:-1].strip() else verifier.judge(["1"], "\\boxed{1}")
    assert verdict.correct or not canonical_notation(box[7:-1])


@SLOW
@given(st.lists(ANYTHING, min_size=1, max_size=8), LATEX)
def test_the_pool_gives_one_verdict_an_item_in_order(pool: VerifierPool, texts: list[str], reference: str) -> None:
    problem = Problem(id="p", prompt="?", references=(reference, "314159"), verifier="maths", source="test")
    responses = [part for text in texts for part in (f"\\boxed{{{text}}}", "\\boxed{314159}")]
    verdicts = pool.judge(problem, responses)
    assert len(verdicts) == len(responses)
    assert all(verdict.correct for verdict in verdicts[1::2])
    assert pool.judge(problem, ["\\boxed{314159}"])[0].correct
