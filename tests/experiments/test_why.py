"""What a bonus does to single words: classes by hand, and steps of a run of the study taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from studies import why
from studies.definition import chosen, shipped_ablations
from studies.runs import plan_runs


def test_classes_and_what_they_gain_by_hand() -> None:
    before = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.02, 0.95, 0.02, 0.01]], dtype=torch.float64)
    after = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.05, 0.90, 0.03, 0.02]], dtype=torch.float64)
    sampled = torch.tensor([1, 0])
    found = why.classes(before, sampled).int().tolist()
    # 0.5 + 0.3 + 0.15 is the first sum of at least 0.9; 0.95 alone is one
    assert found[0] == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert found[1] == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert found[2] == [[0, 0, 0, 1], [0, 0, 1, 1]]
    gained = why.gains(before, after, sampled)
    assert gained == pytest.approx([0.03 / 2, (-0.05 - 0.05) / 2, (0.05 + 0.02) / 2])
    assert sum(gained) == pytest.approx(0)


def run_with(start: int, likely: float, unlikely: float) -> dict[str, Any]:
    """A run of one step: what the bonus over all words gives, in thousandths; with four passes three times as much."""
    words = {"none": [0.001, 0.0, -0.001]}
    words["all words"] = [0.001 - (likely + unlikely) / 1000, likely / 1000, unlikely / 1000 - 0.001]
    words["likelier words"] = [0.001 - unlikely / 4000, 0.0, unlikely / 4000 - 0.001]
    grown = {name: [3 * a - 2 * b for a, b in zip(w, words["none"], strict=True)] for name, w in words.items()}
    made = {f"{n}, {name}": gained for n, table in ((1, words), (4, grown)) for name, gained in table.items()}
    return {"arms": [["22", why.ARM]], "start": start, "words": [{"equal": start > 0, "gains": made}]}


def test_the_page_tells_gains_and_what_becomes_of_the_predictions() -> None:
    text = why.page([run_with(start, likely=1.0 + 0.1 * start, unlikely=4.0 + 0.1 * start) for start in range(8)])
    assert "7 of 8 steps came out bit for bit" in text
    lines = [line for line in text.splitlines() if line.startswith("| small word problems")]
    assert lines[0].startswith("| small word problems | 1 | all words | -5.70 (")
    assert " | 1.35 (" in lines[0]
    assert " | 4.35 (" in lines[0]
    assert " | 13.05 (" in lines[2], "four passes, all words"
    # 3 (4.35 - 1.35), 3 (4.35 / 2 - 4.35 / 4), 3 x 4.35 - 2 x 4.35
    assert [line.split(" | ")[2].split(" ")[0] for line in lines[4:]] == ["9.00", "3.26", "4.35"]
    assert all(line.endswith("| holds |") for line in lines[4:])
    against = why.page([run_with(start, likely=4.0 + 0.1 * start, unlikely=1.0 + 0.2 * start) for start in range(8)])
    assert "gain more than likely ones | -7.95 (" in against
    assert "does not hold" in against


@pytest.mark.slow
def test_steps_of_a_run_are_made_again_in_every_way(tmp_path: Path) -> None:
    run = plan_runs(chosen(["22"], shipped_ablations("starts")), "quick", seeds=[0])[0]
    row = why.take_apart(run, tmp_path)
    (step,) = row["words"]
    assert step["equal"], "the step is the recorded one"
    assert sum(step["held"]) == pytest.approx(1, abs=1e-3)
    assert step["gains"].keys() == {f"{n}, {bonus}" for n in why.PASSES for bonus in why.BONUSES}
    for made in step["gains"].values():
        assert sum(made) == pytest.approx(0, abs=1e-5)
    none, every, likelier = (step["gains"][f"1, {bonus}"] for bonus in why.BONUSES)
    assert every[2] > none[2], "unlikely words gain by a bonus over all words"
    assert every != likelier
    line = next(line for line in why.page([row, row]).splitlines() if "all words" in line)
    assert line.startswith("| small word problems | 1 | all words | ")
