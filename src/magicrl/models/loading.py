"""Loading of Hugging Face causal LMs (docs/guides/models.md), and model folders that plain transformers can read.

A loaded policy uses magicrl's attention (see ``packing.py``) and runs in evaluation mode without dropout, so that
sampler and learner have the same distribution. Code from the model folder is never executed.
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
from safetensors import SafetensorError, safe_open
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
from magicrl.config.model_schema import DType
from magicrl.files import named_errors
from magicrl.models.linear import use_gradient_sums
from magicrl.models.model_files import (
    LANGUAGE_PARTS,
    WeightFiles,
    check_model,
    check_stored_as,
    find_model,
    not_finite,
    read_object,
    refuse_constant,
    weight_paths,
)
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.prompts import end_of_turn_token
from magicrl.models.recurrent import check_layers
from magicrl_verifiers.progress import plural


def device_name(device: torch.device) -> str:
    """Return the CUDA name of the device, ``cpu`` for any other."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_mb(device: torch.device) -> float:
    """Return the peak memory in MiB: of torch on the GPU for this process, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux reports KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


_log = logging.getLogger(__name__)

_LONGEST_REASON = 400
# transformers reports a malformed file by any exception of its parsers.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A policy with the properties that the rest of magicrl needs."""

    model: PreTrainedModel  # the causal LM, in evaluation mode, on its device, with magicrl's attention
    tokenizer: PreTrainedTokenizerBase  # its tokenizer
    # tokens that end a response: ``eos_token_id`` of the configs, the tokenizer's, the chat template's end of turn
    end_tokens: frozenset[int]
    max_context: int  # largest number of tokens of prompt and response together
    valid_vocab: int  # rows of the output head with a token; later rows are padding and must be masked
    folder: str  # folder or hub name that it was loaded from
    licence: str | None = None  # according to its model card or licence file


def resolve_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of a recipe's ``run.device``. ``auto`` is the GPU if there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise RecipeError("'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'", key="")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def resolve_dtype(name: DType | torch.dtype) -> torch.dtype:
    """Return a recipe's precision as a torch dtype."""
    return name if isinstance(name, torch.dtype) else getattr(torch, name)


def warn_of_slow_products(dtype: torch.dtype, device: torch.device) -> None:
    """Warn on CPUs where float16 works but is slow."""
    if dtype == torch.float16 and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        _log.warning(
            "this CPU has no float16 products, and torch's own take several times as long as float32's "
            "(docs/guides/models.md#precision): model.dtype = 'float32' or 'bfloat16' is faster here"
        )


def load_policy(
    folder_or_name: str | Path,
    *,
    dtype: DType | torch.dtype = "float32",
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a causal LM with its tokenizer from a folder, or from the hub for a name ``owner/name``.

    The end tokens are written into the model's generation config, so that ``generate`` of a folder from ``save_policy``
    stops where magicrl stops.

    Raises:
        RecipeError: The name is neither a folder nor a hub name.
        ValueError: A file is missing or damaged; weights are missing, not finite or of other shapes than in the config;
            or there is no end token or context length. The message names the file or folder and the remedy.
    """
    register_attention()
    source = str(folder_or_name)
    folder, tokenizer = _checked(source)
    try:
        config = language_config(folder, source)
        with quiet_bars():
            loaded = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=resolve_dtype(dtype),
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                use_safetensors=True,  # pickled weights can execute code
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the error below can name them
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
            f"model {source} lacks {plural(len(missing), 'weight')}, e.g. {missing[0]}; "
            "they would be random: check that the folder is a complete causal LM"
        )
    _warn_of_unused(sorted(info["unexpected_keys"]), source)
    parameters = dict(model.named_parameters())
    # transformers converts 8-bit values without their scales
    for path in weight_paths(folder, source):
        with safe_open(path, framework="np") as file:
            for name in sorted(parameters.keys() & set(file.keys())):
                check_stored_as(file.get_slice(name).get_dtype(), name, source)
    for name, parameter in parameters.items():
        if not bool(parameter.isfinite().all()):
            raise ValueError(not_finite(name, source))
    refuse_constant((weight for weight in model.parameters() if weight.ndim > 1), source)
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    use_gradient_sums(model)
    model.eval()
    model.name_or_path = source  # the hub name, not the folder of the cache
    return describe_policy(model, tokenizer, folder=source, licence=read_licence(folder))


def load_shell(folder_or_name: str | Path) -> LoadedModel:
    """Load as ``load_policy`` does, but read and check only the headers of the weight files.

    For a process that does not train the model itself. Parameters have shapes but no data (the meta device).
    """
    shell = described_model(folder_or_name)
    _warn_of_unused(WeightFiles(find_model(shell.folder), shell.model, shell.folder).unused, shell.folder)
    return shell


def described_model(folder_or_name: str | Path) -> LoadedModel:
    """Return the properties of a model from its files, without reading weights. Its parameters have no data."""
    source = str(folder_or_name)
    folder, tokenizer = _checked(source)
    return describe_policy(load_empty(source), tokenizer, folder=source, licence=read_licence(folder))


def _checked(source: str) -> tuple[Path, PreTrainedTokenizerBase]:
    folder = find_model(source)
    check_model(folder, source)
    return folder, load_tokenizer(folder, source)


def load_empty(folder_or_name: str | Path) -> PreTrainedModel:
    """Return a model of the folder's architecture with parameters on the meta device, for the caller to fill, and
    computed buffers.
    """
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
    # Buffers (rotary frequencies) are not in the files. They are computed, so they need memory.
    for name, buffer in list(model.named_buffers()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()  # no effect on parameters on the meta device
    model.name_or_path = source
    return model


def describe_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, folder: str, licence: str | None = None
) -> LoadedModel:
    """Return the record of a model in memory.

    Raises:
        ValueError: It has no end token, states no context length, or has layers that mix packed sequences.
    """
    check_layers(model)
    ends = _end_tokens(model, tokenizer, folder)
    # So that `generate` of the saved model stops where magicrl stops.
    model.generation_config.eos_token_id = cast(Any, sorted(ends))
    max_context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(max_context, int):
        raise ValueError(f"model {folder} states no context length; set max_position_embeddings in its config.json")
    # transformers takes the long factors for a whole row if any position in it is above this length: a token's
    # log-prob would depend on the other sequences of the row, and the learner's differ from the sampler's.
    config = model.config.get_text_config()
    stated: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # LongRoPE has the same factors in all rows up to a length, stated for all layers or for each type of layers.
    every = [stated, *(one for one in stated.values() if isinstance(one, dict))]
    found = [one["original_max_position_embeddings"] for one in every if one.get("rope_type") == "longrope"]
    if (short := min(found, default=None)) is not None and short < max_context:
        _log.warning(
            "model %s: its context is %d tokens here, not %d: above it, LongRoPE rotates a whole batch differently",
            *(folder, short, max_context),
        )
        max_context = short
    head = model.get_output_embeddings()
    assert head is not None, "a causal LM has an output head"
    rows = int(head.weight.shape[0])
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        text = f"the tokenizer has tokens up to id {largest}, and the model has {rows}"
        if tokenizer.vocab_size > rows:
            raise ValueError(
                f"model {folder}: {text}: they do not belong together; take tokenizer and weights from one model"
            )
        # Many published models have an added padding token without a row. It matters only where a text contains it.
        names = [name for name, token in tokenizer.get_vocab().items() if token >= rows]
        _log.warning("model %s: %s: a text with %s cannot be read by this model", folder, text, ", ".join(names[:3]))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        end_tokens=ends,
        max_context=max_context,
        # Rows after the tokenizer's last token are padding, which could be sampled but not decoded.
        valid_vocab=min(rows, largest + 1),
        folder=folder,
        licence=licence,
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
    """Write a model folder (safetensors, config, generation config, tokenizer, chat template), completely or not at
    all.

    It is written next to its destination and renamed. An existing model folder is replaced.

    Args:
        model: The causal LM.
        tokenizer: Its tokenizer.
        folder: The destination.
        extra_files: Further text files by name.
        generation: Further settings of the generation config.
        extra_folders: Functions that write further folders, by name.

    Raises:
        ValueError: The destination exists, holds files, and is not a model folder.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not a model folder; choose another output or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Next to it, on the same file system, because only then is a rename atomic.
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with named_errors(folder):
            _write_model(model, partial, generation or {})
            tokenizer.save_pretrained(partial)
            for name, text in (extra_files or {}).items():
                (partial / name).write_text(text, encoding="utf-8")
            for name, write in (extra_folders or {}).items():
                write(partial / name)
            # safetensors 0.8 lets only this user read its files; a server may run as another one
            for weights in partial.rglob("*.safetensors"):
                shutil.copymode(partial / "config.json", weights)
    except BaseException:  # e.g. a full disk, which the rest of the model would keep full
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _put_in_place(partial, folder)
    return folder


def _write_model(model: PreTrainedModel, folder: Path, generation: Mapping[str, Any]) -> None:
    """Write weights, config and generation config. ``generation`` is added to the settings of the last."""
    # A copy, because the recommended settings belong to the folder, not to the model in memory. Written separately,
    # because `save_pretrained` refuses settings that loading accepts, e.g. a temperature without do_sample.
    stated = model.generation_config
    settings = copy.deepcopy(stated)
    settings.update(**generation)
    model.generation_config = GenerationConfig()
    try:
        with quiet_bars():
            model.save_pretrained(folder)
    finally:
        model.generation_config = stated
    settings.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename ``partial`` to ``folder``. A rename cannot replace a folder, so an earlier one is moved away first."""
    former = folder.with_name(f".{folder.name}.former-{os.getpid()}")
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)


def read_licence(folder: Path) -> str | None:
    """Return the licence in a model card's front matter, else the first line of a LICENSE file, else None."""
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
    """Hide transformers' progress bars within this context, because they would break magicrl's own display."""
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
    """Return the tokenizer of a model folder, which the user named ``source``."""
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except _LOADER_ERRORS as error:
        raise _unloadable(source, error) from error


def language_config(folder: Path, source: str) -> PreTrainedConfig:
    """Return the configuration of a folder's language model: for a multimodal model, that of its text part.

    Raises:
        ValueError: transformers has no causal LM for the text part, or the weights are quantised.
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
    # Some configurations state it only for the whole model, while the text part has another default.
    if "tie_word_embeddings" in stated and "tie_word_embeddings" not in stated.get("text_config", {}):
        text.tie_word_embeddings = stated["tie_word_embeddings"]
    return text


def _warn_of_unused(names: Sequence[str], source: str) -> None:
    if names:
        _log.warning("model %s: %d weights of its files are not used, e.g. %s", source, len(names), names[0])


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str) -> frozenset[int]:
    stated: Any = getattr(model.generation_config, "eos_token_id", None)
    # In the order of `generate`: the generation config first.
    if stated is None:
        stated = getattr(model.config.get_text_config(), "eos_token_id", None)
    stated_ids: list[Any] = stated if isinstance(stated, list) else [stated]
    try:
        # All of them, because a base model with a chat template states another end token than that of its turns.
        named: list[Any] = [*stated_ids, tokenizer.eos_token_id, end_of_turn_token(tokenizer)]
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
            if token == tokenizer.eos_token_id and token not in stated_ids:
                raise ValueError(
                    f"model {folder}: the tokenizer's end token {tokenizer.eos_token!r} has the id {token}, and the "
                    f"model has {rows} tokens: they do not belong together; take tokenizer and weights from one model"
                )
            raise ValueError(
                f"model {folder}: end token {token!r} is none of its {rows} tokens; "
                "correct eos_token_id in its generation_config.json"
            )
    return ends
