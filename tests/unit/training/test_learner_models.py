"""One learner for many architectures: log-probs and gradients are those of the plain model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from builders import SIZES, train_sample

from magicrl.config.model_schema import ModelConfig
from magicrl.records import TrainBatch, TrainSample, frozen_floats
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

COMMON = SIZES | {"vocab_size": 48, "initializer_range": 0.3, "eos_token_id": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama_untied": ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 32}),
    "gemma3_window": ("Gemma3", {"head_dim": 8, "sliding_window": 8}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "granite": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {}),
}


def make(name: str, **changes: Any) -> Any:
    family, extra = MODELS[name]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**(COMMON | extra | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).double()


def samples() -> list[TrainSample]:
    rng = np.random.default_rng(0)
    return [
        train_sample(
            rng.integers(2, 48, prompt),
            rng.integers(2, 48, response),
            advantage=advantage,
            sample_index=i,
            sampler_logprobs=frozen_floats(np.full(response, -4.0)),
        )
        for i, (prompt, response, advantage) in enumerate([(3, 9, 1.0), (3, 20, -0.5), (1, 1, 0.7), (9, 17, -1.2)])
    ]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_plain_models(name: str) -> None:
    plain = make(name)
    plain.set_attn_implementation("sdpa")  # the eager attention computes its softmax in float32
    given = samples()
    tokens = sum(len(s.tokens) for s in given)
    total = torch.zeros((), dtype=torch.float64)
    expected: list[np.ndarray] = []
    for s in given:
        row = torch.tensor([*s.prompt_tokens.tolist(), *s.tokens.tolist()])
        logits = plain(input_ids=row[None], use_cache=False).logits[0, len(s.prompt_tokens) - 1 : -1] / 0.9
        logp = logits.log_softmax(-1)
        chosen = logp.gather(1, row[len(s.prompt_tokens) :, None])[:, 0]
        expected.append(chosen.detach().numpy())
        # on-policy the gradient of rho A is that of A log pi
        total = total - (s.advantage * chosen - 0.1 * (logp.exp() * logp).sum(-1)).sum() / tokens
    total.backward()

    one = LocalLearner(make(name), LearnerSettings(model=ModelConfig(micro_batch_tokens=40)))
    batch = TrainBatch.of(given)
    controls = Controls(alpha=0.1, temperature=0.9)
    for ours, theirs in zip(one.logprobs(given, 0.9)[0], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    one.accumulate(batch.samples, one.objective.sample_weights(batch), controls)
    found = one.gradients()
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None
        # some norms compute in float32 for any precision of the model
        assert float((found[key] - parameter.grad).norm()) < 2e-6 * float(parameter.grad.norm()), key


def test_a_head_that_is_more_than_a_product_is_refused() -> None:
    class Doubled(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    config = transformers.LlamaConfig(**COMMON)
    with pytest.raises(ValueError, match="cannot train this architecture"):
        LocalLearner(Doubled(config))
