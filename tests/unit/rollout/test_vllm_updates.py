"""New weights for vLLM while it samples: responses that continue over old keys and values, and those that never do.

vLLM runs in a separate process, as in ``test_vllm_engine.py``, which writes what it observed. The tests check it.
"""

from __future__ import annotations

import importlib.util
import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_samples import run_scenario, save_tiny

from magicrl.config.rollout_schema import VllmConfig
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.vllm_engine import VllmEngine

ROWS, GROUP, LIMIT, PROMPT, FORCED = 6, 4, 16, 40, 9

SCENARIO = """
import json, sys
from pathlib import Path
import torch
from magicrl.models.loading import described_model, load_policy
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.config.rollout_schema import VllmConfig
from magicrl.config.model_schema import ModelConfig
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from vllm_samples import rows, sample_request, scored

folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
start = str(folder / "model")
policy = load_policy(start, dtype="float32", device=torch.device("cpu"))
learner = LocalLearner(policy.model, LearnerSettings(model=ModelConfig(dtype="float32")), tokenizer=policy.tokenizer,
                       valid_vocab=policy.valid_vocab)
settings = EngineSettings(
    model=start, memory_limit_mb=64, max_rows=given["rows"], vllm=VllmConfig(keep_caches=given["keep"])
)
engine = VllmEngine(
    start, settings, end_tokens=frozenset(), decode=lambda tokens: "", valid_vocab=policy.valid_vocab
)
core = engine._engine.engine_core.engine_core
turns, schedule = [], core.scheduler.schedule

def counted(*arguments):
    found = schedule(*arguments)
    turns.append(dict(found.num_scheduled_tokens))
    return found

core.scheduler.schedule = counted

def prompt(draw):
    return [(5 + draw + n) % 11 + 2 for n in range(given["prompt"])]

def request(draw):
    return sample_request(draw, prompt(draw), given["group"], given["limit"])

def forcing(weights):
    # no layer adds anything, so that a token's hidden state is its own embedding, and one row of the head stands out
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in found.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "model.norm.weight")):
            tensor.fill_(1.0)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor[given["forced"]] = 10.0
    return found

own = {name: w.clone() for name, w in learner.weights().items()}
generations = [{name: w * (1 + 0.2 * n) for name, w in own.items()} for n in range(2)] + [forcing(own)]

def under_way():
    return {state.request_id: state.detokenizer.num_output_tokens()
            for state in engine._engine.output_processor.request_states.values()}

seen = {}
for name, version in (("perturbed", 1), ("forced", 2)):
    engine.load_weights(generations[0], 0)
    engine.submit([request(draw) for draw in range(3)])
    before = engine.advance(given["rows"] * 5)
    running = {request: tokens for request, tokens in under_way().items() if tokens}
    turns.clear()
    engine.load_weights(generations[version], version)
    engine.submit([request(0)])  # a prompt whose keys are there, of the old weights
    found = scored(rows([*before, *engine.finished()]), learner, generations, prompt)
    first = {request: next(turn[request] for turn in turns if request in turn) for request in running}
    seen[name] = {"rows": found, "running": list(running.values()), "first": list(first.values())}
engine.close()
(folder / f"seen-{given['keep']}.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module", params=[True, False], ids=["kept", "computed again"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("updates")
    save_tiny(folder / "model")
    given = {"keep": request.param, "rows": ROWS, "group": GROUP, "limit": LIMIT, "prompt": PROMPT, "forced": FORCED}
    run_scenario(SCENARIO, folder, json.dumps(given))
    return {"keep": request.param, **json.loads((folder / f"seen-{request.param}.json").read_text())}


def spanning(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if len(set(row["versions"])) > 1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
class TestUnderWay:
    def test_it_goes_on_without_a_prefill_only_where_caches_are_kept(self, seen: dict[str, Any]) -> None:
        for name in ("perturbed", "forced"):
            running, first = seen[name]["running"], seen[name]["first"]
            assert len(running) == ROWS
            if seen["keep"]:
                assert first == [1] * ROWS, "a turn of one token each"
            else:
                assert max(first) > PROMPT, "the prompt and all that was sampled"
                assert min(first) > 1, "also of those that share a block of the prompt with the first of their group"

    def test_every_sample_comes_once_and_its_versions_part_at_the_update(self, seen: dict[str, Any]) -> None:
        for name, version in (("perturbed", 1), ("forced", 2)):
            rows = seen[name]["rows"]
            places = sorted((row["draw"], row["index"]) for row in rows)
            assert places == sorted([(draw, i) for draw in (0, 0, 1, 2) for i in range(GROUP)])
            assert all(len(row["tokens"]) == LIMIT for row in rows)
            assert len(spanning(rows)) == ROWS
            assert all(row["versions"] == sorted(row["versions"]) for row in rows)
            assert {v for row in rows for v in row["versions"]} == {0, version}

    def test_tokens_after_it_are_of_the_new_weights(self, seen: dict[str, Any]) -> None:
        for row in seen["forced"]["rows"]:
            new = [token for token, version in zip(row["tokens"], row["versions"], strict=True) if version == 2]
            assert set(new) <= {FORCED}
        assert sum(token == FORCED for row in spanning(seen["forced"]["rows"]) for token in row["tokens"]) > ROWS

    def test_log_probs_are_the_learners_but_those_over_older_keys(self, seen: dict[str, Any]) -> None:
        rows = seen["perturbed"]["rows"]
        stale: list[float] = []
        for row in rows:
            wanted = np.array([row["learned"][version][n] for n, version in enumerate(row["versions"])])
            gaps = np.abs(np.array(row["logprobs"]) - wanted)
            over_older = np.array(row["versions"]) == 1 if row in spanning(rows) else np.zeros(LIMIT, dtype=bool)
            assert gaps[~over_older].max() < 1e-4
            stale += gaps[over_older].tolist()
        if seen["keep"]:
            assert max(stale) > 1e-3, "the keys were of the old weights"
        else:
            assert max(stale) < 1e-4


class TurnAhead:
    """A vLLM engine that has begun a turn before it reported the previous one, as on a GPU."""

    def __init__(self, told: list[str]) -> None:
        self.batch_queue: Any = deque(["turn under the old weights"])
        self.engine_core = SimpleNamespace(engine_core=self)
        self.output_processor = SimpleNamespace(request_states={})
        self.told = told

    def pause_scheduler(self, mode: str, *, clear_cache: bool) -> None:
        self.told.append(f"{mode}, clear {clear_cache}")

    def resume_scheduler(self) -> None:
        self.told.append("resume")

    def is_sleeping(self) -> bool:
        return False

    def set_weight_version(self, version: str) -> None:
        self.told.append(f"version {version}")

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.told.append(f"reset, running {reset_running_requests}")


def updated(told: list[str], monkeypatch: pytest.MonkeyPatch, *, keep: bool, ahead: bool = True) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    core = TurnAhead(told)
    if not ahead:
        core.batch_queue = None
    state = SimpleNamespace(external_req_id="0:1", detokenizer=SimpleNamespace(num_output_tokens=lambda: 0))
    begun = SimpleNamespace(external_req_id="0:0", detokenizer=SimpleNamespace(num_output_tokens=lambda: 3))
    core.output_processor.request_states = {"a": begun, "b": state}
    core.abort_request = lambda names: told.append(f"abort {names}")  # pyright: ignore[reportAttributeAccessIssue]
    given: dict[str, Any] = {"0:0": "begun", "0:1": "not begun"}
    settings = EngineSettings(model="x", vllm=VllmConfig(keep_caches=keep))
    fields = {"_engine": core, "settings": settings, "_loads": 0, "_check": None, "_pending": given, "_adapters": None}
    for name, value in {**fields, "weights": SimpleNamespace(load=lambda _: told.append("weights"))}.items():
        setattr(engine, name, value)
    monkeypatch.setattr(engine, "_advance", lambda: told.append(core.batch_queue.pop()))
    monkeypatch.setattr(engine, "_add", lambda asked: told.append(f"add {asked}"))
    engine.load_weights({}, 1)
    return engine


def test_a_turn_begun_ahead_is_the_old_weights_and_what_has_no_token_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    engine = updated(told, monkeypatch, keep=True)
    turn = ["keep, clear False", "turn under the old weights", "resume"]
    assert told == [*turn, "weights", "version 1", "abort ['0:1']", "add not begun"]
    assert engine._loads == 1, "what is added from now on shares keys with nothing before"


def test_where_caches_are_not_kept_vllm_forgets_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    updated(told, monkeypatch, keep=False, ahead=False)
    assert told == ["weights", "version 1", "reset, running True"]
