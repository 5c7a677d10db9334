"""Meters of steps: staleness, throughput and the timeline of workers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import completion as response
from builders import request

from magicrl.config.loader import load_train_recipe
from magicrl.planning.costs import sequence_work
from magicrl.records import (
    Completion,
    FinishReason,
    Problem,
    RolloutGroup,
    TrainBatch,
    TrainSample,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.protocol import Capabilities
from magicrl.training.meters import StalenessMeter, StepClock, Throughput, rates, sampled_work, trained_work
from magicrl.training.protocols import TrainingStopped, WorkSpan
from magicrl.training.session import Workers


def completion(version: int, spans: tuple[tuple[int, int], ...] = ()) -> Completion:
    return Completion(
        tokens=frozen_tokens([1, 2, 3, 4]),
        text="",
        sampler_logprobs=frozen_floats([-1.0] * 4),
        sampler_entropies=None,
        finish_reason=FinishReason.LENGTH,
        policy_version=version,
        version_spans=spans,
    )


def buffer(*completions: Completion) -> list[Any]:
    problem = Problem(id="sum-3", prompt="", references=("1",), verifier="exact", source="test")
    request = SimpleNamespace(problem=problem, draw=7)
    return [SimpleNamespace(group=SimpleNamespace(request=request, completions=completions))]


def meter(most: int, versions: list[int]) -> StalenessMeter:
    """Return a meter that has seen an engine serve these versions, a step each."""
    found = StalenessMeter(most)
    for version in versions:
        found.begin_step(SimpleNamespace(policy_version=version, capabilities=Capabilities()))  # pyright: ignore[reportArgumentType]
    return found


def test_ages_are_steps_however_many_updates_a_step_makes() -> None:
    """Two updates per step, and a step that made none: of versions 0, 2, 2, 4, 6 the newest three count."""
    seen = meter(2, [0, 2, 2, 4, 6])
    groups = buffer(completion(6), completion(2, ((2, 1), (4, 2), (6, 1))))
    seen.check(groups)
    values = seen.metrics(groups, {(7, 0): frozen_floats([-1.5] * 4), (7, 1): frozen_floats([0.0] * 4)})
    assert values["staleness/mean"] == (0 * 4 + 2 + 1 + 1 + 0) / 8
    assert values["staleness/max"] == 2
    assert values["staleness/begun/mean"] == 1.0
    assert values["staleness/older/ratio"] == 3 / 8
    assert values["staleness/spanning/ratio"] == 0.5
    assert [values[f"staleness/share_{n}/ratio"] for n in range(3)] == [5 / 8, 2 / 8, 1 / 8]
    assert values["staleness/fresh_gap/mean"] == pytest.approx(0.5), "of the responses of version 6 alone"


@pytest.mark.parametrize(
    "response",
    [completion(2), completion(2, ((2, 1), (4, 3))), completion(4, ((4, 3), (9, 1)))],
    ids=["begun too long ago", "its first token is too old", "a version that was never served"],
)
def test_tokens_of_other_versions_stop_the_run_and_are_named(response: Completion) -> None:
    seen = meter(1, [0, 2, 4, 6])
    with pytest.raises(TrainingStopped, match=r"response 2 to problem 'sum-3' .* version [29], .*versions 4, 6 only"):
        seen.check(buffer(completion(6), response))


def test_the_bound_holds_over_a_resume() -> None:
    seen, resumed = meter(2, [0, 1, 2]), StalenessMeter(2)
    resumed.restore(seen.state())
    resumed.begin_step(SimpleNamespace(policy_version=3, capabilities=Capabilities()))  # pyright: ignore[reportArgumentType]
    resumed.check(buffer(completion(1)))
    with pytest.raises(TrainingStopped, match="versions 1, 2, 3 only"):
        resumed.check(buffer(completion(0)))


def test_a_synchronous_run_has_no_bound_to_check() -> None:
    meter(0, [0, 1]).check(buffer(completion(5)))


RECIPE = Path(__file__).parents[3] / "src" / "magicrl" / "recipes" / "tiny.toml"
# one layer of 152 parameters, a head of 40; a token that sees one other costs 16 of attention
MODEL = {
    "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": True,
}  # fmt: skip
# a prompt of 2 with responses of 1 and 3: 4 tokens enter, 4 are predicted, 10 are seen
FORWARD = 4 * 2 * 152 + 4 * 2 * 40 + 10 * 16


def sample(prompt: list[int], tokens: int, group: int = 0) -> TrainSample:
    return TrainSample(
        prompt_tokens=frozen_tokens(prompt),
        tokens=frozen_tokens([1] * tokens),
        advantage=1.0,
        group_index=group,
        sample_index=0,
        sampler_logprobs=frozen_floats(np.zeros(tokens)),
        policy_version=0,
    )


def group(prompt: int, *responses: int) -> Any:
    completions = tuple(response(range(n)) for n in responses)
    return SimpleNamespace(group=RolloutGroup(request=request(0, range(prompt)), completions=completions))


def recipe(**changes: Any) -> Any:
    return load_train_recipe(RECIPE, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])


def on(*names: str) -> Any:
    return SimpleNamespace(devices=names, peak_mb=lambda: 7.0)


def test_a_prompt_counts_once_an_update() -> None:
    one = TrainBatch.of([sample([5, 6], 1), sample([5, 6], 3), sample([7], 2, 1)])
    assert trained_work([one]) == sequence_work([(2, [1, 3]), (1, [2])])
    assert trained_work([one, one]) == trained_work([one]) + trained_work([one]), "a second pass is work again"
    assert trained_work([]) == sequence_work([])


def test_a_draw_s_prompt_counts_once_in_sampling() -> None:
    assert sampled_work([group(2, 1, 3), group(2, 0, 4)]) == sequence_work([(2, [1, 3]), (2, [4])])


def test_rates_by_hand() -> None:
    found = rates("learner", 100, 2e15, 4.0, ("NVIDIA H200", "NVIDIA H200"), bf16=True)
    assert found == {
        "flops/learner": 2e15,
        "speed/learner/tokens_per_second": 25.0,
        "speed/learner/tokens_per_second_per_device": 12.5,
        "speed/learner/flops_per_second": 5e14,
        "speed/learner/mfu": pytest.approx(5e14 / (2 * 989e12)),
    }
    assert rates("learner", 1, 1.0, 0.0, ("cpu",), bf16=True) == {}
    assert rates("learner", 1, 1.0, 1.0, (), bf16=True) == {}


@pytest.mark.parametrize(
    ("devices", "bf16"),
    [(("cpu",), True), (("NVIDIA H200", "NVIDIA H100 PCIe"), True), (("NVIDIA H200",), False)],
)
def test_without_the_peak_of_this_arithmetic_there_is_no_mfu(devices: tuple[str, ...], bf16: bool) -> None:
    found = rates("engine", 10, 8.0, 2.0, devices, bf16=bf16)
    assert "speed/engine/mfu" not in found
    assert found["speed/engine/flops_per_second"] == 4.0


def test_a_step_s_learner_and_engine() -> None:
    batch = TrainBatch.of([sample([5, 6], 1), sample([5, 6], 3)])
    values = {"time/train": 2.0, "time/rollout": 4.0, "time/step": 7.0}
    meter = Throughput(recipe(model__dtype="bfloat16"), MODEL)
    found = meter.metrics([group(2, 1, 3)], [batch], values, learner=on("NVIDIA H200"), engine=on("cpu", "cpu"))
    assert found["flops/learner"] == 3 * FORWARD
    assert found["speed/learner/tokens_per_second"] == 6 / 2.0, "the prompt's two and the responses' four"
    assert found["speed/learner/mfu"] == pytest.approx(3 * FORWARD / 2.0 / 989e12)
    assert found["memory/learner/peak_mb"] == found["memory/engine/peak_mb"] == 7.0
    assert found["flops/engine"] == FORWARD
    assert found["speed/engine/tokens_per_second"] == 4 / 4.0
    assert found["speed/engine/tokens_per_second_per_device"] == 0.5
    values["idle/engine/seconds"] = 6.0
    late = meter.metrics([group(2, 1, 3)], [], values, learner=on("cpu"), engine=on("cpu"))
    assert late["speed/engine/tokens_per_second"] == 4.0, "asynchronous: over the seconds in which it generated"
    assert not any(key.startswith(("speed/learner", "flops/learner")) for key in late), "nothing was learnt"


def test_adapters_and_unknown_models() -> None:
    batch = TrainBatch.of([sample([5, 6], 1), sample([5, 6], 3)])
    lora = Throughput(recipe(model__lora='{rank=3, target_modules=["q_proj"]}'), MODEL)
    found = lora.metrics([], [batch], {"time/train": 1.0}, learner=on("cpu"), engine=object())
    assert found["flops/learner"] == 2 * (FORWARD - 160) + 3 * 160 + 4 * 6 * 3 * (4 + 4)
    other = Throughput(recipe(), {**MODEL, "model_type": "gemma2"})
    found = other.metrics([], [batch], {"time/train": 1.0}, learner=on("cpu"), engine=object())
    speeds = {"speed/learner/tokens_per_second", "speed/learner/tokens_per_second_per_device"}
    assert set(found) == speeds | {"memory/learner/peak_mb"}


class Pool:
    """A pool that reports its counter and its spans once, as `protocols.RemoteWorkers` requires."""

    def __init__(self) -> None:
        self.tokens = 0
        self.work: list[WorkSpan] = []
        self.lost: list[str] = []

    def observations(self) -> dict[str, float]:
        told, self.tokens = self.tokens, 0
        return {"cluster/replica_0/tokens": told}

    def spans(self) -> list[WorkSpan]:
        told, self.work = self.work, []
        return told


def test_the_timeline_has_the_work_inside_the_step(tmp_path: Path) -> None:
    clock = StepClock()
    clock.started, clock.spans = 100.0, [("rollout/rollout", 100.0, 104.0), ("other/weights", 108.5, 109.0)]
    clock.ended = 110.0
    work = [
        WorkSpan("replica 0", "rollout", 90.0, 99.0),  # an evaluation before the step
        WorkSpan("replica 0", "rollout", 99.5, 103.25),
        WorkSpan("replica 1", "rollout", 109.0, 200.0),
        WorkSpan("replica 1", "rollout", 110.0, 111.0),
    ]
    clock.append_timeline(tmp_path / "timeline.jsonl", 7, work)
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [(row["worker"], row["what"], row["start"], row["end"]) for row in rows] == [
        ("local", "rollout", 0.0, 4.0),
        ("local", "weights", 8.5, 9.0),
        ("replica 0", "rollout", 0.0, 3.25),
        ("replica 1", "rollout", 9.0, 10.0),
    ]
    assert {row["step"] for row in rows} == {7}


def test_the_end_of_a_step_is_when_its_times_were_taken() -> None:
    clock = StepClock()
    assert clock.times()["step"] == clock.ended - clock.started


def test_a_step_s_figures_leave_out_what_came_before_it() -> None:
    pool = Pool()
    workers = Workers(pool, object())
    pool.tokens, pool.work = 5, [WorkSpan("replica 0", "rollout", 0.0, 1.0)]
    pool.lost.append("replica 0: killed")
    workers.begin_step()
    pool.tokens, pool.work = 7, [WorkSpan("replica 0", "rollout", 2.0, 3.0)]
    assert workers.observations() == {"cluster/replica_0/tokens": 7}
    assert workers.spans() == [WorkSpan("replica 0", "rollout", 2.0, 3.0)]
    assert workers.losses() == ["replica 0: killed"], "a loss is told whenever it came"
    pool.lost.append("replica 1: silent")
    assert workers.losses() == ["replica 1: silent"]
    assert workers.losses() == []
