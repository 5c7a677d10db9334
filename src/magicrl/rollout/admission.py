"""What the in-process engine takes: the limits of a request, and how many rows fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magicrl.records import FinishReason, RolloutRequest
from magicrl.rollout.external import check_request
from magicrl.rollout.rows import GroupProgress

_PREFILL_TOKENS = 8192  # most prompt tokens in one forward (one longer prompt goes alone)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of an engine.

    Attributes:
        max_context: most prompt + response tokens of a sequence.
        valid_vocab: tokens from here on are padding.
        max_rows: most sequences that decode at once.
        memory_limit_mb: MiB of the key/value cache.
        bytes_per_token: of the cache.
    """

    max_context: int
    valid_vocab: int
    max_rows: int
    memory_limit_mb: int
    bytes_per_token: int

    def rows(self, capacity: int) -> int:
        """How many sequences of ``capacity`` tokens fit."""
        return min(self.max_rows, (self.memory_limit_mb << 20) // (capacity * self.bytes_per_token))

    def check(self, request: RolloutRequest) -> None:
        """
        Raises:
            ValueError: the request cannot be served; names the problem and the remedy.
        """
        prompt, limit = len(request.prompt_tokens), request.sampling.max_tokens
        name = f"problem {request.problem.id!r}"
        if prompt == 0:
            raise ValueError(f"{name} has an empty prompt; a model needs at least one token to continue")
        check_request(request, self.max_context, valid_vocab=self.valid_vocab)
        for index, begun in request.begun:
            unfinished = begun.finish_reason is FinishReason.ABORTED
            if index not in request.indices or len(begun) > limit or (unfinished and len(begun) == limit):
                raise ValueError(
                    f"{name}: sample {index} was begun with {len(begun)} tokens ({begun.finish_reason.value}), which "
                    f"cannot be gone on with: wanted are the samples {request.indices} of at most {limit} tokens"
                )
        if not self.rows(prompt + limit):
            need = (prompt + limit) * self.bytes_per_token / 2**20
            raise ValueError(
                f"{name}: prompt of {prompt} tokens + max_tokens {limit} needs {need:.1f} MiB of cache, "
                f"rollout.memory_limit_mb is {self.memory_limit_mb}; raise it or lower max_tokens"
            )


def lengths_of(group: GroupProgress) -> tuple[int, int]:
    """Tokens of the prompt, and of the longest response."""
    return len(group.request.prompt_tokens), group.request.sampling.max_tokens


def packs(groups: Sequence[GroupProgress]) -> Iterator[list[GroupProgress]]:
    """Groups sorted by prompt length (ties in issue order), cut into packs of at most 8,192 prompt tokens."""
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
