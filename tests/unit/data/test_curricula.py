"""Samplers that choose the problems of a step: pools, lengths, state, and messages about wrong choices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from magicrl.data.curricula import DifficultyPools, ShortFirst, make_curriculum
from magicrl.data.sampler import PromptSampler
from magicrl.records import Problem


def problems(n: int) -> list[Problem]:
    """Return problems with ids ``p0``, ... and keys ``k0``, ...; each prompt is one character longer than the last."""
    return [
        Problem(id=f"p{i}", key=f"k{i}", prompt="q" * (i + 1), references=("1",), verifier="exact", source="t")
        for i in range(n)
    ]


def sampler(curriculum: Any, n: int = 20) -> PromptSampler:
    return PromptSampler(problems(n), 0, curriculum)


def ids(drawn: Sequence[Problem]) -> list[str]:
    return [problem.id for problem in drawn]


def test_every_problem_of_a_pool_is_visited_once_before_any_again() -> None:
    drawn = ids(sampler(DifficultyPools(problems(20), 3)).next(60))
    assert [sorted(drawn[i : i + 20]) for i in (0, 20, 40)] == [sorted(ids(problems(20)))] * 3
    assert drawn[:20] != ids(sampler(DifficultyPools(problems(20), 4)).next(20))
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([3]))).permutation(20)
    assert drawn[:20] == [f"p{i}" for i in np.argsort(order)]


def test_pools_follow_the_pass_rate_of_the_last_visit() -> None:
    made = DifficultyPools(problems(30), 0, easy_share=0.1, hard_share=0.2)
    for place, problem in enumerate(problems(30)):
        made.observe(problem, 8, 8)
        made.observe(problem, (8, 0, 4)[place % 3], 8)  # easy, hard, medium
        made.observe(problem, 0, 0)  # nothing judged: does not count as a visit
    drawn = Counter(int(name[1:]) % 3 for name in ids(sampler(made, 30).next(1000)))
    assert drawn[0] == pytest.approx(100, abs=30)
    assert drawn[1] == pytest.approx(200, abs=40)
    assert drawn[2] == pytest.approx(700, abs=50)
    limits = DifficultyPools(problems(2), 0, easy_from=0.5, hard_to=0.25, easy_share=0, hard_share=0)
    limits.observe(problems(2)[0], 4, 8)
    limits.observe(problems(2)[1], 2, 8)
    assert set(ids(sampler(limits, 2).next(4))) == {"p1"}, "without medium problems the hard ones are next"


def test_no_share_of_easy_problems_leaves_them_out_while_others_are_left() -> None:
    made = DifficultyPools(problems(4), 0, easy_share=0.0)
    made.observe(problems(4)[2], 8, 8)
    drawn = sampler(made, 4)
    assert "p2" not in ids(drawn.next(50))
    drawn.remove(["k0", "k1", "k3"])
    assert ids(drawn.next(2)) == ["p2", "p2"]


def test_short_prompts_come_first_and_the_rest_is_added() -> None:
    drawn = ids(sampler(ShortFirst(problems(20), 0, start=0.2, draws=80)).next(200))
    longest = [max(int(name[1:]) for name in drawn[i : i + 20]) for i in range(0, 200, 20)]
    assert longest[0] < 9
    assert longest == sorted(longest)
    assert longest[-1] == 19
    assert set(drawn[:3]) < {"p0", "p1", "p2", "p3"}
    with pytest.raises(ValueError, match="draws = 0 at least 1"):
        ShortFirst(problems(3), 0, draws=0)


@pytest.mark.parametrize("kind", [DifficultyPools, ShortFirst])
def test_a_restored_sampler_draws_what_would_have_followed(kind: Any) -> None:
    def made() -> PromptSampler:
        return sampler(kind(problems(20), 1))

    def visit(drawn: PromptSampler, names: Sequence[str]) -> None:
        for name in names:
            drawn._curriculum.observe(drawn.named(name), int(name[1:]) % 3, 2)

    one = made()
    visit(one, ids(one.next(15)))
    one.remove(["k1"])
    state = json.loads(json.dumps(one.state()))
    other = made()
    other.restore(state)
    for _ in range(3):
        drawn = ids(one.next(11))
        assert ids(other.next(11)) == drawn
        assert "p1" not in drawn
        visit(one, drawn)
        visit(other, drawn)
    assert other.state() == one.state()


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, r"next\(2, ...\) returned 0 ids"),
        ([], "returned 0 ids"),
        ("p1", "returned 0 ids"),
        (["p1"], "returned 1 ids"),
        (["p1", "px"], "returned 'px', which is not one of them"),
        (["p1", "p2"], "returned 'p2', which is not one of them"),
        (["p1", 3], "returned 3, which is not one of them"),
        ([["p1"], "p1"], "returned \\['p1'\\], which is not one of them"),
    ],
)
def test_a_wrong_choice_is_one_clear_error(returned: Any, says: str) -> None:
    class Wrong(ShortFirst):
        def next(self, n: int, remaining: Sequence[Problem]) -> Any:
            del n, remaining
            return returned

    drawn = sampler(Wrong(problems(5), 0), 5)
    drawn.remove(["k2"])
    with pytest.raises(ValueError, match="the sampler Wrong must return the ids of 2 of the 4 problems.*" + says):
        drawn.next(2)


def test_what_is_no_sampler_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text("class Half:\n    def __init__(self, problems, seed):\n        pass\n\n    def next(self): ...\n")
    assert make_curriculum("uniform", problems(2), 0, {}) is None
    with pytest.raises(ValueError, match="without the method observe"):
        make_curriculum(f"{file}:Half", problems(2), 0, {})
    with pytest.raises(ValueError, match=r"cannot be made with the options {'eazy': 1}.*unexpected keyword argument"):
        make_curriculum("difficulty", problems(2), 0, {"eazy": 1})
    with pytest.raises(ValueError, match='the sampler "uniform" has no options, got start'):
        make_curriculum("uniform", problems(2), 0, {"start": 1})
    with pytest.raises(ValueError, match="must be at most 1 together"):
        make_curriculum("difficulty", problems(2), 0, {"easy_share": 0.9, "hard_share": 0.2})
    with pytest.raises(ValueError, match="must be below easy_from"):
        make_curriculum("difficulty", problems(2), 0, {"hard_to": 0.9})
