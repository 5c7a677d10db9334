"""Model types, small and random: magicrl's learner and engine compared with plain transformers.

Every comparison is in float32 with ``model_type`` as transformers implements it: the same weights, each sequence in its
own row under transformers' own attention. Prompts and responses are longer than the windows of the configurations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from magicrl.config.model_schema import ModelConfig
from magicrl.models.packing import ATTENTION_NAME, PackedBatch, packed_with_shared_prompts, register_attention
from magicrl.models.routing import Routers
from magicrl.models.scorer import PolicyScorer
from magicrl.records import (
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    TrainSample,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.in_process import InProcessEngine

WORDS, LAYERS, WINDOW, CONTEXT = 64, 4, 8, 512
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_ONE_EXPERT = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model type, and the part of its configuration that is not `SIZES`."""

    model_type: str
    differs: Mapping[str, Any]
    layers: str  # difference of its layers from Llama's, in a few words
    attention: str = "sdpa"  # transformers' attention that it is compared with

    def config(self, **further: Any) -> Any:
        return AutoConfig.for_model(self.model_type, **(SIZES | dict(self.differs) | further))


CASES = {
    "Llama 3": Case(
        model_type="llama",
        differs={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        layers="Llama 3's rotary frequencies",
    ),
    "Qwen3": Case(model_type="qwen3", differs={}, layers="norms of queries and keys"),
    "Qwen3-MoE": Case(model_type="qwen3_moe", differs=_EXPERTS, layers="mixture, 2 of 4 experts"),
    "Qwen3-Next": Case(
        model_type="qwen3_next",
        differs={**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
        layers="gated delta net, gated attention, mixture with a shared expert",
    ),
    "Qwen3.5": Case(model_type="qwen3_5_text", differs=_DELTA, layers="gated delta net, gated attention"),
    "Qwen3.5-MoE": Case(
        model_type="qwen3_5_moe_text",
        differs={**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
        layers="gated delta net, gated attention, mixture with a shared expert",
    ),
    "Gemma 2": Case(
        model_type="gemma2",
        differs={
            **_WINDOWED,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        layers="windows, capped scores and logits, norms after layers",
        attention="eager",
    ),
    "Gemma 3": Case(
        model_type="gemma3_text",
        differs={**_WINDOWED, "query_pre_attn_scalar": 8},
        layers="windows with separate rotary frequencies, norms after layers",
    ),
    "Gemma 4": Case(
        model_type="gemma4_text",
        differs={
            **_WINDOWED,
            "vocab_size_per_layer_input": WORDS,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
            "final_logit_softcapping": 5.0,
        },
        layers="windows, wider heads in full layers, later layers on earlier keys, embeddings by layer, capped logits",
    ),
    "Gemma 4 mixture": Case(
        model_type="gemma4_text",
        differs={
            **_WINDOWED,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        layers="windows, values that are keys, mixture next to a dense layer",
    ),
    "Llama 4 text": Case(
        model_type="llama4_text",
        differs={
            **_ONE_EXPERT,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0] * (LAYERS // 2),
            "layer_types": ["chunked_attention", "full_attention"] * (LAYERS // 2),
            "moe_layers": [1, 3],
            "floor_scale": 8,
        },
        layers="chunks, layers without positions, attention temperature, mixture, 1 of 4 experts",
    ),
    "gpt-oss": Case(
        model_type="gpt_oss",
        differs={**_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
        layers="windows, attention sinks, mixture, 2 of 4 experts",
        attention="eager",
    ),
    "Mixtral": Case(
        model_type="mixtral",
        differs={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        layers="windows, mixture, 2 of 4 experts",
    ),
    "DeepSeek-V3": Case(
        model_type="deepseek_v3",
        differs={
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
        layers="latent attention, mixture by groups",
    ),
}


def plain_model(case: Case, **further: Any) -> Any:
    """Return a random float32 model with transformers' own attention, whose distributions are far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(
            case.config(**further), dtype=torch.float32, attn_implementation=case.attention
        )
        with torch.no_grad():
            for parameter in made.parameters():
                # norms, scales and sinks are constant at first, which would hide an error in any of them
                parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.add_(
                    torch.randn_like(parameter) * 0.2
                )
    return made.eval()


def own_model(plain: Any) -> Any:
    """Return a model with the same weights and magicrl's attention."""
    register_attention()
    made = AutoModelForCausalLM.from_config(
        deepcopy(plain.config), dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    made.load_state_dict(plain.state_dict())
    return made.eval()


def samples() -> list[TrainSample]:
    """Return two prompts of equal length and one of another, with responses of 1 to 90 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, WORDS, n) for n in (11, 11, 19)]
    lengths = [(0, 90), (0, 1), (0, 13), (1, 13), (1, 30), (2, 7), (2, 2)]
    return [
        TrainSample(
            prompt_tokens=frozen_tokens(prompts[prompt]),
            tokens=frozen_tokens(rng.integers(2, WORDS, length)),
            advantage=0.0,
            group_index=prompt,
            sample_index=index,
            sampler_logprobs=frozen_floats(np.zeros(length)),
            policy_version=0,
        )
        for index, (prompt, length) in enumerate(lengths)
    ]


def plain_logprobs(model: Any, prompt: Any, tokens: Any) -> torch.Tensor:
    """Return ``[T]`` log-probs of one response under plain transformers, with gradient where enabled."""
    row = torch.tensor([*prompt.tolist(), *tokens.tolist()])
    logits = model(input_ids=row[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0]


def _gradient(model: Any, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of a weighted sum of log-probs by parameter. The weights differ from token to token."""
    model.zero_grad()
    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs)).cos()).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def _gradient_distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest distance over parameters, as a share of the whole gradient's norm."""
    whole = float(torch.stack([g.norm() for g in expected.values()]).norm())
    missing = expected.keys() - found.keys()
    distances = [float((found[n] - g).norm()) / whole for n, g in expected.items() if n not in missing]
    return max([*distances, *(float(expected[n].norm()) / whole for n in missing)])


def learner(plain: Any) -> dict[str, float]:
    """Return the largest differences of log-probs and gradients: packed, with shared prompts, and packed one by one."""
    given = samples()
    reference = torch.cat([plain_logprobs(plain, s.prompt_tokens, s.tokens) for s in given])
    expected = _gradient(plain, reference)
    reference = reference.detach()
    model = own_model(plain)
    scorer = PolicyScorer(model)
    found: dict[str, float] = {}
    alone = torch.cat([scorer.forward(PackedBatch.of([s]), 1.0)[0].detach() for s in given])
    for name, pack in (("packed", PackedBatch.of), ("shared", packed_with_shared_prompts)):
        logprobs, _ = scorer.forward(pack(given), 1.0)
        gradient = _gradient(model, logprobs)
        found[f"{name}_logprob"] = _largest(logprobs.detach(), reference)
        found[f"{name}_gradient"] = _gradient_distance(gradient, expected)
        found[f"{name}_alone"] = _largest(logprobs.detach(), alone)
    return found


def make_engine(model: Any, rows: int = 8, *, experts: bool = False) -> InProcessEngine:
    return InProcessEngine(
        model,
        EngineSettings(model="", max_rows=rows, memory_limit_mb=256, training=TrainingUse(experts=experts)),
        end_tokens=frozenset({1}),
        decode=lambda tokens: " ".join(map(str, tokens)),
        valid_vocab=WORDS,
        max_context=CONTEXT,
    )


def requests(sizes: Sequence[tuple[int, int, int]]) -> list[RolloutRequest]:
    """Return requests for ``(prompt tokens, samples, limit)`` each."""
    rng = np.random.default_rng(1)
    return [
        RolloutRequest(
            draw=draw,
            problem=Problem(id=str(draw), prompt="", references=(), verifier="exact", source="random"),
            prompt_tokens=frozen_tokens(rng.integers(2, WORDS, prompt)),
            group_size=count,
            sampling=SamplingParams(temperature=1.0, max_tokens=limit, seed=3),
        )
        for draw, (prompt, count, limit) in enumerate(sizes)
    ]


def finished(made: InProcessEngine, asked: Sequence[RolloutRequest]) -> list[RolloutGroup]:
    """Return all groups of a generation."""
    made.submit(asked)
    return list(made.finished())


@torch.no_grad()
def engine(plain: Any) -> dict[str, float]:
    """Return the largest difference between the engine's log-probs, with more samples than rows, and a full pass."""
    asked = requests([(11, 4, 24), (3, 4, 9), (11, 3, 25), (70, 2, 40)])
    largest, tokens = 0.0, 0
    for group in finished(make_engine(own_model(plain)), asked):
        for completion in group.completions:
            expected = plain_logprobs(plain, group.request.prompt_tokens, completion.tokens)
            largest = max(largest, _largest(torch.from_numpy(completion.sampler_logprobs.copy()), expected))
            tokens += len(completion)
    return {"sampled_logprob": largest, "sampled_tokens": tokens}


def samples_of(groups: Sequence[RolloutGroup]) -> list[TrainSample]:
    """Return ``groups`` as samples for the learner, with advantages of 0."""
    return [
        TrainSample(
            prompt_tokens=group.request.prompt_tokens,
            tokens=completion.tokens,
            advantage=0.0,
            group_index=group.request.draw,
            sample_index=index,
            sampler_logprobs=completion.sampler_logprobs,
            policy_version=0,
            experts=completion.experts,
        )
        for group in groups
        for index, completion in enumerate(group.completions)
    ]


def replayed(case: Case) -> dict[str, float]:
    """Compare routing in bfloat16, without and with the sampler's choices.

    Returns:
        For both, the share of tokens that the learner sends to other experts than the sampler did in some layer, and
        the mean absolute difference of their log-probs.
    """
    model = own_model(plain_model(case, hidden_size=128)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 0.5  # four times the width of the other columns, so their sums become as large
    groups = finished(make_engine(deepcopy(model), experts=True), requests([(11, 8, 60), (40, 8, 60), (25, 8, 60)]))
    given = samples_of(groups)
    sampled = np.concatenate([one.sampler_logprobs for one in given])

    def gap(scorer: PolicyScorer) -> float:
        return float(np.abs(np.concatenate(scorer.score(given, 1.0)[0]) - sampled).mean())

    scorer = PolicyScorer(model)
    routers = Routers(model)  # the routers return their choices for the packed row
    found = {"tokens": float(len(sampled)), "gap": gap(scorer)}
    with torch.no_grad():
        scorer.forward(PackedBatch.of(given), 1.0)
    recorded = PackedBatch.of(given).experts
    assert recorded is not None
    moved = np.sort(routers.chosen(), -1) != np.sort(recorded.numpy(), -1)
    return found | {
        "tokens_moved": float(moved.any((1, 2)).mean()),
        "choices_moved": float(moved.any(2).mean()),
        "gap_replayed": gap(PolicyScorer(model, ModelConfig(router_replay=True))),
    }


def speed(case: Case) -> Callable[[], float]:
    """Return the engine's tokens per second, 32 rows of 24 tokens per call."""
    further = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    if case.model_type == "deepseek_v3":
        further.pop("head_dim")
    made = make_engine(own_model(plain_model(case, **further)), rows=32)
    asked = requests([(32, 16, 24), (32, 16, 24)])

    def once() -> float:
        begin = time.perf_counter()
        tokens = sum(len(c) for group in finished(made, asked) for c in group.completions)
        return tokens / (time.perf_counter() - begin)

    return once


def refusal_or(part: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the result of ``part``, or the reason for which it was rejected."""
    try:
        return part()
    except Exception as error:  # noqa: BLE001 - what a model type is refused with is a result of the table
        return {f"{name}_refused": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def compared(case: Case) -> dict[str, Any]:
    """Return all comparisons of one model type except the speed."""
    plain = plain_model(case)
    return refusal_or(partial(learner, plain), "learner") | refusal_or(partial(engine, plain), "engine")
