"""A pipeline of all steps, killed in each and out of disk in each: it continues to the same files and loses nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from scripted import Server, serving, verdict

STEPS = ("01-clean", "02-dedup", "03-decontaminate", "04-difficulty", "05-judge", "06-mix")


@pytest.fixture(scope="module")
def judge() -> Generator[Server]:
    """Serve a judge that keeps everything except ``4 + 4``."""
    with serving(lambda body, number: verdict("4 + 4" not in asked_about(body))) as server:
        yield server


def asked_about(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"]


@pytest.fixture
def pipeline(write_rows: Callable[..., Path], tiny_models: tuple[Path, Path], judge: Server) -> dict[str, Any]:
    """Return sums with a proof, a copy and a test problem among them. Every step drops something."""
    sums = [(a, b) for a in range(5) for b in range(5)]
    rows = [{"problem": f"what is {a} + {b} ?", "answer": str(a + b)} for a, b in sums]
    rows += [{"problem": "prove that 1 + 1", "answer": "2"}, {"problem": "What is 1 + 2 ?", "answer": "3"}]
    against = write_rows("test.jsonl", [{"problem": "what is 3 + 3?", "answer": "6"}])
    sampler = {"model": str(tiny_models[0]), "threads": 1}
    voter = {"base_url": judge.url, "model": "judge", "votes": 2, "attempts": 1, "concurrency": 1}
    return {
        "sources": [{"path": str(write_rows("sums.jsonl", rows)), "template": "{prompt}"}],
        "steps": [
            {"use": "clean"},
            {"use": "dedup"},
            {"use": "decontaminate", "against": {"held": {"path": str(against)}}},
            {"use": "difficulty", "sampler": sampler, "samples": 2, "max_tokens": 4, "keep": "all", "time_limit": 20},
            {"use": "judge", "flawed": False, "settings": {"judges": [voter]}},
            {"use": "mix", "size": 15},
        ],
    }


def test_out_of_disk_in_any_step_is_a_clear_error_and_the_run_goes_on(
    pipeline: dict[str, Any], run: Any, room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    run(pipeline)
    whole = run.files()
    assert {reason for step in STEPS for reason in run.reasons(step).values()} == {
        "proof", "duplicate (exact)", "in test set held", "judged flawed", "not drawn",
    }  # fmt: skip
    room = 64 + max((run.output / name).stat().st_size for name in ("pipeline.toml", "run.json"))
    for step in STEPS:
        for path in sorted((run.output / step).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        with (
            room_for(room),
            pytest.raises((RuntimeError, ValueError), match=rf"{step}.*(cannot|could not) be written") as caught,
        ):
            run(pipeline)
        assert any(word in str(caught.value) for word in ("free some space", "make room")), str(caught.value)
        assert not list(run.output.rglob("*.writing"))
        run(pipeline)
        assert run.files() == whole


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from magicrl.evaluation.samples import SampleFile
from magicrl.pipeline.build import run_pipeline
from magicrl.pipeline.pipeline_schema import PipelineConfig
from magicrl.pipeline.frame import Watcher
from magicrl_verifiers.served import AnswerFile

def counted(owner, name, place):
    really = getattr(owner, name)
    def instead(self, *rest):
        global left
        if where in str(place(self)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return really(self, *rest)
    setattr(owner, name, instead)

counted(Path, "replace", lambda path: path)
counted(SampleFile, "append", lambda file: file._path)
counted(AnswerFile, "put", lambda cache: cache._file.name)
config = PipelineConfig.model_validate(json.loads(sys.argv[1]), context={'folder': Path(sys.argv[2])})
for line in sys.stdin:
    where, number = line.split()
    left = int(number)
    child = os.fork()
    if child == 0:
        run_pipeline(config, output=Path(sys.argv[3]), watcher=Watcher())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs the pipeline once for every line ``PLACE NUMBER`` and dies before the so-manyth write there; imports once."""


@pytest.mark.slow
def test_a_run_killed_in_every_step_ends_with_the_same_files_and_asks_nothing_twice(
    pipeline: dict[str, Any], run: Any, tmp_path: Path, judge: Server
) -> None:
    """Send SIGKILL just before a file gets its name, a sample or a vote is written, step after step, in one folder."""
    run(pipeline)
    whole = run.files()
    before = len(judge.asked)
    output = tmp_path / "killed"
    words = [sys.executable, "-c", PROGRAM, json.dumps({"workers": 1, **pipeline}), str(tmp_path), str(output)]
    # 48 samples of 24 problems and 48 votes come one by one; `replace` names files that are written whole
    kills = [("sources", 2), ("01-clean", 1), ("02-dedup", 3), ("02-dedup", 9), ("references", 1)]
    kills += [("03-decontaminate", 3), ("04-difficulty", 30), ("05-judge", 20), ("06-mix", 1), ("/mixture/", 2)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runs:
        assert runs.stdin is not None
        assert runs.stdout is not None
        for where, number in [*kills, ("nowhere", 1)]:
            print(where, number, file=runs.stdin, flush=True)
            assert int(runs.stdout.readline()) == (0 if where == "nowhere" else -signal.SIGKILL), where
            if where == "04-difficulty":
                (samples,) = (output / where / "work").glob("samples-*.jsonl")
                assert len(samples.read_text().splitlines()) == 29
                kept = samples.read_text()
    assert {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*.parquet")} == whole
    (samples,) = (output / "04-difficulty" / "work").glob("samples-*.jsonl")
    assert samples.read_text().startswith(kept), "samples that were there stay"
    assert len(samples.read_text().splitlines()) == 48
    assert 48 <= len(judge.asked) - before <= 48 + 2, "only what was under way when the process died is asked for again"
