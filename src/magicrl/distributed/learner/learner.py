"""Distributed learner: the learner's ranks behind the calls of a single-process learner. Implements `Learner`.

The driver (this process) holds no weights. It splits a mini-batch into shares, sends each rank its share, and reads the
results. The ranks run the single learner's code on shards of the weights. If a rank is lost, its shard is lost, so all
ranks are replaced. The new ranks load the last state that the driver knows and repeat the updates made since, which the
driver keeps. These updates are identical to the first ones: same shares, same order, same sums.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from torch import Tensor

from magicrl.config.cluster_schema import ClusterTimeouts, LearnerPlacement
from magicrl.distributed.learner.launchers import Launcher, LearnerLost, RankGroup
from magicrl.distributed.learner.rank import RankUpdate, Share
from magicrl.distributed.learner.sharding import RankSettings, WrittenShard
from magicrl.distributed.same_files import digests_of
from magicrl.distributed.tensors import pack, unpack
from magicrl.models.adapters import ADAPTER, fitted, write_adapters
from magicrl.models.loading import LoadedModel, save_policy
from magicrl.models.model_files import WeightFiles, find_model, stored_buffers
from magicrl.models.packing import check_samples, families
from magicrl.planning.memory import learner_state, shards_by_default
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo
from magicrl.training.objective import LearnerSettings, Objective
from magicrl.training.protocols import Controls, NotFiniteError, WorkSpan

State: TypeAlias = "Mapping[str, Any] | tuple[Path, Mapping[str, Any]] | None"
"""Gathered state, or a folder of shards and its metadata, or None for the starting model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Writing:
    """Copy of the state that the ranks are writing."""

    folder: Path
    meta: Mapping[str, Any]  # metadata of the copy
    updates: int  # number of updates before it, of those that a rebuild repeats
    end: Future[Mapping[str, Any]] = field(default_factory=Future[Mapping[str, Any]])

    def fail(self, why: str) -> None:
        if not self.end.done():
            self.end.set_exception(OSError(why))

    def settle(self, shards: Sequence[WrittenShard]) -> None:
        """Record that every rank has written its shard or failed to."""
        errors = [f"learner rank {rank}: {shard}" for rank, shard in enumerate(shards) if isinstance(shard, str)]
        files = dict(file for shard in shards if not isinstance(shard, str) for file in shard.items())
        unseen = [name for name in files if not (self.folder / name).is_file()]
        if errors:
            self.fail(errors[0])
        # A rank on another node may have written to a folder of the same name on its own disk. Without this check the
        # checkpoint would lack that rank's rows.
        elif unseen:
            self.fail(
                f"{self.folder} lacks {unseen[0]}, which a learner rank has written: the run folder must be on a "
                "file system that all nodes see"
            )
        else:
            self.end.set_result({**self.meta, "files": files})


def split_by_tokens(samples: Sequence[TrainSample], parts: int, token_budget: int) -> list[list[int]]:
    """Split ``samples`` into ``parts`` shares of about equally many tokens. A share may be empty.

    Responses to one prompt stay together so that the prompt is computed once, unless they would exceed a micro-batch of
    ``token_budget`` or an even share. The largest family is assigned first, always to the share with the fewest tokens.

    Returns:
        For each share the indices of its samples, ascending.

    Example: responses of 6, 5, 2 and 1 tokens to four prompts of one token, two parts: ``[[0, 3], [1, 2]]``.
    """
    assert parts >= 1
    total = sum(len(sample) for sample in samples)
    # A family larger than an even share would make its rank the slowest one, and all ranks wait for the slowest.
    pieces = families(samples, max(1, min(token_budget, math.ceil(total / parts))))
    sizes = [len(samples[p[0]].prompt_tokens) + sum(len(samples[i].tokens) for i in p) for p in pieces]
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    # Ties are broken by index, so that a rebuild after a lost rank makes the same shares and therefore the same sums.
    for piece in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        least = min(range(parts), key=lambda i: (loads[i], i))
        shares[least] += pieces[piece]
        loads[least] += sizes[piece]
    return [sorted(share) for share in shares]


def by_node(nodes: Sequence[str]) -> list[int]:
    """Return the processes in the order of their ranks: those of a node are neighbours, in the nodes' first order.

    Example: processes on the nodes a, b, a, b: ``[0, 2, 1, 3]``.
    """
    first = {node: nodes.index(node) for node in nodes}
    return sorted(range(len(nodes)), key=lambda process: (first[nodes[process]], process))


def shard_ranks(places: Sequence[tuple[str, float]], state: float) -> int:
    """Return the number of neighbouring ranks that hold one copy of the model; see `shards_by_default`.

    If nodes have different numbers of ranks, the number is chosen so that no group spans two nodes.

    Args:
        places: Node and memory in bytes of each rank, in order.
        state: Bytes of float32 weights, gradients and moments.
    """
    # A group that divides the ranks of every node never spans two nodes, so its frequent gathers stay inside a node.
    inside = math.gcd(*Counter(node for node, _ in places).values())
    return shards_by_default(len(places), inside, state, min(memory for _, memory in places))


T = TypeVar("T")
_WORK = {
    "configure": "start",
    "update": "train",
    "logprobs": "logprobs",
    "weights": "weights",
    "adapters": "weights",
    "send_weights": "weights",
    "next_bucket": "weights",
}
"""Kind of work in the timeline, by method of a rank. Other methods do not appear in the timeline."""


class ShardedReference:
    """Frozen reference model, sharded over the ranks of ``learner``. Implements ``Reference``."""

    def __init__(self, learner: DistributedLearner) -> None:
        self._learner = learner

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token, ``[T]`` per sample."""
        return self._learner.logprobs(samples, temperature, frozen=True)


class DistributedLearner:
    """Trains a starting model over several ranks. Implements ``Learner``.

    Args:
        policy: The starting model. Its weights are released here because the ranks read the folder themselves;
            `save_hf` uses its architecture and tokenizer.
        learning: As in ``LocalLearner``.
        launcher: Starts ranks.
        placement: Number of ranks, and how they share the work.
        device: ``cuda`` gives every rank one GPU.
        shares_gpus: Rollout engines use the same GPUs in turns, so the ranks keep no freed memory.
        threads: torch threads per rank.
        timeouts: Limits of every wait.
        rebuilds: Number of lost ranks that one call replaces without raising.
        reference: The frozen reference model, which the ranks hold in shards. None for no reference. Weights it has in
            this process are not used.

    Raises:
        ValueError: The model cannot be trained with these settings.
        LearnerLost: The ranks did not start.
    """

    def __init__(
        self,
        policy: LoadedModel,
        learning: LearnerSettings | None = None,
        *,
        launcher: Launcher,
        placement: LearnerPlacement,
        device: str = "cpu",
        shares_gpus: bool = False,
        threads: int | None = None,
        timeouts: ClusterTimeouts | None = None,
        rebuilds: int = 0,
        reference: LoadedModel | None = None,
    ) -> None:
        learning = learning or LearnerSettings()
        self._objective = Objective(learning)
        self._policy = policy
        # The ranks send parameters only, and a model is saved with its stored buffers.
        self._buffers: dict[str, Tensor] = {}
        if names := stored_buffers(policy.model):
            files = WeightFiles(find_model(policy.folder), policy.model, policy.folder)
            self._buffers = {name: cast(Tensor, files.whole(name)) for name in names}
        # The driver keeps only the architecture: a 32B model would take 60 GB of its memory for nothing.
        policy.model.to("meta")  # pyright: ignore[reportArgumentType]
        self._launcher, self._placement = launcher, placement
        self._settings = RankSettings(
            folder=policy.folder,
            learning=learning,
            valid_vocab=policy.valid_vocab,
            placement=placement,
            device="cuda" if device == "cuda" else "cpu",
            shares_gpus=shares_gpus,
            threads=threads,
            reference=None if reference is None else reference.folder,
            reference_vocab=None if reference is None else reference.valid_vocab,
        )
        algorithm = learning.algorithm
        references = filter(None, (algorithm.loss, algorithm.reducer, algorithm.correction))
        # Once: ranks that replace lost ones must not read files that have changed since the start.
        self._digests = digests_of(references, filter(None, (policy.folder, self._settings.reference)))
        self._timeouts = timeouts or ClusterTimeouts()
        self._rebuilds = rebuilds
        self.lost: list[str] = []
        """Reasons why ranks were lost so far, in order."""
        self._base: State = None  # the last state known outside the ranks
        # The updates made since, for a rebuild. They share the loop's batches, about 20 bytes per response token.
        self._updates: list[tuple[TrainBatch, Controls]] = []
        self.version = 0
        """Number of updates made."""
        self._writing: _Writing | None = None  # a copy of the state that is not in a checkpoint yet
        # Another thread completes checkpoints and deletes older ones, which must not happen while a rebuild reads one.
        self._base_lock = threading.RLock()
        self.last: tuple[RankUpdate, ...] = ()
        """Result of the last update on each rank."""
        self.starts = 0
        """Number of times that ranks were started. A process group formed with earlier ranks is no longer usable."""
        self.devices: tuple[str, ...] = ()
        """Name of each rank's device."""
        self._step: dict[str, float] = {}  # sums over the updates since `observations`
        self._spans: list[WorkSpan] = []
        self._ranks: RankGroup | None = None
        # Start the ranks here, so that a setting they refuse ends the run before any response is sampled.
        self._repeated(self._running)

    def peak_mb(self) -> float:
        """Return the peak memory of the fullest rank in MiB; 0 before the first update."""
        return max((answer.peak_mb for answer in self.last), default=0.0)

    def observations(self) -> dict[str, float]:
        """Return metrics since the last call: lost ranks, and each rank's tokens, busy seconds and peak memory."""
        found, self._step = self._step, {}
        peaks = {f"cluster/rank_{rank}/peak_mb": answer.peak_mb for rank, answer in enumerate(self.last)}
        return {"cluster/learner/lost": len(self.lost), **found, **peaks}

    def spans(self) -> list[WorkSpan]:
        """Return when the ranks worked since the last call. They all work at the same time."""
        spans, self._spans = self._spans, []
        return spans

    @property
    def parts(self) -> int:
        """Number of shares into which a mini-batch is split."""
        return self._placement.ranks // self._placement.sequence_parallel

    def update(self, batch: TrainBatch, controls: Controls) -> Mapping[str, float]:
        """Make one update (SGD step) on a mini-batch; see ``Learner.update``.

        Raises:
            NotFiniteError, ValueError: As in the single learner.
            LearnerLost: More ranks were lost than ``rebuilds`` allows. The call can be repeated.
        """
        # Fail before any rank starts its pass: ranks that are in a collective cannot be stopped without ending them.
        self._check(batch.samples)
        self._objective.check(batch.samples, controls)
        self._poll_shards(wait=False)
        weights = self._objective.sample_weights(batch)
        found = self._repeated(lambda: self._update(batch, weights, controls))
        for rank, answer in enumerate(self.last):
            for name, value in (("tokens", answer.tokens), ("busy_seconds", answer.seconds)):
                key = f"cluster/rank_{rank}/{name}"
                self._step[key] = self._step.get(key, 0) + value
        # Only after success: a rebuild inside the call repeats all recorded updates and would apply this one twice.
        self._updates.append((batch, controls))
        return found

    def gradients(self, batch: TrainBatch, controls: Controls) -> dict[str, Tensor]:
        """Return the full gradient of a mini-batch by parameter name, without an update. Used to compare learners."""
        shares = self._shares(batch, self._objective.sample_weights(batch))
        given = [(share, controls) for share in shares]
        return unpack(self._repeated(lambda: self._call("gradients", given, "gradients"))[0], writable=True)

    @property
    def reference(self) -> ShardedReference | None:
        """Frozen reference model held by the ranks, or None."""
        return None if self._settings.reference is None else ShardedReference(self)

    def logprobs(
        self, samples: Sequence[TrainSample], temperature: float, *, frozen: bool = False
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token, ``[T]`` per sample, without gradients.

        ``frozen`` selects the reference model.
        """
        self._check(samples)
        shares = split_by_tokens(samples, self.parts, self._settings.learning.model.micro_batch_tokens)
        given = [([samples[i] for i in share], temperature, frozen) for share in self._each_rank(shares)]
        answers = self._repeated(lambda: self._call("logprobs", given, "log-probs of a batch"))
        found: dict[int, tuple[FloatArray, FloatArray]] = {}
        for share, answer in zip(shares, answers[:: self._placement.sequence_parallel], strict=True):
            found.update(zip(share, zip(*answer, strict=True), strict=True))
        ordered = [found[i] for i in range(len(samples))]
        return [pair[0] for pair in ordered], [pair[1] for pair in ordered]

    def weights(self) -> Mapping[str, Any]:
        """Return the current weights by HF parameter name, in the compute precision on the CPU, LoRA merged, a tied
        weight once.

        The tensors use the memory in which they arrived and are read-only, because a copy would take the memory of
        another model.
        """
        return unpack(self._repeated(lambda: self._call("weights", self._same(), "weights"))[0])

    def adapters(self) -> Mapping[str, Any]:
        """Return only the LoRA adapters, by PEFT's names, on the CPU."""
        return unpack(self._repeated(lambda: self._call("adapters", self._same(), "adapters"))[0], writable=True)

    def open_store(self) -> tuple[str, int]:
        """Return host and port of a store at which the workers of rollout engines can meet rank 0. Rank 0 keeps the
        port open."""
        what = "a store for the weight copy"
        return self._repeated(lambda: self._call("open_receivers_store", [()], what))[0]

    def join(self, size: int, seconds: float) -> tuple[WeightInfo, ...] | None:
        """Form a process group of rank 0 and the engines' workers, which must be called to join at the same time.

        Args:
            size: Number of processes in the group, including rank 0.
            seconds: Time limit.

        Returns:
            The weights that will be sent, in order. None if a worker did not join in time.

        Raises:
            LearnerLost: A rank was lost. The next call of any method starts new ranks.
        """
        # The ranks' own limit ends first, so that they report a missing worker before the driver takes them for lost.
        what = "rollout engines to come for weights"
        return self._unrepeated("join_receivers", self._same(size, seconds), what, 2 * seconds)[0]

    def send(self, seconds: float) -> None:
        """Send the current weights to the workers that joined, which must be called to receive them at the same time.

        Raises:
            LearnerLost: As in `join`, and if sending took longer than ``seconds``.
        """
        self._unrepeated("send_weights", self._same(), "weights to be sent to rollout engines", seconds)

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield the current weights in buckets in memory of the ranks' devices. Asking for the next bucket overwrites
        the last.

        The caller must read to the end.

        Raises:
            LearnerLost: As in `join`.
        """
        while True:
            given = self._unrepeated("next_bucket", self._same(), "weights to be put into buckets")
            if given[0] is None:
                return
            yield WeightBucket.merged(given)

    def _unrepeated(
        self, method: str, arguments: Sequence[tuple[Any, ...]], waiting_for: str, timeout: float | None = None
    ) -> list[Any]:
        """Make a call in which other processes take part, and which the ranks therefore cannot repeat by themselves."""
        try:
            return self._call(method, arguments, waiting_for, timeout)
        except LearnerLost as error:
            self._record(error)
            raise

    def state(self) -> Mapping[str, Any]:
        """Return the single learner's state, gathered from the shards. A rebuild starts from it."""
        self.finish_shards()  # a rebuild from this state does not pass the step at which the shards were copied
        packed, meta = self._repeated(lambda: self._call("state", self._same(), "the learner's state"))[0]
        state = {**unpack(packed, writable=True), "meta": meta}
        self._set_base(state)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, of a single learner or of any number of ranks.

        Raises:
            ValueError: The state's parameters are not this model's.
        """
        self.finish_shards()
        self._repeated(lambda: self._restore(state))
        self._set_base(state)

    def begin_shards(self, folder: Path) -> Future[Mapping[str, Any]]:
        """Copy the state and start writing it to ``folder``, each rank its rows. Every node must see the folder."""
        self.finish_shards()
        meta = self._repeated(lambda: self._call("begin_shards", self._same(str(folder)), "a copy of the state"))[0]
        self._writing = _Writing(folder=folder, meta=meta, updates=len(self._updates))
        return self._writing.end

    def finish_shards(self) -> None:
        """Wait until all ranks have written their shards."""
        self._poll_shards(wait=True)

    def _poll_shards(self, *, wait: bool) -> None:
        """Query whether the ranks have written their shards, and pass the result to the waiting `Future`."""
        writing = self._writing
        if writing is None or writing.end.done():
            return
        given = self._same(wait)
        found: list[WrittenShard | None] = self._repeated(
            lambda: self._call("shards_written", given, "shards to be written")
        )
        shards = [shard for shard in found if shard is not None]
        if len(shards) == len(found):
            writing.settle(shards)

    def read_shards(self, folder: Path, meta: Mapping[str, Any]) -> None:
        """Load what ``begin_shards`` wrote, with any number of ranks.

        Raises:
            ValueError: A file is missing, damaged, or of another model.
        """
        self.finish_shards()
        self._repeated(lambda: self._read(folder, meta))
        self._set_base((folder, meta))

    def shards_kept(self, folder: Path) -> None:
        """Record that the last written shards are now in ``folder`` and stay there, so that a rebuild may start from
        them."""
        with self._base_lock:
            writing, self._writing = self._writing, None
            if writing is not None:
                self._base = (folder, writing.end.result())
                del self._updates[: writing.updates]

    def save_hf(
        self,
        folder: Path,
        *,
        extra_files: Mapping[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a model folder from this process: compute precision, LoRA merged and also as adapters."""
        model, lora = self._policy.model, self._settings.learning.model.lora
        adapters: dict[str, Callable[[Path], None]] = {}
        if lora is not None:
            adapters[ADAPTER] = lambda inner: write_adapters(
                inner, self.adapters(), fitted(lora, model), self._policy.folder
            )
        # ``assign`` avoids a copy of the model, and a tied head has no separate key.
        model.load_state_dict({**self.weights(), **self._buffers}, assign=True, strict=False)
        model.tie_weights()
        save_policy(
            model,
            self._policy.tokenizer,
            folder,
            extra_files=extra_files,
            generation=generation,
            extra_folders=adapters or None,
        )
        model.to("meta")  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """End all ranks. The next call starts new ones, at the version of the last completed update."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()

    def _running(self) -> RankGroup:
        """Return the ranks. Without any, start them and repeat the updates up to the current version."""
        if self._ranks is not None:
            return self._ranks
        timeouts, count = self._timeouts, self._placement.ranks
        self._ranks = self._launcher.start(count, timeout=timeouts.start)
        self.starts += 1
        try:
            self._call("check_files", self._same(self._digests), "learner ranks to compare files", timeouts.start)
            what = "learner ranks to be placed"
            places: list[tuple[str, float]] = self._call("location", self._same(self._settings.device, count), what)
            # Neighbouring ranks share sequences and shards, whose exchanges are far faster inside a node.
            self._ranks.order = order = by_node([node for node, _ in places])
            lora = self._settings.learning.model.lora is not None
            state = learner_state(self._policy.model.num_parameters(), lora=lora)
            # On GPUs that engines use in turns, each rank must keep as little memory as possible.
            default = count if self._settings.shares_gpus else shard_ranks([places[i] for i in order], state)
            placement = self._placement.model_copy(update={"shard_ranks": self._placement.shard_ranks or default})
            settings = replace(self._settings, placement=placement)
            store = self._call("open_store", [()], "rank 0 to open a store for all")[0]
            given = [(settings, store, rank, count) for rank in range(count)]
            self.devices = tuple(self._call("configure", given, "learner ranks to load the model", timeouts.start))
            with self._base_lock:
                if self._base is None:
                    self.version = 0
                elif isinstance(self._base, tuple):
                    self._read(*self._base)
                else:
                    self._restore(self._base)
                # The updates are repeated with the recorded batches and controls. They give the same bits, because
                # shares, their order and the order of the sums are the same.
                for made in range(len(self._updates) + 1):
                    if self._writing is not None and made == self._writing.updates and not self._writing.end.done():
                        # The copy was lost with the ranks that wrote it. It was taken after this many updates.
                        self._call("begin_shards", self._same(str(self._writing.folder)), "a copy of the state")
                    if made < len(self._updates):
                        batch, controls = self._updates[made]
                        self._update(batch, self._objective.sample_weights(batch), controls)
        except BaseException:
            self.close()
            raise
        return self._ranks

    def _update(self, batch: TrainBatch, weights: Tensor, controls: Controls) -> Mapping[str, float]:
        # Weights are computed from the whole mini-batch: a single share does not know its denominator.
        given = [(share, controls) for share in self._shares(batch, weights)]
        try:
            answers: list[RankUpdate] = self._call("update", given, f"update {self.version + 1}")
        except ValueError:
            self.close()  # the ranks stopped inside a pass and cannot continue
            raise
        first = answers[0]
        self.version = first.version
        self.last = tuple(answers)
        if first.failure is not None:
            raise NotFiniteError.of(first.failure, batch.samples, first.culprit)
        return first.values

    def _set_base(self, state: State) -> None:
        """Make ``state``, which is the current one, the start of any rebuild."""
        with self._base_lock:
            # A copy that is still being written belongs to the earlier state and must not become the base.
            self._base, self._writing = state, None
            self._updates.clear()

    def _restore(self, state: Mapping[str, Any]) -> None:
        tensors = {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        packed = pack(tensors)
        # Only rank 0 gets the tensors, and scatters them: each rank's memory then holds one full tensor at a time.
        given = [(shapes, packed if rank == 0 else {}, state["meta"]) for rank in range(self._placement.ranks)]
        self.version = self._call("restore", given, "a state to be restored")[0]

    def _read(self, folder: Path, meta: Mapping[str, Any]) -> None:
        given = self._same(str(folder), dict(meta))
        self.version = self._call("read_shards", given, f"shards to be read from {folder}")[0]

    def _shares(self, batch: TrainBatch, weights: Tensor) -> list[Share]:
        """Return every rank's share. Ranks that share sequences get the same share."""
        statistics = self._objective.statistics(batch)
        parts = split_by_tokens(batch.samples, self.parts, self._settings.learning.model.micro_batch_tokens)
        shares = [
            Share(
                samples=[batch.samples[i] for i in part],
                indices=part,
                weights=weights[part].numpy() if part else np.zeros(0),
                total=len(batch.samples),
                statistics=statistics,
            )
            for part in parts
        ]
        return self._each_rank(shares)

    def _each_rank(self, parts: Sequence[T]) -> list[T]:
        return [part for part in parts for _ in range(self._placement.sequence_parallel)]

    def _same(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * self._placement.ranks

    def _call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], waiting_for: str, timeout: float | None = None
    ) -> list[Any]:
        limit = self._timeouts.learner if timeout is None else timeout
        ranks, began = self._running(), time.perf_counter()
        try:
            return ranks.call(method, arguments, timeout=limit, waiting_for=waiting_for)
        finally:
            if method in _WORK:
                self._spans.append(WorkSpan("learner ranks", _WORK[method], began, time.perf_counter()))

    def _repeated(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``. After a lost rank, repeat it on new ranks while ``rebuilds`` allows."""
        # A mistake of the user would come back on new ranks, so it is raised at once and not repeated.
        for left in range(self._rebuilds, -1, -1):
            try:
                return call()
            except LearnerLost as error:
                self.close()
                if self._writing is not None and (error.mistake is not None or not left):
                    self._writing.fail(f"its ranks are gone: {error}")
                if error.mistake is not None:
                    raise error.mistake from None
                if not left:
                    raise
                self._record(error)
        raise AssertionError("the last turn returns or raises")

    def _record(self, error: LearnerLost) -> None:
        self.close()
        self.lost.append(str(error))

    def _check(self, samples: Sequence[TrainSample]) -> None:
        """Raise here for samples that would stop one rank and leave the others waiting, with the single learner's
        messages."""
        check_samples(samples)
        vocab = self._policy.valid_vocab
        for sample in samples:
            top, low = int(sample.tokens.max()), int(sample.tokens.min())
            if top >= vocab or low < 0:
                raise ValueError(
                    f"token {top if top >= vocab else low} lies outside the vocabulary of {vocab} words: "
                    "is this the model's tokenizer?"
                )
        for kind in ("old_logprobs", "sampler_logprobs", "ref_logprobs", "teacher_logprobs"):
            have = sum(getattr(s, kind) is not None and len(getattr(s, kind)) > 0 for s in samples)
            if 0 < have < len(samples):
                raise ValueError(f"{have} of {len(samples)} samples have {kind}; all of them need it, or none")
