"""Layouts: what fits, what is rejected and with which remedies, and that larger work never needs less.

Also the split in a recipe's [cluster]: released recipes fit, broken ones report the reason.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.commands.main import app
from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.loader import load_train_recipe
from magicrl.planning.costs import Exchange
from magicrl.planning.hardware import GIB, load_hardware
from magicrl.planning.layouts import (
    Demand,
    Placed,
    candidates,
    check_stated,
    fitting_layouts,
    lean_settings,
    place,
    placed_as,
    refusal,
)
from magicrl.planning.memory import learner_memory
from magicrl.planning.planner import Options, demand, make_plan
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


FORTY_K = replace(THIRTY_TWO, longest=40960)


def test_the_32b_model_at_32k_fits_as_the_estimates_say() -> None:
    """Use 8 GPUs: it fits only where all share a sequence, and not at 40K. With the moments in host memory it does."""
    assert all(placed.layout.sequence_parallel == 8 for placed in candidates(THIRTY_TWO, 8) if placed.fits)
    assert not any(placed.fits for placed in candidates(FORTY_K, 8))
    assert any(placed.fits for placed in candidates(replace(FORTY_K, offload_optimizer=True), 8))
    best = candidates(THIRTY_TWO, 16)[0]
    assert best.fits
    assert best.layout.sequence_parallel <= THIRTY_TWO.shape.kv_heads


def test_the_cache_is_no_larger_than_the_recipe_allows() -> None:
    limit = 2.0**26
    small = replace(THIRTY_TWO, shape=load_shape("SmolLM2-135M"), longest=2048, cache_limit=limit)
    (placed,) = candidates(small, 1)
    assert placed.fits
    assert placed.engine["cache"] == placed.layout.cache_bytes == limit


def test_a_refusal_says_what_is_missing() -> None:
    assert not fitting_layouts(FORTY_K, 1)
    text = refusal(FORTY_K, 1, ["--gpus 16"])
    assert "does not fit on 1 x H800-80G" in text
    assert "everything recomputed" in text
    assert "Any one of these would make it fit: --gpus 16" in text
    tiny_machine = replace(THIRTY_TWO.hardware, memory=1 * GIB)
    assert "Nothing tried makes it fit" in refusal(replace(THIRTY_TWO, hardware=tiny_machine), 8, [])


def test_a_threshold_of_recomputation_takes_the_fuller_of_both_kinds() -> None:
    """Micro-batches of 16K keep all layers, a sample of 34K only their inputs."""
    setup = replace(THIRTY_TWO, gpus=16, sequence_parallel=8, checkpointing=False)
    above = learner_memory(setup.shape, replace(setup, checkpoint_above=16384), 0.0).total
    short = learner_memory(setup.shape, replace(setup, longest=16384), 0.0).total
    long = learner_memory(setup.shape, replace(setup, checkpointing=True), 0.0).total
    assert above == max(short, long)
    assert above < learner_memory(setup.shape, setup, 0.0).total
    assert learner_memory(setup.shape, replace(setup, checkpoint_above=40000), 0.0).total == pytest.approx(
        learner_memory(setup.shape, setup, 0.0).total, rel=0.2
    )


def test_settings_that_take_less_memory_come_one_after_the_other() -> None:
    """Use 32B at 32K: the recipe's settings on 64 GPUs, layers recomputed on 16, state in host memory on 8 at 40K."""
    needed = replace(THIRTY_TWO, checkpointing=False, micro_batch_tokens=65536)
    ways = list(lean_settings(needed, 8))
    assert [(way.checkpointing, way.micro_batch_tokens, way.offload_optimizer) for way in ways] == [
        (False, 65536, False), (True, 65536, False), (True, 34816, False), (True, 34816, True)
    ]  # fmt: skip
    totals = [learner_memory(way.shape, replace(way, gpus=8, sequence_parallel=8), 0.0).total for way in ways]
    assert totals == sorted(totals, reverse=True)
    assert len(list(lean_settings(needed, 1))) == 3, "one accelerator has no rank whose state could be elsewhere"
    chosen = {
        (longest, gpus): {
            (one.layout.checkpointing, one.layout.offload)
            for one in fitting_layouts(replace(THIRTY_TWO, longest=longest, checkpointing=False), gpus)
        }
        for longest, gpus in ((8192, 64), (34816, 16), (40960, 8))
    }
    assert list(chosen.values()) == [{(False, False)}, {(True, False)}, {(True, True)}]


def test_layouts_use_every_accelerator_and_divide_the_heads() -> None:
    for placed in candidates(replace(THIRTY_TWO, offload_optimizer=True), 16):
        layout = placed.layout
        assert layout.gpus == 16
        assert THIRTY_TWO.shape.heads % layout.tensor_parallel == 0
        assert layout.replicas * layout.tensor_parallel == layout.rollout_gpus
        assert placed.fits == (placed.missing <= 0)
        if placed.fits:
            assert placed.learner.total <= THIRTY_TWO.hardware.budget
            assert placed.engine["cache"] > 0
    one = candidates(replace(THIRTY_TWO, shape=load_shape("SmolLM2-135M")), 1)
    assert [placed.layout.colocated for placed in one] == [True]


@settings(deadline=None, max_examples=30)
@given(longest=st.integers(256, 70000), more=st.integers(1, 70000), gpus=st.sampled_from([1, 4, 8, 16, 48]))
def test_a_larger_t_never_needs_less(longest: int, more: int, gpus: int) -> None:
    small = min(p.missing for p in candidates(replace(THIRTY_TWO, longest=longest), gpus))
    large = min(p.missing for p in candidates(replace(THIRTY_TWO, longest=longest + more), gpus))
    assert large >= small


RECIPES = Path(__file__).resolve().parents[3] / "src" / "magicrl" / "recipes"
LARGE = sorted(path for folder in ("skywork", "deepseek") for path in (RECIPES / folder).glob("*.toml"))
H800 = load_hardware("H800-80G")
SEVEN = load_shape("DeepSeek-R1-Distill-Qwen-7B")
"""28 query heads, 4 key/value heads."""
CONFIG = load_train_recipe(RECIPES / "skywork" / "or1-7b.toml")
DEMAND = demand(CONFIG, SEVEN, H800, Options(gpus=64))


def cluster(**parts: dict[str, int | bool]) -> ClusterConfig:
    return ClusterConfig.model_validate(parts)


def placed_of(parts: dict[str, dict[str, int | bool]], gpus: int) -> Placed:
    found = check_stated(DEMAND, cluster(**parts), gpus).placed
    assert found is not None
    return found


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_released_recipes_fit_as_they_state(path: Path) -> None:
    config = load_train_recipe(path)
    if config.cluster is None:
        assert make_plan(config, _shape(config), H800, Options(gpus=1), what_if=False).stated is None
        return
    learner, rollout = config.cluster.learner, config.cluster.rollout
    needs = learner.ranks + (0 if rollout.colocated else rollout.replicas * rollout.tensor_parallel)
    stated = make_plan(config, _shape(config), H800, Options(gpus=needs), what_if=False).stated
    assert stated is not None
    assert stated.faults == ()
    assert stated.needs == needs
    assert stated.seconds is not None


def _shape(config: object) -> object:
    return load_shape(str(config.start.model).rsplit("/", 1)[-1])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parts", "gpus", "words"),
    [
        ({"learner": {"ranks": 8}, "rollout": {"replicas": 8}}, 12, "need 16 accelerators, but there are 12"),
        ({"rollout": {"replicas": 1, "tensor_parallel": 3}}, 8, "must divide the 28 query heads"),
        ({"learner": {"ranks": 7, "sequence_parallel": 7}}, 64, "28 query heads and the 4 key/value heads"),
        ({"learner": {"ranks": 2}, "rollout": {"replicas": 1, "tensor_parallel": 14}}, 64, "more than the 8"),
        (
            {"learner": {"ranks": 2}, "rollout": {"replicas": 8, "tensor_parallel": 7}},
            58,
            "next to 2 learner ranks, which fill as few nodes as possible, there are nodes of 1 x 6, 6 x 8, 1 x 2",
        ),
        # 16 GPUs remain, as 2, 8 and 6
        ({"learner": {"ranks": 14}, "rollout": {"replicas": 4, "tensor_parallel": 4}}, 30, "4 replicas of 4 GPUs"),
        ({"learner": {"ranks": 1}}, 8, "a learner rank lacks"),
    ],
)
def test_what_does_not_go_is_said(parts: dict[str, dict[str, int]], gpus: int, words: str) -> None:
    found = check_stated(DEMAND, cluster(**parts), gpus)
    assert not found.fits
    assert any(words in fault for fault in found.faults), found.faults


def test_a_remedy_makes_it_fit() -> None:
    (fault,) = check_stated(DEMAND, cluster(learner={"ranks": 1}), 64).faults
    assert "cluster.learner.ranks = " in fault
    ranks = int(fault.split("cluster.learner.ranks = ")[1].split(";")[0])
    assert check_stated(DEMAND, cluster(learner={"ranks": ranks}), 64).fits
    assert not check_stated(DEMAND, cluster(learner={"ranks": ranks // 2}), 64).fits


def test_offloading_leaves_no_shard_on_the_accelerator_and_asks_for_the_hosts_memory() -> None:
    plain = placed_of({"learner": {"ranks": 8}}, 64)
    offloaded = {"learner": {"ranks": 8, "offload_optimizer": True}}
    spared = placed_of(offloaded, 64)
    # 16 bytes per parameter over eight ranks; the float32 shard of one unit, the embedding, is in transfer
    unit = 4 * SEVEN.vocabulary * SEVEN.hidden / 8
    state = 16 * SEVEN.parameters / 8
    assert (plain.learner.total - spared.learner.total) / GIB == pytest.approx((state - unit) / GIB)
    assert (plain.learner.host, spared.learner.host) == (0.0, pytest.approx(state))
    assert check_stated(DEMAND, cluster(**offloaded), 64).fits
    small = replace(DEMAND, hardware=replace(DEMAND.hardware, host_memory=8 * GIB))
    (fault,) = check_stated(small, cluster(**offloaded), 64).faults
    assert "of the host's memory, 8.0 there" in fault


def test_a_cache_too_small_for_one_sample_asks_for_tensor_parallelism() -> None:
    thirty_two = load_shape("DeepSeek-R1-Distill-Qwen-32B")
    needed = replace(DEMAND, shape=thirty_two, longest=65536)
    parts = {"learner": {"ranks": 64, "sequence_parallel": 4}, "rollout": {"replicas": 4, "tensor_parallel": 1}}
    (fault,) = [fault for fault in check_stated(needed, cluster(**parts), 128).faults if "in its cache" in fault]
    degree = int(fault.split("cluster.rollout.tensor_parallel = ")[1])
    wider = check_stated(needed, cluster(**(parts | {"rollout": {"replicas": 4, "tensor_parallel": degree}})), 128)
    assert not any("in its cache" in other for other in wider.faults)


def test_colocated_replicas_need_no_accelerators_and_live_beside_the_learners_state() -> None:
    parts = {"learner": {"ranks": 16}, "rollout": {"replicas": 16, "colocated": True}}
    assert check_stated(demand(CONFIG, SEVEN, H800, Options(gpus=16)), cluster(**parts), 16).needs == 16
    placed = placed_of(parts, 16)
    assert placed.engine["learner"] == placed.learner.resident > 0
    split = placed_of({"learner": {"ranks": 16}, "rollout": {"replicas": 16}}, 32)
    assert split.engine["cache"] > placed.engine["cache"]
    spared = placed_of(parts | {"learner": {"ranks": 16, "offload_optimizer": True}}, 16)
    # master weights and moments, 12 bytes per parameter over 16 ranks
    assert (spared.engine["cache"] - placed.engine["cache"]) / GIB == pytest.approx(12 * SEVEN.parameters / 16 / GIB)


def test_colocated_the_remedies_name_both_sides() -> None:
    (fault, *_) = check_stated(DEMAND, cluster(learner={"ranks": 1}, rollout={"colocated": True}), 64).faults
    ranks = int(fault.split("cluster.learner.ranks = ")[1].split(" ")[0])
    assert f"cluster.learner.ranks = {ranks} with cluster.rollout.replicas = {ranks}" in fault
    both = cluster(learner={"ranks": ranks}, rollout={"replicas": ranks, "colocated": True})
    assert not any("a learner rank lacks" in other for other in check_stated(DEMAND, both, 64).faults)


def test_the_command_refuses_it() -> None:
    words = ["plan", str(RECIPES / "skywork" / "or1-7b.toml"), "--gpus", "16", "--gpu", "H800-80G"]
    with pytest.raises(ValueError, match=r"\[cluster\] does not fit: 8 learner ranks and 24 replicas of 1 need 32"):
        app(words, result_action="return_value")
    apart = ["--gpus", "128", "--set", "cluster.rollout.tensor_parallel=3"]  # No layout is left to predict.
    with pytest.raises(ValueError, match=r"\[cluster\] does not fit: .*tensor_parallel 3 must divide the 28 query"):
        app([*words[:2], *words[4:], *apart], result_action="return_value")


def test_copies_of_the_model_follow_the_learners_own_rule() -> None:
    """7B on two nodes: each node holds a copy if engines have separate GPUs, unless the recipe states a number."""
    seven = replace(THIRTY_TWO, shape=load_shape("DeepSeek-R1-Distill-Qwen-7B"))
    whole = 4 * seven.shape.parameters
    masters = {
        (colocated, stated): place(replace(seven, shard_ranks=stated), 16, 16, 1, 1, colocated=colocated).learner.master
        for colocated in (False, True)
        for stated in (None, 4)
    }
    assert masters == {
        (False, None): whole / 8,
        (True, None): whole / 16,
        (False, 4): whole / 4,
        (True, 4): whole / 4,
    }
    assert place(THIRTY_TWO, 16, 16, 1, 1, colocated=False).learner.master == 4 * THIRTY_TWO.shape.parameters / 16
    cluster = ClusterConfig.model_validate(
        {"learner": {"ranks": 16, "shard_ranks": 4, "reduce_dtype": "bfloat16"}, "rollout": {"replicas": 16}}
    )
    placed = placed_as(seven, cluster.learner, cluster.rollout)
    assert placed.layout.exchange == Exchange(shards=4, reduce_bytes=2.0)
    narrow = placed.learner
    assert narrow.master == whole / 4
    assert narrow.reduced < place(seven, 16, 16, 1, 1, colocated=False).learner.reduced
