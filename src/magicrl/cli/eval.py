"""``magicrl eval``: options to settings, what it will cost, how it goes, and the scores beside their intervals.

``--run`` evaluates the checkpoints of a run in a process of its own, also while the run goes on. Nothing is written
into the run's folder and nothing is shared with the run but its files, so that it can be stopped, repeated or done on
another machine, and changes nothing of the run.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magicrl import registry
from magicrl.api.evaluating import load_benchmarks, recipe_judge, settings_over
from magicrl.api.evaluation_display import EvalDisplay, money, say
from magicrl.cli.options import EvalOptions
from magicrl.cli.tables import listing
from magicrl.config.errors import RecipeError
from magicrl.evaluation.benchmarks import Reading, Window, parse_asked
from magicrl.evaluation.presets import TABLE13_SETS
from magicrl.evaluation.results import Ask, Price, write_results
from magicrl.evaluation.samples import RESULTS
from magicrl.reporting.wording import number, percent, points, visible
from magicrl_verifiers import references
from magicrl_verifiers.batch import usable_cores
from magicrl_verifiers.progress import duration

if TYPE_CHECKING:
    from magicrl.evaluation.requested import Requested
    from magicrl.evaluation.runner import EvaluationSettings


def show_results(path: Path, console: Console) -> None:
    """The table of scores, and Table 13 where a result is comparable with it."""
    document = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    columns = ("avg@k", "95 % interval", "pass@k", "maj@k", "tokens", "cut")
    table = _table("Scores in per cent; tokens of a response; share cut at the limit", "benchmark", columns)
    notes: list[str] = []
    for name, result in document["benchmarks"].items():
        table.add_row(
            Text(name),
            f"@{result['samples']} {_cent(result['accuracy']['mean'])}",
            _interval(result["accuracy"]),
            _best(result["pass_at"]),
            _best(result["majority_at"]),
            number(result["length"]["mean"]),
            _cent(result["truncation"]["mean"]),
        )
        if "reward" in result:
            reward = result["reward"]
            notes.append(
                f"{name}: mean reward {reward['mean']:.3f}, 95 % interval {reward['low']:.3f} to {reward['high']:.3f}; "
                "avg@k and pass@k count responses whose score reaches the reward's right_from"
            )
        if result["not_judged"]:
            notes.append(f"{name}: {result['not_judged']} samples could not be judged and count nowhere")
        if name in TABLE13_SETS and result["table13"]["differs"]:
            notes.append(f"{name}: not comparable with Table 13: {'; '.join(result['table13']['differs'])}")
    for name, mean in document["means"].items():
        spread = f"standard error {percent(mean['standard_error'])}"
        notes.append(f"mean of {', '.join(mean['sets'])} ({name}): {percent(mean['mean'])} ({spread})")
    console.print(table)
    for note in notes:
        say(console, note)
    _show_fresh(document["benchmarks"], console)
    if "table13" in document:
        _show_table13(document["table13"], console)
    say(console, _used(document["usage"]))
    say(console, f"results: {path}")


def _show_fresh(benchmarks: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Samples drawn anew at other limits beside the long ones cut there."""
    columns = ("limit", "tokens", "anew", "95 % interval", "cut", "anew less cut")
    title = "Accuracy in per cent: samples drawn anew at a limit, and the long ones cut there"
    table = _table(title, "benchmark", columns)
    for name, result in benchmarks.items():
        for point in result["scaling"]["fresh"]:
            table.add_row(
                Text(name),
                str(point["limit"]),
                number(point["mean_tokens"]["mean"]),
                _cent(point["accuracy"]["mean"]),
                _interval(point["accuracy"]),
                "–" if point["cut"] is None else _cent(point["cut"]["mean"]),
                "–" if point["difference"] is None else _interval(point["difference"], points),
            )
    if table.row_count:
        console.print(table)


def _used(usage: Mapping[str, Any]) -> str:
    """One line on what all calls of the evaluation used."""
    asked = "an unknown number of" if usage["prompt_tokens"] is None else f"{usage['prompt_tokens']:,}"
    text = f"used: {asked} tokens in, {usage['response_tokens']:,} out; {duration(usage['seconds'])}, "
    text += f"{duration(usage['cpu_seconds'])} of CPU time"
    if usage["gpu_seconds"]:
        text += f", {duration(usage['gpu_seconds'])} of GPU time"
    if usage["samples_without_times"]:
        text += f" (times of {usage['samples_without_times']} samples are lost)"
    price = usage["price"]
    if price is not None:
        known = price["total"] is not None
        text += f"; {money(price['total'])} at the prices given" if known else "; the price is unknown"
    return text


def _show_table13(beside: Mapping[str, Any], console: Console) -> None:
    columns = ("AIME24", "AIME25", "LiveCodeBench", "average")
    table = _table("Beside Table 13 (avg@32, avg@32, avg@4; per cent)", "model", columns)
    for row in beside["rows"]:
        figures = [row[name] for name in ("aime24", "aime25", "livecodebench", "average")]
        table.add_row(row["model"], *("–" if figure is None else f"{figure:.1f}" for figure in figures))
    console.print(table)
    say(console, beside["note"], style="dim")


def show_comparison(document: Mapping[str, Any], console: Console) -> None:
    """Differences with intervals and p-values; what is not comparable, with its reason."""
    columns = ("problems", "before", "after", "change", "95 % interval", "p", "+/-")
    table = _table("Accuracy in per cent, change in percentage points", "benchmark", columns)
    notes: list[str] = []
    for name, row in document["benchmarks"].items():
        if not row["comparable"]:
            notes.append(f"{name}: not comparable, {row['why']}")
            continue
        notes += [f"{name}: settings differ too ({line})" for line in row["settings_differ"]]
        table.add_row(
            Text(name),
            str(row["problems"]),
            _cent(row["before"]),
            _cent(row["after"]),
            points(row["difference"]["mean"]),
            _interval(row["difference"], points),
            "<0.001" if row["p_value"] < 0.001 else f"{row['p_value']:.3f}",
            f"{row['better']}/{row['worse']}",
        )
        thrift = row["efficiency"]
        if thrift["before"] is not None and thrift["after"] is not None:
            shares = f"before {percent(thrift['before'])}, after {percent(thrift['after'])}"
            notes.append(f"{name}: at {thrift['mean_tokens']:.0f} tokens a response on average: {shares}")
    if table.row_count:
        console.print(table)
    for note in [*notes, *(f"{name}: in one of the two only" for name in document["only_in_one"])]:
        say(console, visible(note))


def show_benchmarks(console: Console) -> None:
    """The catalogue."""
    from magicrl.evaluation.benchmarks import described

    console.print(listing(("name", "what", "hub data set", "licence"), list(described()), console.width, least=80))


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    """A table that fits 80 columns: long names fold, numbers stay whole."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cent(share: float) -> str:
    return f"{100 * share:.1f}"


def _interval(estimate: Mapping[str, float], form: Callable[[float], str] = _cent) -> str:
    return f"{form(estimate['low'])} to {form(estimate['high'])}"


def _best(by_k: Mapping[str, Mapping[str, float]]) -> str:
    if not by_k:
        return "–"
    k = max(by_k, key=int)
    return f"@{k} {_cent(by_k[k]['mean'])}"


INTERRUPTED = 130


def run_eval(options: EvalOptions) -> int:
    """Do what the options say. Returns the exit status."""
    console = Console()
    output = options.output
    if options.list_benchmarks:
        show_benchmarks(console)
        return 0
    if options.compare is not None:
        from magicrl.evaluation.comparison import compare_all, write_comparison

        document = compare_all(options.compare)
        for comparison in document["comparisons"]:
            show_comparison(comparison, console)
        if output is not None:
            say(console, f"comparison: {write_comparison(document, output)}")
        return 0
    if output is None:
        raise RecipeError("magicrl eval needs --output DIR, the folder that samples and results go to")
    ask = ask_of(options)
    if options.merge:
        show_results(write_results(output, _names(options.benchmark, output), ask), console)
        return 0
    if options.run is None:
        return _sample(options, output, ask, console)
    if options.model is not None or options.engine == "openai":
        raise RecipeError("--run takes the place of --model, and needs an engine on this machine")
    return evaluate_checkpoints(
        options, options.run, output, lambda chosen, folder: _sample(chosen, folder, ask, console, again=True), console
    )


def _sample(options: EvalOptions, output: Path, ask: Ask, console: Console, *, again: bool = False) -> int:
    from magicrl.evaluation.runner import evaluate
    from magicrl.rollout.engine_settings import EngineSettings

    try:
        registry.check("engine", options.engine)
    except ValueError as error:
        raise RecipeError(str(error), key="--engine") from None
    if options.model is None or not options.benchmark:
        raise RecipeError("magicrl eval needs --model and at least one --benchmark (--list shows the names)")
    settings = replace(settings_of(options, ask), again=again)
    engine = EngineSettings(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        max_rows=options.max_rows,
        memory_limit_mb=options.memory_limit_mb,
        threads=options.threads,
        options=parse_engine_options(options.engine, options.engine_option or ()),
    )
    benchmarks = load_benchmarks([parse_asked(text) for text in options.benchmark], reading_of(options))
    try:
        with EvalDisplay(console) as display:
            results = evaluate(benchmarks, options.engine, engine, settings, output, display)
    except KeyboardInterrupt:
        say(console, f"interrupted; every finished sample is in {output}: the same command again goes on")
        return INTERRUPTED
    if results is not None:
        show_results(results, console)
    return 0


def settings_of(options: EvalOptions, ask: Ask) -> EvaluationSettings:
    """What is asked of the model: the preset's settings, and over them what is given."""
    return settings_over(
        options.preset,
        {"temperature": options.temperature, "max_tokens": options.max_tokens, "extract": options.extract},
        samples=options.samples,
        seed=options.seed,
        reasoning=options.reasoning,
        time_limit=options.time_limit,
        workers=options.workers or usable_cores(),
        max_turns=options.max_turns,
        max_observation_tokens=options.max_observation_tokens,
        judge=None if options.judge is None else recipe_judge(Path(options.judge)),
        keep_tokens=options.keep_tokens,
        shard=parse_shard(options.shard),
        ask=ask,
    )


def ask_of(options: EvalOptions) -> Ask:
    """What is to be reported. Raises ``RecipeError``: lists of numbers that are none, or a price below 0."""
    price = None
    if options.price_in is not None and options.price_out is not None:
        price = Price(per_million_in=options.price_in, per_million_out=options.price_out)
    elif options.price_in is not None or options.price_out is not None:
        raise RecipeError("give both --price-in and --price-out, what a million tokens cost; 0 if they cost nothing")
    limits = parse_counts("--fresh-limits", options.fresh_limits)
    return Ask(
        pass_at=parse_counts("--pass-at", options.pass_at),
        majority_at=parse_counts("--majority-at", options.majority_at),
        fresh_limits=None if limits is None else tuple(sorted(set(limits))),
        price=price,
    )


def reading_of(options: EvalOptions) -> Reading:
    """How the benchmarks are read.

    Raises:
        RecipeError: a ``--field`` without ``=``, or a ``--window`` that is none.
        ValueError: a ``--verifier`` or ``--environment`` that cannot be meant (says the nearest known one).
    """
    if options.verifier is not None:
        registry.check("reward", options.verifier)
    if options.environment is not None:
        registry.check("environment", options.environment)
    return Reading(
        limit=options.limit,
        limit_seed=options.limit_seed,
        template=options.template,
        fields=_pairs("--field", options.field or (), "prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN"),
        verifier=options.verifier or (None if options.judge is None else "judge"),
        environment=options.environment,
        window=None if options.window is None else parse_window(options.window),
    )


def parse_engine_options(engine: str, texts: Sequence[str]) -> dict[str, Any]:
    """``["concurrency=8"]`` as a dictionary of texts, which the engine reads; the built-in one has none."""
    if texts and engine == "in_process":
        name = texts[0].partition("=")[0]
        raise RecipeError(f"--engine-option {name}: in_process has no options of its own; choose another --engine")
    return dict(_pairs("--engine-option", texts, "NAME=VALUE"))


def _pairs(option: str, texts: Sequence[str], form: str) -> dict[str, str]:
    """``NAME=VALUE`` texts as a table. What is refused is not shown beyond its name: a value may be a secret."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in pairs:
            raise RecipeError(f"{option} {name}: give {form}, each name once")
        pairs[name] = value
    return pairs


def parse_window(text: str) -> Window:
    """``"2024-08-01..2025-02-01"`` as two days; either may be missing."""
    try:
        first, last = (date.fromisoformat(day) if day else None for day in text.split(".."))
    except ValueError:
        raise RecipeError(f"--window {text}: give FIRST..LAST, two days, e.g. 2024-08-01..2025-02-01") from None
    return first, last


def parse_shard(text: str) -> tuple[int, int]:
    """``"0/4"`` as ``(0, 4)``."""
    index, _, count = text.partition("/")
    if not index.isdecimal() or not count.isdecimal() or not int(index) < int(count):
        raise RecipeError(f"--shard {text}: give I/N with I from 0 to N-1, e.g. 0/4 for the first of four")
    return int(index), int(count)


def parse_counts(option: str, text: str | None) -> tuple[int, ...] | None:
    """``"1,4"`` as ``(1, 4)``; None stays None."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RecipeError(f"{option} {text}: give whole numbers separated by commas, e.g. 1,4")
    return tuple(int(part) for part in parts)


def _names(benchmarks: Sequence[str] | None, output: Path) -> list[str]:
    """Benchmarks to merge: those named, else every folder of the output that holds a job."""
    if benchmarks:
        return [parse_asked(text).name for text in benchmarks]
    names = sorted(path.parent.name for path in output.glob("*/job.json"))
    if not names:
        raise RecipeError(f"--merge: {output} holds no evaluation")
    return names


def _requested(options: EvalOptions, run: Path) -> Requested:
    """Return what the options say of every checkpoint of a run."""
    from magicrl.evaluation.engines import opens_reasoning
    from magicrl.evaluation.requested import Requested
    from magicrl.models.loading import described_model
    from magicrl.models.prompts import PromptEncoder
    from magicrl.training.checkpoint import start_model
    from magicrl_verifiers.records import JudgeOptions

    settings = settings_of(options, ask_of(options))
    reasoning = settings.reasoning
    if reasoning is None:  # every checkpoint has the chat template of the starting model
        policy = described_model(start_model(run))
        opens = opens_reasoning(policy.tokenizer, PromptEncoder(policy.tokenizer, policy.max_context))
        reasoning = "required" if opens else "auto"
    chosen = parse_engine_options(options.engine, options.engine_option or ())
    engine = {
        "engine": options.engine,
        "engine_sha256": references.fingerprint(options.engine),
        "dtype": chosen.get("dtype", options.dtype) if options.engine == "vllm" else options.dtype,
        "head_dtype": chosen.get("head_dtype") if options.engine == "vllm" else None,
    }
    return Requested(
        benchmarks=load_benchmarks([parse_asked(text) for text in options.benchmark or ()], reading_of(options)),
        settings=settings,
        judging=JudgeOptions(reasoning=reasoning, extract=settings.extract),
        engine={name: value for name, value in engine.items() if value is not None},
    )


LOOK_EVERY = 5.0  # seconds between looks for a new checkpoint


def evaluate_checkpoints(
    options: EvalOptions,
    run: Path,
    output: Path,
    evaluate: Callable[[EvalOptions, Path], int],
    console: Console,
    *,
    look_every: float = LOOK_EVERY,
) -> int:
    """Evaluate every checkpoint into ``output/step-N``, oldest first, then compare all with the first.

    A checkpoint that was evaluated with the same settings is left as it is. One whose results were made with other
    settings is evaluated again. With ``--follow`` goes on with new ones until the run is no longer running. A
    checkpoint that the run removes before its turn is left out.

    Args:
        evaluate: evaluates ``model`` of the options into a folder and returns the exit status.

    Returns:
        The exit status: that of the first evaluation that was interrupted or failed, else 0.

    Raises:
        ValueError: ``run`` is no run folder, or has no checkpoint.
    """
    from magicrl.evaluation.comparison import compare_all, write_comparison
    from magicrl.training.checkpoint import checkpoint_folders, export_checkpoint, run_status

    # loads the benchmarks, which may be large: only where there is something to compare with
    requested = functools.cache(lambda: _requested(options, run))
    settled: set[str] = set()
    while True:
        going = options.follow and run_status(run) == "running"  # asked first: the last checkpoint comes before
        waiting = [c for c in checkpoint_folders(run) if c.name not in settled]
        if not waiting and not going:
            break
        if not waiting:
            time.sleep(look_every)
            continue
        checkpoint, folder = waiting[0], output / waiting[0].name
        changed = requested().differences(folder) if (folder / RESULTS).exists() else None
        if changed == []:
            settled.add(checkpoint.name)
            continue
        model = output / "models" / checkpoint.name
        try:
            export_checkpoint(run, checkpoint, model)
        except (OSError, ValueError):
            if checkpoint.exists():
                raise
            continue  # the run has removed it meanwhile
        again = f", evaluated again: {'; '.join(changed)}" if changed else ""
        say(console, f"{checkpoint.name} of {run}{again}")
        status = evaluate(replace(options, model=str(model)), folder)
        if status:
            return status
        shutil.rmtree(model)
        if (folder / RESULTS).exists():  # else other shards have not ended
            settled.add(checkpoint.name)
    done = sorted(path.parent for path in output.glob(f"step-*/{RESULTS}"))
    if not done:
        raise ValueError(f"{run} has no checkpoint to evaluate; checkpoint.every of its recipe says how often it saves")
    if len(done) > 1:
        say(console, f"comparison: {write_comparison(compare_all(done), output)}")
    return 0
