"""Router replay: the engine records the choice of every router, and the learner sends tokens to these experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import model_cases
import numpy as np
import pytest
import torch
from builders import completion, train_sample
from model_cases import CASES, finished, make_engine, own_model, plain_model, requests, samples
from numpy.typing import NDArray
from transformers import JambaConfig, JambaForCausalLM

from magicrl.config.model_schema import ModelConfig
from magicrl.models.packing import PackedBatch, packed_with_shared_prompts
from magicrl.models.routing import Routers
from magicrl.models.scorer import PolicyScorer
from magicrl.records import Completion, RolloutGroup, TrainSample, frozen_floats, frozen_tokens
from magicrl.rollout.episodes import with_observation, with_turn

MIXTURES = [name for name, case in CASES.items() if "mixture" in case.layers]


def asked() -> list[Any]:
    return requests([(11, 4, 24), (3, 4, 9), (11, 3, 25), (20, 2, 14)])


def sample(group: RolloutGroup, completion: Completion, **changes: Any) -> TrainSample:
    made = TrainSample(
        prompt_tokens=group.request.prompt_tokens,
        tokens=completion.tokens,
        advantage=1.0,
        group_index=group.request.draw,
        sample_index=0,
        sampler_logprobs=completion.sampler_logprobs,
        policy_version=0,
        experts=completion.experts,
    )
    return replace(made, **changes)


def plain_choices(model: Any, tokens: NDArray[Any]) -> NDArray[np.int64]:
    """Return ``[tokens, routers, k]`` by hooks on transformers' own routers, in ascending order."""
    found: list[torch.Tensor] = []

    def keep(module: Any, _given: Any, output: Any) -> None:
        # only Llama 4 returns scores and logits instead of indices
        last = output[-1]
        found.append(last if not last.is_floating_point() else last.topk(module.top_k, dim=-1)[1])

    handles = [m.register_forward_hook(keep) for m in model.modules() if type(m).__name__.endswith("Router")]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(found, dim=1).sort(-1)[0].numpy()


def other_choices(given: list[TrainSample], routers: int, k: int) -> list[TrainSample]:
    """Return the samples with random choices. Equal prompts have the same ones, since they are computed once."""
    rng, prompts = np.random.default_rng(5), dict[int, NDArray[Any]]()

    def drawn(tokens: int) -> NDArray[Any]:
        return rng.random((tokens, routers, 4)).argsort(-1)[..., :k].astype(np.uint8)

    made: list[TrainSample] = []
    for one in given:
        prompt = prompts.setdefault(one.group_index, drawn(len(one.prompt_tokens)))
        made.append(replace(one, experts=np.concatenate([prompt, drawn(len(one.tokens) - 1)])))
    return made


@pytest.mark.parametrize(("name", "further"), [*((name, {}) for name in MIXTURES), ("Qwen3-MoE", {"num_experts": 300})])
def test_the_engine_tells_what_plain_transformers_chooses(name: str, further: dict[str, int]) -> None:
    """Compare the record of every token that the model reads: prompts, and responses without their last token."""
    plain = plain_model(CASES[name], **further)
    engine = make_engine(own_model(plain), experts=True)
    assert engine.capabilities.experts
    different = tokens = 0
    for group in finished(engine, asked()):
        for answer in group.completions:
            whole = np.concatenate([group.request.prompt_tokens, answer.tokens])[:-1]
            expected = plain_choices(plain, whole)
            assert answer.experts is not None
            assert answer.experts.dtype == (np.uint16 if further else np.uint8), "a byte numbers 256 experts"
            assert answer.experts.shape == expected.shape
            different += int((np.sort(answer.experts, -1) != expected).any((1, 2)).sum())
            tokens += len(whole)
    assert tokens > 200
    # if two experts' scores differ only by rounding, either is correct
    assert different <= 2


@pytest.mark.parametrize("name", MIXTURES)
def test_the_learner_sends_each_token_where_its_record_says(name: str) -> None:
    """Use random choices, unlike those of the routers, in a plain pack, with shared prompts, and in separate passes."""
    model = own_model(plain_model(CASES[name]))
    scorer = PolicyScorer(model, ModelConfig(router_replay=True))
    layers, k = (2, 1) if name == "Llama 4 text" else (3, 2) if name == "DeepSeek-V3" else (4, 2)
    given = other_choices(samples(), layers, k)
    alone = torch.cat([scorer.forward(PackedBatch.of([one]), 1.0)[0].detach() for one in given])
    unchosen = torch.cat([scorer.forward(PackedBatch.of([replace(one, experts=None)]), 1.0)[0] for one in given])
    assert float((alone - unchosen.detach()).abs().max()) > 0.1
    for pack in (PackedBatch.of, packed_with_shared_prompts):
        model.zero_grad()
        logprobs, _ = scorer.forward(pack(given), 1.0)
        torch.testing.assert_close(logprobs.detach(), alone, rtol=0, atol=3e-4)
        logprobs.mean().backward()
        routers = {n: p for n, p in model.named_parameters() if ".gate.weight" in n or "router" in n}
        assert routers
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in routers.values()), "routers go on learning"


def weights_by_hand(kind: str, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights of the chosen experts by the models' papers."""
    if kind == "gpt-oss":  # a softmax over the chosen ones only
        return logits.gather(1, chosen).softmax(-1)
    if kind == "DeepSeek-V3":  # sigmoids, made to sum to the scaling factor
        scores = logits.sigmoid().gather(1, chosen)
        return scores / scores.sum(-1, keepdim=True) * 2.5
    scores = logits.softmax(-1).gather(1, chosen)
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "DeepSeek-V3"])
def test_chosen_experts_weigh_what_the_learners_router_gives_them(name: str) -> None:
    model = own_model(plain_model(CASES[name]))
    routers = Routers(model)
    module = next(m for m in model.modules() if type(m).__name__.endswith("Router"))
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[3, 0], [1, 2], [0, 1], [2, 3], [3, 1]])
    routers.given = chosen[:, None].expand(5, len(routers.layers), 2)
    _, weights, indices = module(hidden)
    logits = hidden @ module.weight.T + getattr(module, "bias", torch.zeros(4))
    if name == "DeepSeek-V3":
        assert float(model.config.routed_scaling_factor) == 2.5
    assert torch.equal(indices, chosen)
    torch.testing.assert_close(weights, weights_by_hand(name, logits, chosen))


def test_what_is_computed_anew_for_the_backward_pass_takes_the_record_again() -> None:
    gradients: list[dict[str, torch.Tensor]] = []
    for above in (None, 1):
        model = own_model(plain_model(CASES["Qwen3-MoE"]))
        scorer = PolicyScorer(model, ModelConfig(router_replay=True, checkpoint_above_tokens=above))
        scorer.forward(PackedBatch.of(other_choices(samples(), 4, 2)), 1.0)[0].mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-5, atol=1e-7)


def experts_of(groups: list[RolloutGroup]) -> dict[tuple[int, int], NDArray[Any]]:
    return {(g.request.draw, i): np.array(c.experts) for g in groups for i, c in enumerate(g.completions)}


def test_a_snapshot_holds_the_record() -> None:
    plain = plain_model(CASES["Mixtral"])
    last, first, second = (make_engine(own_model(plain), rows=5, experts=True) for _ in range(3))
    whole = experts_of(finished(last, asked()))
    given = asked()
    first.submit(given)
    begun = [one for _ in range(12) for one in first.turn()]
    second.resume(first.snapshot(), given)
    found = experts_of(list(second.finished()))
    assert begun, "some samples have ended before the snapshot, others are in rows, others wait"
    assert len(found) > 5
    for key, experts in found.items():
        np.testing.assert_array_equal(experts, whole[key])


def test_what_goes_on_after_an_interruption_keeps_the_choices_that_sampled_it() -> None:
    """With new weights the cache is recomputed with other experts, and the record of earlier tokens remains."""
    model, other = (own_model(plain_model(CASES["Mixtral"])) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.0)
    first, second = (make_engine(m, rows=20, experts=True) for m in (model, other))
    first.submit(asked())
    for _ in range(6):
        first.turn()
    begun = first.interrupt(keep=True)
    kept = {(r.draw, index): c for r in begun for index, c in r.begun}
    assert len(kept) == 13
    second.submit(begun)
    changed = 0
    for group in second.finished():
        for index, answer in enumerate(group.completions):
            before = kept[group.request.draw, index].experts
            assert before is not None
            assert answer.experts is not None
            assert len(answer.experts) == len(group.request.prompt_tokens) + len(answer) - 1
            np.testing.assert_array_equal(answer.experts[: len(before)], before)
            changed += len(answer.experts) > len(before)
    assert changed > 5


def test_turns_of_an_episode_keep_their_records_and_what_was_not_read_has_none() -> None:
    def turn(tokens: int, read: int, chosen: int) -> Completion:
        experts = np.full((read, 4, 2), chosen, dtype=np.uint8)
        return completion(range(tokens), sampler_logprobs=frozen_floats(np.zeros(tokens)), experts=experts)

    prompt, observed = 3, frozen_tokens([1, 2])
    first = with_turn(None, turn(4, prompt + 3, 1))
    asked_again = with_observation(first, observed, cut=False)
    # the second turn's prompt is the whole text so far: its choices for what was read before do not count
    whole = with_turn(asked_again, turn(2, prompt + 4 + 2 + 1, 3))
    assert whole.experts is not None
    assert whole.experts[:, 0, 0].tolist() == [1] * 6 + [3] * 4
    ended = with_observation(whole, observed, cut=False)
    made = train_sample([1] * prompt, ended.tokens, experts=ended.experts)
    batch = PackedBatch.of([made])
    assert batch.experts is not None
    assert batch.experts[:, 0, 0].tolist() == [1] * 6 + [3] * 6


def test_replay_brings_the_learner_to_the_sampler_where_rounding_moves_choices() -> None:
    """In bfloat16 the difference between learner and sampler is smaller with the sampler's choices."""
    found = model_cases.replayed(CASES["Mixtral"])
    assert found["tokens_moved"] > 0
    assert found["gap_replayed"] < found["gap"]


def test_what_cannot_be_replayed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM \(model type 'llama'\) is no mixture of experts"):
        Routers(own_model(plain_model(CASES["Llama 3"])))
    with torch.device("meta"):
        jamba = JambaForCausalLM(JambaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, vocab_size=40))
    with pytest.raises(ValueError, match=r"JambaForCausalLM \(model type 'jamba'\) has no routers that are known"):
        Routers(jamba)
    scorer = PolicyScorer(own_model(plain_model(CASES["Mixtral"])), ModelConfig(router_replay=True))
    given = other_choices(samples(), 4, 2)
    with pytest.raises(ValueError, match="sample 3 of group 1 has no record of the sampler's experts"):
        scorer.score([*given[:3], replace(given[3], experts=None)], 1.0)
    with pytest.raises(ValueError, match=r"recorded for \(\d+, 3\) \(tokens, routers\), the pass has \(\d+, 4\)"):
        scorer.score([replace(one, experts=one.experts[:, :3]) for one in given if one.experts is not None], 1.0)
