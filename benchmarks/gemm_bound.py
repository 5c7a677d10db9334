"""The bound of the speed benchmarks: the time of nothing but a model's matrix products, at one thread.

Three things make it a bound and not one more measurement. Results go into memory that is there already: a fresh
result of a few hundred MiB costs a quarter of a float32 product in page faults alone, which a learner that works in
chunks never pays (it once was faster than a bound that did). Each product is made with several numbers of rows, and
the best counts. And its time is the least ever seen: ``GemmBound`` is run again and again between the measurements, so
that bound and measurements meet the same minutes of a shared machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TRAINING_ROWS = (256, 512, 1024)


class GemmBound:
    """The products of a model's linear layers, with its own weights and shapes.

    Layers are run in order with their own weights, so that these come from where they come from in a real pass. The
    least time of every product is kept for the life of the object.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        self._body = [m for m in model.get_decoder().modules() if isinstance(m, nn.Linear)]
        self._head = [head]
        self._dtype = head.weight.dtype
        self._least: dict[tuple[int, str, int], float] = {}
        self.body_elements = sum(m.weight.numel() for m in self._body)
        self.head_elements = int(head.weight.numel())

    def forward(self, body_rows: int, head_rows: int, repetitions: int = 3) -> float:
        """Seconds of a forward pass: ``body_rows`` tokens through the layers, ``head_rows`` through the head."""
        for _ in range(repetitions):
            self._run(self._body, body_rows, backward=False)
            self._run(self._head, head_rows, backward=False)
        return self._sum(self._body, [body_rows], ("out",)) * body_rows + (
            self._sum(self._head, [head_rows], ("out",)) * head_rows
        )

    def training(self, tokens: int) -> tuple[float, float]:
        """Seconds a token of a forward and backward pass (gradients of inputs and weights): of the layers, of the head.

        Args:
            tokens: what there is at most to multiply at once.
        """
        sizes = [rows for rows in TRAINING_ROWS if rows <= tokens] or [tokens]
        kinds = ("out", "input_gradient", "weight_gradient")
        for rows in sizes:
            self._run(self._body, rows, backward=True)
            self._run(self._head, rows, backward=True)
        return self._sum(self._body, sizes, kinds), self._sum(self._head, sizes, kinds)

    def flops(self, body_rows: int, head_rows: int, *, backward: bool) -> float:
        """Multiplications and additions of the same."""
        return (6.0 if backward else 2.0) * (body_rows * self.body_elements + head_rows * self.head_elements)

    def _sum(self, layers: Sequence[nn.Linear], sizes: Sequence[int], kinds: Sequence[str]) -> float:
        """Seconds a token: of each product the best number of rows."""
        return sum(min(self._least[id(m), kind, rows] / rows for rows in sizes) for m in layers for kind in kinds)

    @torch.inference_mode()
    def _run(self, layers: Sequence[nn.Linear], rows: int, *, backward: bool) -> None:
        torch.set_num_threads(1)
        widths = {width for layer in layers for width in layer.weight.shape}
        given = {width: torch.randn(rows, width, dtype=self._dtype) for width in widths}
        made = {width: torch.empty_like(tensor) for width, tensor in given.items()}
        gradients = {m.weight.shape: torch.empty_like(m.weight) for m in layers} if backward else {}
        for tensor in (*made.values(), *gradients.values()):
            tensor.zero_()  # its pages are there before the clock starts
        for layer in layers:
            out_width, in_width = layer.weight.shape
            weight: Tensor = layer.weight
            products: dict[str, Callable[[], object]] = {
                "out": lambda w=weight, i=in_width, o=out_width: torch.mm(given[i], w.T, out=made[o])
            }
            if backward:
                products["input_gradient"] = lambda w=weight, i=in_width, o=out_width: torch.mm(
                    given[o], w, out=made[i]
                )
                products["weight_gradient"] = lambda w=weight, i=in_width, o=out_width: torch.mm(
                    given[o].T, given[i], out=gradients[w.shape]
                )
            for kind, product in products.items():
                start = time.process_time()
                product()
                key = (id(layer), kind, rows)
                self._least[key] = min(time.process_time() - start, self._least.get(key, float("inf")))
