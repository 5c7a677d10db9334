"""The engine compared with plain transformers: log-probs and entropies, greedy decoding, batches, ends and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from magicrl.models.kv_cache import Sharing
from magicrl.records import FinishReason, RolloutGroup, RolloutRequest
from magicrl.rollout.in_process import InProcessEngine
from magicrl.rollout.protocol import RolloutEngine

KINDS = ("llama", "llama-tied", "qwen2-bias", "qwen3-qknorm", "gemma", "gemma2", "gemma3")
Make = Callable[..., Any]


def drain(engine: InProcessEngine, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
    """Return all groups, in the order of their requests."""
    engine.submit(requests)
    return sorted(engine.finished(), key=lambda g: g.request.draw)


def tokens_of(groups: Sequence[RolloutGroup]) -> list[list[list[int]]]:
    return [[c.tokens.tolist() for c in g.completions] for g in groups]


@torch.no_grad()
def reference_distribution(
    model: Any, request: RolloutRequest, tokens: Sequence[int], tau: float, valid: int
) -> torch.Tensor:
    """Return log-probabilities ``[T, valid]`` of every response position by one full forward pass."""
    ids = torch.tensor([[*request.prompt_tokens.tolist(), *tokens]])
    logits = model(input_ids=ids).logits[0, len(request.prompt_tokens) - 1 : -1, :valid]
    return torch.log_softmax(logits / tau, dim=-1)


def largest_errors(model: Any, groups: Sequence[RolloutGroup], tau: float, valid: int = 40) -> tuple[float, float]:
    """Return the largest error of a sampler log-prob and of an entropy over all completions."""
    worst = [0.0, 0.0]
    for group in groups:
        for completion in group.completions:
            tokens = torch.from_numpy(completion.tokens.astype(np.int64))
            assert completion.sampler_entropies is not None
            expected = reference_distribution(model, group.request, tokens.tolist(), tau, valid).double()
            logprobs = expected.gather(1, tokens[:, None])[:, 0].numpy()
            entropies = -(expected.exp() * expected).sum(1).numpy()
            worst[0] = max(worst[0], float(np.abs(logprobs - completion.sampler_logprobs).max()))
            worst[1] = max(worst[1], float(np.abs(entropies - completion.sampler_entropies).max()))
    return worst[0], worst[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 5e-7), (torch.float32, 1e-4)])
@pytest.mark.parametrize("tau", [1.0, 0.6])
def test_logprobs_and_entropies_equal_a_full_forward(
    make_reference: Make,
    make_engine: Make,
    make_requests: Make,
    kind: str,
    dtype: torch.dtype,
    bound: float,
    tau: float,
) -> None:
    """The records hold float32, so in float64 only their rounding remains (values up to 8: 2.4e-7)."""
    model = make_reference(kind, dtype)
    groups = drain(make_engine(model, end_tokens=frozenset({3, 8}), max_rows=7), make_requests(temperature=tau))
    assert max(largest_errors(model, groups, tau)) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(make_reference: Make, make_engine: Make, make_requests: Make, kind: str) -> None:
    model = make_reference(kind)
    requests = make_requests(temperature=0.0, group_size=2)
    for group in drain(make_engine(model), requests):
        prompt = torch.from_numpy(group.request.prompt_tokens.astype(np.int64))[None]
        with torch.no_grad():
            output = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
        for completion in group.completions:
            assert completion.tokens.tolist() == output[0, prompt.shape[1] :].tolist()
    assert max(largest_errors(model, drain(make_engine(model), requests), 1.0)) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "qwen3-qknorm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_do_not_depend_on_the_batch_size(
    make_reference: Make, make_engine: Make, make_requests: Make, kind: str, dtype: torch.dtype
) -> None:
    model = make_reference(kind, dtype)
    requests = make_requests(count=8, group_size=3, limit=20)
    ends = frozenset({1, 2, 3, 4})
    results = [tokens_of(drain(make_engine(model, end_tokens=ends, max_rows=n), requests)) for n in (1, 8, 64)]
    assert results[0] == results[1] == results[2]
    lengths = {len(tokens) for group in results[0] for tokens in group}
    assert len(lengths) > 5, "the test wants responses of many lengths"


def test_two_runs_are_equal_bit_for_bit(make_reference: Make, make_engine: Make, make_requests: Make) -> None:
    model = make_reference("llama", torch.float32)
    runs = [
        drain(make_engine(model, end_tokens=frozenset({1, 2, 3}), max_rows=6), make_requests(count=8, limit=25))
        for _ in range(2)
    ]
    assert_equal_bits(*runs)


def assert_equal_bits(first: Sequence[RolloutGroup], second: Sequence[RolloutGroup]) -> None:
    for left, right in zip(first, second, strict=True):
        for a, b in zip(left.completions, right.completions, strict=True):
            assert a.tokens.tobytes() == b.tokens.tobytes()
            assert a.sampler_logprobs.tobytes() == b.sampler_logprobs.tobytes()
            assert a.sampler_entropies is not None
            assert b.sampler_entropies is not None
            assert a.sampler_entropies.tobytes() == b.sampler_entropies.tobytes()


@pytest.mark.parametrize("earlier", [5, 17, 23])
def test_bits_do_not_depend_on_what_was_generated_before(
    make_reference: Make, make_engine: Make, make_request: Make, earlier: int
) -> None:
    """A resumed run has not evaluated, or has not had the longer prompts of earlier steps."""
    model = make_reference("llama", torch.float32)
    rng = np.random.default_rng(0)
    wanted = [make_request(n, rng.integers(2, 40, size=n).tolist(), limit=20) for n in range(3, 14)]
    used = make_engine(model, max_rows=32)
    drain(used, [make_request(0, rng.integers(2, 40, size=earlier).tolist(), limit=earlier)])
    assert_equal_bits(drain(used, wanted), drain(make_engine(model, max_rows=32), wanted))


def test_sampling_follows_the_models_distribution(make_reference: Make, make_engine: Make, make_request: Make) -> None:
    """Compute chi-square over the first two tokens of 6000 samples, several temperatures."""
    model = make_reference("llama", torch.float32)
    for tau in (1.0, 0.5):
        request = make_request(0, [4, 9, 2], group_size=6000, limit=2, temperature=tau)
        (group,) = drain(make_engine(model, max_rows=1000), [request])
        first = np.bincount([c.tokens[0] for c in group.completions], minlength=40)
        probabilities = reference_distribution(model, request, [0], tau, 40).exp()[0].double().numpy()
        assert _fits(first, probabilities)
        top = int(first.argmax())
        second = np.bincount([c.tokens[1] for c in group.completions if c.tokens[0] == top], minlength=40)
        after = reference_distribution(model, request, [top, 0], tau, 40).exp()[1].double().numpy()
        assert _fits(second, after)
        assert not _fits(second, probabilities), "the test must be able to fail"


def _fits(counts: Any, probabilities: Any) -> bool:
    expected = probabilities / probabilities.sum() * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return bool(chisquare(observed[keep], wanted[keep]).pvalue > 0.001)


def test_ends_and_truncation(make_reference: Make, make_engine: Make, make_requests: Make) -> None:
    """Any end token stops and is kept, as the last token and nowhere before. Others are truncated at T."""
    ends = frozenset({5, 11, 17})
    requests = make_requests(count=10, limit=15)
    groups = drain(make_engine(make_reference("llama"), end_tokens=ends), requests)
    free = drain(make_engine(make_reference("llama")), requests)
    seen = set[int]()
    for group, unstopped in zip(groups, free, strict=True):
        for completion, whole in zip(group.completions, unstopped.completions, strict=True):
            tokens = completion.tokens.tolist()
            assert not ends & set(tokens[:-1])
            assert whole.tokens.tolist()[: len(tokens)] == tokens
            assert completion.text == " ".join(map(str, tokens))
            if completion.finish_reason is FinishReason.STOP:
                seen.add(tokens[-1])
                assert tokens[-1] in ends
            else:
                assert completion.finish_reason is FinishReason.LENGTH
                assert completion.truncated
                assert len(tokens) == 15
                assert tokens[-1] not in ends
    assert seen == ends
    assert all(len(c) == 15 and c.truncated for g in free for c in g.completions)


def test_an_end_token_at_the_limit_is_a_stop(make_reference: Make, make_engine: Make, make_request: Make) -> None:
    model = make_reference("llama")
    request = make_request(0, [1, 2], group_size=1, temperature=0.0, limit=4)
    (group,) = drain(make_engine(model), [request])
    tokens = group.completions[0].tokens.tolist()
    cut = tokens.index(tokens[-1]) + 1
    (again,) = drain(
        make_engine(model, end_tokens=frozenset({tokens[-1]})),
        [make_request(0, [1, 2], group_size=1, temperature=0.0, limit=cut)],
    )
    assert again.completions[0].finish_reason is FinishReason.STOP
    assert len(again.completions[0]) == cut


def test_limits_and_temperatures_may_differ_within_a_batch(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    model = make_reference("qwen2-bias")
    requests = [
        make_request(0, [1, 2, 3], limit=1, temperature=1.0),
        make_request(1, [4], limit=30, temperature=0.3),
        make_request(2, [5, 6], limit=9, temperature=0.0),
    ]
    together = drain(make_engine(model), requests)
    apart = [drain(make_engine(model), [request])[0] for request in requests]
    assert tokens_of(together) == tokens_of(apart)
    for group, tau in zip(together, (1.0, 0.3, 1.0), strict=True):
        assert max(largest_errors(model, [group], tau)) < 1e-6
        assert {len(c) for c in group.completions} == {group.request.sampling.max_tokens}


def test_top_p_and_top_k_apply_to_their_own_requests(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    """Mixed in one batch, two exclude all but the likeliest token, so they are greedy; the third is unchanged."""
    model = make_reference("llama")

    def request(draw: int, temperature: float = 1.0, **changes: Any) -> RolloutRequest:
        made = make_request(draw, [1, 2, 3], limit=12, temperature=temperature)
        return replace(made, sampling=replace(made.sampling, **changes))

    mixed = [request(0, top_k=1), request(0, top_p=1e-6), request(1), request(2, top_k=3)]
    requests = [replace(one, draw=draw) for draw, one in enumerate(mixed)]
    first, second, plain, three = tokens_of(drain(make_engine(model, valid_vocab=30), requests))
    (greedy,) = tokens_of(drain(make_engine(model, valid_vocab=30), [request(0, temperature=0.0)]))
    assert first == second == greedy
    (alone,) = tokens_of(drain(make_engine(model, valid_vocab=30), [replace(request(2), draw=2)]))
    assert plain == alone
    assert len({tuple(tokens) for tokens in three}) > 1
    assert three != tokens_of(drain(make_engine(model, valid_vocab=30), [replace(request(3), draw=3)]))[0]


def test_padded_vocabulary_is_never_sampled(make_reference: Make, make_engine: Make, make_requests: Make) -> None:
    model = make_reference("llama")
    requests = [r for r in make_requests(count=10, limit=25) if r.prompt_tokens.max() < 30]
    assert requests
    groups = drain(make_engine(model, valid_vocab=30), requests)
    assert max(int(c.tokens.max()) for g in groups for c in g.completions) == 29
    assert max(largest_errors(model, groups, 1.0, valid=30)) < 1e-6


def test_a_prompt_is_computed_once_for_its_group(make_reference: Make, make_engine: Make, make_requests: Make) -> None:
    """Count the tokens that go through the model: prompts once, each response without its last token."""
    engine = make_engine(make_reference("llama"), max_rows=3)
    fed: list[int] = []
    engine._model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: fed.append(inputs[0].numel()))
    requests = make_requests(group_size=5)
    groups = drain(engine, requests)
    prompts = sum(len(r.prompt_tokens) for r in requests)
    assert sum(fed) == prompts + sum(len(c) - 1 for g in groups for c in g.completions)
    assert max(fed) <= max(max(len(r.prompt_tokens) for r in requests), 3)


def test_rows_fill_in_issue_order_and_ended_ones_leave(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    """One-token requests after a long one on two rows finish in their order, the long one last."""
    engine = make_engine(make_reference("llama"), max_rows=2)
    engine.submit([make_request(0, [1, 2], group_size=1, limit=40)])
    engine.submit([make_request(d, [3, d], group_size=2, limit=3) for d in range(1, 6)])
    assert [g.request.draw for g in engine.finished()] == [1, 2, 3, 4, 5, 0]
    requests = [make_request(draw, [3, draw], group_size=1, limit=limit) for draw, limit in ((6, 40), (7, 3))]
    assert [g.request.draw for g in engine.answers(requests)] == [6, 7], "in the order of the requests"


def test_groups_stream_and_requests_may_come_while_generating(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    model = make_reference("llama")
    engine = make_engine(model, max_rows=4)
    engine.submit([make_request(0, [1, 2], limit=3), make_request(1, [3], limit=30)])
    order: list[int] = []
    for group in engine.finished():
        order.append(group.request.draw)
        if group.request.draw == 0:
            engine.submit([make_request(2, [5, 6, 7], limit=60)])  # longer than the cache: waits until it is rebuilt
    assert order == [0, 1, 2]
    later = drain(make_engine(model), [make_request(2, [5, 6, 7], limit=60)])
    engine.submit([make_request(2, [5, 6, 7], limit=60)])
    assert tokens_of(list(engine.finished())) == tokens_of(later)


def test_an_interrupt_returns_the_unfinished_and_leaves_a_usable_engine(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    engine = make_engine(make_reference("llama"), max_rows=4)
    requests = [make_request(0, [1], limit=30), make_request(1, [2], limit=2), make_request(2, [3, 4], limit=9)]
    whole = drain(engine, requests)
    engine.submit([requests[1], requests[0], requests[2]])
    assert next(engine.finished()).request.draw == 1
    assert engine.interrupt() == [requests[0], requests[2]]
    assert list(engine.finished()) == []
    assert tokens_of(drain(engine, requests)) == tokens_of(whole)
    engine.close()
    engine.close()


def test_loaded_weights_are_the_ones_that_sample(make_reference: Make, make_engine: Make, make_requests: Make) -> None:
    """Use tied weights with one name or both. float64 weights are cast to float32."""
    for kind in ("llama", "llama-tied"):
        old, new = make_reference(kind, torch.float32), make_reference(kind, torch.float64, seed=5)
        engine = make_engine(old)
        assert engine.policy_version == -1
        for weights in (dict(new.named_parameters()), new.state_dict()):
            engine.load_weights(weights, 12)
            groups = drain(engine, make_requests())
            assert max(largest_errors(new.float(), groups, 1.0)) < 1e-4
            assert {c.policy_version for g in groups for c in g.completions} == {12}
            assert engine.policy_version == 12
            engine.load_weights(old.state_dict(), 3)
        assert max(largest_errors(old, drain(engine, make_requests()), 1.0)) < 1e-4


def test_bfloat16_weights_sample_near_their_float32_policy(
    make_reference: Make, make_engine: Make, make_requests: Make
) -> None:
    """The mean distance of log-probs is about 2^-8 of values near 3. float32 weights are cast on loading."""
    model = make_reference("qwen3-qknorm", torch.float32)
    engine = make_engine(make_reference("qwen3-qknorm", torch.bfloat16, seed=9))
    engine.load_weights(model.state_dict(), 1)
    groups = drain(engine, make_requests(count=10))
    assert 1e-4 < max(largest_errors(model, groups, 1.0)) < 0.5
    errors = [
        np.abs(_logprobs(model, group.request, completion.tokens) - completion.sampler_logprobs).mean()
        for group in groups
        for completion in group.completions
    ]
    assert np.mean(errors) < 0.03


def _logprobs(model: Any, request: RolloutRequest, tokens: Any) -> Any:
    chosen = torch.from_numpy(tokens.astype(np.int64))
    return reference_distribution(model, request, chosen.tolist(), 1.0, 40).gather(1, chosen[:, None])[:, 0].numpy()


def test_a_sequence_across_an_update_keeps_the_older_version(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    model = make_reference("llama")
    engine = make_engine(model, max_rows=4)
    engine.load_weights(model.state_dict(), 1)
    engine.submit([make_request(0, [1], limit=2), make_request(1, [2], limit=20), make_request(2, [2], limit=20)])
    versions: dict[int, set[int]] = {}
    for group in engine.finished():
        versions[group.request.draw] = {c.policy_version for c in group.completions}
        if group.request.draw == 1:
            engine.load_weights(model.state_dict(), 2)
    assert versions == {0: {1}, 1: {1}, 2: {2}}


def test_weights_that_do_not_fit_are_refused_whole(make_reference: Make, make_engine: Make) -> None:
    model = make_reference("llama")
    tied = make_reference("llama-tied")
    engine = make_engine(model)
    state = dict(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=r"no weights were given for: .*up_proj"):
        engine.load_weights({k: v for k, v in state.items() if k != name}, 1)
    with pytest.raises(ValueError, match="does not have: extra"):
        engine.load_weights(state | {"extra": torch.zeros(1)}, 1)
    with pytest.raises(ValueError, match=r"up_proj.weight has shape \(3, 3\), .* wants \(48, 32\)"):
        engine.load_weights(state | {name: torch.zeros(3, 3)}, 1)
    with pytest.raises(ValueError, match="tied"):
        make_engine(tied).load_weights(dict(tied.state_dict()) | {"lm_head.weight": torch.zeros(40, 32)}, 1)
    assert engine.policy_version == -1


def test_requests_that_cannot_be_served_name_the_problem(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    engine = make_engine(make_reference("llama"), max_context=16)
    with pytest.raises(ValueError, match=r"problem 'p4': prompt of 5 tokens \+ max_tokens 12 .* 16"):
        engine.submit([make_request(0, [1]), make_request(4, [1] * 5)])
    assert list(engine.finished()) == [], "nothing is queued when one request is refused"
    with pytest.raises(ValueError, match="'p0' has an empty prompt"):
        engine.submit([make_request(0, [])])
    with pytest.raises(ValueError, match=r"1\.\.40 leave the vocabulary of 40"):
        engine.submit([make_request(0, [1, 40])])
    with pytest.raises(ValueError, match="end tokens \\[40\\]"):
        make_engine(make_reference("llama"), end_tokens=frozenset({40}))


def test_the_memory_limit_gives_fewer_rows_or_a_clear_error(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    """Two layers x 2 heads x (8 + 8) values x 8 bytes = 512 bytes per token: 1 MiB holds 20 rows of 102 tokens."""
    engine = make_engine(make_reference("llama"), memory_limit_mb=1, max_rows=64)
    assert isinstance(engine, RolloutEngine)
    assert len(drain(engine, [make_request(0, [1, 2], limit=100, group_size=30)])[0].completions) == 30
    assert engine.rows == 20
    assert len(drain(engine, [make_request(0, [1, 2], limit=5)])[0].completions) == 4
    assert engine.rows == 64
    tight = make_engine(make_reference("llama"), memory_limit_mb=0)
    with pytest.raises(ValueError, match=r"needs 0.0 MiB of cache, rollout.memory_limit_mb is 0"):
        tight.submit([make_request(0, [1, 2], limit=5)])


def test_broken_weights_are_an_error(make_reference: Make, make_engine: Make, make_request: Make) -> None:
    model = make_reference("llama", torch.float32)
    engine = make_engine(model)
    state = {k: torch.full_like(v, float("nan")) for k, v in model.state_dict().items()}
    engine.load_weights(state, 4)
    engine.submit([make_request(0, [1, 2])])
    with pytest.raises(FloatingPointError, match="policy version 4"):
        list(engine.finished())


def test_samples_asked_for_later_are_the_same_and_come_one_by_one(
    make_reference: Make, make_engine: Make, make_requests: Make
) -> None:
    """A resumed evaluation requests only the missing samples, and they equal those of an uninterrupted one."""
    model, ends = make_reference("llama", dtype=torch.float64), frozenset({1, 2, 3})
    requests = make_requests(count=3, limit=20)
    whole = drain(make_engine(model, end_tokens=ends), requests)
    expected = {(g.request.draw, i): c.tokens.tolist() for g in whole for i, c in enumerate(g.completions)}
    engine = make_engine(model, end_tokens=ends, max_rows=3)
    engine.submit([replace(requests[0], samples=(1, 3)), requests[1], replace(requests[2], samples=(2,))])
    found = {(s.request.draw, s.index): s.completion.tokens.tolist() for s in engine.finished_samples()}
    assert set(found) == {(0, 1), (0, 3), *((1, i) for i in range(4)), (2, 2)}
    assert all(found[key] == expected[key] for key in found)
    assert list(engine.finished_samples()) == []
    with pytest.raises(ValueError, match="ascending indices below 4"):
        engine.submit([replace(requests[0], samples=(3, 1))])


class Operations(TorchDispatchMode):
    """Count of operations that compute or copy numbers, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_of_a_tiny_model_runs_few_operations(
    make_reference: Make, make_engine: Make, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model's step takes as long as torch needs to start its operations; it had 113 on 2026-11-27."""
    engine = make_engine(make_reference("llama", torch.float32), end_tokens=frozenset(), max_rows=8)
    sort = Mock(side_effect=Sharing.of)
    monkeypatch.setattr(Sharing, "of", sort)
    with Operations() as found:
        drain(engine, [make_request(draw, [5, 9, 7], limit=41) for draw in range(2)])
    assert sort.call_count == 1, "rows are sorted by prompt when they change"
    assert sum(found.counts.values()) / 40 < 95, found.counts


def test_rows_move_without_torch(make_reference: Make, make_engine: Make, make_request: Make) -> None:
    """numpy copies rows by index 30 times faster, and moves were a fifth of the evaluation of a tiny model."""
    engine = make_engine(make_reference("llama", torch.float32), end_tokens=frozenset(), max_rows=6)
    with Operations() as found:
        drain(engine, [make_request(draw, [5, 9, 7], group_size=1, limit=3 + draw) for draw in range(12)])
    assert not found.counts["index_copy_"]
    # torch writes the prompts: keys and values of two layers, at most once for each prompt
    assert found.counts["index_put_"] <= 12 * 4
