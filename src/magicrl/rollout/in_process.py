"""The rollout engine inside the trainer's process: continuous batching over a slot cache, exact and repeatable.

One turn of the loop: give free rows to waiting samples (the prompt of a group is computed and held once), decode one
token for every row, retire the rows that ended. Rows are filled in issue order, and what happens next depends on
requests and tokens only, never on time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.decode_attention import DecodeAttention
from magicrl.models.decoder import fused_decoder
from magicrl.models.slot_cache import PrefillAttention, PromptRun, SlotCache, probe_cache_shape
from magicrl.records import (
    Completion,
    FinishedSample,
    FinishReason,
    RolloutGroup,
    RolloutRequest,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.rows import GroupProgress, RowTable
from magicrl.rollout.sampling import sample_tokens
from magicrl.rollout.weights import copy_weights

_PREFILL_TOKENS = 8192  # most prompt tokens in one forward (one longer prompt goes alone)
_REFILL_SHARE = 8  # new prompts are computed once a 1/8 of the rows is free: fewer, larger forwards


class InProcessEngine:
    """A `magicrl.rollout.protocol.RolloutEngine` on one device.

    Tokens are a function of weights, prompt, temperature and (seed, draw, sample, position). In float32 another
    ``max_rows`` gives the same tokens but for near-ties, since matrix products of another size round differently.
    """

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

        Raises:
            ValueError: an end token lies outside the vocabulary, or a count is not positive.
        """
        if max_rows < 1 or max_context < 2 or valid_vocab < 1:
            raise ValueError(f"not a usable engine: {max_rows=}, {max_context=}, {valid_vocab=}")
        outside = sorted(t for t in end_tokens if not 0 <= t < valid_vocab)
        if outside:
            raise ValueError(f"end tokens {outside} lie outside the vocabulary of {valid_vocab} tokens")
        self._model = model.eval()
        self._decode = decode
        self._valid_vocab = valid_vocab
        self._max_context = max_context
        self._max_rows = max_rows
        self._memory_limit_mb = memory_limit_mb
        self._device = torch.device(device)
        self._ends = np.zeros(valid_vocab, dtype=np.bool_)
        self._ends[sorted(end_tokens)] = True
        self._shape = probe_cache_shape(model, self._device)
        self._fused = fused_decoder(model)  # None: the model runs as transformers has it
        self._version = -1
        self._orders = 0
        self._queue: deque[GroupProgress] = deque()  # groups with samples that have not started
        self._open: dict[int, GroupProgress] = {}  # every unfinished group by issue order
        self._kept: Tensor | None = (
            None  # logits after the prompt of the queue's first group, if it has started in part
        )
        self._prompts: list[GroupProgress] = []  # by cache slot
        self._cache: SlotCache | None = None
        self._rows = RowTable(0, 0)

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def rows(self) -> int:
        """Rows of the present cache: at most ``max_rows``; 0 before the first generation."""
        return self._cache.rows if self._cache is not None else 0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; all or, on an error, none of them.

        Raises:
            ValueError: an empty prompt; a token outside the vocabulary; prompt + ``max_tokens`` over ``max_context``
                or over the memory limit.
        """
        for request in requests:
            self._check(request)
        for request in requests:
            group = GroupProgress(order=self._orders, request=request)
            self._orders += 1
            self._queue.append(group)
            self._open[group.order] = group

    def finished(self) -> Iterator[RolloutGroup]:
        """Generate until nothing is queued, yielding each group as its last member ends."""
        while self._open:
            complete = {group.order: group for group, _ in self._turn() if group.complete}
            for order in sorted(complete):
                del self._open[order]
                request = complete[order].request
                completions = tuple(complete[order].done[index] for index in request.indices)
                yield RolloutGroup(request=request, completions=completions)

    def finished_samples(self) -> Iterator[FinishedSample]:
        """Generate until nothing is queued, yielding each completion as it ends."""
        while self._open:
            for group, index in sorted(self._turn(), key=lambda item: (item[0].order, item[1])):
                if group.complete:
                    self._open.pop(group.order, None)
                yield FinishedSample(request=group.request, index=index, completion=group.done[index])

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Copy ``weights`` in. Sequences in flight go on under the new ones and keep their older version number."""
        copy_weights(self._model, weights)
        if self._fused is not None:
            self._fused.reload()
        self._version = version

    def interrupt(self) -> list[RolloutRequest]:
        """Stop generating, drop partial work and return the unfinished requests in issue order."""
        unfinished = [self._open[order].request for order in sorted(self._open)]
        self._queue.clear()
        self._open.clear()
        self._kept = None
        self._prompts.clear()
        # a new cache next time: broken weights may have left numbers in this one that are not finite
        self._cache, self._rows = None, RowTable(0, 0)
        return unfinished

    def close(self) -> None:
        """Drop all work and free the cache."""
        self.interrupt()

    def _check(self, request: RolloutRequest) -> None:
        prompt, limit = len(request.prompt_tokens), request.sampling.max_tokens
        name = f"problem {request.problem.id!r}"
        if prompt == 0:
            raise ValueError(f"{name} has an empty prompt; a model needs at least one token to continue")
        if prompt + limit > self._max_context:
            raise ValueError(
                f"{name}: prompt of {prompt} tokens + max_tokens {limit} exceeds the context of {self._max_context} "
                "tokens; lower max_tokens (T) or drop the problem"
            )
        if request.group_size < 1 or request.draw < 0 or request.sampling.seed < 0:
            raise ValueError(
                f"{name}: group_size must be positive, draw and seed not negative; got "
                f"{request.group_size}, {request.draw}, {request.sampling.seed}"
            )
        wanted = request.indices
        if not wanted or list(wanted) != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] >= request.group_size:
            raise ValueError(f"{name}: samples must be ascending indices below {request.group_size}, got {wanted}")
        low, high = int(request.prompt_tokens.min()), int(request.prompt_tokens.max())
        if low < 0 or high >= self._valid_vocab:
            raise ValueError(f"{name}: prompt tokens {low}..{high} leave the vocabulary of {self._valid_vocab}")
        if not self._fitting_rows(prompt + limit):
            need = (prompt + limit) * self._shape.bytes_per_token / 2**20
            raise ValueError(
                f"{name}: prompt of {prompt} tokens + max_tokens {limit} needs {need:.1f} MiB of cache, "
                f"rollout.memory_limit_mb is {self._memory_limit_mb}; raise it or lower max_tokens"
            )

    def _fitting_rows(self, capacity: int) -> int:
        return min(self._max_rows, (self._memory_limit_mb << 20) // (capacity * self._shape.bytes_per_token))

    @torch.inference_mode()
    def _turn(self) -> list[tuple[GroupProgress, int]]:
        """Fill rows, decode a token for each, retire; the samples that ended, with their groups."""
        done = self._admit()
        if self._rows.active:
            done += self._decode_step()
        return done

    # filling rows

    def _admit(self) -> list[tuple[GroupProgress, int]]:
        """Start waiting samples in issue order, as many as there are rows; those that ended at once."""
        if not self._queue:
            return []
        cache = self._fit_cache()
        first, starting = self._rows.active, list[tuple[GroupProgress, int]]()
        logits: list[Tensor] = []
        if self._kept is not None:
            logits.append(self._resume_group(cache, self._kept))
        free, few = cache.rows - self._rows.active, max(1, cache.rows // _REFILL_SHARE)
        if self._queue and self._kept is None and (free >= few or not self._rows.active):
            while self._queue and free and self._fits(cache, self._queue[0]):
                group = self._queue[0]
                samples = min(group.waiting, free)
                starting.append((group, samples))
                free -= samples
                if samples < group.waiting:
                    break
                self._queue.popleft()
            logits += self._prefill(cache, starting)
        if self._rows.active == first:
            return []
        return self._sample(slice(first, self._rows.active), torch.cat(logits))

    @staticmethod
    def _fits(cache: SlotCache, group: GroupProgress) -> bool:
        prompt, response = _tokens(group)
        return prompt <= cache.prompts.capacity and response <= cache.responses.capacity

    def _fit_cache(self) -> SlotCache:
        """The cache, made anew between generations when the queue needs longer rows or could have more of them.

        A longer request than the present rows waits until these have drained. Where the longest prompt and the longest
        response of the queue do not fit into memory together, the cache is made for the queue's first group.
        """
        cache = self._cache
        if cache is not None and self._rows.active:
            return cache
        needs = [_tokens(group) for group in self._queue]
        prompt, response = (max(column) for column in zip(*needs, strict=True))
        if not self._fitting_rows(prompt + response):
            prompt, response = needs[0]
        rows = self._fitting_rows(prompt + response)
        held = (0, 0, 0) if cache is None else (cache.prompts.capacity, cache.responses.capacity, cache.rows)
        if cache is None or prompt > held[0] or response > held[1] or rows > held[2]:
            self._cache = cache = None  # freed before the next one is allocated
            self._cache = cache = SlotCache(self._shape, rows, prompt, response, self._device)
            self._rows = RowTable(rows, response)
        return cache

    def _resume_group(self, cache: SlotCache, kept: Tensor) -> Tensor:
        """Start further samples of the first group, whose prompt was computed before; ``[samples, V]`` logits."""
        group = self._queue[0]
        samples = min(group.waiting, cache.rows - self._rows.active)
        self._rows.start(group, samples)
        if not group.waiting:
            self._queue.popleft()
            self._kept = None
        return kept.expand(samples, -1)

    def _prefill(self, cache: SlotCache, starting: Sequence[tuple[GroupProgress, int]]) -> list[Tensor]:
        """Compute prompts once a group and start their samples; logits ``[samples, V]`` a group, in row order."""
        logits: dict[int, Tensor] = {}
        now = time.perf_counter()
        for group, _ in starting:
            group.began, group.version, group.place = now, self._version, len(self._prompts)
            self._prompts.append(group)
        for pack in _packs([group for group, _ in starting]):
            outputs = self._forward_prompts(cache, pack)
            logits.update({group.order: outputs[index : index + 1] for index, group in enumerate(pack)})
        for group, samples in starting:
            self._rows.start(group, samples)
            if group.waiting:
                self._kept = logits[group.order].clone()
        return [logits[group.order].expand(samples, -1) for group, samples in starting]

    def _forward_prompts(self, cache: SlotCache, pack: Sequence[GroupProgress]) -> Tensor:
        """Run packed prompts (sorted by length), filing each in its slot; ``[prompts, V]`` logits after each."""
        lengths = [len(group.request.prompt_tokens) for group in pack]
        runs: list[PromptRun] = []
        start = 0
        for length in sorted(set(lengths)):
            members = tuple(g.place for g, n in zip(pack, lengths, strict=True) if n == length)
            runs.append(PromptRun(start=start, length=length, slots=members))
            start += length * len(members)
        tokens = np.concatenate([group.request.prompt_tokens for group in pack]).astype(np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return self._forward(tokens, positions, PrefillAttention(cache, runs), keep=np.cumsum(lengths) - 1)

    # decoding

    def _decode_step(self) -> list[tuple[GroupProgress, int]]:
        assert self._cache is not None
        prompts, held = self._rows.column("prompt"), self._rows.column("count") - 1
        context = DecodeAttention(
            self._cache, owners=self._rows.column("owner"), prompt_lengths=prompts, response_lengths=held
        )
        logits = self._forward(self._rows.column("last"), prompts + held, context)
        return self._sample(slice(0, self._rows.active), logits)

    def _forward(
        self, tokens: NDArray[Any], positions: NDArray[Any], context: Any, keep: NDArray[Any] | None = None
    ) -> Tensor:
        """Logits ``[k, V]`` of one forward of packed tokens: after those that ``keep`` names, or all."""
        ids, places = (torch.from_numpy(np.array(a)).to(self._device) for a in (tokens, positions))
        kept = None if keep is None else torch.from_numpy(keep).to(self._device)
        if self._fused is not None:
            return self._fused(ids, places, context, kept)
        options = {} if kept is None else {"logits_to_keep": kept}
        output = self._model(
            input_ids=ids[None], position_ids=places[None], use_cache=False, attention_context=context, **options
        )
        return output.logits[0]

    def _sample(self, rows: slice, logits: Tensor) -> list[tuple[GroupProgress, int]]:
        """Give each of ``rows`` its next token and retire those that end, which it returns."""
        table = self._rows
        sampled = sample_tokens(logits, table.column("temperature", rows), table.next_uniforms(rows), self._valid_vocab)
        tokens, logprobs = sampled.tokens.cpu().numpy(), sampled.logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {self._version}); its weights are "
                "broken: resume from an earlier checkpoint with a lower optimizer.learning_rate"
            )
        full = table.record(rows, tokens, logprobs, sampled.entropies.cpu().numpy())
        ended = self._ends[tokens]
        over = np.flatnonzero(full | ended)
        if not len(over):
            return []
        done = [self._complete(rows.start + int(index), stopped=bool(ended[index])) for index in over]
        assert self._cache is not None
        for move in table.remove([rows.start + int(index) for index in over]):
            self._cache.responses.move(*move)
        self._drop_prompts(self._cache, {group.place for group, _ in done if group.complete})
        return done

    def _drop_prompts(self, cache: SlotCache, places: set[int]) -> None:
        """Free the slots of complete groups; the last prompts fill the gaps."""
        for place in sorted(places, reverse=True):
            moved = self._prompts.pop()
            if place != len(self._prompts):
                cache.prompts.move(moved.place, place, len(moved.request.prompt_tokens))
                self._rows.moved_prompt(moved.place, place)
                self._prompts[place], moved.place = moved, place

    def _complete(self, row: int, *, stopped: bool) -> tuple[GroupProgress, int]:
        """File the completion of ``row``; its group and sample index."""
        group, sample, tokens, logprobs, entropies = self._rows.output(row)
        group.done[sample] = Completion(
            tokens=frozen_tokens(tokens),
            text=self._decode(tokens.tolist()),
            sampler_logprobs=frozen_floats(logprobs),
            sampler_entropies=frozen_floats(entropies),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            policy_version=group.version,
            seconds=time.perf_counter() - group.began,
        )
        return group, sample


def _tokens(group: GroupProgress) -> tuple[int, int]:
    """Tokens of the prompt, and of the longest response."""
    return len(group.request.prompt_tokens), group.request.sampling.max_tokens


def _packs(groups: Sequence[GroupProgress]) -> Iterator[list[GroupProgress]]:
    """Groups sorted by prompt length (ties in issue order), cut into packs of at most ``_PREFILL_TOKENS``."""
    pack: list[GroupProgress] = []
    tokens = 0
    for group in sorted(groups, key=lambda g: len(g.request.prompt_tokens)):
        length = len(group.request.prompt_tokens)
        if pack and tokens + length > _PREFILL_TOKENS:
            yield pack
            pack, tokens = [], 0
        pack.append(group)
        tokens += length
    if pack:
        yield pack
