"""Duplicates: found by the right stage, the better copy kept, the same result after a kill."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from json_server import Asked, Reply, json_server
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from magicrl.pipeline import dedup_step
from magicrl.pipeline.dedup_step import Duplicate, find_duplicates
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import DedupSettings, EmbeddingSettings, EmbeddingStageSettings, NearSettings
from magicrl_verifiers.served import ServerError

TRAINS = "Two trains leave Berlin and Paris, which are 1000 km apart, at 80 km/h and 120 km/h. When do they meet?"
CARDS = r"How many ways are there to choose $5$ cards of $52$ so that all have one suit, at $\frac{1}{4}$ each?"
GARDEN = "Maria plants 12 roses in each of 7 rows of her garden, and 5 of all her roses wither. How many bloom?"
POLYNOMIAL = r"Let $p(x) = x^3 - 4x + 2$ have roots $a, b, c$. Find $a^2 + b^2 + c^2$ and simplify your result."


def documents(**texts: str) -> list[Document]:
    return [Document(name, text, (1.0,)) for name, text in texts.items()]


def run(held: list[Document], folder: Path, **settings: Any) -> list[Duplicate]:
    return list(find_duplicates(held, DedupSettings(**settings), folder=folder)[0].values())


def test_each_stage_finds_its_kind_and_names_the_twin(tmp_path: Path) -> None:
    found = run(
        documents(
            trains=TRAINS,
            cards=CARDS,
            garden=GARDEN,
            polynomial=POLYNOMIAL,
            typeset=r"How many ways are there to choose 5 cards of 52 so that all have one suit, at 1/4 each?",
            closely=TRAINS.replace("leave", "currently leave"),
            reworded="How many bloom if Jo plants 12 roses in each of 7 rows of his garden "
            "and 5 of all his roses wither?",
        ),
        tmp_path,
        near=NearSettings(similarity=0.75),
        embedding=EmbeddingStageSettings(similarity=0.6),  # in six texts no word is common
    )
    told = {one.id: (one.kept, one.stage) for one in found}
    assert told == {
        "typeset": ("cards", "exact"),
        "closely": ("trains", "near"),
        "reworded": ("garden", "embedding"),
    }
    assert all(one.twin == one.kept for one in found)


@pytest.mark.parametrize("change", [("12", "13"), ("How many bloom", "How many are not planted"), ("rows", "columns")])
def test_another_problem_in_the_same_words_is_no_duplicate(change: tuple[str, str], tmp_path: Path) -> None:
    found = run(documents(one=GARDEN, other=GARDEN.replace(*change)), tmp_path)
    assert not found


def test_without_the_guard_it_would_be_one(tmp_path: Path) -> None:
    found = run(documents(one=GARDEN, other=GARDEN.replace("12", "13")), tmp_path, compare_numbers=False)
    assert [(one.id, one.stage) for one in found] == [("other", "near")]


def test_the_better_specified_copy_stays_and_of_equals_the_first(tmp_path: Path) -> None:
    held = [
        Document("poor", TRAINS, (0.0, 9.0)),
        Document("first", TRAINS, (1.0, 5.0)),
        Document("second", TRAINS, (1.0, 5.0)),
        Document("near", TRAINS.replace("When do they", "Find when they"), (1.0, 6.0)),
    ]
    found = run(held, tmp_path)
    assert {one.id: (one.kept, one.twin) for one in found} == {
        "poor": ("near", "first"),
        "second": ("near", "first"),
        "first": ("near", "near"),
    }


def test_the_order_of_stages_and_documents_does_not_decide_what_is_a_copy(tmp_path: Path) -> None:
    held = documents(trains=TRAINS, again=TRAINS + " ", cards=CARDS, garden=GARDEN)
    held.append(Document("better", TRAINS.replace("which are", "being"), (2.0,)))
    one = run(held, tmp_path / "a")
    shuffled = random.Random(1).sample(held, len(held))
    other = run(shuffled, tmp_path / "b", stages=("embedding", "near", "exact"))
    assert {d.id: d.kept for d in one} == {d.id: d.kept for d in other}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # two wrappings of one problem, which is not itself among the documents
        (f"I can't do this one - can anyone help me? {GARDEN} Thanks!", f"Problem 12. {GARDEN}\n\nThink step by step."),
        # a blank follows the sign, as at the end of a sentence, and xy are two variables only in a formula
        (
            "Find the largest $x$ with $xy > 12$ and $x + y = 9$.",
            "Find the largest $a$ with $ab > 12$ and $a + b = 9$.",
        ),
    ],
)
def test_two_disguises_of_one_problem_are_duplicates(one: str, other: str, tmp_path: Path) -> None:
    found = run(documents(one=one, other=other), tmp_path, stages=("disguised",))
    assert [(one.id, one.kept) for one in found] == [("other", "one")]


def test_texts_without_words_are_compared_as_they_are(tmp_path: Path) -> None:
    found = run(documents(empty="", question="???", marks="!!!", again="???"), tmp_path)
    assert {one.id: one.kept for one in found} == {"again": "question"}


def test_what_a_caller_gets_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two documents have the id 'a'"):
        run([Document("a", "x"), Document("a", "y")], tmp_path)
    with pytest.raises(ValueError, match=r"quality has 2 values, that of 'a' has 1"):
        run([Document("a", "x", (1.0,)), Document("b", "y", (1.0, 2.0))], tmp_path)
    with pytest.raises(ValueError, match="each once"):
        DedupSettings(stages=("near", "near"))
    with pytest.raises(ValueError, match="rows = 17 is more than permutations = 16, so there is no band to compare"):
        NearSettings(permutations=16, rows=17)
    assert NearSettings(permutations=16, rows=16).rows == 16
    assert run([], tmp_path / "none") == []


def many(count: int) -> list[Document]:
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ba", "ko", "ri", "tu", "fe") for b in ("lan", "mis", "ter", "gol", "dex", "sum")]
    texts = [" ".join(rng.choices(words, k=12)) + f" {rng.randint(1, 5)}" for _ in range(count // 2)]
    return [Document(str(i), text, (rng.random(),)) for i, text in enumerate([*texts, *texts])]


def test_a_killed_call_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = many(60)
    whole = run(held, tmp_path / "whole")
    assert sum(one.stage == "exact" for one in whole) == 30
    for place in ("bands_of", "link_near", "make_embedder", "Duplicate"):
        with monkeypatch.context() as patch:
            patch.setattr(dedup_step, place, stopped)
            with pytest.raises(KeyboardInterrupt):
                run(held, tmp_path / place)
        assert run(held, tmp_path / place) == whole
    # finished work is not repeated
    with monkeypatch.context() as patch:
        for place in ("bands_of", "link_near", "make_embedder", "canonical_text", "number_key"):
            patch.setattr(dedup_step, place, stopped)
        assert run(held, tmp_path / "whole") == whole


def test_another_set_or_setting_does_not_find_old_results(tmp_path: Path) -> None:
    held = many(60)
    run(held, tmp_path)
    assert len(run(held[:30], tmp_path)) < 15
    assert find_duplicates(held, DedupSettings(stages=("exact",)), folder=tmp_path)[1] == {"exact": 0}
    strict = run(held, tmp_path, near=NearSettings(similarity=1.0))
    assert all(one.stage != "near" for one in strict)
    for better in (0, 1):
        twins = [Document(str(place), GARDEN, (float(place == better),)) for place in range(2)]
        assert [one.kept for one in run(twins, tmp_path)] == [str(better)]


def stopped(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_large_blocks_are_split_and_still_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reworded = "Roses: Maria plants 12 in each of 7 rows of her garden; how many bloom, if 5 of all her roses wither?"
    held = documents(garden=GARDEN, reworded=reworded)
    held += [Document(f"x{i}", f"{i % 7} {text.text} 12 7 5", (0.0,)) for i, text in enumerate(many(40))]
    settings = {"stages": ("embedding",), "compare_numbers": False}
    whole = run(held, tmp_path / "whole", **settings)
    monkeypatch.setattr(dedup_step, "_TILE", 8)
    tiles = run(held, tmp_path / "tiles", **settings)
    assert [(one.id, one.twin) for one in tiles] == [(one.id, one.twin) for one in whole]
    monkeypatch.setattr(dedup_step, "_BLOCK", 16)
    parts = run(held, tmp_path / "parts", **settings)
    assert {one.id: one.kept for one in parts}["reworded"] == "garden"
    assert len(parts) >= 0.9 * len(whole)


@contextmanager
def embedding_server(answer: Any, keys: set[str] | None = None) -> Generator[tuple[str, list[int]]]:
    """Yield the server's address and the number of texts in each request. The sent keys are added to ``keys``."""
    asked: list[int] = []

    def reply(request: Asked) -> Reply:
        asked.append(len(request.body["input"]))
        if keys is not None:
            keys.add(request.headers.get("authorization", ""))
        return Reply(body=answer(request.body["input"]))

    with json_server(reply) as url:
        yield url, asked


def by_letters(texts: list[str]) -> dict[str, Any]:
    rows = [{"index": i, "embedding": [text.lower().count(c) for c in "abcdehiorst"]} for i, text in enumerate(texts)]
    return {"data": rows[::-1]}  # a server may change the order


def test_an_embedding_server_is_asked_in_batches_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDDING_KEY", "sk-embed-1234")
    keys: set[str] = set()
    held = documents(garden=GARDEN, turned=" ".join(reversed(GARDEN.split())), cards=CARDS, trains=TRAINS)
    with embedding_server(by_letters, keys) as (url, asked):
        server: dict[str, Any] = {"kind": "server", "base_url": url, "key_variable": "EMBEDDING_KEY"}
        embedder = EmbeddingSettings(**server, model="letters", batch=3)
        settings = {"stages": ("embedding",), "embedding": EmbeddingStageSettings(embedder=embedder, similarity=0.999)}
        settings["compare_numbers"] = False
        found = run(held, tmp_path, **settings)
        assert [(one.id, one.kept) for one in found] == [("turned", "garden")]
        assert sorted(asked) == [1, 3]
        assert run(held, tmp_path, **settings) == found
        assert len(asked) == 2
    assert keys == {"Bearer sk-embed-1234"}


def test_a_duplicate_goes_for_its_nearest_neighbour(tmp_path: Path) -> None:
    # the last one is close to both others, which are not close to each other
    angles = {"oak": 0.0, "elm": 0.7, "ash": 0.4}
    held = [Document(text, text, (-place,)) for place, text in enumerate(angles)]

    def answer(texts: list[str]) -> dict[str, Any]:
        vectors = [[math.cos(angles[text]), math.sin(angles[text])] for text in texts]
        return {"data": [{"index": place, "embedding": vector} for place, vector in enumerate(vectors)]}

    with embedding_server(answer) as (url, _):
        stage = EmbeddingStageSettings(embedder=EmbeddingSettings(kind="server", base_url=url), similarity=0.9)
        (found,) = run(held, tmp_path, stages=("embedding",), embedding=stage, compare_numbers=False)
    assert (found.id, found.twin) == ("ash", "elm")
    assert found.similarity == pytest.approx(math.cos(0.3), abs=1e-3)


@pytest.mark.parametrize(
    "answer", [{"data": []}, {"data": None}, {"data": [{"index": 0, "embedding": [float("nan")]}]}]
)
def test_an_embedding_server_that_does_not_embed_is_refused(answer: Any, tmp_path: Path) -> None:
    with embedding_server(lambda _: answer) as (url, _):
        embedder = EmbeddingSettings(kind="server", base_url=url)
        with pytest.raises(ServerError, match=r"/v1/embeddings: (the answer holds no|1 texts were sent)"):
            run(documents(one="x"), tmp_path, stages=("embedding",), embedding={"embedder": embedder.model_dump()})


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    words = sorted({word for text in (GARDEN, CARDS, TRAINS) for word in text.split()})
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["[unk]", "[pad]", *words])}, unk_token="[unk]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words) + 2, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaModel(config).save_pretrained(tmp_path / "model")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[unk]", pad_token="[pad]")
    fast.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_models_vectors_do_not_depend_on_the_batch(model_folder: Path) -> None:
    from magicrl.pipeline.embedders import make_embedder

    def vectors(batch: int) -> Any:
        settings = EmbeddingSettings(kind="model", model=str(model_folder), batch=batch)
        return make_embedder(settings, no_corpus).embed([GARDEN, CARDS, "", TRAINS])

    assert vectors(4) == pytest.approx(vectors(1), abs=1e-5)
    assert (vectors(2)[0] @ vectors(2)[0]) == pytest.approx(1.0, abs=1e-5)
    assert abs(vectors(2)[0] @ vectors(2)[1]) < 0.9


def no_corpus() -> Iterator[list[str]]:
    raise AssertionError("only the hashed embedder reads the corpus")
