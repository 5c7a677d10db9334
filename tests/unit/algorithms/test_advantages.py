from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from magicrl.algorithms.advantages import (
    AdvantageInputs,
    Signal,
    advantage_of,
    batch_deviation,
    group_relative,
    group_signal,
    leave_one_out,
    max_at_k,
    max_likelihood,
    overlong_penalty,
    pass_at_k_gradient,
    reinforce_pp,
    reinforce_pp_baseline,
    reject_zero_advantage,
    score_group,
    scored_advantages,
    split_minibatches,
)
from magicrl.records import frozen_floats, frozen_tokens
from magicrl.registry import BUILTINS


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


def inputs(rewards, groups=None, mask="none", normalise_std=True, k=4, **more):
    ones = torch.ones(len(rewards), dtype=torch.int64)
    given = {name: torch.tensor(values) for name, values in more.items()}
    return AdvantageInputs(
        rewards_N=torch.tensor(rewards, dtype=torch.float32),
        group_index_N=torch.tensor(groups if groups is not None else [0] * len(rewards)),
        counted_N=given.get("counted_N", ones).bool(),
        truncated_N=given.get("truncated_N", 0 * ones).bool(),
        lengths_N=given.get("lengths_N", ones),
        mask=mask,
        normalise_std=normalise_std,
        k=k,
        groups=(),
    )


def advantages(*args, of=group_relative, **kwargs):
    a = inputs(*args, **kwargs)
    return a.given(of(a))


def test_hand_computed_unbiased_std_and_epsilon():
    # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2
    found = advantages([1, 0, 0, 0])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.75 / 0.500001] + [-0.25 / 0.500001] * 3, rel=1e-12)


def test_groups_are_separate_and_may_be_interleaved():
    found = advantages([1, 5, 0, 5, 0, 7], groups=[9, -2, 9, -2, 9, -2])
    alone = [advantages([1, 0, 0]), advantages([5, 5, 7])]
    assert found[[0, 2, 4]].tolist() == pytest.approx(alone[0].tolist(), rel=1e-12)
    assert found[[1, 3, 5]].tolist() == pytest.approx(alone[1].tolist(), rel=1e-12)


def test_without_std_the_centred_reward_remains():
    assert advantages([1, 0, 0, 0], normalise_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_mask_before_takes_truncated_responses_out_of_mean_and_std():
    found = advantages([1, 0, 0, 0], truncated_N=[0, 0, 1, 1], mask="before")
    std = math.sqrt(0.5)  # of 1 and 0
    assert found.tolist() == pytest.approx([0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0, 0], rel=1e-12)


def test_mask_after_keeps_them_in_mean_and_std():
    found = advantages([1, 0, 0, 0], truncated_N=[0, 0, 1, 1], mask="after")
    assert found.tolist() == pytest.approx([0.75 / 0.500001, -0.25 / 0.500001, 0, 0], rel=1e-12)


def test_mask_none_punishes_truncation():
    found = advantages([1, 0, 0, 0], truncated_N=[0, 0, 1, 1], mask="none")
    assert found[2] < 0
    assert found[2] == found[1]


def test_uncounted_responses_leave_the_group():
    found = advantages([1, 0, 0], counted_N=[1, 1, 0])
    assert found[2] == 0
    assert found[:2].tolist() == pytest.approx(advantages([1, 0]).tolist(), rel=1e-12)


@pytest.mark.parametrize(
    ("rewards", "kwargs"),
    [
        ([1.0], {}),
        ([1.0, 0.0], {"counted_N": [1, 0]}),
        ([1.0, 0.0], {"counted_N": [0, 0]}),
        ([1.0, 0.0, 0.0], {"truncated_N": [0, 1, 1], "mask": "before"}),
        ([0.1, 0.1, 0.1], {}),  # 0.1 is not exact in binary: its float mean differs from it
    ],
)
def test_no_information_is_exactly_zero_never_nan(rewards, kwargs):
    assert advantages(rewards, **kwargs).tolist() == [0.0] * len(rewards)


def test_a_mask_must_be_known(make_group):
    with pytest.raises(ValueError, match="'both'"):
        scored_advantages([make_group("cw")], mask="both")


HAND = {
    # the others' mean is 0 and 1/3
    leave_one_out: ([1, 0, 0, 0], {}, [1, -1 / 3, -1 / 3, -1 / 3]),
    # 1 of 4: n / K - 1 = 3
    max_likelihood: ([1, 0, 0, 0, 1, 1], {"groups": [0, 0, 0, 0, 1, 1]}, [3, -1, -1, -1, 0, 0]),
    # each of two correct ones adds 1 to 2 of the 6 pairs; 0.5 adds 0.3 to {0.2}, 1 adds 0.5 and 0.8, of 3 pairs
    pass_at_k_gradient: (
        [1, 0, 1, 0, 0.5, 0.25, 1],
        {"groups": [0] * 4 + [1] * 3, "k": 2},
        [4 / 3, 0, 4 / 3, 0, 0.25, 0, 1.25],
    ),
    # centred 0.75, -0.25 three times, 0.5, -0.5: squares add to 1.25, over 6 - 1
    batch_deviation: (
        [1, 0, 0, 0, 1, 0],
        {"groups": [0, 0, 0, 0, 1, 1]},
        [x / (0.5 + 1e-6) for x in (0.75, -0.25, -0.25, -0.25, 0.5, -0.5)],
    ),
    # over 4 tokens: mean 0.75, variance 0.75 * 0.0625 + 0.25 * 0.5625 = 0.1875
    reinforce_pp: (
        [1, 0],
        {"groups": [0, 1], "lengths_N": [3, 1]},
        [0.25 / (0.1875**0.5 + 1e-6), -0.75 / (0.1875**0.5 + 1e-6)],
    ),
    # centred 0.5, -0.5 | 1/3, 1/3, -2/3; over 6 tokens mean 1/12, variance 0.75 / 6 + (2 / 3) / 6 - 1 / 144 = 33 / 144
    reinforce_pp_baseline: (
        [1, 0, 1, 1, 0],
        {"groups": [0, 0, 1, 1, 1], "lengths_N": [2, 1, 1, 1, 1]},
        [(x - 1 / 12) / ((33 / 144) ** 0.5 + 1e-6) for x in (1 / 2, -1 / 2, 1 / 3, 1 / 3, -2 / 3)],
    ),
}


@pytest.mark.parametrize("function", HAND, ids=lambda f: f.__name__)
def test_advantages_by_hand(function):
    rewards, settings, expected = HAND[function]
    assert advantages(rewards, of=function, **settings).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", sorted(BUILTINS["advantage"]))
def test_non_members_change_nothing_and_get_zero(name):
    """Truncated (under `before`) and unjudged responses do not change the others, and get 0."""
    function = advantage_of(name)
    alone = advantages([1, 0, 0, 1], [0, 0, 1, 1], of=function, lengths_N=[2, 3, 1, 4])
    more = {"groups": [0, 0, 0, 1, 1, 1], "lengths_N": [2, 3, 9, 1, 4, 9]}
    judged = advantages([1, 0, 1, 0, 1, 1], counted_N=[1, 1, 0, 1, 1, 0], of=function, **more)
    before = advantages([1, 0, 1, 0, 1, 1], truncated_N=[0, 0, 1, 0, 0, 1], mask="before", of=function, **more)
    for found in (judged, before):
        assert found[[0, 1, 3, 4]].tolist() == pytest.approx(alone.tolist(), rel=1e-12)
        assert found[[2, 5]].tolist() == [0, 0]
    # Under `after` they count in mean and deviation, and get 0.
    plain = advantages([1, 0, 1, 0, 1, 1], of=function, **more)
    after = advantages([1, 0, 1, 0, 1, 1], truncated_N=[0, 0, 1, 0, 0, 1], mask="after", of=function, **more)
    assert after.tolist() == [*plain[:2].tolist(), 0, *plain[3:5].tolist(), 0]
    assert advantages([1, 1], counted_N=[0, 0], of=function).tolist() == [0, 0]


def test_max_at_k_is_the_sum_over_all_sets():
    generator = torch.Generator().manual_seed(0)
    for n in range(2, 8):
        values = torch.randint(0, 4, (n,), generator=generator).to(torch.float64)  # with ties
        for k in range(2, n + 1):
            expected = [0.0] * n
            for chosen in itertools.combinations(range(n), k):
                for i in chosen:
                    others = max(float(values[j]) for j in chosen if j != i)
                    expected[i] += (max(others, float(values[i])) - others) * n / math.comb(n, k)
            assert max_at_k(values, k).tolist() == pytest.approx(expected, rel=1e-12)


N = 4
REWARDS = [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "objective"),
    [
        (leave_one_out, lambda p: p),
        (lambda a: pass_at_k_gradient(a._replace(k=2)), lambda p: 1 - (1 - p) ** 2),
        (lambda a: pass_at_k_gradient(a._replace(k=9)), lambda p: 1 - (1 - p) ** N),  # as many as there are
        (max_likelihood, lambda p: -sum((1 - p) ** j / j for j in range(1, N))),  # log p to order n - 1
    ],
    ids=["rloo", "pass@2", "pass@n", "maxrl"],
)
def test_the_expected_gradient_by_enumeration(function, objective):
    """The mean of A grad log pi over all draws of a group from three answers is the gradient of the objective."""
    logits = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    surrogate = torch.zeros((), dtype=torch.float64)
    for drawn in itertools.product(range(3), repeat=N):
        chance = logp.detach()[list(drawn)].sum().exp()
        advantage = advantages([REWARDS[x] for x in drawn], of=function)
        surrogate = surrogate + chance * (advantage * logp[list(drawn)]).mean()
    (found,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(objective(logp[1].exp()), logits)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-9)


def test_maxrl_refuses_a_negative_reward():
    with pytest.raises(ValueError, match=r"one is -0\.5"):
        advantages([1, -0.5], of=max_likelihood)
    assert advantages([1, 0, -0.5], counted_N=[1, 1, 0], of=max_likelihood).tolist() == [1, -1, 0]


def test_the_overlong_penalty_by_hand():
    lengths = torch.tensor([1, 12, 13, 15, 16])
    assert overlong_penalty(lengths, torch.full((5,), 16), 4).tolist() == [0, 0, -0.25, -0.75, -1]


def lengthened(scored, lengths):
    """Return the group with responses of these lengths. Its T is 8."""
    completions = [
        dataclasses.replace(c, tokens=frozen_tokens([1] * n), sampler_logprobs=frozen_floats([-1.0] * n))
        for c, n in zip(scored.group.completions, lengths, strict=True)
    ]
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, completions=tuple(completions)))


def test_overlong_responses_lose_in_the_advantage_and_not_in_the_record(make_group):
    group = lengthened(make_group("ccwc", "...t"), [4, 7, 6, 8])
    # Buffer 4: penalties 0, 3/4, 2/4 and 1. The truncated response is correct and gets 0 - 1.
    (found,) = scored_advantages([group], normalise_std=False, overlong_buffer=4)
    shaped = np.array([1.0, 0.25, -0.5, -1.0])
    assert found.tolist() == pytest.approx((shaped - shaped.mean()).tolist(), rel=1e-12)
    assert group.rewards.tolist() == [1, 1, 0, 0]
    # rejection uses the recorded rewards: with rejection, length penalties never give a group an advantage
    wrong = lengthened(make_group("ww"), [4, 8])
    assert group_signal(wrong) is Signal.ALL_WRONG
    assert scored_advantages([wrong], normalise_std=False, overlong_buffer=4)[0].tolist() == [0.5, -0.5]


def test_a_function_may_return_anything_for_non_members(make_group):
    def ones(a):
        return torch.where(a.members_N, 1.0, math.nan)

    assert scored_advantages([make_group("cwn", ".t.")], mask="before", advantage=ones)[0].tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="3 finite numbers"):
        scored_advantages([make_group("cwn")], advantage=lambda a: torch.where(a.rewards_N > 0, 1.0, math.nan))


def test_records_in_their_order(make_group):
    found = scored_advantages([make_group("cwn"), make_group("cw", "t.")], mask="after")
    assert [len(a) for a in found] == [3, 2]
    assert found[0].tolist() == pytest.approx([*advantages([1, 0]).tolist(), 0.0], rel=1e-12)
    assert found[1].tolist() == [0.0, 0.0]  # the truncated one scored 0 as well
    assert scored_advantages([]) == []


@pytest.mark.parametrize(
    ("outcomes", "finish", "mask", "signal"),
    [
        ("cwc", "...", "none", Signal.MIXED),
        ("ccc", "...", "none", Signal.ALL_CORRECT),
        ("www", "...", "none", Signal.ALL_WRONG),
        ("ccc", "..t", "none", Signal.MIXED),
        ("ccc", "..t", "after", Signal.MIXED),
        ("ccc", "..t", "before", Signal.ALL_CORRECT),
        ("cww", ".tt", "before", Signal.TOO_FEW),
        ("cnn", "...", "none", Signal.TOO_FEW),
        ("ccn", "...", "none", Signal.ALL_CORRECT),
    ],
)
def test_signal_follows_the_counted_rewards_of_the_mask(make_group, outcomes, finish, mask, signal):
    group = make_group(outcomes, finish)
    assert group_signal(group, mask) is signal
    has_advantage = bool(np.any(scored_advantages([group], mask=mask)[0] != 0))
    assert has_advantage == (signal is Signal.MIXED)


def test_rejection_counts_by_reason(make_group):
    found = reject_zero_advantage([make_group(o) for o in ("cc", "cw", "ww", "nc", "wc", "ww")])
    assert found.kept == (1, 4)
    assert (found.all_correct, found.all_wrong) == (1, 2)


def split(num_groups, mode, seed=0, parts=4, size=8):
    return split_minibatches(
        num_groups, num_parts=parts, prompts_per_part=size, mode=mode, rng=np.random.default_rng(seed)
    )


@pytest.mark.parametrize("num_groups", [0, 1, 3, 4, 5, 17, 30, 32])
@pytest.mark.parametrize("mode", ["keep_n_sgd", "keep_d_t"])
def test_every_survivor_is_in_exactly_one_part(num_groups, mode):
    parts = split(num_groups, mode)
    assert sorted(i for part in parts for i in part) == list(range(num_groups))
    assert all(parts)  # no empty mini-batch


def test_keep_n_sgd_keeps_the_number_of_steps():
    assert [len(part) for part in split(17, "keep_n_sgd")] == [5, 4, 4, 4]
    assert [len(part) for part in split(3, "keep_n_sgd")] == [1, 1, 1]


def test_keep_d_t_keeps_the_size():
    assert [len(part) for part in split(17, "keep_d_t")] == [8, 8, 1]
    assert [len(part) for part in split(16, "keep_d_t")] == [8, 8]


@pytest.mark.parametrize("mode", ["keep_n_sgd", "keep_d_t"])
def test_each_pass_draws_a_new_split_reproducibly(mode):
    rng = np.random.default_rng(0)
    first, second = (split_minibatches(16, num_parts=4, prompts_per_part=4, mode=mode, rng=rng) for _ in range(2))
    assert first != second
    assert first == split(16, mode, size=4)


def test_bad_arguments_name_their_value():
    with pytest.raises(ValueError, match="'halves'"):
        split(4, "halves")
    with pytest.raises(ValueError, match="0"):
        split(4, "keep_d_t", size=0)


@pytest.mark.parametrize("form", [list, np.array, tuple, torch.tensor])
def test_numbers_of_any_form_are_taken(form, make_group):
    (found,) = scored_advantages([make_group("cw")], advantage=lambda a: form([0.5, -0.5]))
    assert found.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("returned", [None, "abc", [1.0, None], {"a": 1}])
def test_what_is_no_number_per_response_is_named(returned, make_group):
    with pytest.raises(ValueError, match="an advantage must return 2 numbers, one per response"):
        scored_advantages([make_group("cw")], advantage=lambda a: returned)
