"""Requests in flight: new weights between two tokens, interruptions, evaluations in between, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from magicrl.records import Completion, FinishReason, RolloutGroup
from magicrl.rollout.requests import pack_begun, pack_completions, unpack_completions

Make = Callable[..., Any]
Outputs = dict[tuple[int, int], tuple[Any, ...]]


def outputs(groups: list[RolloutGroup]) -> Outputs:
    """Return everything except times, by draw and sample."""
    return {
        (group.request.draw, index): (
            c.tokens.tolist(),
            c.sampler_logprobs.tolist(),
            [] if c.sampler_entropies is None else c.sampler_entropies.tolist(),
            c.finish_reason,
            c.policy_version,
            c.version_spans,
            c.text,
        )
        for group in groups
        for index, c in zip(group.request.indices, group.completions, strict=True)
    }


def tokens_of(found: Outputs) -> dict[tuple[int, int], list[int]]:
    return {key: value[0] for key, value in found.items()}


def through_files(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the state after writing it to files and reading it, like a checkpoint."""
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    save_file(tensors, folder / "tensors.safetensors")
    rest = json.loads(json.dumps({k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}))
    return {**load_file(folder / "tensors.safetensors"), **rest}


@torch.no_grad()
def expected_logprobs(models: list[Any], versions: list[int], prompt: list[int], tokens: list[int]) -> list[float]:
    """Return log-probs of each token by the weights of its version, over keys and values of older weights."""
    inputs = [*prompt, *tokens]
    cache, found = None, []
    for index, version in enumerate(versions):
        fed = inputs[: len(prompt)] if index == 0 else inputs[len(prompt) + index - 1 : len(prompt) + index]
        out = models[version](input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(float(out.logits[0, -1].log_softmax(-1)[tokens[index]]))
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_new_weights_between_two_tokens(make_reference: Make, make_engine: Make, make_request: Make, kind: str) -> None:
    """Weights 0 sample three tokens per row, 1 two more, 2 the rest. The cache keeps the keys and values of each."""
    models = [make_reference(kind, seed=n) for n in range(3)]
    engine = make_engine(models[0])
    assert engine.capabilities.in_flight
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    engine.load_weights(models[0].state_dict(), 0)
    engine.submit([make_request(draw, prompt, group_size=2) for draw, prompt in enumerate(prompts)])
    rows = 6
    for version, tokens in ((1, 3), (2, 2)):
        assert engine.advance(tokens * rows) == []
        engine.load_weights(models[version].state_dict(), version)
    groups = list(engine.finished())
    assert {c.version_spans for g in groups for c in g.completions} == {((0, 3), (1, 2), (2, 7))}
    for group in groups:
        for c in group.completions:
            assert c.policy_version == 0
            assert c.token_versions.tolist() == [0] * 3 + [1] * 2 + [2] * 7
            wanted = expected_logprobs(
                models, c.token_versions.tolist(), group.request.prompt_tokens.tolist(), c.tokens.tolist()
            )
            np.testing.assert_allclose(c.sampler_logprobs, wanted, atol=1e-5)


def test_the_first_token_after_an_old_prompt_is_of_the_old_weights(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    """Two rows serve four samples: the later two start from the prompt that the first weights computed."""
    models = [make_reference("llama", seed=n) for n in range(2)]
    engine = make_engine(models[0], max_rows=2)
    engine.load_weights(models[0].state_dict(), 5)
    engine.submit([make_request(0, [1, 2, 3], limit=4)])
    engine.advance(2 * 4)
    engine.load_weights(models[1].state_dict(), 6)
    (group,) = engine.finished()
    assert [c.version_spans for c in group.completions] == [(), (), ((5, 1), (6, 3)), ((5, 1), (6, 3))]
    late = group.completions[3]
    wanted = expected_logprobs(models, [0, 1, 1, 1], [1, 2, 3], late.tokens.tolist())
    np.testing.assert_allclose(late.sampler_logprobs, wanted, atol=1e-5)


def test_stopping_to_listen_loses_no_group(make_reference: Make, make_engine: Make, make_requests: Make) -> None:
    engine = make_engine(make_reference("llama"), end_tokens=frozenset({3, 4, 5, 6}))
    engine.submit(make_requests(8))
    whole = outputs(list(engine.finished()))
    engine.submit(make_requests(8))
    found: list[RolloutGroup] = []
    for turn in range(40):
        found += engine.advance(5)
        for group in engine.finished() if turn % 3 == 0 else ():
            found.append(group)
            break
    assert len(found) == 8
    assert outputs(found) == whole


@pytest.mark.parametrize("rows", [3, 8])
def test_interrupted_responses_go_on_where_they_were(
    make_reference: Make, make_engine: Make, make_requests: Make, rows: int
) -> None:
    """Load the same weights into another engine: it must give the same tokens and keep earlier log-probs to the bit."""
    reference = make_reference("llama")
    ends = frozenset({3, 4})
    engine, other = (make_engine(reference, end_tokens=ends, max_rows=rows) for _ in range(2))
    engine.submit(make_requests(6))
    whole = outputs(list(engine.finished()))
    engine.submit(make_requests(6))
    before = engine.advance(60)
    begun = engine.interrupt(keep=True)
    assert list(engine.finished()) == []
    assert [r.draw for r in begun] == sorted(r.draw for r in begun)
    partial: dict[tuple[int, int], Completion] = {(r.draw, i): c for r in begun for i, c in r.begun}
    assert {c.finish_reason for c in partial.values()} >= {FinishReason.ABORTED}
    assert sum(len(c) for c in partial.values()) + sum(g.num_tokens for g in before) >= 60
    other.submit(begun)
    other.advance(7)
    other.submit(other.interrupt(keep=True))  # and once more, in the middle of the restored responses
    after = outputs([*before, *other.finished()])
    assert tokens_of(after) == tokens_of(whole)
    for key, c in partial.items():
        assert after[key][1][: len(c)] == c.sampler_logprobs.tolist()
    for key, value in after.items():
        np.testing.assert_allclose(value[1], whole[key][1], atol=1e-5)


def test_what_was_begun_keeps_the_versions_that_sampled_it(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    models = [make_reference("llama", seed=n) for n in range(3)]
    engine = make_engine(models[0])
    engine.load_weights(models[0].state_dict(), 3)
    engine.submit([make_request(0, [1, 2], group_size=2, limit=6)])
    engine.advance(2 * 2)
    engine.load_weights(models[1].state_dict(), 4)
    engine.advance(2 * 1)
    begun = engine.interrupt(keep=True)
    engine.load_weights(models[2].state_dict(), 7)
    engine.submit(begun)
    (group,) = engine.finished()
    assert [c.version_spans for c in group.completions] == [((3, 2), (4, 1), (7, 3))] * 2
    assert {c.policy_version for c in group.completions} == {3}
    with pytest.raises(ValueError, match=r"sample 0 was begun with 3 tokens \(aborted\).*at most 3 tokens"):
        engine.submit([make_request(0, [1, 2], group_size=2, limit=3).__class__(**fields(begun[0], limit=3))])


def fields(request: Any, *, limit: int) -> dict[str, Any]:
    sampling = request.sampling.__class__(temperature=1.0, max_tokens=limit, seed=0)
    names = ("draw", "problem", "prompt_tokens", "group_size", "begun")
    return {**{name: getattr(request, name) for name in names}, "sampling": sampling}


@pytest.mark.parametrize("rows", [3, 8])
def test_a_resumed_engine_goes_on_bit_for_bit(
    make_reference: Make, make_engine: Make, make_requests: Make, make_request: Make, tmp_path: Path, rows: int
) -> None:
    """New weights and requests come before and after the checkpoint. With three rows a group is split."""
    models = [make_reference("qwen2-bias", seed=n, dtype=torch.float32) for n in range(3)]

    def engine_at(version: int) -> Any:
        made = make_engine(models[0], end_tokens=frozenset({3, 4}), max_rows=rows)
        made.load_weights(models[version].state_dict(), version)
        return made

    def to_the_checkpoint(engine: Any) -> list[RolloutGroup]:
        engine.submit(make_requests(6))
        done = engine.advance(40)
        engine.load_weights(models[1].state_dict(), 1)
        return [*done, *engine.advance(30)]

    def after_it(engine: Any) -> Outputs:
        engine.load_weights(models[2].state_dict(), 2)
        engine.submit([make_request(draw, [1, 2, 3], limit=5) for draw in range(100, 106)])
        return outputs(list(engine.finished()))

    left_alone = engine_at(0)
    done = {g.request.draw for g in to_the_checkpoint(left_alone)}
    stopped = engine_at(0)
    to_the_checkpoint(stopped)
    kept = through_files(dict(stopped.snapshot()), tmp_path)
    open_requests = [r for r in make_requests(6) if r.draw not in done]
    resumed = engine_at(1)
    resumed.resume(kept, open_requests)
    expected = after_it(left_alone)
    assert len(expected) >= 8
    assert after_it(resumed) == expected
    earlier = engine_at(1)  # its checkpoint was written before rows had top-p and top-k
    earlier.resume({k: v for k, v in kept.items() if not k.endswith(("/top_p", "/top_k"))}, open_requests)
    assert after_it(earlier) == expected
    anew = engine_at(1)
    anew.resume({}, open_requests)
    assert {g.request.draw for g in anew.finished()} == {r.draw for r in open_requests}
    begun = stopped.interrupt(keep=True)
    anew.resume(pack_begun(begun), open_requests)  # the snapshot of a pool, in a run that continues without [cluster]
    found = {group.request.draw: group for group in anew.finished()}
    for request in begun:
        for index, known in request.begun:
            whole = found[request.draw].completions[index]
            assert whole.tokens[: len(known)].tolist() == known.tokens.tolist()


def test_an_evaluation_beside_it_disturbs_nothing(
    make_reference: Make, make_engine: Make, make_requests: Make, make_request: Make
) -> None:
    engine, apart = (make_engine(make_reference("llama"), end_tokens=frozenset({3})) for _ in range(2))
    question = make_request(900, [1, 2, 3, 4, 5, 6, 7], limit=30)
    apart.submit([question])
    answer = outputs(list(apart.finished()))
    engine.submit(make_requests(6))
    whole = outputs(list(engine.finished()))
    engine.submit(make_requests(6))
    found = engine.advance(30)
    with engine.newest_weights():
        assert engine.advance(10) == []
        engine.submit([question])
        assert tokens_of(outputs(list(engine.finished()))) == tokens_of(answer)
    assert outputs([*found, *engine.finished()]) == whole
    assert engine.busy_seconds() > 0


def test_no_completions_go_through_a_checkpoint() -> None:
    """Kill while none of the responses under way has ended."""
    assert unpack_completions("held", pack_completions("held", [])) == []
