"""Model types in vLLM and in plain transformers: ``python tests/helpers/vllm_cases.py NAME...`` prints a line for each.

These are the rows of `model_cases.py` in float32, with attention heads of 32, the smallest of vLLM's CPU attention.
vLLM samples, takes other weights under the learner's names, and samples again. vLLM changes its process, so this
module runs separately.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import model_cases
import torch
from model_cases import CASES, WORDS

from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tokenizer
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.vllm_engine import VllmEngine

TOKENIZER = make_tokenizer([f"w{i}" for i in range(WORDS - 2)], model_cases.CONTEXT)
_MARK = "found: "
_WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "pad_token_id": 0}
_OWN: dict[str, dict[str, Any]] = {
    "Gemma 2": {"query_pre_attn_scalar": 32},
    "Gemma 3": {"query_pre_attn_scalar": 32},
    "Gemma 4": {"global_head_dim": 64},
    "Gemma 4 mixture": {"global_head_dim": 64},
    # vLLM reads these where transformers has fixed values or `moe_layers`; the published configurations have them
    "Llama 4 text": {"interleave_moe_layer_step": 2, "attention_chunk_size": 32},
    "DeepSeek-V3": {
        "head_dim": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}


def found_in_a_process(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the results of `sampled` by name. Where the process crashed, the model type is the cause."""
    found: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in found]:
        done = subprocess.run([sys.executable, __file__, *left], capture_output=True, text=True, check=False)
        told = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
        found |= dict(json.loads(line.removeprefix(_MARK)) for line in told)
        if len(told) < len(left):
            found[left[len(told)]] = {"vllm_refused": f"its process ended with status {done.returncode}"}
    return found


def _largest(engine: VllmEngine, plain: Any) -> float:
    """Return the largest difference between a log-prob that vLLM sampled with and a full forward pass."""
    largest = 0.0
    engine.submit(model_cases.requests([(11, 4, 24), (3, 4, 9), (70, 2, 40)]))
    with torch.no_grad():
        for group in engine.finished():
            for answer in group.completions:
                expected = model_cases.plain_logprobs(plain, group.request.prompt_tokens, answer.tokens)
                told = torch.from_numpy(answer.sampler_logprobs.copy())
                largest = max(largest, float((told - expected).abs().max()))
    return largest


def sampled(name: str, folder: Path) -> dict[str, Any]:
    """Return ``vllm_logprob`` of the weights in the folder, and ``vllm_synced`` of others that were loaded later."""
    case = CASES[name]
    plain = model_cases.plain_model(case, **_WIDE | _OWN.get(name, {}))
    save_policy(plain, TOKENIZER, folder)
    engine = VllmEngine(
        str(folder),
        EngineSettings(model=str(folder), memory_limit_mb=64, max_rows=8),
        end_tokens=frozenset({1}),
        decode=lambda tokens: " ".join(map(str, tokens)),
        valid_vocab=WORDS,
    )
    found: dict[str, Any] = {"vllm_logprob": _largest(engine, plain)}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    try:
        engine.load_weights({name: parameter.detach() for name, parameter in plain.named_parameters()}, 1)
        found["vllm_synced"] = _largest(engine, plain)
    except (ValueError, RuntimeError) as error:
        found["vllm_update_refused"] = " ".join(str(error).split())
    finally:
        engine.close()
    return found


def main() -> None:
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = sampled(name, Path(folder) / "model")
            except Exception as error:  # noqa: BLE001 - what vLLM refuses a model with is a result of the table
                found = {"vllm_refused": " ".join(str(error).split()).replace(f" {folder}/model", " it")}
        sys.stdout.write(f"\n{_MARK}{json.dumps([name, found])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
