"""Connection to Ray, resources of its nodes, and waits with limits. Imports Ray only where it is used."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.errors import RecipeError

NAMESPACE = "magicrl"
TOKEN = (
    "it was started with a token (Ray makes ~/.ray/auth_token at the first local ray.init, and uses it from then on). "
    "Copy ~/.ray/auth_token of the head to every node and user before `ray start`, or set RAY_AUTH_MODE=disabled "
    "everywhere, also for `ray start --head`"
)
"""Cause and remedy where a node or a process has another token than the cluster, or none."""


class ClusterError(RuntimeError):
    """An error of a part of the cluster that did not answer or cannot continue; the text names it and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A live node of the cluster."""

    id: str  # Ray's
    address: str  # IP address
    cpus: float  # CPUs that Ray may give to actors
    gpus: float  # likewise
    object_store: float  # bytes of its object store
    head: bool  # whether the cluster's head runs here

    @property
    def name(self) -> str:
        """Address and the start of the id: simulated nodes share an address."""
        return f"{self.address}/{self.id[:6]}"


def require_ray() -> None:
    """Raise ``RecipeError`` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise RecipeError("needs Ray, which is not installed: pip install 'magicrl[ray]' on every node", key="cluster")


@contextmanager
def connected(config: ClusterConfig) -> Generator[None]:
    """Connect this process to the cluster; a cluster that is started here ends with the context.

    Raises:
        RecipeError: Ray is not installed, nobody answers at ``cluster.address``, or the token is another one.
        ClusterError: This machine is too busy to start Ray.
    """
    require_ray()
    import ray
    from ray.exceptions import AuthenticationError

    if ray.is_initialized():  # connected by the caller, who disconnects
        yield
        return
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if config.address is None:
        # not None: Ray would then join whatever cluster somebody last started on this machine
        options |= {"address": "local", "include_dashboard": False}
    else:
        options["address"] = config.address
    try:
        if config.address is not None:
            _check_address(config.address, config.timeouts.connect)
        ray.init(**options)
    except (ConnectionError, RuntimeError, TimeoutError, AuthenticationError) as error:
        # without any token Ray says another sentence than with a wrong one
        said = f"{error} {error.__cause__}"
        if "InvalidAuthToken" in said or "no authentication token was found" in said:
            raise RecipeError(
                f"the Ray at {config.address} refuses this process: {TOKEN}", key="cluster.address"
            ) from None
        raise RecipeError(
            f"no Ray at {config.address or 'this machine'}: {str(error).splitlines()[0]}. On the head node: "
            "ray start --head --port=6379; on every other: ray start --address=HEAD:6379; or leave cluster.address out "
            "to start one here",
            key="cluster.address",
        ) from error
    except Exception as error:  # Ray has no class for it
        if "timed out during startup" not in str(error):
            raise
        raise ClusterError(
            "Ray did not start here within its 30 seconds: the machine is too busy, or its memory is full; end other "
            "work and run the command again"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str, seconds: float) -> None:
    """Raise ``RecipeError`` if nobody listens there: Ray itself tries for minutes and says little."""
    if address == "auto":
        from ray._private.services import get_ray_address_from_environment

        # as in ray.init: RAY_ADDRESS, else the cluster of this node, which may be gone
        address = get_ray_address_from_environment(address, None)
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host or not port.isdigit():  # Ray refuses it at once
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        raise RecipeError(
            f"nobody answers at {address} ({error}); is `ray start --head --port={port}` running there, and the port "
            "open?",
            key="cluster.address",
        ) from error


def nodes() -> list[Node]:
    """The live nodes, the head first."""
    import ray

    found = [
        Node(
            id=row["NodeID"],
            address=row["NodeManagerAddress"],
            cpus=float(row["Resources"].get("CPU", 0)),
            gpus=float(row["Resources"].get("GPU", 0)),
            object_store=float(row["Resources"].get("object_store_memory", 0)),
            head="node:__internal_head__" in row["Resources"],
        )
        for row in ray.nodes()
        if row["Alive"]
    ]
    return sorted(found, key=lambda node: (not node.head, node.id))


def check_room(what: str, count: int, *, cpus: float, key: str, alive: Sequence[Node]) -> None:
    """Raise ``RecipeError`` for actors that do not fit the nodes' CPUs: Ray would wait forever without a message."""
    room = sum(node.cpus // cpus for node in alive) if cpus else math.inf
    if room < count:
        have = ", ".join(f"{node.name}: {node.cpus:g} CPUs" for node in alive)
        fit = "none" if not room else f"only {room:.0f}"
        raise RecipeError(
            f"{count} {what} of {cpus:g} CPUs each do not fit, {fit} would ({have}); ask for fewer, give each less "
            "(cluster.rollout.cpus), or add nodes",
            key=key,
        )


_LEAST_WAIT = 0.1  # seconds for an answer that is ready on another node


def waited_for(reference: Any, seconds: float, what: str, *, until: float | None = None) -> Any:
    """Return the value of a Ray reference; raises what its actor raised, or that it died.

    Args:
        reference: the call.
        seconds: limit.
        what: what is waited for, for the error.
        until: moment of ``time.monotonic`` at which the limit ends, where several calls share it; default: from now.

    Raises:
        ClusterError: it did not come within ``seconds``, or was lost on its way; names what was waited for.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

    try:
        return ray.get(reference, timeout=seconds if until is None else max(_LEAST_WAIT, until - time.monotonic()))
    except GetTimeoutError as error:
        raise ClusterError(
            f"waited {seconds:g} s for {what}; `ray status` shows what runs, and [cluster.timeouts] how long to wait"
        ) from error
    except (RayActorError, RayTaskError):
        raise
    except RayError as error:  # for example an answer on a node that died
        raise ClusterError(f"waited for {what}, which is lost: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """Return the last line of a remote error's cause: Ray adds the tracebacks of every process in between."""
    inner: BaseException = error
    while isinstance(getattr(inner, "cause", None), BaseException) and getattr(inner, "cause", None) is not inner:
        inner = inner.cause  # pyright: ignore[reportAttributeAccessIssue]
    # The last line names the error. Those before it are tracebacks of the remote process.
    lines = [line.strip() for line in str(inner).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(inner).__name__


def see_only(numbers: Sequence[str]) -> None:
    """Make only these GPUs visible to this process, before its first use of CUDA; no numbers change nothing."""
    if numbers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)


def node_network() -> str:
    """Make gloo in this process use the network interface of its Ray node, and return the node's address there.

    By default gloo takes the interface that the host's name resolves to: often loopback, or on a host with several
    networks another one than ``ray start --node-ip-address`` names. ``GLOO_SOCKET_IFNAME`` of the user is kept.
    """
    import ray

    address = str(ray.util.get_node_ip_address())
    for interface, places in psutil.net_if_addrs().items():
        if any(place.address == address for place in places):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return address
