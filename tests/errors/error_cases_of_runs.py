"""Bad input of models, training, output and resuming; the rest of the table of ``error_cases``."""

from __future__ import annotations

from pathlib import Path

from error_making import (
    Case,
    at_checkpoint,
    content,
    cut,
    edit,
    foreign_checkpoint,
    hub_cache,
    narrower_model,
    not_finite,
    problems,
    recipe,
    remove,
    settings,
    several,
)

RESUME = ("train", "recipe.toml", "--output", "run", "--resume")
NO_END = {"eos_token_id": None}


def case(name: str, title: str, make: object, status: int, *says: str, **more: object) -> Case:
    return Case(name=name, title=title, make=make, status=status, says=says, **more)  # type: ignore[arg-type]


def nothing() -> None:
    """The plain recipe, and another command line."""


def beside_others() -> list[str]:
    Path("taken").mkdir()
    Path("taken/thesis.tex").write_text("a thesis")
    return ["--output", "taken"]


def in_place_of_a_file(name: str) -> list[str]:
    Path("taken").write_text("a thesis")
    return ["--output", name]


MODELS = (
    case(
        "no-model",
        "A model folder that is not there",
        recipe('model = "start"', 'model = "./strat"'),
        2,
        "recipe.toml, line 6: start.model",
        "did you mean start?",
        "magicrl sft",
    ),
    case(
        "hub-offline",
        "A hub name without network",
        settings("model=owner/name"),
        1,
        "'owner/name'",
        "cannot be reached",
        "network access",
    ),
    case(
        "hub-no-weights",
        "An interrupted download: no weights",
        hub_cache(weights=False),
        1,
        "owner/name",
        "no weights",
        "fetch the model again",
    ),
    case(
        "hub-cut-weights",
        "An interrupted download: weights cut off",
        hub_cache(weights=True),
        1,
        "model.safetensors",
        "4000 bytes",
        "fetch the model again",
    ),
    case(
        "cut-weights",
        "A weight file cut off",
        cut("start/model.safetensors"),
        1,
        "start/model.safetensors",
        "cut off",
        "fetch the model again",
    ),
    case(
        "cut-tokenizer",
        "A tokenizer cut off",
        content("start/tokenizer.json", '{\n"version": "1.0",\n"model": {'),
        1,
        "start/tokenizer.json, line",
        "broken JSON",
    ),
    case(
        "cut-generation",
        "A generation config cut off",
        content("start/generation_config.json", '{\n"eos_token_id": [1'),
        1,
        "start/generation_config.json, line",
        "broken JSON",
    ),
    case(
        "lfs-pointer",
        "A Git LFS pointer in place of weights",
        content("start/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        1,
        "start/model.safetensors",
        "git lfs pull",
    ),
    case(
        "other-shapes",
        "A config of another model",
        edit("start/config.json", hidden_size=64),
        1,
        "shapes",
        "config.json",
        "one model",
    ),
    case(
        "missing-weights",
        "A config with more layers than there are weights",
        edit("start/config.json", num_hidden_layers=2),
        1,
        "lacks 9 weights",
        "model.layers.1",
    ),
    case("nan-weights", "Weights that are not numbers", not_finite, 1, "model.norm.weight", "NaN", "fetch it again"),
    case(
        "no-tokenizer",
        "A model without a tokenizer",
        remove("start/tokenizer.json"),
        1,
        "no tokenizer",
        "save_pretrained",
    ),
    case(
        "no-end",
        "A model without an end token",
        several(
            edit("start/config.json", **NO_END),
            edit("start/generation_config.json", **NO_END),
            edit("start/tokenizer_config.json", eos_token=None),
        ),
        1,
        "no end token",
        "eos_token_id in its generation_config.json",
    ),
    case(
        "wrong-end",
        "An end token outside the vocabulary",
        edit("start/generation_config.json", eos_token_id=[1, 999]),
        1,
        "999",
        "eos_token_id in its generation_config.json",
    ),
    case(
        "template",
        "A chat template that fails",
        edit("start/tokenizer_config.json", chat_template="{% for m in %}"),
        1,
        "model start",
        "TemplateSyntaxError",
        "correct chat_template",
    ),
    case(
        "template-blind",
        "A chat template that leaves the message out",
        edit("start/tokenizer_config.json", chat_template="L :"),
        1,
        "leaves the user's message out",
        "correct chat_template",
    ),
)

TRAINING = (
    case(
        "nothing-solvable",
        "No problem that the start model solves sometimes",
        settings("data.difficulty_filter.samples=2", "data.difficulty_filter.max_tokens=1"),
        1,
        "data.difficulty_filter",
        "none of 3 problems",
        "3 never correct",
        "difficulty.json",
        "100 % are cut at T = 1",
        "raise max_tokens",
    ),
    case(
        "all-rejected",
        "Every group rejected, step after step",
        settings("stages.0.max_tokens=1", "stages.0.max_steps=9", "algorithm.stop_after_empty_steps=2"),
        1,
        "every group of 2 steps in a row",
        "100 % are cut at T = 1",
        "raise max_tokens",
    ),
    case(
        "not-finite",
        "A loss or gradient that is not finite",
        settings(
            "entropy.controller=fixed",
            "entropy.alpha=1e39",
            "algorithm.reject_zero_advantage=false",
        ),
        1,
        "step 1",
        "response 1 to problem",
        "unchanged",
        "lower optimizer.learning_rate",
    ),
    case(
        "output-is-a-file",
        "An output that is a file",
        lambda: in_place_of_a_file("taken"),
        1,
        "taken",
        "choose another --output",
        arguments=("train", "recipe.toml"),
    ),
    case(
        "output-is-foreign",
        "An output that holds other files",
        beside_others,
        1,
        "taken holds other files (thesis.tex)",
        "choose another --output",
        arguments=("train", "recipe.toml"),
    ),
    case(
        "output-under-a-file",
        "An output that cannot be made",
        lambda: in_place_of_a_file("taken/run"),
        1,
        "taken/run cannot be written",
        "choose another --output",
        arguments=("train", "recipe.toml"),
    ),
    case(
        "output-read-only",
        "An output that cannot be written",
        nothing,
        1,
        "/proc/run cannot be written",
        "choose another --output",
        arguments=("train", "recipe.toml", "--output", "/proc/run"),
    ),
)

RESUMING = (
    case(
        "already-a-run", "An output that holds a run", nothing, 1, "run already holds a run", "--resume", resumes=True
    ),
    case(
        "other-settings",
        "Another configuration",
        settings("optimizer.learning_rate=1e-2", "stages.0.max_steps=3"),
        1,
        "optimizer.learning_rate: was 0.001, is now 0.01",
        "stages.0.max_steps: was 2, is now 3",
        "another --output",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "checkpoint-state-cut",
        "A checkpoint's state cut off",
        at_checkpoint("state.json", lambda path: content(path, '{\n"schema_version": 2,\n"step": 2,\n"sta')),
        1,
        "run/checkpoints/step-000002",
        "damaged",
        "delete that folder",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "checkpoint-tensors-cut",
        "A checkpoint's tensors cut off",
        at_checkpoint("tensors.safetensors", cut),
        1,
        "run/checkpoints/step-000002",
        "damaged",
        "delete that folder",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "checkpoint-schema",
        "A checkpoint of another magicrl",
        at_checkpoint("state.json", lambda path: edit(path, schema_version=99)),
        1,
        "step-000002",
        "schema 99",
        "version that wrote it",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "checkpoint-foreign",
        "A foreign folder among the checkpoints",
        foreign_checkpoint,
        1,
        "step-000099",
        "delete that folder",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "checkpoint-other-model",
        "A start model of another shape",
        narrower_model,
        1,
        "step-000002",
        "does not belong to this model",
        "down_proj",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "checkpoint-other-data",
        "Other training problems",
        problems({"problem": "L 7 :", "answer": "7"}),
        1,
        "step-000002",
        "another training set",
        "resume with the same data",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "run-record-cut",
        "A damaged run.json",
        content("run/run.json", '{\n"schema_version": 1,\n"name": "to'),
        1,
        "run/run.json",
        "damaged",
        "another --output",
        arguments=RESUME,
        resumes=True,
    ),
    case(
        "run-record-foreign",
        "A run.json of something else",
        content("run/run.json", '{"name": "thesis"}'),
        1,
        "run/run.json",
        "does not hold what magicrl writes",
        "another --output",
        arguments=RESUME,
        resumes=True,
    ),
)
