"""``magicrl preflight`` from end to end on a toy: exit status, JSON, page, and no files left behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_start import toy_sft

import magicrl
from magicrl.algorithms.entropy import measure_entropy
from magicrl.commands.preflight import UNSOUND
from magicrl.commands.preflight import command as preflight
from magicrl.config.errors import RecipeError
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.evaluation.job import sample_problems
from magicrl.records import RolloutGroup, ScoredGroup, TrainSample
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.preflight import ATTEMPTS, Learnable
from magicrl.training.step import StepResult, Trainer, buffer_samples

RECIPE = """
[run]
name = "toy"
output = "OUTPUT"
threads = 1

[start]
sft = "sft.toml"

[model]
dtype = "float32"

[[data.train]]
family = "running_sum"
levels = [2]
count = 40

[rollout]
max_rows = 64
memory_limit_mb = 64

[optimizer]
learning_rate = 1e-4

[[stages]]
max_tokens = 24
rollout_batch = 8
group_size = 4
max_steps = 3

[verifier]
extract = "lenient"
"""
REWARD = "def always(problem, response):\n    return 1.0\n\n\ndef never(problem, response):\n    return 0.0\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "sft.toml").write_text(toy_sft(steps=40, options="recheck_continue = 0.5, "))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.toml").write_text(RECIPE.replace("OUTPUT", str(folder / "runs" / "toy")))
    return folder / "recipe.toml"


def test_a_constant_reward_ends_with_a_status_and_a_page(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = recipe.with_name("page.html")
    sets = [f"reward={recipe.with_name('reward.py')}:always"]
    assert preflight(recipe, settings=sets, samples=32, json=True, page=page) == UNSOUND
    found = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in found["findings"]] == ["constant_reward"]
    assert found["learnable"]["answers"]["groups"] == 8
    assert found["learnable"]["answers"]["groups_per_step"] == 8
    assert found["learnable"]["answers"]["entropy"] == found["learnable"]["entropy"] > 0
    assert "the reward does not depend on the answer" in page.read_text()
    # the supervised start is kept for the run, and no run folder is made
    assert [path.name for path in (recipe.parent / "runs").iterdir()] == ["models"]


def test_a_reward_that_judges_nothing_is_a_finding(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = recipe.with_name("unjudged.html")
    recipe.with_name("raises.py").write_text("def raises(problem, response):\n    raise KeyError\n")
    sets = [f"reward={recipe.with_name('raises.py')}:raises"]
    assert preflight(recipe, settings=sets, samples=16, page=page) == UNSOUND
    text = capsys.readouterr().out
    assert "no answer could be judged: KeyError" in text
    assert "Not sound: nothing judged" in text
    assert "no answer could be judged" in page.read_text()


def test_the_figures_are_those_of_the_run(recipe: Path) -> None:
    found = magicrl.preflight(recipe, settings={"data.train.0.levels": [2]}, samples=32)
    answers, update = found["learnable"]["answers"], found["update"]
    assert answers["max_tokens"] == 24
    assert found["learnable"]["group_size"] == 4
    assert found["reward"]["references"] == 40
    assert found["reward"]["unread"] == 0
    assert found["reward"]["earned"]["the reference answer"] == 1
    assert found["reward"]["earned"]["an empty response"] == 0
    assert update["prompts"] == 8, "the recipe's own batch, as it is smaller than what was sampled"
    assert update["kl"] is None or 0 < update["kl"] < 0.1
    assert 0 < found["cost"]["hours"] < 1
    assert found["cost"]["factor"] > 0


def test_minutes_and_samples_are_the_budget(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[dict[str, float]] = []

    def measured(*_: Any, **budget: float) -> None:
        budgets.append(budget)
        raise ValueError("measured")

    monkeypatch.setattr("magicrl.training.preflight.measure", measured)
    with pytest.raises(ValueError, match="measured"):
        preflight(recipe, minutes=2, samples=7)
    assert budgets == [{"seconds": 120, "samples": 7}]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StepResult]:
    """The training steps that preflight makes."""
    made: list[StepResult] = []

    class Watched(Trainer):
        def step(self, stage: StageConfig, stage_index: int) -> StepResult:
            made.append(super().step(stage, stage_index))
            return made[-1]

    monkeypatch.setattr("magicrl.training.preflight.Trainer", Watched)
    return made


def test_the_kl_of_a_step_is_measured_on_responses_that_it_was_not_made_from(
    recipe: Path, steps: list[StepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[RolloutGroup] = []

    def samples_of(groups: Iterable[RolloutGroup]) -> list[TrainSample]:
        measured.extend(groups)
        return buffer_samples(measured)

    monkeypatch.setattr("magicrl.training.preflight.buffer_samples", samples_of)
    found = magicrl.preflight(recipe, settings={"stages.0.rollout_batch": 4}, samples=32)
    assert found["update"]["kl"] is not None
    assert len(measured) == found["update"]["prompts"] == 4
    trained = [scored.group for step in steps for scored in step.groups]
    assert not {id(group) for group in measured} & {id(group) for group in trained}
    assert not {g.request.problem.key for g in measured} & {g.request.problem.key for g in trained}


def test_the_step_is_made_from_the_prompts_whose_answers_had_the_most_different_rewards(
    recipe: Path, steps: list[StepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[ScoredGroup] = []
    learnable = magicrl.training.preflight._learnable

    def seen(config: TrainConfig, groups: Sequence[ScoredGroup], vocabulary: int) -> Learnable:
        sampled.extend(groups)
        return learnable(config, groups, vocabulary)

    monkeypatch.setattr("magicrl.training.preflight._learnable", seen)
    preflight(recipe, settings=["stages.0.rollout_batch=4"], samples=64)
    # of two problems with the same prompt the larger
    spread = dict(sorted((g.group.request.problem.key, float(g.rewards.std())) for g in sampled))
    stepped = {group.group.request.problem.key for group in steps[0].groups}
    assert 0 < sum(value > 0 for value in spread.values()) < len(spread)
    assert min(spread[key] for key in stepped) >= max(spread[key] for key in spread.keys() - stepped)


def test_the_first_stage_has_its_own_temperature_and_learning_rate(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperatures: list[float] = []

    def asked(*given: Any, temperature: float, **named: Any) -> list[ScoredGroup]:
        temperatures.append(temperature)
        return sample_problems(*given, temperature=temperature, **named)

    monkeypatch.setattr("magicrl.training.preflight.sample_problems", asked)
    own = {"stages.0.temperature": 1.25, "stages.0.learning_rate": 2e-4}
    found = magicrl.preflight(recipe, settings=own, samples=8)
    assert {*temperatures} == {found["temperature"]} == {1.25}
    assert found["update"]["rate"] == 2e-4
    assert found["own"] == ("temperature", "learning_rate")


@pytest.mark.parametrize(
    "settings", [{"model.exact": True, "rollout.weight_lag": 2}, {"rollout.max_staleness": 1}], ids=["lag", "ahead"]
)
def test_steps_of_other_modes_are_synchronous(
    recipe: Path, steps: list[StepResult], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    if "rollout.max_staleness" in settings:  # with an engine such as vLLM
        without = replace(InProcessEngine.capabilities, entropies=False)
        monkeypatch.setattr(InProcessEngine, "capabilities", without)
        measured: Any = lambda answers, kind: None if kind == "exact" else measure_entropy(answers, kind)  # noqa: E731
        monkeypatch.setattr("magicrl.training.step.measure_entropy", measured)
    found = magicrl.preflight(recipe, settings={"algorithm.reject_zero_advantage": False} | settings, samples=32)
    assert found["update"]["failure"] == ""
    assert [step.groups[0].group.completions[0].policy_version for step in steps] == [0, 1]


def test_without_a_signal_steps_end_with_the_time(recipe: Path, steps: list[StepResult]) -> None:
    never = f"reward={recipe.with_name('reward.py')}:never"
    preflight(recipe, settings=[never], minutes=1e-4, samples=8)
    assert len(steps) == 1
    preflight(recipe, settings=[never], minutes=60, samples=8)
    assert len(steps) == 1 + ATTEMPTS


def test_too_few_minutes_are_said_with_the_time_that_it_took(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight(recipe, minutes=1e-4, samples=8)
    note = "note: --minutes 0.0001 is too short for this recipe: the fewest answers and steps that say something took "
    assert capsys.readouterr().out.splitlines()[-1].startswith(note)
    preflight(recipe, minutes=60, samples=8)
    assert "too short" not in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="minutes must be above 0"):
        preflight(recipe, minutes=0)
    with pytest.raises(ValueError, match="recorded rollouts are not the model's answers"):
        magicrl.preflight(recipe, settings={"rollout.engine": "replay", "rollout.replay": "x"})
