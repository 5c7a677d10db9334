from __future__ import annotations

import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from magicrl.data.families import OptionValue, TaskFamily, make_family, unique_problems
from magicrl.data.running_sum import FILLERS, parse_prompt, parse_shares, split_of
from magicrl.records import Problem

LEVELS = {2: 0.3, 3: 0.1, 4: 0.2, 5: 0.08, 6: 0.12, 7: 0.06, 8: 0.07, 9: 0.07}
BLOCK = re.compile(r"S(\d) (\d) (\d)")


def family(**options: OptionValue) -> TaskFamily:
    return make_family("running_sum", options)


def take(n: int, *, seed: int = 0, split: str = "train", **options: OptionValue) -> list[Problem]:
    return unique_problems(family(**options), seed=seed, split=split, count=n)


def demonstrations(n: int, **options: OptionValue) -> list[tuple[Problem, list[str]]]:
    made = family(**options)
    rng = np.random.default_rng(1)
    return [(p, made.demonstration(p, rng).split()) for p in islice(made.stream(seed=0, split="train"), n)]


def without_rambling(response: list[str]) -> str:
    """Return only the blocks, without filler and restated totals."""
    words = "|".join(FILLERS)
    text = re.sub(rf" (\?|{words}) \d", "", " " + " ".join(response))
    return re.sub(rf" ({words})(?= |$)", "", text).strip()


def stop_of(response: list[str]) -> int:
    """Return the last operand that a response adds."""
    return max([2, *(int(match) for match in BLOCK.findall(without_rambling(response)) for match in match[:1])])


def check_blocks(problem: Problem, response: list[str]) -> tuple[int, int, int]:
    """Return (operands added, running totals, wrong running totals) of a response. Assert its form and its copies."""
    operands = parse_prompt(problem.prompt)
    head = re.match(r"L (\d)", " ".join(response))
    assert head is not None
    total, wrong, place = int(head.group(1)), 0, 2
    wrong += total != (operands[0] + operands[1]) % 10
    blocks = without_rambling(response)[len("L d") :].strip()
    assert BLOCK.sub("", blocks).strip() == ""
    for step, digit, after in BLOCK.findall(blocks):
        place += 1
        assert int(step) == place
        assert int(digit) == operands[place - 1]
        wrong += int(after) != (total + int(digit)) % 10
        total = int(after)
    assert response[-1] == str(total), "every response ends with its running total"
    return place, place - 1, wrong


def test_prompt_reference_and_level_of_every_problem() -> None:
    for problem in take(500):
        symbols = problem.prompt.split()
        assert len(symbols) == 11
        assert (symbols[0], symbols[-1]) == ("L", ":")
        operands = [int(s) for s in symbols[1:-1]]
        assert problem.references == (str(sum(operands) % 10),)
        assert problem.verifier == "exact"
        assert problem.level is not None
        # the position of the last operand that is not 0, at least 2
        assert problem.level == max([2, *(place for place, digit in enumerate(operands, start=1) if digit)])
        assert operands[problem.level - 1] != 0
        assert not any(operands[problem.level :])


@pytest.mark.parametrize(
    ("variant", "shares"),
    [
        ("stages", LEVELS),
        ("first", LEVELS),
        ("ladder", {2: 0.4, 4: 0.15, 5: 0.15, 7: 0.1, 8: 0.1, 9: 0.1}),
    ],
)
def test_shares_of_levels(variant: str, shares: dict[int, float]) -> None:
    n = 2000
    counts = Counter(p.level for p in take(n, variant=variant))
    assert counts.keys() == shares.keys()
    for level, share in shares.items():
        assert abs(counts[level] / n - share) < 4 * (share * (1 - share) / n) ** 0.5


def test_prompts_repeat_in_training_only() -> None:
    drawn = {split: take(200, seed=3, split=split) for split in ("train", "validation", "test")}
    assert [len({p.key for p in drawn[split]}) for split in ("validation", "test")] == [200, 200]
    assert len({p.key for p in drawn["train"]}) < len({p.id for p in drawn["train"]}) == 200
    with pytest.raises(ValueError, match=r"gave only 31 distinct problems of the 90 requested"):
        unique_problems(family(), seed=3, split="test", count=90, levels=[2])


def test_levels_argument_restricts_and_renormalises() -> None:
    problems = unique_problems(family(), seed=0, split="train", count=2000, levels=[2, 4])
    counts = Counter(p.level for p in problems)
    assert counts.keys() == {2, 4}
    assert abs(counts[2] / 2000 - 0.6) < 0.045


def test_splits_share_no_instance_whatever_the_seed() -> None:
    seen = {
        split: {p.prompt for seed in (0, 1) for p in take(600, seed=seed, split=split)}
        for split in ("train", "validation", "test")
    }
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    for split, prompts in seen.items():
        assert {split_of(parse_prompt(prompt)) for prompt in prompts} == {split}


def test_every_split_has_short_instances() -> None:
    pairs = [split_of([a, b, *[0] * 7]) for a in range(10) for b in range(1, 10)]
    assert min(Counter(pairs).values()) >= 10
    assert set(pairs) == {"train", "validation", "test"}


def test_the_split_of_an_instance_never_changes() -> None:
    """Use literal values: another hash would move test instances of older runs into training."""
    assert [split_of([a, 1, 0, 0, 0, 0, 0, 0, 0]) for a in range(6)] == SPLITS_OF_X1


SPLITS_OF_X1 = ["train", "train", "validation", "test", "train", "validation"]


def test_streams_are_deterministic_and_differ_by_seed() -> None:
    assert take(50, seed=3) == take(50, seed=3)
    assert [p.prompt for p in take(50, seed=3)] != [p.prompt for p in take(50, seed=4)]
    longer = take(80, seed=3)
    assert longer[:50] == take(50, seed=3)
    assert len({p.id for p in longer}) == 80


def test_demonstrations_are_deterministic_given_the_generator() -> None:
    assert demonstrations(40, variant="first") == demonstrations(40, variant="first")


@pytest.mark.parametrize("phase", ["habits", "skill"])
@pytest.mark.parametrize("variant", ["stages", "first", "ladder"])
def test_demonstrations_are_well_formed_with_the_stated_strategies_and_noise(variant: str, phase: str) -> None:
    stops = {
        "stages": {2: 0.68, 4: 0.17, 6: 0.08, 9: 0.07},
        "first": {2: 0.62, 4: 0.21, 6: 0.10, 9: 0.07},
        "ladder": {2: 0.97, 5: 0.0285, 9: 0.0015},
    }[variant]
    if phase == "skill":
        stops = {2: 0.5, 3: 0.16, 4: 0.10, 5: 0.07, 6: 0.05, 7: 0.04, 8: 0.04, 9: 0.04}
    n = 4000
    made = demonstrations(n, variant=variant, phase=phase)
    checked = [check_blocks(problem, response) for problem, response in made]
    counts = Counter(stop for stop, _, _ in checked)
    assert counts.keys() <= stops.keys()
    for stop, share in stops.items():
        assert abs(counts[stop] / n - share) < 4 * (share * (1 - share) / n) ** 0.5
    totals, wrong = sum(t for _, t, _ in checked), sum(w for _, _, w in checked)
    assert abs(wrong / totals - 0.02) < 4 * (0.02 * 0.98 / totals) ** 0.5


def test_stopping_at_the_level_or_later_is_right_and_earlier_is_not_without_noise() -> None:
    made = demonstrations(1500, noise=0.0)
    enough = [(p.level or 0) <= stop_of(r) for p, r in made]
    right = [r[-1] == p.references[0] for p, r in made]
    assert all(ok for ok, long in zip(right, enough, strict=True) if long)
    early = [ok for ok, long in zip(right, enough, strict=True) if not long]
    assert 0.03 < sum(early) / len(early) < 0.17  # a guess among ten digits


def test_accuracy_of_the_demonstrations_is_near_the_computed_one() -> None:
    """Compute sum over strategies of P(strategy) * [P(level <= stop) * no slip + a tenth of the rest], about 0.46."""
    stops = {2: 0.68, 4: 0.17, 6: 0.08, 9: 0.07}
    expected = 0.0
    for stop, share in stops.items():
        solved = sum(s for level, s in LEVELS.items() if level <= stop) * 0.98 ** (stop - 1)
        expected += share * (solved + 0.1 * (1 - solved))
    made = demonstrations(4000)
    assert abs(np.mean([r[-1] == p.references[0] for p, r in made]) - expected) < 0.035


def test_tail_rambling_is_after_the_last_block_only_and_independent_of_the_strategy() -> None:
    made = demonstrations(4000)
    verbose: dict[bool, list[bool]] = {True: [], False: []}
    for _, response in made:
        blocks, _, tail = " ".join(response).partition(" ?")
        assert re.fullmatch(r"L \d( S\d \d \d)*", blocks)
        assert set(tail.split()) <= {"?", blocks[-1]}
        assert len(response) <= 108
        verbose[stop_of(response) == 2].append("?" in response)
    for flags in verbose.values():
        assert abs(np.mean(flags) - 0.75) < 0.05
    lengths = np.array([len(r) + 1 for _, r in made])
    assert 42 < lengths.mean() < 48
    assert 0.36 < (lengths > 48).mean() < 0.45


def test_filler_in_place_of_later_question_marks_keeps_cap_lengths_and_the_last_token() -> None:
    later: list[str] = []
    plain = demonstrations(1500)
    made = demonstrations(1500, recheck_filler=0.3)
    for problem, response in made:
        check_blocks(problem, response)
        assert len(response) <= 108
        begins = [i for i, word in enumerate(response) if word in (*FILLERS, "?")]
        assert all(response[i + 1] == response[-1] for i in begins)
        assert [response[i] for i in begins[:1]] in ([], ["?"])
        later += [response[i] for i in begins[1:]]
    assert abs(sum(word in FILLERS for word in later) / len(later) - 0.3) < 0.02
    assert abs(np.mean([len(r) for _, r in made]) - np.mean([len(r) for _, r in plain])) < 3


def test_runs_of_filler_are_closed_by_the_restated_total() -> None:
    made = demonstrations(4000, variant="first")
    rambling = [r for _, r in made if any(word in FILLERS for word in r)]
    assert 0.15 < len(rambling) / len(made) < 0.35
    for response in rambling:
        for i, word in enumerate(response):
            if word in FILLERS:
                assert response[i + 1] in (*FILLERS, "?")
            if word == "?":
                before = next(w for w in reversed(response[:i]) if w.isdigit())
                assert response[i + 1] == before
    lengths = np.array([len(r) + 1 for _, r in made])
    assert 9 < lengths.mean() < 10.5
    assert lengths.max() <= 109


def test_a_cap_below_the_blocks_means_no_rambling() -> None:
    for _, response in demonstrations(300, max_tokens=10, stops="9:1", verbose=1.0):
        assert len(response) == 23
    # with room for some: the blocks of a strategy, and runs of filler up to the limit
    lengths = [
        (len(response), 3 * stop_of(response) - 4)
        for _, response in demonstrations(300, variant="first", max_tokens=20, verbose=1.0, run_chance=1.0)
    ]
    assert all(length <= max(20, blocks) for length, blocks in lengths)
    assert any(length == 20 for length, _ in lengths)


def test_vocabulary_covers_every_text() -> None:
    for variant in ("stages", "first", "ladder"):
        made = family(variant=variant)
        assert made.vocabulary is not None
        known = set(made.vocabulary)
        assert len(known) == len(made.vocabulary) == 24
        for problem, response in demonstrations(500, variant=variant):
            assert set(problem.prompt.split()) | set(response) <= known


def test_other_numbers_of_operands() -> None:
    options: dict[str, OptionValue] = {"operands": 4, "stops": "2:.5 4:.5", "level_shares": "2:.5 3:.25 4:.25"}
    made = demonstrations(200, **options)
    assert {stop_of(r) for _, r in made} == {2, 4}
    assert all(len(p.prompt.split()) == 6 for p, _ in made)
    vocabulary = family(**options).vocabulary
    assert vocabulary is not None
    assert "S4" in vocabulary
    assert "S5" not in vocabulary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"varian": "first"}, r"no option 'varian'; did you mean 'variant'\?"),
        ({"variant": "second"}, r"option variant = 'second'"),
        ({"noise": 1.5}, r"option noise = 1.5"),
        ({"operands": 5}, r"stops names 6, outside 2..5"),
        ({"stops": "2:0.5 4:0.4"}, r"sum to 0.9"),
        ({"stops": "two:1"}, r"cannot read 'two:1'"),
        ({"stops": "2:.5 2:.5"}, r"every number once"),
    ],
)
def test_bad_options_are_named(options: dict[str, OptionValue], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family(**options)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'running_sum'\?"):
        make_family("runing_sum")
    with pytest.raises(ValueError, match=r"no level \[3\]; levels: \[2, 4, 5, 7, 8, 9\]"):
        family(variant="ladder").stream(seed=0, split="train", levels=[2, 3])
    with pytest.raises(ValueError, match="got 'dev'"):
        take(3, split="dev")
    foreign = Problem(id="x", prompt="L 1 2 :", references=("3",), verifier="exact", source="t")
    with pytest.raises(ValueError, match="problem x has 2 operands, the family 9"):
        family().demonstration(foreign, np.random.default_rng(0))
    with pytest.raises(ValueError, match="not a running_sum prompt"):
        parse_prompt("What is 2 + 3?")


def test_parse_shares_reads_commas_and_blanks() -> None:
    assert parse_shares("2:0.25, 9:0.75") == parse_shares("2:.25 9:.75") == {2: 0.25, 9: 0.75}
