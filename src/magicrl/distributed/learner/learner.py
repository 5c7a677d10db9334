"""The learner of many devices behind the same calls as the one of one process; implements ``Learner``.

The driver holds no weights. It cuts a mini-batch into shares, tells every rank its own, and reads what they found.
What the ranks compute is the single learner's code on shards. A lost rank loses its rows of the weights, so all ranks
start anew: from the last state that the driver knows, and through the updates made since, which it keeps. They are the
same updates: same shares, same order, same sums.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from magicrl.config.cluster_schema import ClusterTimeouts, LearnerPlacement
from magicrl.distributed.learner.launchers import Launcher, LearnerLost, RankGroup
from magicrl.distributed.learner.rank import RankUpdate, Share
from magicrl.distributed.learner.seats import Seat, by_node, shard_ranks
from magicrl.distributed.learner.sharding import RankSettings, WrittenShard
from magicrl.distributed.tensors import pack, unpack
from magicrl.models.adapter_files import ADAPTER, write_adapters
from magicrl.models.loading import LoadedModel, save_policy
from magicrl.models.packing import check_samples, families
from magicrl.planning.memory import learner_state
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo
from magicrl.training.objective import LearnerSettings, Objective
from magicrl.training.protocols import Controls, NotFiniteError, UpdateMetrics, WorkSpan

State: TypeAlias = "Mapping[str, Any] | tuple[Path, Mapping[str, Any]] | None"
"""A gathered state, a folder of shards with what belongs to it, or the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Writing:
    """A copy of the state that ranks write."""

    folder: Path
    meta: Mapping[str, Any]  # of the copy
    updates: int  # made before it, of those that a rebuild repeats
    end: Future[Mapping[str, Any]] = field(default_factory=Future[Mapping[str, Any]])

    def fail(self, why: str) -> None:
        if not self.end.done():
            self.end.set_exception(OSError(why))

    def tell(self, shards: Sequence[WrittenShard]) -> None:
        """All ranks have written, or some could not."""
        errors = [f"learner rank {rank}: {shard.error}" for rank, shard in enumerate(shards) if shard.error]
        files = dict(shard.file for shard in shards if shard.file is not None)
        unseen = [name for name in files if not (self.folder / name).is_file()]
        if errors:
            self.fail(errors[0])
        elif unseen:
            self.fail(
                f"{self.folder} lacks {unseen[0]}, which a learner rank has written: the run folder has to lie on a "
                "file system that all nodes see"
            )
        else:
            self.end.set_result({**self.meta, "files": files})


def split_by_tokens(samples: Sequence[TrainSample], parts: int, token_budget: int) -> list[list[int]]:
    """Spread ``samples`` over ``parts`` shares of about as many tokens each: ascending indices, maybe none.

    Responses to one prompt stay together as far as neither a micro-batch of ``token_budget`` nor an even share is
    exceeded, so that the prompt is computed once. The largest family goes first, each to the share with the fewest
    tokens.

    Example: responses of 6, 5, 2 and 1 tokens to four prompts of one token, two parts: ``[[0, 3], [1, 2]]``.
    """
    assert parts >= 1
    total = sum(len(sample) for sample in samples)
    pieces = families(samples, max(1, min(token_budget, math.ceil(total / parts))))
    sizes = [len(samples[p[0]].prompt_tokens) + sum(len(samples[i].tokens) for i in p) for p in pieces]
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for piece in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        least = min(range(parts), key=lambda i: (loads[i], i))
        shares[least] += pieces[piece]
        loads[least] += sizes[piece]
    return [sorted(share) for share in shares]


T = TypeVar("T")
_WORK = {
    "configure": "start",
    "update": "train",
    "logprobs": "logprobs",
    "reference_logprobs": "logprobs",
    "weights": "weights",
    "adapters": "weights",
    "send_weights": "weights",
    "next_bucket": "weights",
}
"""What calls of ranks are called in the timeline; of others nothing is told."""


@dataclass(frozen=True, slots=True)
class ShardedReference:
    """The frozen reference that a learner's ranks hold; implements ``Reference``."""

    scores: Callable[[str, Sequence[TrainSample], float], tuple[list[FloatArray], list[FloatArray]]]

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of every response token, ``[T]`` a sample."""
        return self.scores("reference_logprobs", samples, temperature)


class DistributedLearner:
    """Trains a start model over ranks; implements ``Learner``.

    Args:
        policy: the start model; its weights are given up here (ranks read the folder themselves), its architecture and
            tokenizer serve ``save_hf``.
        learning: as ``LocalLearner``'s.
        launcher: starts ranks.
        placement: how many ranks, and how they share the work.
        device: ``cuda`` gives every rank one GPU.
        shares_gpus: rollout engines use these GPUs in turn with the ranks, which then keep no freed memory.
        threads: torch threads of a rank.
        timeouts: of every wait.
        rebuilds: how many losses of a rank in one call are mended without a word to the caller.
        on_loss: told of every loss before it is mended.
        reference: the frozen reference model, held by the ranks in shards; None: there is none. Its weights, if it has
            any here, are not used.

    Raises:
        ValueError: the model cannot be trained like this.
        LearnerLost: the ranks did not start.
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
        on_loss: Callable[[LearnerLost], None] | None = None,
        reference: LoadedModel | None = None,
    ) -> None:
        learning = learning or LearnerSettings()
        self._objective = Objective(learning)
        self._policy = policy
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
        self._timeouts = timeouts or ClusterTimeouts()
        self._rebuilds, self._on_loss = rebuilds, on_loss
        self.lost: list[str] = []
        """What ranks were lost so far, with the reason."""
        self._base: State = None  # the last state known outside the ranks
        # the updates made since, for a rebuild: the loop's own batches, about 20 bytes per response token
        self._updates: list[tuple[TrainBatch, Controls]] = []
        self._version = 0
        self._writing: _Writing | None = None  # a copy of the state that is not in a checkpoint yet
        # a checkpoint is whole, and older ones go, in another thread: not while a rebuild reads one
        self._base_lock = threading.RLock()
        self.last: tuple[RankUpdate, ...] = ()
        """What each rank told of the last update."""
        self.starts = 0
        """How often ranks were started: a group that was formed with others is of no use any more."""
        self._devices: tuple[str, ...] = ()
        self._step: dict[str, float] = {}  # sums over the updates since `observations`
        self._spans: list[WorkSpan] = []
        self._ranks: RankGroup | None = None
        self._repeated(self._running)

    @property
    def devices(self) -> tuple[str, ...]:
        """One a rank."""
        return self._devices

    def peak_mb(self) -> float:
        """Most memory so far of the fullest rank; 0 before the first update."""
        return max((answer.peak_mb for answer in self.last), default=0.0)

    def observations(self) -> dict[str, float]:
        """How often ranks were lost, and what each did in the updates since the last call."""
        told, self._step = self._step, {}
        peaks = {f"cluster/rank_{rank}/peak_mb": answer.peak_mb for rank, answer in enumerate(self.last)}
        return {"cluster/learner/lost": len(self.lost), **told, **peaks}

    def spans(self) -> list[WorkSpan]:
        """When the ranks worked, all at once as they do, since the last call."""
        told, self._spans = self._spans, []
        return told

    @property
    def version(self) -> int:
        """Number of updates made."""
        return self._version

    @property
    def parts(self) -> int:
        """Shares into which a mini-batch is cut."""
        return self._placement.ranks // self._placement.sequence_parallel

    def update(self, batch: TrainBatch, controls: Controls) -> UpdateMetrics:
        """One SGD step on the mini-batch; see ``Learner.update``.

        Raises:
            NotFiniteError, ValueError: as the single learner's.
            LearnerLost: a rank was lost (more often than ``rebuilds``); after ``rebuild`` the call may be repeated.
        """
        self._check(batch.samples)
        self._objective.check(batch.samples, controls)
        self._look_at_shards(wait=False)
        weights = self._objective.sample_weights(batch)
        found = self._repeated(lambda: self._update(batch, weights, controls))
        for rank, answer in enumerate(self.last):
            for name, value in (("tokens", answer.tokens), ("busy_seconds", answer.seconds)):
                key = f"cluster/rank_{rank}/{name}"
                self._step[key] = self._step.get(key, 0) + value
        self._updates.append((batch, controls))
        return found

    def gradients(self, batch: TrainBatch, controls: Controls) -> dict[str, Tensor]:
        """The mini-batch's gradient by parameter name, whole; weights stay. To compare learners with."""
        shares = self._shares(batch, self._objective.sample_weights(batch))
        given = [(share, controls) for share in shares]
        return unpack(self._repeated(lambda: self._call("gradients", given, "gradients"))[0], writable=True)

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of every response token, ``[T]`` a sample, without gradient."""
        return self._scores("logprobs", samples, temperature)

    @property
    def reference(self) -> ShardedReference | None:
        """The frozen reference among the ranks; None where there is none."""
        return None if self._settings.reference is None else ShardedReference(self._scores)

    def _scores(
        self, method: str, samples: Sequence[TrainSample], temperature: float
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        self._check(samples)
        shares = split_by_tokens(samples, self.parts, self._settings.learning.model.micro_batch_tokens)
        given = [([samples[i] for i in share], temperature) for share in self._each_rank(shares)]
        answers = self._repeated(lambda: self._call(method, given, "log-probs of a batch"))
        found: dict[int, tuple[FloatArray, FloatArray]] = {}
        for share, answer in zip(shares, answers[:: self._placement.sequence_parallel], strict=True):
            found.update(zip(share, zip(*answer, strict=True), strict=True))
        ordered = [found[i] for i in range(len(samples))]
        return [pair[0] for pair in ordered], [pair[1] for pair in ordered]

    def weights(self) -> Mapping[str, Any]:
        """Present weights by HF parameter name in the compute precision on the CPU, LoRA merged; a tied one once.

        They lie in the memory in which they came, which may only be read: a copy would be another whole model.
        """
        return unpack(self._repeated(lambda: self._call("weights", self._same(), "weights"))[0])

    def adapters(self) -> Mapping[str, Any]:
        """The LoRA adapters alone, by PEFT's names, on the CPU."""
        return unpack(self._repeated(lambda: self._call("adapters", self._same(), "adapters"))[0], writable=True)

    def open_store(self) -> tuple[str, int]:
        """Return host and port where the workers of rollout engines can meet rank 0, which holds the port open."""
        what = "a store for the weight copy"
        return self._repeated(lambda: self._call("open_receivers_store", [()], what))[0]

    def join(self, size: int, seconds: float) -> tuple[WeightInfo, ...] | None:
        """Wait ``seconds`` for the workers, asked to come at the same time, ``size`` processes with rank 0.

        Returns:
            The weights that they will be sent, in order; None if some did not come.

        Raises:
            LearnerLost: a rank was lost; the next call of anything starts new ranks.
        """
        what = "rollout engines to come for weights"
        return self._unrepeated("join_receivers", self._same(size, seconds), what, 2 * seconds)[0]

    def send(self, seconds: float) -> None:
        """Send the present weights to the workers that came, asked to take them at the same time.

        Raises:
            LearnerLost: as `join`, also where sending took longer than ``seconds``.
        """
        self._unrepeated("send_weights", self._same(), "weights to be sent to rollout engines", seconds)

    def buckets(self) -> Iterator[WeightBucket]:
        """All present weights, which lie in memory of the ranks' devices until the next ones are asked for; to its end.

        Raises:
            LearnerLost: as `join`.
        """
        while True:
            given = self._unrepeated("next_bucket", self._same(), "weights to be put into buckets")
            if given[0] is None:
                return
            yield WeightBucket.merged(given)

    def _unrepeated(
        self, method: str, arguments: Sequence[tuple[Any, ...]], waiting_for: str, timeout: float | None = None
    ) -> list[Any]:
        """Make a call in which others take part, so that it cannot be repeated alone."""
        try:
            return self._call(method, arguments, waiting_for, timeout)
        except LearnerLost as error:
            self._record(error)
            raise

    def state(self) -> Mapping[str, Any]:
        """The single learner's state, gathered; a rebuild goes on from here."""
        self.finish_shards()  # behind this moment a rebuild does not come past that of their copy
        packed, meta = self._repeated(lambda: self._call("state", self._same(), "the learner's state"))[0]
        state = {**unpack(packed, writable=True), "meta": meta}
        self._go_on_from(state)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``, also of a single learner's or of one with another number of ranks.

        Raises:
            ValueError: the state's parameters are not this model's.
        """
        self.finish_shards()
        self._repeated(lambda: self._restore(state))
        self._go_on_from(state)

    def begin_shards(self, folder: Path) -> Future[Mapping[str, Any]]:
        """Copy the state and begin to write it into ``folder``, which every node has to see, each rank its own rows."""
        self.finish_shards()
        meta = self._repeated(lambda: self._call("begin_shards", self._same(str(folder)), "a copy of the state"))[0]
        self._writing = _Writing(folder=folder, meta=meta, updates=len(self._updates))
        return self._writing.end

    def finish_shards(self) -> None:
        """Wait until all ranks have written what they began."""
        self._look_at_shards(wait=True)

    def _look_at_shards(self, *, wait: bool) -> None:
        """Ask the ranks whether they have written what they began, and tell who waits for it."""
        writing = self._writing
        if writing is None or writing.end.done():
            return
        given = self._same(wait)
        found: list[WrittenShard | None] = self._repeated(
            lambda: self._call("shards_written", given, "shards to be written")
        )
        shards = [shard for shard in found if shard is not None]
        if len(shards) == len(found):
            writing.tell(shards)

    def read_shards(self, folder: Path, meta: Mapping[str, Any]) -> None:
        """Take over what ``begin_shards`` wrote, whatever the number of ranks that did.

        Raises:
            ValueError: a file is missing, damaged, or another model's.
        """
        self.finish_shards()
        self._repeated(lambda: self._read(folder, meta))
        self._go_on_from((folder, meta))

    def shards_kept(self, folder: Path) -> None:
        """What was written last lies in ``folder`` now, and stays: a rebuild may go on from it."""
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
        """Write a model folder in the compute precision, LoRA merged and beside it, from this process."""
        model = self._policy.model
        model.load_state_dict(self.weights(), assign=True, strict=False)
        model.tie_weights()
        save_policy(
            model,
            self._policy.tokenizer,
            folder,
            extra_files=extra_files,
            generation=generation,
            extra_folders={ADAPTER: self._write_adapters} if self._settings.learning.model.lora else None,
        )
        model.to("meta")  # pyright: ignore[reportArgumentType]

    def _write_adapters(self, folder: Path) -> None:
        lora = self._settings.learning.model.lora
        assert lora is not None
        write_adapters(folder, self.adapters(), lora, self._policy.folder)

    def rebuild(self) -> None:
        """Start new ranks and bring them to where the lost ones were after the last update that was made."""
        self.close()
        self._running()

    def close(self) -> None:
        """End all ranks; the next call starts new ones."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()

    def _running(self) -> RankGroup:
        """The ranks; they are started, and brought to the present version, if there are none."""
        if self._ranks is not None:
            return self._ranks
        timeouts, count = self._timeouts, self._placement.ranks
        self._ranks = self._launcher.start(count, timeout=timeouts.start)
        self.starts += 1
        try:
            settings = self._placed(self._ranks)
            store = self._call("open_store", [()], "rank 0 to open a store for all")[0]
            given = [(settings, store, rank, count) for rank in range(count)]
            self._devices = tuple(self._call("configure", given, "learner ranks to load the model", timeouts.start))
            self._return_to_the_present()
        except BaseException:
            self.close()
            raise
        return self._ranks

    def _placed(self, ranks: RankGroup) -> RankSettings:
        """Give neighbouring ranks to a node's processes; the settings with the number of ranks that hold the model."""
        count = self._placement.ranks
        seats: list[Seat] = self._call("seat", self._same(self._settings.device, count), "learner ranks to be placed")
        ranks.order = by_node([seat.node for seat in seats])
        state = learner_state(self._policy.model.num_parameters(), lora=self._settings.learning.model.lora is not None)
        # GPUs that engines use in turn are to hold as little meanwhile as they can
        found = count if self._settings.shares_gpus else shard_ranks([seats[i] for i in ranks.order], state)
        placement = self._placement.model_copy(update={"shard_ranks": self._placement.shard_ranks or found})
        return replace(self._settings, placement=placement)

    def _return_to_the_present(self) -> None:
        with self._base_lock:
            if self._base is None:
                self._version = 0
            elif isinstance(self._base, tuple):
                self._read(*self._base)
            else:
                self._restore(self._base)
            for made in range(len(self._updates) + 1):
                if self._writing is not None and made == self._writing.updates and not self._writing.end.done():
                    # the copy went with the ranks that wrote it; this is where it was taken
                    self._call("begin_shards", self._same(str(self._writing.folder)), "a copy of the state")
                if made < len(self._updates):
                    batch, controls = self._updates[made]
                    self._update(batch, self._objective.sample_weights(batch), controls)

    def _update(self, batch: TrainBatch, weights: Tensor, controls: Controls) -> UpdateMetrics:
        given = [(share, controls) for share in self._shares(batch, weights)]
        try:
            answers: list[RankUpdate] = self._call("update", given, f"update {self._version + 1}")
        except ValueError:
            self.close()  # the ranks stopped in the middle of a pass
            raise
        first = answers[0]
        self._version = first.version
        self.last = tuple(answers)
        if first.failure is not None:
            sample = None if first.culprit is None else batch.samples[first.culprit]
            raise NotFiniteError(first.failure, None if sample is None else (sample.group_index, sample.sample_index))
        return UpdateMetrics(values=first.values)

    def _go_on_from(self, state: State) -> None:
        """``state`` is the present one: a rebuild starts there."""
        with self._base_lock:
            self._base, self._writing = state, None
            self._updates.clear()

    def _restore(self, state: Mapping[str, Any]) -> None:
        tensors = {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        packed = pack(tensors)
        given = [(shapes, packed if rank == 0 else {}, state["meta"]) for rank in range(self._placement.ranks)]
        self._version = self._call("restore", given, "a state to be restored")[0]

    def _read(self, folder: Path, meta: Mapping[str, Any]) -> None:
        given = self._same(str(folder), dict(meta))
        self._version = self._call("read_shards", given, f"shards to be read from {folder}")[0]

    def _shares(self, batch: TrainBatch, weights: Tensor) -> list[Share]:
        """Every rank's part; ranks that share sequences get the same."""
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
        """``call``, again on new ranks where one was lost and losses are to be mended."""
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
        if self._on_loss is not None:
            self._on_loss(error)

    def _check(self, samples: Sequence[TrainSample]) -> None:
        """What would stop one rank and leave the others waiting is told here, as the single learner tells it."""
        check_samples(samples)
        vocab = self._policy.valid_vocab
        for sample in samples:
            top, low = int(sample.tokens.max()), int(sample.tokens.min())
            if top >= vocab or low < 0:
                raise ValueError(
                    f"token {top if top >= vocab else low} lies outside the vocabulary of {vocab} words: "
                    "is this the model's tokenizer?"
                )
        for kind in ("old_logprobs", "sampler_logprobs", "ref_logprobs"):
            have = sum(getattr(s, kind) is not None and len(getattr(s, kind)) > 0 for s in samples)
            if 0 < have < len(samples):
                raise ValueError(f"{have} of {len(samples)} samples have {kind}; all of them need it, or none")
