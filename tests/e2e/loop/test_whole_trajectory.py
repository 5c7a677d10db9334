"""Golden trajectories of whole runs: all of metrics.jsonl, every weight and every event, against a slow loop.

`tests/helpers/slow_loop.py` is a direct implementation of the recipe. It computes the run again from its recorded
tokens. A metric that neither it nor the clock explains fails here, so every new metric needs its slow counterpart.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from slow_loop import problems_of, prompts
from slow_methods import LOSSES, REDUCERS, SlowMethods
from tomli_w import dumps

from magicrl.config.loader import load_train_recipe, to_toml
from magicrl.records import Outcome, Verdict
from magicrl.training.checkpoint import load_checkpoint
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training
from magicrl_verifiers.extraction import ExactVerifier

CLOCKED = ("time/", "idle/", "speed/", "memory/", "tokens/per_second", "verify/seconds")
FLOPS = ("flops/learner", "flops/engine")
"""The planner's arithmetic, which `tests/unit/planning/test_shapes.py` compares with torch's own counter."""
RELATIVE, ABSOLUTE = 1e-5, 5e-6
"""Tolerances of float32 against float64. Values that are 0 (the sampler gap on-policy) differ only by rounding."""
CANCELLING = ("learner/loss", "learner/policy_loss")
"""Sums of terms of both signs and of size 1, whose absolute error is that of the terms."""

RECIPE: dict[str, Any] = {
    "run": {"name": "trajectory", "seed": 7, "threads": 1},
    "model": {"dtype": "float32", "micro_batch_tokens": 150, "head_chunk_tokens": 16},
    "data": {
        "train": [{"path": "train.jsonl", "verifier": "exact"}],
        "validation": [{"path": "validation.jsonl", "verifier": "exact"}],
        "test": {},
        "online_filter": True,
    },
    "rollout": {"temperature": 0.8, "max_rows": 16, "memory_limit_mb": 64},
    "algorithm": {
        "loss": "magic",
        "advantage_mask": "none",
        "clip_low": 0.1,
        "clip_high": 0.3,
        "reject_zero_advantage": True,
        "refill": "until_full",
        "refill_rounds": 2,
        "minibatch": "keep_n_sgd",
        "reuse": 2,
        "correction": "none",
    },
    "entropy": {"controller": "adaptive", "target": 1.3, "step": 0.02, "maximum": 0.05, "estimator": "exact"},
    "reference": {"mode": "loss", "coefficient": 0.05},
    # eps is large, so that a gradient that consists of rounding does not move a weight
    "optimizer": {
        "learning_rate": 0.01,
        "warmup_steps": 5,
        "beta1": 0.8,
        "beta2": 0.95,
        "eps": 0.01,
        "weight_decay": 0.02,
        "max_grad_norm": 1.2,
    },
    "stages": [
        {
            "max_tokens": 6,
            "rollout_batch": 8,
            "mini_batch": 4,
            "group_size": 4,
            "min_steps": 0,
            "max_steps": 14,
            "transition": {"rule": "converged", "horizon": 1, "delta": 0.15, "window": 4, "confidence": 0.9},
        },
        {
            "max_tokens": 14,
            "rollout_batch": 6,
            "mini_batch": 3,
            "group_size": 5,
            "min_steps": 0,
            "max_steps": 4,
            "transition": {"rule": "converged", "horizon": 1, "delta": 0.01, "window": 4, "confidence": 0.9},
        },
    ],
    "evaluation": {"every": 0, "validation_samples": 1, "validation_temperature": 0.0},
    "verifier": {"extract": "lenient"},
    "checkpoint": {"every": 1, "keep_last": 99},
}


def with_changes(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with ``changes`` by dotted key."""
    recipe = copy.deepcopy(RECIPE)
    for key, value in changes.items():
        *path, last = key.split(".")
        place: Any = recipe
        for name in path:
            place = place[int(name)] if name.isdigit() else place[name]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return recipe


def write_problems(path: Path, count: int, twins: int = 0) -> None:
    """Write distinct prompts, two of three with answer 3, the others 8: soon learned, so solved ones are removed."""
    rows = [
        {"problem": prompt, "answer": "8" if number % 3 == 0 else "3"}
        for number, prompt in enumerate(prompts(count, path.stem))
    ]
    rows += rows[1 : 1 + twins]  # one prompt, two problems
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(folder: Path, model: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Write recipe and problems into ``folder``, and return the recipe as its TOML has it."""
    recipe = {**with_changes(changes), "start": {"model": str(model)}}
    write_problems(folder / "train.jsonl", 22, twins=2)
    write_problems(folder / "validation.jsonl", 6)
    (folder / "recipe.toml").write_text(dumps(recipe))
    return recipe


def run(folder: Path, output: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    """Run the folder's recipe and return the lines of metrics.jsonl without times."""
    run_training(load_train_recipe(folder / "recipe.toml", []), output, NullObserver(), resume=resume)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["values"] = {k: v for k, v in line["values"].items() if not k.startswith(CLOCKED)}
    return lines


def events(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]


Unjudged = Callable[[str, str], bool]
"""Function that says whether the run's verifier could not judge this response, given a reference answer."""


class Trajectory:
    """A run and its slow counterpart, compared step by step."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        changes: dict[str, Any],
        *,
        unjudged: Unjudged = lambda _reference, _text: False,
    ) -> None:
        self.recipe = write_recipe(folder, model, changes)
        self.output = folder / "run"
        self.lines = run(folder, self.output)
        self.values = [line["values"] for line in self.lines]
        self.slow = SlowMethods(
            self.recipe,
            model,
            problems_of(folder / "train.jsonl"),
            problems_of(folder / "validation.jsonl"),
            unjudged=unjudged,
        )

    def check(self, relative: float = RELATIVE) -> None:
        for line in self.lines:
            stage = self.slow.stage.index
            assert (line["step"], line["stage"]) == (self.slow.steps + 1, stage)
            rows = pq.read_table(self.output / "rollouts" / f"step-{line['step']:06d}.parquet").to_pylist()
            expected = self.slow.step(rows)
            found = {k: v for k, v in line["values"].items() if k not in FLOPS}
            if self.slow.ahead:  # which responses have ended depends on the engine's schedule
                assert 0 <= found.pop("queue/finished") <= found["queue/in_flight"]
            assert found.keys() == expected.keys(), f"step {line['step']}: {sorted(found.keys() ^ expected.keys())}"
            for key, value in expected.items():
                near = relative if key in CANCELLING else ABSOLUTE
                wanted = None if value is None else pytest.approx(value, rel=relative, abs=near)
                assert found[key] == wanted, f"step {line['step']}: {key}"
            self._check_weights(line["step"], relative)
        assert self.slow.stage.index == len(self.recipe["stages"]), "the run ended before its last stage did"
        self._check_events()

    def _check_weights(self, step: int, relative: float) -> None:
        """Compare weights and both moments of the step's checkpoint, parameter by parameter."""
        checkpoint = load_checkpoint(self.output / "checkpoints" / f"step-{step:06d}")
        kinds = {"weights": self.slow.weights, "exp_avg": self.slow.first, "exp_avg_sq": self.slow.second}
        for kind, tensors in kinds.items():
            if kind != "weights" and not self.slow.updates:
                continue
            # a gradient that is a difference of near equals is small, and its absolute error is that of the terms
            whole = torch.stack([tensor.norm() for tensor in tensors.values()]).norm()
            for name, expected in tensors.items():
                found = checkpoint.tensors[f"learner/{kind}/{name}"].double()
                error = float((found - expected).norm() / whole.clamp(min=1e-9))  # all are 0 without any advantage
                assert error < relative, f"step {step}: {kind} of {name} is off by {error}"
                tensors[name] = found  # continue from the run's values, so that rounding does not add up over steps
        self._check_state(checkpoint.state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Compare the other state of a resumed run."""
        slow = self.slow
        assert state["controller"].get("c", 0.0) == pytest.approx(slow.c, abs=1e-12)
        assert state["sampler"]["removed"] == sorted(slow.removed)
        assert state["solved"] == len(slow.removed)
        assert sorted((right, judged) for _, right, judged in state["visits"].values()) == sorted(slow.visits.values())
        curve = state["schedule"]["test"]
        if curve is not None and "values" in curve:
            points = list(zip(curve["steps"], curve["values"], curve["standard_errors"], strict=True))
            assert points == [pytest.approx(point, rel=RELATIVE) for point in slow.stage.curve]

    def _check_events(self) -> None:
        told = events(self.output)
        ends = [e for e in told if e["kind"] == "stage_end"]
        slow_ends = [e for e in self.slow.events if e["kind"] == "stage_end"]
        assert [(e["stage"], f"after {e['steps']} step{'s' * (e['steps'] != 1)}") for e in slow_ends] == [
            (e["stage"], e["message"].split(" ended ")[1].split(":")[0]) for e in ends
        ]
        assert [e["early"] for e in slow_ends] == ["max_steps" not in e["message"] for e in ends]
        filters = [(e["removed"], e["kept"]) for e in told if e["kind"] == "filter"]
        assert filters == [(e["removed"], e["kept"]) for e in self.slow.events if e["kind"] == "filter"]


def test_the_whole_recipe(toy_model: Path, tmp_path: Path) -> None:
    """All features of the recipe at once. Each must have had an effect in this run."""
    last = {**RECIPE["stages"][1], "max_steps": 1, "transition": {"rule": "fixed"}}
    trajectory = Trajectory(tmp_path, toy_model, {"stages": [*RECIPE["stages"], last]})
    trajectory.check()
    values = trajectory.values
    alphas = [row["entropy/alpha"] for row in values]
    assert 0 < max(alphas) == max(row["entropy/c"] for row in values) == 0.05, "c reached its ceiling"
    assert any(row["entropy/alpha"] == 0 < row["entropy/c"] for row in values), "c is not alpha above the target"
    moves = np.diff([row["entropy/c"] for row in values])
    assert min(moves) < 0 < max(moves), "c went both ways"
    assert all(row["learner/sgd_steps"] == 4 for row in values)
    assert min(row["groups/trained"] for row in values) < 6, "some step was not filled by all of its rounds"
    assert any(row["groups/trained"] == 8 for row in values), "and some step was"
    assert min(row["learner/clip_ratio"] for row in values) > 0
    assert min(row["learner/grad_norm"] for row in values) < 1.2 < max(row["learner/grad_norm"] for row in values)
    assert next(event["early"] for event in trajectory.slow.events if event["kind"] == "stage_end"), "converged"
    filters = [event["removed"] for event in trajectory.slow.events if event["kind"] == "filter"]
    assert len(filters) == 2
    assert filters[0] > 0
    assert trajectory.slow.epoch > 1, "problems came again"


SHORT: dict[str, Any] = {
    "stages.1.transition": {"rule": "fixed"},
    "stages.0.transition": {"rule": "fixed"},
    "stages.0.min_steps": 0,
    "stages.0.max_steps": 3,
    "stages.1.max_steps": 1,
}
CONVERGED = {"rule": "converged", "horizon": 1, "window": 4, "confidence": 0.9}
OWN_CLIPS = {"algorithm.clip_low": None, "algorithm.clip_high": None}
STAGED: dict[str, float] = {
    "temperature": 1.1,
    "entropy_target": 1.9,
    "kl_coefficient": 0.3,
    "clip_low": 0.02,
    "clip_high": 0.04,
    "reuse": 3,
    "learning_rate": 0.02,
}
"""Settings of a stage, each far enough from the recipe's."""
CASES: dict[str, dict[str, Any]] = {
    # mask before, refilled
    "before": {"algorithm.advantage_mask": "before"},
    # mask after, parts of D_T, no refill, DAPO
    "after": {
        **OWN_CLIPS,
        "algorithm.loss": "dapo",
        "algorithm.advantage_mask": "after",
        "algorithm.minibatch": "keep_d_t",
        "algorithm.refill": "none",
        "algorithm.reuse": 1,
    },
    # several passes over one part, Dr. GRPO
    "reuse": {
        "algorithm.loss": "dr_grpo",
        "stages.0.mini_batch": 8,
        "stages.1.mini_batch": 6,
    },
    # on-policy without rejection, GRPO, fixed alpha, KL watched
    "on-policy": {
        "algorithm.loss": "grpo",
        "algorithm.reject_zero_advantage": False,
        "algorithm.refill": "none",
        "algorithm.reuse": 1,
        "stages.0.mini_batch": 8,
        "stages.1.mini_batch": 6,
        "entropy": {"controller": "fixed", "alpha": 0.01, "estimator": "exact"},
        "reference": {"mode": "monitor"},
        # without the sampling error of the accuracy, four steps would be enough
        "stages.0.transition": {**CONVERGED, "delta": 0.09},
        "stages.0.max_steps": 5,
    },
    # older weights, corrected, sampled entropy, validation, truncation rule
    "lagged": {
        "rollout.weight_lag": 1,
        "rollout.max_sampler_gap": 1.0,
        "algorithm.correction": "tis",
        "algorithm.correction_cap": 1.1,
        "entropy.estimator": "sampled",
        "entropy.target": 1.6,
        "evaluation.every": 2,
        "stages.0.transition": {"rule": "truncation", "truncation_below": 0.9, "window": 4},
        "stages.0.max_steps": 7,
    },
    # weights two versions old, CISPO, masked weights, no entropy control, no filter
    "older": {
        **OWN_CLIPS,
        "algorithm.loss": "cispo",
        "rollout.weight_lag": 2,
        "rollout.max_sampler_gap": 1.0,
        "algorithm.correction": "mis",
        "algorithm.correction_cap": 1.1,
        "entropy": {"controller": "none", "estimator": "exact"},
        "reference": {"mode": "none"},
        "data.online_filter": False,
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 0.003,
    },
    # asynchronous, two steps ahead, m2po, a stage that ends early
    "ahead": {
        "rollout.max_staleness": 2,
        "rollout.max_rows": 24,
        "algorithm.refill": "none",
        "algorithm.correction": "m2po",
        "algorithm.second_moment": 0.01,
        "stages.0.transition": {"rule": "truncation", "truncation_below": 0.9, "window": 4},
        "stages.0.max_steps": 8,
        "stages.1.max_steps": 2,
    },
    # a stage's own settings: no KL in the first, everything else in the second
    "staged": {
        "stages.0.kl_coefficient": 0.0,
        "stages.0.entropy_target": 1.5,
        **{f"stages.1.{name}": value for name, value in STAGED.items()},
        "stages.1.max_steps": 2,
    },
    # the same with groups that are in flight when the stage changes
    "staged-ahead": {
        "rollout.max_staleness": 1,
        "rollout.max_rows": 24,
        "algorithm.refill": "none",
        "stages.0.transition": {"rule": "truncation", "truncation_below": 0.9, "window": 4},
        "stages.0.max_steps": 8,
        **{f"stages.1.{name}": value for name, value in STAGED.items()},
        "stages.1.max_steps": 2,
    },
    # steps without anything to learn from
    "empty": {
        "stages.0.max_tokens": 1,
        "stages.0.max_steps": 2,
        "algorithm.refill": "none",
        "entropy.target": 9.0,
    },
    "gspo": {**OWN_CLIPS, "algorithm.loss": "gspo"},
    # ScaleRL's loss and advantage, with DAPO's penalty for long responses
    "scalerl": {
        **OWN_CLIPS,
        "algorithm.loss": "scalerl",
        "algorithm.advantage": "batch_std",
        "algorithm.overlong_buffer": 3,
    },
    # PPO; without the sampling error of the validation, four steps would be enough
    "ppo": {
        "algorithm.loss": "ppo",
        "evaluation.every": 1,
        "stages.0.transition": {**CONVERGED, "delta": 0.3},
        "stages.0.max_steps": 5,
    },
    # too few validations to end a stage: the training accuracy of every step would suffice
    "pg": {
        **OWN_CLIPS,  # this loss has none, and refuses others
        "algorithm.loss": "pg",
        "algorithm.refill_rounds": 1,
        "evaluation.every": 2,
        "stages.0.transition": {**CONVERGED, "delta": 0.9},
        "stages.0.max_steps": 6,
    },
}


UNJUDGED: dict[str, dict[str, Any]] = {
    "rejected and refilled": {},
    "not rejected": {
        "algorithm.reject_zero_advantage": False,
        "algorithm.refill": "none",
        "algorithm.advantage_mask": "after",
        "algorithm.loss": "dr_grpo",
        "stages.0.rollout_batch": 12,
    },
}


@pytest.mark.parametrize("case", UNJUDGED)
def test_what_nobody_could_judge_leaves_its_group(
    case: str, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a failing checker: problems with answer 8 and responses of four words get no verdict."""

    def unjudged(reference: str, text: str) -> bool:
        return reference == "8" or len(text.split()) == 4

    judge = ExactVerifier.judge

    def failing(self: ExactVerifier, references: Sequence[str], response: str) -> Verdict:
        verdict = judge(self, references, response)
        return replace(verdict, outcome=Outcome.NOT_JUDGED) if unjudged(references[0], response) else verdict

    monkeypatch.setattr(ExactVerifier, "judge", failing)
    Trajectory(tmp_path, toy_model, {**SHORT, **UNJUDGED[case]}, unjudged=unjudged).check()


@pytest.mark.parametrize("case", CASES)
def test_what_else_a_recipe_may_ask_for(case: str, toy_model: Path, tmp_path: Path) -> None:
    Trajectory(tmp_path, toy_model, {**SHORT, **CASES[case]}).check()


def without(output: Path, later_than: int, target: Path) -> None:
    """Return a copy of a run as a kill leaves it after its checkpoint of this step."""
    shutil.copytree(output, target)
    for folder in (target / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > later_than:
            shutil.rmtree(folder)
    shutil.rmtree(target / "model")


RESUMED: dict[str, dict[str, Any]] = {
    "whole": {},
    "lagged": {**SHORT, **CASES["lagged"]},
    "code": {
        **SHORT,
        # one step's filter in each of two stage changes; the preset's lag; a stage that waits for its min_steps
        "entropy": {"controller": "adaptive", "preset": "code", "target": 1.5, "step": 0.01, "maximum": 0.05},
        "stages.0.transition": {"rule": "truncation", "truncation_below": 0.9, "window": 4},
        "stages.0.max_steps": 9,
        "stages.0.min_steps": 6,
    },
    "ahead": {
        **SHORT,
        "rollout.max_staleness": 2,
        "rollout.max_rows": 24,
        "algorithm.refill": "none",
        # the stage's end discards more than the next stage's first step requests again
        "stages.0.transition": {"rule": "truncation", "truncation_below": 0.9, "window": 4},
        "stages.0.max_steps": 8,
        "stages.1.rollout_batch": 2,
        "stages.1.mini_batch": 2,
        "stages.1.max_steps": 3,
    },
    "staged": {**SHORT, **CASES["staged-ahead"], "stages.1.max_steps": 4},
}


@pytest.mark.parametrize(
    ("case", "cuts"),
    [("whole", (7, 14)), ("lagged", (2, 5)), ("code", (5, 6)), ("ahead", (2, 4, 5)), ("staged", (4, 6))],
)
def test_a_resumed_trajectory_is_the_same(case: str, cuts: tuple[int, ...], toy_model: Path, tmp_path: Path) -> None:
    """Kill while c moves, a convergence test is pending, visits wait for the filter, and problems are removed."""
    write_recipe(tmp_path, toy_model, RESUMED[case])
    whole = tmp_path / "whole"
    lines = run(tmp_path, whole)
    kinds = [(e["kind"], e["step"], e["message"]) for e in events(whole) if e["kind"] != "resume"]
    for cut in cuts:
        again = tmp_path / f"cut-{cut}"
        without(whole, cut, again)
        assert run(tmp_path, again, resume=True) == lines
        assert [(e["kind"], e["step"], e["message"]) for e in events(again) if e["kind"] != "resume"] == kinds
        last = f"step-{lines[-1]['step']:06d}"
        states = [json.loads((p / "checkpoints" / last / "state.json").read_text()) for p in (whole, again)]
        assert states[0] == states[1], "state and the checksum of weights and moments"


ADVANTAGES = ("group", "rloo", "maxrl", "pass_at_k", "batch_std", "gdpo", "reinforce_pp", "reinforce_pp_baseline")


def drawn(seed: int) -> dict[str, Any]:
    """Return random changes of the recipe: methods, entropy control, staleness, stages and sizes in any combination."""
    draw = random.Random(seed)
    pick = draw.choice
    loss, mode = pick(LOSSES), pick(("none", "monitor", "loss"))
    rollout, algorithm = {**RECIPE["rollout"], "max_sampler_gap": 9.0}, {"loss": loss, "advantage": pick(ADVANTAGES)}
    rollout |= pick(({}, {}, {"weight_lag": pick((1, 2))}, {"max_staleness": pick((1, 2)), "max_rows": 24}))
    algorithm |= {"advantage_mask": pick(("none", "before", "after")), "advantage_k": 2}
    algorithm |= {"correction": pick(("none", "tis", "mis")), "correction_cap": 1.1}
    algorithm |= {"minibatch": pick(("keep_n_sgd", "keep_d_t")), "reuse": pick((1, 2)), "refill_rounds": pick((1, 3))}
    rejects = algorithm["advantage"] != "reinforce_pp" and pick((True, False))
    algorithm |= {
        "reject_zero_advantage": rejects,
        "refill": "until_full" if rejects and pick((True, False)) else "none",
    }
    if pick((True, False)):
        algorithm["reducer"] = pick(("global_tokens", *sorted(set(REDUCERS.values()))))
    if pick((True, False)) and loss not in ("pg", "sapo"):
        algorithm |= {"clip_low": pick((0.02, 0.3)), "clip_high": pick((0.04, 0.5))}
    if algorithm["advantage"] not in ("gdpo", "maxrl") and pick((True, False)):
        algorithm["overlong_buffer"] = 2
    entropy: dict[str, Any] = {"controller": pick(("none", "fixed", "adaptive", "adaptive")), "estimator": "exact"}
    entropy |= {"alpha": 0.01} if entropy["controller"] == "fixed" else {}
    if entropy["controller"] == "adaptive":
        entropy |= {"preset": pick(("report", "code", "small")), "target": pick((1.3, 1.8, 9.0))}
    if "max_staleness" not in rollout:
        entropy["estimator"] = pick(("exact", "sampled"))
    stages: list[dict[str, Any]] = []
    for steps in (3, 2):
        parts, groups = pick((1, 2)), pick((3, 4))
        stage = {"max_tokens": pick((6, 10, 14)), "rollout_batch": parts * groups, "mini_batch": groups}
        stage |= {"group_size": pick((3, 4)), "max_steps": steps, "transition": {"rule": "fixed"}}
        stage |= {"kl_coefficient": pick((0.0, 0.3))} if mode != "none" and len(stages) and pick((True, False)) else {}
        stages.append(stage | pick(({}, {}, {"temperature": 1.1}, {"reuse": 2}, {"learning_rate": 0.005})))
    optimizer = {"beta1": pick((0.0, 0.8)), "beta2": pick((0.9, 0.99)), "max_grad_norm": pick((0.5, 100.0))}
    return {
        "rollout": rollout,
        "algorithm": algorithm,
        "entropy": entropy,
        "reference": {"mode": mode, **({"coefficient": 0.05} if mode == "loss" else {})},
        "optimizer": {**RECIPE["optimizer"], **optimizer, "warmup_steps": pick((0, 5)), "learning_rate": 0.005},
        "stages": stages,
        "model.micro_batch_tokens": pick((20, 60, 150, 4000)),
        "data.online_filter": pick((True, False)),
        "evaluation.every": pick((0, 2)),
    }


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 40))])
def test_a_drawn_recipe_is_computed_again_and_resumed(seed: int, toy_model: Path, tmp_path: Path) -> None:
    trajectory = Trajectory(tmp_path, toy_model, drawn(seed))
    trajectory.check(relative=1e-4)  # some have a small gradient of large terms
    again = tmp_path / "again"
    without(trajectory.output, random.Random(seed).randrange(1, len(trajectory.lines)), again)
    assert run(tmp_path, again, resume=True) == trajectory.lines
    last = f"step-{trajectory.lines[-1]['step']:06d}"
    states = [json.loads((p / "checkpoints" / last / "state.json").read_text()) for p in (trajectory.output, again)]
    assert states[0] == states[1], "state and the checksum of weights and moments"


PLACES = {
    "temperature": "rollout.temperature",
    "entropy_target": "entropy.target",
    "kl_coefficient": "reference.coefficient",
    "clip_low": "algorithm.clip_low",
    "clip_high": "algorithm.clip_high",
    "reuse": "algorithm.reuse",
    "learning_rate": "optimizer.learning_rate",
}


@pytest.mark.parametrize("name", PLACES)
def test_a_stage_goes_on_as_under_a_recipe_that_says_so_for_the_whole_run(
    name: str, toy_model: Path, tmp_path: Path
) -> None:
    """Compare a run of two stages with its checkpoint at the change, resumed with the value in the recipe."""
    (tmp_path / "staged").mkdir()
    (tmp_path / "plain").mkdir()
    changes = {**SHORT, "stages.0.max_steps": 2, "stages.1.max_steps": 2, "checkpoint.every": 2}
    write_recipe(tmp_path / "staged", toy_model, {**changes, f"stages.1.{name}": STAGED[name]})
    staged, plain = tmp_path / "staged" / "run", tmp_path / "plain" / "run"
    lines = run(tmp_path / "staged", staged)

    for data in ("train.jsonl", "validation.jsonl"):
        shutil.copy(tmp_path / "staged" / data, tmp_path / "plain" / data)
    write_recipe(tmp_path / "plain", toy_model, {**changes, PLACES[name]: STAGED[name]})
    without(staged, 2, plain)
    # rewrite the folder as if it had been started under this recipe
    (plain / "config.toml").write_text(to_toml(load_train_recipe(tmp_path / "plain" / "recipe.toml", []), plain))
    assert run(tmp_path / "plain", plain, resume=True) == lines
    states = [json.loads((p / "checkpoints" / "step-000004" / "state.json").read_text()) for p in (staged, plain)]
    assert states[0] == states[1], "state and the checksum of weights and moments"
