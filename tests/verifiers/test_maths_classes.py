"""Classes of equal answers, each with an unequal neighbour: sets, names, words, units, vectors, running text."""

import pytest

from magicrl.verifiers import JudgeOptions
from magicrl.verifiers.maths.maths_verifier import MathsVerifier

VERIFIER = MathsVerifier(JudgeOptions())


def accepts(gold: str, answer: str) -> bool:
    return VERIFIER.judge([gold], f"\\boxed{{{answer}}}").correct


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"(-\infty,9)\cup(9,\infty)", r"\mathbb{R}-\{9\}", r"\mathbb{R}-\{8\}"),
        (r"(0,\infty)", r"\mathbb{R}^+", r"\mathbb{R}^-"),
        ("y > 0", r"\mathbb{R}_{>0}", r"\mathbb{R}_{\ge 0}"),
        ("y < 0", r"\text{all negative real numbers}", r"\text{all positive real numbers}"),
        (r"[0,\infty)", r"\text{nonnegative real numbers}", r"\text{positive real numbers}"),
        (r"\emptyset", r"\text{There are no real solutions.}", r"\text{There are two real solutions.}"),
        (r"\mathrm{Var}(Y)=6", "6", "5"),
        (r"\mathbb{E}[Y]=2.5", r"\frac{5}{2}", r"\frac{2}{5}"),
        (r"\frac{dy}{dx}=6x", "6x", "5x"),
        (r"\{4,6\}", r"A \cup B = \{4,6\}", r"A \cup B = \{4,7\}"),
        (r"\int_0^2 t\,dt = 2", "2", "4"),
        (r"\text{thirty-four}", "34", "43"),
        ("205", r"\text{two hundred and five}", r"\text{two hundred and fifty}"),
        (r"\text{infinitely many}", r"\infty", "8"),
        (r"\text{all even integers}", r"\text{even integers}", r"\text{odd integers}"),
        (r"11\text{ years}", r"11\text{ years old}", r"11\text{ days old}"),
        (r"8\text{ hours}", "8h", "8m"),
        (r"6\ \mathrm{m}/\mathrm{s}", "6 m/s", "6 m s"),
        (r"6\ \mathrm{m\,s^{-1}}", r"6\text{ m/s}", r"6\text{ m/s}^2"),
        (r"35\%", r"35\text{ per cent}", r"36\text{ per cent}"),
        ("1101_2", "(1101)_2", "(1101)_3"),
        (r"\frac{5}{33}", r"0.151515\ldots", r"0.1515"),
        (r"12.75^\circ", r"12^\circ 45'", r"12^\circ 75'"),
        (r"\begin{pmatrix}7\\8\\9\end{pmatrix}", "[7,8,9]", "[7,9,8]"),
        ("(7,8,9)", "[7,8,9]", "[7,8,9)"),
        (r"\begin{pmatrix}5&6\\7&8\end{pmatrix}", "[[5,6],[7,8]]", "[[5,7],[6,8]]"),
        (r"\begin{array}{l}p=4\\q=9\end{array}", "p=4, q=9", "p=9, q=4"),
        (r"n \equiv 2 \pmod{9}", r"n\equiv 2 \bmod 9", r"n\equiv 2 \bmod 8"),
    ],
)
def test_classes(gold: str, right: str, wrong: str) -> None:
    assert accepts(gold, right)
    assert accepts(right, gold)
    assert not accepts(gold, wrong)
    assert not accepts(wrong, gold)


@pytest.mark.parametrize(
    ("gold", "hedge"),
    [
        ("y > 4", r"y > 4 \text{ or } y > 9"),
        (r"(1,5) \cup (5,8)", r"(1,5) \cup (5,8) \text{ or } (2,5) \cup (5,8)"),
        ("c_1 = 0", r"c_1 = 0 \text{ or } c_4 = 0"),
        ("f(1) = 0", r"f(1) = 0, f(6) = 0"),
    ],
)
def test_hedges_that_come_to_the_same(gold: str, hedge: str) -> None:
    assert not accepts(gold, hedge)


def test_a_wrapped_choice_as_gold() -> None:
    assert accepts(r"(\text{F})", "F")
    assert not accepts(r"(\text{F})", "E")


def test_two_numbers_keep_their_brackets() -> None:
    assert not accepts("(7,8)", "[7,8]")
    assert not accepts("(7,8,9)", r"\{7,8,9\}")


def test_numbers_in_words_that_are_two_are_none() -> None:
    assert not accepts("34", r"\text{thirty four five}")
    assert not accepts("7", r"\text{three four}")


def test_a_gold_choice_with_what_it_stands_for() -> None:
    assert accepts(r"\textbf{(D)}\ 18", "D")
    assert not accepts(r"\textbf{(D)}\ 18", "C")
    assert not accepts("(D)(x+1)", "D")


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("-14", "The answer is −14.", "The answer is 14."),
        (r"\frac{\pi}{9}", "Answer: π/9", "Answer: 9/π"),
        ("7x-2", "We add both.\n\\[\n7x - 2\n\\]", "We add both.\n\\[\n7x + 2\n\\]"),
        ("5x+6y+7=0", "The answer is 5x + 6y + 7 = 0.", "The answer is 5x + 6y - 7 = 0."),
        ("2312_5", "The answer is 2312_5.", "The answer is 2312_6."),
        (r"3+\sqrt{2}, 3-\sqrt{2}", r"The answer is 3+\sqrt{2}, 3-\sqrt{2}.", r"The answer is 3+\sqrt{2}."),
        ("13522", r"The answer is $13,\! 522$.", r"The answer is $13,\! 523$."),
        ("2:07 PM", "The answer is 2:07 pm.", "The answer is 2:07 am."),
        (r"\$44", r"The answer is \$44.", r"The answer is \$44 or \$45."),
        (r"6\sqrt{5}\text{ cm}", r"The answer is 6\sqrt{5}\text{ cm}.", r"The answer is 6\sqrt{5}\text{ cm}^2."),
        ("x^3-5", "The answer is x³ − 5.", "The answer is x³ + 5."),
        ("C", "The answer is option $C$.", "The answer is option $D$."),
        (r"15\%", "The answer is 15 percent.", "The answer is 16 percent."),
        ("9", "The answer is 9.", "The answer is 9 or 8x."),
    ],
)
def test_running_text(gold: str, right: str, wrong: str) -> None:
    assert VERIFIER.judge([gold], right).correct
    assert not VERIFIER.judge([gold], wrong).correct
