"""Where a policy is uncertain: positions, concentration, tokens; computed by hand."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from magicrl.reporting import token_entropy
from magicrl.reporting.arms import group_runs
from magicrl.reporting.charts import bars_view
from magicrl.reporting.read_folders import RunFolderError, read_run
from magicrl.reporting.token_entropy import (
    arms_entropy,
    bin_edges,
    by_position,
    concentration,
    most_uncertain,
    read_tokens,
    recorded,
    run_entropy,
    token_name,
    token_shares,
)

from .conftest import TOKENS, write_rollout_recording

RESPONSES = [([5, 6, 5], [0.0, 1.0, 2.0]), ([5], [4.0]), ([], [])]


def test_positions_count_only_responses_that_are_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_entropy, "LEAST_TOKENS", 1)
    data = recorded(RESPONSES)
    assert data is not None
    bins = by_position(data, [1, 2, 4])
    assert [(b.first, b.last, b.mean, b.tokens) for b in bins] == [(1, 1, 2.0, 2), (2, 3, 1.5, 2)]
    monkeypatch.setattr(token_entropy, "LEAST_TOKENS", 3)
    assert by_position(data, [1, 2, 4]) == []


def test_bins_cover_every_position() -> None:
    assert bin_edges(1) == [1, 2]
    edges = bin_edges(32768)
    assert (edges[0], edges[-1], len(edges) - 1) == (1, 32769, 24)


def test_concentration_is_what_the_most_uncertain_tokens_hold() -> None:
    data = recorded(RESPONSES)
    assert data is not None
    found = concentration(data, (0.25, 0.5, 1.0))
    assert [share for share, _ in found] == [0.25, 0.5, 1.0]
    assert [held for _, held in found] == pytest.approx([4 / 7, 6 / 7, 1.0])
    certain = recorded([([1, 2], [0.0, 0.0])])
    assert certain is not None
    assert concentration(certain) == []


def test_tokens_by_what_they_hold_and_by_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_entropy, "LEAST_TOKENS", 1)
    data = recorded([([5, 6, 5, 7], [2.0, 3.0, 2.0, 0.0])])
    assert data is not None
    shares = token_shares(data)
    assert [(s.token, s.drawn, s.mean) for s in shares] == [(5, 2, 2.0), (6, 1, 3.0), (7, 1, 0.0)]
    assert shares[0].share == pytest.approx(4 / 7)
    assert [s.token for s in most_uncertain(shares, 2)] == [6, 5]
    monkeypatch.setattr(token_entropy, "LEAST_TOKENS", 2)
    assert [s.token for s in most_uncertain(shares, 2)] == [5], "a token that was drawn once says too little"


def test_nothing_and_nonsense() -> None:
    assert recorded([]) is None
    assert recorded([([], [])]) is None
    with pytest.raises(ValueError, match="1 tokens has 2 entropies"):
        recorded([([1], [0.0, 1.0])])


def test_a_run_s_figures_name_tokens_by_the_tokenizer_beside_the_model(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_entropy, "LEAST_TOKENS", 1)
    write_rollout_recording(run_folder)
    found = run_entropy(read_run(run_folder))
    assert found is not None
    data, crosshairs = found.data, found.hover
    assert set(crosshairs) == {"entropy_by_position", "entropy_concentration"}
    labels = [s["label"] for s in crosshairs["entropy_by_position"]["series"]]
    assert labels == ["step 1", "step 20", "step 40"], "the first and the end of each stage"
    bars = data["panels"][2][0]
    assert bars.title == "Tokens that hold most entropy, step 40"
    assert "[end]" in bars.svg
    assert "No tokenizer" not in data["note"]
    (run_folder / "model" / "tokenizer.json").unlink()
    again = run_entropy(read_run(run_folder))
    assert again is not None
    assert "#8" in again.data["panels"][2][0].svg
    assert "No tokenizer lies beside the model" in again.data["note"]


def test_an_arm_s_line_is_over_its_runs_last_recordings(arm_folders: list[Path]) -> None:
    for folder in arm_folders[:2]:
        write_rollout_recording(folder)
    found = arms_entropy(group_runs([read_run(folder) for folder in arm_folders]))
    assert found is not None
    assert "(step 40)" in found.data["note"]
    assert [s["label"] for s in found.hover["entropy_concentration"]["series"]] == ["loss magic"]


def test_recordings_without_entropies_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    pq.write_table(pa.table({"tokens": [[1, 2]], "sampler_entropies": pa.array([None], pa.list_(pa.float32()))}), path)
    assert read_tokens(path) is None
    told = pa.array([[0.5], None, [1.0, 2.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"tokens": [[7], [8, 8], [9, 9]], "sampler_entropies": told}), path)
    data = read_tokens(path)
    assert data is not None
    assert (data.ids.tolist(), data.entropies.tolist()) == ([7, 9, 9], [0.5, 1.0, 2.0])
    assert data.lengths.tolist() == [1, 2]
    # of the last response an environment answered the first token
    episodes = [None, None, '{"observed": [[0, 1]], "answer": "9"}']
    table = {"tokens": [[7], [8, 8], [9, 6]], "sampler_entropies": told, "episode": episodes}
    pq.write_table(pa.table(table), path)
    data = read_tokens(path)
    assert data is not None
    assert (data.ids.tolist(), data.entropies.tolist(), data.lengths.tolist()) == ([7, 6], [0.5, 2.0], [1, 1])
    pq.write_table(pa.table({"tokens": [[7]], "sampler_entropies": [[0.5, 1.0]]}), path)
    with pytest.raises(RunFolderError, match="another number of entropies"):
        read_tokens(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(RunFolderError, match="no recording"):
        read_tokens(path)


def test_tokens_are_shown_with_their_spaces_and_never_act(run_folder: Path) -> None:
    from tokenizers import Tokenizer

    write_rollout_recording(run_folder)
    tokenizer = Tokenizer.from_file(str(run_folder / "model" / "tokenizer.json"))
    assert token_name(tokenizer, 0) == "␣3"
    assert token_name(tokenizer, TOKENS.index("\u202e")) == "⟨U+202E⟩"
    assert len(token_name(tokenizer, TOKENS.index("W" * 3000))) == 40
    assert token_name(tokenizer, 10**6) == "#1000000"
    assert token_name(None, 3) == "#3"


def test_bars_escape_their_names_and_export_their_values() -> None:
    view = bars_view("k", "t", "nats", [("<b>", 0.5, "2 times")])
    assert "&lt;b&gt;: 0.5 (2 times)" in view.svg
    assert base64.b64decode(view.csv.partition(",")[2]) == b"name,nats,words\n<b>,0.5,2 times\n"
