"""The rollout engine inside the trainer's process: continuous batching over a slot cache, exact and repeatable.

One turn of the loop: give free rows to waiting samples (the prompt of a group is computed and held once), decode one
token for every row, retire the rows that ended. Rows are filled in issue order, and what happens next depends on
requests and tokens only, never on time.
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
from magicrl.records import (
    Completion,
    FinishReason,
    RolloutRequest,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.protocol import Capabilities
from magicrl.rollout.requests import GroupProgress, OpenGroups, SchedulingEngine, check_request, with_begun
from magicrl.rollout.rows import RowOutput, RowTable, Work, pack_work, unpack_work
from magicrl.rollout.sampling import sample_tokens

_Ended = tuple[GroupProgress, int, Completion]  # a group, the index of its sample, which has ended
_ROOM = 128  # tokens of a block of prompts
_PREFILL_TOKENS = 8192  # most prompt tokens in one forward (one longer prompt goes alone)


def _lengths(request: RolloutRequest, *, exact: bool, room: bool = False) -> tuple[int, int]:
    """Room for the prompt (with ``room`` for the longest one that may follow it), and for the longest response."""
    prompt = len(request.prompt_tokens)
    if room and request.room:
        # whole blocks: one that was made for other prompts has blocks of this width, too, and gives the same bits
        prompt = -(-(prompt + request.room) // _ROOM) * _ROOM
    lengths = (prompt, request.sampling.max_tokens)
    return exact_lengths(*lengths) if exact else lengths


def _packs(groups: Sequence[GroupProgress]) -> Iterator[list[GroupProgress]]:
    """Groups sorted by prompt length (ties in issue order), cut into packs of at most 8,192 prompt tokens."""
    pack: list[GroupProgress] = []
    tokens = 0
    # prompts of one length lie side by side, so that attention takes them as one batch without padding
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

    capabilities = Capabilities(entropies=True, in_flight=True)

    def __init__(
        self,
        model: Any,
        *,
        end_tokens: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        valid_vocab: int,
        max_context: int,
        max_rows: int,
        memory_limit_mb: int,
        device: torch.device | str = "cpu",
        static_steps: bool | None = None,
        experts: bool = False,
        float32_head: bool = False,
        exact: bool = False,
    ) -> None:
        """
        Args:
            model: an HF causal LM of the engine's own, loaded with ``attn_implementation="magicrl"``.
            end_tokens: a response ends with any of these; the token is kept.
            decode: response tokens to text, special tokens left out.
            valid_vocab: logits from here on are padding and never sampled.
            max_context: most prompt + response tokens of a sequence.
            max_rows: most sequences that decode at once.
            memory_limit_mb: upper limit of the key/value cache in MiB; fewer rows are used when they do not fit.
            device: where the model is.
            static_steps: decode in steps of fixed shapes, as CUDA graphs need them, where the model allows it;
                default: on CUDA.
            experts: completions tell the experts that tokens went to.
            float32_head: the head's logits are float32, whatever the model's dtype.
            exact: a token's bits do not depend on what else is computed, and are a `PolicyScorer`'s of the same
                weights and threads (`magicrl.models.exact`).

        Raises:
            ValueError: an end token lies outside the vocabulary, a count is not positive, the model's layers mix
                packed sequences, it has no routers that could tell, or it cannot be exact.
        """
        if max_rows < 1 or max_context < 2 or valid_vocab < 1:
            raise ValueError(f"not a usable engine: {max_rows=}, {max_context=}, {valid_vocab=}")
        outside = sorted(t for t in end_tokens if not 0 <= t < valid_vocab)
        if outside:
            raise ValueError(f"end tokens {outside} lie outside the vocabulary of {valid_vocab} tokens")
        self._model = model.eval()
        self._max_context = max_context
        self._decode = decode
        self._device = torch.device(device)
        # a table, so that one look tells which rows of a step have ended
        self._ends = np.zeros(valid_vocab, dtype=np.bool_)
        self._ends[sorted(end_tokens)] = True
        self._exact, self._before = exact, AHEAD if exact else 0
        if exact:
            use_exact(model)
        keep_sequences_apart(model)
        self._routers = Routers(model) if experts else None
        self.capabilities = replace(InProcessEngine.capabilities, experts=experts)
        if float32_head:
            Float32Head.put_into(model)
        # prompts are packed into one forward: a layer that carries state over tokens would leak one into the next
        check_isolation(model, valid_vocab=valid_vocab, shared=False)
        check_attention(model)
        if self._routers is not None:
            self._routers.chosen()  # of the passes just made: every router must have told
        self._shape = probe_cache_shape(model, self._device)
        self._valid_vocab, self._max_rows, self._memory_limit_mb = valid_vocab, max_rows, memory_limit_mb
        # None: the model runs as transformers has it, as one with routers always does
        self._fused = fused_decoder(model) if self._routers is None else None
        if exact and self._fused is None:
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
        """Rows of the present cache: at most ``max_rows``; 0 before the first generation."""
        return self._work.cache.rows if self._work.cache is not None else 0

    @property
    def graphs_captured(self) -> int:
        """CUDA graphs of decoding steps captured so far."""
        return 0 if self._static is None else self._static.captured

    @property
    def devices(self) -> tuple[str, ...]:
        """The one that it computes on."""
        return (device_name(self._device),)

    def peak_mb(self) -> float:
        """Most memory of this process so far, a learner in it included."""
        return peak_mb(self._device)

    def busy_seconds(self) -> float:
        return self._busy

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """See `RolloutEngine.submit`; refused is also what does not fit into the memory limit."""
        for request in requests:
            self._check(request)
        self._work.queue.extend(self._groups.take_in(requests))

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Copy ``weights`` in. Sequences in flight keep their cache and go on under the new ones."""
        copy_weights(self._model, weights)
        if self._static is not None:
            self._static.reload()
        self._version = version
        self._work.rows.updated(version)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        unfinished = self._unfinished(keep=keep)
        # a new cache next time: broken weights may have left numbers in this one that are not finite
        self._work = Work()
        return unfinished

    def _running(self) -> Iterator[tuple[GroupProgress, int, Completion]]:
        for row in range(self._work.rows.active):
            output = self._work.rows.output(row)
            yield output.group, output.sample, self._completion(output, FinishReason.ABORTED)

    @contextmanager
    def newest_weights(self) -> Generator[None]:
        """Within it nothing is in flight; what was waits with its cache, which takes its memory meanwhile."""
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
        """What is in flight with its cache, so that a resumed run goes on with the same numbers, bit for bit."""
        return pack_work(self._work) if self._groups.unyielded() else {}

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Inverse of ``snapshot``; requests that it does not hold start from their beginning.

        Of a pool's snapshot (a run may go on without ``[cluster]``) it takes the responses that are there.
        """
        held = set[int]()
        # only this engine's own snapshot has it (`pack_work`); those of others hold responses alone
        if "orders" in snapshot:
            whole = self._static is not None
            self._work = unpack_work(snapshot, requests, self._shape, self._device, whole=whole, ahead=self._before)
            held = {id(group.request) for group in self._groups.unyielded()}
        self.submit(with_begun(snapshot, [request for request in requests if id(request) not in held]))

    @torch.inference_mode()
    def _advance(self) -> None:
        """Fill rows, decode a token for each, retire; what ends is filed in issue order."""
        begin = time.perf_counter()
        done = self._admit()
        if self._work.rows.active:
            done += self._decode_step()
        # not in the order of rows, which depends on what else is in the batch
        for ended in sorted(done, key=lambda ended: (ended[0].order, ended[1])):
            self._groups.file(*ended)
        self._busy += time.perf_counter() - begin

    def sampled_tokens(self) -> int:
        return self._work.sampled

    def _rows_that_fit(self, capacity: int) -> int:
        """How many sequences of ``capacity`` tokens fit into memory."""
        # a row is counted with a prompt of its own, since a group may have a single sample
        return min(self._max_rows, (self._memory_limit_mb << 20) // self._row_bytes(capacity))

    def _row_bytes(self, capacity: int) -> int:
        return capacity * self._shape.bytes_per_token + self._shape.bytes_per_row

    def _check(self, request: RolloutRequest) -> None:
        """Raise ``ValueError``, naming problem and remedy, for a request that cannot be served."""
        limit, name = request.sampling.max_tokens, f"problem {request.problem.id!r}"
        prompt, room = _lengths(request, exact=self._exact)
        check_request(request, self._max_context, valid_vocab=self._valid_vocab)
        for index, begun in request.begun:
            # an aborted beginning of T tokens has no room for the next one: it should have been recorded as ended
            unfinished = begun.finish_reason is FinishReason.ABORTED
            if index not in request.indices or len(begun) > limit or (unfinished and len(begun) == limit):
                raise ValueError(
                    f"{name}: sample {index} was begun with {len(begun)} tokens ({begun.finish_reason.value}), which "
                    f"cannot be gone on with: wanted are the samples {request.indices} of at most {limit} tokens"
                )
        # the last turn's prompt holds all that came before it, and its response is what is left of T
        most = max(room, request.room)
        if not self._rows_that_fit(prompt + most):
            need = self._row_bytes(prompt + most) / 2**20
            raise ValueError(
                f"{name}: prompt of {prompt} tokens + max_tokens {most} needs {need:.1f} MiB of cache, "
                f"rollout.memory_limit_mb is {self._memory_limit_mb}; raise it or lower max_tokens"
            )

    # filling rows

    def _admit(self) -> list[_Ended]:
        """Start waiting samples in issue order, as many as there are rows; those that ended at once."""
        if not self._work.queue:
            return []
        cache = self._fit_cache()
        first, starting = self._work.rows.active, list[tuple[GroupProgress, int]]()
        logits: list[Tensor] = []
        if self._work.kept is not None:
            logits.append(self._resume_group(cache, self._work.kept))
        # few large forwards of prompts instead of one whenever a row is free
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
                # the rows are full; the other samples start as rows come free, from the logits that are kept
                if samples < group.waiting:
                    break
                self._work.queue.popleft()
            logits += self._prefill(cache, starting)
        if self._work.rows.active == first:
            return []
        return self._sample(slice(first, self._work.rows.active), torch.cat(logits))

    def _fit_cache(self) -> SlotCache:
        """The cache, made anew between generations when the queue's longest prompt or response is another.

        Products round by the width of its blocks, which is that of the longest: kept from an earlier, longer queue it
        would give other bits than a resumed run has. A longer request than the present rows waits until these have
        drained. Where the longest prompt and the longest response of the queue do not fit into memory together, the
        cache is made for the queue's first group.
        """
        cache = self._work.cache
        # a group of which samples wait has its prompt there, also when no row is left
        if cache is not None and (self._work.rows.active or self._work.kept is not None):
            return cache
        needs = [_lengths(group.request, exact=self._exact, room=True) for group in self._work.queue]
        prompt, response = (max(column) for column in zip(*needs, strict=True))
        if not self._rows_that_fit(prompt + response):
            prompt, response = _lengths(self._work.queue[0].request, exact=self._exact)
        rows = self._rows_that_fit(prompt + response)
        held = (0, 0, 0) if cache is None else (cache.prompts.capacity, cache.responses.capacity, cache.rows)
        needed = (prompt, response, rows)
        # graphs are captured with its addresses: there it only grows
        fits = all(map(operator.le, needed, held)) if self._static is not None else needed == held
        if cache is None or not fits:
            self._work.cache = cache = None  # freed before the next one is allocated
            self._work.cache = cache = SlotCache(
                self._shape, rows, prompt, response, self._device, whole=self._static is not None, ahead=self._before
            )
            self._work.rows = RowTable(rows, response)
        return cache

    def _resume_group(self, cache: SlotCache, kept: Tensor) -> Tensor:
        """Start further samples of the first group, whose prompt was computed before; ``[samples, V]`` logits."""
        group = self._work.queue[0]
        samples = min(group.waiting, cache.rows - self._work.rows.active)
        self._work.rows.start(group, samples, self._version)
        if not group.waiting:
            self._work.queue.popleft()
            self._work.kept = None
        # all samples of a group draw their first token from the same logits
        return kept.expand(samples, -1)

    def _prefill(self, cache: SlotCache, starting: Sequence[tuple[GroupProgress, int]]) -> list[Tensor]:
        """Compute prompts once a group and start their samples; logits ``[samples, V]`` a group, in row order."""
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
        """Run packed prompts (sorted by length), filing each in its slot; ``[prompts, V]`` logits after each."""
        lengths = [len(group.request.prompt_tokens) for group in pack]
        runs = [
            (length, [g.place for g, n in zip(pack, lengths, strict=True) if n == length])
            for length in sorted(set(lengths))
        ]
        tokens = np.concatenate([group.request.prompt_tokens for group in pack]).astype(np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        # the head sees the last token of each prompt alone: logits of all tokens would be far the largest tensor
        ends = np.cumsum(lengths)
        logits = self._forward(tokens, positions, PrefillAttention(cache, runs), keep=ends - 1)
        if self._routers is not None:
            for group, experts in zip(pack, np.split(self._routers.chosen(), ends[:-1]), strict=True):
                group.experts = experts
        return logits

    # decoding

    def _decode_step(self) -> list[_Ended]:
        assert self._work.cache is not None
        # the last token of a row is not in the cache yet: this step feeds it and files its key and value
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
        """Logits ``[k, V]`` of one forward of packed tokens: after those that ``keep`` names, or all."""
        ids, places = (torch.from_numpy(np.array(a)).to(self._device) for a in (tokens, positions))
        kept = None if keep is None else torch.from_numpy(keep).to(self._device)
        if self._exact:
            return self._forward_exactly(ids, places, context, kept)
        if self._fused is not None:
            return self._fused(ids, places, context, kept)
        options = {} if kept is None else {"logits_to_keep": kept}
        output = self._model(
            input_ids=ids[None], position_ids=places[None], use_cache=False, attention_context=context, **options
        )
        return output.logits[0]

    def _forward_exactly(self, ids: Tensor, places: Tensor, context: Any, kept: Tensor | None) -> Tensor:
        assert self._fused is not None, "a known architecture"
        wanted = len(ids) if kept is None else len(kept)
        kept = None if kept is None else filled_rows(kept)
        return self._fused(filled_rows(ids), filled_rows(places), FilledContext(context, len(ids)), kept)[:wanted]

    def _sample(self, rows: slice, logits: Tensor) -> list[_Ended]:
        """Give each of ``rows`` its next token and retire those that end, which it returns."""
        table = self._work.rows
        sampled = sample_tokens(
            logits,
            table.column("temperature", rows),
            table.next_uniforms(rows),
            self._valid_vocab,
            exact=self._exact,
        )
        tokens, logprobs, entropies = sampled.on_host()
        # one NaN or +inf among a row's logits makes its log-prob NaN, so this looks at all of them
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {self._version}); its weights are "
                "broken: resume from an earlier checkpoint with a lower optimizer.learning_rate"
            )
        # of a response that goes on, what is known replaces what was sampled: these steps only fill its cache
        table.given(rows, (tokens, logprobs, entropies))
        full = table.record(rows, tokens, logprobs, entropies)
        self._work.sampled += len(tokens)
        ended = self._ends[tokens]
        over = np.flatnonzero(full | ended)
        if not len(over):
            return []
        done: list[_Ended] = []
        for index in over:
            output = table.output(rows.start + int(index))
            reason = FinishReason.STOP if ended[index] else FinishReason.LENGTH
            done.append((output.group, output.sample, self._completion(output, reason)))
        assert self._work.cache is not None
        # the cache follows move by move: the source of one may be the target of an earlier one
        for move in table.remove([rows.start + int(index) for index in over]):
            source, target, tokens = move
            self._work.cache.responses.move(source, target, tokens + self._before)
        # a group is complete once nothing of it waits and no row reads its prompt
        read = set(table.column("owner").tolist())
        unread = {group.place for group, *_ in done if not group.waiting and group.place not in read}
        self._drop_prompts(self._work.cache, unread)
        return done

    def _drop_prompts(self, cache: SlotCache, places: set[int]) -> None:
        """Free these slots, whose groups are complete; the last prompts fill the gaps."""
        # from the back, so that the prompt that fills a gap is never one to be dropped
        for place in sorted(places, reverse=True):
            moved = self._work.prompts.pop()
            if place != len(self._work.prompts):
                cache.prompts.move(moved.place, place, len(moved.request.prompt_tokens))
                self._work.rows.moved_prompt(moved.place, place)
                self._work.prompts[place], moved.place = moved, place

    def _completion(self, output: RowOutput, reason: FinishReason) -> Completion:
        # a response counts as old as its oldest part, the prompt's keys and values included
        oldest = min([output.group.version, *(version for version, _ in output.spans)])
        several = any(version != oldest for version, _ in output.spans)
        return Completion(
            tokens=frozen_tokens(output.tokens),
            text=self._decode(output.tokens.tolist()),
            sampler_logprobs=frozen_floats(output.logprobs),
            # not known of tokens that another engine sampled
            sampler_entropies=None if np.isnan(output.entropies).any() else frozen_floats(output.entropies),
            finish_reason=reason,
            policy_version=oldest,
            seconds=time.perf_counter() - output.group.began,
            version_spans=output.spans if several else (),
            experts=output.experts,
        )
