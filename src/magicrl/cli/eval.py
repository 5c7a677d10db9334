"""What the words of ``magicrl eval`` mean: options to settings, and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from magicrl.cli.eval_display import EvalDisplay, show_benchmarks, show_comparison, show_results
from magicrl.cli.eval_options import EvalOptions, ProblemOptions
from magicrl.config.errors import RecipeError
from magicrl.evaluation.benchmarks import Asked, LoadedBenchmark, Reading, Window, load_benchmark, parse_asked
from magicrl.evaluation.presets import PRESETS
from magicrl.evaluation.results import Ask, write_results
from magicrl.evaluation.usage import Price

if TYPE_CHECKING:
    from magicrl.evaluation.runner import EvaluationSettings  # loads torch, which a comparison does not need

INTERRUPTED = 130


def run_eval(options: EvalOptions) -> int:
    """Do what the options say. Returns the exit status."""
    console = Console()
    instead, output = options.instead, options.asked.output
    if instead.list_benchmarks:
        show_benchmarks(console)
        return 0
    if instead.compare is not None:
        from magicrl.evaluation.comparison import compare_all, write_comparison

        document = compare_all(instead.compare)
        for comparison in document["comparisons"]:
            show_comparison(comparison, console)
        if output is not None:
            console.print(f"comparison: {write_comparison(document, output)}", highlight=False, soft_wrap=True)
        return 0
    if output is None:
        raise RecipeError("magicrl eval needs --output DIR, the folder that samples and results go to")
    ask = ask_of(options)
    if instead.merge:
        show_results(write_results(output, _names(options.asked.benchmark, output), ask), console)
        return 0
    if options.asked.run is not None:
        return _checkpoints(options, options.asked.run, output, ask, console)
    return _sample(options, output, ask, console)


def _checkpoints(options: EvalOptions, run: Path, output: Path, ask: Ask, console: Console) -> int:
    from magicrl.cli.eval_checkpoints import evaluate_checkpoints

    if options.asked.model is not None or options.engine.engine == "openai":
        raise RecipeError("--run takes the place of --model, and needs an engine on this machine")

    def evaluate_one(chosen: EvalOptions, folder: Path) -> int:
        return _sample(chosen, folder, ask, console)

    return evaluate_checkpoints(options, run, output, evaluate_one, console)


def _sample(options: EvalOptions, output: Path, ask: Ask, console: Console) -> int:
    from magicrl.evaluation.engines import EngineSettings, engine_names
    from magicrl.evaluation.runner import evaluate

    asked, chosen = options.asked, options.engine
    if chosen.engine not in engine_names():
        raise RecipeError(f"--engine {chosen.engine}: unknown; known: {', '.join(engine_names())}")
    if asked.model is None or not asked.benchmark:
        raise RecipeError("magicrl eval needs --model and at least one --benchmark (--list shows the names)")
    settings = settings_of(options, ask)
    engine = EngineSettings(
        model=asked.model,
        dtype=chosen.dtype,
        device=chosen.device,
        max_rows=chosen.max_rows,
        memory_limit_mb=chosen.memory_limit_mb,
        threads=chosen.threads,
        options=parse_engine_options(chosen.engine, chosen.engine_option or ()),
    )
    benchmarks = _benchmarks(asked.benchmark, reading_of(options.problems))
    try:
        with EvalDisplay(console) as display:
            results = evaluate(benchmarks, chosen.engine, engine, settings, output, display)
    except KeyboardInterrupt:
        console.print(
            f"interrupted; every finished sample is in {output}: the same command again goes on", soft_wrap=True
        )
        return INTERRUPTED
    if results is not None:
        show_results(results, console)
    return 0


def settings_of(options: EvalOptions, ask: Ask) -> EvaluationSettings:
    """What is asked of the model: the preset's settings, and over them what is given."""
    from magicrl.evaluation.runner import EvaluationSettings

    sampling, judging = options.sampling, options.judging
    preset = PRESETS[sampling.preset] if sampling.preset is not None else None
    given = {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "extract": judging.extract,
    }
    chosen: dict[str, Any] = {} if preset is None else {name: getattr(preset, name) for name in given}
    chosen |= {name: value for name, value in given.items() if value is not None}
    return EvaluationSettings(
        samples=sampling.samples,
        seed=sampling.seed,
        reasoning=judging.reasoning,
        time_limit=judging.time_limit,
        workers=judging.workers or len(os.sched_getaffinity(0)),
        preset=preset,
        keep_tokens=sampling.keep_tokens,
        shard=parse_shard(options.asked.shard),
        ask=ask,
        **chosen,
    )


def ask_of(options: EvalOptions) -> Ask:
    """What is to be reported.

    Raises:
        RecipeError: lists of numbers that are none, or a price below 0.
    """
    scores = options.scores
    if (scores.price_in is None) != (scores.price_out is None):
        raise RecipeError("give both --price-in and --price-out, what a million tokens cost; 0 if they cost nothing")
    price = None
    if scores.price_in is not None and scores.price_out is not None:
        price = Price(per_million_in=scores.price_in, per_million_out=scores.price_out)
    limits = parse_counts("--fresh-limits", options.sampling.fresh_limits)
    return Ask(
        pass_at=parse_counts("--pass-at", scores.pass_at),
        majority_at=parse_counts("--majority-at", scores.majority_at),
        fresh_limits=None if limits is None else tuple(sorted(set(limits))),
        price=price,
    )


def reading_of(options: ProblemOptions) -> Reading:
    """How the benchmarks are read.

    Raises:
        RecipeError: a ``--field`` without ``=``, or a ``--window`` that is none.
    """
    fields = _pairs("--field", options.field or (), "prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN")
    return Reading(
        limit=options.limit,
        limit_seed=options.limit_seed,
        template=options.template,
        fields=fields,
        verifier=options.verifier,
        window=None if options.window is None else parse_window(options.window),
    )


def parse_engine_options(engine: str, texts: Sequence[str]) -> dict[str, Any]:
    """``["concurrency=8"]`` as a dictionary of texts, which the engine reads.

    Raises:
        RecipeError: not of that form, given twice, or the engine has no options of its own.
    """
    if texts and engine == "in_process":
        name = texts[0].partition("=")[0]
        raise RecipeError(f"--engine-option {name}: in_process has no options of its own; choose another --engine")
    return dict(_pairs("--engine-option", texts, "NAME=VALUE"))


def _pairs(option: str, texts: Sequence[str], form: str) -> dict[str, str]:
    """``NAME=VALUE`` texts as a table. What is refused is not shown beyond its name: a value may be a secret."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value or name in pairs:
            raise RecipeError(f"{option} {name}: give {form}, each name once")
        pairs[name] = value
    return pairs


def parse_window(text: str) -> Window:
    """``"2024-08-01..2025-02-01"`` as two days; either may be missing.

    Raises:
        RecipeError: not of that form.
    """
    first, dots, last = text.partition("..")
    try:
        if not dots:
            raise ValueError("no '..'")
        days = tuple(date.fromisoformat(day) if day else None for day in (first, last))
    except ValueError as error:
        raise RecipeError(f"--window {text}: give FIRST..LAST, e.g. 2024-08-01..2025-02-01 ({error})") from None
    return days[0], days[1]


def parse_shard(text: str) -> tuple[int, int]:
    """``"0/4"`` as ``(0, 4)``.

    Raises:
        RecipeError: not of that form, or no such shard.
    """
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or not int(index) < int(count):
        raise RecipeError(f"--shard {text}: give I/N with I from 0 to N-1, e.g. 0/4 for the first of four")
    return int(index), int(count)


def parse_counts(option: str, text: str | None) -> tuple[int, ...] | None:
    """``"1,4"`` as ``(1, 4)``; None stays None.

    Raises:
        RecipeError: not whole numbers of at least 1.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RecipeError(f"{option} {text}: give whole numbers separated by commas, e.g. 1,4")
    return tuple(int(part) for part in parts)


def _benchmarks(texts: Sequence[str], reading: Reading) -> list[LoadedBenchmark]:
    asked = [parse_asked(text) for text in texts]
    _check_names(asked)
    return [load_benchmark(one, reading) for one in asked]


def _check_names(asked: Sequence[Asked]) -> None:
    names = [one.name for one in asked]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"--benchmark: {name} is named twice; give one of them another name with NAME=FILE")


def _names(benchmarks: Sequence[str] | None, output: Path) -> list[str]:
    """Benchmarks to merge: those named, else every folder of the output that holds a job."""
    if benchmarks:
        return [parse_asked(text).name for text in benchmarks]
    names = sorted(path.parent.name for path in output.glob("*/job.json"))
    if not names:
        raise RecipeError(f"--merge: {output} holds no evaluation")
    return names
