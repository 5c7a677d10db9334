"""Custom parts of the algorithm from a file: each example trains, and a copy of a built-in equals it bit for bit."""

from __future__ import annotations

import csv
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from magicrl.algorithms import advantages, entropy, losses
from magicrl.commands.train import command
from magicrl.config.errors import RecipeError
from magicrl.config.loader import config_hash, custom_files, load_train_recipe
from magicrl.training.protocols import NotFiniteError
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHORT = (
    "stages.0.max_steps=2", "stages.1.max_steps=1", "evaluation.every=0", "evaluation.temperatures=[0.0]",
    "data.test={}", "algorithm.refill=until_full", "algorithm.refill_rounds=40",
)  # fmt: skip
OFF_POLICY = ("stages.0.mini_batch=4", "algorithm.reuse=2")


def run(recipe: Path, output: Path, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    run_training(load_train_recipe(recipe, [*SHORT, *overrides]), output, NullObserver(), resume=resume)
    return [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def learning(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: row[key] for key in row if key.startswith(("learner/", "entropy/", "train/", "length/"))} for row in rows
    ]


@pytest.mark.parametrize(
    ("setting", "alone"),
    [
        ("algorithm.loss=examples/loss.py:ROW", "learner/policy_loss"),
        ("algorithm.advantage=examples/advantage.py:only_better", "learner/policy_loss"),
        ("algorithm.reducer=examples/reducer.py:square_root", "learner/policy_loss"),
        ("algorithm.correction=examples/correction.py:of_responses", "learner/correction_mean"),
        ("entropy.controller=examples/controller.py:make", "entropy/coefficient/trend"),
    ],
)
def test_each_example_trains_and_changes_what_it_is_for(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, alone: str
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)  # a path in --set is relative to the working directory
    assert len((EXAMPLES / setting.split("/")[1].split(":")[0]).read_text().splitlines()) < 60
    rows = run(toy_recipe, tmp_path / "own", setting, *OFF_POLICY)
    plain = run(toy_recipe, tmp_path / "plain", *OFF_POLICY)
    assert all(row["learner/grad_norm"] > 0 for row in rows)
    assert rows[0]["train/accuracy/mean"] == plain[0]["train/accuracy/mean"]
    assert rows[0].get(alone) != plain[0].get(alone) or rows[1].get(alone) != plain[1].get(alone)


LOSS = """
from __future__ import annotations
import torch
from magicrl.algorithms.losses import LossInputs, LossRow, Surrogate, global_tokens, past_the_clip

{source}

ROW = LossRow(surrogate=clipped_ratio, reducer=global_tokens, clip=(0.2, 0.2))
"""
COPIES = {
    "loss": ("algorithm.loss", "ROW", LOSS.format(source=inspect.getsource(losses.clipped_ratio))),
    "advantage": (
        "algorithm.advantage",
        "group_relative",
        "from magicrl.algorithms.advantages import *\n" + inspect.getsource(advantages.group_relative),
    ),
    "reducer": (
        "algorithm.reducer",
        "global_tokens",
        "import torch\nfrom magicrl.algorithms.losses import *\n" + inspect.getsource(losses.global_tokens),
    ),
    "correction": (
        "algorithm.correction",
        "weights",
        "from magicrl.algorithms.losses import *\n\ndef weights(c):\n"
        "    return (c.old_logprobs - c.sampler_logprobs).exp().clamp(max=c.cap)\n",
    ),
    "controller": (
        "entropy.controller",
        "adaptive_control",
        "from magicrl.algorithms.entropy import *\n" + inspect.getsource(entropy.adaptive_control),
    ),
}


@pytest.mark.parametrize("kind", list(COPIES))
def test_a_built_in_brought_as_a_file_is_the_built_in_bit_for_bit(toy_recipe: Path, tmp_path: Path, kind: str) -> None:
    key, name, text = COPIES[kind]
    (toy_recipe.parent / "mine.py").write_text("from __future__ import annotations\n" + text)
    built_in = ("algorithm.correction=tis",) if kind == "correction" else ()
    expected = run(toy_recipe, tmp_path / "built-in", *OFF_POLICY, *built_in)
    table, _, field = key.partition(".")  # in a recipe, a path is relative to the recipe's folder
    text = toy_recipe.read_text()
    toy_recipe.write_text(
        text.replace("[entropy]\n", f'[entropy]\n{field} = "mine.py:{name}"\n')
        if table == "entropy"
        else f'{text}\n[{table}]\n{field} = "mine.py:{name}"\n'
    )
    found = run(toy_recipe, tmp_path / "brought", *OFF_POLICY)
    assert learning(found) == learning(expected)
    ours, theirs = (load_file(tmp_path / kept / "model" / "model.safetensors") for kept in ("brought", "built-in"))
    assert all(torch.equal(ours[weight], theirs[weight]) for weight in theirs)


NEEDY = """
import torch
from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, needs, nothing_clipped

@needs("old_logprobs", "ref_logprobs")
def statistics(batch):
    assert all(sample.old_logprobs is not None for sample in batch.samples)
    assert not [sample for sample in batch.samples if sample.ref_logprobs is None]
    return {"gap": max(abs(s.old_logprobs - s.sampler_logprobs).max() for s in batch.samples)}

def surrogate(s):
    assert s.statistics["gap"] < 1e-3 and s.coefficients == {} and s.entropy.requires_grad
    assert s.group_index.shape == s.policy_version.shape == s.sample_index.shape == s.ratio.shape
    return Surrogate(s.advantages * s.logprobs - 0.01 * (s.logprobs - s.ref_logprobs), nothing_clipped(s))

ROW = LossRow(surrogate=surrogate, needs=("entropy",), statistics=statistics)
"""


def test_a_pass_is_made_where_something_needs_it_and_nowhere_else(toy_recipe: Path, tmp_path: Path) -> None:
    mine = tmp_path / "needy.py"
    mine.write_text(NEEDY)
    rows = run(toy_recipe, tmp_path / "needy", f"algorithm.loss={mine}:ROW")
    assert all("learner/kl" in row for row in rows)  # the part needs a reference, which the recipe does not request
    assert all("time/other/old_logprobs" in row for row in rows)  # before the only update of the step
    file = tmp_path / "needy" / "run.json"
    document = json.loads(file.read_text())
    document["environments"][0]["start_weights"] = "others"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="the weights of the start model, the reference, changed"):
        run(toy_recipe, tmp_path / "needy", f"algorithm.loss={mine}:ROW", resume=True)
    gap = "max(abs(s.old_logprobs - s.sampler_logprobs).max() for s in batch.samples)"
    modest = NEEDY.replace('@needs("old_logprobs", ', "@needs(").replace("assert all", "assert not any")
    modest = modest.replace(gap, "0.0")
    mine.write_text(modest.replace("s.coefficients == {}", 'set(s.coefficients) == {"trend"}'))
    control = f"entropy.controller={EXAMPLES}/controller.py:make"
    rows = run(toy_recipe, tmp_path / "modest", f"algorithm.loss={mine}:ROW", control)
    assert not any("time/other/old_logprobs" in row for row in rows)  # with one update per step the ratio is 1


def test_an_advantage_of_zero_is_nothing_to_learn_from(
    toy_recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "zero.py").write_text("def const(a):\n    return 0.0 * a.rewards_N\n")
    own = (f"algorithm.advantage={tmp_path}/zero.py:const", "entropy.controller=none", "stages.1.max_steps=1")
    rows = run(toy_recipe, tmp_path / "run", *own)
    assert {row.get("learner/grad_norm", 0.0) for row in rows} == {0.0}
    learning = json.loads((tmp_path / "run" / "run.json").read_text())["learning"]
    assert learning["facts"]["updates"] > 0
    assert learning["outcome"] == "nothing_to_learn"
    assert "the gradient was 0" in learning["reason"]
    assert caplog.text.count("zero.py:const' is 0 for all") == 1, "reported once"


def test_an_advantage_with_the_wrong_sign_is_reported(
    toy_recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sign.py").write_text("def minus(a):\n    return 0.5 - a.rewards_N\n")
    more = ("stages.0.rollout_batch=16", "stages.0.mini_batch=16", "stages.0.group_size=8", "stages.1.max_steps=1")
    run(toy_recipe, tmp_path / "run", f"algorithm.advantage={tmp_path}/sign.py:minus", *more)
    assert caplog.text.count("sign.py:minus' gives the better responses") == 1, "once"


BAD = """
from magicrl.algorithms.entropy import FixedEntropyController, no_control
from magicrl.algorithms.losses import LossRow, Surrogate, nothing_clipped

def of(values, **more):
    return LossRow(surrogate=lambda s: Surrogate(values(s), nothing_clipped(s)), **more)

ROW = of(lambda s: (s.ratio * s.advantages).detach())
MEAN = of(lambda s: (s.ratio * s.advantages).mean())
LOG = of(lambda s: (s.ratio - s.ratio.detach()).log())
ROOT = of(lambda s: s.advantages * (s.ratio - s.ratio.detach()).sqrt())
NEGATIVE = of(lambda s: s.ratio * s.advantages, reducer=lambda r: -r.lengths_N)
FORGETFUL = of(lambda s: s.ratio * s.advantages, statistics=lambda batch: None)

def few(a):
    return a.rewards_N[1:]
def words(a):
    return ['x'] * len(a.rewards_N)
def better(a):
    return a.rewards_N > a.rewards_N.mean()
def nothing(r):
    return r.lengths_N // 1000
def long(r):
    return r.lengths_N > 2
def divided(c):
    return c.advantages / (c.advantages - c.advantages)

class Control(FixedEntropyController):
    def coefficient(self, entropy):
        return self.alpha
class More(FixedEntropyController):
    def coefficient(self, entropy):
        return 0.0
    def coefficients(self, entropy):
        return self.alpha
def control(alpha, kind=Control):
    def make(settings):
        made = kind(0.0)
        made.alpha = alpha
        return made
    return make
none, below, minus = control(None), control(True), control(-0.1)
more, true = control(None, More), control({"a": True}, More)

class Remembers(FixedEntropyController):
    seen = {}
    def observe(self, entropy):
        self.seen = {1: entropy}
    def state(self):
        return {"seen": self.seen}
def remembers(settings):
    return Remembers(0.0)
"""


@pytest.mark.parametrize(
    ("key", "name", "reason"),
    [
        ("algorithm.loss", "ROW", ": the loss has no gradient"),
        ("algorithm.loss", "MEAN", ": a surrogate must return"),
        ("algorithm.loss", "LOG", " returns numbers that are not finite"),
        ("algorithm.loss", "ROOT", r" for an infinite derivative \(sqrt"),
        ("algorithm.loss", "NEGATIVE", r": a reducer must return \d+ finite weights >= 0"),
        ("algorithm.loss", "FORGETFUL", ": statistics must return a dict; got NoneType"),
        ("algorithm.advantage", "few", ": an advantage must return"),
        ("algorithm.advantage", "words", ": an advantage must return"),
        ("algorithm.advantage", "better", r": an advantage must return \d+ numbers"),
        ("algorithm.reducer", "nothing", r": a reducer must return \d+ finite weights >= 0, not all 0"),
        ("algorithm.reducer", "long", ": a reducer must return"),
        ("algorithm.correction", "divided", " returns numbers that are not finite"),
        ("entropy.controller", "none", r": coefficient\(entropy\) is None; it must be a finite number"),
        ("entropy.controller", "below", r": coefficient\(entropy\) is True"),
        ("entropy.controller", "minus", r": coefficient\(entropy\) is -0.1; it must be >= 0"),
        ("entropy.controller", "more", r": coefficients\(entropy\) must return a dict; got NoneType"),
        ("entropy.controller", "true", ": the coefficient 'a' is True"),
        ("entropy.controller", "remembers", r": state\(\) must return what JSON keeps .* got {'seen': {1: "),
    ],
)
def test_an_error_of_a_custom_part_names_its_setting_and_file(
    key: str, name: str, reason: str, toy_recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    # The gradient of a bonus must not hide that the policy term has none.
    bonus = ("entropy.controller=fixed", "entropy.alpha=0.001")
    with pytest.raises((ValueError, NotFiniteError), match=rf"{key} = '.*bad\.py:{name}'{reason}"):
        run(toy_recipe, tmp_path / "run", *bonus, f"{key}={tmp_path}/bad.py:{name}")


def test_a_changed_file_is_told_to_a_resumed_run(toy_recipe: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(COPIES["loss"][2])
    own = f"algorithm.loss={mine}:ROW"
    config = load_train_recipe(toy_recipe, [own])
    before, plain = config_hash(config), config_hash(load_train_recipe(toy_recipe))
    run(toy_recipe, tmp_path / "run", own, "stages.1.max_steps=1")
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert document["environments"][0]["custom"] == custom_files(config)
    mine.write_text(COPIES["loss"][2] + "\n# another\n")
    assert len({before, plain, config_hash(config)}) == 3
    run(toy_recipe, tmp_path / "run", own, "stages.1.max_steps=1", resume=True)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("the file of algorithm.loss has changed" in event.get("message", "") for event in events)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("algorithm.loss=magik", "unknown loss 'magik'; did you mean 'magic'? Known: aspo, c"),
        ("algorithm.reducer=global_token", "did you mean 'global_tokens'?"),
        ("algorithm.correction=tiss", "did you mean 'tis'?"),
        ("algorithm.advantage=nowhere.py:mine", "there is no file"),
        ("entropy.controller=adaptiv", "did you mean 'adaptive'?"),
    ],
)
def test_an_unknown_name_is_told_before_anything_is_loaded(toy_recipe: Path, setting: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_train_recipe(toy_recipe, [setting])
    assert told in str(error.value)
    assert str(error.value).startswith(f"--set {setting}: ")


def test_what_a_stage_cannot_change_is_told_before_training(toy_recipe: Path, tmp_path: Path) -> None:
    config = load_train_recipe(toy_recipe, ["algorithm.loss=pg", "stages.1.clip_high=0.3"])
    with pytest.raises(RecipeError, match="'pg' has no clip to set; leave it out") as error:
        run_training(config, tmp_path / "run", NullObserver(), resume=False)
    assert error.value.key == "stages.1.clip_high"
    config = load_train_recipe(toy_recipe, ["algorithm.loss=pg", "algorithm.clip_low=0.3"])
    with pytest.raises(RecipeError, match="'pg' has no clip to set; leave it out") as error:
        run_training(config, tmp_path / "run", NullObserver(), resume=False)
    assert error.value.key == "algorithm.clip_low"
    (tmp_path / "mine.py").write_text(
        "from magicrl.algorithms.entropy import adaptive_control\n\n"
        "def make(s):\n    if s.target == 0.5:\n        raise ValueError('not half a nat')\n"
        "    return adaptive_control(s)\n"
    )
    own = [f"entropy.controller={tmp_path}/mine.py:make", "stages.1.entropy_target=0.5"]
    with pytest.raises(RecipeError, match="not half a nat") as error:
        run_training(load_train_recipe(toy_recipe, own), tmp_path / "run", NullObserver(), resume=False)
    assert error.value.key == "entropy.controller"
    assert not (tmp_path / "run").exists()


def test_a_stage_with_another_target_hands_a_controllers_state_on(toy_recipe: Path, tmp_path: Path) -> None:
    """The example's controller remembers the entropy of the previous step."""
    control = f"entropy.controller={EXAMPLES}/controller.py:make"
    plain = run(toy_recipe, tmp_path / "plain", control, "entropy.target=5")
    staged = run(toy_recipe, tmp_path / "staged", control, "entropy.target=5", "stages.1.entropy_target=6")
    assert staged[2]["entropy/coefficient/trend"] == plain[2]["entropy/coefficient/trend"] != 0
    assert [s["entropy/alpha"] - p["entropy/alpha"] for s, p in zip(staged, plain, strict=True)] == pytest.approx(
        [0, 0, 0.05]  # gain times the change of the target
    )


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("algorithm.loss=OWN:thing", "is a int; it must be a magicrl.algorithms.losses.LossRow"),
        ("algorithm.loss=OWN:single", r"clip = 0.2; it must be a pair of positive numbers \(eps_low, eps_high\)"),
        ("algorithm.loss=OWN:three", r"clip = \(0.2, 0.2, 0.2\); it must be a pair"),
        ("algorithm.loss=OWN:text", r"clip = \('0.2', 0.2\); it must be a pair"),
        ("algorithm.loss=OWN:zero", r"clip = \(0, 0.2\); it must be a pair"),
        ("algorithm.loss=OWN:row", "surrogate of loss .* called with one argument, LossInputs: missing .* 'more'"),
        ("algorithm.reducer=OWN:two", "is called with one argument, ReducerInputs: missing .* 'more'"),
        ("algorithm.correction=OWN:two", "is called with one argument, LossInputs: missing .* 'more'"),
        ("algorithm.advantage=OWN:two", "is called with one argument, AdvantageInputs: missing .* 'more'"),
        ("algorithm.reducer=OWN:thing", "must be a function of ReducerInputs"),
        ("algorithm.correction=OWN:thing", "must be a function of LossInputs"),
        ("algorithm.correction=OWN:misspelt", "needs has unknown inputs 'reference'"),
        ("algorithm.advantage=OWN:thing", "must be a function"),
        ("entropy.controller=OWN:thing", "must be a function of ControllerSettings"),
        ("entropy.controller=OWN:made", "is a FixedEntropyController; it must be a function of ControllerSettings"),
        ("entropy.controller=OWN:kept", "returns the same object for every call"),
        ("algorithm.loss=examples/loss.py:ROW", "statistics of the mini-batch, which do not see what a teacher adds"),
    ],
)
def test_something_else_under_the_name_is_told_before_training(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, told: str
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    (tmp_path / "wrong.py").write_text(
        "from magicrl.algorithms.entropy import FixedEntropyController\n"
        "from magicrl.algorithms.losses import Correction, LossRow\n"
        "single, three = LossRow(surrogate=None, clip=0.2), LossRow(surrogate=None, clip=(0.2, 0.2, 0.2))\n"
        "text, zero = LossRow(surrogate=None, clip=('0.2', 0.2)), LossRow(surrogate=None, clip=(0, 0.2))\n"
        "two = lambda inputs, more: inputs\nrow = LossRow(surrogate=two)\n"
        "thing = 1\nmade = FixedEntropyController(0.1)\nkept = lambda settings: made\n"
        "misspelt = Correction(name='mine', weights=lambda c: c.ratio, needs=('reference',))\n"
    )
    teacher = ["teacher.prompt={prompt}", "algorithm.reject_zero_advantage=false"] if "examples" in setting else []
    config = load_train_recipe(toy_recipe, [setting.replace("OWN", f"{tmp_path}/wrong.py"), *teacher])
    with pytest.raises(RecipeError, match=told) as error:
        run_training(config, tmp_path / "run", NullObserver(), resume=False)
    assert error.value.key == setting.partition("=")[0]
    assert not (tmp_path / "run").exists()


def test_a_tracker_beside_the_recipe_gets_every_step_of_a_run(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toy_recipe.parent / "mine.py").write_text((EXAMPLES / "tracker.py").read_text())
    toy_recipe.write_text(toy_recipe.read_text() + '\n[logging]\ntrackers = ["mine.py:CsvTracker"]\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    command(toy_recipe, settings=SHORT, output=tmp_path / "run")
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    with (tmp_path / "run" / "csv" / "steps.csv").open() as file:
        told = [(int(step), float(value)) for step, key, value in csv.reader(file) if key == "length/mean"]
    assert told == [(row["step"], row["values"]["length/mean"]) for row in recorded]
