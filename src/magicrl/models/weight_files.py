"""The weights of a model folder read rows at a time, so that no process has to hold the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from magicrl.models.folder import weight_paths

_PLAIN = ("F64", "F32", "F16", "BF16")
"""Stored types that are a weight's value; others need scales that lie elsewhere."""


class WeightFiles:
    """The mapped safetensors files of a model folder, one or many, by the names that the model gives its weights.

    Only headers are read until rows are asked for. A tied head's weight is the embedding's, whichever of the two names
    the files have.

    Args:
        folder: of the model.
        model: built from the folder's configuration; its parameters may be on the meta device.
        source: what the user called it.

    Raises:
        ValueError: the files lack a weight of the model, or one has another shape or is quantised; says which.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, source: str) -> None:
        self._source = source
        self._file_of: dict[str, Any] = {}
        for path in weight_paths(folder, source):
            file = safe_open(path, framework="pt", device="cpu")
            self._file_of.update(dict.fromkeys(file.keys(), file))
        tied: dict[str, str] = model.all_tied_weights_keys
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._names = {name: self._present(name, tied) for name in self._shapes}
        self._check()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the weight ``name`` on the CPU, in the files' precision.

        Raises:
            ValueError: they are not finite, or two names that the model ties have different values.
        """
        found, *others = (self._file_of[key].get_slice(key)[start:stop] for key in self._names[name])
        if not bool(found.isfinite().all()):
            raise ValueError(not_finite(name, self._source))
        if any(not torch.equal(found, other) for other in others):
            raise ValueError(
                f"model {self._source}: its configuration ties {' and '.join(self._names[name])}, but its files hold "
                "different values for them; set tie_word_embeddings in config.json to what the model was trained with"
            )
        return found

    def whole(self, name: str) -> Tensor | None:
        """A tensor that is no parameter, such as a buffer; None where the files do not have it."""
        return self._file_of[name].get_tensor(name) if name in self._file_of else None

    @property
    def unused(self) -> list[str]:
        """Names in the files that the model does not have."""
        return sorted(self._file_of.keys() - self._shapes.keys())

    def _present(self, name: str, tied: dict[str, str]) -> list[str]:
        """Under which names of the files a weight of the model is found."""
        first = tied.get(name, name)
        same = [first, *(other for other, to in tied.items() if to == first)]
        return [key for key in same if key in self._file_of]

    def _check(self) -> None:
        missing = sorted(name for name, keys in self._names.items() if not keys)
        if missing:
            raise ValueError(
                f"the weight files of model {self._source} lack {len(missing)} weights of a {len(self._names)}-tensor "
                f"causal LM, e.g. {missing[0]}{self._instead()}. If plain transformers loads the model, write it again "
                "under the names that it has there: AutoModelForCausalLM.from_pretrained(model)"
                ".save_pretrained(folder, save_original_format=False), and the tokenizer beside it"
            )
        for name, keys in self._names.items():
            for key in keys:
                header = self._file_of[key].get_slice(key)
                found, kind = tuple(header.get_shape()), header.get_dtype()
                if kind not in _PLAIN:
                    raise ValueError(
                        f"model {self._source}: weight {key} is stored as {kind}, so the model is quantised; training "
                        "needs the weights it was quantised from (float32, bfloat16 or float16)"
                    )
                if found != self._shapes[name]:
                    raise ValueError(
                        f"model {self._source}: weight {key} is {list(found)} in the file and "
                        f"{list(self._shapes[name])} by the config; take config.json and weights from one model"
                    )

    def _instead(self) -> str:
        return f" (they have others, e.g. {self.unused[0]})" if self.unused else ""


def weights_differ(trained: Path, start: Path) -> bool | None:
    """Whether a weight of one model folder is not what the other has, in the trained one's precision.

    It stops at the first that differs. None where the two have no name in common.
    """
    start_files = {name: file for file in _opened(start) for name in file.keys()}  # noqa: SIM118 (no mapping)
    compared = 0
    for file in _opened(trained):
        for name in file.keys():  # noqa: SIM118
            if name in start_files:
                compared += 1
                found = file.get_tensor(name)
                if not torch.equal(found, start_files[name].get_tensor(name).to(found.dtype)):
                    return True
    return False if compared else None


def _opened(folder: Path) -> list[Any]:
    return [safe_open(path, framework="pt", device="cpu") for path in weight_paths(folder, str(folder))]


def not_finite(name: str, source: str) -> str:
    """The error's text for a start model's weight that is NaN or infinite."""
    return (
        f"model {source}: weight {name} holds values that are not finite (NaN or infinity), so nothing can be "
        "sampled; take an earlier checkpoint of that model, or fetch it again"
    )
