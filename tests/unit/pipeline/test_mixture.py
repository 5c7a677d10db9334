"""The mixture: quotas, bands, the released schema read by training's own reader, and its data card."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicrl.config.data_schema import SourceConfig
from magicrl.config.errors import RecipeError
from magicrl.data.sources import load_problems
from magicrl.pipeline.card import waterfall
from magicrl.pipeline.frame import Watcher
from magicrl.pipeline.mix_step import quotas_of
from magicrl.pipeline.stats import StepCounts

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


@pytest.mark.parametrize(
    ("available", "weights", "size", "quotas"),
    [
        ({"a": 10, "b": 10}, {"a": 2, "b": 1}, 4, {"a": 3, "b": 1}),  # 2.67 and 1.33: the larger remainder wins
        ({"a": 10, "b": 10}, {}, 3, {"a": 2, "b": 1}),  # equal remainders: by name
        ({"a": 100, "b": 100}, {"a": 0.29, "b": 1}, None, {"a": 29, "b": 100}),  # 0.29 * 100 is 28.999999999999996
    ],
)
def test_quotas_are_rounded_by_the_largest_remainder(
    available: dict[str, int], weights: dict[str, float], size: int | None, quotas: dict[str, int]
) -> None:
    assert quotas_of(available, caps={}, weights=weights, size=size) == quotas


def test_a_cap_of_zero_leaves_a_source_out_and_no_cap_is_negative(pipeline: dict[str, Any], run: Any) -> None:
    assert quotas_of({"a": 5, "b": 6}, caps={"a": 0}, weights={"b": 2.0}, size=None) == {"a": 0, "b": 6}
    pipeline["steps"] = [{"use": "mix", "caps": {"r": -1}}]
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        run(pipeline)


def test_a_weight_for_an_input_whose_rows_have_other_sources_is_refused(pipeline: dict[str, Any], run: Any) -> None:
    run(pipeline)
    (part,) = (run.output / "01-mix" / "kept").glob("*.parquet")
    mix = {"use": "mix", "weights": {"again": 3.0}}
    with pytest.raises(RecipeError, match=r"weights: no source is called 'again'; known: r"):
        run({"sources": [{"name": "again", "path": str(part)}], "steps": [mix]})
    run({"sources": [{"name": "again", "path": str(part)}], "steps": [{**mix, "weights": {"r": 3.0}}]})
    assert len(run.kept("01-mix")) == 20


def test_weights_must_be_numbers_of_at_least_zero() -> None:
    with pytest.raises(RecipeError, match=r"weights: weight of a must be a number of at least 0, got -1"):
        quotas_of({"a": 3}, caps={}, weights={"a": -1}, size=2)


@pytest.fixture
def pipeline(write_rows: Callable[..., Path]) -> dict[str, Any]:
    """Return twenty released rows with difficulties, ten of them programs."""
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
    assert problems[2].references == ("2",)
    assert "What is 2|2? <b>&" in problems[2].prompt
    ids = [json.loads(line) for line in (mixture / "ids.jsonl").read_text().splitlines()]
    assert ids[3] == {"file": "train.parquet", "row": 3, "id": "r/r-3"}


def test_bands_caps_size_and_seed_choose_rows(pipeline: dict[str, Any], run: Any) -> None:
    band = {"model": "R1-7B", "low": 1 / 16, "high": 14 / 16}
    pipeline["steps"] = [{"use": "mix", "bands": [band], "caps": {"r": 12}, "size": 8, "seed": 1}]
    run(pipeline)
    first = [entry.index for entry in run.kept("01-mix")]
    assert len(first) == 8
    assert first == sorted(first)
    assert not {0, 16, 17, 18, 19} & set(first)
    outside = {name for name, reason in run.reasons("01-mix").items() if reason == "outside the band of R1-7B"}
    assert outside == {"r/r-0", "r/r-15", "r/r-16", "r/r-17"}, "both ends belong to the band"
    reasons = list(run.reasons("01-mix").values())
    assert reasons.count("no difficulty under R1-7B") == 2
    assert reasons.count("over the cap of r") == 2
    assert reasons.count("not drawn") == 4
    pipeline["steps"][0]["seed"] = 2
    run(pipeline)
    assert [entry.index for entry in run.kept("01-mix")] != first


def test_a_band_of_a_model_that_no_row_has_is_refused(pipeline: dict[str, Any], run: Any) -> None:
    band = {"model": "R1", "low": 0.2, "high": 0.8, "without": "keep"}
    pipeline["steps"] = [{"use": "mix", "bands": [band]}]
    with pytest.raises(RecipeError, match=r"steps\.0\.bands: no row has a difficulty under 'R1'; known: R1-7B, other"):
        run(pipeline)


@pytest.mark.parametrize("size", [20, 21])
def test_a_size_that_is_not_reached_is_reported(size: int, pipeline: dict[str, Any], run: Any) -> None:
    class Notes(Watcher):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    pipeline["steps"] = [{"use": "mix", "size": size}]
    run(pipeline, Notes())
    said = "size = 21: only 20 rows pass bands, caps and weights; all are drawn"
    assert [note for note in notes if "rows pass" in note] == ([said] if size == 21 else [])


def test_files_by_ability_and_a_card_that_counts_what_the_rows_say(pipeline: dict[str, Any], run: Any) -> None:
    pipeline["steps"] = [
        {"use": "clean", "code": {"reference": False}, "maths": {"unreadable_references": "keep"}},
        {"use": "mix", "split_by_ability": True, "size": 15},
    ]
    run(pipeline)
    mixture = run.output / "mixture"
    card = json.loads((mixture / "card.json").read_text())
    assert sum(card["files"].values()) == 15
    assert card["files"].keys() == {"train_math.parquet", "train_code.parquet"}
    assert [(one["in"], one["kept"]) for one in card["steps"]] == [(20, 20), (20, 20), (20, 15)]
    assert card["sources"]["r"]["licence"] == "CC0|x"
    rows = {name: pq.read_table(mixture / name).to_pylist() for name in card["files"]}
    for line in map(json.loads, (mixture / "ids.jsonl").read_text().splitlines()):
        assert line["id"] == f"r/r-{rows[line['file']][line['row']]['extra_info']['index']}"
    page = (mixture / "card.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "5 not drawn" in page.replace(",", "")
    text = (mixture / "card.md").read_text()
    assert "CC0\\|x" in text
    assert re.search(r"^\| r \|.* 20 \| 20 \| 20 \| 15 \|$", text, re.M), "rows read, and those that each step left"
    pipeline["steps"][1] = {"use": "mix"}
    run(pipeline)
    assert [path.name for path in mixture.glob("*.parquet")] == ["train.parquet"]
    steps = [one["step"] for one in json.loads((mixture / "card.json").read_text())["steps"]]
    assert steps == ["import", "01-clean", "02-mix"], "each step once, also in a rebuilt folder"


def test_a_card_shows_no_secret(pipeline: dict[str, Any], run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf-abcd1234"
    monkeypatch.setenv("MIRROR_TOKEN", secret)
    path = Path(pipeline["sources"][0]["path"])
    named = path.rename(path.with_name(f"rows-{secret}.jsonl"))
    run({**pipeline, "sources": [{"path": str(named), "name": "r"}]})
    texts = {file.name: file.read_text() for file in (run.output / "mixture").glob("card.*")}
    assert texts.keys() == {"card.json", "card.md", "card.html"}
    assert "rows-***MIRROR_TOKEN***.jsonl" in texts["card.md"]
    assert not [name for name, text in texts.items() if secret in text]


def test_a_drawing_names_the_most_frequent_reasons_and_sums_the_others() -> None:
    dropped = {f"reason {count}": count for count in range(1, 9)}
    picture = waterfall("run", [StepCounts(step="01-clean", sources={"s": {"in": 40, "kept": 4, "dropped": dropped}})])
    shown = re.findall(r">(\d+) (reason \d|2 other reasons)<", picture)
    assert [int(count) for count, _ in shown] == [8, 7, 6, 5, 4, 3, 2 + 1]
