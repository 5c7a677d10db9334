"""Methods of the race's final compared with values by hand, a published property, and a slow gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from magicrl.algorithms.entropy import ControllerSettings, EntropyController
from magicrl.algorithms.loss_terms import loss_terms
from magicrl.algorithms.losses import LossRow
from magicrl.algorithms.token_weights import LossInputs
from magicrl.config.loader import load_train_recipe
from studies.race import kl3, repo

# one response per token: old probabilities, ratios, advantages
Q = [0.5, 0.5, 0.01, 0.01, 0.9, 0.9, 0.97, 0.97]
RHO = [1.1, 0.7, 4.5, 0.45, 1.05, 0.4, 1.02, 1.02]
A = [1.0, -1.0, 2.0, -2.0, 1.0, -1.0, 1.0, -1.0]


def gradient(row: LossRow, rho: list[float], coefficients: Mapping[str, float] | None = None) -> list[float]:
    """Return d objective / d log pi of each token, every token with weight 1."""
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
    inputs = inputs._replace(clip_low=low, clip_high=high, coefficients=coefficients or {})
    loss_terms(row, inputs, torch.ones(len(Q))).loss.backward()
    assert logprobs.grad is not None
    return (-logprobs.grad).tolist()


def by_bounds(low: Callable[[float], float], high: Callable[[float], float], a: list[float] | None = None):
    """Compute the slow reference: rho A, 0 for a token that moved with its advantage beyond its bound, one by one."""
    found: list[float] = []
    for q, rho, advantage in zip(Q, RHO, a or A, strict=True):
        gone = (advantage > 0 and rho > high(q)) or (advantage < 0 and rho < low(q))
        found.append(0.0 if gone else rho * advantage)
    return found


ROWS = {"kl3": kl3.ROW, "repo": repo.ROW}


@pytest.mark.parametrize("name", list(ROWS))
def test_on_policy_every_row_is_the_plain_policy_gradient(name: str) -> None:
    assert gradient(ROWS[name], [1.0] * len(Q), {"zeta": 0.0}) == pytest.approx(A)


def test_kl3_has_the_published_upper_end() -> None:
    assert kl3.upper_end(0.2) == pytest.approx(0.2308, abs=5e-5)  # the paper: about 0.231
    for low in (0.05, 0.2, 0.5):  # both ends have the same rho - 1 - log rho
        ends = (1 - low, 1 + kl3.upper_end(low))
        assert ends[1] - math.log(ends[1]) == pytest.approx(ends[0] - math.log(ends[0]), abs=1e-12)
    with pytest.raises(ValueError, match="clip_low"):
        kl3.upper_end(1.0)
    assert gradient(kl3.ROW, RHO) == pytest.approx(by_bounds(lambda q: 0.8, lambda q: 1.2308))


def observed(controller: EntropyController, entropies: list[float], name: str) -> list[float]:
    found: list[float] = []
    for entropy in entropies:
        assert controller.coefficient(entropy) == 0  # no bonus: another method controls entropy
        found.append(controller.coefficients(entropy)[name])  # type: ignore[attr-defined]
        kept = controller.state()
        controller.observe(entropy)
        after = controller.state()
        controller.restore(kept)
        assert controller.state() == kept
        controller.restore(after)
    return found


def test_repo_raises_rare_right_tokens_and_spares_rare_wrong_ones() -> None:
    advantages, logprobs = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -20.0])
    assert repo.rescaled(advantages, logprobs, 0.1).tolist() == pytest.approx([1.2, -0.8, 0.0])
    scaled = [a * max(0.0, 1 - math.copysign(0.1, a) * math.log(q * rho)) for q, rho, a in zip(Q, RHO, A, strict=True)]
    expected = by_bounds(lambda q: 0.8, lambda q: 1.2, scaled)
    assert gradient(repo.ROW, RHO, {"zeta": 0.1}) == pytest.approx(expected)
    # the first entropy is the target; below it zeta doubles, above it it halves, within its bounds
    zetas = observed(repo.make(ControllerSettings(maximum=0.03)), [0.5, 0.4, 0.4, 0.4, 0.6], "zeta")
    assert zetas == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.03])


def test_a_method_is_also_named_by_its_file() -> None:
    root = Path(__file__).parents[3]
    for file in sorted((root / "studies" / "race").glob("*.py")):
        for key, name in re.findall(r"--set ([\w.]+)=(studies/race/\w+\.py:\w+)", file.read_text()):
            load_train_recipe(root / "src/magicrl/recipes/tiny.toml", [f"{key}={root / name}"], root)
