"""One rollout replica: an engine in a process of its own, which generates while others talk to it.

A thread runs the engine, turn by turn; calls from outside (new work, new weights, what has ended) come between two
turns, so that a response under way goes on with new weights after its next token. The pool runs this class as an actor
with several threads. Weights reach it through Ray's object store, put once and read by every process of a node.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from magicrl.distributed.runtime import see_only
from magicrl.distributed.tensors import Payload, unpack
from magicrl.records import Completion, FinishedSample, RolloutGroup, RolloutRequest
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.rollout.vllm_weights import Rendezvous, WeightInfo
from magicrl.training.protocols import OnDevices

_HEARTBEAT = 10.0  # seconds after which `collect` answers with nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFacts:
    """What a replica reports of itself once its engine is made."""

    host: str  # the machine's name
    pid: int  # its process
    node: str  # Ray's id of the node; empty outside Ray
    max_context: int  # of its engine
    adapters: bool = False  # whether its engine takes LoRA adapters alone
    devices: tuple[str, ...] = ()  # what CUDA calls its accelerators; ``cpu`` without any


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedSamples:
    """What ended since the last call."""

    samples: list[tuple[int, int, Completion]]  # (issue order of the request, sample index, completion)
    busy: float  # seconds that the engine has generated so far
    peak_mb: float = 0.0  # most memory of its fullest accelerator so far, as the engine tells it


class Replica:
    """An engine and the thread that runs it."""

    def __init__(self, make: Callable[[], RolloutEngine], threads: int, numbers: Sequence[str] = ()) -> None:
        """
        Args:
            make: makes the engine, in this process.
            threads: torch threads.
            numbers: of the GPUs that it uses in turn with learner ranks; Ray gives it those of its own.
        """
        see_only(numbers)
        torch.set_num_threads(threads)
        self._engine = make()
        self._changed = threading.Condition()
        self._engine_free = threading.Lock()
        self._visitors = 0  # calls that want the engine between two turns
        self._closed = False
        # by identity of a request under way: itself (or its ``id`` could be reused), its order, its missing samples
        self._orders: dict[int, tuple[RolloutRequest, int, set[int]]] = {}
        self._ended: deque[tuple[int, int, Completion]] = deque()
        self._failure: BaseException | None = None
        self._busy = self._peak_mb = 0.0
        threading.Thread(target=self._generate, name="generate", daemon=True).start()

    def facts(self) -> ReplicaFacts:
        """Who it is; answered once the engine is made."""
        import ray

        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return ReplicaFacts(
            host=socket.gethostname(),
            pid=os.getpid(),
            node=node,
            max_context=self._engine.max_context,
            adapters=self._engine.capabilities.adapters,
            devices=tuple(self._engine.devices) if isinstance(self._engine, OnDevices) else (),
        )

    def submit(self, work: Sequence[tuple[int, RolloutRequest]]) -> None:
        """Queue requests with their issue orders; what the engine refuses, `collect` raises."""
        with self._visit():
            try:
                self._engine.submit([request for _, request in work])
            except ValueError as error:
                self._failure = error
                return
            for order, request in work:
                self._orders[id(request)] = (request, order, set(request.indices))

    def collect(self) -> CollectedSamples:
        """What has ended since the last call, waiting ten seconds at most for the first; raises why it stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._failure is not None, timeout=_HEARTBEAT)
            samples = list(self._ended)
            self._ended.clear()
            if self._failure is not None and not samples:
                raise self._failure
            return CollectedSamples(samples=samples, busy=self._busy, peak_mb=self._peak_mb)

    def load(self, payload: Payload, version: int, probes: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Take new weights between two turns, and answer ``probes`` with them."""
        with self._visit():
            self._engine.load_weights(unpack(payload), version)
            return self._engine.answers(probes)

    def join(self, rendezvous: Rendezvous, place: int) -> None:
        """Meet the learner's rank that sends weights; its place in the group."""
        with self._visit():
            self._direct().join(rendezvous, place)

    def take(self, told: Sequence[WeightInfo], version: int, probes: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """As `load`, with what the rank that was met sends at the same time."""
        with self._visit():
            self._direct().take(told, version)
            return self._engine.answers(probes)

    def _direct(self) -> VllmEngine:
        assert isinstance(self._engine, VllmEngine), "only vLLM's workers can be sent weights"
        return self._engine

    def sleep(self) -> None:
        """Give the engine's GPU memory back until the next `load`, where the engine shares its GPUs."""
        with self._visit():
            if self._engine.capabilities.sleep:
                self._engine.sleep()

    def interrupt(self) -> None:
        """Drop all work."""
        with self._visit():
            self._engine.interrupt()
            self._orders.clear()
            with self._changed:
                self._ended.clear()

    def close(self) -> None:
        """Stop generating and free the engine."""
        with self._visit():
            self._closed = True
            self._engine.close()

    @contextmanager
    def _visit(self) -> Generator[None]:
        """The engine, as soon as its present turn is over."""
        with self._changed:
            self._visitors += 1
        try:
            with self._engine_free:
                yield
        finally:
            with self._changed:
                self._visitors -= 1
                self._changed.notify_all()

    def _working(self) -> bool:
        return bool(self._orders) and self._failure is None

    def _generate(self) -> None:
        while True:
            with self._changed:
                # visitors first: otherwise this thread mostly takes the lock again before one of them wakes
                self._changed.wait_for(lambda: self._closed or (self._working() and not self._visitors))
            with self._engine_free:
                if self._closed:
                    return
                if not self._working():
                    continue
                began = time.perf_counter()
                try:
                    samples = self._engine.turn()
                except Exception as error:  # noqa: BLE001 (the border of a worker: the caller of `collect` gets it)
                    with self._changed:
                        self._failure = error
                        self._changed.notify_all()
                    continue
                self._busy += time.perf_counter() - began
                for sample in samples:
                    self._file(sample)

    def _file(self, sample: FinishedSample) -> None:
        """Keep a sample for `collect`; a sample of a request that was interrupted is dropped."""
        with self._changed:
            if id(sample.request) not in self._orders:
                return
            _, order, missing = self._orders[id(sample.request)]
            self._ended.append((order, sample.index, sample.completion))
            missing.discard(sample.index)
            if not missing:
                del self._orders[id(sample.request)]
            if not self._orders and isinstance(self._engine, OnDevices):
                self._peak_mb = self._engine.peak_mb()  # once a step, and before its last sample is fetched
            self._changed.notify_all()
