"""Load Hugging Face causal LMs (docs/models.md) for magicrl, and write model folders that plain transformers reads.

A loaded policy uses magicrl's attention (see ``packing.py``), runs in evaluation mode (no dropout, so that the
sampler and the learner are one distribution) and never executes code from the model folder.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import resource
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from magicrl.config.errors import RecipeError
from magicrl.config.schema import DType
from magicrl.models.model_files import LANGUAGE_PARTS, WeightFiles, check_model, find_model, not_finite, read_object
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.prompts import end_of_turn_token
from magicrl.models.recurrent import check_layers


def device_name(device: torch.device) -> str:
    """What CUDA calls the device; ``cpu`` for anything else."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_mb(device: torch.device) -> float:
    """Most memory so far, MiB: what torch held of the GPU for this process; on a CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux counts it in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


_log = logging.getLogger(__name__)

_LONGEST_REASON = 400
# transformers reports a malformed file by whatever its parser happened to raise
_LOADER_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    StrictDataclassError,
    SafetensorError,
)
_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A policy and what the other rooms need to know of it."""

    model: PreTrainedModel  # the causal LM, in evaluation mode, on its device, with magicrl's attention
    tokenizer: PreTrainedTokenizerBase  # its tokenizer
    # every one that ends a response: ``eos_token_id`` of the configs, the tokenizer's, the chat template's end of turn
    end_tokens: frozenset[int]
    max_context: int  # most tokens of prompt and response together
    valid_vocab: int  # rows of the output head that stand for a token; later ones are padding and must be masked
    folder: str  # where it was loaded from (folder or hub name)
    licence: str | None = None  # what its model card or licence file says, if anything


def resolve_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of a recipe's ``run.device``; ``auto`` is the GPU where there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise RecipeError("'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'", key="")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def resolve_dtype(name: DType | torch.dtype) -> torch.dtype:
    """A recipe's precision as torch knows it."""
    return name if isinstance(name, torch.dtype) else _DTYPES[name]


def warn_of_slow_products(dtype: torch.dtype, device: torch.device) -> None:
    """Tell where float16 is there to be tried, not to be trained in."""
    if dtype == torch.float16 and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        _log.warning(
            "this CPU has no float16 products, and torch's own take several times as long as float32's "
            "(docs/models.md#precision): model.dtype = 'float32' or 'bfloat16' is faster here"
        )


def load_policy(
    folder_or_name: str | Path,
    *,
    dtype: DType | torch.dtype = "float32",
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a causal LM with its tokenizer from a folder, or from the hub when it is ``owner/name``.

    The end tokens found are written into the model's generation config, so that a later ``save_policy`` gives a
    folder whose ``generate`` stops where magicrl stops.

    Raises:
        RecipeError: the name can be neither a folder nor a hub name.
        ValueError: a file is missing or damaged, weights are missing, of other shapes than the config's or not
            finite, no end token, or no stated context length. The message names the file or folder and what to do.
    """
    register_attention()
    source = str(folder_or_name)
    folder, tokenizer = _checked(source)
    with quiet_bars():
        model = _load_model(folder, source, resolve_dtype(dtype))
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(not_finite(name, source))
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    model.eval()
    model.name_or_path = source  # of a hub name, not the cache's folder
    return describe_policy(model, tokenizer, folder=source, licence=read_licence(folder))


def load_shell(folder_or_name: str | Path) -> LoadedModel:
    """``load_policy`` without the weights, of which only the files' headers are read and checked.

    For a process that does not train the model itself: parameters have shapes but no data (the meta device).
    """
    shell = described_model(folder_or_name)
    _warn_of_unused(WeightFiles(find_model(shell.folder), shell.model, shell.folder).unused, shell.folder)
    return shell


def described_model(folder_or_name: str | Path) -> LoadedModel:
    """What is known of a model from its files but the weights; its parameters have no data."""
    source = str(folder_or_name)
    folder, tokenizer = _checked(source)
    return describe_policy(load_empty(source), tokenizer, folder=source, licence=read_licence(folder))


def _checked(source: str) -> tuple[Path, PreTrainedTokenizerBase]:
    folder = find_model(source)
    check_model(folder, source)
    return folder, load_tokenizer(folder, source)


def load_empty(folder_or_name: str | Path) -> PreTrainedModel:
    """A model of the folder's architecture: parameters on the meta device for the caller to fill, buffers computed."""
    register_attention()
    source = str(folder_or_name)
    folder = find_model(source)
    try:
        config = language_config(folder, source)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
        model = cast(PreTrainedModel, made.eval())
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except _LOADER_ERRORS as error:
        raise _unloadable(source, error) from error
    # buffers (rotary frequencies) stand in no file: they are computed, so they need memory
    for name, buffer in list(model.named_buffers()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()  # of parameters on the meta device it changes nothing
    model.name_or_path = source
    return model


def describe_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, folder: str, licence: str | None = None
) -> LoadedModel:
    """The record of a model in memory.

    ``ValueError`` if it has no end token, states no context length, or has layers that mix packed sequences.
    """
    check_layers(model)
    ends = _end_tokens(model, tokenizer, folder)
    # so that `generate` of the saved model stops where magicrl stops
    model.generation_config.eos_token_id = cast(Any, sorted(ends))
    head = model.get_output_embeddings()
    assert head is not None, "a causal LM has an output head"
    rows = int(head.weight.shape[0])
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        end_tokens=ends,
        max_context=_max_context(model, folder),
        # rows beyond the tokenizer's last token are padding, which could be sampled but not decoded
        valid_vocab=min(rows, max(tokenizer.get_vocab().values()) + 1),
        folder=folder,
        licence=licence or read_licence(Path(folder)),
    )


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    extra_files: Mapping[str, str] | None = None,
    generation: Mapping[str, Any] | None = None,
    extra_folders: Mapping[str, Callable[[Path], None]] | None = None,
) -> Path:
    """Write a model folder (safetensors, config, generation config, tokenizer, chat template), whole or not at all.

    It is written beside its destination and renamed. A model folder already there is replaced; any other folder
    that holds files is not touched (``ValueError``). ``extra_files`` are further text files of the folder by name,
    ``generation`` settings of its generation config beside those that the model has; ``extra_folders`` write folders
    in it by name.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not a model folder; choose another output or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside it, on the same file system: only there a rename is one move
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with quiet_bars():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if generation:
        # of a copy: what the card recommends is the folder's, not the model's in memory
        recommended = copy.deepcopy(model.generation_config)
        recommended.update(**generation)
        recommended.save_pretrained(partial)
    for name, text in (extra_files or {}).items():
        (partial / name).write_text(text, encoding="utf-8")
    for name, write in (extra_folders or {}).items():
        write(partial / name)
    _put_in_place(partial, folder)
    return folder


def read_licence(folder: Path) -> str | None:
    """The licence that a model card's front matter names, else the first line of a LICENSE file, else None."""
    card = folder / "README.md"
    if card.is_file():
        found = re.search(r"^license:\s*[\"']?([^\"'\n]+)", card.read_text(encoding="utf-8", errors="replace"), re.M)
        if found:
            return found.group(1).strip()
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
            return next((line.strip() for line in lines if line.strip()), None)
    return None


@contextmanager
def quiet_bars() -> Generator[None]:
    """Silence transformers' progress bars for a moment: they would tear magicrl's own display."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _unloadable(source: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()).rstrip(".")[:_LONGEST_REASON]
    return ValueError(
        f"cannot load model {source!r}: {type(error).__name__}: {reason}. Correct the file; if plain transformers "
        "loads the folder (AutoModelForCausalLM.from_pretrained), please report this"
    )


def load_tokenizer(folder: Path, source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, which the user called ``source``."""
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except _LOADER_ERRORS as error:
        raise _unloadable(source, error) from error


def language_config(folder: Path, source: str) -> PreTrainedConfig:
    """The configuration of a folder's language model: of a multimodal model, that of its text part.

    ``ValueError`` where transformers has no causal LM for the text part, or the weights are quantised.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    stated = read_object(folder / "config.json")
    quantised = stated.get("quantization_config") or stated.get("text_config", {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "a method that config.json does not name")
        raise ValueError(
            f"model {source} is quantised ({method}); training needs the weights it was quantised from (float32, "
            "bfloat16 or float16): name that model, or convert it and remove quantization_config from its config.json"
        )
    text = config.get_text_config()
    if type(text) is type(config):
        return config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model {source} ({config.model_type}) is multimodal, and transformers has no causal LM for its text part "
            f"({text.model_type}); use a text model"
        )
    # some say it of the whole only, where the text part has a default of its own
    if "tie_word_embeddings" in stated and "tie_word_embeddings" not in stated.get("text_config", {}):
        text.tie_word_embeddings = stated["tie_word_embeddings"]
    return text


def _load_model(folder: Path, source: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        config = language_config(folder, source)
        loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            use_safetensors=True,  # pickled weights can run code
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # only so that they can be named below
            key_mapping=LANGUAGE_PARTS,
        )
    except _LOADER_ERRORS as error:
        raise _unloadable(source, error) from error
    model, info = cast("tuple[PreTrainedModel, Mapping[str, Any]]", loaded)
    if info["mismatched_keys"]:
        name, found, wanted = min(info["mismatched_keys"])
        raise ValueError(
            f"model {source}: {len(info['mismatched_keys'])} weights do not have the shapes that config.json states, "
            f"e.g. {name} is {list(found)} in the file and {list(wanted)} by the config; "
            "take config.json and weights from one model"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"model {source} lacks {len(missing)} weights, e.g. {missing[0]}; "
            "they would be random: check that the folder is a complete causal LM"
        )
    _warn_of_unused(sorted(info["unexpected_keys"]), source)
    return model


def _warn_of_unused(names: Sequence[str], source: str) -> None:
    if names:
        _log.warning("model %s: %d weights of its files are not used, e.g. %s", source, len(names), names[0])


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str) -> frozenset[int]:
    stated: Any = getattr(model.generation_config, "eos_token_id", None)
    # as `generate` reads them: the generation config first
    if stated is None:
        stated = getattr(model.config.get_text_config(), "eos_token_id", None)
    named: list[Any] = stated if isinstance(stated, list) else [stated]
    try:
        # all of them: a base model that ships a chat template states another end than the template's turns have
        named = [*named, tokenizer.eos_token_id, end_of_turn_token(tokenizer)]
    except ValueError as error:
        raise ValueError(f"model {folder}: {error}") from error
    ends = frozenset(token for token in named if token is not None)
    if not ends:
        raise ValueError(
            f"model {folder} states no end token, so no response could ever end; "
            "set eos_token_id in its generation_config.json"
        )
    rows = int(cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0])
    for token in ends:
        if not isinstance(token, int) or not 0 <= token < rows:
            raise ValueError(
                f"model {folder}: end token {token!r} is none of its {rows} tokens; "
                "correct eos_token_id in its generation_config.json"
            )
    return ends


def _max_context(model: PreTrainedModel, folder: str) -> int:
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ValueError(f"model {folder} states no context length; set max_position_embeddings in its config.json")
    return length


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename ``partial`` to ``folder``; a former folder is moved aside first, since a rename cannot replace it."""
    former = folder.with_name(f".{folder.name}.former-{os.getpid()}")
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
