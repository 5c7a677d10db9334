"""Tiny models of several architectures: one with magicrl's attention for the engine, one with transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SIZES, request
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.records import RolloutRequest
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine

VOCAB = SIZES["vocab_size"]
ONE = SIZES | {"num_key_value_heads": 1}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "qwen2-bias": Qwen2Config(**ONE, tie_word_embeddings=True),
    "qwen3-qknorm": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "gemma": GemmaConfig(**ONE, head_dim=16),
    # these two run with transformers' layers: norms after attention, windows (not reached), soft-capped logits
    "gemma2": Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**ONE, head_dim=16, sliding_window=64),
    "mistral-window": MistralConfig(**SIZES, sliding_window=8),
}


def reference_model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a random model with transformers' attention and large weights, so that distributions are far from uniform.

    Its "eager" attention takes the softmax in float32 even in a float64 model; "sdpa" does not.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[kind]), attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def engine_for(
    reference: Any,
    *,
    end_tokens: frozenset[int] = frozenset(),
    max_rows: int = 8,
    memory_limit_mb: int = 64,
    valid_vocab: int = VOCAB,
    max_context: int = 128,
    static_steps: bool | None = None,
) -> InProcessEngine:
    """Return an engine with the reference's weights, given at construction (version -1)."""
    register_attention()
    model = AutoModelForCausalLM.from_config(deepcopy(reference.config), attn_implementation=ATTENTION_NAME)
    model = model.to(reference.dtype)
    model.load_state_dict(reference.state_dict())
    return InProcessEngine(
        model,
        EngineSettings(model="", max_rows=max_rows, memory_limit_mb=memory_limit_mb),
        end_tokens=end_tokens,
        decode=lambda tokens: " ".join(map(str, tokens)),
        valid_vocab=valid_vocab,
        max_context=max_context,
        static_steps=static_steps,
    )


def request_for(
    draw: int, prompt: Sequence[int], *, group_size: int = 4, limit: int = 12, seed: int = 7, **further: Any
) -> RolloutRequest:
    return request(draw, prompt, size=group_size, limit=limit, seed=seed, **further)


def mixed_requests(count: int = 6, **options: Any) -> list[RolloutRequest]:
    """Return prompts of different and of equal lengths."""
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 3, 5, 9, 1, 3, 7, 5, 2, 4][:count]
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [request_for(draw, prompt, **options) for draw, prompt in enumerate(prompts)]


@pytest.fixture
def make_reference() -> Callable[..., Any]:
    return reference_model


@pytest.fixture
def make_engine() -> Callable[..., InProcessEngine]:
    return engine_for


@pytest.fixture
def make_request() -> Callable[..., RolloutRequest]:
    return request_for


@pytest.fixture
def make_requests() -> Callable[..., list[RolloutRequest]]:
    return mixed_requests


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., None]:
    """Save a random model with a tokenizer and a chat template, for engines that load folders themselves."""

    def save(folder: Path, *, head_dim: int = 32, padding: int = 0, tied: bool = False) -> None:
        words = {word: place for place, word in enumerate(["<end>", "<unk>", *(f"w{n}" for n in range(VOCAB - 2))])}
        backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
        backend.pre_tokenizer = WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
        tokenizer.chat_template = "w1 {{ messages[0]['content'] }} w2"
        sizes = ONE | {"hidden_size": 64, "num_attention_heads": 2, "vocab_size": VOCAB + padding, "eos_token_id": 0}
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, head_dim=head_dim, tie_word_embeddings=tied))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
                else:
                    parameter.uniform_(0.5, 1.5)
        model.generation_config.do_sample = True  # transformers' server would otherwise ignore the temperature
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return save
