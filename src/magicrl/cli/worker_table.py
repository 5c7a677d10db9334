"""Who of a cluster does how much: a row a worker, from one step's metrics, as wide as there is room for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from magicrl.records import StepMetrics
from magicrl.reporting.wording import percent

MOST_REPLICAS, MOST_VERIFIERS = 4, 2
"""Rows; of more there are the slowest replicas and the busiest verifiers."""
GAP = 2
COLUMNS = ("tokens/s", "busy", "queue", "memory", "MFU", "per device")
"""The first ones stay where there is little room. ``queue``: now (most in the step); ``per device``: of tokens/s."""
_REPLICA = re.compile(r"cluster/replica_(\d+)/tokens")
_VERIFIER = re.compile(r"cluster/verifier_(\d+)/judged")
_LOST = (("replicas", "replica"), ("learner", "learner rank"), ("verifiers", "verifier node"))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRow:
    """One worker, or all of a kind: its name and the cells that were measured, by column."""

    name: str
    cells: Mapping[str, str]


def worker_rows(metrics: StepMetrics) -> tuple[list[WorkerRow], Text]:
    """The rows of a step and a note below them; none where the run has no cluster."""
    found = _Figures(metrics)
    replicas, verifiers = found.numbers(_REPLICA), found.numbers(_VERIFIER)
    if not replicas and not verifiers:
        return [], Text()
    slowest = sorted(replicas, key=lambda n: found[f"cluster/replica_{n}/tokens_per_second"] or 0.0)[:MOST_REPLICAS]
    busiest = sorted(verifiers, key=lambda n: -(found[f"cluster/verifier_{n}/busy_seconds"] or 0.0))[:MOST_VERIFIERS]
    rows = [
        found.all_of("learner", ("time/train", "time/other/old_logprobs")),
        found.all_of("engine", ("time/rollout",)),
    ]
    rows += [found.one(f"replica {n}", f"cluster/replica_{n}") for n in sorted(slowest)]
    rows += [found.one(f"verifier {n}", f"cluster/verifier_{n}") for n in sorted(busiest)]
    left_out = [
        f"{len(shown)} {which} of {len(there)}"
        for shown, there, which in ((slowest, replicas, "slowest replicas"), (busiest, verifiers, "busiest verifiers"))
        if len(shown) < len(there)
    ]
    lost = [(int(found[f"cluster/{key}/lost"] or 0), name) for key, name in _LOST]
    told = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in lost if count]
    notes = [Text(", ".join(left_out), style="dim")] if left_out else []
    notes += [Text(f"lost: {', '.join(told)}", style="yellow")] if told else []
    return [row for row in rows if row.cells], Text("; ").join(notes)


def worker_table(rows: Sequence[WorkerRow], width: int) -> Table:
    """The rows with as many columns as fit into ``width`` characters."""
    columns = [column for column in COLUMNS if any(column in row.cells for row in rows)]
    while len(columns) > 1 and _width(rows, columns) > width:
        columns.pop()
    table = Table.grid(padding=(0, GAP))
    table.add_column(no_wrap=True)
    for _ in columns:
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(Text(column, style="dim") for column in columns))
    for row in rows:
        table.add_row(Text(row.name, style="dim"), *(row.cells.get(column, "") for column in columns))
    return table


def memory(mebibytes: float) -> str:
    """``1536.0`` as ``1.5 GiB``, below one GiB whole MiB."""
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.0f} MiB"


class _Figures:
    """A step's numbers, and rows made of them."""

    def __init__(self, metrics: StepMetrics) -> None:
        self._values = metrics.values

    def __getitem__(self, key: str) -> float | None:
        value = self._values.get(key)
        return float(value) if isinstance(value, (int, float)) else None

    def numbers(self, pattern: re.Pattern[str]) -> list[int]:
        return sorted(int(match[1]) for match in map(pattern.fullmatch, self._values) if match)

    def all_of(self, kind: str, parts: Sequence[str]) -> WorkerRow:
        """The learner, or the engine, as a whole; it works while the step is in ``parts``."""
        mfu = self[f"speed/{kind}/mfu"]
        cells = self._cells(
            speed=self[f"speed/{kind}/tokens_per_second"],
            busy=sum(self[part] or 0.0 for part in parts),
            peak=self[f"memory/{kind}/peak_mb"],
            each=self[f"speed/{kind}/tokens_per_second_per_device"],
        )
        return WorkerRow(name=kind, cells=cells | ({} if mfu is None else {"MFU": percent(mfu, 0)}))

    def one(self, name: str, key: str) -> WorkerRow:
        cells = self._cells(
            speed=self[f"{key}/tokens_per_second"], busy=self[f"{key}/busy_seconds"], peak=self[f"{key}/peak_mb"]
        )
        queue, most = self[f"{key}/queue"], self[f"{key}/queue_max"]
        if queue is not None:
            cells["queue"] = f"{queue:.0f}" + ("" if most is None else f" ({most:.0f})")
        return WorkerRow(name=name, cells=cells)

    def _cells(
        self, *, speed: float | None, busy: float | None, peak: float | None, each: float | None = None
    ) -> dict[str, str]:
        step = self["time/step"]
        cells = {
            name: f"{value:,.0f}" for name, value in (("tokens/s", speed), ("per device", each)) if value is not None
        }
        if step and busy is not None:
            cells["busy"] = percent(min(1.0, busy / step), 0)
        if peak:
            cells["memory"] = memory(peak)
        return cells


def _width(rows: Sequence[WorkerRow], columns: Sequence[str]) -> int:
    cells = [max(len(column), *(len(row.cells.get(column, "")) for row in rows)) for column in columns]
    return max(len(row.name) for row in rows) + sum(GAP + cell for cell in cells)
