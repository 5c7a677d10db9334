"""Windows, chunks, capped scores and sinks: by hand, and compared with the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magicrl.models.attention import ScoreRules, attend_rows, rules_of
from magicrl.models.packing import PackedContext


def test_what_a_query_sees() -> None:
    keys = np.arange(6)
    assert ScoreRules(window=2).seen(4, keys).tolist() == [False, False, False, True, True, False]
    assert ScoreRules(chunk=3).seen(4, keys).tolist() == [False, False, False, True, True, False]
    assert ScoreRules(chunk=3).seen(3, keys).tolist() == [False, False, False, True, False, False]
    assert ScoreRules().seen(4, keys).tolist() == [True] * 5 + [False]
    assert [ScoreRules(window=5).cuts(n) for n in (5, 6)] == [False, True]


def test_a_sink_and_a_cap_by_hand() -> None:
    """Use two keys of scores 0 and ln 3 with values 0 and 1, and the second token's output."""
    q, k = torch.tensor([0.0, 1.0]), torch.tensor([0.0, np.log(3.0)])
    v = torch.tensor([0.0, 1.0])
    q, k, v = (x.view(1, 2, 1, 1).double() for x in (q, k, v))
    assert float(attend_rows(q, k, v, 1.0)[0, 1]) == pytest.approx(3 / 4)
    # a sink of score ln 4 takes 4 of 1 + 3 + 4
    sinks = ScoreRules(sinks=torch.tensor([np.log(4.0)]))
    assert float(attend_rows(q, k, v, 1.0, sinks)[0, 1]) == pytest.approx(3 / 8)
    capped = float(attend_rows(q, k, v, 1.0, ScoreRules(softcap=0.5))[0, 1])
    weight = np.exp(0.5 * np.tanh(np.log(3.0) / 0.5))
    assert capped == pytest.approx(weight / (1 + weight))
    assert float(attend_rows(q, k, v, 1.0, ScoreRules(window=1))[0, 1]) == pytest.approx(1.0)


def written_out(q: Tensor, k: Tensor, v: Tensor, scaling: float, rules: ScoreRules) -> Tensor:
    heads = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(heads, 2), v.repeat_interleave(heads, 2)))
    scores = q @ k.transpose(2, 3) * scaling
    if rules.softcap is not None:
        scores = rules.softcap * (scores / rules.softcap).tanh()
    place = torch.arange(q.shape[2])
    scores = scores.masked_fill(~rules.seen(place[:, None], place), -torch.inf)
    if rules.sinks is not None:
        scores = torch.cat((scores, rules.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : q.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize(
    "rules",
    [
        ScoreRules(window=3),
        ScoreRules(chunk=4),
        ScoreRules(softcap=0.7),
        ScoreRules(softcap=0.7, window=3),
        ScoreRules(sinks=torch.linspace(-1, 2, 4)),
        ScoreRules(sinks=torch.linspace(-1, 2, 4), window=3),
    ],
    ids=repr,
)
def test_values_and_gradients_are_those_of_the_formula(rules: ScoreRules) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, h, 16, d, generator=generator, dtype=torch.float64) for h, d in ((4, 6), (2, 6), (2, 5))]
    lengths = [5, 9, 2]
    results: list[list[Tensor]] = []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in given]
        made = replace(rules, sinks=rules.sinks.double().requires_grad_()) if rules.sinks is not None else rules
        if ours:
            out = PackedContext(lengths).attend(0, *leaves, 0.3, made)[0]
        else:
            rows = zip(*(x.transpose(1, 2).split(lengths, 1) for x in leaves), strict=True)
            out = torch.cat([written_out(*row, 0.3, made) for row in rows], 1)[0]
        wanted = leaves if made.sinks is None else [*leaves, made.sinks]
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).cos()
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), wanted)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Layer(torch.nn.Module):
    layer_idx = 1

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.config = type("Config", (), {"layer_types": kinds})


def test_the_rules_of_a_layer() -> None:
    window = Layer("full_attention", "sliding_attention")
    assert rules_of(window, 8, {}) == ScoreRules(window=8)
    assert rules_of(window, 8, {"sliding_window": 4}) == ScoreRules(window=4)
    assert rules_of(Layer("full_attention", "chunked_attention"), 8, {}) == ScoreRules(chunk=8)
    assert rules_of(window, None, {"softcap": 3.0, "position_ids": 1}) == ScoreRules(softcap=3.0)


@pytest.mark.parametrize(
    ("mask", "given", "said"),
    [
        (torch.zeros(1), {}, "Layer makes an attention mask of its own"),
        (None, {"position_bias": torch.zeros(1)}, r"attention with position_bias \(Layer\)"),
        (None, {"softcap": 1.0, "s_aux": torch.zeros(1)}, "Layer caps its scores and has sinks"),
    ],
)
def test_what_is_not_known_is_refused_by_the_layers_name(mask: object, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rules_of(Layer("full_attention", "full_attention"), mask, given)
