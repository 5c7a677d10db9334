"""Scores and samples of an evaluation folder, for Python and notebooks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from magicrl.commands.run_folder import framed
from magicrl.reporting.comparison_page import evaluation_blocks
from magicrl.reporting.page import render_page
from magicrl.reporting.read_folders import RecordedEvaluation, scored_samples

if TYPE_CHECKING:
    import pandas as pd


class Evaluation:
    """Scores and samples of a model; a notebook shows them. ``path`` is the folder.

    Args:
        recorded: the folder's ``results.json``, read.
    """

    def __init__(self, recorded: RecordedEvaluation) -> None:
        self.recorded = recorded
        self.path = recorded.path

    @property
    def scores(self) -> pd.DataFrame:
        """Scores per benchmark: accuracy (and reward) with 95 % intervals, pass@k, maj@k, length, truncation."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for name, result in self.recorded.benchmarks.items():
            row: dict[str, Any] = {"benchmark": name, "problems": result.problems, "samples": result.samples}
            for key in ("accuracy", "reward", "length", "truncation"):
                interval = getattr(result, key)
                if interval is not None:
                    row |= {key: interval.mean, f"{key}_low": interval.low, f"{key}_high": interval.high}
            row |= {f"pass@{k}": interval.mean for k, interval in result.pass_at.items()}
            row |= {f"maj@{k}": interval.mean for k, interval in result.majority_at.items()}
            rows.append(row | {"not_judged": result.not_judged})
        return pd.DataFrame(rows).set_index("benchmark")

    def samples(self, benchmark: str | None = None) -> pd.DataFrame:
        """Return one row per judged response: problem, prompt, sample, text, outcome, score, tokens, ...

        Args:
            benchmark: its name; default: the only one.

        Raises:
            ValueError: no such benchmark, or several and none is named.
        """
        import pandas as pd

        known = list(self.recorded.benchmarks)
        if benchmark is None and len(known) == 1:
            benchmark = known[0]
        if benchmark not in known:
            raise ValueError(f"samples of which benchmark? {benchmark!r} is none of {', '.join(known)}")
        problems, rows = scored_samples(self.path / benchmark, self.recorded.benchmarks[benchmark].samples)
        prompts = {problem.id: problem.prompt for problem in problems}
        flags = ({name: getattr(row, name) for name in ("correct", "truncated", "reward")} for row in rows)
        found = zip(rows, flags, strict=True)
        return pd.DataFrame([{"prompt": prompts.get(row.problem), **asdict(row), **more} for row, more in found])

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {result.accuracy.mean:.3f}" for name, result in self.recorded.benchmarks.items())
        return f"<evaluation of {self.recorded.model} in {self.path}: {scores}>"

    def _repr_html_(self) -> str:
        blocks = [b for b in evaluation_blocks([self.recorded]) if b is not None and b.key != "responses"]
        return framed(render_page(self.recorded.model, [], blocks, kind="evaluation"))
