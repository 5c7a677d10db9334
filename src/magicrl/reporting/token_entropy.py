"""Where a policy is uncertain: entropy by position in the response, its concentration on few tokens, and those tokens.

The entropy of a token is that of the distribution from which it was drawn, in nats: a token of high entropy is one at
which the policy could have gone on differently. A run's page has a line a step, a comparison a line an arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from magicrl.reporting.arms import Arm
from magicrl.reporting.charts import PALETTE, Bar, Chart, FigureView, Series, bars_view, chart_view
from magicrl.reporting.page import Block, figures_block
from magicrl.reporting.read_folders import RecordedRun, RunFolderError
from magicrl.reporting.samples import observed_spans, recordings, run_tokenizer
from magicrl.reporting.wording import number, visible

MOST_BINS = 24
LEAST_TOKENS = 8
"""Tokens below which a bin of positions, or a token of the vocabulary, says too little to be shown."""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the tokens at which the concentration is read."""
MOST_STEPS = 4
MOST_BARS = 14
UNCERTAIN = "Where the policy is uncertain"
MEANT = "The entropy of a token is that of the distribution from which it was drawn, in nats."


class Recorded(NamedTuple):
    """The responses of one step (or evaluation): ids and entropies of all tokens, one behind the other."""

    ids: NDArray[np.int64]  # [tokens]
    entropies: NDArray[np.float64]  # [tokens], nats
    lengths: NDArray[np.int64]  # [responses], tokens of each


NamedTokens: TypeAlias = tuple[int, str, Recorded]
"""Recorded tokens with the slot of the palette and the name that the figures give them."""


class PositionBin(NamedTuple):
    """Positions ``first`` to ``last`` (from 1) of the responses: mean entropy, and how many tokens it is a mean of."""

    first: int
    last: int
    mean: float
    tokens: int


class TokenShare(NamedTuple):
    """One token of the vocabulary: how often it was drawn, its mean entropy, its share of all entropy."""

    token: int
    drawn: int
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
    return joined([Recorded(np.array(i, np.int64), np.array(e, np.float64), np.array([len(i)])) for i, e in responses])


def joined(parts: Sequence[Recorded]) -> Recorded | None:
    """Several recordings as one; None where there is no token."""
    if not any(len(part.ids) for part in parts):
        return None
    ids, entropies, lengths = zip(*parts, strict=True)
    return Recorded(np.concatenate(ids), np.concatenate(entropies), np.concatenate(lengths))


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
    positions = np.concatenate([np.arange(1, length + 1) for length in data.lengths])
    slots = np.searchsorted(edges, positions, side="right") - 1
    counts = np.bincount(slots, minlength=len(edges) - 1)
    sums = np.bincount(slots, weights=data.entropies, minlength=len(edges) - 1)
    return [
        PositionBin(edges[i], edges[i + 1] - 1, float(sums[i] / counts[i]), int(counts[i]))
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
    total = float(sums.sum()) or 1.0
    order = np.argsort(-sums, kind="stable")
    return [
        TokenShare(int(tokens[i]), int(counts[i]), float(sums[i] / counts[i]), float(sums[i] / total)) for i in order
    ]


def most_uncertain(shares: Sequence[TokenShare], most: int) -> list[TokenShare]:
    """The tokens of highest mean entropy among those drawn at least ``LEAST_TOKENS`` times."""
    often = [share for share in shares if share.drawn >= LEAST_TOKENS]
    return sorted(often, key=lambda share: (-share.mean, share.token))[:most]


def run_entropy(run: RecordedRun) -> Block | None:
    """The block of one run: a line a step, bars of the last; None where nothing was recorded.

    Raises:
        RunFolderError: a recording that cannot be read.
    """
    paths = recordings(run.path / "rollouts")
    inside = [[step for step in sorted(paths) if s.first_step <= step <= s.last_step] for s in run.stages]
    ends = [steps[-1] for steps in inside if steps]
    steps = sorted({min(paths), *ends}) if ends else []
    steps = steps if len(steps) <= MOST_STEPS else [steps[0], *steps[1 - MOST_STEPS :]]
    told = [(step, data) for step in steps if (data := read_tokens(paths[step])) is not None]
    named = [(slot, f"step {step}", data) for slot, (step, data) in enumerate(told)]
    if not named:
        return None
    tokenizer = run_tokenizer(run)
    panels = [[chart_view(chart)] for chart in entropy_charts(named)]
    panels += [[view] for view in _token_views(token_shares(named[-1][2]), tokenizer, named[-1][1])]
    missing = "" if tokenizer else " No tokenizer lies beside the model: tokens are named by their ids."
    return figures_block("tokens", UNCERTAIN, panels, MEANT + missing)


def arms_entropy(arms: Sequence[Arm]) -> Block | None:
    """The same for a comparison: a line an arm, of the last recorded step of each of its runs together."""
    named: list[NamedTokens] = []
    ends: set[int] = set()
    for slot, arm in enumerate(arms):
        parts: list[Recorded] = []
        for run in arm.runs:
            paths = recordings(run.path / "rollouts")
            inside = [step for step in paths if not run.metrics or step <= run.metrics[-1].step]
            if inside and (data := read_tokens(paths[max(inside)])) is not None:
                parts.append(data)
                ends.add(max(inside))
        if (whole := joined(parts)) is not None:
            named.append((slot, arm.name, whole))
    if not named:
        return None
    steps = f"step {min(ends)}" + (f" to {max(ends)}" if len(ends) > 1 else "")
    note = f"Of the last recorded rollouts of each run ({steps}). {MEANT}"
    return figures_block("tokens", UNCERTAIN, [[chart_view(chart)] for chart in entropy_charts(named)], note)


def read_tokens(path: Path) -> Recorded | None:
    """Tokens and entropies of one recorded step; None where the engine told no entropies.

    Raises:
        RunFolderError: the file cannot be read.
    """
    try:
        wanted = ("tokens", "sampler_entropies", "episode")  # older recordings have no episodes
        table = pq.read_table(path, columns=[name for name in pq.read_schema(path).names if name in wanted])
        told = table.filter(table["sampler_entropies"].is_valid()).combine_chunks()
        ids, values = (told[name].combine_chunks() for name in ("tokens", "sampler_entropies"))
        lengths, others = (np.diff(np.asarray(column.offsets, dtype=np.int64)) for column in (ids, values))
    except (pa.ArrowException, OSError) as error:
        raise RunFolderError(f"{path}: no recording of rollouts: {error}; remove the file") from None
    if not np.array_equal(lengths, others):
        raise RunFolderError(f"{path}: a response has another number of entropies than tokens; remove the file")
    flat = Recorded(np.asarray(ids.flatten(), np.int64), np.asarray(values.flatten(), np.float64), lengths)
    if "episode" in told.column_names:
        flat = _without_observations(flat, told["episode"].to_pylist())
    return flat if len(flat.ids) else None


def _without_observations(data: Recorded, episodes: Sequence[str | None]) -> Recorded:
    """What the policy wrote: an environment's tokens were not drawn."""
    sampled, lengths = np.ones(len(data.ids), dtype=np.bool_), data.lengths.copy()
    for row, (start, episode) in enumerate(zip(np.cumsum(data.lengths) - data.lengths, episodes, strict=True)):
        for first, count in observed_spans(episode):
            sampled[start + first : start + first + count] = False
            lengths[row] -= count
    return Recorded(data.ids[sampled], data.entropies[sampled], lengths)


def entropy_charts(named: Sequence[NamedTokens], *, prefix: str = "") -> tuple[Chart, ...]:
    """Entropy by position, and its concentration, a line each; ``prefix`` goes before the names of the exports."""
    edges = bin_edges(max(int(data.lengths.max()) for _, _, data in named))
    position: list[Series] = []
    concentrated: list[Series] = []
    for slot, name, data in named:
        color = slot % len(PALETTE)
        means = tuple(((b.first + b.last) / 2, b.mean) for b in by_position(data, edges))
        held = tuple((100 * x, y) for x, y in concentration(data))
        position.append(Series(label=name, points=means, color=color, dots=True))
        concentrated.append(Series(label=name, points=held, color=color))
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


def _token_views(shares: Sequence[TokenShare], tokenizer: Tokenizer | None, where: str) -> list[FigureView]:
    """Tokens that hold most of all entropy, and those of the highest mean entropy."""
    views: list[FigureView] = []
    holding: list[Bar] = [
        (token_name(tokenizer, s.token), s.share, f"{s.drawn:,} × {number(s.mean, 2)}")
        for s in shares[:MOST_BARS]
        if s.share > 0
    ]
    if holding:
        note = "Behind a bar: how often the token was drawn, times its mean entropy."
        title = f"Tokens that hold most entropy, {where}"
        views.append(bars_view("tokens_by_share", title, "share of all entropy", holding, note, unit="percent"))
    uncertain: list[Bar] = [
        (token_name(tokenizer, s.token), s.mean, f"{s.drawn:,} times")
        for s in most_uncertain(shares, MOST_BARS)
        if s.mean > 0
    ]
    if uncertain:
        note = f"Of the tokens that were drawn at least {LEAST_TOKENS} times."
        title = f"Most uncertain tokens, {where}"
        views.append(bars_view("tokens_by_mean", title, "mean entropy, nats", uncertain, note, color=1))
    return views


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as it reads, with its spaces and line ends made visible; its id where no tokenizer knows it."""
    if tokenizer is None:
        return f"#{token}"
    text = str(tokenizer.decode([token], skip_special_tokens=False)) or str(tokenizer.id_to_token(token) or "")
    return visible(text[:40]).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or f"#{token}"
