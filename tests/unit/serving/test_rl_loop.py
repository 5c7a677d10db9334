"""tinker-cookbook's ``rl_loop.py``, unchanged, trains a tiny model through the command, as the guide says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[3]
COOKBOOK = Path(os.environ.get("TINKER_COOKBOOK", Path(sys.prefix) / "tinker-cookbook"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COOKBOOK.is_dir(), reason="`make test-slow` installs tinker-cookbook"),
]


def test_rl_loop_learns(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / "tinker_start.py"], cwd=tmp_path, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = "Qwen/Qwen3-8B-Base"
    server = subprocess.Popen([sys.executable, "-m", "magicrl", "serve", model, "--port", str(port)], cwd=tmp_path)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.5)
        variables = {
            "PYTHONPATH": os.pathsep.join([str(COOKBOOK), os.environ.get("PYTHONPATH", "")]),
            "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
            "TINKER_API_KEY": "tml-local",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": "hub",
        }
        settings = ["batch_size=16", "group_size=16", "max_tokens=16", "learning_rate=1e-3", "max_steps=30"]
        subprocess.run(
            [sys.executable, "-m", "tinker_cookbook.recipes.rl_loop", f"model_name={model}", "log_path=log", *settings],
            cwd=tmp_path,
            env={**os.environ, **variables},
            check=True,
        )
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    rewards = [json.loads(line)["reward/total"] for line in (tmp_path / "log" / "metrics.jsonl").open()]
    assert mean(rewards[:3]) < 0.6
    assert mean(rewards[-3:]) > 0.8
    (sampler,) = tmp_path.glob("tinker/*/sampler_weights/final")
    assert (sampler / "model.safetensors").is_file()
