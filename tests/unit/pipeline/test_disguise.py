"""Problems under other names of their variables and people, and inside chat text."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicrl.pipeline.decontaminate_step import find_contamination
from magicrl.pipeline.dedup_step import find_duplicates
from magicrl.pipeline.disguise import keys_of, problem_of
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import DecontaminationSettings, DedupSettings

LINES = (
    r"Let $f(x) = 3x^2 + bx$ and let $A$ and $B$ lie on it. If $AB = \frac 1b$ and $\triangle OAB$ is right, find $b$."
)
STORY = "Ann pays $5 for 2 pears. Her brother Tom pays $3. How much more does Ann pay than Tom?"
INDEX = r"Find the least $n$ with $\sum_{i=1}^n a_i > 100$, where $a_i = i^2 + e^i$ and $a_0 = 1$."

SAME = [
    (LINES, LINES.replace("x", "t").replace("b", "k").replace("A", "P").replace("B", "Q").replace("Okl", "O")),
    (LINES, LINES.replace("$f(x) = 3x^2 + bx$", r"$f(\theta) = 3\theta^2 + b\theta$")),
    (LINES, f"<|user|>\n{LINES}\n<|assistant|>\n"),
    (LINES, f"I can't do this one - can anyone help me? {LINES} Thanks!"),
    (STORY, STORY.replace("Ann", "Zoe").replace("Tom", "Raj").replace("Her", "His")),
    (STORY, f"Problem 12. {STORY}\n\nPlease think step by step and box your final answer."),
    (STORY, f"Here is today's riddle from my aunt:\n{STORY}\nGood luck!"),
    (INDEX, INDEX.replace("_i", "_k").replace("i=1", "k=1").replace("= i^2 + e^i", "= k^2 + e^k").replace("n", "m", 0)),
]
WRAPPED = [
    (STORY, f"A student asks their teacher:\n{STORY}"),
    (STORY, f"Answer the question below. Rules:\n1. Show all work.\n2. No calculators.\n\n{STORY}"),
    (STORY, f"{STORY}\n(Time limit: 60 s)"),
    (STORY, f"[Word problem | id 4521]\n{STORY}"),
    (STORY, f"Difficulty: 3/10. Topic: algebra. {STORY}"),
    (STORY, f"Arithmetic quiz #12: {STORY}"),
    (STORY, f"Question (id 812): {STORY}"),
    (STORY, f"{STORY}\nGive only a number, e.g. 12."),
    (LINES, LINES.replace("b", "k").replace("find $k$", "what is the value of $k$?")),
    ("Let $ab = 12$. Find the minimum of $a + b$.", "If $mn = 12$, find the smallest possible value of $m + n$."),
]
OTHER = [
    (STORY, f"You have 30 minutes. {STORY} She walks for 5 minutes."),
    (LINES, LINES.replace("find $b$", "find $A$")),
    (LINES, LINES.replace("3x^2 + bx", "3b^2 + bx")),
    (LINES, LINES.replace("3x", "4x")),
    (STORY, STORY.replace("than Tom", "than Ann").replace("does Ann", "does Tom")),
    (STORY, f"{STORY} Ann returns 1 pear."),
    (STORY, f"{STORY} How many pears do you get for $10?"),
    (STORY, STORY.replace("How much more does Ann pay than Tom?", "What do you think is the total?")),
    ("Compute $(1 + i)^2 + 3$.", "Compute $(1 + x)^2 + 3$."),
    (r"Solve $x^2 = 4x + 7$. Find the largest solution.", r"Solve $x^2 = 4x + 7$. Find the smallest solution."),
    ("A code has 3 digits. How many are there?", "A code has 3 digits. How many are there? No digit comes twice."),
    ("It rains on Monday and Tom has 3 coats. What now?", "It rains on Friday and Tom has 3 coats. What now?"),
]  # fmt: skip


def alike(a: str, b: str) -> bool:
    keys_a, keys_b = keys_of(problem_of(a)), keys_of(problem_of(b))
    return keys_a[0] in keys_b or keys_b[0] in keys_a


@pytest.mark.parametrize(("one", "other"), SAME + WRAPPED)
def test_a_disguise_is_seen_through(one: str, other: str) -> None:
    assert one != other
    assert alike(one, other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_another_problem_is_none(one: str, other: str) -> None:
    assert one != other
    assert not alike(one, other)


def test_both_steps_say_what_they_found(tmp_path: Path) -> None:
    texts = {f"own{i}": text for i, text in enumerate([LINES, STORY, INDEX])}
    copies = {f"copy{i}": other for i, (_, other) in enumerate(SAME)}
    held = [Document(name, text, (float(name < "d"),)) for name, text in (copies | texts).items()]
    found, _ = find_duplicates(held, DedupSettings(stages=("exact", "disguised")), folder=tmp_path / "dedup")
    assert found.keys() == {*texts, *copies} - {
        "copy0",
        "copy4",
        "copy7",
    }
    # a chat template and remarks are no part of a problem: these copies are equal to it
    assert {name for name, one in found.items() if one.stage == "exact"} == {"own0", "own1", "copy6"}
    references = {"test": [Document(name, text) for name, text in texts.items()]}
    asked = (Document(name, text) for name, text in copies.items())
    settings = DecontaminationSettings(use_embedding=False)
    hits = {hit.document: hit.kind for hit in find_contamination(asked, references, settings, folder=tmp_path / "hits")}
    renamed = dict.fromkeys(("copy0", "copy1", "copy2", "copy4", "copy5", "copy6", "copy7"), "renamed")
    assert hits == renamed | {"copy3": "contained"}
    assert {"renamed", "contained"} <= set(settings.drop)


def test_two_that_share_a_part_only_are_two_problems(tmp_path: Path) -> None:
    told = "A shop sells 3 kinds of bread and 4 kinds of cheese. "
    held = [Document("a", told + "It opens early."), Document("b", told + "It is near the school.")]
    assert not find_duplicates(held, DedupSettings(stages=("disguised",)), folder=tmp_path)[0]


REMARKS = [
    ("Question 14: ", ""),
    ("", " /no_think"),
    ("", "\nPlease put the final answer as $\\boxed{ANSWER}$."),
    ("Problem 3 (5 points). ", ""),
    ("You have 2048 tokens. Think in at most 5 steps.\n", ""),
    (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>",
    ),
    ("Solve this problem. The last line is of the form Answer: $Answer, where $Answer is the answer.\n\n", ""),
    ("### Instruction:\n", "\n\n### Response: Let's think step by step."),
    ("Example 7.\n", " [3 marks]"),
    ("Return \\(\\boxed{x}\\), where x is your answer.\n---\n", ""),
    ("Your task is to ", "\nExplain your solution as if to a ten-year-old."),
    ("Answer this in under 3 minutes: ", ""),
    ("Winter exam, problem 8. ", ""),
    ("(HMMT 2019) ", ""),
    ("", " [Putnam 1987]"),
]
NO_REMARKS = [
    "You have 5 exams, and 3 problems in each exam. How many are there?",
    "Find the number of solutions of\n$x^2 = 4$.",
    "What comes next:\n2, 4, 8, 16",
    "Find the least of these: $x$, $x + 1$, $2x$.",
    "Tom says that his answer is 12. What is half of it?",
    "What is 20/7? Round your answer to 3 decimal places.",
    "A box holds 3 pens. The answer is $x$. Find $x$.",
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), REMARKS)
def test_remarks_are_no_part_of_a_problem_whatever_numbers_they_hold(before: str, after: str) -> None:
    for problem in (LINES, STORY):
        assert problem_of(f"{before}{problem}{after}") == problem


@pytest.mark.parametrize("text", NO_REMARKS)
def test_what_may_belong_to_a_problem_stays(text: str) -> None:
    assert problem_of(text) == text


def test_letters_of_axes_are_no_variables() -> None:
    assert not alike("Reflect (2, 3) over the $x$-axis.", "Reflect (2, 3) over the $y$-axis.")
