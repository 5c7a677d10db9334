from __future__ import annotations

import json

import pytest

from magicrl.algorithms.filters import (
    PassCount,
    VisitRecord,
    accuracy_over_all,
    offline_filter,
    online_filter,
    reasons,
)


def pass_counts(groups):
    return {group.group.request.problem.key: PassCount.of(group) for group in groups}


def test_offline_filter_drops_never_and_always_solved(make_group):
    groups = [make_group(o, problem=o) for o in ("wwww", "cwww", "cccc", "cccn", "nnnn", "cccw")]
    found = offline_filter(pass_counts(groups))
    assert [*found] == ["wwww", "cccc", "cccn", "nnnn"]
    assert reasons(found.values()) == (2, 1, 1)


def test_a_truncated_response_is_wrong_for_the_filter(make_group):
    assert offline_filter(pass_counts([make_group("cccc", "...t", problem="a")])) == {}


def test_online_filter_drops_only_what_the_last_visit_solved(make_group):
    record = VisitRecord()
    record.observe(make_group("cc", draw=7, problem="solved late"))
    record.observe(make_group("cw", draw=1, problem="solved late"))  # an earlier draw that finished later
    record.observe(make_group("cc", draw=2, problem="lost again"))
    record.observe(make_group("cw", draw=8, problem="lost again"))
    record.observe(make_group("cc", draw=3, problem="then not judged"))
    record.observe(make_group("nn", draw=9, problem="then not judged"))
    record.observe(make_group("ww", draw=10, problem="never solved"))
    names = ["solved late", "lost again", "then not judged", "never solved", "never seen"]
    found = online_filter(record.last_visits(), names)
    assert [*found] == ["solved late", "then not judged"]


def test_visit_record_state(make_group):
    record, copy = VisitRecord(), VisitRecord()
    record.observe(make_group("ccn", draw=4, problem="a"))
    copy.restore(json.loads(json.dumps(record.state())))
    assert copy.last_visits() == record.last_visits() == {"a": PassCount(correct=2, counted=2)}
    record.clear()
    assert record.last_visits() == {}
    assert copy.last_visits() != {}


def test_nothing_left_is_a_clear_error():
    solved = {"a": PassCount(correct=4, counted=4), "b": PassCount(correct=0, counted=4)}
    with pytest.raises(ValueError, match="none of 2 problems: 1 always correct, 1 never correct"):
        offline_filter(solved)
    with pytest.raises(ValueError, match="online filter leaves none of 1"):
        online_filter(solved, ["a"])


def test_accuracy_is_the_same_before_and_after_a_filter():
    unfiltered = (4 * 0.5 + 5 * 1.0) / 9
    assert accuracy_over_all(0.5, 4, removed_correct=5) == pytest.approx(unfiltered)
    assert accuracy_over_all(0.5, 4, removed_correct=0) == 0.5
    with pytest.raises(ValueError, match="no problems"):
        accuracy_over_all(0.5, 0, removed_correct=0)
