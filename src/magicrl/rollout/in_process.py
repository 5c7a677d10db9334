"""The rollout engine inside the trainer's process: continuous batching over a slot cache, exact and repeatable.

One turn of the loop gives free rows to waiting samples (the prompt of a group is computed and held once), decodes one
token for every row, and retires the rows that ended. Rows are filled in issue order. The schedule depends on requests
and tokens only, never on time.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.decoding import fused_decoder, static_decoder
from magicrl.models.exact import FilledContext, filled_rows, use_exact
from magicrl.models.exact_cache import AHEAD, ExactDecodeAttention, exact_lengths
from magicrl.models.head import Float32Head
from magicrl.models.kv_cache import DecodeAttention, PrefillAttention, SlotCache, probe_cache_shape
from magicrl.models.loading import device_name, peak_mb
from magicrl.models.recurrent import keep_sequences_apart
from magicrl.models.routing import Routers
from magicrl.models.scorer import check_attention, check_isolation
from magicrl.records import TOKEN_FILTERS, Completion, FinishReason, RolloutRequest
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.protocol import Capabilities
from magicrl.rollout.requests import GroupProgress, OpenGroups, SchedulingEngine, check_request, with_begun
from magicrl.rollout.rows import RowTable, Work, pack_work, unpack_work
from magicrl.rollout.sampling import likely_tokens, on_host, sample_tokens

_Ended = tuple[GroupProgress, int, Completion]  # group, sample index and completion of a sample that has ended
_ROOM = 128  # tokens of a block of prompts
_PREFILL_TOKENS = 8192  # most prompt tokens in one forward, unless a single prompt is longer


def _lengths(request: RolloutRequest, *, exact: bool, room: bool = False) -> tuple[int, int]:
    """Return the cache capacity for the prompt (with ``room``, for the longest later turn) and for the response."""
    prompt = len(request.prompt_tokens)
    if room and request.room:
        # whole blocks: a cache made for other prompts then has the same block width and gives the same bits
        prompt = -(-(prompt + request.room) // _ROOM) * _ROOM
    lengths = (prompt, request.sampling.max_tokens)
    return exact_lengths(*lengths) if exact else lengths


def _packs(groups: Sequence[GroupProgress]) -> Iterator[list[GroupProgress]]:
    """Sort groups by prompt length (ties in issue order) and split them into packs of at most 8,192 prompt tokens."""
    pack: list[GroupProgress] = []
    tokens = 0
    # prompts of one length are neighbours, so that attention takes them as one batch without padding
    for group in sorted(groups, key=lambda g: len(g.request.prompt_tokens)):
        length = len(group.request.prompt_tokens)
        if pack and tokens + length > _PREFILL_TOKENS:
            yield pack
            pack, tokens = [], 0
        pack.append(group)
        tokens += length
    if pack:
        yield pack


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy ``weights`` (HF parameter names to tensors) into ``model``, cast to its precision and device.

    A tied parameter (an ``lm_head`` that is the embedding) needs one of its names; further names must hold the
    same values. ``ValueError``, and nothing is written, unless every name and shape fits.
    """
    # with duplicates: a tied parameter may be given under any of its names
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    unknown = sorted(set(weights) - set(targets))
    if unknown:
        raise ValueError(f"weights for parameters that the engine's model does not have: {', '.join(unknown[:5])}")
    # by identity of the parameter: the name whose values are copied
    chosen: dict[int, str] = {}
    for name, value in weights.items():
        target = targets[name]
        if tuple(value.shape) != tuple(target.shape):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the engine's model wants {tuple(target.shape)}")
        other = chosen.setdefault(id(target), name)
        twin = weights[other]
        if other != name and twin.data_ptr() != value.data_ptr() and not torch.equal(twin, value):
            raise ValueError(
                f"{name} and {other} are tied in the engine's model but differ in the given weights; "
                "load the engine's model with tie_word_embeddings as the learner's"
            )
    missing = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in chosen)
    if missing:
        raise ValueError(f"no weights were given for: {', '.join(missing[:5])}")
    # all checks have passed: an engine never keeps half of the new weights
    for name in chosen.values():
        targets[name].copy_(weights[name])


REFILL_SHARE = 8  # new prompts are computed once a 1/8 of the rows is free: fewer, larger forwards


class InProcessEngine(SchedulingEngine):
    """Continuous batching on one device.

    Tokens are a function of weights, prompt, temperature and (seed, draw, sample, position). In float32 another
    ``max_rows`` gives the same tokens but for near-ties, since matrix products of another size round differently.
    """

    capabilities = Capabilities(entropies=True, filters=True, in_flight=True)

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        *,
        end_tokens: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        valid_vocab: int,
        max_context: int,
        static_steps: bool | None = None,
    ) -> None:
        """
        Args:
            model: an HF causal LM that only this engine uses, loaded with ``attn_implementation="magicrl"``.
            settings: sizes, the precision of the head, and whether to record experts. With ``exact`` the bits of a
                token do not depend on the rest of the batch, and equal those of a `PolicyScorer` with the same weights
                and threads (`magicrl.models.exact`).
            end_tokens: a response ends with any of these; the token is kept.
            decode: turns response tokens into text without special tokens.
            valid_vocab: logits from here on are padding and never sampled.
            max_context: most prompt + response tokens of a sequence.
            static_steps: decode in steps of fixed shapes, as CUDA graphs need them, where the model allows it.
                Default: on CUDA.

        Raises:
            ValueError: an end token is outside the vocabulary, a count is not positive, the model's layers mix packed
                sequences, the model has no routers whose choices could be recorded, or it cannot be exact.
        """
        max_rows = settings.max_rows
        if max_rows < 1 or max_context < 2 or valid_vocab < 1:
            raise ValueError(f"not a usable engine: {max_rows=}, {max_context=}, {valid_vocab=}")
        outside = sorted(t for t in end_tokens if not 0 <= t < valid_vocab)
        if outside:
            raise ValueError(f"end tokens {outside} lie outside the vocabulary of {valid_vocab} tokens")
        self._model = model.eval()
        self._max_context = max_context
        self._decode = decode
        self._device = torch.device(model.device)
        self.devices = (device_name(self._device),)
        """Name of the engine's only device, as a tuple."""
        # a table, so that one lookup finds the rows of a step that have ended
        self._ends = np.zeros(valid_vocab, dtype=np.bool_)
        self._ends[sorted(end_tokens)] = True
        self._exact, self._before = settings.exact, AHEAD if settings.exact else 0
        if settings.exact:
            use_exact(model)
        keep_sequences_apart(model)
        experts = settings.training is not None and settings.training.experts
        self._routers = Routers(model) if experts else None
        self.capabilities = replace(InProcessEngine.capabilities, experts=experts)
        if settings.head_dtype == "float32":
            Float32Head.put_into(model)
        # prompts are packed into one forward: a layer that carries state over tokens would leak one into the next
        check_isolation(model, valid_vocab=valid_vocab, shared=False)
        check_attention(model)
        if self._routers is not None:
            self._routers.chosen()  # fails unless every router recorded the passes just made
        self._shape = probe_cache_shape(model, self._device)
        self._valid_vocab, self._max_rows, self._memory_limit_mb = valid_vocab, max_rows, settings.memory_limit_mb
        # None: the model runs as in transformers, as one with routers always does
        self._fused = fused_decoder(model) if self._routers is None else None
        if self._exact and self._fused is None:
            raise ValueError("model.exact: this model has no fused decoder; use another one, or leave model.exact out")
        wanted = self._device.type == "cuda" if static_steps is None else static_steps
        self._static = static_decoder(self._fused, model) if wanted else None
        self._work = Work()
        self._busy = 0.0

    @property
    def _groups(self) -> OpenGroups:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._work.groups

    @property
    def rows(self) -> int:
        """Number of rows of the current cache: at most ``max_rows``; 0 before the first generation."""
        return self._work.cache.rows if self._work.cache is not None else 0

    @property
    def graphs_captured(self) -> int:
        """Number of CUDA graphs of decoding steps captured so far."""
        return 0 if self._static is None else self._static.captured

    def peak_mb(self) -> float:
        """Return the peak memory of this process in MiB, including a learner in it."""
        return peak_mb(self._device)

    def busy_seconds(self) -> float:
        return self._busy

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """See `RolloutEngine.submit`. Also refuses a request that does not fit into the memory limit."""
        for request in requests:
            self._check(request)
        self._work.queue.extend(self._groups.take_in(requests))

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Copy ``weights`` into the model. Sequences in flight keep their cache and continue under the new weights."""
        copy_weights(self._model, weights)
        if self._static is not None:
            self._static.reload()
        self._version = version
        self._work.rows.updated(version)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        unfinished = self._unfinished(keep=keep)
        # the next cache is a new one, since broken weights may have left non-finite numbers in this one
        self._work = Work()
        return unfinished

    def _running(self) -> Iterator[tuple[GroupProgress, int, Completion]]:
        for row in range(self._work.rows.active):
            yield self._work.rows.output(row, FinishReason.ABORTED, self._decode)

    @contextmanager
    def newest_weights(self) -> Generator[None]:
        """Inside this context nothing else is in flight. Earlier requests wait, and their cache keeps its memory."""
        if not self._groups.unyielded():
            yield
            return
        waiting, self._work = self._work, Work()
        try:
            yield
        finally:
            if self._version >= 0:
                waiting.rows.updated(self._version)  # no effect unless weights were loaded within
            self._work = waiting

    def snapshot(self) -> Mapping[str, Any]:
        """Return the requests in flight with their cache, so that a resumed run continues bit for bit."""
        return pack_work(self._work) if self._groups.unyielded() else {}

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Continue the requests of ``snapshot``; start the others from their beginning.

        The snapshot of an engine pool gives the responses so far: a run may continue without ``[cluster]``.
        """
        held = set[int]()
        # only this engine's snapshots have orders (`pack_work`); those of other engines hold only responses
        if "orders" in snapshot:
            whole = self._static is not None
            self._work = unpack_work(snapshot, requests, self._shape, self._device, whole=whole, ahead=self._before)
            held = {id(group.request) for group in self._groups.unyielded()}
        self.submit(with_begun(snapshot, [request for request in requests if id(request) not in held]))

    @torch.inference_mode()
    def _advance(self) -> None:
        """Fill rows, decode a token for each, and retire ended rows; their samples are filed in issue order."""
        begin = time.perf_counter()
        done = self._admit()
        if self._work.rows.active:
            done += self._decode_step()
        # the order of rows depends on the rest of the batch
        for ended in sorted(done, key=lambda ended: (ended[0].order, ended[1])):
            self._groups.file(*ended)
        self._busy += time.perf_counter() - begin

    def sampled_tokens(self) -> int:
        return self._work.sampled

    @property
    def max_cached(self) -> int:
        """Most tokens of prompt and response of one sample that fit into the cache."""
        return ((self._memory_limit_mb << 20) - self._shape.bytes_per_row) // self._shape.bytes_per_token

    def _rows_that_fit(self, capacity: int) -> int:
        """Return the number of sequences of ``capacity`` tokens that fit into memory."""
        # each row is counted with its own prompt, since a group may have a single sample
        return min(self._max_rows, (self._memory_limit_mb << 20) // self._row_bytes(capacity))

    def _row_bytes(self, capacity: int) -> int:
        return capacity * self._shape.bytes_per_token + self._shape.bytes_per_row

    def _check(self, request: RolloutRequest) -> None:
        """Raise ``ValueError``, naming problem and remedy, for a request that cannot be served."""
        limit, name = request.sampling.max_tokens, f"problem {request.problem.id!r}"
        prompt, room = _lengths(request, exact=self._exact)
        check_request(request, self._max_context, valid_vocab=self._valid_vocab)
        for index, begun in request.begun:
            # an aborted response of T tokens cannot continue: it should have been recorded as ended
            unfinished = begun.finish_reason is FinishReason.ABORTED
            if index not in request.indices or len(begun) > limit or (unfinished and len(begun) == limit):
                raise ValueError(
                    f"{name}: sample {index} was begun with {len(begun)} tokens ({begun.finish_reason.value}), which "
                    f"cannot be continued: the request is for the samples {request.indices} of at most {limit} tokens"
                )
        # the prompt of the last turn holds everything before it, and its response the remaining tokens of T
        most = max(room, request.room)
        if not self._rows_that_fit(prompt + most):
            need = self._row_bytes(prompt + most) / 2**20
            raise ValueError(
                f"{name}: prompt of {prompt} tokens + max_tokens {most} needs {need:.1f} MiB of cache, "
                f"rollout.memory_limit_mb is {self._memory_limit_mb}; raise it or lower max_tokens"
            )

    # filling rows

    def _admit(self) -> list[_Ended]:
        """Start waiting samples in free rows, in issue order, and return the samples that ended at once."""
        if not self._work.queue:
            return []
        cache = self._fit_cache()
        first, starting = self._work.rows.active, list[tuple[GroupProgress, int]]()
        logits: list[Tensor] = []
        if self._work.kept is not None:
            # all samples of a group draw their first token from the same logits
            group = self._work.queue[0]
            samples = min(group.waiting, cache.rows - first)
            logits.append(self._work.kept.expand(samples, -1))
            self._work.rows.start(group, samples, self._version)
            if not group.waiting:
                self._work.queue.popleft()
                self._work.kept = None
        # a few large forwards of prompts instead of one whenever a row is free
        free, few = cache.rows - self._work.rows.active, max(1, cache.rows // REFILL_SHARE)
        if self._work.queue and self._work.kept is None and (free >= few or not self._work.rows.active):
            while self._work.queue and free:
                group = self._work.queue[0]
                prompt, response = _lengths(group.request, exact=self._exact)
                # a longer request waits for its cache, and nothing overtakes it: rows are filled in issue order
                if prompt > cache.prompts.capacity or response > cache.responses.capacity:
                    break
                samples = min(group.waiting, free)
                starting.append((group, samples))
                free -= samples
                # the rows are full; the other samples start from the kept logits as rows become free
                if samples < group.waiting:
                    break
                self._work.queue.popleft()
            logits += self._prefill(cache, starting)
        if self._work.rows.active == first:
            return []
        return self._sample(slice(first, self._work.rows.active), torch.cat(logits))

    def _fit_cache(self) -> SlotCache:
        """Return the cache; make a new one between generations when the queue's longest prompt or response changed.

        The rounding of products depends on the width of the cache's blocks, which is that of the longest sequence. A
        cache kept from an earlier, longer queue would give other bits than a resumed run. A request that is longer
        than the current rows waits until they have drained. If the longest prompt and the longest response of the
        queue do not fit into memory together, the cache is made for the first group of the queue.
        """
        cache = self._work.cache
        # the prompt of a group with waiting samples is in the cache, even when no row is left
        if cache is not None and (self._work.rows.active or self._work.kept is not None):
            return cache
        needs = [_lengths(group.request, exact=self._exact, room=True) for group in self._work.queue]
        prompt, response = (max(column) for column in zip(*needs, strict=True))
        if not self._rows_that_fit(prompt + response):
            prompt, response = _lengths(self._work.queue[0].request, exact=self._exact)
        rows = self._rows_that_fit(prompt + response)
        held = (0, 0, 0) if cache is None else (cache.prompts.capacity, cache.responses.capacity, cache.rows)
        needed = (prompt, response, rows)
        # CUDA graphs hold the cache's addresses, so with them it only grows
        fits = all(map(operator.le, needed, held)) if self._static is not None else needed == held
        if cache is None or not fits:
            self._work.cache = cache = None  # freed before the next one is allocated
            self._work.cache = cache = SlotCache(
                self._shape, rows, prompt, response, self._device, whole=self._static is not None, ahead=self._before
            )
            self._work.rows = RowTable(rows, response)
        return cache

    def _prefill(self, cache: SlotCache, starting: Sequence[tuple[GroupProgress, int]]) -> list[Tensor]:
        """Compute one prompt per group and start its samples; return ``[samples, V]`` logits per group."""
        logits: dict[int, Tensor] = {}
        now = time.perf_counter()
        for group, _ in starting:
            group.began, group.version, group.place = now, self._version, len(self._work.prompts)
            self._work.prompts.append(group)
        for pack in _packs([group for group, _ in starting]):
            outputs = self._forward_prompts(cache, pack)
            logits.update({group.order: outputs[index : index + 1] for index, group in enumerate(pack)})
        for group, samples in starting:
            self._work.rows.start(group, samples, self._version)
            if group.waiting:
                # a copy: the view would keep the logits of the whole pack in memory
                self._work.kept = logits[group.order].clone()
        return [logits[group.order].expand(samples, -1) for group, samples in starting]

    def _forward_prompts(self, cache: SlotCache, pack: Sequence[GroupProgress]) -> Tensor:
        """Run packed prompts (sorted by length) into their slots; return ``[prompts, V]`` logits after each."""
        lengths = [len(group.request.prompt_tokens) for group in pack]
        runs = [
            (length, [g.place for g, n in zip(pack, lengths, strict=True) if n == length])
            for length in sorted(set(lengths))
        ]
        tokens = np.concatenate([group.request.prompt_tokens for group in pack]).astype(np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        # the head sees only the last token of each prompt: logits of all tokens would be by far the largest tensor
        ends = np.cumsum(lengths)
        logits = self._forward(tokens, positions, PrefillAttention(cache, runs), keep=ends - 1)
        if self._routers is not None:
            for group, experts in zip(pack, np.split(self._routers.chosen(), ends[:-1]), strict=True):
                group.experts = experts
        return logits

    # decoding

    def _decode_step(self) -> list[_Ended]:
        assert self._work.cache is not None
        # the last token of a row is not in the cache yet: this step feeds it and stores its key and value
        prompts, held = self._work.rows.column("prompt"), self._work.rows.column("count") - 1
        owners, last = self._work.rows.column("owner"), self._work.rows.column("last")
        if self._static is not None:
            logits = self._static(self._work.cache, last, owners=owners, prompt_lengths=prompts, held=held)
        else:
            kind = ExactDecodeAttention if self._exact else DecodeAttention
            context = kind(self._work.cache, owners=owners, prompt_lengths=prompts, response_lengths=held)
            logits = self._forward(last, prompts + held, context)
        if self._routers is not None:
            self._work.rows.record_experts(self._routers.chosen())
        return self._sample(slice(0, self._work.rows.active), logits)

    def _forward(
        self, tokens: NDArray[Any], positions: NDArray[Any], context: Any, keep: NDArray[Any] | None = None
    ) -> Tensor:
        """Return logits ``[k, V]`` of one forward of packed tokens, at the positions ``keep`` (default: all)."""
        ids, places = (torch.from_numpy(np.array(a)).to(self._device) for a in (tokens, positions))
        kept = None if keep is None else torch.from_numpy(keep).to(self._device)
        if self._exact and self._model.exact_rows > 1:
            assert self._fused is not None, "a known architecture"
            step, count = self._model.exact_rows, len(ids) if kept is None else len(kept)
            filled_ids, filled_places = filled_rows(ids, step), filled_rows(places, step)
            filled_kept = None if kept is None else filled_rows(kept, step)
            return self._fused(filled_ids, filled_places, FilledContext(context, len(ids)), filled_kept)[:count]
        if self._fused is not None:
            return self._fused(ids, places, context, kept)
        options = {} if kept is None else {"logits_to_keep": kept}
        output = self._model(
            input_ids=ids[None], position_ids=places[None], use_cache=False, attention_context=context, **options
        )
        return output.logits[0]

    def _sample(self, rows: slice, logits: Tensor) -> list[_Ended]:
        """Give each of ``rows`` its next token; retire and return those that end."""
        table = self._work.rows
        taus, points = table.column("temperature", rows), table.next_uniforms(rows)
        filters = {name: table.column(name, rows) for name in TOKEN_FILTERS}
        if any((filters[name] != off).any() for name, off in TOKEN_FILTERS.items()):
            logits = likely_tokens(logits[:, : self._valid_vocab], taus, **filters)
        tokens, logprobs, entropies = on_host(sample_tokens(logits, taus, points, self._valid_vocab, exact=self._exact))
        # one NaN or +inf among a row's logits makes its log-prob NaN, so this checks all of them
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {self._version}); its weights are "
                "broken: start a new run with a lower optimizer.learning_rate"
            )
        # a response that continues has known tokens: they replace the sampled ones, and the steps only fill its cache
        table.given(rows, (tokens, logprobs, entropies))
        full = table.record(rows, tokens, logprobs, entropies)
        self._work.sampled += len(tokens)
        ended = self._ends[tokens]
        over = np.flatnonzero(full | ended)
        if not len(over):
            return []
        done: list[_Ended] = []
        for index in over:
            reason = FinishReason.STOP if ended[index] else FinishReason.LENGTH
            done.append(table.output(rows.start + int(index), reason, self._decode))
        assert self._work.cache is not None
        moves = table.remove([rows.start + int(index) for index in over])
        self._work.cache.responses.move([(source, place, held + self._before) for source, place, held in moves])
        # a group is complete once nothing of it waits and no row reads its prompt
        read = set(table.column("owner").tolist())
        unread = {group.place for group, *_ in done if not group.waiting and group.place not in read}
        # The last prompts fill the gaps: from the back, so that a prompt that fills a gap is never one to be dropped.
        for place in sorted(unread, reverse=True):
            moved = self._work.prompts.pop()
            if place != len(self._work.prompts):
                self._work.cache.prompts.move([(moved.place, place, len(moved.request.prompt_tokens))])
                self._work.rows.moved_prompt(moved.place, place)
                self._work.prompts[place], moved.place = moved, place
        return done
