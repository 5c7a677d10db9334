"""The head's two passes over the logits in torch: one product a piece, softmax in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from magicrl.models.head_backend import HeadInputs, Pull

_CPU_BLOCK_ELEMENTS = 1 << 19
"""Softmax statistics are taken over blocks of rows that stay in a core's cache (2 MiB of float32)."""
_GPU_BLOCK_ELEMENTS = 1 << 25


class TorchHead:
    """A ``HeadBackend`` for every device."""

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        self._elements = _GPU_BLOCK_ELEMENTS if inputs.hidden.is_cuda else _CPU_BLOCK_ELEMENTS
        self._buffers: list[Tensor] = []

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """See ``HeadBackend``."""
        inputs = self._inputs
        tokens, vocab = len(inputs.hidden), len(inputs.weight)
        logprobs = torch.empty(tokens, dtype=inputs.dtype, device=inputs.hidden.device)
        entropies, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        step = inputs.options.chunk_tokens
        for start in range(0, tokens, step):
            product = inputs.hidden[start : start + step] @ inputs.weight.T
            for span, _, logits, spare in self._blocks(start, product, slice(0, vocab)):
                largest = logits.amax(dim=1, keepdim=True)
                logits.sub_(largest)
                chosen = logits.gather(1, inputs.targets[span, None])[:, 0]
                torch.exp(logits, out=spare)
                total = spare.sum(dim=1)
                log_total = total.log()
                torch.sub(chosen, log_total, out=logprobs[span])
                # sum_v p_v z_v with z relative to the largest: no cancellation of large numbers
                mean = spare.mul_(logits).sum(dim=1).div_(total)
                torch.sub(log_total, mean, out=entropies[span])
                torch.add(log_total, largest[:, 0], out=log_sums[span])
        return logprobs, entropies, log_sums

    def gradient(self, pull: Pull, rows: slice, words: slice) -> Tensor:
        """See ``HeadBackend``. The product's memory is given its gradient."""
        inputs = self._inputs
        product = inputs.hidden[rows] @ inputs.weight[words].T
        for span, part, logits, spare in self._blocks(rows.start, product, words):
            torch.sub(logits, pull.log_sums[span, None], out=spare)
            spare.exp_()
            constant = pull.constant(span)[:, None]
            if pull.entropies is None:
                spare.mul_(constant)
            else:
                spare.mul_(torch.addcmul(constant, logits, pull.entropies[span, None], value=-1))
            place = inputs.targets[span] - words.start
            (here,) = torch.where((place >= 0) & (place < product.shape[1]))
            spare[here, place[here]] += pull.logprobs[span][here]
            self._through_transform(spare, logits)
            part.copy_(spare)
        return product

    def _blocks(self, first: int, product: Tensor, words: slice) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Blocks of a product: rows of the whole, the block of ``product``, its logits and a spare buffer.

        Logits are in the statistics' dtype, transformed and divided by tau. The last two are reused by the
        next block.
        """
        inputs, options = self._inputs, self._inputs.options
        rows = max(1, min(self._elements // product.shape[1], len(product)))
        if not self._buffers or self._buffers[0].numel() < rows * product.shape[1]:
            self._buffers = [product.new_empty(rows * product.shape[1], dtype=inputs.dtype) for _ in range(2)]
        for start in range(0, len(product), rows):
            part = product[start : start + rows]
            logits, spare = (buffer[: part.numel()].view(part.shape) for buffer in self._buffers)
            logits.copy_(part)
            if inputs.bias is not None:
                logits.add_(inputs.bias[words])
            if options.scale != 1.0:
                logits.mul_(options.scale)
            if options.softcap is not None:
                logits.div_(options.softcap).tanh_().mul_(options.softcap)
            if options.temperature != 1.0:
                logits.div_(options.temperature)
            yield slice(first + start, first + start + len(part)), part, logits, spare

    def _through_transform(self, gradient: Tensor, logits: Tensor) -> None:
        """Turn the gradient of the final logits into that of the raw product, in place."""
        options = self._inputs.options
        factor = options.scale / options.temperature
        if options.softcap is not None:  # d softcap*tanh(x/softcap) = 1 - tanh^2
            gradient.mul_(1 - (logits * (options.temperature / options.softcap)).square_())
        if factor != 1.0:
            gradient.mul_(factor)
