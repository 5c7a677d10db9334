"""Combinations of numbers in ``[cluster.learner]`` that are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from magicrl.config.cluster_schema import LearnerPlacement


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 6, "sequence_parallel": 4}, "sequence_parallel 4 must divide ranks 6"),
        ({"ranks": 6, "shard_ranks": 4}, "shard_ranks 4 must divide ranks 6"),
        ({"ranks": 2, "reduce_once": True, "reduce_dtype": "bfloat16"}, "leave out one of the two"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LearnerPlacement.model_validate(given)
