"""Wrong labels: as many as asked for, never by chance the right one, and nested."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicrl.config.errors import RecipeError
from magicrl.config.schema import SourceConfig
from magicrl.data.sources import MARK, load_problems, with_wrong_labels
from magicrl.records import Problem


def problems(golds: list[str]) -> list[Problem]:
    return [
        Problem(id=f"p{i}", prompt=f"q{i}", golds=(gold,), verifier="exact", source="s") for i, gold in enumerate(golds)
    ]


CLEAN = problems([str(i % 10) for i in range(2000)])


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_share_is_wrong_and_marked_and_the_rest_is_untouched(share: float) -> None:
    noisy = with_wrong_labels(CLEAN, share)
    changed = [(old, new) for old, new in zip(CLEAN, noisy, strict=True) if old.golds != new.golds]
    assert len(changed) / len(CLEAN) == pytest.approx(share, abs=0.03)
    assert all(new.extra[MARK] == "wrong" for _, new in changed)
    assert all(old is new for old, new in zip(CLEAN, noisy, strict=True) if old.golds == new.golds)


def test_every_other_answer_is_given_about_as_often() -> None:
    given = [p.golds[0] for p in with_wrong_labels(problems(["0"] * 2000 + [str(i) for i in range(1, 10)]), 1.0)[:2000]]
    counts = [given.count(str(i)) for i in range(1, 10)]
    assert given.count("0") == 0
    assert min(counts) > 150, counts


def test_a_larger_share_adds_wrong_labels_and_moves_none() -> None:
    few, many = with_wrong_labels(CLEAN, 0.2), with_wrong_labels(CLEAN, 0.4)
    assert all(b.golds == a.golds for a, b in zip(few, many, strict=True) if MARK in a.extra)
    assert sum(MARK in p.extra for p in few) < sum(MARK in p.extra for p in many)


def test_it_is_a_setting_of_a_source(tmp_path: Path) -> None:
    def load(share: float) -> list[Problem]:
        return load_problems(SourceConfig(family="running_sum", count=100, label_noise=share))

    wrong = [a.prompt == b.prompt and a.golds != b.golds for a, b in zip(load(0.0), load(0.3), strict=True)]
    assert 15 < sum(wrong) < 45
    (tmp_path / "same.jsonl").write_text('{"problem": "a", "answer": "1"}\n{"problem": "b", "answer": "1"}\n')
    with pytest.raises(RecipeError, match=r"all 2 problems have one answer") as caught:
        load_problems(SourceConfig(path=str(tmp_path / "same.jsonl"), label_noise=0.5))
    assert caught.value.key == "label_noise"
