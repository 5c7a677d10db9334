"""Memory by term: against the project's own estimates at 32K, and monotone in what makes a step larger."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicrl.planning.hardware import GIB, load_hardware
from magicrl.planning.memory import LearnerSetup, engine_memory, learner_memory
from magicrl.planning.shapes import ModelShape, load_shape

AT_32K = LearnerSetup(
    gpus=8, sequence_parallel=1, micro_batch_tokens=1, longest=34816, checkpointing=True, head_chunk_tokens=1024
)


@pytest.mark.parametrize(
    ("model", "gpus", "sequence_parallel", "offload", "estimate"),
    [
        ("Qwen3-8B", 8, 1, False, 39),
        ("Qwen3-8B", 8, 2, False, 31),
        ("DeepSeek-R1-Distill-Qwen-32B", 16, 4, False, 49),
        ("DeepSeek-R1-Distill-Qwen-32B", 8, 4, False, 80),
        ("DeepSeek-R1-Distill-Qwen-32B", 8, 4, True, 49),
        ("DeepSeek-R1-Distill-Qwen-32B", 32, 4, False, 34),
    ],
)
def test_the_estimates_at_32k_are_met_within_a_tenth(
    model: str, gpus: int, sequence_parallel: int, offload: bool, estimate: float
) -> None:
    """GiB a GPU, full checkpointing, logits in chunks of 1024; estimates made apart from this model."""
    setup = replace(AT_32K, gpus=gpus, sequence_parallel=sequence_parallel, offload_moments=offload)
    assert learner_memory(load_shape(model), setup, 3 * GIB).total / GIB == pytest.approx(estimate, rel=0.1)


def test_states_of_a_shard_by_hand() -> None:
    shape = load_shape("Qwen3-8B")
    memory = learner_memory(shape, replace(AT_32K, reference=True), 0.0)
    assert memory.master == memory.gradients == memory.moments / 2 == 4 * shape.parameters / 8
    assert memory.reference == 2 * shape.parameters / 8
    assert memory.head == 3 * 4 * 1024 * shape.vocabulary
    assert memory.total == pytest.approx(sum(memory.terms().values()))
    assert memory.resident < memory.total
    layers = 36 * 34816 * 4096 * 2  # the layers' inputs
    one = 34816 * (10 * 4096 + 3 * 12288) * 2
    assert memory.activations == layers + one
    assert learner_memory(shape, replace(AT_32K, checkpointing=False), 0.0).activations == 36 * one


@given(
    longest=st.integers(1, 65536),
    more=st.integers(0, 65536),
    gpus=st.sampled_from([1, 8, 16, 64]),
    sp=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 40000),
    checkpointing=st.booleans(),
)
def test_memory_never_shrinks_with_t_and_never_grows_with_gpus(
    longest: int, more: int, gpus: int, sp: int, micro: int, checkpointing: bool
) -> None:
    shape = load_shape("DeepSeek-R1-Distill-Qwen-7B")
    setup = replace(
        AT_32K,
        longest=longest,
        gpus=gpus,
        sequence_parallel=sp,
        micro_batch_tokens=micro,
        checkpointing=checkpointing,
    )
    total = learner_memory(shape, setup, 0.0).total
    assert learner_memory(shape, replace(setup, longest=longest + more), 0.0).total >= total
    assert learner_memory(shape, replace(setup, gpus=2 * gpus), 0.0).total <= total
    assert learner_memory(shape, replace(setup, sequence_parallel=2 * sp), 0.0).total <= total


def test_the_cache_is_what_the_budget_leaves() -> None:
    shape, hardware = load_shape("Qwen3-8B"), load_hardware("H100-80G")
    engine = engine_memory(shape, hardware, 2, learner=10 * GIB)
    assert sum(engine.terms().values()) == pytest.approx(hardware.budget)
    assert engine_memory(shape, hardware, 2, learner=70 * GIB).cache < 0


def test_adapters_alone_have_masters_and_moments() -> None:
    # rank 2 on q and down of one layer: 2 * ((8 + 16) + (8 + 24)) = 112
    shape = ModelShape(
        name="s", hidden=8, intermediate=24, layers=1, heads=4, kv_heads=2, head_dim=4, vocabulary=10, tied=True
    )
    adapters = shape.adapter_parameters(2, ("q_proj", "down_proj"))
    assert adapters == 112
    setup = replace(AT_32K, gpus=1, adapters=adapters)
    memory = learner_memory(shape, setup, 0.0)
    assert (memory.master, memory.gradients, memory.moments) == (4 * 112, 4 * 112, 8 * 112)
    assert memory.frozen == 2 * shape.parameters
