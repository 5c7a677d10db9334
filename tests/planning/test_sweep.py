"""A plan beside its neighbours, and what can never be: more accelerators that are slower, larger work that is free."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.config.loader import load_train_recipe
from magicrl.planning.hardware import load_hardware
from magicrl.planning.layouts import place
from magicrl.planning.planner import Options, Plan, demand, make_plan
from magicrl.planning.shapes import load_shape
from magicrl.planning.sweep import BatchPoint, over_batches, over_gpus

ROOT = Path(__file__).resolve().parents[2]
CONFIG = load_train_recipe(ROOT / "studies/bases/paper-7b.toml")
SEVEN, H800 = load_shape("DeepSeek-R1-Distill-Qwen-7B"), load_hardware("H800-80G")


@pytest.fixture(scope="module")
def made() -> Plan:
    return make_plan(CONFIG, SEVEN, H800, Options(gpus=16))


def test_table_nines_curve_falls_ever_less(made: Plan) -> None:
    points = over_gpus(CONFIG, made)
    assert [point.gpus for point in points] == [4, 8, 16, 32, 64, 128]
    seconds = [point.stage.timing.seconds for point in points if point.stage is not None]
    assert len(seconds) == len(points)
    assert seconds[2] == made.stages[0].timing.seconds, "the plan's own point is the plan's"
    gains = [1 - after / before for before, after in itertools.pairwise(seconds)]
    assert all(0 < gain < 0.5 for gain in gains), "never slower, and never twice as fast"
    assert gains[-1] < gains[0]
    assert all(p.stage.low <= p.stage.timing.seconds <= p.stage.high for p in points if p.stage is not None)


def test_what_does_not_fit_is_told_and_one_machine_has_one_point(made: Plan) -> None:
    assert next(point.stage for point in over_gpus(CONFIG, made, factors=(1 / 16,))) is None
    quick = load_train_recipe(ROOT / "src/magicrl/recipes/smollm2.toml")
    alone = make_plan(quick, load_shape("SmolLM2-135M"), load_hardware("cpu-2core"), Options(gpus=1))
    (point,) = over_gpus(quick, alone)
    assert (point.gpus, point.stage) == (1, alone.stages[max(range(2), key=lambda i: alone.stages[i].hours)])


def test_larger_batches_take_longer_and_pay_for_the_tail_once(made: Plan) -> None:
    points = {(p.rollout_batch, p.group_size): p for p in over_batches(CONFIG, made)}
    assert set(points) == {(32, 16), (64, 16), (128, 16), (256, 16), (64, 8), (64, 32), (64, 64)}
    for line in ([(32, 16), (64, 16), (128, 16), (256, 16)], [(64, 8), (64, 16), (64, 32), (64, 64)]):
        found = [points[key] for key in line]
        seconds = [p.seconds for p in found if p.seconds is not None]
        each = [p.per_response for p in found if p.per_response is not None]
        assert seconds == sorted(seconds)
        assert each[0] == max(each), "the tail is waited for once, whatever the batch"
    assert BatchPoint(rollout_batch=4, group_size=2, seconds=None).per_response is None


@settings(deadline=None, max_examples=40)
@given(
    limit=st.integers(256, 32768),
    batch=st.integers(1, 256),
    size=st.integers(2, 64),
    more=st.tuples(st.integers(0, 4096), st.integers(0, 64), st.integers(0, 64)),
)
def test_memory_never_shrinks_with_t_d_r_or_group_size(
    limit: int, batch: int, size: int, more: tuple[int, int, int]
) -> None:
    def needed(max_tokens: int, rollout_batch: int, group_size: int) -> tuple[float, float]:
        changes = {"max_tokens": max_tokens, "rollout_batch": rollout_batch, "group_size": group_size}
        stages = (CONFIG.stages[0].model_copy(update=changes),)
        want = demand(CONFIG.model_copy(update={"stages": stages}), SEVEN, H800, Options(gpus=16))
        placed = place(want, 16, 16, 4, 2, colocated=True)
        return placed.learner.total, placed.missing

    small = needed(limit, batch, size)
    for i in range(3):
        larger = [limit, batch, size]
        larger[i] += more[i]
        assert all(a >= b for a, b in zip(needed(*larger), small, strict=True))
