"""One replica without Ray: its loop generates, and weights, probes and interrupts come between two turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch

from magicrl.config.errors import RecipeError
from magicrl.config.schema import TrainConfig
from magicrl.distributed.cluster_parts import make_replica_engine
from magicrl.distributed.replica import Replica
from magicrl.distributed.tensors import pack, unpack
from magicrl.records import Completion, RolloutRequest
from magicrl.rollout.protocol import Capabilities, RolloutEngine
from magicrl.training.assemble import make_training_engine
from magicrl.training.start_checks import check_run


def asked(draw: int, *, limit: int = 12) -> RolloutRequest:
    return builders.request(draw, [5, 6, 7 + draw], size=3, limit=limit, seed=1)


def test_weights_travel_with_the_same_bits_and_without_a_copy() -> None:
    weights = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(4), "c": torch.randn(6, 2).T}
    payload = pack(weights)
    assert payload["a"][1].dtype == np.int16
    there = unpack(payload)
    for name, tensor in weights.items():
        assert there[name].dtype == tensor.dtype
        assert torch.equal(there[name], tensor)
    assert there["b"].data_ptr() == weights["b"].data_ptr()


@pytest.fixture
def engine(make_recipe: Callable[..., TrainConfig]) -> Any:
    from magicrl.models.loading import described_model
    from magicrl.models.prompts import PromptEncoder

    recipe = make_recipe()
    start = recipe.start.model or ""
    return make_training_engine(recipe, start, PromptEncoder(described_model(start).tokenizer, 64))


class Driven:
    """A started replica whose loop runs while one of its calls is waited for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.runner = asyncio.Runner()
        self.replica = Replica(make, threads=1)
        self.run(self.replica.start())

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def load(self, payload: Any, version: int, probes: Any = ()) -> Any:
        return self.run(self.replica.load(payload, version, probes))

    def submit(self, work: Any) -> None:
        self.run(self.replica.submit(work))

    def collected(self, count: int) -> dict[tuple[int, int], Any]:
        found: dict[tuple[int, int], Any] = {}
        while len(found) < count:
            for order, index, completion in self.run(self.replica.collect())[0]:
                assert (order, index) not in found
                found[order, index] = completion
        return found


@pytest.fixture
def replica(engine: Any) -> Generator[Driven]:
    found = Driven(lambda: engine)
    yield found
    found.runner.close()
    engine.close()


def payload_of(engine: Any) -> Any:
    return pack({name: p.detach().clone() for name, p in engine._model.named_parameters()})


def test_it_delivers_every_sample_once_with_the_version_that_sampled_it(replica: Driven, engine: Any) -> None:
    payload = payload_of(engine)
    replica.load(payload, 4)
    replica.submit([(10, asked(0)), (11, asked(1))])
    first = replica.collected(6)
    assert set(first) == {(order, index) for order in (10, 11) for index in range(3)}
    assert {c.policy_version for c in first.values()} == {4}
    replica.submit([(12, asked(0))])
    again = replica.collected(3)
    for index in range(3):
        assert again[12, index].tokens.tolist() == first[10, index].tokens.tolist()


def test_an_engine_of_ones_own_is_a_replica_s(make_recipe: Callable[..., TrainConfig]) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "engine.py"
    recipe = make_recipe({"rollout": {"replicas": 2}}, rollout={"engine": f"{example}:make"})
    made = make_replica_engine(recipe, recipe.start.model or "", gpus=1)
    replica = Driven(lambda: made)
    with replica.runner:
        assert len(replica.load(payload_of(made), 3, [asked(7, limit=4)])) == 1
        replica.submit([(0, asked(0)), (1, asked(1))])
        assert {completion.policy_version for completion in replica.collected(6).values()} == {3}


def test_an_engine_that_cannot_be_imported_is_refused_before_anything_is_made(
    make_recipe: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    recipe = make_recipe({"rollout": {"replicas": 2}}, rollout={"engine": f"{tmp_path}/mine.py:make"})
    with pytest.raises(RecipeError, match=r"mine\.py cannot be imported: ModuleNotFoundError") as refused:
        check_run(recipe, tmp_path / "run", resume=False)
    assert refused.value.key == "rollout.engine"
    assert not (tmp_path / "run").exists()


def test_probes_are_answered_beside_work_that_goes_on(replica: Driven, engine: Any) -> None:
    payload = payload_of(engine)
    replica.load(payload, 0)
    probes = [asked(7, limit=4), asked(8, limit=4)]
    alone = replica.load(payload, 0, probes)
    replica.submit([(n, asked(n, limit=100)) for n in range(8)])
    groups = replica.load(payload, 1, probes)
    for group, before, probe in zip(groups, alone, probes, strict=True):
        assert group.request is probe
        for completion, other in zip(group.completions, before.completions, strict=True):
            assert completion.tokens.tolist() == other.tokens.tolist()
            assert completion.policy_version == 1
    found = replica.collected(24)
    assert all((len(c.token_versions) and set(c.token_versions)) <= {0, 1} for c in found.values())


def test_new_weights_come_between_two_tokens_of_what_is_under_way(
    replica: Driven, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No response has to end first: the weights are requested in the third turn and sample from the fourth on."""
    payload, turn, turns = payload_of(engine), engine.turn, 0
    loading: list[Any] = []

    def watched() -> Any:
        nonlocal turns
        turns += 1
        if turns == 3:
            loading.append(asyncio.create_task(replica.replica.load(payload, 1, ())))
        return turn()

    monkeypatch.setattr(engine, "turn", watched)
    replica.load(payload, 0)
    replica.submit([(n, asked(n, limit=40)) for n in range(4)])
    spans = [c.version_spans for c in replica.collected(12).values() if len(c) > 4]
    assert len(spans) >= 6
    assert {span[0] for span in spans} == {(0, 4)}, "two of the first turn, which also reads the prompt"
    assert all([version for version, _ in span] == [0, 1] for span in spans)


class OneByOne(RolloutEngine):
    """An engine without `Capabilities.in_flight`, such as a custom one."""

    capabilities = Capabilities(turns=False)
    _max_context = 64

    def generate(self, request: RolloutRequest) -> list[Completion]:
        return [builders.completion([3], policy_version=self._version) for _ in request.indices]

    def load_weights(self, weights: Any, version: int) -> None:
        self._version = version


def test_probes_of_an_engine_without_requests_in_flight_lose_none() -> None:
    engine = OneByOne()
    engine.submit([asked(0), asked(1)])
    replica = Replica(lambda: engine, threads=1)
    with asyncio.Runner() as runner:
        facts = runner.run(replica.start())
        assert facts.capabilities == engine.capabilities
        (group,) = runner.run(replica.load({}, 1, [asked(7)]))
    assert group.request.draw == 7
    assert [group.request.draw for group in engine.finished()] == [0, 1]


def test_an_interrupt_drops_work_and_what_was_not_fetched(replica: Driven, engine: Any) -> None:
    replica.load(payload_of(engine), 0)
    replica.submit([(n, asked(n, limit=100)) for n in range(8)])
    replica.run(replica.replica.interrupt())
    replica.submit([(99, asked(3, limit=4))])
    assert set(replica.collected(3)) == {(99, index) for index in range(3)}


def test_what_the_engine_refuses_reaches_the_one_who_collects(replica: Driven, engine: Any) -> None:
    replica.load(payload_of(engine), 0)
    replica.submit([(0, asked(0, limit=4))])
    ended = replica.run(until_ended(replica.replica))
    replica.submit([(1, asked(0, limit=5000))])
    samples, *_ = replica.run(replica.replica.collect())
    assert len(samples) == ended == 3, "what had ended is delivered first"
    with pytest.raises(ValueError, match="exceeds the context"):
        replica.run(replica.replica.collect())


async def until_ended(replica: Replica) -> int:
    """Run the loop until nothing is under way, and return how many samples wait to be collected."""
    while replica._orders:
        await asyncio.sleep(0)
    return len(replica._ended)
