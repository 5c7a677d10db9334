from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicrl.data.sampler import PromptSampler
from magicrl.data.sources import problems_fingerprint
from magicrl.records import Problem


def problems(n: int) -> list[Problem]:
    """Return problems with ids ``p0``, ... and keys ``k0``, ..."""
    return [
        Problem(id=f"p{i}", key=f"k{i}", prompt=f"q{i}", references=(str(i),), verifier="exact", source="t")
        for i in range(n)
    ]


def ids(drawn: list[Problem]) -> list[str]:
    return [p.id for p in drawn]


def test_every_epoch_visits_each_problem_once_in_its_own_order() -> None:
    sampler = PromptSampler(problems(20), seed=3)
    epochs = [ids(sampler.next(20)) for _ in range(3)]
    assert all(sorted(e) == sorted(ids(problems(20))) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sampler.epoch == 2


def test_order_is_the_permutation_of_seed_and_epoch() -> None:
    sampler = PromptSampler(problems(7), seed=5)
    expected: list[str] = []
    for epoch in range(2):
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, epoch])))
        expected += [f"p{i}" for i in rng.permutation(7)]
    assert ids(sampler.next(14)) == expected
    assert ids(PromptSampler(problems(7), seed=6).next(14)) != expected


def test_draw_size_does_not_change_the_sequence_and_crosses_epochs() -> None:
    one, many = PromptSampler(problems(5), seed=0), PromptSampler(problems(5), seed=0)
    assert ids(one.next(12)) == [i for _ in range(4) for i in ids(many.next(3))]
    assert (one.epoch, one.position) == (many.epoch, many.position) == (2, 2)


def test_removed_problems_are_skipped_and_the_rest_keep_their_order() -> None:
    plain, filtered = PromptSampler(problems(10), seed=1), PromptSampler(problems(10), seed=1)
    assert ids(plain.next(4)) == ids(filtered.next(4))
    gone = set(ids(plain.next(2))) | {"p0"}
    keys = {name.replace("p", "k") for name in gone}
    assert filtered.remove(keys) == len(gone)
    assert filtered.remove(keys) == 0
    rest = [i for i in ids(plain.next(24)) if i not in gone]
    assert ids(filtered.next(len(rest))) == rest
    assert len(filtered) == 10 - len(gone)
    assert {p.id for p in filtered.remaining} == {f"p{i}" for i in range(10)} - gone
    assert filtered.removed == gone


def test_removing_everything_is_an_error_and_changes_nothing() -> None:
    sampler = PromptSampler(problems(3), seed=0)
    sampler.remove(["k0"])
    before = sampler.state()
    with pytest.raises(ValueError, match=r"would leave none of 3.*online_filter = false"):
        sampler.remove(["k1", "k2", "k0"])
    with pytest.raises(ValueError, match="'k9'"):
        sampler.remove(["k1", "k9"])
    assert sampler.state() == before


def test_every_problem_of_a_removed_prompt_goes() -> None:
    asked = ["What is 2 + 3?", "what is  2 + 3?", "What is 2 + 4?"]
    listed = [
        Problem(id=f"p{i}", prompt=p, references=("5",), verifier="exact", source="t") for i, p in enumerate(asked)
    ]
    sampler = PromptSampler(listed, seed=0)
    assert sampler.remove([listed[1].key]) == 2
    assert sampler.removed == {"p0", "p1"}
    assert set(ids(sampler.next(4))) == {"p2"}
    with pytest.raises(ValueError, match="would leave none of 3"):
        sampler.remove([listed[2].key])


@given(
    n=st.integers(1, 12),
    seed=st.integers(0, 5),
    draws=st.lists(st.integers(1, 9), max_size=5),
    removed=st.sets(st.integers(0, 11), max_size=6),
)
def test_state_round_trip_goes_on_where_it_was(n: int, seed: int, draws: list[int], removed: set[int]) -> None:
    sampler = PromptSampler(problems(n), seed=seed)
    for size in draws:
        sampler.next(size)
    gone = [f"k{i}" for i in removed if i < n]
    if len(gone) < n:
        sampler.remove(gone)
    state = json.loads(json.dumps(sampler.state()))
    other = PromptSampler(problems(n), seed=99)
    other.restore(state)
    assert other.state() == sampler.state()
    assert ids(other.next(2 * n + 1)) == ids(sampler.next(2 * n + 1))
    assert other.state() == sampler.state()


def test_counts_over_many_draws_are_equal() -> None:
    sampler = PromptSampler(problems(6), seed=2)
    assert set(Counter(ids(sampler.next(60))).values()) == {10}


def test_restore_rejects_another_training_set_or_damage() -> None:
    sampler = PromptSampler(problems(4), seed=0)
    state = sampler.state()
    with pytest.raises(ValueError, match="another training set"):
        PromptSampler(problems(5), seed=0).restore(state)
    with pytest.raises(ValueError, match="damaged"):
        sampler.restore({**state, "position": 5})
    with pytest.raises(ValueError, match="damaged"):
        sampler.restore({**state, "removed": ["p0", "p1", "p2", "p3"]})
    with pytest.raises(ValueError, match="lacks 'epoch'"):
        sampler.restore({k: v for k, v in state.items() if k != "epoch"})
    assert sampler.state() == state


def test_a_checkpoint_of_version_0_2_has_the_folder_of_a_reward_in_its_checksum() -> None:
    given = [replace(problem, verifier="/home/me/r.py:score") for problem in problems(4)]
    sampler = PromptSampler(given, seed=0)
    sampler.restore({**sampler.state(), "position": 2, "fingerprint": problems_fingerprint(given, folders=True)})
    assert sampler.position == 2


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="no problems"):
        PromptSampler([], seed=0)
    with pytest.raises(ValueError, match="'p1' appears twice"):
        PromptSampler([*problems(2), problems(2)[1]], seed=0)
    with pytest.raises(ValueError, match="seed"):
        PromptSampler(problems(2), seed=-1)
    with pytest.raises(ValueError, match="n = 0"):
        PromptSampler(problems(2), seed=0).next(0)
