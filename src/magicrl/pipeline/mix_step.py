"""The mix step: draws rows by difficulty bands, caps and weights, and writes them in the released schema."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.config.errors import RecipeError
from magicrl.data.sources import RECORDED_ROLLOUTS
from magicrl.files import whole_file, write_atomically
from magicrl.pipeline.card import write_card
from magicrl.pipeline.entry import RELEASED_FIELDS
from magicrl.pipeline.frame import Context, Drop, PipelineStep, write_drops
from magicrl.pipeline.parts import Part, StepFolder, read_part
from magicrl.pipeline.pipeline_schema import MixStep


def write_mixture(parts: Sequence[Part], folder: Path, *, split: bool) -> dict[str, int]:
    """Write ``train.parquet``, or one file per ability, and ``ids.jsonl`` with the problem of each row.

    Returns:
        Number of rows by file name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models = sorted({name for table in _tables(parts, ["extra_info"]) for row in _difficulties(table) for name in row})
    # ``model_difficulty`` has a field per model, and is absent if none was measured
    measured = [("model_difficulty", pa.struct([(name, pa.int64()) for name in models]))] if models else []
    extra = pa.field("extra_info", pa.struct([("index", pa.int64()), *measured]))
    schema = pa.schema([*RELEASED_FIELDS, extra])
    released = [field.name for field in RELEASED_FIELDS]
    rows: Counter[str] = Counter()
    ids: list[str] = []
    # all writers finish before the first file is renamed, so that a full disk changes none of them
    with ExitStack() as files, ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for table in _tables(parts, [*released, "extra_info", "id"]):
            for name, some in _by_file(table, split=split):
                if name not in writers:
                    file = files.enter_context(whole_file(folder / name))
                    writers[name] = stack.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))
                extras = [
                    {"index": row["index"], "model_difficulty": dict(row["model_difficulty"] or ())}
                    for row in some.column("extra_info").to_pylist()
                ]
                column = pa.array(extras, extra.type)  # selects the fields of the type
                writers[name].write_table(some.select(released).append_column(extra, column).cast(schema))
                for identity in some.column("id").to_pylist():
                    ids.append(json.dumps({"file": name, "row": rows[name], "id": identity}))
                    rows[name] += 1
    write_atomically(folder / "ids.jsonl", "".join(f"{line}\n" for line in ids))
    # with another `split` the old files would be read together with the new ones
    for stale in folder.glob("train*.parquet"):
        if stale.name not in rows:
            stale.unlink()
    return dict(rows)


def _tables(parts: Sequence[Part], columns: list[str]) -> Iterator[pa.Table]:
    for part in parts:
        table = read_part(part.path, columns)
        if table.num_rows:
            yield table


def _difficulties(table: pa.Table) -> list[dict[str, int]]:
    """Return the failures of 16 by model for each row."""
    return [dict(row["model_difficulty"] or ()) for row in table.column("extra_info").to_pylist()]


def _by_file(table: pa.Table, *, split: bool) -> Iterator[tuple[str, pa.Table]]:
    if not split:
        yield "train.parquet", table
        return
    abilities = table.column("ability").to_pylist()
    for ability in sorted(set(abilities)):
        yield f"train_{ability}.parquet", table.filter(pa.array([one == ability for one in abilities]))


class Mix(PipelineStep[MixStep]):
    """Draws rows by a hash of seed and id, so that neither their order nor other sources affect the choice."""

    use = "mix"

    def identity(self, context: Context) -> Any:
        return self._settings.model_dump(mode="json")

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Store the rows that are not drawn, with the reason."""
        settings = self._settings
        drops: dict[str, Drop] = {}
        labels = {source.label for source in self._config.sources}
        seen: set[str] = set()
        models: set[str] = set()
        eligible: defaultdict[str, list[tuple[bytes, str]]] = defaultdict(list)
        for part in parts:
            table = read_part(part.path, ["id", "source", "extra_info"])
            inside = set(table.column("source").unique().to_pylist())
            seen |= inside
            # rows of another run keep the names of its sources
            labels -= {part.name.rpartition(".")[0]} - inside if inside else set()
            for row, difficulty in zip(table.select(["id", "source"]).to_pylist(), _difficulties(table), strict=True):
                models |= difficulty.keys()
                fault = self._outside(difficulty)
                if fault is not None:
                    drops[row["id"]] = Drop(fault)
                    continue
                # a hash, so that neither other rows nor their order affect the draw
                order = hashlib.blake2b(f"{settings.seed}/{row['id']}".encode(), digest_size=12).digest()
                eligible[row["source"]].append((order, row["id"]))
        for band in settings.bands:
            if band.model not in models:
                have = ", ".join(sorted(models)) or "none"
                raise RecipeError(f"no row has a difficulty under {band.model!r}; known: {have}", key="bands")
        known = sorted(seen | labels)
        for key, names in (("caps", settings.caps), ("weights", settings.weights)):
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise RecipeError(f"no source is called {unknown[0]!r}; known: {', '.join(known)}", key=key)
        available = {source: len(rows) for source, rows in eligible.items()}
        quotas = quotas_of(available, caps=settings.caps, weights=settings.weights, size=settings.size)
        for source, rows in eligible.items():
            cap = settings.caps.get(source, len(rows))
            for place, (_, name) in enumerate(sorted(rows)):
                if place >= quotas[source]:
                    drops[name] = Drop(f"over the cap of {source}" if place >= cap else "not drawn")
        write_drops(folder, drops)

    def _outside(self, difficulty: Mapping[str, int]) -> str | None:
        for band in self._settings.bands:
            failures = difficulty.get(band.model)
            if failures is None:
                if band.without == "drop":
                    return f"no difficulty under {band.model}"
            elif not band.low <= failures / RECORDED_ROLLOUTS <= band.high:
                return f"outside the band of {band.model}"
        return None

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Write the training files and the data card."""
        mixture = context.output / "mixture"
        files = write_mixture(parts, mixture, split=self._settings.split_by_ability)
        size, drawn = self._settings.size, sum(files.values())
        if size is not None and drawn < size:
            context.watcher.note(f"size = {size}: only {drawn} rows pass bands, caps and weights; all are drawn")
        write_card(self._config, context.output, folder, files)

    def is_finished(self, context: Context) -> bool:
        mixture = context.output / "mixture"
        if not (mixture / "card.json").is_file():
            return False
        files = json.loads((mixture / "card.json").read_text(encoding="utf-8"))["files"]
        return all((mixture / name).is_file() for name in ("ids.jsonl", "card.html", "card.md", *files))


def quotas_of(
    available: Mapping[str, int], *, caps: Mapping[str, int], weights: Mapping[str, float], size: int | None
) -> dict[str, int]:
    """Return how many rows to draw from each source.

    Without weights and size, all rows up to the caps are drawn. With weights only, shares are exact and as large as the
    scarcest source allows. With a size, a source that cannot fill its share gives all its rows, and the others share
    the rest by weight.

    Raises:
        RecipeError: A weight is negative or not finite.

    Example:
        >>> quotas_of({"a": 100, "b": 100}, caps={"a": 10}, weights={}, size=None)
        {'a': 10, 'b': 100}
        >>> quotas_of({"a": 100, "b": 100}, caps={}, weights={"a": 3, "b": 1}, size=40)
        {'a': 30, 'b': 10}
        >>> quotas_of({"a": 100, "b": 100}, caps={}, weights={"a": 1, "b": 2}, size=None)
        {'a': 50, 'b': 100}
    """
    room = {source: min(count, caps.get(source, count)) for source, count in available.items()}
    share = {source: float(weights.get(source, 1.0)) for source in room}
    wrong = next((source for source, weight in share.items() if not (weight >= 0 and math.isfinite(weight))), None)
    if wrong is not None:
        raise RecipeError(f"weight of {wrong} must be a number of at least 0, got {share[wrong]}", key="weights")
    if not weights and size is None:
        return room
    if size is None:
        largest = max(share.values(), default=0.0) or 1.0
        share = {
            source: weight / largest for source, weight in share.items()
        }  # a division by a tiny weight would overflow
        # a cap of 0 leaves a source out, as a weight of 0 does
        scarcest = min(
            (room[source] / weight for source, weight in share.items() if weight and room[source]), default=0
        )
        # 1e-9: 0.29 * 100 is 28.999999999999996, and 29 is meant
        return {source: math.floor(scarcest * weight + 1e-9) if room[source] else 0 for source, weight in share.items()}
    # Sources with too few rows give all they have, and the others make up for them.
    quota = dict.fromkeys(room, 0)
    open_sources = {source for source in room if share[source] > 0 and room[source] > 0}
    left = min(size, sum(room[source] for source in open_sources))
    while left and open_sources:
        total = sum(share[source] for source in open_sources)
        exact = {source: left * share[source] / total for source in open_sources}
        # these give all their rows, and the rest is divided again in the next round
        full = {source for source in open_sources if exact[source] >= room[source]}
        if not full:
            floors = {source: math.floor(value) for source, value in exact.items()}
            rest = left - sum(floors.values())
            # largest remainders (Hamilton's method), ties by name: the sum is exactly `left`
            by_remainder = sorted(open_sources, key=lambda source: (floors[source] - exact[source], source))
            extra = Counter(by_remainder[:rest])
            return quota | {source: floors[source] + extra[source] for source in open_sources}
        for source in full:
            quota[source] = room[source]
            left -= room[source]
        open_sources -= full
    return quota
