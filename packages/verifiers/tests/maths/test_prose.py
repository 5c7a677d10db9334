"""The final answer in running text: one candidate, by rules that depend only on the text."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path

import pytest

from magicrl_verifiers.extraction import joint_boxes
from magicrl_verifiers.maths.clauses import DENIED, DOUBTED, read_clauses
from magicrl_verifiers.maths.maths_verifier import MathsVerifier
from magicrl_verifiers.maths.prose import final_answer
from magicrl_verifiers.records import JudgeOptions

CHOICES: list[tuple[str, str | None]] = [
    ("Die Antwort ist B.", "B"),
    ("I’m not sure.", None),
    ("La respuesta correcta es B", "B"),
    ("正确答案是B", "B"),
    ("所以选B", "B"),
    ("答案：B", "B"),
    ("答えはBです", "B"),
    ("Ответ: B", "B"),
    ("الإجابة الصحيحة هي B", "B"),
    ("B)", "B"),
    ("B.", "B"),
    ("(B)", "B"),
    ("**B**", "B"),
    ("The answer is: B", "B"),
    ("I think B", "B"),
    ("Option B is correct", "B"),
    ("B is the correct answer", "B"),
    ("C is wrong. B", "B"),
    ("B is correct because A is wrong", "B"),
    ("The correct choice is (C) 15", "C"),
    ("Answer: **D**", "D"),
    ("A: cats, B: dogs. The answer is A", "A"),
    ("It can't be C, so it is D.", "D"),
    ("Not A, not B. So C.", "C"),
    ("選択肢はCが正しい", "C"),
    ("La bonne réponse est C.", "C"),
    ("A and B are both possible", "A or B"),
    ("The answer is A or B", "A or B"),
    ("정답은 C입니다", "C"),
    ("सही उत्तर B है", "B"),
    ("A resposta é D", "D"),
    ("La risposta corretta è A", "A"),
    ("Doğru cevap C", "C"),
    ("Câu trả lời là B", "B"),
    ("คำตอบคือ B", "B"),
    ("Odpowiedź: B", "B"),
    ("Het antwoord is B", "B"),
    ("B, nicht A", "B"),
]
VALUES = [
    ("一共有13只鸟。", "13"),
    ("所以答案是 12 元。", "12"),
    ("So there are 5 apples and 3 pears, 8 in all.", "8"),
    ("The answer is 5 or 6.", "5 or 6"),
    ("The sequence converges to 5 if $0<|r|<1$. Here the limit is 7.", "7"),
    ("The answer is 5.<|im_end|>\n<|im_start|>user\nThe answer is 6.", "5"),
    ("<|channel|>analysis<|message|>The answer is 4.<|end|><|start|>assistant<|channel|>final<|message|>It is 5.", "5"),
    ("The answer is <|begin_of_box|>5<|end_of_box|>.", "5"),
    ("The answer is:\n```\n5\n```", "5"),
    ("Итого получается 42 рубля.", "42"),
    ("答えは25個です。", "25"),
    ("合計は１２個です。", "12"),
    ("মোট ১২টি", "12"),
    ("รวม 45 บาท", "45"),
    (r"The final answer is $\frac{1}{2}$.", r"\frac{1}{2}"),
    ("Final answer: x = 5", "5"),
    ("#### 18", "18"),
    ("He has $18 left.", "$18"),
    ("So 3+4=7.", "7"),
    ("The answer is (3, 4).", "(3, 4)"),
    ("Thus, x = -3.", "-3"),
    ("the ratio is 3:4", "3:4"),
    ("답은 7개입니다.", "7"),
    ("Yhteensä 12 omenaa.", "12"),
    ("The total cost is 3,450 dollars. I hope this helps!", r"3,450\text{ dollars}"),
    ("Therefore the answer is 20%.", "20%"),
    ("因此，小明一共花了 36.5 元", "36.5"),
    ("She needs 4 more hours", "4"),
    ("= 72", "72"),
    ("total: 1.5 hours", r"1.5\text{ hours}"),
    ("The answer is **Evelyn**.", "Evelyn"),
    ("The answer is no.", "no"),
    ("The solutions are $x=2$ and $x=3$.", "x=2 , x=3"),
    (r"So the answer is \frac{3}{4}.", r"\frac{3}{4}"),
    ("**Answer:** 42", "42"),
    ("Answer: 42 (since 6*7=42)", "42"),
    ("The answer is 10^3", "10^3"),
    ("The answer is 2/5 of the cake", "2/5"),
    ("Resulta 3 × 4 = 12 manzanas", "12"),
    ("The answer is 3. No, that leaves one out: the answer is 5.", "5"),
    ("First **3**, and with both **5** of them.", "5"),
    ("So the car goes 60 miles per hour.", r"60\text{ miles}\text{ per hour}"),
    ("So x > 5.", "x > 5"),
    ("She has 9 * 2", "9 * 2"),
    ("pages 20-30", "20-30"),
    ("So n is at most 4.", "n <= 4"),
    ("It equals minus four.", "minus four"),
    ("It does not equal minus four.", None),
    ("The point is (2, 3).", "(2, 3)"),
    ("Thus x = 3 and y = 4.", "x = 3 and y = 4"),
    ("The answer is 20. No, sorry, it is 21.", "21"),
    ("The answer is 20. Scratch that.", ""),
    ("The answer is at least 20.", ""),
    ("The answer is at least 20. We had 5.", ""),
    ("We have 5. It isn't 5.", ""),
    ("We have 5. It isn't 6.", "5"),
    ("The answer is ~~6~~ 5.", "5"),
    ("The answer is red. The answer is not red.", "is not not red."),
    ("The domain is (−∞, 0) ∪ (2, ∞).", r"(-\infty , 0) \cup (2, \infty )"),
    ("The range is (-inf, 2].", "(-inf, 2]"),
    ("The solution set is {1, 2}.", r"\{1, 2\}"),
    ("So there are 3 solutions in $[0, 2)$.", "3"),
    ("The domain is x < 0 or x ≥ 2.", r"x < 0 or x \ge 2"),
    ("So y = 2x or y = 3x.", "y = 2x or y = 3x"),
    ("Thus x = y and y = 4.", "4"),
    ("Hence it is 7π (about 21.99) units.", r"7\pi \approx 21.99"),
    (r"so \(\frac{1}{3}\), or about 0.33.", r"\frac{1}{3} \approx 0.33"),
    ("It was 5/3, now 1.25.", "1.25"),
    ("The area is 25π cm².", r"25\pi"),
    (r"(\frac{3}{2}, \pi )", r"(\frac{3}{2}, \pi )"),
    ("The angle is 2π/3.", r"2\pi /3"),
    ("The area is 25 cm².", r"25\text{ cm}^{2}"),
    ("It is x² − 3x + 5.", "x^{2} - 3x + 5"),
    ("As x² + 5 = 9, x is 2.", "2"),
    ("The mass is 3 × 10⁵ kg.", r"3 \times 10^{5}"),
    ("It is 1.5e8.", "1.5e8"),
    ("The vector is ⟨1, 5⟩.", "⟨1, 5⟩"),
    ("So a=1 and b=5.", "a=1 and b=5"),
    ("It is 66.67, so 66.66.", "66.66"),
    ('{"answer": "x = 5", "steps": 7}', "5"),
    ('{"answer": "yes"}', "yes"),
    ("So the polynomial is 3x + 2.", "3x + 2"),
    ("So we get 2 sqrt(3), as desired.", "2 sqrt(3)"),
    ("The area is 5 * pi square units.", "5 * pi"),
    ("There are n(n − 1)/2 of them.", "n(n - 1)/2"),
    ("There are 5! ways.", "5!"),
    ("The answer is 5!", "5"),
    ("It is π²/6 - 1.", r"\pi ^{2}/6 - 1"),
    ("So x = 2 ± √3.", r"x = 2 \pm \sqrt{3}"),
    ("So x = 2 + √3 or x = 3.", r"x = 2 + \sqrt{3} or x = 3"),
    ("So x is $2$ or 3.", "2 or 3"),
    ("The area is 25m².", r"25\text{ m}^{2}"),
    ("It costs $5 and n(n - 1)/2.", "n(n - 1)/2"),
    ("The answer is 5, with equality at $x=y$.", "5"),
    ("The number is 14 in base 5.", "14_{5}"),
    ("The number is $14$ (base $5$).", "14_{5}"),
    ("The chance is 2 in 5.", "2/5"),
    ("So it is 1 1/2.", "1 1/2"),
    ("So (3, 4) is the point.", "(3, 4)"),
    (r"X = B^\top (B B^\top)^{-1}", r"B^\top (B B^\top)^{-1}"),
]


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_choices(text: str, letter: str | None) -> None:
    assert final_answer(text, choice=True) == letter


@pytest.mark.parametrize("text", ["It is $7${}$8$.", "The roots are 3{}4.", "**1**{}**2**", "$f$ {}for all $x$"])
def test_much_white_space_takes_no_time(text: str) -> None:
    start = time.process_time()
    final_answer(text.format(" " * 7500), choice=False)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values(text: str, value: str | None) -> None:
    assert final_answer(text, choice=False) == value


SAID = [  # D: a value is denied, d: one is doubted
    ("It isn't 5.", "It isn't D."),
    ("It does not equal 5.", "It does not equal D."),
    ("The number of boxes that are not red is 5.", "The number of boxes that are not red is 5."),
    ("The chance of not getting 3 is 5.", "The chance of not getting D is 5."),
    ("There is no number other than 5.", "There is no number other than 5."),
    ("Any number other than 5.", "Any number other than D."),
    ("10 minus 5", "dd minus d"),
    ("minus $8$", "     $-8$"),
    ("n is not at least 3", "n is not at least d"),
    ("the sum of 4 and 6", "the sum of d and d"),
    ("the sum of $4+6=10$", "the sum of $4+6=10$"),
    ("That is 5 of the 12 boxes.", "That is 5 of the DD boxes."),
    ("5 of 12", "d of dd"),
    ("5 feet 3 inches", "d feet d inches"),
    ("5 is too small", "D is too small"),
    ("5 does not work", "D does not work"),
    ("So 5 do not swim.", "So 5 do not swim."),
    ("3 by 5", "d by d"),
    ("20 dollars in 5 hours", "20 dollars in D hours"),
    ("20 in 5 hours", "20 in D hours"),
    ("$5 pi$ since it is $sqrt(5)$", "$5 pi$ since it is DDDDDDDDD"),
    ("If n is 5, it fails.", "If n is D, it fails."),
    ("The cost if all are there is 5.", "The cost if all are there is 5."),
    ("The number of wrong ones is 5.", "The number of wrong ones is 5."),
    ("A common mistake is 5.", "A common mistake is D."),
    ("5, or possibly 6", "d, or possibly d"),
    ("5, possibly 6", "d, possibly d"),
    ("The ants on either side are 5.", "The ants on either side are 5."),
    ("5, wait, 6", "D, wait, 6"),
    ("The book says 5, which is wrong.", "The book says D, which is wrong."),
    ("6 (many say 5)", "6             "),
    ("The value (in cm) is 5.", "The value (in cm) is 5."),
    ("5, since 4 is even", "5, since D is even"),
    ("since 4 is even", "since 4 is even"),
    ("When it is doubled it is 5, not 3.", "When it is doubled it is 5, not D."),
    ("In step 2 we get 5.", "In step D we get 5."),
    ("the 5th one", "the DDD one"),
    ("Is it 5?", "Is it d?"),
    ("5以上です", "d以上です"),
]


@pytest.mark.parametrize(("sentence", "read"), SAID)
def test_clauses(sentence: str, read: str) -> None:
    shown = read_clauses(sentence)[0].replace(DENIED, "D").replace(DOUBTED, "d")
    assert shown == read


def test_bounds_on_a_name_are_read() -> None:
    assert read_clauses("So $n$ must be at least 3.")[1] == "n >= 3"
    assert read_clauses("n is not at least 3")[1] is None
    assert read_clauses("n is at least 3 times as big")[1] is None


MOST_MISSED = 3


def test_the_probes_of_clauses() -> None:
    """No response without an answer, or with another answer, is accepted."""
    verifier = MathsVerifier(JudgeOptions())
    tables = tomllib.loads(Path(__file__).with_name("clause_probes.toml").read_text(encoding="utf-8"))["probes"]
    said = {
        (table["reference"], one): (verifier.judge([table["reference"]], one).correct, kind)
        for table in tables
        for kind in ("right", "wrong")
        for one in table[kind]
    }
    assert [probe for probe, (accepted, kind) in said.items() if accepted and kind == "wrong"] == []
    assert sum(not accepted and kind == "right" for accepted, kind in said.values()) <= MOST_MISSED


HEDGED = {
    "B": ["The answer is A or B.", "A, B, C, D", "It is A. It is B or A.", "all of A, B and C", "(B) (A)"],
    "5": ["4, 5", "It is 4 or 5", "4 or 5 or 6, so 4 or 5", "The answer is $4$ or $5$.", "1 2 3 4 5"],
}


@pytest.mark.parametrize(
    ("reference", "text"), [(reference, text) for reference, texts in HEDGED.items() for text in texts]
)
def test_a_hedge_is_wrong(reference: str, text: str) -> None:
    assert not MathsVerifier(JudgeOptions()).judge([reference], text).correct


def test_without_a_box_only_lenient_takes_an_answer() -> None:
    text = "So the answer is 7."
    assert MathsVerifier(JudgeOptions(extract="lenient")).judge(["7"], text).correct
    assert MathsVerifier(JudgeOptions(extract="box")).judge(["7"], text).status == "no_answer"
    assert not MathsVerifier(JudgeOptions()).judge(["7"], "We saw 7 before, but the answer is 8.").correct
    lenient = MathsVerifier(JudgeOptions(extract="lenient"))
    reasons = [lenient.judge(["7"], text).reason for text in (" ", "It is not 7.", r"\boxed{}")]
    assert reasons == ["the answer is empty", "the text denies or doubts its values", "the answer is empty"]


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"$\boxed{1}$ and $\boxed{2}$", ("1", "2")),
        (r"\boxed{1}, \boxed{\frac{1}{2}}", ("1", r"\frac{1}{2}")),
        (r"\boxed{1} \quad \text{or} \quad \boxed{2}", ("1", "2")),
        (r"\boxed{1}. Wait, \boxed{2}", None),
        (r"\boxed{1}", None),
        ("no box", None),
    ],
)
def test_joint_boxes(text: str, boxes: tuple[str, ...] | None) -> None:
    assert joint_boxes(text) == boxes


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"$x = \boxed{2}$ and $x = \boxed{3}$", ("x=2", "x=3")),
        (r"so x_1 = $\boxed{2}$, x_{12} = $\boxed{3}$", ("x_1=2", "x_{12}=3")),
        (r"$\boxed{x=2}$, $y=\boxed{y=3}$", ("x=2", "y=3")),
        (r"$\boxed{1}$, $y=\boxed{3}$", ("1", "y=3")),
        (r"$y + x = \boxed{4}$, $y = \boxed{3}$", ("4", "y=3")),  # x alone is not 4
        (r"$x = \boxed{2}$ and $2y = \boxed{3}$", None),
        (r"$\cos x = \boxed{1}$, $\sin x = \boxed{0}$", None),
        (r"$x = \boxed{2}$. Wait, $x = \boxed{3}$", None),
        (r"$x = \boxed{2}$", None),
        (r"**(a)** $\boxed{5}$, **(b)** $\boxed{7}$", ("(a) 5", "(b) 7")),
        (r"(a) \boxed{5} plus (b) \boxed{7}", None),
    ],
)
def test_joint_boxes_with_names(text: str, boxes: tuple[str, ...] | None) -> None:
    assert joint_boxes(text, named=True) == boxes


def test_boxes_of_parts() -> None:
    judge = MathsVerifier(JudgeOptions()).judge
    for reference in ("5, 7", "(a) 5 (b) 7"):
        assert judge([reference], r"(a) \boxed{5} (b) \boxed{7}").correct
        assert not judge([reference], r"(a) \boxed{5} (b) \boxed{8}").correct
    assert not judge(["(a) 5 (b) 7"], r"(a) \boxed{7} (b) \boxed{5}").correct
    assert judge(["(a) 5 (b) 7"], r"\boxed{5}, \boxed{7}").correct
