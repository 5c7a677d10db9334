"""Tasks of reasoning-gym as data: splits and seeds share nothing, levels, their verifier, unusable tasks."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from magicrl.config.data_schema import SourceConfig
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.data.families import OptionValue, hashed_split, make_family
from magicrl.data.sources import load_problems
from magicrl.evaluation.benchmarks import load_benchmark, parse_asked
from magicrl.evaluation.options import arguments
from magicrl.records import Outcome
from magicrl_verifiers.gym import GymVerifier, entry_text, is_arithmetic, restored
from magicrl_verifiers.records import JudgeOptions
from magicrl_verifiers.service import VerifierPool

LEGS = "reasoning_gym/leg_counting"


def test_without_the_extra_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # simulates a missing package
    with pytest.raises(RecipeError, match=r"^family: .*pip install 'magicrl\[gym\]'"):
        load_problems(SourceConfig(family=LEGS, count=1))


def test_a_task_stands_in_the_place_of_a_data_set_with_a_test_set_of_its_own() -> None:
    config = load_train_recipe(Path("tiny"), [f"data={LEGS}"])
    assert [source.family for source in config.data.train] == [LEGS]
    assert (config.data.test["held_out"].split, config.data.test["held_out"].family) == ("test", LEGS)
    assert (config.data.holdout, config.run.name) == (0, "tiny-leg_counting")


def test_values_that_json_lacks_come_back_from_an_entry() -> None:
    value = {"board": ((1, 2), (3, 4)), "by_number": {1: ["a", (2,)]}, "text": "x"}
    text = entry_text("leg_counting", {"sizes": (3, 4)}, value)
    assert restored(text) == {"task": "leg_counting", "config": {"sizes": (3, 4)}, "entry": value}


gym = pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")


def test_seeds_and_splits_share_no_question_and_the_benchmark_none_of_their_seeds() -> None:
    made = {
        (seed, split): load_problems(SourceConfig(family=LEGS, count=30, seed=seed, split=split))
        for seed in (0, 1)
        for split in ("train", "validation", "test")
    }
    keys = {name: {problem.key for problem in problems} for name, problems in made.items()}
    assert len(set.union(*keys.values())) == sum(len(found) for found in keys.values()) == 180
    benchmark = load_benchmark(parse_asked(LEGS), arguments(limit=30)).problems
    theirs = [str(entry["question"]) for entry in gym.create_dataset("leg_counting", seed=0, size=300)]
    theirs = [text.strip() for text in theirs if hashed_split(text) == "test"]
    assert all(problem.prompt.startswith(text) for problem, text in zip(benchmark, theirs[:30], strict=True))
    assert not {problem.key for problem in benchmark} & set.union(*keys.values())
    assert load_problems(SourceConfig(family=LEGS, count=30)) == made[0, "train"]


def test_few_distinct_questions_are_not_shared_between_splits() -> None:
    family = make_family("reasoning_gym/chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    drawn = {
        split: {problem.prompt for problem in islice(family.stream(seed=0, split=split), 200)}
        for split in ("train", "test")
    }
    assert drawn["train"]
    assert drawn["test"]
    assert not drawn["train"] & drawn["test"]


def test_the_benchmark_of_few_questions_has_none_of_training_and_none_twice() -> None:
    task = "reasoning_gym/prime_factorization"
    keys = [problem.key for problem in load_benchmark(parse_asked(task), arguments()).problems]
    assert len({*keys}) == len(keys) == 100
    trained = load_problems(SourceConfig(family=task, count=400, seed=1))
    assert not {*keys} & {problem.key for problem in trained}


def test_items_that_the_library_cannot_generate_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(gym.create_dataset("leg_counting", seed=0, size=1))
    made = kind.__getitem__

    def broken(self: object, index: int) -> dict[str, object]:
        if index % 2:
            raise TypeError("Object of type int64 is not JSON serializable")
        return made(self, index)

    whole = [problem.id for problem in load_problems(SourceConfig(family=LEGS, count=40))]
    monkeypatch.setattr(kind, "__getitem__", broken)
    left = [problem.id for problem in load_problems(SourceConfig(family=LEGS, count=10))]
    assert left == [name for name in whole if int(name.rpartition("-")[2]) % 2 == 0][:10]


def test_levels_are_those_of_the_curriculum() -> None:
    source = SourceConfig(family=LEGS, count=60, levels=(0, 3))
    problems = load_problems(source)
    assert [problem.level for problem in problems[:4]] == [0, 3, 0, 3]
    # a level of this task widens the range of the numbers of animals and of their kinds
    longest = {level: max(len(p.prompt) for p in problems if p.level == level) for level in (0, 3)}
    assert longest[3] > longest[0]
    with pytest.raises(RecipeError, match=r"^levels: .*has no level 99: it has levels 0 to \d+$"):
        load_problems(source.model_copy(update={"levels": (99,)}))
    with pytest.raises(RecipeError, match="levels set max_animals, min_animals; leave the option or the levels out"):
        load_problems(source.model_copy(update={"options": {"min_animals": 4, "max_animals": 5}}))


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("leg_countin", {}, "^family: .*no such task; did you mean 'leg_counting'?"),
        ("word_ladder", {}, "^family: .*differ from process to process"),
        ("game_of_life_halting", {}, "^family: .*accepts any text"),
        ("composite", {}, "^family: .*mixture of other tasks"),
        ("leg_counting", {"max_animal": 3}, "^options: .*no option 'max_animal'; did you mean 'max_animals'?"),
        ("leg_counting", {"min_animals": 9, "max_animals": 2}, "^options: .*max_animals must be >= min_animals"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(
    family: str, options: dict[str, OptionValue], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        load_problems(SourceConfig(family=f"reasoning_gym/{family}", count=1, options=options))


def test_an_answer_is_right_if_the_task_s_own_function_says_so() -> None:
    (found,) = load_problems(SourceConfig(family="reasoning_gym/countdown", count=1, options={"min_numbers": 4}))
    (reference,) = found.references
    moved = reference.replace(" ", "")  # another spelling of the same expression
    with VerifierPool() as pool:
        judged = pool.judge(found, [rf"So \boxed{{{reference}}}", f"<answer>{moved}</answer>", reference, "1", "("])
    assert [verdict.correct for verdict in judged] == [True, True, True, False, False]
    assert [verdict.status for verdict in judged[3:]] == ["mismatch", "mismatch"]
    # with a verifier that reads the reference answer the second form is wrong
    with VerifierPool() as pool:
        assert not pool.judge(replace(found, verifier="exact"), [rf"\boxed{{{moved}}}"])[0].correct


@pytest.mark.parametrize("task", ["n_queens", "binary_matrix", "spiral_matrix", "string_insertion", "countdown"])
def test_an_answer_is_never_evaluated_as_python(task: str, tmp_path: Path) -> None:
    (found,) = load_problems(SourceConfig(family=f"reasoning_gym/{task}", count=1))
    with VerifierPool(workers=1) as pool:
        assert not pool.judge(found, [rf"\boxed{{__import__('os').mkdir('{tmp_path}/made')}}"])[0].correct
        assert not [*tmp_path.iterdir()]
        assert pool.judge(found, [rf"\boxed{{{found.references[0]}}}"])[0].correct


@pytest.mark.parametrize("task", ["puzzle24", "simple_integration", "number_sorting", "bitwise_arithmetic"])
def test_tasks_that_evaluate_accept_their_own_reference_answers(task: str) -> None:
    for found in load_problems(SourceConfig(family=f"reasoning_gym/{task}", count=5)):
        judged = GymVerifier(JudgeOptions()).judge([found.extra["reasoning_gym"]], rf"\boxed{{{found.references[0]}}}")
        assert judged.correct


def test_only_arithmetic_may_be_evaluated() -> None:
    for text in ("(59 + 7)*.5 - 4.\n^2", "x**2*exp(X)/3. + C", "sqrt(pi)"):
        assert is_arithmetic(text)
    for text in ("sin.func", "sin. func", "x1.sin", "x.sin", "dir(x)", "S(1)", "'x'", "x[0]", "a_b", "\uff53in(1)"):
        assert not is_arithmetic(text), text


def test_a_partial_score_is_wrong_and_what_a_task_cannot_read_is_no_fault_of_the_verifier() -> None:
    entry = {"question": "?", "answer": "6", "metadata": {}}
    plain = [entry_text("leg_counting", {}, entry)]
    lenient = GymVerifier(JudgeOptions())
    assert lenient.judge(plain, "The answer is 6").correct
    assert lenient.judge(plain, "The answer is **6**.").correct
    ends_so = [entry_text("leg_counting", {}, entry | {"answer": "a b."})]
    assert [lenient.judge(ends_so, text).correct for text in ("It is a b.", "It is a b")] == [True, False]
    assert lenient.judge(plain, r"\boxed{6 or 7}").outcome is Outcome.WRONG  # its score is a third
    assert lenient.judge(plain, "<think> 6").status == "no_answer"
    assert GymVerifier(JudgeOptions(extract="box")).judge(plain, "The answer is 6").status == "no_answer"
    lines = [entry_text("chain_sum", {}, entry | {"answer": "1  2\n3"})]
    assert lenient.judge(lines, "So:\n1  2\n3").correct
    assert not lenient.judge(lines, "So:\n1 2\n3").correct
    raises = [entry_text("prime_factorization", {}, entry | {"metadata": {"factors": [2, 3], "number": 6}})]
    assert lenient.judge(raises, r"\boxed{no number}").status == "unparsable"


def test_wrong_labels_need_a_verifier_that_reads_labels() -> None:
    source = SourceConfig(family=LEGS, count=20, label_noise=0.5)
    with pytest.raises(RecipeError, match=r'^label_noise: .*set verifier = "exact" too'):
        load_problems(source)
    assert load_problems(source.model_copy(update={"verifier": "exact"}))


def test_other_problems_cannot_be_judged_by_it() -> None:
    (found,) = load_problems(SourceConfig(family=LEGS, count=1))
    with VerifierPool() as pool, pytest.raises(ValueError, match="judges problems of the family reasoning_gym/TASK"):
        pool.submit(replace(found, extra={}), ["6"])
