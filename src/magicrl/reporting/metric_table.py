"""The metrics of a training step (``metrics.toml``): what each is, how it is written, which way is better, where it is
drawn. A further figure is a row there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from magicrl.config.loader import shipped_table
from magicrl.config.schema import Section
from magicrl.reporting.charts import Unit

Low = Annotated[float | None, BeforeValidator(lambda value: None if value == "data" else value)]
"""The lower end of a y axis; ``"data"``: from the data."""


class Metric(Section):
    """A metric as pages show it. ``key`` is that of ``metrics.jsonl``."""

    key: str
    label: str = ""  # in the legend and the CSV of a figure
    unit: Unit = "number"
    title: str = ""  # title and note where it has a figure of its own
    note: str = ""
    better: Literal["higher", "lower", ""] = ""
    figure: str = ""  # of a run's page, in which it is a line
    color: int = 0  # slot of the palette
    # smooth: a running mean before the raw values; dots: each measurement is marked
    look: Literal["smooth", "line", "steps", "dots"] = "line"
    error: str | None = None  # metric of its standard error, drawn as a 95 % band; of a share inside [0, 1]
    ends: tuple[str, str] | None = None  # metrics of the ends of a band
    share_of: str | None = None  # metric that the values are divided by
    unlike: str | None = None  # left out where it equals this metric at every step
    silent: float | None = None  # left out where all its values (and ends) are this one
    compared: str = ""  # key of its figure in a comparison
    instead: str = ""  # metric that a comparison takes at steps without this one
    exact: bool = False  # a comparison shows its values as they are, without running mean
    y_low: Low = 0.0  # ends of the y axis in a comparison
    y_high: float | None = None


class Figure(Section):
    """A figure of a run's page; its lines are the metrics that name it, its other fields those of ``Chart``.

    Without ``title`` and ``note`` it has those of its only metric.
    """

    key: str
    title: str = ""
    note: str = ""
    y_low: Low = 0.0
    y_high: float | None = None
    target: str | None = None  # a metric
    stacked: bool = False
    compact: bool = False
    tests: bool = False  # the test's scores are in it too


class Group(Section):
    """Metrics and figures under one heading. ``panels`` holds figures that share a card and its x axis."""

    key: str
    title: str
    metrics: tuple[Metric, ...]
    panels: tuple[tuple[Figure, ...], ...]


class _Groups(Section):
    groups: tuple[Group, Group, Group]


METRICS = LEARNING, POLICY, TIME = shipped_table("reporting/metrics.toml", _Groups).groups
