"""Write the table of ``docs/reference/metrics.md`` from ``metrics.toml``: ``python -m tools.metrics_page``."""

from __future__ import annotations

from magicrl.reporting.curves import METRICS
from tools.pages import ROOT, put_section, table

PAGE = ROOT / "docs" / "reference" / "metrics.md"


def section() -> list[str]:
    """Return the lines of the table: key, unit and meaning of each metric that the pages draw."""
    rows: dict[str, tuple[str, str, str]] = {}
    for group in METRICS:
        figures = {figure.key: figure for panel in group.panels for figure in panel}
        for metric in group.metrics:
            figure = figures.get(metric.figure)
            title = metric.title or ": ".join(filter(None, (figure.title if figure else "", metric.label)))
            note = metric.note or (figure.note if figure else "")
            unit = "share, 0 to 1" if metric.unit == "percent" else metric.unit
            rows.setdefault(metric.key, (f"`{metric.key}`", unit, f"{title}. {note}".strip()))
    return table("key | unit | meaning", rows.values())


if __name__ == "__main__":
    put_section(PAGE, "metrics", section())
