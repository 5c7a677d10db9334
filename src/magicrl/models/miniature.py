"""Random weights of a model's own architecture, small enough for seconds on a CPU; its tokenizer reads any text.

For trials of a recipe: the model class, its biases and norms, tied or untied head and the grouping of its heads are the
real model's; width, depth and vocabulary are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from magicrl.models.attention import ATTENTION_NAME, register_attention
from magicrl.models.loading import save_policy

HEAD_DIM = 32
"""vLLM's CPU build has a kernel for it."""
MOST_HEADS = 8
_PAD, _END, _USER, _ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def make_byte_tokenizer(max_context: int) -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, and four control tokens; its chat template opens a reasoning block, as R1's does."""
    symbols = [_PAD, _END, _USER, _ASSISTANT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(name, special=True) for name in symbols[:4]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_miniature(config: Mapping[str, Any], folder: Path, *, max_context: int, seed: int = 0) -> Path:
    """Write the model folder of a miniature.

    Args:
        config: of the real model, as its ``config.json``: ``model_type``, heads, key/value heads, tying.
        folder: to write; one that is there is replaced.
        max_context: tokens.
        seed: of the weights.

    Raises:
        ValueError: an architecture that transformers does not know.
    """
    register_attention()
    tokenizer = make_byte_tokenizer(max_context)
    heads, groups = int(config["num_attention_heads"]), int(config.get("num_key_value_heads") or 0)
    kept = min(groups or heads, MOST_HEADS // 2)
    queries = kept * min(MOST_HEADS // kept, max(1, heads // (groups or heads)))
    small = AutoConfig.for_model(
        str(config["model_type"]),
        vocab_size=len(tokenizer),
        hidden_size=queries * HEAD_DIM,
        intermediate_size=2 * queries * HEAD_DIM,
        num_hidden_layers=2,
        num_attention_heads=queries,
        num_key_value_heads=kept,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_context,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return save_policy(model.eval(), tokenizer, folder)
