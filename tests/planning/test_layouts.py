"""Layouts: what fits, what is refused and with which remedies, and that larger work never needs less."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.planning.hardware import GIB, load_hardware
from magicrl.planning.layouts import Demand, candidates, refusal, remedies
from magicrl.planning.shapes import load_shape

THIRTY_TWO = Demand(
    shape=load_shape("DeepSeek-R1-Distill-Qwen-32B"),
    hardware=load_hardware("H800-80G"),
    longest=34816,
    micro_batch_tokens=16384,
    checkpointing=True,
    head_chunk_tokens=1024,
    reference=False,
)


def test_the_32b_model_at_32k_fits_as_the_estimates_say() -> None:
    """On 8 GPUs not, with the moments in the host's memory it does; on 16 it does with sequence parallelism."""
    assert not any(placed.fits for placed in candidates(THIRTY_TWO, 8))
    assert any(placed.fits for placed in candidates(replace(THIRTY_TWO, offload_moments=True), 8))
    best = candidates(THIRTY_TWO, 16)[0]
    assert best.fits
    assert best.layout.sequence_parallel <= THIRTY_TWO.shape.kv_heads


def test_a_refusal_says_what_is_missing_and_every_remedy_works() -> None:
    text = refusal(THIRTY_TWO, 8)
    assert "does not fit on 8 x H800-80G" in text
    assert "moments 30.5" in text
    assert "What would make it fit, each alone: --gpus 16; AdamW's moments in the host's memory" in text
    assert any(placed.fits for placed in candidates(THIRTY_TWO, 16))
    bare = replace(THIRTY_TWO, checkpointing=False)
    assert "model.gradient_checkpointing = true" in remedies(bare, 16)
    assert any(placed.fits for placed in candidates(replace(bare, checkpointing=True), 16))
    tiny_machine = replace(THIRTY_TWO.hardware, memory=1 * GIB)
    assert "No single change makes it fit" in refusal(replace(THIRTY_TWO, hardware=tiny_machine), 8)


def test_layouts_use_every_accelerator_and_divide_the_heads() -> None:
    for placed in candidates(replace(THIRTY_TWO, offload_moments=True), 16):
        layout = placed.layout
        assert layout.gpus == 16
        assert THIRTY_TWO.shape.heads % layout.tensor_parallel == 0
        assert layout.replicas * layout.tensor_parallel == layout.rollout_gpus
        assert placed.fits == (placed.missing <= 0)
        if placed.fits:
            assert placed.learner.total <= THIRTY_TWO.hardware.budget
            assert placed.engine.cache > 0
    one = candidates(replace(THIRTY_TWO, shape=load_shape("SmolLM2-135M")), 1)
    assert [placed.layout.colocated for placed in one] == [True]


@settings(deadline=None, max_examples=30)
@given(longest=st.integers(256, 70000), more=st.integers(1, 70000), gpus=st.sampled_from([1, 4, 8, 16, 48]))
def test_a_larger_t_never_needs_less(longest: int, more: int, gpus: int) -> None:
    small = min(p.missing for p in candidates(replace(THIRTY_TWO, longest=longest), gpus))
    large = min(p.missing for p in candidates(replace(THIRTY_TWO, longest=longest + more), gpus))
    assert large >= small
