"""What dedup and decontamination compare: a text with a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A problem as dedup and decontamination see it.

    Attributes:
        id: unique among the documents of one call.
        text: the problem's statement.
        quality: how well specified the problem is; of two copies the one with the larger tuple is kept, of equal ones
            the earlier. Tuples of one call are equally long.

    Example:
        >>> Document("gsm8k-0", "Ann has 3 apples. How many are left?", (1.0, 36.0)).id
        'gsm8k-0'
    """

    id: str
    text: str
    quality: tuple[float, ...] = ()
