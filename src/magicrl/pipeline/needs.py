"""What the steps of a pipeline need, looked for before the first of them runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from magicrl.config.errors import RecipeError, under
from magicrl.models.model_files import find_model
from magicrl.pipeline.settings import (
    DecontaminateStep,
    DedupStep,
    DifficultyStep,
    JudgeStep,
    PipelineConfig,
    SamplerConfig,
)
from magicrl.pipeline.similarity.settings import EmbeddingSettings
from magicrl.pipeline.sources.importing import source_files
from magicrl.pipeline.sources.settings import PipelineSource
from magicrl.rollout.vllm_engine import vllm_missing


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
        with under(key):
            find_model(embedder.model)


def _check_files(source: PipelineSource) -> None:
    for path in source_files(source):
        if not path.exists():
            raise RecipeError(f"{path}: no such file", key="path")


def _check_sampler(sampler: SamplerConfig) -> None:
    if sampler.gguf_package is not None:
        _check_gguf(sampler.gguf_package, "sampler.gguf_package")
    elif sampler.engine != "openai":
        assert sampler.model is not None, "the schema asks for one of the two"
        with under("sampler.model"):
            find_model(sampler.model)
    if sampler.engine == "vllm" and importlib.util.find_spec("vllm") is None:
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


def _check_gguf(package: str, key: str) -> None:
    from magicrl.models.small_models import find_gguf  # torch: only where such a package is named

    try:
        find_gguf(package)
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error
