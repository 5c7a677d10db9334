"""A mini-batch spread over ranks: by tokens, evenly, and always in the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from magicrl.models.packing import families
from magicrl.records import TrainSample


def split_by_tokens(samples: Sequence[TrainSample], parts: int, token_budget: int) -> list[list[int]]:
    """Spread ``samples`` over ``parts`` shares of about as many tokens each.

    Responses to one prompt stay together as far as neither a micro-batch nor an even share is exceeded, so that the
    prompt is computed once. The largest family goes first, each to the share with the fewest tokens. The result
    depends on the arguments only. A share may be empty.

    Args:
        samples: a mini-batch.
        parts: shares.
        token_budget: most tokens of a micro-batch.

    Returns:
        ``parts`` ascending lists of indices into ``samples``; every index stands in exactly one.

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
