"""``magicrl data build``: the sources, then every step, in one run folder that only one process writes.

OUTPUT/sources/NAME/{kept,dropped}/   what was read, and what could not be
OUTPUT/01-clean/{kept,dropped}/       a step's rows; step.json counts them by source and reason
OUTPUT/02-dedup/work/                 what a step found by looking at all rows, and its reports
OUTPUT/mixture/                       the training file and its data card (step mix)
OUTPUT/pipeline.toml, run.json        the resolved settings; versions and machine
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicrl.config.errors import RecipeError, under
from magicrl.config.loader import to_toml
from magicrl.evaluation.provenance import environment_facts
from magicrl.files import only_writer, write_atomically
from magicrl.pipeline.frame import Context, Step, Watcher, run_step, start_worker
from magicrl.pipeline.import_source import import_source, source_files
from magicrl.pipeline.parts import Part
from magicrl.pipeline.pipeline_schema import (
    AnyStep,
    DecontaminateStep,
    DedupStep,
    DifficultyStep,
    EmbeddingSettings,
    JudgeStep,
    PipelineConfig,
    PipelineSource,
    SamplerConfig,
)


def check_needs(config: PipelineConfig, output: Path) -> None:
    """Find the models, judges' servers and test sets of all steps, so that the last does not fail for want of one.

    Raises:
        RecipeError: one is not there (with its key); the text says what makes it.
        ValueError: the hub cannot be reached, or a package is missing.
    """
    for number, (step, name) in enumerate(zip(config.steps, config.step_names(), strict=True)):
        with under(f"steps.{number}"):
            if isinstance(step, DifficultyStep):
                _check_sampler(step.sampler)
            elif isinstance(step, DecontaminateStep):
                for label, source in step.against.items():
                    with under(f"against.{label}"):
                        _check_files(source)
            elif isinstance(step, JudgeStep) and not (output / name / "work" / "judgements.jsonl").is_file():
                _check_server(step)
            if isinstance(step, DedupStep):
                _check_embedder(step.settings.embedding.embedder, "settings.embedding.embedder.model")
            elif isinstance(step, DecontaminateStep):
                _check_embedder(step.settings.embedder, "settings.embedder.model")


def _check_embedder(embedder: EmbeddingSettings, key: str) -> None:
    if embedder.kind == "model":
        _check_model(embedder.model, key)


def _check_files(source: PipelineSource) -> None:
    for path in source_files(source):
        if not path.exists():
            raise RecipeError(f"{path}: no such file", key="path")


def _check_sampler(sampler: SamplerConfig) -> None:
    if sampler.gguf_package is not None:
        _check_gguf(sampler.gguf_package, "sampler.gguf_package")
    elif sampler.engine != "openai":
        assert sampler.model is not None, "the schema asks for one of the two"
        _check_model(sampler.model, "sampler.model")
    if sampler.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        from magicrl.rollout.vllm_engine import vllm_missing  # torch

        raise vllm_missing(ImportError(name="vllm"))


def _check_server(step: JudgeStep) -> None:
    if step.serve_gguf_package is not None:
        _check_gguf(step.serve_gguf_package, "serve_gguf_package")
    words = step.serve
    asked = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m" and words[i - 1] == "{python}"]
    for module in asked:
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise RecipeError(
                f"the judge's server is a module of {package}, which is not installed; install it, or name another "
                "command",
                key="serve",
            )


def _check_model(model: str, key: str) -> None:
    from magicrl.models.model_files import find_model  # torch: only where a step needs a model

    with under(key):
        find_model(model)


def _check_gguf(package: str, key: str) -> None:
    from magicrl.models.small_models import find_gguf  # torch: only where such a package is named

    try:
        find_gguf(package)
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error


_STEPS = {
    "clean": "clean_step:Clean",
    "dedup": "dedup_step:Dedup",
    "decontaminate": "decontaminate_step:Decontaminate",
    "difficulty": "difficulty_step:Difficulty",
    "judge": "judge_step:Judge",
    "mix": "mix_step:Mix",
}


def make_step(settings: AnyStep, config: PipelineConfig) -> Step[Any]:
    """The step of these settings; its module (torch, the verifiers) is imported with the step that needs it."""
    module, _, name = _STEPS[settings.use].partition(":")
    return getattr(importlib.import_module(f"magicrl.pipeline.{module}"), name)(settings, config)


SOURCES = "sources"
SETTINGS = "pipeline.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a run left.

    Attributes:
        output: its folder.
        parts: the kept parts of the last step.
        mixture: the folder of the training file, None without ``mix``.
    """

    output: Path
    parts: tuple[Part, ...]
    mixture: Path | None


def build(config: PipelineConfig, *, output: Path, watcher: Watcher) -> Built:
    """Run the pipeline; what is there already, from the same inputs and settings, is taken as it is.

    Args:
        config: sources and steps.
        output: the run folder.
        watcher: told how it goes.

    Raises:
        RecipeError: a setting is unusable (with its key).
        ValueError: a source or part cannot be read or written, or another process writes the folder.
    """
    workers = config.workers or len(os.sched_getaffinity(0))
    context = Context(
        output=output.resolve(),
        workers=workers,
        max_field_characters=config.max_field_characters,
        watcher=watcher,
    )
    check_needs(config, context.output)
    with only_writer(output, wait=False):
        _record(config, context.output)
        parts = import_sources(config.sources, context)
        for number, (settings, name) in enumerate(zip(config.steps, config.step_names(), strict=True)):
            with under(f"steps.{number}"):
                parts = run_step(make_step(settings, config), name, parts, context)
    mixture = context.output / "mixture"
    mixed = any(settings.use == "mix" for settings in config.steps)
    return Built(output=context.output, parts=tuple(parts), mixture=mixture if mixed else None)


def _record(config: PipelineConfig, output: Path) -> None:
    try:
        write_atomically(output / SETTINGS, to_toml(config))
        write_atomically(output / "run.json", json.dumps(environment_facts(), indent=1))
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error}; free some space, or choose another --output") from None


def import_sources(sources: Sequence[PipelineSource], context: Context) -> list[Part]:
    """The parts of all sources, in their order; several are read at once.

    Raises:
        RecipeError: with the key of the source.
        ValueError: a source as a whole is unreadable.
    """
    context.watcher.note(f"{len(sources)} sources: read, or found unchanged")
    jobs = [(source, context.output / SOURCES / source.label, context.max_field_characters) for source in sources]
    found: list[list[Part]] = []
    if context.workers == 1 or len(jobs) == 1:
        for number, job in enumerate(jobs):
            with under(f"sources.{number}"):
                found.append(import_source(*job))
            context.watcher.progress(SOURCES, number + 1, len(jobs), "sources")
        return [part for parts in found for part in parts]
    method = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(context.workers, len(jobs)), mp_context=method, initializer=start_worker) as pool:
        waiting = [pool.submit(_import, *job) for job in jobs]
        try:
            for number, future in enumerate(waiting):
                with under(f"sources.{number}"):
                    problem = future.result()
                    if isinstance(problem, tuple):
                        raise RecipeError(problem[0], key=problem[1])
                    found.append(problem)
                context.watcher.progress(SOURCES, number + 1, len(jobs), "sources")
        except BrokenProcessPool:
            raise ValueError("a process that read a source died (out of memory, or killed); run again") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [part for parts in found for part in parts]


def _import(source: PipelineSource, folder: Path, most_characters: int) -> list[Part] | tuple[str, str | None]:
    """In a worker process. An error of settings comes back as its parts: an exception with two arguments of its own
    does not survive the way between processes."""
    try:
        return import_source(source, folder, most_characters)
    except RecipeError as error:
        return error.problem, error.key
