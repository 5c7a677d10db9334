"""A pipeline of all steps: killed in each, and out of disk in each, it goes on to the same files and loses nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from json_server import Asked, Reply, json_server

from magicrl.config.schema import TinyModelConfig
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny
from magicrl.pipeline.judge_votes import CRITERIA

STEPS = ("01-clean", "02-dedup", "03-decontaminate", "04-difficulty", "05-judge", "06-mix")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = TinyModelConfig(hidden_size=32, layers=1, heads=2, intermediate_size=64, max_context=64)
    made, tokenizer = make_tiny(config, ("what", "is", "0", "1", "2", "3", "4", "+", "?"), 0)
    save_policy(made, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def judge() -> Generator[tuple[str, list[str]]]:
    """A judge that keeps everything but ``4 + 4``: its address, and what it was asked, one text a vote."""
    asked: list[str] = []

    def answer(request: Asked) -> Reply:
        text = request.body["messages"][0]["content"]
        asked.append(text)
        good = "4 + 4" not in text
        said = {"reasons": "because", **dict.fromkeys(CRITERIA, good), "verdict": "keep" if good else "drop"}
        message = {"role": "assistant", "content": json.dumps(said)}
        return Reply(body={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    with json_server(answer) as url:
        yield url, asked


@pytest.fixture
def pipeline(write_rows: Callable[..., Path], model: Path, judge: tuple[str, list[str]]) -> dict[str, Any]:
    """Sums with a proof, a copy and a test problem among them; every step drops something."""
    sums = [(a, b) for a in range(5) for b in range(5)]
    rows = [{"problem": f"what is {a} + {b} ?", "answer": str(a + b)} for a, b in sums]
    rows += [{"problem": "prove that 1 + 1", "answer": "2"}, {"problem": "What is 1 + 2 ?", "answer": "3"}]
    against = write_rows("test.jsonl", [{"problem": "what is 3 + 3?", "answer": "6"}])
    sampler = {"model": str(model), "threads": 1}
    voter = {"base_url": judge[0], "model": "judge", "votes": 2, "attempts": 1, "concurrency": 1}
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
        with room_for(room), pytest.raises(ValueError, match=rf"{step}.*(cannot|could not) be written") as caught:
            run(pipeline)
        assert any(word in str(caught.value) for word in ("free some space", "make room")), str(caught.value)
        run(pipeline)
        assert run.files() == whole


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from magicrl.evaluation.samples import SampleFile
from magicrl.pipeline.build import build
from magicrl.pipeline.judge_votes import VoteCache
from magicrl.pipeline.pipeline_schema import PipelineConfig
from magicrl.pipeline.frame import Watcher

where, left = sys.argv[4], int(sys.argv[5])

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
counted(VoteCache, "put", lambda cache: cache._file.name)
config = PipelineConfig.model_validate(json.loads(sys.argv[1]), context={'folder': Path(sys.argv[2])})
build(config, output=Path(sys.argv[3]), watcher=Watcher())
"""


@pytest.mark.slow
def test_a_run_killed_in_every_step_ends_with_the_same_files_and_asks_nothing_twice(
    pipeline: dict[str, Any], run: Any, tmp_path: Path, judge: tuple[str, list[str]]
) -> None:
    """SIGKILL just before a file gets its name, a sample or a vote is written, step after step, in one run folder."""
    run(pipeline)
    whole = run.files()
    before = Counter(judge[1])
    output = tmp_path / "killed"
    words = [sys.executable, "-c", PROGRAM, json.dumps({"workers": 1, **pipeline}), str(tmp_path), str(output)]
    # 48 samples of 24 problems and 48 votes come one by one; `replace` names what is written whole
    kills = [("sources", 2), ("01-clean", 1), ("02-dedup", 3), ("02-dedup", 9), ("references", 1)]
    kills += [("03-decontaminate", 3), ("04-difficulty", 30), ("05-judge", 20), ("06-mix", 1), ("/mixture/", 2)]
    for where, number in kills:
        killed = subprocess.run([*words, where, str(number)], check=False)
        assert killed.returncode == -signal.SIGKILL, where
        if where == "04-difficulty":
            (samples,) = (output / where / "work").glob("samples-*.jsonl")
            assert len(samples.read_text().splitlines()) == 29
            kept = samples.read_text()
    subprocess.run([*words, "nowhere", "1"], check=True)
    assert {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*.parquet")} == whole
    (samples,) = (output / "04-difficulty" / "work").glob("samples-*.jsonl")
    assert samples.read_text().startswith(kept), "samples that were there stay"
    assert len(samples.read_text().splitlines()) == 48
    asked = Counter(judge[1]) - before
    assert 48 <= asked.total() <= 48 + 2, "only what was under way when the process died is asked for again"
