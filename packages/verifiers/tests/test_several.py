"""Several rewards per response: names, sums, and the effect of one failing reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicrl_verifiers import VerifierPool
from magicrl_verifiers.batch import verify_file
from magicrl_verifiers.records import JudgeOptions, Outcome, Problem, Verdict, make_verdict
from magicrl_verifiers.references import live
from magicrl_verifiers.several import each_name, joined, reward_names, reward_terms, short_names
from magicrl_verifiers.table import verifier_spec

PROBLEM = Problem(id="p", prompt="2 + 3?", references=("5",), verifier="", source="doc")
REWARDS = """
def brief(problem, response):
    return {"score": 1.0 if len(response) < 12 else 0.5, "characters": len(response)}


def breaks(problem, response):
    raise RuntimeError("no opinion")


def needs_column(completions, level, **kwargs):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def judged(verifier: str, *responses: str) -> tuple[Verdict, ...]:
    with VerifierPool() as pool:
        pool.warm_up([verifier])
        problem = Problem(id="p", prompt="2 + 3?", references=("5",), verifier=verifier, source="doc")
        ticket = pool.submit(problem, responses)
        verdicts = pool.result(ticket)
        assert pool.ready(ticket)
        return verdicts


def test_names_and_weights() -> None:
    assert reward_terms("maths") == (("maths", 1.0),)
    assert reward_terms("maths + 0.25 * a b/c.py:f + 1e-3 * judge") == (
        ("maths", 1.0),
        ("a b/c.py:f", 0.25),
        ("judge", 0.001),
    )
    assert reward_names("2 * maths + a.py:f") == ["maths", "a.py:f"]
    assert each_name("2 * maths + 0.5 * a.py:f", str.upper) == "2 * MATHS + 0.5 * A.PY:F"
    assert short_names(reward_terms(f"maths + a/b.py:f + c.py:f + {live(len, 'g')}")) == ["maths", "f_2", "f_3", "g"]


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("0 * maths + 0 * exact", "the weights sum to 0"),
        ("maths + -1 * exact", "'-1 [*] exact' must begin with a weight of 0 or more"),
        ("maths + x * exact", "'x [*] exact' must begin with a weight"),
        ("maths + nan * exact", "must begin with a weight"),
        ("maths + inf * exact", "must begin with a weight"),
        ("maths + 0.5 * maths", "a reward is named twice"),
        ("maths + 0.5 * exac", "unknown reward 'exac'; did you mean 'exact'"),
    ],
)
def test_wrong_weights_and_names_are_refused(reference: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        verifier_spec(reference)


def test_the_reward_is_the_weighted_mean_and_the_first_one_decides(file: Path) -> None:
    right, wrong, long = judged(f"exact + 0.25 * {file}:brief", r"\boxed{5}", r"\boxed{6}", r"so it is \boxed{5}")
    assert [v.outcome for v in (right, wrong, long)] == [Outcome.CORRECT, Outcome.WRONG, Outcome.CORRECT]
    assert [v.status for v in (right, wrong)] == ["matched", "mismatch"]
    assert [v.score for v in (right, wrong, long)] == pytest.approx([1.0, 0.25 / 1.25, (1 + 0.125) / 1.25])
    assert right.parts == {"exact": (1.0, 1.0), "brief": (0.25, 1.0)}
    assert long.metrics == {"brief_characters": 18.0}
    # another first reward decides about the same scores
    assert judged(f"0.25 * {file}:brief + exact", r"\boxed{6}")[0].outcome is Outcome.CORRECT


def test_a_reward_that_fails_has_no_part_and_is_no_zero(file: Path) -> None:
    (verdict,) = judged(f"exact + {file}:breaks + 3 * {file}:brief", r"\boxed{6}")
    assert verdict.outcome is Outcome.WRONG
    assert verdict.parts == {"exact": (1.0, 0.0), "breaks": (1.0, None), "brief": (3.0, 1.0)}
    assert verdict.score == pytest.approx(3 / 4)  # not 3 / 5
    assert verdict.reason == "RuntimeError: no opinion (my_rewards.py, line 7)"


def test_without_the_deciding_reward_or_any_weight_nothing_is_judged(file: Path) -> None:
    (first,) = judged(f"{file}:breaks + exact", r"\boxed{5}")
    assert first.outcome is Outcome.NOT_JUDGED
    assert first.status == "reward_failed"
    (weightless,) = judged(f"0 * exact + {file}:breaks", r"\boxed{5}")
    assert weightless.outcome is Outcome.NOT_JUDGED
    assert weightless.score is None
    found = joined("exact + maths", [[make_verdict("matched", seconds=1.0)], [make_verdict("mismatch", seconds=2.0)]])
    assert found[0].seconds == 3.0


def test_a_metric_has_the_name_of_its_reward_whatever_the_others_return() -> None:
    def of(**metrics: float) -> Verdict:
        return Verdict(outcome=Outcome.CORRECT, status="", score=1.0, metrics=metrics)

    (found,) = joined("a.py:f + b.py:g", [[of(length=10, lines=2)], [of(length=99)]])
    assert found.metrics == {"f_length": 10, "f_lines": 2, "g_length": 99}
    (found,) = joined("a.py:f + b.py:g", [[of(length=10)], [of()]])
    assert found.metrics == {"f_length": 10}


def test_several_rewards_need_a_reference_if_one_does() -> None:
    assert verifier_spec("maths + exact").needs_reference
    assert verifier_spec("judge + maths").needs_reference
    assert not verifier_spec("judge + reasoning_gym").needs_reference


def test_every_reward_checks_the_problem(file: Path) -> None:
    with pytest.raises(ValueError, match="requires the column 'level'"):
        verifier_spec(f"exact + {file}:needs_column").check_references(PROBLEM)
    bare = Problem(id="bare", prompt="?", references=(), verifier="", source="doc")
    with pytest.raises(ValueError, match="has no reference answer"):
        verifier_spec(f"{file}:brief + exact").check_references(bare)


def test_a_judged_file_shows_each_reward(file: Path, tmp_path: Path) -> None:
    lines = tmp_path / "answers.jsonl"
    lines.write_text(json.dumps({"id": 1, "prompt": "?", "reference": "5", "response": r"\boxed{5}"}) + "\n")
    out = tmp_path / "out.jsonl"
    verify_file(
        lines,
        out,
        verifier=f"exact + 0.5 * {file}:breaks",
        options=JudgeOptions(),
        workers=1,
        time_limit=2.0,
        memory_limit_mb=512,
    )
    row = json.loads(out.read_text())
    assert row["rewards"] == {"exact": 1.0, "breaks": None}
    assert row["score"] == 1.0
