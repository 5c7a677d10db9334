"""Parts that the run's process holds on a cluster, decided from the recipe and Ray's count of the nodes.

Also the placement of ranks on nodes with GPUs (by a simulated count): together, so that wide replicas have space.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from json_server import free_port
from model_cases import CASES, CONTEXT, WORDS, plain_model

pytest.importorskip("ray")

from magicrl.config.errors import RecipeError
from magicrl.config.schema import TrainConfig
from magicrl.distributed import cluster_parts, doctor
from magicrl.distributed.cluster_parts import ClusterParts, rank_options
from magicrl.distributed.doctor import NodeFacts, _of_node, examine_cluster
from magicrl.distributed.learner.learner import DistributedLearner, ShardedReference
from magicrl.distributed.learner.sharding import RankSettings
from magicrl.distributed.runtime import ClusterError, Node, check_room, node_network, nodes
from magicrl.models.loading import LoadedModel, load_policy, save_policy
from magicrl.models.small_models import make_tokenizer
from magicrl.planning.memory import NodeRoom, beside_ranks
from magicrl.training import assemble
from magicrl.training.objective import LearnerSettings

VLLM = {"engine": "vllm", "max_rows": 8}


@pytest.fixture
def parts(
    make_recipe: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., cluster_parts.ClusterParts]:
    """Return parts of a recipe on two nodes that Ray would count like this."""

    def make(
        cluster: dict[str, Any], *, gpus: int = 0, output: Path | None = None, **sections: Any
    ) -> cluster_parts.ClusterParts:
        alive = [replace(node(name, cpus=16.0), gpus=float(gpus)) for name in ("a", "b")]
        monkeypatch.setattr(cluster_parts, "nodes", lambda: alive)
        recipe = make_recipe(cluster, run={"name": "parts", "device": "auto"}, **sections)
        return cluster_parts.ClusterParts(recipe, output)

    return make


def node(name: str, *, cpus: float) -> Node:
    return Node(id=name, address=name, cpus=cpus, gpus=0.0, object_store=1e9, head=name == "a")


CONNECT = """
import sys
from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.errors import RecipeError
from magicrl.distributed.runtime import connected
for address in sys.argv[1:]:
    try:
        with connected(ClusterConfig.model_validate({"address": address, "timeouts": {"connect": 0.1}})):
            print("connected")
    except RecipeError as error:
        print(error)
"""


def test_an_address_that_does_not_answer_is_an_error_after_the_time_to_connect() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        silent = "{}:{}".format(*server.getsockname())
        # the queue's only place is occupied, and nobody accepts: further connections get no answer
        with socket.create_connection(server.getsockname()):
            done = subprocess.run(
                [sys.executable, "-c", CONNECT, "auto", silent, f"ray://{silent}"],
                env=os.environ | {"RAY_ADDRESS": silent},
                check=True,
                capture_output=True,
                text=True,
                timeout=60,  # Ray itself waits for minutes
            )
    assert done.stdout.count(f"{silent} (timed out)") == 3, done.stdout


def test_an_actor_needs_a_node_that_has_room_for_all_of_it() -> None:
    alive = [node("a", cpus=3), node("b", cpus=3)]
    check_room("replicas", 2, cpus=2, key="k", alive=alive)
    with pytest.raises(RecipeError, match=r"3 replicas of 2 CPUs each do not fit, only 2 would \(a/a: 3 CPUs, b/b: 3"):
        check_room("replicas", 3, cpus=2, key="k", alive=alive)


def test_gloo_uses_the_interface_of_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    loopback = next(
        name for name, places in psutil.net_if_addrs().items() if any(p.address == "127.0.0.1" for p in places)
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    assert node_network() == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "the user's"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    node_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback


@pytest.mark.parametrize(("behind", "status"), [(0.001, "ok"), (5.0, "warning"), (-5.0, "warning")])
def test_a_clock_that_is_ahead_or_behind_is_reported(behind: float, status: str) -> None:
    facts = NodeFacts(
        versions={}, memory=(1 << 34, 1 << 35), shared_memory=1 << 34,
        gpus=(), threads=2,
    )  # fmt: skip
    found = {f.what: f for f in _of_node(node("a", cpus=2), facts, need=1, behind=behind)}
    assert found["clock of a/a"].status == status
    assert {finding.status for what, finding in found.items() if "clock" not in what} == {"ok"}


def test_the_start_of_a_probe_is_not_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(doctor.Probe):
        def facts(self) -> NodeFacts:
            now[0] += 10.0  # as an import of torch from a network disk
            return NodeFacts(versions={}, memory=(1, 1), shared_memory=1, gpus=(), threads=1)

        def read(self, values: Any) -> float:
            return 0.0

    def start(_: Node) -> Any:
        probe = Slow()
        names = ("facts", "clock", "read")
        return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(probe, name)) for name in names})

    now = [1000.0]
    monkeypatch.setattr(doctor.time, "time", lambda: now[0])
    monkeypatch.setattr(doctor, "waited_for", lambda value, *_: value)
    monkeypatch.setattr("ray.put", lambda _: None)
    found = {f.what: f for f in examine_cluster([node("a", cpus=2)], megabytes=1, probe=start)}
    assert found["clock of a/a"].text == "+0 ms behind"


@pytest.mark.parametrize(("ranks", "gpus", "here"), [(1, 0, True), (2, 0, False), (1, 4, False), (2, 4, False)])
def test_the_runs_process_holds_weights_only_where_it_trains_itself(
    parts: Callable[..., cluster_parts.ClusterParts], make_recipe: Any, ranks: int, gpus: int, here: bool
) -> None:
    start = make_recipe().start.model
    policy = parts({"learner": {"ranks": ranks}}, gpus=gpus).policy(start)
    named = dict(policy.model.named_parameters())
    assert {parameter.device.type for parameter in named.values()} == {"cpu" if here else "meta"}
    whole = load_policy(start)
    assert {name: p.shape for name, p in named.items()} == {n: p.shape for n, p in whole.model.named_parameters()}
    for fact in ("folder", "max_context", "valid_vocab", "end_tokens", "licence"):
        assert getattr(policy, fact) == getattr(whole, fact)


@pytest.mark.parametrize(("mode", "other"), [("none", None), ("monitor", None), ("monitor", "another")])
def test_the_reference_is_held_by_the_ranks(
    parts: Callable[..., ClusterParts],
    make_recipe: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    other: str | None,
) -> None:
    """Use the starting model or another one: the ranks load it, and this process loads no second model."""
    start = make_recipe().start.model
    if other is not None:
        other = str(shutil.copytree(start, tmp_path / other))
    told: dict[str, Any] = {}

    class Ranks(DistributedLearner):
        def __init__(self, policy: LoadedModel, learning: LearnerSettings, **settings: Any) -> None:
            told.update(settings)
            reference = told["reference"]
            self._settings = RankSettings(folder=policy.folder, reference=reference and reference.folder)

    monkeypatch.setattr(cluster_parts, "DistributedLearner", Ranks)
    made = parts({"learner": {"ranks": 2}}, reference={"mode": mode, "model": other})
    learner = made.learner(made.policy(start))
    monkeypatch.setattr("magicrl.training.assemble.load_policy", None)
    found = made.reference(start, learner)
    if mode == "none":
        assert told["reference"] is None
        assert found is None
        return
    assert told["reference"].folder == (other or start)
    assert {p.device.type for p in told["reference"].model.parameters()} == {"meta"}
    assert isinstance(found, ShardedReference)


def test_workers_output_is_kept_in_the_runs_folder(
    parts: Callable[..., ClusterParts], make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have another working directory than the run, whose folder may be anywhere."""
    monkeypatch.chdir(tmp_path)
    made, files = parts({"learner": {"ranks": 2}}, output=Path("run")), dict[str, Any]()
    start = make_recipe().start.model
    monkeypatch.setattr(cluster_parts, "RayLauncher", lambda _, **told: files.update(ranks=told["files"]))
    monkeypatch.setattr(cluster_parts, "DistributedLearner", lambda *_, **__: None)
    monkeypatch.setattr(cluster_parts, "start_replica", lambda *_, **told: files.update(replica=told["file"]))
    monkeypatch.setattr(
        cluster_parts, "EnginePool", lambda make, _, **told: (make(0), files.update(named=told["file"](0)))
    )
    monkeypatch.setattr(cluster_parts, "VerifierNodes", lambda *_, **told: files.update(verifier=told["file"](1)))
    made.judge()
    made.learner(made.policy(start))
    made.engine(start, None, None, None)  # type: ignore[arg-type]
    folder = tmp_path / "run" / "workers"
    assert files["ranks"] == [f"{folder}/learner-0.log", f"{folder}/learner-1.log"]
    assert files["replica"] == files["named"] == f"{folder}/replica-0.log"
    assert files["verifier"] == f"{folder}/verifier-1.log"


def test_every_device_that_a_run_holds_is_counted_once(parts: Callable[..., cluster_parts.ClusterParts]) -> None:
    """Device hours in reports are seconds times this number."""
    vllm = {"rollout": {"engine": "vllm", "max_rows": 8}}
    wide = {"replicas": 2, "tensor_parallel": 2}
    assert parts({"learner": {"ranks": 2}}).devices == 2, "two machines"
    assert parts({"learner": {"ranks": 2}, "rollout": wide}, gpus=4, **vllm).devices == 2 + 2 * 2
    assert parts({"learner": {"ranks": 4}, "rollout": wide | {"colocated": True}}, gpus=4, **vllm).devices == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_ranks_on_gpus_start_with_segments_that_grow_or_as_the_user_says(
    parts: Callable[..., ClusterParts],
    make_recipe: Any,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    expected: str,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    started: list[Any] = []
    monkeypatch.setattr(cluster_parts, "rank_options", lambda ranks, **_: [{"num_gpus": 1}] * ranks)
    monkeypatch.setattr(cluster_parts, "RayLauncher", lambda options, **_: started.extend(options))
    monkeypatch.setattr(cluster_parts, "DistributedLearner", lambda *_, **__: None)
    start = make_recipe().start.model
    for gpus in (0, 4):
        made = parts({"learner": {"ranks": 2}}, gpus=gpus)
        made.learner(made.policy(start))
    told = {"runtime_env": {"env_vars": {"PYTORCH_ALLOC_CONF": expected}}}
    assert started == [{"num_gpus": 1}] * 2 + [{"num_gpus": 1} | told] * 2


def test_the_gpus_of_the_ranks_are_free_after_the_run(
    parts: Callable[..., ClusterParts], make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a Ray session of the user's, the next run needs them.
    removed: list[Any] = []
    place = SimpleNamespace(placement_group="group")
    monkeypatch.setattr(cluster_parts, "rank_options", lambda ranks, **_: [{"scheduling_strategy": place}] * ranks)
    monkeypatch.setattr(cluster_parts, "DistributedLearner", lambda *_, **__: None)
    monkeypatch.setattr(cluster_parts, "remove_placement_group", removed.append)
    made = parts({"learner": {"ranks": 2}}, gpus=4)
    made.learner(made.policy(make_recipe().start.model))
    made.close()
    made.close()
    assert removed == ["group"]


@pytest.mark.slow
def test_ranks_share_as_few_nodes_as_they_can(three_nodes: Any, make_recipe: Callable[..., TrainConfig]) -> None:
    import ray
    from ray.util.placement_group import placement_group_table, remove_placement_group

    added = [three_nodes.add_node(num_cpus=4, num_gpus=4, object_store_memory=80 << 20) for _ in range(2)]
    options: list[dict[str, Any]] = []
    try:
        options = rank_options(4, gpus=True, seconds=60.0)
        group = options[0]["scheduling_strategy"].placement_group
        assert [option["scheduling_strategy"].placement_group_bundle_index for option in options] == [0, 1, 2, 3]
        used = placement_group_table(group)["bundles_to_node_id"].values()
        assert len(set(used)) == 1
        rooms = {node.id: NodeRoom(gpus=node.gpus, cpus=node.cpus) for node in nodes()}
        planned = beside_ranks(list(rooms.values()), 4)
        assert planned is not None
        assert sorted(room.gpus for room in planned) == sorted(rooms[id].gpus - list(used).count(id) for id in rooms)
        refused = make_recipe(
            {"learner": {"ranks": 6}, "rollout": {"replicas": 1, "tensor_parallel": 4}},
            run={"name": "wide", "device": "auto"},
            rollout={"engine": "vllm"},
        )
        with pytest.raises(RecipeError, match=r"1 replicas of 4 GPUs and 1 CPUs do not fit, 0 do: next to 6 learner"):
            ClusterParts(refused)

        @ray.remote(num_gpus=4, num_cpus=1)
        def wide() -> str:
            return "placed"

        assert ray.get(wide.remote(), timeout=60.0) == "placed"
        with pytest.raises(ClusterError, match="8 free GPUs, each with a CPU, for the learner ranks"):
            rank_options(8, gpus=True, seconds=2.0)
    finally:
        if options:
            remove_placement_group(options[0]["scheduling_strategy"].placement_group)
        for node in added:
            three_nodes.remove_node(node)


@pytest.mark.parametrize(
    ("rollout", "gpus", "sections", "expected"),
    [
        ({}, 4, {}, "direct"),
        ({"tensor_parallel": 2}, 4, {}, "direct"),
        ({}, 0, {}, "object_store"),
        ({"weight_copy": "object_store"}, 4, {}, "object_store"),
        ({"weight_copy": "direct"}, 0, {}, "direct"),
        ({"colocated": True}, 4, {}, "direct"),
        ({"colocated": True}, 0, {}, "object_store"),
        ({}, 4, {"rollout": {"engine": "vllm", "max_rows": 8, "weight_lag": 1}}, "object_store"),
        ({}, 4, {"rollout": {"max_rows": 8}}, "object_store"),
        ({}, 4, {"model": {"dtype": "bfloat16", "lora": {"rank": 4}}}, "object_store"),
    ],
)
def test_weights_go_from_gpu_to_gpu_by_themselves_wherever_vllm_takes_them_so(
    parts: Callable[..., cluster_parts.ClusterParts],
    rollout: dict[str, Any],
    gpus: int,
    sections: dict[str, Any],
    expected: str,
) -> None:
    """The replicas must get the same setting, since vLLM starts with or without its transfer."""
    made = parts({"rollout": rollout, "learner": {"ranks": 1}}, gpus=gpus, **{"rollout": VLLM, **sections})
    assert made._cluster.rollout.weight_copy == expected
    assert made._config.cluster is not None
    assert made._config.cluster.rollout.weight_copy == expected


def test_mixtures_go_through_the_store(
    parts: Callable[..., ClusterParts], make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_parts, "experts_of", lambda config: 8)
    start = make_recipe().start.model
    made = parts({"learner": {"ranks": 2}}, gpus=4, rollout=VLLM)
    made.policy(start)
    assert made._cluster.rollout.weight_copy == "object_store"
    asked = parts({"rollout": {"weight_copy": "direct"}, "learner": {"ranks": 2}}, gpus=4, rollout=VLLM)
    with pytest.raises(RecipeError, match="experts"):
        asked.policy(start)


def test_stored_buffers_go_through_the_store(parts: Callable[..., ClusterParts], tmp_path: Path) -> None:
    """Use Gemma 4: the ranks send parameters only, and vLLM expects its layer scalars with them."""
    tokenizer = make_tokenizer([f"w{i}" for i in range(WORDS - 2)], CONTEXT)
    for name, expected in (("Qwen3", "direct"), ("Gemma 4", "object_store")):
        folder = save_policy(plain_model(CASES[name], pad_token_id=0), tokenizer, tmp_path / name)
        made = parts({"learner": {"ranks": 2}}, gpus=4, rollout=VLLM)
        made.policy(folder)
        assert made._cluster.rollout.weight_copy == expected
    asked = parts({"rollout": {"weight_copy": "direct"}, "learner": {"ranks": 2}}, gpus=4, rollout=VLLM)
    with pytest.raises(RecipeError, match="stored buffers"):
        asked.policy(folder)


@pytest.mark.parametrize(
    ("rollout", "gpus", "pool", "told"),
    [
        ({}, 4, "GroupPool", {"learner", "workers"}),
        ({"colocated": True}, 4, "ColocatedPool", {"learner"}),
        ({"colocated": True}, 0, "EnginePool", set[str]()),
        ({"colocated": True, "weight_copy": "direct"}, 0, "ColocatedPool", {"learner"}),
    ],
)
def test_ranks_on_the_replicas_gpus_lend_them_weights_and_others_send_them(
    parts: Callable[..., ClusterParts],
    monkeypatch: pytest.MonkeyPatch,
    rollout: dict[str, Any],
    gpus: int,
    pool: str,
    told: set[str],
) -> None:
    """The replica's vLLM must also know where the ranks are."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(cluster_parts, "SharedBundles", lambda *_, **__: None)  # Ray is not running
    for name in ("EnginePool", "GroupPool", "ColocatedPool"):
        monkeypatch.setattr(cluster_parts, name, lambda *_, name=name, **given: found.update(pool=name, given=given))
    monkeypatch.setattr(
        assemble, "make_engine", lambda _, settings, **__: found.update(use=settings.training) or SimpleNamespace()
    )
    made = parts({"rollout": {"replicas": 2, **rollout}, "learner": {"ranks": 2}}, gpus=gpus, rollout=VLLM)
    start = made._config.start.model or ""
    made.engine(start, None, DistributedLearner.__new__(DistributedLearner), None)  # type: ignore[arg-type]
    assert (found["pool"], set(found["given"]) & {"learner", "workers"}) == (pool, told)
    placed = {"GroupPool": "apart", "ColocatedPool": "colocated", "EnginePool": None}[pool]
    monkeypatch.setattr(assemble, "_max_context", lambda *_: 64)
    with suppress(AttributeError):  # an engine stub without these attributes
        assemble.make_training_engine(made._config, start, None)  # type: ignore[arg-type]
    assert found["use"].direct_weights == placed


ANOTHER_HOME = """
import sys
from magicrl.config.cluster_schema import ClusterConfig
from magicrl.distributed.runtime import connected
with connected(ClusterConfig(address=sys.argv[1])):
    pass
"""


@pytest.mark.slow
def test_a_cluster_with_another_token_is_named_with_the_remedy(tmp_path: Path) -> None:
    """Use the head of one home folder and a run of another."""
    head, other = tmp_path / "head", tmp_path / "other"
    for home in (head / ".ray", other):
        home.mkdir(parents=True)
    (head / ".ray" / "auth_token").write_text("0" * 64)
    options = ["--include-dashboard=false", "--num-cpus=0", "--object-store-memory=80000000"]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    port = str(free_port())
    started = subprocess.Popen([*start, f"--port={port}"], env=os.environ | {"HOME": str(head)}, start_new_session=True)
    try:
        for _ in range(600):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
                break
            time.sleep(0.1)
        run = [sys.executable, "-c", ANOTHER_HOME, f"127.0.0.1:{port}"]
        said = subprocess.run(run, env=os.environ | {"HOME": str(other)}, capture_output=True, text=True, check=False)
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        started.wait(60)
    assert "refuses this process: it was started with a token" in said.stderr
    assert "Copy ~/.ray/auth_token of the head" in said.stderr
