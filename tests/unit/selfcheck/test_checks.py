"""Each check of ``magicrl selfcheck`` passes here, and fails for a planted fault."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from magicrl.algorithms import loss_terms
from magicrl.algorithms.losses import LOSSES
from magicrl.records import Outcome
from magicrl.rollout.in_process import InProcessEngine
from magicrl.selfcheck import agreement, judging, learning, loss, resume, slow_steps, verifiers
from magicrl.selfcheck.setup import Setup
from magicrl.training import session
from magicrl.training.learner import MasterOptimizer
from magicrl_verifiers import rewards
from magicrl_verifiers.maths.maths_verifier import MathsVerifier
from magicrl_verifiers.records import make_verdict

DIFFERENT_IN_EVERY_PROCESS = """
import random

DRAWS = random.SystemRandom()

def by_process(problem, response):
    return float(DRAWS.random() < 0.5)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a starting model once."""
    return Setup(tmp_path_factory.mktemp("start"), seed=0, quick=True).start


@pytest.fixture
def setup(tmp_path: Path, made: Path) -> Setup:
    found = Setup(tmp_path, seed=0, quick=True)
    found.__dict__["start"] = made
    return found


# --- the loss is the formula ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_a_case_of_each_loss_is_the_formula(name: str) -> None:
    assert loss.case_error(loss.random_case(name, 5, 1)) < loss.TOLERANCE


def test_another_seed_is_another_case() -> None:
    first, second = (loss.random_case("magic", seed, 0) for seed in (0, 1))
    assert [len(group) for group in first.groups] != [len(group) for group in second.groups]


def with_kl() -> loss.Case:
    found = (loss.random_case("magic", 0, number) for number in range(20))
    return next(case for case in found if case.controls.kl_coefficient and not case.on_policy)


def test_a_wrong_kl_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_kl()
    assert loss.case_error(case) < loss.TOLERANCE
    monkeypatch.setattr(loss_terms, "k3", lambda logprobs, ref: (ref - logprobs).square() / 2)
    assert loss.case_error(case) > loss.TOLERANCE


@pytest.mark.parametrize("fault", [{"normalise_std": False}, {"reducer": LOSSES["grpo"].reducer}])
def test_another_advantage_or_denominator_is_noticed(fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**LOSSES, "magic": dataclasses.replace(LOSSES["magic"], **fault)}
    monkeypatch.setattr(loss, "LOSSES", changed)
    monkeypatch.setattr("magicrl.training.objective.loss_row", lambda name: changed[name])
    assert loss.case_error(loss.random_case("magic", 0, 0)) > 1e-3


def test_whole_steps_are_those_of_a_naive_loop_and_a_wrong_optimizer_is_noticed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = slow_steps.whole_steps(setup, steps=2)
    assert max(errors.values()) < loss.STEP_TOLERANCE
    right = MasterOptimizer.step
    monkeypatch.setattr(MasterOptimizer, "step", lambda self, rate, norm: right(self, rate * 1.01, norm))
    setup.folder = setup.folder / "again"
    setup.folder.mkdir()
    errors = slow_steps.whole_steps(setup, steps=1)
    assert errors["step 1: weights"] > loss.STEP_TOLERANCE


def test_a_figure_that_is_no_number_fails_the_line(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSSES", {"magic": LOSSES["magic"]})
    monkeypatch.setattr(loss, "whole_steps", lambda setup, steps: {"step 1: loss": 0.0})
    monkeypatch.setattr(loss, "case_error", lambda case: 0.0)
    assert loss.check_loss(setup).status == "passed"
    monkeypatch.setattr(loss, "case_error", lambda case: float("nan"))
    found = loss.check_loss(setup)
    assert found.status == "failed"
    assert "magic, case 0" in found.figure


# --- sampler and learner agree ----------------------------------------------------------------------------------------


def test_an_engine_with_old_weights_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MODES", {"float32": agreement.MODES["float32"]})
    found = agreement.check_agreement(setup)
    assert found.status == "passed", found.figure
    load, copied = InProcessEngine.load_weights, []

    def once(self: InProcessEngine, weights: Any, version: int) -> None:
        if not copied:
            load(self, weights, version)
        copied.append(version)
        self._version = version  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(InProcessEngine, "load_weights", once)
    setup.folder = setup.folder / "again"
    setup.folder.mkdir()
    found = agreement.check_agreement(setup)
    assert found.status == "failed"
    assert "above its limit: float32" in found.figure


# --- a killed run continues -------------------------------------------------------------------------------------------


def test_a_killed_run_is_compared_and_a_state_that_no_checkpoint_holds_is_noticed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ("stages.0.max_steps=2",)
    monkeypatch.setattr(resume, "CONFIGURATIONS", {"plain": plain, "asynchronous": plain})
    monkeypatch.setattr(resume, "KILLS", 1)
    found = resume.check_resume(setup)
    assert found.status == "passed", found.figure
    assert found.details["plain"]["kills"] == 2
    file = setup.folder / "drawn.py"
    file.write_text(DIFFERENT_IN_EVERY_PROCESS)
    again = setup.folder / "again"
    again.mkdir()
    setup.folder = again
    faulty = (*plain, f"data.train.0.verifier={file}:by_process")
    monkeypatch.setattr(resume, "CONFIGURATIONS", {"plain": faulty, "asynchronous": faulty})
    found = resume.check_resume(setup)
    assert found.status == "failed"
    assert "weights" in found.details["plain"]["different"]


def test_kills_that_leave_no_checkpoint_prove_nothing(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"kills": 2, "runs": 1, "checkpoint": 0, "pending stage change": 0, "different": []}
    monkeypatch.setattr(resume, "kills_of", lambda *arguments, **named: counts)
    assert resume.check_resume(setup).status == "failed"
    counts["checkpoint"] = 1
    setup.folder = setup.folder / "again"
    setup.folder.mkdir()
    found = resume.check_resume(setup)
    assert found.status == "passed"
    assert "4 kills of 2 runs" in found.figure
    assert "2 kills with a checkpoint to resume from" in found.figure


def test_a_kill_waits_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Life:
        """A process that saves a checkpoint at the third look and never ends."""

        exitcode, looks = None, 0

        def is_alive(self) -> bool:
            self.looks += 1
            if self.looks == 3:
                (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
            return True

        def start(self) -> None: ...
        def kill(self) -> None: ...
        def join(self, seconds: float | None = None) -> None: ...

    made: list[Life] = []
    monkeypatch.setattr(resume.FORKS, "Process", lambda **named: made.append(Life()) or made[-1])
    assert not resume.live_until(tmp_path, (), tmp_path, 0.0, early=False)
    assert resume.newest_checkpoint(tmp_path) is not None
    assert not resume.live_until(tmp_path, (), tmp_path, 0.0)
    assert [life.looks for life in made] == [3, 0]


# --- responses that were not judged -----------------------------------------------------------------------------------


def test_a_failed_reward_that_counts_as_wrong_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    troubles = {name: judging.TROUBLES[name] for name in ("reward raises", "reward returns None", "judge is down")}
    monkeypatch.setattr(judging, "TROUBLES", troubles)
    monkeypatch.setattr(judging, "OWN_FAULTS", {})
    found = judging.check_judging(setup)
    assert found.status == "passed", found.figure
    wrong = make_verdict("mismatch", decided_by="fault")
    monkeypatch.setattr(rewards, "make_verdict", lambda *words, **named: wrong)
    found = judging.check_judging(setup)
    assert found.status == "failed"
    assert "reward raises" in found.figure


def test_a_verdict_that_leaves_a_trace_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = make_verdict("worker_lost", decided_by="pool")
    assert judging.leaves_or_right(lost)
    score = judging.score_group
    monkeypatch.setattr(
        judging,
        "score_group",
        lambda group, verdicts: dataclasses.replace(
            score(group, [v if v.outcome is not Outcome.NOT_JUDGED else judging.WRONG for v in verdicts])
        ),
    )
    assert not judging.leaves_or_right(lost)


def test_an_answer_that_escapes_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "TROUBLES", {})
    monkeypatch.setattr(judging, "OWN_FAULTS", {"hangs": lambda _: make_verdict("worker_lost")})
    assert judging.check_judging(setup).status == "failed"


@pytest.mark.slow
def test_every_trouble(setup: Setup) -> None:
    found = judging.check_judging(setup)
    assert found.status == "passed", found.figure


# --- verifiers --------------------------------------------------------------------------------------------------------


def test_a_verifier_that_accepts_too_much_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    right = make_verdict("matched", decided_by="fault")
    honest = dict.fromkeys(("calls",), right)
    monkeypatch.setattr(verifiers, "attack_verdicts", lambda: ({"guess": make_verdict("wrong_answer")}, honest))
    found = verifiers.check_verifiers(setup)
    assert found.status == "passed", found.figure
    monkeypatch.setattr(MathsVerifier, "judge", lambda *arguments: right)
    assert verifiers.check_verifiers(setup).status == "failed"


def test_an_attack_that_passes_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    right = make_verdict("matched", decided_by="fault")
    monkeypatch.setattr(verifiers, "labelled", lambda step=1: iter(()))
    monkeypatch.setattr(verifiers, "attack_verdicts", lambda: ({"frames, calls": right}, {"calls": right}))
    found = verifiers.check_verifiers(setup)
    assert found.status == "failed"
    assert found.details["attacks"] == ["frames, calls"]


def test_the_labels_hold_both_kinds() -> None:
    labels = [right for _, _, right in verifiers.labelled()]
    assert min(labels.count(True), labels.count(False)) > 400


# --- nothing was learned ----------------------------------------------------------------------------------------------


def test_a_verdict_that_is_always_good_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "reward always 1"
    monkeypatch.setattr(learning, "SETUPS", {"sound": learning.SETUPS[name], name: learning.SETUPS[name]})
    assert learning.check_learning(setup).status == "passed"
    conclude = session.conclude
    monkeypatch.setattr(session, "conclude", lambda facts: dataclasses.replace(conclude(facts), outcome="learned"))
    setup.folder = setup.folder / "again"
    setup.folder.mkdir()
    found = learning.check_learning(setup)
    assert found.status == "failed"
    assert "learned, not nothing_to_learn" in found.figure


@pytest.mark.slow
def test_every_set_up_has_the_verdict_that_was_known(tmp_path: Path) -> None:
    found = learning.check_learning(Setup(tmp_path, seed=0, quick=False))
    assert found.status == "passed", found.figure


def test_own_precision_is_in_use() -> None:
    """Check that a float64 model has no float32 part, which would hide errors below 1e-7."""
    model = loss.tiny_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
