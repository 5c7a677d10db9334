"""Results of a training run as data frames and figures: `load_run`."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicrl.commands.given import in_python
from magicrl.config.given import PathText, path_text
from magicrl.reporting.curves import figure_groups
from magicrl.reporting.page import PageBlock, render_page
from magicrl.reporting.read_folders import RecordedRun, SetEvaluation, read_run
from magicrl.reporting.run_page import run_blocks, run_facts
from magicrl_verifiers.progress import plural

if TYPE_CHECKING:
    import pandas as pd

_LEFT_OUT = ("samples", "rollouts", "entropy")
"""Sections with all responses, which a notebook omits: they are megabytes, and available as data frames."""
_LONG = ("prompt_tokens", "tokens", "sampler_logprobs", "sampler_entropies", "version_spans")
"""Columns of recorded rollouts with one number per token."""


@in_python()
def load_run(path: PathText) -> Run:
    """Return the run in this folder, finished or not.

    Raises:
        ValueError: no run folder, or a corrupt file in it.
    """
    return Run(read_run(Path(path_text("path", path))))


class Run:
    """A run, read from its folder. A notebook shows its verdict, results and curves.

    Args:
        recorded: the folder, read.
    """

    def __init__(self, recorded: RecordedRun) -> None:
        self.recorded = recorded
        self._path = recorded.path.absolute()  # a notebook may change its working directory

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._path

    @property
    def model(self) -> Path:
        """Folder of the trained model. It exists once the run has finished."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """The run's page."""
        return self.path / "report.html"

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped`` or ``failed``."""
        return self.recorded.status

    @property
    def verdict(self) -> str:
        """Answer to "did it learn?" in a sentence; empty before the run's end."""
        learning = self.recorded.learning
        return "" if learning is None else f"{learning.title}: {learning.reason}"

    @property
    def learned(self) -> bool | None:
        """False if the run finished and the model learned nothing; None before the end."""
        learning = self.recorded.learning
        return None if learning is None else not learning.failed

    @property
    def config(self) -> Mapping[str, Any]:
        """Recipe with all defaults. `train` accepts its file, ``path / "config.toml"``."""
        return self.recorded.config

    @property
    def metrics(self) -> pd.DataFrame:
        """Metrics with one row per training step and one column per metric (``train/accuracy/mean``, ...)."""
        import pandas as pd

        rows = [{"step": row.step, "stage": row.stage, **row.values} for row in self.recorded.metrics]
        return pd.DataFrame(rows, columns=None if rows else ["step", "stage"]).set_index("step")

    @property
    def events(self) -> pd.DataFrame:
        """Events, one row each: time, kind, message, step and further fields."""
        import pandas as pd

        return pd.DataFrame([dict(event) for event in self.recorded.events])

    @property
    def evaluations(self) -> pd.DataFrame:
        """Evaluations, one row per set and temperature: accuracy (and reward) with 95 % intervals, length, truncation.

        ``test`` is ``before``, ``after``, or ``step-N`` of `Training.evaluate`.
        """
        order = {"before": 0, "after": 2}
        return evaluation_rows(sorted(self.recorded.evaluations, key=lambda found: order.get(found.name, 1)))

    def rollouts(self, steps: int | Collection[int] | None = None, *, tokens: bool = False) -> pd.DataFrame:
        """Return one row per recorded response: step, draw, sample, problem_id, text, reward, outcome, ...

        Args:
            steps: Step or steps to read; default: all recorded ones.
            tokens: Include token ids, log-probs and entropies, one array per response.
        """
        import pandas as pd
        import pyarrow.parquet as pq

        files = {int(p.stem.rpartition("-")[2]): p for p in sorted((self.path / "rollouts").glob("step-*.parquet"))}
        chosen = set(files if steps is None else (steps,) if isinstance(steps, int) else steps)
        missing = [step for step in chosen if step not in files]
        if missing:
            present = f"steps {min(files)} to {max(files)}" if files else "none (logging.rollouts_every = 0?)"
            raise ValueError(f"{self.path / 'rollouts'} has no step {missing[0]!r}; it has {present}")
        frames: list[pd.DataFrame] = []
        for step, path in files.items():
            if step in chosen:
                columns = [name for name in pq.read_schema(path).names if tokens or name not in _LONG]
                frames.append(pd.read_parquet(path, columns=columns))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def figures(self, group: str | None = None) -> Figures:
        """Return the report's charts for a notebook.

        Args:
            group: ``learning``, ``policy`` or ``time``; default: all.

        Raises:
            ValueError: no such group, or the run has no step to draw.
        """
        known = [metrics.key for metrics, _, _ in figure_groups(self.recorded)]
        if not known or (group is not None and group not in known):
            has = f"it has {', '.join(known)}" if known else "it has no training step yet"
            raise ValueError(f"no figures {group or ''} of the run in {self.path}; {has}".replace("  ", " "))
        wanted = known if group is None else [group]
        return Figures(self.recorded.name, [b for b in run_blocks(self.recorded) if b.key in wanted])

    def __repr__(self) -> str:
        told = f", {self.verdict}" if self.verdict else ""
        steps = plural(len(self.recorded.metrics), "step")
        return f"<run {self.recorded.name!r} in {self.path}: {self.status}, {steps}{told}>"

    def _repr_html_(self) -> str:
        blocks = [b for b in run_blocks(self.recorded) if b.key not in _LEFT_OUT]
        return framed(render_page(self.recorded.name, run_facts(self.recorded), blocks))


class Figures:
    """Charts of a run; a notebook shows them."""

    def __init__(self, title: str, blocks: list[PageBlock]) -> None:
        self._title = title
        self._blocks = blocks

    def _repr_html_(self) -> str:
        return framed(render_page(self._title, [], self._blocks, kind="figures"))


def framed(page: str) -> str:
    """Return a page as an iframe, so that its style and script do not affect the notebook."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="allow-scripts allow-downloads" '
        f'style="width:100%;height:640px;border:0"></iframe>'
    )


def evaluation_rows(evaluations: Iterable[SetEvaluation]) -> pd.DataFrame:
    """Return one row per evaluation and temperature."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for found in evaluations:
        for temperature, score in sorted(found.temperatures.items()):
            row: dict[str, Any] = {"test": found.name, "set": found.set_name, "temperature": temperature}
            for name, interval in (("accuracy", score.accuracy), ("reward", score.reward)):
                if interval is not None:
                    row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            row |= {"problems": score.problems, "samples": score.samples, "length": score.length_mean}
            row |= {"truncation": score.truncation, "entropy": score.entropy}
            rows.append(row | {f"pass@{k}": interval.mean for k, interval in score.pass_at.items()})
    return pd.DataFrame(rows)
