"""Where a policy is uncertain: entropy by position in the response, its concentration on few tokens, and those tokens.

The entropy of a token is that of the distribution from which it was drawn, in nats: a token of high entropy is one at
which the policy could have gone on differently. A run's page has a line a step, a comparison a line an arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from magicrl.reporting.arms import Arm
from magicrl.reporting.charts import PALETTE, Chart, FigureView, Series, chart_view
from magicrl.reporting.page import Block, figures_block
from magicrl.reporting.read_folders import RecordedRun, RunFolderError
from magicrl.reporting.row_charts import bars_view
from magicrl.reporting.samples import recordings, run_tokenizer
from magicrl.reporting.wording import number, visible

Floats: TypeAlias = NDArray[np.float64]

MOST_BINS = 24
LEAST_TOKENS = 8
"""Tokens below which a bin of positions, or a token of the vocabulary, says too little to be shown."""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the tokens at which the concentration is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The responses of one step (or evaluation): ids and entropies of all tokens, one behind the other.

    Attributes:
        ids: [tokens].
        entropies: [tokens], nats.
        lengths: [responses], tokens of each; they add up to ``len(ids)``.
    """

    ids: NDArray[np.int64]
    entropies: Floats
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Positions ``first`` to ``last`` (from 1) of the responses: mean entropy, and how many tokens it is a mean of."""

    first: int
    last: int
    mean: float
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """One token of the vocabulary: how often it was drawn, its mean entropy, its share of all entropy."""

    token: int
    count: int
    mean: float
    share: float


def recorded(responses: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Recorded | None:
    """(ids, entropies) of each response as one; None where there is no token.

    Raises:
        ValueError: a response with another number of entropies than tokens.
    """
    for ids, entropies in responses:
        if len(ids) != len(entropies):
            raise ValueError(f"a response of {len(ids)} tokens has {len(entropies)} entropies")
    if not any(len(ids) for ids, _ in responses):
        return None
    return Recorded(
        ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in responses]),
        entropies=np.concatenate([np.asarray(values, dtype=np.float64) for _, values in responses]),
        lengths=np.array([len(ids) for ids, _ in responses], dtype=np.int64),
    )


def bin_edges(longest: int, bins: int = MOST_BINS) -> list[int]:
    """First positions of at most ``bins`` bins of equal width over 1 to ``longest``, and one behind the last.

    Example:
        >>> bin_edges(10, 4)
        [1, 4, 7, 10, 11]
    """
    width = -(-longest // bins)
    return [*range(1, longest + 1, width), longest + 1]


def by_position(data: Recorded, edges: Sequence[int]) -> list[PositionBin]:
    """Mean entropy over all tokens in each bin of positions; bins of fewer than ``LEAST_TOKENS`` tokens are left out.

    Late bins hold only the responses that are so long.
    """
    starts = np.cumsum(data.lengths) - data.lengths
    positions = np.arange(len(data.ids)) - np.repeat(starts, data.lengths) + 1
    slots = np.searchsorted(np.asarray(edges), positions, side="right") - 1
    counts = np.bincount(slots, minlength=len(edges) - 1)
    sums = np.bincount(slots, weights=data.entropies, minlength=len(edges) - 1)
    return [
        PositionBin(first=edges[i], last=edges[i + 1] - 1, mean=float(sums[i] / counts[i]), tokens=int(counts[i]))
        for i in range(len(edges) - 1)
        if counts[i] >= LEAST_TOKENS
    ]


def concentration(data: Recorded, shares: Sequence[float] = SHARES) -> list[tuple[float, float]]:
    """(share of the tokens, share of all entropy that the most uncertain so many of them hold) pairs.

    Empty where there is no entropy at all.
    """
    total = float(data.entropies.sum())
    if total <= 0:
        return []
    held = np.cumsum(np.sort(data.entropies)[::-1]) / total
    count = len(held)
    return [(share, float(held[min(count, max(1, round(share * count))) - 1])) for share in shares]


def token_shares(data: Recorded) -> list[TokenShare]:
    """Every drawn token of the vocabulary, the one that holds most of all entropy first."""
    tokens, inverse, counts = np.unique(data.ids, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=data.entropies, minlength=len(tokens))
    total = float(sums.sum())
    order = np.argsort(-sums, kind="stable")
    return [
        TokenShare(
            token=int(tokens[i]),
            count=int(counts[i]),
            mean=float(sums[i] / counts[i]),
            share=float(sums[i] / total) if total > 0 else 0.0,
        )
        for i in order
    ]


def most_uncertain(shares: Sequence[TokenShare], most: int) -> list[TokenShare]:
    """The tokens of highest mean entropy among those drawn at least ``LEAST_TOKENS`` times."""
    often = [share for share in shares if share.count >= LEAST_TOKENS]
    return sorted(often, key=lambda share: (-share.mean, share.token))[:most]


MOST_STEPS = 4
MOST_BARS = 14
UNCERTAIN = "Where the policy is uncertain"
MEANT = "The entropy of a token is that of the distribution from which it was drawn, in nats."


NamedTokens: TypeAlias = tuple[int, str, Recorded]
"""Recorded tokens with the slot of the palette and the name that the figures give them."""


def run_entropy(run: RecordedRun) -> Block | None:
    """The block of one run: a line a step, bars of the last; None where nothing was recorded.

    Raises:
        RunFolderError: a recording that cannot be read.
    """
    paths = recordings(run.path / "rollouts")
    steps = _first_and_stage_ends(run, sorted(paths))
    told = [(step, data) for step in steps if (data := read_tokens(paths[step])) is not None]
    named = [(slot, f"step {step}", data) for slot, (step, data) in enumerate(told)]
    if not named:
        return None
    tokenizer = run_tokenizer(run)
    panels = [[chart_view(chart)] for chart in entropy_charts(named)]
    _, last, data = named[-1]
    panels += [[view] for view in token_views(token_shares(data), tokenizer, last)]
    note = MEANT
    if tokenizer is None:
        note += " No tokenizer lies beside the model: tokens are named by their ids."
    return figures_block("tokens", UNCERTAIN, panels, note)


def _first_and_stage_ends(run: RecordedRun, steps: Sequence[int]) -> list[int]:
    """The first recorded step and the last of each stage, at most ``MOST_STEPS``."""
    ends = [
        inside[-1]
        for stage in run.stages
        if (inside := [step for step in steps if stage.first_step <= step <= stage.last_step])
    ]
    chosen = sorted({steps[0], *ends}) if ends else []
    return chosen if len(chosen) <= MOST_STEPS else [chosen[0], *chosen[1 - MOST_STEPS :]]


def arms_entropy(arms: Sequence[Arm]) -> Block | None:
    """The same for a comparison: a line an arm, of the last recorded step of each of its runs together."""
    named: list[NamedTokens] = []
    unequal: set[int] = set()
    for slot, arm in enumerate(arms):
        parts: list[Recorded] = []
        for run in arm.runs:
            paths = recordings(run.path / "rollouts")
            inside = [step for step in paths if not run.metrics or step <= run.metrics[-1].step]
            data = read_tokens(paths[max(inside)]) if inside else None
            if data is not None:
                parts.append(data)
                unequal.add(max(inside))
        if parts:
            named.append((slot, arm.name, joined(parts)))
    if not named:
        return None
    steps = f"step {unequal.pop()}" if len(unequal) == 1 else f"step {min(unequal)} to {max(unequal)}"
    note = f"Of the last recorded rollouts of each run ({steps}). {MEANT}"
    return figures_block("tokens", UNCERTAIN, [[chart_view(chart)] for chart in entropy_charts(named)], note)


def joined(parts: Sequence[Recorded]) -> Recorded:
    """Several recordings as one."""
    return Recorded(
        ids=np.concatenate([part.ids for part in parts]),
        entropies=np.concatenate([part.entropies for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
    )


def read_tokens(path: Path) -> Recorded | None:
    """Tokens and entropies of one recorded step; None where the engine told no entropies.

    Raises:
        RunFolderError: the file cannot be read.
    """
    try:
        table = pq.read_table(path, columns=["tokens", "sampler_entropies"])
        told = table.filter(table["sampler_entropies"].is_valid()).combine_chunks()
        ids, values = (told[name].combine_chunks() for name in ("tokens", "sampler_entropies"))
        lengths, others = (np.diff(np.asarray(column.offsets, dtype=np.int64)) for column in (ids, values))
    except (pa.ArrowException, OSError) as error:
        raise RunFolderError(f"{path}: no recording of rollouts: {error}; remove the file") from None
    if not np.array_equal(lengths, others):
        raise RunFolderError(f"{path}: a response has another number of entropies than tokens; remove the file")
    if not lengths.sum():
        return None
    return Recorded(
        ids=np.asarray(ids.flatten(), dtype=np.int64),
        entropies=np.asarray(values.flatten(), dtype=np.float64),
        lengths=lengths,
    )


def entropy_charts(named: Sequence[NamedTokens], *, prefix: str = "") -> tuple[Chart, ...]:
    """Entropy by position, and its concentration, a line each; ``prefix`` goes before the names of the exports."""
    edges = bin_edges(max(int(data.lengths.max()) for _, _, data in named))
    position = [
        Series(
            label=name,
            points=tuple(((b.first + b.last) / 2, b.mean) for b in by_position(data, edges)),
            color=slot % len(PALETTE),
            dots=True,
        )
        for slot, name, data in named
    ]
    concentrated = [
        Series(
            label=name,
            points=tuple((100 * x, y) for x, y in concentration(data)),
            color=slot % len(PALETTE),
        )
        for slot, name, data in named
    ]
    width = edges[1] - edges[0]
    bins = f"Mean over bins of {width} positions" if width > 1 else "Mean at each position"
    charts = (
        Chart(
            key=f"{prefix}entropy_by_position",
            title="Entropy by position",
            series=tuple(position),
            y_low=0.0,
            x_name="position in the response, tokens",
            x_word="position",
            x_whole=False,
            note=f"{bins}; with fewer than {LEAST_TOKENS} tokens there is no point. Only responses so long count at a "
            "position.",
        ),
        Chart(
            key=f"{prefix}entropy_concentration",
            title="Entropy held by the most uncertain tokens",
            series=tuple(concentrated),
            unit="percent",
            y_low=0.0,
            y_high=1.0,
            x_name="per cent of the tokens, the most uncertain first",
            x_word="% of tokens",
            x_range=(0.0, 100.0),
            note="A steep rise: a few tokens, at which the response forks, hold most of the entropy.",
        ),
    )
    return tuple(chart for chart in charts if not chart.empty)


def token_views(shares: Sequence[TokenShare], tokenizer: Tokenizer | None, where: str) -> list[FigureView]:
    """Tokens that hold most of all entropy, and those of the highest mean entropy."""
    holding = [s for s in shares if s.share > 0][:MOST_BARS]
    uncertain = [s for s in most_uncertain(shares, MOST_BARS) if s.mean > 0]
    views: list[FigureView] = []
    if holding:
        bars = [(token_name(tokenizer, s.token), s.share, f"{s.count:,} × {number(s.mean, 2)}") for s in holding]
        note = "Behind a bar: how often the token was drawn, times its mean entropy."
        title = f"Tokens that hold most entropy, {where}"
        views.append(bars_view("tokens_by_share", title, "share of all entropy", bars, note, unit="percent"))
    if uncertain:
        bars = [(token_name(tokenizer, s.token), s.mean, f"{s.count:,} times") for s in uncertain]
        note = f"Of the tokens that were drawn at least {LEAST_TOKENS} times."
        title = f"Most uncertain tokens, {where}"
        views.append(bars_view("tokens_by_mean", title, "mean entropy, nats", bars, note, color=1))
    return views


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as it reads, with its spaces and line ends made visible; its id where no tokenizer knows it."""
    if tokenizer is None:
        return f"#{token}"
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    text = text or str(tokenizer.id_to_token(token) or "")
    shown = visible(text[:40]).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return shown or f"#{token}"
