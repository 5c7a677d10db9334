"""Hand-computed values of every row on one small mini-batch, and mutations that must change them.

Two groups of two responses; logprobs are -1 everywhere. Ratios and advantages:
    group 0: r0 A=+1 rho 1.5, 1.0, 0.5    r1 A=-1 rho 1.5, 0.5
    group 1: r2 A=+2 rho 2.0              r3 A=-2 rho 0.9, 0.9
min(rho A, clip(rho, 0.8, 1.2) A) sums to 2.7, -2.3, 2.4, -3.6 by response; 8 tokens.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from magicrl.algorithms.loss_terms import LossMetrics, k3, loss_terms
from magicrl.algorithms.losses import LOSSES, LossRow, Surrogate, binary_kl, binary_tv, loss_row, unclipped_ratio
from magicrl.algorithms.token_weights import (
    NOT_GIVEN,
    LossInputs,
    constant,
    correction_of,
    global_tokens,
    response_mean,
    response_weights,
    sequence_sum,
)
from magicrl.selfcheck.slow_loss import NOT_DIVIDED, WHOLE_RATIO

RHO = [1.5, 1.0, 0.5, 1.5, 0.5, 2.0, 0.9, 0.9]
ROW = [0, 0, 0, 1, 1, 2, 3, 3]
LENGTHS = torch.tensor([3, 2, 1, 2])
GROUPS = torch.tensor([0, 0, 1, 1])
SAPO_TAUS = [1.0] * 3 + [1.05] * 2 + [1.0] + [1.05] * 2
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64)


def hand_case(**changes) -> LossInputs:
    row = torch.tensor(ROW)
    logprobs = torch.full((8,), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=-1.0 - torch.tensor(RHO, dtype=torch.float64).log(),
        ref_logprobs=torch.full((8,), -1.0 + math.log(2.0), dtype=torch.float64),
        entropy=torch.full((8,), 0.5, dtype=torch.float64),
        advantages=ADVANTAGES[row],
        loss_mask=torch.ones(8, dtype=torch.bool),
        sample_index=row,
    )
    return inputs._replace(**changes)


def hand_loss(name, inputs=None, reducer=None, clip=(0.2, 0.2), row=None, correction="none", cap=2.0, **kwargs):
    row = row or LOSSES[name]
    weights = response_weights(reducer or row.reducer, LENGTHS, GROUPS, num_loss_tokens=8, max_tokens=4)
    inputs = inputs or hand_case()
    return loss_terms(
        row,
        inputs._replace(clip_low=clip[0], clip_high=clip[1], cap=cap),
        weights[inputs.sample_index],
        correction=correction_of(correction),
        **kwargs,
    )


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


EXPECTED = {
    "pg": -((3.0 - 2.0) / 2 + (4.0 - 3.6) / 2) / 2,
    "ppo": -((2.7 - 2.3) / 2 + (2.4 - 3.6) / 2) / 2,
    "grpo": -((0.9 - 1.15) / 2 + (2.4 - 1.8) / 2) / 2,
    "magic": 0.8 / 8,
    "dapo": 0.56 / 8,  # 1.28 instead of 1.2 at the two clipped tokens: +0.08 and +0.16
    "dr_grpo": 0.8 / (4 * 4),
    "gspo": -((0.75 ** (1 / 3) - 0.75**0.5) / 2 + (2.4 - 1.8) / 2) / 2,
    "cispo": -(-3.0 + 2.0 - 2.4 + 3.6) / 8,
    "nll": 1.0,
    # CISPO's sums by group, over 5 and 3 tokens
    "scalerl": -((-3.0 + 2.0) / 5 + (-2.4 + 3.6) / 3) / 2,
    # 4 / tau sigmoid(tau (rho - 1)); of rho 1.5 and 0.5 the sigmoids add to 1
    "sapo": -((2 - 2 / 1.05) / 2 + (8 * sigmoid(1.0) - 8 / 1.05 * sigmoid(-0.105)) / 2) / 2,
    # 1.2 where rho is 1.5 or 2 and A > 0, 0.75 * 0.8 where rho is 0.5 and A < 0
    "ce_gppo": -(2.7 - 2.1 + 2.4 - 3.6) / 8,
    # r0 0, 1, 1 / 0.5; r1 -1.5, 0; r2 0; r3 -3.6
    "aspo": -(3.0 - 1.5 + 0.0 - 3.6) / 8,
    # pi = 1/e and mu = pi / rho: |pi - mu| is 0.12, 0, 0.37, 0.12, 0.37, 0.18, 0.04, 0.04, and token 4 goes
    "dppo": -(3.0 - 1.5 + 4.0 - 3.6) / 8,
    # the divergences are 0.034 at rho 1.5, 0.279 at 0.5, 0.081 at 2, 0.004 at 0.9: tokens 4 and 5 go
    "dppo_kl": -(3.0 - 1.5 + 0.0 - 3.6) / 8,
}
CLIPS = {"dapo": (0.2, 0.28), "dppo_kl": (0.05, 0.05)}


@pytest.mark.parametrize("name", list(LOSSES))
def test_hand_computed_value(name):
    clip = CLIPS.get(name, (0.2, 0.2))
    assert hand_loss(name, clip=clip).loss.item() == pytest.approx(EXPECTED[name], rel=1e-12)


def test_the_table_holds_the_methods_the_recipes_may_name():
    assert set(LOSSES) == set(EXPECTED)
    assert LOSSES["dapo"].clip == (0.2, 0.28)
    assert {name for name, row in LOSSES.items() if not row.normalise_std} == NOT_DIVIDED
    assert {name for name, row in LOSSES.items() if row.ratio_level == "sequence"} == WHOLE_RATIO


NEW_LOSS = """
from magicrl.algorithms.losses import LossRow, Surrogate, nothing_clipped

def positive_only(s):
    return Surrogate(s.ratio * s.advantages.clamp(min=0), nothing_clipped(s))

ROW = LossRow(surrogate=positive_only)
"""


def test_a_new_loss_is_a_file_of_ones_own(tmp_path):
    (tmp_path / "positive_only.py").write_text(NEW_LOSS)
    row = loss_row(f"{tmp_path}/positive_only.py:ROW")
    # r0 gives 1.5 + 1.0 + 0.5, r2 gives 2 * 2.0, the others nothing
    assert hand_loss("", row=row).loss.item() == pytest.approx(-7 / 8, rel=1e-12)


def test_entropy_and_kl_terms_take_the_same_weights_and_their_signs():
    magic = hand_loss("magic").loss.item()
    # H = 0.5 and k3 = 2 - ln 2 - 1 at every token, so their weighted means are these.
    assert hand_loss("magic", alpha=0.1).loss.item() == pytest.approx(magic - 0.1 * 0.5, rel=1e-12)
    assert hand_loss("magic", beta=0.1).loss.item() == pytest.approx(magic + 0.1 * (1 - math.log(2)), rel=1e-12)
    # sequence_sum: 8 tokens of weight 1/4.
    both = hand_loss("ppo", alpha=0.1, beta=0.1).loss.item()
    assert both == pytest.approx(EXPECTED["ppo"] - 0.1 * 0.5 * 2 + 0.1 * (1 - math.log(2)) * 2, rel=1e-12)


MUTATIONS = {
    "sign of the advantage": lambda: hand_loss("magic", hand_case(advantages=-hand_case().advantages)),
    "no clip": lambda: hand_loss("magic", row=dataclasses.replace(LOSSES["magic"], surrogate=unclipped_ratio)),
    "upper clip": lambda: hand_loss("magic", clip=(0.2, 0.3)),
    "lower clip": lambda: hand_loss("magic", clip=(0.3, 0.2)),
    "inverted ratio": lambda: hand_loss("magic", hand_case(old_logprobs=-2.0 - hand_case().old_logprobs)),
    "ratio forgotten": lambda: hand_loss("magic", hand_case(old_logprobs=NOT_GIVEN)),
    "mask": lambda: hand_loss("magic", hand_case(loss_mask=torch.tensor([True] * 7 + [False]))),
    "response mean": lambda: hand_loss("magic", reducer=response_mean),
    "sequence sum": lambda: hand_loss("magic", reducer=sequence_sum),
    "constant": lambda: hand_loss("magic", reducer=constant),
    "sequence ratio": lambda: hand_loss("magic", row=dataclasses.replace(LOSSES["magic"], ratio_level="sequence")),
}


@pytest.mark.parametrize("mutation", list(MUTATIONS))
def test_each_mutation_changes_the_hand_computed_value(mutation):
    assert abs(MUTATIONS[mutation]().loss.item() - EXPECTED["magic"]) > 1e-3


def test_gradients_by_hand():
    inputs = hand_case()
    hand_loss("magic", inputs).loss.backward()
    # d/dlogp of rho A is rho A where nothing clips, 0 where it does (tokens 0, 4 and 5).
    expected = [0.0, 1.0, 0.5, -1.5, 0.0, 0.0, -1.8, -1.8]
    assert (-8 * inputs.logprobs.grad).tolist() == pytest.approx(expected, rel=1e-12)


def test_clipped_marks_the_tokens_whose_gradient_is_zero():
    outputs = hand_loss("magic")
    assert outputs.clipped.tolist() == [True, False, False, False, True, True, False, False]
    assert outputs.metrics.values()["clip_ratio"] == pytest.approx(3 / 8)


def test_cispo_keeps_a_gradient_at_every_token():
    inputs = hand_case()
    hand_loss("cispo", inputs).loss.backward()
    weight = [1.2, 1.0, 0.8, -1.2, -0.8, 2.4, -1.8, -1.8]
    assert (-8 * inputs.logprobs.grad).tolist() == pytest.approx(weight, rel=1e-12)


def test_without_old_logprobs_the_ratio_is_exactly_one_and_the_gradient_is_that_of_a_log_pi():
    inputs = hand_case(old_logprobs=NOT_GIVEN)
    outputs = hand_loss("magic", inputs)
    assert outputs.metrics.maxima["ratio"] == outputs.metrics.minima["ratio"] == 1.0
    assert not outputs.clipped.any()
    outputs.loss.backward()
    assert (-8 * inputs.logprobs.grad).tolist() == inputs.advantages.tolist()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"nll"}))
def test_every_row_is_inert_at_ratio_one(name):
    """Without old log-probs the gradient is the plain policy gradient's: the reducer's weight times the advantage."""
    inputs = hand_case(old_logprobs=NOT_GIVEN)
    outputs = hand_loss(name, inputs)
    outputs.loss.backward()
    weights = response_weights(LOSSES[name].reducer, LENGTHS, GROUPS, num_loss_tokens=8, max_tokens=4)[ROW]
    assert (-inputs.logprobs.grad).tolist() == pytest.approx((weights * inputs.advantages).tolist(), rel=1e-12)
    assert not outputs.clipped.any()


def test_sapo_fades_with_the_distance_of_the_ratio():
    inputs = hand_case()
    hand_loss("sapo", inputs, reducer=global_tokens).loss.backward()
    gate = [4 * sigmoid(tau * (rho - 1)) * sigmoid(-tau * (rho - 1)) for rho, tau in zip(RHO, SAPO_TAUS, strict=True)]
    expected = [g * rho * a for g, rho, a in zip(gate, RHO, hand_case().advantages.tolist(), strict=True)]
    assert (-8 * inputs.logprobs.grad).tolist() == pytest.approx(expected, rel=1e-12)


def test_ce_gppo_keeps_the_bounds_gradient_where_ppo_has_none():
    inputs = hand_case()
    outputs = hand_loss("ce_gppo", inputs)
    outputs.loss.backward()
    expected = [1.2, 1.0, 0.5, -1.5, -0.75 * 0.8, 2.4, -1.8, -1.8]
    assert (-8 * inputs.logprobs.grad).tolist() == pytest.approx(expected, rel=1e-12)
    assert outputs.clipped.tolist() == hand_loss("magic").clipped.tolist()


def test_aspo_raises_a_good_token_that_fell_behind_more_and_up_to_a_bound():
    rho = [*RHO[:2], 0.25, *RHO[3:]]
    inputs = hand_case(old_logprobs=-1.0 - torch.tensor(rho, dtype=torch.float64).log())
    outputs = hand_loss("aspo", inputs)
    outputs.loss.backward()
    # 1 / 0.25 is 4, held at 3; the gradient has the weight's sign, not that of a falling 1 / rho
    expected = [0.0, 1.0, 3.0, -1.5, 0.0, 0.0, -1.8, -1.8]
    assert (-8 * inputs.logprobs.grad).tolist() == pytest.approx(expected, rel=1e-12)
    assert outputs.clipped.tolist() == [True, False, False, False, True, True, False, False]
    fell = hand_case(old_logprobs=-1.0 - torch.tensor([*RHO[:2], 0.5, *RHO[3:]], dtype=torch.float64).log())
    hand_loss("aspo", fell).loss.backward()
    assert (-8 * fell.logprobs.grad)[2].item() == pytest.approx(2.0, rel=1e-12)


def test_dppo_looks_at_the_sampler_and_at_one_threshold_a_direction():
    # rho = 1, and the sampler gave each token the probability mu of the hand case
    inputs = hand_case(old_logprobs=NOT_GIVEN, sampler_logprobs=hand_case().old_logprobs)
    assert hand_loss("dppo", inputs, clip=(0.2, 0.15)).clipped.tolist() == [False] * 4 + [True, True, False, False]
    assert hand_loss("dppo", inputs, clip=(0.4, 0.1)).clipped.tolist() == [True, *[False] * 4, True, False, False]
    hand_loss("dppo", inputs, clip=(0.2, 0.15)).loss.backward()
    assert (-8 * inputs.logprobs.grad).tolist() == [1.0, 1.0, 1.0, -1.0, 0.0, 0.0, -2.0, -2.0]
    # the paper's ratio, pi / mu: rho times the correction
    both = hand_case(old_logprobs=NOT_GIVEN, sampler_logprobs=hand_case().old_logprobs)
    hand_loss("dppo", both, clip=(0.2, 0.15), correction="tis", cap=9.0).loss.backward()
    assert (-8 * both.logprobs.grad).tolist() == pytest.approx([1.5, 1.0, 0.5, -1.5, 0, 0, -1.8, -1.8], rel=1e-12)


def test_divergences_by_hand_and_at_the_edge():
    pi, mu = torch.tensor([0.5, 0.5, 1.0, 1.0]).log(), torch.tensor([0.25, 0.5, 1.0, 0.5]).log()
    assert binary_tv(pi, mu).tolist() == pytest.approx([0.25, 0.0, 0.0, 0.5], rel=1e-6)
    found = binary_kl(pi, mu).tolist()
    assert found[:3] == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0.0, 0.0], abs=1e-7)
    assert 40 < found[3] < math.inf  # infinite except for the smallest number: masked, and no NaN


def test_a_masked_response_stays_in_the_denominator_and_in_the_entropy_term():
    advantages = hand_case().advantages.clone()
    advantages[:3] = 0.0
    outputs = hand_loss("magic", hand_case(advantages=advantages), alpha=0.1)
    assert outputs.loss.item() == pytest.approx((2.3 - 2.4 + 3.6) / 8 - 0.1 * 0.5, rel=1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_token_without_loss_reaches_nothing_whatever_it_holds(name):
    inputs = hand_case()
    junk = torch.tensor([-math.inf], dtype=torch.float64)
    padded = LossInputs(
        logprobs=torch.cat([inputs.logprobs, junk]),
        old_logprobs=torch.cat([inputs.old_logprobs, torch.tensor([math.nan], dtype=torch.float64)]),
        sampler_logprobs=torch.cat([inputs.old_logprobs, junk]),
        ref_logprobs=torch.cat([inputs.ref_logprobs, -junk]),
        entropy=torch.cat([inputs.entropy, -junk]),
        advantages=torch.cat([inputs.advantages, torch.tensor([1.0], dtype=torch.float64)]),
        loss_mask=torch.tensor([True] * 8 + [False]),
        sample_index=torch.cat([inputs.sample_index, torch.tensor([3])]),
    )
    plain = hand_loss(name, inputs, alpha=0.1, beta=0.1)
    (expected,) = torch.autograd.grad(plain.loss, inputs.logprobs)
    outputs = hand_loss(name, padded, alpha=0.1, beta=0.1)
    (found,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    assert outputs.loss.item() == plain.loss.item()
    assert torch.equal(found, expected)
    assert outputs.metrics.values() == plain.metrics.values()


def test_extreme_ratios_stay_finite():
    inputs = hand_case(old_logprobs=torch.full((8,), -500.0, dtype=torch.float64))
    outputs = hand_loss("pg", inputs, beta=0.1)
    assert math.isfinite(outputs.loss.item())
    ref = hand_case(ref_logprobs=torch.full((8,), 800.0, dtype=torch.float64))
    assert math.isfinite(hand_loss("magic", ref, beta=0.1).loss.item())


def test_metrics_hold_no_graph():
    metrics = hand_loss("magic", alpha=0.1, beta=0.1).metrics
    held = [*metrics.sums.values(), *metrics.maxima.values(), *metrics.minima.values()]
    assert not any(value.requires_grad for value in held)


def test_metrics_add_over_micro_batches():
    inputs = hand_case(sampler_logprobs=torch.linspace(-1.3, -0.7, 8, dtype=torch.float64))
    whole = hand_loss("magic", inputs, alpha=0.1, beta=0.1, correction="tis", cap=1.3).metrics.values()
    parts = []
    for rows in ((0, 2), (1, 3)):
        chosen = torch.tensor([r in rows for r in ROW])
        per_token = {k: v[chosen] for k, v in inputs._asdict().items() if isinstance(v, torch.Tensor) and len(v)}
        share = inputs._replace(**per_token)
        parts.append(hand_loss("magic", share, alpha=0.1, beta=0.1, correction="tis", cap=1.3).metrics)
    merged = LossMetrics.merge(parts).values()
    assert merged == pytest.approx(whole, rel=1e-12)
    assert whole["ratio_max"] == pytest.approx(2.0)
    assert whole["ratio_min"] == pytest.approx(0.5)
    assert whole["ratio_mean"] == pytest.approx(sum(RHO) / 8)
    assert whole["entropy"] == pytest.approx(0.5)
    assert whole["kl"] == pytest.approx(1 - math.log(2))
    assert whole["tokens"] == 8
    gaps = (inputs.old_logprobs - inputs.sampler_logprobs).abs()
    assert whole["sampler_gap_mean"] == pytest.approx(float(gaps.mean()))
    assert whole["sampler_gap_max"] == pytest.approx(float(gaps.max()))


def test_missing_inputs_are_named():
    with pytest.raises(ValueError, match="alpha"):
        hand_loss("magic", hand_case(entropy=None), alpha=0.1)
    with pytest.raises(ValueError, match="beta"):
        hand_loss("magic", hand_case(ref_logprobs=None), beta=0.1)
    with pytest.raises(ValueError, match="'tis'"):
        hand_loss("magic", correction="tis")


@pytest.mark.parametrize(
    ("surrogate", "got"),
    [
        (lambda s: s.ratio, r"\(8,\)$"),
        (lambda s: Surrogate(s.ratio.sum(), s.ratio > 1), r"\(\), \(8,\)$"),
        (lambda s: Surrogate(s.ratio, None), r"\(8,\), NoneType$"),
        (lambda s: (s.ratio, s.ratio > 1), "tuple$"),
    ],
)
def test_a_surrogate_that_returns_something_else_is_told_what_to_return(surrogate, got):
    with pytest.raises(ValueError, match=rf"must return Surrogate\(values, clipped\), two tensors .* got {got}"):
        hand_loss("magic", row=LossRow(surrogate=surrogate))


def test_an_entropy_without_gradient_is_refused_where_the_surrogate_would_train_it():
    def bonus(s):
        return Surrogate(s.ratio * s.advantages + 0.1 * s.entropy, s.ratio > 1)

    with pytest.raises(ValueError, match=r'set needs=\("entropy",\) in the row'):
        hand_loss("magic", row=LossRow(surrogate=bonus))
    trained = hand_case(entropy=torch.full((8,), 0.5, dtype=torch.float64, requires_grad=True))
    hand_loss("magic", trained, row=LossRow(surrogate=bonus, needs=("entropy",))).loss.backward()
    assert trained.entropy.grad.tolist() == pytest.approx([-0.1 / 8] * 8)
    # A detached entropy may weigh or mask tokens.
    weighted = LossRow(surrogate=lambda s: Surrogate(s.ratio * (s.entropy.detach() > 0.1), s.ratio > 1))
    hand_loss("magic", row=weighted).loss.backward()


def test_a_surrogate_with_the_sign_of_a_loss_is_refused():
    loss = LossRow(
        surrogate=lambda s: Surrogate(-torch.minimum(s.ratio, s.ratio.clamp(max=1.2)) * s.advantages, s.ratio > 1)
    )
    with pytest.raises(ValueError, match="its values are maximised, unlike a loss: change their sign"):
        hand_loss("magic", row=loss)
    # A penalty outweighs the advantages, and moves some tokens against them.
    hand_loss("magic", row=LossRow(surrogate=lambda s: Surrogate(s.ratio * s.advantages - 9 * s.logprobs, s.ratio > 1)))


def test_k3_by_hand_and_never_negative():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    ref = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)], dtype=torch.float64)
    assert k3(logprobs, ref).tolist() == pytest.approx([0.0, 1 - math.log(2), math.log(2) - 0.5], rel=1e-12)
    near = torch.tensor([-1e-4], dtype=torch.float32)
    assert float(k3(torch.zeros(1), near)) == pytest.approx(0.5e-8, rel=1e-3)  # plain r - log r - 1 gives 0 here


def test_the_correction_multiplies_the_policy_term_only():
    sampler = hand_case().old_logprobs - math.log(1.5)
    inputs = hand_case(sampler_logprobs=sampler)
    outputs = hand_loss("magic", inputs, alpha=0.1, beta=0.1, correction="tis")
    rest = -0.1 * 0.5 + 0.1 * (1 - math.log(2))
    assert outputs.loss.item() == pytest.approx(1.5 * EXPECTED["magic"] + rest, rel=1e-12)
    masked = hand_loss("magic", inputs, alpha=0.1, beta=0.1, correction="mis", cap=1.4)
    assert masked.loss.item() == pytest.approx(rest, rel=1e-12)
    assert masked.metrics.values()["corrected_ratio"] == 1.0
