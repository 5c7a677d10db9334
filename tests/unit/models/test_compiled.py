"""Compiled decoder layers compared with the model's own: log-probs, gradients, updates, number of graphs, resumed bits.

With the backend ``eager``, torch traces and splits as for its compiler, and runs the traced code unchanged, which takes
seconds. The slow tests compile.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch
from builders import train_sample
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from magicrl.config.model_schema import ModelConfig
from magicrl.models import compiled
from magicrl.models.compiled import check_compiled, check_compiler
from magicrl.models.scorer import PolicyScorer
from magicrl.records import TrainBatch, TrainSample
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

SIZES = builders.SIZES | {"num_hidden_layers": 2}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES | {"num_key_value_heads": 1}, head_dim=16),
}
CONTROLS = Controls(learning_rate=1e-3, temperature=0.7)


@pytest.fixture(autouse=True)
def fresh() -> Generator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with = torch.compile

    def uncompiled(forward: Any, *, dynamic: bool, options: dict[str, Any]) -> Any:
        assert options
        return compile_with(forward, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", uncompiled)


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def mixed_samples(seed: int, count: int = 12, shared: bool = True) -> list[TrainSample]:
    """Return responses of 1 to 30 tokens, three to a prompt or each with a separate prompt."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 40, size=rng.integers(2, 25)).tolist() for _ in range(count)]
    return [
        train_sample(
            prompts[i // 3 if shared else i],
            rng.integers(2, 40, size=rng.integers(1, 31)).tolist(),
            group_index=i // 3,
            sample_index=i,
            advantage=float(rng.normal()),
        )
        for i in range(count)
    ]


def learner(*, compile: bool, kind: str = "llama", start: torch.dtype = torch.float32, **model: Any) -> LocalLearner:
    settings = {"dtype": "float32", "micro_batch_tokens": 150, "head_chunk_tokens": 16, "compile": compile, **model}
    return LocalLearner(model_of(kind, start), LearnerSettings(model=ModelConfig(**settings)))


def gradients(one: LocalLearner, samples: list[TrainSample]) -> dict[str, torch.Tensor]:
    batch = TrainBatch.of(samples)
    one.accumulate(batch.samples, one.objective.sample_weights(batch), CONTROLS, one.objective.statistics(batch))
    found = {name: value.clone() for name, value in one.gradients().items()}
    one.optimizer.forget()
    return found


def assert_equal_but_for_rounding(own: LocalLearner, other: LocalLearner, tolerance: float = 1e-5) -> None:
    """Compare log-probs, gradients, and weights after an update, on prompts that are shared and on others."""
    for seed, shared in ((0, True), (1, False)):
        samples = mixed_samples(seed, shared=shared)
        for mine, theirs in zip(own.logprobs(samples, 0.7), other.logprobs(samples, 0.7), strict=True):
            for values, expected in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(values, expected, rtol=tolerance, atol=tolerance)
        found, expected = gradients(own, samples), gradients(other, samples)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((found[name] - gradient).norm()) <= 10 * tolerance * float(gradient.norm()) + 1e-12, name
    updates = [one.update(TrainBatch.of(mixed_samples(2)), CONTROLS) for one in (own, other)]
    assert updates[0]["loss"] == pytest.approx(updates[1]["loss"], rel=10 * tolerance, abs=10 * tolerance)
    assert own.weights().keys() == other.weights().keys()


@pytest.mark.usefixtures("traced")
def test_traced_layers_give_the_same() -> None:
    own, other = (learner(compile=c, start=torch.float64, checkpoint_above_tokens=80) for c in (True, False))
    assert_equal_but_for_rounding(own, other, 1e-9)


@pytest.mark.slow
def test_compiled_layers_give_the_same() -> None:
    own, other = (learner(compile=c, kind="qwen3", gradient_checkpointing=True) for c in (True, False))
    assert_equal_but_for_rounding(own, other)


@pytest.mark.slow
def test_compiled_layers_in_bfloat16() -> None:
    """Compare with float32: as close as the model's own layers, since one kernel rounds once."""
    exact, own, other = (
        learner(compile=c, dtype=dtype) for c, dtype in ((False, "float32"), (True, "bfloat16"), (False, "bfloat16"))
    )
    samples = mixed_samples(0)
    expected = np.concatenate(exact.logprobs(samples, 0.7)[0])
    errors = [np.abs(np.concatenate(one.logprobs(samples, 0.7)[0]) - expected).mean() for one in (own, other)]
    assert 0 < errors[0] < 1.2 * errors[1]
    wanted = gradients(exact, samples)
    distances = [
        sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
        for found in (gradients(own, samples), gradients(other, samples))
    ]
    assert 0 < distances[0] < 1.5 * distances[1]
    own.update(TrainBatch.of(samples), CONTROLS)


_RUN = """
import json, sys
import torch
sys.path[:0] = json.loads(sys.argv[2])
from test_compiled import CONTROLS, learner, mixed_samples
from magicrl.records import TrainBatch
began, read, written = json.loads(sys.argv[1])
torch.set_num_threads(2)
one = learner(compile=True)
if began:
    one.restore(torch.load(f"{read}/{began}.pt"))
for step in range(began, 4):
    one.update(TrainBatch.of(mixed_samples(step, count=3 + 5 * step, shared=step % 2 == 0)), CONTROLS)
    torch.save(dict(one.state()), f"{written}/{step + 1}.pt")
"""


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    """Resume in another process, which has no compiled code, and whose first batch has other lengths."""

    def run(began: int, name: str, **environment: str) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        paths = [str(Path(__file__).parent), str(Path(builders.__file__).parent)]
        told = json.dumps([began, str(tmp_path / "whole"), str(folder)])
        subprocess.run([sys.executable, "-c", _RUN, told, json.dumps(paths)], check=True, env=os.environ | environment)
        return torch.load(folder / "4.pt")

    whole, resumed = run(0, "whole"), run(2, "resumed", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert whole.keys() == resumed.keys()
    tensors = [key for key, value in whole.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 50
    assert all(torch.equal(whole[key], resumed[key]) for key in tensors)


@pytest.mark.usefixtures("traced")
def test_all_graphs_are_made_at_the_start() -> None:
    one = learner(compile=True, checkpoint_above_tokens=80)
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 8  # four pieces of a layer, with gradient and without
    lengths: set[int] = set()
    for seed in range(30):
        samples = mixed_samples(seed, count=1 + seed % 7, shared=seed % 2 == 0)
        lengths |= {batch.input_ids.shape[1] for _, batch in one.scorer.micro_batches(samples)}
        one.logprobs(samples, 1.0)
        one.update(TrainBatch.of(samples), CONTROLS)
    assert len(lengths) > 30
    assert min(lengths) < 20 < 80 < max(lengths)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.usefixtures("traced")
def test_names_are_the_models_and_a_copy_has_its_own_weights() -> None:
    one = learner(compile=True)
    assert one.weights().keys() == learner(compile=False).weights().keys()
    assert not any("_orig_mod" in name for name in (*one.weights(), *one.state(), *one.scorer.model.state_dict()))
    twin = copy.deepcopy(one.scorer.model)
    before = one.logprobs(mixed_samples(0), 1.0)[0]
    with torch.no_grad():
        for parameter in twin.model.layers.parameters():
            parameter.zero_()
    after = one.logprobs(mixed_samples(0), 1.0)[0]
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    batch = next(iter(one.scorer.micro_batches(mixed_samples(0))))[1]
    hidden = twin.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        attention_context=batch.attention,
    ).last_hidden_state
    embedded = twin.model.norm(twin.model.embed_tokens(batch.input_ids))
    torch.testing.assert_close(hidden, embedded)  # layers of zeros add nothing


@pytest.mark.slow
def test_checkpointing_keeps_less() -> None:
    def kept(above: int | None) -> int:
        scorer = PolicyScorer(model_of(), ModelConfig(checkpoint_above_tokens=above, compile=True))
        batch = next(iter(scorer.micro_batches(mixed_samples(0))))[1]
        sizes: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scorer.forward(batch, 1.0)
        return sum(sizes)

    assert kept(1) < 0.7 * kept(None)


@pytest.mark.usefixtures("traced")
def test_layers_that_are_compiled_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = compiled._Compiled.__call__
    monkeypatch.setattr(compiled._Compiled, "__call__", lambda *a, **k: 1.1 * forward(*a, **k))
    with pytest.raises(ValueError, match=r"differ from its own by 0.* leave out model.compile"):
        PolicyScorer(model_of(), ModelConfig(compile=True))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match=r"compiles with g\+\+ here, which is not found.*CXX.*leave out model.compile"):
        check_compiler(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"compiles with g\+\+ here"):
        PolicyScorer(model_of(), ModelConfig(compile=True))
    monkeypatch.setattr(compiled, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="Triton"):
        check_compiler(torch.device("cuda"))
    monkeypatch.setattr(compiled, "find_spec", lambda _name: "found")
    with pytest.raises(ValueError, match="gcc or clang"):
        check_compiler(torch.device("cuda"))
    program = tmp_path / "my-compiler"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", f"{program} -O2")
    check_compiler(torch.device("cpu"))


def test_what_cannot_be_compiled_is_refused() -> None:
    check_compiled(CONFIGS["llama"])
    with pytest.raises(ValueError, match=r"'mixtral'.* mixture of experts.*leave out model.compile"):
        check_compiled(MixtralConfig())
    stateful = Qwen3Config(**SIZES, layer_types=["linear_attention"] * 2)
    with pytest.raises(ValueError, match=r"carry a state.*leave out model.compile"):
        check_compiled(stateful)
    for name in ("exact", "router_replay"):
        with pytest.raises(ValueError, match=f"compile with {name}.*leave one of them out"):
            ModelConfig.model_validate({"compile": True, name: True})
