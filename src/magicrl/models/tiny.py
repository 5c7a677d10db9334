"""The tiny reasoner: a Llama decoder of about 0.1M parameters over the symbols of a task family.

It needs no download and learns in seconds, yet is an ordinary Hugging Face folder: everything that works on it
works on a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from magicrl.config.schema import TinyModelConfig
from magicrl.models.attention import ATTENTION_NAME, register_attention

PAD = "<pad>"
END = "<end>"


def make_tokenizer(vocabulary: Sequence[str], max_context: int) -> PreTrainedTokenizerFast:
    """One token a whitespace-separated symbol; decoding joins them by single spaces.

    ``<pad>`` is token 0 and ``<end>`` (the end of a response) token 1. A symbol outside the vocabulary encodes to
    ``<pad>``, declared as the unknown token, which ``PromptEncoder`` turns into an error.

    Raises:
        ValueError: a symbol is empty, holds whitespace, stands twice or is reserved.
    """
    ids = {PAD: 0, END: 1}
    for symbol in vocabulary:
        if symbol.split() != [symbol]:
            raise ValueError(f"a symbol of a tiny model's vocabulary must be one word, got {symbol!r}")
        if symbol in ids:
            raise ValueError(f"symbol {symbol!r} of the vocabulary is reserved or stands twice")
        ids[symbol] = len(ids)
    backend = Tokenizer(WordLevel(ids, unk_token=PAD))
    backend.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )


def make_tiny(
    config: TinyModelConfig, vocabulary: Sequence[str], seed: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A seeded float32 model with tied embeddings, magicrl's attention and its tokenizer.

    Raises:
        ValueError: ``hidden_size`` is no multiple of ``heads``, or the vocabulary is unusable.
    """
    if config.hidden_size % config.heads:
        raise ValueError(f"model.tiny.hidden_size {config.hidden_size} must be a multiple of heads {config.heads}")
    register_attention()
    tokenizer = make_tokenizer(vocabulary, config.max_context)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=True,
        # The usual 0.02 suits widths near 1000; at width 64 it delays the step from copying to adding threefold.
        initializer_range=config.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is none of this function's business
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(llama, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    model = cast(LlamaForCausalLM, made)
    model.eval()
    return model, tokenizer
