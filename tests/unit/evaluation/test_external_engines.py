"""Options of engines outside this process: parsed from the command line, rejected with a remedy."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from json_server import Reply, json_server

from magicrl.config.rollout_schema import TRAINING_ONLY
from magicrl.evaluation.engines import KNOWN_BEFORE_LOADING, open_engine, settings_that_decide
from magicrl.evaluation.options import arguments
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import _ENGINE_OPTIONS, with_vllm_options
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl_verifiers.served import ServerError, ServerSettings

NOWHERE = "base_url=http://127.0.0.1:9/v1"  # the discard port: nothing answers
MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "no address": ("openai", [], "OPENAI_BASE_URL"),
    "misspelt": ("openai", [NOWHERE, "concurency=8"], "did you mean 'concurrency'"),
    "no number": ("openai", [NOWHERE, "concurrency=many"], "--engine-option concurrency=many"),
    "no positive number": ("openai", [NOWHERE, "concurrency=0"], "^concurrency must be positive, got 0"),
    "no mode": ("openai", [NOWHERE, "mode=talk"], "--engine-option mode=talk"),
    "no object": ("openai", [NOWHERE, "extra=seed"], "extra: give a JSON object"),
    "another seed": ("openai", [NOWHERE, 'extra={"seed": 5}'], "extra: magicrl sends seed .* use null or leave it out"),
    "another limit": ("openai", [NOWHERE, 'extra={"max_tokens": 9}'], "extra: magicrl sends max_tokens from its other"),
    "no URL": ("openai", ["base_url=localhost"], "http://localhost:8000/v1"),
    "no value": ("openai", ["concurrency"], "give NAME=VALUE"),
    "another's": ("vllm", ["base_url=x"], "base_url: unknown. Known: cache_mb, "),
    "training's": ("vllm", ["keep_caches=false"], "only training has it, as rollout.vllm.keep_caches"),
    "out of range": ("vllm", ["gpu_share=2"], "--engine-option gpu_share=2: Input should be less than or equal to 1"),
    "magicrl's": ("vllm", ['engine_args={"max_num_seqs": 4}'], "engine_args.max_num_seqs: magicrl sets this argument"),
    "none of its own": ("in_process", ["concurrency=1"], "in_process has no options"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_option_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    engine, texts, expected = MISTAKES[name]

    def make() -> None:
        options = arguments(engine=engine, engine_options=texts).engine_values
        open_engine(engine, EngineSettings(model="tiny", options=options))

    with pytest.raises(ValueError, match=expected):
        make()


def test_the_page_on_engines_names_options_that_exist() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "engines.md").read_text()

    def options_of(heading: str) -> set[str]:
        section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}

    assert len(options_of("Servers")) >= 8
    assert options_of("Servers") <= {field.name for field in fields(ServerSettings)} | {"tokenizer"}
    assert options_of("vLLM") == {*_ENGINE_OPTIONS}
    left_out = " and\n".join(f"`{name}`" for name in TRAINING_ONLY)
    assert f"are options too, but for {left_out}, which only training has" in page


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magicrl_verifiers.served._FIRST_WAIT", 0.0)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/elsewhere")
    options = arguments(engine="openai", engine_options=["attempts=2", 'extra={"seed": null}']).engine_values
    with pytest.raises(ServerError, match=r"GET http://127\.0\.0\.1:9/elsewhere/models: cannot reach"):
        open_engine("openai", EngineSettings(model="tiny", options=options))


def test_options_of_vllm_that_may_change_samples_decide_an_evaluation() -> None:
    options = {"dtype": "bfloat16", "head_dtype": "float32", "engine_args": '{"quantization": "fp8"}', "cache_mb": "64"}
    decided = settings_that_decide("vllm", with_vllm_options(EngineSettings(model="tiny", options=options)))
    expected = {"dtype": "bfloat16", "head_dtype": "float32", "engine_args": {"quantization": "fp8"}}
    assert decided == {"engine": "vllm", **expected}
    assert {*decided, "engine_sha256"} == {*KNOWN_BEFORE_LOADING}
    assert settings_that_decide("in_process", EngineSettings(model="tiny")) == {
        "engine": "in_process",
        "dtype": "float32",
    }


def test_options_of_vllm_are_recorded_and_decide_no_evaluation(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(_: str, settings: EngineSettings) -> VllmEngine:
        engine = VllmEngine.__new__(VllmEngine)
        engine.settings, engine._max_context = with_vllm_options(settings), 64
        return engine

    monkeypatch.setattr("magicrl.evaluation.engines.make_engine", made)
    monkeypatch.setattr(VllmEngine, "version", "0.32.0")
    opened = [
        open_engine("vllm", EngineSettings(model=str(tiny_models[0]), options=options, threads=1))
        for options in ({"cache_mb": "512"}, {})
    ]
    assert [found.facts["vllm_options"] for found in opened] == [{"cache_mb": 512}, {}]
    assert opened[0].decides == opened[1].decides


@pytest.mark.parametrize("owner", ["vllm", "somebody"])
def test_a_server_that_is_not_vllm_may_know_the_limit(owner: str) -> None:
    models = {"data": [{"id": "tiny", "owned_by": owner, "max_model_len": 64}]}
    with json_server(lambda asked: Reply(body=models)) as url:
        opened = open_engine("openai", EngineSettings(model="tiny", options={"base_url": url}))
        opened.engine.close()
    assert opened.decides.get("dialect") == (None if owner == "vllm" else "openai"), "other defaults of top-k and min-p"
    assert opened.knows_limit == (owner != "vllm"), "a curve over its limits is then an estimate"
