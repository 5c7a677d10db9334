"""Responses on a page: selection, counting of problems, and safe output for any vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from magicrl.evaluation.samples import SampleRow
from magicrl.reporting import samples as sample_browser
from magicrl.reporting.read_folders import RunFolderError, read_run
from magicrl.reporting.run_page import write_run_page
from magicrl.reporting.samples import (
    MOST_ROLLOUT_CHARACTERS,
    BrowsedProblem,
    Kind,
    browser,
    chosen,
    clipped,
    coloured_pieces,
    outcome_kinds,
    shown_rollouts,
    variant_browsers,
)
from magicrl.reporting.variants import group_runs


def test_first_and_last_step_of_each_stage_with_one_response_a_kind(rich_run: Path) -> None:
    steps = shown_rollouts(read_run(rich_run))
    assert [rollouts[0]["step"] for rollouts in steps] == [1, 20, 21, 40]
    assert [(r["outcome"], r["finish_reason"]) for r in steps[0]] == [
        ("correct", "stop"), ("wrong", "stop"), ("truncated", "length"),
    ]  # fmt: skip
    right = steps[0][0]
    assert right["prompt"] == " 3 + 4"
    assert [right[key] for key in ("group_right", "group_size", "reward", "decided_by")] == [1, 3, 1.0, "string"]
    assert [(text, level) for text, level, *_ in right["pieces"]] == [(" 7", 0), ("[end]", 4)]


def test_the_response_of_highest_mean_entropy_is_shown_too(rich_run: Path) -> None:
    path = rich_run / "rollouts" / "step-000001.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("sampler_entropies")
    flat = [
        [nats] * len(row) for nats, row in zip((0.5, 2.0, 1.0), table["sampler_entropies"].to_pylist(), strict=True)
    ]
    other = table.set_column(column, table.schema.field(column), pa.array(flat, table.schema.field(column).type))
    pq.write_table(pa.concat_tables([table, other]), path)
    last = shown_rollouts(read_run(rich_run))[0][-1]
    assert (last["why"], last["entropy"]) == ("the highest mean entropy", 2.0)


def test_a_right_answer_that_was_truncated_is_not_right(rich_run: Path) -> None:
    # It earned 0, and counts as wrong in every curve of the page.
    path = rich_run / "rollouts" / "step-000001.parquet"
    rows = pq.read_table(path)
    column = rows.schema.get_field_index("outcome")
    outcomes = pa.array(["correct"] * 3, rows.schema.field(column).type)
    pq.write_table(rows.set_column(column, rows.schema.field(column), outcomes), path)
    shown = shown_rollouts(read_run(rich_run))[0]
    cut = next(rollout for rollout in shown if rollout["finish_reason"] == "length")
    assert (cut["why"], cut["outcome"], cut["group_right"]) == ("the first truncated one", "truncated", 2)


def test_of_many_stages_the_first_and_the_last_steps_are_shown(rich_run: Path) -> None:
    rows = [{"step": s, "stage": s // 2, "values": {}} for s in range(1, 41)]
    (rich_run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording = (rich_run / "rollouts" / "step-000001.parquet").read_bytes()
    for step in range(1, 41):
        (rich_run / "rollouts" / f"step-{step:06d}.parquet").write_bytes(recording)
    assert [r[0]["step"] for r in shown_rollouts(read_run(rich_run))] == [1, 36, 37, 38, 39, 40]


def test_certain_neighbours_share_a_piece_and_others_tell_their_entropy() -> None:
    pieces = coloured_pieces(["a", "b", "", "c", "d"], [0.0, 0.09, 9.0, 0.6, 0.6])
    assert pieces == [("ab", 0, None, False), ("c", 2, 0.6, False), ("d", 2, 0.6, False)]
    long = coloured_pieces(["x" * 10**6, "y"], [1.0, 1.0])
    assert sum(len(text) for text, *_ in long) == MOST_ROLLOUT_CHARACTERS, "no token makes the page long"
    played = coloured_pieces(["a", "b", "c", "d", "e"], [0.0, 0.0, 0.0, 0.0, 0.6], [(1, 2)])
    assert [(text, observed) for text, _, _, observed in played] == [
        ("a", False),
        ("bc", True),
        ("d", False),
        ("e", False),
    ]


def test_what_an_environment_answered_is_set_apart(rich_run: Path) -> None:
    path = rich_run / "rollouts" / "step-000001.parquet"
    before = {r["sample"]: r for r in shown_rollouts(read_run(rich_run))[0]}
    table = pq.read_table(path)
    episodes = [json.dumps({"observed": [[0, 1]], "answer": "", "verdict": None})] * len(table)
    table = table.drop_columns([name for name in table.column_names if name == "episode"])
    pq.write_table(table.append_column("episode", pa.array(episodes)), path)
    shown = shown_rollouts(read_run(rich_run))[0]
    assert shown
    for rollout in shown:
        assert any(observed for *_, observed in rollout["pieces"])
        old = before[rollout["sample"]]
        assert rollout["tokens"] == old["tokens"] - 1
        # The separated token has no entropy.
        assert rollout["entropy"] == pytest.approx(old["entropy"] * old["tokens"] / rollout["tokens"])
    page = write_run_page(rich_run).read_text()
    assert '<span class="observed" title="observation">' in page


def test_without_a_tokenizer_the_recorded_text_is_shown(rich_run: Path) -> None:
    (rich_run / "model" / "tokenizer.json").unlink()
    shown = shown_rollouts(read_run(rich_run))[0][1]
    assert (shown["prompt"], shown["coloured"]) == (None, False)
    assert "⟨U+202E⟩" in shown["pieces"][0][0]
    assert "&lt;/pre&gt;&lt;script&gt;document" in write_run_page(rich_run).read_text()


def test_the_start_model_s_tokenizer_stands_in_while_a_run_goes_on(rich_run: Path, tmp_path: Path) -> None:
    (rich_run / "model").rename(tmp_path / "start")
    run = json.loads((rich_run / "run.json").read_text()) | {"start_model": str(tmp_path / "start")}
    (rich_run / "run.json").write_text(json.dumps(run))
    assert shown_rollouts(read_run(rich_run))[0][0]["coloured"]


def test_hostile_tokens_are_escaped(rich_run: Path) -> None:
    page = write_run_page(rich_run).read_text()
    assert "</script>&#39;" not in page
    assert "&lt;/pre&gt;&lt;script&gt;document.title" in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "sum/&lt;1&gt;" in page


@pytest.mark.parametrize("file", ["rollouts/step-000020.parquet", "model/tokenizer.json"])
def test_a_broken_file_is_named(rich_run: Path, file: str) -> None:
    (rich_run / file).write_text("no such thing")
    with pytest.raises(RunFolderError, match=Path(file).name):
        shown_rollouts(read_run(rich_run))


def response(text: str, outcome: str, finish_reason: str = "stop") -> SampleRow:
    return SampleRow(
        problem="p",
        sample=0,
        outcome=outcome,
        status="",
        decided_by="",
        reason="",
        finish_reason=finish_reason,
        tokens=1,
        seconds=0.0,
        text=text,
    )


RIGHT = response("7", "correct")
WRONG = response("8", "wrong")
CUT = response("7", "correct", finish_reason="length")
OPEN = response("", "not_judged")


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        ([[RIGHT], [WRONG]], {"lost", "right", "wrong"}),
        ([[WRONG], [RIGHT]], {"won", "right", "wrong"}),
        ([[RIGHT], [RIGHT], [WRONG]], {"lost", "right", "wrong"}),
        ([[RIGHT, WRONG], [RIGHT, RIGHT]], {"right", "wrong"}),
        ([[RIGHT], [CUT]], {"lost", "right", "truncated"}),
        ([[OPEN], [RIGHT]], {"not_judged", "right"}),
        ([[], [RIGHT]], {"right"}),
        ([[WRONG]], {"wrong"}),
    ],
)
def test_what_a_problem_is(columns: list[list[SampleRow]], kinds: set[str]) -> None:
    assert outcome_kinds(columns) == kinds


def problem(name: str, *kinds: Kind, text: str = "t") -> BrowsedProblem:
    row = ("", (response(text, "wrong"),))
    return BrowsedProblem(id=name, prompt="", reference="", marks=(), rows=(row,), kinds=frozenset(kinds))


def test_a_full_page_holds_some_of_every_kind_in_the_set_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_browser, "MOST_PROBLEMS", 4)
    problems = [*(problem(f"r{i}", "right") for i in range(9)), problem("w", "wrong"), problem("l", "lost", "wrong")]
    assert [p["id"] for p in chosen(problems)] == ["r0", "r1", "w", "l"]


def test_the_page_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_browser, "MOST_CHARACTERS", 250)
    problems = [problem(str(i), "wrong", text="x" * 100) for i in range(9)]
    shown = browser("s", ("m",), problems)
    assert (len(shown["problems"]), shown["total"]) == (2, 9)
    assert shown["counts"]["wrong"] == 9


def test_a_single_column_has_nothing_that_changed() -> None:
    shown = browser("s", ("m",), [problem("a", "wrong", "right")])
    assert list(shown["kind_words"]) == ["wrong", "right"]
    words = browser("s", ("before", "after"), [problem("a", "lost")])["kind_words"]
    assert words == {"lost": "right before, wrong after"}


def test_both_ends_of_a_long_response_are_shown() -> None:
    text = "a" * 5000 + "answer 7"
    shown = clipped(text)
    assert shown.endswith("answer 7")
    assert "1008 characters left out" in shown
    assert clipped("short") == "short"


def test_responses_to_other_problems_of_one_id_are_not_next_to_each_other(variant_folders: list[Path]) -> None:
    def sizes() -> list[tuple[str, int]]:
        (found,) = variant_browsers(group_runs([read_run(folder) for folder in variant_folders]))
        return [(p["reference"], sum(r is not None for _, row in p["rows"] for r in row)) for p in found["problems"]]

    assert sizes() == [("7 or seven", 3)], "the initial checkpoint and two variants"
    path = variant_folders[2] / "evaluations" / "after.json"
    document = json.loads(path.read_text())
    document["samples"][0]["reference"] = "8"
    path.write_text(json.dumps(document))
    assert sizes() == [("7 or seven", 2), ("8", 1)]
    document["samples"][0] |= {"reference": ["7", "seven"], "prompt": "What is 3 + 5?"}
    path.write_text(json.dumps(document))
    assert sizes() == [("7 or seven", 2), ("7 or seven", 1)]
