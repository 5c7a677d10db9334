"""RL against the code verifier with a policy that only writes attacks: see `tests/helpers/attack_policy.py`."""

from __future__ import annotations

import pytest
from attack_policy import Setting, train

from .conftest import judge_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:  # pyright: ignore[reportUnusedFunction]
    judge_of("A").close()


def test_attacks_earn_nothing_and_teach_nothing() -> None:
    found = train(Setting(steps=9, cpu_seconds=0.2))
    assert (found["rewarded"], found["not_judged"]) == ({}, 0)
    assert found["its_chance"] == round(1 / found["templates"], 3)  # every group was rejected: no update


def test_an_honest_program_among_attacks_is_what_is_learnt() -> None:
    found = train(Setting(steps=9, honest=True, cpu_seconds=0.2))
    assert set(found["rewarded"]) == {"honest"}
    assert found["likeliest"] == "honest"
    assert found["its_chance"] > 0.5


def test_with_a_guard_left_out_the_policy_finds_the_hole() -> None:
    found = train(Setting(steps=9, opened="landlock", cpu_seconds=0.2))
    assert set(found["rewarded"]) == {"the tests' file"}
    assert found["likeliest"] == "the tests' file"
    assert found["its_chance"] > 0.5
