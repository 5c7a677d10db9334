"""``magicrl eval`` and ``magicrl.evaluate``: samples and scores of a model on benchmarks.

``--run`` evaluates the checkpoints of a run in a separate process, also while the run continues. It only reads the
run's files and writes nothing into its folder, so it can be stopped, repeated or done on another machine.
"""

from __future__ import annotations

import functools
import inspect
import shlex
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from cyclopts import Parameter
from rich.console import Console

from magicrl import registry
from magicrl.commands.evaluation_display import EvalDisplay, say, show_benchmarks, show_comparison, show_results
from magicrl.commands.given import in_python, model_text
from magicrl.commands.options import Flag, as_command, taking
from magicrl.commands.run_folder import framed
from magicrl.config.errors import RecipeError
from magicrl.config.given import (
    Data,
    PathText,
    Recipe,
    Reward,
    data_reference,
    given_recipe,
    path_text,
    reward_reference,
)
from magicrl.config.loader import load_train_recipe
from magicrl.config.model_schema import DType
from magicrl.data.schemas import catalogue as schemas
from magicrl.evaluation.benchmarks import BenchmarkSource, LoadedBenchmark, Reading, Window, load_benchmark, parse_asked
from magicrl.evaluation.presets import PRESETS
from magicrl.evaluation.results import Ask, Price, write_results
from magicrl.evaluation.samples import RESULTS
from magicrl.reporting.comparison_page import evaluation_blocks
from magicrl.reporting.inspect_log import write_inspect_logs
from magicrl.reporting.page import render_page
from magicrl.reporting.read_folders import RecordedEvaluation, read_evaluation_folder, scored_samples
from magicrl_verifiers import references
from magicrl_verifiers.batch import usable_cores
from magicrl_verifiers.records import Extract, Reasoning

if TYPE_CHECKING:
    import pandas as pd

    from magicrl.evaluation.runner import EvaluationObserver, EvaluationSettings
    from magicrl.rollout.engine_settings import EngineSettings

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
LOOK_EVERY = 5.0
"""Seconds between looks for a new checkpoint."""

Benchmarks = PathText | Sequence[PathText] | Mapping[str, Data]
Counts = str | Sequence[int]
"""Numbers, or a text of numbers separated by commas."""
Pairs = Mapping[str, Any] | Sequence[str]
"""Names and values, or texts ``NAME=VALUE``."""
Derived = TypeVar("Derived")


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


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Arguments of `evaluate` and options of ``magicrl eval``: their types, defaults and help are here only."""

    model: PathText
    """A model folder, or a hub name; with openai as the engine the name that the server knows it by."""
    benchmarks: Benchmarks
    """NAME, NAME=FILE, FILE or reasoning_gym/TASK (repeatable); --list shows the names. In Python also a dict of names
    to records, problems, a data frame or a function."""
    _: KW_ONLY
    output: PathText
    """The evaluation's folder; the same call again continues where it stopped."""
    shard: str = "0/1"
    """I/N: only every N-th problem, beginning with the I-th (from 0). Shards share an output."""
    preset: Literal["report", "released-code", "study"] | None = None
    """report: Table 13's settings; released-code: the same at temperature 0.6; study: the ablations' metric."""
    samples: int | None = None
    """Samples per problem; default: the preset's, or 1."""
    temperature: float | None = None
    """Sampling temperature; default: the preset's, or 1. 0 is greedy."""
    max_tokens: int | None = None
    """The response limit; default: the preset's, or 4096."""
    fresh_limits: Counts | None = None
    """Sample again at each of these response limits, e.g. 1024,2048, in addition to the curve that is computed by
    truncating one set."""
    seed: int = 0
    """Seed of the sampling."""
    keep_tokens: bool = False
    """Keep token ids and entropies with the samples."""
    max_turns: int = 8
    """Turns of a response to an environment; a response that is not done then is truncated."""
    max_observation_tokens: int = 256
    """Tokens of one reply of an environment; a longer one is truncated."""
    limit: int | None = None
    """Number of problems of each benchmark, from the first on."""
    limit_seed: int | None = None
    """Draw these at random with this seed instead."""
    template: str | None = None
    """Text around each prompt in place of the benchmark's; holds {prompt}."""
    fields: Pairs | None = None
    """prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN for a file of another form (repeatable)."""
    reward: Reward | None = None
    """maths, exact, code or a custom reward (my_reward.py:score), in place of the benchmark's verifier."""
    environment: str | None = None
    """calculator, guessing or a custom one (game.py:Game), which answers each turn of a response."""
    window: str | None = None
    """FIRST..LAST day of problems that have one, e.g. 2024-08-01..2025-02-01; default: the benchmark's."""
    judge: Recipe | None = None
    """A training recipe's file or name: the served model of its [verifier.judge] judges every response."""
    reasoning: Reasoning | None = None
    """How the answer is found, as in magicrl verify math; default: required if the chat template opens the reasoning,
    else auto."""
    extract: Extract | None = None
    """box: only a boxed answer counts; lenient: another counts, too; default: the preset's, or lenient."""
    time_limit: float = 10.0
    """CPU seconds of judging one response (one test, for code)."""
    workers: int | None = None
    """Verifier processes; default: the cores this process may use."""
    engine: str = "in_process"
    """in_process, vllm (this machine), openai (any OpenAI-compatible server), or a custom file.py:function."""
    engine_options: Pairs | None = None
    """NAME=VALUE of that engine, e.g. base_url=http://localhost:8000/v1 (repeatable)."""
    dtype: DType = "float32"
    """Precision of the weights in memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    max_rows: int = 32
    """Sequences that decode at once."""
    memory_limit_mb: int = 4096
    """MiB of the key/value cache."""
    threads: int | None = None
    """Number of torch's threads; default: the cores this process may use."""
    pass_at: Counts | None = None
    """pass@k for these k, e.g. 1,4; default: powers of two."""
    majority_at: Counts | None = None
    """maj@k for these k; default: the largest power of two."""
    price_in: float | None = None
    """Price of a million prompt tokens, for the estimate and the account in results.json."""
    price_out: float | None = None
    """Price of a million response tokens."""
    progress: bool | EvaluationObserver = True
    """True for the usual display, False for none, or an observer."""


@in_python()
@taking(EvaluationOptions)
def evaluate(given: EvaluationOptions) -> Evaluation:
    """Evaluate a model on benchmarks: avg@k, pass@k, maj@k, length and truncation with intervals, resumable.

    Raises:
        ValueError: an argument is wrong, the model or a benchmark cannot be used, or ``output`` holds another job.
        KeyboardInterrupt: Stopped by the user; every finished sample is kept.
    """
    watcher = given.progress
    if isinstance(watcher, bool):
        _sample(given, EvalDisplay(Console(emoji=False, quiet=not watcher)))
    else:
        _sample(given, nullcontext(watcher))
    return Evaluation(read_evaluation_folder(Path(path_text("output", given.output))))


def arguments(**given: Any) -> EvaluationOptions:
    """Return the options of a command, in which model, benchmarks and output may be missing: they are None then."""
    missing: dict[str, Any] = dict.fromkeys(("model", "benchmarks", "output"))
    return EvaluationOptions(**missing | given)


def _derived(record: Callable[..., Derived], given: EvaluationOptions, **converted: Any) -> Derived:
    """Return a record of settings: the given options of the same names, and over them those that were converted."""
    names = inspect.signature(record).parameters
    same = {name: value for name in names if (value := getattr(given, name, None)) is not None}
    return record(**same | converted)


def _sample(
    given: EvaluationOptions, display: AbstractContextManager[EvaluationObserver], *, again: bool = False
) -> Path | None:
    """Sample and judge what is missing.

    Args:
        given: the arguments of `evaluate`.
        display: shows the progress.
        again: discard the samples of a job with other settings.

    Returns:
        The file of the results; None while shards of other processes are missing.
    """
    from magicrl.commands.training import threads_kept
    from magicrl.evaluation.runner import run_evaluation

    output, engine_settings = Path(path_text("output", given.output)), _engine_settings(given)
    settings = settings_of(given, again=again)
    found = load_benchmarks(_asked(given.benchmarks), reading_of(given))
    with threads_kept(), display as watcher:
        for text in prompts_not_trained_on(Path(engine_settings.model), found):
            watcher.note(text)
        return run_evaluation(found, given.engine, engine_settings, settings, output, watcher)


def prompts_not_trained_on(model: Path, benchmarks: Sequence[LoadedBenchmark]) -> Iterator[str]:
    """Yield a sentence per benchmark that puts another text around its prompts than the run that made the model."""
    try:
        sources = tomllib.loads((model / "config.toml").read_text(encoding="utf-8"))["data"]["train"]
    except (OSError, ValueError, KeyError, TypeError):  # not a model of magicrl train
        return
    trained = [source.get("template", "{prompt}") for source in sources if "family" not in source]
    for benchmark in benchmarks if trained else ():
        if benchmark.facts["template_given"]:
            continue
        texts = [schemas().templates[name].text for name in benchmark.facts["template"]]
        asked = next((text for text in texts if text not in trained), None)
        if asked is not None:
            yield (
                f"{benchmark.name}: the model was trained on other prompts than {asked!r}, which this evaluation asks; "
                f"to ask as in training, add --template {shell_text(trained[0])}"
            )


def shell_text(text: str) -> str:
    """Return a text as bash and zsh read it, on one line."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n")
    return f"$'{escaped}'"


def settings_of(given: EvaluationOptions, *, again: bool = False) -> EvaluationSettings:
    """Return what is requested of the model: the preset's settings, and over them what is given."""
    from magicrl.evaluation.runner import EvaluationSettings

    if given.preset is not None and given.preset not in PRESETS:
        raise RecipeError(f"preset must be one of {', '.join(PRESETS)}, got {given.preset!r}")
    preset = None if given.preset is None else PRESETS[given.preset]
    missing = [name for name in ("temperature", "max_tokens", "extract") if getattr(given, name) is None]
    return _derived(
        EvaluationSettings,
        given,
        preset=preset,
        **{name: getattr(preset, name) for name in missing if preset is not None},
        workers=given.workers or usable_cores(),
        judge=None if given.judge is None else load_train_recipe(given_recipe(given.judge)).verifier.needed_judge(),
        shard=parse_shard(given.shard),
        ask=ask_of(given),
        again=again,
    )


def ask_of(given: EvaluationOptions) -> Ask:
    """Return what is to be reported.

    Raises:
        RecipeError: lists of numbers that are none, one price without the other, or a price below 0.
    """
    price = None
    if given.price_in is not None and given.price_out is not None:
        price = Price(per_million_in=given.price_in, per_million_out=given.price_out)
    elif given.price_in is not None or given.price_out is not None:
        raise RecipeError("give both --price-in and --price-out, what a million tokens cost; 0 if they cost nothing")
    limits = parse_counts("--fresh-limits", given.fresh_limits)
    return Ask(
        pass_at=parse_counts("--pass-at", given.pass_at),
        majority_at=parse_counts("--majority-at", given.majority_at),
        fresh_limits=None if limits is None else tuple(sorted(set(limits))),
        price=price,
    )


def reading_of(given: EvaluationOptions) -> Reading:
    """Return how the benchmarks are read.

    Raises:
        RecipeError: a field without ``=``, or a window that is none.
        ValueError: an unknown reward or environment (names the nearest known one).
    """
    reward = None if given.reward is None else registry.check("reward", reward_reference(given.reward))
    if given.environment is not None:
        registry.check("environment", given.environment)
    return _derived(
        Reading,
        given,
        fields=_pairs("--field", given.fields, "prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN"),
        verifier=reward or (None if given.judge is None else "judge"),
        window=None if given.window is None else parse_window(given.window),
    )


def _engine_settings(given: EvaluationOptions) -> EngineSettings:
    from magicrl.rollout.engine_settings import EngineSettings

    try:
        registry.check("engine", given.engine)
    except ValueError as error:
        raise RecipeError(str(error), key="--engine") from None
    options = parse_engine_options(given.engine, given.engine_options)
    return _derived(EngineSettings, given, model=model_text(given.model), options=options)


def load_benchmarks(asked: Sequence[BenchmarkSource], reading: Reading) -> list[LoadedBenchmark]:
    """Load the problems of each benchmark. Raises ``ValueError`` if two have one name, or one cannot be read."""
    for name, count in Counter(one.name for one in asked).items():
        if count > 1:
            raise RecipeError(f"--benchmark: {name} is named twice; give one of them another name with NAME=FILE")
    return [load_benchmark(one, reading) for one in asked]


def _asked(benchmarks: Any) -> list[BenchmarkSource]:
    if isinstance(benchmarks, Mapping):
        given = cast("Mapping[Any, Any]", benchmarks)
        return [parse_asked(f"{name}={data_reference(f'benchmarks[{name!r}]', data)}") for name, data in given.items()]
    several = benchmarks if isinstance(benchmarks, list | tuple) else [benchmarks]
    names = [path_text("benchmarks (or one of them)", one) for one in cast("list[Any]", several)]
    if not names:
        raise ValueError("benchmarks is empty: name one, or give problems as {'mine': records}")
    return [parse_asked(name) for name in names]


def parse_engine_options(engine: str, options: Pairs | None) -> dict[str, Any]:
    """Return ``["concurrency=8"]`` as a dict of texts, which the engine reads; the built-in engine has none."""
    if options and engine == "in_process":
        name = next(iter(options)).partition("=")[0]
        raise RecipeError(f"--engine-option {name}: in_process has no options; choose another --engine")
    return _pairs("--engine-option", options, "NAME=VALUE")


def _pairs(option: str, texts: Pairs | None, form: str) -> dict[str, Any]:
    """Return ``NAME=VALUE`` texts as a dict. Of a refused text only the name is shown: a value may be a secret."""
    if texts is None or isinstance(texts, Mapping):
        return dict(texts or {})
    pairs: dict[str, Any] = {}
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


def parse_counts(option: str, given: Counts | None) -> tuple[int, ...] | None:
    """Return ``"1,4"`` as ``(1, 4)``; None stays None."""
    if given is None or not isinstance(given, str):
        return None if given is None else tuple(given)
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RecipeError(f"{option} {given}: give whole numbers separated by commas, e.g. 1,4")
    return tuple(int(part) for part in parts)


def _present(
    work: functools.partial[Evaluation],
    *,
    run: Path | None = None,
    follow: bool = False,
    merge: bool = False,
    compare: list[Path] | None = None,
    inspect_logs: Path | None = None,
    list_: bool = False,
) -> int:
    """Print the scores.

    Example: magicrl eval --model runs/quickstart/model --benchmark mine.jsonl --samples 4 --output runs/eval

    Args:
        run: In place of a model: the checkpoints of this run, each into its own folder of the output.
        follow: With --run: continue with new checkpoints until the run ends.
        merge: Only score what is in --output: the shards' samples, or those there are with other k and prices.
        compare: Evaluation folders: the paired differences of each from the first; with --output DIR they and the
            curves are written to DIR/comparison.json.
        inspect_logs: Also write the results of --output to this folder, as logs that `inspect view` opens.
        list_: Show the benchmarks.
    """
    console, given = Console(emoji=False), arguments(**work.keywords)
    output = Path(given.output) if given.output else None
    if list_:
        show_benchmarks(console)
        return 0
    if inspect_logs is not None and (compare is not None or run is not None):
        raise RecipeError("--inspect-logs needs --model; for a checkpoint: magicrl eval --merge --output DIR/step-N")
    if compare is not None:
        from magicrl.evaluation.comparison import compare_all, save_comparison

        document = compare_all(compare)
        for comparison in document["comparisons"]:
            show_comparison(comparison, console)
        if output is not None:
            say(console, f"comparison: {save_comparison(document, output)}")
        return 0
    if output is None:
        raise RecipeError("magicrl eval needs --output DIR, the folder that samples and results go to")
    if merge:
        show_results(write_results(output, _names(given.benchmarks, output), ask_of(given)), console)
        _write_logs(output, inspect_logs, console)
        return 0
    if run is None:
        status = _sample_and_show(given, console)
        if status == 0 and (output / RESULTS).exists():  # other shards may be missing
            _write_logs(output, inspect_logs, console)
        return status
    if given.model or given.engine == "openai":
        raise RecipeError("--run takes the place of --model, and needs an engine on this machine")
    sample = functools.partial(_sample_and_show, console=console, again=True)
    return evaluate_checkpoints(given, run, output, sample, console, follow=follow)


def _write_logs(output: Path, folder: Path | None, console: Console) -> None:
    if folder is not None:
        for path in write_inspect_logs(read_evaluation_folder(output), folder):
            say(console, f"Inspect log: {path}")


def _sample_and_show(given: EvaluationOptions, console: Console, *, again: bool = False) -> int:
    if not (given.model and given.benchmarks):
        raise RecipeError("magicrl eval needs --model and at least one --benchmark (--list shows the names)")
    try:
        results = _sample(given, EvalDisplay(console), again=again)
    except KeyboardInterrupt:
        say(console, f"interrupted; every finished sample is in {given.output}: the same command again continues")
        return INTERRUPTED
    if results is not None:
        show_results(results, console)
    return 0


def _names(benchmarks: Any, output: Path) -> list[str]:
    """Return the benchmarks to merge: those named, else every folder of the output that holds a job."""
    if benchmarks:
        return [parse_asked(text).name for text in benchmarks]
    names = sorted(path.parent.name for path in output.glob("*/job.json"))
    if not names:
        raise RecipeError(f"--merge: {output} holds no evaluation")
    return names


def requested(given: EvaluationOptions, run: Path) -> Callable[[Path], list[str]]:
    """Return what the arguments say about every checkpoint of a run."""
    from magicrl.evaluation.engines import opens_reasoning
    from magicrl.evaluation.runner import requested_changes
    from magicrl.models.loading import described_model
    from magicrl.models.prompts import PromptEncoder
    from magicrl.training.checkpoint import start_model_of
    from magicrl_verifiers.records import JudgeOptions

    settings = settings_of(given)
    reasoning = settings.reasoning
    if reasoning is None:  # every checkpoint has the chat template of the starting model
        policy = described_model(start_model_of(run))
        opens = opens_reasoning(policy.tokenizer, PromptEncoder(policy.tokenizer, policy.max_context))
        reasoning = "required" if opens else "auto"
    chosen = parse_engine_options(given.engine, given.engine_options)
    engine = {
        "engine": given.engine,
        "engine_sha256": references.file_fingerprint(given.engine),
        "dtype": chosen.get("dtype", given.dtype) if given.engine == "vllm" else given.dtype,
        "head_dtype": chosen.get("head_dtype") if given.engine == "vllm" else None,
    }
    return functools.partial(
        requested_changes,
        benchmarks=load_benchmarks(_asked(given.benchmarks), reading_of(given)),
        settings=settings,
        judging=JudgeOptions(reasoning=reasoning, extract=settings.extract),
        engine={name: value for name, value in engine.items() if value is not None},
    )


def evaluate_checkpoints(
    given: EvaluationOptions,
    run: Path,
    output: Path,
    evaluate: Callable[[EvaluationOptions], int],
    console: Console,
    *,
    follow: bool,
    look_every: float = LOOK_EVERY,
) -> int:
    """Evaluate every checkpoint into ``output/step-N``, oldest first, then compare all with the first.

    A checkpoint that was evaluated with the same settings is left as it is. One whose results were made with other
    settings is evaluated again. A checkpoint that the run removes before its turn is left out.

    Args:
        given: arguments of `magicrl.evaluate`, without a model.
        run: run folder.
        output: folder for the results.
        evaluate: evaluates a model and returns the exit status.
        console: for one line per checkpoint.
        follow: continue with new checkpoints until the run is no longer running.
        look_every: seconds between looks for a new checkpoint.

    Returns:
        The exit status: that of the first evaluation that was interrupted or failed, else 0.

    Raises:
        ValueError: ``run`` is no run folder, or has no checkpoint.
    """
    from magicrl.evaluation.comparison import compare_all, save_comparison
    from magicrl.training.checkpoint import checkpoint_folders, export_checkpoint, run_status

    # loads the benchmarks, which may be large: only if there is something to compare with
    request = functools.cache(lambda: requested(given, run))
    settled: set[str] = set()
    while True:
        running = follow and run_status(run) == "running"  # read first: the last checkpoint is written before
        waiting = [c for c in checkpoint_folders(run) if c.name not in settled]
        if not waiting and not running:
            break
        if not waiting:
            time.sleep(look_every)
            continue
        checkpoint, folder = waiting[0], output / waiting[0].name
        changed = request()(folder) if (folder / RESULTS).exists() else None
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
        status = evaluate(replace(given, model=str(model), output=str(folder)))
        if status:
            return status
        shutil.rmtree(model)
        if (folder / RESULTS).exists():  # else other shards have not ended
            settled.add(checkpoint.name)
    done = sorted(path.parent for path in output.glob(f"step-*/{RESULTS}"))
    if not done:
        raise ValueError(f"{run} has no checkpoint to evaluate; checkpoint.every of its recipe says how often it saves")
    if len(done) > 1:
        say(console, f"comparison: {save_comparison(compare_all(done), output)}")
    return 0


_GROUPS = {
    "model": "What is evaluated",
    "preset": "Sampling",
    "limit": "Problems",
    "judge": "Judging",
    "engine": "Engine",
    "pass_at": "Scores",
    "run": "Runs and existing results",
}
"""First parameter of each group in ``--help``, and the group's title. Parameters of `_present` come last."""
_TYPED = {
    "benchmarks": Annotated[list[str], Parameter(name="--benchmark", negative=(), consume_multiple=False)],
    "fields": Annotated[list[str] | None, Parameter(name="--field", negative=(), consume_multiple=False)],
    "engine_options": Annotated[
        list[str] | None, Parameter(name="--engine-option", negative=(), consume_multiple=False)
    ],
    "reward": Annotated[str | None, Parameter(name=("--reward", "--verifier"))],
    "compare": Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)],
    "list_": Annotated[Flag, Parameter(name="--list")],
    **dict.fromkeys(("fresh_limits", "pass_at", "majority_at"), str | None),
}
command = as_command(
    evaluate,
    _present,
    typed=_TYPED,
    optional=("model", "benchmarks", "output"),
    groups=_GROUPS,
)
