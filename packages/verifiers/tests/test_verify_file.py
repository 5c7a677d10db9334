"""JSON Lines in, JSON Lines out: order, one line each, errors that name the place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from builders import write_lines

from magicrl import verify
from magicrl_verifiers import JudgeOptions
from magicrl_verifiers.batch import verify_file, verify_rows
from magicrl_verifiers.cli import code, custom_reward, math


def test_a_file_is_judged_in_order(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "reference": "5", "response": r"\boxed{5}"},
        {"reference": ["6", "1/2"], "response": "<think>x</think>\\boxed{0.5}"},
        {"id": 7, "reference": "2", "response": "\\boxed{\\lim_{x \\to 0} 9^{9^{9}}}"},
        {"id": None, "reference": "2", "response": "it is 2"},
        {"id": "z", "reference": "π/2", "response": "\\boxed{\\frac{\\pi}{2}}"},
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")  # a blank line is no answer
    output = tmp_path / "out.jsonl"
    summary = verify_file(source, output, workers=2, time_limit=0.4)
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in found] == ["a", 2, 7, None, "z"]
    assert [row["correct"] for row in found] == [True, True, False, True, True]
    assert [row["status"] for row in found] == ["matched", "matched", "timeout", "matched", "matched"]
    assert list(found[0]) == ["id", "correct", "status", "extracted", "decided_by", "seconds"]
    assert found[1]["extracted"] == "0.5"
    assert (summary.total, summary.correct, summary.wrong, summary.not_judged) == (5, 4, 1, 0)
    assert not (tmp_path / "out.jsonl.part").exists()


def test_options_reach_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"reference": "2", "response": "it is 2"}, {"reference": "2", "response": r"a</think>\boxed{2}"}]
    source, output = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    options = JudgeOptions(reasoning="required", extract="box")
    assert verify_file(source, output, options=options, workers=1).correct == 1
    assert math(input=source, output=output, extract="box", workers=1) == 0
    assert "2 judged, 1 correct, 0 not judged" in capsys.readouterr().out
    write_lines(source, [*rows, {"reference": r"\frac{", "response": "2"}])
    assert math(input=source, output=output, workers=1) == 0
    assert "2 judged, 2 correct, 1 not judged" in capsys.readouterr().out


def test_numbers_are_reference_answers_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"reference": 5, "response": "5"}, {"reference": ["6", 5.0], "response": "5"}]
    source.write_bytes(b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert verify_file(source, output, verifier="exact", workers=1).correct == 2


BROKEN = {
    "{": "not JSON",
    "[1]": "expected an object, got list",
    '{"response": "x"}': "field 'reference' is missing",
    '{"reference": "x"}': "field 'response' is missing",
    '{"reference": [], "response": "x"}': "field 'reference' must be a string or a list",
    '{"reference": true, "response": "x"}': "field 'reference' must be a string or a list of strings, none empty, got",
    '{"reference": ["5", null], "response": "x"}': "none empty, got ['5', None]",
    '{"reference": " ", "response": "x"}': "none empty, got ' '",
    '{"reference": "5", "response": null}': "field 'response' must be a string, got None",
    "[" * 100_000: "not JSON",
    '{"reference": "5", "response": "5", "response": "6"}': "the key 'response' appears twice in one object",
}


def test_a_line_that_cannot_be_read_has_its_own_row(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = '{"id": "a", "reference": "5", "response": "5"}\n'
    source.write_text(good + "".join(f"{line}\n{good}" for line in BROKEN))
    summary = verify_file(source, output, workers=1)
    rows = [json.loads(text) for text in output.read_text().splitlines()]
    assert (summary.total, summary.correct, summary.not_judged) == (23, 12, 11)
    assert all((row["id"], row["correct"]) == ("a", True) for row in rows[::2])
    for place, message in enumerate(BROKEN.values()):
        row, told = rows[2 * place + 1], summary.broken[place]
        assert (row["id"], row["correct"], row["status"]) == (2 * place + 2, None, "broken_line")
        assert row["reason"] == told
        assert message in told
        assert f"in.jsonl:{2 * place + 2}: " in told


def test_the_command_says_how_many_lines_it_could_not_read(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"reference": "5", "response": "\xff"}\n{"reference": "5", "response": "5"}\n')
    with pytest.raises(ValueError, match=r"1 of 2 lines could not be read .*in\.jsonl:1: not UTF-8 at byte"):
        math(input=source, output=output, workers=1)
    assert len(output.read_text().splitlines()) == 2


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_no_line_at_all_is_an_error(tmp_path: Path, text: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ValueError, match=r"in\.jsonl: the file holds no line to judge"):
        verify_file(source, tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == [source]


def test_an_output_that_is_the_input(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"reference": "5", "response": "5"}\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for output in (source, link):
        with pytest.raises(ValueError, match="is the input file"):
            verify_file(source, output)
    # the output grows in OUTPUT.part, which would empty this input before its first line is read
    left = tmp_path / "out.jsonl.part"
    left.write_text(source.read_text())
    with pytest.raises(ValueError, match=r"out\.jsonl\.part is the input file"):
        verify_file(left, tmp_path / "out.jsonl")
    assert left.read_text() == source.read_text()


def test_an_output_may_be_a_link_or_a_pipe_and_remains_one(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"reference": "5", "response": "5"}])
    link, pipe = tmp_path / "link.jsonl", tmp_path / "pipe"
    link.symlink_to("out.jsonl")
    os.mkfifo(pipe)  # /dev/null and /dev/stdout would be replaced likewise
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for output in (link, pipe):
        verify_file(source, output, verifier="exact", workers=1)
    linked, piped = (json.loads(text) for text in ((tmp_path / "out.jsonl").read_bytes(), os.read(reader, 1000)))
    assert link.is_symlink()
    assert linked["correct"]
    assert piped == {**linked, "seconds": piped["seconds"]}
    assert pipe.is_fifo()
    os.close(reader)


def test_an_input_that_is_no_file_is_refused_and_leaves_the_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("earlier verdicts")
    with pytest.raises(ValueError, match="/dev/null is no file, and is read twice; write its lines to a file first"):
        verify_file(Path("/dev/null"), output, verifier="exact", workers=1)  # a pipe would wait for its writer
    assert output.read_text() == "earlier verdicts"


def test_a_folder_as_output_is_refused_before_anything_is_judged(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"reference": "5", "response": "5"}])
    (tmp_path / "out").mkdir()
    for folder in (tmp_path / "out", Path()):
        with pytest.raises(ValueError, match="is a folder; give a file in it"):
            verify_file(source, folder)
    assert not (tmp_path / "out.part").exists()
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path / 'no'}; create it, or choose another"):
        verify_file(source, tmp_path / "no" / "out")


def test_only_a_whole_output_has_its_name(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"reference": "5", "response": "5"}] * 2)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_file(source, tmp_path / "out.jsonl", verifier="exact", workers=1, tell=stop)
    assert not (tmp_path / "out.jsonl").exists()
    assert len((tmp_path / "out.jsonl.part").read_text().splitlines()) == 1


REWARDS = """
import asyncio
from magicrl_verifiers import reward

def plain(problem, response):
    return {"score": len(response) / problem.extra["most"], "prompt": len(problem.prompt)}

@reward(batched=True, right_from=0.5)
def batched(problems, responses):
    return [plain(problem, response)["score"] for problem, response in zip(problems, responses)]

async def awaited(problem, response):
    await asyncio.sleep(0.01)
    return plain(problem, response)

@reward(isolated=True, time_limit=5.0)
def isolated(problem, response):
    import os
    return {"score": plain(problem, response)["score"], "pid": os.getpid()}
"""


@pytest.mark.parametrize("name", ["plain", "batched", "awaited", "isolated"])
def test_a_reward_of_ones_own_judges_as_in_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(REWARDS)
    lines = [{"prompt": "ab", "response": "x", "most": 4}, {"response": "xx", "most": 2}, {"response": "y"}]
    write_lines(Path("in.jsonl"), lines)
    custom_reward(f"own.py:{name}", input=Path("in.jsonl"), output=Path("out.jsonl"), workers=1)
    first, second, failed = (json.loads(line) for line in Path("out.jsonl").read_text().splitlines())
    assert [first["score"], second["score"]] == [0.25, 1.0]
    assert [first["status"], second["status"]] == ["score_below", "score_reached"]
    assert (failed["status"], failed["correct"]) == ("reward_failed", None)
    assert "KeyError" in failed["reason"]
    assert first["metrics"].get("prompt", 2) == 2
    assert first["metrics"].get("pid") != os.getpid()
    printed = capsys.readouterr().out
    assert "2 judged, 1 correct, mean reward 0.625, 1 not judged" in printed
    assert "all rewards are equal" not in printed


@pytest.mark.parametrize("value", ["0.5", "False"])
def test_a_reward_that_is_the_same_for_all_is_told_so(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("constant.py").write_text(f"def score(problem, response):\n    return {value}\n")
    write_lines(Path("in.jsonl"), [{"response": "x"}, {"response": "y"}])
    custom_reward("constant.py:score", input=Path("in.jsonl"), output=Path("out.jsonl"), workers=1)
    assert "all rewards are equal, so nothing can be learned" in " ".join(capsys.readouterr().out.split())


def test_a_built_in_reward_reads_boxes_only_unless_told_otherwise(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [{"reference": "5", "response": "It is 5"}, {"reference": "5", "response": "<think> 5"}])
    given: dict[str, Any] = {"input": source, "output": output, "workers": 1}
    cases: list[tuple[dict[str, Any], list[bool]]] = [
        ({}, [False, False]),
        ({"extract": "lenient"}, [True, False]),
        ({"extract": "lenient", "reasoning": "none"}, [True, True]),
    ]
    for settings, right in cases:
        custom_reward("exact", **given, **settings)
        assert [json.loads(line)["correct"] for line in output.read_text().splitlines()] == right


def test_answers_of_which_none_was_judged_are_a_failure_with_reasons(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [{"reference": "{", "response": "```python\nprint(1)\n```"}])
    with pytest.raises(ValueError, match=r"none of 1 answers was judged; 'reason' in .*out\.jsonl says why"):
        custom_reward("code", input=source, output=output, workers=1)
    row = json.loads(output.read_text())
    assert (row["correct"], row["status"]) == (None, "infrastructure_error")
    assert "field 'tests' is text but not JSON" in row["reason"]


def test_programs_that_were_not_judged_have_a_reason(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    tests = {"inputs": ["3"], "outputs": ["3"]}
    write_lines(source, [{"program": "print(3)", "tests": given} for given in (tests, tests | {"outputs": []})])
    code(input=source, output=output)
    right, unusable = (json.loads(line) for line in output.read_text().splitlines())
    assert right["correct"] is True
    assert "reason" not in right
    assert "differ in length" in unusable["reason"]


def test_a_list_of_a_wrong_length_shows_although_each_line_is_judged_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("single.py").write_text("def one(completions, **kwargs):\n    return [1.0]\n")
    write_lines(Path("in.jsonl"), [{"response": "x"}, {"response": "y"}])
    limits: dict[str, Any] = {"workers": 1, "time_limit": 2.0, "memory_limit_mb": 1024}
    row = {"response": r"\boxed{x}", "reference": "x"}
    (alone,) = verify_rows([row], verifier="single.py:one", options=JudgeOptions(), **limits)
    assert "must return 2 scores, got 1" in alone.reason
    (part,) = verify_rows([row], verifier="exact + 0.5 * single.py:one", options=JudgeOptions(), **limits)
    assert part.parts == {"exact": (1.0, 1.0), "one": (0.5, None)}
    with pytest.raises(ValueError, match="none of 2 answers was judged"):
        custom_reward("single.py:one", input=Path("in.jsonl"), output=Path("out.jsonl"), workers=1)


def test_a_line_without_a_column_that_a_reward_of_trl_reads_has_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trl_reward.py").write_text("def near(completions, level, **kwargs):\n    return level\n")
    lines = [{"response": "x", "level": 1}, {"response": "x"}, {"response": "x", "promt": "y", "level": 1}]
    write_lines(Path("in.jsonl"), [*lines, lines[0]])
    with pytest.raises(ValueError, match=r"2 of 4 lines could not be read .*in\.jsonl:2: .*'level'"):
        custom_reward("trl_reward.py:near", input=Path("in.jsonl"), output=Path("out.jsonl"), workers=1)
    first, missing, misspelt, last = (json.loads(line) for line in Path("out.jsonl").read_text().splitlines())
    assert (first["score"], last["score"]) == (1.0, 1.0)
    assert missing["status"] == misspelt["status"] == "broken_line"
    assert misspelt["reason"] == "in.jsonl:3: unknown field 'promt'; did you mean 'prompt'?"
    with pytest.raises(ValueError, match=r"record 1: .*'level'"):
        verify(lines, reward="trl_reward.py:near")


def test_an_unknown_reward_lists_the_known_ones(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"reference": "5", "response": "5"}])
    for name, said in (
        ("mats", r"did you mean 'maths'\?.*code, exact, judge, maths"),
        ("own.py:score", "no file own.py"),
    ):
        with pytest.raises(ValueError, match=said):
            verify_file(source, tmp_path / "out.jsonl", verifier=name)
    assert verify_file(source, tmp_path / "out.jsonl", verifier="exact").correct == 1
