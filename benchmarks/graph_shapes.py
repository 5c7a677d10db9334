"""What steps of fixed shapes cost: how many CUDA graphs, and what rounding up computes and reads beyond the needed.

A step's rows are played pass by pass; each pass has the shape that the engine would capture (`StepShape`). No GPU is
needed for that, and nothing is said about time on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from measure import rounded
from tails import Group

from magicrl.models.decoding import StepShape
from magicrl.models.kv_cache import CacheShape, SlotCache
from magicrl.rollout.in_process import REFILL_SHARE

_ANY = CacheShape(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype=torch.bfloat16)


def shapes_of(groups: Sequence[Group], rows: int, prompt_tokens: int) -> dict[str, Any]:
    """Graphs of one step in issue order, and rows and cached tokens over those that are needed.

    Prompts are counted as read once a pass each on both sides.
    """
    longest = max(int(group.lengths.max()) for group in groups)
    cache = SlotCache(_ANY, rows, prompt_tokens, longest, torch.device("meta"), whole=True)
    waiting = [(number, int(length)) for number, group in enumerate(groups) for length in group.lengths]
    held, length, group = (np.zeros(0, dtype=np.int64) for _ in range(3))
    shapes = set[StepShape]()
    passes, computed, needed, read, used = 0, 0, 0, 0, 0
    while len(held) or waiting:
        free = rows - len(held)
        if waiting and (free >= max(1, rows // REFILL_SHARE) or not len(held)):
            started, waiting = waiting[:free], waiting[free:]
            held = np.append(held, np.zeros(len(started), dtype=np.int64))
            length = np.append(length, [n for _, n in started])
            group = np.append(group, [number for number, _ in started])
        owners = np.unique(group, return_inverse=True)[1]
        shape = StepShape.of(cache, owners, np.full(len(held), prompt_tokens), held)
        shapes.add(shape)
        passes, computed, needed = passes + 1, computed + shape.rows, needed + len(held)
        starts = [0, *(tokens for _, tokens in shape.tiers[:-1])]
        read += sum(count * (tokens - start) for start, (count, tokens) in zip(starts, shape.tiers, strict=True))
        read += shape.prompts * shape.prompt_tokens
        used += int((held + 1).sum()) + (int(owners.max()) + 1) * prompt_tokens
        held = held + 1
        alive = held < length - 1  # a response's last token is fed to nobody
        held, length, group = held[alive], length[alive], group[alive]
    return {
        "rows": rows,
        "passes": passes,
        "graphs": len(shapes),
        "rows_computed_over_needed": rounded(computed / needed),
        "cache_read_over_held": rounded(read / used),
    }
