"""``magicrl data build``: import the sources, then run every step, in a run folder that only one process writes.

``docs/guides/data-pipeline.md`` shows the folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import httpx2

from magicrl.config.errors import RecipeError, under
from magicrl.config.loader import to_toml
from magicrl.evaluation.provenance import environment_facts
from magicrl.files import only_writer, write_atomically
from magicrl.pipeline.frame import Context, PipelineStep, Watcher, in_processes, run_step, start_worker
from magicrl.pipeline.import_source import (
    brought_place,
    import_source,
    shown_place,
    source_files,
    unreadable_records,
)
from magicrl.pipeline.parts import Part, StepFolder, read_part, told_when_full
from magicrl.pipeline.pipeline_schema import (
    AnyStep,
    DecontaminateStep,
    DedupStep,
    DifficultyStep,
    EmbeddingSettings,
    JudgeStep,
    PipelineConfig,
    PipelineSource,
    VotingJudge,
)
from magicrl.pipeline.stats import recorded_run
from magicrl_verifiers.served import ServerSettings

SOURCES = "sources"
SETTINGS = "pipeline.toml"


def run_pipeline(config: PipelineConfig, *, output: Path, watcher: Watcher) -> None:
    """Run the pipeline. Results that already exist for the same inputs and settings are reused.

    Args:
        config: Sources and steps.
        output: Run folder.
        watcher: Receives progress events.

    Raises:
        RecipeError: A setting cannot be used (names its key).
        ValueError: A source or part cannot be read or written, another process writes the folder, or it holds a run
            of other sources.
    """
    context = Context(
        output=output.resolve(),
        workers=config.workers or len(os.sched_getaffinity(0)),
        max_field_characters=config.max_field_characters,
        watcher=watcher,
    )
    check_needs(config, context.output)
    with only_writer(output, wait=False), told_when_full(output):
        _check_same_run(config, output)
        # before the first step, so that a killed run can still be identified
        write_atomically(output / SETTINGS, to_toml(config))
        belonging = {"sources": [source.label for source in config.sources], "steps": config.step_names()}
        write_atomically(output / "run.json", json.dumps({**environment_facts(), **belonging}, indent=1))
        parts = import_sources(config.sources, context)
        for number, (settings, name) in enumerate(zip(config.steps, config.step_names(), strict=True)):
            with under(f"steps.{number}"):
                parts = run_step(make_step(settings, config), name, parts, context)
            _check_kept(f"the step {name!r}", parts, StepFolder(context.output / name))


def _check_same_run(config: PipelineConfig, output: Path) -> None:
    """Raise ValueError if the folder holds a run that shares no source with this one, whose results would be lost."""
    former = recorded_run(output).get("sources")
    if former and {*former}.isdisjoint(source.label for source in config.sources):
        raise ValueError(
            f"{output} holds a run of other sources ({', '.join(former)}), which this run would replace; choose "
            "another --output, or delete the folder"
        )


def import_sources(sources: Sequence[PipelineSource], context: Context) -> list[Part]:
    """Return the parts of all sources in their order. Several sources are read in parallel."""
    context.watcher.note(f"{len(sources)} sources: read, or found unchanged")
    jobs = [(source, context.output / SOURCES / source.label, context.max_field_characters) for source in sources]
    workers = min(context.workers, len(jobs))
    found: Iterator[list[Part]] = starmap(import_source, jobs)
    if workers > 1:
        found = in_processes(SOURCES, import_source, jobs, workers, start_worker)
    parts: list[Part] = []
    for number in range(len(jobs)):
        with under(f"sources.{number}"):
            imported = next(found)
        source, folder, _ = jobs[number]
        _check_kept(f"the source {shown_place(source)}", imported, StepFolder(folder))
        parts += imported
        unreadable = unreadable_records(StepFolder(folder))
        if unreadable:
            context.watcher.note(f"{source.label}: {len(unreadable)} unreadable records, the first: {unreadable[0]}")
        context.watcher.progress(SOURCES, number + 1, len(jobs), "sources")
    _check_ids(parts)
    return parts


def _check_kept(what: str, parts: Sequence[Part], folder: StepFolder) -> None:
    """Raise ValueError if a source or step keeps no row: later steps and the training would have nothing to read."""
    if any(read_part(part.path, ["id"]).num_rows for part in parts):
        return
    dropped = [row for table in folder.tables("dropped", ["reason", "detail"]) for row in table.to_pylist()]
    if not dropped:
        raise ValueError(f"{what} holds no records, only blank lines or none; give it some")
    reasons = ", ".join(
        f"{count} {reason}" for reason, count in Counter(row["reason"] for row in dropped).most_common()
    )
    first = (dropped[0]["detail"] or "").partition("\n")[0]
    raise ValueError(
        f"{what}: all {len(dropped)} rows were dropped: {reasons}{f' (the first: {first})' if first else ''}; "
        f"see {folder.dropped}"
    )


def _check_ids(parts: Sequence[Part]) -> None:
    """Raise ValueError if two sources hold rows with one id, as two inputs from one run may. Steps drop rows by id."""
    labels = {part.name: part.name.rpartition(".")[0] for part in parts}
    tables = ((labels[part.name], read_part(part.path, ["source"])) for part in parts)
    # ids of other sources begin with their own name
    if len({*labels.values()}) == 1 or all(set(t["source"].unique().to_pylist()) <= {name} for name, t in tables):
        return
    found: dict[str, str] = {}
    for part in parts:
        for name in read_part(part.path, ["id"]).column("id").to_pylist():
            first = found.setdefault(name, labels[part.name])
            if first != labels[part.name]:
                raise ValueError(
                    f"the sources {first!r} and {labels[part.name]!r} both hold the row {name!r}; take the rows of a "
                    "run from one of its steps only, or give one of its sources another name"
                )


def make_step(settings: AnyStep, config: PipelineConfig) -> PipelineStep[Any]:
    """Return the step for these settings: the step ``mix`` is the class ``Mix`` of ``mix_step.py``.

    Its module is imported here, because some need torch or the verifiers.
    """
    module = importlib.import_module(f"magicrl.pipeline.{settings.use}_step")
    return getattr(module, settings.use.capitalize())(settings, config)


def check_needs(config: PipelineConfig, output: Path) -> None:
    """Check that the custom sources, models, judge servers and test sets of all steps are available.

    A pipeline runs for hours, so a missing input must not stop its last step.

    Raises:
        RecipeError: An input is missing (names its key); the message says how to get it.
        ValueError: The hub cannot be reached, or a package is missing.
    """
    for number, source in enumerate(config.sources):
        with under(f"sources.{number}"):
            brought_place(source)
    for number, (step, name) in enumerate(zip(config.steps, config.step_names(), strict=True)):
        with under(f"steps.{number}"):
            if isinstance(step, DifficultyStep):
                sampler = step.sampler
                if sampler.gguf_package is not None:
                    from magicrl.models.small_models import find_gguf  # torch: only where such a package is named

                    try:
                        find_gguf(sampler.gguf_package)
                    except ValueError as error:
                        raise RecipeError(str(error), key="sampler.gguf_package") from error
                if sampler.engine != "openai":
                    _check_model(sampler.model, "sampler.model")
                if sampler.engine == "vllm" and importlib.util.find_spec("vllm") is None:
                    from magicrl.rollout.vllm_options import vllm_missing  # torch

                    raise vllm_missing(ImportError(name="vllm"))
            elif isinstance(step, DedupStep):
                _check_embedder(step.settings.embedding.embedder, "settings.embedding.embedder.model")
            elif isinstance(step, DecontaminateStep):
                for label, source in step.against.items():
                    with under(f"against.{label}"):
                        brought_place(source)
                        missing = [path for path in source_files(source) if not path.exists()]
                        if missing:
                            raise RecipeError(f"{missing[0]}: no such file", key="path")
                _check_embedder(step.settings.embedder, "settings.embedder.model")
            elif isinstance(step, JudgeStep) and not (output / name / "work" / "judgements.jsonl").is_file():
                for place, judge in enumerate(step.settings.judges):
                    with under(f"settings.judges.{place}"):
                        _check_judge(judge)


def _check_embedder(embedder: EmbeddingSettings, key: str) -> None:
    if embedder.kind == "model":
        _check_model(embedder.model, key)


def _check_model(model: str | None, key: str) -> None:
    if model is not None:
        from magicrl.models.model_files import find_model  # torch: only where a step needs a model

        with under(key):
            find_model(model)


def _check_judge(judge: VotingJudge) -> None:
    """Check that the server answers. The key and the model are checked with the first vote."""
    server = ServerSettings(base_url=judge.base_url)
    try:
        httpx2.get(server.endpoint("/models"), timeout=5)
    except httpx2.HTTPError as error:
        raise RecipeError(
            f"judge {judge.shown_name!r}: no answer from {server.shown('/models')} ({type(error).__name__}); start the "
            f"server, as with 'vllm serve {judge.model} --port PORT', or stop before this step with --until",
            key="base_url",
        ) from None
