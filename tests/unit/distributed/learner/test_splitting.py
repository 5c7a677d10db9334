"""Splitting of a mini-batch over ranks, and of a micro-batch over the ranks that share its sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import train_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.distributed.learner.learner import split_by_tokens
from magicrl.distributed.learner.ulysses import SequenceSlice
from magicrl.distributed.tensors import pack, unpack
from magicrl.models.packing import packed_with_shared_prompts
from magicrl.records import TrainSample


def sample(prompt: int, response: int) -> TrainSample:
    return train_sample([prompt], np.arange(response), advantage=1.0, group_index=prompt)


def test_the_docstrings_example() -> None:
    samples = [sample(i, n) for i, n in enumerate((6, 5, 2, 1))]
    assert split_by_tokens(samples, 2, 100) == [[0, 3], [1, 2]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=40), st.integers(1, 9))
def test_every_sample_has_one_rank_and_no_rank_much_more_than_its_part(
    drawn: list[tuple[int, int]], parts: int
) -> None:
    samples = [sample(*pair) for pair in drawn]
    shares = split_by_tokens(samples, parts, token_budget=64)
    assert sorted(i for share in shares for i in share) == list(range(len(samples)))
    assert len(shares) == parts
    if samples:
        # no share exceeds an even part by more than one piece, and a piece is at most an even part or one response
        total = sum(len(s) for s in samples)
        largest = max(max(len(s) for s in samples), min(64, -(-total // parts)))
        assert max(sum(len(samples[i].tokens) for i in share) for share in shares) <= total / parts + largest


class Rank:
    """The part of a process group that splitting needs."""

    def __init__(self, number: int, ranks: int) -> None:
        self._number, self._ranks = number, ranks

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return self._ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_slices_put_together_are_the_micro_batch(ranks: int) -> None:
    batch = packed_with_shared_prompts([sample(1, 4), sample(1, 7), sample(2, 2)])
    slices = [SequenceSlice(batch, Rank(r, ranks)) for r in range(ranks)]  # type: ignore[arg-type]
    tokens = batch.input_ids.shape[1]
    for name in ("input_ids", "position_ids"):
        whole = torch.cat([getattr(part, name) for part in slices], dim=1)
        assert torch.equal(whole[:, :tokens], getattr(batch, name))
        assert len({getattr(part, name).shape for part in slices}) == 1
    # the ranks' padded results for their response tokens are concatenated: ``place`` finds a token again
    width = slices[0].width
    said = torch.full((ranks, width), -1)
    for rank, part in enumerate(slices):
        said[rank, : len(part.targets)] = part.targets
        length = part.input_ids.shape[1]
        assert torch.equal(part.predict_index + rank * length, batch.predict_index[part.own])
    for part in slices:
        assert torch.equal(said.flatten()[part.place], batch.targets)


def test_bfloat16_crosses_a_pipe_bit_for_bit() -> None:
    tensors = {"a": torch.randn(3, 2).bfloat16(), "b": torch.randn(4), "c": torch.tensor(2.5)}
    again = unpack(pack(tensors), writable=True)
    assert again.keys() == tensors.keys()
    assert all(again[k].dtype == v.dtype and torch.equal(again[k], v) for k, v in tensors.items())
