"""What makes two prompts the same one."""

from __future__ import annotations

import pickle
import sys
import unicodedata
from dataclasses import replace

import pytest

from magicrl.records import Problem, prompt_key, typed

SAME = [
    ("Find the sum of 2 and 3.", "  find  the SUM\nof 2 and\t3. "),
    ("It’s “x” – 3 − 2 … 5‑fold", 'it\'s "x" - 3 - 2 ... 5-fold'),
    ("Ｆｉｎｄ\u00a0the ﬁrst\u2009𝑥", "find the first x"),
    ("cafe\u0301", "café"),
    ("\ufeffWhat\u200b is 2\u00ad+3\u2060?", "what is 2+3?"),
    ("STRASSE", "straße"),
]
OTHER = [
    ("2³", "23"), ("x₁", "x1"), ("1½", "11/2"), ("2 + 3", "2 - 3"), ("2 3", "23"), ("1.5", "15"), ("ℵ", "a"),
    ("f'(x)", "f(x)"), (r"\frac12", r"\frac21"), ("x²", "x³"), ("10,0", "100"),
]  # fmt: skip


def problem(prompt: str, **more: str) -> Problem:
    return Problem(id="a", prompt=prompt, golds=("1",), verifier="exact", source="doc", **more)


@pytest.mark.parametrize(("one", "other"), SAME)
def test_typesetting_makes_no_other_prompt(one: str, other: str) -> None:
    assert prompt_key(one) == prompt_key(other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_what_is_asked_does(one: str, other: str) -> None:
    assert prompt_key(one) != prompt_key(other)


def test_no_two_digits_of_another_value_are_folded_into_one() -> None:
    """Every character that Unicode folds into a plain digit is a digit of that value, and not raised or lowered."""
    for code in range(sys.maxunicode + 1):
        found = typed(char := chr(code))
        if found != char and any(c.isdigit() for c in found):
            tag = unicodedata.decomposition(char).partition(" ")[0]
            assert tag not in ("<super>", "<sub>", "<fraction>"), f"U+{code:04X} {char} became {found}"


def test_all_messages_count() -> None:
    user, system = {"role": "user", "content": "What is 2 + 3?"}, {"role": "system", "content": "Be brief."}
    said = {"role": "assistant", "content": "5"}
    assert prompt_key([user]) == prompt_key("what is 2 + 3?")
    many = [
        [user],
        [system, user],
        [user, system],
        [user, said, user],
        [{"role": "system", "content": user["content"]}],
    ]
    assert len({prompt_key(one) for one in many}) == len(many)
    assert prompt_key([system, user]) == prompt_key([{"content": "be  BRIEF.", "role": "system"}, user])


def test_a_problem_keeps_its_identity_in_a_wrapping_and_on_its_way() -> None:
    one = problem("What is 2 + 3?")
    wrapped = replace(one, prompt="Think. What is 2 + 3? Box it.", id="b")
    assert one.key == wrapped.key == pickle.loads(pickle.dumps(one)).key != problem(wrapped.prompt).key


def test_a_template_is_a_cluster() -> None:
    assert problem("a").cluster == problem(" A").cluster != problem("b").cluster
    assert problem("a", template="t").cluster == problem("b", template="t").cluster
