"""The mixture: quotas, bands, the released schema read by training's own reader, and its data card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicrl.config.errors import RecipeError
from magicrl.config.schema import SourceConfig
from magicrl.data.sources import load_problems
from magicrl.pipeline.mix_step import quotas_of

NAMES = st.sampled_from("abcd")


@given(
    st.dictionaries(NAMES, st.integers(0, 50), min_size=1),
    st.dictionaries(NAMES, st.integers(0, 30)),
    st.dictionaries(NAMES, st.floats(0, 5)),
    st.none() | st.integers(1, 100),
)
def test_quotas_never_exceed_what_there_is_and_fill_the_size(
    available: dict[str, int], caps: dict[str, int], weights: dict[str, float], size: int | None
) -> None:
    quotas = quotas_of(available, caps=caps, weights=weights, size=size)
    room = {name: min(count, caps.get(name, count)) for name, count in available.items()}
    assert all(0 <= quotas[name] <= room[name] for name in available)
    if size is not None:
        wanted = sum(room[name] for name in available if weights.get(name, 1.0) > 0)
        assert sum(quotas.values()) == min(size, wanted)


def test_weights_must_be_numbers_of_at_least_zero() -> None:
    with pytest.raises(RecipeError, match=r"weights: weight of a must be a number of at least 0, got -1"):
        quotas_of({"a": 3}, caps={}, weights={"a": -1}, size=2)


@pytest.fixture
def pipeline(write_rows: Callable[..., Path]) -> dict[str, Any]:
    """Twenty released rows with difficulties, ten of them programs."""
    tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})

    def row(place: int) -> dict[str, Any]:
        code = place % 2 == 1
        rates = {"R1-7B": place % 17} if place < 18 else {"other": 4}
        return {
            "data_source": "train-code" if code else "train-math",
            "prompt": [{"role": "user", "content": f"What is {place}|{place}? <b>&"}],
            "ability": "code" if code else "math",
            "reward_model": {"ground_truth": tests if code else json.dumps([str(place)]), "style": "rule"},
            "extra_info": {"index": place, "model_difficulty": rates},
        }

    path = write_rows("r.jsonl", map(row, range(20)))
    return {"sources": [{"path": str(path), "licence": "CC0|x"}], "steps": [{"use": "mix"}]}


def test_the_training_file_is_the_released_schema_and_is_read_by_the_recipes_reader(
    pipeline: dict[str, Any], run: Any
) -> None:
    run(pipeline)
    mixture = run.output / "mixture"
    path = mixture / "train.parquet"
    assert pq.read_schema(path).names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    rows = pq.read_table(path).to_pylist()
    assert rows[3]["extra_info"] == {"index": 3, "model_difficulty": {"R1-7B": 3, "other": None}}
    problems = load_problems(SourceConfig(path=str(path)))
    assert [problem.verifier for problem in problems] == ["maths", "code"] * 10
    assert problems[2].golds == ("2",)
    assert "What is 2|2? <b>&" in problems[2].prompt
    ids = [json.loads(line) for line in (mixture / "ids.jsonl").read_text().splitlines()]
    assert ids[3] == {"file": "train.parquet", "row": 3, "id": "r/r-3"}


def test_bands_caps_size_and_seed_choose_rows(pipeline: dict[str, Any], run: Any) -> None:
    band = {"model": "R1-7B", "low": 0.05, "high": 0.95}
    pipeline["steps"] = [{"use": "mix", "bands": [band], "caps": {"r": 12}, "size": 8, "seed": 1}]
    run(pipeline)
    first = [entry.index for entry in run.kept("01-mix")]
    assert len(first) == 8
    assert first == sorted(first)
    assert not {0, 16, 17, 18, 19} & set(first)
    reasons = list(run.reasons("01-mix").values())
    assert reasons.count("no difficulty under R1-7B") == 2
    assert reasons.count("outside the band of R1-7B") == 3
    assert reasons.count("over the cap of r") == 3
    assert reasons.count("not drawn") == 4
    pipeline["steps"][0]["seed"] = 2
    run(pipeline)
    assert [entry.index for entry in run.kept("01-mix")] != first


def test_files_by_ability_and_a_card_that_counts_what_the_rows_say(pipeline: dict[str, Any], run: Any) -> None:
    pipeline["steps"] = [
        {"use": "clean", "code": {"reference": False}, "maths": {"unreadable_golds": "keep"}},
        {"use": "mix", "split_by_ability": True, "size": 15},
    ]
    run(pipeline)
    mixture = run.output / "mixture"
    card = json.loads((mixture / "card.json").read_text())
    assert sum(card["files"].values()) == 15
    assert card["files"].keys() == {"train_math.parquet", "train_code.parquet"}
    assert [(one["in"], one["kept"]) for one in card["steps"]] == [(20, 20), (20, 20), (20, 15)]
    assert card["sources"]["r"]["licence"] == "CC0|x"
    page = (mixture / "card.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "5 not drawn" in page.replace(",", "")
    assert "CC0\\|x" in (mixture / "card.md").read_text()
    pipeline["steps"][1] = {"use": "mix"}
    run(pipeline)
    assert [path.name for path in mixture.glob("*.parquet")] == ["train.parquet"]
