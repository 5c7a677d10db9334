"""Each method of the race against numbers worked out by hand, a published property, and a slow gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from magicrl.algorithms.advantages import AdvantageInputs
from magicrl.algorithms.entropy import ControllerSettings, EntropyController
from magicrl.algorithms.loss_terms import LossInputs, loss_terms
from magicrl.algorithms.losses import CorrectionInputs, LossRow, correction_of, needs_of
from magicrl.config.loader import load_train_recipe
from magicrl.models.head import HeadOptions, logprobs_and_entropies
from studies.race import (
    aent,
    bapo,
    clip_cov,
    dcpo,
    entrocraft,
    entropic,
    kl3,
    mai_clip,
    qae,
    repo,
    seq_mis,
    trl_adaptive,
)

# one response a token: old probabilities, ratios, advantages
Q = [0.5, 0.5, 0.01, 0.01, 0.9, 0.9, 0.97, 0.97]
RHO = [1.1, 0.7, 4.5, 0.45, 1.05, 0.4, 1.02, 1.02]
A = [1.0, -1.0, 2.0, -2.0, 1.0, -1.0, 1.0, -1.0]


def gradient(row: LossRow, rho: list[float], coefficients: Mapping[str, float] | None = None) -> list[float]:
    """d objective / d log pi of each token, every token weighing 1."""
    old = torch.tensor(Q, dtype=torch.float64).log()
    logprobs = (old + torch.tensor(rho, dtype=torch.float64).log()).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=torch.tensor(A, dtype=torch.float64),
        loss_mask=torch.ones(len(Q), dtype=torch.bool),
        sample_index=torch.arange(len(Q)),
    )
    low, high = row.clip or (0.2, 0.2)
    given = {"coefficients": coefficients} if coefficients else {}
    loss_terms(row, inputs, torch.ones(len(Q)), clip_low=low, clip_high=high, **given).loss.backward()
    assert logprobs.grad is not None
    return (-logprobs.grad).tolist()


def by_bounds(low: Callable[[float], float], high: Callable[[float], float], a: list[float] | None = None):
    """The slow reference: rho A, 0 for a token that moved with its advantage beyond its bound, one by one."""
    found: list[float] = []
    for q, rho, advantage in zip(Q, RHO, a or A, strict=True):
        gone = (advantage > 0 and rho > high(q)) or (advantage < 0 and rho < low(q))
        found.append(0.0 if gone else rho * advantage)
    return found


NEUTRAL = {"control": 0.0, "zeta": 0.0, "k": 0.0, "sign": 0.0}
ROWS = {
    "kl3": kl3.ROW, "dcpo": dcpo.ROW, "bapo": bapo.ROW, "bapo-half": bapo.HALF, "entropic": entropic.ROW,
    "repo": repo.ROW, "mai_clip": mai_clip.ROW, "entrocraft": entrocraft.ROW,
}  # fmt: skip


@pytest.mark.parametrize("name", list(ROWS))
def test_on_policy_every_row_is_the_plain_policy_gradient(name: str) -> None:
    assert gradient(ROWS[name], [1.0] * len(Q), NEUTRAL) == pytest.approx(A)


def test_kl3_has_the_published_upper_end() -> None:
    assert kl3.upper_end(0.2) == pytest.approx(0.2308, abs=5e-5)  # the paper: about 0.231
    for low in (0.05, 0.2, 0.5):  # both ends at the same rho - 1 - log rho
        ends = (1 - low, 1 + kl3.upper_end(low))
        assert ends[1] - math.log(ends[1]) == pytest.approx(ends[0] - math.log(ends[0]), abs=1e-12)
    with pytest.raises(ValueError, match="clip_low"):
        kl3.upper_end(1.0)
    assert gradient(kl3.ROW, RHO) == pytest.approx(by_bounds(lambda q: 0.8, lambda q: 1.2308))


def test_dcpo_gives_rare_tokens_room_and_common_ones_little() -> None:
    low, high = dcpo.bounds(torch.tensor([0.01, 1.0, 1e-6], dtype=torch.float64), 0.16, 0.2)
    # q = 0.01: 1 - 64 < 0 and sqrt(81) = 9; q = 1: sqrt(0.36) = 0.6 and sqrt(1.8)
    assert low.tolist() == pytest.approx([0.5, 0.8, 0.5])
    assert high.tolist() == pytest.approx([5.0, 0.5 + 0.5 * math.sqrt(1.8), 10.0])
    expected = by_bounds(
        lambda q: 0.5 + 0.5 * math.sqrt(max(1 - 0.64 / q, 0)), lambda q: min(0.5 + 0.5 * math.sqrt(1 + 0.8 / q), 10)
    )
    assert gradient(dcpo.ROW, RHO) == pytest.approx(expected)
    assert expected[2] != 0  # which a clip of 0.28 cuts


def test_bapo_moves_its_bounds_until_right_tokens_have_their_share() -> None:
    # two right at rho 3, three wrong at 1: 2 * 1.2 / (2.4 + 3) = 0.44 at first; half at an upper bound of 1.5
    ratio, advantages = torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    assert bapo.positive_share(ratio, advantages, 0.6, 1.2) == pytest.approx(2.4 / 5.4)
    assert bapo.search(ratio, advantages, 0.4) == (0.6, 1.2)
    assert bapo.search(ratio, advantages, 0.5) == (0.6, 1.5)
    assert bapo.positive_share(ratio, advantages, *bapo.search(ratio, advantages, 0.5)) == pytest.approx(0.5)
    assert bapo.search(ratio, advantages, 0.99) == (0.9, 3.0)  # the ends, where it cannot be had
    assert bapo.positive_share(ratio[:2], advantages[:2], 0.6, 1.2) == 1
    bounds = bapo.search(torch.tensor(RHO), torch.tensor(A), 0.5)
    assert gradient(bapo.HALF, RHO) == pytest.approx(by_bounds(lambda q: bounds[0], lambda q: bounds[1]))


def test_clip_cov_takes_tokens_whose_covariance_lies_between_its_bounds() -> None:
    found = gradient(clip_cov.ROW, [1.0] * len(Q))
    logprobs = [math.log(q) for q in Q]
    means = sum(logprobs) / len(Q), sum(A) / len(Q)
    eligible = [1 < (x - means[0]) * (a - means[1]) < 5 for x, a in zip(logprobs, A, strict=True)]
    assert any(eligible)
    dropped = [x == 0 for x in found]
    assert sum(dropped) == 1  # 0.0002 of eight tokens, one at least
    assert eligible[dropped.index(True)]
    assert found == gradient(clip_cov.ROW, [1.0] * len(Q)), "the draw repeats"


def observed(controller: EntropyController, entropies: list[float], name: str) -> list[float]:
    found: list[float] = []
    for entropy in entropies:
        assert controller.coefficient(entropy) == 0  # no bonus: another actuator
        found.append(controller.coefficients(entropy)[name])  # type: ignore[attr-defined]
        kept = controller.state()
        controller.observe(entropy)
        after = controller.state()
        controller.restore(kept)
        assert controller.state() == kept
        controller.restore(after)
    return found


def test_entropic_controls_by_the_error_and_its_sum() -> None:
    entropies = [0.5, 0.3, 0.1, 5.0, -5.0]
    # e = 0.3, 0.1, -0.1, ...; the sums before them are 0, 0.3, 0.4
    expected = [0.3, 0.1 + 0.1 * 0.3, -0.1 + 0.1 * 0.4, 1.0, -1.0]
    assert observed(entropic.make(ControllerSettings(target=0.2, step=0.1)), entropies, "control") == pytest.approx(
        expected
    )
    found = gradient(entropic.ROW, RHO, {"control": 0.5})
    usual = by_bounds(lambda q: 0.8, lambda q: 1.2)
    # above 0.95: the two at 0.97 * 1.02, and neither of those at 0.9; 1 + 0.5 for the right one, 1 - 0.5 for the other
    assert found == pytest.approx([*usual[:6], 1.02 * 1.5, -1.02 * 0.5])


def test_the_integral_takes_a_steady_error_away_that_the_proportion_leaves() -> None:
    """The paper: off-policy, with a drift of the entropy, proportional control alone keeps an error."""

    def settled(k_i: float) -> float:
        controller, entropy = entropic.make(ControllerSettings(target=0.2, step=k_i)), 0.2
        for _ in range(4000):
            control = controller.coefficients(entropy)["control"]
            controller.observe(entropy)
            entropy += -0.02 - 0.2 * control  # too much entropy lowers it; the drift does too
        return entropy

    assert settled(0.0) == pytest.approx(0.2 - 0.02 / 0.2)
    assert settled(0.01) == pytest.approx(0.2, abs=1e-6)


def test_repo_raises_rare_right_tokens_and_spares_rare_wrong_ones() -> None:
    advantages, logprobs = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -20.0])
    assert repo.rescaled(advantages, logprobs, 0.1).tolist() == pytest.approx([1.2, -0.8, 0.0])
    scaled = [a * max(0.0, 1 - math.copysign(0.1, a) * math.log(q * rho)) for q, rho, a in zip(Q, RHO, A, strict=True)]
    expected = by_bounds(lambda q: 0.8, lambda q: 1.2, scaled)
    assert gradient(repo.ROW, RHO, {"zeta": 0.1}) == pytest.approx(expected)
    # the first entropy is the target; below it zeta doubles, above it it halves, within its bounds
    zetas = observed(repo.make(ControllerSettings(maximum=0.03)), [0.5, 0.4, 0.4, 0.4, 0.6], "zeta")
    assert zetas == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.03])


def test_mai_clip_opens_the_upper_bound_below_the_target() -> None:
    ks = observed(mai_clip.make(ControllerSettings()), [0.2, 0.2, 0.3, 0.4, *[0.1] * 12], "k")
    assert ks[:5] == [0.0, 0.25, 0.5, 0.5, 0.25]
    assert ks[-1] == 2.5  # k_max
    for k in (0.0, 2.2):  # the token at rho 4.5 is beyond 2.5 and within 4.7
        expected = by_bounds(lambda q: 0.4, lambda q, k=k: 2.5 + k)
        assert gradient(mai_clip.ROW, RHO, {"k": k}) == pytest.approx(expected)


def test_aents_bonus_leaves_out_unlikely_words_and_its_coefficient_moves_outside_of_its_bounds() -> None:
    # two good words and eight poor ones: a step along the usual bonus gives the poor ones more than it leaves the good
    hidden, target = torch.ones(1, 1), torch.tensor([0])
    gained: dict[float, float] = {}
    for clamp in (0.0, 0.8):
        weight = torch.tensor([3.0, 2.0, *[-1.0] * 8])[:, None].requires_grad_()
        _, entropy = logprobs_and_entropies(hidden, weight, target, HeadOptions(entropy_clamp=clamp))
        (step,) = torch.autograd.grad(entropy.sum(), weight)
        before, after = (w.detach()[:, 0].softmax(0)[2:].sum() for w in (weight, weight + step))
        gained[clamp] = float(after - before)
    assert gained[0.0] > 4 * abs(gained[0.8]), gained
    controller = aent.make(ControllerSettings(target=0.3, step=0.01))
    paid: list[float] = []
    for entropy in (0.05, 0.3, 0.9):
        controller.observe(entropy)
        paid.append(controller.coefficient(entropy))
    assert paid == pytest.approx([0.0015, 0.0015, 1e-5])  # half a tenth below 0.1; between; 0.4 above 0.5, to the floor
    kept = controller.state()
    controller.observe(0.0)
    controller.restore(kept)
    assert controller.coefficient(0.0) == 1e-5


def test_entrocraft_keeps_one_sign_outside_of_its_band() -> None:
    signs = observed(entrocraft.make(ControllerSettings(target=0.4, step=0.1)), [0.51, 0.49, 0.31, 0.29], "sign")
    assert signs == [1.0, 0.0, 0.0, -1.0]
    usual = by_bounds(lambda q: 0.8, lambda q: 1.2)
    right, wrong = (gradient(entrocraft.ROW, RHO, {"sign": sign}) for sign in (1.0, -1.0))
    assert right == pytest.approx([x if a > 0 else 0.0 for x, a in zip(usual, A, strict=True)])
    assert wrong == pytest.approx([x if a < 0 else 0.0 for x, a in zip(usual, A, strict=True)])


def test_masked_weights_are_products_over_a_response() -> None:
    gaps = torch.tensor([0.5, 0.5, 0.7, 0.6, -0.1])  # exp(1.0), exp(1.3), exp(-0.1)
    index = torch.tensor([0, 0, 1, 1, 2])
    inputs = CorrectionInputs(old_logprobs=gaps - 1, sampler_logprobs=torch.full((5,), -1.0), cap=3.0)
    weights = seq_mis.of_responses(inputs._replace(sample_index=index))
    assert weights.tolist() == pytest.approx([math.e, math.e, 0.0, 0.0, math.exp(-0.1)])
    assert needs_of(seq_mis.of_responses) == ("old_logprobs",)
    assert correction_of("studies.race.seq_mis:of_responses").needs == ("old_logprobs",)


def of_groups(*groups: list[float]) -> AdvantageInputs:
    rewards = [r for group in groups for r in group]
    index = [i for i, group in enumerate(groups) for _ in group]
    every = torch.ones(len(rewards), dtype=torch.bool)
    return AdvantageInputs(
        rewards_N=torch.tensor(rewards), group_index_N=torch.tensor(index), counted_N=every, truncated_N=~every,
        lengths_N=torch.ones(len(rewards)), mask="none", normalise_std=True, k=4, groups=(),
    )  # fmt: skip


def test_qae_reinforces_successes_of_hard_groups_and_punishes_failures_of_easy_ones() -> None:
    # K = 0.4: hard up to a pass rate of 0.6, which three of five are
    hard, easy = [1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]
    found = qae.k40(of_groups(hard, easy, [1.0, 1.0])).tolist()
    deviations = math.sqrt(0.3) + 1e-6, math.sqrt(0.2) + 1e-6
    assert found == pytest.approx([1 / deviations[0]] * 3 + [0.0] * 6 + [-1 / deviations[1]] + [0.0, 0.0])
    # between 1 - K and 1 is easy: of K = 0.6 these three of five are
    assert qae.k60(of_groups(hard)).tolist() == pytest.approx([0.0] * 3 + [-1 / deviations[0]] * 2)


def test_trl_pays_by_the_step_before_and_rises_at_the_target() -> None:
    controller, paid, held = trl_adaptive.make(ControllerSettings(step=0.1, maximum=0.25)), [], []
    for entropy in [0.1, 0.2, 0.3, 0.1, 0.1, 0.1]:
        paid.append(controller.coefficient(entropy))
        controller.observe(entropy)
        held.append(controller.c)
    assert held == pytest.approx([0.1, 0.2, 0.1, 0.2, 0.25, 0.25])
    assert paid == pytest.approx([0.0, 0.1, 0.2, 0.0, 0.2, 0.25])  # after 0.3 nothing is paid


def test_a_method_is_also_named_by_its_file() -> None:
    root = Path(__file__).parents[3]
    for file in sorted((root / "studies" / "race").glob("*.py")):
        for key, name in re.findall(r"--set ([\w.]+)=(studies/race/\w+\.py:\w+)", file.read_text()):
            load_train_recipe(root / "src/magicrl/recipes/tiny.toml", [f"{key}={root / name}"], root)
