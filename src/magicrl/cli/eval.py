"""What the words of ``magicrl eval`` mean: options to settings, and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from magicrl.cli.eval_display import EvalDisplay, show_benchmarks, show_comparison, show_results
from magicrl.config.errors import RecipeError
from magicrl.evaluation.benchmarks import Asked, LoadedBenchmark, Reading, Window, load_benchmark, parse_asked
from magicrl.evaluation.presets import PRESETS
from magicrl.evaluation.results import Ask, write_results
from magicrl.verifiers.base import Extract, Reasoning

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The options of ``magicrl eval`` by their names."""

    model: str | None
    benchmark: list[str] | None
    output: Path | None
    samples: int | None
    preset: str | None
    temperature: float | None
    max_tokens: int | None
    seed: int
    limit: int | None
    pass_at: str | None
    majority_at: str | None
    reasoning: Reasoning | None
    extract: Extract | None
    template: str | None
    field: list[str] | None
    verifier: str | None
    window: str | None
    shard: str
    keep_tokens: bool
    engine: str
    engine_option: list[str] | None
    dtype: Literal["float32", "bfloat16"]
    device: Literal["auto", "cpu", "cuda"]
    max_rows: int
    memory_limit_mb: int
    threads: int | None
    time_limit: float
    workers: int | None
    merge: bool
    compare: tuple[Path, Path] | None
    list_benchmarks: bool


def run_eval(options: EvalOptions) -> int:
    """Do what the options say. Returns the exit status."""
    console = Console()
    if options.list_benchmarks:
        show_benchmarks(console)
        return 0
    if options.compare is not None:
        from magicrl.evaluation.comparison import compare

        show_comparison(compare(*options.compare), console)
        return 0
    if options.output is None:
        raise RecipeError("magicrl eval needs --output DIR, the folder that samples and results go to")
    ask = Ask(
        pass_at=parse_counts("--pass-at", options.pass_at),
        majority_at=parse_counts("--majority-at", options.majority_at),
    )
    if options.merge:
        show_results(write_results(options.output, _names(options), ask), console)
        return 0
    return _sample(options, options.output, ask, console)


def _sample(options: EvalOptions, output: Path, ask: Ask, console: Console) -> int:
    from magicrl.evaluation.engines import EngineSettings, engine_names
    from magicrl.evaluation.runner import EvaluationSettings, evaluate

    if options.engine not in engine_names():
        raise RecipeError(f"--engine {options.engine}: unknown; known: {', '.join(engine_names())}")
    if options.model is None or not options.benchmark:
        raise RecipeError("magicrl eval needs --model and at least one --benchmark (--list shows the names)")
    preset = PRESETS[options.preset] if options.preset is not None else None
    chosen: dict[str, Any] = {
        "temperature": options.temperature if preset is None else preset.temperature,
        "max_tokens": options.max_tokens if preset is None else preset.max_tokens,
        "extract": options.extract if preset is None else preset.extract,
    }
    own = {"temperature": options.temperature, "max_tokens": options.max_tokens, "extract": options.extract}
    chosen |= {name: value for name, value in own.items() if value is not None}
    settings = EvaluationSettings(
        samples=options.samples,
        seed=options.seed,
        reasoning=options.reasoning,
        time_limit=options.time_limit,
        workers=options.workers or len(os.sched_getaffinity(0)),
        preset=preset,
        keep_tokens=options.keep_tokens,
        shard=parse_shard(options.shard),
        ask=ask,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    engine = EngineSettings(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        max_rows=options.max_rows,
        memory_limit_mb=options.memory_limit_mb,
        threads=options.threads,
        options=parse_engine_options(options.engine, options.engine_option or ()),
    )
    benchmarks = _benchmarks(options.benchmark, reading_of(options))
    try:
        with EvalDisplay(console) as display:
            results = evaluate(benchmarks, options.engine, engine, settings, output, display)
    except KeyboardInterrupt:
        console.print(
            f"interrupted; every finished sample is in {output}: the same command again goes on", soft_wrap=True
        )
        return INTERRUPTED
    if results is not None:
        show_results(results, console)
    return 0


def reading_of(options: EvalOptions) -> Reading:
    """How the benchmarks are read.

    Raises:
        RecipeError: a ``--field`` without ``=``, or a ``--window`` that is none.
    """
    fields = _pairs("--field", options.field or (), "prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN")
    return Reading(
        limit=options.limit,
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


def _names(options: EvalOptions) -> list[str]:
    """Benchmarks to merge: those named, else every folder of the output that holds a job."""
    assert options.output is not None, "the caller checked"
    if options.benchmark:
        return [parse_asked(text).name for text in options.benchmark]
    names = sorted(path.parent.name for path in options.output.glob("*/job.json"))
    if not names:
        raise RecipeError(f"--merge: {options.output} holds no evaluation")
    return names
