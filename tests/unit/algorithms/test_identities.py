"""The checks of ``make identities`` as tests, and a proof that the slow reference detects errors."""

from __future__ import annotations

import dataclasses

import identities
import pytest
import torch
from reference import random_responses

from magicrl.algorithms.losses import LOSSES, unclipped_ratio

EXACT = {"loop_reference_checks", "invariance_checks", "policy_gradient_identity", "kl_identity"}


@pytest.mark.parametrize("family", [family for _, family in identities.CHECKS], ids=lambda f: f.__name__)
def test_identities_hold(family):
    for check in family():
        assert check.passed, f"{check.name}: error {check.error} > {check.tolerance}"


def test_the_families_of_this_room_are_listed():
    assert {family.__name__ for _, family in identities.CHECKS} >= EXACT


def whole(responses):
    return [list(range(len(responses)))]


@pytest.mark.parametrize("field", ["alpha", "beta"])
def test_reference_sees_entropy_and_kl_terms(field):
    responses = random_responses(1, groups=3, members=4)
    settings = identities.Settings(name="magic")
    other = dataclasses.replace(settings, **{field: 0.0})
    error = identities.step_error(
        identities.library_step(other, responses, whole(responses)), identities.reference_step(settings, responses)
    )
    assert error > 1e-4


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"pg", "nll"}))
def test_reference_sees_a_missing_clip(name, monkeypatch):
    responses = random_responses(1, groups=3, members=4)
    settings = identities.Settings(name=name)
    expected = identities.reference_step(settings, responses)
    mutated = {**LOSSES, name: dataclasses.replace(LOSSES[name], surrogate=unclipped_ratio)}
    monkeypatch.setattr(identities, "LOSSES", mutated)
    found = identities.library_step(settings, responses, whole(responses))
    assert identities.step_error(found, expected) > 1e-3


def test_reference_sees_a_denominator_taken_per_micro_batch():
    responses = random_responses(2, groups=4, members=4)
    settings = identities.Settings(name="magic")
    expected = identities.library_step(settings, responses, whole(responses))
    halves = [responses[:5], responses[5:]]
    shares = [identities.library_step(settings, half, whole(half)) for half in halves]
    loss = torch.stack([s[0] for s in shares]).mean()
    gradient = torch.stack([s[1] for s in shares]).mean(0)
    assert identities.step_error((loss, gradient), expected) > 1e-3


def test_reference_sees_a_rejected_group_that_still_weighs_in():
    responses = random_responses(2, groups=4, members=4)
    settings = identities.Settings(name="magic")
    expected = identities.library_step(settings, responses, whole(responses))
    intruders = [dataclasses.replace(r, advantage=0.0, group=9) for r in responses[:4]]
    found = identities.library_step(settings, [*responses, *intruders], whole([*responses, *intruders]))
    assert identities.step_error(found, expected) > 1e-3


def test_a_failing_check_fails_the_command(monkeypatch, capsys):
    bad = identities.Check(name="two is three", error=1.0, tolerance=0.1)
    nan = identities.Check(name="nan", error=float("nan"), tolerance=0.1)
    monkeypatch.setattr(identities, "CHECKS", [("wrong", lambda: [bad, nan])])
    assert identities.main() == 1
    assert capsys.readouterr().out.count("FAILED") == 3
