"""Evaluation of a model on benchmarks with one engine, as jobs that resume, and their results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from magicrl.config.errors import RecipeError
from magicrl.config.loader import decisive
from magicrl.config.schema import EnvironmentConfig
from magicrl.config.verifier_schema import JudgeConfig
from magicrl.data.sources import problems_fingerprint
from magicrl.environments.base import environment_spec
from magicrl.evaluation.benchmarks import FILTERS, LoadedBenchmark
from magicrl.evaluation.comparison import read_benchmarks
from magicrl.evaluation.engines import OpenedEngine, open_engine
from magicrl.evaluation.job import SamplingPlan, evaluation_seed, requests_for, run_job
from magicrl.evaluation.presets import Preset
from magicrl.evaluation.provenance import environment_facts
from magicrl.evaluation.results import Ask, Incomplete, Meter, Price, write_results
from magicrl.evaluation.samples import AskedProblem, EvaluationFolder, Job, SampleFile, SampleRow, differences
from magicrl.records import Problem
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.episodes import EpisodeEngine
from magicrl_verifiers import references
from magicrl_verifiers.records import Extract, JudgeOptions, Reasoning
from magicrl_verifiers.secrets import without_secrets
from magicrl_verifiers.service import VerifierPool
from magicrl_verifiers.several import reward_names
from magicrl_verifiers.table import verifier_spec

PILOT_SAMPLES = 32
"""Most samples of a pilot, which runs if at least four times as many are missing."""
_ENGINE = ("engine", "engine_sha256", "dtype", "head_dtype")
"""Facts of an engine that are known before it has loaded a model."""
_READING = ("source", "window", *FILTERS, "template")
"""Facts of a benchmark that decide its problems. A reader learns nothing from a checksum of the problems."""
_NOT_DECISIVE: dict[str, Any] = dict.fromkeys(
    ("base_url", "key_variable", "concurrency", "attempts", "attempt_seconds", "token_budget", "cache"), True
)
"""Settings of the judge model that decide no score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCost:
    """Upper bounds of the cost of a benchmark's job: missing samples and their tokens."""

    name: str
    problems: int
    samples: int  # per problem
    missing: int
    wanted: int  # samples of this shard
    max_tokens: int
    prompt_tokens: int | None = None  # of the missing samples; None if a server makes the prompts
    price: Price | None = None

    @property
    def most_tokens(self) -> int:
        return self.missing * self.max_tokens

    @property
    def most_price(self) -> float | None:
        """The highest price; None without prices, or if prompts have a price and an unknown number of tokens."""
        if self.price is None or (self.prompt_tokens is None and self.price.per_million_in):
            return None
        return self.price.of(self.prompt_tokens or 0, self.most_tokens)


class EvaluationObserver(Protocol):
    """A receiver of an evaluation's events. It must not change the evaluation."""

    def cost(self, costs: Sequence[JobCost]) -> None: ...  # before anything is generated
    def note(self, text: str) -> None: ...  # a remark for the user
    def progress(self, name: str, done: int, total: int) -> None: ...
    def sample(self, name: str, row: SampleRow) -> None: ...  # a judged sample
    # after the pilot: estimated seconds for the rest, and the mean length of responses
    def estimate(self, name: str, seconds: float, mean_tokens: float) -> None: ...


@dataclass(kw_only=True, slots=True)
class Task:
    """A benchmark at one response limit; ``name`` is its name in events."""

    name: str
    problems: Sequence[Problem]
    folder: EvaluationFolder
    plan: SamplingPlan
    price: Price | None

    def cost(self, opened: OpenedEngine) -> JobCost:
        """Return the number of missing samples, and upper bounds of their cost."""
        asked = requests_for(self.problems, self.plan, opened.encode, self._rows())
        prompts = [(len(request.prompt_tokens), len(request.indices)) for request in asked]
        return JobCost(
            name=self.name,
            problems=len(self.problems),
            samples=self.plan.samples,
            missing=sum(count for _, count in prompts),
            wanted=self.plan.wanted(self.problems),
            max_tokens=self.plan.max_tokens,
            prompt_tokens=None if any(not n for n, _ in prompts) else sum(n * count for n, count in prompts),
            price=self.price,
        )

    def run(self, opened: OpenedEngine, judge: VerifierPool, watcher: EvaluationObserver) -> None:
        """Generate and judge the missing samples, after a pilot."""
        with self.folder.writing(self.plan.shard) as path:
            missing = self.cost(opened).missing
            if not missing:
                return
            file = SampleFile(path)
            meter = Meter(self.folder.usage, gpus=opened.gpus, workers=lambda: judge.worker_pids, served=opened.served)
            lengths: list[int] = []

            def write(row: SampleRow) -> None:
                file.append(row)
                lengths.append(row.tokens)
                meter.count(row)
                watcher.sample(self.name, row)

            def generate(most: int | None) -> None:
                run_job(
                    self.problems,
                    self.plan,
                    opened.engine,
                    judge,
                    opened.encode,
                    write=write,
                    done=self._rows(),
                    progress=lambda done, total: watcher.progress(self.name, done, total),
                    most=most,
                )

            try:
                if missing >= 4 * PILOT_SAMPLES:
                    began = time.monotonic()
                    generate(PILOT_SAMPLES)
                    count = len(lengths)
                    seconds = (time.monotonic() - began) / count * (missing - count)
                    watcher.estimate(self.name, seconds, sum(lengths) / count)
                generate(None)
            finally:
                file.close()
                meter.write(ended=True)

    def _rows(self) -> list[SampleRow]:
        """Return the existing rows of this shard's problems."""
        own = {problem.id for place, problem in enumerate(self.problems) if self.plan.owns(place)}
        return [row for row in self.folder.rows(self.plan.samples) if row.problem in own]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """Settings of an evaluation, in addition to benchmarks and engine."""

    samples: int | None = None  # per problem of every benchmark; None: the preset's, or 1
    temperature: float = 1.0
    max_tokens: int = 4096
    seed: int = 0  # each benchmark's seed is derived from it
    reasoning: Reasoning | None = None  # None: ``required`` if the chat template opens ``<think>``, else ``auto``
    extract: Extract = "lenient"
    time_limit: float = 10.0  # CPU seconds for judging one response (one test, for code)
    workers: int = 1  # verifier processes, and processes that play episodes
    judge: JudgeConfig | None = None  # the served model behind the reward ``judge``
    max_turns: int = 8  # turns of an episode
    max_observation_tokens: int = 256  # tokens of one observation
    preset: Preset | None = None  # source of the settings, for the record
    keep_tokens: bool = False  # keep token ids and entropies with the samples
    shard: tuple[int, int] = (0, 1)
    again: bool = False  # move samples of other settings away, instead of refusing the folder
    ask: Ask = field(default_factory=Ask)

    def __post_init__(self) -> None:
        if self.temperature == 0 and (self.samples or 1) > 1:
            raise RecipeError("--temperature 0 gives the same response every time; use --samples 1")

    @property
    def environment(self) -> EnvironmentConfig:
        """Limits and workers of environments."""
        limits = {
            name: getattr(self, name) for name in ("max_turns", "max_observation_tokens", "workers", "time_limit")
        }
        return EnvironmentConfig(**limits)

    def samples_for(self, benchmark: str) -> int:
        if self.samples is not None or self.temperature == 0:
            return self.samples or 1
        return self.preset.samples_for(benchmark) if self.preset is not None else 1


def run_evaluation(
    benchmarks: Sequence[LoadedBenchmark],
    engine_name: str,
    engine_settings: EngineSettings,
    settings: EvaluationSettings,
    output: Path,
    watcher: EvaluationObserver,
) -> Path | None:
    """Sample and judge every benchmark, then score them.

    Returns:
        The path of ``results.json``; None if samples of other shards are still missing.

    Raises:
        RecipeError: a setting is unusable, or the limit does not fit the model's context.
        ValueError: a reward or the model cannot be loaded, or the output holds another job.
    """
    names = {problem.verifier for benchmark in benchmarks for problem in benchmark.problems}
    for name in sorted(names):
        verifier_spec(name)  # imports a custom reward before a model is loaded
    if "judge" in names and settings.judge is None:
        raise RecipeError(
            "the reward 'judge' needs a served model: name the recipe that has [verifier.judge]", key="--judge"
        )
    opened = open_engine(engine_name, engine_settings)
    try:
        opened = _with_environments(opened, benchmarks, settings)
        reasoning = settings.reasoning or ("required" if opened.opens_reasoning else "auto")
        judging = JudgeOptions(reasoning=reasoning, extract=settings.extract)
        for benchmark in benchmarks:
            check_fits(benchmark, opened, max([settings.max_tokens, *(settings.ask.fresh_limits or ())]), settings)
        tasks = [task for b in benchmarks for task in _begun(b, opened, settings, judging, output, watcher)]
        # all costs before the first task, so that a user can stop before anything is spent
        watcher.cost([task.cost(opened) for task in tasks])
        with VerifierPool(
            options=judging, time_limit=settings.time_limit, workers=settings.workers, judge=settings.judge
        ) as judge:
            for task in tasks:
                task.run(opened, judge, watcher)
    finally:
        opened.engine.close()
    samples = {benchmark.name: settings.samples_for(benchmark.name) for benchmark in benchmarks}
    try:
        return write_results(output, list(samples), settings.ask, samples)
    except Incomplete as error:
        # with a single shard no other process will generate the missing samples
        if settings.shard[1] == 1:
            raise
        watcher.note(f"{error}; the last shard writes results.json, or --merge")
        return None


def _with_environments(
    opened: OpenedEngine, benchmarks: Sequence[LoadedBenchmark], settings: EvaluationSettings
) -> OpenedEngine:
    """Return an engine for episodes if a problem has an environment."""
    names = {problem.environment for benchmark in benchmarks for problem in benchmark.problems} - {None}
    if not names:
        return opened
    for name in sorted(str(name) for name in names):
        environment_spec(name)
    if opened.encoder is None:
        raise RecipeError(
            "an environment needs prompts as tokens, and here the server makes them: serve the model with vLLM and "
            "give --engine-option tokenizer=MODEL"
        )
    return replace(opened, engine=EpisodeEngine(opened.engine, opened.encoder, settings.environment))


def check_fits(benchmark: LoadedBenchmark, opened: OpenedEngine, max_tokens: int, settings: EvaluationSettings) -> None:
    """Raise ``RecipeError`` if the longest prompt, the limit and the observations do not fit the context."""
    longest = max(len(opened.encode(problem)) for problem in benchmark.problems)
    if any(problem.environment is not None for problem in benchmark.problems):
        max_tokens += settings.environment.most_observed
    if longest + max_tokens > opened.max_context:
        room = opened.max_context - longest
        remedy = f"use {room} or less" if room > 0 else "leave its longest problems out"
        raise RecipeError(
            f"benchmark {benchmark.name}: its longest prompt ({longest} tokens) and a response of --max-tokens (or "
            f"--fresh-limits) {max_tokens} exceed the model's context of {opened.max_context} tokens; {remedy}"
        )


def _begun(
    benchmark: LoadedBenchmark,
    opened: OpenedEngine,
    settings: EvaluationSettings,
    judging: JudgeOptions,
    output: Path,
    watcher: EvaluationObserver,
) -> list[Task]:
    """Prepare folders and return the tasks of a benchmark: one, and one for each fresh limit."""
    if benchmark.set_aside:
        watcher.note(
            f"{benchmark.name}: {len(benchmark.set_aside)} records cannot be used, e.g. {benchmark.set_aside[0]}"
        )
    main = EvaluationFolder(output / benchmark.name)
    asked = [(benchmark.name, main, settings.max_tokens, benchmark.name)]
    for limit in settings.ask.fresh_limits or ():
        asked.append((f"{benchmark.name} at {limit}", main.fresh_at(limit), limit, f"{benchmark.name}/fresh/{limit}"))
    tasks: list[Task] = []
    for name, folder, max_tokens, seed_name in asked:
        plan = SamplingPlan(
            samples=settings.samples_for(benchmark.name),
            temperature=settings.temperature,
            max_tokens=max_tokens,
            seed=evaluation_seed(settings.seed, seed_name),
            shard=settings.shard,
            keep_tokens=settings.keep_tokens,
        )
        job = job_of(benchmark, opened, settings, judging, plan)
        if settings.again and (moved := folder.make_room(job)) is not None:
            watcher.note(f"{name}: samples of other settings ({'; '.join(moved[0])}) are now in {moved[1]}")
        for changed in folder.begin(job, benchmark.problems):
            watcher.note(f"{name}: {changed} since the job was begun; samples may differ in their last bits")
        tasks.append(Task(name=name, problems=benchmark.problems, folder=folder, plan=plan, price=settings.ask.price))
    return tasks


def decides_of(
    benchmark: LoadedBenchmark, settings: EvaluationSettings, judging: JudgeOptions, max_tokens: int
) -> dict[str, Any]:
    """Return everything but the engine that decides the samples and verdicts of a benchmark at a response limit."""
    decides: dict[str, Any] = {
        "benchmark": benchmark.name,
        "problems": {"count": len(benchmark.problems), "sha256": problems_fingerprint(benchmark.problems)},
        # the user's seed, from which each benchmark's is derived
        "sampling": {
            "temperature": settings.temperature,
            "top_p": 1.0,
            "max_tokens": max_tokens,
            "seed": settings.seed,
        },
        "judging": {"reasoning": judging.reasoning, "extract": judging.extract, "time_limit": settings.time_limit},
    }
    if settings.judge is not None and any("judge" in reward_names(problem.verifier) for problem in benchmark.problems):
        # the address and speed of the judge decide no score
        decides["judging"]["judge"] = decisive(settings.judge, _NOT_DECISIVE)
    # other code of a custom reward may give other verdicts
    if rewards := _code_of({name for problem in benchmark.problems for name in reward_names(problem.verifier)}):
        decides["judging"]["rewards_sha256"] = rewards
    # other code or limits of environments may give other samples
    names = sorted({problem.environment for problem in benchmark.problems if problem.environment is not None})
    if names:
        limits = {name: getattr(settings, name) for name in ("max_turns", "max_observation_tokens")}
        decides["environments"] = {"names": names, "sha256": _code_of(names), **limits}
    return decides


def _code_of(names: Iterable[str]) -> dict[str, str | None]:
    """Return the SHA-256 of the file of each name ``file.py:attribute``."""
    files = sorted(name for name in names if name.rpartition(":")[0].endswith(".py"))
    return {name: references.file_fingerprint(name) for name in files}


def job_of(
    benchmark: LoadedBenchmark,
    opened: OpenedEngine,
    settings: EvaluationSettings,
    judging: JudgeOptions,
    plan: SamplingPlan,
) -> Job:
    """Return everything that decides the samples and verdicts of a benchmark, and further facts."""
    decides = {"engine": opened.decides, **decides_of(benchmark, settings, judging, plan.max_tokens)}
    source = {
        **benchmark.facts,
        "source": without_secrets(str(benchmark.facts["source"])),
        "whole": benchmark.whole,
        "set_aside": list(benchmark.set_aside),
    }
    recorded: dict[str, Any] = {
        "engine": opened.facts,
        "knows_limit": opened.knows_limit,
        "preset": settings.preset.model_dump() if settings.preset is not None else None,
        "benchmark": source,
        "environment": environment_facts(),
    }
    return {"decides": decides, "samples": plan.samples, "recorded": recorded}


def requested_changes(
    output: Path,
    benchmarks: Sequence[LoadedBenchmark],
    settings: EvaluationSettings,
    judging: JudgeOptions,
    engine: Mapping[str, Any],
) -> list[str]:
    """Compare a requested evaluation, apart from the model's weights, with the results in a folder.

    Args:
        output: folder with the results.
        benchmarks: requested benchmarks.
        settings: requested settings.
        judging: reading rules, with the default of ``reasoning`` for this model.
        engine: facts of the engine in ``_ENGINE``, without those that are None.

    Returns:
        One line per benchmark and setting that differs.

    Raises:
        ValueError: ``output`` has no results, or a file that is no results file.
    """
    results, ask = read_benchmarks(output), settings.ask
    found: list[str] = []
    for benchmark in benchmarks:
        if (result := results.get(benchmark.name)) is None:
            found.append(f"{benchmark.name}: was not evaluated, is now requested")
            continue
        before = result["settings"]["engine"]
        then = {**result["settings"], "engine": {name: before[name] for name in _ENGINE if name in before}}
        now = decides_of(benchmark, settings, judging, settings.max_tokens) | {"engine": dict(engine)}
        lines = differences(then, now)
        if any(line.startswith("problems.") for line in lines):
            problems = EvaluationFolder(output / benchmark.name).problems()
            read = differences(_reading(result["source"], problems), _reading(benchmark.facts, benchmark.problems))
            lines = [*read, *(line for line in lines if not (read and line.startswith("problems.")))]
        pairs: list[tuple[str, Any, Any]] = [
            ("samples", result["samples"], settings.samples_for(benchmark.name)),
            # further k and limits in the results do no harm, and k without a request are defaults
            ("pass_at", [int(k) for k in result["pass_at"]], ask.pass_at),
            # without a vote, as for programs, no k can be added
            ("majority_at", [int(k) for k in result["majority_at"]], ask.majority_at if result["majority_at"] else ()),
            ("fresh_limits", [point["limit"] for point in result["scaling"]["fresh"]], ask.fresh_limits),
        ]
        for name, then, now in pairs:
            if bool({*(now or ())} - {*then}) if isinstance(then, list) else then != now:
                lines.append(f"{name}: was {_listed(then)}, is now {_listed(now)}")
        found += [f"{benchmark.name}: {line}" for line in lines]
    return found


def _reading(facts: Mapping[str, Any], problems: Sequence[AskedProblem | Problem]) -> dict[str, Any]:
    known = {name: facts.get(name) for name in _READING}
    verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
    return known | {"source": without_secrets(str(facts.get("source"))), "verifier": verifiers}


def _listed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(one) for one in cast("Sequence[Any]", value)) or "none"
    return str(value)
