"""Canonical texts, shingles, and the guard that keeps different problems apart."""

from __future__ import annotations

import numpy as np
import pytest

from magicrl.pipeline.canonical import canonical_text
from magicrl.pipeline.embedders import HashedEmbedder, make_embedder
from magicrl.pipeline.guard import are_different, number_key, numbers_of
from magicrl.pipeline.pipeline_schema import EmbeddingSettings
from magicrl.pipeline.texts import jaccard, shingles


@pytest.mark.parametrize(
    ("latex", "plain"),
    [
        (r"Find $\frac{1}{2}x^{2} \le 10{,}000$.", "find 1/2 x² ≤ 10,000"),
        (r"Let \(\sqrt{2}\) and $\alpha_{1}^{2}$", "Let √2 and α₁^2."),
        (r"$\angle ABC = 90^\circ$ and $\triangle DEF$", "∠ABC = 90°, and △DEF"),
        (r"\left( \dfrac{x+1}{y} \right) \times 3", "((x+1)/y) × 3"),
        (r"It costs \$5.00 \text{ per cm}", "It costs 5 per cm"),
        (r"$$5! \ne 0.50$$", "5! ≠ .5"),
        (r"$\frac{\sin 20^\circ}{2}$ and $\$26,\!000$", r"\(\dfrac{\sin 20^{\circ}}{2}\) and $26000"),
        ("He doesn't pay 8 dollars", "He does not pay USD 8"),
        ("the 3rd of **two** dozen, at 5km for 50¢", "The third of 24, at 5 kilometers for 50 cents"),
        ("one, two thousand thirty-two and two hundred and fifty", "1, 2032 and 250"),
        ("2.5 million and a hundred", "2,500,000 and a 100"),
        ("half a dozen, a dozen, 7:00 a.m. and 11 PM", "6, 12, 7am and 11 p.m."),
        ("two thirds of it, a quarter of it, 3-fifths and one half", "2/3 of it, 1/4 of it, 3/5 and half"),
        (r"The gcd of $5**3$ and 8, $\dotsb$", "The greatest common divisor of 5^3 and 8"),
        (
            "A non-negative two-digit number, 5 m^2, the $x$-axis",
            "a nonnegative two digit number, 5 square meters, the x axis",
        ),
    ],
)
def test_typesetting_does_not_count(latex: str, plain: str) -> None:
    assert canonical_text(latex) == canonical_text(plain)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2(x+1)", "2x+1"),
        ("$x^2$", "$x_2$"),
        ("1.5", "15"),
        ("1, 234", "1,234"),
        ("$x^{2n}$", "$x^2 n + $"),
        (r"$0.\overline{5}$", "$0.5$"),
        ("5!", "5"),
        ("a < b", "a > b"),
        (r"$\frac{1}{x+1}$", r"$\frac{1}{x}+1$"),
    ],
)
def test_what_is_another_formula_stays_another_text(one: str, other: str) -> None:
    assert canonical_text(one) != canonical_text(other)


def test_hostile_texts_come_through() -> None:
    for text in ("", "\x00", "\ud800", "{" * 5000, "\\frac" * 500, "$" * 999, "²" * 100, "🙂 中文 ﷺ"):
        assert canonical_text(canonical_text(text)) is not None


def test_numbers_are_read_as_words_too() -> None:
    assert numbers_of(canonical_text("He has twenty-five, 3.0 and two dozen").split()) == ["25", "3", "24"]
    assert number_key(["3", "and", "5"]) == number_key(["5", "then", "3"])
    assert number_key(["3", "3", "5"]) != number_key(["3", "5", "5"])


SAME = [
    ("Jo pays $5 (the smaller share) for ear buds.", "Jo pays $5, the smaller share, for earbuds."),
    (
        "Ann has 3 apples and Bob has 5 pears. How many in total?",
        "Bob has 5 pears and Ann has 3 apples. How many in total?",
    ),
    ("What is the largest $x$ with $5-4x>17$?", "Find the greatest $x$ such that $5 - 4x > 17$."),
    (
        "Josie got 50 dollars and paid 9 of them. What is left?",
        "Amanda received $50 and spent 9 of them. What remains?",
    ),
    ("Compute $3^4$.", "What is the value of $3^4$?"),
    (
        "In May Ann sold 8 cards to Tom for $5. What did Tom pay?",
        "Zoe vended eight cards to Raj for 5 dollars in May. What did Raj spend?",
    ),
    ("Solve $\\sin 2x = \\cos 3x$ for 3 values.", "Solve $\\sin(2x) = \\cos(3x)$ for 3 values."),
    ("Jack came to 9 shops. Then Paul came.", "Omar came to 9 shops. Then Ivan came."),
    ("Ann has 9 cows. She sells 2. How many has she?", "Zoe has 9 cows. Zoe sells 2. How many has Zoe?"),
    ("What percentage of 90 kilograms is 8 kilograms, in kilograms?", "What percent of 90 kg is 8 kg, in kg?"),
    ("A nut costs $3 a pound. What do 5 pounds cost, in dollars?", "A nut costs $3 per lb. What do 5 lb cost?"),
    ("Each of 9 bags holds 3 nuts. How far is the shop?", "Each of 9 bags has 3 nuts. What distance is the shop?"),
    ("A square has sides of 5 cm. What is its area?", "What is the area of a square that has sides of 5 cm?"),
    ("A pump fills 3 L/min for 1 h 20 min.", "A pump fills 3 liters per minute for 1 hour 20 minutes."),
    ("Let $a^{}_{}$ be the 3 roots of $x^2 + ax^{}_{}$.", "Let $a$ be the 3 roots of $x^2 + ax$."),
    ("Her neighbor was traveling 30 km.", "Her neighbour was travelling 30 kilometers."),
    ("What is the greatest root of $x^2 - 3x$?", "What is the largest zero of $x^2 - 3x$?"),
    (
        "If 2 is a zero of $p$ and each one is real, find $p(3)$.",
        "If 2 is a root of $p$ and each is real, find $p(3)$.",
    ),
    ("It costs $ 20/pound for 60 words/minute.", "It costs $20 per pound for 60 words per minute."),
    ("Ann won 5 points. How many total points has Ann?", "Ann won 5 points. How many points has Ann in total?"),
    ("Find the greater of the 2 terms.", "Find the larger of the 2 terms."),
    ("He runs 3 miles, monday and tuesday.", "He runs 3 miles, on Mondays and Tuesdays."),
    (
        "THE TOTAL IS 30 MARBLES. IT'S 50% OF WHAT TOM HAS.",
        "The total is 30 marbels. It is 50 percent of what Tom has.",
    ),
]
DIFFERENT = [
    ("Ann and Bob met. How many has he?", "Ann and Bob met. How many has Ann?"),
    ("Find the area of 5 squares with sides of 2.", "Find the sides of 5 squares with area of 2."),
    ("Let $f(x)=x^2-x$. Find $f(4)$.", "Let $f(x)=x^2-x$. Find $f(f(4))$."),
    ("Find the sum of $|a_i|$ for 9 terms.", "Find the sum of $a_i$ for 9 terms."),
    (
        "She had half as many gems as ores yesterday. Today she found 6 ores. Of 48 ores, how many gems does she have?",
        "She had half as many ores as gems yesterday. Today she found 6 ores. Of 48 ores, how many gems does she have?",
    ),
    ("Find $(5 + x)(20 - x)$ for the root.", "Find $(5 - x)(20 + x)$ for the root."),
    ("Ann has 3 apples.", "Ann has 4 apples."),
    ("Ann has 3 apples and Bob has 5 pears", "Ann has 5 apples and Bob has 3 pears"),
    ("What is $x - 3$ for x = 1?", "What is $x + 3$ for x = 1?"),
    ("How many even divisors has 24?", "How many odd divisors has 24?"),
    ("Find the center of the circle $x^2+y^2=9$", "Find the radius of the circle $x^2+y^2=9$"),
    ("Arrange the letters of ELLIPSE", "Arrange the letters of COMBINATION"),
    ("The graph of $ax^2+b$. Find $a$.", "The graph of $ax^2+b$. Find $b$."),
    ("How many boys are in the club of 26?", "How many girls are in the club of 26?"),
    ("4 distinguishable balls in 2 indistinguishable boxes", "4 indistinguishable balls in 2 distinguishable boxes"),
    ("What is $88/4/2$?", "What is $88/(4/2)$?"),
    ("How many pairs of integers have the sum 12?", "How many pairs of distinct integers have the sum 12?"),
    ("A box holds 3 red and 5 blue pens. Is it long?", "A box holds 3 red and 5 blue pens. Is it heavy?"),
    ("Compute $3 - 5$.", "Compute $5 - 3$."),
    ("Tom has twice as many as his 5 cats.", "Tom has half as many as his 5 cats."),
    ("He had 9 pears and ate 4 of them. How many are left?", "He had 9 pears and ate 4 of them. How many are gained?"),
    ("Ann has 3 pears, Tom has 5. How many has Ann?", "Ann has 3 pears, Tom has 5. How many has Tom?"),
    ("Then Ann gave Tom 3 of her 9 pears.", "Then Tom gave Ann 3 of her 9 pears."),
    ("He has 3 red and 5 blue pens. How many red ones?", "He has 3 blue and 5 red pens. How many red ones?"),
    ("She buys 3 pens for $2 each.", "She buys 3 pens for $2."),
    ("She has 8 pens and gives 3 to him.", "She has 8 pens and gives 3 to him. She loses half of the rest."),
    ("They walked for the seventh time, 5 miles.", "They walked for the seventy time, 5 miles."),
    ("What is the sum of the zero vector and $v$?", "What is the sum of the root vector and $v$?"),
    ("Of his pens, zero of the 5 are red.", "Of his pens, roots of the 5 are red."),
    ("Let $r$ and $s$ be 2 roots. Find $s$.", "Let $r$ and $s$ be 2 roots. Find $r$."),
    ("Choose 6 of 14 players.", "Choose 6 of 14 players so that the tallest, the oldest and the fastest are in."),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_guard_lets_copies_through(one: str, other: str) -> None:
    assert not are_different(one, other)
    assert not are_different(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_the_guard_keeps_problems_apart(one: str, other: str) -> None:
    assert are_different(one, other)
    assert are_different(other, one)


def test_shingles_of_a_batch_are_those_of_each_text() -> None:
    texts = ["abcdef", "abc", "", "xabcdef", "ü🙂ab c"]
    hashes, starts = shingles(texts, 5)
    for i, text in enumerate(texts):
        alone, _ = shingles([text], 5)
        assert hashes[starts[i] : starts[i + 1]].tolist() == alone.tolist()
        assert len(alone) == (max(1, len(text) - 4) if text else 0)
    a, b = (np.unique(shingles([text], 5)[0]) for text in (texts[0], texts[3]))
    assert jaccard(a, b) == pytest.approx(2 / 3)


def test_the_embedder_sees_wording_whoever_the_story_is_about() -> None:
    stories = [f"A farmer sells {i} eggs to Natalia, and later Natalia sells {i} of them to Omar." for i in range(5)]
    story = "In April, Natalia sold 48 clips to friends, and in May Natalia sold half as many. How many did she sell?"
    corpus = [*stories, story, "Compute the integral of x squared from zero to one.", "How many primes are below 100?"]
    embedder = HashedEmbedder([corpus], dimensions=128, seed=0)
    vectors = embedder.embed([story, story.replace("Natalia", "Omar"), corpus[-1], ""])
    assert vectors[0] @ vectors[1] > 0.99
    assert abs(vectors[0] @ vectors[2]) < 0.4
    assert not vectors[3].any()
    again = HashedEmbedder([corpus], dimensions=128, seed=0).embed([story])
    assert (again[0] == vectors[0]).all()
    assert (HashedEmbedder([corpus], dimensions=128, seed=1).embed([story])[0] != vectors[0]).any()


def test_a_word_that_begins_sentences_is_no_name() -> None:
    embedder = HashedEmbedder(
        [["Squares roll.", "Squares fall.", "Circles roll.", "Circles fall."]], dimensions=64, seed=0
    )
    squares, circles = embedder.embed(["Squares roll.", "Circles roll."])
    assert squares @ circles < 0.9


def test_settings_name_what_they_need() -> None:
    with pytest.raises(ValueError, match="needs model"):
        EmbeddingSettings(kind="model")
    with pytest.raises(ValueError, match="needs base_url"):
        EmbeddingSettings(kind="server")
    with pytest.raises(ValueError, match="no http"):
        make_embedder(EmbeddingSettings(kind="server", base_url="ftp://x"), list)


def test_a_condition_that_only_one_text_has_counts_without_wording_too() -> None:
    plain = "How many integers from 1 to 50 have a digit sum of 5?"
    assert not are_different(plain, plain.replace("How many integers", "How many whole integers"), wording=False)
    assert are_different(plain, plain.replace("integers", "even integers"), wording=False)
