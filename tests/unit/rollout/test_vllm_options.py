"""The arguments that vLLM gets for magicrl's settings, and the remedies that its errors get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicrl.config.rollout_schema import VllmConfig
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.vllm_engine import engine_trouble
from magicrl.rollout.vllm_options import engine_options, executor

REPLICA = {"valid_vocab": 40, "on_gpu": False}


def test_a_replica_s_workers_are_never_ray_s() -> None:
    for gpus, expected in ((1, "uni"), (2, "mp"), (8, "mp")):
        assert executor(gpus) == expected
        options = engine_options("folder", EngineSettings(model="x", gpus=gpus), **REPLICA)
        assert options["distributed_executor_backend"] == expected


def test_an_argument_that_magicrl_leaves_to_vllm_can_be_given() -> None:
    given = EngineSettings(model="x", vllm=VllmConfig(engine_args={"kv_cache_memory_bytes": 64}))
    assert engine_options("folder", given, valid_vocab=40, on_gpu=True)["kv_cache_memory_bytes"] == 64
    with pytest.raises(ValueError, match="magicrl sets this argument"):
        engine_options("folder", given, **REPLICA)


def test_a_bound_that_vllm_checks_has_its_remedy() -> None:
    error = ValueError("max_num_batched_tokens (64) is smaller than max_model_len (128).")
    assert "raise engine_args.max_num_batched_tokens" in str(engine_trouble("vLLM", error))


def test_a_short_limit_makes_llama_4_no_other_model(tmp_path: Path) -> None:
    # vLLM itself scales the queries of its layers without positions only in contexts of over 32,768 tokens
    for written in ({"attn_temperature_tuning": 1}, {"text_config": {"attn_temperature_tuning": True}}):
        (tmp_path / "config.json").write_text(json.dumps(written))
        options = engine_options(str(tmp_path), EngineSettings(model="x", max_context=512), **REPLICA)
        assert options["override_generation_config"] == {"attn_temperature_tuning": True}
    (tmp_path / "config.json").write_text("{}")
    assert engine_options(str(tmp_path), EngineSettings(model="x"), **REPLICA)["override_generation_config"] == {}


def test_latent_attention_has_its_positions_by_torch_on_a_cpu(tmp_path: Path) -> None:
    for written, expected in (({"kv_lora_rank": 512}, {"custom_ops": ["-rotary_embedding"]}), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(written))
        for on_gpu in (False, True):
            options = engine_options(str(tmp_path), EngineSettings(model="x"), **REPLICA | {"on_gpu": on_gpu})
            assert options.get("compilation_config") == (None if on_gpu else expected)
