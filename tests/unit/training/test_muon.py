"""Muon for the matrices of the layers: the optimizer of each parameter, the update, state, and rejected settings."""

from __future__ import annotations

import pytest
import torch

from magicrl.config.model_schema import OptimizerConfig
from magicrl.training.learner import MasterOptimizer, muon_matrices

SHAPES = {
    "model.embed_tokens.weight": (11, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 6),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (11, 4),
}
MATRICES = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"}
CONFIG = OptimizerConfig(kind="muon", momentum=0.9, weight_decay=0.1, max_grad_norm=100.0)


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def step(optimizer: MasterOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for gradient in optimizer.gradients().values():
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
    optimizer.step(1e-2, optimizer.gradient_norm())


def test_matrices_of_layers_are_muons_and_the_rest_is_adamws() -> None:
    assert muon_matrices(parameters()) == MATRICES
    trained, plain = parameters(), parameters()
    muon = MasterOptimizer(trained, CONFIG, torch.float32)
    adamw = MasterOptimizer(plain, CONFIG.model_copy(update={"kind": "adamw"}), torch.float32)
    step(muon, 0)
    step(adamw, 0)
    assert {name for name in SHAPES if not torch.equal(trained[name], plain[name])} == MATRICES
    state = muon.state()
    assert {name.partition("/")[2] for name in state if name.startswith("momentum_buffer/")} == MATRICES
    assert {name.partition("/")[2] for name in state if name.startswith("exp_avg/")} == SHAPES.keys() - MATRICES


def test_the_update_is_orthogonal_and_as_large_as_adamws() -> None:
    trained = parameters()
    before = {name: value.detach().clone() for name, value in trained.items()}
    step(MasterOptimizer(trained, CONFIG, torch.float32), 0)
    for name in MATRICES:
        rows, columns = SHAPES[name]
        # W <- W (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) O, with O nearly orthogonal.
        moved = (before[name] * (1 - 1e-2 * 0.1) - trained[name].detach()) / (1e-2 * 0.2 * max(rows, columns) ** 0.5)
        values = torch.linalg.svdvals(moved)
        assert bool(((values > 0.6) & (values < 1.3)).all()), name


def test_a_restored_optimizer_makes_the_same_steps() -> None:
    one = MasterOptimizer(first := parameters(), CONFIG, torch.float32)
    step(one, 0)
    state = {name: value.clone() if torch.is_tensor(value) else value for name, value in one.state().items()}
    other = MasterOptimizer(second := parameters(1), CONFIG, torch.float32)
    other.restore(state)
    for number in (1, 2):
        step(one, number)
        step(other, number)
    assert all(torch.equal(first[name], second[name]) for name in SHAPES)
    adamw = MasterOptimizer(parameters(), CONFIG.model_copy(update={"kind": "adamw"}), torch.float32)
    with pytest.raises(ValueError, match="does not belong to this model"):
        adamw.restore(state)


def test_adapters_may_be_matrices_only() -> None:
    lora = {"layers.0.q_proj.lora_A.weight": torch.nn.Parameter(torch.ones(2, 4))}
    optimizer = MasterOptimizer(lora, CONFIG, torch.float32)
    step(optimizer, 0)
    assert not torch.equal(next(iter(lora.values())), torch.ones(2, 4))


def test_a_model_without_such_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="trains no matrix in its decoder layers"):
        muon_matrices({"lm_head.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)})
