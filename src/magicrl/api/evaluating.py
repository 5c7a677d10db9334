"""Evaluation from Python, as ``magicrl eval`` evaluates: `evaluate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console

from magicrl.api.evaluation_display import EvalDisplay
from magicrl.api.given import Data, RewardFunction, data_reference, in_python, path_text, reward_reference
from magicrl.api.runs import framed
from magicrl.config.errors import RecipeError
from magicrl.config.loader import Recipe, load_train_recipe
from magicrl.config.schema import DType
from magicrl.config.verifier_schema import JudgeConfig
from magicrl.evaluation.benchmarks import Asked, LoadedBenchmark, Reading, load_benchmark, parse_asked
from magicrl.evaluation.presets import PRESETS
from magicrl.evaluation.results import Ask
from magicrl.registry import check
from magicrl.reporting.evaluation_page import evaluation_blocks
from magicrl.reporting.page import render_page
from magicrl.reporting.read_folders import RecordedEvaluation, evaluated, read_evaluation_folder
from magicrl_verifiers.batch import usable_cores
from magicrl_verifiers.records import Extract, Reasoning

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd

    from magicrl.evaluation.runner import EvaluationSettings, Watcher


def evaluate(
    model: str | PathLike[str],
    benchmarks: str | PathLike[str] | Sequence[str | PathLike[str]] | Mapping[str, Data],
    *,
    output: str | PathLike[str],
    samples: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    preset: Literal["report", "released-code", "study"] | None = None,
    seed: int = 0,
    limit: int | None = None,
    limit_seed: int | None = None,
    template: str | None = None,
    fields: Mapping[str, str] | None = None,
    reward: str | RewardFunction | None = None,
    judge: Recipe | None = None,
    environment: str | None = None,
    max_turns: int = 8,
    max_observation_tokens: int = 256,
    reasoning: Reasoning | None = None,
    extract: Extract | None = None,
    time_limit: float = 10.0,
    workers: int | None = None,
    engine: str = "in_process",
    engine_options: Mapping[str, Any] | None = None,
    dtype: DType = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    max_rows: int = 32,
    memory_limit_mb: int = 4096,
    threads: int | None = None,
    pass_at: Sequence[int] | None = None,
    majority_at: Sequence[int] | None = None,
    keep_tokens: bool = False,
    progress: bool | Watcher = True,
) -> Evaluation:
    """Sample and judge problems: avg@k, pass@k, maj@k, length and truncation with intervals.

    Args:
        model: a model folder or hub name; with ``engine="openai"`` the name that the server knows it by.
        benchmarks: a benchmark's name, a file, a folder or a hub name, or several; or names of your own with what they
            hold: records, problems, a data frame, a function.
        output: the folder that samples and results go to; the same call again goes on where it stopped.
        samples: a problem; default: the preset's, or 1.
        temperature: of sampling; default: the preset's, or 1; 0 is greedy.
        max_tokens: the response limit; default: the preset's, or 4096.
        preset: settings of a published evaluation.
        seed: of the sampling.
        limit: problems of each benchmark at most: the first, or with ``limit_seed`` some at random.
        limit_seed: draws them.
        template: text around each prompt; holds ``{prompt}``.
        fields: columns by what they hold (``prompt``, ``answer``, ``id``, ``level``).
        reward: in place of the benchmark's verifier: a name, or a function ``(problem, response) -> score``.
        judge: a training recipe (name, file or tree): the served model of its ``[verifier.judge]`` judges.
        environment: answers the turns of each response: a name, or ``file.py:Class``.
        max_turns: of the model in an episode.
        max_observation_tokens: of what the environment says to one turn.
        reasoning: how the end of the reasoning is found; default: ``required`` where the chat template opens it.
        extract: ``box`` or ``lenient``; default: the preset's, or lenient.
        time_limit: CPU seconds of judging one response.
        workers: processes that judge; default: the cores this process may use.
        engine: ``in_process``, ``vllm``, ``openai``, or ``file.py:function``.
        engine_options: of that engine, e.g. ``{"base_url": "http://localhost:8000/v1"}``.
        dtype: precision of the weights in memory.
        device: where the model runs.
        max_rows: sequences that decode at once.
        memory_limit_mb: MiB of the key/value cache.
        threads: of torch; default: the cores this process may use.
        pass_at: k of pass@k; default: powers of two.
        majority_at: k of maj@k; default: the largest power of two.
        keep_tokens: token ids and entropies with the samples.
        progress: whether, or by whom, it is told how it goes.

    Raises:
        ValueError: an argument is wrong, the model or a benchmark cannot be used, or ``output`` holds another job.
        KeyboardInterrupt: stopped by a person; every finished sample is kept.
    """
    with in_python():
        asked = _asked(benchmarks)
        folder = Path(path_text("output", output))
        name = path_text("model", model)
        verifier = None if reward is None else check("reward", reward_reference(reward))
        served = None if judge is None else recipe_judge(judge)
        check("engine", engine)
        if environment is not None:
            check("environment", environment)
        reading = Reading(
            limit=limit,
            limit_seed=limit_seed,
            template=template,
            fields=dict(fields or {}),
            verifier=verifier if served is None else "judge",
            environment=environment,
        )
        settings = settings_over(
            preset,
            {"temperature": temperature, "max_tokens": max_tokens, "extract": extract},
            samples=samples,
            seed=seed,
            reasoning=reasoning,
            time_limit=time_limit,
            workers=workers or usable_cores(),
            keep_tokens=keep_tokens,
            max_turns=max_turns,
            max_observation_tokens=max_observation_tokens,
            judge=served,
            ask=Ask(
                pass_at=None if pass_at is None else tuple(pass_at),
                majority_at=None if majority_at is None else tuple(majority_at),
            ),
        )
        found = load_benchmarks(asked, reading)
        from magicrl.api.training import threads_kept
        from magicrl.evaluation.runner import evaluate as evaluate_all
        from magicrl.rollout.engine_settings import EngineSettings

        engine_settings = EngineSettings(
            model=name,
            dtype=dtype,
            device=device,
            max_rows=max_rows,
            memory_limit_mb=memory_limit_mb,
            threads=threads,
            options=dict(engine_options or {}),
        )
        with threads_kept(), _watched(progress) as watcher:
            evaluate_all(found, engine, engine_settings, settings, folder, watcher)
        return Evaluation(read_evaluation_folder(folder))


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
        """A row a benchmark: accuracy (and reward) with 95 % intervals, pass@k, maj@k, length, truncation."""
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
        """A row a judged response: problem, prompt, sample, text, outcome, score, tokens, ...

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
        problems, rows = evaluated(self.path / benchmark, self.recorded.benchmarks[benchmark].samples)
        prompts = {problem.id: problem.prompt for problem in problems}
        told = ({name: getattr(row, name) for name in ("correct", "truncated", "reward")} for row in rows)
        found = zip(rows, told, strict=True)
        return pd.DataFrame([{"prompt": prompts.get(row.problem), **asdict(row), **more} for row, more in found])

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {result.accuracy.mean:.3f}" for name, result in self.recorded.benchmarks.items())
        return f"<evaluation of {self.recorded.model} in {self.path}: {told}>"

    def _repr_html_(self) -> str:
        blocks = [b for b in evaluation_blocks([self.recorded]) if b.key != "responses"]
        return framed(render_page(self.recorded.model, [], blocks, kind="evaluation"))


def settings_over(preset: str | None, given: Mapping[str, Any], **rest: Any) -> EvaluationSettings:
    """What is asked of the model: the preset's settings, and over them those ``given`` that are not None."""
    from magicrl.evaluation.runner import EvaluationSettings

    if preset is not None and preset not in PRESETS:
        raise RecipeError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    base = None if preset is None else PRESETS[preset]
    chosen: dict[str, Any] = {} if base is None else {name: getattr(base, name) for name in given}
    chosen |= {name: value for name, value in given.items() if value is not None}
    return EvaluationSettings(preset=base, **chosen, **rest)


def recipe_judge(recipe: Recipe) -> JudgeConfig:
    """The ``[verifier.judge]`` of a training recipe. Raises RecipeError where it has none."""
    return load_train_recipe(recipe).verifier.needed_judge()


def load_benchmarks(asked: Sequence[Asked], reading: Reading) -> list[LoadedBenchmark]:
    """The problems of each. Raises ``ValueError``: two of one name, or one cannot be read."""
    for name, count in Counter(one.name for one in asked).items():
        if count > 1:
            raise RecipeError(f"--benchmark: {name} is named twice; give one of them another name with NAME=FILE")
    return [load_benchmark(one, reading) for one in asked]


def _asked(benchmarks: Any) -> list[Asked]:
    if isinstance(benchmarks, Mapping):
        given = cast("Mapping[Any, Any]", benchmarks)
        return [parse_asked(f"{name}={data_reference(f'benchmarks[{name!r}]', data)}") for name, data in given.items()]
    several = benchmarks if isinstance(benchmarks, list | tuple) else [benchmarks]
    names = [path_text("benchmarks (or one of them)", one) for one in cast("list[Any]", several)]
    if not names:
        raise ValueError("benchmarks is empty: name one, or give problems as {'mine': records}")
    return [parse_asked(name) for name in names]


def _watched(progress: bool | Watcher) -> AbstractContextManager[Watcher]:
    if isinstance(progress, bool):
        return EvalDisplay(Console(quiet=not progress))
    return nullcontext(progress)
