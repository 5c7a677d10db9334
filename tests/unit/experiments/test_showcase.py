"""Tests of the showcase's page: rules without a model, and the verdict on a claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from magicrl.config.data_schema import SourceConfig
from magicrl.records import Problem
from studies.showcase import parts, sentence, tiny, without_model, without_template


def problem(prompt: str, answer: str) -> Problem:
    return Problem(id=prompt, prompt=prompt, references=(answer,), verifier="exact", source="test")


def test_the_examples_in_a_template_are_no_numbers_of_the_problem() -> None:
    source = SourceConfig(path="x.json", template="Tom has 3 and 6: 9\n{prompt}\nAnswer:")
    bare = problem("a 7 b 4 c 1", "3")
    asked = replace(bare, prompt=f"Tom has 3 and 6: 9\n{bare.prompt}\nAnswer:")
    assert without_template(asked, [source]).prompt == bare.prompt
    train = [bare, problem("5 then 9 then 9", "0"), problem("8 of 2", "6"), problem("no number", "6")]
    assert without_model(train, [problem("a 4 b 9 c 2", "7")]) == {
        "always '6'": 0.0,
        "difference of the last two numbers": 1.0,
    }


@pytest.mark.parametrize(
    ("steps", "before", "greedy", "at_1", "verdict"),
    [
        (30, 0.02, (0.45, 0.45, 0.45), 0.2, "holds"),
        (60, 0.02, (0.45, 0.45, 0.45), 0.2, "fails"),
        (60, 0.02, (0.45, 0.45, 0.45), 0.4, "holds"),
        (60, 0.02, (0.45, 0.44, 0.45), 0.4, "fails"),
        (60, 0.02, (0.45, 0.45), 0.4, "undecided"),
        (60, 0.02, (0.45, 0.44), 0.4, "fails"),
        (60, 0.06, (0.45, 0.44, 0.45), 0.4, "undecided"),
    ],
)
def test_a_claim_needs_its_premise_its_seeds_and_each_bar(
    steps: int, before: float, greedy: tuple[float, ...], at_1: float, verdict: str
) -> None:
    runs = [
        {
            "seed": seed,
            "curves": {"train/accuracy/mean": [0.0] * steps},
            "tests": {
                "before": {"0.0": {"accuracy": {"mean": before}}},
                "after": {"0.0": {"accuracy": {"mean": value}}, "1.0": {"accuracy": {"mean": at_1}}},
            },
        }
        for seed, value in enumerate(greedy)
    ]
    assert f"**{verdict}**" in sentence(runs)


def part(seed: int, right: int, *, alpha: int = 4, first: float = 8.0) -> dict[str, Any]:
    """Return a run with ``right`` % right from step 16 to 20, 0 before and after, and alpha above 0 in some steps."""
    return {
        "seed": seed,
        "curves": {
            "train/accuracy/mean": [0.0] * 15 + [right / 100] * 5 + [0.0],
            "train/accuracy/standard_error": [0.01 * 5**0.5] * 21,
            "train/truncation/ratio": [0.5] * 21,
            "length/mean": [first] + [8.0] * 20,
            "entropy/alpha": [0.0] * (20 - alpha) + [0.1] * alpha + [0.0],
            "learner/sgd_steps": [None] + [1] * 20,
            "groups/rejected/ratio": [0.1] * 21,
            "time/rollout_cpu": [1.0] * 21,
            "time/train_cpu": [2.0] * 21,
        },
        "tests": {"after": {"0.0": {"accuracy": {"mean": 0.5, "low": 0.4, "high": 0.6}, "per_problem": [0.5] * 200}}},
    }


@pytest.mark.parametrize(
    ("base", "changes", "alpha", "words"),
    [
        (30, (30, 31, 29), 4, "| met | +30.0 | +27.5 to +32.5 | higher, 3 of 3 seeds |"),
        (30, (-9, -9, -10), 4, "lower, 3 of 3 seeds"),
        (30, (30, 31), 4, "undecided, 2 of 3 seeds"),
        (30, (30, 5, 60), 4, "undecided, 3 of 3 seeds"),
        (30, (1, -1, 0), 4, "no difference, 3 of 3 seeds"),
        (30, (30, 31, 29), 3, "| not met | +30.0 | +27.5 to +32.5 | undecided, 3 of 3 seeds |"),
        (9, (30, 31, 29), 4, "| not met |"),
    ],
)
def test_a_part_differs_only_with_its_premise_and_three_seeds(
    base: int, changes: tuple[int, ...], alpha: int, words: str
) -> None:
    runs = {f"family-{seed}": part(seed, base) for seed in (4, 5, 6)}
    runs |= {f"parts-entropy-{4 + i}": part(4 + i, base + d, alpha=alpha) for i, d in enumerate(changes)}
    lines = parts(runs)
    assert words in lines[-1]
    assert lines[2] == f"| `base` | 4 | {base}.0 ({base - 1.96:.1f} to {base + 1.96:.1f}) |  |  | 19 | 40,960 | 60 |"
    d = changes[0]
    row = f"| {d:+.1f} ({d - 2.77:+.1f} to {d + 2.77:+.1f}) | 50.0 (40.0 to 60.0) | 19 | 40,960 | 60 |"
    assert lines[2 + len(changes)].endswith(row)


def test_holms_correction_is_over_the_variants_with_three_seeds() -> None:
    runs = {f"family-{seed}": part(seed, 30) for seed in (4, 5, 6)}
    runs |= {f"parts-entropy-{4 + i}": part(4 + i, 30 + d) for i, d in enumerate((20, 25, 15))}
    assert "higher" in parts(runs)[-1]
    for name in ("stages", "all-groups"):
        runs |= {f"parts-{name}-{seed}": part(seed, 25 + seed) for seed in (4, 5, 6)}
    assert "undecided" in next(line for line in parts(runs) if line.startswith("| `entropy` | met"))


def test_a_part_whose_first_step_differs_from_base_is_not_compared() -> None:
    runs = {"family-4": part(4, 30), "parts-entropy-4": part(4, 60, first=9.0)}
    assert parts(runs) == ["No run has ended."]


def test_variants_on_the_tiny_model_are_paired_by_seed() -> None:
    runs: dict[str, Any] = {}
    for variant, seed, right in (("sum", 1, 0.6), ("sum", 2, 0.8), ("uniform", 1, 0.5), ("uniform", 2, 0.6)):
        curves = {
            "validation/accuracy/mean": [None, right, None, right + 0.1],
            "validation/length/mean": [None, 9.0, 7.0],
        }
        tests = {"after": {"0.0": {"accuracy": {"mean": right}}}}
        runs[f"tiny-{variant}-{seed}"] = {"seed": seed, "curves": curves, "tests": tests}
    assert tiny(runs)[2:] == [
        "| `sum` | 70.0, 80.0 | +15.0 (-48.5 to +78.5) | 70.0 | +15.0 (-48.5 to +78.5) | 7.0 |",
        "| `uniform` | 55.0, 65.0 |  | 55.0 |  | 7.0 |",
    ]
