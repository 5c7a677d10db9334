from __future__ import annotations

import numpy as np
import pytest

from magicrl.algorithms.advantages import score_group


def test_correct_is_one_wrong_is_zero(make_group):
    scored = make_group("cwc")
    assert scored.rewards.tolist() == [1, 0, 1]
    assert scored.counted.tolist() == [True, True, True]


def test_a_truncated_response_scores_zero_even_if_its_text_is_correct(make_group):
    scored = make_group("ccw", "t.t")
    assert scored.rewards.tolist() == [0, 1, 0]
    assert scored.counted.all()


def test_not_judged_and_aborted_are_not_counted(make_group):
    scored = make_group("ncc", "..a")
    assert scored.counted.tolist() == [False, True, False]
    assert scored.rewards.tolist() == [0, 1, 0]


def test_a_lost_verdict_is_an_error(make_group):
    scored = make_group("cw")
    with pytest.raises(ValueError, match="2 completions but 1 verdicts"):
        score_group(scored.group, scored.verdicts[:1])


def test_scored_arrays_are_read_only(make_group):
    scored = make_group("cw")
    for array in (scored.rewards, scored.counted):
        assert isinstance(array, np.ndarray)
        assert not array.flags.writeable
