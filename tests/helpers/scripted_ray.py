"""A Ray without processes: it records the calls of a run, and its actors give scripted answers.

`ScriptedRay.see` makes the parts of a recipe with ``[cluster]`` like a run, by `ClusterParts`, and uses each once.
`fsdp_calls` makes a rank's model from the settings that were sent to the ranks. Its process group exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from builders import problem, request

from magicrl.config.schema import TrainConfig
from magicrl.records import Verdict

GPUS_OF_A_NODE = 8
NODE = "ab" * 28
"""Ray accepts only hexadecimal names of nodes."""


@dataclass(frozen=True, eq=False)
class Call:
    """A reference to the future result of an actor's method."""

    actor: Actor
    method: str
    arguments: tuple[Any, ...]


class Actor:
    """An actor of Ray as its caller sees it."""

    def __init__(self, kind: str, options: Mapping[str, Any], arguments: Sequence[Any]) -> None:
        self.kind, self.options, self.arguments = kind, dict(options), list(arguments)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Call(self, method, arguments))


class ScriptedRay:
    """Recorder of the calls of Ray.

    Attributes:
        actors: Every actor that was started.
        waits: Seconds of waiting for each kind of call.
        rank_settings: Configuration of each learner rank.
    """

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.waits: dict[str, list[float]] = {}
        self.rank_settings: list[Any] = []
        self.init: list[Any] = []
        self._silent = False  # calls stay without an answer

    def see(self, config: TrainConfig, root: Path) -> dict[str, Any]:
        """Make the parts of the recipe, use each once, and return the calls of Ray."""
        import ray  # noqa: TID251 - it is replaced here

        from magicrl.config.cluster_schema import ClusterConfig
        from magicrl.distributed import cluster_parts, runtime

        assert config.cluster is not None
        connects: list[Any] = []
        found: dict[str, Any] = {}
        node = {
            "NodeID": NODE,
            "NodeManagerAddress": "10.0.0.1",
            "Alive": True,
            "Resources": {"CPU": 64.0, "GPU": float(GPUS_OF_A_NODE), "memory": 1e12, "object_store_memory": 1e12},
        }
        group = SimpleNamespace(ready=lambda: Call(Actor("group", {}, ()), "ready", ()))
        connected: list[bool] = []

        def connect(address: Any, timeout: float) -> Any:
            connects.append(timeout)
            return SimpleNamespace(close=lambda: None)

        with ExitStack() as stack:
            for name, function in {
                "remote": lambda kind: self._template(kind.__name__),
                "get": self._get,
                "wait": self._wait,
                "put": lambda value: value,
                "kill": lambda *_, **__: None,
                "nodes": lambda: [node],
                "is_initialized": lambda: bool(connected),
                "init": lambda **options: (self.init.append(options.get("address")), connected.append(True)),
                "shutdown": lambda: connected.clear(),
            }.items():
                stack.enter_context(patch.object(ray, name, function))
            stack.enter_context(patch.object(cluster_parts, "placement_group", lambda *_, **__: group))
            stack.enter_context(patch.object(cluster_parts, "remove_placement_group", lambda _: None))
            stack.enter_context(patch.object(runtime.socket, "create_connection", connect))
            assert isinstance(config.cluster, ClusterConfig)
            parts = stack.enter_context(cluster_parts.cluster_parts(config))
            found = self._use(parts, config)
        replicas = [actor for actor in self.actors if actor.kind == "Replica"]
        ranks = [actor for actor in self.actors if actor.kind == "_RankActor"]
        judges = [actor for actor in self.actors if actor.kind == "JudgeActor"]
        count = config.cluster.learner.ranks
        return {
            "init": self.init,
            "ranks": len(self.rank_settings),
            "launches": len(ranks) // count,
            "replicas": len(replicas) - len(found.get("lost", ())),
            "replica/num_gpus": replicas[0].options["num_gpus"] if replicas else None,
            "replica/num_cpus": replicas[0].options["num_cpus"] if replicas else None,
            "replica/threads": replicas[0].arguments[1] if replicas else None,
            "judge/workers": judges[0].arguments[0].workers if judges else None,
            "waits/connect": connects[0] if connects else None,
            **{f"waits/{method}": sorted(set(seconds)) for method, seconds in self.waits.items()},
            **found,
        }

    def _use(self, parts: Any, config: TrainConfig) -> dict[str, Any]:
        """Use judge, learner and engine once each."""
        from magicrl.distributed.learner.launchers import LearnerLost
        from magicrl.distributed.runtime import ClusterError

        judge = parts.judge()
        judge.warm_up(["exact"])
        ticket = judge.submit(problem(), ["1"])
        judge.result(ticket)
        policy = parts.policy("model")
        self._script = config.run.name
        with suppress(LearnerLost):
            learner = parts.learner(policy)
            pool = parts.engine("model", None, learner, None)
            found: dict[str, Any] = {"pool": type(pool).__name__, "lost": []}
            try:
                if type(pool).__name__ == "EnginePool":
                    pool.load_weights({}, 0)
                pool.submit([request(0, [1, 2], size=1, limit=2)])
                self._silent = True
                pool.advance(0)
            except ClusterError as error:
                found["lost"].append(f"stopped: {error}")
            found["lost"] += [text for text in pool.lost if text not in found["lost"]]
            return found
        return {}

    # methods with Ray's names

    def _template(self, kind: str) -> Any:
        def made(options: Mapping[str, Any], *arguments: Any) -> Actor:
            self.actors.append(Actor(kind, options, arguments))
            return self.actors[-1]

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *given: made(options, *given)),
            remote=lambda *given: made({}, *given),
        )

    def _wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self._note(calls[0], timeout)
        silent = self._silent or calls[0].method == "collect"
        return ([], calls) if silent else (calls[:num_returns], calls[num_returns:])

    def _get(self, call: Any, timeout: float | None = None) -> Any:
        from ray.exceptions import RayActorError  # noqa: TID251

        actor, method, arguments = call.actor, call.method, call.arguments
        if timeout is not None and actor.kind != "_RankActor":
            self._note(call, timeout)
        if actor.kind == "_RankActor":
            return self._of_rank(*arguments)
        if self._script == "replicas die" and method == "load":
            raise RayActorError
        return {"start": _facts, "load": list, "judge": _judged}.get(method, lambda: None)()

    def _note(self, call: Any, seconds: float) -> None:
        actor, method, arguments = call.actor, call.method, call.arguments
        name = arguments[0] if actor.kind == "_RankActor" else method
        if seconds and name != "collect":
            self.waits.setdefault(name, []).append(float(round(seconds)))

    def _of_rank(self, method: str, *arguments: Any) -> Any:
        from magicrl.distributed.learner.launchers import Fault

        if method == "configure":
            if self._script == "ranks die":
                return Fault(died=True, text="died")
            self.rank_settings.append(arguments[0])
        values = {
            "address": ("10.0.0.1", 1),
            "open_store": ("10.0.0.1", 1),
            "location": (NODE, 8e10),
            "configure": "scripted",
        }
        return values.get(method)

    _script = ""


def _facts() -> Any:
    from magicrl.distributed.replica import ReplicaFacts
    from magicrl.rollout.protocol import Capabilities

    return ReplicaFacts(host="host", pid=1, node=NODE, max_context=96, capabilities=Capabilities())


def _judged() -> Any:
    from magicrl_verifiers.records import make_verdict

    verdict: Verdict = make_verdict("matched", decided_by="exact")
    return verdict, 0.0, 0.0


def fsdp_calls(settings: Any, ranks: int, root: Path) -> dict[str, Any]:
    """Return calls of FSDP2 by rank 0 of ``ranks`` for its model and for a pass that is not the last of an update."""
    import torch.distributed as dist  # noqa: TID251 - the border that this looks at
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from magicrl.distributed.learner import sharding

    asked: list[Mapping[str, Any]] = []
    told: list[tuple[str, bool]] = []
    shard = sharding.fully_shard

    def sharded(module: Any, **options: Any) -> Any:
        asked.append(options)
        return shard(module, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with patch.object(sharding, "fully_shard", sharded):
            meshes = shards, group = sharding.make_meshes(
                "cpu", settings.placement.sequence_parallel, settings.placement.shard_ranks
            )
            model = sharding.ShardedModel(settings, meshes, torch.device("cpu"), fill=False)
            kind = sharding.FSDPModule
            with (
                patch.object(kind, "set_requires_gradient_sync", lambda _, on: told.append(("sync", on))),
                patch.object(kind, "set_requires_all_reduce", lambda _, on: told.append(("all_reduce", on))),
                patch.object(kind, "set_is_last_backward", lambda _, on: None),
            ):
                model.begin_pass(last=False)
        sequence = None if group is None else dist.get_world_size(group)
        mesh = tuple(shards.shape)
    finally:
        dist.destroy_process_group()
    return {
        "mesh": mesh,
        "sequence": sequence,
        "reduce_dtype": {str(options["mp_policy"].reduce_dtype) for options in asked},
        "offload": type(asked[0]["offload_policy"]).__name__,
        "pass": told,
    }
