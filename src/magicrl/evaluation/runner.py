"""Evaluation of a model on benchmarks with one engine, as jobs that resume, and their results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from magicrl.config.errors import RecipeError
from magicrl.config.loader import decisive
from magicrl.config.verifier_schema import JUDGE_ACCESS
from magicrl.data.sources import problems_fingerprint
from magicrl.environments.base import environment_spec
from magicrl.evaluation.benchmarks import LoadedBenchmark, load_benchmarks, prompts_not_trained_on
from magicrl.evaluation.comparison import read_benchmarks
from magicrl.evaluation.engines import KNOWN_BEFORE_LOADING, OpenedEngine, open_engine, settings_that_decide
from magicrl.evaluation.job import SamplingPlan, evaluation_seed, requests_for, run_job
from magicrl.evaluation.options import FILTERS, EvaluationObserver, EvaluationOptions, JobCost, Price
from magicrl.evaluation.provenance import environment_facts
from magicrl.evaluation.results import Incomplete, Meter, check_counts, write_results
from magicrl.evaluation.samples import EvaluationFolder, Job, SampleFile, SampleRow, differences
from magicrl.records import TOKEN_FILTERS, Problem
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import with_vllm_options
from magicrl.rollout.episodes import EpisodeEngine
from magicrl_verifiers import references
from magicrl_verifiers.secrets import without_secrets
from magicrl_verifiers.service import VerifierPool
from magicrl_verifiers.several import reward_names
from magicrl_verifiers.table import verifier_spec

PILOT_SAMPLES = 32
"""Most samples of a pilot, which runs if at least four times as many are missing."""
_READING = ("source", "window", *FILTERS, "template")
"""Facts of a benchmark that decide its problems. A reader learns nothing from a checksum of the problems."""


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
            max_tokens=self.plan.sampling.max_tokens,
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
            pools = [judge, opened.engine] if isinstance(opened.engine, EpisodeEngine) else [judge]
            meter = Meter(
                self.folder.usage,
                gpus=opened.gpus,
                workers=lambda: [pid for pool in pools for pid in pool.worker_pids],
                served=opened.served,
            )
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


def run_evaluation(options: EvaluationOptions, watcher: EvaluationObserver, *, again: bool = False) -> Path | None:
    """Sample and judge what is missing of every benchmark, then score them.

    Args:
        options: a model's folder or name, benchmarks, settings and the folder for the results.
        watcher: receives the events.
        again: move samples of other settings away, instead of refusing the folder.

    Returns:
        The path of ``results.json``; None if samples of other shards are still missing.

    Raises:
        RecipeError: a setting is unusable, or the limit does not fit the model's context.
        ValueError: a benchmark, a reward or the model cannot be loaded, or the output holds another job.
    """
    benchmarks = load_benchmarks(options)
    for benchmark in benchmarks:
        check_counts(options, options.samples_for(benchmark.name))
    for text in prompts_not_trained_on(Path(options.model), benchmarks):
        watcher.note(text)
    _check_rewards(benchmarks, options)  # before a model is loaded
    opened = open_engine(options.engine, _engine_settings(options))
    try:
        opened = _checked_engine(opened, benchmarks, options)
        if options.reasoning is None and opened.opens_reasoning:
            options = replace(options, reasoning="required")
        for benchmark in benchmarks:
            check_fits(benchmark, opened, options)
        tasks = [task for b in benchmarks for task in _begun(b, opened, options, watcher, again=again)]
        # all costs before the first task, so that a user can stop before anything is spent
        watcher.cost([task.cost(opened) for task in tasks])
        with VerifierPool(
            options=options.judging,
            time_limit=options.time_limit,
            workers=options.processes,
            judge=options.judge_settings,
        ) as judge:
            for task in tasks:
                task.run(opened, judge, watcher)
    finally:
        opened.engine.close()
    samples = {benchmark.name: options.samples_for(benchmark.name) for benchmark in benchmarks}
    try:
        return write_results(options, list(samples), samples)
    except Incomplete as error:
        # with a single shard no other process will generate the missing samples
        if options.part[1] == 1:
            raise
        watcher.note(f"{error}; the last shard writes results.json, or --merge")
        return None


def _check_rewards(benchmarks: Sequence[LoadedBenchmark], options: EvaluationOptions) -> None:
    """Import custom rewards, and raise ``RecipeError`` if one needs a served judge that the options do not name."""
    names = {problem.verifier for benchmark in benchmarks for problem in benchmark.problems}
    for name in sorted(names):
        verifier_spec(name)
    if options.judge_settings is None and any("judge" in reward_names(name) for name in names):
        raise RecipeError(
            "the reward 'judge' needs a served model: name the recipe that has [verifier.judge]", key="--judge"
        )


def _checked_engine(
    opened: OpenedEngine, benchmarks: Sequence[LoadedBenchmark], options: EvaluationOptions
) -> OpenedEngine:
    """Return the engine, for episodes if a problem has an environment, or raise if it cannot do what is requested."""
    if options.sampling.truncates and not opened.engine.capabilities.filters:
        raise RecipeError(
            f"{options.engine} samples from all tokens; leave out --top-p and --top-k, or apply them there and "
            "declare Capabilities(filters=True)",
            key="--engine",
        )
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
    return replace(opened, engine=EpisodeEngine(opened.engine, opened.encoder, options.episodes))


def check_fits(benchmark: LoadedBenchmark, opened: OpenedEngine, options: EvaluationOptions) -> None:
    """Raise ``RecipeError`` if the longest prompt, the limit and the observations do not fit the context."""
    max_tokens = max([options.sampling.max_tokens, *(options.fresh or ())])
    try:
        longest = max(len(opened.encode(problem)) for problem in benchmark.problems)
    except ValueError as error:
        if benchmark.facts["template_given"] or benchmark.facts["template"] == ["bare"]:
            raise
        remedy = "The evaluation adds a text to each prompt: --template '{prompt}' leaves it out"
        raise ValueError(f"benchmark {benchmark.name}: {error}. {remedy}") from None
    if any(problem.environment is not None for problem in benchmark.problems):
        max_tokens += options.episodes.most_observed
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
    options: EvaluationOptions,
    watcher: EvaluationObserver,
    *,
    again: bool,
) -> list[Task]:
    """Prepare folders and return the tasks of a benchmark: one, and one for each fresh limit."""
    if benchmark.set_aside:
        watcher.note(
            f"{benchmark.name}: {len(benchmark.set_aside)} records cannot be used, e.g. {benchmark.set_aside[0]}"
        )
    main, sampling = EvaluationFolder(options.folder / benchmark.name), options.sampling
    asked = [(benchmark.name, main, sampling.max_tokens, benchmark.name)]
    for limit in options.fresh or ():
        asked.append((f"{benchmark.name} at {limit}", main.fresh_at(limit), limit, f"{benchmark.name}/fresh/{limit}"))
    tasks: list[Task] = []
    for name, folder, max_tokens, seed_name in asked:
        seed = evaluation_seed(options.seed, seed_name)
        plan = SamplingPlan(
            samples=options.samples_for(benchmark.name),
            sampling=replace(sampling, max_tokens=max_tokens, seed=seed),
            shard=options.part,
            keep_tokens=options.keep_tokens,
        )
        job = job_of(benchmark, opened, options, max_tokens)
        if again and (moved := folder.make_room(job)) is not None:
            watcher.note(f"{name}: samples of other settings ({'; '.join(moved[0])}) are now in {moved[1]}")
        for changed in folder.begin(job, benchmark.problems):
            watcher.note(f"{name}: {changed} since the job was begun; samples may differ in their last bits")
        if options.keep_tokens and (without := sum(row.token_ids is None for row in folder.rows(plan.samples))):
            watcher.note(
                f"{name}: {without} existing samples have no tokens, and --keep-tokens changes only new ones; choose "
                "another --output to sample all with tokens"
            )
        tasks.append(Task(name=name, problems=benchmark.problems, folder=folder, plan=plan, price=options.price))
    return tasks


def _engine_settings(options: EvaluationOptions) -> EngineSettings:
    return EngineSettings(
        model=str(options.model),
        options=options.engine_values,
        dtype=options.dtype,
        device=options.device,
        max_rows=options.max_rows,
        memory_limit_mb=options.memory_limit_mb,
        threads=options.threads,
    )


def decides_of(benchmark: LoadedBenchmark, options: EvaluationOptions, max_tokens: int) -> dict[str, Any]:
    """Return everything but the engine that decides the samples and verdicts of a benchmark at a response limit."""
    sampling = options.sampling
    # earlier evaluations have an entry of top_p, and none of further filters
    filters = {
        name: value
        for name, off in TOKEN_FILTERS.items()
        if (value := getattr(sampling, name)) != off or name == "top_p"
    }
    decides: dict[str, Any] = {
        "benchmark": benchmark.name,
        "problems": {"count": len(benchmark.problems), "sha256": problems_fingerprint(benchmark.problems)},
        # named one by one, so that an option of training is no difference between evaluations; the seed is the user's,
        # from which each benchmark's is derived
        "sampling": {
            **filters,
            "temperature": sampling.temperature,
            "max_tokens": max_tokens,
            "seed": sampling.seed,
        },
        "judging": {**asdict(options.judging), "time_limit": options.time_limit},
    }
    judge = options.judge_settings
    if judge is not None and any("judge" in reward_names(problem.verifier) for problem in benchmark.problems):
        decides["judging"]["judge"] = decisive(judge, dict.fromkeys(JUDGE_ACCESS, True))
    # other code of a custom reward may give other verdicts
    if rewards := _code_of({name for problem in benchmark.problems for name in reward_names(problem.verifier)}):
        decides["judging"]["rewards_sha256"] = rewards
    # other code or limits of environments may give other samples
    names = sorted({problem.environment for problem in benchmark.problems if problem.environment is not None})
    if names:
        limits = {name: getattr(options, name) for name in ("max_turns", "max_observation_tokens")}
        decides["environments"] = {"names": names, "sha256": _code_of(names), **limits}
    return decides


def _code_of(names: Iterable[str]) -> dict[str, str | None]:
    """Return the SHA-256 of the file of each name ``file.py:attribute``."""
    files = sorted(name for name in names if name.rpartition(":")[0].endswith(".py"))
    return {name: references.file_fingerprint(name) for name in files}


def job_of(benchmark: LoadedBenchmark, opened: OpenedEngine, options: EvaluationOptions, max_tokens: int) -> Job:
    """Return everything that decides the samples and verdicts of a benchmark, and further facts."""
    decides = {"engine": opened.decides, **decides_of(benchmark, options, max_tokens)}
    source = {
        **benchmark.facts,
        "source": without_secrets(str(benchmark.facts["source"])),
        "whole": benchmark.whole,
        "set_aside": list(benchmark.set_aside),
    }
    recorded: dict[str, Any] = {
        "engine": opened.facts,
        "knows_limit": opened.knows_limit,
        "preset": None if options.preset is None else options.defaults.model_dump(),
        "benchmark": source,
        "environment": environment_facts(),
    }
    return {"decides": decides, "samples": options.samples_for(benchmark.name), "recorded": recorded}


def requested_changes(output: Path, options: EvaluationOptions, benchmarks: Sequence[LoadedBenchmark]) -> list[str]:
    """Compare a requested evaluation, apart from the model's weights, with the results in a folder.

    Args:
        output: folder with the results.
        options: the request, with the ``reasoning`` that this model needs.
        benchmarks: the problems of the request.

    Returns:
        One line per benchmark and setting that differs.

    Raises:
        ValueError: ``output`` has no results, or a file that is no results file.
    """
    results, settings = read_benchmarks(output), _engine_settings(options)
    chosen = with_vllm_options(settings) if options.engine == "vllm" else settings
    engine = settings_that_decide(options.engine, chosen)
    found: list[str] = []
    for benchmark in benchmarks:
        if (result := results.get(benchmark.name)) is None:
            found.append(f"{benchmark.name}: was not evaluated, is now requested")
            continue
        before = result["settings"]["engine"]
        then = {**result["settings"], "engine": {name: before[name] for name in KNOWN_BEFORE_LOADING if name in before}}
        now = decides_of(benchmark, options, options.sampling.max_tokens) | {"engine": engine}
        lines = differences(then, now)
        if any(line.startswith("problems.") for line in lines):
            problems = EvaluationFolder(output / benchmark.name).problems()
            read = differences(_reading(result["source"], problems), _reading(benchmark.facts, benchmark.problems))
            lines = [*read, *(line for line in lines if not (read and line.startswith("problems.")))]
        voted = options.counts("majority_at")
        pairs: list[tuple[str, Any, Any]] = [
            ("samples", result["samples"], options.samples_for(benchmark.name)),
            # further k and limits in the results do no harm, and k without a request are defaults
            ("pass_at", [int(k) for k in result["pass_at"]], options.counts("pass_at")),
            # without a vote, as for programs, no k can be added
            ("majority_at", [int(k) for k in result["majority_at"]], voted if result["majority_at"] else ()),
            ("fresh_limits", [point["limit"] for point in result["scaling"]["fresh"]], options.fresh),
        ]
        for name, then, now in pairs:
            if bool({*(now or ())} - {*then}) if isinstance(then, list) else then != now:
                lines.append(f"{name}: was {_listed(then)}, is now {_listed(now)}")
        found += [f"{benchmark.name}: {line}" for line in lines]
    return found


def _reading(facts: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    known = {name: facts.get(name) for name in _READING}
    verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
    return known | {"source": without_secrets(str(facts.get("source"))), "verifier": verifiers}


def _listed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(one) for one in cast("Sequence[Any]", value)) or "none"
    return str(value)
