"""Difficulty by a real (tiny, random) model: resumable to the sample, early stopping, the report's table."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from scipy.stats import betabinom

from magicrl.evaluation.samples import read_samples
from magicrl.pipeline.difficulty_step import (
    Difficulty,
    chance_of_the_same,
    difficulty_report,
    failures_of_sixteen,
    is_closed,
    sampled_name,
)
from magicrl.pipeline.frame import Drop
from magicrl.pipeline.parts import StepFolder, read_part
from magicrl.pipeline.pipeline_schema import DifficultyStep, EarlyStop


@pytest.fixture
def pipeline(write_rows: Callable[..., Path], tiny_models: tuple[Path, Path]) -> dict[str, Any]:
    """Return twelve sums with reference answers that the model gives often, sometimes and never."""
    references = ["1", "2", "3", "77"]
    rows = [{"problem": f"what is {i % 3} + {i % 4} ?", "answer": references[i % 4], "id": f"p{i}"} for i in range(12)]
    columns = {"id": "id"}
    step = {"use": "difficulty", "sampler": {"model": str(tiny_models[0]), "threads": 1}, "label": "tiny"}
    step |= {"samples": 8, "max_tokens": 16, "time_limit": 20}
    source = {"path": str(write_rows("sums.jsonl", rows)), "fields": columns, "template": "{prompt}"}
    return {"sources": [source], "steps": [step]}


class Stops:
    """Observer that interrupts after a number of samples."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.notes: list[str] = []

    def step(self, name: str, parts: int, missing: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        if unit == "samples" and done >= self.after:
            raise KeyboardInterrupt


def counts_in(run: Any) -> dict[str, Any]:
    return json.loads((run.output / "01-difficulty" / "work" / "counts.json").read_text())


def texts_in(run: Any) -> dict[tuple[str, int], str]:
    """Return the samples by problem and number."""
    (path,) = (run.output / "01-difficulty" / "work").glob("samples-*.jsonl")
    return {(row.problem, row.sample): row.text for row in read_samples([path])}


def test_fewer_samples_in_a_rerun_count_as_in_a_new_run(pipeline: dict[str, Any], run: Any, tmp_path: Path) -> None:
    new = type(run)(tmp_path)
    new.output = tmp_path / "new"
    run(pipeline)
    for folder in (run, new):
        pipeline["steps"][0]["samples"] = 4
        folder(pipeline)
    assert counts_in(run) == counts_in(new)
    assert counts_in(run)["samples"] == {"wanted": 48, "made": 48, "saved": 0}


def test_never_and_always_solved_problems_go_and_the_others_say_how_hard_they_are(
    pipeline: dict[str, Any], run: Any
) -> None:
    told = Stops(10**9)
    run(pipeline, told)
    counts = {name.partition("@")[0]: row for name, row in counts_in(run)["counts"].items()}
    kept = {entry.id: entry for entry in run.kept("01-difficulty")}
    reasons = run.reasons("01-difficulty")
    assert len(kept) + len(reasons) == 12
    assert kept, "the tiny model solves some sums sometimes"
    for name, (_, correct, counted, total) in counts.items():
        assert counted == total == 8
        if correct == 0:
            assert reasons[name] == "never solved by tiny"
        elif correct == counted:
            assert reasons[name] == "always solved by tiny"
        else:
            assert kept[name].difficulty == {"tiny": 16 - 2 * correct}
            assert kept[name].notes["pass_rate"] == {"tiny": [correct, counted]}
    assert any("96 samples to make at most" in note for note in told.notes)
    table = (run.output / "01-difficulty" / "work" / "difficulty.txt").read_text()
    assert re.search(rf"maths +12 .*{100 * len(kept) / 12:.1f} %", table)
    assert "<svg" in (run.output / "01-difficulty" / "work" / "difficulty.svg").read_text()


def test_an_interrupted_measurement_goes_on_to_the_same_samples(
    pipeline: dict[str, Any], run: Any, tmp_path: Path
) -> None:
    run(pipeline)
    whole = counts_in(run)["counts"]
    run.output = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        run(pipeline, Stops(30))
    before = texts_in(run)
    assert 30 <= len(before) < 96
    run(pipeline)
    (samples,) = (run.output / "01-difficulty" / "work").glob("samples-*.jsonl")
    rows = list(read_samples([samples]))
    assert len(rows) == 96
    assert len({(row.problem, row.sample) for row in rows}) == 96
    assert {key: row.text for row in rows if (key := (row.problem, row.sample)) in before} == before
    assert counts_in(run)["counts"] == whole


def test_other_problems_beside_it_change_no_problems_samples(
    pipeline: dict[str, Any], run: Any, tmp_path: Path
) -> None:
    pipeline["steps"][0]["samples"] = 4
    run(pipeline)
    whole = texts_in(run)
    source = Path(pipeline["sources"][0]["path"])
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(lines[5:]))
    run.output = tmp_path / "fewer"
    run(pipeline)
    fewer = texts_in(run)
    assert len(fewer) == 7 * 4
    assert all(whole[key] == text for key, text in fewer.items())


def test_early_stopping_makes_fewer_samples_and_says_how_many(pipeline: dict[str, Any], run: Any) -> None:
    pipeline["steps"][0]["early_stop"] = {"first": 2, "confidence": 0.7}
    run(pipeline)
    document = counts_in(run)
    samples = document["samples"]
    assert samples["wanted"] == 96
    assert samples["made"] + samples["saved"] == 96
    assert samples["saved"] > 0
    rule = EarlyStop(first=2, confidence=0.7)
    for _, correct, counted, total in document["counts"].values():
        assert is_closed(correct, counted, total, rule)
    report = (run.output / "01-difficulty" / "work" / "difficulty.txt").read_text()
    assert f"early stopping saved {samples['saved']} samples" in report
    # all N after all: only the samples that were saved by stopping are made
    del pipeline["steps"][0]["early_stop"]
    run(pipeline)
    assert counts_in(run)["samples"] == {"wanted": 96, "made": 96, "saved": 0}


def test_a_prompt_that_leaves_no_room_is_dropped_or_an_error(
    pipeline: dict[str, Any], run: Any, write_rows: Callable[..., Path]
) -> None:
    # the model takes 96 tokens, of which 16 are for the response
    fits = "what is 1 + 1 ? " * 13 + "? ?"
    words = {"fits": fits, "over": fits + " ?", "long": "what is 1 + 1 ? " * 30}
    rows = [{"problem": text, "answer": "2", "id": name} for name, text in words.items()]
    long = {"path": str(write_rows("long.jsonl", rows)), "fields": {"id": "id"}, "template": "{prompt}"}
    run({**pipeline, "sources": [*pipeline["sources"], long]})
    unfit = [name for name, why in run.reasons("01-difficulty").items() if why == "prompt unfit for the model"]
    assert unfit == ["long/over", "long/long"]
    pipeline["sources"].append({**long, "path": str(write_rows("long.jsonl", rows[2:]))})
    pipeline["steps"][0] |= {"overlong_prompts": "error", "seed": 1}
    with pytest.raises(ValueError, match=r"1 prompts cannot be encoded for the model, e\.g\. long/long@"):
        run(pipeline)


@pytest.mark.parametrize(("counted", "total", "prior"), [(0, 4, 0.5), (4, 16, 0.5), (8, 16, 1.0), (15, 16, 0.3)])
def test_the_chance_of_the_same_is_the_beta_binomials(counted: int, total: int, prior: float) -> None:
    expected = betabinom.pmf(0, total - counted, prior, prior + counted)
    assert chance_of_the_same(counted, total, prior) == pytest.approx(expected)


def test_when_a_problem_is_closed() -> None:
    rule = EarlyStop(first=4, confidence=0.9, prior=0.5)
    assert is_closed(1, 2, 16, rule)
    assert not is_closed(0, 2, 16, EarlyStop(first=4, confidence=0.51))
    assert not is_closed(0, 8, 16, rule)
    assert is_closed(0, 14, 16, rule)
    assert is_closed(16, 16, 16, rule)
    assert [failures_of_sixteen(c, 16) for c in (0, 1, 15, 16)] == [16, 15, 1, 0]
    assert [failures_of_sixteen(c, 64) for c in (0, 1, 63, 64)] == [16, 15, 1, 0], "solved sometimes stays sometimes"


def test_early_stopping_says_how_many_it_closed_wrongly() -> None:
    # one judged sample of sixteen is none that stopped early
    counts = {
        "early": ["math", 0, 4, 16],
        "failed": ["math", 0, 1, 16],
        "whole": ["math", 0, 16, 16],
        "sometimes": ["math", 1, 4, 16],
    }
    document = {"model": "m", "temperature": 1.0, "max_tokens": 8, "overlong": {}, "counts": counts}
    document |= {"samples": {"wanted": 48, "made": 24, "saved": 24}}
    document |= {"early_stop": EarlyStop(confidence=0.51).model_dump()}
    told, _ = difficulty_report(document, drops=True)
    # only the first problem might still be solved: B(4.5, 0.5) / B(16.5, 0.5) of such problems stay unsolved
    assert told["expected_errors"] == round(1 - betabinom.pmf(0, 12, 0.5, 4.5), 2)
    (row,) = told["table"]
    assert (row["never"], row["always"], row["kept"], row["unmeasured"]) == (2, 0, 1, 1)


@pytest.mark.parametrize(
    ("correct", "counted", "rule", "expected"),
    [
        (0, 1, None, "too few samples could be judged"),
        (7, 7, None, "too few samples could be judged"),
        (1, 2, None, None),
        (0, 8, None, "never solved by m"),
        (0, 4, {"confidence": 0.51}, "never solved by m"),
        (0, 4, {"confidence": 0.9}, "too few samples could be judged"),
    ],
)
def test_a_problem_of_which_few_samples_were_judged_is_unmeasured(
    correct: int, counted: int, rule: Any, expected: str | None, write_rows: Callable[..., Path], run: Any
) -> None:
    run({"sources": [{"path": str(write_rows("r.jsonl", [{"problem": "1 + 1?", "answer": "2"}]))}]})
    (part,) = (run.output / "sources" / "r" / "kept").glob("*.parquet")
    (entry,) = run.kept("sources/r")
    folder = StepFolder(run.output / "01-difficulty")
    folder.work.mkdir(parents=True)
    counts = {sampled_name(entry): ["math", correct, counted, 16]}
    (folder.work / "counts.json").write_text(json.dumps({"counts": counts, "overlong": {}}))
    (decision,) = difficulty_of({"model": "m"}, early_stop=rule).decide(folder)(read_part(part))
    assert decision.reason == expected if isinstance(decision, Drop) else expected is None


def test_samples_that_were_not_judged_are_made_again(pipeline: dict[str, Any], run: Any) -> None:
    run(pipeline)
    whole = counts_in(run)
    work = run.output / "01-difficulty" / "work"
    (path,) = work.glob("samples-*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lost = {(row["problem"], row["sample"]) for row in rows[::16]}
    rows = [{**row, "outcome": "not_judged"} if (row["problem"], row["sample"]) in lost else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "prepared.key").unlink()
    shutil.rmtree(run.output / "01-difficulty" / "kept")
    run(pipeline)
    assert {(row.problem, row.sample) for row in list(read_samples([path]))[96:]} == lost
    assert counts_in(run) == whole


def difficulty_of(sampler: dict[str, Any], **settings: Any) -> Difficulty:
    step = DifficultyStep.model_validate({"use": "difficulty", "sampler": sampler, **settings})
    return Difficulty(step, cast(Any, None))


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"extra": '{"top_k": 5}'}, True),
        ({"max_context": "64"}, True),
        ({"mode": "chat"}, True),
        ({"base_url": "http://b/v1", "concurrency": "2", "gpu_share": "0.5"}, False),
    ],
)
def test_engine_options_that_change_samples_are_part_of_the_identity(options: dict[str, str], counts: bool) -> None:
    identities = [
        difficulty_of({"engine": "openai", "model": "m", "options": given}).identity(cast(Any, None))
        for given in ({"base_url": "http://a/v1"}, options)
    ]
    assert (identities[0] != identities[1]) == counts


def test_the_code_of_a_custom_engine_is_part_of_the_identity(tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    file, found = tmp_path / "engine.py", list[Any]()
    for text in ("def make(settings): return 1", "def make(settings): return 2"):
        file.write_text(text)
        sampler = {"engine": f"{file}:make", "model": str(tiny_models[0])}
        found.append(difficulty_of(sampler).identity(cast(Any, None)))
    assert found[0] != found[1]


def test_a_second_model_is_measured_under_its_own_reasoning_and_keeps_the_first_ones_failures(
    pipeline: dict[str, Any], run: Any
) -> None:
    first = {**pipeline["steps"][0], "keep": "all"}
    run({**pipeline, "steps": [first, {**first, "label": "strict", "reasoning": "required"}]})
    kept = run.kept("02-difficulty")
    assert len(kept) == 12
    assert all(entry.difficulty.keys() == entry.notes["pass_rate"].keys() == {"tiny", "strict"} for entry in kept)
    assert min(entry.difficulty["tiny"] for entry in kept) < 16
    assert {entry.difficulty["strict"] for entry in kept} == {16}, "without </think> no response has an answer"
    work = run.output / "02-difficulty" / "work"
    assert json.loads((work / "difficulty.json").read_text())["table"][0]["sometimes"] == 0
    assert re.search(r"N/N +sometimes +unmeasured", (work / "difficulty.txt").read_text())
    assert "both are kept" in (work / "difficulty.svg").read_text()


def test_two_models_of_one_name_are_refused(pipeline: dict[str, Any], run: Any) -> None:
    first = pipeline["steps"][0]
    with pytest.raises(ValueError, match=r"two difficulty steps write model_difficulty of 'tiny'.*another label"):
        run({**pipeline, "steps": [first, {**first, "reasoning": "required"}]})
