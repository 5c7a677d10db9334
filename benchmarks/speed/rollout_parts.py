"""Counts and times of the in-process engine's decoding while it runs.

They cover what its speed rests on: no work for finished sequences (rows computed per needed token), a cache that is
read once (tokens read per layer over tokens held, a group's prompt held once), and the shares of attention and
sampling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.shared import rounded
from magicrl.models.decoding import FusedDecoder
from magicrl.models.kv_cache import DecodeAttention, Integers, SlotCache
from magicrl.rollout import in_process
from magicrl.rollout.sampling import sample_tokens


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of all decoding steps so far."""

    rows: int = 0  # computed
    read: int = 0  # cached tokens that attention reads in one layer, keys and values as one
    held: int = 0  # cached tokens that the rows need: each prompt once, each response
    attention_s: float = 0.0  # CPU seconds, as the next
    sampling_s: float = 0.0


@contextmanager
def tallied() -> Generator[Tally]:
    """Count every decoding step of an `InProcessEngine` inside this context, in which layers run one by one."""
    tally = Tally()

    class Counted(DecodeAttention):
        def __init__(
            self, cache: SlotCache, *, owners: Integers, prompt_lengths: Integers, response_lengths: Integers
        ) -> None:
            super().__init__(cache, owners=owners, prompt_lengths=prompt_lengths, response_lengths=response_lengths)
            tally.rows += len(owners)
            _, first = np.unique(owners, return_index=True)
            held = int(prompt_lengths[first].sum() + (response_lengths + 1).sum())
            tally.read += held if self._kernel else self._tokens_in_blocks()
            tally.held += held

        def _tokens_in_blocks(self) -> int:
            """Return the cached tokens that matrix products read. A kernel reads up to each row's length instead."""
            self._lay_out()
            blocks = [*self._prompts, *self._responses]
            return sum(block.places * (block.columns.stop - block.columns.start) for block in blocks)

        def attend(self, *given: Any) -> Tensor:
            start = time.process_time()
            found = super().attend(*given)
            tally.attention_s += time.process_time() - start
            return found

    def sampled(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        found = sample_tokens(*args, **options)
        tally.sampling_s += time.process_time() - start
        return found

    # One call for all layers would not show attention's part.
    one_by_one = patch.object(FusedDecoder, "_kernel_for", lambda *given: None)
    with one_by_one, patch.multiple(in_process, DecodeAttention=Counted, sample_tokens=sampled):
        yield tally


def engine_parts(run: Callable[[], NDArray[np.int64]], reading_s: float) -> dict[str, float]:
    """Return counts and shares of one generation.

    Args:
        run: Generates and returns the response lengths.
        reading_s: Least time to read the cache (`rollout_speed.attention_read_seconds`).
    """
    start = time.process_time()
    with tallied() as tally:
        lengths = run()
    total = time.process_time() - start
    needed = int(lengths.sum()) - len(lengths)  # prefill gives the first token of each
    return {
        "rows_computed_over_needed": rounded(tally.rows / needed),
        "cache_read_over_held": rounded(tally.read / tally.held),
        "attention_share": rounded(tally.attention_s / total),
        "attention_over_reading": rounded(tally.attention_s / reading_s),
        "sampling_share": rounded(tally.sampling_s / total),
    }
