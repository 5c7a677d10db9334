"""The sheet on which a person labels problems: one self-contained page, and a CSV for those who prefer a table."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from magicrl.pipeline.judging.calibration import Sampled
from magicrl.pipeline.judging.prompt import CRITERIA


def write_sheet(sample: Sequence[Sampled], texts: Mapping[str, str], folder: Path) -> Path:
    """Write ``sheet.html``, ``sheet.csv`` and ``weights.json`` (for ``calibrate``) and return the page's path.

    The page shows one problem at a time and no votes, so that they cannot sway a label; it asks nothing of a network,
    keeps labels in the browser and saves them as CSV or JSON.

    Args:
        sample: from ``sample_for_labels``.
        texts: statements by problem id.
        folder: is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems = [{"id": one.problem, "text": texts[one.problem]} for one in sample]
    # the text of a problem must not end the script element that holds it
    data = json.dumps(problems).replace("<", "\\u003c")
    criteria = "".join(f"<li>{html.escape(text)}</li>" for text in CRITERIA.values())
    page = files("magicrl.pipeline.judging").joinpath("sheet.html").read_text(encoding="utf-8")
    path = folder / "sheet.html"
    path.write_text(page.replace("<!--CRITERIA-->", criteria).replace("/*PROBLEMS*/[]", data), encoding="utf-8")
    with (folder / "sheet.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "label", "note", "text"])
        table.writerows([one["id"], "", "", one["text"]] for one in problems)
    weights = {one.problem: one.weight for one in sample}
    (folder / "weights.json").write_text(json.dumps(weights, indent=1), encoding="utf-8")
    return path
