"""Who starts first, by hand."""

from __future__ import annotations

import json

from magicrl.training.rollout_queue import PastLengths


def test_the_longest_first_and_the_unknown_in_their_middle() -> None:
    lengths = PastLengths()
    assert lengths.longest_first(["a", "b", "c"]) == [0, 1, 2], "nothing is known: the order of issue"
    for problem, mean in (("short", 3), ("long", 60), ("middling", 30)):
        lengths.saw(problem, mean)
    # new ones are expected to take the mean of 3, 30 and 60
    assert lengths.longest_first(["new", "short", "middling", "long", "newer"]) == [3, 0, 4, 2, 1]
    lengths.saw("short", 85)
    assert lengths.longest_first(["long", "short"]) == [1, 0], "the last draw counts"


def test_it_goes_through_a_checkpoint() -> None:
    lengths, again = PastLengths(), PastLengths()
    lengths.saw("a", 1.5)
    again.restore(json.loads(json.dumps(lengths.state())))
    assert again.state() == lengths.state() == {"a": 1.5}
