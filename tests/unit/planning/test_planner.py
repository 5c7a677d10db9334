"""Plans of whole recipes: their parts agree, and larger work or fewer accelerators never take less time.

Each plan is compared with its neighbours: more accelerators are never slower, and larger work is never free.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from math import exp, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.config.loader import load_train_recipe
from magicrl.config.schema import TrainConfig
from magicrl.planning.costs import System, forward_flops, load_calibration
from magicrl.planning.hardware import load_hardware
from magicrl.planning.layouts import fitting_layouts, place
from magicrl.planning.planner import (
    DoesNotFit,
    Options,
    Plan,
    demand,
    make_plan,
    over_gpus,
    stage_lengths,
    workload,
)
from magicrl.planning.shapes import load_shape
from magicrl.planning.workload import Lengths, Workload, read_measured, step_time, timing

ROOT = Path(__file__).resolve().parents[3]
PAPER = ROOT / "studies/bases/paper-7b.toml"
RECIPES = ROOT / "src" / "magicrl" / "recipes"
CONFIG = load_train_recipe(PAPER)
SEVEN, H800 = load_shape("DeepSeek-R1-Distill-Qwen-7B"), load_hardware("H800-80G")


def work_of(config: TrainConfig, options: Options) -> Workload:
    (stage,) = config.stages
    return workload(config, stage, options, stage_lengths(stage, stage.max_tokens, options))


def test_a_stage_with_more_passes_and_no_reference_is_planned_so() -> None:
    reference = CONFIG.reference.model_copy(update={"mode": "loss", "coefficient": 0.1})
    (stage,) = CONFIG.stages
    own = stage.model_copy(update={"reuse": 3, "kl_coefficient": 0.0})
    config = CONFIG.model_copy(update={"stages": (stage, own), "reference": reference})
    first, second = (found.work for found in make_plan(config, SEVEN, H800, Options(gpus=32), what_if=False).stages)
    assert (second.reuse, second.sgd_steps) == (3 * first.reuse, 3 * first.sgd_steps)
    assert (first.forwards, second.forwards) == ((first.sgd_steps > 1) + 1, 1)


def test_a_plan_adds_up() -> None:
    plan = make_plan(CONFIG, SEVEN, H800, Options(gpus=32))
    (stage,) = plan.stages
    parts = stage.parts
    assert stage.seconds == pytest.approx(parts.rollout + parts.learn + parts.other)
    assert plan.hours == pytest.approx(stage.seconds * 1000 / 3600)
    assert plan.placed.fits
    changes = {change: (seconds or 0.0) / stage.seconds for change, seconds in plan.what_if.items()}
    assert 0.5 < changes["64 accelerators"] < 1  # the longest response does not get shorter
    assert changes["staleness 1"] < 1
    # a step waits for the longest response once, and groups are spread more evenly than responses of one group
    assert 1 < changes["D_R 128"] < changes["group size 32"] < 2


def test_the_recipe_decides_the_workload() -> None:
    config = load_train_recipe(PAPER, ["stages.0.mini_batch=16", "algorithm.reuse=2", "reference.mode=monitor"])
    options = Options(gpus=32)
    work = work_of(config, options)
    assert (work.sgd_steps, work.reuse, work.forwards) == (8, 2, 2)
    assert (work.kept, work.prompt) == (0.6, 256)
    everything = load_train_recipe(
        PAPER,
        ["stages.0.mini_batch=16", "algorithm.reject_zero_advantage=false", "model.gradient_checkpointing=true"],
    )
    plain = work_of(everything, options)
    assert (plain.kept, plain.sgd_steps, plain.forwards) == (1.0, 4, 1)
    given = Options(gpus=1, mean_length=5000)
    assert work_of(config, given).lengths.mean == pytest.approx(5000)
    (stage,) = config.stages
    short = stage_lengths(stage.model_copy(update={"max_tokens": 4096}), stage.max_tokens, given)
    assert short == work_of(config, given).lengths.at(4096), "the mean that is given is that of the largest T"
    assert demand(config, SEVEN, H800, options).longest == 16384 + 2048
    alone = demand(config, SEVEN, H800, Options(gpus=1))
    assert alone.rows == config.rollout.max_rows
    assert alone.cache_limit == config.rollout.memory_limit_mb * 2**20


def test_a_teacher_needs_memory_unless_it_is_served_or_the_policy_itself() -> None:
    alone = Options(gpus=1)
    common = ["algorithm.reject_zero_advantage=false", "teacher.model=SmolLM2-135M"]
    taught = load_train_recipe(PAPER, common)
    assert demand(taught, SEVEN, H800, alone).teacher == load_shape("SmolLM2-135M").parameters
    served = load_train_recipe(PAPER, [*common, "teacher.server=http://localhost:8000/v1"])
    assert demand(served, SEVEN, H800, alone).teacher == 0
    assert demand(CONFIG, SEVEN, H800, alone).teacher == 0


def test_a_teacher_makes_one_forward_unless_it_is_served() -> None:
    common = ["algorithm.reject_zero_advantage=false", "reference.mode=monitor"]
    alone, other, own, served = (
        step_time(
            System(SEVEN, H800, load_calibration(H800.name, SEVEN.hidden)),
            work_of(load_train_recipe(PAPER, [*common, *sets]), Options(gpus=8)),
            place(demand(CONFIG, SEVEN, H800, Options(gpus=8)), 8, 8, 1, 1, colocated=True).layout,
        ).logprobs
        for sets in (
            [],
            ["teacher.model=SmolLM2-135M"],
            ["teacher.prompt={prompt} {reference}"],
            ["teacher.model=SmolLM2-135M", "teacher.server=http://localhost:8000/v1"],
        )
    )
    assert served == alone > 0
    assert own == 2 * alone, "the policy with another prompt"
    context = work_of(CONFIG, Options(gpus=8)).mean_context
    a_pass, of_policy = (forward_flops(shape, 1.0, context) for shape in (load_shape("SmolLM2-135M"), SEVEN))
    assert (other - alone) / alone == pytest.approx(a_pass / of_policy)


def test_a_larger_batch_is_planned_with_the_recipe_s_mini_batch() -> None:
    options, sets = Options(gpus=32), ["stages.0.mini_batch=16"]
    plan = make_plan(load_train_recipe(PAPER, sets), SEVEN, H800, options)
    doubled = load_train_recipe(PAPER, [*sets, "stages.0.rollout_batch=128"])
    assert plan.what_if["D_R 128"] == make_plan(doubled, SEVEN, H800, options, what_if=False).stages[0].seconds


def test_time_is_monotone_in_the_work_and_in_the_updates() -> None:
    plan = make_plan(CONFIG, SEVEN, H800, Options(gpus=32))
    layout, efficiency = plan.placed.layout, plan.calibration
    work = work_of(CONFIG, plan.options)

    def seconds(**changes: int) -> float:
        return timing(System(SEVEN, H800, efficiency), replace(work, **changes), layout, 0)[1]

    base = seconds()
    assert seconds(rollout_batch=128) > base
    assert seconds(group_size=32) > base
    assert seconds(sgd_steps=4) > base
    longer = replace(work, lengths=work.lengths.at(32768))
    assert timing(System(SEVEN, H800, efficiency), longer, layout, 0)[1] > base


def test_rejected_groups_take_no_part_in_the_update() -> None:
    layout = place(demand(CONFIG, SEVEN, H800, Options(gpus=8)), 8, 8, 1, 1, colocated=True).layout
    work = work_of(CONFIG, Options(gpus=8))
    system = System(SEVEN, H800, load_calibration(H800.name, SEVEN.hidden))
    all_kept, half_kept = (step_time(system, replace(work, kept=kept), layout) for kept in (1.0, 0.5))
    assert half_kept.learn == pytest.approx(all_kept.learn / 2, rel=0.2)
    assert (half_kept.rollout, half_kept.other) == (all_kept.rollout, all_kept.other)


def test_overlap_pays_and_the_schedules_are_ordered() -> None:
    options = Options(gpus=32)
    work = work_of(CONFIG, options)
    plan = make_plan(CONFIG, SEVEN, H800, replace(options, staleness=1))
    layout = plan.placed.layout
    assert not layout.colocated
    efficiency = plan.calibration
    seconds = [timing(System(SEVEN, H800, efficiency), work, layout, staleness)[1] for staleness in (0, 1, 3)]
    assert seconds[0] > seconds[1] > seconds[2]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"does not fit on 1 x H800-80G.*Any one of these would make it fit: --gpus 1"):
        make_plan(CONFIG, SEVEN, H800, Options(gpus=1))
    for options, text in (
        ({"gpus": 0}, "--gpus"),
        ({"gpus": 1, "staleness": -1}, "--staleness"),
        ({"gpus": 1, "kept": 2.0}, "--kept"),
        ({"gpus": 1, "other": -1.0}, "--other"),
        ({"gpus": 1, "other": nan}, "--other"),
        ({"gpus": 1, "prompt": 0}, "--prompt-tokens"),
    ):
        with pytest.raises(ValueError, match=text):
            Options(**options)


def test_the_machines_own_efficiencies_are_taken() -> None:
    assert load_calibration("cpu-2core", 64).name == "cpu-2core-quickstart"
    assert load_calibration("cpu-2core", 576).name == "cpu-2core-smollm2"
    assert load_calibration("H200", 64).name == "published"


def test_a_runs_own_lengths_and_survivors_replace_the_assumptions(tmp_path: Path) -> None:
    drawn = Lengths(median=900, sigma=0.5, limit=4096)
    q50, q90 = 900.0, 900 * exp(0.5 * 1.28155)
    values = {"length/mean": drawn.mean, "length/q50": q50, "length/q90": q90, "stage/max_tokens": 4096}
    values |= {"groups/trained": 24, "groups/sampled": 64}
    line = json.dumps({"step": 2, "stage": 1, "values": values})
    # the previous stage had another T
    other = {key: value / 2 for key, value in values.items()}
    first = json.dumps({"step": 1, "stage": 0, "values": other | {"groups/trained": 1}})
    (tmp_path / "metrics.jsonl").write_text(f"{first}\n{line}\n{line}\n")
    measured = read_measured(tmp_path)
    lengths, kept = measured
    assert kept == 24 / 64
    assert lengths.sigma == pytest.approx(0.5, rel=1e-3)
    assert lengths.median == pytest.approx(900, rel=1e-2)
    work = work_of(CONFIG, Options(gpus=8, measured=measured))
    assert (work.lengths.limit, work.lengths.median) == (16384, lengths.median)
    assert work.kept == 24 / 64
    with pytest.raises(ValueError, match="use one of them"):
        Options(gpus=8, measured=measured, mean_length=100)
    with pytest.raises(ValueError, match="not the metrics of a run"):
        read_measured(tmp_path / "none")


MEASURED = {
    "length/mean": 40.0,
    "length/q50": 35.0,
    "length/q90": 90.0,
    "groups/trained": 4,
    "groups/sampled": 8,
    "stage/max_tokens": 128,
}


def test_lengths_of_a_run_that_is_not_finished_or_has_steps_without_responses(tmp_path: Path) -> None:
    def line(**changed: float | None) -> str:
        return json.dumps({"step": 1, "stage": 0, "values": MEASURED | changed}) + "\n"

    path = tmp_path / "metrics.jsonl"
    path.write_text(line())
    whole = read_measured(tmp_path)
    assert whole[1] == 0.5
    # the process was killed while it wrote its last line, and no response of a step was judged
    path.write_text(line() + line(**{"length/mean": None, "length/q50": None}) + '{"step": 3, "sta')
    assert read_measured(tmp_path) == whole
    for text in (line(**{"groups/sampled": 0}), json.dumps({"stage": 0, "values": {}}) + "\n", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match="no step with sampled responses yet"):
            read_measured(tmp_path)
    for text in ("[1]\n", '{"stage": 0, "values": 3}\n', '{"step": 1}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not the metrics of a run"):
            read_measured(tmp_path)


def test_a_known_time_outside_the_gpus_replaces_the_fitted_one() -> None:
    fitted = make_plan(CONFIG, SEVEN, H800, Options(gpus=32))
    known = make_plan(CONFIG, SEVEN, H800, Options(gpus=32, other=0.0))
    gone = fitted.stages[0].seconds - known.stages[0].seconds
    assert gone == pytest.approx(1024 * fitted.calibration.other)


def test_the_layout_is_the_fastest_that_fits() -> None:
    options = Options(gpus=16, staleness=3)
    plan, work = make_plan(CONFIG, SEVEN, H800, options), work_of(CONFIG, options)
    system = System(SEVEN, H800, plan.calibration)
    fitting = fitting_layouts(demand(CONFIG, SEVEN, H800, options), 16)
    assert plan.stages[0].seconds == min(timing(system, work, placed.layout, 3)[1] for placed in fitting)
    assert {placed.layout.colocated for placed in fitting} == {True, False}
    assert not plan.placed.layout.colocated


@pytest.mark.parametrize(
    ("recipe", "gpu", "gpus", "staleness"),
    [
        (PAPER, "H200", 64, 0),
        (PAPER, "H200", 16, 2),
        (PAPER, "H200", 4, 2),
        (RECIPES / "skywork" / "or1-7b.toml", "RTX-4090", 32, 0),
        (RECIPES / "deepseek" / "7b-lora-gpu.toml", "H100-80G", 1, 0),
        (RECIPES / "deepseek" / "1.5b-node.toml", "H100-80G", 8, 1),
    ],
)
def test_the_settings_of_a_plan_are_a_recipe_that_is_planned_so(
    recipe: Path, gpu: str, gpus: int, staleness: int
) -> None:
    """A recipe with these settings is valid, needs these accelerators, and its split is the layout that was found."""
    config, options = load_train_recipe(recipe), Options(gpus=gpus, staleness=staleness)
    shape, hardware = load_shape(str(config.start.model)), load_hardware(gpu)
    first = make_plan(config, shape, hardware, options, what_if=False)
    sets = [f"{key}={json.dumps(value)}" for key, value in first.settings.items()]
    again = make_plan(load_train_recipe(recipe, sets), shape, hardware, options, what_if=False)
    assert again.settings == {}
    assert again.placed == first.placed
    if gpus > 1:
        assert again.stated is not None
        assert (again.stated.faults, again.stated.needs) == ((), gpus)
        assert again.stated.placed is not None
        assert again.stated.placed.layout == first.placed.layout
    layout = first.placed.layout
    assert first.settings.get("rollout.max_staleness", 0) == (0 if layout.colocated or gpus == 1 else staleness)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [("Qwen3-8B", "RTX-4090", 1), ("DeepSeek-R1-Distill-Qwen-32B", "H800-80G", 1), ("Qwen3-30B-A3B", "L40S", 2)],
)
def test_what_would_fit_fits_and_no_fewer_accelerators_do(model: str, gpu: str, gpus: int) -> None:
    shape, hardware, options = load_shape(model), load_hardware(gpu), Options(gpus=gpus)
    with pytest.raises(DoesNotFit) as refused:
        make_plan(CONFIG, shape, hardware, options)
    ways = refused.value.ways
    assert ways
    for way in ways:
        _, count, *sets = way.split()  # --gpus N --set KEY=VALUE ...
        changed = load_train_recipe(PAPER, sets[1::2])
        assert make_plan(changed, shape, hardware, replace(options, gpus=int(count)), what_if=False).placed.fits
    fewest = next(int(way.split()[1]) for way in ways if "--set" not in way)
    with pytest.raises(DoesNotFit):
        make_plan(CONFIG, shape, hardware, replace(options, gpus=fewest - 1))
    offloading = load_train_recipe(PAPER, ["rollout.vllm.engine_args.cpu_offload_gb=8"])
    with pytest.raises(DoesNotFit, match=r"not counted: rollout\.vllm\.engine_args \(cpu_offload_gb\)"):
        make_plan(offloading, shape, hardware, options)


@pytest.fixture(scope="module")
def made() -> Plan:
    return make_plan(CONFIG, SEVEN, H800, Options(gpus=16))


def test_twice_one_accelerator_is_a_step_on_two() -> None:
    """One accelerator runs the in-process engine with its limits, two do not."""
    made = make_plan(CONFIG, load_shape("Qwen2.5-1.5B"), H800, Options(gpus=1))
    on_two = over_gpus(CONFIG, made)[2]
    assert on_two is not None
    assert made.what_if["2 accelerators"] == on_two.seconds


def test_table_nines_curve_falls_ever_less(made: Plan) -> None:
    points = over_gpus(CONFIG, made)
    assert list(points) == [4, 8, 16, 32, 64, 128]
    seconds = [stage.seconds for stage in points.values() if stage is not None]
    assert len(seconds) == len(points)
    assert seconds[2] == made.stages[0].seconds, "the plan's own point is the plan's"
    gains = [1 - after / before for before, after in itertools.pairwise(seconds)]
    assert all(0 < gain < 0.5 for gain in gains), "never slower, and never twice as fast"
    assert gains[-1] < gains[0]


def test_what_does_not_fit_is_told_and_one_machine_has_one_point(made: Plan) -> None:
    assert over_gpus(CONFIG, replace(made, options=replace(made.options, gpus=4)))[1] is None
    quick = load_train_recipe(ROOT / "src/magicrl/recipes/smollm2.toml")
    alone = make_plan(quick, load_shape("SmolLM2-135M"), load_hardware("cpu-2core"), Options(gpus=1))
    assert over_gpus(quick, alone) == {1: max(alone.stages, key=lambda stage: stage.hours)}


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
