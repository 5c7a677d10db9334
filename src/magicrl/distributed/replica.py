"""A rollout replica: an engine in a separate process, which generates while it accepts calls.

One thread, that of an event loop, makes and drives the engine: CUDA's current stream is per thread, and vLLM waits for
the copies of one stream. Every call from outside (new work, new weights, finished samples) is a coroutine of that loop
and runs between two turns of the engine, so that unfinished responses continue with new weights. The pool runs this
class as an asynchronous Ray actor.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from magicrl.distributed.runtime import node_network, see_only
from magicrl.distributed.tensors import Payload, unpack
from magicrl.distributed.worker_logs import keep_output
from magicrl.records import Completion, RolloutGroup, RolloutRequest
from magicrl.rollout.protocol import Capabilities, RolloutEngine
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo
from magicrl.training.protocols import OnDevices

_HEARTBEAT = 10.0  # seconds after which `collect` answers with nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFacts:
    """Facts about a replica and its engine."""

    host: str  # the machine's name
    pid: int  # its process
    node: str  # Ray's id of the node; empty outside Ray
    max_context: int  # of its engine
    capabilities: Capabilities  # of its engine
    devices: tuple[str, ...] = ()  # names of its accelerators; ``cpu`` without any


class Replica:
    """An engine and the loop that drives it; `start` is the first call."""

    def __init__(
        self, make: Callable[[], RolloutEngine], threads: int, numbers: Sequence[str] = (), file: str | None = None
    ) -> None:
        """
        Args:
            make: makes the engine, in this process.
            threads: torch threads.
            numbers: GPUs that it shares with learner ranks; without any, those that Ray assigns.
            file: file that keeps its output; default: Ray's logs.
        """
        if file is not None:
            keep_output(file)
        see_only(numbers)
        self._make, self._threads = make, threads
        self._work, self._ready = asyncio.Event(), asyncio.Event()  # there is work to generate, samples to `collect`
        # by ``id`` of an unfinished request: the request (so that its ``id`` is not reused), its order, missing samples
        self._orders: dict[int, tuple[RolloutRequest, int, set[int]]] = {}
        self._ended: deque[tuple[int, int, Completion]] = deque()
        self._failure: BaseException | None = None
        self._busy = self._peak_mb = 0.0

    async def start(self) -> ReplicaFacts:
        """Make the engine on the thread that will drive it (Ray calls ``__init__`` on another); return its facts."""
        import ray

        if ray.is_initialized():
            node_network()
        torch.set_num_threads(self._threads)  # of this thread
        self._engine = self._make()
        self._generating = asyncio.create_task(self._generate())
        return await self.facts()

    async def facts(self) -> ReplicaFacts:
        """Return the replica's facts."""
        import ray

        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return ReplicaFacts(
            host=socket.gethostname(),
            pid=os.getpid(),
            node=node,
            max_context=self._engine.max_context,
            capabilities=self._engine.capabilities,
            devices=tuple(self._engine.devices) if isinstance(self._engine, OnDevices) else (),
        )

    async def submit(self, work: Sequence[tuple[int, RolloutRequest]]) -> None:
        """Queue requests with their issue orders; `collect` raises the error of a refused request."""
        try:
            self._engine.submit([request for _, request in work])
        except ValueError as error:
            self._fail(error)
            return
        for order, request in work:
            self._orders[id(request)] = (request, order, set(request.indices))
        self._work.set()

    async def collect(self) -> tuple[list[tuple[int, int, Completion]], float, float]:
        """Return what ended since the last call, after at most ten seconds; raise what stopped the engine.

        Returns:
            (issue order of the request, sample index, completion) of each sample, seconds spent generating so far, and
            the peak memory of its fullest accelerator in MiB.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), _HEARTBEAT)
        samples = list(self._ended)
        self._ended.clear()
        # Deliver finished samples before the error: they are valid, and the pool would generate them again.
        if self._failure is not None and not samples:
            raise self._failure
        if self._failure is None:
            self._ready.clear()
        return samples, self._busy, self._peak_mb

    async def load(self, payload: Payload, version: int, probes: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Load new weights and return the answers to ``probes``."""
        self._engine.load_weights(unpack(payload), version)
        return self._engine.answers(probes)

    async def join(self, store: tuple[str, int], place: int, size: int, seconds: float) -> None:
        """Meet the learner's rank that sends weights; see `VllmWeights.join`."""
        self._direct().weights.join(store, place, size, seconds)

    async def take(
        self, infos: Sequence[WeightInfo], version: int, probes: Sequence[RolloutRequest]
    ) -> list[RolloutGroup]:
        """Do as `load`, with weights that the learner's rank sends at the same time."""
        self._direct().take(infos, version)
        return self._engine.answers(probes)

    async def receive(self, bucket: WeightBucket) -> None:
        """Copy the bucket of the rank on its device; the rank may fill it again after the answer."""
        self._direct().receive(bucket)

    async def complete(self, version: int, probes: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Do as `load`, with the received buckets."""
        self._direct().complete(version)
        return self._engine.answers(probes)

    def _direct(self) -> VllmEngine:
        assert isinstance(self._engine, VllmEngine), "only vLLM's workers receive weights directly"
        return self._engine

    async def sleep(self) -> None:
        """Release the engine's GPU memory until the next `load`, if the engine shares its GPUs."""
        if self._engine.capabilities.sleep:
            self._engine.sleep()

    async def interrupt(self) -> None:
        """Drop all work."""
        self._engine.interrupt()
        self._orders.clear()
        self._ended.clear()

    async def _generate(self) -> None:
        while self._failure is None:
            await self._work.wait()
            began = time.perf_counter()
            try:
                samples = self._engine.turn()
            except Exception as error:  # noqa: BLE001 (border of a process: `collect` raises it)
                self._fail(error)
                return
            self._busy += time.perf_counter() - began
            for sample in samples:
                if id(sample.request) not in self._orders:
                    continue  # interrupted
                _, order, missing = self._orders[id(sample.request)]
                self._ended.append((order, sample.index, sample.completion))
                missing.discard(sample.index)
                if not missing:
                    del self._orders[id(sample.request)]
                if not self._orders and isinstance(self._engine, OnDevices):
                    self._peak_mb = self._engine.peak_mb()  # once per step, before its last sample is fetched
                self._ready.set()
            # Without this the loop would turn without work and take CPU time from the learner.
            if not self._orders:
                self._work.clear()
            await asyncio.sleep(0)  # let pending calls run

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._work.clear()
        self._ready.set()
