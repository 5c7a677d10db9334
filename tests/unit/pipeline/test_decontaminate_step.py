"""Test problems found in training texts, whatever was changed in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magicrl.config.errors import RecipeError
from magicrl.pipeline import decontaminate_step
from magicrl.pipeline.decontaminate_step import Hit, find_contamination, write_report
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import DecontaminationSettings

WALK = (
    "Every morning Aya goes for a $9$-kilometer-long walk and stops at a coffee shop afterwards. When she walks at a "
    r"constant speed of $s$ kilometers per hour, the walk takes her $4$ hours, including $t \le 60$ minutes there. "
    "Find the number of minutes the walk takes her at $s+2$ kilometers per hour."
)
GRID = (
    r"Let $S$ be the set of points $(a,b)$ with $0 \le a \le 8$ and $0 \le b \le 8$. Find the number of squares whose "
    r"four vertices lie in $S$ and whose side has length $\frac{m}{n}$."
)
SHORT = "Compute $3+5$."
CODE = "You are given a string s of length n. In one move you delete two equal neighbours. Print the shortest length."
OWN = (
    "A fair die is thrown four times. How likely is it that every throw shows more than the one before?",
    "Six knights sit at a round table, and three of them are chosen. How likely is it that two sat side by side?",
    "A frog jumps ten times, each time one step left or right. How likely is it that it ends where it began?",
)
REFERENCES = {"aime": [WALK, GRID, SHORT], "code": [CODE]}

COPIES = {
    "verbatim": WALK.upper().replace(" ", "\n"),
    "reformatted": WALK.replace("$", "").replace(r"\le", "≤"),
    "contained": f"Here is a contest problem for you. {GRID} After that, find the sum of m and n and explain it.",
    "reworded": WALK.replace("Every morning Aya goes", "Each morning Bruno sets out").replace(
        "stops at a coffee shop afterwards", "afterwards stops at a cafe"
    ),
    "renumbered": GRID.replace("8", "12"),
    "one word": GRID.replace("squares", "quadrilaterals"),
    "code": CODE.replace("string s of length n", "string t of length m"),
}
OTHERS = {
    "another": "Let $S$ be the set of primes below 100. Find the number of pairs in $S$ whose sum is a square.",
    "short-renumbered": "Compute $4+7$.",
    "empty": "",
}


def search(texts: dict[str, str], folder: Path, sets: dict[str, list[str]] = REFERENCES, **settings: Any) -> list[Hit]:
    references = {
        name: [Document(f"{name}-{i}", text) for i, text in enumerate(members)] for name, members in sets.items()
    }
    documents = (Document(name, text) for name, text in texts.items())
    return list(find_contamination(documents, references, DecontaminationSettings(**settings), folder=folder))


def test_every_kind_is_found_and_named(tmp_path: Path) -> None:
    hits = search(COPIES | OTHERS, tmp_path)
    told = {hit.document: (hit.reference, hit.kind) for hit in hits if hit.kind != "neighbour"}
    assert told == {
        "verbatim": ("aime-0", "verbatim"),
        "reformatted": ("aime-0", "reformatted"),
        "contained": ("aime-1", "contained"),
        "reworded": ("aime-0", "reworded"),
        "renumbered": ("aime-1", "renumbered"),
        "one word": ("aime-1", "reworded"),
    } | ({"code": told["code"]} if "code" in told else {})
    assert "code" in {hit.document for hit in hits}
    assert not {hit.document for hit in hits} & OTHERS.keys()
    exact = next(hit for hit in hits if hit.document == "reformatted")
    assert (exact.score, exact.reference_set) == (1.0, "aime")
    assert exact.document_text == COPIES["reformatted"]
    assert exact.reference_text == WALK
    assert all(0 < hit.score <= 1 for hit in hits)


def test_short_test_problems_are_found_verbatim_only(tmp_path: Path) -> None:
    hits = search({"same": "compute 3 + 5", "other": "Compute $3+6$."}, tmp_path)
    assert [(hit.document, hit.kind) for hit in hits] == [("same", "reformatted")]
    # all of its n-grams are in a longer text with further numbers, but it has no words
    longer = "In round 7 we warm up a little: compute $3+5-2+4-6$ and tell your neighbour which number you found."
    sums = {"sums": ["Compute $3+5-2+4-6$."]}
    assert not search({"longer": longer}, tmp_path, sums, use_embedding=False)


def test_words_alone_find_what_embeddings_are_not_asked_for(tmp_path: Path) -> None:
    hits = search(COPIES, tmp_path, use_embedding=False)
    assert {"verbatim", "reformatted", "contained", "reworded", "renumbered"} <= {hit.document for hit in hits}
    turned = " ".join(reversed(CODE.split()))
    assert not search({"turned": turned}, tmp_path, use_embedding=False)


def test_only_kinds_that_are_asked_for_are_reported(tmp_path: Path) -> None:
    hits = search(COPIES, tmp_path, kinds=("verbatim", "renumbered"), drop=("verbatim",))
    assert {hit.kind for hit in hits} == {"verbatim", "renumbered"}
    assert "neighbour" not in DecontaminationSettings().drop
    with pytest.raises(ValueError, match="drop has contained, reworded, which kinds leaves out, so such copies would"):
        DecontaminationSettings(kinds=("verbatim",), drop=("verbatim", "contained", "reworded"))


def test_test_problems_without_a_usable_answer_are_found_and_unreadable_ones_are_an_error(
    write_rows: Callable[..., Path], run: Any
) -> None:
    rows = [{"problem": text, "answer": "5"} for text in (WALK, GRID, CODE, *OWN)]
    held = [
        {"problem": WALK, "answer": None},
        {"problem": GRID, "answer": "n/a"},
        {"question_content": CODE, "public_test_cases": "[]", "private_test_cases": "?"},
        {"problem": OWN[0], "choices": ["1/2", "1/3"], "answer": "2/5"},
        {"problem": OWN[1], "answer": "1/2", "solution": "x" * 5000},
    ]
    against = {"held": {"path": str(write_rows("t.jsonl", held))}}
    step = {"use": "decontaminate", "against": against, "settings": {"use_embedding": False}}
    tree = {"sources": [{"path": str(write_rows("r.jsonl", rows))}], "steps": [step], "max_field_characters": 4000}
    run(tree)
    assert run.reasons("01-decontaminate") == {f"r/r-{place}": "in test set held" for place in range(5)}
    write_rows("t.jsonl", [*held, {"problem": "", "answer": "5"}])
    said = (
        r"steps\.0\.against\.held: 1 records of the test set cannot be read.*t\.jsonl, line 6: field 'problem' is empty"
    )
    for _ in range(2):  # the second time the import is found unchanged
        with pytest.raises(RecipeError, match=said):
            run(tree)


def test_shared_phrases_are_no_hit(tmp_path: Path) -> None:
    """Phrases that every problem of a test set contains identify none of them."""
    same = (
        "Express your answer as a common fraction in lowest terms and give the sum of its parts as an integer. "
        "Write nothing else, use no calculator, and show every step of your work on the sheet that you were given."
    )  # most of each problem's n-grams
    references = {"set": [Document(str(i), f"{own} {same}") for i, own in enumerate(OWN)]}
    settings = DecontaminationSettings(use_embedding=False)
    documents = [Document("x", f"A ship sails 30 miles north, then 40 miles west; how far is it from home? {same}")]
    assert not list(find_contamination(documents, references, settings, folder=tmp_path))


def test_a_killed_call_goes_on_after_its_last_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decontaminate_step, "CHUNK", 2)
    whole = search(COPIES | OTHERS, tmp_path / "whole")
    hits_of, done = decontaminate_step._Search.hits, []

    def stopping(self: Any, ids: Any, texts: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(ids)
        return hits_of(self, ids, texts)

    with monkeypatch.context() as patch:
        patch.setattr(decontaminate_step._Search, "hits", stopping)
        with pytest.raises(KeyboardInterrupt):
            search(COPIES | OTHERS, tmp_path / "killed")
    asked: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            decontaminate_step._Search, "hits", lambda self, ids, texts: asked.append(ids) or hits_of(self, ids, texts)
        )
        assert search(COPIES | OTHERS, tmp_path / "killed") == whole
    assert len(asked) == 3  # of five chunks
    assert [hit.kind for hit in search({"a": WALK}, tmp_path / "killed")] == ["verbatim"]
    assert not search({"a": WALK}, tmp_path / "killed", {"other": [OWN[0]]}), "other test sets are searched again"


def test_only_the_kinds_to_drop_cost_rows(write_rows: Callable[..., Path], run: Any) -> None:
    texts = [COPIES["verbatim"], COPIES["reformatted"], OTHERS["another"]]
    source = {"path": str(write_rows("r.jsonl", [{"problem": text, "answer": "5"} for text in texts]))}
    against = {"aime": {"path": str(write_rows("t.jsonl", [{"problem": WALK, "answer": "204"}]))}}
    settings = {"drop": ["verbatim"], "use_embedding": False}
    run({"sources": [source], "steps": [{"use": "decontaminate", "against": against, "settings": settings}]})
    assert run.reasons("01-decontaminate") == {"r/r-0": "in test set aime"}
    hits = (run.output / "01-decontaminate" / "work" / "hits.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in hits] == ["verbatim", "reformatted"]


def test_nothing_to_compare_with_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every reference set is empty"):
        list(find_contamination([], {"aime24": []}, DecontaminationSettings(), folder=tmp_path))


def test_the_report_holds_both_texts_of_every_hit(tmp_path: Path) -> None:
    texts = COPIES | {"fenced": f"`````` {WALK} ````"}
    hits = search(texts, tmp_path / "work")
    write_report(iter(hits), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "hits.jsonl").read_text().splitlines()]
    assert [Hit(**row) for row in rows] == hits
    page = (tmp_path / "hits.md").read_text()
    assert "| aime | renumbered | 1 |" in page
    assert page.count("Training text:") == len(hits)
    assert all(hit.document_text in page and hit.reference_text in page for hit in hits)
    assert f"\n```````text\n{texts['fenced']}\n```````\n" in page, "no text ends its own block"
    assert not list(tmp_path.glob("*.tmp"))
