"""The peers' sides of ``magicrl selfcheck``, with stand-ins for what is not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from magicrl.selfcheck import livecodebench_peer, verifiers
from magicrl.selfcheck.setup import CannotRun, Setup

HARNESS = """
import json, time

def codegen_metrics(samples, programs, k_list, num_process_evaluate, timeout):
    program, tests = programs[0][0], json.loads(samples[0]["input_output"])
    if "os.write" in program:
        time.sleep(60)
    solved = "__eq__" in program if "9176" not in program else "input()" in program or "fn_name" in tests
    return None, [solved], [[json.dumps({} if solved else {"error_message": "Wrong Answer"})]]

def extract_instance_results(results):
    return [results]
"""
"""A harness that accepts equal objects and the honest program, hangs at one attack and knows one way to read."""


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    folder = tmp_path / "clone" / "lcb_runner" / "evaluation"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(HARNESS)
    return Setup(tmp_path, seed=0, quick=True, livecodebench=tmp_path / "clone")


def test_accepted_attacks_hangs_and_refused_programs_are_told(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("guess", "equal to everything", "every descriptor", "the tests' file")
    attacks = {name: text for name, text in verifiers.templates(Path("x")).items() if name in some}
    monkeypatch.setattr(verifiers, "templates", lambda answers: attacks)
    monkeypatch.setattr(verifiers, "READERS", {name: verifiers.READERS[name] for name in ("input", "buffer.read")})
    monkeypatch.setattr(livecodebench_peer, "PATIENCE", 5.0)
    found = livecodebench_peer.verifying(setup)
    assert found.status == "peer"
    assert "2 of 6 attacks accepted (equal to everything, calls; equal to everything, standard input)" in found.figure
    assert "2 do not let the harness end (every descriptor, calls; every descriptor, standard input)" in found.figure
    assert "1 of 3 honest programs refused (buffer.read, standard input)" in found.figure
    assert not any("file" in name for name in found.details), "the harness keeps no tests on disk"


def test_a_harness_that_refuses_an_undisturbed_program_is_not_compared(setup: Setup) -> None:
    with pytest.raises(CannotRun, match="nothing disturbed"):
        livecodebench_peer.judging(setup)


def test_a_harness_that_does_not_start_is_not_compared(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "clone" / "lcb_runner" / "evaluation" / "__init__.py").write_text("import no_such_module")
    with pytest.raises(CannotRun, match=r"(?s)gave no result: .*no_such_module"):
        livecodebench_peer.harness_verdict(setup, {}, "")


# --- verl -------------------------------------------------------------------------------------------------------------


def policy(
    old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor, mode: str, actor: Any, weights: Tensor | None
) -> tuple[Tensor]:
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return (aggregate(-objective * (1.0 if weights is None else weights), mask, mode, **actor.global_batch_info),)


def aggregate(values: Tensor, mask: Tensor, mode: str, *, batch_num_tokens: int, **counts: Any) -> Tensor:
    assert mode == "token-mean"
    return (values * mask).sum() / batch_num_tokens


def group_advantages(
    rewards: Tensor, mask: Tensor, index: Any, *, norm_adv_by_std_in_grpo: bool = True
) -> tuple[Tensor]:
    found = rewards.sum(-1).view(-1, 3)
    found = (found - found.mean(-1, keepdim=True)) / (found.std(-1, keepdim=True) + 1e-6)
    return (found.view(-1, 1) * mask,)


def k3(new: Tensor, ref: Tensor, name: str) -> Tensor:
    assert name == "low_var_kl"
    return (ref - new).exp() - (ref - new) - 1


def trust(log_ratio: Tensor, mask: Tensor, *, rollout_is: str, rollout_is_threshold: str) -> tuple[Tensor]:
    ratio = log_ratio.exp()
    return (ratio * (ratio <= 2.0) if "_" in rollout_is_threshold else ratio.clamp(max=2.0),)


@pytest.fixture
def core() -> SimpleNamespace:
    """Return a stand-in for verl's functions that holds what DAPO needs."""
    return SimpleNamespace(
        get_policy_loss_fn=lambda mode: policy,
        agg_loss=aggregate,
        kl_penalty=k3,
        compute_grpo_outcome_advantage=group_advantages,
    )


@pytest.fixture
def peer(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)  # pyright: ignore[reportArgumentType]
    helper = SimpleNamespace(compute_rollout_correction_weights=trust)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.rollout_corr_helper", helper)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "verl.workers.config", SimpleNamespace(ActorConfig=SimpleNamespace))  # pyright: ignore[reportArgumentType]
    monkeypatch.delitem(sys.modules, "magicrl.selfcheck.verl_peer", raising=False)
    yield importlib.import_module("magicrl.selfcheck.verl_peer")
    sys.modules.pop("magicrl.selfcheck.verl_peer", None)


def test_a_right_loss_agrees_and_a_wrong_one_is_told(
    peer: Any, core: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "METHODS", {"dapo": peer.METHODS["dapo"]})
    monkeypatch.setattr(peer, "rloo_error", lambda case: 0.0)
    found = peer.verl_loss(Setup(tmp_path, seed=0, quick=False))
    assert found.figure.startswith("0 of 8 cases of 1 losses differ"), found.details
    monkeypatch.setattr(core, "kl_penalty", lambda new, ref, name: (ref - new).square() / 2)
    found = peer.verl_loss(Setup(tmp_path, seed=0, quick=False))
    assert not found.figure.startswith("0 of 8"), "some of the cases have a KL term"


def test_rloo_is_compared_with_the_mean_of_the_others(peer: Any, core: SimpleNamespace) -> None:
    case = peer.held_out("dapo", 0, 0)
    core.compute_rloo_outcome_advantage = lambda rewards, mask, index: (
        1.5 * (rewards - rewards.view(-1, 3).mean(-1).repeat_interleave(3)[:, None]),
    )
    assert peer.rloo_error(case) < 1e-12
    core.compute_rloo_outcome_advantage = lambda rewards, mask, index: (rewards,)
    assert peer.rloo_error(case) > 0.1
