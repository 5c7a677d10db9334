"""``model.exact``: engine and learner give the same bits whatever else is computed with a token.

``python tests/unit/rollout/test_exact.py 1000`` tries a thousand random packings.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import SIZES, request, train_sample
from cpu_marks import served
from numpy.random import Generator
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from magicrl.config.model_schema import ModelConfig
from magicrl.models import cpu_kernels, cpu_rows, decoding, exact
from magicrl.models.attention import EXACT, attend_rows, supports_row
from magicrl.models.cpu_rows import CpuRow
from magicrl.models.exact import ExactLinear, attend_exactly, exact_product, multiplies_exactly, silu
from magicrl.models.linear import use_gradient_sums
from magicrl.models.memory_efficient import gated_linear
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.scorer import PolicyScorer
from magicrl.records import RolloutGroup, TrainSample
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine

WORDS, CONTEXT, DECODED = 40, 512, 24
LARGE = SIZES | {"max_position_embeddings": CONTEXT, "head_dim": 16}
CONFIGS: dict[str, Any] = {
    "llama-grouped": LlamaConfig(**LARGE, tie_word_embeddings=False),
    # heads of 32 and more have kernels
    "llama-tied": LlamaConfig(
        **LARGE | {"num_key_value_heads": 4, "intermediate_size": 50, "head_dim": 32}, tie_word_embeddings=True
    ),
    "llama-one-head": LlamaConfig(**LARGE | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}),
    # many heads for each key head, and a vocabulary of no round number
    "qwen3": Qwen3Config(**LARGE | {"num_key_value_heads": 1, "vocab_size": 1003, "head_dim": 64}),
    # in bfloat16 its products have kernels too
    "llama-wide": LlamaConfig(
        **LARGE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 1003}
    ),
    # and here all but one of each layer
    "llama-partly": LlamaConfig(**LARGE | {"hidden_size": 64, "intermediate_size": 50, "head_dim": 32}),
}


def model_of(kind: str, dtype: torch.dtype, seed: int) -> Any:
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[kind]), attn_implementation=ATTENTION_NAME)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
                else:
                    parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def engine_of(model: Any, max_rows: int, *, exact: bool = True) -> InProcessEngine:
    return InProcessEngine(
        model,
        EngineSettings(model="", max_rows=max_rows, memory_limit_mb=256, exact=exact),
        end_tokens=frozenset({0}),
        decode=lambda tokens: " ".join(map(str, tokens)),
        valid_vocab=WORDS,
        max_context=CONTEXT,
    )


def groups_of(engine: InProcessEngine, rng: Generator, tau: float) -> list[RolloutGroup]:
    lengths = rng.choice([1, 2, 9, 63, 64, 65, 127, 130, 200], size=rng.integers(1, 6))
    requests = [
        request(
            draw,
            rng.integers(1, WORDS, length),
            size=int(rng.integers(1, 7)),
            limit=int(rng.choice([1, 3, DECODED, 4 * DECODED])),
            temperature=tau,
            seed=int(rng.integers(1000)),
        )
        for draw, length in enumerate(lengths)
    ]
    engine.submit(requests)
    return list(engine.finished())


def samples_of(groups: list[RolloutGroup], rng: Generator) -> tuple[list[TrainSample], list[Any]]:
    """Return samples in a random order, and each one's entropies."""
    found = [
        (train_sample(group.request.prompt_tokens, c.tokens, sampler_logprobs=c.sampler_logprobs), c.sampler_entropies)
        for group in groups
        for c in group.completions
    ]
    order = [int(i) for i in rng.permutation(len(found))[: rng.integers(1, len(found) + 1)]]
    return [found[i][0] for i in order], [found[i][1] for i in order]


def differing(seed: int) -> int:
    """Return log-probs and entropies that differ between an engine and a scorer of one random case."""
    rng = np.random.default_rng(seed)
    kind, dtype = list(CONFIGS)[seed % len(CONFIGS)], (torch.float32, torch.bfloat16)[seed // len(CONFIGS) % 2]
    tau = float(rng.choice([1.0, 0.6, 0.9]))
    groups = groups_of(engine_of(model_of(kind, dtype, seed), int(rng.integers(1, 20))), rng, tau)
    samples, entropies = samples_of(groups, rng)
    scorer = PolicyScorer(
        model_of(kind, dtype, seed),
        ModelConfig(
            micro_batch_tokens=int(rng.choice([1, 100, 500, 4000])),
            head_chunk_tokens=int(rng.choice([1, 13, 64, 1024])),
            share_prompts=bool(rng.integers(2)),
            exact=True,
        ),
        valid_vocab=WORDS,
    )
    scored = scorer.score(samples, tau)
    pairs = [(sample.sampler_logprobs, found) for sample, found in zip(samples, scored[0], strict=True)]
    pairs += list(zip(entropies, scored[1], strict=True))
    return sum(int((given != found).sum()) for given, found in pairs)


@pytest.mark.parametrize("seed", range(48))
def test_no_bit_depends_on_what_is_computed_beside_a_token(seed: int) -> None:
    assert differing(seed) == 0


@pytest.mark.parametrize("seed", range(12))
def test_nor_without_kernels(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    assert differing(seed) == 0


def test_without_it_nearly_every_packing_shows() -> None:
    rng = np.random.default_rng(0)
    model = model_of("llama-grouped", torch.float32, 0)
    samples, _ = samples_of(groups_of(engine_of(model, 7, exact=False), rng, 1.0), rng)
    found, _ = PolicyScorer(model_of("llama-grouped", torch.float32, 0), valid_vocab=WORDS).score(samples, 1.0)
    assert any((sample.sampler_logprobs != one).any() for sample, one in zip(samples, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exact", [True, False])
def test_a_kernel_attends_where_there_are_kernels(
    exact: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    kernel = cpu_kernels.DecodeKernel
    for owner, name in ((kernel, "__call__"), (kernel, "run_layers"), (cpu_rows, "attend_row")):
        original: Any = getattr(owner, name)

        def attend(*given: Any, original: Any = original, name: str = name, **options: Any) -> Any:
            asked.append("exactly" if name == "attend_row" and given[-1] is True else name)
            return original(*given, **options)

        monkeypatch.setattr(owner, name, attend)
    engine = engine_of(model_of("llama-one-head", dtype, 0), 4, exact=exact)
    engine.submit([request(0, [5, 7, 9], size=2)])
    assert list(engine.finished())
    if cpu_kernels.missing() is None:
        # One of them attends in decoding: all layers at once need magicrl's products.
        assert {"__call__", "run_layers"} & set(asked)
        assert ("exactly" in asked) == exact
    else:
        assert not asked


def test_what_is_in_flight_goes_on_with_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    asked = [request(d, rng.integers(1, WORDS, n), size=3, limit=90) for d, n in enumerate((70, 5, 131))]

    def arrays(groups: list[RolloutGroup]) -> list[Any]:
        ordered = sorted(groups, key=lambda g: g.request.draw)
        return [a.tolist() for g in ordered for c in g.completions for a in (c.tokens, c.sampler_logprobs)]

    whole = engine_of(model_of("llama-grouped", torch.bfloat16, 0), 4)
    whole.submit(asked)
    expected = arrays(list(whole.finished()))
    stopped = engine_of(model_of("llama-grouped", torch.bfloat16, 0), 4)
    stopped.submit(asked)
    for _ in range(75):
        stopped._advance()  # pyright: ignore[reportPrivateUsage]
    other = engine_of(model_of("llama-grouped", torch.bfloat16, 0), 4)
    other.resume(stopped.snapshot(), asked)
    assert arrays(list(other.finished())) == expected


@pytest.mark.parametrize(
    ("dtype", "dim", "most"), [(torch.float64, 16, 1e-12), (torch.float32, 32, 1e-5), (torch.bfloat16, 32, 0.03)]
)
@pytest.mark.parametrize(("first", "width"), [(0, 5), (70, 9), (0, 70)])
def test_attention_and_its_gradient_are_plain_ones(
    first: int, width: int, dtype: torch.dtype, dim: int, most: float
) -> None:
    """In float64 torch attends, in the others a kernel where there is one."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, width, 4, dim), (2, first + width, 2, dim), (2, first + width, 2, dim))
    given = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
    wide = [x.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in given]
    mask = torch.arange(first + width) <= first + torch.arange(width)[:, None]
    rows = [x.flatten(0, 1).transpose(0, 1)[None] for x in given]
    if supports_row(rows[0], rows[2], EXACT, first + width):
        row = CpuRow([width] * 2, [first + width] * 2)
        ours = row.attend(rows[0], rows[1], rows[2], 0.3, exact=True)[0].unflatten(0, (2, -1))
    else:
        ours = attend_exactly(*given, 0.3)
    plain = attend_rows(*wide, 0.3, mask=mask)
    pull = torch.randn(ours.shape, generator=generator, dtype=dtype)
    torch.testing.assert_close(ours.to(plain.dtype), plain, atol=most, rtol=0)
    found, expected = torch.autograd.grad(ours, given, pull), torch.autograd.grad(plain, wide, pull.to(plain.dtype))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.to(other.dtype), other, atol=most, rtol=most)


@pytest.mark.parametrize(("dtype", "product"), [(torch.bfloat16, "multiply"), (torch.float32, "multiply_rows")])
@pytest.mark.parametrize(("kind", "layers", "rows"), [("llama-wide", 7, 4), ("llama-partly", 6, 16)])
def test_the_learner_multiplies_as_the_sampler_does(
    kind: str, layers: int, rows: int, dtype: torch.dtype, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's products often have the same bits, so that a comparison of results does not show them."""
    if not multiplies_exactly(torch.zeros(32, 32, dtype=dtype)):
        pytest.skip(f"torch multiplies {dtype} on this processor")
    model = model_of(kind, dtype, 0)
    monkeypatch.setattr("magicrl.models.products.widens_bfloat16", lambda: True)
    use_gradient_sums(model)  # as in a model that was loaded on such a CPU
    monkeypatch.undo()
    scorer = PolicyScorer(model, ModelConfig(exact=True), valid_vocab=WORDS)
    spy = Mock(wraps=getattr(cpu_kernels, product))
    monkeypatch.setattr(cpu_kernels, product, spy)
    scorer.score([train_sample([3, 4, 5], [7, 8])], 1.0)
    assert spy.call_count == layers * model.config.num_hidden_layers + 1
    assert len(spy.call_args_list[0].args[0]) == rows
    engine, sampled = engine_of(model, 4), Mock(wraps=getattr(cpu_kernels, product))
    monkeypatch.setattr(decoding, product, sampled)
    engine.submit([request(0, [3, 4, 5], limit=1)])
    assert list(engine.finished())
    joined = 3  # queries, keys and values are one product, gate and up another
    assert sampled.call_count == (layers - joined) * model.config.num_hidden_layers + 1


@served
@pytest.mark.parametrize("gated", [False, True])
def test_a_products_gradients_are_plain_ones(gated: bool) -> None:
    """Check a single layer, and one behind a gate, which the backward pass computes again."""
    given = [torch.randn(s).bfloat16().requires_grad_() for s in ((2, 5, 64), (2, 5, 64), (40, 64))]
    wide = [x.detach().float().requires_grad_() for x in given]
    if gated:
        ours = gated_linear(*given, torch.nn.SiLU(), exact_product)
        plain = F.linear(F.silu(wide[0]) * wide[1], wide[2])
    else:
        layer = torch.nn.Linear(64, 40, bias=False)
        layer.weight, layer.__class__ = torch.nn.Parameter(given[2].detach()), ExactLinear
        ours, plain = layer(given[0]), F.linear(wide[0], wide[2])
        given, wide = [given[0], layer.weight], [wide[0], wide[2]]
    torch.testing.assert_close(ours.float(), plain, rtol=0.03, atol=0.2)
    pull = torch.randn(ours.shape).bfloat16()
    found, expected = torch.autograd.grad(ours, given, pull), torch.autograd.grad(plain, wide, pull.float())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.03, atol=0.2)


def test_the_activation_and_its_gradient_are_plain_ones() -> None:
    x = torch.tensor([-200.0, -90.0, -3.0, 0.0, 3.0, 200.0], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(silu(x), torch.nn.functional.silu(x))
    found, expected = (torch.autograd.grad(f(x).sum(), x)[0] for f in (silu, torch.nn.functional.silu))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Qwen2Config(**LARGE), "this model is a Qwen2ForCausalLM"),
        (LlamaConfig(**LARGE, attention_bias=True), "a layer has a bias"),
        (LlamaConfig(**LARGE, hidden_act="gelu"), "activation 'gelu'"),
        (LlamaConfig(**LARGE | {"head_dim": 8}), "narrower than 16"),
        (Qwen3Config(**LARGE, use_sliding_window=True, sliding_window=8, max_window_layers=0), "sliding window"),
    ],
)
def test_what_is_not_proven_is_refused_by_name(config: Any, told: str) -> None:
    register_attention()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    with pytest.raises(ValueError, match=told):
        PolicyScorer(model, ModelConfig(exact=True))
    with pytest.raises(ValueError, match=told):
        engine_of(model, 2)


def test_a_machine_whose_products_depend_on_their_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "ROWS", 1)
    monkeypatch.setattr(exact, "_FEW", 1)
    with pytest.raises(ValueError, match="depend on the other rows in a product with a weight of"):
        exact.use_exact(model_of("llama-tied", torch.float32, 0))


@pytest.mark.slow
def test_nor_with_two_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert [seed for seed in range(100, 110) if differing(seed)] == []
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    cases = range(int(sys.argv[1]))
    wrong = [seed for seed in cases if differing(seed)]
    sys.stdout.write(f"{len(cases)} packings, {torch.get_num_threads()} threads; with a bit that differs: {wrong}\n")
    sys.exit(bool(wrong))
