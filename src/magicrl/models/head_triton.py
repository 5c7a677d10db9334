"""The head's two passes over the logits as Triton kernels: no logit of the forward pass ever reaches memory.

A program of the forward pass multiplies its rows with one tile of words after the other and keeps three running
numbers a row (largest logit, sum of exponentials, their mean logit's numerator), which are those of a softmax over
the words seen so far; programs share the vocabulary, and their numbers are joined in float32 afterwards, in a fixed
order. The kernel of the backward pass multiplies again and writes the product's gradient, rounded to the weights'
dtype, for the two products that follow.

The kernels run on CUDA, and anywhere in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested
where there is no GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from magicrl.models.head_backend import HeadInputs, Pull, Tiles

TRITON_IS_THERE = importlib.util.find_spec("triton") is not None

_kernels: Any = importlib.import_module("magicrl.models.head_kernels") if TRITON_IS_THERE else None


_WIDE, _NARROW = Tiles(words=256), Tiles(words=128)
_WIDE_NEEDS_BYTES = 3 * 64 * (128 + 256) * 2


def tiles_for(device: torch.device) -> Tiles:
    """Tiles of 256 words where a device's shared memory has room for three stages of them, else of 128."""
    if device.type != "cuda":
        return _NARROW
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _WIDE if room >= _WIDE_NEEDS_BYTES else _NARROW


class TritonHead:
    """A ``HeadBackend`` for CUDA."""

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        self._tiles = inputs.options.tiles or tiles_for(inputs.hidden.device)

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """See ``HeadBackend``."""
        inputs, tiles = self._inputs, self._tiles
        tokens, vocab = len(inputs.hidden), len(inputs.weight)
        span = tiles.words * tiles.words_per_program
        parts = -(-vocab // span)
        largest, total, weighted = torch.empty((3, parts, tokens), dtype=torch.float32, device=inputs.hidden.device)
        chosen = torch.zeros(tokens, dtype=torch.float32, device=inputs.hidden.device)
        if tokens:
            grid = (-(-tokens // tiles.tokens) * parts,)
            _kernels.statistics[grid](
                *self._tensors(), largest, total, weighted, chosen, tokens, vocab, *self._strides(),
                **self._constants(), PER_PROGRAM=tiles.words_per_program,
            )  # fmt: skip
        top = largest.amax(dim=0)
        shrunk = (largest - top).exp()  # each part's numbers relative to the largest logit of all
        sums = total * shrunk
        whole = sums.sum(dim=0)
        # sum_v p_v z_v with z relative to the largest: no cancellation of large numbers
        mean = (weighted * shrunk + sums * (largest - top)).sum(dim=0) / whole
        log_total = whole.log()
        return chosen - top - log_total, log_total - mean, log_total + top

    def gradient(self, pull: Pull, rows: slice, words: slice) -> Tensor:
        """See ``HeadBackend``."""
        inputs, tiles = self._inputs, self._tiles
        count, width = rows.stop - rows.start, words.stop - words.start
        out = torch.empty((count, width), dtype=inputs.hidden.dtype, device=inputs.hidden.device)
        pulled = pull.entropies if pull.entropies is not None else pull.logprobs
        grid = (-(-count // tiles.tokens) * -(-width // tiles.words),)
        _kernels.gradient[grid](
            *self._tensors(), pull.log_sums, pull.constant(slice(None)), pull.logprobs.contiguous(),
            pulled.contiguous(), out, rows.start, rows.stop, words.start, words.stop, *self._strides(), out.stride(0),
            **self._constants(), WITH_ENTROPY=pull.entropies is not None,
        )  # fmt: skip
        return out

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = self._inputs
        bias = inputs.targets if inputs.bias is None else inputs.bias  # never read without a bias
        return inputs.hidden, inputs.weight, bias, inputs.targets

    def _strides(self) -> tuple[int, ...]:
        return (*self._inputs.hidden.stride(), *self._inputs.weight.stride())

    def _constants(self) -> dict[str, int | float | bool]:
        options, tiles = self._inputs.options, self._tiles
        return {
            "SCALE": options.scale,
            "SOFTCAP": options.softcap or 0.0,
            "TEMPERATURE": options.temperature,
            "WIDTH": self._inputs.hidden.shape[1],
            "WITH_BIAS": self._inputs.bias is not None,
            "TOKENS": tiles.tokens,
            "WORDS": tiles.words,
            "INNER": tiles.inner,
            "GROUP": tiles.group,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
